"""Variants of a trial's sidecar: what is the realised run's own, what only looks like it, and rounded weights with rounded ends."""

from dataclasses import replace

import pytest
from staged_tiny import QUICK, RULE, SMALL, gap

from unlearnlib.benchmarks.staged_baselines import put
from unlearnlib.benchmarks.staged_measures import DEGENERATE, TOLD
from unlearnlib.benchmarks.staged_robustness import (
    EDITS,
    Variant,
    judge_quantized,
    judge_variant,
    transported,
    variants,
    with_adapters,
)
from unlearnlib.quantize import quantized
from unlearnlib.sidecar import combine, norm


@pytest.fixture
def trial(make_staged_trial):
    return make_staged_trial()


def test_variants_by_name():
    names = {one.name: one for one in variants([7], [0.5, 2.0])}
    assert list(names) == ["realised", "order 7, both ends", "order 7, lower end", "ε = 0.5", "ε = 2"]
    assert names["realised"] == Variant("realised", None, True, 1.0)
    assert not names["ε = 2"].upper_shipped and names["ε = 2"].order is None


def test_the_realised_variant_is_the_trials_sidecar(trial):
    side, own = transported(trial, Variant("realised")), trial.sidecar()
    assert gap(side.residual, own.residual) == 0 == gap(side.memory, own.memory)


def test_what_another_order_changes(trial):
    realised = trial.sidecar()
    both, lower = (transported(trial, Variant("", 3, upper_shipped=upper)) for upper in (False, True))
    assert gap(both.shipped, realised.shipped) == 0 == gap(both.memory, realised.memory)
    other = trial.safety(3)
    start, memory = trial.theta_a, realised.memory
    ends = [other(combine((1.0, start), (sign, memory))) for sign in (1.0, -1.0)]
    expected = combine((0.5, ends[0]), (-0.5, ends[1]), (-1.0, memory))
    assert gap(both.residual, expected) < 1e-5 * norm(expected)
    expected = combine((0.5, trial.shipped), (-0.5, ends[1]), (-1.0, memory))
    assert gap(lower.residual, expected) < 1e-5 * norm(expected)
    assert gap(both.residual, realised.residual) > 0 < gap(both.residual, lower.residual)


def test_another_epsilon_is_the_secant_at_that_distance(trial):
    memory = trial.sidecar().memory
    side = transported(trial, Variant("", upper_shipped=False, epsilon=0.5))
    assert gap(side.residual, trial.sidecar(epsilon=0.5).residual) < 1e-6 * norm(memory)
    with pytest.raises(ValueError, match=r"at ε = 1 only, not at 0\.5"):
        transported(trial, Variant("half", epsilon=0.5))


def test_a_variant_is_judged_by_the_trials_own_ends(trial):
    rows = judge_variant(trial, Variant("realised"), SMALL, RULE)
    assert [row["edit"] for row in rows] == list(EDITS)
    found = {row["edit"]: row for row in rows}
    assert (found["sidecar_at_1"]["lam"], found["sidecar_at_1"]["gamma"]) == (1.0, 1.0)
    assert found["naive"]["gamma"] == 0 and found["jvp_line"]["gamma"] == found["jvp_line"]["lam"]
    side = trial.sidecar()
    scores = trial.judge(side.at(1.0, 1.0))
    assert found["sidecar_at_1"]["parameter_error"] == pytest.approx(scores["distance"] / norm(side.memory), rel=1e-5)
    assert {name: found["sidecar_at_1"][name] for name in TOLD} == pytest.approx({name: scores[name] for name in TOLD}, abs=1e-5)
    assert found["sidecar_at_1"]["name"] == "sidecar at (1, 1)"
    margins = [trial.judge(theta)["refusal_margin"] for theta in (trial.shipped, trial.oracle)]
    assert {row["flagged"] for row in rows} == {abs(margins[0] - margins[1]) < DEGENERATE}
    assert judge_variant(trial, Variant("realised"), SMALL, RULE) == rows


def test_rounded_edits_are_held_against_rounded_ends(trial):
    rows = judge_quantized(trial, {"half": (0.5, 0.25)}, ["nf4"])
    found = {(row["scheme"], row["edit"]): row for row in rows}
    assert list(found) == [(scheme, edit) for scheme in ("none", "nf4") for edit in ("shipped", "oracle", "half")]
    for scheme in ("none", "nf4"):
        assert (found[scheme, "shipped"]["closure"], found[scheme, "oracle"]["closure"]) == (0.0, 1.0)
    put(trial.model, trial.oracle)
    with quantized(trial.model, "nf4"):
        assert trial._measures("test")(trial.model)["refusal_margin"] == pytest.approx(found["nf4", "oracle"]["refusal_margin"], abs=1e-5)
    assert found["nf4", "oracle"]["refusal_margin"] != found["none", "oracle"]["refusal_margin"]


def test_adapters_keep_everything_else(trial):
    other = with_adapters(trial, 4, 10.0)
    assert other.data.digest == trial.data.digest
    assert other.phases == replace(QUICK, lora_rank=4, skill_lr=1e-1, memory_lr=5e-2, safety_lr=2e-2)
    assert other.folder != trial.folder
