"""Settings that the TOFU tables' runs have chosen, for the pages that go on from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..baselines import GradientSettings
from ..grom.choose import mildest
from ..methods import GromSettings
from .tofu_study import Study
from .tofu_tables import MODELS, _settings


def chosen_settings(study: Study, method: str, gathered: Iterable[Mapping] = ()) -> GromSettings | GradientSettings | None:
    """Settings of a method as another run's record has them, or else as the study chooses them; None for a model that no method made.

    Parameters
    ----------
    study : Study
    method : str
        From :data:`~unlearnlib.methods.METHODS` or :data:`~unlearnlib.benchmarks.tofu_tables.MODELS`.
    gathered : iterable of record
        Records of the TOFU page, on the same grid; the first that tried the method counts.

    Returns
    -------
    GromSettings, GradientSettings or None
    """
    if method in MODELS:
        return None
    for record in gathered:
        choices = [choice for choice in record["values"]["choices"] if choice["method"] == method]
        if choices:
            return _settings(study, method, choices)
    return mildest(study.choose(method)).settings
