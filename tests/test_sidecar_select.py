"""The grid, its lines, and a selector that sees validation measures only."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unlearnlib.sidecar import GridPoint, ProcessSidecar, SelectionRule, diagonal, evaluate_grid, naive_line, select

AXIS = [0.0, 0.5, 1.0, 1.5]
MEASURES = st.fixed_dictionaries({"margin": st.floats(-5, 5), "auc": st.floats(0, 1), "skill": st.floats(0, 1)})
POINTS = st.lists(st.builds(GridPoint, st.sampled_from(AXIS), st.sampled_from(AXIS), MEASURES), min_size=1, max_size=12)
RULES = st.builds(
    lambda weight, auc, skill: SelectionRule({"margin": 1.0, "skill": weight}, at_least={"skill": skill}, at_most={"auc": auc}),
    st.floats(0, 2),
    st.floats(0, 1),
    st.floats(0, 1),
)


def linear_and_edit():
    model = nn.Linear(2, 2, bias=False).double()
    theta = {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)}
    memory = {"weight": torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)}
    residual = {"weight": torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)}
    edit = ProcessSidecar(theta, memory, residual)
    edit.revert_(model)
    return model, edit


def corners(model):
    return {"first": model.weight[0, 0].item(), "last": model.weight[1, 1].item()}


def test_the_grid_measures_every_edit_and_leaves_the_shipped_model():
    model, edit = linear_and_edit()
    points = evaluate_grid(edit, model, AXIS, AXIS[:2], corners)
    assert [(p.lam, p.gamma) for p in points] == [(lam, gamma) for lam in AXIS for gamma in AXIS[:2]]
    assert all(p.measures == {"first": 1 - p.lam, "last": 4 - p.gamma} for p in points)
    assert torch.equal(model.weight, edit.shipped["weight"])
    assert points[3].row() == {"lam": 0.5, "gamma": 0.5, "first": 0.5, "last": 3.5}


def test_the_lines_are_restrictions_of_the_grid():
    model, edit = linear_and_edit()
    points = evaluate_grid(edit, model, AXIS, AXIS, corners)
    assert [p.lam for p in naive_line(points)] == AXIS and all(p.gamma == 0 for p in naive_line(points))
    assert [p.lam for p in diagonal(points)] == AXIS and all(p.gamma == p.lam for p in diagonal(points))
    assert naive_line(points) == evaluate_grid(edit, model, AXIS, [0.0], corners)


def test_a_measure_that_fails_or_is_not_finite_names_the_point_and_reverts():
    model, edit = linear_and_edit()
    with pytest.raises(ValueError, match=r"lam = 0\.5, gamma = 1\.0 these measures aren't finite: ratio"):
        evaluate_grid(edit, model, AXIS, AXIS, lambda m: {"ratio": float("nan") if m.weight[1, 1] == 3 and m.weight[0, 0] < 1 else 0.0})
    assert torch.equal(model.weight, edit.shipped["weight"])
    with pytest.raises(ZeroDivisionError):
        evaluate_grid(edit, model, [1.0], [1.0], lambda m: {"ratio": 1 / 0})
    assert torch.equal(model.weight, edit.shipped["weight"])


@settings(max_examples=200)
@given(POINTS, RULES)
def test_the_choice_is_the_best_point_within_limits(points, rule):
    """Recomputed the long way round."""
    chosen = select(points, rule)
    allowed = [p for p in points if p.measures["skill"] >= rule.at_least["skill"] and p.measures["auc"] <= rule.at_most["auc"]]
    assert chosen.feasible == bool(allowed)

    def score(p):
        return p.measures["margin"] + rule.weights["skill"] * p.measures["skill"]

    def broken(p):
        return max(0.0, rule.at_least["skill"] - p.measures["skill"]) + max(0.0, p.measures["auc"] - rule.at_most["auc"])

    if allowed:
        assert chosen.score == pytest.approx(max(map(score, allowed)), abs=1e-12) and chosen.point in allowed
    else:
        assert broken(chosen.point) == pytest.approx(min(map(broken, points)), abs=1e-12)


@settings(max_examples=100)
@given(POINTS, RULES, st.randoms(use_true_random=False))
def test_the_choice_does_not_hang_on_the_order_and_the_plane_cannot_lose_to_its_lines(points, rule, random):
    shuffled = points[:]
    random.shuffle(shuffled)
    chosen, again = select(points, rule), select(shuffled, rule)
    assert (chosen.score, chosen.feasible) == (again.score, again.feasible)
    assert (chosen.point.lam, chosen.point.gamma) == (again.point.lam, again.point.gamma)
    for line in (naive_line(points), diagonal(points)):
        if line and select(line, rule).feasible:
            assert chosen.feasible and chosen.score >= select(line, rule).score


def test_of_equal_points_the_smaller_edit_is_taken():
    points = [GridPoint(lam, gamma, {"margin": 1.0}) for lam in AXIS[1:] for gamma in AXIS[1:]]
    assert select(points[::-1], SelectionRule({"margin": 1.0})).point == points[0]


def test_the_selector_cannot_be_handed_an_oracle():
    """It takes points and a rule; a point holds numbers only, since the grid turns every measure into a float."""
    assert list(inspect.signature(select).parameters) == ["points", "rule"]
    model, edit = linear_and_edit()
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        evaluate_grid(edit, model, [1.0], [1.0], lambda m: {"oracle": m.weight})


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="points is empty"):
        select([], SelectionRule({"margin": 1.0}))
    with pytest.raises(ValueError, match=r"lam = 1, gamma = 0 lacks the measures auc, margin"):
        select([GridPoint(1, 0, {"skill": 1.0})], SelectionRule({"margin": 1.0}, at_most={"auc": 0.5}))
    with pytest.raises(ValueError, match="weights is empty"):
        SelectionRule({})
