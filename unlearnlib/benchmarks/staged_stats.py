"""Statistics of the staged study: does the two-dimensional edit beat naive task arithmetic and the diagonal, and by which measure.

A row is one trial, :func:`trial_rows` makes them of records. Trials of one model and one data family share both, so that tests and
intervals are of the means of such blocks, as in the paper. These aren't quite independent either: blocks of one model share its
pretraining, and blocks of one family its phrasings. A trial whose closure has a degenerate denominator is flagged; everything is told of
all trials, and of those without a flag beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from ..stats import block_means, bootstrap_interval, equivalence_test, paired_differences, sign_test

NAMES = {
    "naive": "naive",
    "jvp_line": "JVP line",
    "two_d": "2-D",
    "naive_fine": "naive, fine",
    "jvp_line_fine": "JVP line, fine",
    "naive_at_1": "naive at (1, 0)",
    "sidecar_at_1": "sidecar at (1, 1)",
    "ft_unlearn": "FT-unlearn",
    "npo": "NPO",
    "ties": "TIES",
    "dare": "DARE",
    "oracle": "oracle",
    "shipped": "shipped",
}
"""Whose measures a trial records, and how a table or a picture calls them; the coefficients of those at (1, ·) nobody has selected."""

METHODS = tuple(NAMES)

MEASURES = (
    "closure",
    "closure_signed",
    "kl_to_oracle",
    "kl_ordinary",
    "parameter_error",
    "secret_auc",
    "skill",
    "refusal_margin",
    "over_refusal",
    "disclosure",
)
"""What a trial records of each method, on test prompts."""

REGIME = ("residual_ratio", "curvature", "drift")
"""What a trial records of how far it is from the linear regime."""

TRIAL = ("model", "family", "seed")
BLOCK = ("model", "family")


@dataclass(frozen=True)
class Definition:
    """One way to say which of two edits is closer to the oracle.

    Attributes
    ----------
    name : str
        For people.
    suffix : str
        Of the recorded names.
    measure : str
        From :data:`MEASURES`.
    higher_wins : bool
    """

    name: str
    suffix: str
    measure: str
    higher_wins: bool


DEFINITIONS = (
    Definition("closure by distance", "", "closure", True),
    Definition("signed closure", "_signed", "closure_signed", True),
    Definition("KL to the oracle", "_kl", "kl_to_oracle", False),
    Definition("parameter error", "_parameter", "parameter_error", False),
)
"""All but the signed closure have the oracle as their best: that one goes on rising when an edit overshoots it."""

RIVALS = {"naive": "naive", "jvp_line": "line", "naive_fine": "naive_fine", "jvp_line_fine": "line_fine"}
"""What the two-dimensional edit is held against, and how the recorded names call it. The finer lines are controls: see
:data:`unlearnlib.benchmarks.staged_select.FINE`."""

PAIRS = (("two_d", "naive"), ("two_d", "jvp_line"), ("sidecar_at_1", "naive_at_1"))
"""Whose forgetting is compared: the selected edits, whose secret AUC the rule has limited, and those at (1, ·), which nobody selects."""

UNFLAGGED = "_unflagged"
"""At the end of the names of numbers that leave flagged trials out."""


def trial_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One flat row a trial.

    Parameters
    ----------
    records : sequence of dict
        Whole records of trials, with ``values``.

    Returns
    -------
    list of dict
        ``model``, ``family``, ``seed``, ``flagged``, what :data:`REGIME` names; ``<measure>_<method>`` for every measure and method that
        the record has; ``lam_<method>``, ``gamma_<method>`` and ``feasible_<method>`` of the selected edits, and ``zeta``.

    Raises
    ------
    ValueError
        If a record lacks one of the values or two records are of the same trial; the run is named.
    """
    rows: list[dict[str, Any]] = []
    seen: dict[tuple, str] = {}
    for record in records:
        name, values = f"{record['notebook']}/{record['run']}", record["values"]
        plain = (*TRIAL, "flagged", *REGIME, "zeta")
        if absent := [key for key in (*plain, *MEASURES, "selected") if key not in values]:
            raise ValueError(f"{name}: no value of {', '.join(absent)}, so this isn't the record of a trial")
        row = {key: values[key] for key in plain}
        key = tuple(row[field] for field in TRIAL)
        if key in seen:
            raise ValueError(f"{name} and {seen[key]} are of the same trial {key}")
        seen[key] = name
        for measure in MEASURES:
            row |= {f"{measure}_{method}": value for method, value in values[measure][0].items()}
        for chosen in values["selected"]:
            row |= {f"{field}_{chosen['method']}": chosen.get(field) for field in ("lam", "gamma", "feasible")}
        rows.append(row)
    return rows


def split_by_seed(
    rows: Sequence[dict[str, Any]], confirmed_from: int, explored_from: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The study's trials and those of the confirmation.

    Parameters
    ----------
    rows : sequence of dict
        From :func:`trial_rows`.
    confirmed_from : int
        Trials of seeds from this one on are the confirmation.
    explored_from : int
        On seeds from this one on, settings were found: they are to be in no trial.

    Returns
    -------
    study, confirming : list of dict

    Raises
    ------
    ValueError
        If a trial has a seed that settings were found on, or the study has no trial.
    """
    if seen := [row for row in rows if row["seed"] >= explored_from]:
        raise ValueError(f"{len(seen)} trials have seeds that settings were found on, such as {[seen[0][field] for field in TRIAL]}")
    study = [row for row in rows if row["seed"] < confirmed_from]
    if not study:
        raise ValueError("there is no trial to study: every one is of the confirmation, or none was gathered")
    return study, [row for row in rows if row["seed"] >= confirmed_from]


def compare(rows: Sequence[Mapping[str, Any]], definition: Definition, rival: str) -> dict[str, Any]:
    """The two-dimensional edit against another one, by one definition.

    Parameters
    ----------
    rows : sequence of dict
        From :func:`trial_rows`.
    definition : Definition
    rival : str
        A method.

    Returns
    -------
    dict
        ``trials``, ``wins``, ``ties`` and ``losses`` of the two-dimensional edit; ``mean``, of all trials' differences, positive where it
        is better; ``blocks`` and ``positive_blocks``, and of the block means the exact one-sided sign test, ``p_value`` (ties broken
        against the edit) and ``p_value_ties_dropped``, and the 95 % bootstrap interval ``low`` … ``high``, None for a single block.
        With no row the counts are 0, the p-values 1 and the rest None.

    Raises
    ------
    ValueError
        If a trial has only one of the two values.
    """
    if not rows:
        counts = dict.fromkeys(("trials", "wins", "ties", "losses", "blocks", "positive_blocks"), 0)
        return counts | dict.fromkeys(("mean", "low", "high")) | {"p_value": 1.0, "p_value_ties_dropped": 1.0}
    fields = _compared(definition, rival)
    differences = paired_differences(rows, **fields)
    means = [block["mean"] for block in block_means(rows, block=BLOCK, **fields)]
    # An edit selected twice is one edit: its differences are exactly 0, and it has won nothing.
    against, dropped = (sign_test(means, ties=ties) for ties in ("against", "drop"))
    low, high = bootstrap_interval(means) if len(means) > 1 else (None, None)
    return {
        "trials": len(rows),
        "wins": int((differences > 0).sum()),
        "ties": int((differences == 0).sum()),
        "losses": int((differences < 0).sum()),
        "mean": float(differences.mean()),
        "blocks": len(means),
        "positive_blocks": against.positive,
        "p_value": against.p_value,
        "p_value_ties_dropped": dropped.p_value,
        "low": low,
        "high": high,
    }


def block_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The block means of all trials, by every definition and against both rivals, each positive where the two-dimensional edit is better.

    Parameters
    ----------
    rows : sequence of dict
        From :func:`trial_rows`.

    Returns
    -------
    list of dict
        ``definition``, ``against``, ``model``, ``family``, ``trials`` and ``mean``.
    """
    return [
        {"definition": definition.name, "against": NAMES[rival], **block}
        for definition in DEFINITIONS
        for rival in RIVALS
        for block in block_means(rows, block=BLOCK, **_compared(definition, rival))
    ]


def _compared(definition: Definition, rival: str) -> dict[str, Any]:
    """The fields of a comparison, as :mod:`unlearnlib.stats` takes them: a positive difference is a win of the two-dimensional edit."""
    edit, other = (f"{definition.measure}_{method}" for method in ("two_d", rival))
    first, second = (edit, other) if definition.higher_wins else (other, edit)
    return {"trial": TRIAL, "first": first, "second": second}


def without_flagged(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The trials whose closure has a denominator worth dividing by."""
    return [row for row in rows if not row["flagged"]]


def comparisons(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every definition, against naive task arithmetic and against the line, of all trials and of those without a flag.

    Parameters
    ----------
    rows : sequence of dict
        From :func:`trial_rows`.

    Returns
    -------
    list of dict
        ``definition``, ``against``, ``set`` (``"all"`` or ``"unflagged"``) and what :func:`compare` tells.
    """
    return [
        {"definition": definition.name, "against": NAMES[rival], "set": which} | compare(part, definition, rival)
        for which, part in (("all", rows), ("unflagged", without_flagged(rows)))
        for definition in DEFINITIONS
        for rival in RIVALS
    ]


def summary(rows: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, int | float]:
    """The counts and p-values of :func:`comparisons` under one name each.

    Parameters
    ----------
    rows : sequence of dict
        From :func:`trial_rows`.
    prefix : str
        Of every name; ``"confirm_"`` for the confirmation.

    Returns
    -------
    dict of str to number
        With the suffix of each definition (none for the closure by distance): ``wins_two_d_over_naive``, ``ties_two_d_over_naive``,
        ``positive_blocks`` and ``p_value``, which are against naive task arithmetic; ``wins_two_d_over_line``, ``ties_two_d_over_line``,
        ``positive_blocks_over_line`` and ``p_value_over_line``, and so on for every one of :data:`RIVALS`; ``trials`` and ``blocks``. The
        same again with :data:`UNFLAGGED` at the end, without the flagged trials; and ``flagged``, how many these are.
    """
    found: dict[str, int | float] = {"flagged": len(rows) - len(without_flagged(rows))}
    for end, part in (("", rows), (UNFLAGGED, without_flagged(rows))):
        for definition in DEFINITIONS:
            suffix = definition.suffix + end
            for rival, called in RIVALS.items():
                result = compare(part, definition, rival)
                found |= {f"{what}_two_d_over_{called}{suffix}": result[what] for what in ("wins", "ties")}
                over = "" if rival == "naive" else f"_over_{called}"
                found |= {f"{what}{over}{suffix}": result[what] for what in ("positive_blocks", "p_value")}
            found |= {f"{what}{suffix}": result[what] for what in ("trials", "blocks")}
    return {f"{prefix}{name}": value for name, value in found.items()}


def forgetting(rows: Sequence[Mapping[str, Any]], margin: float) -> list[dict[str, Any]]:
    """Whether the compared edits forget equally: the paired difference in secret AUC, and the equivalence test of its block means.

    Parameters
    ----------
    rows : sequence of dict
        From :func:`trial_rows`.
    margin : float
        The largest difference of AUC that doesn't matter, fixed before looking.

    Returns
    -------
    list of dict
        One a set and pair of :data:`PAIRS`: ``edit``, ``against``, ``set``, ``trials``, ``blocks``, ``margin``; ``mean``, the secret AUC of
        the first minus the second's;
        ``low`` … ``high``, its 90 % interval by t, within ±margin just where ``p_value`` (two one-sided tests) is below .05. Fewer than
        two blocks, or blocks that don't differ, leave nothing to test with: None.
    """
    found = []
    for which, part in (("all", rows), ("unflagged", without_flagged(rows))):
        for edit, rival in PAIRS:
            row: dict[str, Any] = {"edit": NAMES[edit], "against": NAMES[rival], "set": which}
            row |= {"trials": len(part), "blocks": 0, "margin": margin}
            row |= dict.fromkeys(("mean", "low", "high", "p_value"))
            if part:
                fields = {"trial": TRIAL, "first": f"secret_auc_{edit}", "second": f"secret_auc_{rival}"}
                means = [block["mean"] for block in block_means(part, block=BLOCK, **fields)]
                row |= {"blocks": len(means), "mean": float(paired_differences(part, **fields).mean())}
                if np.ptp(means) > 0:
                    test = equivalence_test(means, margin)
                    row |= {"low": test.low, "high": test.high, "p_value": test.p_value}
            found.append(row)
    return found


def method_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every method's measures: means over trials, with the 95 % bootstrap interval of the closure over blocks.

    Parameters
    ----------
    rows : sequence of dict
        From :func:`trial_rows`.

    Returns
    -------
    list of dict
        ``method``, ``name``, ``trials`` and the mean of each measure, None where no trial has one; ``closure_low`` … ``closure_high``, None
        for a single block; and ``closure_median``, since one degenerate denominator can make a mean of closures anything.
    """
    found = []
    for method in METHODS:
        own = [row for row in rows if row.get(f"closure_{method}") is not None]
        if not own:
            continue
        line: dict[str, Any] = {"method": method, "name": NAMES[method], "trials": len(own)}
        for measure in MEASURES:
            known = [row[f"{measure}_{method}"] for row in own if row.get(f"{measure}_{method}") is not None]
            line[measure] = fmean(known) if known else None
        closures = [row[f"closure_{method}"] for row in own]
        blocks: dict[tuple, list[float]] = {}
        for row, value in zip(own, closures, strict=True):
            blocks.setdefault(tuple(row[field] for field in BLOCK), []).append(value)
        means = [fmean(values) for values in blocks.values()]
        low, high = bootstrap_interval(means) if len(means) > 1 else (None, None)
        found.append(line | {"closure_low": low, "closure_high": high, "closure_median": float(np.median(closures))})
    return found


def by_model(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The comparisons of all trials for each model apart, and how far that model is from the linear regime.

    Parameters
    ----------
    rows : sequence of dict
        From :func:`trial_rows`.

    Returns
    -------
    list of dict
        ``model``, what :data:`REGIME` names (means over its trials), ``definition``, ``against`` and what :func:`compare` tells.
    """
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        regime = {name: fmean(row[name] for row in own) for name in REGIME}
        found += [
            {"model": model, **regime, "definition": definition.name, "against": NAMES[rival]} | compare(own, definition, rival)
            for definition in DEFINITIONS
            for rival in RIVALS
        ]
    return found


def zeta_spread(rows: Sequence[Mapping[str, Any]], edge: float) -> list[dict[str, Any]]:
    """Where the selected two-dimensional edits lie, for each model and for all.

    Parameters
    ----------
    rows : sequence of dict
        From :func:`trial_rows`.
    edge : float
        The grid's largest coefficient.

    Returns
    -------
    list of dict
        ``model`` (``"all"`` for the last row), ``trials``; mean, standard deviation, lowest and highest of ζ = λ − γ; and how many lie on
        the naive line (``on_naive``), on the diagonal (``on_line``; the origin, which is on both, counts for both), on the grid's outer
        edge (``at_edge``: the best edit may then be outside of it), and outside of the rule's limits (``infeasible``).
    """
    found = []
    for model in (*dict.fromkeys(row["model"] for row in rows), "all"):
        own = [row for row in rows if model in ("all", row["model"])]
        zeta = np.array([row["zeta"] for row in own], dtype=float)
        line = {"model": model, "trials": len(own), "zeta_mean": zeta.mean(), "zeta_sd": zeta.std(ddof=1) if len(own) > 1 else None}
        line |= {"zeta_low": zeta.min(), "zeta_high": zeta.max()}
        line["on_naive"] = sum(row["gamma_two_d"] == 0 for row in own)
        line["on_line"] = sum(row["gamma_two_d"] == row["lam_two_d"] for row in own)
        line["at_edge"] = sum(edge in (row["lam_two_d"], row["gamma_two_d"]) for row in own)
        line["infeasible"] = sum(not row["feasible_two_d"] for row in own)
        found.append({key: float(value) if isinstance(value, np.floating) else value for key, value in line.items()})
    return found


def averages(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> list[dict[str, Any]]:
    """Means over trials.

    Parameters
    ----------
    rows : sequence of dict
        With ``family`` and ``seed``, which name the trial.
    by : sequence of str
        The fields that name a group.

    Returns
    -------
    list of dict
        A row a group, in order of first appearance: the fields, ``trials``, how many of these are ``flagged`` if the rows say so, and the
        mean of every float.
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in by), []).append(row)
    found = []
    for key, members in groups.items():
        numbers = [name for name, value in members[0].items() if isinstance(value, float) and name not in by]
        means = {name: fmean(member[name] for member in members) for name in numbers}
        flags = {"flagged": sum(member["flagged"] for member in members)} if "flagged" in members[0] else {}
        found.append(dict(zip(by, key, strict=True)) | {"trials": len(members), **flags, **means})
    return found
