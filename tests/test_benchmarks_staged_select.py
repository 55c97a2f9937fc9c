"""The choice among edits: measured gaps, the members of the plane, the best of a stream, and that nothing but validation can enter."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib.benchmarks import staged_select
from unlearnlib.benchmarks.staged_select import MEMBERS, RULE, best_of, between, choose, selection_row, validation_measures
from unlearnlib.sidecar import GridPoint, SelectionRule, select

RULES = SelectionRule(**RULE)


def measured(margin=0.0, auc=0.5, skill=1.0):
    given_ = {"refusal_margin": margin, "secret_auc": auc, "skill": skill}
    return validation_measures(given_, unknown_auc=0.45, stranger_margin=2.0)


def grid(values=(0.0, 0.5, 1.0), measures=lambda lam, gamma: measured()):
    return [GridPoint(lam, gamma, measures(lam, gamma)) for lam in values for gamma in values]


def test_gaps_are_distances_from_what_was_never_known():
    found = measured(margin=3.5, auc=0.3)
    assert found["margin_gap"] == pytest.approx(1.5)
    assert found["auc_gap"] == pytest.approx(0.15)
    assert (found["refusal_margin"], found["secret_auc"], found["skill"]) == (3.5, 0.3, 1.0)
    below, above = measured(margin=0.5, auc=0.6), found
    assert (below["margin_gap"], below["auc_gap"]) == (pytest.approx(above["margin_gap"]), pytest.approx(above["auc_gap"]))


def test_the_rule_prefers_the_strangers_margin_to_a_higher_one():
    points = [GridPoint(lam, 0.0, measured(margin=margin)) for lam, margin in ((0.0, 0.1), (0.5, 1.8), (1.0, 6.0))]
    assert select(points, RULES).point.lam == 0.5


def test_limits_come_before_the_margin():
    known = measured(margin=2.0, auc=0.9)
    unskilled = measured(margin=2.0, skill=0.5)
    plain = measured(margin=0.0)
    points = [GridPoint(float(i), 0.0, measures) for i, measures in enumerate((known, unskilled, plain))]
    chosen = select(points, RULES)
    assert (chosen.point.lam, chosen.feasible) == (2.0, True)
    assert not select(points[:2], RULES).feasible


def test_each_edit_is_chosen_from_its_own_points():
    margins = {(0.5, 0.0): 1.0, (0.5, 0.5): 1.5, (0.5, 1.0): 2.0}
    points = grid(measures=lambda lam, gamma: measured(margin=margins.get((lam, gamma), -5.0)))
    found = {name: (one.point.lam, one.point.gamma) for name, one in choose(points, RULES).items()}
    assert found == {"naive": (0.5, 0.0), "jvp_line": (0.5, 0.5), "two_d": (0.5, 1.0)}


@given(st.lists(st.floats(-5, 5), min_size=9, max_size=9), st.lists(st.floats(0, 1), min_size=9, max_size=9))
def test_on_the_data_that_select_the_plane_never_loses(margins, aucs):
    cells = iter(zip(margins, aucs, strict=True))
    chosen = choose(grid(measures=lambda lam, gamma: measured(*next(cells))), RULES)
    keys = {name: (RULES.violation(one.point.measures), -one.score) for name, one in chosen.items()}
    assert keys["two_d"] <= keys["naive"] and keys["two_d"] <= keys["jvp_line"]


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 1), st.floats(0.5, 1.2)), min_size=1, max_size=8))
def test_the_best_of_a_stream_is_the_best_of_all(rows):
    points = [GridPoint(float(i), 0.0, measured(*row)) for i, row in enumerate(rows)]
    selection, theta, tried = best_of(((point, f"model {point.lam}") for point in points), RULES)
    assert selection == select(points, RULES)
    assert theta == f"model {selection.point.lam}"
    assert tried == points


def test_nothing_to_choose_from():
    with pytest.raises(ValueError, match="no candidates"):
        best_of([], RULES)
    with pytest.raises(ValueError, match="nothing to choose from"):
        choose([GridPoint(1.0, 0.0, measured())], RULES)


def test_a_row_names_the_choice():
    row = selection_row("naive", select(grid(), RULES))
    assert {name: row[name] for name in ("method", "lam", "gamma", "feasible", "score")} == {
        "method": "naive",
        "lam": 0.0,
        "gamma": 0.0,
        "feasible": True,
        "score": -2.0,
    }
    assert row["auc_gap"] == pytest.approx(0.05)


def test_signatures_take_validation_measures_and_nothing_else():
    """No oracle, no test split, no parameters of a model but those that are handed through."""
    taken = {
        name: list(inspect.signature(getattr(staged_select, name)).parameters) for name in ("choose", "best_of", "validation_measures")
    }
    assert taken == {
        "choose": ["points", "rule"],
        "best_of": ["candidates", "rule"],
        "validation_measures": ["measured", "unknown_auc", "stranger_margin"],
    }
    assert set(MEMBERS) == {"naive", "jvp_line", "two_d"}
    assert {*RULE["weights"], *RULE["at_least"], *RULE["at_most"]} <= set(measured())


def test_a_finer_line_divides_each_step_of_the_grid():
    assert between([2.0, 0.0, 1.0], 4) == [0.25, 0.5, 0.75, 1.25, 1.5, 1.75]
    assert between([0.0, 1.0], 1) == []
