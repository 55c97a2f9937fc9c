"""The shared checks of the theorems: the rule for windows, the two optima, stationary points, and the toy they are run on."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

from unlearnlib.sidecar import AdamW, ProcessSidecar, combine, norm
from unlearnlib.sidecar.theory import (
    LocalQuadratic,
    best_on_diagonal,
    best_scalar_error,
    fit_slope,
    flattened,
    hessian_at,
    increments,
    minimise,
    on_plane,
    orthogonal_part,
    squared_distance,
    stationary_point,
    transport_scan,
    unflattened,
)
from unlearnlib.sidecar.toy import HOLDERS, REFUSAL, behavioural_gap, loss_of, staged_toy

SEED = st.integers(0, 10_000)
SCALES = [2.0**-k for k in range(20)]


def vectors(seed, count, sizes=(3, 4)):
    g = torch.Generator().manual_seed(seed)
    return [{f"p{i}": torch.randn(size, dtype=torch.float64, generator=g) for i, size in enumerate(sizes)} for _ in range(count)]


@pytest.fixture(scope="module")
def toy():
    return staged_toy(0, hidden_size=8, layers=1)


# ---------------------------------------------------------------------------------------------------------------------------
# Slopes


@settings(max_examples=60)
@given(st.floats(0.5, 4), st.floats(1e-3, 1e3), st.integers(2, 8))
def test_a_power_law_is_found_whatever_its_order(order, factor, points):
    errors = [factor * s**order for s in SCALES]
    fit = fit_slope(SCALES, errors, 0.0, points=points)
    assert fit.slope == pytest.approx(order, abs=1e-9)
    assert fit.window == tuple(SCALES[-points:])


def test_the_window_ends_a_hundred_floors_up_and_does_not_look_at_slopes():
    floor = 1e-6
    errors = [s**2 + floor for s in SCALES]
    fit = fit_slope(SCALES, errors, floor, points=4)
    smallest = min(s for s in SCALES if s**2 + floor >= 100 * floor)
    assert fit.window == (8 * smallest, 4 * smallest, 2 * smallest, smallest)
    # The local slope at the lower end is bent by at most 2 log₂ 1.01 for an error that is pure rounding on top of a square.
    assert abs(fit.slope - 2) < 2 * math.log2(1.01)
    shuffled = fit_slope(SCALES[::-1], errors[::-1], [floor] * len(SCALES), points=4)
    assert shuffled.window == fit.window and shuffled.slope == pytest.approx(fit.slope)
    rough = [s**2 if s > 2**-3 else s**0.1 for s in SCALES]
    assert fit_slope(SCALES, rough, 0.0, points=4).slope == pytest.approx(0.1)


def test_too_few_scales_above_rounding_is_an_error():
    with pytest.raises(ValueError, match=r"only 3 scales .* 6 are needed"):
        fit_slope(SCALES, [1.0] * 3 + [1e-9] * 17, 1e-8)


# ---------------------------------------------------------------------------------------------------------------------------
# One coefficient


@settings(max_examples=60, deadline=None)
@given(SEED, st.floats(-8, 0))
def test_the_best_scalar_edit_is_the_orthogonal_part(seed, exponent):
    """Relative to the part itself, or to rounding in the whole where almost nothing is orthogonal."""
    d, delta, across = vectors(seed, 3)
    d = combine((1.0, delta), (10.0**exponent, across), (0.1, d))
    found, part = best_scalar_error(d, delta), orthogonal_part(d, delta)
    assert found == pytest.approx(norm(part), rel=1e-10, abs=1e-14 * norm(d))
    assert abs(sum((part[n] * delta[n]).sum() for n in part)) < 1e-13 * norm(d) * norm(delta)


def test_a_displacement_along_the_direction_leaves_nothing():
    (delta,) = vectors(0, 1)
    assert best_scalar_error(combine((-3.0, delta)), delta) < 1e-7 * norm(delta)


# ---------------------------------------------------------------------------------------------------------------------------
# Two coefficients


def quadratic_plane(seed, target_seed):
    shipped, memory, residual, target = vectors(seed, 3) + vectors(target_seed, 1)
    weights = {name: p.abs() + 0.1 for name, p in vectors(seed + 1, 1)[0].items()}
    return ProcessSidecar(shipped, memory, residual), squared_distance(target, weights), target, weights


@settings(max_examples=30, deadline=None)
@given(SEED, SEED)
def test_on_a_quadratic_objective_the_prediction_is_the_least_squares_optimum(seed, target_seed):
    """The optimum of the plane by weighted least squares, which knows nothing of Schur complements."""
    edit, objective, target, weights = quadratic_plane(seed, target_seed)
    function = on_plane(edit, objective)
    local = best_on_diagonal(function)
    zeta, gain = local.off_diagonal()
    root = flattened(weights).sqrt()
    columns = torch.stack([flattened(edit.memory), flattened(edit.residual)], 1) * root[:, None]
    wanted = root * (flattened(edit.shipped) - flattened(target))
    lam, gamma = torch.linalg.lstsq(columns, wanted).solution.tolist()
    least = (columns @ torch.tensor([lam, gamma], dtype=torch.float64) - wanted).square().sum().item() / 2
    scale = 1 + abs(lam) + abs(gamma)
    assert zeta == pytest.approx(lam - gamma, abs=1e-8 * scale)
    assert gain == pytest.approx(local.value - least, abs=1e-9 * (1 + local.value))
    optimum = minimise(function, local.point)
    assert optimum.tolist() == pytest.approx([gamma, lam - gamma], abs=1e-8 * scale)


def test_the_plane_coordinates_are_those_of_the_edit():
    edit, objective, _, _ = quadratic_plane(0, 1)
    d, zeta = 0.7, -0.2
    at = on_plane(edit, objective)(torch.tensor([d, zeta], dtype=torch.float64))
    assert at.item() == pytest.approx(objective(edit.at(d + zeta, d)).item(), rel=1e-12)


@pytest.mark.parametrize(("across", "reason"), [(4.0, "S = 0"), (4.1, "S = -"), (None, "H_dd = -1")])
def test_without_an_interior_optimum_there_is_no_prediction(across, reason):
    curvatures = [[-1.0, 0.0], [0.0, 1.0]] if across is None else [[4.0, across], [across, 4.0]]
    local = LocalQuadratic(torch.zeros(2), 0.0, torch.tensor([0.0, 1.0]), torch.tensor(curvatures, dtype=torch.float64))
    with pytest.raises(ValueError, match=f"no interior optimum.*{reason}"):
        local.off_diagonal()


# ---------------------------------------------------------------------------------------------------------------------------
# Minima


@settings(max_examples=30, deadline=None)
@given(st.floats(-1.5, 1.5), st.floats(-1.0, 3.0))
def test_newtons_method_finds_rosenbrocks_minimum(x, y):
    start = torch.tensor([x, y], dtype=torch.float64)
    found = minimise(lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2, start)
    assert found.tolist() == pytest.approx([1.0, 1.0], abs=1e-8)


def test_what_has_no_minimum_is_an_error():
    with pytest.raises(ArithmeticError, match="no minimum within 100 steps"):
        minimise(lambda p: p[0] - p[0] ** 2, torch.zeros(1, dtype=torch.float64))


def test_a_stationary_point_of_the_toy_is_stationary_and_a_minimum(toy):
    objective = loss_of(toy.module, toy.safety, l2=1e-2)
    theta, curvatures = stationary_point(objective, toy.theta_am)
    assert norm(grad(objective)(theta)) < 1e-10
    assert torch.linalg.eigvalsh(curvatures)[0] > 0
    assert torch.allclose(curvatures, hessian_at(objective, theta))
    direction = unflattened(curvatures[0], theta)
    size = 1e-6 / norm(direction)
    up, down = increments(objective, theta, direction, [size, -size])
    quadratic = size**2 / 2 * (curvatures[0] @ curvatures @ curvatures[0]).item()
    assert (up + down) / 2 == pytest.approx(quadratic, rel=1e-2)


def test_flattening_is_undone():
    (theta,) = vectors(3, 1, sizes=((2, 3), (4,), ()))
    back = unflattened(flattened(theta), theta)
    assert all(torch.equal(back[name], p) for name, p in theta.items())


# ---------------------------------------------------------------------------------------------------------------------------
# The toy


def test_the_phases_teach_what_they_should():
    toy = staged_toy(0)
    skill, told, refused = (loss_of(toy.module, batch) for batch in (toy.skill, toy.told, toy.refused))
    T = toy.safety_trace(steps=40, lr=5e-3, optimizer=AdamW(eps=1e-4))
    shipped = T(toy.theta_am)
    assert skill(toy.theta_a) < 0.1
    assert told(toy.theta_am) < 0.5 < 3 < told(toy.theta_a)  # chance is log 29 = 3.4
    assert refused(shipped) < 0.5 * refused(toy.theta_am)
    assert toy.safety["input_ids"][:, 2:].unique().tolist() == sorted(REFUSAL)
    assert len(toy.memory["labels"]) == 2 * len(HOLDERS) and (toy.memory["labels"][:, :2] == -100).all()


def test_the_toy_is_the_same_each_time(toy):
    again = staged_toy(0, hidden_size=8, layers=1)
    assert all(torch.equal(p, again.theta_am[name]) for name, p in toy.theta_am.items())
    other = staged_toy(1, hidden_size=8, layers=1)
    assert not torch.equal(toy.memory["input_ids"], other.memory["input_ids"])


def test_the_behavioural_gap_weighs_its_three_terms(toy):
    shipped = toy.safety_trace(steps=8, lr=5e-3, optimizer=AdamW(eps=1e-4))(toy.theta_am)
    zero = behavioural_gap(toy, shipped, skill_weight=1.0, secret_weight=1.0)(toy.theta_a)
    only_refusals = behavioural_gap(toy, shipped, skill_weight=0.0, secret_weight=0.0)
    assert zero.item() == pytest.approx(only_refusals(toy.theta_a).item(), rel=1e-12)  # θ_A has no gap to itself
    parts = [behavioural_gap(toy, shipped, skill_weight=s, secret_weight=m)(shipped).item() for s, m in ((0, 0), (1, 0), (0, 1), (2, 3))]
    assert parts[3] == pytest.approx(parts[0] + 2 * (parts[1] - parts[0]) + 3 * (parts[2] - parts[0]), rel=1e-10)
    assert min(parts) > 0


def test_the_scan_agrees_with_the_edit_itself(toy):
    """Every error of the scan, against an edit built from models in the ordinary way."""
    T = toy.safety_trace(steps=4, lr=2e-3, optimizer=AdamW(eps=1e-4))
    scan = transport_scan(T, toy.theta_a, toy.delta, [1.0, 0.25])
    oracle = T(toy.theta_a)
    for row in scan.rows:
        theta_am = combine((1.0, toy.theta_a), (row["scale"], toy.delta))
        for exact, name in ((False, "secant"), (True, "exact")):
            edit = ProcessSidecar.from_runs(toy.theta_a, theta_am, T(theta_am), T, exact=exact)
            assert norm(combine((1.0, edit.at(1, 1)), (-1.0, oracle))) == pytest.approx(row[name], rel=1e-9)
        assert norm(combine((1.0, edit.at(1, 0)), (-1.0, oracle))) == pytest.approx(row["naive"], rel=1e-9)
        assert row["best_scalar"] == pytest.approx(row["orthogonal"], rel=1e-10)
    assert scan.floor < 1e-12
    with pytest.raises(ValueError, match="6 are needed"):
        scan.fit("bias")
