"""Multiple choice by the text of the choices: hand-worked scores, what must not matter, the table's numbers, and lm-eval."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unlearnlib import models
from unlearnlib.benchmarks import wmdp_scores
from unlearnlib.benchmarks.wmdp_scores import (
    Evaluation,
    accuracy,
    answer_questions,
    by_subject,
    encode_choices,
    lm_eval_accuracy,
    table_row,
)
from unlearnlib.published import table

ROWS = [
    {"question": "What colour is the sky?", "choices": ["blue", "a kind of grey", "it is over"], "answer": 0, "subject": "sky"},
    {"question": "What is over the hills?", "choices": ["the sky, blue and grey", "hills"], "answer": 1, "subject": "hills"},
    {"question": "Where is it grey?", "choices": ["over it", "the hills", "sky", "What"], "answer": 3, "subject": "sky"},
]


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture(scope="module")
def model():
    made = models.build(vocab_size=320, hidden_size=32, intermediate_size=48, layers=2, seed=3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    return made


def log_prob(model, prompt, answer):
    """One choice on its own, by the whole logits."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
    return sum(logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer))


def test_scores_by_hand(model, tokenizer):
    for row, found in zip(ROWS, answer_questions(model, tokenizer, ROWS), strict=True):
        prompt = tokenizer(row["question"]).input_ids
        sums = [log_prob(model, prompt, tokenizer(" " + choice).input_ids) for choice in row["choices"]]
        means = [total / len(choice) for total, choice in zip(sums, row["choices"], strict=True)]
        assert found["right"] == (means.index(max(means)) == row["answer"])
        assert found["right_sum"] == (sums.index(max(sums)) == row["answer"])
        weights = [math.exp(total) for total in sums]
        assert found["probability"] == pytest.approx(weights[row["answer"]] / sum(weights), rel=1e-4)
        assert found["guessing"] == 1 / len(row["choices"])
        assert found["subject"] == row["subject"]
        assert "shown" not in found


def test_whether_the_answer_is_shown_is_told_where_it_is_known(model, tokenizer):
    found = answer_questions(model, tokenizer, [row | {"shown": i > 0} for i, row in enumerate(ROWS)])
    assert [one["shown"] for one in found] == [False, True, True]


def test_division_by_length_is_by_characters(tokenizer, monkeypatch):
    """Two choices whose sums are -6 and -4, of 12 and 4 characters: the longer one wins a character, the shorter one in sum."""
    row = {"question": "What?", "choices": ["blueblueblue", "grey"], "answer": 0}

    def scores(_model, batch):
        value = {0: -6.0, 1: -4.0}
        counts = torch.bincount(batch.example)
        return torch.tensor([value[i] / counts[i] for i in batch.example.tolist()])

    monkeypatch.setattr(wmdp_scores, "answer_log_probs", scores)
    (found,) = answer_questions(nn.Linear(1, 1), tokenizer, [row])
    assert (found["right"], found["right_sum"]) == (True, False)
    assert found["probability"] == pytest.approx(math.exp(-6) / (math.exp(-6) + math.exp(-4)))


def test_batching_does_not_matter(model, tokenizer):
    together, alone = (answer_questions(model, tokenizer, ROWS, Evaluation(batch_size=size)) for size in (64, 1))
    for one, other in zip(together, alone, strict=True):
        assert one["right"] == other["right"]
        assert one["probability"] == pytest.approx(other["probability"], rel=1e-4)


def test_of_two_equal_choices_either_is_right(model, tokenizer):
    row = {"question": "What?", "choices": ["sky", "sky"]}
    assert all(answer_questions(model, tokenizer, [row | {"answer": answer}])[0]["right"] for answer in (0, 1))


def test_choices_carry_no_end_token(tokenizer, make_tokenizer):
    plain = encode_choices(tokenizer, ROWS[0])
    assert [tokenizer.decode(example.answer) for example in plain] == [" blue", " a kind of grey", " it is over"]
    assert len({example.prompt for example in plain}) == 1
    chatting = make_tokenizer(chat=True)
    chat = encode_choices(chatting, ROWS[0], Evaluation(system="Choose."))
    assert [chatting.decode(example.answer) for example in chat] == ["blue", "a kind of grey", "it is over"]
    assert "Choose." in chatting.decode(chat[0].prompt)
    assert chatting.decode(chat[0].prompt).endswith("assistant\n")
    bare = encode_choices(chatting, ROWS[0], Evaluation(template="plain"))
    assert chatting.decode(bare[0].prompt) == ROWS[0]["question"]
    assert chatting.decode(bare[0].answer) == " blue"


def test_autocast_computes_in_bfloat16(model, tokenizer):
    exact, rounded = (answer_questions(model, tokenizer, ROWS, Evaluation(autocast=on)) for on in (False, True))
    probabilities = [[one["probability"] for one in found] for found in (exact, rounded)]
    assert probabilities[0] != probabilities[1]
    assert probabilities[0] == pytest.approx(probabilities[1], abs=0.1)


def test_non_ascii_choices(model, tokenizer):
    row = {"question": "Où?", "choices": ["à côté", "élève"], "answer": 0}
    assert 0 < answer_questions(model, tokenizer, [row])[0]["probability"] < 1


def test_nothing_to_ask(model, tokenizer):
    with pytest.raises(ValueError, match="no examples"):
        answer_questions(model, tokenizer, [])
    with pytest.raises(ValueError, match="no questions"):
        accuracy([])


def marks(right, wrong, subject="law", **more):
    one = {"right_sum": True, "probability": 0.5, "guessing": 0.25, "subject": subject} | more
    return [one | {"right": True}] * right + [one | {"right": False}] * wrong


def test_a_row_by_hand():
    scores = {"restricted": marks(29, 71), "general": marks(40, 40, "law", shown=True) + marks(15, 5, "dishes", shown=False)}
    row = table_row(scores)
    assert row["accuracy_restricted"] == 0.29
    assert row["mmlu"] == 0.55
    assert (row["mmlu_unseen"], row["accuracy_restricted_unseen"]) == (0.75, None)
    # The paper's row of GROM: 1 − Acc .71, MMLU .55, Final .63.
    published = table("wmdp_bio")
    assert 1 - row["accuracy_restricted"] == pytest.approx(published.value("grom", "one_minus_accuracy"))
    assert row["final"] == pytest.approx(published.value("grom", "final"))
    assert (row["mmlu_sum"], row["mmlu_probability"], row["mmlu_guessing"]) == (1, 0.5, 0.25)
    assert by_subject(scores["general"]) == {"law": 0.5, "dishes": 0.75}
    assert by_subject([{"right": True}]) == {}


@pytest.mark.parametrize("method", ["full", "simnpo", "npo", "grom"])
def test_final_fits_the_published_rows(method):
    published = table("wmdp_bio")
    numbers = {column: published.value(method, column) for column in ("one_minus_accuracy", "mmlu", "final")}
    size = 100
    right = round(size * (1 - numbers["one_minus_accuracy"])), round(size * numbers["mmlu"])
    scores = {name: marks(count, size - count) for name, count in zip(("restricted", "general"), right, strict=True)}
    assert table_row(scores)["final"] == pytest.approx(numbers["final"], abs=0.01)


def test_intervals_are_exact_binomial_ones():
    """Ends by their definition: the accuracies at which so few, or so many, right answers have a probability of 2.5 %."""
    row = table_row({"restricted": marks(3, 9), "general": marks(12, 0)})
    low, high = row["accuracy_restricted_low"], row["accuracy_restricted_high"]
    assert sum(math.comb(12, k) * high**k * (1 - high) ** (12 - k) for k in range(4)) == pytest.approx(0.025)
    assert sum(math.comb(12, k) * low**k * (1 - low) ** (12 - k) for k in range(3, 13)) == pytest.approx(0.025)
    # Twelve right ones of twelve don't make certain.
    assert row["mmlu_high"] == 1
    assert row["mmlu_low"] == pytest.approx(0.025 ** (1 / 12))


def test_lm_eval_is_asked_for_the_same(monkeypatch, model, tokenizer):
    seen = {}

    def simple_evaluate(wrapped, tasks, **options):
        (task,) = tasks
        seen.update(task, text=open(task["dataset_kwargs"]["data_files"]["test"], encoding="utf-8").read())  # noqa: SIM115
        return {"results": {task["task"]: {"acc,none": 0.25, "acc_norm,none": 0.5}}}

    monkeypatch.setattr(wmdp_scores, "_lm_eval", lambda: (simple_evaluate, lambda **parts: SimpleNamespace(**parts)))
    assert lm_eval_accuracy(model, tokenizer, ROWS) == {"right": 0.5, "right_sum": 0.25}
    assert seen["output_type"] == "multiple_choice"
    assert seen["text"].count("\n") == len(ROWS)


def test_lm_eval_may_be_missing(monkeypatch, model, tokenizer):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match="needs the package lm-eval"):
        lm_eval_accuracy(model, tokenizer, ROWS)


def test_parity_with_lm_eval(model, tokenizer, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("lm_eval", reason="lm-eval is optional and large: without it its scores can't be compared with ours")
    words = ["blue", "grey", "over the hills", "sky", "a very long kind of answer about the sky", "it is", "What colour"]
    rows = [
        {"question": f"What colour is {words[i % 7]} over {words[(i + 3) % 7]}?", "choices": words[i % 3 : i % 3 + 4], "answer": i % 4}
        for i in range(42)
    ]
    found = answer_questions(model, tokenizer, rows)
    ours = {"right": accuracy(found), "right_sum": accuracy(found, "right_sum")}
    assert ours["right"] != ours["right_sum"], "these questions can't tell the two apart"
    assert lm_eval_accuracy(model, tokenizer, rows) == pytest.approx(ours)
