"""What the checks of the theorems share: slopes with a rule for their window, and the optima that theorems speak of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, hessian
from tqdm import tqdm

from .edit import ProcessSidecar
from .functional import Parameters, combine, inner, norm
from .trace import SafetyTrace

# ---------------------------------------------------------------------------------------------------------------------------
# Orders of convergence

ABOVE_ROUNDING = 100
"""How many times the rounding floor an error has to be for its scale to enter a fit."""


@dataclass(frozen=True)
class SlopeFit:
    """A log–log slope and the scales that it was fitted on, largest first."""

    slope: float
    window: tuple[float, ...]


def fit_slope(scales: Sequence[float], errors: Sequence[float], floor: float | Sequence[float], *, points: int = 6) -> SlopeFit:
    """The slope of log error against log scale over a window that is chosen without looking at slopes.

    The rule (ours): of the scales whose error is at least a hundred times the rounding floor (`ABOVE_ROUNDING`), the `points`
    smallest. There the floor bends a local slope by at most ``2 log₂ 1.01 ≈ .03``, and no smaller scale is left on which the
    order could be told.

    Parameters
    ----------
    scales, errors : sequence of float
        Positive scales in any order and the errors there.
    floor : float or sequence of float
        The error that rounding alone makes, the same for all scales or one for each.
    points : int
        Size of the window.

    Raises
    ------
    ValueError
        If fewer than `points` scales have an error above the limit.
    """
    floors = [floor] * len(scales) if isinstance(floor, (int, float)) else floor
    usable = sorted((s, e) for s, e, f in zip(scales, errors, floors, strict=True) if e >= ABOVE_ROUNDING * f and e > 0)
    if len(usable) < points:
        raise ValueError(f"only {len(usable)} scales have an error {ABOVE_ROUNDING} times above rounding, {points} are needed")
    window = usable[:points][::-1]
    x, y = (torch.tensor([math.log2(pair[i]) for pair in window], dtype=torch.float64) for i in (0, 1))
    x = x - x.mean()
    return SlopeFit((x @ y / (x @ x)).item(), tuple(s for s, _ in window))


@dataclass(frozen=True)
class TransportScan:
    """A map T around θ_A along ΔM, from which the errors of all edits of a memory ``σ·ΔM`` follow.

    Attributes
    ----------
    memory_norm, transported_norm, orthogonal_norm, residual_norm : float
        ‖ΔM‖, ‖JΔM‖, the norm of the part of JΔM orthogonal to ΔM, and ‖JΔM − ΔM‖; J is the exact derivative at θ_A.
    floor : float
        Rounding in T: the distance between the two faces of the trace at θ_A, the same map in two orders of operations.
    rows : list of dict
        For each ``scale`` σ: ``naive``, ``exact`` and ``secant``, the error ‖θ̂ − θ_AS‖ at (1, 0), at (1, 1) with the exact J, and
        at (1, 1) with the secant of that scale; ``best_scalar``, the least error over λ at γ = 0, found by search;
        ``orthogonal``, the norm of the part of T(θ_A + σΔM) − T(θ_A) orthogonal to ΔM, its ``ratio`` to that of the derivative,
        σ‖(JΔM)_⊥‖, and ``ratio_gap``, which is ``|ratio − 1|``; ``bias``, the error of the secant relative to ‖JΔM‖; and ``bend``,
        the second difference relative to the first, ``‖T₊ − 2T₀ + T₋‖ / ‖T₊ − T₋‖``.
    """

    memory_norm: float
    transported_norm: float
    orthogonal_norm: float
    residual_norm: float
    floor: float
    rows: list[dict[str, float]]

    def column(self, name: str) -> list[float]:
        """One column of the rows."""
        return [row[name] for row in self.rows]

    def fit(self, name: str, *, points: int = 6) -> SlopeFit:
        """The slope of one column by :func:`fit_slope`, with rounding in T carried over to that column."""
        scales = self.column("scale")
        unit = {"bias": 2 * self.transported_norm, "ratio_gap": self.orthogonal_norm}.get(name)
        floor = self.floor if unit is None else [self.floor / (unit * s) for s in scales]
        return fit_slope(scales, self.column(name), floor, points=points)


def transport_scan(
    trace: SafetyTrace, theta_a: Parameters, delta: Parameters, scales: Sequence[float], *, progress: bool | None = None
) -> TransportScan:
    """Run T at θ_A and at θ_A ± σ·ΔM for each scale σ, and its exact derivative once.

    Parameters
    ----------
    trace : SafetyTrace
        The map T.
    theta_a, delta : mapping of str to Tensor
        θ_A and ΔM.
    scales : sequence of float
        The factors σ.
    progress : bool, optional
        Show a bar on stderr; by default if that is a terminal.
    """
    oracle = trace(theta_a, progress=False)
    other_face, transported = trace.jvp(theta_a, delta, progress=False)
    transported_norm, orthogonal_norm = norm(transported), norm(orthogonal_part(transported, delta))
    rows = []
    for s in tqdm(scales, desc="scales", disable=None if progress is None else not progress):
        plus = trace(combine((1.0, theta_a), (s, delta)), progress=False)
        minus = trace(combine((1.0, theta_a), (-s, delta)), progress=False)
        displacement = combine((1.0, plus), (-1.0, oracle))
        first, second = combine((1.0, plus), (-1.0, minus)), combine((1.0, plus), (-2.0, oracle), (1.0, minus))
        orthogonal = norm(orthogonal_part(displacement, delta))
        ratio = orthogonal / (s * orthogonal_norm)
        row = {
            "scale": s,
            "naive": norm(combine((1.0, displacement), (-s, delta))),
            "exact": norm(combine((1.0, displacement), (-s, transported))),
            "secant": norm(second) / 2,
            "best_scalar": best_scalar_error(displacement, delta),
            "orthogonal": orthogonal,
            "ratio": ratio,
            "ratio_gap": abs(ratio - 1),
            "bias": norm(combine((1.0, first), (-2 * s, transported))) / (2 * s * transported_norm),
            "bend": norm(second) / norm(first),
        }
        rows.append(row)
    residual_norm = norm(combine((1.0, transported), (-1.0, delta)))
    floor = norm(combine((1.0, oracle), (-1.0, other_face)))
    return TransportScan(norm(delta), transported_norm, orthogonal_norm, residual_norm, floor, rows)


# ---------------------------------------------------------------------------------------------------------------------------
# One coefficient: the best that task arithmetic can do


def orthogonal_part(a: Parameters, b: Parameters) -> dict[str, Tensor]:
    """The part of a orthogonal to b."""
    return combine((1.0, a), (-inner(a, b) / inner(b, b), b))


def best_scalar_error(displacement: Parameters, delta: Parameters) -> float:
    """``min_λ ‖d − λ Δ‖`` by golden-section search: no use is made of the projection that Theorem 3 says it is.

    The search starts from ``|λ| ≤ 2‖d‖/‖Δ‖``, outside of which the error exceeds its value at λ = 0.
    """
    d, direction = (torch.cat([theta[name].flatten() for name in delta]) for theta in (displacement, delta))

    def error(lam: float) -> float:
        return torch.linalg.vector_norm(d - lam * direction).item()

    golden = (math.sqrt(5) - 1) / 2
    high = 2 * (torch.linalg.vector_norm(d) / torch.linalg.vector_norm(direction)).item()
    low = -high
    left, right = high - golden * (high - low), low + golden * (high - low)
    error_left, error_right = error(left), error(right)
    for _ in range(80):  # each step shortens the bracket by .618: 80 of them by 2e-17
        if error_left <= error_right:
            high, right, error_right = right, left, error_left
            left = high - golden * (high - low)
            error_left = error(left)
        else:
            low, left, error_left = left, right, error_right
            right = low + golden * (high - low)
            error_right = error(right)
    return min(error_left, error_right)


# ---------------------------------------------------------------------------------------------------------------------------
# Two coefficients: a smooth objective on the plane


@dataclass(frozen=True)
class LocalQuadratic:
    """Value, gradient and Hessian of an objective at a point (d, ζ): λ = d + ζ, γ = d, so that ζ = 0 is the diagonal.

    Attributes
    ----------
    point, gradient : Tensor
        ``(2,)``, in the order d, ζ.
    hessian : Tensor
        ``(2, 2)``.
    value : float
        The objective.
    """

    point: Tensor
    value: float
    gradient: Tensor
    hessian: Tensor

    @property
    def schur(self) -> float:
        """``S = H_ζζ − H_ζd² / H_dd``: the curvature along ζ when d follows it."""
        return (self.hessian[1, 1] - self.hessian[0, 1] ** 2 / self.hessian[0, 0]).item()

    def off_diagonal(self) -> tuple[float, float]:
        """ζ* and the gain over the diagonal's best point, if this is that point (Sweeney 2026, Theorem 4; this form is ours).

        Returns
        -------
        (float, float)
            ``ζ* = −∂_ζ f / S`` and ``(∂_ζ f)² / 2S``.

        Raises
        ------
        ValueError
            If the quadratic has no minimum on the plane: H_dd or S isn't positive.
        """
        if not (self.hessian[0, 0] > 0 and self.schur > 0):
            raise ValueError(f"no interior optimum: H_dd = {self.hessian[0, 0].item():.3g}, S = {self.schur:.3g}")
        slope = self.gradient[1].item()
        return -slope / self.schur, slope**2 / (2 * self.schur)


def on_plane(sidecar: ProcessSidecar, objective: Callable[[Parameters], Tensor]) -> Callable[[Tensor], Tensor]:
    """An objective of the parameters as a function of (d, ζ): of ``θ_AMS − d (ΔM + R̂) − ζ ΔM``."""

    def function(x: Tensor) -> Tensor:
        shipped, memory, residual = sidecar.shipped, sidecar.memory, sidecar.residual
        return objective({name: p - (x[0] + x[1]) * memory[name] - x[0] * residual[name] for name, p in shipped.items()})

    return function


def squared_distance(target: Parameters, weights: Parameters | None = None) -> Callable[[Parameters], Tensor]:
    """Half the squared distance of θ to a target, ``½ (θ − θ⋆)ᵀ H (θ − θ⋆)``, with H the identity or diagonal with given weights."""

    def objective(theta: Parameters) -> Tensor:
        parts = {name: (p - target[name]).square() for name, p in theta.items()}
        return sum((part if weights is None else weights[name] * part).sum() for name, part in parts.items()) / 2

    return objective


def best_on_diagonal(function: Callable[[Tensor], Tensor], start: float = 1.0) -> LocalQuadratic:
    """The expansion of a function of (d, ζ) at its best point with ζ = 0, from which Theorem 4 predicts the plane's optimum."""

    def along(x: Tensor) -> Tensor:
        return function(torch.cat([x, torch.zeros_like(x)]))

    d = minimise(along, torch.tensor([start], dtype=torch.float64))
    point = torch.cat([d, torch.zeros_like(d)])
    return LocalQuadratic(point, function(point).item(), grad(function)(point), hessian(function)(point))


# ---------------------------------------------------------------------------------------------------------------------------
# Minima


def minimise(function: Callable[[Tensor], Tensor], start: Tensor, *, steps: int = 100, tolerance: float = 1e-10) -> Tensor:
    """A local minimum of a smooth function by Newton's method with backtracking, on a dense Hessian.

    Negative curvature is turned into positive, so that each step goes down.

    Parameters
    ----------
    function : callable
        Takes a vector, returns a scalar; float64, with second derivatives.
    start : Tensor
        ``(n,)``, n in the hundreds at most.
    steps : int
        Limit on the number of steps.
    tolerance : float
        On the norm of the gradient.

    Raises
    ------
    ArithmeticError
        If the gradient stays above the tolerance.
    """
    x = start.detach().clone()
    for _ in range(steps):
        slope = grad(function)(x)
        if torch.linalg.vector_norm(slope) < tolerance:
            return x
        curvatures, axes = torch.linalg.eigh(hessian(function)(x))
        step = -axes @ ((axes.T @ slope) / curvatures.abs().clamp_min(1e-8))
        size, value = 1.0, function(x)
        # The last term is rounding: where the decrease drowns in it, the whole Newton step is taken.
        while size > 1e-8 and function(x + size * step) > value + 1e-4 * size * (slope @ step) + 1e-14 * value.abs():
            size /= 2
        x = x + size * step
    raise ArithmeticError(f"no minimum within {steps} steps: the gradient is {torch.linalg.vector_norm(slope).item():.2g}")


def stationary_point(
    objective: Callable[[Parameters], Tensor], theta: Parameters, *, tolerance: float = 1e-10
) -> tuple[dict[str, Tensor], Tensor]:
    """Minimise an objective of some hundred parameters until its gradient is nil to rounding: L-BFGS, then Newton's method.

    L-BFGS alone stops at gradients near 1e-8, where differences of the objective are rounding.

    Parameters
    ----------
    objective : callable
        Of parameters by name, with second derivatives.
    theta : mapping of str to Tensor
        Where to start, in float64.
    tolerance : float
        On the norm of the gradient.

    Returns
    -------
    (dict, Tensor)
        The point, and the Hessian there as a matrix over the flattened parameters, in their order.

    Raises
    ------
    ArithmeticError
        If the gradient stays above the tolerance.
    """

    def function(x: Tensor) -> Tensor:
        return objective(unflattened(x, theta))

    x = flattened(theta).clone().requires_grad_()
    optimizer = torch.optim.LBFGS([x], max_iter=400, history_size=50, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = function(x)
        value.backward()
        return value

    optimizer.step(closure)
    point = unflattened(minimise(function, x.detach(), tolerance=tolerance), theta)
    return point, hessian_at(objective, point)


def hessian_at(objective: Callable[[Parameters], Tensor], theta: Parameters) -> Tensor:
    """The Hessian at θ as a matrix over the flattened parameters, in their order: for some hundred of them."""
    return hessian(lambda x: objective(unflattened(x, theta)))(flattened(theta))


def increments(objective: Callable[[Parameters], Tensor], theta: Parameters, direction: Parameters, steps: Sequence[float]) -> list[float]:
    """``f(θ + η d) − f(θ)`` for each step η."""
    with torch.no_grad():
        start = objective(theta).item()
        return [objective(combine((1.0, theta), (step, direction))).item() - start for step in steps]


def flattened(theta: Parameters) -> Tensor:
    """All parameters in one vector, in their order."""
    return torch.cat([p.flatten() for p in theta.values()])


def unflattened(x: Tensor, like: Parameters) -> dict[str, Tensor]:
    """The inverse of :func:`flattened`."""
    pieces = x.split([p.numel() for p in like.values()])
    return {name: piece.view(p.shape) for (name, p), piece in zip(like.items(), pieces, strict=True)}
