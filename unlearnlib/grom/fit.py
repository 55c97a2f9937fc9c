"""Fitting an edit on token ids: collect keys, solve, edit, matrix after matrix."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ..examples import Batch, Example, batches
from .anatomy import HEAD, Anatomy, unembedding, weight_view
from .audit import FitState
from .edit import Edit, MatrixEdit, fingerprint, weight_fingerprint
from .keys import BandStates, check_band, collect_keys
from .ridge import RidgeFitter
from .targets import Targets, corruption, specificity, suppression


@dataclass(frozen=True)
class FitSettings:
    r"""What determines a fit besides model and data.

    Attributes
    ----------
    layers : tuple of int or "head"
        What is edited: a contiguous band of layers, the LM head, or a band and then the head.
    strength : float
        β of a suppression, c of a corruption.
    target : {"suppress", "corrupt"}
        Token suppression or representation corruption (MLP layers only).
    retain_weight, forget_weight : float
        :math:`w_r`, :math:`w_f`.
    ridge : float
        ρ, :math:`\mu = \rho\cdot\mathrm{mean}(\mathrm{diag} A)`.
    head_strength : float, optional
        β of the head, where it is edited after a band; `strength` by default.
    seed : int
        Of the corruption direction.
    batch_size : int
        Examples a forward pass; changes no result.
    padding_side : {"right", "left"}
        Changes no result either.
    """

    layers: tuple[int | str, ...]
    strength: float
    target: str = "suppress"
    retain_weight: float = 100.0
    forget_weight: float = 1.0
    ridge: float = 0.03
    head_strength: float | None = None
    seed: int = 0
    batch_size: int = 16
    padding_side: str = "right"

    def __post_init__(self):
        if not self.layers:
            raise ValueError("layers is empty: name a band of layers, or 'head'")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}")
        if self.padding_side not in ("right", "left"):
            raise ValueError(f"padding_side must be right or left, got {self.padding_side!r}")
        if self.target not in ("suppress", "corrupt"):
            raise ValueError(f"target must be suppress or corrupt, got {self.target!r}")
        for name in ("retain_weight", "forget_weight", "ridge"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number ≥ 0, got {getattr(self, name)}")
        for name in ("strength", "head_strength"):
            number = getattr(self, name)
            if number is not None and not 0 < number < float("inf"):
                raise ValueError(f"{name} must be a finite number > 0, got {number}: an edit of strength 0 does nothing")
        if HEAD in self.layers[:-1]:
            raise ValueError("the head comes last among layers: its keys are those after the band's edits")
        if self.target == "corrupt" and HEAD in self.layers:
            raise ValueError("representation corruption edits MLP outputs, not the head")


class FitData:
    """A model with its forget and retain examples, on which edits of several settings can be fitted.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Left as it was by every fit.
    forget, retain : sequence of Example
    alpha_source : sequence of Example, optional
        Where the retain frequencies of the specificity α come from; `retain` by default.
    states_dtype, states_folder
        How hidden states are kept between layers, see :class:`~unlearnlib.grom.keys.BandStates`.
    progress : bool
        Whether to show progress bars.

    Raises
    ------
    ValueError
        If a set is empty or has token ids outside the vocabulary, or the model is in training mode.
    """

    def __init__(
        self,
        model: nn.Module,
        forget: Sequence[Example],
        retain: Sequence[Example],
        *,
        alpha_source: Sequence[Example] | None = None,
        states_dtype: torch.dtype | None = None,
        states_folder: str | None = None,
        progress: bool = False,
    ):
        source = retain if alpha_source is None else alpha_source
        for name, examples in (("forget", forget), ("retain", retain), ("alpha_source", source)):
            if not examples:
                raise ValueError(f"the {name} set is empty")
        self.model, self.forget, self.retain = model, list(forget), list(retain)
        self.anatomy, self.progress = Anatomy(model), progress
        self._states_dtype, self._states_folder = states_dtype, states_folder
        vocab_size = len(unembedding(model))
        for name, examples in (("forget", self.forget), ("retain", self.retain), ("alpha_source", source)):
            _check_tokens(examples, vocab_size, name)
        self.forget_gold = _gold(self.forget)
        self.alpha = specificity(self.forget_gold, _gold(source), vocab_size)
        self._entrance: tuple[tuple, list[BandStates]] | None = None

    def batches(self, settings: FitSettings) -> tuple[list[Batch], list[Batch]]:
        """Forget and retain batches."""
        options = {
            "batch_size": settings.batch_size,
            "padding_side": settings.padding_side,
            "device": unembedding(self.model).device,
        }
        return batches(self.forget, **options), batches(self.retain, **options)

    def fit(self, settings: FitSettings, *, keep_audit: bool = False) -> Edit:
        """Fit the edit, one matrix after another, each on keys collected after the edits before it.

        Parameters
        ----------
        settings : FitSettings
        keep_audit : bool
            Whether the edit is to carry what its audit needs: a factor of n×n and the forget keys, a matrix.

        Returns
        -------
        Edit
            The model itself is left as it was.

        Raises
        ------
        IndexError, ValueError
            If a layer is unknown, a weight or key is not finite, or nothing can be suppressed.
        IllConditionedError
            If the normal equations are hopeless.
        """
        band = tuple(where for where in settings.layers if where != HEAD)
        if band:
            check_band(self.anatomy, band)
        for where in settings.layers:
            self.anatomy.check_weight(where)
        targets = {where: self.targets(settings, where) for where in settings.layers}
        groups = self.batches(settings)
        states = self._states(band, groups, settings) if band else ()
        matrices, audits = [], []
        with ExitStack() as stack:
            for where in settings.layers:
                forget_keys, retain_keys = (
                    (collect_keys(self.model, group, HEAD, progress=self.progress) for group in groups)
                    if where == HEAD
                    else (part.keys(where) for part in states)
                )
                matrix, audit = self._fit_matrix(where, targets[where], groups[0], forget_keys, retain_keys, settings, keep_audit)
                matrices.append(matrix)
                audits += audit
                if where != settings.layers[-1]:
                    stack.callback(Edit((matrix,)).apply(self.model).revert)
                    if where != band[-1]:
                        for part in states:
                            part.advance(where)
        key = secrets.token_bytes(32)
        prints = tuple(fingerprint(example, key) for example in self.forget)
        return Edit(tuple(matrices), asdict(settings) | {"layers": list(settings.layers)}, prints, key, tuple(audits))

    def targets(self, settings: FitSettings, where: int | str) -> Targets:
        """Target shifts of the forget outputs of one matrix.

        Raises
        ------
        NoSpecificTokensError
            If nothing can be suppressed: the edit would do nothing.
        """
        if settings.target == "corrupt":
            return corruption(len(weight_view(self.anatomy.edited(where))), settings.strength, settings.seed)
        if where == HEAD:
            strength = settings.strength if settings.head_strength is None else settings.head_strength
            return suppression(self.forget_gold, self.alpha, strength, None)
        return suppression(self.forget_gold, self.alpha, settings.strength, unembedding(self.model))

    def _states(self, band: tuple[int, ...], groups: tuple[list[Batch], list[Batch]], settings: FitSettings) -> list[BandStates]:
        """States entering the band; those of the band fitted last are remembered, since only what comes after them depends on its edits."""
        above = {id(weight) for layer in self.anatomy.layers[band[0] :] for weight in layer.parameters()}
        # Another edit, or a change of type, may have come in between: the counter grows with every change of a weight in place.
        below = [weight for weight in self.anatomy.base.parameters() if id(weight) not in above]
        state = tuple((weight.data_ptr(), weight.dtype, weight._version) for weight in below)
        how = (band, settings.batch_size, settings.padding_side, state)
        options = {"dtype": self._states_dtype, "folder": self._states_folder, "progress": self.progress}
        if self._states_folder is not None:
            return [BandStates(self.model, group, band, **options) for group in groups]
        if self._entrance is None or self._entrance[0] != how:
            self._entrance = how, [BandStates(self.model, group, band, **options) for group in groups]
        return [part.copy() for part in self._entrance[1]]

    def _fit_matrix(
        self,
        where: int | str,
        targets: Targets,
        forget_batches: list[Batch],
        forget_keys: Iterator[Tensor],
        retain_keys: Iterator[Tensor],
        settings: FitSettings,
        keep_audit: bool,
    ) -> tuple[MatrixEdit, list[FitState]]:
        module = self.anatomy.edited(where)
        out_features, in_features = weight_view(module).shape
        fitter = RidgeFitter(in_features, targets.rank, device=module.weight.device)
        kept = []
        for batch, keys in zip(forget_batches, forget_keys, strict=True):
            codes, values = targets.coordinates(batch.gold.cpu())
            fitter.update_forget(keys, (codes, values))
            if keep_audit:
                kept.append((keys.double().cpu(), codes, values, batch.example.cpu()))
        for keys in retain_keys:
            fitter.update_retain(keys)
        solution = fitter.solve(retain_weight=settings.retain_weight, forget_weight=settings.forget_weight, ridge=settings.ridge)
        rows = targets.tokens if targets.basis is None else None
        base = weight_fingerprint(module.weight)
        matrix = MatrixEdit(self.anatomy.name(module), solution.edit.cpu(), targets.basis, rows, out_features, base)
        if not keep_audit:
            return matrix, []
        names = tuple(example.name or f"example {i}" for i, example in enumerate(self.forget))
        columns = (torch.cat(parts) for parts in zip(*kept, strict=True))
        return matrix, [FitState(matrix.module, solution.cpu(), targets.basis, *columns, names)]


def _gold(examples: Sequence[Example]) -> Tensor:
    return torch.tensor([token for example in examples for token in example.answer])


def _check_tokens(examples: Sequence[Example], vocab_size: int, name: str) -> None:
    if not all(0 <= token < vocab_size for example in examples for token in example.prompt + example.answer):
        raise ValueError(f"the {name} set has token ids outside the model's vocabulary of {vocab_size}: is it the model's own tokenizer?")
