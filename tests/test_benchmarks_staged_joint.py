"""GROM on the shipped model of a trial: what it is told, how it is chosen, its audit, and the table of both papers."""

import pytest
from staged_tiny import RULE, SMALL, TRIES

from unlearnlib.benchmarks.staged_baselines import put
from unlearnlib.benchmarks.staged_joint import PLACES, GromGrid, edited, grom, grom_data, grom_fits, influence_by_entity, joint_rows
from unlearnlib.benchmarks.staged_measures import TOLD, closure
from unlearnlib.benchmarks.staged_trial import run_trial
from unlearnlib.grom import FitSettings

GRID = GromGrid(strengths=(5.0, 50.0), head_strengths=(1.0,), width=6)


@pytest.fixture
def trial(make_staged_trial):
    return make_staged_trial()


def test_grom_is_told_training_items_only(trial):
    data = grom_data(trial)
    memory, retain = data.forget, data.retain
    assert [example.name for example in memory] == [item["question"] for item in trial.data.memory]
    kept = {example.name for example in retain}
    probed = {probe.question for split in ("validation", "test") for probe in trial.data.probes[split]}
    assert not probed & (kept | {example.name for example in memory})
    assert not any(entity in name for entity in trial.data.entities for name in kept)


def test_candidates_are_a_late_band_and_the_head(trial):
    data = grom_data(trial)
    band = grom_fits(data, GRID, "grom")
    assert [(fit.layers, fit.strength) for fit in band] == [((1,), 5.0), ((1,), 50.0)], "half of two layers, the last"
    assert [(fit.layers, fit.strength) for fit in grom_fits(data, GRID, "grom_head")] == [(("head",), 1.0)]


@pytest.mark.parametrize("place", PLACES)
def test_an_edit_is_judged_and_gone_again(trial, snapshot, place):
    put(trial.model, trial.shipped)
    before = snapshot(trial.model)
    result = grom(trial, RULE, GRID, place)
    put(trial.model, trial.shipped)
    assert snapshot(trial.model) == before
    assert set(TOLD) <= set(result["scores"])
    assert result["selected"]["method"] == place and len(result["candidates"]) == len(grom_fits(grom_data(trial), GRID, place))
    norms = [row["norm"] for row in result["influence"]]
    assert norms == sorted(norms, reverse=True) and norms[0] > 0
    assert sum(row["items"] for row in result["influence"]) == len(trial.data.memory)
    assert grom(trial, RULE, GRID, place) == result


def test_the_influence_of_a_person_is_that_of_a_refit_without(trial):
    """The audit holds s, μ and the keys fixed; here it is asked of one layer, against an edit whose targets of one person are zero."""
    data = grom_data(trial)
    edit = data.fit(grom_fits(data, GRID, "grom")[0], keep_audit=True)
    top = influence_by_entity(edit, trial)[0]
    members = [i for i, item in enumerate(trial.data.memory) if top["entity"] in item["question"]]
    (state,), (without,) = edit.audit().states, edit.audit().without(members)
    difference = state.solution.edit - without
    gram = state.left.T @ state.left
    assert top["norm"] == pytest.approx(((gram @ difference) * difference).sum().sqrt().item(), rel=1e-6)


def test_both_papers_in_one_table(trial):
    values = run_trial(trial, grid=SMALL, rule=RULE, candidates=TRIES, keep_runs=True)
    made = {place: grom(trial, RULE, GRID, place) for place in PLACES}
    rows = {row["method"]: row for row in joint_rows(values, made, ("shipped", "naive", "two_d", "oracle"))}
    assert list(rows) == ["shipped", "naive", "two_d", "oracle", *PLACES]
    assert rows["oracle"]["closure"] == 1.0 and rows["oracle"]["training_steps"] == trial.phases.safety_steps
    assert rows["shipped"]["seconds"] is None and rows["shipped"]["needs"] is None
    ends = rows["shipped"]["refusal_margin"], rows["oracle"]["refusal_margin"]
    for place in PLACES:
        assert rows[place]["closure"] == pytest.approx(closure(made[place]["scores"]["refusal_margin"], *ends))
        assert rows[place]["training_steps"] == 0 < rows[place]["seconds"]
    assert len({tuple(row) for row in rows.values()}) == 1, "all rows have the same columns"
    assert {row["flagged"] for row in rows.values()} == {values["flagged"]}
    assert rows["two_d"]["secret_auc"] == values["secret_auc"][0]["two_d"]


def test_candidates_leave_the_model_alone(trial, snapshot):
    data = grom_data(trial)
    before = snapshot(trial.model)
    fits = [FitSettings((1,), 5.0), FitSettings(("head",), 2.0)]
    found = list(edited(trial.model, data, fits, lambda changed: {"first": next(changed.parameters()).sum().item()}))
    assert snapshot(trial.model) == before
    assert [(point.lam, point.measures["layers"]) for point, _ in found] == [(5.0, 1.0), (2.0, 1.0)]
    assert all(len(edit.audit().ranking()) == len(trial.data.memory) for _, edit in found)
