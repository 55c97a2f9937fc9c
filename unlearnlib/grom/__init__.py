"""GROM: a one-shot, gradient-free, closed-form unlearning edit of weight matrices, and its exact audit."""

from .anatomy import HEAD, UnknownArchitectureError, tie, untie
from .audit import Audit, Influence
from .edit import AppliedEdit, Edit, MatrixEdit
from .fit import FitData, FitSettings
from .keys import BandStates, collect_keys
from .layers import attribution, direct_effect, select_band
from .ridge import IllConditionedError, RidgeFitter, RidgeSolution
from .targets import NoSpecificTokensError, Targets, corruption, specificity, suppression
from .unlearn import Report, unlearn

__all__ = [
    "HEAD",
    "AppliedEdit",
    "Audit",
    "BandStates",
    "Edit",
    "FitData",
    "FitSettings",
    "IllConditionedError",
    "Influence",
    "MatrixEdit",
    "NoSpecificTokensError",
    "Report",
    "RidgeFitter",
    "RidgeSolution",
    "Targets",
    "UnknownArchitectureError",
    "attribution",
    "collect_keys",
    "corruption",
    "direct_effect",
    "select_band",
    "specificity",
    "suppression",
    "tie",
    "unlearn",
    "untie",
]
