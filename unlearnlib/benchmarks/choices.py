"""A study's choice of settings as rows of a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..grom.choose import Trial, mildest


def choice_rows(method: str, trials: Sequence[Trial], describe: Callable[[Any], str]) -> list[dict]:
    """All candidates of a method, and which of them was chosen.

    Parameters
    ----------
    method : str
    trials : sequence of Trial
        In the order of the candidates, the mildest first.
    describe : callable
        Takes a candidate's settings, returns them in a few words.

    Returns
    -------
    list of dict
        ``method``, ``candidate`` (from 0), ``settings``, ``forgetting``, ``preservation``, ``score`` and ``chosen``.
    """
    best = mildest(trials)
    return [
        {
            "method": method,
            "candidate": i,
            "settings": describe(trial.settings),
            "forgetting": trial.forgetting,
            "preservation": trial.preservation,
            "score": trial.score,
            "chosen": trial is best,
        }
        for i, trial in enumerate(trials)
    ]
