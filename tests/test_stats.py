"""Paired statistics against counting by hand, closed forms, textbook values and independent recomputation."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import stdtr
from scipy.stats import beta

from unlearnlib import stats

ALTERNATIVES = ["greater", "less", "two-sided"]
counts = st.integers(0, 12)
small_differences = st.lists(st.integers(-5, 5), min_size=1, max_size=9)


def tail(wins, trials, alternative="greater"):
    """The p-value by counting sign patterns in whole numbers."""
    at_least = Fraction(sum(math.comb(trials, k) for k in range(wins, trials + 1)), 2**trials)
    at_most = Fraction(sum(math.comb(trials, k) for k in range(wins + 1)), 2**trials)
    return {"greater": at_least, "less": at_most, "two-sided": min(Fraction(1), 2 * min(at_least, at_most))}[alternative]


def signs(positive, negative, zero=0):
    return [1.0] * positive + [-1.0] * negative + [0.0] * zero


def make_records(blocks=3, seeds=2):
    return [
        {"model": f"m{block}", "family": "f", "seed": seed, "two_d": block + seed, "naive": 0.5 * seed}
        for block in range(blocks)
        for seed in range(seeds)
    ]


KEYS = {"trial": ["model", "family", "seed"], "first": "two_d", "second": "naive"}


# ---------------------------------------------------------------------------------------------------------------------------
# Records


def test_block_means_by_hand():
    rows = stats.block_means(make_records(), block=["model", "family"], **KEYS)
    assert rows == [{"model": f"m{block}", "family": "f", "trials": 2, "mean": block + 0.25} for block in range(3)]


@given(st.permutations(make_records(4, 3)))
def test_block_means_do_not_depend_on_the_order_of_the_trials(records):
    rows = stats.block_means(records, block=["model"], **KEYS)
    assert {row["model"]: row["mean"] for row in rows} == {f"m{block}": block + 0.5 for block in range(4)}


def test_swapping_the_methods_negates():
    records = make_records()
    swapped = stats.paired_differences(records, trial=KEYS["trial"], first="naive", second="two_d")
    np.testing.assert_array_equal(stats.paired_differences(records, **KEYS), -swapped)


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan")])
def test_a_value_that_is_not_finite_names_trial_and_field(value):
    records = make_records()
    records[3]["naive"] = value
    with pytest.raises(ValueError, match=r"trial model='m1', family='f', seed=1: naive is (nan|inf)"):
        stats.block_means(records, block=["model"], **KEYS)


@pytest.mark.parametrize("value", ["high", [1.0, 2.0]])
def test_a_value_that_is_no_number_names_trial_and_field(value):
    records = make_records()
    records[0]["two_d"] = value
    with pytest.raises(ValueError, match="trial model='m0', family='f', seed=0: two_d is not a number"):
        stats.paired_differences(records, **KEYS)


@pytest.mark.parametrize("broken", [lambda r: r.pop("naive"), lambda r: r.update(naive=None)])
def test_a_trial_without_its_partner_is_named(broken):
    records = make_records()
    broken(records[2])
    with pytest.raises(ValueError, match="trial model='m1', family='f', seed=0: no value of naive, so it cannot be paired"):
        stats.paired_differences(records, **KEYS)


def test_a_duplicate_trial_is_named_with_both_records():
    records = make_records()
    with pytest.raises(ValueError, match="trial model='m0', family='f', seed=1: records 1 and 6 have the same trial key"):
        stats.paired_differences([*records, dict(records[1], two_d=9)], **KEYS)


def test_missing_fields_and_empty_input():
    records = make_records()
    with pytest.raises(ValueError, match="record 0 has no field 'dataset'"):
        stats.block_means(records, block=["dataset"], **KEYS)
    with pytest.raises(ValueError, match="record 0 has no field 'run'"):
        stats.paired_differences(records, trial=["run"], first="two_d", second="naive")
    with pytest.raises(ValueError, match="records is empty"):
        stats.paired_differences([], **KEYS)
    for names in ("model", []):
        with pytest.raises(ValueError, match="trial must be a non-empty list"):
            stats.paired_differences(records, trial=names, first="two_d", second="naive")
        with pytest.raises(ValueError, match="block must be a non-empty list"):
            stats.block_means(records, block=names, **KEYS)


# ---------------------------------------------------------------------------------------------------------------------------
# Sign test


def test_the_published_p_values():
    assert stats.sign_test(signs(15, 0)).p_value == 2.0**-15 == pytest.approx(3.05e-5, abs=0.005e-5)
    assert stats.sign_test(signs(20, 0)).p_value == 2.0**-20 == pytest.approx(9.5e-7, abs=0.05e-7)
    assert stats.sign_test(signs(60, 0)).p_value == pytest.approx(2.0**-60, rel=1e-12)


def test_textbook_value_eight_of_ten():
    assert stats.sign_test(signs(8, 2)).p_value == pytest.approx(56 / 1024, rel=1e-14)
    assert stats.sign_test(signs(8, 2), alternative="two-sided").p_value == pytest.approx(112 / 1024, rel=1e-14)


@given(counts, counts, counts, st.sampled_from(ALTERNATIVES))
def test_p_value_equals_counting_and_ties_against_is_the_worst_way_to_break_them(positive, negative, zero, alternative):
    assume(positive + negative + zero)
    dropped = stats.sign_test(signs(positive, negative, zero), alternative=alternative)
    against = stats.sign_test(signs(positive, negative, zero), alternative=alternative, ties="against")
    assert (dropped.positive, dropped.negative, dropped.zero) == (positive, negative, zero)
    # scipy sums in floating point: some units in the last place.
    assert dropped.p_value == pytest.approx(float(tail(positive, positive + negative, alternative)), rel=1e-12)
    trials = positive + negative + zero
    worst = max(tail(positive + broken, trials, alternative) for broken in range(zero + 1))
    assert against.p_value == pytest.approx(float(worst), rel=1e-12)
    assert against.p_value >= dropped.p_value * (1 - 1e-12)


@given(small_differences, st.sampled_from(ALTERNATIVES), st.sampled_from(["drop", "against"]), st.randoms())
def test_only_signs_count_and_mirrored_data_mirror_the_test(values, alternative, ties, random):
    expected = stats.sign_test(values, alternative=alternative, ties=ties)
    shuffled = random.sample(values, len(values))
    assert stats.sign_test([v**3 / 7 for v in shuffled], alternative=alternative, ties=ties) == expected
    mirror = {"greater": "less", "less": "greater", "two-sided": "two-sided"}[alternative]
    mirrored = stats.sign_test([-v for v in values], alternative=mirror, ties=ties)
    assert mirrored.p_value == pytest.approx(expected.p_value, rel=1e-12)


def test_nearly_equal_values_are_ties_only_when_asked():
    values = [0.1 + 0.2 - 0.3, 1.0, -1.0]
    assert stats.sign_test(values).positive == 2
    assert stats.sign_test(values, tie_within=1e-12).zero == 1


def test_nothing_but_ties_says_nothing():
    for alternative, ties in itertools.product(ALTERNATIVES, ["drop", "against"]):
        assert stats.sign_test([0.0, 0.0], alternative=alternative, ties=ties).p_value == 1.0


# ---------------------------------------------------------------------------------------------------------------------------
# Interval of the win probability


def test_clopper_pearson_textbook_values():
    # 0 of 10 and 7 of 10 at 95 %: printed in tables as (0, .3085) and (.3475, .9333).
    assert stats.win_interval(0, 10) == pytest.approx((0, 0.3085), abs=5e-5)
    assert stats.win_interval(7, 10) == pytest.approx((0.3475, 0.9333), abs=5e-5)


@given(st.integers(1, 40), st.data(), st.sampled_from([0.8, 0.95, 0.99]))
def test_clopper_pearson_is_the_pair_of_beta_quantiles(trials, data, confidence):
    wins = data.draw(st.integers(0, trials))
    tail_mass = (1 - confidence) / 2
    low = beta.ppf(tail_mass, wins, trials - wins + 1) if wins else 0.0
    high = beta.ppf(1 - tail_mass, wins + 1, trials - wins) if wins < trials else 1.0
    assert stats.win_interval(wins, trials, confidence=confidence) == pytest.approx((low, high), abs=1e-9)


def test_one_sided_bound_with_every_trial_won_is_a_root_of_the_level():
    for n in (5, 15, 20, 60):
        assert stats.win_interval(n, n, alternative="greater") == pytest.approx((0.05 ** (1 / n), 1.0), abs=1e-9)
        assert stats.win_interval(0, n, alternative="less") == pytest.approx((0.0, 1 - 0.05 ** (1 / n)), abs=1e-9)


def test_coverage_is_at_least_the_confidence():
    intervals = [stats.win_interval(wins, 15) for wins in range(16)]
    for p in np.linspace(0.01, 0.99, 49):
        masses = [math.comb(15, wins) * p**wins * (1 - p) ** (15 - wins) for wins in range(16)]
        assert sum(m for m, (low, high) in zip(masses, intervals, strict=True) if low <= p <= high) >= 0.95


# ---------------------------------------------------------------------------------------------------------------------------
# Power and size


@pytest.mark.parametrize("alternative", ALTERNATIVES)
@pytest.mark.parametrize("ties", ["drop", "against"])
@pytest.mark.parametrize("tie_probability", [0.0, 0.25])
def test_power_equals_enumeration_of_all_outcomes(alternative, ties, tie_probability):
    n, p, level = 6, 0.8, 0.11
    expected = 0.0
    for outcome in itertools.product((1.0, -1.0, 0.0), repeat=n):
        mass = math.prod({1.0: (1 - tie_probability) * p, -1.0: (1 - tie_probability) * (1 - p), 0.0: tie_probability}[s] for s in outcome)
        if mass and stats.sign_test(outcome, alternative=alternative, ties=ties).p_value <= level:
            expected += mass
    power = stats.sign_test_power(n, p, tie_probability=tie_probability, level=level, alternative=alternative, ties=ties)
    assert power == pytest.approx(expected, rel=1e-11, abs=1e-15)


def test_power_at_the_smallest_level_is_winning_everything():
    assert stats.sign_test_power(15, 0.9, level=2.0**-15) == pytest.approx(0.9**15, rel=1e-12)


@settings(max_examples=40)
@given(st.integers(1, 25), st.floats(0, 1), st.sampled_from(ALTERNATIVES), st.sampled_from(["drop", "against"]))
def test_size_never_exceeds_the_level_and_against_never_has_more_power(trials, tie_probability, alternative, ties):
    options = {"tie_probability": tie_probability, "alternative": alternative}
    assert stats.sign_test_power(trials, 0.5, ties=ties, **options) <= 0.05 + 1e-12
    against = stats.sign_test_power(trials, 0.8, ties="against", **options)
    assert against <= stats.sign_test_power(trials, 0.8, **options) + 1e-12


def test_power_grows_with_the_win_probability():
    powers = [stats.sign_test_power(15, p) for p in np.linspace(0.5, 1, 11)]
    assert np.all(np.diff(powers) > 0)
    assert powers[-1] == pytest.approx(1.0)


def test_correlated_trials_inflate_the_size():
    independent = stats.sign_test_power(60, 0.5)
    assert stats.size_ignoring_blocks(15, 4, 0.0) == pytest.approx(independent, rel=1e-10)
    # Correlation 1: fifteen coins, each counted four times. 37 of 60 are needed, that is ten coins.
    assert tail(36, 60) > 0.05 >= tail(37, 60)
    assert stats.size_ignoring_blocks(15, 4, 1.0) == pytest.approx(float(tail(10, 15)), rel=1e-12)
    rates = [stats.size_ignoring_blocks(15, 4, r) for r in (0.0, 1e-6, 0.2, 0.5, 1 - 1e-9, 1.0)]
    assert rates[0] < rates[2] < rates[3] < rates[5]
    assert rates[1] == pytest.approx(rates[0], abs=1e-5)
    assert rates[-2] == pytest.approx(rates[-1], abs=1e-6)
    assert stats.size_ignoring_blocks(15, 1, 0.7) == pytest.approx(stats.sign_test_power(15, 0.5), rel=1e-10)


def test_size_ignoring_blocks_against_simulation():
    generator, correlation, rounds = np.random.default_rng(0), 0.3, 20_000
    shape = (1 / correlation - 1) / 2
    chance = generator.beta(shape, shape, size=(rounds, 15))
    wins = generator.binomial(4, chance)
    false_alarms = (wins.sum(axis=1) >= 37).mean()
    exact = stats.size_ignoring_blocks(15, 4, correlation)
    assert false_alarms == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / rounds))


# ---------------------------------------------------------------------------------------------------------------------------
# Sign flips, bootstrap, equivalence


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=2, max_size=9), st.sampled_from(ALTERNATIVES))
def test_sign_flips_equal_enumeration(values, alternative):
    observed = sum(values)
    sums = [sum(s * v for s, v in zip(flips, values, strict=True)) for flips in itertools.product((1, -1), repeat=len(values))]
    greater, less = sum(s >= observed for s in sums), sum(s <= observed for s in sums)
    expected = {"greater": greater, "less": less, "two-sided": min(2 * min(greater, less), len(sums))}[alternative] / len(sums)
    assert stats.sign_flip_test(values, alternative=alternative) == pytest.approx(expected, rel=1e-12)


def test_all_positive_differences_give_the_sign_tests_p_value_whatever_their_sizes():
    values = np.random.default_rng(1).lognormal(sigma=2, size=15)
    assert stats.sign_flip_test(values) == 2.0**-15


def test_monte_carlo_agrees_with_enumeration_and_is_seeded():
    values = np.random.default_rng(2).normal(0.4, size=12)
    exact = stats.sign_flip_test(values)
    drawn = stats.sign_flip_test(values, max_patterns=100, resamples=4000, seed=3)
    assert drawn != exact
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 4000))
    assert drawn == stats.sign_flip_test(values, max_patterns=100, resamples=4000, seed=3)
    assert stats.sign_flip_test(np.ones(40), resamples=999) == pytest.approx(1 / 1000)


@pytest.mark.parametrize("method", ["percentile", "BCa"])
def test_bootstrap_interval_of_many_rows_is_the_normal_one(method):
    rows = np.random.default_rng(0).normal(3.0, 2.0, size=2000)
    half_width = 1.959964 * rows.std() / math.sqrt(len(rows))
    low, high = stats.bootstrap_interval(rows, method=method)
    # Monte Carlo error of a 2.5 % quantile from 9,999 resamples: about 2 % of the half-width; skewness of the sample adds less.
    assert low == pytest.approx(rows.mean() - half_width, abs=0.08 * half_width)
    assert high == pytest.approx(rows.mean() + half_width, abs=0.08 * half_width)
    assert stats.bootstrap_interval(rows, method=method) == (low, high)


def test_percentile_interval_by_enumeration_of_three_rows():
    means = np.sort([np.mean(draw) for draw in itertools.product([0.0, 1.0, 5.0], repeat=3)])
    low, high = stats.bootstrap_interval([0.0, 1.0, 5.0], method="percentile", confidence=0.8, resamples=20_000)
    # Quantiles of the exact bootstrap law: 10 % and 90 % lie strictly inside the steps of these masses.
    assert (low, high) == pytest.approx((means[2], means[24]))


def test_bca_leans_towards_the_long_tail():
    rows = np.random.default_rng(0).lognormal(size=30)
    plain, corrected = (stats.bootstrap_interval(rows, method=method) for method in ("percentile", "BCa"))
    assert corrected[0] > plain[0] and corrected[1] > plain[1]


def test_equal_rows_have_an_interval_without_width():
    assert stats.bootstrap_interval([0.25] * 7) == (0.25, 0.25)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=20), st.floats(0.01, 2), st.sampled_from([0.01, 0.05, 0.1]))
def test_equivalence_is_the_interval_within_the_margin(values, margin, level):
    assume(np.std(values) > 1e-6)
    outcome = stats.equivalence_test(values, margin, level=level)
    n, error = len(values), np.std(values, ddof=1) / math.sqrt(len(values))
    # Student's distribution function, from scipy.special rather than from scipy.stats.
    expected = max(stdtr(n - 1, -(np.mean(values) + margin) / error), stdtr(n - 1, (np.mean(values) - margin) / error))
    assert outcome.p_value == pytest.approx(expected, rel=1e-8, abs=1e-300)
    assert outcome.low < outcome.mean < outcome.high
    assume(abs(outcome.p_value - level) > 1e-9)
    assert (outcome.p_value < level) == (-margin < outcome.low and outcome.high < margin)


# ---------------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    "function", [stats.sign_test, stats.sign_flip_test, stats.bootstrap_interval, lambda v: stats.equivalence_test(v, 1)]
)
def test_bad_arrays_are_named(function):
    with pytest.raises(ValueError, match=r"(differences|rows)\[1\] is nan"):
        function([0.0, math.nan, 1.0])
    with pytest.raises(ValueError, match=r"(differences|rows) must be one-dimensional"):
        function([[1.0, 2.0]])
    with pytest.raises(ValueError, match=r"(differences|rows) must be one-dimensional with at least"):
        function([])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stats.sign_test([1.0], alternative="up"), "alternative must be one of greater, less, two-sided"),
        (lambda: stats.sign_test([1.0], ties="split"), "ties must be one of drop, against"),
        (lambda: stats.sign_test([1.0], tie_within=-1.0), "tie_within"),
        (lambda: stats.win_interval(4, 3), "wins must lie within"),
        (lambda: stats.win_interval(0, 0), "trials be positive"),
        (lambda: stats.win_interval(1, 3, confidence=95), "confidence"),
        (lambda: stats.win_interval(1, 3, alternative="up"), "alternative"),
        (lambda: stats.sign_test_power(0, 0.5), "trials must be positive"),
        (lambda: stats.sign_test_power(5, 1.5), "win_probability"),
        (lambda: stats.sign_test_power(5, 0.5, tie_probability=math.nan), "tie_probability"),
        (lambda: stats.sign_test_power(5, 0.5, level=0), "level"),
        (lambda: stats.size_ignoring_blocks(0, 4, 0.1), "blocks"),
        (lambda: stats.size_ignoring_blocks(3, 4, -0.1), "correlation"),
        (lambda: stats.size_ignoring_blocks(3, 4, 0.1, alternative="up"), "alternative"),
        (lambda: stats.sign_flip_test([1.0, 2.0], alternative="up"), "alternative"),
        (lambda: stats.sign_flip_test([1.0, 2.0], resamples=0), "resamples"),
        (lambda: stats.bootstrap_interval([1.0, 2.0], method="basic"), "method must be one of percentile, BCa"),
        (lambda: stats.bootstrap_interval([1.0, 2.0], resamples=0), "resamples"),
        (lambda: stats.equivalence_test([1.0, 2.0], 0.0), "margin"),
        (lambda: stats.equivalence_test([1.0, 2.0], 1.0, level=0.5), "level"),
        (lambda: stats.equivalence_test([1.0, 1.0], 1.0), "all equal to 1.0"),
    ],
)
def test_bad_options_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
