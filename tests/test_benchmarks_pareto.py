"""Dominance over the benchmarks: by hand and by definition, and what records say of GROM's claim."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib.benchmarks.pareto import BENCHMARKS, HIGHEST, Benchmark, duels, standings, undominated, verdicts
from unlearnlib.benchmarks.tofu_scores import final


def test_undominated_by_hand():
    points = {"a": (0.9, 0.1), "b": (0.5, 0.5), "c": (0.5, 0.4), "d": (0.1, 0.9), "e": (0.1, 0.9), "f": (0.0, 0.9)}
    assert undominated(points) == ["d", "e", "b", "a"]
    assert undominated({}) == []


grid = st.integers(0, 4)


@given(st.dictionaries(st.integers(), st.tuples(grid, grid), max_size=8))
def test_undominated_by_definition(points):
    kept = undominated(points)

    def dominates(one, other):
        return one != other and one[0] >= other[0] and one[1] >= other[1]

    for name, point in points.items():
        assert (name in kept) == (not any(dominates(other, point) for other in points.values()))
    assert [points[name][0] for name in kept] == sorted(points[name][0] for name in kept)


def record(run, verdict, rows, **claim):
    notebook, name = run.split("/")
    claims = [{"claim": HIGHEST, "verdict": verdict, **claim}]
    return {"notebook": notebook, "run": name, "values": {"rows": rows, "claims": claims}}


def tofu_row(method, forgetting, utility):
    return {"method": method, "model_utility": utility, "final": (forgetting + utility) / 2}


def test_a_point_is_read_back_from_final():
    row = {"rouge_l": 0.2, "prob": 0.1, "extraction": 0.3, "model_utility": 0.6}
    row["final"] = final(row)
    assert BENCHMARKS[0].point(row) == pytest.approx((0.8, 0.6))
    per_cent = {"know_mem_retain": 40.0, "final": 55.0}
    assert Benchmark("", "", "know_mem_retain", scale=100).point(per_cent) == pytest.approx((0.7, 0.4))


def test_standings_name_who_dominates():
    rows = [tofu_row("full", 0.0, 0.9), tofu_row("grom", 0.8, 0.6), tofu_row("npo", 0.9, 0.7), tofu_row("simnpo", 0.7, 0.9)]
    found = standings([record("grom_tofu/forget05", "doesn't hold", rows)])
    assert [(row["benchmark"], row["method"], row["dominated_by"]) for row in found] == [
        ("TOFU 5 %", "grom", "npo"),
        ("TOFU 5 %", "npo", None),
        ("TOFU 5 %", "simnpo", None),
    ]
    assert found[0]["final"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("other", "highest", "expected", "by"),
    [
        ((0.7, 0.7), "holds", "holds", None),
        ((0.9, 0.7), "doesn't hold", "doesn't hold", "npo"),
        ((0.9, 0.7), "can't be told", "can't be told", "npo"),
        ((0.9, 0.55), "doesn't hold", "holds", None),
    ],
)
def test_verdicts_by_hand(other, highest, expected, by):
    # Another variant of GROM beats the paper's: that is no other method.
    rows = [tofu_row("grom", 0.8, 0.6), tofu_row("grom_both", 0.95, 0.95), tofu_row("npo", *other), tofu_row("simnpo", 0.1, 0.1)]
    (found,) = verdicts([record("grom_tofu/forget10", highest, rows)])
    assert (found["benchmark"], found["other"], found["dominated_by"]) == ("TOFU 10 %", "npo", by)
    assert (found["pareto_best"], found["highest_final"]) == (expected, highest)
    assert (found["final"], found["other_final"]) == pytest.approx((0.7, sum(other) / 2))


def test_the_verdict_is_that_of_the_papers_variant():
    rows = [{"method": name, "specificity": 0.5, "final": 0.5} for name in ("grom", "grom_head", "rome")]
    made = record("grom_zsre/default", "holds", rows, method="grom_head")
    made["values"]["claims"].insert(0, {"claim": HIGHEST, "verdict": "doesn't hold", "method": "grom"})
    (found,) = verdicts([made])
    assert (found["method"], found["highest_final"]) == ("grom_head", "holds")


def test_where_others_do_not_work_nothing_is_counted():
    rows = [{"method": "grom_head", "specificity": 0.9, "final": 0.9}, {"method": "rome", "specificity": 0.5, "final": 0.5}]
    records = [record("grom_zsre/default", "can't be told: no editor can edit this model", rows, method="grom_head")]
    (found,) = verdicts(records)
    assert (found["pareto_best"], found["highest_final"]) == ("can't be told", "can't be told: no editor can edit this model")
    placed = standings(records)
    assert [row["counts"] for row in placed] == [False, False]
    assert duels(placed)[0] == {"method": "rome"} | dict.fromkeys(
        ("benchmarks", "grom_dominates", "dominates_grom", "neither", "higher_final"), 0
    )


def test_what_has_no_rival_gets_no_verdict():
    alone = record("grom_tofu/forget05", "holds", [tofu_row("grom", 0.8, 0.6), tofu_row("retain", 0.9, 0.6)])
    without = record("grom_tofu/forget10", "holds", [tofu_row("npo", 0.8, 0.6)])
    assert verdicts([alone, without]) == []
    assert verdicts([]) == standings([]) == duels([]) == []


def test_duels_count_benchmarks():
    first = [tofu_row("grom", 0.8, 0.6), tofu_row("npo", 0.9, 0.7), tofu_row("simnpo", 0.7, 0.5)]
    second = [tofu_row("grom", 0.8, 0.6), tofu_row("npo", 0.7, 0.9)]
    records = [record("grom_tofu/forget05", "holds", first), record("grom_tofu/forget10", "holds", second)]
    assert duels(standings(records)) == [
        {"method": "npo", "benchmarks": 2, "grom_dominates": 0, "dominates_grom": 1, "neither": 1, "higher_final": 0},
        {"method": "simnpo", "benchmarks": 1, "grom_dominates": 1, "dominates_grom": 0, "neither": 0, "higher_final": 1},
    ]
