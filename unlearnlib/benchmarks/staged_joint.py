"""The two papers face to face: the memory of a staged trial taken out of the shipped model by a GROM edit, and by the process sidecar."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..examples import Example, encode
from ..grom import HEAD, Edit, FitData, FitSettings, attribution, select_band
from ..remembered import remembered
from ..sidecar import SelectionRule
from .staged_baselines import edited, put
from .staged_measures import closure, closure_signed
from .staged_select import best_of, selection_row
from .staged_trial import Trial

CODE = "import unlearnlib.benchmarks.staged_joint"

PLACES = ("grom", "grom_head")
"""GROM on a band of MLP outputs, and on the LM head."""

MEASURES = ("secret_auc", "refusal_margin", "refusal_rate", "skill", "over_refusal", "disclosure", "kl_memory", "kl_ordinary")
"""What is told of each method beside the closures."""

NEEDS = {
    "grom": "the secrets, and items to keep",
    "grom_head": "the secrets, and items to keep",
    "naive": "the checkpoints before and after the memory phase",
    "jvp_line": "those checkpoints, and the safety run's data, order and settings, once again",
    "two_d": "those checkpoints, and the safety run's data, order and settings, once again",
    "ft_unlearn": "the secrets",
    "npo": "the secrets, and items to keep",
    "oracle": "the checkpoint before the memory phase, and the safety run's data and settings, once again",
}
"""What a method needs beside the shipped model and validation prompts to choose its settings on."""


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

    strengths: tuple[float, ...] = (20.0, 65.0, 200.0)
    head_strengths: tuple[float, ...] = (5.0, 20.0, 80.0)
    width: int = 6
    retain_weight: float = 100.0
    ridge: float = 0.03
    batch_size: int = 16


def grom_sets(trial: Trial) -> tuple[list[Example], list[Example]]:
    """What GROM is told: the memory's items to forget; and to keep, those of the safety and of the skill phase, which the trial has."""
    encoding = {"template": trial.template, "system": trial.system}
    sets = trial.data.memory, [*trial.data.safety, *trial.data.skill_train]
    memory, retain = (encode(trial.tokenizer, items, **encoding) for items in sets)
    return memory, retain


def grom_fits(trial: Trial, grid: GromGrid, place: str) -> list[FitSettings]:
    """Candidates for one place, the mildest first; the band is the one that attribution selects in the shipped model.

    Parameters
    ----------
    trial : Trial
    grid : GromGrid
    place : {"grom", "grom_head"}
    """
    base = FitSettings((HEAD,), 1.0, retain_weight=grid.retain_weight, ridge=grid.ridge, batch_size=grid.batch_size)
    if place == "grom_head":
        return [replace(base, strength=strength) for strength in grid.head_strengths]
    put(trial.model, trial.shipped)
    data = FitData(trial.model, *grom_sets(trial))
    band = select_band(attribution(trial.model, *data.batches(base), data.alpha), min(grid.width, len(data.anatomy.layers) // 2))
    return [replace(base, layers=tuple(band), strength=strength) for strength in grid.strengths]


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
        ``selected``, a row; ``scores``, test measures; ``seconds`` of all fits and of the choice; ``influence``, rows of ``entity``,
        ``items`` and ``norm``, the exact part ‖P − P₋e‖ of the edit that is due to all of a person's items, over all matrices.
    """

    def compute() -> dict[str, Any]:
        validate = trial.validate
        test = trial.test
        began = time.perf_counter()
        fits = grom_fits(trial, grid, place)
        put(trial.model, trial.shipped)
        tried = edited(trial.model, *grom_sets(trial), fits, validate, keep_audit=True, progress=trial.progress)
        selection, edit, points = best_of(tried, rule)
        seconds = time.perf_counter() - began
        with edit.applied(trial.model):
            scores = test(trial.model)
        row = selection_row(place, selection)
        return {
            "selected": row,
            "candidates": [{"method": place, **point.row()} for point in points],
            "scores": scores,
            "seconds": seconds,
            "influence": influence_by_entity(edit, trial),
        }

    return remembered(f"staged-joint-{place}", [*trial.recipe, asdict(rule), asdict(grid)], compute, CODE)


def influence_by_entity(edit: Edit, trial: Trial) -> list[dict[str, Any]]:
    """How much of an edit is due to each person of the memory: of all of a person's items, taken out together, largest first."""
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
        ``method``, ``closure``, ``closure_signed``, :data:`MEASURES`, ``training_steps`` and ``seconds`` that it costs once the shipped
        model is there (None for the shipped model), ``feasible``: whether the rule's limits could be kept (None where nothing is
        chosen), and ``needs``, see :data:`NEEDS`.
    """
    names = {"kl_memory": "kl_to_oracle"}
    cost = {row["method"]: row for row in values["cost"]}
    feasible = {row["method"]: row["feasible"] for row in values["selected"]}
    rows = []
    for method in methods:
        measures = {name: values[names.get(name, name)][0][method] for name in ("closure", "closure_signed", *MEASURES)}
        spent = {name: cost[method][name] if method in cost else None for name in ("training_steps", "seconds")}
        rows.append({"method": method, **measures, **spent, "feasible": feasible.get(method), "needs": NEEDS.get(method)})
    ends = values["refusal_margin"][0]["shipped"], values["refusal_margin"][0]["oracle"]
    for place, result in made.items():
        scores = result["scores"]
        closures = {f.__name__: f(scores["refusal_margin"], *ends) for f in (closure, closure_signed)}
        measures = {name: scores[name] for name in MEASURES}
        spent = {"training_steps": 0, "seconds": result["seconds"]}
        rows.append({"method": place, **closures, **measures, **spent, "feasible": result["selected"]["feasible"], "needs": NEEDS[place]})
    return rows
