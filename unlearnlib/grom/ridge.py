r"""The closed-form edit of one matrix: ridge least squares on forget and retain keys.

Minimises :math:`\tfrac{w_r}{r}\|P X_r\|^2 + \tfrac{w_f}{s}\|P X_f - D\|^2 + \mu\|P\|^2` over :math:`P`. The targets are factored,
:math:`D = U S`, with a basis :math:`U` (one column a distinct gold token) that the fit never needs: it works with the coordinates
:math:`S`, and the edit it returns is :math:`P = U V` in the same basis. Keys and targets are passed one token position a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_CHOLESKY_BLOCK = 1024
_GRAM_BLOCKS = 8
_MAX_CONDITION = 1e12


class IllConditionedError(ArithmeticError):
    """The normal matrix :math:`A` is singular, or too close to it for float64."""


class RidgeFitter:
    r"""Streaming normal equations: any number of keys, :math:`O(n^2)` memory.

    Only sufficient statistics are kept: the Gram matrices of the retain and of the forget keys, the cross moments of targets and
    forget keys, and two counters. While there are fewer keys than `in_features` the keys themselves are kept instead (they are
    smaller than the Gram), and :meth:`solve` uses the sample-space form.

    Parameters
    ----------
    in_features : int
        n, the width of a key.
    out_features : int
        k, the number of target coordinates: columns of the basis :math:`U`, or m for plain targets.
    device : str or torch.device
        Where the statistics live.

    Notes
    -----
    Reference: objective and minimiser, GROM (arXiv 2608.05783); streaming and the choice between the two forms are ours.
    """

    def __init__(self, in_features: int, out_features: int, *, device: str | torch.device = "cpu"):
        if in_features < 1 or out_features < 1:
            raise ValueError(f"in_features and out_features must be positive, got {in_features} and {out_features}")
        self.in_features, self.out_features = in_features, out_features
        self.retain_count = self.forget_count = 0
        self.cross = torch.zeros(out_features, in_features, dtype=torch.float64, device=device)
        self._grams: tuple[Tensor, Tensor] | None = None
        # Keys that are not in the Gram matrices yet: n rows at most, retain keys from the front, forget keys from the back.
        self._buffer: Tensor | None = None
        self._retain_kept = self._forget_kept = 0

    def update_retain(self, keys: Tensor) -> None:
        """Add retain keys.

        Parameters
        ----------
        keys : Tensor, shape (tokens, n)

        Raises
        ------
        ValueError
            If the shape is wrong or an entry is not finite.
        """
        rows = self._checked(keys, "retain keys", self.in_features)
        self.retain_count += len(rows)
        if self._fits(rows, 0):
            self._buffer[self._retain_kept : self._retain_kept + len(rows)] = rows
            self._retain_kept += len(rows)

    def update_forget(self, keys: Tensor, targets: Tensor | tuple[Tensor, Tensor]) -> None:
        """Add forget keys with their target shifts.

        Parameters
        ----------
        keys : Tensor, shape (tokens, n)
        targets : Tensor, shape (tokens, k), or pair of Tensors, each of shape (tokens,)
            Coordinates of each shift in the basis; or, where each has one non-zero coordinate, its index and its value. An index
            of -1 stands for a zero target: the key is kept, its output is asked not to move.

        Raises
        ------
        ValueError
            If shapes differ, an index is out of range, or an entry is not finite.
        """
        rows = self._checked(keys, "forget keys", self.in_features)
        if isinstance(targets, tuple):
            index, value = targets
            if index.shape != (len(rows),) or value.shape != (len(rows),):
                raise ValueError(f"coded targets must have shape ({len(rows)},), got {tuple(index.shape)} and {tuple(value.shape)}")
            if not torch.isfinite(value).all():
                raise ValueError("targets contain NaN or infinite entries")
            if (index >= self.out_features).any():
                raise ValueError(f"coded targets must be below {self.out_features}, got {index.max().item()}")
            used = index >= 0
            self.cross.index_add_(0, index[used].to(rows.device), value[used, None].to(rows) * rows[used.to(rows.device)])
        else:
            coordinates = self._checked(targets, "targets", self.out_features)
            if len(coordinates) != len(rows):
                raise ValueError(f"{len(rows)} forget keys but {len(coordinates)} targets")
            self.cross.addmm_(coordinates.T, rows)
        self.forget_count += len(rows)
        if self._fits(rows, 1):
            end = self.in_features - self._forget_kept
            self._buffer[end - len(rows) : end] = rows
            self._forget_kept += len(rows)

    def solve(
        self,
        *,
        retain_weight: float = 100.0,
        forget_weight: float = 1.0,
        ridge: float = 0.03,
        mu: float | None = None,
        forget_count: int | None = None,
        form: str = "auto",
    ) -> RidgeSolution:
        r"""The unique minimiser :math:`V = B A^{-1}`.

        Parameters
        ----------
        retain_weight, forget_weight : float
            :math:`w_r` and :math:`w_f`.
        ridge : float
            :math:`\rho`; the ridge is :math:`\mu = \rho\cdot\mathrm{mean}(\mathrm{diag}\,A)`, taken before it is added.
        mu : float, optional
            The ridge itself, in place of `ridge` (to hold it fixed while data change).
        forget_count : int, optional
            The s of the weight :math:`w_f/s`, in place of the number of forget keys seen (likewise).
        form : {"auto", "primal", "dual"}
            ``"primal"`` factors the n×n matrix :math:`A`, ``"dual"`` the Gram of all keys among themselves; ``"auto"`` takes the
            smaller one. The dual needs fewer keys than n.

        Returns
        -------
        RidgeSolution

        Raises
        ------
        ValueError
            If there are no forget or no retain keys, a parameter is out of range, or the dual is asked for and not available.
        IllConditionedError
            If :math:`A` is singular or its condition number above 1e12; the message says what to change.
        """
        if not self.forget_count or not self.retain_count:
            missing = "forget" if not self.forget_count else "retain"
            raise ValueError(f"no {missing} keys were given: the fit needs both forget and retain keys")
        for name, number in (("retain_weight", retain_weight), ("forget_weight", forget_weight), ("ridge", ridge), ("mu", mu)):
            if number is not None and not 0 <= number < float("inf"):
                raise ValueError(f"{name} must be a finite number ≥ 0, got {number}")
        if forget_count is not None and forget_count < 1:
            raise ValueError(f"forget_count must be positive, got {forget_count}")
        if form not in ("auto", "primal", "dual"):
            raise ValueError(f"form must be auto, primal or dual, got {form!r}")
        if form == "dual" and self._grams is not None:
            raise ValueError(f"the dual form needs fewer keys than n = {self.in_features}; this fit has seen more and kept the Gram only")
        retain = retain_weight / self.retain_count
        forget = forget_weight / (forget_count or self.forget_count)
        dual = self._grams is None and form != "primal"
        factor = self._factor_dual if dual else self._factor_primal
        inverse = factor(retain, forget, ridge, mu)
        return RidgeSolution(
            edit=inverse.right_multiply(forget * self.cross),
            inverse=inverse,
            retain_weight=retain_weight,
            forget_scale=forget,
            retain_count=self.retain_count,
            forget_count=self.forget_count,
        )

    def normal_matrix(self, retain_scale: float, forget_scale: float) -> Tensor:
        r"""Lower triangle of :math:`a X_r X_r^\top + b X_f X_f^\top`, without ridge; the strict upper triangle is not filled in.

        Parameters
        ----------
        retain_scale, forget_scale : float
            a and b, that is :math:`w_r/r` and :math:`w_f/s`.

        Returns
        -------
        Tensor, shape (n, n), float64
        """
        if self._grams is None:
            matrix = self.cross.new_zeros(self.in_features, self.in_features)
        else:
            matrix = (retain_scale * self._grams[0]).add_(self._grams[1], alpha=forget_scale)
        for scale, kept in zip((retain_scale, forget_scale), self._kept(), strict=True):
            _add_gram(matrix, kept, scale)
        return matrix

    def _checked(self, rows: Tensor, name: str, width: int) -> Tensor:
        if rows.ndim != 2 or rows.shape[1] != width:
            raise ValueError(f"{name} must have shape (tokens, {width}), got {tuple(rows.shape)}")
        rows = rows.detach().to(device=self.cross.device, dtype=torch.float64)
        if not torch.isfinite(rows).all():
            raise ValueError(f"{name} contain NaN or infinite entries")
        return rows

    def _kept(self) -> tuple[Tensor, Tensor]:
        """The retain and the forget keys in the buffer."""
        if self._buffer is None:
            return (self.cross[:0], self.cross[:0])
        return self._buffer[: self._retain_kept], self._buffer[self.in_features - self._forget_kept :]

    def _fits(self, rows: Tensor, kind: int) -> bool:
        """Make room for some keys in the buffer; where they are too many for it, add them to their Gram matrix and say no.

        The Gram is added to in chunks of many keys, for the sake of the matrix product's speed.
        """
        if self._retain_kept + self._forget_kept + len(rows) >= self.in_features:
            if self._grams is None:
                self._grams = tuple(self.cross.new_zeros(self.in_features, self.in_features) for _ in range(2))
            for gram, kept in zip(self._grams, self._kept(), strict=True):
                _add_gram(gram, kept)
            self._retain_kept = self._forget_kept = 0
        if len(rows) >= self.in_features:
            _add_gram(self._grams[kind], rows)
            return False
        if self._buffer is None:
            self._buffer = self.cross.new_empty(self.in_features, self.in_features)
        return True

    def _factor_primal(self, retain: float, forget: float, ridge: float, mu: float | None) -> _PrimalInverse:
        normal = self.normal_matrix(retain, forget)
        diagonal = normal.diagonal()
        mu = ridge * diagonal.mean().item() if mu is None else mu
        diagonal += mu
        factor = _cholesky_(normal)
        largest, smallest = _extreme_eigenvalues(factor)
        _check_condition(largest, smallest, mu)
        return _PrimalInverse(mu, factor)

    def _factor_dual(self, retain: float, forget: float, ridge: float, mu: float | None) -> _DualInverse:
        rows = torch.cat([scale**0.5 * kept for scale, kept in zip((retain, forget), self._kept(), strict=True)])
        mu = ridge * rows.square().sum().item() / self.in_features if mu is None else mu
        gram = rows @ rows.T
        gram.diagonal().add_(mu)
        factor = _cholesky_(gram)
        # A has the eigenvalues of this Gram, and μ for every direction that no key spans.
        _check_condition(_extreme_eigenvalues(factor)[0], mu, mu)
        return _DualInverse(mu, rows, factor)


@dataclass(frozen=True)
class RidgeSolution:
    r"""The minimiser of one fit, with what its audit needs.

    Attributes
    ----------
    edit : Tensor, shape (k, n), float64
        V, the edit in the coordinates of the targets' basis: :math:`P = U V`.
    inverse : object
        Applies :math:`A^{-1}`: ``inverse.right_multiply(keys)`` is ``keys @ A⁻¹``, shape (tokens, n).
    retain_weight : float
        :math:`w_r`.
    forget_scale : float
        c = w_f/s.
    retain_count, forget_count : int
        r and s.
    """

    edit: Tensor
    inverse: _PrimalInverse | _DualInverse
    retain_weight: float
    forget_scale: float
    retain_count: int
    forget_count: int

    @property
    def mu(self) -> float:
        """The ridge."""
        return self.inverse.mu

    def cpu(self) -> RidgeSolution:
        """The same solution with its tensors on the CPU."""
        inverse = inverse_from_tensors(self.mu, {name: tensor.cpu() for name, tensor in self.inverse.tensors().items()})
        return replace(self, edit=self.edit.cpu(), inverse=inverse)


@dataclass(frozen=True)
class _PrimalInverse:
    """A⁻¹ by the Cholesky factor of A."""

    mu: float
    factor: Tensor

    def right_multiply(self, rows: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(self.factor, rows.T, upper=False)
        return torch.linalg.solve_triangular(self.factor.T, half, upper=True).T

    def tensors(self) -> dict[str, Tensor]:
        return {"factor": self.factor}


@dataclass(frozen=True)
class _DualInverse:
    r"""A⁻¹ in sample space, :math:`(Z^\top Z + \mu I)^{-1} = \mu^{-1}(I - Z^\top (Z Z^\top + \mu I)^{-1} Z)`, Z the weighted keys."""

    mu: float
    rows: Tensor
    factor: Tensor

    def right_multiply(self, rows: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(self.factor, self.rows @ rows.T, upper=False)
        coefficients = torch.linalg.solve_triangular(self.factor.T, half, upper=True)
        return (rows - coefficients.T @ self.rows) / self.mu

    def tensors(self) -> dict[str, Tensor]:
        return {"rows": self.rows, "factor": self.factor}


def inverse_from_tensors(mu: float, tensors: dict[str, Tensor]) -> _PrimalInverse | _DualInverse:
    """The :attr:`RidgeSolution.inverse` whose ``tensors()`` were saved."""
    return _DualInverse(mu, **tensors) if "rows" in tensors else _PrimalInverse(mu, **tensors)


def _add_gram(gram: Tensor, rows: Tensor, scale: float = 1.0) -> None:
    """Add scale · rowsᵀ rows to the lower triangle, by block columns: half the work of the full product."""
    step = -(-len(gram) // _GRAM_BLOCKS)
    for start in range(0, len(gram), step):
        gram[start:, start : start + step].addmm_(rows[:, start:].T, rows[:, start : start + step], alpha=scale)


def _check_condition(largest: float, smallest: float, mu: float) -> None:
    condition = largest / smallest if smallest > 0 else float("inf")
    if not condition < _MAX_CONDITION:
        raise IllConditionedError(
            f"A is singular or nearly so: condition number about {condition:.1e} at μ = {mu:.1e}, above {_MAX_CONDITION:.0e}. Raise "
            "the ridge (the papers use 0.03), give more and more varied retain keys, or lower retain_weight"
        )


def _extreme_eigenvalues(factor: Tensor, steps: int = 3) -> tuple[float, float]:
    """Largest and smallest eigenvalue of L Lᵀ, by a few steps of power and inverse iteration; (inf, 0) where L is not a factor."""
    if not (factor.diagonal() > 0).all():
        return float("inf"), 0.0
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(len(factor), 1, generator=generator, dtype=torch.float64).to(factor.device)
    small = torch.zeros_like(large)
    small[factor.diagonal().argmin()] = 1.0
    for _ in range(steps):
        large = factor @ (factor.T @ (large / large.norm()))
        half = torch.linalg.solve_triangular(factor, small / small.norm(), upper=False)
        small = torch.linalg.solve_triangular(factor.T, half, upper=True)
    return large.norm().item(), 1 / small.norm().item()


def _cholesky_(matrix: Tensor) -> Tensor:
    """Blocked left-looking Cholesky of a lower triangle, in place; nearly all of its work is matrix products. Zero where it fails."""
    for start in range(0, len(matrix), _CHOLESKY_BLOCK):
        stop = start + _CHOLESKY_BLOCK
        panel = matrix[start:, start:stop]
        if start:
            panel.addmm_(matrix[start:, :start], matrix[start:stop, :start].T, alpha=-1)
        corner, info = torch.linalg.cholesky_ex(panel[:_CHOLESKY_BLOCK])
        if info:
            return matrix.zero_()
        panel[:_CHOLESKY_BLOCK] = corner
        if stop < len(matrix):
            panel[_CHOLESKY_BLOCK:] = torch.linalg.solve_triangular(corner.T, panel[_CHOLESKY_BLOCK:], upper=True, left=False)
    return matrix.tril_()
