"""Targets: specificity by hand, coded and dense forms, and the two ways a suppression can be empty."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlearnlib.grom import NoSpecificTokensError, RidgeFitter, corruption, specificity, suppression

golds = st.lists(st.integers(0, 11), min_size=1, max_size=40)


def test_specificity_by_hand():
    forget = torch.tensor([0, 0, 1, 2])  # q_f = 1/2, 1/4, 1/4
    retain = torch.tensor([0, 1, 1, 1, 3, 3, 3, 3])  # q_r = 1/8, 3/8, 0, 1/2
    alpha = specificity(forget, retain, 5)
    # 1 − (1/8)/(1/2); 1 − (3/8)/(1/4) < 0 is clipped; not in retain; not in forget; in neither
    assert alpha.tolist() == [0.75, 0.0, 1.0, 0.0, 0.0]
    assert alpha.dtype == torch.float64


@settings(max_examples=100, deadline=None)
@given(golds, golds)
def test_specificity_is_the_clipped_frequency_ratio(forget, retain):
    alpha = specificity(torch.tensor(forget), torch.tensor(retain), 12)
    for token in range(12):
        q_f, q_r = forget.count(token) / len(forget), retain.count(token) / len(retain)
        expected = min(max(1 - q_r / q_f, 0), 1) if q_f else 0
        assert alpha[token].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("forget", "retain"), [([], [1]), ([1], [])])
def test_specificity_of_an_empty_set_is_an_error(forget, retain):
    with pytest.raises(ValueError, match="empty"):
        specificity(torch.tensor(forget, dtype=torch.int64), torch.tensor(retain, dtype=torch.int64), 5)


def quiet_suppression(*arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return suppression(*arguments)


@settings(max_examples=60, deadline=None)
@given(golds, golds, st.booleans(), st.integers(0, 10**6))
def test_dense_and_coded_targets_are_the_formula(forget, retain, head, seed):
    gold = torch.tensor(forget)
    alpha = specificity(gold, torch.tensor(retain), 12)
    weight = torch.randn(12, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if not alpha[gold].any():
        with pytest.raises(NoSpecificTokensError):
            suppression(gold, alpha, 3.0, None)
        return
    targets = quiet_suppression(gold, alpha, 3.0, None if head else weight)
    out = 12 if head else 6
    dense = targets.dense(gold, out)
    for j, token in enumerate(forget):
        direction = torch.eye(12, dtype=torch.float64)[token] if head else weight[token] / weight[token].norm()
        assert torch.allclose(dense[:, j], -3.0 * alpha[token] * direction, atol=1e-14)
    assert targets.rank == len({token for token in forget if alpha[token] > 0})
    assert torch.linalg.matrix_rank(dense) <= targets.rank

    keys = torch.randn(len(gold), 7, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    fitter = RidgeFitter(7, targets.rank)
    fitter.update_forget(keys, targets.coordinates(gold))
    basis = torch.eye(12, dtype=torch.float64)[:, targets.tokens] if head else targets.basis
    assert torch.allclose(basis @ fitter.cross, dense @ keys, atol=1e-12), "B from the codes is D X_fᵀ"


def test_tokens_without_specificity_get_code_minus_one():
    gold = torch.tensor([4, 2, 4, 9, 2])
    alpha = torch.zeros(12, dtype=torch.float64)
    alpha[4], alpha[9] = 0.5, 1.0
    targets = suppression(gold, alpha, 2.0, None)
    codes, values = targets.coordinates(torch.tensor([2, 4, 9, 11, 0]))
    assert codes.tolist() == [-1, 0, 1, -1, -1]
    assert values.tolist() == [0.0, -1.0, -2.0, 0.0, 0.0]


def test_alpha_zero_everywhere_is_an_error_that_says_what_to_do():
    gold = torch.tensor([1, 1, 2])
    with pytest.raises(NoSpecificTokensError, match="alpha_source"):
        suppression(gold, specificity(gold, torch.tensor([1, 1, 2]), 5), 10.0, None)


def test_low_mean_alpha_warns_with_its_value_and_a_fair_one_does_not():
    gold = torch.tensor([0] * 9 + [1])
    alpha = torch.tensor([0.0, 1.0])
    with pytest.warns(UserWarning, match=r"only 0\.10"):
        suppression(gold, alpha, 1.0, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        suppression(gold, torch.tensor([0.3, 1.0]), 1.0, None)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_head_row_without_direction_is_refused_and_named(bad):
    weight = torch.ones(5, 3)
    weight[2] = bad
    with pytest.raises(ValueError, match="2"):
        suppression(torch.tensor([1, 2]), torch.ones(5, dtype=torch.float64), 1.0, weight)
    suppression(torch.tensor([1, 3]), torch.ones(5, dtype=torch.float64), 1.0, weight)


def test_half_precision_head_rows_are_normalised_in_float64():
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = suppression(torch.tensor([1, 2]), torch.ones(5, dtype=torch.float64), 1.0, weight)
    assert torch.allclose(targets.basis.norm(dim=0), torch.ones(2, dtype=torch.float64), atol=1e-14)


def test_corruption_is_one_unit_direction_fixed_by_the_seed():
    first, again, other = corruption(8, 4.0, 1), corruption(8, 4.0, 1), corruption(8, 4.0, 2)
    assert torch.equal(first.basis, again.basis)
    assert not torch.allclose(first.basis, other.basis)
    state = torch.get_rng_state()
    corruption(8, 4.0, 3)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random state is left alone"
    dense = first.dense(torch.tensor([3, 0, 7]), 8)
    assert torch.allclose(dense.norm(dim=0), torch.full((3,), 4.0, dtype=torch.float64))
    assert torch.equal(dense[:, 0], dense[:, 2])
    assert first.rank == 1
