"""The TOFU study: the stand-in request, what each method is shown, what is remembered and resumed, tables from runs and records."""

import copy
import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib import models, tiny, training
from unlearnlib.baselines import gradient
from unlearnlib.benchmarks import tofu, tofu_study, tofu_tables
from unlearnlib.benchmarks.tofu import Tofu
from unlearnlib.benchmarks.tofu_scores import Evaluation, evaluate, intervals, table_row, utility
from unlearnlib.benchmarks.tofu_study import LORA, Grid, Study, make_study, rehearse
from unlearnlib.benchmarks.tofu_tables import DEVIATING, LEVEL, MODELS, SPREAD, Tables, claims, deviation, make_tables, spread
from unlearnlib.examples import encode
from unlearnlib.finetune import FineTuning
from unlearnlib.grom import HEAD
from unlearnlib.grom.choose import mildest, weigh
from unlearnlib.methods import GROM, METHODS, outcome
from unlearnlib.metrics import answer_probability

SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "layers": 4, "heads": 4, "max_length": 512}
SETTINGS = {
    "tuning": FineTuning(epochs=1, lr=1e-2, batch_size=16),
    "how": Evaluation(max_new_tokens=2, batch_size=64),
    "grid": Grid((2.0, 4.0), (1.0, 2.0), (1e-3, 2e-3), width=2, epochs=1, batch_size=8, lora_rank=2),
    "rehearsal_authors": 1,
}


def load_data(split="forget10"):
    return tofu.load("miniature", split, authors=(18, 2), retain_rows=4, general_rows=4)


@pytest.fixture(scope="module")
def data():
    return load_data()


@pytest.fixture(scope="module")
def load(data, make_tokenizer):
    """What stands for `models.load`."""
    tokenizer = make_tokenizer([f"{row['question']} {row['answer']}" for row in data.full])
    return lambda name: (models.build(**SIZES), tokenizer)


@pytest.fixture(scope="module")
def study(data, load, tmp_path_factory):
    """A study whose models and steps are kept throughout the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNLEARNLIB_CACHE", str(tmp_path_factory.mktemp("study")))
        yield Study(data, "small", load=load, **SETTINGS)


@pytest.fixture
def same(study, load):
    """The same study, begun anew: it has only what the cache has."""
    return Study(load_data(), "small", load=load, **SETTINGS)


def never(*_, **options):
    pytest.fail("computed again")


def weights(model):
    return [weight.detach().clone() for weight in model.parameters()]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


# ---------------------------------------------------------------------------------------------------------------------------
# The grid


@pytest.mark.parametrize("name", ["strengths", "head_strengths", "learning_rates"])
@pytest.mark.parametrize("values", [(), (1.0, 2.0)])
def test_every_method_has_as_many_candidates(name, values):
    with pytest.raises(ValueError, match="equally many candidates"):
        Grid(**{name: values})


def test_a_grid_without_candidates_is_refused():
    with pytest.raises(ValueError, match="at least one each"):
        Grid((), (), ())


# ---------------------------------------------------------------------------------------------------------------------------
# The stand-in request


def invented(authors, evaluated, forgotten=2):
    """Two rows for each author; the first row of some is evaluated, the last authors are to be forgotten."""
    full = [{"question": f"{author}, {i}?", "answer": "Yes.", "author": author} for author in range(authors) for i in range(2)]
    kept = [row for row in full if row["author"] < authors - forgotten]
    asked = [row for row in kept if row["author"] in evaluated and row["question"].endswith("0?")]
    return Tofu("forget05", full, full[len(kept) :], kept, asked, [], [], [], [])


@given(st.sampled_from([20, 30, 40]), st.sets(st.integers(0, 17), max_size=10), st.integers(1, 3), st.integers(0, 99), st.integers(1, 2))
def test_the_rehearsal_is_drawn_from_authors_whom_nothing_is_about(authors, evaluated, size, seed, forgotten):
    data = invented(authors, evaluated, forgotten)
    found = rehearse(data, size, seed)
    parts = found.forget, found.validation, found.retain
    forget, validation, retain = ({row["author"] for row in part} for part in parts)
    assert len(forget) == len(validation) == size
    assert not forget & validation and not retain & (forget | validation)
    # Neither evaluated, nor forgotten by any split: the largest takes a tenth of the authors.
    assert not (forget | validation) & evaluated
    assert max(forget | validation) < authors - authors // 10
    # All rows to be retained take part, once, and nothing else.
    questions = [row["question"] for part in parts for row in part]
    assert sorted(questions) == sorted(row["question"] for row in data.retain)
    assert rehearse(data, size, seed) == found


def test_another_seed_is_another_rehearsal():
    data = invented(40, set())
    assert len({tuple(row["author"] for row in rehearse(data, 2, seed).forget) for seed in range(8)}) > 4


@pytest.mark.parametrize("source", ["full", "cut"])
def test_every_split_rehearses_on_the_same_authors(source):
    cut = {"authors": (36, 4)} if source == "full" else {"authors": (18, 2)}
    found = [rehearse(tofu.load("miniature", split, retain_rows=4, **cut), 1, 5) for split in ("forget05", "forget10")]
    assert found[0].forget == found[1].forget
    assert found[0].validation == found[1].validation


def test_a_stand_in_needs_enough_authors():
    data = invented(20, set(range(13)))
    assert rehearse(data, 2, 0)
    with pytest.raises(ValueError, match="5 authors to be kept are in no evaluation row: too few to choose settings on 2 × 3"):
        rehearse(data, 3, 0)


# ---------------------------------------------------------------------------------------------------------------------------
# Models


@pytest.mark.parametrize("replay", [False, True])
def test_the_models_differ_in_the_rows_to_be_forgotten_alone(replay, data, load, monkeypatch):
    seen = {}

    def record(base, rows, tuning, *, load, name, progress):
        seen[name] = rows
        return f"folder of {name}"

    monkeypatch.setattr(tofu_study, "finetuned", record)
    study = Study(data, "small", load=load, replay=replay, **SETTINGS)
    assert study.folder("full") == "folder of tofu-full"
    assert study.folder("retain") == "folder of tofu-without-forget10"
    general = data.real_authors + data.world_facts if replay else []
    assert seen == {"tofu-full": data.full + general, "tofu-without-forget10": data.retain + general}
    forgotten = {row["question"] for row in data.forget}
    assert forgotten and not forgotten & {row["question"] for row in seen["tofu-without-forget10"]}


def test_models_that_are_there_already_are_not_trained(data, monkeypatch):
    monkeypatch.setattr(tofu_study, "finetuned", never)
    study = Study(data, "small", full_model="owner/full", retain_model="owner/retain90")
    assert [study.folder(which) for which in ("full", "retain")] == ["owner/full", "owner/retain90"]


def test_what_no_method_made(study, load):
    with study.model("base") as base, study.model("full") as full, study.model("retain") as retain:
        assert equal(base, load("small")[0])
        assert full is study.full[0]
        assert not equal(full, base) and not equal(full, retain) and not equal(base, retain)


@pytest.mark.parametrize("method", GROM)
def test_an_edit_leaves_the_full_model_to_the_bit(method, study, snapshot):
    full = study.full[0]
    examples = encode(study.full[1], study.data.forget)
    before, known = snapshot(full), answer_probability(full, examples).mean()
    with study.model(method, study.candidates(method)[0]) as model:
        assert model is full
        assert answer_probability(model, examples).mean() < known
    assert snapshot(full) == before


@pytest.mark.parametrize("method", ["grad_diff", "npo" + LORA])
def test_a_trained_model_is_kept(method, study, same, snapshot, monkeypatch):
    before, settings = snapshot(study.full[0]), study.candidates(method)[0]
    with study.model(method, settings) as model:
        assert not equal(model, study.full[0])
        assert model.config.unlearning_seconds > 0
    assert snapshot(study.full[0]) == before
    monkeypatch.setattr(Study, "run", never)
    with same.model(method, settings) as again:
        assert equal(again, model)
    for change in ({"lr": 3e-3}, {"seed": 1}):
        with pytest.raises(pytest.fail.Exception), same.model(method, replace(settings, **change)):
            pass
    with pytest.raises(pytest.fail.Exception), same.model(method, settings, held_out=True):
        pass


class Interrupt(Exception):
    """What stops a training on its way."""


def test_an_interrupted_method_goes_on_to_the_same_bits(study, same, monkeypatch):
    method = "grad_diff"
    settings = replace(study.candidates(method)[1], epochs=3)
    whole = study.run(method, study.data.forget, study.data.retain, settings)
    compute, steps = gradient.Objective.parts, []

    def parts(self, model, step):
        steps.append(step)
        if len(steps) == 4:
            raise Interrupt
        yield from compute(self, model, step)

    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(gradient.Objective, "parts", parts)
    with pytest.raises(Interrupt), study.model(method, settings):
        pass
    with same.model(method, settings) as resumed:
        assert equal(resumed, whole)
    assert steps == [0, 1, 2, 3, 3, 4, 5], "what was done is not done again"


def test_refusals_are_those_of_the_data(study, monkeypatch):
    seen = []
    monkeypatch.setitem(METHODS, "idk_dpo", lambda *_, **options: seen.append(options["refusals"]))
    study.run("idk_dpo", [], [], None)
    study.run("idk_dpo" + LORA, [], [], None)
    assert seen == [study.data.refusals] * 2


# ---------------------------------------------------------------------------------------------------------------------------
# What a method is told to keep


def test_anchors(study):
    data = study.data
    general = data.real_authors + data.world_facts
    assert all(study.anchors(method) == data.retain + general for method in GROM)
    assert study.anchors("npo") == study.anchors("npo" + LORA) == data.retain
    evaluated = {row["question"] for row in data.retain_eval + general}
    for method in ("grom", "npo"):
        kept = study.anchors(method, held_out=True)
        assert not evaluated & {row["question"] for row in kept}
        # No more than these are left out.
        assert kept == [row for row in data.retain if row["question"] not in evaluated]
        assert len(kept) == len(data.retain) - len(data.retain_eval)


@pytest.mark.parametrize("method", ["grom", "grad_ascent"])
def test_scores_have_a_second_result_that_was_not_shown_the_evaluation(method, data, study, monkeypatch):
    shown, run, scored = [], Study.run, []

    def spy(self, method, forget, retain, settings, **options):
        shown.append((forget, retain))
        return run(self, method, forget, retain, settings, **options)

    def stand_in(model, tokenizer, data, how, **options):
        scored.append((options.get("utility_only", False), weights(model)))
        return {"number": len(scored)}

    monkeypatch.setattr(Study, "run", spy)
    monkeypatch.setattr(tofu_study, "evaluate", stand_in)
    settings = replace(study.candidates(method)[0], **({"template": "plain"} if method in GROM else {"lr": 7e-4}))
    found = study._score(method, settings)
    assert [forget for forget, _ in shown] == [data.forget] * 2
    assert [retain for _, retain in shown] == [study.anchors(method, held_out=held_out) for held_out in (False, True)]
    assert (found["scores"], found["utility_scores"]) == ({"number": 1}, {"number": 2})
    assert [utility_only for utility_only, _ in scored] == [False, True]
    assert found["seconds"] > 0
    # Gradient ascent doesn't look at rows to be kept.
    first, second = (parameters for _, parameters in scored)
    differ = not all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert differ == (method == "grom")


# ---------------------------------------------------------------------------------------------------------------------------
# Choosing


@pytest.mark.parametrize("method", ["grom", "grom_head", "grom_both", "npo", "simnpo" + LORA])
def test_candidates_come_mildest_first_and_as_many_each(method, study):
    found = study.candidates(method)
    assert len(found) == 2
    if method in GROM:
        assert [one.fit.strength for one in found] == ([1.0, 2.0] if method == "grom_head" else [2.0, 4.0])
        layers = {"grom": study.band, "grom_head": (HEAD,), "grom_both": (*study.band, HEAD)}[method]
        assert all(one.fit.layers == layers for one in found)
        assert [one.fit.head_strength for one in found] == ([1.0, 2.0] if method == "grom_both" else [None, None])
    else:
        name = method.removesuffix(LORA)
        assert [(one.method, one.lr, one.epochs, one.batch_size) for one in found] == [(name, 1e-3, 1, 8), (name, 2e-3, 1, 8)]
        assert {one.lora_rank for one in found} == {2 if method.endswith(LORA) else 0}
        # The rest is the field's.
        assert found[0].beta == gradient.GradientSettings.defaults(name).beta


@pytest.mark.parametrize("method", ["grom", "grad_ascent"])
def test_settings_are_chosen_on_the_rehearsal_and_once(method, study, same, monkeypatch, snapshot):
    before = snapshot(study.full[0])
    trials = study.choose(method)
    assert snapshot(study.full[0]) == before
    assert [trial.settings for trial in trials] == study.candidates(method)
    monkeypatch.setattr(Study, "run", never)
    assert same.choose(method) == trials
    monkeypatch.undo()
    full, tokenizer = study.full
    sets = [encode(tokenizer, rows) for rows in (study.rehearsal.forget, study.rehearsal.validation)]
    result = METHODS[method](full, tokenizer, study.rehearsal.forget, study.rehearsal.retain, trials[1].settings)
    before = [answer_probability(full, examples).mean() for examples in sets]
    with outcome(full, result) as model:
        after = [answer_probability(model, examples).mean() for examples in sets]
    expected = weigh(trials[1].settings, before, after)
    assert (trials[1].forgetting, trials[1].preservation) == pytest.approx((expected.forgetting, expected.preservation), abs=1e-5)


def test_another_grid_is_chosen_from_anew(study, monkeypatch):
    study.choose("grom_head")
    tried = []
    monkeypatch.setattr(Study, "_try", lambda self, method, settings: tried.append(settings.fit.strength) or [0.5, 0.5])
    replace(study, grid=replace(study.grid, retain_weight=1.0)).choose("grom_head")
    assert tried == [1.0, 2.0]


def test_the_band_is_selected_once_or_taken_from_elsewhere(study, same, monkeypatch):
    assert len(study.band) == 2
    monkeypatch.setattr(tofu_study, "attribution", never)
    assert same.band == study.band
    same.set_band(0)
    assert same.band == (0, 1)
    assert {one.fit.layers for one in same.candidates("grom")} == {(0, 1)}
    assert {one.fit.layers for one in same.candidates("grom_both")} == {(0, 1, HEAD)}


def test_a_band_is_no_wider_than_half_the_model(study):
    wide = replace(study, grid=replace(study.grid, width=99))
    wide.set_band(1)
    assert wide.band == (1, 2)


# ---------------------------------------------------------------------------------------------------------------------------
# Scores


def test_scores_are_computed_once(study, same, monkeypatch):
    settings = study.candidates("grom_head")[0]
    found = study.scores("grom_head", settings)
    for name in ("evaluate", "train"):
        monkeypatch.setattr(tofu_study, name, never)
    monkeypatch.setattr(Study, "run", never)
    assert same.scores("grom_head", settings) == found
    json.dumps(found, allow_nan=False)
    monkeypatch.setattr(Study, "_score", never)
    for other in (replace(study, how=replace(study.how, max_new_tokens=3)), replace(study, dtype=torch.float64)):
        with pytest.raises(pytest.fail.Exception):
            other.scores("grom_head", settings)
    with pytest.raises(pytest.fail.Exception):
        same.scores("grom_head", study.candidates("grom_head")[1])


def test_scores_are_those_of_the_model(study):
    settings = study.candidates("grom_head")[0]
    found = study.scores("grom_head", settings)
    with study.model("grom_head", settings) as model:
        expected = evaluate(model, study.full[1], study.data, study.how)
    assert found["scores"].keys() == expected.keys()
    assert found["scores"]["forget"]["prob"] == pytest.approx(expected["forget"]["prob"], rel=1e-4)
    assert list(found["utility_scores"]) == ["retain", "real_authors", "world_facts"]
    full = study.scores("full")
    assert full["utility_scores"] == full["scores"]
    assert full["seconds"] is None


@pytest.mark.parametrize(("which", "change"), [("base", {"base": "another"}), ("retain", {"retain_model": "another/retain90"})])
def test_models_made_elsewhere_have_scores_of_their_own(which, change, study, tmp_path, monkeypatch):
    """Two models beside the same full one."""
    elsewhere = replace(study, full_model="owner/full", retain_model="owner/retain90")
    monkeypatch.setenv("UNLEARNLIB_CACHE", str(tmp_path))
    monkeypatch.setattr(Study, "_score", lambda self, method, settings: [self.base, self.retain_model])
    other = replace(elsewhere, **change)
    assert elsewhere.scores(which) == ["small", "owner/retain90"]
    assert other.scores(which) == [other.base, other.retain_model]


def test_relearning_is_measured_on_rows_that_the_attacker_does_not_have(study, snapshot, monkeypatch):
    model, shown = study.full[0], []

    def spy(model, examples, **options):
        shown.extend(examples)
        assert options["batch_size"] == 8 and options["steps"] == 3
        return training.train(model, examples, **options)

    monkeypatch.setattr(tofu_study, "train", spy)
    before = snapshot(model)
    found = study.relearn(model, steps=3)
    assert snapshot(model) == before
    others = [example for example in encode(study.full[1], study.data.forget) if example not in shown]
    assert (len(shown), len(others)) == (8, 4)
    assert found["before"] == pytest.approx(answer_probability(model, others).mean().item(), rel=1e-5)
    attacked = copy.deepcopy(model)
    training.train(attacked, shown, steps=3, lr=study.tuning.lr, batch_size=8, seed=study.tuning.seed)
    assert found["after"] == pytest.approx(answer_probability(attacked, others).mean().item(), rel=1e-4)
    # A model that has seen such sentences once learns their form from eight more.
    assert found["after"] > found["before"]


def test_a_request_of_few_rows_leaves_one_to_measure_relearning_on(study):
    few = replace(study, data=replace(study.data, forget=study.data.forget[:3]), full_model=study.folder("full"))
    assert set(few.relearn(few.full[0], steps=1)) == {"before", "after"}


# ---------------------------------------------------------------------------------------------------------------------------
# Tables

COLUMNS = {
    *("method", "rouge_l", "prob", "extraction", "model_utility", "model_utility_held_out", "forget_quality", "truth_ratio"),
    *("priv_leak", "generation_forget", "final", "seconds", "seed", "relearn_before", "relearn_after", "prob_low", "prob_high"),
}
"""What those who read a record look for, and some more."""


@pytest.fixture(scope="module")
def tables(study):
    return make_tables(study, ["grom_head", "base", "full", "retain"])


def record(tables, split):
    """What is kept of a run, as far as it is gathered."""
    values = {"split": split, "rows": tables.rows, "choices": tables.choices, "forget_rows": tables.forget_rows}
    return json.loads(json.dumps({"values": values}, allow_nan=False))


def test_rows_come_in_the_order_asked_for(tables, study):
    assert [row["method"] for row in tables.rows] == ["grom_head", "base", "full", "retain"]
    assert all(row.keys() >= COLUMNS for row in tables.rows)
    assert [row["seconds"] is None for row in tables.rows] == [False, True, True, True]
    assert {row["seed"] for row in tables.rows} == {0}
    # Without a method, the second result is the same model.
    assert all(row["model_utility_held_out"] == row["model_utility"] for row in tables.rows if row["method"] in MODELS)
    assert tables.row("retain")["forget_quality"] == pytest.approx(1)
    assert tables.row("retain")["priv_leak"] == 0
    assert tables.row("full")["generation_forget"] == 0


def test_a_row_is_made_from_the_scores(tables, study):
    (choice,) = (choice for choice in tables.choices if choice["chosen"])
    found = study.scores("grom_head", study.candidates("grom_head")[choice["candidate"]])
    row = tables.row("grom_head")
    full, retain = (study.scores(which)["scores"] for which in ("full", "retain"))
    expected = table_row(found["scores"], full, retain) | intervals(found["scores"])
    assert {name: row[name] for name in expected} == expected
    assert row["model_utility_held_out"] == utility(found["utility_scores"])
    assert row["relearn_after"] == found["relearned"]["after"]
    assert row["seconds"] == found["seconds"]


def test_choices_say_what_was_tried(tables, study):
    trials = study.choose("grom_head")
    assert [choice["settings"] for choice in tables.choices] == ["LM head, β 1", "LM head, β 2"]
    assert [choice["candidate"] for choice in tables.choices] == [0, 1]
    assert [choice["score"] for choice in tables.choices] == [trial.score for trial in trials]
    assert [choice["chosen"] for choice in tables.choices] == [trial is mildest(trials) for trial in trials]
    assert {choice["band"] for choice in tables.choices} == {None}


def test_descriptions_of_settings(study):
    first, last = study.band[0], study.band[-1]
    described = [tofu_tables._describe(study.candidates(method)[0]) for method in ("grom", "grom_both", "npo")]
    assert described == [f"layers {first}–{last}, β 2", f"layers {first}–{last}, β 2, LM head β 1", "lr 0.001"]
    assert [tofu_tables._first_layer(study.candidates(method)[0]) for method in ("grom", "grom_both", "grom_head")] == [first, first, None]
    assert tofu_tables._first_layer(study.candidates("npo")[0]) is None


def test_scores_of_the_forget_rows_can_be_read_back(tables, study):
    assert len(tables.forget_rows) == 4 * len(study.data.forget)
    for method in MODELS:
        found, known = tables.scores(method), study.scores(method)["scores"]
        assert found["holdout"]["min_k"] == pytest.approx(known["holdout"]["min_k"], rel=1e-6)
        assert found["forget"].keys() == known["forget"].keys()
        for name, values in known["forget"].items():
            assert found["forget"][name] == pytest.approx(values, rel=1e-6)
    assert tables.scores("npo") is None


def test_a_row_that_is_not_there_is_named(tables):
    with pytest.raises(KeyError, match=r"no row 'npo'; there are grom_head, base, full, retain"):
        tables.row("npo")
    with pytest.raises(KeyError, match="there are none"):
        Tables().row("npo")


def test_unknown_methods_are_refused_before_any_work(study, monkeypatch):
    for name in ("folder", "scores", "choose"):
        monkeypatch.setattr(Study, name, never)
    for name in ("npo2", "grom" + LORA):
        with pytest.raises(ValueError, match=rf"unknown method '{name}'.*retain.*grom_head.*alt_po"):
            make_tables(study, ["full", name])


def test_rows_of_the_same_split_are_taken_over_word_for_word(tables, study, monkeypatch):
    for name in ("scores", "choose", "model"):
        monkeypatch.setattr(Study, name, never)
    gathered = record(tables, "forget10")
    gathered["values"]["rows"][0]["prob"] = 0.123
    found = make_tables(study, ["retain", "grom_head"], [gathered])
    assert found.rows == [gathered["values"]["rows"][3], gathered["values"]["rows"][0]]
    assert found.row("grom_head")["prob"] == 0.123
    assert found.choices == tables.choices
    assert [(row["method"], row["row"]) for row in found.forget_rows] == [(name, i) for name in ("retain", "grom_head") for i in range(12)]


def test_rows_in_several_records_are_taken_once(tables, study, monkeypatch):
    for name in ("scores", "choose", "model"):
        monkeypatch.setattr(Study, name, never)
    gathered = record(tables, "forget10")
    methods = ["full", "retain", "grom_head"]
    assert make_tables(study, methods, [gathered, copy.deepcopy(gathered)]) == make_tables(study, methods, [gathered])


def test_rows_of_other_seeds_are_told_apart(tables, study):
    gathered = [record(tables, "forget10") for _ in range(3)]
    for seed, one in enumerate(gathered):
        for row in one["values"]["rows"]:
            row |= {"seed": seed, "prob": row["prob"] + seed}
        for row in one["values"]["forget_rows"]:
            row["prob"] += seed
    found = make_tables(study, ["retain", "grom_head"], [*gathered, gathered[1]])
    assert found.rows == make_tables(study, ["retain", "grom_head"], gathered[:1]).rows
    assert sorted((row["method"], row["seed"]) for row in found.repeats if row["method"] in ("grom_head", "retain")) == [
        *(("grom_head", seed) for seed in (1, 2)),
        *(("retain", seed) for seed in (1, 2)),
    ]
    # Scores row by row, and choices, are those of the first.
    assert len(found.forget_rows) == 2 * len(study.data.forget)
    assert found.choices == tables.choices
    retained, edited = spread(found)
    assert (edited["method"], edited["seeds"], retained["seeds"]) == ("grom_head", 3, 3)
    prob = tables.row("grom_head")["prob"]
    assert [edited[f"prob_{part}"] for part in ("low", "mean", "high")] == pytest.approx([prob, prob + 1, prob + 2])
    assert edited["final_low"] == edited["final_high"]


def test_without_other_seeds_nothing_is_spread(tables):
    for row, summary in zip(tables.rows, spread(tables), strict=True):
        assert summary["seeds"] == 1
        assert all(summary[f"{measure}_{part}"] == row[measure] for measure in SPREAD for part in ("low", "mean", "high"))


TERMS = ("prob", "rouge_l", "extraction")


def claimed(method, forgetting, utility, seconds=1.0):
    """A row with the same three forget terms."""
    row = {"method": method, "model_utility": utility, "final": (utility + forgetting) / 2, "seconds": seconds}
    return row | dict.fromkeys(TERMS, 1 - forgetting)


@pytest.mark.parametrize(
    ("others", "verdicts"),
    [
        # Final .8 against .7 and .6; forgetting .9 against .7; utility level within .02; 1 second against 2.
        ([claimed("npo", 0.7, 0.7, 2.0), claimed("simnpo", 0.8, 0.4, 3.0), claimed("retain", 0.7, 0.71)], ["holds"] * 4),
        # Half of .1, the interval's width over rows, can't be told apart in forgetting, and half of that in Final.
        (
            [claimed("npo", 0.88, 0.7, 2.0), claimed("retain", 0.86, 0.7 + 1.5 * LEVEL)],
            ["can't be told", "can't be told", "doesn't hold", "holds"],
        ),
        ([claimed("npo", 0.98, 0.8, 0.5), claimed("retain", 0.99, 0.1)], ["doesn't hold", "doesn't hold", "holds", "doesn't hold"]),
        # The other edits are no rivals, and neither are models that no method made.
        ([claimed("grom_head", 1.0, 1.0, 0.1), claimed("full", 1.0, 1.0, None)], []),
    ],
)
def test_claims_by_hand(others, verdicts):
    # Half of 16 rows at 0, half at .2: a standard error of .025.
    rows = [{"method": "grom", "row": i, "holdout_min_k": 0.0} | dict.fromkeys(TERMS, 0.2 * (i % 2)) for i in range(16)]
    found = claims(Tables([claimed("grom", 0.9, 0.7), *others], forget_rows=rows))
    assert [claim["verdict"] for claim in found] == verdicts
    if verdicts:
        final, forgotten, kept, fast = found
        assert [claim["grom"] for claim in found] == pytest.approx([0.8, 0.9, 0.7, 1.0])
        assert (forgotten["against"], kept["against"]) == ("retain", "retain")
        assert (final["against"], fast["against"]) == ("npo", "npo")
        assert fast["other"] == others[0]["seconds"]
    assert claims(Tables(others)) == []


def test_a_missing_row_is_held_against_gathered_ones(tables, study, monkeypatch):
    gathered = record(tables, "forget10")
    scores = Study.scores

    def others(self, method, settings=None):
        assert method not in ("full", "retain")
        return scores(self, method, settings)

    monkeypatch.setattr(Study, "scores", others)
    gathered["values"]["rows"] = [row for row in gathered["values"]["rows"] if row["method"] != "grom_head"]
    found = make_tables(study, ["grom_head"], [gathered])
    # Scores are recorded with seven digits.
    assert found.row("grom_head") == {
        name: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value for name, value in tables.row("grom_head").items()
    }


def test_choices_of_another_split_are_used_but_not_its_rows(tables, study, monkeypatch):
    gathered = record(tables, "forget05")
    for i, choice in enumerate(gathered["values"]["choices"]):
        choice["chosen"] = i == 1
    gathered["values"]["choices"] += [choice | {"method": "grom", "band": 0} for choice in gathered["values"]["choices"]]
    asked = {}
    known = study.scores("full")

    def score(self, method, settings=None):
        asked[method] = settings
        return known

    monkeypatch.setattr(Study, "choose", never)
    monkeypatch.setattr(Study, "scores", score)
    monkeypatch.setattr(tofu_study, "attribution", never)
    fresh = replace(study, progress=False)
    found = make_tables(fresh, ["grom_head", "grom", "retain"], [gathered])
    assert [row["method"] for row in found.rows] == ["grom_head", "grom", "retain"]
    assert {row["prob"] for row in found.rows} == {table_row(*[known["scores"]] * 3)["prob"]}, "not the recorded ones"
    assert asked["grom_head"] == study.candidates("grom_head")[1]
    assert asked["grom"].fit.layers == (0, 1)
    assert asked["grom"].fit.strength == 4.0
    assert found.choices == gathered["values"]["choices"]


# ---------------------------------------------------------------------------------------------------------------------------
# From a notebook's parameters


def test_a_study_from_plain_parameters(data):
    study = make_study(
        data,
        "owner/name",
        seed=3,
        system="Be brief.",
        max_new_tokens=5,
        eval_batch_size=7,
        tuning={"epochs": 4, "lr": 1e-3},
        grid={"strengths": [1.0], "head_strengths": [2.0], "learning_rates": [3.0], "width": 5},
        dtype="bfloat16",
        rehearsal_authors=3,
        retain_model="owner/other",
    )
    assert (study.base, study.retain_model, study.rehearsal_authors, study.dtype) == ("owner/name", "owner/other", 3, torch.bfloat16)
    assert study.tuning == FineTuning(epochs=4, lr=1e-3, seed=3, system="Be brief.")
    assert study.how == Evaluation(5, 7, system="Be brief.")
    assert study.grid == Grid((1.0,), (2.0,), (3.0,), width=5)
    assert study.load is models.load
    assert not study.replay
    assert json.dumps(asdict(study.grid))


def test_a_tiny_base_learns_the_language_from_others(data, monkeypatch, tmp_path):
    monkeypatch.setenv("UNLEARNLIB_CACHE", str(tmp_path))
    monkeypatch.setattr(tiny, "SIZES", {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4})
    monkeypatch.setattr(tofu_study, "LESSONS", 2)
    taught = []

    def train(model, examples, **options):
        taught.extend(examples)
        return training.train(model, examples, **options)

    monkeypatch.setattr(tiny, "train", train)
    study = make_study(data, "tiny-gpt2")
    assert study.replay
    model, tokenizer = study.load("tiny-gpt2")
    assert model.config.model_type == "gpt2"
    assert study.load("tiny-gpt2")[1].get_vocab() == tokenizer.get_vocab()
    asked = {example.name for example in taught}
    assert asked >= {row["question"] for row in data.real_authors + data.world_facts}
    assert not asked & {row["question"] for row in data.full + data.holdout}
    assert len(asked) > 200


# ---------------------------------------------------------------------------------------------------------------------------
# In bfloat16, and as the common implementation does


def test_bfloat16_reaches_everything_that_trains_and_scores(data):
    made = make_study(data, "some-model", autocast=True)
    assert made.tuning.autocast and made.how.autocast
    plain = make_study(data, "some-model")
    assert not plain.tuning.autocast and not plain.how.autocast


def test_bfloat16_changes_scores_by_its_rounding(study, data):
    model, tokenizer = study.full
    exact, rounded = (evaluate(model, tokenizer, data, replace(study.how, autocast=autocast)) for autocast in (False, True))
    for measure in ("prob", "min_k"):
        assert rounded["forget"][measure] == pytest.approx(exact["forget"][measure], rel=0.1)
        assert rounded["forget"][measure] != exact["forget"][measure]


def test_the_rounding_is_measured_before_unlearning(study):
    assert 0 < study.rounding() < 0.1


def test_gradient_methods_train_in_the_type_of_fine_tuning(study):
    settings = replace(study, tuning=replace(study.tuning, autocast=True)).candidates("npo")
    assert all(each.autocast for each in settings)
    assert not any(each.autocast for each in study.candidates("npo"))


def test_the_common_scores_stand_beside_ours(study, monkeypatch):
    asked = []

    def spy(model, tokenizer, data, how, **options):
        asked.append(how.compat)
        return evaluate(model, tokenizer, data, replace(how, compat=False), **options)

    ours = [study.scores(which)["scores"] for which in ("full", "retain")]
    monkeypatch.setattr(tofu_study, "evaluate", spy)
    rows = deviation(study)
    assert asked == [True]
    assert [row["measure"] for row in rows] == list(DEVIATING)
    # The spy scored as ours: the two columns are then the same, and those of the table.
    expected = table_row(ours[0], *ours)
    assert all(row["ours"] == pytest.approx(row["compat"]) == expected[row["measure"]] for row in rows)
