"""Training a causal language model: AdamW on any loss, resumable, and the loss of answer tokens of examples in a seeded order."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from .examples import Example, batches
from .metrics import answer_log_probs, bfloat16

CHECKPOINT_SECONDS = 120.0
"""A checkpoint is written when the last one is older than this."""


def train(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    steps: int,
    lr: float,
    batch_size: int = 16,
    weight_decay: float = 0.01,
    seed: int = 0,
    by_length: bool = False,
    autocast: bool = False,
    checkpoint: str | os.PathLike | None = None,
    progress: bool = False,
) -> list[float]:
    """Fine-tune a model, in place, to give the answers of some examples.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        All parameters that require a gradient are trained.
    examples : sequence of Example
    steps : int
        Optimiser steps.
    lr : float
        Peak of the learning rate, see :func:`optimise`.
    batch_size : int
        Examples a step, drawn without replacement within each pass over the set.
    weight_decay : float
    seed : int
        Of the order.
    by_length : bool
        Whether to batch examples of similar length, see :func:`draw_batches`.
    autocast : bool
        Whether to compute passes in bfloat16, see :func:`~unlearnlib.metrics.bfloat16`; weights and optimiser keep their type.
    checkpoint : path, optional
        See :func:`optimise`.
    progress : bool

    Returns
    -------
    list of float
        Loss of each step, nats a token.

    Raises
    ------
    ValueError
        If there are no examples or no steps.
    """
    if not examples or steps < 1:
        raise ValueError("training needs at least one example and one step")
    lengths = [len(example) for example in examples] if by_length else None
    drawn = draw_batches(len(examples), batch_size, steps, seed, lengths)

    def loss(step: int) -> Iterable[Tensor]:
        members = [examples[i] for i in drawn[step]]
        (batch,) = batches(members, batch_size=len(members), device=next(model.parameters()).device)
        # Entered anew each time: autocast would otherwise go on with its copies of weights that have moved since.
        with bfloat16(model, autocast):
            log_probs = answer_log_probs(model, batch)
        yield -log_probs.mean()

    return optimise(model, loss, steps=steps, lr=lr, weight_decay=weight_decay, checkpoint=checkpoint, progress=progress)


def draw_batches(count: int, batch_size: int, steps: int, seed: int, lengths: Sequence[int] | None = None) -> list[list[int]]:
    """Which examples each step sees: passes over the set, each in a new seeded order.

    Parameters
    ----------
    count : int
        Number of examples.
    batch_size, steps, seed : int
    lengths : sequence of int, optional
        Length of each example. If given, examples of similar length share a batch, which saves padding: every eight batches' worth of
        a pass is sorted by length, then the order of the batches is shuffled again.

    Returns
    -------
    list of list of int
        One list of indices a step. Without `lengths` a batch may begin with the rest of one pass and end in the next.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: list[list[int]] = []
    order: list[int] = []
    while len(drawn) < steps:
        if lengths is not None:
            order = torch.randperm(count, generator=generator).tolist()
            window = 8 * batch_size
            order = [i for start in range(0, count, window) for i in sorted(order[start : start + window], key=lambda i: lengths[i])]
            groups = [order[start : start + batch_size] for start in range(0, count, batch_size)]
            drawn += [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
            continue
        if len(order) < min(batch_size, count):
            order += torch.randperm(count, generator=generator).tolist()
        drawn.append(order[:batch_size])
        order = order[batch_size:]
    return drawn[:steps]


def optimise(
    model: nn.Module,
    loss: Callable[[int], Iterable[Tensor]],
    *,
    steps: int,
    lr: float,
    weight_decay: float = 0.01,
    checkpoint: str | os.PathLike | None = None,
    describe: str = "training",
    progress: bool = False,
) -> list[float]:
    """Minimise a loss with AdamW, in place; an interrupted call goes on from its checkpoint to the very same result.

    Parameters
    ----------
    model : torch.nn.Module
        All parameters that require a gradient are trained; the model is left in evaluation mode.
    loss : callable
        ``loss(step)`` gives the parts of that step's loss, which are summed. Each part is differentiated before the next is asked for,
        so that a large batch can be made of small ones.
    steps : int
    lr : float
        Peak of the learning rate, which rises over the first tenth of the steps and falls to 0 along a cosine.
    weight_decay : float
    checkpoint : path, optional
        Where to keep the state of an unfinished run; removed at the end. It must belong to the same model, loss and settings.
    describe : str
        Of the progress bar.
    progress : bool

    Returns
    -------
    list of float
        Loss of each step.

    Raises
    ------
    ValueError
        If the checkpoint was written for another number of steps or other weights.
    """
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=weight_decay)
    warmup = max(1, steps // 10)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup))
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, cosine], milestones=[warmup])
    losses: list[float] = []
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.is_file():
        losses = _restore(path, weights, optimizer, schedule, steps)
    saved = time.monotonic()
    model.train()
    for step in tqdm(range(len(losses), steps), initial=len(losses), total=steps, desc=describe, disable=not progress, leave=False):
        optimizer.zero_grad()
        total = 0.0
        for part in loss(step):
            part.backward()
            total += part.item()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(total)
        if path is not None and time.monotonic() - saved > CHECKPOINT_SECONDS:
            _save(path, weights, optimizer, losses, steps)
            saved = time.monotonic()
    optimizer.zero_grad()
    model.eval()
    if path is not None:
        path.unlink(missing_ok=True)
    return losses


def _save(path: Path, weights, optimizer, losses: list[float], steps: int) -> None:
    state = {"steps": steps, "weights": [w.detach() for w in weights], "optimizer": optimizer.state_dict(), "losses": losses}
    scratch = path.with_name(f".{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, scratch)
    os.replace(scratch, path)


def _restore(path: Path, weights, optimizer, schedule, steps: int) -> list[float]:
    state = torch.load(path, weights_only=True)
    shapes = [kept.shape for kept in state["weights"]]
    if state.get("steps", steps) != steps or shapes != [weight.shape for weight in weights]:
        raise ValueError(f"{path}: this checkpoint belongs to other training; remove it to begin anew")
    with torch.no_grad():
        for weight, kept in zip(weights, state["weights"], strict=True):
            weight.copy_(kept)
    with warnings.catch_warnings():
        # The schedule is wound forward, since its own state isn't plain data; it thinks that the optimiser was forgotten.
        warnings.simplefilter("ignore", UserWarning)
        for _ in state["losses"]:
            schedule.step()
    optimizer.load_state_dict(state["optimizer"])
    return state["losses"]
