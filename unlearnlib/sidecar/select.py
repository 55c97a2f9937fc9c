"""The grid of edits and the choice among them, on validation measures only (Sweeney 2026, the deployable selector)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from tqdm import tqdm

from .edit import ProcessSidecar

Measure = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True)
class GridPoint:
    """One edit (λ, γ) and its measures by name."""

    lam: float
    gamma: float
    measures: dict[str, float]

    def row(self) -> dict[str, float]:
        """As a row of a record."""
        return {"lam": self.lam, "gamma": self.gamma, **self.measures}


def evaluate_grid(
    sidecar: ProcessSidecar,
    model: nn.Module,
    lams: Sequence[float],
    gammas: Sequence[float],
    measure: Measure,
    *,
    progress: bool | None = None,
) -> list[GridPoint]:
    """Measure the edit at every (λ, γ) of a grid, from the cached directions: nothing is trained.

    Parameters
    ----------
    sidecar : ProcessSidecar
        The edit.
    model : nn.Module
        Edited in place; it holds the shipped parameters afterwards, also after an error.
    lams, gammas : sequence of float
        The two axes.
    measure : callable
        Takes the edited model, returns numbers by name. For :func:`select` they have to come from validation data.
    progress : bool, optional
        Show a bar on stderr; by default if that is a terminal.

    Returns
    -------
    list of GridPoint
        λ by λ.

    Raises
    ------
    MismatchError
        If the model doesn't fit the edit.
    ValueError
        If a measure isn't a finite number; the point is named.
    """
    pairs = [(lam, gamma) for lam in lams for gamma in gammas]
    points = []
    try:
        for lam, gamma in tqdm(pairs, desc="grid", unit="edit", disable=None if progress is None else not progress):
            sidecar.apply_(model, lam=lam, gamma=gamma)
            measures = {name: float(value) for name, value in measure(model).items()}
            if bad := [name for name, value in measures.items() if not math.isfinite(value)]:
                raise ValueError(f"at lam = {lam}, gamma = {gamma} these measures aren't finite: {', '.join(bad)}")
            points.append(GridPoint(lam, gamma, measures))
    finally:
        sidecar.revert_(model)
    return points


def naive_line(points: Sequence[GridPoint]) -> list[GridPoint]:
    """The points with γ = 0: task arithmetic."""
    return [point for point in points if point.gamma == 0]


def diagonal(points: Sequence[GridPoint]) -> list[GridPoint]:
    """The points with γ = λ: the process-JVP line."""
    return [point for point in points if point.gamma == point.lam]


@dataclass(frozen=True)
class SelectionRule:
    """What to choose by: the highest weighted sum of measures among the points that keep within limits (ours).

    Attributes
    ----------
    weights : mapping of str to float
        The score is ``Σ weight · measure``; a negative weight makes a measure count as a cost.
    at_least, at_most : mapping of str to float
        Limits on measures.
    """

    weights: Mapping[str, float]
    at_least: Mapping[str, float] = field(default_factory=dict)
    at_most: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self):
        if not self.weights:
            raise ValueError("weights is empty: a rule needs at least one measure to score by")

    def score(self, measures: Mapping[str, float]) -> float:
        """The weighted sum."""
        return sum(weight * measures[name] for name, weight in self.weights.items())

    def violation(self, measures: Mapping[str, float]) -> float:
        """By how much the limits are broken, summed; 0 if all hold."""
        below = sum(max(0.0, limit - measures[name]) for name, limit in self.at_least.items())
        return below + sum(max(0.0, measures[name] - limit) for name, limit in self.at_most.items())


@dataclass(frozen=True)
class Selection:
    """The chosen point, its score, and whether it keeps within the limits; if not, no point does, and it breaks them least."""

    point: GridPoint
    score: float
    feasible: bool


def select(points: Sequence[GridPoint], rule: SelectionRule) -> Selection:
    """Choose an edit by its validation measures; neither an oracle nor parameters can enter.

    Of equal points the one with the smaller ``|λ| + |γ|`` is taken, then the smaller λ.

    Parameters
    ----------
    points : sequence of GridPoint
        A grid, or a line of it.
    rule : SelectionRule
        Stated before the measures are seen.

    Raises
    ------
    ValueError
        If there are no points, or the rule names a measure that a point lacks.
    """
    if not points:
        raise ValueError("points is empty: there is nothing to choose from")
    needed = {*rule.weights, *rule.at_least, *rule.at_most}
    for point in points:
        if absent := sorted(needed - point.measures.keys()):
            raise ValueError(f"the point lam = {point.lam}, gamma = {point.gamma} lacks the measures {', '.join(absent)}")

    def preference(point: GridPoint) -> tuple[float, float, float, float]:
        return rule.violation(point.measures), -rule.score(point.measures), abs(point.lam) + abs(point.gamma), point.lam

    best = min(points, key=preference)
    return Selection(best, rule.score(best.measures), rule.violation(best.measures) == 0)
