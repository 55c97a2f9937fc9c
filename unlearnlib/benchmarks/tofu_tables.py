"""The TOFU tables: a row a method, the settings that were tried, and the scores of each forget row; put together from runs and records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..grom import HEAD
from ..grom.choose import Trial, mildest
from ..methods import GROM, METHODS, GromSettings
from ..stats import bootstrap_interval
from .tofu_scores import FINAL_TERMS, Scores, intervals, mean, table_row, utility
from .tofu_study import LORA, Study

MODELS = ("base", "full", "retain")
"""Rows of the tables that no method made: before fine-tuning, before unlearning, and never trained on the forget rows."""

DIGITS = 7
"""Significant digits of scores that are recorded row by row: float32 has no more."""

Rows = list[dict]


@dataclass
class Tables:
    """What a run of the TOFU page records.

    Attributes
    ----------
    rows : list of dict
        One a model or method, see :func:`~unlearnlib.benchmarks.tofu_scores.table_row`; with ``method``, ``model_utility_held_out``,
        ``relearn_before`` and ``relearn_after``, bootstrap intervals, ``seconds`` and ``seed``.
    choices : list of dict
        One a candidate: ``method``, ``candidate`` (from 0, the mildest first), ``settings``, ``forgetting``, ``preservation``,
        ``score`` and ``chosen``; of a band also its first layer, ``band``.
    forget_rows : list of dict
        One a model and forget row: its scores by measure, and those of the holdout row beside it.
    repeats : list of dict
        Rows like `rows` of the same methods with other seeds, from other runs.
    """

    rows: Rows = field(default_factory=list)
    choices: Rows = field(default_factory=list)
    forget_rows: Rows = field(default_factory=list)
    repeats: Rows = field(default_factory=list)

    def row(self, method: str) -> dict:
        """The row of a method.

        Raises
        ------
        KeyError
            If there is none.
        """
        return next((row for row in self.rows if row["method"] == method), None) or _missing(method, self.rows)

    def scores(self, method: str) -> Scores | None:
        """The scores of a model's forget and holdout rows; None if there are none."""
        found = [row for row in self.forget_rows if row["method"] == method]
        if not found:
            return None
        names = [name for name in found[0] if name not in ("method", "row", "holdout_min_k")]
        forget = {name: [row[name] for row in found] for name in names}
        return {"forget": forget, "holdout": {"min_k": [row["holdout_min_k"] for row in found]}}


def _missing(method: str, rows: Rows):
    raise KeyError(f"there is no row {method!r}; there are {', '.join(row['method'] for row in rows) or 'none'}")


def make_tables(study: Study, methods: Sequence[str], gathered: Iterable[Mapping] = ()) -> Tables:
    """Compute the rows of some methods, or take them from records of other runs.

    Parameters
    ----------
    study : Study
    methods : sequence of str
        Names from :data:`MODELS` and :data:`~unlearnlib.methods.METHODS`.
    gathered : iterable of record
        Records of other runs of the page. Rows of the same split are taken over; the settings that they chose are used, whatever the
        split, for methods whose row isn't there.

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
        name = method.removesuffix(LORA)
        if method not in MODELS and (name not in METHODS or (name in GROM and name != method)):
            raise ValueError(f"unknown method {method!r}: use {', '.join([*MODELS, *METHODS])}, or a gradient method's with {LORA}")
    known = Tables()
    chosen: dict[str, Rows] = {}
    for record in gathered:
        values = record["values"]
        # Of what several records have, the first one's counts.
        new = {choice["method"] for choice in values["choices"]} - chosen.keys()
        for choice in values["choices"]:
            if choice["method"] in new:
                chosen.setdefault(choice["method"], []).append(choice)
        if values["split"] == study.data.split:
            new = {row["method"] for row in values["rows"]} - {row["method"] for row in known.rows}
            known.forget_rows += [row for row in values["forget_rows"] if row["method"] in new]
            for row in values["rows"]:
                seeds = {other["seed"] for other in known.rows + known.repeats if other["method"] == row["method"]}
                if row["method"] in new:
                    known.rows.append(row)
                elif row["seed"] not in seeds:
                    known.repeats.append(row)
    tables = Tables(repeats=known.repeats)
    # The two models that every row is held against.
    references = {which: known.scores(which) or study.scores(which)["scores"] for which in ("full", "retain")}
    for method in methods:
        tables.choices += chosen.get(method, [])
        if any(row["method"] == method for row in known.rows):
            tables.rows.append(known.row(method))
            tables.forget_rows += [row for row in known.forget_rows if row["method"] == method]
            continue
        settings = None
        if method not in MODELS:
            if method not in chosen:
                chosen[method] = _choices(method, study.choose(method))
                tables.choices += chosen[method]
            settings = _settings(study, method, chosen[method])
        found = study.scores(method, settings)
        scores = found["scores"]
        row = {"method": method, **table_row(scores, **references)}
        row["model_utility_held_out"] = utility(found["utility_scores"])
        row |= {f"relearn_{when}": value for when, value in found["relearned"].items()}
        tables.rows.append(row | intervals(scores) | {"seconds": found["seconds"], "seed": study.tuning.seed})
        columns = scores["forget"] | {"holdout_min_k": scores["holdout"]["min_k"]}
        tables.forget_rows += [
            {"method": method, "row": i} | {name: float(f"{values[i]:.{DIGITS}g}") for name, values in columns.items()}
            for i in range(len(scores["forget"]["prob"]))
        ]
    return tables


LEVEL = 0.02
"""Model Utilities that differ by less count as level: the paper's own margin over the retrained model is 0 and .01."""

SPREAD = ("prob", "rouge_l", "extraction", "model_utility", "model_utility_held_out", "generation_forget", "relearn_after", "final")
"""Measures whose spread over seeds is told."""


def spread(tables: Tables) -> Rows:
    """How the measures vary over the seeds of a table's runs.

    Returns
    -------
    list of dict
        One a method, with ``seeds``, their number, and of each of :data:`SPREAD` ``<measure>_mean``, ``_low`` and ``_high``.
    """
    found = []
    for row in tables.rows:
        same = [row] + [other for other in tables.repeats if other["method"] == row["method"]]
        summary = {"method": row["method"], "seeds": len(same)}
        for measure in SPREAD:
            values = [one[measure] for one in same]
            summary |= {f"{measure}_mean": mean(values), f"{measure}_low": min(values), f"{measure}_high": max(values)}
        found.append(summary)
    return found


DEVIATING = ("prob", "rouge_l", "extraction", "memorization", "truth_ratio", "model_utility", "paraphrase_prob", "forget_auc")
"""Measures of one model that are set beside the common implementation's."""


def deviation(study: Study) -> Rows:
    """Scores of the model before unlearning by our measures and by those of the common implementation.

    Returns
    -------
    list of dict
        ``measure``, and what it comes to on the same rows: ``ours``, ``compat``.
    """
    ours, retain = (study.scores(which)["scores"] for which in ("full", "retain"))
    rows = [table_row(scores, scores, retain) for scores in (ours, study.compat_scores())]
    return [{"measure": name, "ours": rows[0][name], "compat": rows[1][name]} for name in DEVIATING]


def claims(tables: Tables) -> Rows:
    """What the paper says of GROM on TOFU, held against a table's rows.

    Returns
    -------
    list of dict
        ``claim``; ``grom`` and ``other``, the two numbers that decide it; ``against``, whose the second is; and ``verdict``: ``holds``,
        ``doesn't hold``, or ``can't be told`` where the two differ by less than the rows to be forgotten can tell apart (half the width
        of the 95 % bootstrap interval, over rows, of the mean of GROM's forget terms; Final halves it).

    Notes
    -----
    Claims of a table that lacks a row they need are left out.
    """
    rows = {row["method"]: row for row in tables.rows}
    if "grom" not in rows:
        return []
    grom, trained = rows["grom"], [row for name, row in rows.items() if name not in MODELS and not name.startswith("grom")]
    scores = tables.scores("grom")["forget"]
    low, high = bootstrap_interval([mean(terms) for terms in zip(*(scores[term] for term in FINAL_TERMS), strict=True)])
    noise = (high - low) / 2

    def forgetting(row: Mapping) -> float:
        return 1 - mean([row[term] for term in FINAL_TERMS])

    def hold(claim: str, value: float, other: Mapping, other_value: float, noise: float) -> dict:
        verdict = "can't be told" if abs(value - other_value) < noise else "holds" if value > other_value else "doesn't hold"
        return {"claim": claim, "grom": value, "other": other_value, "against": other["method"], "verdict": verdict}

    found = []
    if trained:
        best = max(trained, key=lambda row: row["final"])
        found.append(hold("highest Final of all methods", grom["final"], best, best["final"], noise / 2))
    if "retain" in rows:
        gold = rows["retain"]
        found.append(hold("forgets more than the retrained model", forgetting(grom), gold, forgetting(gold), noise))
        utility_claim = "Model Utility no lower than the retrained model's"
        found.append(hold(utility_claim, grom["model_utility"] + LEVEL, gold, gold["model_utility"], 0) | {"grom": grom["model_utility"]})
    if trained:
        fastest = min(trained, key=lambda row: row["seconds"])
        found.append(hold("faster than every gradient method", -grom["seconds"], fastest, -fastest["seconds"], 0))
        found[-1] |= {"grom": grom["seconds"], "other": fastest["seconds"]}
    return found


def _choices(method: str, trials: Sequence[Trial]) -> Rows:
    best = mildest(trials)
    return [
        {
            "method": method,
            "candidate": i,
            "settings": _describe(trial.settings),
            "forgetting": trial.forgetting,
            "preservation": trial.preservation,
            "score": trial.score,
            "chosen": trial is best,
            "band": _first_layer(trial.settings),
        }
        for i, trial in enumerate(trials)
    ]


def _settings(study: Study, method: str, choices: Rows):
    """The chosen candidate's settings; the band is that of the choice, wherever it was made."""
    chosen = next(choice for choice in choices if choice["chosen"])
    if chosen["band"] is not None:
        study.set_band(chosen["band"])
    return study.candidates(method)[chosen["candidate"]]


def _first_layer(settings) -> int | None:
    layers = settings.fit.layers if isinstance(settings, GromSettings) else (HEAD,)
    return None if layers[0] == HEAD else layers[0]


def _describe(settings) -> str:
    if not isinstance(settings, GromSettings):
        return f"lr {settings.lr:g}"
    fit = settings.fit
    band = [layer for layer in fit.layers if layer != HEAD]
    if not band:
        return f"LM head, β {fit.strength:g}"
    head = f", LM head β {fit.head_strength:g}" if HEAD in fit.layers else ""
    return f"layers {band[0]}–{band[-1]}, β {fit.strength:g}{head}"
