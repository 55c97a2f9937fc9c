"""Training a causal language model on examples: the loss of their answer tokens, AdamW, a seeded order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from tqdm.auto import tqdm

from .examples import Example, batches
from .metrics import answer_log_probs


def train(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    steps: int,
    lr: float,
    batch_size: int = 16,
    weight_decay: float = 0.01,
    seed: int = 0,
    progress: bool = False,
) -> list[float]:
    """Fine-tune all of a model's parameters, in place, to give the answers of some examples.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    examples : sequence of Example
    steps : int
        Optimiser steps.
    lr : float
        Peak of the learning rate, which rises over the first tenth of the steps and falls to 0 along a cosine.
    batch_size : int
        Examples a step, drawn without replacement within each pass over the set.
    weight_decay : float
    seed : int
        Of the order.
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
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    warmup = max(1, steps // 10)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup))
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, cosine], milestones=[warmup])
    order: list[int] = []
    losses = []
    model.train()
    for _ in tqdm(range(steps), desc="training", disable=not progress, leave=False):
        if len(order) < min(batch_size, len(examples)):
            order += torch.randperm(len(examples), generator=generator).tolist()
        drawn, order = order[:batch_size], order[batch_size:]
        (batch,) = batches([examples[i] for i in drawn], batch_size=batch_size, device=next(model.parameters()).device)
        loss = -answer_log_probs(model, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return losses
