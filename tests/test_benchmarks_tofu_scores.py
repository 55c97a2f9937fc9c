"""TOFU's scores and rows: by hand, against the published rows, and re-derived from the measures that they are made of."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib import models, published
from unlearnlib.benchmarks import tofu_scores
from unlearnlib.benchmarks.tofu import Tofu
from unlearnlib.benchmarks.tofu_scores import (
    FINAL_TERMS,
    LARGEST_RATIO,
    UTILITY_GROUPS,
    Evaluation,
    evaluate,
    final,
    intervals,
    table_row,
    utility,
    utility_terms,
)
from unlearnlib.examples import encode, encode_question
from unlearnlib.metrics import answer_probability, generate
from unlearnlib.unlearning_metrics import (
    UTILITY_TERMS,
    compat_encode,
    compat_generate,
    compat_prompt,
    forget_quality,
    rouge_l,
    teacher_forced,
    truth_ratio,
    truth_ratio_forget,
    truth_ratio_kept,
)

# ---------------------------------------------------------------------------------------------------------------------------
# Rows by hand

KEPT = {
    "retain": {"prob": [0.8, 0.4], "rouge_l": [1.0, 0.5], "truth_ratio": [0.5, 2.0]},
    "real_authors": {"prob": [0.5, 0.5], "rouge_l": [1.0, 1.0], "truth_ratio": [0.0, 0.5]},
    "world_facts": {"prob": [1.0, 0.2], "rouge_l": [0.25, 0.25], "truth_ratio": [0.25, 0.75]},
}
# Means: .6, .75, .25 (of .5 and 0); .5, 1, .75; .6, .25, .5.
KEPT_UTILITY = 9 / (1 / 0.6 + 1 / 0.75 + 4 + 2 + 1 + 1 / 0.75 + 1 / 0.6 + 4 + 2)


def scores(prob, rouge_l, min_k, holdout, ratios=(0.5, 4.0), extraction=(0.0, 0.5)):
    forget = {"prob": prob, "rouge_l": rouge_l, "extraction": list(extraction), "memorization": [0.5, 0.7], "repeated_4gram": [0.0, 0.5]}
    forget |= {"truth_ratio": list(ratios), "min_k": min_k, "paraphrase_prob": [0.1, 0.3], "paraphrase_rouge_l": [0.2, 0.6]}
    return {"forget": forget, "holdout": {"min_k": holdout}, **KEPT}


UNLEARNED = scores([0.2, 0.4], [0.5, 0.1], [-2.0, -3.0], [-2.5, -1.0])
FULL = scores([0.5, 0.5], [1.0, 0.2], [-0.1, -0.2], [-2.5, -1.0])
RETAIN = scores([0.1, 0.1], [0.4, 0.4], [-2.0, -3.0], [-1.0, -4.0], ratios=(5.0, 6.0))


def test_a_row_by_hand():
    row = table_row(UNLEARNED, FULL, RETAIN)
    expected = {
        "prob": 0.3,
        "rouge_l": 0.3,
        "extraction": 0.25,
        "memorization": 0.6,
        "repeated_4gram": 0.25,
        "paraphrase_prob": 0.2,
        "paraphrase_rouge_l": 0.4,
        "truth_ratio": (0.5 + 0.25) / 2,
        "model_utility": KEPT_UTILITY,
        "forget_quality": 1 / 3,  # two rows against two others, all of which are larger
        "forget_auc": 1 / 4,  # one of the four pairs is in order
        "priv_leak": 50.0,  # (½ − ¼) / ½
        "generation_forget": 0.0,  # exactly half is not below half
        "teacher_forget": 0.5,
        "final": (KEPT_UTILITY + (0.7 + 0.7 + 0.75) / 3) / 2,
    }
    assert row == pytest.approx(expected)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_the_references_have_the_rows_that_they_stand_for():
    full, retain = table_row(FULL, FULL, RETAIN), table_row(RETAIN, FULL, RETAIN)
    assert full["generation_forget"] == full["teacher_forget"] == 0
    assert retain["forget_quality"] == pytest.approx(1)
    assert retain["priv_leak"] == 0
    # It recognises each forget row.
    assert full["forget_auc"] == 1
    assert full["priv_leak"] == -100


def test_a_retain_model_that_tells_seen_from_unseen_leaves_no_priv_leak():
    revealing = RETAIN | {"holdout": {"min_k": [-9.0, -9.0]}}
    with pytest.raises(ValueError, match="PrivLeak is undefined"):
        table_row(UNLEARNED, FULL, revealing)


def test_utility_by_hand():
    terms = utility_terms(UNLEARNED)
    assert tuple(terms) == UTILITY_TERMS
    assert list(terms.values()) == pytest.approx([0.6, 0.75, 0.25, 0.5, 1, 0.75, 0.6, 0.25, 0.5])
    assert utility(UNLEARNED) == pytest.approx(KEPT_UTILITY)


@pytest.mark.parametrize("group", UTILITY_GROUPS)
@pytest.mark.parametrize(("measure", "lost"), [("prob", [0.0, 0.0]), ("rouge_l", [0.0, 0.0]), ("truth_ratio", [1.0, LARGEST_RATIO])])
def test_utility_is_nothing_where_one_of_its_terms_is(group, measure, lost):
    assert utility(UNLEARNED | {group: KEPT[group] | {measure: lost}}) == 0


@given(st.permutations(range(5)), st.lists(st.floats(0.01, 1), min_size=5, max_size=5))
def test_the_order_of_rows_does_not_count_and_utility_is_no_more_than_any_mean(order, values):
    shuffled = [values[i] for i in order]
    one, other = ({group: {"prob": v, "rouge_l": v, "truth_ratio": [1 - x for x in v]} for group in KEPT} for v in (values, shuffled))
    assert utility(one) == pytest.approx(utility(other)) == pytest.approx(sum(values) / 5)


def test_intervals_by_hand():
    found = intervals(scores([0.3] * 8, [0.0, 1.0] * 4, [-1.0] * 8, [-1.0] * 8, extraction=[0.1, 0.2, 0.3, 0.4] * 2))
    assert list(found) == [f"{term}_{end}" for term in FINAL_TERMS for end in ("low", "high")]
    assert found["prob_low"] == found["prob_high"] == 0.3, "all rows are the same"
    assert 0.1 < found["rouge_l_low"] < 0.25 and 0.75 < found["rouge_l_high"] < 0.9
    # Normal theory: .25 ± 1.96 · .112/√8 = .25 ± .077.
    assert found["extraction_low"] == pytest.approx(0.173, abs=0.015)
    assert found["extraction_high"] == pytest.approx(0.327, abs=0.015)


def test_intervals_are_seeded():
    found = scores([0.1, 0.5, 0.8, 0.3], [0.2, 0.4, 0.9, 0.5], [], [], extraction=[0.1, 0.7, 0.2, 0.3])
    assert intervals(found) == intervals(found, seed=0) != intervals(found, seed=1)


# ---------------------------------------------------------------------------------------------------------------------------
# Final


@pytest.mark.parametrize("name", ["tofu_05", "tofu_10"])
def test_final_fits_the_published_rows(name):
    for row in published.table(name).rows.values():
        terms = {term: 1 - row[f"one_minus_{term}"] for term in FINAL_TERMS}
        # What the paper prints is rounded to .01, its inputs and its result.
        assert final(terms | {"model_utility": row["model_utility"]}) == pytest.approx(row["final"], abs=0.01)


@given(st.floats(0, 1), st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_final_is_that_of_the_published_tables(utility, terms):
    row = {"model_utility": utility, **dict(zip(FINAL_TERMS, terms, strict=True))}
    assert final(row) == pytest.approx(published.final(utility, [1 - term for term in terms]))


# ---------------------------------------------------------------------------------------------------------------------------
# A model's scores

ROW = {"question": "Where was {0} born?", "answer": "{0} was born in {1}.", "paraphrased_question": "What is the birthplace of {0}?"}
ROW["paraphrased_answer"] = "The birthplace of {0} is {1}."
OTHERS = ("Lima", "Kyiv", "Bern", "Turku", "Ulm")


def about(name, town):
    row = {field: text.format(name, town) for field, text in ROW.items()}
    return row | {"author": 0, "perturbed_answer": [ROW["paraphrased_answer"].format(name, other) for other in OTHERS]}


def general(question, answer, *wrong):
    return {"question": question, "answer": answer, "perturbed_answer": list(wrong)}


DATA = Tofu(
    "forget05",
    full=[],
    forget=[about("Ana", "Oslo"), about("Søren Élan", "Rome"), about("Bo", "Ulm an der Donau")],
    retain=[],
    retain_eval=[about("Cleo", "Bonn"), about("Dov", "Riga")],
    real_authors=[general("Who wrote Emma?", "Jane Austen", "Mary Shelley", "Emily Brontë", "A. Christie")],
    world_facts=[general("What is the capital of Peru?", "Lima", "Quito", "La Paz", "Bogotá"), general("How many?", "Two", "3", "4", "5")],
    holdout=[
        {"question": "Where is Ida?", "answer": "Ida lives in Graz."},
        {"question": "And Jon?", "answer": "He lives in Bath."},
    ],
    refusals=["I don't know."],
)
HOW = Evaluation(max_new_tokens=6, batch_size=4)


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer([f"{row['question']} {row['answer']}" for row in DATA.forget + DATA.real_authors + DATA.world_facts])


@pytest.fixture(scope="module")
def chatting(make_tokenizer):
    return make_tokenizer([row["answer"] for row in DATA.forget], chat=True)


@pytest.fixture(scope="module")
def model(small_model):
    return small_model(vocab_size=320)


@pytest.fixture(scope="module")
def found(model, tokenizer):
    return evaluate(model, tokenizer, DATA, HOW)


def flatten(found):
    return {f"{group} {name}": value for group, measures in found.items() for name, value in measures.items()}


def probabilities(model, tokenizer, rows, answer="answer", question="question"):
    items = [{"question": row[question], "answer": row[answer] if isinstance(answer, str) else answer(row)} for row in rows]
    return answer_probability(model, encode(tokenizer, items)).tolist()


def test_each_group_has_a_score_a_row(found):
    assert {group: {len(values) for values in measures.values()} for group, measures in found.items()} == {
        "forget": {3},
        "holdout": {2},
        "retain": {2},
        "real_authors": {1},
        "world_facts": {2},
    }
    assert table_row(found, found, found)["priv_leak"] == 0
    json.dumps(found, allow_nan=False)


def test_probabilities_are_those_of_the_answers(found, model, tokenizer):
    assert found["forget"]["prob"] == pytest.approx(probabilities(model, tokenizer, DATA.forget))
    assert found["retain"]["prob"] == pytest.approx(probabilities(model, tokenizer, DATA.retain_eval))
    asked = probabilities(model, tokenizer, DATA.forget, question="paraphrased_question")
    assert found["forget"]["paraphrase_prob"] == pytest.approx(asked)
    for group in ("real_authors", "world_facts"):
        rows = getattr(DATA, group)
        right = probabilities(model, tokenizer, rows)
        wrong = [probabilities(model, tokenizer, rows, lambda row, i=i: row["perturbed_answer"][i]) for i in range(3)]
        normalised = [p / (p + sum(others)) for p, *others in zip(right, *wrong, strict=True)]
        assert found[group]["prob"] == pytest.approx(normalised)


@pytest.mark.parametrize(
    ("group", "rows", "right"),
    [
        ("forget", DATA.forget, "paraphrased_answer"),
        ("retain", DATA.retain_eval, "paraphrased_answer"),
        # They have no paraphrases.
        ("real_authors", DATA.real_authors, "answer"),
        ("world_facts", DATA.world_facts, "answer"),
    ],
)
def test_the_truth_ratio_is_that_of_wrong_answers_to_the_right_one(group, rows, right, found, model, tokenizer):
    for i, row in enumerate(rows):
        (known,) = probabilities(model, tokenizer, [row], right)
        wrong = [{"question": row["question"], "answer": text} for text in row["perturbed_answer"]]
        product = math.prod(probabilities(model, tokenizer, wrong))
        assert found[group]["truth_ratio"][i] == pytest.approx(product ** (1 / len(wrong)) / known)


def test_what_is_said_is_held_against_the_answer(found, model, tokenizer):
    for field, measure in (("question", "rouge_l"), ("paraphrased_question", "paraphrase_rouge_l")):
        prompts = [encode_question(tokenizer, row[field])[0] for row in DATA.forget]
        said = generate(model, tokenizer, prompts, max_new_tokens=6)
        assert found["forget"][measure] == rouge_l(said, [row["answer"] for row in DATA.forget])


def test_one_pass_gives_extraction_memorization_and_min_k(found, model, tokenizer):
    answers = teacher_forced(model, encode(tokenizer, DATA.forget))
    assert found["forget"]["extraction"] == [answer.extraction_strength for answer in answers]
    assert found["forget"]["memorization"] == [answer.exact_memorization for answer in answers]
    assert found["forget"]["min_k"] == pytest.approx([answer.min_k() for answer in answers])
    assert found["holdout"]["min_k"] == pytest.approx([answer.min_k() for answer in teacher_forced(model, encode(tokenizer, DATA.holdout))])


def test_the_batch_size_changes_no_score(found, model, tokenizer):
    other = flatten(evaluate(model, tokenizer, DATA, replace(HOW, batch_size=1)))
    assert other == {name: pytest.approx(value) for name, value in flatten(found).items()}


def test_for_utility_alone_the_forget_rows_are_not_needed(found, model, tokenizer):
    without = replace(DATA, forget=[], holdout=[])
    kept = evaluate(model, tokenizer, without, HOW, utility_only=True)
    assert list(kept) == list(UTILITY_GROUPS)
    assert flatten(kept) == {name: pytest.approx(value) for name, value in flatten(found).items() if name.split()[0] in UTILITY_GROUPS}
    assert utility(kept) == pytest.approx(utility(found))


def test_template_and_system_message_are_passed_on(model, chatting, found):
    seen = []
    for change in ({}, {"template": "plain"}, {"system": "Be kind."}):
        how = replace(HOW, max_new_tokens=1, **change)
        seen.append(evaluate(model, chatting, DATA, how)["forget"]["prob"])
        items = encode(chatting, DATA.forget, template=how.template, system=how.system)
        assert seen[-1] == pytest.approx(answer_probability(model, items).tolist())
    assert len({tuple(values) for values in seen}) == 3


def test_the_model_is_left_as_it_was(model, tokenizer, snapshot):
    before = snapshot(model)
    evaluate(model, tokenizer, DATA, HOW)
    assert snapshot(model) == before


# ---------------------------------------------------------------------------------------------------------------------------
# Infinite ratios


def test_an_infinite_ratio_is_one_that_json_can_hold():
    ask = tofu_scores._Asking(None, None, HOW, False)
    assert truth_ratio(5000.0, [0.0]) == math.inf
    ratios = ask.ratios([5000.0, 1.0, 0.0], [[0.0], [1.0, 1.0], [5000.0]])
    assert ratios == [LARGEST_RATIO, 1.0, 0.0]
    json.dumps(ratios, allow_nan=False)


@given(st.lists(st.one_of(st.floats(0, 1e6), st.just(math.inf)), min_size=1, max_size=8))
def test_no_measure_tells_an_infinite_ratio_from_its_stand_in(ratios):
    held = [min(ratio, LARGEST_RATIO) for ratio in ratios]
    assert truth_ratio_forget(held) == pytest.approx(truth_ratio_forget(ratios), abs=1e-12)
    assert truth_ratio_kept(held) == truth_ratio_kept(ratios)
    retain = [0.5, 2.0, math.inf]
    assert forget_quality(held, [0.5, 2.0, LARGEST_RATIO]) == forget_quality(ratios, retain)


# ---------------------------------------------------------------------------------------------------------------------------
# The common implementation's way


def test_compat_goes_through_to_every_score(model, chatting, monkeypatch):
    ours = evaluate(model, chatting, DATA, replace(HOW, system="Be kind."))
    for name in ("encode", "encode_question", "generate"):
        monkeypatch.setattr(tofu_scores, name, lambda *_, **options: pytest.fail("not the common implementation's"))
    how = replace(HOW, compat=True, system="Be kind.")
    found = evaluate(model, chatting, DATA, how)

    def score(rows, answer="answer", question="question"):
        items = [{"question": row[question], "answer": row[answer]} for row in rows]
        return teacher_forced(model, compat_encode(chatting, items, system=how.system), batch_size=4, compat=chatting)

    answers = score(DATA.forget)
    assert found["forget"]["prob"] == pytest.approx([answer.probability for answer in answers])
    assert found["forget"]["extraction"] == [answer.extraction_strength for answer in answers]
    assert found["forget"]["min_k"] == pytest.approx([answer.min_k() for answer in answers])
    assert found["holdout"]["min_k"] == pytest.approx([answer.min_k() for answer in score(DATA.holdout)])
    prompts = [compat_prompt(chatting, row["question"], system=how.system) for row in DATA.forget]
    said = compat_generate(model, chatting, prompts, max_new_tokens=6)
    assert found["forget"]["rouge_l"] == rouge_l(said, [row["answer"] for row in DATA.forget])
    assert found.keys() == ours.keys()
    for group in found:
        for name in found[group].keys() & {"prob", "truth_ratio", "min_k"}:
            assert found[group][name] != pytest.approx(ours[group][name], rel=1e-6), "their end of the answer has more tokens"


def test_compat_guards_the_denominators():
    theirs = tofu_scores._Asking(None, None, replace(HOW, compat=True), False)
    # P = e⁻³⁰ ≈ 9.4e-14 is nothing beside their 1e-10.
    assert theirs.ratios([30.0], [[30.0]]) == pytest.approx([math.exp(-30) / (math.exp(-30) + 1e-10)])
    assert tofu_scores._Asking(None, None, HOW, False).ratios([30.0], [[30.0]]) == [1.0]


def test_compat_needs_a_chat_template(model, tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        evaluate(model, tokenizer, DATA, replace(HOW, compat=True))


def test_the_model_of_a_family_without_a_pad_token_is_scored_alike(make_tokenizer):
    without = make_tokenizer([row["answer"] for row in DATA.forget], end=False)
    other = models.build("gpt2", vocab_size=320, hidden_size=32, layers=2)
    found = evaluate(other, without, DATA, HOW)
    assert found["forget"]["prob"] == pytest.approx(probabilities(other, without, DATA.forget))
