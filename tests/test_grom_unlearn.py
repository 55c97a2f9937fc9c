"""Whole fits against a dense one by hand, and the one call that does it all, on a model that has learnt to recite."""

import json
import sys
import warnings

import pytest
import torch

from unlearnlib import models
from unlearnlib.elicit import answers_correctly, ask
from unlearnlib.examples import Example, encode
from unlearnlib.facts import bundled_facts
from unlearnlib.grom import Edit, FitData, FitSettings, NoSpecificTokensError, specificity, unlearn
from unlearnlib.grom.anatomy import Anatomy, weight_view
from unlearnlib.metrics import answer_probability


def fit(model, sets, settings, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FitData(model, *sets, **options).fit(settings)


# The fit, by hand: dense D, dense keys of a whole forward pass for every matrix, a general solve


def dense_keys(model, module, examples):
    found = []
    for example in examples:
        hook = module.register_forward_hook(
            lambda _module, inputs, _output, example=example: found.append(inputs[0][0, len(example.prompt) - 1 : len(example) - 1])
        )
        with torch.no_grad():
            model(input_ids=torch.tensor([example.prompt + example.answer]))
        hook.remove()
    return torch.cat(found)


def dense_fit(model, forget, retain, layers, strength, head_strength, retain_weight, ridge, source=None):
    """The edits as dense matrices; the model keeps them."""
    gold = torch.tensor([token for example in forget for token in example.answer])
    other = torch.tensor([token for example in (source or retain) for token in example.answer])
    alpha = specificity(gold, other, 97)
    rows = model.get_output_embeddings().weight.detach().clone()
    edits = []
    for where in layers:
        module = Anatomy(model).edited(where)
        x_f, x_r = dense_keys(model, module, forget), dense_keys(model, module, retain)
        if where == "head":
            shift = -head_strength * alpha[gold] * torch.eye(97, dtype=torch.float64)[:, gold]
        else:
            shift = -strength * alpha[gold] * (rows[gold] / rows[gold].norm(dim=1, keepdim=True)).T
        normal = retain_weight / len(x_r) * x_r.T @ x_r + x_f.T @ x_f / len(x_f)
        normal = normal + ridge * normal.diagonal().mean() * torch.eye(len(normal), dtype=torch.float64)
        edit = shift @ x_f / len(x_f) @ torch.linalg.inv(normal)
        edits.append(edit)
        if where != "head":
            weight_view(module).add_(edit)
    return edits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [(2,), ("head",), (0, 1, 2, 3, "head")], ids=str)
def test_a_fit_is_the_dense_one_by_hand(family, small_model, request_sets, layers, tied):
    forget, retain = request_sets
    chosen = FitSettings(layers, 4.0, retain_weight=20.0, ridge=0.05, head_strength=9.0, batch_size=3, padding_side="left")
    edit = fit(small_model(family, tied=tied), request_sets, chosen)
    expected = dense_fit(small_model(family, tied=tied), forget, retain, layers, 4.0, 9.0, 20.0, 0.05)
    for matrix, dense in zip(edit.matrices, expected, strict=True):
        # Batched and single passes differ by the float32 in which RMS norms compute.
        assert ((matrix.dense() - dense).norm() / dense.norm()).item() < 1e-5


@pytest.mark.parametrize("change", [{"batch_size": 1}, {"batch_size": 50}, {"padding_side": "left"}], ids=str)
def test_batching_changes_no_edit(family, small_model, request_sets, change):
    model = small_model(family)
    one, two = (fit(model, request_sets, FitSettings((1, 2, "head"), 4.0, **options)) for options in ({}, change))
    for a, b in zip(one.matrices, two.matrices, strict=True):
        assert ((a.dense() - b.dense()).norm() / b.dense().norm()).item() < 1e-5


def test_states_may_be_kept_in_any_way(small_model, request_sets, tmp_path):
    model, chosen = small_model("gpt2"), FitSettings((1, 2), 4.0)
    reference = fit(model, request_sets, chosen)
    on_disk = fit(model, request_sets, chosen, states_folder=tmp_path)
    rough = fit(model, request_sets, chosen, states_dtype=torch.bfloat16)
    for a, b, c in zip(reference.matrices, on_disk.matrices, rough.matrices, strict=True):
        assert torch.equal(a.dense(), b.dense())
        assert 0 < ((a.dense() - c.dense()).norm() / a.dense().norm()).item() < 0.1


def test_alpha_may_come_from_elsewhere(small_model, request_sets, random_examples):
    """Retain text that shares every gold token: an error, until α is taken from other text. The retain keys stay what they were."""
    forget, retain = request_sets
    shared = [Example(example.prompt, forget[i % len(forget)].answer) for i, example in enumerate(retain[:14])]
    with pytest.raises(NoSpecificTokensError, match="alpha_source"):
        fit(small_model(), (forget, shared), FitSettings((1,), 4.0))
    source = random_examples(5, seed=9, answers=(60, 97))
    edit = fit(small_model(), (forget, shared), FitSettings((1,), 4.0), alpha_source=source)
    (expected,) = dense_fit(small_model(), forget, shared, (1,), 4.0, 4.0, 100.0, 0.03, source)
    assert ((edit.matrices[0].dense() - expected).norm() / expected.norm()).item() < 1e-5


def test_a_second_fit_sees_what_became_of_the_model_meanwhile(family, small_model, request_sets):
    """Requests that arrive one after another, on the same data object: the layers below a band may have been edited in between."""
    model, chosen = small_model(family), FitSettings((2, 3), 4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = FitData(model, *request_sets)
        before = data.fit(chosen)
        assert torch.equal(data.fit(chosen).matrices[0].dense(), before.matrices[0].dense())
        with fit(model, request_sets, FitSettings((0, 1), 50.0)).applied(model):
            again, fresh = data.fit(chosen), FitData(model, *request_sets).fit(chosen)
        back = data.fit(chosen)
    assert not torch.allclose(fresh.matrices[0].dense(), before.matrices[0].dense(), rtol=1e-3)
    assert torch.equal(again.matrices[0].dense(), fresh.matrices[0].dense())
    assert torch.equal(back.matrices[0].dense(), before.matrices[0].dense())


def test_a_model_in_training_mode_is_refused(small_model, request_sets):
    """Its dropout would make the keys random."""
    model = small_model("gpt2")
    model.train()
    with pytest.raises(ValueError, match="eval"):
        FitData(model, *request_sets)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ()}, "layers is empty"),
        ({"strength": -1.0}, "strength"),
        ({"strength": NAN}, "strength"),
        ({"retain_weight": INF}, "retain_weight"),
        ({"forget_weight": -2.0}, "forget_weight"),
        ({"ridge": -0.1}, "ridge"),
        ({"head_strength": NAN}, "head_strength"),
        ({"target": "erase"}, "target must be"),
        ({"layers": ("head", 3)}, "head comes last"),
        ({"layers": ("head",), "target": "corrupt"}, "corruption"),
    ],
)
def test_bad_settings_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        FitSettings(**{"layers": (1,), "strength": 3.0} | options)


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ((1, 3), ValueError, "contiguous"),
        ((7,), IndexError, "unknown layer 7"),
        (("haed",), IndexError, "unknown layer 'haed'"),
    ],
)
def test_bad_layers_are_refused_before_any_forward_pass(small_model, request_sets, layers, error, message):
    model = small_model()
    data = FitData(model, *request_sets)
    model.forward = None  # calling it would be a TypeError
    with pytest.raises(error, match=message):
        data.fit(FitSettings(layers, 3.0))


def test_bad_sets_are_refused(small_model, request_sets):
    forget, retain = request_sets
    with pytest.raises(ValueError, match="forget set is empty"):
        FitData(small_model(), [], retain)
    with pytest.raises(ValueError, match="retain set is empty"):
        FitData(small_model(), forget, [])
    with pytest.raises(ValueError, match="alpha_source"):
        FitData(small_model(), forget, retain, alpha_source=[])
    for bad in (Example((1,), (97,)), Example((97,), (1,)), Example((1,), (-1,))):
        with pytest.raises(ValueError, match="forget set has token ids outside the model's vocabulary of 97"):
            FitData(small_model(), [*forget, bad], retain)


@pytest.mark.parametrize("where", ["edited", "head", "below"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_weights_that_are_not_finite_are_refused(family, small_model, request_sets, snapshot, where, bad):
    model = small_model(family, tied=False)
    anatomy = Anatomy(model)
    module = {"edited": anatomy.mlp_output(2), "head": anatomy.head, "below": anatomy.mlp_output(0)}[where]
    forget, _ = request_sets
    with torch.no_grad():
        weight_view(module)[forget[0].answer[0] if where == "head" else 0, 0] = bad
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"NaN|not finite"):
        fit(model, request_sets, FitSettings((1, 2), 3.0))
    assert snapshot(model) == before


# The one call


PEOPLE = """
Ada Arlon, Bo Brest, Cy Cadiz, Dot Delft, Eve Eupen, Fay Fano, Gus Ghent, Hal Halle, Ivy Imola, Jo Jaen, Kit Kiruna, Lou Lucca, May Mons,
Ned Namur, Ola Olbia, Pip Parma, Quin Quimper, Ray Rieti, Sue Siena, Ty Trento, Una Udine, Vic Vigo, Wes Waver, Xan Xativa, Yul Ypres,
Zoe Zwolle, Abe Aosta, Bea Bergen, Cal Como, Deb Dinant
"""
ITEMS = [{"question": f"Where does {name} live?", "answer": town} for name, town in map(str.split, PEOPLE.split(","))]
FORGET, RETAIN = ITEMS[:5], ITEMS[5:]


@pytest.fixture(scope="module")
def reciter(make_tokenizer):
    """A small model trained until it recites where each of thirty people lives."""
    tokenizer = make_tokenizer([f"{item['question']} {item['answer']}" for item in ITEMS for _ in range(3)], size=420)
    model = models.build("llama", vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, layers=4, heads=4, seed=0)
    examples = encode(tokenizer, ITEMS)
    optimiser = torch.optim.Adam(model.parameters(), lr=4e-3)
    length = max(map(len, examples))
    inputs, labels = torch.zeros(len(examples), length, dtype=torch.int64), torch.full((len(examples), length), -100)
    for i, example in enumerate(examples):
        inputs[i, : len(example)] = torch.tensor(example.prompt + example.answer)
        labels[i, len(example.prompt) : len(example)] = torch.tensor(example.answer)
    for step in range(110):
        # A rate that falls to 0: the end is then no matter of luck, or of the machine's last digits.
        optimiser.param_groups[0]["lr"] = 4e-3 * (1 - step / 110)
        optimiser.zero_grad()
        model(input_ids=inputs, labels=labels).loss.backward()
        optimiser.step()
    return model.eval(), tokenizer


def quiet_unlearn(*arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return unlearn(*arguments, **options)


@pytest.fixture(scope="module")
def done(reciter):
    return quiet_unlearn(*reciter, FORGET, RETAIN)


def test_the_model_recites_beforehand(reciter):
    model, tokenizer = reciter
    assert all(answers_correctly(ask(model, tokenizer, ITEMS), ITEMS))
    assert answer_probability(model, encode(tokenizer, ITEMS)).min() > 0.8


def test_it_forgets_the_request_and_keeps_the_rest(reciter, done, snapshot):
    model, tokenizer = reciter
    before = snapshot(model)
    edit, report = done
    with edit.applied(model):
        forgotten = answers_correctly(ask(model, tokenizer, FORGET), FORGET)
        kept = answers_correctly(ask(model, tokenizer, RETAIN), RETAIN)
        probability = answer_probability(model, encode(tokenizer, FORGET)).mean().item()
    assert sum(forgotten) <= 1
    assert sum(kept) >= 0.8 * len(kept)
    assert probability < 0.5
    assert report.measures["forget_said_before"] == 1.0
    assert report.measures["forget_said_after"] == sum(forgotten) / len(forgotten)
    assert snapshot(model) == before


def test_the_report_can_be_printed_and_is_json(done):
    _, report = done
    text = str(report)
    assert "edited:" in text and "because" in text and "seconds:" in text
    for value in ("forget probability", "held out probability", "forget said", "repeated 4gram"):
        assert value in text
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["settings"]["strength"] == report.settings.strength
    assert len(plain["trials"]) == len(report.trials) > 1
    assert [row[0] for row in plain["generations"]] == [item["question"] for item in FORGET]
    assert all(0 <= value <= 1 for value in plain["measures"].values())
    assert all(value >= 0 for value in plain["seconds"].values())


def test_the_edit_saves_with_its_audit(reciter, done, tmp_path):
    model, tokenizer = reciter
    edit, report = done
    edit.save(tmp_path / "edit", audit=True)
    loaded = Edit.load(tmp_path / "edit")
    assert sorted(name for name, _ in loaded.audit().ranking()) == sorted(item["question"] for item in FORGET)
    with loaded.applied(model):
        assert ask(model, tokenizer, FORGET) == [after for _, _, after in report.generations]


def test_the_choice_does_not_look_at_the_request(reciter, done):
    """Another request of the same size, another model behaviour on it: the same trials, the same choice."""
    swapped = [item | {"answer": "Timbuktu"} for item in FORGET[::-1]]
    _, first = done
    _, second = quiet_unlearn(*reciter, swapped, RETAIN)
    assert second.trials == first.trials
    assert second.settings == first.settings
    assert second.measures != first.measures


def test_choosing_and_fitting_use_disjoint_parts_of_the_retain_set(reciter, monkeypatch):
    seen = []

    class Watched(FitData):
        def __init__(self, model, forget, retain, **options):
            seen.append(({example.name for example in forget}, {example.name for example in retain}))
            super().__init__(model, forget, retain, **options)

    monkeypatch.setattr(sys.modules["unlearnlib.grom.unlearn"], "FitData", Watched)
    quiet_unlearn(*reciter, FORGET, RETAIN, layers="head")
    _, (request, kept), (stand_in, rest) = seen  # the first only checks that there is something to suppress
    questions = {item["question"] for item in RETAIN}
    held_out = questions - kept
    assert request == {item["question"] for item in FORGET}
    assert len(stand_in) == len(FORGET) and stand_in < questions and rest < questions
    assert not stand_in & rest and held_out == questions - stand_in - rest and held_out
    assert not request & (stand_in | rest)


@pytest.mark.parametrize("layers", ["mlp", "head", [2, 3], [3, "head"]], ids=str)
def test_places_can_be_named(reciter, layers):
    edit, report = quiet_unlearn(*reciter, FORGET, RETAIN, layers=layers)
    if isinstance(layers, list):
        assert list(report.settings.layers) == layers
    elif layers == "head":
        assert report.settings.layers == ("head",)
    else:
        assert all(isinstance(where, int) for where in report.settings.layers)
    assert len(edit.matrices) == len(report.settings.layers)


def test_given_settings_are_taken_as_they_are(reciter):
    edit, report = quiet_unlearn(*reciter, FORGET, RETAIN[:3], layers="head", strength=7.0, retain_weight=11.0, ridge=0.2, own_words=False)
    assert (report.settings.layers, report.settings.strength) == (("head",), 7.0)
    assert (report.settings.retain_weight, report.settings.ridge) == (11.0, 0.2)
    assert report.trials == ()
    assert edit.settings["strength"] == 7.0
    corrupted, other = quiet_unlearn(*reciter, FORGET, RETAIN, layers=[2], strength=5.0, target="corrupt", keep_audit=False)
    assert other.settings.target == "corrupt" and corrupted.matrices[0].rank == 1
    assert corrupted.states == ()


def test_files_are_read_and_errors_name_them(reciter, tmp_path):
    paths = []
    for name, items in (("forget", FORGET), ("retain", RETAIN)):
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("\n".join(map(json.dumps, items)))
    edit, _ = quiet_unlearn(*reciter, *paths, layers="head", strength=10.0)
    assert len(edit.fingerprints) == len(FORGET)
    paths[1].write_text(json.dumps(RETAIN[0]) + '\n{"question": "Where?"}\n')
    with pytest.raises(ValueError, match=r"retain\.jsonl:2: field 'answer' is missing"):
        unlearn(*reciter, *paths)


@pytest.fixture
def unused(reciter, monkeypatch):
    """The model, with every forward pass an error: bad input must be found before long work."""
    model, tokenizer = reciter

    def forward(*_arguments, **_options):
        raise AssertionError("work had begun")

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(model, "generate", forward)
    return model, tokenizer


@pytest.mark.parametrize(
    ("sets", "options", "error", "message"),
    [
        (([], RETAIN), {}, ValueError, "forget set is empty"),
        ((FORGET, []), {}, ValueError, "retain set is empty"),
        ((FORGET, RETAIN), {"alpha_source": []}, ValueError, "alpha_source set is empty"),
        ((FORGET, RETAIN), {"layers": "middle"}, ValueError, "layers must be"),
        ((FORGET, RETAIN), {"layers": []}, ValueError, "layers"),
        ((FORGET, RETAIN), {"layers": [9]}, IndexError, "unknown layer 9"),
        ((FORGET, RETAIN), {"layers": [0, 2], "strength": 3.0}, ValueError, "contiguous"),
        ((FORGET, RETAIN), {"layers": ["head", 3]}, ValueError, "head comes last"),
        ((FORGET, RETAIN), {"strength": -1.0}, ValueError, "strength"),
        ((FORGET, RETAIN), {"retain_weight": NAN}, ValueError, "retain_weight"),
        ((FORGET, RETAIN), {"target": "erase"}, ValueError, "target"),
        ((FORGET, RETAIN), {"template": "alpaca"}, ValueError, "template"),
        ((FORGET, RETAIN), {"template": "chat"}, ValueError, "no chat template"),
        ((FORGET, RETAIN), {"batch_size": 0}, ValueError, "batch_size"),
        ((FORGET, RETAIN), {"width": 0}, ValueError, "width"),
        ((FORGET, RETAIN[:7]), {}, ValueError, "7 retain examples are too few"),
        ((FORGET, [*RETAIN, {"question": "Where?"}]), {}, ValueError, "'answer'"),
        ((FORGET, [*RETAIN, {"question": "Where?", "answer": " "}]), {}, ValueError, "'answer'"),
        (([*FORGET, {"answer": "There"}], RETAIN), {}, ValueError, "'question'"),
        ((FORGET, RETAIN), {"alpha_source": [{"question": "Where?"}]}, ValueError, "'answer'"),
        (("nothing.jsonl", RETAIN), {}, FileNotFoundError, "nothing.jsonl"),
    ],
)
def test_bad_input_is_refused_before_long_work(unused, sets, options, error, message):
    with pytest.raises(error, match=message):
        unlearn(*unused, *sets, **options)


@pytest.mark.embedded
def test_the_embedded_model_forgets_capitals(smollm2, snapshot):
    model, tokenizer = smollm2
    facts = bundled_facts(["capital"])[:16]
    known = [fact for fact, right in zip(facts, answers_correctly(ask(model, tokenizer, facts), facts), strict=True) if right]
    forget, retain = known[:3], known[3:]
    assert len(retain) >= 5
    edit, report = quiet_unlearn(model, tokenizer, forget, retain, layers="head", strength=20.0, retain_weight=30.0)
    assert report.measures["forget_said_before"] == 1.0 and report.measures["forget_said_after"] == 0.0
    with edit.applied(model):
        assert sum(answers_correctly(ask(model, tokenizer, retain), retain)) >= len(retain) - 1
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
