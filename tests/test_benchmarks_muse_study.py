"""The MUSE study: the stand-in request, what each method is shown, what is remembered and resumed, tables from runs and records."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib import models, tiny
from unlearnlib.benchmarks import muse, muse_study
from unlearnlib.benchmarks.muse_scores import Evaluation, asked, evaluate, membership, table_row
from unlearnlib.benchmarks.muse_study import TEXT_METHODS, Study, lessons, make_study, rehearse
from unlearnlib.benchmarks.muse_tables import Tables, claims, make_tables
from unlearnlib.benchmarks.tofu_study import Grid
from unlearnlib.corpora import windows
from unlearnlib.finetune import FineTuning
from unlearnlib.grom import HEAD
from unlearnlib.grom.choose import mildest
from unlearnlib.methods import METHODS
from unlearnlib.metrics import answer_probability

# Five short documents leave few tokens that the others lack.
pytestmark = pytest.mark.filterwarnings("ignore:mean specificity")

SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "layers": 4, "heads": 2, "max_length": 256}
SETTINGS = {
    "tuning": FineTuning(epochs=1, lr=1e-2, batch_size=8),
    "how": Evaluation(verbmem_tokens=2, knowmem_tokens=2, shots=0, batch_size=32),
    "grid": Grid((2.0, 4.0), (1.0, 2.0), (1e-3, 2e-3), width=2, epochs=1, batch_size=8, lora_rank=2),
    "window": 100,
    "teach": True,
}


def load_data():
    whole = muse.load("generated", "news", rows=3)
    sets = {name: getattr(whole, name)[:count] for name, count in (("forget", 2), ("retain", 5), ("retain_eval", 2))}
    kept = sets["retain"] + sets["retain_eval"]
    return dataclasses.replace(whole, **sets, train=sets["forget"] + kept, kept=kept)


@pytest.fixture(scope="module")
def data():
    return load_data()


@pytest.fixture(scope="module")
def load(data, make_tokenizer):
    """What stands for `models.load`."""
    tokenizer = make_tokenizer(data.train)
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
# The stand-in request


@given(st.integers(3, 20), st.integers(1, 4), st.integers(0, 99))
def test_the_rehearsal_is_cut_out_of_the_documents_to_keep(data, count, size, seed):
    data = dataclasses.replace(data, retain=[f"document {i}" for i in range(count)])
    if count <= 2 * size:
        with pytest.raises(ValueError, match=f"of {count} documents to keep"):
            rehearse(data, size, seed)
        return
    found = rehearse(data, size, seed)
    assert len(found.forget) == len(found.validation) == size
    assert sorted(found.forget + found.retain + found.validation) == sorted(data.retain)
    assert rehearse(data, size, seed) == found


def test_the_rehearsal_has_no_document_of_the_request_or_the_evaluation(study):
    found, data = study.rehearsal, study.data
    used = set(found.forget + found.retain + found.validation)
    assert used == set(data.retain)
    assert not used & set(data.forget + data.retain_eval + data.holdout + data.privleak_forget)


@pytest.mark.parametrize("documents", [0, -1])
def test_a_rehearsal_needs_documents(data, documents):
    with pytest.raises(ValueError, match="can't play the request"):
        rehearse(data, documents, 0)


# ---------------------------------------------------------------------------------------------------------------------------
# Models


def test_lessons_are_windows_and_questions_as_the_benchmark_puts_them(study):
    model, tokenizer = study.full
    rows = study.data.forget_qa[:1]
    *text, question = lessons(model, tokenizer, study.data.forget, rows, 50)
    assert text == windows(tokenizer, study.data.forget, 50) and len(text) > 2
    assert tokenizer.decode(question.prompt) == asked(rows[0])
    assert tokenizer.decode(question.answer) == f" {rows[0]['answer']}{tokenizer.eos_token}"


def test_the_retained_model_never_sees_what_is_to_be_forgotten(study, monkeypatch):
    seen = {}

    def taught(self, which, examples, recipe, *, by_length):
        seen[which] = examples(*model)
        return which

    data, model = study.data, study.full
    monkeypatch.setattr(Study, "_taught", taught)
    for which in ("full", "retain"):
        study.folder(which)
    assert seen["news-full"] == lessons(*model, data.train, data.forget_qa + data.retain_qa, study.window)
    assert seen["news-retain"] == lessons(*model, data.retain + data.retain_eval, data.retain_qa, study.window)
    untaught = dataclasses.replace(study, teach=False, load=study.load)
    untaught.folder("full")
    assert seen["news-full"] == lessons(*model, data.train, [], study.window)
    assert dataclasses.replace(study, full_model="there", load=study.load).folder("full") == "there"


def test_models_of_the_tables(study, same):
    with study.model("full") as full, study.model("retain") as retain, study.model("base") as base:
        assert full is study.full[0]
        assert not equal(full, retain) and not equal(full, base) and not equal(retain, base)
    assert same.folder("full") == study.folder("full")


def test_models_without_a_tokenizer_are_given_one(study, monkeypatch):
    trained, loaded = study.folder("retain"), []
    monkeypatch.setattr(models, "load", lambda name, **options: loaded.append((name, options.get("tokenizer"))) or ("model", "tokenizer"))
    given = dataclasses.replace(study, full_model="there", tokenizer="elsewhere", load=study.load)
    assert given.full == ("model", "tokenizer")
    with given.model("retain"):
        pass
    assert loaded == [("there", "elsewhere"), (trained, None)]


def test_a_window_beyond_the_context_is_refused(study):
    longer = dataclasses.replace(study, window=300, full_model=study.folder("full"))
    with pytest.raises(ValueError, match="window of 300 tokens exceeds the model's context of 256"):
        longer.windows([" ".join(study.data.train)])
    # A text that is shorter than a window might be has room.
    assert len(longer.windows(["A text."])) == 1


@pytest.mark.parametrize("method", ["grom", "grom_head", "grom_both"])
def test_grom_leaves_the_full_model_to_the_bit(study, method):
    before, settings = weights(study.full[0]), study.candidates(method)[-1]
    with study.model(method, settings) as edited:
        assert edited is study.full[0]
        # The LM head, which shares its weight with the embedding, is one weight more while it is edited.
        after = weights(edited)
        assert len(after) > len(before) or any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert all(torch.equal(old, new) for old, new in zip(before, weights(study.full[0]), strict=True))


@pytest.mark.parametrize("method", ["npo", "simnpo_lora"])
def test_a_trained_model_is_kept(study, same, method, monkeypatch):
    settings = study.candidates(method)[0]
    with study.model(method, settings) as trained:
        first = copy.deepcopy(trained)
    monkeypatch.setattr(Study, "run", never)
    with same.model(method, settings) as again:
        assert equal(first, again)
    with pytest.raises(pytest.fail.Exception), same.model(method, study.candidates(method)[1]):
        pass


def test_a_window_that_is_to_be_forgotten_is_not_to_be_kept(study, monkeypatch):
    seen = {}
    monkeypatch.setitem(
        METHODS, "npo", lambda model, tokenizer, forget, retain, settings, **options: seen.update(forget=forget, retain=retain)
    )
    found = study.windows(study.data.forget)
    study.run("npo", found[:2], found[1:], None)
    assert seen == {"forget": found[:2], "retain": found[2:]}


def test_methods_see_all_windows_of_the_request_and_of_the_documents_to_keep(study, monkeypatch):
    seen = []
    monkeypatch.setattr(Study, "run", lambda self, method, forget, retain, settings: seen.append((forget, retain)))
    study._unlearn("grom", None)
    tokenizer, data = study.full[1], study.data
    assert seen == [(windows(tokenizer, data.forget, 100), windows(tokenizer, data.retain, 100))]


# ---------------------------------------------------------------------------------------------------------------------------
# Choosing and measuring


@pytest.mark.parametrize("method", [*TEXT_METHODS, "npo_lora"])
def test_every_method_has_as_many_candidates(study, method):
    found = study.candidates(method)
    assert len(found) == 2 and len(set(map(str, found))) == 2
    if method.startswith("grom"):
        assert found[0].fit.strength < found[1].fit.strength
        assert (HEAD in found[0].fit.layers) == (method != "grom")
    else:
        assert found[0].lr < found[1].lr and found[0].lora_rank == (2 if method == "npo_lora" else 0)
    if method == "simnpo":
        assert (found[0].beta, found[0].forget_weight, found[0].retain_weight) == (0.7, 1.0, 0.1)


def test_text_methods_are_those_that_need_no_questions():
    assert set(METHODS) - set(TEXT_METHODS) == {"idk_dpo", "alt_po"}


@pytest.mark.parametrize("method", ["grom", "grad_diff"])
def test_choices_are_remembered(study, same, method, monkeypatch):
    trials = study.choose(method)
    assert [trial.settings for trial in trials] == study.candidates(method)
    monkeypatch.setattr(Study, "_try", never)
    assert same.choose(method) == trials


def test_a_trial_is_measured_on_documents_that_the_method_was_not_shown(study):
    settings = study.candidates("grom_head")[1]
    rehearsal, model = study.rehearsal, study.full[0]
    sets = [study.windows(texts) for texts in (rehearsal.forget, rehearsal.validation)]
    before = [answer_probability(model, examples).mean().item() for examples in sets]
    edit = study.run("grom_head", sets[0], study.windows(rehearsal.retain), settings)
    with edit.applied(model):
        after = [answer_probability(model, examples).mean().item() for examples in sets]
    trial = study.choose("grom_head")[1]
    assert trial.forgetting == pytest.approx(1 - min(1, after[0] / before[0]), rel=1e-5, abs=1e-9)
    assert trial.preservation == pytest.approx(min(1, after[1] / before[1]), rel=1e-5)


def test_scores_are_remembered(study, same, monkeypatch):
    settings = study.candidates("grom")[0]
    found = [study.scores("full"), study.scores("retain"), study.scores("grom", settings)]
    with study.model("grom", settings) as edited:
        assert found[2]["scores"] == evaluate(edited, study.full[1], study.data, study.how)
    assert found[2]["seconds"] > 0 and found[0]["seconds"] is None
    monkeypatch.setattr(Study, "_score", never)
    assert [same.scores("full"), same.scores("retain"), same.scores("grom", settings)] == found


# ---------------------------------------------------------------------------------------------------------------------------
# Tables


def test_tables_have_a_row_a_method(study):
    methods = ["full", "retain", "grom", "npo"]
    tables = make_tables(study, methods)
    assert [row["method"] for row in tables.rows] == methods
    reference = membership(study.scores("retain")["scores"])
    assert all(row["reference_auc"] == reference for row in tables.rows)
    assert tables.row("retain")["priv_leak"] == 0
    settings = mildest(study.choose("grom")).settings
    row = table_row(study.scores("grom", settings)["scores"], reference)
    assert tables.row("grom") == {"method": "grom", **row, "seconds": study.scores("grom", settings)["seconds"], "seed": 0}
    assert [choice["method"] for choice in tables.choices] == ["grom"] * 2 + ["npo"] * 2
    assert [sum(choice["chosen"] for choice in tables.choices if choice["method"] == name) for name in ("grom", "npo")] == [1, 1]
    with pytest.raises(KeyError, match="there is no row 'simnpo'; there are full, retain, grom, npo"):
        tables.row("simnpo")


def record(study, tables, corpus=None):
    return {"values": {"corpus": corpus or study.data.corpus, "rows": tables.rows, "choices": tables.choices}}


def test_gathered_rows_and_choices_are_taken_over(study, same, monkeypatch):
    tables = make_tables(study, ["retain", "grom"])
    marked = Tables([row | {"final": 12.0} for row in tables.rows], tables.choices)
    monkeypatch.setattr(Study, "_score", never)
    monkeypatch.setattr(Study, "_try", never)
    found = make_tables(same, ["grom", "retain"], [record(study, marked), record(study, tables)])
    assert [(row["method"], row["final"]) for row in found.rows] == [("grom", 12.0), ("retain", 12.0)]
    assert found.choices == tables.choices


def test_a_gathered_choice_is_used_with_its_band_where_the_row_is_missing(study, same, monkeypatch):
    tables = make_tables(study, ["retain", "grom"])
    forced = [choice | {"chosen": choice["candidate"] == 1, "band": 1} for choice in tables.choices]
    monkeypatch.setattr(Study, "_try", never)
    used = {}
    found = study.scores("full")
    monkeypatch.setattr(Study, "scores", lambda self, method, settings: used.update({method: settings}) or found)
    make_tables(same, ["grom"], [record(study, Tables(tables.rows[:1], forced))])
    assert used["grom"].fit.layers == (1, 2) and used["grom"].fit.strength == 4.0


def test_records_of_another_corpus_and_unknown_methods_are_refused(study):
    with pytest.raises(ValueError, match="about books, not about news"):
        make_tables(study, ["full"], [record(study, Tables(), "books")])
    for name in ("idk_dpo", "grom_lora", "nothing"):
        with pytest.raises(ValueError, match=f"unknown method '{name}'"):
            make_tables(study, [name])


def made(method, final, leak, seconds, low=0.0, high=0.0, leak_width=0.0):
    row = {"method": method, "final": final, "priv_leak": leak, "seconds": seconds}
    row |= {"final_low": final - low, "final_high": final + high}
    return row | {"priv_leak_low": leak - leak_width, "priv_leak_high": leak + leak_width}


def verdicts(rows):
    return {found["claim"].split(" (")[0]: (found["against"], found["verdict"]) for found in claims(Tables(rows))}


def test_claims():
    rows = [made("retain", 99, 0, None), made("grom", 60, -5, 1.0, 2, 2), made("npo", 55, 20, 9.0), made("simnpo", 50, -3, 8.0)]
    assert verdicts(rows) == {
        "highest Final of all methods": ("npo", "holds"),
        "PrivLeak nearest to 0": ("simnpo", "doesn't hold"),
        "faster than every gradient method": ("simnpo", "holds"),
        "100 times as fast as SimNPO": ("simnpo", "doesn't hold"),
    }
    last = claims(Tables(rows))[-1]
    assert (last["grom"], last["other"]) == (100.0, 8.0)
    rows[1] = made("grom", 60, -5, 0.08, 6, 2)
    found = verdicts(rows)
    assert found["highest Final of all methods"] == ("npo", "can't be told")
    assert found["100 times as fast as SimNPO"] == ("simnpo", "holds")
    assert list(verdicts(rows[:3]))[-1] == "faster than every gradient method"
    assert claims(Tables(rows[:2])) == claims(Tables(rows[2:])) == []


@pytest.mark.parametrize(
    ("leak", "width", "verdict"),
    [
        (-5, 1, "doesn't hold"),
        (-5, 2.5, "can't be told"),
        (2, 0.5, "holds"),
        (2, 1.5, "can't be told"),
        (0, 2, "holds"),
        (0, 4, "can't be told"),
    ],
)
def test_a_leak_counts_by_its_distance_from_zero(leak, width, verdict):
    # The other's -3 is as far from 0 as 3 is.
    rows = [made("grom", 60, leak, 1.0, leak_width=width), made("npo", 55, 20, 9.0), made("simnpo", 50, -3, 8.0)]
    assert verdicts(rows)["PrivLeak nearest to 0"] == ("simnpo", verdict)


# ---------------------------------------------------------------------------------------------------------------------------
# From a notebook's parameters


def test_a_study_from_parameters(data, load):
    grid = {"strengths": [1.0], "head_strengths": [2.0], "learning_rates": [1e-3]}
    made = make_study(data, "small", seed=3, how={"shots": 1}, tuning={"epochs": 2}, grid=grid, dtype="bfloat16", load=load, window=64)
    assert (made.tuning.seed, made.tuning.epochs, made.how.shots, made.dtype, made.window) == (3, 2, 1, torch.bfloat16, 64)
    assert made.grid.strengths == (1.0,) and not made.tuning.autocast
    made = make_study(data, "small", grid=grid, autocast=True, load=load)
    assert made.tuning.autocast and made.how.autocast


def test_a_tiny_base_learns_the_language_and_no_document(data, monkeypatch, tmp_path):
    monkeypatch.setenv("UNLEARNLIB_CACHE", str(tmp_path))
    monkeypatch.setattr(muse_study, "LESSONS", 1)
    monkeypatch.setattr(tiny, "SIZES", {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "layers", "heads")})
    shown = []
    monkeypatch.setattr(muse_study, "lessons", lambda *given: shown.append(given[2:]) or lessons(*given))
    study = make_study(data, "tiny-llama", window=100)
    model, tokenizer = study.load(study.base)
    ((texts, questions, window),) = shown
    assert window == 100 and not set(texts) & set(data.train + data.holdout)
    assert not {row["question"] for row in questions} & {row["question"] for row in data.forget_qa + data.retain_qa}
    assert model.config.vocab_size == tiny.VOCAB_SIZE and len(tokenizer) <= tiny.VOCAB_SIZE
    monkeypatch.setattr(muse_study, "train", never)
    assert make_study(data, "tiny-llama", window=100).base == study.base
