"""The edit as an object: frozen low-rank factors that can be applied, reverted to the bit, saved, and exported as a LoRA adapter."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..examples import Example
from .anatomy import is_tied, is_transposed, tie, untie, weight_view
from .audit import Audit, FitState

_FORMAT = 1


@dataclass(frozen=True)
class MatrixEdit:
    r"""Low-rank edit of one weight matrix, :math:`W \leftarrow W + P` with :math:`P = U V`.

    Attributes
    ----------
    module : str
        Dotted name of the module whose weight is edited.
    right : Tensor, shape (k, n), float64
        V.
    left : Tensor, shape (m, k), float64, or None
        U. None where P only changes some rows.
    rows : Tensor of int64, shape (k,), or None
        Those rows, where `left` is None: P is V there and zero elsewhere.
    out_features : int
        m.
    base : str
        Fingerprint of the weight that the edit was fitted on, see :func:`weight_fingerprint`; empty if it isn't known.
    """

    module: str
    right: Tensor
    left: Tensor | None
    rows: Tensor | None
    out_features: int
    base: str = ""

    @property
    def rank(self) -> int:
        """Number k of factors, an upper bound of the rank of P."""
        return len(self.right)

    def dense(self) -> Tensor:
        """P, shape (m, n), float64."""
        if self.left is not None:
            return self.left @ self.right
        dense = torch.zeros(self.out_features, self.right.shape[1], dtype=torch.float64)
        dense[self.rows] = self.right
        return dense

    def norm(self) -> float:
        """Frobenius norm of P, without forming it."""
        return squared_norm(self.left, self.right) ** 0.5

    def scaled(self, factor: float) -> MatrixEdit:
        """The edit ``factor * P``; exactly the fit of a strength `factor` times larger, since P is linear in the strength."""
        return replace(self, right=factor * self.right)

    def add_to(self, weight: Tensor) -> None:
        """Add P to a weight of shape (m, n) in place: the sum is taken in float64 and rounded once to the weight's type."""
        if self.left is not None:
            weight.copy_(weight.double() + (self.left @ self.right).to(weight.device))
        else:
            rows = self.rows.to(weight.device)
            weight[rows] = (weight[rows].double() + self.right.to(weight.device)).to(weight.dtype)


def squared_norm(left: Tensor | None, right: Tensor) -> float:
    """Squared Frobenius norm of ``left @ right`` from the k×k Grams of its factors; `left` None stands for distinct unit columns."""
    gram = right @ right.T
    return gram.trace().item() if left is None else ((left.T @ left) * gram).sum().item()


@dataclass(frozen=True)
class Edit:
    """A frozen edit of a model: one :class:`MatrixEdit` a matrix, the settings it was fitted with, and fingerprints of its data.

    Attributes
    ----------
    matrices : tuple of MatrixEdit
    settings : dict
        Everything that determines the fit besides data and model.
    fingerprints : tuple of str
        HMAC-SHA256 of each forget example under `key`: with the key, and only with it, one can check that an example was part of the
        request (:meth:`covers`); without it a stored edit doesn't let its data be guessed by hashing candidates.
    key : bytes or None
        The secret of the fingerprints. Not saved with the edit; keep it apart.
    states : tuple of FitState
        What the audit needs, one a matrix; empty where it was not kept.
    """

    matrices: tuple[MatrixEdit, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    fingerprints: tuple[str, ...] = ()
    key: bytes | None = None
    states: tuple[FitState, ...] = ()

    def covers(self, example: Example, key: bytes | None = None) -> bool:
        """Whether an example was in the forget set, by its fingerprint.

        Raises
        ------
        ValueError
            If neither `key` is given nor the edit still has its own.
        """
        key = key or self.key
        if key is None:
            raise ValueError("the key of the fingerprints is needed: it is not saved with the edit")
        return fingerprint(example, key) in self.fingerprints

    def norm(self) -> float:
        """Frobenius norm of all edits together."""
        return sum(matrix.norm() ** 2 for matrix in self.matrices) ** 0.5

    def audit(self) -> Audit:
        """The exact influence of each forget example on each edited matrix.

        Raises
        ------
        ValueError
            If the edit was fitted or loaded without what an audit needs.
        """
        if not self.states:
            raise ValueError("this edit carries no audit data: fit it with keep_audit=True, and save it with audit=True")
        return Audit(self.states)

    def check(self, model: nn.Module) -> None:
        """See whether the edit fits a model, before anything is changed.

        Raises
        ------
        ValueError
            If the model lacks an edited module, or its shape differs.

        Warns
        -----
        UserWarning
            If a weight isn't the one that the edit was fitted on.
        """
        for matrix in self.matrices:
            weight = _checked_module(model, matrix).weight
            if matrix.base and matrix.base != weight_fingerprint(weight):
                warnings.warn(
                    f"{matrix.module} isn't the weight that the edit was fitted on: another model, or one that is edited already?",
                    stacklevel=2,
                )

    def apply(self, model: nn.Module, *, originals: str | Path = "cpu") -> AppliedEdit:
        """Add the edit to a model's weights, in place; a tied head is untied first.

        Parameters
        ----------
        model : transformers.PreTrainedModel
        originals : "cpu" or path
            Where the one original of each edited matrix is kept for :meth:`AppliedEdit.revert`: in memory, or in a file in this folder.

        Returns
        -------
        AppliedEdit

        Raises
        ------
        ValueError
            If the model lacks an edited module or its shape differs; nothing is changed then.
        """
        return AppliedEdit(self, model, originals)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Context in which the model is edited; on leaving it has its exact original bits again."""
        handle = self.apply(model)
        try:
            yield model
        finally:
            handle.revert()

    def survival(self, model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, float]:
        r"""Fraction of each edit that is left once the weights are rounded to a floating-point type.

        With :math:`\Delta` the change of the rounded weights, this is :math:`\langle\Delta, P\rangle / \|P\|^2`: 1 when nothing is lost.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            Not edited.
        dtype : torch.dtype, optional
            The type to round to; the model's own by default.

        Returns
        -------
        dict of str to float
            By module name.
        """
        fractions = {}
        for matrix in self.matrices:
            weight = weight_view(_checked_module(model, matrix))
            # Of an edit of some rows, only these are looked at: a head has as many as the vocabulary.
            rows = weight if matrix.rows is None else weight[matrix.rows.to(weight.device)]
            before = rows.to(dtype or weight.dtype)
            wanted = (matrix.right if matrix.left is None else matrix.dense()).to(weight.device)
            change = (before.double() + wanted).to(before.dtype).double() - before.double()
            fractions[matrix.module] = ((change * wanted).sum() / wanted.square().sum()).item()
        return fractions

    def save(self, folder: str | Path, *, audit: bool = False) -> None:
        """Write the edit as ``edit.safetensors`` and ``edit.json`` into a new folder, whole or not at all.

        Parameters
        ----------
        folder : path
            Must not exist yet, or be empty.
        audit : bool
            Whether to write what :meth:`audit` needs too: a factor of n×n and the forget keys for each matrix, which tell of the forgotten
            text and should be protected like it.

        Raises
        ------
        FileExistsError
            If the folder holds something.
        ValueError
            If `audit` is asked for and the edit has no audit data.
        """
        if audit and not self.states:
            raise ValueError("audit=True, but this edit carries no audit data: fit it with keep_audit=True")
        tensors, described = {}, []
        for i, matrix in enumerate(self.matrices):
            parts = {"right": matrix.right, "left": matrix.left, "rows": matrix.rows}
            tensors |= {f"{i}.{name}": part.contiguous() for name, part in parts.items() if part is not None}
            described.append({"module": matrix.module, "out_features": matrix.out_features, "base": matrix.base})
        description = {"format": _FORMAT, "matrices": described, "settings": self.settings, "fingerprints": list(self.fingerprints)}
        with new_folder(folder) as scratch:
            save_file(tensors, scratch / "edit.safetensors")
            if audit:
                for i, state in enumerate(self.states):
                    state.save(scratch / f"audit-{i}.safetensors")
            (scratch / "edit.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Edit:
        """Read an edit that :meth:`save` wrote, with its audit data if they are there.

        Raises
        ------
        ValueError
            If a file isn't what :meth:`save` writes.
        FileNotFoundError
            If one is missing.
        """
        folder = Path(folder)
        described, stored = folder / "edit.json", folder / "edit.safetensors"
        try:
            description = json.loads(described.read_text(encoding="utf-8"))
            if description["format"] != _FORMAT:
                raise ValueError(f"{described}: field format: {description['format']!r}, this version reads {_FORMAT}")
            tensors = load_file(stored)
            matrices = tuple(
                MatrixEdit(
                    module=entry["module"],
                    right=tensors[f"{i}.right"],
                    left=tensors.get(f"{i}.left"),
                    rows=tensors.get(f"{i}.rows"),
                    out_features=entry["out_features"],
                    base=entry["base"],
                )
                for i, entry in enumerate(description["matrices"])
            )
            settings, fingerprints = description["settings"], tuple(description["fingerprints"])
        except json.JSONDecodeError as error:
            raise ValueError(f"{described}:{error.lineno}: not JSON: {error.msg}") from None
        except SafetensorError as error:
            raise ValueError(f"{stored}: not a whole safetensors file: {error}") from None
        except (KeyError, TypeError) as error:
            raise ValueError(f"{described} and its tensors are not what Edit.save writes: {type(error).__name__} {error}") from None
        audits = [folder / f"audit-{i}.safetensors" for i in range(len(matrices))]
        there = [path for path in audits if path.exists()]
        if there and len(there) < len(audits):
            raise ValueError(f"{folder}: audit data of some matrices are missing: {len(there)} of {len(audits)} files are there")
        states = tuple(FitState.load(path) for path in there)
        return cls(matrices, settings, fingerprints, None, states)

    def export_lora(self, folder: str | Path, model: nn.Module) -> None:
        """Write the edit as a PEFT LoRA adapter, exact up to the rounding of its factors to float32.

        Parameters
        ----------
        folder : path
            Must not exist yet, or be empty.
        model : transformers.PreTrainedModel
            The base model, not edited.

        Raises
        ------
        ValueError
            If the head is edited and the base is tied: merging such an adapter would change the input embedding too. Untie and save the
            base first (:func:`unlearnlib.grom.anatomy.untie`), and load the adapter onto that one.
        """
        tensors, ranks, transposed = {}, {}, set()
        for matrix in self.matrices:
            module = _checked_module(model, matrix)
            if module is model.get_output_embeddings() and is_tied(model):
                raise ValueError(
                    "the edit changes the LM head, which this model shares with its input embedding: merging an adapter there would change "
                    "both. Untie the model (unlearnlib.grom.anatomy.untie), save it as the adapter's base, and export against it"
                )
            left = matrix.left
            if left is None:
                left = torch.zeros(matrix.out_features, matrix.rank)
                left[matrix.rows, torch.arange(matrix.rank)] = 1.0
            tensors[f"base_model.model.{matrix.module}.lora_A.weight"] = matrix.right.float().contiguous()
            tensors[f"base_model.model.{matrix.module}.lora_B.weight"] = left.float().contiguous()
            ranks[matrix.module] = matrix.rank
            transposed.add(is_transposed(module))
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "base_model_name_or_path": model.config.name_or_path or None,
            # PEFT matches a list entry with the end of a module's name; these names are whole.
            "target_modules": sorted(ranks),
            "r": max(ranks.values()),
            "rank_pattern": ranks,
            "lora_alpha": max(ranks.values()),
            "alpha_pattern": ranks,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": transposed == {True},
        }
        with new_folder(folder) as scratch:
            save_file(tensors, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
            (scratch / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


class AppliedEdit:
    """An edit that is in a model's weights, with the originals to take it out again.

    Edits that are applied one on top of the other are reverted in the opposite order; :meth:`revert` refuses anything else.
    """

    def __init__(self, edit: Edit, model: nn.Module, originals: str | Path = "cpu"):
        edit.check(model)
        self._modules = [model.get_submodule(matrix.module) for matrix in edit.matrices]
        head = model.get_output_embeddings()
        self.model, self._tied = model, is_tied(model) and head in self._modules
        self._folder = None if originals == "cpu" else tempfile.TemporaryDirectory(dir=originals, prefix="originals-")
        # A head that was tied has its original in the embedding still.
        kept = [module for module in self._modules if not (self._tied and module is head)]
        self._originals = {module: self._keep(module.weight.detach(), i) for i, module in enumerate(kept)}
        for module in self._modules:
            module.__dict__.setdefault("_applied_edits", []).append(self)
        try:
            if self._tied:
                untie(model)
            for module, matrix in zip(self._modules, edit.matrices, strict=True):
                matrix.add_to(weight_view(module))
        except BaseException:
            self.revert()
            raise

    def _keep(self, weight: Tensor, i: int) -> Tensor | Path:
        copy = weight.to("cpu", copy=True)
        if self._folder is None:
            return copy
        path = Path(self._folder.name) / f"{i}.safetensors"
        save_file({"weight": copy.contiguous()}, path)
        return path

    def revert(self) -> None:
        """Put the exact original bits back. A second call does nothing.

        Raises
        ------
        RuntimeError
            If another edit was applied to one of the matrices afterwards and is still in.
        """
        if not self._modules:
            return
        if any(module._applied_edits[-1] is not self for module in self._modules):
            raise RuntimeError("a later edit is still applied to one of these matrices: revert that one first")
        for module, original in self._originals.items():
            module.weight.detach().copy_(load_file(original)["weight"] if isinstance(original, Path) else original)
        for module in self._modules:
            module._applied_edits.pop()
        if self._tied:
            tie(self.model)
        self._modules, self._originals = [], {}
        if self._folder is not None:
            self._folder.cleanup()


def _checked_module(model: nn.Module, matrix: MatrixEdit) -> nn.Module:
    try:
        module = model.get_submodule(matrix.module)
    except AttributeError:
        raise ValueError(f"the model has no module {matrix.module!r}, which the edit changes") from None
    shape = (matrix.out_features, matrix.right.shape[1])
    if weight_view(module).shape != shape:
        raise ValueError(f"{matrix.module}: the edit has shape {shape}, the model's weight {tuple(weight_view(module).shape)}")
    return module


def weight_fingerprint(weight: Tensor) -> str:
    """SHA-256, in hex, of a weight rounded to bfloat16, so that the same checkpoint is recognised in whatever precision it is loaded."""
    rounded = weight.detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(rounded.view(torch.int16).numpy().tobytes()).hexdigest()


def fingerprint(example: Example, key: bytes) -> str:
    """HMAC-SHA256, in hex, of an example's token ids under a key."""
    message = json.dumps([example.prompt, example.answer]).encode()
    return hmac.new(key, message, hashlib.sha256).hexdigest()


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Fill a folder under a temporary name and put it in place at the end, so that it is there whole or not at all.

    Raises
    ------
    FileExistsError
        If the folder exists and holds something.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already and is not an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.parent / f".{folder.name}-{secrets.token_hex(4)}"
    scratch.mkdir()
    try:
        yield scratch
        os.replace(scratch, folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
