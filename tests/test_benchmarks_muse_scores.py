"""MUSE's scores: what a model is asked, where its answer ends, and the numbers of the tables, by hand and as published."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib import models, published
from unlearnlib.benchmarks import muse, muse_scores
from unlearnlib.benchmarks.muse_scores import Evaluation, asked, evaluate, final, first_answer, forgetting, membership, table_row
from unlearnlib.corpora import windows
from unlearnlib.training import train
from unlearnlib.unlearning_metrics import rouge_l, teacher_forced

# ---------------------------------------------------------------------------------------------------------------------------
# The tables' numbers


@pytest.mark.parametrize("name", ["muse_news", "muse_books"])
def test_final_fits_the_published_rows(name):
    table = published.table(name)
    for method, row in table.rows.items():
        assert final(row) == pytest.approx(row["final"], abs=0.05), method


def scores(**changes):
    made = {
        "verb_mem": [0.2, 0.4],
        "know_mem_forget": [0.0, 1.0, 0.5, 0.5],
        "know_mem_retain": [1.0, 0.5],
        "repeated_4gram": [0.0, 0.1],
        "min_k_forget": [-1.0, -2.0, -3.0, -4.0],
        "min_k_holdout": [-2.5, -3.5],
    }
    return made | changes


def test_a_row_by_hand():
    # Of the 8 pairs a forget passage is the more familiar one in 2 + 2 + 1 + 0.
    row = table_row(scores(), 0.5)
    assert row["auc"] == membership(scores()) == 5 / 8
    assert row["priv_leak"] == pytest.approx(((1 - 5 / 8) - 0.5) / 0.5 * 100)
    assert row["verb_mem_forget"] == pytest.approx(30) and row["know_mem_forget"] == pytest.approx(50)
    assert row["know_mem_retain"] == pytest.approx(75) and row["repeated_4gram"] == pytest.approx(0.05)
    assert row["reference_auc"] == 0.5
    # ½ [75 + ⅓ (70 + 50 + (100 − 25))]
    assert forgetting(row) == pytest.approx([70, 50, 75])
    assert row["final"] == pytest.approx((75 + 65) / 2)


def test_intervals_enclose_their_number_and_are_repeatable():
    row = table_row(scores(), 0.5)
    for name in ("verb_mem_forget", "know_mem_forget", "priv_leak", "know_mem_retain", "final"):
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
        assert row[f"{name}_low"] < row[f"{name}_high"]
    assert row == table_row(scores(), 0.5)
    sure = table_row(scores(verb_mem=[0.3] * 5), 0.5)
    assert sure["verb_mem_forget_low"] == pytest.approx(30) == sure["verb_mem_forget_high"]


def test_the_reference_is_the_zero_of_privleak():
    assert table_row(scores(), 5 / 8)["priv_leak"] == pytest.approx(0)
    assert table_row(scores(min_k_forget=[-1.0]), 0.5)["priv_leak"] == -100
    with pytest.raises(ValueError, match="reference's AUC is 1"):
        table_row(scores(), 1.0)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(-100, 100), st.floats(0, 100))
def test_final_rewards_forgetting_and_keeping_and_either_sign_of_privleak_costs(verbatim, knowledge, leak, kept):
    row = {"verb_mem_forget": verbatim, "know_mem_forget": knowledge, "priv_leak": leak, "know_mem_retain": kept}
    assert final(row) == pytest.approx(final(row | {"priv_leak": -leak}))
    assert final(row) <= final(row | {"verb_mem_forget": 0, "know_mem_forget": 0, "priv_leak": 0, "know_mem_retain": 100}) == 100


# ---------------------------------------------------------------------------------------------------------------------------
# Asking


def test_a_question_is_put_as_in_muse():
    rows = [{"question": "Who?", "answer": "Me."}, {"question": "Why?", "answer": "Because."}]
    assert asked(rows[0]) == "Question: Who?\nAnswer:"
    assert asked(rows[1], rows[:1]) == "Question: Who?\nAnswer: Me.\n\nQuestion: Why?\nAnswer:"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Bill\n\nQuestion: Who?", "Bill"),
        ("Bill\nQuestion: Who?\nAnswer: Me", "Bill"),
        ("Bill Question: Who?", "Bill"),
        ("Bill\nthe lizard", "Bill\nthe lizard"),
        ("\n\nBill", ""),
        ("", ""),
    ],
)
def test_where_an_answer_ends(text, answer):
    assert first_answer(text) == answer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verbmem_tokens", 0),
        ("knowmem_tokens", 0),
        ("privleak_tokens", 1),
        ("shots", -1),
        ("batch_size", 0),
        ("min_k", 0.0),
        ("min_k", 1.1),
    ],
)
def test_settings_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        Evaluation(**{name: value})


# ---------------------------------------------------------------------------------------------------------------------------
# A model's scores


@pytest.fixture(scope="module")
def data():
    whole = muse.load("generated", "news", rows=3)
    return dataclasses.replace(whole, forget_icl=whole.forget_icl[:1])


@pytest.fixture(scope="module")
def tokenizer(data, make_tokenizer):
    return make_tokenizer(data.train)


@pytest.fixture(scope="module")
def model():
    return models.build(vocab_size=320, hidden_size=32, intermediate_size=48, layers=2, heads=2, max_length=512)


HOW = Evaluation(verbmem_tokens=6, knowmem_tokens=3, shots=2, batch_size=2)


def test_scores_of_every_row(model, tokenizer, data):
    found = evaluate(model, tokenizer, data, HOW)
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, 3)
    assert all(0 <= value <= 1 for name in ("verb_mem", "know_mem_forget", "know_mem_retain") for value in found[name])
    whole = [muse_scores._beginning(tokenizer, text, 512) for text in data.privleak_forget]
    assert found["min_k_forget"] == pytest.approx([answer.min_k(0.4) for answer in teacher_forced(model, whole)], rel=1e-5)
    # The batch size changes no score, but fewer tokens and another share do.
    other = evaluate(model, tokenizer, data, dataclasses.replace(HOW, batch_size=5))
    assert other["min_k_forget"] == pytest.approx(found["min_k_forget"], rel=1e-5)
    for change in ({"privleak_tokens": 9}, {"min_k": 0.2}):
        assert evaluate(model, tokenizer, data, dataclasses.replace(HOW, **change))["min_k_forget"] != found["min_k_forget"]


def test_scores_in_bfloat16_are_close_and_not_the_same(model, tokenizer, data):
    exact, rounded = (evaluate(model, tokenizer, data, dataclasses.replace(HOW, autocast=autocast)) for autocast in (False, True))
    for name in ("min_k_forget", "min_k_holdout"):
        assert rounded[name] != exact[name] and rounded[name] == pytest.approx(exact[name], rel=0.01)


def test_what_is_said_is_held_against_as_many_tokens(model, tokenizer, data, monkeypatch):
    prompts = []

    def say(model, tokenizer, ids, *, max_new_tokens, **options):
        prompts.extend((tokenizer.decode(own), max_new_tokens) for own in ids)
        true = {row["prompt"]: row["gt"] for row in data.verbmem}
        # It recites every passage to its end, and answers every question with the first answer.
        return [true.get(tokenizer.decode(own), data.forget_qa[0]["answer"] + "\n\nQuestion: And?") for own in ids]

    monkeypatch.setattr(muse_scores, "generate", say)
    found = evaluate(model, tokenizer, data, HOW)
    short = [tokenizer.decode(tokenizer(row["gt"]).input_ids[:6]) for row in data.verbmem]
    assert found["verb_mem"] == rouge_l([row["gt"] for row in data.verbmem], short, "f1")
    assert all(0 < value < 1 for value in found["verb_mem"])
    assert found["know_mem_forget"][0] == 1.0
    assert prompts[3] == (asked(data.forget_qa[0], data.forget_icl[:1]), 3)
    assert prompts[6] == (asked(data.retain_qa[0], data.retain_icl[:2]), 3)
    monkeypatch.setattr(muse_scores, "generate", lambda model, tokenizer, ids, **options: [""] * len(ids))
    nothing = evaluate(model, tokenizer, data, HOW)
    assert nothing["verb_mem"] == nothing["know_mem_retain"] == nothing["repeated_4gram"] == [0, 0, 0]


def test_a_prompt_beyond_the_context_is_refused(model, tokenizer, data):
    with pytest.raises(ValueError, match="exceed the context of 512: show fewer shots"):
        evaluate(model, tokenizer, data, dataclasses.replace(HOW, verbmem_tokens=500))


def test_a_context_that_is_shorter_than_a_passage_cuts_it(tokenizer, data):
    model = models.build(vocab_size=320, hidden_size=32, intermediate_size=48, layers=2, heads=2, max_length=160)
    wide = dataclasses.replace(HOW, shots=0)
    short = dataclasses.replace(wide, privleak_tokens=160)
    assert evaluate(model, tokenizer, data, wide)["min_k_forget"] == evaluate(model, tokenizer, data, short)["min_k_forget"]


def test_a_model_that_knows_a_text_finds_it_familiar(tokenizer, data):
    model = models.build(vocab_size=320, hidden_size=32, intermediate_size=48, layers=2, heads=2, max_length=512)
    train(model, windows(tokenizer, data.privleak_forget), steps=30, lr=1e-2, batch_size=3)
    found = evaluate(model, tokenizer, data, HOW)
    assert membership(found) == 1.0
    assert torch.tensor(found["min_k_forget"]).min() > torch.tensor(found["min_k_holdout"]).max()
