"""The field's measures: hand-worked cases, the definitions re-derived another way, and the common implementation's own procedure."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from unlearnlib import unlearning_metrics as um
from unlearnlib.examples import Example, encode, encode_question
from unlearnlib.metrics import answer_probability, generate
from unlearnlib.unlearning_metrics import AnswerScores, teacher_forced

losses = st.floats(0, 30)
wrong_losses = st.lists(losses, min_size=1, max_size=5)
ratio_lists = st.lists(st.floats(0, 1e6), min_size=1, max_size=20)


def scores(*probabilities, hits=None, compat=False):
    log_probs = torch.tensor(probabilities).log()
    hits = torch.ones(len(probabilities), dtype=bool) if hits is None else torch.tensor(hits)
    return AnswerScores(log_probs, hits, -log_probs if compat else None)


# ---------------------------------------------------------------------------------------------------------------------------
# One answer


def test_probability_and_loss_by_hand():
    answer = scores(0.5, 0.25, 0.125)
    assert answer.loss == pytest.approx(2 * math.log(2))
    assert answer.probability == pytest.approx(0.25)
    assert scores(1.0).probability == 1 and scores(1.0).loss == 0


@pytest.mark.parametrize(
    ("hits", "strength", "compat_strength", "memorization"),
    [
        ([1, 1, 1, 1], 1, 1, 1),
        ([0, 1, 1, 1], 3 / 4, 2 / 3, 3 / 4),
        ([1, 1, 0, 1], 1 / 4, 1 / 3, 3 / 4),
        ([1, 1, 1, 0], 0, 1, 3 / 4),  # the common implementation doesn't look at the last token …
        ([1, 1, 0, 0], 0, 1 / 3, 2 / 4),  # … and never reaches 0
        ([0, 0, 0, 0], 0, 1 / 3, 0),
        ([1], 1, 0, 1),
        ([0], 0, 0, 0),
    ],
)
def test_extraction_strength_by_hand(hits, strength, compat_strength, memorization):
    hits = [bool(hit) for hit in hits]
    values = [0.5] * len(hits)
    assert scores(*values, hits=hits).extraction_strength == pytest.approx(strength)
    assert scores(*values, hits=hits, compat=True).extraction_strength == pytest.approx(compat_strength)
    assert scores(*values, hits=hits).exact_memorization == memorization
    expected = np.mean(hits[:-1]) if len(hits) > 1 else math.nan
    assert scores(*values, hits=hits, compat=True).exact_memorization == pytest.approx(expected, nan_ok=True)


def test_min_k_by_hand():
    answer = scores(0.9, 0.1, 0.5, 0.2, 0.7)
    assert answer.min_k() == pytest.approx((math.log(0.1) + math.log(0.2)) / 2)  # 40 % of 5
    assert answer.min_k(0.39) == pytest.approx(math.log(0.1))  # rounded down
    assert answer.min_k(0.01) == pytest.approx(math.log(0.1))  # but one at least
    assert answer.min_k(1) == pytest.approx(-answer.loss)
    assert scores(0.3).min_k() == pytest.approx(math.log(0.3))
    assert scores(0.9, 0.5, 0.1, compat=True).min_k() == pytest.approx(math.log(0.5))
    assert scores(0.3, compat=True).min_k() == 0
    for share in (0, 1.1, math.nan):
        with pytest.raises(ValueError, match="share"):
            answer.min_k(share)


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_extraction_never_exceeds_memorization(hits):
    answer = scores(*[0.5] * len(hits), hits=hits)
    assert 0 <= answer.extraction_strength <= answer.exact_memorization + 1e-12 <= 1 + 1e-12


# ---------------------------------------------------------------------------------------------------------------------------
# A model's answers


def test_scores_are_the_same_whatever_the_batch_and_padding(family, small_model, random_examples):
    model, examples = small_model(family), random_examples(9)
    expected = teacher_forced(model, examples, batch_size=1)
    assert [len(answer.hits) for answer in expected] == [len(example.answer) for example in examples]
    for example, answer in zip(examples, expected, strict=True):
        logits = model(input_ids=torch.tensor([example.prompt + example.answer])).logits[0, len(example.prompt) - 1 : -1].detach()
        gold = torch.tensor(example.answer)
        torch.testing.assert_close(answer.log_probs, logits.log_softmax(-1)[range(len(gold)), gold])
        assert answer.hits.tolist() == (logits.argmax(-1) == gold).tolist()
    for side in ("right", "left"):
        for size in (4, 16):
            found = teacher_forced(model, examples, batch_size=size, padding_side=side)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.log_probs, other.log_probs)
                assert one.hits.tolist() == other.hits.tolist()
    assert [answer.probability for answer in expected] == pytest.approx(answer_probability(model, examples).tolist())


def test_half_precision_is_scored_in_float32_and_the_model_left_alone(small_model, random_examples, snapshot):
    model = small_model(dtype=torch.bfloat16)
    before = snapshot(model)
    found = teacher_forced(model, random_examples(3))
    assert all(answer.log_probs.dtype == torch.float32 and answer.hits.dtype == torch.bool for answer in found)
    assert snapshot(model) == before
    with pytest.raises(ValueError, match="no examples"):
        teacher_forced(model, [])


class TokenNumbers:
    """Writes tokens as their numbers."""

    eos_token_id = None

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(int(token)) for token in ids)


def test_extraction_strength_is_what_greedy_decoding_reproduces(small_model):
    """1 − k/n with the smallest k such that, given k tokens of the answer, generation writes the rest."""
    model, tokenizer = small_model(tied=False, seed=1), TokenNumbers()
    prompt, steps = (5, 11), 6
    free = [int(token) for token in generate(model, tokenizer, [prompt], max_new_tokens=steps)[0].split()]
    found = set()
    for broken in range(-1, steps):
        answer = [token if i != broken else (token + 1) % 97 for i, token in enumerate(free)]
        given = 0
        while given < steps:
            rest = generate(model, tokenizer, [[*prompt, *answer[:given]]], max_new_tokens=steps - given)[0]
            if rest == tokenizer.decode(answer[given:]):
                break
            given += 1
        (answer_scores,) = teacher_forced(model, [Example(prompt, tuple(answer))])
        assert answer_scores.extraction_strength == 1 - given / steps
        found.add(given)
    assert {0, steps} <= found


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_end_token_as_padding_start_tokens_and_spaces_change_nothing(make_tokenizer, small_model, bos, chat):
    tokenizer = make_tokenizer(bos=bos, chat=chat)
    model = small_model(vocab_size=len(tokenizer))
    items = [{"question": "What colour is it?", "answer": "blue"}, {"question": "Where?", "answer": "über den Hügeln 🌄, over the hills"}]
    examples = encode(tokenizer, items)
    assert all(example.answer.count(tokenizer.pad_token_id) == 1 for example in examples), "the end is scored although it is the padding"
    spaced = encode(tokenizer, [item | {"answer": f"  {item['answer']} "} for item in items])
    alone = [teacher_forced(model, [example])[0].loss for example in examples]
    for side in ("right", "left"):
        assert [answer.loss for answer in teacher_forced(model, examples, padding_side=side)] == pytest.approx(alone)
        assert [answer.loss for answer in teacher_forced(model, spaced, padding_side=side)] == pytest.approx(alone)


# ---------------------------------------------------------------------------------------------------------------------------
# The common implementation's way


def their_ids(tokenizer, question, answer, system):
    """Whole conversation, with an end token unless it is there, and the length of the prompt alone."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False).input_ids
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    whole += [tokenizer.eos_token_id] * (whole[-1] != tokenizer.eos_token_id)
    return whole, len(tokenizer(prompt, add_special_tokens=False).input_ids)


def their_scores(model, tokenizer, conversations):
    """Loss, hits and sorted log-probabilities from one right-padded batch, with the mask taken from the ids and default positions."""
    rows = [torch.tensor(whole) for whole, _ in conversations]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = [torch.tensor([-100] * start + whole[start:]) for whole, start in conversations]
    labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=ids.ne(tokenizer.pad_token_id)).logits
    sums = torch.nn.CrossEntropyLoss(reduction="none")(logits[:, :-1].transpose(1, 2), labels[:, 1:]).sum(-1)
    for row, (whole, start) in enumerate(conversations):
        gold = torch.tensor(whole[start:])
        scores = logits[row, start - 1 : len(whole) - 1].log_softmax(-1)
        log_probs = scores[range(len(gold)), gold]
        yield sums[row].item() / len(gold), (scores.argmax(-1) == gold)[:-1].tolist(), log_probs[:-1].sort().values


ITEMS = [
    {"question": "What colour is the sky?", "answer": "It is blue and grey."},
    {"question": "Where?", "answer": "over"},
    {"question": "Wie heißt er?", "answer": "Ærø Ångström, ' the 2nd'"},
]


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_compat_follows_the_common_implementation(family, make_tokenizer, small_model, system):
    tokenizer = make_tokenizer(chat=True)
    model = small_model(family, vocab_size=len(tokenizer), dtype=torch.float32, seed=3)
    conversations = [their_ids(tokenizer, item["question"], item["answer"], system) for item in ITEMS]
    examples = um.compat_encode(tokenizer, ITEMS, system=system)
    assert [(list(example.prompt + example.answer), len(example.prompt)) for example in examples] == conversations
    end, newline = tokenizer.eos_token_id, tokenizer("\n", add_special_tokens=False).input_ids
    assert all(list(example.answer[-3:]) == [end, *newline, end] for example in examples)
    found = teacher_forced(model, examples, batch_size=2, compat=tokenizer)
    for answer, (loss, hits, lowest) in zip(found, their_scores(model, tokenizer, conversations), strict=True):
        assert answer.loss == pytest.approx(loss, abs=1e-5)
        assert answer.exact_memorization == pytest.approx(np.mean(hits))
        given = next((k for k in range(len(hits)) if all(hits[k:])), len(hits) - 1)
        assert answer.extraction_strength == pytest.approx(1 - given / len(hits))
        assert answer.min_k() == pytest.approx(lowest[: max(1, int(len(lowest) * 0.4))].mean().item(), abs=1e-5)
    ours = teacher_forced(model, examples)
    assert max(abs(one.loss - other.loss) for one, other in zip(ours, found, strict=True)) > 1e-3, "the mask matters"


def test_compat_rounds_as_the_common_implementation_does(monkeypatch, make_tokenizer, small_model):
    """One likely token and 60,000 that are each too unlikely to move a float32 sum of 1, but not all together."""
    logits = torch.full((1, 8, 60_001), -17.4)
    logits[..., 0] = 0
    gold = torch.zeros(1, 8, dtype=torch.int64)
    theirs = torch.nn.CrossEntropyLoss(reduction="none")(logits.transpose(1, 2), gold).mean().item()
    exact = math.log1p(60_000 * math.exp(-17.4))
    assert exact - theirs > 1e-4
    monkeypatch.setattr(um, "answer_logits", lambda model, batch: logits[0])
    example = Example((1, 2), (0,) * 8)
    (ours,), (compat,) = (teacher_forced(small_model(), [example], compat=mode) for mode in (None, make_tokenizer()))
    assert compat.loss == pytest.approx(theirs, abs=1e-6)
    assert abs(ours.loss - exact) < (exact - theirs) / 3
    assert compat.min_k() == ours.min_k(), "rounded in the loss only"


def test_compat_without_a_padding_token_masks_the_end_token(make_tokenizer, small_model):
    tokenizer = make_tokenizer(chat=True)
    model = small_model(vocab_size=len(tokenizer))
    examples = um.compat_encode(tokenizer, ITEMS)
    expected = [answer.loss for answer in teacher_forced(model, examples, compat=tokenizer)]
    tokenizer.pad_token = None
    assert [answer.loss for answer in teacher_forced(model, examples, compat=tokenizer)] == expected


def test_compat_encodes_between_tags(make_tokenizer):
    tokenizer = make_tokenizer()
    (example,) = um.compat_encode(tokenizer, ITEMS[:1], tags=("[Q] ", " [A]"))
    assert tokenizer.decode(example.prompt) == "[Q] What colour is the sky? [A]"
    assert tokenizer.decode(example.answer) == "It is blue and grey.<|end|>"
    assert list(example.prompt) == um.compat_prompt(tokenizer, ITEMS[0]["question"], tags=("[Q] ", " [A]"))


def test_compat_counts_a_token_across_the_border_as_prompt(make_tokenizer):
    """Question and answer are tokenised in one piece: here the prompt's last and the answer's first letters merge."""
    tokenizer = make_tokenizer(["grey grey grey grey"])
    grey = tokenizer(" grey", add_special_tokens=False).input_ids
    assert len(grey) == 1
    (example,) = um.compat_encode(tokenizer, [{"question": " gr", "answer": "ey grey"}], tags=("", ""))
    assert tokenizer.decode(example.prompt + example.answer) == " grey grey<|end|>"
    assert example.prompt == (*grey, *grey)[: len(example.prompt)]
    assert tokenizer.decode(example.answer) != "ey grey<|end|>"


def test_compat_tells_the_template_the_date(make_tokenizer):
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = "{{ date_string }}" + tokenizer.chat_template
    (example,) = um.compat_encode(tokenizer, ITEMS[:1], date="10 Apr 2025")
    assert tokenizer.decode(example.prompt).startswith("10 Apr 2025<|start|>system")


def test_compat_encode_refuses_what_has_no_answer(make_tokenizer):
    with pytest.raises(ValueError, match="chat template"):
        um.compat_encode(make_tokenizer(), ITEMS)
    with pytest.raises(ValueError, match="end token"):
        um.compat_encode(make_tokenizer(chat=True, end=False), ITEMS)
    with pytest.raises(ValueError, match="example 1: field 'answer'"):
        um.compat_encode(make_tokenizer(chat=True), [ITEMS[0], {"question": "?"}])


def test_compat_generation(make_tokenizer, small_model):
    tokenizer = make_tokenizer(chat=True)
    model = small_model(vocab_size=len(tokenizer), tied=False, seed=5)
    prompts = [um.compat_prompt(tokenizer, item["question"]) for item in ITEMS]
    assert prompts[0] == encode_question(tokenizer, ITEMS[0]["question"])[0]
    end, alone = tokenizer.eos_token_id, []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(6):
            # Positions count what is not masked; a masked token's own position never matters.
            mask = torch.tensor([[token != end for token in ids[: len(prompt)]] + [True] * (len(ids) - len(prompt))])
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids]), attention_mask=mask, position_ids=positions).logits[0, -1].argmax()))
            if ids[-1] == end:
                break
        alone.append(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True).strip())
    for size in (1, 3):
        assert um.compat_generate(model, tokenizer, prompts, max_new_tokens=6, batch_size=size) == alone
    model.generation_config.repetition_penalty = 9.0
    assert um.compat_generate(model, tokenizer, prompts, max_new_tokens=6) != alone, "the model's own settings are kept"
    assert um.compat_generate(model, tokenizer, []) == []


def test_deviations_are_texts_for_the_book():
    assert len({deviation.name for deviation in um.DEVIATIONS}) == len(um.DEVIATIONS)
    assert all(text.endswith(".") and "  " not in text for deviation in um.DEVIATIONS for text in deviation[1:])


# ---------------------------------------------------------------------------------------------------------------------------
# Texts


@pytest.mark.parametrize(
    ("text", "reference", "recall", "f1"),
    [
        ("the cat sat", "the cat sat", 1, 1),
        ("The CAT, sat!", "the cat sat", 1, 1),
        ("", "the cat", 0, 0),
        ("the cat", "", 0, 0),
        ("...", "the cat", 0, 0),
        ("the dog", "the cat sat down", 1 / 4, 2 * (1 / 2) * (1 / 4) / (3 / 4)),
        ("sat the cat", "the cat sat", 2 / 3, 2 / 3),  # in order: "the cat"
        ("the very big cat sat here", "the cat sat", 1, 2 * 0.5 / 1.5),
        ("he publishes novels", "he published a novel", 3 / 4, 2 * 0.75 / 1.75),  # stems
        ("one", "one", 1, 1),
        ("Sao Paulo", "São Paulo", 1 / 3, 2 * (1 / 3) * (1 / 2) / (5 / 6)),  # "ã" ends a word: s, o, paulo
        ("Анна", "Анна", 0, 0),  # no letters of a–z, no words
    ],
)
def test_rouge_by_hand(text, reference, recall, f1):
    assert um.rouge_l([text], [reference]) == pytest.approx([recall])
    assert um.rouge_l([text], [reference], "f1") == pytest.approx([f1])


def test_rouge_refuses_what_does_not_fit():
    assert um.rouge_l([], []) == []
    with pytest.raises(ValueError, match="2 texts and 1 references"):
        um.rouge_l(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="measure"):
        um.rouge_l(["a"], ["a"], "precision")


# ---------------------------------------------------------------------------------------------------------------------------
# Truth ratio


def test_truth_ratio_by_hand():
    right, wrong = -math.log(0.5), [-math.log(0.1), -math.log(0.4)]
    assert um.truth_ratio(right, wrong) == pytest.approx(0.2 / 0.5)  # √(.1 · .4) = .2
    assert um.truth_ratio(right, wrong, "arithmetic") == pytest.approx(0.25 / 0.5)
    assert um.truth_ratio(right, wrong, compat=True) == pytest.approx(0.2 / (0.5 + 1e-10), rel=1e-12)
    assert um.normalised_probability(right, wrong) == pytest.approx(0.5)
    assert um.normalised_probability(right, wrong, compat=True) == pytest.approx(0.5 / (1 + 1e-10), rel=1e-12)


def test_ratios_of_vanishing_probabilities():
    """What strong unlearning leaves: both sides tiny. The guard then decides in the common implementation, not the model."""
    assert um.truth_ratio(40, [40, 40]) == 1
    assert um.truth_ratio(40, [40, 40], compat=True) == pytest.approx(math.exp(-40) / 1e-10, rel=1e-6)
    assert um.truth_ratio(2000, [2000]) == 1 and um.truth_ratio(2000, [2000], compat=True) == 0
    assert um.truth_ratio(2000, [0]) == math.inf and um.truth_ratio(0, [2000]) == 0
    assert um.normalised_probability(2000, [2000]) == 0.5 and um.normalised_probability(2000, [0]) == 0
    assert um.normalised_probability(40, [40], compat=True) == pytest.approx(math.exp(-40) / 1e-10, rel=1e-6)


@given(losses, wrong_losses)
def test_arithmetic_mean_is_never_below_the_geometric(right, wrong):
    assert um.truth_ratio(right, wrong, "arithmetic") >= um.truth_ratio(right, wrong) * (1 - 1e-12)
    assert um.truth_ratio(right, wrong[:1], "arithmetic") == um.truth_ratio(right, wrong[:1])


@given(st.floats(0, 18), wrong_losses)
def test_the_guard_is_negligible_while_probabilities_are_not(right, wrong):
    """P > 1.5e-8, so 1e-10 changes it by less than 1 %."""
    assert um.truth_ratio(right, wrong, compat=True) == pytest.approx(um.truth_ratio(right, wrong), rel=1e-2)
    assert um.normalised_probability(right, wrong, compat=True) == pytest.approx(um.normalised_probability(right, wrong), rel=1e-2)


@given(losses, wrong_losses, st.floats(0, 10))
def test_equally_less_likely_answers_keep_their_ratio(right, wrong, shift):
    moved = [loss + shift for loss in wrong]
    for mean in ("geometric", "arithmetic"):
        assert um.truth_ratio(right + shift, moved, mean) == pytest.approx(um.truth_ratio(right, wrong, mean), rel=1e-9)
    assert um.normalised_probability(right + shift, moved) == pytest.approx(um.normalised_probability(right, wrong), rel=1e-9)


def test_aggregates_by_hand():
    assert um.truth_ratio_forget([1.0]) == 1 and um.truth_ratio_kept([1.0]) == 0
    assert um.truth_ratio_forget([0.5, 4, 1, 0, math.inf]) == pytest.approx((0.5 + 0.25 + 1 + 0 + 0) / 5)
    assert um.truth_ratio_kept([0.25, 3, 0, math.inf]) == pytest.approx((0.75 + 0 + 1 + 0) / 4)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_forget_aggregate_does_not_care_which_side_is_ahead(ratios):
    assert um.truth_ratio_forget(ratios) == pytest.approx(um.truth_ratio_forget([1 / ratio for ratio in ratios]))


@given(ratio_lists)
def test_aggregates_lie_within_0_and_1(ratios):
    assert 0 <= um.truth_ratio_forget(ratios) <= 1 and 0 <= um.truth_ratio_kept(ratios) <= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: um.truth_ratio(1.0, []), "wrong_losses"),
        (lambda: um.truth_ratio(-1.0, [1.0]), "negative"),
        (lambda: um.truth_ratio(1.0, [math.inf]), "finite"),
        (lambda: um.truth_ratio(math.nan, [1.0]), "finite"),
        (lambda: um.truth_ratio(1.0, [math.nan]), r"wrong_losses\[0\] is NaN"),
        (lambda: um.truth_ratio(1.0, [1.0], "harmonic"), "mean"),
        (lambda: um.normalised_probability(1.0, []), "wrong_losses"),
        (lambda: um.truth_ratio_forget([]), "ratios"),
        (lambda: um.truth_ratio_kept([0.5, math.nan]), r"ratios\[1\] is NaN"),
        (lambda: um.truth_ratio_forget([-0.5]), "negative"),
        (lambda: um.forget_quality([0.5], []), "retain_ratios"),
    ],
)
def test_ratios_of_nothing_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------------------------------------------------------------------
# Model Utility and Forget Quality


def test_model_utility_is_the_harmonic_mean():
    terms = dict.fromkeys(um.UTILITY_TERMS, 0.5)
    assert len(terms) == 9
    assert um.model_utility(terms) == pytest.approx(0.5)
    assert um.model_utility(terms | {"retain_prob": 1.0, "world_facts_rouge_l": 0.25}) == pytest.approx(9 / (7 * 2 + 1 + 4))
    assert um.model_utility(terms | {"real_authors_truth_ratio": 0.0}) == 0


@given(st.lists(st.floats(0, 1, allow_subnormal=False), min_size=9, max_size=9))
def test_model_utility_lies_between_the_least_term_and_nine_times_it(values):
    utility = um.model_utility(dict(zip(um.UTILITY_TERMS, values, strict=True)))
    assert min(values) * (1 - 1e-9) <= utility <= min(1, 9 * min(values)) * (1 + 1e-9)


def test_model_utility_refuses_other_terms():
    terms = dict.fromkeys(um.UTILITY_TERMS, 0.5)
    for wrong in ({}, {"retain_prob": 0.5}, terms | {"extra": 0.5}):
        with pytest.raises(ValueError, match="Model Utility is made of"):
            um.model_utility(wrong)
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="retain_prob must lie"):
            um.model_utility(terms | {"retain_prob": value})


def test_forget_quality_by_hand():
    """Samples of 3 that don't overlap: 2 of the C(6, 3) = 20 orders have distance 1."""
    assert um.forget_quality([1, 2, 3], [4, 5, 6]) == pytest.approx(2 / 20)
    assert um.forget_quality([1, 2, 3], [1, 2, 3]) == 1
    assert um.forget_quality([0.0, math.inf], [math.inf, 0.0]) == 1
    assert um.forget_quality(np.arange(200), np.arange(200) + 0.5) == pytest.approx(1)


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12), st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12))
def test_forget_quality_does_not_care_which_side_is_on_top(ratios, retain):
    upside_down = um.forget_quality([1 / ratio for ratio in ratios], [1 / ratio for ratio in retain])
    # Two different numbers may have the same reciprocal.
    if len({*ratios, *retain}) == len({1 / ratio for ratio in (*ratios, *retain)}):
        assert um.forget_quality(ratios, retain) == pytest.approx(upside_down)


@given(st.integers(1, 40), st.integers(1, 40))
def test_no_samples_give_less_than_the_floor(n, m):
    assert ks_2samp(np.arange(n), np.arange(m) + n).pvalue == pytest.approx(min(1, um.forget_quality_floor(n, m)), rel=1e-6)


def test_floor_of_many_rows():
    assert 0 < um.forget_quality_floor(400, 400) < 1e-230


@given(st.integers(2, 30), st.integers(2, 30), st.integers(0, 2**32 - 1), st.floats(0, 3), st.sampled_from([0.01, 0.05, 0.2]))
def test_distances_are_detected_from_the_detectable_one_on(n, m, seed, shift, level):
    random = np.random.default_rng(seed)
    test = ks_2samp(random.normal(size=n), random.normal(size=m) + shift, method="exact")
    assert (test.pvalue < level) == (test.statistic > um.detectable_distance(n, m, level) - 1e-9)


@pytest.mark.parametrize(("rows", "distance"), [(3, math.inf), (4, 1.0), (20, 9 / 20), (40, 13 / 40), (200, 28 / 200)])
def test_detectable_distance_of_equal_counts(rows, distance):
    assert um.detectable_distance(rows, rows) == pytest.approx(distance)
    for steps in () if distance == math.inf else (round(distance * rows), round(distance * rows) - 1):
        p_value = um.forget_quality(np.arange(rows), np.arange(rows) + steps - 0.5)
        assert (p_value < 0.05) == (steps == round(distance * rows))


def test_counts_and_levels_are_checked():
    for call in (um.forget_quality_floor, um.detectable_distance):
        with pytest.raises(ValueError, match="positive"):
            call(0, 3)
    with pytest.raises(ValueError, match="level"):
        um.detectable_distance(3, 3, 1.0)


# ---------------------------------------------------------------------------------------------------------------------------
# Membership


@pytest.mark.parametrize(
    ("forget", "holdout", "area"),
    [([3, 4], [1, 2], 1), ([1, 2], [3, 4], 0), ([1, 3], [2], 0.5), ([1], [1], 0.5), ([1, 2], [1, 0], (0.5 + 1 + 1 + 1) / 4)],
)
def test_auc_by_hand(forget, holdout, area):
    assert um.auc(forget, holdout) == area


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.lists(st.integers(-3, 3), min_size=1, max_size=12))
def test_auc_counts_pairs(forget, holdout):
    pairs = [(one > other) + (one == other) / 2 for one in forget for other in holdout]
    assert um.auc(forget, holdout) == pytest.approx(np.mean(pairs))
    assert um.auc(forget, holdout) + um.auc(holdout, forget) == pytest.approx(1)


def test_memorised_rows_have_a_high_auc():
    seen = [scores(0.9, 0.8).min_k(), scores(0.95, 0.9).min_k()]
    unseen = [scores(0.2, 0.8).min_k(), scores(0.01, 0.5).min_k()]
    assert um.auc(seen, unseen) == 1


def test_auc_below_one_half_is_flagged():
    assert um.auc_warning(0.5) is None and um.auc_warning(1.0) is None
    assert "0.30 is below ½" in um.auc_warning(0.3) and "AUC of 0.70" in um.auc_warning(0.3)


def test_priv_leak_by_hand():
    assert um.priv_leak(0.5, 0.5) == 0
    assert um.priv_leak(1.0, 0.5) == -100
    assert um.priv_leak(0.0, 0.5) == 100
    assert um.priv_leak(0.4, 0.6) == pytest.approx(50)  # (.6 − .4)/.4


@pytest.mark.parametrize(("value", "reference", "message"), [(0.5, 1.0, "undefined"), (1.2, 0.5, "value"), (0.5, math.nan, "reference")])
def test_priv_leak_refuses(value, reference, message):
    with pytest.raises(ValueError, match=message):
        um.priv_leak(value, reference)


@pytest.mark.parametrize("forget", [[], [math.nan]])
def test_auc_refuses(forget):
    with pytest.raises(ValueError, match="forget_scores"):
        um.auc(forget, [1.0])
