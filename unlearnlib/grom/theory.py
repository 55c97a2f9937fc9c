"""The claims about the closed form as numerical checks: the objective, its gradient, descent, limits, and refits for the audit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..measure import best_seconds
from .anatomy import HEAD, unembedding
from .audit import Audit, FitState
from .edit import Edit, squared_norm
from .fit import FitData, FitSettings
from .keys import collect_keys
from .ridge import RidgeFitter
from .targets import suppression


@dataclass(frozen=True)
class Problem:
    """A small ridge problem with everything dense, one token position a column as in the derivations.

    Attributes
    ----------
    forget_keys : Tensor, shape (n, s), float64
    retain_keys : Tensor, shape (n, r), float64
    shift : Tensor, shape (m, s), float64
        D.
    retain_weight, forget_weight : float
    mu : float
        The ridge itself.
    """

    forget_keys: Tensor
    retain_keys: Tensor
    shift: Tensor
    retain_weight: float = 100.0
    forget_weight: float = 1.0
    mu: float = 0.03

    @classmethod
    def random(cls, *, n: int, m: int, forget: int, retain: int, seed: int, **settings: float) -> Problem:
        """Seeded Gaussian keys whose covariance spectrum decays like that of a layer's, and Gaussian shifts."""
        generator = torch.Generator().manual_seed(seed)

        def gaussian(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        scale = torch.arange(1, n + 1, dtype=torch.float64).rsqrt()[:, None]
        return cls(scale * gaussian(n, forget), scale * gaussian(n, retain), gaussian(m, forget), **settings)

    def normal_matrix(self) -> Tensor:
        r"""A, shape (n, n), by its definition."""
        retain, forget = (
            weight / keys.shape[1] * keys @ keys.T
            for weight, keys in ((self.retain_weight, self.retain_keys), (self.forget_weight, self.forget_keys))
        )
        return retain + forget + self.mu * torch.eye(len(retain), dtype=torch.float64)

    def objective(self, edit: Tensor) -> Tensor:
        r"""Value of :math:`\tfrac{w_r}{r}\|P X_r\|^2 + \tfrac{w_f}{s}\|P X_f - D\|^2 + \mu\|P\|^2` at P, shape (m, n)."""
        retained = self.retain_weight / self.retain_keys.shape[1] * (edit @ self.retain_keys).square().sum()
        forgotten = self.forget_weight / self.forget_keys.shape[1] * (edit @ self.forget_keys - self.shift).square().sum()
        return retained + forgotten + self.mu * edit.square().sum()

    def gradient(self, edit: Tensor) -> Tensor:
        """Gradient of the objective at P by automatic differentiation, shape (m, n)."""
        return torch.func.grad(self.objective)(edit)

    def solve(self, form: str = "auto") -> Tensor:
        """P*, shape (m, n), by the library's fitter."""
        return self.fitter().solve(retain_weight=self.retain_weight, forget_weight=self.forget_weight, mu=self.mu, form=form).edit

    def fitter(self) -> RidgeFitter:
        """A fitter that has seen all keys."""
        fitter = RidgeFitter(len(self.forget_keys), len(self.shift))
        fitter.update_forget(self.forget_keys.T, self.shift.T)
        fitter.update_retain(self.retain_keys.T)
        return fitter


def descend(problem: Problem, steps: int) -> tuple[list[float], float]:
    """Gradient descent from P = 0 with the best constant step, and how far it still is from the closed form.

    Parameters
    ----------
    problem : Problem
    steps : int

    Returns
    -------
    distances : list of float
        Distance to P* relative to its norm, before each step and at the end: ``steps + 1`` numbers.
    rate : float
        Factor a step that the condition number of A predicts, (κ − 1)/(κ + 1).
    """
    eigenvalues = torch.linalg.eigvalsh(problem.normal_matrix())
    smallest, largest = eigenvalues[0].item(), eigenvalues[-1].item()
    optimum, edit = problem.solve(), torch.zeros(len(problem.shift), len(problem.forget_keys), dtype=torch.float64)
    distances = []
    for _ in range(steps + 1):
        distances.append(((edit - optimum).norm() / optimum.norm()).item())
        # The gradient is 2(PA − B); the best constant step for it is 1/(λmin + λmax).
        edit = edit - problem.gradient(edit) / (smallest + largest)
    return distances, (largest - smallest) / (largest + smallest)


def refit(
    state: FitState,
    retain_keys: Tensor,
    kept: Tensor,
    *,
    recompute_count: bool = False,
    recompute_ridge: bool = False,
    targets: tuple[Tensor, Tensor, int] | None = None,
    ridge: float = 0.03,
) -> Tensor:
    """Fit one matrix again on some of its forget positions: what the audit's formula must agree with.

    Parameters
    ----------
    state : FitState
    retain_keys : Tensor, shape (r, n)
    kept : Tensor of bool, shape (s,)
        The positions that stay.
    recompute_count : bool
        Whether s becomes the number of positions that stay; held at its old value by default.
    recompute_ridge : bool
        Whether μ is taken from the remaining data by the rule with `ridge`; held at its old value by default.
    targets : (codes, values, k), optional
        Other targets of the kept positions, as when α is recomputed.
    ridge : float
        ρ.

    Returns
    -------
    Tensor, shape (k, n)
        V without the rest.
    """
    codes, values, width = targets or (state.codes[kept], state.values[kept], len(state.solution.edit))
    fitter = RidgeFitter(state.keys.shape[1], width)
    fitter.update_retain(retain_keys)
    fitter.update_forget(state.keys[kept], (codes, values))
    return fitter.solve(
        retain_weight=state.solution.retain_weight,
        forget_weight=state.solution.forget_scale * state.solution.forget_count,
        ridge=ridge,
        mu=None if recompute_ridge else state.solution.mu,
        forget_count=None if recompute_count else state.solution.forget_count,
    ).edit


def audit_against_refits(data: FitData, settings: FitSettings, group_size: int = 4) -> dict[str, list[float]]:
    """Distance of the audited influence from the one that refits show, relative to the refits'.

    Each example is left out once, and the first `group_size` together.

    Parameters
    ----------
    data : FitData
        Of a small model in float64.
    settings : FitSettings
        Of a suppression.
    group_size : int

    Returns
    -------
    dict of str to list of float
        One number an example (or group) and matrix, for refits that hold s, μ and α fixed, that recompute one of them, and that fit the
        whole band again from scratch.

    Raises
    ------
    ValueError
        If the settings are of another kind of edit.
    """
    if HEAD in settings.layers or settings.target != "suppress":
        raise ValueError(f"settings: only suppression at MLP outputs is compared here, got {settings.target} at {settings.layers}")
    edit = data.fit(settings, keep_audit=True)
    audit = edit.audit()
    retain_keys = keys_along_band(data, settings, edit)
    gold = torch.cat([batch.gold for batch in data.batches(settings)[0]])
    gaps: dict[str, list[float]] = {name: [] for name in ("held fixed", "s", "μ", "α", "whole fit")}
    for group in [*([e] for e in range(len(data.forget))), list(range(group_size))]:
        remaining = FitData(data.model, [x for i, x in enumerate(data.forget) if i not in group], data.retain)
        scratch = remaining.fit(settings)
        for i, (state, keys) in enumerate(zip(edit.states, retain_keys, strict=True)):
            kept = ~torch.isin(state.example, torch.tensor(group))
            whole, audited = edit.matrices[i].dense(), state.left @ audit.influence(group)[i].coordinates()
            again = suppression(remaining.forget_gold, remaining.alpha, settings.strength, unembedding(data.model))
            refits = {
                "held fixed": state.left @ refit(state, keys, kept),
                "s": state.left @ refit(state, keys, kept, recompute_count=True),
                "μ": state.left @ refit(state, keys, kept, recompute_ridge=True, ridge=settings.ridge),
                "α": again.basis @ refit(state, keys, kept, targets=(*again.coordinates(gold[kept]), again.rank)),
                "whole fit": scratch.matrices[i].dense(),
            }
            for name, without in refits.items():
                gaps[name].append(((whole - without - audited).norm() / (whole - without).norm()).item())
    return gaps


def keys_along_band(data: FitData, settings: FitSettings, edit: Edit) -> list[Tensor]:
    """Retain keys of each edited matrix, collected after the edits before it: one Tensor of shape (r, n) a matrix."""
    retain_batches = data.batches(settings)[1]
    found = []
    for i, where in enumerate(settings.layers):
        with Edit(edit.matrices[:i]).applied(data.model):
            found.append(torch.cat(list(collect_keys(data.model, retain_batches, where))).double())
    return found


def refit_each(state: FitState, normal: Tensor) -> Tensor:
    """Norm of each example's influence by refitting without it: a downdate, a factorisation and a solve an example.

    Parameters
    ----------
    state : FitState
    normal : Tensor, shape (n, n)
        A without its ridge, lower triangle, from :meth:`~unlearnlib.grom.ridge.RidgeFitter.normal_matrix`.

    Returns
    -------
    Tensor, shape (examples,), float64
    """
    c, solution = state.solution.forget_scale, state.solution
    cross = torch.zeros_like(solution.edit)
    used = state.codes >= 0
    cross.index_add_(0, state.codes[used], state.values[used, None] * state.keys[used])
    norms = []
    for e in range(len(state.names)):
        rows = state.example == e
        keys, codes, values = state.keys[rows], state.codes[rows], state.values[rows]
        without = cross.index_add(0, codes[codes >= 0], values[codes >= 0, None] * keys[codes >= 0], alpha=-1)
        matrix = normal - c * keys.T @ keys
        matrix.diagonal().add_(solution.mu)
        edit = torch.cholesky_solve(c * without.T, torch.linalg.cholesky(matrix)).T
        norms.append(squared_norm(state.left, solution.edit - edit) ** 0.5)
    return torch.tensor(norms, dtype=torch.float64)


def time_audit(state: FitState, retain_keys: Tensor, repetitions: int = 3) -> tuple[float, float]:
    """Seconds to audit all examples of a fit, and to refit without each of them: the best of some alternating repetitions.

    Parameters
    ----------
    state : FitState
    retain_keys : Tensor, shape (r, n)
    repetitions : int

    Returns
    -------
    audit, refits : float
        Seconds.

    Raises
    ------
    ArithmeticError
        If the two disagree.
    """
    fitter = RidgeFitter(state.keys.shape[1], len(state.solution.edit))
    fitter.update_retain(retain_keys)
    fitter.update_forget(state.keys, (state.codes, state.values))
    solution = state.solution
    normal = fitter.normal_matrix(solution.retain_weight / solution.retain_count, solution.forget_scale)
    found: dict[str, Tensor] = {}
    works = {"audit": lambda: Audit((state,)).norms()[0], "refits": lambda: refit_each(state, normal)}
    seconds = best_seconds({name: partial(_keep_result, found, name, work) for name, work in works.items()}, repetitions)
    tolerance = 1e-9 * solution.edit.norm().item()
    if not torch.allclose(found["audit"], found["refits"], rtol=1e-6, atol=tolerance):
        raise ArithmeticError("audit and refits disagree")
    return seconds["audit"], seconds["refits"]


def _keep_result(found: dict[str, Tensor], name: str, work: Callable[[], Tensor]) -> None:
    found[name] = work()


@dataclass(frozen=True)
class Limit:
    """Approach to a limit: the setting that is moved, the distance that should vanish, and the log–log slope at its far end.

    Attributes
    ----------
    settings, distances : list of float
    """

    settings: list[float]
    distances: list[float]

    @property
    def slope(self) -> float:
        """Slope between the two settings that are farthest along."""
        (x0, x1), (y0, y1) = self.settings[-2:], self.distances[-2:]
        return math.log(y1 / y0) / math.log(x1 / x0)


def decreasing_ridge(problem: Problem) -> Limit:
    r"""μ → 0 with independent keys, fewer than n: both :math:`P X_r` and :math:`P X_f - D` vanish, linearly in μ."""

    def distance(one: Problem) -> float:
        edit = one.solve()
        misses = torch.cat([edit @ one.retain_keys, edit @ one.forget_keys - one.shift], dim=1)
        return (misses.norm() / one.shift.norm()).item()

    return _limit(problem, "mu", [10.0**-k for k in range(1, 8)], distance)


def increasing_ridge(problem: Problem) -> Limit:
    r"""μ → ∞: :math:`\mu P \to B`, with an error like 1/μ."""
    cross = problem.forget_weight / problem.shift.shape[1] * problem.shift @ problem.forget_keys.T
    return _limit(problem, "mu", [10.0**k for k in range(7)], lambda one: ((one.mu * one.solve() - cross).norm() / cross.norm()).item())


def increasing_retain_weight(problem: Problem) -> Limit:
    r""":math:`w_r \to \infty`: :math:`P X_r \to 0` like :math:`1/w_r`."""
    return _limit(problem, "retain_weight", [10.0**k for k in range(8)], lambda one: (one.solve() @ one.retain_keys).norm().item())


def _limit(problem: Problem, name: str, settings: list[float], distance: Callable[[Problem], float]) -> Limit:
    return Limit(settings, [distance(replace(problem, **{name: setting})) for setting in settings])
