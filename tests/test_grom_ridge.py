"""The closed form of one matrix: against direct formulas and another solver, in any chunking and in both forms."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlearnlib.grom import IllConditionedError, RidgeFitter
from unlearnlib.grom import ridge as ridge_module

# Condition numbers in these problems stay below about 1e6, so that float64 leaves ten digits with room to spare.
RELATIVE = 1e-9


@st.composite
def problems(draw, most_keys=24):
    n, k = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    r, s = draw(st.integers(1, most_keys)), draw(st.integers(1, most_keys))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def gaussian(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {
        "retain_weight": draw(st.sampled_from([0.0, 0.5, 10.0, 300.0])),
        "forget_weight": draw(st.sampled_from([0.2, 1.0, 7.0])),
        "ridge": draw(st.sampled_from([1e-3, 0.03, 2.0])),
    }
    return gaussian(r, n), gaussian(s, n), gaussian(s, k), weights


def fitted(retain, forget, targets):
    fitter = RidgeFitter(retain.shape[1], targets.shape[1])
    fitter.update_retain(retain)
    fitter.update_forget(forget, targets)
    return fitter


def direct(retain, forget, targets, retain_weight, forget_weight, ridge):
    """B A⁻¹ as written on paper, with a general inverse."""
    a, c = retain_weight / len(retain), forget_weight / len(forget)
    normal = a * retain.T @ retain + c * forget.T @ forget
    mu = ridge * normal.diagonal().mean()
    normal = normal + mu * torch.eye(len(normal), dtype=torch.float64)
    return c * targets.T @ forget @ torch.linalg.inv(normal), mu.item(), normal


def gap(a, b):
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()


@settings(max_examples=80, deadline=None)
@given(problems())
def test_edit_is_the_direct_formula(problem):
    retain, forget, targets, weights = problem
    solution = fitted(retain, forget, targets).solve(**weights)
    expected, mu, _ = direct(retain, forget, targets, **weights)
    assert solution.mu == pytest.approx(mu, rel=1e-12)
    assert gap(solution.edit, expected) < RELATIVE
    assert solution.edit.dtype == torch.float64
    assert (solution.retain_count, solution.forget_count) == (len(retain), len(forget))
    assert solution.forget_scale == pytest.approx(weights["forget_weight"] / len(forget))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_edit_is_the_least_squares_solution_of_the_stacked_system(problem):
    retain, forget, targets, weights = problem
    solution = fitted(retain, forget, targets).solve(**weights)
    blocks = [
        ((weights["retain_weight"] / len(retain)) ** 0.5 * retain, torch.zeros(len(retain), targets.shape[1])),
        ((weights["forget_weight"] / len(forget)) ** 0.5 * forget, (weights["forget_weight"] / len(forget)) ** 0.5 * targets),
        (solution.mu**0.5 * torch.eye(retain.shape[1], dtype=torch.float64), torch.zeros(retain.shape[1], targets.shape[1])),
    ]
    left, right = (np.concatenate([block[i].numpy().astype(np.float64) for block in blocks]) for i in (0, 1))
    expected = torch.from_numpy(np.linalg.lstsq(left, right, rcond=None)[0].T)
    assert gap(solution.edit, expected) < RELATIVE


@settings(max_examples=60, deadline=None)
@given(problems())
def test_gradient_of_the_objective_vanishes_at_the_edit_and_only_there(problem):
    retain, forget, targets, weights = problem
    solution = fitted(retain, forget, targets).solve(**weights)

    def gradient(at):
        at = at.clone().requires_grad_(True)
        loss = weights["retain_weight"] / len(retain) * (at @ retain.T).square().sum()
        loss = loss + weights["forget_weight"] / len(forget) * (at @ forget.T - targets.T).square().sum()
        (loss + solution.mu * at.square().sum()).backward()
        return at.grad.norm()

    at_zero = gradient(torch.zeros_like(solution.edit))
    assert gradient(solution.edit) < 1e-9 * at_zero
    assert gradient(1.01 * solution.edit) > 1e-3 * at_zero


@settings(max_examples=60, deadline=None)
@given(problems(), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_chunking_in_any_order_gives_the_same_statistics(problem, sizes, random):
    retain, forget, targets, weights = problem
    fitter = RidgeFitter(retain.shape[1], targets.shape[1])
    pieces, start = [], 0
    for keys, goal in ((retain, None), (forget, targets)):
        start = turn = 0
        while start < len(keys):
            stop = start + sizes[turn % len(sizes)]
            pieces.append((keys[start:stop], None if goal is None else goal[start:stop]))
            start, turn = stop, turn + 1
    random.shuffle(pieces)
    for keys, goal in pieces:
        if goal is None:
            fitter.update_retain(keys)
        else:
            fitter.update_forget(keys, goal)
    expected, _, _ = direct(retain, forget, targets, **weights)
    assert gap(fitter.solve(**weights).edit, expected) < RELATIVE


@settings(max_examples=60, deadline=None)
@given(problems(most_keys=5))
def test_primal_and_dual_forms_agree(problem):
    retain, forget, targets, weights = problem
    n = len(retain) + len(forget) + 1 + retain.shape[1]
    generator = torch.Generator().manual_seed(n)
    retain, forget = (torch.randn(len(keys), n, generator=generator, dtype=torch.float64) for keys in (retain, forget))
    fitter = fitted(retain, forget, targets)
    primal, dual, auto = (fitter.solve(**weights, form=form) for form in ("primal", "dual", "auto"))
    assert gap(dual.edit, primal.edit) < 1e-10
    assert dual.mu == pytest.approx(primal.mu, rel=1e-13)
    assert torch.equal(auto.edit, dual.edit)
    probe = torch.randn(3, n, generator=generator, dtype=torch.float64)
    _, _, normal = direct(retain, forget, targets, **weights)
    for solution in (primal, dual):
        assert gap(solution.inverse.right_multiply(probe), probe @ torch.linalg.inv(normal)) < RELATIVE


@pytest.mark.parametrize("keys", [19, 20, 21, 1000])
def test_auto_takes_the_dual_below_n_keys_and_the_primal_from_there_on(keys):
    generator = torch.Generator().manual_seed(keys)
    retain, forget = torch.randn(keys - 5, 20, generator=generator).double(), torch.randn(5, 20, generator=generator).double()
    targets = torch.randn(5, 3, generator=generator).double()
    fitter = fitted(retain, forget, targets)
    solution = fitter.solve()
    expected, _, _ = direct(retain, forget, targets, 100.0, 1.0, 0.03)
    assert gap(solution.edit, expected) < RELATIVE
    assert ("rows" in solution.inverse.tensors()) == (keys < 20)
    if keys >= 20:
        with pytest.raises(ValueError, match="fewer keys than n = 20"):
            fitter.solve(form="dual")


def test_fit_may_go_on_after_a_solve():
    generator = torch.Generator().manual_seed(3)
    retain, forget = torch.randn(30, 12, generator=generator).double(), torch.randn(9, 12, generator=generator).double()
    targets = torch.randn(9, 2, generator=generator).double()
    fitter = RidgeFitter(12, 2)
    fitter.update_retain(retain[:3])
    fitter.update_forget(forget[:4], targets[:4])
    first, again = fitter.solve(), fitter.solve()
    assert torch.equal(first.edit, again.edit)
    fitter.update_retain(retain[3:])
    fitter.update_forget(forget[4:], targets[4:])
    assert gap(fitter.solve().edit, direct(retain, forget, targets, 100.0, 1.0, 0.03)[0]) < RELATIVE


@pytest.mark.parametrize(("n", "block", "grams"), [(30, 7, 8), (30, 10, 4), (29, 29, 64), (5, 2, 8), (33, 1, 3)])
def test_block_sizes_change_nothing(monkeypatch, n, block, grams):
    monkeypatch.setattr(ridge_module, "_CHOLESKY_BLOCK", block)
    monkeypatch.setattr(ridge_module, "_GRAM_BLOCKS", grams)
    generator = torch.Generator().manual_seed(n)
    retain, forget = torch.randn(80, n, generator=generator).double(), torch.randn(9, n, generator=generator).double()
    targets = torch.randn(9, 4, generator=generator).double()
    solution = fitted(retain, forget, targets).solve()
    expected, _, normal = direct(retain, forget, targets, 100.0, 1.0, 0.03)
    assert gap(solution.edit, expected) < RELATIVE
    assert gap(solution.inverse.factor, torch.linalg.cholesky(normal)) < RELATIVE


def test_more_than_one_real_block():
    """n above the Cholesky's block size, which the other problems stay below."""
    generator = torch.Generator().manual_seed(0)
    retain, forget = torch.randn(1300, 1100, generator=generator).double(), torch.randn(40, 1100, generator=generator).double()
    targets = torch.randn(40, 3, generator=generator).double()
    solution = fitted(retain, forget, targets).solve()
    assert gap(solution.edit, direct(retain, forget, targets, 100.0, 1.0, 0.03)[0]) < RELATIVE


def test_held_fixed_mu_and_forget_count():
    generator = torch.Generator().manual_seed(5)
    retain, forget = torch.randn(50, 8, generator=generator).double(), torch.randn(20, 8, generator=generator).double()
    targets = torch.randn(20, 2, generator=generator).double()
    for n_forget in (20, 3):
        solution = fitted(retain, forget[:n_forget], targets[:n_forget]).solve(mu=0.7, forget_count=20, retain_weight=10)
        normal = 10 / 50 * retain.T @ retain + forget[:n_forget].T @ forget[:n_forget] / 20 + 0.7 * torch.eye(8, dtype=torch.float64)
        expected = targets[:n_forget].T @ forget[:n_forget] / 20 @ torch.linalg.inv(normal)
        assert solution.mu == 0.7
        assert solution.forget_scale == pytest.approx(1 / 20)
        assert gap(solution.edit, expected) < RELATIVE


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10), st.integers(1, 6), st.integers(1, 20), st.integers(0, 10**6))
def test_coded_targets_are_dense_ones(n, k, s, seed):
    generator = torch.Generator().manual_seed(seed)
    forget, retain = (torch.randn(count, n, generator=generator, dtype=torch.float64) for count in (s, 7))
    codes = torch.randint(-1, k, (s,), generator=generator)
    values = torch.randn(s, generator=generator, dtype=torch.float64)
    dense = torch.zeros(s, k, dtype=torch.float64)
    for j in range(s):
        if codes[j] >= 0:
            dense[j, codes[j]] = values[j]
    coded, plain = RidgeFitter(n, k), fitted(retain, forget, dense)
    coded.update_retain(retain)
    coded.update_forget(forget, (codes, values))
    assert torch.allclose(coded.cross, dense.T @ forget, rtol=1e-13, atol=1e-13)
    assert coded.forget_count == s, "a key with a zero target still counts"
    assert torch.allclose(coded.solve().edit, plain.solve().edit, rtol=1e-10, atol=1e-12)


def test_memory_stays_quadratic_whatever_the_number_of_keys():
    n, k = 32, 4
    fitter = RidgeFitter(n, k)
    generator = torch.Generator().manual_seed(0)

    def held():
        kept = [fitter._buffer, *(fitter._grams or ()), fitter.cross]
        return sum(tensor.untyped_storage().nbytes() for tensor in kept)

    most = 0
    for _ in range(300):
        fitter.update_retain(torch.randn(17, n, generator=generator))
        fitter.update_forget(torch.randn(5, n, generator=generator), torch.randn(5, k, generator=generator))
        most = max(most, held())
    # Two Grams, the keys of less than one chunk of n, and the cross moments.
    assert most <= 8 * (3 * n * n + k * n)
    assert (fitter.retain_count, fitter.forget_count) == (5100, 1500)


def test_keys_that_the_caller_overwrites_were_taken_by_value():
    generator = torch.Generator().manual_seed(1)
    retain, forget = torch.randn(6, 20, generator=generator).double(), torch.randn(4, 20, generator=generator).double()
    targets = torch.randn(4, 2, generator=generator).double()
    expected = fitted(retain, forget, targets).solve().edit
    buffers = [tensor.clone() for tensor in (retain, forget, targets)]
    fitter = fitted(*buffers)
    for buffer in buffers:
        buffer.zero_()
    assert torch.equal(fitter.solve().edit, expected)


def spectrum(condition, n=16, seed=0):
    """Keys whose Gram has eigenvalues from 1 down to 1/condition."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    return left * torch.logspace(0, -np.log10(condition) / 2, n, dtype=torch.float64) @ right


@settings(max_examples=40, deadline=None)
@given(st.floats(1, 11), st.integers(0, 1000))
def test_tolerable_condition_numbers_are_solved(digits, seed):
    fitter = fitted(spectrum(10**digits, seed=seed), torch.ones(1, 16).double() * 1e-12, torch.ones(1, 1).double())
    fitter.solve(retain_weight=16, ridge=0)


@settings(max_examples=40, deadline=None)
@given(st.floats(13, 30), st.integers(0, 1000))
def test_hopeless_condition_numbers_are_refused(digits, seed):
    fitter = fitted(spectrum(10**digits, seed=seed), torch.ones(1, 16).double() * 1e-20, torch.ones(1, 1).double())
    with pytest.raises(IllConditionedError):
        fitter.solve(retain_weight=16, ridge=0)


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_the_error_names_the_condition_number_and_what_to_change(form):
    generator = torch.Generator().manual_seed(0)
    retain, forget = torch.randn(6, 20, generator=generator).double(), torch.randn(3, 20, generator=generator).double()
    fitter = fitted(retain, forget, torch.ones(3, 1).double())
    _, _, normal = direct(retain, forget, torch.ones(3, 1).double(), 100.0, 1.0, 0)
    mu = 1e-13 * torch.linalg.eigvalsh(normal).max().item()
    with pytest.raises(IllConditionedError, match="ridge") as caught:
        fitter.solve(mu=mu, form=form)
    named = float(re.search(r"condition number about ([\d.e+]+)", str(caught.value)).group(1))
    assert 1e13 / 5 < named < 1e13 * 5, "an estimate by a few iterations, and at this size rounding has its part in it"


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_no_ridge_and_fewer_keys_than_n_is_singular(form):
    fitter = fitted(torch.eye(6, 20).double(), torch.ones(3, 20).double(), torch.ones(3, 1).double())
    with pytest.raises(IllConditionedError, match="condition number about"):
        fitter.solve(ridge=0, form=form)


def test_all_keys_zero_is_singular():
    fitter = fitted(torch.zeros(30, 4).double(), torch.zeros(3, 4).double(), torch.ones(3, 1).double())
    with pytest.raises(IllConditionedError):
        fitter.solve()


def test_keys_so_large_that_their_squares_overflow_are_refused():
    fitter = fitted(torch.full((30, 4), 1e200, dtype=torch.float64), torch.ones(3, 4).double(), torch.ones(3, 1).double())
    with pytest.raises(IllConditionedError):
        fitter.solve()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda fitter: fitter.update_retain(torch.ones(2, 5)), r"retain keys must have shape \(tokens, 4\), got \(2, 5\)"),
        (lambda fitter: fitter.update_retain(torch.ones(4)), "retain keys must have shape"),
        (lambda fitter: fitter.update_retain(torch.tensor([[1, 2, NAN, 0]])), "retain keys contain NaN"),
        (lambda fitter: fitter.update_forget(torch.tensor([[1, INF, 0, 0]]), torch.ones(1, 2)), "forget keys contain NaN or infinite"),
        (lambda fitter: fitter.update_forget(torch.ones(2, 4), torch.ones(2, 3)), r"targets must have shape \(tokens, 2\)"),
        (lambda fitter: fitter.update_forget(torch.ones(2, 4), torch.ones(1, 2)), "2 forget keys but 1 targets"),
        (lambda fitter: fitter.update_forget(torch.ones(1, 4), torch.tensor([[NAN, 1]])), "targets contain NaN"),
        (lambda fitter: fitter.update_forget(torch.ones(2, 4), (torch.tensor([0]), torch.ones(2))), "coded targets must have shape"),
        (lambda fitter: fitter.update_forget(torch.ones(1, 4), (torch.tensor([0]), torch.tensor([NAN]))), "NaN"),
        (lambda fitter: fitter.update_forget(torch.ones(1, 4), (torch.tensor([2]), torch.ones(1))), "2"),
    ],
)
def test_bad_keys_and_targets_are_refused_and_leave_the_fit_as_it_was(update, message):
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(*shape, generator=generator).double() for shape in ((7, 4), (3, 4), (3, 2))]
    fitter = fitted(*data)
    expected = fitter.solve().edit
    with pytest.raises(ValueError, match=message):
        update(fitter)
    assert (fitter.retain_count, fitter.forget_count) == (7, 3)
    assert torch.equal(fitter.solve().edit, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retain_weight": -1}, "retain_weight"),
        ({"forget_weight": INF}, "forget_weight"),
        ({"ridge": NAN}, "ridge"),
        ({"mu": -0.1}, "mu"),
        ({"form": "both"}, "form must be"),
        ({"forget_count": -3}, "forget_count"),
        ({"forget_count": 0}, "forget_count"),
    ],
)
def test_bad_parameters_are_refused_by_name(arguments, message):
    fitter = fitted(torch.eye(4).double(), torch.ones(3, 4).double(), torch.ones(3, 1).double())
    with pytest.raises(ValueError, match=message):
        fitter.solve(**arguments)


def test_missing_keys_are_named():
    fitter = RidgeFitter(4, 1)
    with pytest.raises(ValueError, match="no forget keys"):
        fitter.solve()
    fitter.update_forget(torch.ones(1, 4), torch.ones(1, 1))
    with pytest.raises(ValueError, match="no retain keys"):
        fitter.solve()
    with pytest.raises(ValueError, match="must be positive"):
        RidgeFitter(0, 1)
