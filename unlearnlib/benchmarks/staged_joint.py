"""The two papers face to face: the memory of a staged trial taken out of the shipped model by a GROM edit, and by the process sidecar."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from ..examples import encode
from ..grom import HEAD, Edit, FitData, FitSettings, attribution, select_band
from ..published import NAMES as PUBLISHED
from ..remembered import remembered
from ..sidecar import GridPoint, SelectionRule
from ..sidecar.select import Measure
from .staged_baselines import put
from .staged_measures import TOLD, closures
from .staged_select import best_of, selection_row
from .staged_stats import NAMES
from .staged_trial import Trial

CODE = "import unlearnlib.benchmarks.staged_joint"

PLACES = ("grom", "grom_head")
"""GROM on a band of MLP outputs, and on the LM head."""

NEEDS = {
    "grom": "the secrets, and items to keep",
    "grom_head": "the secrets, and items to keep",
    "naive": "the checkpoints before and after the memory phase",
    "naive_at_1": "the checkpoints before and after the memory phase",
    "jvp_line": "those checkpoints, and the safety run's data, order and settings, once again",
    "two_d": "those checkpoints, and the safety run's data, order and settings, once again",
    "sidecar_at_1": "those checkpoints, and the safety run's data, order and settings, once again",
    "ft_unlearn": "the secrets",
    "npo": "the secrets, and items to keep",
    "oracle": "the checkpoint before the memory phase, and the safety run's data and settings, once again",
}
"""What a method's edit is made from, beside the shipped model. Settings are chosen by the study's rule, for which there must be validation
prompts with the true secrets in them, and the checkpoint before the memory phase, for its secret AUC and skill."""


@dataclass(frozen=True)
class GromGrid:
    """What GROM's settings are chosen from.

    Attributes
    ----------
    strengths, head_strengths : tuple of float
        β of the band and of the LM head, the mildest first.
    width : int
        Layers of the band, at most half of the model's.
    retain_weight, ridge : float
        :math:`w_r` and ρ.
    batch_size : int
        Examples a forward pass.
    """

    strengths: tuple[float, ...]
    head_strengths: tuple[float, ...]
    width: int = 6
    retain_weight: float = 100.0
    ridge: float = 0.03
    batch_size: int = 16


def grom_data(trial: Trial) -> FitData:
    """What GROM fits on: the memory's items to forget, and those to keep, in the shipped model, which this puts into the network."""
    put(trial.model, trial.shipped)
    encoding = {"template": trial.template, "system": trial.system}
    sets = (encode(trial.tokenizer, items, **encoding) for items in (trial.data.memory, trial.kept))
    return FitData(trial.model, *sets, progress=trial.progress)


def grom_fits(data: FitData, grid: GromGrid, place: str) -> list[FitSettings]:
    """Candidates for one place, the mildest first; the band is the one that attribution selects in the shipped model.

    Parameters
    ----------
    data : FitData
        From :func:`grom_data`.
    grid : GromGrid
    place : {"grom", "grom_head"}
    """
    base = FitSettings((HEAD,), 1.0, retain_weight=grid.retain_weight, ridge=grid.ridge, batch_size=grid.batch_size)
    if place == "grom_head":
        return [replace(base, strength=strength) for strength in grid.head_strengths]
    band = select_band(attribution(data.model, *data.batches(base), data.alpha), min(grid.width, len(data.anatomy.layers) // 2))
    return [replace(base, layers=tuple(band), strength=strength) for strength in grid.strengths]


def edited(model: nn.Module, data: FitData, fits: Sequence[FitSettings], measure: Measure) -> Iterator[tuple[GridPoint, Edit]]:
    """A GROM edit of the shipped model with each of some settings, which carries what its audit needs; λ of a point is the strength.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With the shipped parameters; left as it was.
    data : FitData
    fits : sequence of FitSettings
    measure : callable
        Takes a model, returns its validation measures.

    Yields
    ------
    point : GridPoint
        With ``layers``, the number of edited matrices, among its measures.
    edit : Edit
    """
    for fit in fits:
        edit = data.fit(fit, keep_audit=True)
        with edit.applied(model):
            measures = dict(measure(model))
        if all(math.isfinite(value) for value in measures.values()):
            yield GridPoint(fit.strength, 0.0, measures | {"layers": float(len(fit.layers))}), edit


def grom(trial: Trial, rule: SelectionRule, grid: GromGrid, place: str) -> dict[str, Any]:
    """A GROM edit of the shipped model, its strength chosen by the study's rule; kept in the cache.

    Parameters
    ----------
    trial : Trial
    rule : SelectionRule
    grid : GromGrid
    place : {"grom", "grom_head"}

    Returns
    -------
    dict
        ``selected``, a row; ``candidates``, rows; ``scores``, test measures; ``seconds`` of all fits and of the choice; ``influence``,
        see :func:`influence_by_entity`.
    """

    def compute() -> dict[str, Any]:
        validate, test = trial.validate, trial.test
        put(trial.model, trial.shipped)
        began = time.perf_counter()
        data = grom_data(trial)
        selection, edit, points = best_of(edited(trial.model, data, grom_fits(data, grid, place), validate), rule)
        seconds = time.perf_counter() - began
        with edit.applied(trial.model):
            scores = test(trial.model)
        return {
            "selected": selection_row(place, selection),
            "candidates": [{"method": place, **point.row()} for point in points],
            "scores": scores,
            "seconds": seconds,
            "influence": influence_by_entity(edit, trial),
        }

    return remembered(f"staged-joint-{place}", [*trial.recipe, asdict(rule), asdict(grid)], compute, CODE)


def influence_by_entity(edit: Edit, trial: Trial) -> list[dict[str, Any]]:
    """How much of an edit is due to each person of the memory: of all of a person's items, taken out together.

    Returns
    -------
    list of dict
        ``entity``, ``items`` and ``norm``, ‖P − P₋e‖ over all edited matrices, largest first. Of each matrix it is exact, given its keys;
        in a band the keys of a later matrix depend on the edits of the earlier ones, and are held where they are.
    """
    audit = edit.audit()
    found = []
    for entity in trial.data.entities:
        members = [i for i, item in enumerate(trial.data.memory) if entity in item["question"]]
        norms = [part.norm() for part in audit.influence(members)]
        found.append({"entity": entity, "items": len(members), "norm": sum(norm**2 for norm in norms) ** 0.5})
    return sorted(found, key=lambda row: -row["norm"])


def joint_rows(values: dict[str, Any], made: dict[str, dict[str, Any]], methods: Sequence[str]) -> list[dict[str, Any]]:
    """The table: GROM's edits beside methods of a trial.

    Parameters
    ----------
    values : dict
        From :func:`~unlearnlib.benchmarks.staged_trial.run_trial`, of the same trial.
    made : dict of str to result of grom
        By place.
    methods : sequence of str
        Methods of the trial to be shown, ``shipped`` among them or not.

    Returns
    -------
    list of dict
        ``method`` and ``name`` (for people), ``closure``, ``closure_signed``, ``flagged``,
        :data:`~unlearnlib.benchmarks.staged_measures.TOLD`, ``training_steps`` and ``seconds`` that it costs once the shipped model is
        there (None for the shipped model), ``feasible``: whether the rule's limits could be kept (None where nothing is chosen), and
        ``needs``, see :data:`NEEDS`.
    """
    names = {"kl_memory": "kl_to_oracle"}
    ends = values["refusal_margin"][0]["shipped"], values["refusal_margin"][0]["oracle"]
    cost = {row["method"]: row for row in values["cost"]}
    feasible = {row["method"]: row["feasible"] for row in values["selected"]}

    def row(method: str, scores: dict[str, float], spent: dict[str, Any], within: bool | None) -> dict[str, Any]:
        told = {measure: scores[measure] for measure in TOLD} | {"flagged": values["flagged"]}
        named = {"method": method, "name": (NAMES | PUBLISHED)[method], "needs": NEEDS.get(method), "feasible": within}
        return {**named, **closures(scores["refusal_margin"], *ends), **told, **spent}

    rows = []
    for method in methods:
        scores = {measure: values[names.get(measure, measure)][0][method] for measure in TOLD}
        spent = {name: cost[method][name] if method in cost else None for name in ("training_steps", "seconds")}
        rows.append(row(method, scores, spent, feasible.get(method)))
    for place, result in made.items():
        spent = {"training_steps": 0, "seconds": result["seconds"]}
        rows.append(row(place, result["scores"], spent, result["selected"]["feasible"]))
    return rows
