"""The WMDP tables: a row a model or method, the settings that were tried, and the paper's claims; put together from runs and records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import hypot

from .. import published
from ..baselines import GradientSettings
from ..baselines.rmu import RmuSettings
from ..grom import FitSettings
from ..grom.choose import mildest
from .choices import choice_rows
from .wmdp_scores import by_subject, table_row
from .wmdp_study import METHODS, MODELS, Study

ACCURACIES = ("accuracy_restricted", "mmlu")

PUBLISHED_CHOICES = 4
"""Of each question of WMDP and MMLU."""

Rows = list[dict]


@dataclass
class Tables:
    """What a run of the WMDP page records.

    Attributes
    ----------
    rows : list of dict
        One a model or method, see :func:`~unlearnlib.benchmarks.wmdp_scores.table_row`; with ``method``, ``settings``, ``seconds`` and
        ``seed``.
    choices : list of dict
        See :func:`~unlearnlib.benchmarks.choices.choice_rows`.
    subjects : list of dict
        One a model and subject: ``method``, ``domain`` (restricted or general), ``subject`` and ``accuracy``.
    """

    rows: Rows = field(default_factory=list)
    choices: Rows = field(default_factory=list)
    subjects: Rows = field(default_factory=list)


def make_tables(study: Study, methods: Sequence[str], gathered: Iterable[Mapping] = ()) -> Tables:
    """Compute the rows of some methods, or take them from records of other runs.

    Parameters
    ----------
    study : Study
    methods : sequence of str
        Names from :data:`~unlearnlib.benchmarks.wmdp_study.MODELS` and :data:`~unlearnlib.benchmarks.wmdp_study.METHODS`.
    gathered : iterable of record
        Records of other runs of the page. Rows and choices of the same questions are taken over; of what several have, the first one's.

    Returns
    -------
    Tables
        In the order of `methods`.

    Raises
    ------
    ValueError
        Before any work, if a method is unknown.
    """
    for method in methods:
        if method not in MODELS + METHODS:
            raise ValueError(f"unknown method {method!r}: use {', '.join(MODELS + METHODS)}")
    known: dict[str, Mapping] = {}
    for record in gathered:
        if record["values"]["subset"] == study.data.name:
            for row in record["values"]["rows"]:
                known.setdefault(row["method"], record["values"])
    tables = Tables()
    for method in methods:
        if method in known:
            for name in ("rows", "choices", "subjects"):
                getattr(tables, name).extend(row for row in known[method][name] if row["method"] == method)
            continue
        settings = None
        if method not in MODELS:
            trials = study.choose(method)
            settings = mildest(trials).settings
            tables.choices += choice_rows(method, trials, describe)
        found = study.scores(method, settings)
        scores = found["scores"]
        described = {"settings": None if settings is None else describe(settings), "seconds": found["seconds"], "seed": study.tuning.seed}
        tables.rows.append({"method": method} | table_row(scores) | described)
        tables.subjects += [
            {"method": method, "domain": domain, "subject": subject, "accuracy": value}
            for domain, marks in scores.items()
            for subject, value in by_subject(marks).items()
        ]
    return tables


def describe(settings: FitSettings | RmuSettings | GradientSettings) -> str:
    """A candidate's settings in a few words."""
    if isinstance(settings, GradientSettings):
        return f"lr {settings.lr:g}"
    layer = settings.layer if isinstance(settings, RmuSettings) else settings.layers[0]
    return f"layer {layer}, c {settings.strength:g}"


def claims(rows: Rows) -> Rows:
    """What the paper says of GROM on WMDP, held against a table's rows.

    Parameters
    ----------
    rows : list of dict
        Of :class:`Tables`.

    Returns
    -------
    list of dict
        ``claim``; ``paper``, the paper's number for GROM; ``grom`` and ``other``, the two numbers that decide it here; ``against``, whose
        the second is; and ``verdict``: ``holds``, ``doesn't hold``, or ``can't be told`` where the two differ by less than the questions
        can tell apart (half the width of the 95 % binomial intervals of GROM's accuracies; of Final, which is made of two, half their
        root sum of squares). The paper's numbers of what was known are relative to guessing one of four. Without a row that they need,
        there are none.
    """
    named = {row["method"]: row for row in rows}
    others = [row for row in rows if row["method"] not in (*MODELS, "grom")]
    if "grom" not in named or not others:
        return []
    grom, paper = named["grom"], _published_rows()["grom"]
    noise = {name: (grom[f"{name}_high"] - grom[f"{name}_low"]) / 2 for name in ACCURACIES}
    noise |= {"final": hypot(*noise.values()) / 2, "seconds": 0.0}
    found = []

    def hold(claim: str, ours: float, theirs: float, other: float, against: str, noise: float, sign: int = 1) -> None:
        lead = sign * (ours - other)
        verdict = "can't be told" if abs(lead) < noise else "holds" if lead > 0 else "doesn't hold"
        found.append({"claim": claim, "paper": theirs, "grom": ours, "other": other, "against": against, "verdict": verdict})

    for claim, measure, sign in (
        ("highest Final of all methods", "final", 1),
        ("highest accuracy on the general domain", "mmlu", 1),
        ("faster than every method that trains (seconds)", "seconds", -1),
    ):
        best = max(others, key=lambda row: sign * row[measure])
        hold(claim, grom[measure], paper[measure], best[measure], best["method"], noise[measure], sign)
    if "full" in named:
        before = named["full"]
        ours, theirs = known_left(grom, before), known_left(paper, _published_rows()["full"])
        noise = {name: noise[name] / (before[name] - before[f"{name}_guessing"]) for name in ACCURACIES}
        restricted, general = ACCURACIES
        claim = "most of what was known of the restricted domain is gone"
        hold(claim, 1 - ours[restricted], 1 - theirs[restricted], 0.5, "a half", noise[restricted])
        claim = "most of what was known of the general domain is left"
        hold(claim, ours[general], theirs[general], 0.5, "a half", noise[general])
    return found


def known_left(row: Mapping, before: Mapping) -> dict[str, float]:
    """The part of what was known that is left, of both accuracies: 1 for that before unlearning, 0 for guessing.

    Parameters
    ----------
    row, before : dict
        Of :class:`Tables`: a method's, and that of the model before unlearning.

    Returns
    -------
    dict
        ``accuracy_restricted`` and ``mmlu``.

    Raises
    ------
    ValueError
        If nothing was known.
    """
    found = {}
    for name in ACCURACIES:
        guessing = before[f"{name}_guessing"]
        if before[name] <= guessing:
            raise ValueError(f"before unlearning {name} was {before[name]:g}, no more than guessing ({guessing:g}): nothing was known")
        found[name] = (row[name] - guessing) / (before[name] - guessing)
    return found


def _published_rows() -> dict[str, dict]:
    """The paper's table in the shape of ours; all of its questions have four choices."""
    table = published.table("wmdp_bio")
    found = {}
    for method in table.rows:
        value = partial(table.value, method)
        minutes = value("minutes")
        found[method] = {
            "accuracy_restricted": 1 - value("one_minus_accuracy"),
            "mmlu": value("mmlu"),
            "final": value("final"),
            "seconds": None if minutes is None else 60 * minutes,
        } | {f"{name}_guessing": 1 / PUBLISHED_CHOICES for name in ACCURACIES}
    return found
