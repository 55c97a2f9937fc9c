"""The harnesses of zsRE: which tokens are scored, what is averaged over what, and the rows made of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib import models
from unlearnlib.benchmarks import zsre_scores
from unlearnlib.benchmarks.zsre_scores import Evaluation, encode_pairs, evaluate, final, table_row
from unlearnlib.examples import Example
from unlearnlib.unlearning_metrics import AnswerScores

FACTS = [
    {"prompt": "The sky is", "answer": "blue", "target": "red", "paraphrases": ["Above us it is", "The hills see"]},
    {"prompt": "Two and two is", "answer": "four grey", "target": "five", "paraphrases": ["Twice two is"]},
]
UNRELATED = [{"prompt": "Hills are", "answer": "over there"}]


def scored(*hits, log_prob=-1.0):
    return AnswerScores(torch.full((len(hits),), log_prob), torch.tensor(hits, dtype=torch.bool))


@pytest.fixture
def answers(monkeypatch):
    """Let the model score each pair as a test says; pairs are known by their prompt."""
    asked, table = [], {}

    def encode(tokenizer, pairs):
        asked.extend(pairs)
        return [Example((0,), (0,), prompt) for prompt, _ in pairs]

    monkeypatch.setattr(zsre_scores, "encode_pairs", encode)
    monkeypatch.setattr(zsre_scores, "teacher_forced", lambda model, examples, **_: [table[example.name] for example in examples])
    return asked, table


def test_hand_worked_means(answers):
    asked, table = answers
    table |= {
        "The sky is": scored(1),
        "Two and two is": scored(1, 0, 0, 1),
        "Above us it is": scored(0),
        "The hills see": scored(1),
        "Twice two is": scored(0, 0),
        "Hills are": scored(1, 1, 0),
    }
    scores = evaluate(torch.nn.Linear(1, 1), None, FACTS, UNRELATED, how=Evaluation(max_new_tokens=0))
    assert scores["efficacy"]["token"] == [1.0, 0.5]
    assert scores["efficacy"]["exact"] == [1.0, 0.0]
    assert scores["generalization"]["token"] == [0.5, 0.0]
    assert scores["generalization"]["exact"] == [0.5, 0.0]
    assert scores["specificity"]["token"] == [pytest.approx(2 / 3)]
    assert scores["efficacy"]["prob"] == [pytest.approx(torch.tensor(-1.0).exp().item())] * 2
    assert "own" not in scores
    assert ("Two and two is", "four grey") in asked
    row = table_row(scores)
    assert (row["efficacy"], row["efficacy_exact"], row["generalization"]) == (0.75, 0.5, 0.25)
    assert row["specificity"] == row["specificity_low"] == row["specificity_high"] == pytest.approx(2 / 3)
    assert row["efficacy_low"] <= row["efficacy"] <= row["efficacy_high"]
    assert row["final"] == pytest.approx((2 / 3 + (0.25 + 0.75) / 2) / 2)
    assert (row["harness"], row["protocol"]) == ("unlearning", zsre_scores.PROTOCOLS["unlearning"])


def test_the_editing_harness_asks_for_the_new_answer(answers):
    asked, table = answers
    table |= dict.fromkeys(["The sky is", "Two and two is", "Above us it is", "The hills see", "Twice two is", "Hills are"], scored(1, 1))
    row = table_row(evaluate(torch.nn.Linear(1, 1), None, FACTS, UNRELATED, "editing", Evaluation(max_new_tokens=0)), "editing")
    assert asked == [
        ("The sky is", "red"),
        ("Two and two is", "five"),
        ("Above us it is", "red"),
        ("The hills see", "red"),
        ("Twice two is", "five"),
        ("Hills are", "over there"),
    ]
    assert row["final"] == 1.0
    assert "higher is better" in row["protocol"]


@given(*[st.floats(0, 1)] * 3)
def test_final_stays_between_0_and_1_and_is_best_where_it_should(efficacy, generalization, specificity):
    row = {"efficacy": efficacy, "generalization": generalization, "specificity": specificity}
    assert 0 <= final(row) <= 1
    # What one harness wants of the answer is what the other doesn't.
    assert final(row) + final(row, "editing") == pytest.approx(specificity + 0.5)
    assert final(row | {"efficacy": 0, "generalization": 0, "specificity": 1}) == 1


def test_only_the_own_tokens_of_an_answer_are_scored(make_tokenizer):
    tokenizer = make_tokenizer(bos=True)
    (example,) = encode_pairs(tokenizer, [("What is it?", " blue and grey ")])
    assert tokenizer.decode(example.answer) == " blue and grey"
    assert tokenizer.eos_token_id not in example.answer
    assert example.prompt[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in example.prompt
    assert example.name == "What is it?"


def test_chat_templates_are_not_used(make_tokenizer):
    plain, chat = make_tokenizer(), make_tokenizer(chat=True)
    pairs = [("What is it?", "blue")]
    assert encode_pairs(chat, pairs) == encode_pairs(plain, pairs)


@pytest.fixture(scope="module")
def spoken(make_tokenizer):
    """A model that says the same to everything."""
    tokenizer = make_tokenizer([" blue" * 9])
    model = models.build(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, layers=1, heads=2, tied=False)
    (word,) = encode_pairs(tokenizer, [("x", "blue")])[0].answer
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(word), len(tokenizer)).float())
    return model, tokenizer


def test_what_the_model_says_itself(spoken):
    model, tokenizer = spoken
    scores = evaluate(model, tokenizer, FACTS, UNRELATED, how=Evaluation(batch_size=1, max_new_tokens=6))
    assert scores["efficacy"]["exact"] == [1.0, 0.0]
    # "blue blue blue blue blue blue" has three 4-grams, all the same.
    assert scores["own"] == {"said": [1.0, 0.0], "repeated_4gram": [pytest.approx(2 / 3)] * 2}
    row = table_row(scores)
    assert (row["said"], row["repeated_4gram"]) == (0.5, pytest.approx(2 / 3))


def test_batches_change_nothing(make_tokenizer):
    tokenizer = make_tokenizer()
    model = models.build(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, layers=2, heads=2).double()
    one, many = (evaluate(model, tokenizer, FACTS, UNRELATED, how=Evaluation(size, 0)) for size in (1, 8))
    for measure in one:
        assert one[measure]["token"] == many[measure]["token"]
        assert one[measure]["prob"] == pytest.approx(many[measure]["prob"], rel=1e-9)


def test_nothing_to_ask():
    with pytest.raises(ValueError, match="0 facts, 1 unrelated questions"):
        evaluate(None, None, [], UNRELATED)
    with pytest.raises(ValueError, match="2 facts, 0 unrelated questions"):
        evaluate(None, None, FACTS, [])
    with pytest.raises(ValueError, match="harness must be one of unlearning, editing, got 'both'"):
        evaluate(None, None, FACTS, UNRELATED, "both")
