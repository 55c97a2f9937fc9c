"""How the staged study chooses coefficients: one rule for every edit and every baseline, fed with validation measures and nothing else.

The rule (:data:`RULE`) is of the form "as close to a target as possible, within limits". The limits are on the measures that are piecewise
constant, and that a practitioner would state as limits: the true secrets are told from wrong ones about as well as before the memory came
in, no better and no worse (with a dozen secrets an AUC is off ½ by chance, and θ_A shows by how much), and the skill is still there. Among
the edits within the limits decides a smooth measure, the refusal margin. Taking the highest margin would reward overshooting: a model that
refuses about the forgotten people more firmly than about anybody else isn't one that never knew them, and stands out. So the rule asks for
the margin that the shipped model has on **strangers**, people of whom no phase has told it anything: that is what the forgotten people are
to become, and neither the oracle nor a test prompt is needed to measure it. Ours; the paper's rule isn't at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..sidecar import GridPoint, Selection, SelectionRule, diagonal, naive_line, select
from ..sidecar.functional import Parameters

RULE = {"weights": {"margin_gap": -1.0}, "at_least": {"skill": 0.9}, "at_most": {"auc_gap": 0.1}}
"""The study's rule, as fields of :class:`~unlearnlib.sidecar.select.SelectionRule` on the measures of :func:`validation_measures`."""

MEMBERS = {"naive": naive_line, "jvp_line": diagonal, "two_d": list}
"""Which points of a grid each of the three edits may have."""

FINE = {"naive": "naive_fine", "jvp_line": "jvp_line_fine"}
"""How the two lines are called where they have a finer grid than the plane, as controls: of two points near to each other on a grid of the
plane, the better one may win for being a finer step of what a line's coefficient does, and not for its direction."""


def between(values: Sequence[float], parts: int) -> list[float]:
    """What divides each step of a grid into so many equal parts, without the grid's own values."""
    ordered = sorted(values)
    return [low + (high - low) * i / parts for low, high in pairwise(ordered) for i in range(1, parts)]


def validation_measures(measured: Mapping[str, float], *, unknown_auc: float, stranger_margin: float) -> dict[str, float]:
    """What the rule can speak of.

    Parameters
    ----------
    measured : mapping of str to float
        Of an edited model on the validation split, with ``refusal_margin`` and ``secret_auc``.
    unknown_auc : float
        The secret AUC of θ_A, which has never seen the secrets.
    stranger_margin : float
        The shipped model's refusal margin on strangers.

    Returns
    -------
    dict of str to float
        What was given, and ``auc_gap`` and ``margin_gap``, the distances of the secret AUC and of the refusal margin from those two. An
        AUC below θ_A's counts as much as one above: secrets that are less likely than wrong ones stand out as well.
    """
    auc_gap, margin_gap = abs(measured["secret_auc"] - unknown_auc), abs(measured["refusal_margin"] - stranger_margin)
    return dict(measured) | {"auc_gap": auc_gap, "margin_gap": margin_gap}


def choose(points: Sequence[GridPoint], rule: SelectionRule) -> dict[str, Selection]:
    """The best of the naive line, of the diagonal and of the whole plane, each by the same rule.

    Parameters
    ----------
    points : sequence of GridPoint
        A grid with both lines in it.
    rule : SelectionRule

    Returns
    -------
    dict of str to Selection
        By the name of the edit, see :data:`MEMBERS`.

    Raises
    ------
    ValueError
        If the grid lacks one of the lines, or a point one of the rule's measures.
    """
    return {name: select(members(points), rule) for name, members in MEMBERS.items()}


def best_of(candidates: Iterable[tuple[GridPoint, Parameters]], rule: SelectionRule) -> tuple[Selection, Parameters, list[GridPoint]]:
    """The best of some models, by the same rule; no more than two sets of parameters are held at once.

    Parameters
    ----------
    candidates : iterable of (GridPoint, parameters)
        What a method makes with each of its settings, measured. A method with one coefficient has it as λ.
    rule : SelectionRule

    Returns
    -------
    selection : Selection
    theta : parameters
        Of the selected one.
    points : list of GridPoint
        All of them.

    Raises
    ------
    ValueError
        If there is no candidate.
    """
    selection, best, points = None, None, []
    for point, theta in candidates:
        points.append(point)
        # The preference is a total order, so the best so far and the next one are enough to decide.
        selection = select([point] if selection is None else [selection.point, point], rule)
        if selection.point is point:
            best = theta
    if selection is None:
        raise ValueError("there are no candidates to choose from")
    return selection, best, points


def selection_row(method: str, selection: Selection) -> dict[str, Any]:
    """A selection as a row of a record: ``method``, ``feasible``, ``score``, and the point's coefficients and measures."""
    return {"method": method, "feasible": selection.feasible, "score": selection.score, **selection.point.row()}
