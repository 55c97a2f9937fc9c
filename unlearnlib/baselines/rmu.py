"""RMU (Li et al., 2024), representation misdirection: training that sends the hidden states of what is to be forgotten astray."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..corpora import as_examples
from ..examples import Batch, Example, batches
from ..grom.anatomy import Anatomy, weight_view
from ..grom.targets import corruption
from ..metrics import bfloat16
from ..training import draw_batches, optimise

DEPTH = 2
"""How many layers below layer ℓ are trained as well."""


@dataclass(frozen=True)
class RmuSettings:
    """How a model is unlearned by RMU.

    Attributes
    ----------
    layer : int
        ℓ: hidden states are those that leave this layer; the MLP output matrices of layers ℓ − 2 to ℓ are trained, as far as they exist.
    strength : float
        c, the length of the state that forget positions are pushed to; in units of the residual stream.
    lr : float
        Peak of the learning rate; its course is that of :func:`~unlearnlib.training.optimise`.
    epochs : int
        Passes over the forget set.
    batch_size : int
        Forget examples a step, and as many retain examples; the whole set where it is smaller.
    retain_weight : float
        α.
    weight_decay : float
    seed : int
        Of the order, and of the direction u.
    template : {"auto", "chat", "plain"}
    system : str, optional
        How questions and answers become token ids, see :func:`~unlearnlib.examples.encode`; what is token ids already stays as it is.
    autocast : bool
        Whether passes are computed in bfloat16, see :func:`~unlearnlib.metrics.bfloat16`; the loss is float32 at least.

    Raises
    ------
    ValueError
        Naming the first setting that is out of range.
    """

    layer: int = 7
    strength: float = 6.5
    lr: float = 5e-5
    epochs: int = 1
    batch_size: int = 4
    retain_weight: float = 1200.0
    weight_decay: float = 0.01
    seed: int = 0
    template: str = "auto"
    system: str | None = None
    autocast: bool = False

    def __post_init__(self):
        for name, low in (("layer", 0), ("epochs", 1), ("batch_size", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        for name in ("strength", "lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number > 0, got {getattr(self, name)}")
        for name in ("retain_weight", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number, at least 0, got {getattr(self, name)}")


def rmu(
    model: nn.Module,
    tokenizer,
    forget: Sequence[dict | Example],
    retain: Sequence[dict | Example],
    settings: RmuSettings,
    *,
    progress: bool = False,
    checkpoint: str | os.PathLike | None = None,
) -> nn.Module:
    r"""Unlearn texts or answers by training three MLP output matrices of a copy of a model.

    With h the hidden states that leave layer ℓ, u a random unit direction and h^ref the states of the model before unlearning, it minimises

    .. math:: \lVert h(x_f) - c\,u\rVert^2 + \alpha\,\lVert h(x_r) - h^{ref}(x_r)\rVert^2

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Left as it was; also the reference.
    tokenizer : transformers.PreTrainedTokenizerBase
    forget, retain : sequence of dict or of Example
        With the text fields ``question`` and ``answer``, or token ids. The states that count are those at the positions that predict an
        answer token: of a text's window, all but the last.
    settings : RmuSettings
    progress : bool
    checkpoint : path, optional
        See :func:`~unlearnlib.training.optimise`.

    Returns
    -------
    transformers.PreTrainedModel
        The new model.

    Raises
    ------
    IndexError
        If the model has no such layer.
    ValueError
        If a set is empty or a field is missing.
    FloatingPointError
        If the loss is no longer finite.

    Notes
    -----
    Squares are averaged over positions and over the units of the hidden state, as in the authors' code: c is a length, but a loss of a
    wider model is no larger. Ours: u is drawn from a normal distribution, like GROM's corruption direction with the same seed, where the
    authors' code draws from [0, 1), so that all of its directions lie within a narrow cone around that of equal entries; padding doesn't
    count; and the learning rate and the length of gradients are those of :func:`~unlearnlib.training.optimise`, where the authors' rate is
    constant and nothing is clipped.

    Reference: Li et al. (2024), "The WMDP Benchmark", section 4, and its code.
    """
    for name, items in (("forget", forget), ("retain", retain)):
        if not items:
            raise ValueError(f"the {name} set is empty")
    sets = [as_examples(tokenizer, items, template=settings.template, system=settings.system) for items in (forget, retain)]
    trained = copy.deepcopy(model).eval()
    reference, anatomy = Anatomy(model), Anatomy(trained)
    anatomy.check_layer(settings.layer)
    modules = [anatomy.mlp_output(layer) for layer in range(max(0, settings.layer - DEPTH), settings.layer + 1)]
    asked = [parameter.requires_grad for parameter in trained.parameters()]
    trained.requires_grad_(False)
    for module in modules:
        module.weight.requires_grad_(True)
    device, width = modules[0].weight.device, len(weight_view(modules[0]))
    direction = corruption(width, settings.strength, settings.seed)
    target = (direction.values * direction.basis).flatten().to(device, torch.float32)
    size = min(settings.batch_size, len(sets[0]))
    steps = settings.epochs * math.ceil(len(sets[0]) / settings.batch_size)
    drawn = [draw_batches(len(part), size, steps, settings.seed + i) for i, part in enumerate(sets)]

    def states(anatomy: Anatomy, batch: Batch) -> Tensor:
        # Entered anew each time: autocast would otherwise go on with its copies of weights that have moved since.
        with bfloat16(trained, settings.autocast):
            return hidden_states(anatomy, batch, settings.layer)

    def loss(step: int) -> Iterator[Tensor]:
        on_forget, on_retain = (
            batches([part[i] for i in order[step]], batch_size=size, device=device)[0] for part, order in zip(sets, drawn, strict=True)
        )
        yield _finite((states(anatomy, on_forget) - target).square().mean(), step, steps)
        if settings.retain_weight:
            with torch.no_grad():
                kept = states(reference, on_retain)
            yield _finite(settings.retain_weight * (states(anatomy, on_retain) - kept).square().mean(), step, steps)

    options = {"lr": settings.lr, "weight_decay": settings.weight_decay, "checkpoint": checkpoint, "progress": progress}
    optimise(trained, loss, steps=steps, describe="rmu", **options)
    trained.zero_grad()
    for parameter, wanted in zip(trained.parameters(), asked, strict=True):
        parameter.requires_grad_(wanted)
    return trained


def hidden_states(anatomy: Anatomy, batch: Batch, layer: int) -> Tensor:
    """States that leave a layer, at the positions that predict a gold token; the layers above it are not run.

    Parameters
    ----------
    anatomy : Anatomy
        Of the model.
    batch : Batch
    layer : int

    Returns
    -------
    Tensor, shape (gold, hidden), float32 or wider
        Differentiable.
    """
    found = []

    def stop(_module, _inputs, output):
        found.append(output[0] if isinstance(output, tuple) else output)
        raise _Enough

    hook = anatomy.layers[layer].register_forward_hook(stop)
    try:
        anatomy.base(**batch.inputs(), use_cache=False)
    except _Enough:
        pass
    finally:
        hook.remove()
    states = found[0][batch.rows, batch.columns]
    return states.to(torch.promote_types(states.dtype, torch.float32))


class _Enough(Exception):
    """Not an error: it ends a forward pass whose rest isn't needed."""


def _finite(loss: Tensor, step: int, steps: int) -> Tensor:
    if not torch.isfinite(loss):
        raise FloatingPointError(f"rmu: the loss of step {step + 1} of {steps} is {loss.item()}; lower lr")
    return loss
