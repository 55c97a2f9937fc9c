"""Corpora as windows, and the methods of the tables on them."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib import models
from unlearnlib.baselines import METHODS as GRADIENT
from unlearnlib.baselines import GradientSettings
from unlearnlib.baselines.gradient import Objective
from unlearnlib.corpora import WINDOW, as_examples, unshared, windows
from unlearnlib.examples import encode
from unlearnlib.grom import FitData, FitSettings
from unlearnlib.methods import METHODS, GromSettings

TEXTS = ["The heron stood in the cold river and waited.", "A goat ate the mayor's hat, and nobody minded in the least."]


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer(TEXTS)


@pytest.fixture(scope="module")
def front_tokenizer(make_tokenizer):
    return make_tokenizer(TEXTS, bos=True)


@pytest.fixture(scope="module")
def model():
    return models.build(vocab_size=320, hidden_size=32, intermediate_size=48, layers=2, heads=2, max_length=128)


# ---------------------------------------------------------------------------------------------------------------------------
# Windows


@given(st.lists(st.text(min_size=2, max_size=60).filter(lambda text: len(text.strip()) > 1), min_size=1, max_size=3), st.integers(2, 9))
def test_every_token_but_a_texts_first_is_gold_once(tokenizer, texts, length):
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    if any(len(own) < 2 for own in ids):
        return
    found = windows(tokenizer, texts, length)
    assert [token for window in found for token in window.answer] == [token for own in ids for token in own[1:]]
    assert all(len(window.prompt) == 1 and 2 <= len(window) <= length for window in found)
    # Neighbours share a token: what comes before a window's gold tokens is what came before them in the text.
    for number, own in enumerate(ids):
        mine = [window for window in found if window.name.startswith(f"text {number},")]
        assert [window.prompt[0] for window in mine] == own[: len(own) - 1 : length - 1]


@given(st.integers(2, 9))
def test_a_token_in_front_begins_every_window_and_all_text_is_gold(front_tokenizer, length):
    found = windows(front_tokenizer, TEXTS, length)
    assert {window.prompt for window in found} == {(0,)}
    ids = [token for text in TEXTS for token in front_tokenizer(text, add_special_tokens=False).input_ids]
    assert [token for window in found for token in window.answer] == ids
    assert max(len(window) for window in found) == length


def test_a_window_by_hand(tokenizer):
    ids = tokenizer(TEXTS[0], add_special_tokens=False).input_ids
    first, second = windows(tokenizer, TEXTS[:1], 6)[:2]
    assert (first.prompt, first.answer, first.name) == (tuple(ids[:1]), tuple(ids[1:6]), "text 0, token 1")
    assert (second.prompt, second.answer, second.name) == (tuple(ids[5:6]), tuple(ids[6:11]), "text 0, token 6")
    (whole,) = windows(tokenizer, TEXTS[:1])
    assert len(whole) == len(ids) < WINDOW


def test_nothing_is_capped(tokenizer):
    text = "The heron waited. " * 3000
    count = len(tokenizer(text, add_special_tokens=False).input_ids)
    assert sum(len(window.answer) for window in windows(tokenizer, [text])) == count - 1


@pytest.mark.parametrize(
    ("texts", "length", "message"),
    [
        ([], 400, "at least one text"),
        ("one text", 400, "sequence of at least one text"),
        (["fine", " "], 400, "text 1: is empty"),
        (["fine", None], 400, "text 1: is empty or not text"),
        (["fine", "x"], 400, "text 1: has a single token"),
        (["fine"], 1, "at least 2 tokens"),
    ],
)
def test_what_cannot_be_cut_is_refused(tokenizer, texts, length, message):
    with pytest.raises(ValueError, match=message):
        windows(tokenizer, texts, length)


def test_a_single_token_behind_another_is_a_window(front_tokenizer):
    (window,) = windows(front_tokenizer, ["x"])
    assert (len(window.prompt), len(window.answer)) == (1, 1)


def test_windows_that_two_texts_have_in_common(tokenizer):
    first, second = (windows(tokenizer, [text], 8) for text in TEXTS)
    last = dataclasses.replace(first[-1], name="of another text")
    assert unshared([*second, last], first) == second
    assert unshared(first, first) == [] and unshared(first, second) == first


# ---------------------------------------------------------------------------------------------------------------------------
# Examples in place of questions


def test_examples_stay_as_they_are_and_questions_are_encoded(tokenizer):
    found = windows(tokenizer, TEXTS)
    assert as_examples(tokenizer, found) == found
    rows = [{"question": "Who stood in the river?", "answer": "The heron."}]
    assert as_examples(tokenizer, rows, template="plain") == encode(tokenizer, rows, template="plain")
    assert as_examples(tokenizer, []) == []
    for mixed, place in (([*rows, *found], 1), ([*found, *rows], 2)):
        with pytest.raises(ValueError, match=f"item {place}: .* not both"):
            as_examples(tokenizer, mixed)


@pytest.mark.parametrize("method", ["grad_ascent", "grad_diff", "npo", "simnpo"])
def test_gradient_methods_train_on_windows_as_on_the_same_answers(method, model, tokenizer):
    rows = [{"question": text[:12], "answer": text[12:]} for text in TEXTS]
    examples = encode(tokenizer, rows, template="plain")
    settings = GradientSettings.defaults(method, epochs=1, batch_size=1, micro_batch=None, lr=1e-3, template="plain")
    one, other = (Objective(copy.deepcopy(model), tokenizer, sets[:1], sets[1:], settings) for sets in (rows, examples))
    for asked, ready in zip(one.parts(model, 0), other.parts(model, 0), strict=True):
        assert torch.equal(asked, ready)


def test_grom_and_the_gradient_methods_take_windows(model, tokenizer):
    forget, retain = windows(tokenizer, TEXTS[:1], 8), windows(tokenizer, TEXTS[1:], 8)
    fit = FitSettings((0,), 2.0)
    edit = METHODS["grom"](model, tokenizer, forget, retain, GromSettings(fit))
    expected = FitData(model, forget, retain).fit(fit)
    assert torch.equal(edit.matrices[0].right, expected.matrices[0].right)
    before = [weight.clone() for weight in model.parameters()]
    trained = GRADIENT["npo"](model, tokenizer, forget, retain, GradientSettings.defaults("npo", epochs=1, lr=1e-3))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert any(not torch.equal(old, new) for old, new in zip(before, trained.parameters(), strict=True))


@pytest.mark.parametrize("method", ["idk_dpo", "alt_po"])
def test_methods_that_need_questions_refuse_text(method, model, tokenizer):
    found = windows(tokenizer, TEXTS)
    with pytest.raises(ValueError, match=f"{method} prefers other answers"):
        GRADIENT[method](model, tokenizer, found[:1], found[1:], GradientSettings.defaults(method))


def test_a_shared_window_is_refused_by_name(model, tokenizer):
    found = windows(tokenizer, TEXTS)
    with pytest.raises(ValueError, match="1 of the 1 rows to forget are also to be retained, such as 'text 0, token 1'"):
        GRADIENT["npo"](model, tokenizer, found[:1], found, GradientSettings.defaults("npo"))
    # Settings other than the sets are checked as before.
    with pytest.raises(ValueError, match="forget set is empty"):
        GRADIENT["npo"](model, tokenizer, [], found, GradientSettings.defaults("npo"))
