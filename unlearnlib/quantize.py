"""Four-bit weights as float32 round trips: what a model says once its weights were rounded, and how much of an update is left.

A round trip quantises a weight and takes it back to float32, so that the model computes with the very values that a 4-bit file holds,
and with nothing else changed. Double quantisation of the scales and 4-bit arithmetic are not imitated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor, nn
from torch.nn import functional

from .grom.anatomy import Anatomy, is_transposed, weight_view

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 levels of 4-bit NormalFloat: quantiles of a normal distribution, scaled to [−1, 1] (Dettmers et al., 2023, appendix E)."""


@dataclass(frozen=True)
class Scheme:
    """A way to round a matrix to 4 bits, block by block; calling it gives the round trip.

    Attributes
    ----------
    name : str
        Its key in :data:`SCHEMES`.
    encode : callable
        ``encode(blocks)`` gives codes and rounded values, both of shape (number of blocks, entries of a block).
    block : int
        Entries that share a scale.
    across_rows : bool
        Whether blocks run on from one row to the next. A last block that isn't full is then a block of its own; otherwise the number of
        columns must be a multiple of `block`.
    """

    name: str
    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    block: int
    across_rows: bool = False

    def round_trip(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and rounded values of a matrix.

        Parameters
        ----------
        weight : Tensor, shape (out, in)
            Of any floating-point type; it is taken to float32 first.

        Returns
        -------
        codes : Tensor of uint8 or int8, shape (out, in)
        values : Tensor of float32, shape (out, in)

        Raises
        ------
        ValueError
            If the weight isn't a matrix, its columns can't be split into blocks, or an entry isn't finite or is too large for the scheme.
        """
        if weight.ndim != 2 or not weight.numel():
            raise ValueError(f"{self.name} rounds matrices, got a tensor of shape {tuple(weight.shape)}")
        if self.block < 1:
            raise ValueError(f"a block has at least 1 entry, got {self.block}")
        if not self.across_rows and weight.shape[1] % self.block:
            raise ValueError(f"{self.name} needs a multiple of {self.block} columns, got shape {tuple(weight.shape)}")
        flat = weight.detach().float().reshape(-1)
        if not torch.isfinite(flat).all():
            raise ValueError("the weight has NaN or infinite entries")
        blocks = functional.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)
        codes, values = (part.reshape(-1)[: len(flat)].view(weight.shape) for part in self.encode(blocks))
        if not torch.isfinite(values).all():
            raise ValueError(f"a weight of {flat.abs().max().item():g} is too large for {self.name}, whose scales are float16")
        return codes, values

    def __call__(self, weight: Tensor) -> Tensor:
        """The rounded values alone, see :meth:`round_trip`."""
        return self.round_trip(weight)[1]


def nf4(weight: Tensor, block: int = 64) -> Tensor:
    """Round trip through 4-bit NormalFloat, in the layout and with the arithmetic of bitsandbytes.

    Parameters
    ----------
    weight : Tensor, shape (out, in)
    block : int
        Entries that share a scale, the largest magnitude among them; blocks run on from one row to the next.

    Returns
    -------
    Tensor of float32, shape (out, in)

    Raises
    ------
    ValueError
        See :meth:`Scheme.round_trip`.
    """
    return replace(SCHEMES["nf4"], block=block)(weight)


def rtn_int4(weight: Tensor, group: int = 64) -> Tensor:
    r"""Round trip by symmetric round-to-nearest, :math:`s \cdot \mathrm{round}(w / s)` with :math:`s = \max|w| / 7` in each group.

    Parameters
    ----------
    weight : Tensor, shape (out, in)
    group : int
        Neighbouring entries of a row that share a scale, which stays float32. Halves go to the even code.

    Returns
    -------
    Tensor of float32, shape (out, in)

    Raises
    ------
    ValueError
        See :meth:`Scheme.round_trip`.
    """
    return replace(SCHEMES["rtn_int4"], block=group)(weight)


def q4_0(weight: Tensor) -> Tensor:
    """Round trip through llama.cpp's Q4_0: blocks of 32 in a row, a float16 scale, codes −8 to 7; see :meth:`Scheme.round_trip`."""
    return SCHEMES["q4_0"](weight)


def q4_1(weight: Tensor) -> Tensor:
    """Round trip through llama.cpp's Q4_1: blocks of 32 in a row, a float16 scale and minimum; see :meth:`Scheme.round_trip`."""
    return SCHEMES["q4_1"](weight)


def _encode_nf4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    levels = torch.tensor(NF4, device=blocks.device)
    largest = blocks.abs().amax(1, keepdim=True)
    # Times the reciprocal, not divided: at a midpoint between two levels this decides, and bitsandbytes does it so.
    scaled = (blocks * (1 / largest.clamp(min=1e-38))).clamp(-1, 1)
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    return codes.to(torch.uint8), levels[codes] * largest


def _encode_rtn(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scale = (blocks.abs().amax(1, keepdim=True) / 7).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (blocks / scale).round()
    return codes.to(torch.int8), codes * scale


def _encode_gguf(blocks: Tensor, kind: GGMLQuantizationType) -> tuple[Tensor, Tensor]:
    # One long row: gguf loops over rows in Python, and a block never looks beyond itself.
    with np.errstate(over="ignore", invalid="ignore"):
        packed = quants.quantize(blocks.cpu().numpy().reshape(1, -1), kind)
        values = torch.from_numpy(quants.dequantize(packed, kind))
    # A block's bytes are its scales, then 16 bytes with the code of entry i in the low and of entry i + 16 in the high half.
    halves = torch.from_numpy(packed).view(len(blocks), -1)[:, -16:]
    codes = torch.cat([halves & 15, halves >> 4], 1)
    return codes.to(blocks.device), values.view_as(blocks).to(blocks.device)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("nf4", _encode_nf4, 64, across_rows=True),
        Scheme("rtn_int4", _encode_rtn, 64),
        Scheme("q4_0", partial(_encode_gguf, kind=GGMLQuantizationType.Q4_0), 32),
        Scheme("q4_1", partial(_encode_gguf, kind=GGMLQuantizationType.Q4_1), 32),
    )
}
"""The schemes by name, with the block sizes in use: 64 for NF4 and round-to-nearest, 32 for the two formats of llama.cpp."""


def on_grid(weight: Tensor, scheme: str | Scheme) -> float:
    """Share of a matrix's entries that a round trip leaves exactly as they are.

    1 for a weight that was read from a file of that scheme: rounding it again takes back every change that is small against the grid. So a
    model distributed in a 4-bit format, like the embedded one, says nothing about that very format. An ordinary weight has a
    few such entries, those that set their block's scale.

    Parameters
    ----------
    weight : Tensor, shape (out, in)
    scheme : str or Scheme
        A key of :data:`SCHEMES`, or a scheme with other settings.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If the scheme is unknown, and see :meth:`Scheme.round_trip`.
    """
    return (_scheme(scheme)(weight) == weight.detach().float()).double().mean().item()


def block_weights(model: nn.Module, *, head: bool = False) -> dict[str, Tensor]:
    """The weights that 4-bit quantisation rounds: those of all linear layers in the transformer blocks.

    Embedding, norms, biases and LM head keep their precision, as with bitsandbytes in transformers, which leaves the head and whatever is
    tied to it alone. llama.cpp gives these two more bits than the rest.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In evaluation mode, of a kind that :class:`~unlearnlib.grom.anatomy.Anatomy` knows.
    head : bool
        Whether the LM head is one of them, as where an edit of the head is to be looked at. A tied head is the input embedding too.

    Returns
    -------
    dict of str to Tensor, each of shape (out, in)
        By the parameter's name: views whose changes the model sees, transposed where the model keeps (in, out).
    """
    anatomy = Anatomy(model)
    linear = [part for layer in anatomy.layers for part in layer.modules() if isinstance(part, nn.Linear) or is_transposed(part)]
    return {f"{anatomy.name(module)}.weight": weight_view(module) for module in linear + [anatomy.head] * head}


@contextmanager
def quantized(model: nn.Module, scheme: str | Scheme, *, head: bool = False) -> Iterator[nn.Module]:
    """Context in which a model's linear weights are rounded to 4 bits; on leaving it has its exact original bits again.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In evaluation mode. Its type is kept: rounded values are cast to it.
    scheme : str or Scheme
        A key of :data:`SCHEMES`, or a scheme with other settings.
    head : bool
        See :func:`block_weights`.

    Yields
    ------
    torch.nn.Module
        The model.

    Raises
    ------
    ValueError
        If the scheme is unknown or can't round a weight, which is named; the model is as it was then.
    """
    scheme, originals = _scheme(scheme), []
    try:
        for name, weight in block_weights(model, head=head).items():
            values = _named(scheme, name, weight)[1]
            originals.append((weight, weight.clone()))
            weight.copy_(values)
        yield model
    finally:
        for weight, original in reversed(originals):
            weight.copy_(original)


@dataclass(frozen=True)
class MatrixSurvival:
    r"""What quantisation leaves of one matrix's update, :math:`\Delta` before it and :math:`\Delta_Q = Q(W + \Delta) - Q(W)` after it.

    Attributes
    ----------
    name : str
    squared_norm : float
        :math:`\|\Delta\|^2`.
    overlap : float
        :math:`\langle\Delta_Q, \Delta\rangle`.
    surviving_squared_norm : float
        :math:`\|\Delta_Q\|^2`.
    rank, surviving_rank : int
        Numerical ranks of Δ and of Δ_Q.
    codes_changed, entries : int
        How many entries have another code after the update, of how many.
    """

    name: str
    squared_norm: float
    overlap: float
    surviving_squared_norm: float
    rank: int
    surviving_rank: int
    codes_changed: int
    entries: int


@dataclass(frozen=True)
class Survival:
    """What quantisation leaves of a model's update; the properties are None where no matrix was changed.

    Attributes
    ----------
    matrices : tuple of MatrixSurvival
        The changed ones only.
    """

    matrices: tuple[MatrixSurvival, ...]

    def _total(self, field: str) -> float:
        return sum(getattr(matrix, field) for matrix in self.matrices)

    @property
    def kept(self) -> float | None:
        r"""Share of the update that is left in its own direction, :math:`\langle\Delta_Q, \Delta\rangle / \|\Delta\|^2` over all matrices.

        0 is an update undone. Entries of an ordinary base lie anywhere between two levels, so that even changes far smaller than a step
        come through on average, in a few entries that jump by a whole step: this is near 1 then, and :attr:`norm_ratio` tells at what
        price. A base that lies on the grid itself (:func:`on_grid`) takes such changes back, and this is near 0.
        """
        return self._total("overlap") / self._total("squared_norm") if self.matrices else None

    @property
    def norm_ratio(self) -> float | None:
        r""":math:`\|\Delta_Q\| / \|\Delta\|` over all matrices; ``kept / norm_ratio`` is their cosine, 1 without noise."""
        return (self._total("surviving_squared_norm") / self._total("squared_norm")) ** 0.5 if self.matrices else None

    @property
    def codes_changed(self) -> float | None:
        """Share of the changed matrices' entries that have another code after the update."""
        return self._total("codes_changed") / self._total("entries") if self.matrices else None

    @property
    def rank(self) -> float | None:
        """Numerical rank of the update, mean over the changed matrices."""
        return self._total("rank") / len(self.matrices) if self.matrices else None

    @property
    def surviving_rank(self) -> float | None:
        """Numerical rank of what is left of the update, mean over the changed matrices."""
        return self._total("surviving_rank") / len(self.matrices) if self.matrices else None


def update_survival(
    base: Mapping[str, Tensor], edited: Mapping[str, Tensor], scheme: str | Scheme, *, rank_tolerance: float = 0.01
) -> Survival:
    """How much of an update of weights is left once both base and edited model are quantised.

    Parameters
    ----------
    base, edited : mapping of str to Tensor, each of shape (out, in)
        Weights before and after the update, :func:`block_weights` of the two models for instance. They are looked at one by one, so that a
        mapping may read them from a file; every name of `edited` must be in `base`, which may have more.
    scheme : str or Scheme
        A key of :data:`SCHEMES`, or a scheme with other settings.
    rank_tolerance : float
        Singular values below this share of the largest don't count as rank; 1e-6 at least. It should be well above what rounding of
        the edited weights to their own type leaves in every direction.

    Returns
    -------
    Survival

    Raises
    ------
    ValueError
        If a name is missing, shapes differ, the scheme is unknown or can't round a weight, or the tolerance is out of range.
    """
    scheme = _scheme(scheme)
    if not 1e-6 <= rank_tolerance < 1:
        raise ValueError(f"rank_tolerance must be at least 1e-6 and below 1, got {rank_tolerance}")
    absent = [name for name in edited if name not in base]
    if absent:
        raise ValueError(f"the base has no {absent[0]!r}" + (f", nor {len(absent) - 1} more" if absent[1:] else ""))
    found = []
    for name in edited:
        before, after = base[name].detach(), edited[name].detach()
        if before.shape != after.shape:
            raise ValueError(f"{name}: shape {tuple(after.shape)} in the edited model, {tuple(before.shape)} in the base")
        if torch.equal(before, after):
            continue
        update = after.double() - before.double()
        (codes, values), (new_codes, new_values) = (_named(scheme, name, weight) for weight in (before, after))
        left = new_values.double() - values.double()
        found.append(
            MatrixSurvival(
                name,
                squared_norm=update.square().sum().item(),
                overlap=(left * update).sum().item(),
                surviving_squared_norm=left.square().sum().item(),
                rank=_rank(update, rank_tolerance),
                surviving_rank=_rank(left, rank_tolerance),
                codes_changed=int((codes != new_codes).sum()),
                entries=update.numel(),
            )
        )
    return Survival(tuple(found))


def _rank(matrix: Tensor, tolerance: float) -> int:
    """Number of singular values above `tolerance` times the largest, from the smaller Gram matrix; 0 for a zero matrix."""
    gram = matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix
    squares = torch.linalg.eigvalsh(gram)
    return int((squares > tolerance**2 * squares[-1]).sum())


def _named(scheme: Scheme, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    try:
        return scheme.round_trip(weight)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _scheme(scheme: str | Scheme) -> Scheme:
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        raise ValueError(f"unknown scheme {scheme!r}: use {', '.join(SCHEMES)}")
    return SCHEMES[scheme]
