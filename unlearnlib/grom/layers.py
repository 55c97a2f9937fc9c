r"""Layer selection: the direct effect of each layer's MLP output on the gold tokens, read through the logit lens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ..examples import Batch
from .anatomy import Anatomy, unembedding


@torch.no_grad()
def direct_effect(model: nn.Module, batches: Sequence[Batch], alpha: Tensor | None = None) -> Tensor:
    r"""Mean direct effect of each layer's MLP output on the logit of the gold token.

    The MLP's output goes through the final norm, linearised with the scale of the *actual* final residual, and onto the gold token's row
    of the unembedding minus the mean row.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    batches : sequence of Batch
    alpha : Tensor, shape (vocab,), optional
        Weight of each gold token in the mean, :math:`\alpha_v`; equal weights by default.

    Returns
    -------
    Tensor, shape (layers,), float64
        In logits.

    Raises
    ------
    ValueError
        If all weights are 0.

    Notes
    -----
    The paper gives the idea, not the normalisation: this one is ours.
    """
    anatomy = Anatomy(model)
    gain, centred = _norm_gain(anatomy.norm, unembedding(model).shape[1])
    mean_row = _wide(unembedding(model)).mean(0)
    total, weight = torch.zeros(len(anatomy.layers), dtype=torch.float64), 0.0
    for batch in batches:
        outputs, residual = _mlp_outputs(anatomy, batch)
        if centred:
            outputs, residual = (tensor - tensor.mean(-1, keepdim=True) for tensor in (outputs, residual))
        scale = gain / (residual.square().mean(-1, keepdim=True) + _epsilon(anatomy.norm)).sqrt()
        direction = scale * (_wide(unembedding(model)[batch.gold]) - mean_row)
        effects = (outputs * direction).sum(-1).double()
        weights = torch.ones(len(batch.gold), dtype=torch.float64) if alpha is None else alpha[batch.gold.cpu()].double()
        total += effects.cpu() @ weights
        weight += weights.sum().item()
    if weight == 0:
        raise ValueError("the weight α of every gold token is 0: there is nothing to attribute")
    return total / weight


def attribution(model: nn.Module, forget: Sequence[Batch], retain: Sequence[Batch], alpha: Tensor) -> Tensor:
    r"""Score :math:`S_\ell = F_\ell - R_\ell` of each layer: its effect on the forget gold tokens, α-weighted, minus on the retain ones.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    forget, retain : sequence of Batch
    alpha : Tensor, shape (vocab,)
        From :func:`~unlearnlib.grom.targets.specificity`.

    Returns
    -------
    Tensor, shape (layers,), float64
        In logits.
    """
    return direct_effect(model, forget, alpha) - direct_effect(model, retain)


def select_band(scores: Tensor, width: int, late: float = 0.5) -> tuple[int, ...]:
    """The contiguous window of layers with the highest mean score, among the late layers.

    Parameters
    ----------
    scores : Tensor, shape (layers,)
    width : int
        Number of layers of the band.
    late : float
        Windows start at this fraction of the depth at the earliest.

    Returns
    -------
    tuple of int

    Raises
    ------
    ValueError
        If no such window exists.
    """
    first = math.ceil(late * len(scores))
    if not 0 <= late <= 1 or not 1 <= width <= len(scores) - first:
        raise ValueError(f"no window of {width} layers starts after {late:.0%} of a model of {len(scores)} layers: change width or late")
    means = scores[first:].unfold(0, width, 1).mean(-1)
    start = first + int(means.argmax())
    return tuple(range(start, start + width))


def _mlp_outputs(anatomy: Anatomy, batch: Batch) -> tuple[Tensor, Tensor]:
    """MLP output of each layer, shape (layers, gold, hidden), and final residual, shape (gold, hidden), at the gold positions."""
    outputs, residual = {}, []

    def note(layer: int):
        return lambda _module, _inputs, output: outputs.__setitem__(layer, _wide(output[batch.rows, batch.columns]))

    with ExitStack() as stack:
        for layer in range(len(anatomy.layers)):
            stack.callback(anatomy.mlp_output(layer).register_forward_hook(note(layer)).remove)
        before_norm = anatomy.norm.register_forward_pre_hook(
            lambda _module, inputs: residual.append(_wide(inputs[0][batch.rows, batch.columns]))
        )
        stack.callback(before_norm.remove)
        anatomy.base(**batch.inputs(), use_cache=False)
    return torch.stack([outputs[layer] for layer in range(len(anatomy.layers))]), residual[0]


def _norm_gain(norm: nn.Module, width: int) -> tuple[Tensor, bool]:
    """Elementwise gain of the final norm, and whether it subtracts the mean."""
    if isinstance(norm, nn.LayerNorm):
        return _wide(norm.weight.detach()), True
    # An RMS norm maps the vector of ones to its gain, whether it is kept as γ or as γ − 1.
    return _wide(norm(torch.ones(1, width, dtype=norm.weight.dtype, device=norm.weight.device)).flatten()), False


def _wide(tensor: Tensor) -> Tensor:
    """In float32, or wider if it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _epsilon(norm: nn.Module) -> float:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
