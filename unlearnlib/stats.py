"""Statistics of paired comparisons: block means, exact sign tests and what goes with them, on any records.

A record is one trial: a dict with fields that identify it, fields that name its block, and one value for each of the two methods
compared. Differences are always `first` − `second`, so a positive one is a win of the first method.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

Alternative = Literal["greater", "less", "two-sided"]
Ties = Literal["drop", "against"]


def paired_differences(records: Sequence[Mapping[str, Any]], *, trial: Sequence[str], first: str, second: str) -> np.ndarray:
    """The difference `first` − `second` of every trial, in the order of the records.

    Parameters
    ----------
    records : sequence of dict
        One trial each.
    trial : sequence of str
        The fields that together identify a trial.
    first, second : str
        The fields of the two values compared.

    Returns
    -------
    ndarray
        Of shape (len(records),), float64.

    Raises
    ------
    ValueError
        If there is no record, a key field is missing, two records have the same trial key, a trial has only one of the two values,
        or a value is not a finite number. The message names the trial.
    """
    if isinstance(trial, str) or not trial:
        raise ValueError(f"trial must be a non-empty list of field names, got {trial!r}")
    if not records:
        raise ValueError("records is empty: there is no trial to compare")
    seen: dict[tuple, int] = {}
    differences = np.empty(len(records))
    for index, record in enumerate(records):
        key = _fields(record, trial, f"record {index}")
        name = "trial " + ", ".join(f"{field}={value!r}" for field, value in zip(trial, key, strict=True))
        if key in seen:
            raise ValueError(f"{name}: records {seen[key]} and {index} have the same trial key")
        seen[key] = index
        missing = [field for field in (first, second) if record.get(field) is None]
        if missing:
            raise ValueError(f"{name}: no value of {' and '.join(missing)}, so it cannot be paired")
        differences[index] = _number(record[first], f"{name}: {first}") - _number(record[second], f"{name}: {second}")
    return differences


def block_means(
    records: Sequence[Mapping[str, Any]], *, trial: Sequence[str], block: Sequence[str], first: str, second: str
) -> list[dict[str, Any]]:
    """The mean difference of every block: the unit that is independent when the trials within a block are not.

    Parameters
    ----------
    records, trial, first, second
        As in :func:`paired_differences`.
    block : sequence of str
        The fields that together name a block, such as model and data set.

    Returns
    -------
    list of dict
        One row a block, in order of first appearance: the block's fields, ``trials`` (how many) and ``mean``.

    Raises
    ------
    ValueError
        As :func:`paired_differences`, and if a record lacks a block field.
    """
    if isinstance(block, str) or not block:
        raise ValueError(f"block must be a non-empty list of field names, got {block!r}")
    differences = paired_differences(records, trial=trial, first=first, second=second)
    members: dict[tuple, list[float]] = {}
    for index, (record, difference) in enumerate(zip(records, differences, strict=True)):
        members.setdefault(_fields(record, block, f"record {index}"), []).append(difference)
    return [
        dict(zip(block, key, strict=True)) | {"trials": len(values), "mean": math.fsum(values) / len(values)}
        for key, values in members.items()
    ]


@dataclass(frozen=True)
class SignTest:
    """The outcome of :func:`sign_test`: the signs counted, the binomial count that was tested, and its p-value."""

    positive: int
    negative: int
    zero: int
    wins: int
    trials: int
    p_value: float


def sign_test(differences: ArrayLike, *, alternative: Alternative = "greater", ties: Ties = "drop", tie_within: float = 0.0) -> SignTest:
    """Exact sign test of independent differences; the null hypothesis is that a win is as likely as a loss.

    Parameters
    ----------
    differences : array_like
        Of shape (n,), finite: block means, or differences of trials that are independent.
    alternative : {"greater", "less", "two-sided"}
        What is to be shown of the win probability, against ½.
    ties : {"drop", "against"}
        Zeros are left out, and the test is conditional on the other signs; or they are broken in the way that makes the p-value
        largest, which is conservative.
    tie_within : float
        Differences of at most this absolute size count as zero.

    Returns
    -------
    SignTest
        ``wins`` of ``trials`` are what was tested; with no trial left the p-value is 1.

    Raises
    ------
    ValueError
        If a difference is not finite, or an option is unknown.

    Notes
    -----
    Exact binomial test of scipy; the treatments of ties are the textbook ones.
    """
    values = _finite(differences, "differences", at_least=1)
    if not tie_within >= 0:
        raise ValueError(f"tie_within must be at least 0, got {tie_within}")
    positive, negative = int((values > tie_within).sum()), int((values < -tie_within).sum())
    zero = len(values) - positive - negative
    wins, trials = _count(positive, negative, zero, alternative, ties)
    return SignTest(positive, negative, zero, wins, trials, _p_value(wins, trials, alternative))


def win_interval(wins: int, trials: int, *, confidence: float = 0.95, alternative: Alternative = "two-sided") -> tuple[float, float]:
    """Clopper–Pearson interval of the win probability: exact, so it covers at least as often as it says.

    Parameters
    ----------
    wins, trials : int
        As in :class:`SignTest`.
    confidence : float
        Between 0 and 1.
    alternative : {"greater", "less", "two-sided"}
        ``"greater"`` gives a lower bound alone (the upper end is 1), ``"less"`` an upper bound alone.

    Returns
    -------
    low, high : float

    Raises
    ------
    ValueError
        If `wins` is not within 0 … `trials`, `trials` is 0, or an option is out of range.
    """
    _check_probability(confidence, "confidence")
    _check_choice(alternative, Alternative, "alternative")
    if trials < 1 or not 0 <= wins <= trials:
        raise ValueError(f"wins must lie within 0 … trials and trials be positive, got {wins} of {trials}")
    interval = stats.binomtest(wins, trials, alternative=alternative).proportion_ci(confidence, method="exact")
    return float(interval.low), float(interval.high)


def sign_test_power(
    trials: int,
    win_probability: float,
    *,
    tie_probability: float = 0.0,
    level: float = 0.05,
    alternative: Alternative = "greater",
    ties: Ties = "drop",
) -> float:
    """The probability that :func:`sign_test` gives a p-value of at most `level`, summed over all outcomes.

    Parameters
    ----------
    trials : int
        Independent differences, ties included.
    win_probability : float
        Of a difference that is not a tie; ½ gives the size of the test.
    tie_probability : float
        Of a difference.
    level : float
        Significance level.
    alternative, ties
        As in :func:`sign_test`.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If `trials` is not positive, a probability is outside 0 … 1, or an option is unknown.
    """
    if trials < 1:
        raise ValueError(f"trials must be positive, got {trials}")
    for value, name in ((win_probability, "win_probability"), (tie_probability, "tie_probability")):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie within 0 … 1, got {value}")
    _check_probability(level, "level")
    # The binomial probabilities overflow on subnormal numbers, which are as good as zero.
    win_probability, tie_probability = (0.0 if p < sys.float_info.min else p for p in (win_probability, tie_probability))
    power = 0.0
    for zero in range(trials + 1):
        signs = trials - zero
        counts = [_count(positive, signs - positive, zero, alternative, ties) for positive in range(signs + 1)]
        rejected = [positive for positive, count in enumerate(counts) if _p_value(*count, alternative) <= level]
        given_ties = float(stats.binom.pmf(rejected, signs, win_probability).sum())
        power += float(stats.binom.pmf(zero, trials, tie_probability)) * given_ties
    return power


def size_ignoring_blocks(
    blocks: int, trials_per_block: int, correlation: float, *, level: float = 0.05, alternative: Alternative = "greater"
) -> float:
    """How often a sign test over all trials rejects a true null hypothesis when trials of one block are correlated.

    The wins of a block are beta-binomial with mean ½: each block draws its own win probability, ½ on average.

    Parameters
    ----------
    blocks, trials_per_block : int
        Independent blocks, and the trials of each.
    correlation : float
        Between the win indicators of two trials of one block, 0 … 1.
    level : float
        Significance level that the test claims.
    alternative : {"greater", "less", "two-sided"}
        As in :func:`sign_test`.

    Returns
    -------
    float
        The rate of false alarms, to be compared with `level`.

    Raises
    ------
    ValueError
        If a count is not positive, or another parameter out of range.

    Notes
    -----
    Model and computation are ours; the sum over outcomes is exact.
    """
    if blocks < 1 or trials_per_block < 1:
        raise ValueError(f"blocks and trials_per_block must be positive, got {blocks} and {trials_per_block}")
    if not 0 <= correlation <= 1:
        raise ValueError(f"correlation must lie within 0 … 1, got {correlation}")
    _check_probability(level, "level")
    _check_choice(alternative, Alternative, "alternative")
    wins = np.arange(trials_per_block + 1)
    if correlation == 0:
        one_block = stats.binom.pmf(wins, trials_per_block, 0.5)
    elif correlation == 1:
        one_block = 0.5 * ((wins == 0) | (wins == trials_per_block))
    else:
        shape = (1 / correlation - 1) / 2
        one_block = stats.betabinom.pmf(wins, trials_per_block, shape, shape)
    total = np.ones(1)
    for _ in range(blocks):
        total = np.convolve(total, one_block)
    return float(sum(mass for count, mass in enumerate(total) if _p_value(count, len(total) - 1, alternative) <= level))


def sign_flip_test(
    differences: ArrayLike,
    *,
    alternative: Alternative = "greater",
    max_patterns: int = 2**20,
    resamples: int = 99_999,
    seed: int = 0,
) -> float:
    """Permutation test of the mean difference over flips of signs, which are all alike likely if the law is symmetric about 0.

    Parameters
    ----------
    differences : array_like
        Of shape (n,), n ≥ 2, independent and finite.
    alternative : {"greater", "less", "two-sided"}
        What is to be shown of the mean, against 0.
    max_patterns : int
        All 2ⁿ patterns of signs are enumerated, and the p-value is exact, if there are no more than this.
    resamples : int
        Random patterns otherwise; the observed one is counted among them, so the p-value is never 0.
    seed : int
        Of the random patterns.

    Returns
    -------
    float
        The p-value.

    Raises
    ------
    ValueError
        If a difference is not finite, there are fewer than two, or an option is out of range.
    """
    values = _finite(differences, "differences", at_least=2)
    _check_choice(alternative, Alternative, "alternative")
    if max_patterns < 1 or resamples < 1:
        raise ValueError(f"max_patterns and resamples must be positive, got {max_patterns} and {resamples}")
    patterns = 2 ** len(values)
    result = stats.permutation_test(
        (values,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=patterns if patterns <= max_patterns else min(resamples, patterns - 1),
        batch=4096,
        alternative=alternative,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def bootstrap_interval(
    rows: ArrayLike,
    *,
    confidence: float = 0.95,
    method: Literal["percentile", "BCa"] = "BCa",
    resamples: int = 9999,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap interval of the mean over rows.

    Parameters
    ----------
    rows : array_like
        Of shape (n,), n ≥ 2: one finite value a row, rows independent.
    confidence : float
        Between 0 and 1.
    method : {"percentile", "BCa"}
        Plain, or corrected for bias and skewness.
    resamples : int
        How many.
    seed : int
        Of the resampling.

    Returns
    -------
    low, high : float
        Both equal to the value if all rows are the same.

    Raises
    ------
    ValueError
        If a row is not finite, there are fewer than two, or an option is out of range.
    """
    values = _finite(rows, "rows", at_least=2)
    _check_probability(confidence, "confidence")
    _check_choice(method, Literal["percentile", "BCa"], "method")
    if resamples < 1:
        raise ValueError(f"resamples must be positive, got {resamples}")
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    interval = stats.bootstrap(
        (values,),
        np.mean,
        confidence_level=confidence,
        method=method,
        n_resamples=resamples,
        batch=256,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class EquivalenceTest:
    """The outcome of :func:`equivalence_test`: the mean difference, its interval, and the larger of the two one-sided p-values."""

    mean: float
    low: float
    high: float
    p_value: float


def equivalence_test(differences: ArrayLike, margin: float, *, level: float = 0.05) -> EquivalenceTest:
    """Two one-sided paired t tests (TOST) of the null hypothesis that the mean difference is `margin` or more away from 0.

    Parameters
    ----------
    differences : array_like
        Of shape (n,), n ≥ 2, independent and finite, not all equal.
    margin : float
        The largest difference that does not matter, in the unit of the differences; fixed before looking.
    level : float
        Significance level; the interval has confidence 1 − 2·level, and lies within ±margin just when the p-value is below it.

    Returns
    -------
    EquivalenceTest

    Raises
    ------
    ValueError
        If a difference is not finite, there are fewer than two, all are equal (no spread to judge by), or an option is bad.

    Notes
    -----
    Schuirmann (1987).
    """
    values = _finite(differences, "differences", at_least=2)
    if not (margin > 0 and math.isfinite(margin)):
        raise ValueError(f"margin must be positive and finite, got {margin}")
    if not 0 < level < 0.5:
        raise ValueError(f"level must lie between 0 and 0.5, got {level}")
    if np.ptp(values) == 0:
        raise ValueError(f"differences are all equal to {values[0]}: a t test has no spread to judge them by")
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    interval = stats.ttest_1samp(values, 0).confidence_interval(1 - 2 * level)
    return EquivalenceTest(float(values.mean()), float(interval.low), float(interval.high), float(max(above, below)))


# ---------------------------------------------------------------------------------------------------------------------------


def _count(positive: int, negative: int, zero: int, alternative: Alternative, ties: Ties) -> tuple[int, int]:
    """Wins and trials of the binomial test."""
    _check_choice(alternative, Alternative, "alternative")
    _check_choice(ties, Ties, "ties")
    if ties == "drop":
        return positive, positive + negative
    trials = positive + negative + zero
    if alternative == "two-sided":
        # The ties can be split, and the p-value is largest where the wins come closest to half.
        return min(max(trials // 2, positive), positive + zero), trials
    return (positive if alternative == "greater" else positive + zero), trials


@lru_cache(maxsize=4096)
def _p_value(wins: int, trials: int, alternative: Alternative) -> float:
    return float(stats.binomtest(wins, trials, alternative=alternative).pvalue) if trials else 1.0


def _fields(record: Mapping[str, Any], names: Sequence[str], where: str) -> tuple:
    for name in names:
        if name not in record:
            raise ValueError(f"{where} has no field {name!r}")
    return tuple(record[name] for name in names)


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is not a number but {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number


def _finite(values: ArrayLike, name: str, *, at_least: int) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) < at_least:
        raise ValueError(f"{name} must be one-dimensional with at least {at_least} values, got shape {array.shape}")
    for index in np.flatnonzero(~np.isfinite(array)):
        raise ValueError(f"{name}[{index}] is {array[index]}")
    return array


def _check_probability(value: float, name: str) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")


def _check_choice(value: str, kind: Any, name: str) -> None:
    if value not in kind.__args__:
        raise ValueError(f"{name} must be one of {', '.join(kind.__args__)}, got {value!r}")
