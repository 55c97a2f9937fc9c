"""Process sidecars (Sweeney 2026): training as a map, its derivative, and the two-coefficient edit that takes a memory back."""

from .edit import ProcessSidecar, secant, second_difference
from .functional import MismatchError, cast_like, combine, inner, norm, parameters_of
from .select import GridPoint, Selection, SelectionRule, diagonal, evaluate_grid, naive_line, select
from .trace import SGD, AdamW, SafetyTrace, causal_lm_loss, constant, linear_decay, minibatches

__all__ = [
    "SGD",
    "AdamW",
    "GridPoint",
    "MismatchError",
    "ProcessSidecar",
    "SafetyTrace",
    "Selection",
    "SelectionRule",
    "cast_like",
    "causal_lm_loss",
    "combine",
    "constant",
    "diagonal",
    "evaluate_grid",
    "inner",
    "linear_decay",
    "minibatches",
    "naive_line",
    "norm",
    "parameters_of",
    "secant",
    "second_difference",
    "select",
]
