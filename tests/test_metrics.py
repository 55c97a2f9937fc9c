"""Measures: probability by hand and whatever the batch, greedy generation, whole-word matches, repeated n-grams."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib.examples import Example, batches
from unlearnlib.metrics import answer_log_probs, answer_probability, contains_answer, generate, repeated_ngram_rate


def by_hand(model, example):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([example.prompt + example.answer])).logits[0]
    scores = logits.log_softmax(-1)
    start = len(example.prompt)
    picked = [scores[start - 1 + i, token].item() for i, token in enumerate(example.answer)]
    return math.exp(sum(picked) / len(picked))


def test_probability_by_hand_whatever_the_batch_and_padding(family, small_model, random_examples):
    model, examples = small_model(family), random_examples(9)
    expected = [by_hand(model, example) for example in examples]
    assert max(expected) > 2 * min(expected)
    for side in ("right", "left"):
        for size in (1, 4, 16):
            found = answer_probability(model, examples, batch_size=size, padding_side=side)
            assert found.dtype == torch.float64
            assert found.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_scored_in_float32(small_model, random_examples, dtype):
    model, examples = small_model(dtype=dtype), random_examples(5)
    (batch,) = batches(examples)
    scores = answer_log_probs(model, batch)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all() and (scores < 0).all()
    assert (scores * 256 != (scores * 256).round()).any(), "not rounded to the weights' type"


def test_scoring_leaves_the_model_alone(family, small_model, random_examples, snapshot):
    model = small_model(family)
    before = snapshot(model)
    answer_probability(model, random_examples(3))
    with pytest.raises(IndexError):
        answer_probability(model, [Example((1, 9999), (2,))])
    assert snapshot(model) == before


def greedy(model, prompt, steps, end):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            ids.append(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item())
            if ids[-1] == end:
                break
    return ids[len(prompt) :]


class TokenNumbers:
    """Writes tokens as their numbers, so that texts differ wherever tokens do."""

    def __init__(self, end=1):
        self.eos_token_id = end

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(int(token)) for token in ids if not (skip_special_tokens and token == self.eos_token_id))


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 97, (length,), generator=generator).tolist() for length in (1, 7, 3, 12, 3)]


def test_generation_in_padded_batches_is_greedy_decoding_by_hand(family, small_model, prompts):
    model, tokenizer = small_model(family, tied=False, seed=1), TokenNumbers()
    expected = [tokenizer.decode(greedy(model, prompt, 8, 1), skip_special_tokens=True) for prompt in prompts]
    assert len(set(expected)) == len(prompts)
    for size in (1, 2, 5):
        assert generate(model, tokenizer, prompts, max_new_tokens=8, batch_size=size) == expected


def test_generation_stops_at_the_end_token(small_model, prompts):
    model = small_model(tied=False)
    free = [greedy(model, prompt, 8, None) for prompt in prompts]
    end = free[1][2]
    cut = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in free]
    assert len(cut[1]) <= 2 and max(map(len, cut)) == 8, "some stop, some go on"
    assert generate(model, TokenNumbers(end), prompts, max_new_tokens=8) == [" ".join(map(str, tokens)) for tokens in cut]


@pytest.mark.parametrize(
    "habit",
    [
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1},
        {"do_sample": True, "temperature": 9.0},
        {"num_beams": 3},
        {"min_length": 20},
    ],
    ids=lambda habit: next(iter(habit)),
)
def test_generation_is_greedy_whatever_the_model_brings_along(small_model, prompts, habit):
    """Qwen2.5's checkpoints, for one, come with a repetition penalty."""
    model = small_model("qwen2")
    end = greedy(model, prompts[1], 4, None)[2]
    expected = generate(model, TokenNumbers(end), prompts, max_new_tokens=8)
    for name, value in habit.items():
        setattr(model.generation_config, name, value)
    before = model.generation_config.to_dict()
    assert generate(model, TokenNumbers(end), prompts, max_new_tokens=8) == expected
    assert model.generation_config.to_dict() == before


def test_generation_without_an_end_token(small_model, prompts):
    model, tokenizer = small_model(tied=False), TokenNumbers(None)
    assert generate(model, tokenizer, prompts, max_new_tokens=5) == [tokenizer.decode(greedy(model, prompt, 5, None)) for prompt in prompts]
    assert generate(model, tokenizer, []) == []


@pytest.mark.parametrize(
    ("text", "answer", "contained"),
    [
        ("The capital is Paris.", "Paris", True),
        ("PARIS!", "paris", True),
        ("Parisian streets", "Paris", False),
        ("comParis", "Paris", False),
        ("in 1905, they", "1905", True),
        ("in 19055", "1905", False),
        ("New York City", "New York", True),
        ("Newly York", "New York", False),
        ("it costs $5 there", "$5", True),
        ("it costs $50", "$5", False),
        ("a.b", "a+b", False),
        ("the C++ language", "C++", True),
        ("São Paulo", "são paulo", True),
        ("Malmö", "Malm", False),
        ("snake_case", "case", False),
        ("in Rome", " Rome ", True),
        ("", "Rome", False),
    ],
)
def test_answers_are_found_as_whole_words(text, answer, contained):
    assert contains_answer(text, answer) is contained


@pytest.mark.parametrize(
    ("text", "n", "rate"),
    [
        ("", 4, 0.0),
        ("one two three", 4, 0.0),
        ("one two three four", 4, 0.0),
        ("a a a a a a a", 4, 3 / 4),  # four 4-grams, one distinct
        ("a b c d a b c d", 4, 1 / 5),  # abcd bcda cdab dabc abcd
        ("a b a b", 2, 1 / 3),  # ab ba ab
        ("a b c", 1, 0.0),
        ("a\nb  a\tb", 2, 1 / 3),
    ],
)
def test_repeated_ngrams_by_hand(text, n, rate):
    assert repeated_ngram_rate(text, n) == pytest.approx(rate)


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 5))
def test_repeated_ngrams_count_those_seen_before(words, n):
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    repeats = sum(gram in grams[:i] for i, gram in enumerate(grams))
    assert repeated_ngram_rate(" ".join(words), n) == pytest.approx(repeats / len(grams) if grams else 0)
