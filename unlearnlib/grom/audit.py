r"""The audit: the exact influence of forget examples on an edit, without refitting.

With :math:`c = w_f/s` and :math:`H = X_e^\top A^{-1} X_e` for the columns of an example, or of a group of them,

.. math:: P - P_{-e} = c\,(D_e - P X_e)(I - c H)^{-1} X_e^\top A^{-1}.

Exact for one matrix while s, μ, α and the retain keys are held fixed. Reference: ours, by the Woodbury identity.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .ridge import RidgeSolution, inverse_from_tensors


@dataclass(frozen=True)
class FitState:
    """What the audit of one matrix needs besides its edit.

    Attributes
    ----------
    module : str
        Name of the edited module.
    solution : RidgeSolution
    left : Tensor, shape (m, k), or None
        Basis U of the targets; None for unit columns.
    keys : Tensor, shape (s, n), float64
        Forget keys, one token position a row.
    codes : Tensor of int64, shape (s,)
        Basis column of each position's target, -1 for a zero target.
    values : Tensor, shape (s,), float64
        Its coefficient.
    example : Tensor of int64, shape (s,)
        Example that each position belongs to.
    names : tuple of str
        What the examples are called.
    """

    module: str
    solution: RidgeSolution
    left: Tensor | None
    keys: Tensor
    codes: Tensor
    values: Tensor
    example: Tensor
    names: tuple[str, ...]

    def save(self, path: str | Path) -> None:
        """Write everything into one safetensors file."""
        tensors = {
            "edit": self.solution.edit,
            "keys": self.keys,
            "codes": self.codes,
            "values": self.values,
            "example": self.example,
        }
        tensors |= self.solution.inverse.tensors() | ({} if self.left is None else {"left": self.left})
        scalars = {"module": self.module, "names": self.names, "mu": self.solution.mu, "retain_weight": self.solution.retain_weight}
        scalars |= {"forget_scale": self.solution.forget_scale, "counts": [self.solution.retain_count, self.solution.forget_count]}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"scalars": json.dumps(scalars)})

    @classmethod
    def load(cls, path: str | Path) -> FitState:
        """Read what :meth:`save` wrote.

        Raises
        ------
        ValueError
            Naming the file, if it is damaged or something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                scalars = json.loads(file.metadata()["scalars"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            own = {name: tensors.pop(name) for name in ("edit", "keys", "codes", "values", "example")}
            left = tensors.pop("left", None)
            retain_count, forget_count = scalars["counts"]
            inverse = inverse_from_tensors(scalars["mu"], tensors)
            edit = own.pop("edit")
            solution = RidgeSolution(edit, inverse, scalars["retain_weight"], scalars["forget_scale"], retain_count, forget_count)
            return cls(scalars["module"], solution, left, names=tuple(scalars["names"]), **own)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: the audit data are damaged: {type(error).__name__} {error}") from error


@dataclass(frozen=True)
class Influence:
    r"""The part :math:`P - P_{-e}` of one matrix's edit that is due to a group of examples, as :math:`U\,Q\,Z`.

    Attributes
    ----------
    module : str
    left : Tensor, shape (m, k), or None
        U; None for unit columns.
    middle : Tensor, shape (k, t), float64
        :math:`Q = c\,(S_e - V X_e)(I - cH)^{-1}`, t the number of the group's token positions.
    right : Tensor, shape (t, n), float64
        :math:`Z = X_e^\top A^{-1}`.
    leverage : float
        Largest eigenvalue of :math:`c H`, in [0, 1): how much of the fit at these keys is their own doing.
    """

    module: str
    left: Tensor | None
    middle: Tensor
    right: Tensor
    leverage: float

    def coordinates(self) -> Tensor:
        r"""V − V₋e, shape (k, n): the influence in the coordinates of the targets' basis."""
        return self.middle @ self.right

    def norm(self) -> float:
        r"""Frobenius norm :math:`\|P - P_{-e}\|_F`, without forming an m×n matrix."""
        outer = self.middle.T @ self.middle if self.left is None else self.middle.T @ (self.left.T @ self.left) @ self.middle
        return max((outer * (self.right @ self.right.T)).sum().item(), 0.0) ** 0.5

    def effect(self, keys: Tensor) -> Tensor:
        r"""What the group changes in the outputs at given keys, :math:`(P - P_{-e}) x` in coordinates of the basis.

        Parameters
        ----------
        keys : Tensor, shape (tokens, n)

        Returns
        -------
        Tensor, shape (tokens, k), float64
        """
        return keys.double() @ self.right.T @ self.middle.T


class Audit:
    """Influence of forget examples on a fitted edit, matrix by matrix.

    Parameters
    ----------
    states : sequence of FitState
        One for each edited matrix, as an edit that was fitted with ``keep_audit=True`` carries them.

    Notes
    -----
    Each matrix's influence is exact with s, μ, α and its keys held fixed. For a band edited in sequence the keys of later layers
    depend on the earlier edits, which this does not follow: the norms of several matrices are combined as if it didn't.
    """

    def __init__(self, states: Sequence[FitState]):
        if not states:
            raise ValueError("there is nothing to audit: no fit states were given")
        self.states = tuple(states)
        self.names = self.states[0].names

    @cached_property
    def _scaled_keys(self) -> list[Tensor]:
        """Z = Xᵀ A⁻¹ of all forget keys, a matrix each: the one expensive step, shared by all examples."""
        return [state.solution.inverse.right_multiply(state.keys) for state in self.states]

    @cached_property
    def _residuals(self) -> list[Tensor]:
        """S − V X of all forget keys, shape (s, k), a matrix each."""
        found = []
        for state in self.states:
            residual = -(state.keys @ state.solution.edit.T)
            used = state.codes >= 0
            residual[used, state.codes[used]] += state.values[used]
            found.append(residual)
        return found

    def influence(self, group: int | Sequence[int]) -> tuple[Influence, ...]:
        """Influence of one example, or of a group taken out together.

        Parameters
        ----------
        group : int or sequence of int
            Indices into `names`.

        Returns
        -------
        tuple of Influence
            One a matrix.

        Raises
        ------
        IndexError
            If there is no such example.
        ValueError
            If the group is empty.
        """
        members = self._members(group)
        return tuple(self._influence(i, torch.isin(state.example, members)) for i, state in enumerate(self.states))

    def without(self, group: int | Sequence[int]) -> tuple[Tensor, ...]:
        """The edit without a group, V₋e, shape (k, n), one a matrix."""
        return tuple(state.solution.edit - part.coordinates() for state, part in zip(self.states, self.influence(group), strict=True))

    def norms(self) -> Tensor:
        r"""Norm :math:`\|P - P_{-e}\|_F` of each example's influence, all of them in one pass.

        Returns
        -------
        Tensor, shape (matrices, examples), float64
        """
        found = torch.zeros(len(self.states), len(self.names), dtype=torch.float64)
        for i, state in enumerate(self.states):
            z, residual = self._scaled_keys[i], self._residuals[i]
            weighted = residual if state.left is None else residual @ (state.left.T @ state.left)
            order = torch.argsort(state.example, stable=True)
            sizes = torch.bincount(state.example, minlength=len(self.names))
            starts = sizes.cumsum(0) - sizes
            for size in sizes.unique().tolist():
                if not size:
                    continue
                # Examples with as many token positions go through together, as one batched computation.
                members = torch.nonzero(sizes == size).flatten()
                rows = order[starts[members, None] + torch.arange(size)]
                x, zb, e, ge = state.keys[rows], z[rows], residual[rows], weighted[rows]
                c = state.solution.forget_scale
                core = torch.eye(size, dtype=torch.float64) - c * (zb @ x.mT)
                # ‖U Q Z‖² = tr(Qᵀ Uᵀ U Q · Z Zᵀ) with Q = c Eᵀ core⁻¹
                right = torch.linalg.solve(core, zb @ zb.mT)
                left = torch.linalg.solve(core.mT, e @ ge.mT)
                found[i, members] = c * torch.einsum("bij,bji->b", left, right).clamp(min=0).sqrt()
        return found

    def ranking(self) -> list[tuple[str, float]]:
        """Examples by the norm of their influence over all matrices, largest first.

        Returns
        -------
        list of (str, float)
        """
        totals = self.norms().square().sum(0).sqrt()
        order = torch.argsort(totals, descending=True)
        return [(self.names[i], totals[i].item()) for i in order.tolist()]

    def _members(self, group: int | Sequence[int]) -> Tensor:
        members = torch.tensor([group] if isinstance(group, int) else list(group), dtype=torch.int64)
        if not len(members):
            raise ValueError("the group has no examples")
        wrong = [i for i in members.tolist() if not 0 <= i < len(self.names)]
        if wrong:
            raise IndexError(f"unknown example {wrong[0]}: the edit has examples 0 to {len(self.names) - 1}")
        return members

    def _influence(self, i: int, rows: Tensor) -> Influence:
        state, c = self.states[i], self.states[i].solution.forget_scale
        z = self._scaled_keys[i][rows]
        hat = c * (z @ state.keys[rows].T)
        core = torch.eye(len(hat), dtype=torch.float64) - hat
        middle = c * torch.linalg.solve(core.T, self._residuals[i][rows]).T
        leverage = torch.linalg.eigvalsh((hat + hat.T) / 2).max().item()
        return Influence(state.module, state.left, middle, z, leverage)
