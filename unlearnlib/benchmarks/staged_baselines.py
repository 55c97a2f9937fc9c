"""The other ways to take a memory out of the shipped model of a staged trial, each as candidates from which the study's rule chooses.

A candidate comes with its validation measures; which of them is taken is decided by :mod:`unlearnlib.benchmarks.staged_select`, as for the
sidecar's own coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from peft.utils import merge_utils
from torch import Tensor, nn

from ..baselines import GradientSettings
from ..baselines import unlearn as unlearn_by_gradient
from ..sidecar import GridPoint, combine, parameters_of
from ..sidecar.functional import Parameters, check_alike
from ..sidecar.select import Measure

GRADIENT = {"ft_unlearn": "grad_ascent", "npo": "npo"}
"""Which gradient method each trained baseline is: the paper's fine-tuning to unlearn is ascent on the memory alone."""

MERGING = ("ties", "dare")


@dataclass(frozen=True)
class Candidates:
    """What the baselines' settings are chosen from.

    Attributes
    ----------
    learning_rates : tuple of float
        Of the gradient methods.
    epochs : tuple of int
        Of the gradient methods: passes over the memory, tried with each of the learning rates.
    batch_size : int
        Of the gradient methods: items a step.
    npo_retain_weight : float
        Weight of NPO's retain term on the items to keep; 0 leaves it out.
    coefficients : tuple of float
        λ of the negated memory in a merger.
    densities : tuple of float
        Share of a task vector's entries that a merger keeps.

    Raises
    ------
    ValueError
        If there are no candidates, or a density lies outside (0, 1].
    """

    learning_rates: tuple[float, ...] = (1e-5, 2e-5, 5e-5)
    epochs: tuple[int, ...] = (1, 2, 4)
    batch_size: int = 8
    npo_retain_weight: float = 1.0
    coefficients: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0)
    densities: tuple[float, ...] = (0.2, 0.6)

    def __post_init__(self):
        for name in ("learning_rates", "epochs", "coefficients", "densities"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: a baseline needs at least one candidate")
        if not all(0 < density <= 1 for density in self.densities):
            raise ValueError(f"densities must lie in (0, 1], got {self.densities}")

    def gradient(self, method: str, **encoding) -> list[GradientSettings]:
        """The settings of a gradient method from :data:`GRADIENT`, one for each learning rate and number of epochs."""
        name = GRADIENT[method]
        common = {"batch_size": self.batch_size, "micro_batch": None, **encoding}
        if method == "npo":
            common["retain_weight"] = self.npo_retain_weight
        return [GradientSettings.defaults(name, lr=lr, epochs=epochs, **common) for lr in self.learning_rates for epochs in self.epochs]


def trained(
    model: nn.Module,
    tokenizer,
    memory: Sequence[dict],
    kept: Sequence[dict],
    settings: Sequence[GradientSettings],
    measure: Measure,
    *,
    progress: bool = False,
) -> Iterator[tuple[GridPoint, dict[str, Tensor]]]:
    """What a gradient method makes of the shipped model with each of its settings.

    λ of a point is the learning rate, and its epochs are among the measures.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With the shipped parameters; left as it was.
    tokenizer : transformers.PreTrainedTokenizerBase
    memory, kept : sequence of dict
        What to forget, and what a method with a retain term is told to keep.
    settings : sequence of GradientSettings
    measure : callable
        Takes a model, returns its validation measures.
    progress : bool

    Yields
    ------
    point : GridPoint
    theta : dict of str to Tensor

    Notes
    -----
    A setting under which training or a measure isn't finite any more is no candidate.
    """
    for one in settings:
        try:
            changed = unlearn_by_gradient(model, tokenizer, memory, kept if one.retains else [], one, progress=progress)
        except FloatingPointError:
            continue
        measures = dict(measure(changed))
        if all(math.isfinite(value) for value in measures.values()):
            yield GridPoint(one.lr, 0.0, {**measures, "epochs": float(one.epochs)}), parameters_of(changed)


@dataclass(frozen=True)
class MergedLine:
    """A merger of two task vectors as a line: the merged model is ``θ_A + constant + λ · slope`` (ours).

    The mask of TIES depends on the unweighted vectors alone, and that of DARE on chance alone, so that a merger is affine in the weights.

    Attributes
    ----------
    constant, slope : dict of str to Tensor
        What stays of the first vector, and of the second at weight 1.
    """

    constant: dict[str, Tensor]
    slope: dict[str, Tensor]

    def at(self, theta_a: Parameters, lam: float) -> dict[str, Tensor]:
        """The merged model at weight λ."""
        return combine((1.0, theta_a), (1.0, self.constant), (lam, self.slope))


def merged_line(method: str, theta_a: Parameters, shipped: Parameters, delta: Parameters, density: float, seed: int = 0) -> MergedLine:
    """Merge what the shipped model has learned since θ_A with the negated memory.

    Parameters
    ----------
    method : {"ties", "dare"}
        TIES prunes both vectors by magnitude, elects a sign for each entry and averages those that have it; DARE drops entries at random,
        scales up the rest and adds (``peft.utils.merge_utils``).
    theta_a, shipped, delta : mapping of str to Tensor
        θ_A, θ_AMS and ΔM. The two task vectors are θ_AMS − θ_A at weight 1 and −ΔM at weight λ.
    density : float
        Share of the entries kept, of each tensor. 1 keeps all.
    seed : int
        Of DARE's chance.

    Returns
    -------
    MergedLine

    Raises
    ------
    ValueError
        If the method is unknown, or density isn't in (0, 1].
    MismatchError
        If the sets differ in names or shapes.

    Notes
    -----
    Yadav et al. (2023); Yu et al. (2024).
    """
    if method not in MERGING:
        raise ValueError(f"method must be one of {', '.join(MERGING)}, got {method!r}")
    if not 0 < density <= 1:
        raise ValueError(f"density must lie in (0, 1], got {density}")
    check_alike(theta_a=theta_a, shipped=shipped, delta=delta)
    constant, slope = {}, {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, start in theta_a.items():
            vectors = [(shipped[name] - start).float(), -delta[name].float()]
            if density < 1:
                how = {"method": "magnitude"} if method == "ties" else {"method": "random", "rescale": True}
                vectors = [merge_utils.prune(vector, density, **how) for vector in vectors]
            if method == "ties":
                stacked = torch.stack(vectors)
                elected = merge_utils.calculate_majority_sign_mask(stacked, "total")
                weights = torch.eye(2, device=start.device)
                vectors = [
                    merge_utils.disjoint_merge(stacked * merge_utils.reshape_weight_task_tensors(stacked, weight), elected)
                    for weight in weights
                ]
            constant[name], slope[name] = vectors
    return MergedLine(constant, slope)


def merged(
    model: nn.Module,
    method: str,
    theta_a: Parameters,
    shipped: Parameters,
    delta: Parameters,
    candidates: Candidates,
    measure: Measure,
    seed: int = 0,
) -> Iterator[tuple[GridPoint, dict[str, Tensor]]]:
    """A merger with each density and coefficient; λ of a point is the coefficient, and its density is among the measures.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its parameters are overwritten.
    method, theta_a, shipped, delta, seed
        See :func:`merged_line`.
    candidates : Candidates
    measure : callable
        Takes a model, returns its validation measures.

    Yields
    ------
    point : GridPoint
    theta : dict of str to Tensor
    """
    for density in candidates.densities:
        line = merged_line(method, theta_a, shipped, delta, density, seed)
        for lam in candidates.coefficients:
            theta = line.at(theta_a, lam)
            put(model, theta)
            yield GridPoint(lam, 0.0, {**measure(model), "density": density}), theta


def put(model: nn.Module, theta: Mapping[str, Tensor]) -> None:
    """Give a model parameters, in place; those that are tied to one of them follow.

    Parameters
    ----------
    model : nn.Module
    theta : mapping of str to Tensor
        All of its parameters, tied ones once.

    Raises
    ------
    MismatchError
        If names or shapes differ from the model's.
    """
    own = parameters_of(model)
    check_alike(model=own, theta=theta)
    for name, tensor in own.items():
        tensor.copy_(theta[name])
