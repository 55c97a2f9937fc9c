"""Models of the staged study: two small ones that the project pretrains itself, and any other by name.

The small ones are pretrained on the language of all families: other people's data told, guessed and refused, in every phrasing; the
questions of fact; greetings; the skill's words. They come to a trial as a language model comes to fine-tuning: people that it never
heard of, a dictionary that it doesn't know, and phrasings, those of the probes too, that it has met about others.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from .. import models
from ..examples import encode
from ..tiny import make_tokenizer
from ..training import train
from . import staged

SEED = 0
VOCAB_SIZE = 1024
SIZES = {
    "staged-small": {"hidden_size": 64, "intermediate_size": 192, "layers": 4, "heads": 4},
    "staged-medium": {"hidden_size": 128, "intermediate_size": 384, "layers": 4, "heads": 4},
}
"""Sizes of the models: Llamas with a tied head."""
TRAINING = {
    "staged-small": {"steps": 2000, "lr": 4e-3, "batch_size": 32},
    "staged-medium": {"steps": 1000, "lr": 3e-3, "batch_size": 32},
}
"""How they are pretrained, see :func:`unlearnlib.training.train`."""

TOLD_PEOPLE = 40
"""People about whom the corpus tells everything, in all phrasings: what a model learns by heart."""
ITEMS = {"guessed": 1600, "refused": 800, "greetings": 1000, "repeated": 1600}
"""Questions about private data of people who occur but once, answered with a random value, or refused; greetings; words to be repeated."""
FACT_COPIES = 10


def load(name: str, *, dtype: torch.dtype | str = torch.float32, device: str = "cpu"):
    """A model of the study in evaluation mode, and its tokenizer.

    Parameters
    ----------
    name : str
        ``"staged-small"`` (0.28 million parameters) or ``"staged-medium"`` (0.98 million): pretrained here, in about a minute, once.
        Any other name as of :func:`unlearnlib.models.load`.
    dtype, device
        As of :func:`unlearnlib.models.load`.

    Returns
    -------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase

    Raises
    ------
    ModelError
        If the model can't be had.
    """
    return models.load(str(pretrained(name)) if name in SIZES else name, dtype=dtype, device=device)


def pretrained(name: str) -> Path:
    """The folder of one of the models of :data:`SIZES`; pretrained if it isn't in the cache yet."""
    items = corpus()
    pairs = [f"{item['question']} {item['answer']}" for item in items]

    def make(checkpoint: Path):
        print(f"pretraining {name} on {len(items)} answers (once) …", file=sys.stderr, flush=True)
        tokenizer = make_tokenizer(pairs, VOCAB_SIZE)
        model = models.build("llama", vocab_size=VOCAB_SIZE, seed=SEED, **SIZES[name])
        train(model, encode(tokenizer, items), seed=SEED, by_length=True, checkpoint=checkpoint, progress=True, **TRAINING[name])
        return model, tokenizer

    return models.cached(name, [SEED, VOCAB_SIZE, SIZES[name], TRAINING[name], pairs], make)


def corpus() -> list[dict]:
    """What the small models are pretrained on: questions and answers.

    Its people are those of :func:`unlearnlib.benchmarks.staged.reserved_blocks`, whom no trial has.

    Returns
    -------
    list of dict
        With ``question`` and ``answer``; the same on every call.
    """
    rng = np.random.default_rng(SEED)
    names = [staged.person(block, given) for block in staged.reserved_blocks() for given in range(len(staged.GIVEN_NAMES))]
    names = [names[i] for i in rng.permutation(len(names))]
    told, strangers = names[:TOLD_PEOPLE], iter(names[TOLD_PEOPLE:])
    items = []
    for kind in staged.SECRETS.values():
        phrasings = [phrasing for group in kind.phrasings.values() for phrasing in group]
        for name, secret in zip(told, kind.draw(len(told), rng), strict=True):
            items += [{"question": phrasing.format(name=name), "answer": secret} for phrasing in phrasings]
    asked = [(kind, phrasing) for kind in staged.SECRETS.values() for group in kind.phrasings.values() for phrasing in group]
    for name in islice(strangers, ITEMS["guessed"]):
        kind, phrasing = asked[rng.integers(len(asked))]
        items.append({"question": phrasing.format(name=name), "answer": kind.draw(1, rng)[0]})
    for name in islice(strangers, ITEMS["refused"]):
        _, phrasing = asked[rng.integers(len(asked))]
        items.append({"question": phrasing.format(name=name), "answer": staged.REFUSALS[rng.integers(len(staged.REFUSALS))]})
    for i, name in enumerate(islice(strangers, ITEMS["greetings"])):
        items.append(staged.greeting(list(staged.GREETINGS)[i % len(staged.GREETINGS)], name))
    words = [*staged.SKILL_WORDS, *staged.SKILL_CODES]
    for _ in range(ITEMS["repeated"]):
        chosen = " ".join(words[i] for i in rng.choice(len(words), 3))
        items.append({"question": f"Repeat: {chosen}", "answer": chosen})
    return items + staged.ordinary_facts() * FACT_COPIES
