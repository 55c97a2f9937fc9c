"""The MUSE tables: a row a method, and the settings that were tried; put together from runs and records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .muse_scores import membership, table_row
from .muse_study import TEXT_METHODS, Study
from .tofu_study import LORA
from .tofu_tables import MODELS, _choices, _missing, _settings

Rows = list[dict]


@dataclass
class Tables:
    """What a run of the MUSE page records.

    Attributes
    ----------
    rows : list of dict
        One a model or method, see :func:`~unlearnlib.benchmarks.muse_scores.table_row`; with ``method``, ``seconds`` and ``seed``.
    choices : list of dict
        One a candidate: ``method``, ``candidate`` (from 0, the mildest first), ``settings``, ``forgetting``, ``preservation``,
        ``score`` and ``chosen``; of a band also its first layer, ``band``.
    """

    rows: Rows = field(default_factory=list)
    choices: Rows = field(default_factory=list)

    def row(self, method: str) -> dict:
        """The row of a method.

        Raises
        ------
        KeyError
            If there is none.
        """
        return next((row for row in self.rows if row["method"] == method), None) or _missing(method, self.rows)


def make_tables(study: Study, methods: Sequence[str], gathered: Iterable[Mapping] = ()) -> Tables:
    """Compute the rows of some methods, or take them from records of other runs.

    Parameters
    ----------
    study : Study
    methods : sequence of str
        ``base``, ``full``, ``retain``, names from :data:`~unlearnlib.benchmarks.muse_study.TEXT_METHODS`, and gradient methods with
        ``_lora`` at their end.
    gathered : iterable of record
        Records of other runs of the page on the same corpus. Their rows are taken over, of several for one method the first; the
        settings that they chose are used for methods whose row isn't there.

    Returns
    -------
    Tables
        In the order of `methods`.

    Raises
    ------
    ValueError
        Before any work, if a method is unknown, or a record is about another corpus.
    """
    for method in methods:
        name = method.removesuffix(LORA)
        if method not in MODELS and (name not in TEXT_METHODS or (name.startswith("grom") and name != method)):
            raise ValueError(f"unknown method {method!r}: use {', '.join([*MODELS, *TEXT_METHODS])}, or a gradient method's with {LORA}")
    known = Tables()
    for record in gathered:
        values = record["values"]
        if values["corpus"] != study.data.corpus:
            raise ValueError(f"a gathered record is about {values['corpus']}, not about {study.data.corpus}")
        for mine, theirs in ((known.rows, values["rows"]), (known.choices, values["choices"])):
            there = {row["method"] for row in mine}
            mine += [row for row in theirs if row["method"] not in there]
    rows = {row["method"]: row for row in known.rows}
    # What every row is held against: the test's success on the model that never saw the documents.
    reference = rows["retain"]["auc"] if "retain" in rows else membership(study.scores("retain")["scores"])
    tables = Tables()
    for method in methods:
        own = [choice for choice in known.choices if choice["method"] == method]
        if method not in MODELS and method not in rows and not own:
            own = _choices(method, study.choose(method))
        tables.choices += own
        if method in rows:
            tables.rows.append(rows[method])
            continue
        found = study.scores(method, None if method in MODELS else _settings(study, method, own))
        row = {"method": method, **table_row(found["scores"], reference)}
        tables.rows.append(row | {"seconds": found["seconds"], "seed": study.tuning.seed})
    return tables


SPEEDUP = 100
"""How many times as fast as SimNPO the paper has GROM at least, on either corpus."""


def claims(tables: Tables) -> Rows:
    """What the paper says of GROM on MUSE, held against a table's rows.

    Returns
    -------
    list of dict
        ``claim``; ``grom`` and ``other``, the two numbers that decide it; ``against``, whose the second is; and ``verdict``: ``holds``,
        ``doesn't hold``, or ``can't be told`` where GROM's 95 % bootstrap interval, over rows, includes the other's number (of PrivLeak,
        where it is as far from 0 on either side).

    Notes
    -----
    Claims of a table that lacks a row they need are left out.
    """
    rows = {row["method"]: row for row in tables.rows}
    trained = [row for name, row in rows.items() if name not in MODELS and not name.startswith("grom")]
    if "grom" not in rows or not trained:
        return []
    grom = rows["grom"]

    def claim(text: str, number: float, other: Mapping, others: float, *, better: bool, unclear: bool = False) -> dict:
        verdict = "can't be told" if unclear else "holds" if better else "doesn't hold"
        return {"claim": text, "grom": number, "other": others, "against": other["method"], "verdict": verdict}

    best = max(trained, key=lambda row: row["final"])
    closest = min(trained, key=lambda row: abs(row["priv_leak"]))
    fastest = min(trained, key=lambda row: row["seconds"])
    ends = grom["priv_leak_low"], grom["priv_leak_high"]
    nearest = 0.0 if ends[0] <= 0 <= ends[1] else min(map(abs, ends))
    found = [
        claim(
            "highest Final of all methods",
            grom["final"],
            best,
            best["final"],
            better=grom["final"] > best["final"],
            unclear=grom["final_low"] <= best["final"] <= grom["final_high"],
        ),
        claim(
            "PrivLeak nearest to 0",
            grom["priv_leak"],
            closest,
            closest["priv_leak"],
            better=abs(grom["priv_leak"]) < abs(closest["priv_leak"]),
            unclear=nearest <= abs(closest["priv_leak"]) <= max(map(abs, ends)),
        ),
        claim(
            "faster than every gradient method (seconds)",
            grom["seconds"],
            fastest,
            fastest["seconds"],
            better=grom["seconds"] < fastest["seconds"],
        ),
    ]
    if "simnpo" in rows:
        scaled, other = SPEEDUP * grom["seconds"], rows["simnpo"]
        text = f"{SPEEDUP} times as fast as SimNPO (seconds, GROM's × {SPEEDUP})"
        found.append(claim(text, scaled, other, other["seconds"], better=scaled <= other["seconds"]))
    return found
