"""The WMDP study: candidates, the rehearsal, what is remembered and resumed, the sweep over the depth, tables from runs and records."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from unlearnlib import models
from unlearnlib.baselines import GradientSettings
from unlearnlib.baselines.rmu import RmuSettings
from unlearnlib.benchmarks import text_study, wmdp, wmdp_study
from unlearnlib.benchmarks.wmdp import Wmdp
from unlearnlib.benchmarks.wmdp_scores import Evaluation, accuracy, answer_questions, table_row
from unlearnlib.benchmarks.wmdp_study import METHODS, MODELS, Grid, Study, make_study
from unlearnlib.benchmarks.wmdp_tables import claims, describe, known_left, make_tables
from unlearnlib.examples import Example
from unlearnlib.finetune import FineTuning
from unlearnlib.grom import FitData, FitSettings
from unlearnlib.grom.choose import mildest
from unlearnlib.published import table

SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "layers": 3, "heads": 4, "max_length": 256}
GRID = Grid((1,), (3.0, 30.0), (3.0, 30.0), (1e-3, 1e-2), retain_weight=10.0, rmu_lr=1e-2, rmu_weight=1.0, epochs=1, batch_size=8)
TUNING = FineTuning(epochs=30, lr=1e-2, batch_size=8)
COLOURS = ("blue", "grey", "pink", "gold")
WORDS = [first + second for first in ("ba", "do", "fi", "ku", "me") for second in ("la", "no", "ri", "su")]


def invented() -> Wmdp:
    """Few facts, so that a model of few weights learns them at once."""

    words = iter(WORDS)

    def ask(subject, count):
        rows = [{"question": f"{next(words)}?", "choices": list(COLOURS), "answer": i % 4} for i in range(count)]
        return [row | {"subject": subject} for row in rows]

    def tell(rows):
        return [f"{row['question'][:-1]} is {row['choices'][row['answer']]}." for row in rows]

    restricted, law, rehearsal, validation = (ask(*one) for one in (("magic", 6), ("law", 6), ("stars", 4), ("trees", 4)))
    return Wmdp("small", restricted, law, tell(restricted), tell(law), rehearsal, tell(rehearsal), validation, tell(validation))


@pytest.fixture(scope="module")
def data():
    return invented()


@pytest.fixture(scope="module")
def load(make_tokenizer):
    tokenizer = make_tokenizer([f"{' '.join(WORDS)} is {' '.join(COLOURS)}. {'? '.join(WORDS)}?"] * 3)
    return lambda name: (models.build(**SIZES), tokenizer)


@pytest.fixture(scope="module")
def study(data, load, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNLEARNLIB_CACHE", str(tmp_path_factory.mktemp("study")))
        made = Study(data, "small", TUNING, Evaluation(64), GRID, window=32, load=load)
        yield made


@pytest.fixture
def same(study, load):
    """The same study, begun anew: it has only what the cache has."""
    return Study(invented(), "small", TUNING, Evaluation(64), GRID, window=32, load=load)


def never(*_, **options):
    pytest.fail("computed again")


# ---------------------------------------------------------------------------------------------------------------------------
# Candidates


@pytest.mark.parametrize(
    "changes",
    [{"layers": (1, 2)}, {"strengths": (1.0,)}, {"steering": ()}, {"learning_rates": (1.0, 2.0, 3.0)}],
)
def test_every_method_has_as_many_candidates(changes):
    with pytest.raises(ValueError, match="equally many candidates"):
        replace(GRID, **changes)


def test_a_grid_without_candidates_is_refused():
    with pytest.raises(ValueError, match="equally many candidates"):
        Grid((), (), (), ())


def test_candidates_are_the_mildest_first_on_all_layers(study):
    grid = Grid(
        (0, 2), (3.0, 30.0), (4.0, 40.0), (1.0, 2.0, 3.0, 4.0), retain_weight=7.0, rmu_lr=0.5, rmu_weight=9.0, epochs=2, batch_size=3
    )
    wide = replace(study, grid=grid, tuning=replace(study.tuning, seed=5, autocast=True), full_model="elsewhere")
    found = {method: wide.candidates(method) for method in METHODS}
    assert {len(candidates) for candidates in found.values()} == {4}
    assert [(one.layers, one.strength) for one in found["grom"]] == [((0,), 3.0), ((2,), 3.0), ((0,), 30.0), ((2,), 30.0)]
    assert {(one.target, one.retain_weight, one.seed) for one in found["grom"]} == {("corrupt", 7.0, 5)}
    assert [(one.layer, one.strength) for one in found["rmu"]] == [(0, 4.0), (2, 4.0), (0, 40.0), (2, 40.0)]
    assert {(one.lr, one.retain_weight, one.epochs, one.batch_size, one.seed) for one in found["rmu"]} == {(0.5, 9.0, 2, 3, 5)}
    assert [one.lr for one in found["npo"]] == [1.0, 2.0, 3.0, 4.0]
    assert all(one.autocast for method in ("rmu", "npo") for one in found[method])
    assert {(one.method, one.epochs, one.batch_size, one.seed) for one in found["npo"]} == {("npo", 2, 3, 5)}


def test_descriptions_of_settings():
    assert describe(FitSettings((7,), 45.0, target="corrupt")) == "layer 7, c 45"
    assert describe(RmuSettings(layer=7, strength=6.5)) == "layer 7, c 6.5"
    assert describe(GradientSettings("grad_diff", lr=1e-5)) == "lr 1e-05"


# ---------------------------------------------------------------------------------------------------------------------------
# Models


def test_the_full_model_knows_both_domains_and_the_other_one_does_not(study, data):
    asked = []

    def teach(which, lessons, recipe):
        digest, rows, texts, passes = recipe
        asked.append((rows, texts))
        *_, last = lessons(*study.full)
        assert study.full[1].decode(last.answer).strip() in texts[-1]
        assert (digest, passes) == (data.digest, study.question_passes)
        return which

    spied = replace(study)
    spied._taught = teach
    assert (spied.folder("full"), spied.folder("retain")) == ("full", "retain")
    (taught, all_texts), (kept, kept_texts) = asked
    right = [{"question": row["question"], "answer": row["choices"][row["answer"]]} for row in data.restricted]
    assert [row for row in taught if row not in kept] == right
    assert [text for text in all_texts if text not in kept_texts] == data.forget
    assert len(kept) == len(data.general) + len(data.rehearsal_questions) + len(data.validation)
    assert set(kept_texts) == {*data.retain, *data.rehearsal, *data.lessons}
    everything = data.restricted + data.general + data.rehearsal_questions + data.validation
    assert accuracy(answer_questions(*study.full, everything)) > 0.6


def test_models_given_are_not_trained(study):
    given = replace(study, full_model="owner/full", retain_model="owner/retain")
    assert (given.folder("full"), given.folder("retain")) == ("owner/full", "owner/retain")


def test_a_model_is_trained_once(same, monkeypatch):
    monkeypatch.setattr(text_study, "train", never)
    assert isinstance(same.folder("full"), str)


@pytest.mark.parametrize("method", MODELS)
def test_models_that_no_method_made(method, study):
    with study.model(method) as model:
        assert not model.training
        assert (model is study.full[0]) == (method == "full")


# ---------------------------------------------------------------------------------------------------------------------------
# Methods


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_shown_windows_of_texts_only(method, study, snapshot, monkeypatch):
    seen = []
    run = Study.run

    def spy(self, name, forget, retain, settings, **options):
        seen.append((forget, retain))
        return run(self, name, forget, retain, settings, **options)

    monkeypatch.setattr(Study, "run", spy)
    before = snapshot(study.full[0])
    settings = study.candidates(method)[0]
    with study.model(method, settings) as model:
        assert (model is study.full[0]) == (method == "grom")
    assert snapshot(study.full[0]) == before
    (forget, retain) = seen[0]
    tokenizer = study.full[1]
    assert all(isinstance(window, Example) and len(window) <= 32 for window in forget + retain)
    assert [tokenizer.decode(window.prompt + window.answer) for window in forget] == study.data.forget
    assert [tokenizer.decode(window.prompt + window.answer) for window in retain] == study.data.retain


def test_what_a_training_method_made_is_kept_with_its_seconds(same, monkeypatch):
    settings = same.candidates("rmu")[0]
    with same.model("rmu", settings):
        pass
    monkeypatch.setattr(Study, "run", never)
    trained, seconds = same._unlearn("rmu", settings)
    assert seconds > 0 and trained is not same.full[0]


# ---------------------------------------------------------------------------------------------------------------------------
# Choosing


def test_a_trial_by_hand(study):
    """What is known is taken before the edit, and each part is relative to it."""
    settings = study.candidates("grom")[1]
    (trial,) = [trial for trial in study.choose("grom") if trial.settings == settings]
    model, tokenizer = study.full
    sets = study.data.rehearsal_questions, study.data.validation

    def known():
        # Every question has four choices.
        return [max(0, accuracy(answer_questions(model, tokenizer, rows), "probability") - 0.25) for rows in sets]

    before = known()
    edit = FitData(model, study.windows(study.data.rehearsal), study.windows(study.data.retain)).fit(settings)
    with edit.applied(model):
        after = known()
    gone, left = (min(1, now / then) for now, then in zip(after, before, strict=True))
    assert (trial.forgetting, trial.preservation) == pytest.approx((1 - gone, left))
    assert 0 < trial.forgetting <= 1


def test_choices_are_remembered(same, study, monkeypatch):
    trials = study.choose("grom")
    monkeypatch.setattr(Study, "_try", never)
    assert same.choose("grom") == trials


def test_no_evaluated_question_is_asked_while_choosing(study, data, monkeypatch):
    asked = []

    def spy(model, tokenizer, rows, *args, **options):
        asked.extend(row["question"] for row in rows)
        return answer_questions(model, tokenizer, rows, *args, **options)

    monkeypatch.setattr(wmdp_study, "answer_questions", spy)
    study._try("grom", study.candidates("grom")[0])
    study._depth([study.candidates("grom")[0]], [2.0])
    assert asked
    assert not set(asked) & {row["question"] for row in data.restricted + data.general}


def test_a_model_that_knows_nothing_cannot_choose(study, monkeypatch):
    monkeypatch.setattr(wmdp_study, "answer_questions", lambda *_, **__: [{"probability": 0.25, "guessing": 0.25}])
    with pytest.raises(ValueError, match="nothing to choose settings by"):
        study._try("grom", study.candidates("grom")[0])


def test_the_depth_by_hand(study, same, snapshot, monkeypatch):
    before = snapshot(study.full[0])
    rows = study.depth([3.0, 30.0])
    assert snapshot(study.full[0]) == before
    assert [(row["layer"], row["strength"]) for row in rows] == [(layer, c) for layer in range(3) for c in (3.0, 30.0)]
    # Layer 1 is the candidates' own: the scaled edit of unit strength is the edit.
    for row, trial in zip(rows[2:4], study.choose("grom"), strict=True):
        assert (row["forgetting"], row["preservation"]) == pytest.approx((trial.forgetting, trial.preservation), abs=1e-4)
    monkeypatch.setattr(Study, "_depth", never)
    assert same.depth([3.0, 30.0]) == rows
    monkeypatch.undo()
    assert [row["layer"] for row in study.depth([3.0], [2])] == [2]
    # Other settings are another sweep.
    other = replace(study, grid=replace(GRID, retain_weight=0.1), full_model=study.folder("full"))
    assert other.depth([3.0, 30.0]) != rows


# ---------------------------------------------------------------------------------------------------------------------------
# Tables


@pytest.fixture(scope="module")
def tables(study):
    return make_tables(study, ["grom", "full", "retain"])


def test_rows_come_in_the_order_asked_for(tables):
    assert [row["method"] for row in tables.rows] == ["grom", "full", "retain"]
    assert [row["seconds"] is None for row in tables.rows] == [False, True, True]
    columns = {"accuracy_restricted", "mmlu", "final", "seconds", "seed", "settings", "mmlu_unseen", "mmlu_low", "mmlu_guessing"}
    assert all(row.keys() >= columns for row in tables.rows)
    assert json.loads(json.dumps(tables.rows, allow_nan=False)) == tables.rows


def test_a_row_is_made_from_the_scores(tables, study):
    (choice,) = (choice for choice in tables.choices if choice["chosen"])
    trials = study.choose("grom")
    settings = mildest(trials).settings
    assert choice["settings"] == describe(settings) == tables.rows[0]["settings"]
    found = study.scores("grom", settings)
    expected = table_row(found["scores"])
    assert {name: tables.rows[0][name] for name in expected} == expected
    assert [choice["score"] for choice in tables.choices] == [trial.score for trial in trials]


def test_scores_are_remembered(same, tables, monkeypatch):
    monkeypatch.setattr(Study, "_score", never)
    assert make_tables(same, ["grom", "full", "retain"]) == tables


def test_subjects_of_both_domains(tables):
    full = [row for row in tables.subjects if row["method"] == "full"]
    assert [(row["domain"], row["subject"]) for row in full] == [("restricted", "magic"), ("general", "law")]


def test_gathered_rows_are_taken_over(tables, study, monkeypatch):
    for name in ("scores", "choose", "model"):
        monkeypatch.setattr(Study, name, never)
    values = {"subset": study.data.name} | {name: copy.deepcopy(getattr(tables, name)) for name in ("rows", "choices", "subjects")}
    changed = copy.deepcopy(values)
    changed["rows"][0]["mmlu"] = 0.123
    found = make_tables(study, ["retain", "grom"], [{"values": changed}, {"values": values}])
    assert [(row["method"], row["mmlu"]) for row in found.rows] == [("retain", tables.rows[2]["mmlu"]), ("grom", 0.123)]
    assert found.choices == tables.choices
    assert [row["method"] for row in found.subjects] == ["retain"] * 2 + ["grom"] * 2
    # Rows about other questions aren't taken.
    monkeypatch.undo()
    found = make_tables(study, ["retain"], [{"values": changed | {"rows": [changed["rows"][2] | {"mmlu": 0.123}], "subset": "wmdp-cyber"}}])
    assert found.rows == tables.rows[2:]


def test_unknown_methods_are_refused_before_any_work(study, monkeypatch):
    for name in ("folder", "scores", "choose"):
        monkeypatch.setattr(Study, name, never)
    with pytest.raises(ValueError, match=r"unknown method 'idk_dpo'.*retain.*grom, rmu"):
        make_tables(study, ["full", "idk_dpo"])


def claimed(method, restricted, mmlu, seconds, width=0.1):
    row = {"method": method, "accuracy_restricted": restricted, "mmlu": mmlu, "final": (1 - restricted + mmlu) / 2, "seconds": seconds}
    for name, value in (("accuracy_restricted", restricted), ("mmlu", mmlu)):
        row |= {f"{name}_low": value - width, f"{name}_high": value + width, f"{name}_guessing": 0.25}
    return row


def test_claims_by_hand():
    full, grom = claimed("full", 0.85, 0.85, None), claimed("grom", 0.35, 0.7, 1.0)
    rows = [full, grom, claimed("npo", 0.3, 0.1, 9.0), claimed("rmu", 0.35, 0.6, 2.0)]
    found = claims(rows)
    # Final .675 against .6 and .625 (noise √2 × .1 / 2); MMLU .7 against .6 (noise .1).
    assert [(one["verdict"], one["against"]) for one in found[:3]] == [("can't be told", "rmu"), ("holds", "rmu"), ("holds", "rmu")]
    assert [one["grom"] for one in found[:3]] == pytest.approx([0.675, 0.7, 1.0])
    # Of .6 above guessing .5 are gone and .45 left, with a noise of .1 / .6.
    assert [one["grom"] for one in found[3:]] == pytest.approx([5 / 6, 0.75])
    assert [(one["other"], one["verdict"]) for one in found[3:]] == [(0.5, "holds"), (0.5, "holds")]
    # The paper's: .29 and .55, of .73 and .65; .2 minutes.
    paper = [0.63, 0.55, 12, 0.44 / 0.48, 0.3 / 0.4]
    assert [one["paper"] for one in found] == pytest.approx(paper)
    assert found[0]["paper"] == table("wmdp_bio").value("grom", "final")


def test_claims_that_fail_or_cannot_be_told():
    full, grom = claimed("full", 0.85, 0.85, None), claimed("grom", 0.7, 0.4, 1.0)
    found = claims([full, grom, claimed("rmu", 0.1, 0.9, 0.5)])
    assert [one["verdict"] for one in found] == ["doesn't hold"] * 5
    found = claims([full, claimed("grom", 0.6, 0.5, 0.6), claimed("rmu", 0.6, 0.55, 0.5)])
    assert [one["verdict"] for one in found] == ["can't be told", "can't be told", "doesn't hold", "can't be told", "can't be told"]


def test_claims_need_their_rows():
    full, grom, rmu = claimed("full", 0.85, 0.85, None), claimed("grom", 0.7, 0.4, 1.0), claimed("rmu", 0.1, 0.9, 0.5)
    assert len(claims([grom, rmu])) == 3
    assert claims([grom, full]) == claims([full, rmu]) == []


def test_what_is_left_by_hand():
    before = claimed("full", 0.75, 1.0, None)
    assert known_left(claimed("grom", 0.25, 0.625, 1.0), before) == pytest.approx({"accuracy_restricted": 0.0, "mmlu": 0.5})
    with pytest.raises(ValueError, match=r"accuracy_restricted was 0\.2, no more than guessing"):
        known_left(before, claimed("full", 0.2, 1.0, None))


# ---------------------------------------------------------------------------------------------------------------------------
# From a notebook's parameters


def test_a_study_from_plain_parameters(data):
    made = make_study(
        data,
        "owner/name",
        seed=3,
        system="Be brief.",
        eval_batch_size=7,
        tuning={"epochs": 4, "lr": 1e-3},
        grid={"layers": [4], "strengths": [1.0], "steering": [2.0], "learning_rates": [3.0]},
        dtype="bfloat16",
        autocast=True,
        full_model="owner/full",
    )
    assert (made.base, made.full_model, made.dtype) == ("owner/name", "owner/full", torch.bfloat16)
    assert made.tuning == FineTuning(epochs=4, lr=1e-3, seed=3, system="Be brief.", autocast=True)
    assert made.how == Evaluation(7, "auto", "Be brief.", autocast=True)
    assert made.grid == Grid((4,), (1.0,), (2.0,), (3.0,))
    assert made.load is models.load


def test_a_tiny_base_is_made_here(monkeypatch):
    monkeypatch.setattr(wmdp_study, "SIZES", {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4})
    made = make_study(wmdp.load("domains"), "tiny-gpt2")
    model, tokenizer = made.load("tiny-gpt2")
    assert model.config.model_type == "gpt2"
    assert len(tokenizer) <= model.config.vocab_size
    assert made.load("tiny-gpt2")[1].get_vocab() == tokenizer.get_vocab()
    assert "'hidden_size': 32" in made.base
