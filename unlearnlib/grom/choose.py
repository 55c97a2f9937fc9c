"""Choosing where and how strongly to edit, on validation data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from ..examples import Example
from ..metrics import answer_probability
from .anatomy import HEAD
from .edit import Edit
from .fit import FitData, FitSettings
from .layers import attribution, select_band

MILDNESS = 0.01
"""A weaker edit is preferred to a stronger one of the same place whose score is higher by no more than this."""


@dataclass(frozen=True)
class Trial:
    """One candidate, measured on validation data.

    Attributes
    ----------
    settings : FitSettings, or another method's settings
    forgetting : float
        1 − mean probability of the stand-in request's answers after the edit, relative to before; in [0, 1].
    preservation : float
        Mean probability of held-out retain answers after the edit, relative to before; in [0, 1].
    """

    settings: Any
    forgetting: float
    preservation: float

    @property
    def score(self) -> float:
        """Mean of forgetting and preservation."""
        return (self.forgetting + self.preservation) / 2


def candidates(
    data: FitData, base: FitSettings, strengths: Sequence[float], head_strengths: Sequence[float], width: int
) -> list[FitSettings]:
    """Settings to try: the band that attribution selects on `data`, and the LM head, each with several strengths.

    Parameters
    ----------
    data : FitData
    base : FitSettings
        Everything else.
    strengths, head_strengths : sequence of float
        β of the band and of the head; an empty one leaves that place out.
    width : int
        Layers of the band.

    Returns
    -------
    list of FitSettings
    """
    found = [replace(base, layers=(HEAD,), strength=strength) for strength in head_strengths]
    if strengths:
        forget, retain = data.batches(base)
        width = min(width, len(data.anatomy.layers) // 2)
        band = select_band(attribution(data.model, forget, retain, data.alpha), width)
        found += [replace(base, layers=band, strength=strength) for strength in strengths]
    return found


def try_all(data: FitData, validation: Sequence[Example], settings: Sequence[FitSettings]) -> list[Trial]:
    """Fit every candidate on a stand-in request and measure what it forgets and what it preserves.

    Parameters
    ----------
    data : FitData
        Its forget set is the stand-in: examples that are not part of the real request.
    validation : sequence of Example
        Retain examples that are in neither set of `data`.
    settings : sequence of FitSettings

    Returns
    -------
    list of Trial
    """
    model, bars = data.model, {"progress": data.progress}

    def measure() -> tuple[torch.Tensor, torch.Tensor]:
        return answer_probability(model, data.forget, **bars).mean(), answer_probability(model, validation, **bars).mean()

    units: dict[FitSettings, Edit] = {}

    def fit(one: FitSettings) -> Edit:
        if len(one.layers) > 1 or one.head_strength is not None:
            return data.fit(one)
        # The edit of a single matrix is linear in its strength: one fit serves them all.
        unit = replace(one, strength=1.0)
        if unit not in units:
            units[unit] = data.fit(unit)
        return Edit((units[unit].matrices[0].scaled(one.strength),))

    before = measure()
    trials = []
    for one in tqdm(settings, desc="candidates", disable=not data.progress, leave=False):
        with fit(one).applied(model):
            after = measure()
        trials.append(weigh(one, before, after))
    return trials


def weigh(settings: Any, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> Trial:
    """A trial from the mean probabilities of the stand-in request's answers and of the held-out retain answers, before and after."""
    forgotten, preserved = ((a / b).clamp(0, 1).item() for a, b in zip(after, before, strict=True))
    return Trial(settings, 1 - forgotten, preserved)


def best(trials: Sequence[Trial]) -> Trial:
    """The trial with the highest score, or a weaker one of the same place that is as good within :data:`MILDNESS`."""
    top = max(trials, key=lambda trial: trial.score)
    same_place = [trial for trial in trials if trial.settings.layers == top.settings.layers]
    return mildest(sorted(same_place, key=lambda trial: trial.settings.strength))


def mildest(trials: Sequence[Trial]) -> Trial:
    """Of trials that are listed mildest first, the first one whose score is the highest, or lower by no more than :data:`MILDNESS`."""
    top = max(trial.score for trial in trials)
    return next(trial for trial in trials if trial.score >= top - MILDNESS)


def split_retain(retain: Sequence[Example], forget_size: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Indices of a stand-in request, of validation examples and of the rest, drawn from the retain set.

    Parameters
    ----------
    retain : sequence of Example
    forget_size : int
        Size of the real request; the stand-in is as large, but at most a quarter of the retain set, as are the validation examples.
    seed : int

    Raises
    ------
    ValueError
        If there are fewer than 8 retain examples.
    """
    if len(retain) < 8:
        raise ValueError(
            f"{len(retain)} retain examples are too few to choose settings on (8 at least): give more, or name layers and strength yourself"
        )
    order = torch.randperm(len(retain), generator=torch.Generator().manual_seed(seed)).tolist()
    quarter = len(retain) // 4
    stand_in = min(forget_size, quarter)
    return order[:stand_in], order[stand_in : stand_in + quarter], order[stand_in + quarter :]
