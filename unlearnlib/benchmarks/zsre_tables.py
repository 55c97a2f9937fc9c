"""The tables of the study of single facts: what was measured, the settings that were tried, and what is claimed of GROM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..baselines.editing import EditorSettings
from ..baselines.editors import DEVIATIONS, EDITORS, NOT_ESTABLISHED
from ..grom import HEAD
from ..methods import GromSettings
from ..published import NAMES as COMMON_NAMES
from .choices import choice_rows
from .zsre_scores import EDITING, OWN, UNLEARNING, table_row
from .zsre_study import BEFORE, GROM, METHODS, Study

NAMES = COMMON_NAMES | {"zero_unlearn_gd": "ZeroUnlearn-GD"}
"""How a table or a picture calls a method."""

EDITABLE = 0.5
"""Editors count in a comparison if the best of them makes the model say this share of the new answers, whole: what they were built for."""

NOT_EDITABLE = "can't be told: no editor can edit this model"
"""The verdict on what would hold against editors where none gets so far."""


@dataclass
class Tables:
    """What a run of the page records; every row of scores has ``method``, ``facts``, ``harness`` and ``protocol``.

    Attributes
    ----------
    rows : list of dict
        The unlearning harness at one size of request: a row a method, see :func:`~unlearnlib.benchmarks.zsre_scores.table_row`, with
        ``seconds`` and ``moments_seconds``.
    dilution : list of dict
        The same for every size, without the model's own answers.
    editing : list of dict
        The editing harness: a row an editor, and the model before it.
    choices : list of dict
        See :func:`~unlearnlib.benchmarks.choices.choice_rows`.
    reach : list of dict
        See :meth:`~unlearnlib.benchmarks.zsre_study.Study.reach`.
    """

    rows: list[dict] = field(default_factory=list)
    dilution: list[dict] = field(default_factory=list)
    editing: list[dict] = field(default_factory=list)
    choices: list[dict] = field(default_factory=list)
    reach: list[dict] = field(default_factory=list)

    @property
    def editable(self) -> bool:
        """Whether editors can edit the model, as far as that was measured: see :data:`EDITABLE`."""
        found = [row["efficacy_exact"] for row in self.editing if row["method"] in EDITORS]
        return not found or max(found) >= EDITABLE


def make_tables(
    study: Study,
    methods: Sequence[str],
    *,
    facts: int,
    counts: Sequence[int],
    editor_counts: Sequence[int],
    editing_facts: int = 0,
    reach_steps: int = 0,
    gathered: Iterable[Mapping] = (),
) -> Tables:
    """Choose every method's settings, and measure it on requests of several sizes; or take that from records of other runs.

    Parameters
    ----------
    study : Study
    methods : sequence of str
        From :data:`~unlearnlib.benchmarks.zsre_study.METHODS` and :data:`~unlearnlib.benchmarks.zsre_study.BEFORE`.
    facts : int
        The size of request that the main table has.
    counts, editor_counts : sequence of int
        The sizes that GROM and the model before it are measured on, and those of the editors, which take longer.
    editing_facts : int
        The size of request of the editing harness; 0 leaves it out.
    reach_steps : int
        See :meth:`~unlearnlib.benchmarks.zsre_study.Study.reach`; 0 leaves it out.
    gathered : iterable of record
        Records of other runs of the page on the same split. A method's choices and rows are taken from them where they are there.

    Returns
    -------
    Tables
        In the order of `methods`.

    Raises
    ------
    ValueError
        Before any work, if a method is unknown, a request is larger than the split's, `facts` is not among the sizes, or a record is of
        another split.
    """
    for method in methods:
        if method not in (*METHODS, BEFORE):
            raise ValueError(f"unknown method {method!r}: use {', '.join((BEFORE, *METHODS))}")
    for name, sizes in (("counts", counts), ("editor_counts", editor_counts)):
        if facts not in sizes:
            raise ValueError(f"{name} must contain facts = {facts}, the size of the main table, got {list(sizes)}")
        if max(sizes) > len(study.split.forget) or min(sizes) < 1:
            raise ValueError(f"{name} must lie within 1 … {len(study.split.forget)}, the facts to forget, got {list(sizes)}")
    if not 0 <= editing_facts <= len(study.split.forget):
        raise ValueError(f"editing_facts must lie within 0 … {len(study.split.forget)}, the facts to forget, got {editing_facts}")
    if reach_steps < 0:
        raise ValueError(f"reach_steps must be at least 0, got {reach_steps}")
    known, tables = _gather(gathered, study.split.digest), Tables()

    def measured(table: str, method: str, count: int, settings, *options) -> dict:
        """A row that a record has, or a new one."""
        same = [row for row in getattr(known, table) if (row["method"], row["facts"]) == (method, count)]
        return same[0] if same else _row(study, method, count, settings(), *options)

    for method in methods:
        tables.choices += (choices := _choices(study, method, known.choices))

        def settings(method=method, choices=choices):
            return next((study.candidates(method)[choice["candidate"]] for choice in choices if choice["chosen"]), None)

        row = measured("rows", method, facts, settings, UNLEARNING, True)
        tables.rows.append(row)
        for count in editor_counts if method in EDITORS else counts:
            if count == facts:
                tables.dilution.append({name: value for name, value in row.items() if name not in OWN})
            else:
                tables.dilution.append(measured("dilution", method, count, settings))
        if editing_facts and method not in GROM:
            tables.editing.append(measured("editing", method, editing_facts, settings, EDITING, True))
    if reach_steps:
        tables.reach = known.reach or study.reach(reach_steps)
    return tables


def _gather(gathered: Iterable[Mapping], digest: str) -> Tables:
    """What records of other runs have; of what several have, the first one's counts."""
    known = Tables()
    for record in gathered:
        values = record["values"]
        if values["split"] != digest:
            raise ValueError(f"the record {record['notebook']}/{record['run']} is of other facts (split {values['split']}, here {digest})")
        for table in ("rows", "dilution", "editing"):
            getattr(known, table).extend(values[table])
        known.reach = known.reach or values["reach"]
        new = {choice["method"] for choice in values["choices"]} - {choice["method"] for choice in known.choices}
        known.choices += [choice for choice in values["choices"] if choice["method"] in new]
    return known


def _choices(study: Study, method: str, known: Sequence[dict]) -> list[dict]:
    found = [choice for choice in known if choice["method"] == method]
    if method == BEFORE or found:
        return found
    return choice_rows(method, study.choose(method), describe)


def _row(study: Study, method: str, count: int, settings, harness: str = UNLEARNING, speak: bool = False) -> dict:
    found = study.scores(method, count, settings, harness, speak=speak)
    times = {name: found[name] for name in ("seconds", "moments_seconds")}
    return {"method": method, "facts": count} | table_row(found["scores"], harness) | times


def blank_rows() -> list[dict]:
    """Rows that a table of this benchmark would have, and that are left blank: ``method`` and the ``reason``."""
    return [{"method": NAMES[name], "reason": reason} for name, reason in NOT_ESTABLISHED.items()]


def claims(tables: Tables) -> list[dict]:
    """What is claimed of GROM, held against the table's rows.

    Returns
    -------
    list of dict
        ``method``, the variant of GROM; ``claim``; ``grom`` and ``other``, the two numbers that decide it; ``against``, whose the second
        is; ``verdict``: ``holds``, ``doesn't hold``, or ``can't be told`` where the two differ by less than half the width of the 95 %
        bootstrap interval, over facts and unrelated questions, of GROM's number (for the claim about two sizes: of their difference), or,
        with :data:`NOT_EDITABLE`, where editors can't do on this model what they were built for.

    Notes
    -----
    Claims of a table that lacks a row they need are left out. Pareto-best: no editor forgets at least as well and keeps at least as much,
    and does one of both better.
    """
    rows = {row["method"]: row for row in tables.rows}
    editors = [row for name, row in rows.items() if name in EDITORS]
    found = []
    for method in GROM:
        if method not in rows:
            continue
        row = rows[method]
        if editors:
            best = max(editors, key=lambda other: other["final"])
            dominating = [other for other in editors if _dominates(other, row)]
            against_editors = [
                _verdict(method, "highest Final of all methods", row["final"], best["final"], best["method"], _final_noise(row)),
                {
                    "method": method,
                    "claim": "Pareto-best: no editor dominates it",
                    "grom": row["final"],
                    "other": max((other["final"] for other in dominating), default=None),
                    "against": ", ".join(other["method"] for other in dominating) or None,
                    "verdict": "doesn't hold" if dominating else "holds",
                },
            ]
            # An editor that can't work here is no rival. One that is better all the same is.
            for claim in against_editors:
                if claim["verdict"] == "holds" and not tables.editable:
                    claim["verdict"] = NOT_EDITABLE
            found += against_editors
        sizes = sorted((other for other in tables.dilution if other["method"] == method), key=lambda other: other["facts"])
        if len(sizes) > 1:
            few, many = sizes[0], sizes[-1]
            noise = math.hypot(*(_half_width(one, "efficacy") for one in (few, many)))
            claim = f"one solve dilutes: efficacy is worse on {many['facts']} facts than on {few['facts']}"
            found.append(_verdict(method, claim, many["efficacy"], few["efficacy"], method, noise))
    return found


def _verdict(method: str, claim: str, value: float, other: float, against: str, noise: float) -> dict:
    verdict = "can't be told" if abs(value - other) < noise else "holds" if value > other else "doesn't hold"
    return {"method": method, "claim": claim, "grom": value, "other": other, "against": against, "verdict": verdict}


def _final_noise(row: Mapping[str, float]) -> float:
    """Half the width of an interval of Final: its three terms are independent to the first order."""
    # Efficacy and generalization are about the same facts, so that their errors add up.
    of_facts = (_half_width(row, "efficacy") + _half_width(row, "generalization")) / 2
    return math.hypot(_half_width(row, "specificity"), of_facts) / 2


def _half_width(row: Mapping[str, float], measure: str) -> float:
    return (row[f"{measure}_high"] - row[f"{measure}_low"]) / 2


def _dominates(other: Mapping[str, float], row: Mapping[str, float]) -> bool:
    pairs = [(-(one["efficacy"] + one["generalization"]), one["specificity"]) for one in (other, row)]
    return all(a >= b for a, b in zip(*pairs, strict=True)) and pairs[0] != pairs[1]


def describe(settings: GromSettings | EditorSettings) -> str:
    """Settings in a few words: the place, and what was varied."""
    if isinstance(settings, GromSettings):
        layers, what = settings.fit.layers, f"β {settings.fit.strength:g}"
    else:
        knobs = {"mom2_weight": "λ", "l2": "L2", "general_weight": "a"}
        found = [f"{sign} {getattr(settings, name):g}" for name, sign in knobs.items() if hasattr(settings, name)]
        layers, what = settings.layers, found[0] if found else f"clamp {settings.clamp:g}"
    if layers == (HEAD,):
        return f"LM head, {what}"
    return (f"layer {layers[0]}, " if len(layers) == 1 else f"layers {layers[0]}–{layers[-1]}, ") + what


def deviations_table() -> str:
    """Where the editors depart from their official code, as a Markdown table."""
    lines = ["| method | official code | here |", "|---|---|---|"]
    return "\n".join(lines + [f"| {method} | {theirs} | {ours} |" for method, theirs, ours in DEVIATIONS])
