"""The study of single facts: candidates, the rehearsal, what is remembered, edits that leave the model as it was, and the tables."""

from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from unlearnlib import models, tiny
from unlearnlib.baselines.editors import EDITORS, NOT_ESTABLISHED, SETTINGS, key_moments
from unlearnlib.benchmarks import zsre, zsre_study
from unlearnlib.benchmarks.zsre_scores import EDITING, PROTOCOLS, Evaluation, evaluate, first, table_row
from unlearnlib.benchmarks.zsre_study import BEFORE, GROM, METHODS, Grid, Study, lessons, make_study
from unlearnlib.benchmarks.zsre_tables import NAMES, NOT_EDITABLE, Tables, blank_rows, claims, describe, make_tables
from unlearnlib.examples import encode
from unlearnlib.grom import HEAD
from unlearnlib.grom.choose import mildest
from unlearnlib.training import train

GRID = Grid(
    multiples=(0.25, 1.0, 2.0, 4.0), depths=(0.5, 0.0), relaxations=(1.0, 0.01), clamps=(1.0, 2.0), width=2, editor_width=2, contexts=0
)


@pytest.fixture(scope="module")
def split():
    return zsre.split(zsre.load("bundled", rows=24), 8, retain=0, rehearsal=4, unrelated=0)


@pytest.fixture(scope="module")
def taught(split, make_tokenizer):
    """A small model that knows the facts, and its tokenizer."""
    items = lessons(split)
    tokenizer = make_tokenizer([f"{item['question']} {item['answer']}" for item in items])
    model = models.build(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, layers=4, heads=4)
    train(model, encode(tokenizer, items, template="plain"), steps=80, lr=1e-2, batch_size=32)
    return model, tokenizer


@pytest.fixture(scope="module")
def study(split, taught, tmp_path_factory):
    """A study whose steps are kept throughout the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNLEARNLIB_CACHE", str(tmp_path_factory.mktemp("study")))
        yield Study(split, lambda: ("taught", *taught), GRID, Evaluation(max_new_tokens=2))


def bits(model):
    return [weight.detach().clone() for weight in model.state_dict().values()]


def same_bits(model, before):
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before, strict=True))


# ---------------------------------------------------------------------------------------------------------------------------
# Candidates


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Let editors look for values for three steps only, which none of these tests minds."""
    if "study" in request.fixturenames:
        monkeypatch.setattr(zsre_study, "SETTINGS", {name: partial(settings, v_steps=3) for name, settings in SETTINGS.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multiples": (1.0, 2.0, 4.0)}, "GROM has 3 candidates, of multiples, and an editor 2 × 2"),
        ({"depths": (0.5,)}, "GROM has 4 candidates, of multiples, and an editor 1 × 2"),
        ({"multiples": (), "depths": ()}, "at least one"),
        ({"clamps": (1.0,)}, "ROME has 1 clamps in place of 2 relaxations"),
        ({"depths": (0.5, 1.1)}, "0 to 1"),
    ],
)
def test_every_method_has_as_many_candidates(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(GRID, **changes)


def test_candidates_are_published_values_and_multiples_of_them(study):
    assert [(one.fit.layers, one.fit.strength) for one in study.candidates("grom_head")] == [((HEAD,), 20.0 * x) for x in GRID.multiples]
    assert [one.fit.strength for one in study.candidates("grom")] == [65.0 * x for x in GRID.multiples]
    assert study.candidates("grom")[0].fit.layers == study.band in {(0, 1), (1, 2), (2, 3)}
    assert all(one.fit.retain_weight == 30 for method in GROM for one in study.candidates(method))
    assert [(one.layers, one.clamp) for one in study.candidates("rome")] == [((2,), 1.0), ((0,), 1.0), ((2,), 2.0), ((0,), 2.0)]
    places = [(1, 2), (0,)] * 2
    assert [one.layers for one in study.candidates("memit")] == places
    assert [one.mom2_weight for one in study.candidates("memit")] == pytest.approx([15000, 15000, 150, 150])
    assert [one.l2 for one in study.candidates("alpha_edit")] == pytest.approx([10, 10, 0.1, 0.1])
    assert [one.general_weight for one in study.candidates("zero_unlearn")] == pytest.approx([15000, 15000, 150, 150])
    for editor in EDITORS:
        assert len(study.candidates(editor)) == len(study.candidates("grom"))
        published = SETTINGS[editor]((0,))
        varied = {"layers", "v_lr", "template", "prefix_lengths", "v_steps", "clamp", "mom2_weight", "l2", "general_weight"}
        for one in study.candidates(editor):
            assert (one.template, one.prefix_lengths) == ("plain", ())
            assert {k: v for k, v in asdict(one).items() if k not in varied} == {
                k: v for k, v in asdict(published).items() if k not in varied
            }
    for contexts, lengths in ((2, (10, 10)), (-1, SETTINGS["rome"]((0,)).prefix_lengths)):
        assert replace(study, grid=replace(GRID, contexts=contexts)).candidates("rome")[0].prefix_lengths == lengths
    with pytest.raises(ValueError, match="unknown method 'npo'"):
        study.candidates("npo")


@pytest.mark.parametrize(
    ("depth", "width", "layers"), [(0.0, 3, (0,)), (0.3, 1, (1,)), (0.5, 2, (1, 2)), (1.0, 2, (1, 2)), (0.99, 9, (0, 1, 2))]
)
def test_editors_never_write_into_the_last_layer(study, depth, width, layers):
    assert study._window(depth, width) == layers


@pytest.mark.parametrize("method", METHODS)
def test_settings_in_words(study, method):
    words = [describe(settings) for settings in study.candidates(method)]
    assert len(set(words)) == 4
    expected = {
        "grom_head": "LM head, β 5",
        "rome": "layer 2, clamp 1",
        "memit": "layers 1–2, λ 15000",
        "alpha_edit": "layers 1–2, L2 10",
        "zero_unlearn": "layers 1–2, a 15000",
    }
    assert words[0] == expected.get(method, words[0])


# ---------------------------------------------------------------------------------------------------------------------------
# Editing and choosing


@pytest.mark.parametrize("method", METHODS)
def test_an_edit_does_something_and_is_taken_out_to_the_bit(study, split, method):
    before = bits(study.model)
    edit = study.run(method, split.forget[:3], split.anchors, study.candidates(method)[1])
    assert same_bits(study.model, before)
    with edit.applied(study.model):
        assert not same_bits(study.model, before)
    assert same_bits(study.model, before)


def test_what_editors_are_told(study, split, monkeypatch):
    seen = {}

    def editor(model, tokenizer, facts, settings, *, moments, progress):
        seen.update(facts=facts, moments=moments)

    monkeypatch.setitem(zsre_study.EDITORS, "memit", editor)
    settings = study.candidates("memit")[0]
    study.run("memit", split.forget[:2], split.retain, settings)
    # To forget: the neutral object. The true answer is there for the editor that projects it out.
    assert [(fact["target"], fact["answer"]) for fact in seen["facts"]] == [(None, fact["answer"]) for fact in split.forget[:2]]
    texts = [f"{fact['prompt']} {fact['answer']}" for fact in split.retain]
    expected = key_moments(study.model, study.tokenizer, texts, settings.layers)
    assert seen["moments"].keys() == expected.keys()
    assert all(torch.allclose(seen["moments"][layer], expected[layer], rtol=1e-6) for layer in expected)
    study.run("memit", split.forget[:2], split.retain, settings, EDITING)
    assert [fact["target"] for fact in seen["facts"]] == [fact["target"] for fact in split.forget[:2]]


def test_moments_are_computed_once_for_each_text(study, split, monkeypatch):
    first, seconds = study.moments(split.retain, (0, 1))
    monkeypatch.setattr(zsre_study, "key_moments", lambda *_, **__: pytest.fail("computed again"))
    again, same_seconds = study.moments(split.retain, (0, 1))
    assert all(again[layer] is first[layer] for layer in (0, 1))
    assert seconds == same_seconds > 0
    with pytest.raises(BaseException, match="computed again"):
        study.moments(split.retain[:1], (0, 1))


def test_grom_teaches_nothing(study, split):
    with pytest.raises(ValueError, match="no place in the editing harness"):
        study.run("grom", split.forget[:2], split.retain, study.candidates("grom")[0], EDITING)
    with pytest.raises(ValueError, match="unknown method 'npo'"):
        study.run("npo", split.forget[:2], split.retain, None)


@pytest.mark.parametrize("method", ["grom_head", "memit"])
def test_settings_are_chosen_on_the_rehearsal_alone(study, split, monkeypatch, method):
    seen = []
    prompts = {fact["prompt"]: fact for fact in split.forget + split.retain}
    encode_facts = zsre_study._items
    monkeypatch.setattr(zsre_study, "_items", lambda facts: (seen.extend(fact["prompt"] for fact in facts), encode_facts(facts))[1])
    run = Study.run
    monkeypatch.setattr(Study, "run", lambda self, name, *rest: (seen.extend(f["prompt"] for f in rest[0]), run(self, name, *rest))[1])
    trials = study.choose(method)
    allowed = split.stand_in + split.validation + split.anchors
    assert {fact["prompt"] for fact in split.stand_in + split.validation} <= set(seen) <= {fact["prompt"] for fact in allowed}
    assert not set(seen) & {fact["prompt"] for fact in split.forget}
    assert len(prompts) == len(split.forget) + len(split.retain)
    assert len(trials) == 4
    assert all(0 <= number <= 1 for trial in trials for number in (trial.forgetting, trial.preservation))
    for name in ("run", "_rehearsal"):
        monkeypatch.setattr(Study, name, lambda *_: pytest.fail("computed again"))
    assert study.choose(method) == trials
    with pytest.raises(BaseException, match="computed again"):
        replace(study, load=lambda: ("another model", study.model, study.tokenizer)).choose(method)


def test_a_stronger_edit_forgets_more_and_is_what_run_makes(study, split):
    trials = study.choose("grom_head")
    assert [trial.forgetting for trial in trials] == sorted(trial.forgetting for trial in trials)
    examples = encode(study.tokenizer, zsre_study._items(split.stand_in), template="plain")
    before = zsre_study.answer_probability(study.model, examples).mean()
    with study.run("grom_head", split.stand_in, split.anchors, trials[2].settings).applied(study.model):
        after = zsre_study.answer_probability(study.model, examples).mean()
    assert trials[2].forgetting == pytest.approx(1 - (after / before).item(), abs=1e-4)


def test_reach(study, monkeypatch):
    rows = study.reach(30)
    assert [row["layer"] for row in rows] == [-1, 0, 1, 2]
    assert len({row["before"] for row in rows}) == 1
    assert all(0 <= row["before"] <= 1 and 0 <= row["after"] <= 1 for row in rows)
    assert rows[0]["after"] > rows[0]["before"], "the subject's embedding is read, whatever the layers do"
    monkeypatch.setattr(zsre_study, "value_accuracy", lambda *_, **__: pytest.fail("computed again"))
    assert study.reach(30) == rows


# ---------------------------------------------------------------------------------------------------------------------------
# Measuring


def test_scores_are_those_of_the_edited_model_and_remembered(study, split, monkeypatch):
    settings = study.candidates("grom_head")[1]
    found = study.scores("grom_head", 3, settings, speak=True)
    edit = study.run("grom_head", split.forget[:3], split.retain, settings)
    with edit.applied(study.model):
        assert found["scores"] == evaluate(study.model, study.tokenizer, split.forget[:3], split.unrelated, how=study.how)
    assert found["seconds"] > 0
    assert found["moments_seconds"] == 0
    assert "own" in found["scores"] and "own" not in study.scores("grom_head", 3, settings)["scores"]
    monkeypatch.setattr(Study, "run", lambda *_: pytest.fail("computed again"))
    assert study.scores("grom_head", 3, settings, speak=True) == found
    for change in ({"count": 2}, {"settings": study.candidates("grom_head")[0]}):
        with pytest.raises(BaseException, match="computed again"):
            study.scores(**{"method": "grom_head", "count": 3, "settings": settings} | change)


def test_the_model_before(study, split, monkeypatch):
    found = study.scores(BEFORE, 8)
    assert found["seconds"] is found["moments_seconds"] is None
    row = table_row(found["scores"])
    assert row["efficacy"] > 0.8
    assert row["specificity"] > 0.5
    few = evaluate(study.model, study.tokenizer, split.forget[:3], split.unrelated, how=Evaluation(max_new_tokens=0))
    monkeypatch.setattr(zsre_study, "evaluate", lambda *_: pytest.fail("asked again"))
    sliced = study.scores(BEFORE, 3)["scores"]
    assert {measure: kinds["token"] for measure, kinds in sliced.items()} == {measure: kinds["token"] for measure, kinds in few.items()}
    for count in (0, 9):
        with pytest.raises(ValueError, match=f"a request of {count} facts is wanted; the split has 8"):
            study.scores(BEFORE, count)


def test_tables(study, monkeypatch):
    methods = [BEFORE, "grom_head", "rome"]
    options = {"facts": 4, "counts": (2, 4, 8), "editor_counts": (4,), "editing_facts": 2, "reach_steps": 2}
    tables = make_tables(study, methods, **options)
    assert [row["method"] for row in tables.rows] == methods
    assert {row["facts"] for row in tables.rows} == {4}
    assert all("said" in row for row in tables.rows) and not any("said" in row for row in tables.dilution)
    sizes = [(row["method"], row["facts"]) for row in tables.dilution]
    assert sizes == [(method, count) for method in methods[:2] for count in (2, 4, 8)] + [("rome", 4)]
    assert [(row["method"], row["facts"], row["harness"]) for row in tables.editing] == [(BEFORE, 2, EDITING), ("rome", 2, EDITING)]
    assert all(row["protocol"] == PROTOCOLS[row["harness"]] for row in tables.dilution + tables.editing)
    assert [(choice["method"], choice["candidate"]) for choice in tables.choices] == [(m, i) for m in methods[1:] for i in range(4)]
    for method in methods[1:]:
        trials = study.choose(method)
        chosen = [choice["chosen"] for choice in tables.choices if choice["method"] == method]
        assert chosen == [trial is mildest(trials) for trial in trials]
        row = next(row for row in tables.rows if row["method"] == method)
        expected = table_row(study.scores(method, 4, mildest(trials).settings, speak=True)["scores"])
        assert {name: row[name] for name in expected} == expected
    assert tables.reach == study.reach(2)
    bare = make_tables(study, methods, facts=4, counts=(4,), editor_counts=(4,))
    assert not bare.editing
    assert not bare.reach
    assert set(NAMES) >= {row["method"] for row in tables.rows}


def record(study, tables, name="one"):
    return {"notebook": "grom_zsre", "run": name, "values": {"split": study.split.digest, **asdict(tables)}}


def test_tables_from_records(study, monkeypatch):
    options = {"facts": 4, "counts": (2, 4), "editor_counts": (4,), "editing_facts": 2, "reach_steps": 2}
    parts = [[BEFORE, "grom_head"], ["rome"]]
    records = [record(study, make_tables(study, methods, **options)) for methods in parts]
    whole = make_tables(study, [*parts[0], *parts[1]], **options)

    def unneeded():
        pytest.fail("loaded the model")

    elsewhere = Study(study.split, unneeded, study.grid, study.how)
    assert make_tables(elsewhere, ["rome", BEFORE, "grom_head"], **options, gathered=records).rows == [whole.rows[i] for i in (2, 0, 1)]
    same = make_tables(elsewhere, [*parts[0], *parts[1]], **options, gathered=records)
    assert same == whole
    # Choices of a record are used for what it doesn't have.
    for choice in records[1]["values"]["choices"]:
        choice["chosen"] = choice["candidate"] == 3
    more = make_tables(study, ["rome"], **options | {"editor_counts": (2, 4)}, gathered=records[1:])
    expected = table_row(study.scores("rome", 2, study.candidates("rome")[3])["scores"])
    assert {name: more.dilution[0][name] for name in expected} == expected
    records[1]["values"]["split"] = "other"
    with pytest.raises(ValueError, match=r"the record grom_zsre/one is of other facts \(split other, here [0-9a-f]{16}\)"):
        make_tables(elsewhere, ["rome"], **options, gathered=records)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["npo"]}, "unknown method 'npo': use full, grom_head, grom, rome"),
        ({"counts": (2, 8)}, "counts must contain facts = 4"),
        ({"editor_counts": (2,)}, "editor_counts must contain facts = 4"),
        ({"counts": (4, 9)}, "counts must lie within 1 … 8"),
        ({"editor_counts": (0, 4)}, "editor_counts must lie within 1 … 8"),
        ({"editing_facts": 9}, "editing_facts must lie within 0 … 8"),
        ({"reach_steps": -1}, "reach_steps must be at least 0"),
    ],
)
def test_errors_come_before_any_work(study, monkeypatch, options, message):
    monkeypatch.setattr(Study, "choose", lambda *_: pytest.fail("began"))
    options = {"methods": ["grom"], "facts": 4, "counts": (4,), "editor_counts": (4,)} | options
    with pytest.raises(ValueError, match=message):
        make_tables(study, **options)


def row(method, efficacy, specificity, seconds, facts=10, half=0.05):
    found = {"method": method, "facts": facts, "seconds": seconds, "final": (specificity + 1 - efficacy) / 2}
    for name, value in (("efficacy", efficacy), ("generalization", efficacy), ("specificity", specificity)):
        found |= {name: value, f"{name}_exact": value - 0.1, f"{name}_low": value - half, f"{name}_high": value + half}
    return found


def by_claim(tables):
    return {claim["claim"].split(":")[0]: claim for claim in claims(tables)}


def test_claims():
    rows = [row("full", 0.9, 0.9, None), row("grom", 0.1, 0.8, 1.0), row("rome", 0.3, 0.7, 9.0), row("memit", 0.5, 0.9, 5.0)]
    dilution = [*rows, row("grom", 0.6, 0.8, 2.0, facts=100)]
    found = by_claim(Tables(rows, dilution))
    assert found["highest Final of all methods"] | {"grom": 0.85, "other": 0.7, "verdict": "holds"} == found["highest Final of all methods"]
    assert (found["Pareto-best"]["against"], found["Pareto-best"]["verdict"]) == (None, "holds")
    assert (found["one solve dilutes"]["grom"], found["one solve dilutes"]["verdict"]) == (0.6, "holds")
    assert not any("fast" in claim for claim in found), "seconds of one run decide nothing"

    # Of two sizes, both efficacies are uncertain.
    for many, verdict in ((0.16, "can't be told"), (0.18, "holds"), (0.02, "doesn't hold")):
        few = [row("grom", 0.1, 0.8, 1.0), row("grom", many, 0.8, 2.0, facts=100)]
        found = by_claim(Tables(few[:1], few))
        assert found["one solve dilutes"]["verdict"] == verdict

    # Another forgets as well and keeps more; the difference of Final is within the noise.
    rows[2] = row("rome", 0.1, 0.82, 0.5)
    found = by_claim(Tables(rows, rows))
    assert found["highest Final of all methods"]["verdict"] == "can't be told"
    assert (found["Pareto-best"]["against"], found["Pareto-best"]["verdict"]) == ("rome", "doesn't hold")
    assert "one solve dilutes" not in found

    assert claims(Tables(rows[2:], rows[2:])) == []
    assert [claim["claim"] for claim in claims(Tables([rows[1]], [rows[1]]))] == []


@pytest.mark.parametrize(("taught", "verdict"), [(0.5, NOT_EDITABLE), (0.6, "holds")])
def test_nothing_holds_against_editors_that_cannot_edit(taught, verdict):
    rows = [row("grom", 0.1, 0.8, 1.0), row("rome", 0.3, 0.7, 9.0)]
    editing = [row("full", 0.9, 0.9, None), row("rome", taught, 0.9, 1.0), row("memit", 0.2, 0.9, 1.0)]
    found = by_claim(Tables(rows, rows, editing))
    assert [found[claim]["verdict"] for claim in ("highest Final of all methods", "Pareto-best")] == [verdict] * 2
    # One that is better all the same is better.
    rows[1] = row("rome", 0.0, 0.9, 9.0)
    found = by_claim(Tables(rows, rows, editing))
    assert [found[claim]["verdict"] for claim in ("highest Final of all methods", "Pareto-best")] == ["doesn't hold"] * 2


def test_blank_rows_have_their_reasons():
    assert [row["reason"] for row in blank_rows()] == list(NOT_ESTABLISHED.values())
    assert blank_rows()[0]["method"] == "ZeroUnlearn"


# ---------------------------------------------------------------------------------------------------------------------------
# Models


def test_lessons_have_the_phrasings_and_the_unrelated_questions_once(split):
    items = lessons(split)
    questions = [item["question"] for item in items]
    assert len(set(questions)) == len(questions)
    twice = [*split.forget, *split.stand_in, *split.validation]
    shown = [prompt for fact in twice for prompt in (fact["prompt"], fact["paraphrases"][0])]
    kept = [fact["prompt"] for fact in split.retain]
    assert set(questions) == {*shown, *kept, *(question["prompt"] for question in split.unrelated)}
    answers = {fact["prompt"]: fact["answer"] for fact in split.forget}
    assert all(answers.get(item["question"], item["answer"]) == item["answer"] for item in items)


def test_a_study_of_a_tiny_model(split, monkeypatch, tmp_path):
    monkeypatch.setenv("UNLEARNLIB_CACHE", str(tmp_path))
    monkeypatch.setattr(tiny, "SIZES", {"hidden_size": 16, "intermediate_size": 16, "layers": 2, "heads": 2})
    monkeypatch.setattr(zsre_study, "scholar", partial(tiny.scholar, steps=1))
    of_facts = make_study(split, "tiny-llama", dataset="zsre", eval_batch_size=7, max_new_tokens=3, grid={"multiples": [1.0] * 4})
    assert of_facts.grid.multiples == (1.0,) * 4
    assert of_facts.how == Evaluation(7, 3)
    assert of_facts._recipe()[0].startswith("facts-llama-0-")
    monkeypatch.setattr(zsre_study, "reciter", lambda family, seed: (of_facts.model, f"tokenizer of {family} {seed}"))
    of_bundled = make_study(split, "tiny-qwen2", seed=3, dtype="float64")
    assert (of_bundled._recipe()[0], of_bundled.tokenizer) == ("reciter-qwen2-3", "tokenizer of qwen2 3")
    assert next(of_bundled.model.parameters()).dtype == torch.float64


def test_a_study_of_a_base_model(split, taught, monkeypatch, tmp_path):
    loaded, tuned = [], []
    monkeypatch.setattr(models, "load", lambda name, **_: (loaded.append(name), taught)[1])
    monkeypatch.setattr(zsre_study, "finetuned", lambda base, items, settings, **_: (tuned.append((base, items, settings)), tmp_path)[1])
    study = make_study(split, "some/model", tuning={"epochs": 0, "lr": 1e-4})
    assert not loaded, "before it is needed"
    assert study._recipe()[0] == "some/model"
    assert not tuned
    study = make_study(split, "some/model", seed=2, tuning={"epochs": 3, "lr": 1e-4}, autocast=True)
    assert study._recipe()[0] == tmp_path.name
    ((base, items, settings),) = tuned
    assert (base, items, settings.epochs, settings.seed, settings.template) == ("some/model", lessons(split), 3, 2, "plain")
    assert settings.autocast and study.candidates("rome")[0].autocast
    assert {study.candidates(editor)[0].v_lr for editor in ("rome", "memit", "alpha_edit")} == {0.5}
    assert loaded == ["some/model", str(tmp_path)]
    assert set(GROM) <= set(METHODS)


def test_first_scores(study):
    found = study.scores(BEFORE, 8)["scores"]
    assert first(found, 2)["efficacy"]["token"] == found["efficacy"]["token"][:2]
    assert first(found, 2)["specificity"] == found["specificity"]
