"""Losses of the baselines: hand-worked values, gradients against formulas, and what β tends to."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlearnlib.baselines import losses


def t(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def gradient(loss, of):
    (found,) = torch.autograd.grad(loss, of)
    return found


numbers = st.floats(-60, 0)
answers = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        *[st.lists(numbers, min_size=n, max_size=n)] * 4,
        st.lists(st.integers(1, 30), min_size=n, max_size=n),
    )
)
betas = st.floats(0.01, 8)


def test_values_by_hand():
    log_probs, lengths = t(-2.0, -6.0), torch.tensor([1, 3])
    assert losses.nll(log_probs, lengths).item() == pytest.approx(2.0)
    assert losses.grad_ascent(log_probs, lengths).item() == pytest.approx(-2.0)
    # σ(−β (ℓ − ℓ_ref)) is 1/(1 + 3) for ℓ − ℓ_ref = log 3 and β = 1, and 1/2 where nothing has changed.
    reference = t(-2.0 - math.log(3), -6.0)
    assert losses.npo(log_probs, reference, 1.0).item() == pytest.approx(math.log(4) + math.log(2))
    assert losses.npo(log_probs, reference, 2.0).item() == pytest.approx((math.log(10) + math.log(2)) / 2)
    # −(β/|y|) ℓ − γ is 2 β − γ for both.
    assert losses.simnpo(log_probs, lengths, 0.5, 1.0).item() == pytest.approx(4 * math.log(2))
    assert losses.simnpo(log_probs, lengths, 0.5).item() == pytest.approx(4 * math.log(1 + math.exp(-1)))
    # The margin between win and lose is 1 − (−1) = 2 for the first pair and 0 for the second.
    win, lose = t(-4.0, -5.0), t(-3.0, -7.0)
    references = t(-5.0, -5.0), t(-2.0, -7.0)
    expected = (math.log(1 + math.exp(-1)) + math.log(2)) / 2 * 4
    assert losses.dpo(win, lose, *references, 0.5).item() == pytest.approx(expected)


@settings(max_examples=40)
@given(answers, betas, st.floats(-2, 2))
def test_gradients_are_weighted_ascent(drawn, beta, margin):
    """Each loss's gradient is a positive weight times that of ℓ: the weight is what distinguishes the methods."""
    log_probs, reference, win, reference_win, lengths = (t(*values) for values in drawn)
    n = len(log_probs)
    log_ratio = log_probs - reference
    close = {"rtol": 1e-9, "atol": 1e-12}
    found = gradient(losses.npo(log_probs, reference, beta), log_probs)
    torch.testing.assert_close(found, 2 * torch.sigmoid(beta * log_ratio) / n, **close)
    found = gradient(losses.simnpo(log_probs, lengths, beta, margin), log_probs)
    torch.testing.assert_close(found, 2 * torch.sigmoid(beta * log_probs / lengths + margin) / lengths / n, **close)
    loss = losses.dpo(win, log_probs, reference_win, reference, beta)
    weight = 2 * torch.sigmoid(beta * (log_ratio - (win - reference_win))) / n
    torch.testing.assert_close(gradient(loss, log_probs), weight, **close)
    torch.testing.assert_close(gradient(losses.dpo(win, log_probs, reference_win, reference, beta), win), -weight, **close)
    torch.testing.assert_close(gradient(losses.grad_ascent(log_probs, lengths), log_probs), 1 / lengths / n, **close)


@settings(max_examples=40)
@given(answers)
def test_small_beta_is_gradient_ascent(drawn):
    log_probs, reference, win, reference_win, lengths = (t(*values) for values in drawn)
    n, beta = len(log_probs), 1e-7
    constant = 2 * math.log(2) / beta  # that the loss is larger by; it has no gradient
    close = {"rtol": 1e-4, "atol": 1e-4}
    found = losses.npo(log_probs, reference, beta)
    torch.testing.assert_close(found - constant, (log_probs - reference).mean(), **close)
    torch.testing.assert_close(gradient(found, log_probs), torch.full((n,), 1 / n, dtype=torch.float64), **close)
    found = losses.simnpo(log_probs, lengths, beta)
    torch.testing.assert_close(gradient(found, log_probs), gradient(losses.grad_ascent(log_probs, lengths), log_probs), **close)
    found = losses.dpo(win, log_probs, reference_win, reference, beta)
    torch.testing.assert_close(found - constant, (log_probs - reference - win + reference_win).mean(), **close)


@settings(max_examples=40)
@given(answers)
def test_large_beta_asks_for_no_more_than_a_fall(drawn):
    log_probs, reference, win, reference_win, lengths = (t(*values) for values in drawn)
    beta = 1e6
    close = {"rtol": 0, "atol": 2 / beta}
    torch.testing.assert_close(losses.npo(log_probs, reference, beta), 2 * (log_probs - reference).clamp(min=0).mean(), **close)
    torch.testing.assert_close(losses.simnpo(log_probs, lengths, beta), 0 * log_probs.mean(), **close)
    margins = win - reference_win - log_probs + reference
    torch.testing.assert_close(losses.dpo(win, log_probs, reference_win, reference, beta), 2 * (-margins).clamp(min=0).mean(), **close)


@settings(max_examples=40)
@given(answers, betas, st.floats(-9, 9))
def test_relations_between_the_losses(drawn, beta, shift):
    log_probs, reference, win, _, lengths = (t(*values) for values in drawn)
    close = {"rtol": 1e-9, "atol": 1e-9}
    # A winner that stands still leaves NPO; a reference of log-probability 0 and one token leaves SimNPO; only differences count.
    npo = losses.npo(log_probs, reference, beta)
    torch.testing.assert_close(losses.dpo(win, log_probs, win, reference, beta), npo, **close)
    torch.testing.assert_close(losses.npo(log_probs + shift, reference + shift, beta), npo, **close)
    zero, one = torch.zeros_like(log_probs), torch.ones_like(lengths)
    torch.testing.assert_close(losses.npo(log_probs, zero, beta), losses.simnpo(log_probs, one, beta), **close)


def test_far_from_the_reference_nothing_overflows():
    far = t(-1e5, 0.0)
    for loss in (losses.npo(far, t(0.0, -1e5), 4.5), losses.simnpo(far, torch.tensor([1, 1]), 4.5), losses.dpo(far, -far, far, far, 4.5)):
        assert torch.isfinite(loss) and torch.isfinite(gradient(loss, far)).all()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: losses.nll(t(-1.0, -2.0), t(1.0)), r"log_probs \(2,\), lengths \(1,\)"),
        (lambda: losses.npo(t(-1.0, -2.0), t(-1.0, -2.0)[:, None], 0.1), r"reference \(2, 1\)"),
        (lambda: losses.nll(t(), t()), "at least one answer"),
        (lambda: losses.grad_ascent(t(-1.0)[0], t(1.0)[0]), r"log_probs \(\)"),
        (lambda: losses.npo(t(-1.0), t(-1.0), 0.0), "beta must be a finite number > 0"),
        (lambda: losses.simnpo(t(-1.0), t(1.0), math.inf), "got inf"),
        (lambda: losses.dpo(t(-1.0), t(-1.0), t(-1.0), t(-1.0), -0.1), r"got -0\.1"),
        (lambda: losses.dpo(t(-1.0), t(-1.0), t(-1.0), t(-1.0, -2.0), 0.1), r"reference_lose \(2,\)"),
    ],
)
def test_bad_input(call, said):
    with pytest.raises(ValueError, match=said):
        call()
