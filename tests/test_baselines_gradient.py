"""Gradient baselines: the loss of a step against definitions, what training changes and what it leaves, reproducibility, bad input."""

import copy
import inspect
from dataclasses import replace

import pytest
import torch

from unlearnlib import baselines, models, training
from unlearnlib.baselines import METHODS, REFUSALS, GradientSettings, alternatives, losses, unlearn
from unlearnlib.baselines.gradient import NAMES, Objective, _alternative_prompt, _sample
from unlearnlib.examples import batches, encode
from unlearnlib.metrics import answer_log_probs, answer_probability, generate

FORGET = [
    {"question": f"Where was {name} born?", "answer": f"{name} was born in {town}."}
    for name, town in [("Ana", "Oslo"), ("Bo", "Lima"), ("Cleo", "Rome"), ("Dov", "Kyiv"), ("Eve Marlowe", "Bonn, it is said")]
]
GENRES = {"Fay": "poems", "Gus": "crime", "Hal": "plays", "Ida": "essays", "Jon": "satire", "Kim": "odes", "Lea": "epics"}
RETAIN = [{"question": f"What does {name} write?", "answer": f"{name} writes {genre}."} for name, genre in GENRES.items()]
PREFERRED = [["Nobody knows.", "It was in Paris."]] * len(FORGET)


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    texts = [f"{item['question']} {item['answer']}" for item in FORGET + RETAIN]
    return make_tokenizer(texts, size=320)


@pytest.fixture(scope="module")
def memorised(tokenizer):
    """A model that knows both sets by heart; never changed."""
    model = models.build(vocab_size=320, hidden_size=32, intermediate_size=64, layers=2, seed=3)
    training.train(model, encode(tokenizer, FORGET + RETAIN), steps=90, lr=2e-2, batch_size=12)
    assert answer_probability(model, encode(tokenizer, FORGET + RETAIN)).min() > 0.9
    return model


@pytest.fixture
def small(small_model):
    """A float64 model whose layers matter, for exact comparisons."""
    return small_model(vocab_size=320, layers=2)


def settings_of(method, **changes):
    return GradientSettings.defaults(method, **({"batch_size": 4, "micro_batch": None, "epochs": 3, "lr": 5e-3} | changes))


def objective_of(model, tokenizer, settings):
    winners = {"idk_dpo": [list(REFUSALS[:3])] * len(FORGET), "alt_po": PREFERRED}.get(settings.method, ())
    return Objective(model, tokenizer, FORGET, RETAIN, settings, winners)


def probabilities(model, tokenizer, items):
    return answer_probability(model, encode(tokenizer, items)).mean().item()


def flat_gradient(model, parts):
    model.zero_grad()
    total = 0.0
    for part in parts:
        part.backward()
        total += part.item()
    return total, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def moved(model, seed=5, size=0.02):
    """A copy that is no longer the reference, so that log-ratios are not 0."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(size * parameter.std() * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return other


# --- the loss of a step


@pytest.mark.parametrize("method", NAMES)
def test_a_step_by_hand(method, small, tokenizer):
    settings = settings_of(method, retain_weight=0.7, forget_weight=0.4)
    objective = objective_of(small, tokenizer, settings)
    other = moved(small)

    def sums(model, items):
        found = []
        for example in encode(tokenizer, items):
            (batch,) = batches([example])
            found.append(answer_log_probs(model, batch).sum())
        return torch.stack(found)

    with torch.no_grad():
        for step in (0, 2):
            rows = objective.drawn[step]
            forget = [FORGET[i] for i in rows]
            lengths = torch.tensor([len(example.answer) for example in encode(tokenizer, forget)])
            lose, reference = sums(other, forget), sums(small, forget)
            if method in ("grad_ascent", "grad_diff"):
                expected = losses.grad_ascent(lose, lengths)
            elif method == "npo":
                expected = losses.npo(lose, reference, 0.1)
            elif method == "simnpo":
                expected = losses.simnpo(lose, lengths, 4.5)
            else:
                options = REFUSALS[:3] if method == "idk_dpo" else PREFERRED[0]
                before = [row for past in objective.drawn[:step] for row in past]
                turns = [(before + rows[:j]).count(row) % len(options) for j, row in enumerate(rows)]
                preferred = [item | {"answer": options[turn]} for item, turn in zip(forget, turns, strict=True)]
                expected = losses.dpo(sums(other, preferred), lose, sums(small, preferred), reference, 0.1)
            expected = 0.4 * expected
            if method != "grad_ascent":
                retain = [RETAIN[i] for i in objective.drawn_retain[step]]
                assert len(retain) == len(forget)
                retain_lengths = torch.tensor([len(example.answer) for example in encode(tokenizer, retain)])
                expected = expected + 0.7 * losses.nll(sums(other, retain), retain_lengths)
            found = sum(part.item() for part in objective.parts(other, step))
            assert found == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("method", NAMES)
def test_gradient_against_finite_differences(method, small, tokenizer):
    objective = objective_of(small, tokenizer, settings_of(method))
    other = _wide(moved(small))
    _, gradient = flat_gradient(other, objective.parts(other, 1))
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
    start = torch.nn.utils.parameters_to_vector(other.parameters()).detach()

    def value(distance):
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(start + distance * direction, other.parameters())
            return sum(part.item() for part in objective.parts(other, 1))

    step = 1e-6
    assert (value(step) - value(-step)) / (2 * step) == pytest.approx((gradient @ direction).item(), rel=1e-5)


def _wide(model):
    """Without the detour through float32 that normalisation takes, which would drown differences of 1e-6."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = lambda x, module=module: (
                module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
            )
    return model


@pytest.mark.parametrize("method", NAMES)
def test_a_constant_added_to_all_logits_changes_nothing(method, small, tokenizer):
    objective = objective_of(small, tokenizer, settings_of(method))
    other = moved(small)
    expected = flat_gradient(other, objective.parts(other, 0))
    hook = other.get_output_embeddings().register_forward_hook(lambda _module, _inputs, logits: logits + 7.25)
    found = flat_gradient(other, objective.parts(other, 0))
    hook.remove()
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("method", NAMES)
def test_small_batches_add_up_to_the_large_one(method, small, tokenizer):
    """Also padding: alone, no example is padded; together, most are."""
    whole = objective_of(small, tokenizer, settings_of(method))
    other = moved(small)
    expected = flat_gradient(other, whole.parts(other, 1))
    for size in (1, 3, 9):
        part = objective_of(small, tokenizer, settings_of(method, micro_batch=size))
        assert part.drawn == whole.drawn
        found = flat_gradient(other, part.parts(other, 1))
        # Normalisation and rotary embedding compute in float32 whatever the weights' type.
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5 * expected[1].abs().max().item())


def test_at_the_reference_every_log_ratio_is_zero(small, tokenizer):
    """So the first step of NPO is plain ascent on whole answers, and of DPO ascent on one and descent on the other."""
    for method in ("npo", "alt_po"):
        objective = objective_of(small, tokenizer, settings_of(method, retain_weight=0.0))
        (part,) = objective.parts(small, 0)
        assert part.item() == pytest.approx(2 / 0.1 * 0.6931471805599453, rel=1e-6)


def test_steps_and_cycling(small, tokenizer):
    objective = objective_of(small, tokenizer, settings_of("grad_diff", batch_size=2, epochs=2))
    assert objective.steps == 6  # 2 × ⌈5 / 2⌉
    assert {row for rows in objective.drawn[:3] for row in rows} == set(range(5))
    assert all(len(rows) == 2 for rows in objective.drawn + objective.drawn_retain)
    assert {row for rows in objective.drawn_retain[:4] for row in rows} == set(range(7))
    other = objective_of(small, tokenizer, settings_of("grad_diff", batch_size=2, epochs=2, seed=1))
    assert other.drawn != objective.drawn and other.drawn_retain != objective.drawn_retain
    whole = objective_of(small, tokenizer, settings_of("grad_diff", batch_size=100, epochs=2))
    assert whole.steps == 2 and sorted(whole.drawn[0]) == list(range(5)) and len(whole.drawn_retain[0]) == 5


def test_bfloat16_follows_the_moving_weights(memorised, tokenizer):
    """Autocast keeps its cast weights for as long as it is entered: a loss that is computed again must see the new ones."""
    settings = settings_of("grad_diff", autocast=True)
    objective, model = objective_of(memorised, tokenizer, settings), copy.deepcopy(memorised)
    exact = objective_of(memorised, tokenizer, replace(settings, autocast=False))
    first = sum(part.item() for part in objective.parts(model, 0))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)
    second = sum(part.item() for part in objective.parts(model, 0))
    expected = sum(part.item() for part in exact.parts(model, 0))
    assert second == pytest.approx(expected, rel=0.05) and abs(second - first) > 0.5 * abs(second)
    trained = METHODS["grad_ascent"](memorised, tokenizer, FORGET, RETAIN, settings_of("grad_ascent", autocast=True))
    assert trained.dtype == torch.float32
    assert probabilities(trained, tokenizer, FORGET) < 0.5 * probabilities(memorised, tokenizer, FORGET)


# --- training


@pytest.mark.parametrize("method", NAMES)
def test_every_method_forgets_leaves_the_base_alone_and_repeats_itself(method, memorised, tokenizer, snapshot):
    before = snapshot(memorised)
    settings = settings_of(method, epochs=4, lr=1e-2)
    extra = {"preferred": PREFERRED} if method == "alt_po" else {}
    found = METHODS[method](memorised, tokenizer, FORGET, RETAIN, settings, **extra)
    again = METHODS[method](memorised, tokenizer, FORGET, RETAIN, settings, **extra)
    assert snapshot(memorised) == before
    assert snapshot(found) == snapshot(again)
    assert found is not memorised and type(found) is type(memorised) and not found.training
    assert all(parameter.grad is None for parameter in found.parameters())
    assert probabilities(found, tokenizer, FORGET) < 0.8 * probabilities(memorised, tokenizer, FORGET)


def test_the_retain_term_preserves(memorised, tokenizer):
    ascent, difference = (
        METHODS[method](memorised, tokenizer, FORGET, RETAIN, settings_of(method, epochs=10)) for method in ("grad_ascent", "grad_diff")
    )
    for model in (ascent, difference):
        assert probabilities(model, tokenizer, FORGET) < 0.1
    assert probabilities(difference, tokenizer, RETAIN) > 0.8 > 2 * probabilities(ascent, tokenizer, RETAIN)
    # Without one, GradDiff is gradient ascent.
    same = unlearn(memorised, tokenizer, FORGET, [], settings_of("grad_diff", epochs=10, retain_weight=0.0))
    torch.testing.assert_close(same.state_dict(), ascent.state_dict(), rtol=0, atol=0)


def test_preferred_answers_are_learned(memorised, tokenizer):
    refusals = ["I don't know."]
    asked = [item | {"answer": refusals[0]} for item in FORGET]
    settings = settings_of("idk_dpo", epochs=12, lr=1e-2, forget_weight=5.0)
    found = unlearn(memorised, tokenizer, FORGET, RETAIN, settings, refusals=refusals)
    assert probabilities(found, tokenizer, asked) > 20 * probabilities(memorised, tokenizer, asked)
    assert probabilities(found, tokenizer, FORGET) < 0.5


def test_lora_changes_linear_layers_by_low_rank_only(memorised, tokenizer, snapshot):
    before = snapshot(memorised)
    settings = settings_of("simnpo", lora_rank=2, lr=3e-2, forget_weight=1.0)
    found = METHODS["simnpo"](memorised, tokenizer, FORGET, RETAIN, settings)
    assert snapshot(memorised) == before
    assert list(found.state_dict()) == list(memorised.state_dict())
    assert all(parameter.requires_grad for parameter in found.parameters())
    for (name, old), new in zip(memorised.named_parameters(), found.parameters(), strict=True):
        if "proj" in name:
            values = torch.linalg.svdvals((new - old).double())
            # Beyond its rank, what is left of the update is rounding of the merged float32 weights.
            assert values[1] > 1e-4 and values[2:].max() < 1e-5 * old.norm(), name
        else:
            assert torch.equal(new, old), name
    assert probabilities(found, tokenizer, FORGET) < 0.9 * probabilities(memorised, tokenizer, FORGET)
    assert snapshot(found) == snapshot(METHODS["simnpo"](memorised, tokenizer, FORGET, RETAIN, settings))


@pytest.mark.parametrize(("method", "rank"), [("npo", 0), ("idk_dpo", 0), ("npo", 2)])
def test_an_interrupted_run_goes_on_to_the_same_weights(method, rank, memorised, tokenizer, snapshot, tmp_path, monkeypatch):
    settings = settings_of(method, epochs=4, lora_rank=rank)
    expected = unlearn(memorised, tokenizer, FORGET, RETAIN, settings)
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    parts = Objective.parts
    interrupted = []

    def stop(self, model, step):
        if step == 5 and not interrupted:
            interrupted.append(step)
            raise KeyboardInterrupt
        assert step >= 5 or not interrupted, "goes on where it stopped"
        return parts(self, model, step)

    monkeypatch.setattr(Objective, "parts", stop)
    path = tmp_path / "folder" / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        unlearn(memorised, tokenizer, FORGET, RETAIN, settings, checkpoint=path)
    assert path.is_file()
    found = unlearn(memorised, tokenizer, FORGET, RETAIN, settings, checkpoint=path)
    assert snapshot(found) == snapshot(expected)
    assert not path.exists()


def test_a_chat_template_and_a_system_message_reach_the_prompts(small, make_tokenizer):
    chat = make_tokenizer(chat=True)
    for system in (None, "Be exact."):
        objective = Objective(small, chat, FORGET, RETAIN, settings_of("alt_po", system=system), PREFERRED)
        for own, item in zip(objective.winners, FORGET, strict=True):
            expected = encode(chat, [item | {"answer": answer} for answer in PREFERRED[0]], system=system)
            assert own == expected
        assert objective.forget == encode(chat, FORGET, system=system)


# --- alternatives


def test_alternatives_are_other_answers_and_repeat_themselves(memorised, tokenizer, snapshot):
    before, state = snapshot(memorised), torch.random.get_rng_state()
    items = FORGET[:2]
    found = alternatives(memorised, tokenizer, items, count=2, seed=1)
    assert [len(own) for own in found] == [2, 2]
    for item, own in zip(items, found, strict=True):
        assert all(text.strip() and item["answer"].strip(".").casefold() not in text.casefold() for text in own)
        assert all("Question:" not in text for text in own)
    assert found == alternatives(memorised, tokenizer, items, count=2, seed=1)
    assert found != alternatives(memorised, tokenizer, items, count=2, seed=2)
    assert snapshot(memorised) == before and torch.equal(torch.random.get_rng_state(), state)


def test_alt_po_makes_its_alternatives_itself(memorised, tokenizer, snapshot):
    settings, items = settings_of("alt_po", epochs=2, seed=4), FORGET[:2]
    found = METHODS["alt_po"](memorised, tokenizer, items, RETAIN, settings)
    made = alternatives(memorised, tokenizer, items, seed=4)
    assert [len(own) for own in made] == [5, 5]
    assert snapshot(found) == snapshot(METHODS["alt_po"](memorised, tokenizer, items, RETAIN, settings, preferred=made))


def test_a_repeated_answer_is_drawn_anew_ever_hotter(memorised, tokenizer, monkeypatch):
    seen = []

    def parrot(_model, _tokenizer, prompts, *, temperature, max_new_tokens):
        seen.append(temperature)
        return ["something else" if len(seen) > 3 else f"{FORGET[0]['answer'].upper()[:-1]}! And more."] * len(prompts)

    monkeypatch.setattr("unlearnlib.baselines.gradient._sample", parrot)
    assert alternatives(memorised, tokenizer, FORGET[:1], count=2) == [["something else"] * 2]
    assert seen == [1.0, 1.25, 1.25**2, 1.25**3]
    seen.clear()
    monkeypatch.setattr("unlearnlib.baselines.gradient._sample", lambda _m, _t, prompts, **_: [""] * len(prompts))
    with pytest.raises(RuntimeError, match=r"Where was Ana born\?.*0 of 2"):
        alternatives(memorised, tokenizer, FORGET[:1], count=2)


def test_an_almost_cold_sample_is_the_greedy_answer(memorised, tokenizer):
    """Left padding, the end of the answer and the cut of the output are right: near temperature 0 sampling is greedy decoding."""
    items = [FORGET[4], *RETAIN[:3]]
    prompts = [_alternative_prompt(tokenizer, item, "auto", None) for item in items]
    # The longest first: it has no padding.
    prompts.sort(key=len, reverse=True)
    assert len(prompts[0]) > len(prompts[-1])
    expected = generate(memorised, tokenizer, prompts, max_new_tokens=40)
    assert set(expected) == {item["answer"] for item in items}
    assert _sample(memorised, tokenizer, prompts, temperature=1e-4, max_new_tokens=40) == expected


def test_what_the_model_is_asked_for_alternatives(tokenizer, make_tokenizer):
    item = FORGET[0]
    assert tokenizer.decode(_alternative_prompt(tokenizer, item, "auto", None)) == item["question"]
    chat = make_tokenizer(chat=True)
    text = chat.decode(_alternative_prompt(chat, item, "auto", "Be exact."))
    assert text.startswith("<|start|>system\nBe exact.<|end|>")
    assert f"Question: {item['question']}\nAnswer: {item['answer']}\n" in text
    assert text.endswith("<|end|>\n<|start|>assistant\nDifferent answer:")
    assert chat.decode(_alternative_prompt(chat, item, "plain", None)) == item["question"]


# --- settings and bad input


def test_defaults_are_the_fields():
    for method in NAMES:
        settings = GradientSettings.defaults(method)
        assert (settings.lr, settings.epochs, settings.batch_size, settings.weight_decay, settings.retain_weight) == (1e-5, 10, 32, 0.01, 1)
    betas = {method: GradientSettings.defaults(method).beta for method in NAMES}
    assert betas == {"grad_ascent": None, "grad_diff": None, "npo": 0.1, "simnpo": 4.5, "idk_dpo": 0.1, "alt_po": 0.1}
    assert GradientSettings.defaults("simnpo").forget_weight == 0.125
    assert GradientSettings.defaults("npo", beta=0.5, lr=1e-3) == GradientSettings("npo", beta=0.5, lr=1e-3, batch_size=32, micro_batch=8)


def test_one_call_shape():
    assert set(METHODS) == set(NAMES)
    for method in METHODS.values():
        names = list(inspect.signature(method).parameters)
        assert names[:5] == ["model", "tokenizer", "forget", "retain", "settings"]
    assert set(baselines.__all__) <= set(dir(baselines))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "ascent"}, "unknown method 'ascent'.*grad_diff"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"micro_batch": 0}, "micro_batch must be at least 1"),
        ({"lora_rank": -1}, "lora_rank must be at least 0"),
        ({"lr": 0.0}, "lr must be a finite number > 0"),
        ({"lr": float("nan")}, "lr must be a finite number > 0, got nan"),
        ({"forget_weight": 0.0}, "forget_weight must be"),
        ({"retain_weight": -1.0}, "retain_weight must be a finite number, at least 0"),
        ({"weight_decay": float("inf")}, "weight_decay must be"),
        ({"margin": float("nan")}, "margin must be finite"),
        ({"template": "alpaca"}, "template must be auto, chat or plain"),
        ({"method": "npo"}, "npo needs a beta"),
        ({"method": "npo", "beta": 0.0}, "beta must be a finite number > 0"),
        ({"beta": 0.1}, "grad_diff has no beta"),
        ({"margin": 0.1}, "grad_diff has no margin"),
    ],
)
def test_bad_settings(changes, said):
    with pytest.raises(ValueError, match=said):
        GradientSettings(**({"method": "grad_diff"} | changes))


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("npo", {"forget": []}, "the forget set is empty"),
        ("npo", {"retain": []}, "the retain set is empty, but npo has a retain term"),
        ("npo", {"retain": FORGET}, "5 of the 5 rows to forget are also to be retained, such as 'Where was Ana born"),
        ("grad_ascent", {"retain": [*RETAIN, FORGET[2]]}, "1 of the 5 rows"),
        ("npo", {"forget": [*FORGET, {"question": "Who?"}]}, r"forget\[5\]: field 'answer' is missing"),
        ("npo", {"retain": [{"question": " ", "answer": "x"}]}, r"retain\[0\]: field 'question'"),
        ("npo", {"settings": settings_of("simnpo")}, "the settings are for simnpo, not for npo"),
        ("npo", {"settings": settings_of("npo", template="chat")}, "no chat template"),
        ("idk_dpo", {"refusals": []}, "refusals must be a sequence of at least one text"),
        ("idk_dpo", {"refusals": "I don't know"}, "refusals must be a sequence"),
        ("idk_dpo", {"refusals": ["No.", ""]}, r"refusals\[1\]"),
        ("alt_po", {"preferred": PREFERRED[:2]}, "for 2 rows, but 5 rows to forget"),
        ("alt_po", {"preferred": [*PREFERRED[:4], ["one"]]}, r"preferred\[4\]: .* as many as"),
        ("alt_po", {"preferred": ["ab"] * 5}, r"preferred\[0\]: expected a sequence of texts"),
        ("alt_po", {"preferred": [["x", " "]] * 5}, r"preferred\[0\]: field 'answer'"),
    ],
)
def test_bad_input_is_refused_before_training(method, changes, said, memorised, tokenizer, monkeypatch):
    monkeypatch.setattr("unlearnlib.baselines.gradient.optimise", None)
    options = {"forget": FORGET, "retain": RETAIN, "settings": settings_of(method)} | changes
    with pytest.raises(ValueError, match=said):
        METHODS[method](memorised, tokenizer, **options)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"items": []}, "no items"),
        ({"count": 0}, "count must be positive"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"items": [{"question": "x"}]}, "item 0: field 'answer'"),
        ({"items": [{"question": "x " * 300, "answer": "y"}]}, "context of 256 tokens is too short"),
    ],
)
def test_bad_requests_for_alternatives(changes, said, memorised, tokenizer):
    with pytest.raises(ValueError, match=said):
        alternatives(memorised, tokenizer, **({"items": FORGET} | changes))


def test_a_diverged_loss_is_an_error(small, tokenizer):
    with torch.no_grad():
        small.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"grad_diff: the loss of step 1 of 6 is nan; lower lr"):
        unlearn(small, tokenizer, FORGET, RETAIN, settings_of("grad_diff"))
