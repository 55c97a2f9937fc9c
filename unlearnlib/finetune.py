"""Fine-tuned models, trained once: cached by the content of data and settings, and resumed where training was interrupted."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import models
from .examples import check_text, encode
from .lora import lora
from .training import train

RECIPE = 1
"""Part of every model's hash: to be raised when the code would train other weights from the same settings."""


@dataclass(frozen=True)
class FineTuning:
    """How a model is fine-tuned on questions and answers.

    Attributes
    ----------
    epochs : int
        Passes over the data.
    lr : float
        Peak of the learning rate; its course is that of :func:`~unlearnlib.training.optimise`.
    batch_size : int
        Examples a step.
    weight_decay : float
    seed : int
        Of the order.
    template : {"auto", "chat", "plain"}
    system : str, optional
        See :func:`~unlearnlib.examples.encode`.
    lora_rank : int
        Rank of LoRA adapters on all linear layers, merged at the end; 0 trains all parameters.
    autocast : bool
        Whether to compute passes in bfloat16, which halves the time or better where the processor has instructions for it.
    """

    epochs: int = 5
    lr: float = 1e-4
    batch_size: int = 8
    weight_decay: float = 0.01
    seed: int = 0
    template: str = "auto"
    system: str | None = None
    lora_rank: int = 0
    autocast: bool = False

    def __post_init__(self):
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be a finite number > 0, got {self.lr}")
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank must be at least 0, got {self.lora_rank}")


def finetuned(
    base: str,
    items: Sequence[dict],
    settings: FineTuning,
    *,
    load: Callable = models.load,
    name: str = "finetuned",
    progress: bool = False,
) -> Path:
    """The folder of a model fine-tuned on questions and answers; trained if it isn't in the cache yet.

    Parameters
    ----------
    base : str
        Model to start from, in the terms of `load`.
    items : sequence of dict
        With the text fields ``question`` and ``answer``.
    settings : FineTuning
    load : callable
        ``load(base)`` gives model and tokenizer.
    name : str
        Begins the name of the folder, for people.
    progress : bool

    Returns
    -------
    Path
        A folder that :func:`~unlearnlib.models.load` reads.

    Raises
    ------
    ValueError
        If an item has no question or answer.
    """

    def make(checkpoint: Path):
        model, tokenizer = load(base)
        examples = encode(tokenizer, items, template=settings.template, system=settings.system)
        steps = settings.epochs * math.ceil(len(examples) / settings.batch_size)
        if progress:
            print(f"fine-tuning {base} on {len(examples)} answers, {steps} steps (once) …", file=sys.stderr, flush=True)
        options = {name: getattr(settings, name) for name in ("lr", "batch_size", "weight_decay", "seed", "autocast")}
        with lora(model, settings.lora_rank, settings.seed) as trainable:
            train(trainable, examples, steps=steps, by_length=True, checkpoint=checkpoint, progress=progress, **options)
        return model, tokenizer

    for i, item in enumerate(items):
        for field in ("question", "answer"):
            check_text(item, field, f"example {i}")
    pairs = [[item["question"], item["answer"]] for item in items]
    return models.cached(f"finetuned/{name}", [RECIPE, base, asdict(settings), pairs], make)
