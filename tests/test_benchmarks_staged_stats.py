"""The statistics of the staged study, against counts by hand on made-up records."""

import itertools

import pytest
from scipy import stats

from unlearnlib.benchmarks.staged_stats import (
    DEFINITIONS,
    MEASURES,
    METHODS,
    RIVALS,
    averages,
    block_table,
    by_model,
    compare,
    comparisons,
    forgetting,
    method_table,
    split_by_seed,
    summary,
    trial_rows,
    without_flagged,
    zeta_spread,
)

MODELS, FAMILIES, SEEDS = ("small", "medium", "large"), ("a", "b", "c", "d", "e"), range(4)


def record(model="small", family="a", seed=0, *, flagged=False, selected=(1.0, 0.5), **changes):
    """A trial in which all methods do alike, but for the changes, each a dict by method."""
    values = {"model": model, "family": family, "seed": seed, "flagged": flagged, "residual_ratio": 0.2, "curvature": 0.1, "drift": 0.8}
    values |= {measure: [dict.fromkeys(METHODS, 0.5) | changes.get(measure, {})] for measure in MEASURES}
    values["selected"] = [
        {"method": "naive", "lam": 1.0, "gamma": 0.0, "feasible": True},
        {"method": "jvp_line", "lam": 1.0, "gamma": 1.0, "feasible": True},
        {"method": "two_d", "lam": selected[0], "gamma": selected[1], "feasible": changes.get("feasible", True)},
        {"method": "npo", "lam": 1e-5, "gamma": 0.0, "feasible": False},
    ]
    values["zeta"] = selected[0] - selected[1]
    return {"notebook": "sidecar_trial", "run": f"{model}-{family}-{seed}", "profile": "tiny", "parameters": {}, "values": values}


def study(change):
    """All 60 trials; `change(model, family, seed)` gives what is special about each."""
    return trial_rows([record(*key, **change(*key)) for key in itertools.product(MODELS, FAMILIES, SEEDS)])


def ahead(by):
    """The two-dimensional edit is better by so much in every definition, on both rivals."""
    return {
        "closure": {"two_d": 0.5 + by},
        "closure_signed": {"two_d": 0.5 + by},
        "kl_to_oracle": {"two_d": 0.5 - by},
        "parameter_error": {"two_d": 0.5 - by},
    }


def test_a_row_has_every_measure_of_every_method():
    (row,) = trial_rows([record(closure={"two_d": 0.9}, selected=(1.25, 2.0))])
    assert row["closure_two_d"] == 0.9 and row["secret_auc_oracle"] == 0.5
    assert (row["lam_two_d"], row["gamma_two_d"], row["zeta"]) == (1.25, 2.0, -0.75)
    assert (row["lam_npo"], row["feasible_npo"]) == (1e-5, False)
    assert {f"{measure}_{method}" for measure in MEASURES for method in METHODS} <= set(row)


def test_records_that_are_no_trials():
    other = record()
    del other["values"]["zeta"]
    with pytest.raises(ValueError, match=r"sidecar_trial/small-a-0: no value of zeta"):
        trial_rows([other])
    with pytest.raises(ValueError, match="of the same trial"):
        trial_rows([record(), record()])


def test_sixty_wins_are_fifteen_positive_blocks():
    found = summary(study(lambda *_: ahead(0.1)))
    for definition in DEFINITIONS:
        for name, value in (("wins_two_d_over_naive", 60), ("wins_two_d_over_line", 60), ("trials", 60), ("blocks", 15)):
            assert found[name + definition.suffix] == value
        assert found["positive_blocks" + definition.suffix] == 15 == found["positive_blocks_over_line" + definition.suffix]
        assert found["p_value" + definition.suffix] == 2.0**-15
    assert summary([], "confirm_")["confirm_trials"] == 0
    assert {f"confirm_{name}" for name in found} == set(summary(study(lambda *_: ahead(0.1)), "confirm_"))


def test_each_definition_has_its_own_direction():
    """Better closure and worse everything else."""
    worse = ahead(-0.1) | {"closure": {"two_d": 0.6}}
    found = summary(study(lambda *_: worse))
    assert [found["wins_two_d_over_naive" + definition.suffix] for definition in DEFINITIONS] == [60, 0, 0, 0]
    assert found["p_value_kl"] == 1.0


def test_blocks_decide_and_ties_count_against():
    """Blocks of model "small" lose in total although three of four trials win; all of "large" select the same edit."""

    def change(model, family, seed):
        by = {"small": -0.9 if seed == 0 else 0.1, "medium": 0.1, "large": 0.0}[model]
        return ahead(by)

    result = compare(study(change), DEFINITIONS[0], "naive")
    counts = {name: result[name] for name in ("trials", "wins", "ties", "losses", "blocks", "positive_blocks")}
    assert counts == {"trials": 60, "wins": 35, "ties": 20, "losses": 5, "blocks": 15, "positive_blocks": 5}
    assert result["p_value"] == pytest.approx(stats.binomtest(5, 15, alternative="greater").pvalue)
    assert result["p_value_ties_dropped"] == pytest.approx(stats.binomtest(5, 10, alternative="greater").pvalue)
    assert result["mean"] == pytest.approx((5 * (-0.9 + 0.3) + 20 * 0.1) / 60)
    assert result["low"] < result["mean"] < result["high"]


def test_flagged_trials_are_shown_and_left_out_beside_it():
    def change(model, family, seed):
        flagged = seed == 3
        return ahead(-5.0 if flagged else 0.1) | {"flagged": flagged}

    rows = study(change)
    found = summary(rows)
    assert (found["flagged"], found["trials"], found["trials_unflagged"]) == (15, 60, 45)
    assert (found["wins_two_d_over_naive"], found["positive_blocks"]) == (45, 0)
    assert (found["wins_two_d_over_naive_unflagged"], found["positive_blocks_unflagged"]) == (45, 15)
    assert len(without_flagged(rows)) == 45
    table = comparisons(rows)
    assert len(table) == 2 * len(RIVALS) * len(DEFINITIONS)
    assert {(row["set"], row["trials"]) for row in table} == {("all", 60), ("unflagged", 45)}


def test_forgetting_equally():
    generator = itertools.cycle((-0.01, 0.0, 0.02))
    near = study(lambda *_: {"secret_auc": {"two_d": 0.5 + next(generator)}})
    row = forgetting(near, margin=0.05)[0]
    means = [sum(r["secret_auc_two_d"] - 0.5 for r in near[i : i + 4]) / 4 for i in range(0, 60, 4)]
    assert (row["blocks"], row["trials"]) == (15, 60)
    assert row["mean"] == pytest.approx(sum(means) / 15)
    assert row["p_value"] == pytest.approx(stats.ttest_1samp(means, 0.05, alternative="less").pvalue)
    assert -0.05 < row["low"] < row["high"] < 0.05 and row["p_value"] < 0.05

    far = forgetting(study(lambda model, family, seed: {"secret_auc": {"two_d": 0.6 + 0.01 * seed * len(family + model)}}), margin=0.05)[0]
    assert far["p_value"] > 0.5

    same = forgetting(study(lambda *_: {}), margin=0.05)[0]
    assert (same["mean"], same["p_value"]) == (0.0, None)
    assert forgetting([], 0.05)[0]["mean"] is None


def test_the_table_of_methods():
    table = method_table(study(lambda model, family, seed: {"closure": {"two_d": 0.1 * seed}, "skill": {"naive": 0.25}}))
    rows = {row["method"]: row for row in table}
    assert list(rows) == list(METHODS)
    assert rows["two_d"]["closure"] == pytest.approx(0.15) == rows["two_d"]["closure_median"]
    assert rows["naive"]["skill"] == 0.25 and rows["oracle"]["trials"] == 60
    assert rows["two_d"]["closure_low"] == pytest.approx(0.15) == rows["two_d"]["closure_high"], "all blocks have the same mean"
    single = method_table(trial_rows([record()]))[0]
    assert (single["closure_low"], single["closure"]) == (None, 0.5)


def test_models_apart():
    rows = by_model(study(lambda model, *_: ahead(0.1 if model == "small" else -0.1)))
    wins = {(row["model"], row["definition"], row["against"]): row["wins"] for row in rows}
    assert len(wins) == 3 * len(RIVALS) * len(DEFINITIONS)
    assert wins["small", "closure by distance", "naive"] == 20 and wins["large", "closure by distance", "naive"] == 0
    assert {row["blocks"] for row in rows} == {5}
    assert {row["residual_ratio"] for row in rows} == {0.2}


def test_where_the_selected_edits_lie():
    places = {0: (1.0, 0.0), 1: (1.0, 1.0), 2: (1.25, 2.0), 3: (0.0, 0.0)}
    rows = study(lambda model, family, seed: {"selected": places[seed], "feasible": seed != 2})
    found = {row["model"]: row for row in zeta_spread(rows, edge=2.0)}
    assert list(found) == [*MODELS, "all"]
    for model, trials in (("small", 20), ("all", 60)):
        row = found[model]
        assert row["trials"] == trials and row["zeta_mean"] == pytest.approx((1.0 - 0.75) / 4)
        assert (row["zeta_low"], row["zeta_high"]) == (-0.75, 1.0)
        counts = [row[name] for name in ("on_naive", "on_line", "at_edge", "infeasible")]
        assert counts == [trials // 2, trials // 2, trials // 4, trials // 4]
    (alone,) = {row["zeta_sd"] for row in zeta_spread(rows[:1], edge=2.0)}
    assert alone is None


def test_a_trial_without_one_of_the_values():
    rows = trial_rows([record(closure={"naive": None})])
    with pytest.raises(ValueError, match="no value of closure_naive"):
        compare(rows, DEFINITIONS[0], "naive")


def test_the_confirmation_is_split_off_and_explored_seeds_are_refused():
    rows = study(lambda *_: {})
    first, confirming = split_by_seed(rows, 3, 900)
    assert (len(first), len(confirming)) == (45, 15)
    assert {row["seed"] for row in confirming} == {3}
    with pytest.raises(ValueError, match="15 trials have seeds that settings were found on"):
        split_by_seed(rows, 1, 3)
    with pytest.raises(ValueError, match="no trial to study"):
        split_by_seed(rows, 0, 900)
    with pytest.raises(ValueError, match="no trial to study"):
        split_by_seed([], 3, 900)


def test_block_means_of_every_definition():
    table = block_table(study(lambda model, *_: ahead(0.1 if model == "small" else -0.1)))
    assert len(table) == len(DEFINITIONS) * len(RIVALS) * 15
    assert all(row["mean"] == pytest.approx(0.1 if row["model"] == "small" else -0.1) and row["trials"] == 4 for row in table)


def test_averages_are_over_trials():
    rows = [
        {
            "family": family,
            "seed": seed,
            "variant": variant,
            "edit": "naive",
            "closure": float(seed + (variant == "b")),
            "flagged": seed == 1,
        }
        for family in "xy"
        for seed in (0, 1)
        for variant in "ab"
    ]
    found = averages(rows, ("variant", "edit"))
    assert found == [
        {"variant": "a", "edit": "naive", "trials": 4, "flagged": 2, "closure": 0.5},
        {"variant": "b", "edit": "naive", "trials": 4, "flagged": 2, "closure": 1.5},
    ]
    plain = [{name: value for name, value in row.items() if name != "flagged"} for row in rows]
    assert "flagged" not in averages(plain, ("variant",))[0]


def test_forgetting_is_compared_of_edits_that_nobody_selected_too():
    rows = forgetting(study(lambda *_: {"secret_auc": {"two_d": 0.6, "naive_at_1": 0.3}}), margin=0.05)
    means = {(row["edit"], row["against"], row["set"]): row["mean"] for row in rows}
    assert means["2-D", "naive", "all"] == pytest.approx(0.1) == means["2-D", "JVP line", "unflagged"]
    assert means["sidecar at (1, 1)", "naive at (1, 0)", "all"] == pytest.approx(0.2)
