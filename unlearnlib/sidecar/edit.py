"""The process sidecar: the memory's direction before and after transport through training, and the edit made of the two.

θ̂(λ, γ) = θ_AMS − λ ΔM − γ R̂,   ΔM = θ_AM − θ_A,   R̂ = Ĵ(ΔM) − ΔM            (Sweeney 2026)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, replace

import torch
from torch import Tensor, nn

from .functional import MismatchError, Parameters, cast_like, check_alike, combine, load_tensors, parameters_of, save_tensors, wide

Map = Callable[[Parameters], Parameters]

_FORMAT = "unlearnlib.sidecar/1"


def secant(
    trace: Map, theta_a: Parameters, delta: Parameters, *, epsilon: float = 1.0, theta_plus: Parameters | None = None
) -> dict[str, Tensor]:
    """The centred secant ``[T(θ_A + εΔ) − T(θ_A − εΔ)] / 2ε`` (Sweeney 2026): two runs, or one if the upper end is at hand.

    Parameters
    ----------
    trace : callable
        The map T, a :class:`~unlearnlib.sidecar.trace.SafetyTrace` or any other.
    theta_a : mapping of str to Tensor
        The point.
    delta : mapping of str to Tensor
        The direction, in float32 or wider.
    epsilon : float
        Half the distance of the two starts in units of Δ. At 1 the upper start is θ_AM, so ``T(θ_A + Δ)`` is the shipped model.
    theta_plus : mapping of str to Tensor, optional
        ``T(θ_A + εΔ)`` if it is known.

    Returns
    -------
    dict of str to Tensor
        In float32 or wider.

    Raises
    ------
    ValueError
        If `epsilon` isn't positive.
    MismatchError
        If names or shapes differ.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon}, it has to be positive")
    if theta_plus is None:
        theta_plus = trace(cast_like(combine((1.0, theta_a), (epsilon, delta)), theta_a))
    theta_minus = trace(cast_like(combine((1.0, theta_a), (-epsilon, delta)), theta_a))
    return {name: d / (2 * epsilon) for name, d in combine((1.0, theta_plus), (-1.0, theta_minus)).items()}


def second_difference(trace: Map, theta_a: Parameters, delta: Parameters, *, theta_plus: Parameters | None = None) -> dict[str, Tensor]:
    """``T(θ_A + Δ) − 2 T(θ_A) + T(θ_A − Δ)``: zero for an affine T; half of it is the (1, 1) secant edit's error at ε = 1 (ours).

    Parameters
    ----------
    trace, theta_a, delta, theta_plus
        As for :func:`secant` with ε = 1.

    Returns
    -------
    dict of str to Tensor
        In float32 or wider.
    """
    if theta_plus is None:
        theta_plus = trace(cast_like(combine((1.0, theta_a), (1.0, delta)), theta_a))
    theta_minus = trace(cast_like(combine((1.0, theta_a), (-1.0, delta)), theta_a))
    return combine((1.0, theta_plus), (-2.0, trace(theta_a)), (1.0, theta_minus))


@dataclass(frozen=True)
class ProcessSidecar:
    """The edit θ̂(λ, γ) as an object: the shipped parameters, and the two directions that are taken off them.

    The shipped parameters are the one kept original: each edit is computed from them, never from an earlier edit, so that
    going back is exact to the bit.

    Attributes
    ----------
    shipped : dict of str to Tensor
        θ_AMS, in the model's own dtype.
    memory : dict of str to Tensor
        ΔM, in float32 or wider.
    residual : dict of str to Tensor
        R̂, in float32 or wider: what transport through training added to ΔM.
    copy : bool
        Of the constructor only: copy the tensors given. False only if nobody else will change them in place.
    """

    shipped: dict[str, Tensor]
    memory: dict[str, Tensor]
    residual: dict[str, Tensor]
    copy: InitVar[bool] = True

    def __post_init__(self, copy: bool):
        check_alike(shipped=self.shipped, memory=self.memory, residual=self.residual)
        parts = {"shipped": self.shipped} | {
            part: {name: wide(getattr(self, part)[name]) for name in self.shipped} for part in ("memory", "residual")
        }
        for part, theta in parts.items():
            # The tensors given may be those of the very model that will be edited in place.
            own = {name: tensor.detach().clone() if copy else tensor.detach() for name, tensor in theta.items()}
            object.__setattr__(self, part, own)

    @classmethod
    def from_runs(
        cls,
        theta_a: nn.Module | Parameters,
        theta_am: nn.Module | Parameters,
        theta_ams: nn.Module | Parameters,
        trace: Map,
        *,
        epsilon: float = 1.0,
        exact: bool = False,
    ) -> ProcessSidecar:
        """Build it from the models before and after the memory phase, the shipped model, and the safety run.

        Parameters
        ----------
        theta_a, theta_am, theta_ams : nn.Module or mapping of str to Tensor
            The three sets of parameters; tied ones count once.
        trace : callable
            The realised safety run T.
        epsilon : float
            Of the centred secant. At 1 one run is enough, since ``T(θ_A + ΔM)`` is θ_AMS.
        exact : bool
            Take the exact ``DT(θ_A)·ΔM`` (``trace.jvp``) in place of the secant.

        Raises
        ------
        MismatchError
            If the sets differ in names or shapes; they are listed.
        ValueError
            If `epsilon` isn't positive.
        """
        theta_a, theta_am, theta_ams = parameters_of(theta_a), parameters_of(theta_am), parameters_of(theta_ams)
        check_alike(theta_a=theta_a, theta_am=theta_am, theta_ams=theta_ams)
        memory = combine((1.0, theta_am), (-1.0, theta_a))
        if exact:
            _, transported = trace.jvp(theta_a, memory)
        else:
            transported = secant(trace, theta_a, memory, epsilon=epsilon, theta_plus=theta_ams if epsilon == 1 else None)
        shipped = {name: p.clone() for name, p in theta_ams.items()}
        return cls(shipped, memory, combine((1.0, transported), (-1.0, memory)), copy=False)

    def at(self, lam: float, gamma: float) -> dict[str, Tensor]:
        """The edited parameters θ̂(λ, γ): new tensors in the shipped dtype; γ = 0 is task arithmetic, γ = λ the process-JVP line."""
        return cast_like(combine((1.0, self.shipped), (-lam, self.memory), (-gamma, self.residual)), self.shipped)

    def apply_(self, model: nn.Module, *, lam: float, gamma: float) -> None:
        """Set the model's parameters to θ̂(λ, γ), whatever edit they hold now; other parameters are left alone.

        Raises
        ------
        MismatchError
            If the model lacks parameters of the edit, has them in other shapes, or ties two of them. Nothing is changed then.
        """
        _write(model, self.at(lam, gamma))

    def revert_(self, model: nn.Module) -> None:
        """Set the model's parameters back to the shipped ones, to the bit.

        Raises
        ------
        MismatchError
            As for :meth:`apply_`.
        """
        _write(model, self.shipped)

    @contextmanager
    def applied(self, model: nn.Module, *, lam: float, gamma: float) -> Iterator[nn.Module]:
        """The model with the edit in it for the length of a block, and the shipped parameters afterwards.

        Raises
        ------
        MismatchError
            As for :meth:`apply_`.
        """
        self.apply_(model, lam=lam, gamma=gamma)
        try:
            yield model
        finally:
            self.revert_(model)

    def restricted(self, only: Callable[[str], bool] | Iterable[str]) -> ProcessSidecar:
        """The edit of some parameters only; `only` is a predicate on names, or the names.

        Raises
        ------
        MismatchError
            If it names parameters that the edit lacks, or keeps none.
        """
        names = parameters_of(self.shipped, only)
        parts = ("shipped", "memory", "residual")
        return replace(self, **{part: {name: getattr(self, part)[name] for name in names} for part in parts}, copy=False)

    def save(self, path: str | os.PathLike) -> None:
        """Write the edit to one safetensors file, whole or not at all."""
        parts = {part: getattr(self, part) for part in ("shipped", "memory", "residual")}
        tensors = {f"{part}/{name}": tensor for part, theta in parts.items() for name, tensor in theta.items()}
        save_tensors(path, tensors, {"format": _FORMAT, "names": list(self.shipped)})

    @classmethod
    def load(cls, path: str | os.PathLike, device: str | torch.device = "cpu") -> ProcessSidecar:
        """Read an edit that :meth:`save` wrote.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            Naming the file, if it is damaged or something else.
        """
        tensors, description = load_tensors(path, _FORMAT, device)
        parts = ("shipped", "memory", "residual")
        if absent := [f"{part}/{name}" for part in parts for name in description["names"] if f"{part}/{name}" not in tensors]:
            raise ValueError(f"{path}: tensors are missing: {', '.join(absent)}")
        # Copied, since tensors read by safetensors are views of the mapped file and would change with it.
        return cls(*({name: tensors[f"{part}/{name}"] for name in description["names"]} for part in parts))


def _write(model: nn.Module, theta: Parameters) -> None:
    own = dict(model.named_parameters(remove_duplicate=False))
    check_alike(edit=theta, model={name: own[name] for name in theta if name in own})
    first_name: dict[int, str] = {}
    for name in theta:
        if (other := first_name.setdefault(id(own[name]), name)) != name:
            raise MismatchError(f"{other} and {name} are tied in the model: an edit has to hold one of them only")
    with torch.no_grad():
        for name, tensor in theta.items():
            own[name].copy_(tensor)
