"""What the sidecar of a staged trial loses where its assumptions don't hold: another safety run, another ε, adapters, 4-bit weights.

The shipped model, the oracle and ΔM are always the trial's own; what varies is how R̂ is come by, or what is done to the edited model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..quantize import quantized
from ..remembered import remembered
from ..sidecar import ProcessSidecar, SelectionRule, combine, evaluate_grid, norm, secant
from .staged_baselines import put
from .staged_measures import DEGENERATE, TOLD, closures, degenerate
from .staged_select import choose
from .staged_stats import NAMES
from .staged_trial import Trial

CODE = "import unlearnlib.benchmarks.staged_robustness"

EDITS = ("naive", "jvp_line", "two_d", "sidecar_at_1")
"""What is judged of each variant; the last one has the coefficients (1, 1), which nobody selects."""


@dataclass(frozen=True)
class Variant:
    """One way to come by the transported memory R̂.

    Attributes
    ----------
    name : str
    order : int, optional
        Seed of another order of the safety run's items, for the runs of the secant; None is the realised order.
    upper_shipped : bool
        Whether the secant's upper end is the shipped model, hence of the realised run, whatever the lower one is.
    epsilon : float
        Of the secant.
    """

    name: str
    order: int | None = None
    upper_shipped: bool = True
    epsilon: float = 1.0


def variants(orders: Sequence[int], epsilons: Sequence[float]) -> list[Variant]:
    """The realised run; other orders, for both ends of the secant and for the lower one alone; other ε."""
    found = [Variant("realised")]
    found += [Variant(f"order {order}, both ends", order, upper_shipped=False) for order in orders]
    found += [Variant(f"order {order}, lower end", order) for order in orders]
    return found + [Variant(f"ε = {epsilon:g}", epsilon=epsilon, upper_shipped=False) for epsilon in epsilons]


def transported(trial: Trial, variant: Variant) -> ProcessSidecar:
    """The edit with R̂ from a variant of the safety run.

    Parameters
    ----------
    trial : Trial
    variant : Variant

    Raises
    ------
    ValueError
        If the shipped model is to be the upper end of a secant whose ε isn't 1.
    """
    if variant.upper_shipped and variant.epsilon != 1:
        raise ValueError(f"{variant.name}: the shipped model is the upper end of the secant at ε = 1 only, not at {variant.epsilon:g}")
    memory = combine((1.0, trial.theta_am()), (-1.0, trial.theta_a))
    ends = {"epsilon": variant.epsilon, "theta_plus": trial.shipped if variant.upper_shipped else None}
    moved = secant(trial.safety(variant.order), trial.theta_a, memory, **ends)
    return ProcessSidecar(trial.shipped, memory, combine((1.0, moved), (-1.0, memory)), copy=False)


def judge_variant(trial: Trial, variant: Variant, grid: Sequence[float], rule: SelectionRule) -> list[dict[str, Any]]:
    """The edits that the rule chooses with a variant's R̂, and (1, 1), on test prompts; kept in the cache.

    Parameters
    ----------
    trial : Trial
    variant : Variant
    grid : sequence of float
        Values of λ and γ.
    rule : SelectionRule

    Returns
    -------
    list of dict
        One row each of :data:`EDITS`: ``variant``, ``edit``, ``name`` (for people), ``lam``, ``gamma``, ``closure``, ``closure_signed``,
        ``flagged`` (see :data:`~unlearnlib.benchmarks.staged_measures.DEGENERATE`), the measures
        :data:`~unlearnlib.benchmarks.staged_measures.TOLD`, ``parameter_error``, and ``residual_ratio``, ‖R̂‖/‖ΔM‖.
    """

    def compute() -> list[dict[str, Any]]:
        side = transported(trial, variant)
        memory = norm(side.memory)
        points = evaluate_grid(side, trial.model, grid, grid, trial.validate, progress=trial.progress)
        places = {name: (one.point.lam, one.point.gamma) for name, one in choose(points, rule).items()} | {"sidecar_at_1": (1.0, 1.0)}
        ends = tuple(trial.judge(theta)["refusal_margin"] for theta in (trial.shipped, trial.oracle))
        rows = []
        for edit in EDITS:
            lam, gamma = places[edit]
            scores = trial.judge(side.at(lam, gamma))
            row = {"variant": variant.name, "edit": edit, "lam": lam, "gamma": gamma, **_told(edit, scores, ends)}
            rows.append(row | {"parameter_error": scores["distance"] / memory, "residual_ratio": norm(side.residual) / memory})
        return rows

    recipe = [*trial.recipe, asdict(variant), list(grid), asdict(rule)]
    return remembered("staged-variant", recipe, compute, CODE)


def judge_quantized(trial: Trial, edits: dict[str, tuple[float, float]], schemes: Sequence[str]) -> list[dict[str, Any]]:
    """Edits of the trial rounded to 4 bits, beside the shipped model and the oracle rounded alike; kept in the cache.

    Parameters
    ----------
    trial : Trial
    edits : dict of str to (float, float)
        Coefficients (λ, γ) by name.
    schemes : sequence of str
        Keys of :data:`~unlearnlib.quantize.SCHEMES`.

    Returns
    -------
    list of dict
        ``scheme`` (``"none"`` for the weights as they are), ``edit`` (also ``shipped`` and ``oracle``), ``name``, the closures and
        ``flagged``, whose shipped and oracle are rounded by the same scheme, and the measures
        :data:`~unlearnlib.benchmarks.staged_measures.TOLD`; the KL divergences among these are from the oracle as it is, and the skill is
        relative to θ_A as it is.
    """

    def compute() -> list[dict[str, Any]]:
        side, test = trial.sidecar(), trial.test
        scores: dict[str, dict[str, dict[str, float]]] = {scheme: {} for scheme in ("none", *schemes)}
        for name, theta in _states(trial, side, edits):
            put(trial.model, theta)
            scores["none"][name] = test(trial.model)
            for scheme in schemes:
                with quantized(trial.model, scheme):
                    scores[scheme][name] = test(trial.model)
        rows = []
        for scheme, found in scores.items():
            ends = found["shipped"]["refusal_margin"], found["oracle"]["refusal_margin"]
            for name, one in found.items():
                rows.append({"scheme": scheme, "edit": name, **_told(name, one, ends)})
        return rows

    recipe = [*trial.recipe, {name: list(at) for name, at in edits.items()}, list(schemes)]
    return remembered("staged-quantized", recipe, compute, CODE)


def _states(trial: Trial, side: ProcessSidecar, edits: dict[str, tuple[float, float]]) -> Iterator[tuple[str, dict]]:
    yield "shipped", trial.shipped
    yield "oracle", trial.oracle
    for name, (lam, gamma) in edits.items():
        yield name, side.at(lam, gamma)


def with_adapters(trial: Trial, rank: int, factor: float) -> Trial:
    """The same trial with LoRA phases.

    Parameters
    ----------
    trial : Trial
    rank : int
        Of the adapters.
    factor : float
        By which all learning rates are raised: adapters need larger ones.
    """
    phases = trial.phases
    rates = {name: factor * getattr(phases, name) for name in ("skill_lr", "memory_lr", "safety_lr")}
    return replace(trial, phases=replace(phases, lora_rank=rank, **rates))


def _told(edit: str, scores: dict[str, float], ends: tuple[float, float]) -> dict[str, Any]:
    found = {"name": NAMES.get(edit, edit), **closures(scores["refusal_margin"], *ends), "flagged": degenerate(*ends, DEGENERATE)}
    return found | {measure: scores[measure] for measure in TOLD}
