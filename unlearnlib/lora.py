"""Training low-rank adapters in place of all parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def lora(model: nn.Module, rank: int, seed: int = 0) -> Iterator[nn.Module]:
    """Train LoRA adapters on all linear layers within the context; they are merged into the model's weights at its end.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    rank : int
        Of each adapter, with α = 2 × rank and no dropout. 0 gives the model itself back, to train all of it.
    seed : int
        Of the adapters' initialisation.

    Yields
    ------
    torch.nn.Module
        What to train. The given model holds the merged weights afterwards, or its old ones if the context was left by an error.
    """
    if rank == 0:
        yield model
        return
    from peft import LoraConfig, get_peft_model

    asked = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = get_peft_model(model, config)
    try:
        yield wrapped
    except BaseException:
        wrapped.unload()
        raise
    else:
        wrapped.merge_and_unload()
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(asked[name])
