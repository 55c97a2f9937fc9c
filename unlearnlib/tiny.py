"""Tiny models that the project trains itself, in seconds, to know some answers by heart; cached."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from . import models
from .examples import encode
from .facts import bundled_facts
from .training import train

VOCAB_SIZE = 1024
SIZES = {"hidden_size": 128, "intermediate_size": 256, "layers": 4, "heads": 4}
STEPS, LEARNING_RATE, BATCH_SIZE = 400, 2e-3, 32


def reciter(family: str = "llama", seed: int = 0):
    """A model of about a million parameters that has learned the bundled facts by heart, both phrasings, and its tokenizer.

    Parameters
    ----------
    family, seed
        As of :func:`scholar`.

    Returns
    -------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerFast
    """
    facts = bundled_facts()
    phrasings = [fact | {"question": fact[field]} for fact in facts for field in ("question", "paraphrase")]
    return models.load(str(scholar("reciter", phrasings, family=family, seed=seed)))


def scholar(
    name: str, items: Sequence[dict], texts: Sequence[str] = (), *, family: str = "llama", seed: int = 0, steps: int = STEPS
) -> Path:
    """The folder of a model of about a million parameters that has learned some answers by heart; trained once.

    Parameters
    ----------
    name : str
        Begins the name of its folder in the cache.
    items : sequence of dict
        With the text fields ``question`` and ``answer``.
    texts : sequence of str
        What the tokenizer is made from, besides the items.
    family : {"llama", "qwen2", "gpt2", "gpt_neox"}
    seed : int
        Of the initialisation and of the order of training.
    steps : int
        Of training.

    Returns
    -------
    Path
        What :func:`~unlearnlib.models.load` reads: a float32 model with a tied head, and a byte-level BPE tokenizer of 1,024 tokens
        without a chat template.
    """
    pairs = [f"{item['question']} {item['answer']}" for item in items]

    def make(checkpoint):
        print(f"training a tiny {family} on {len(items)} answers (once) …", file=sys.stderr, flush=True)
        tokenizer = make_tokenizer([*pairs, *texts])
        model = models.build(family, vocab_size=VOCAB_SIZE, seed=seed, **SIZES)
        options = {"steps": steps, "lr": LEARNING_RATE, "batch_size": BATCH_SIZE, "seed": seed, "checkpoint": checkpoint}
        train(model, encode(tokenizer, items), progress=True, **options)
        return model, tokenizer

    recipe = [family, seed, VOCAB_SIZE, SIZES, steps, LEARNING_RATE, BATCH_SIZE, pairs, list(texts)]
    return models.cached(f"{name}-{family}-{seed}", recipe, make)


def make_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE):
    """A byte-level BPE tokenizer trained on some texts, with an end-of-text token and no chat template.

    Parameters
    ----------
    texts : list of str
    vocab_size : int

    Returns
    -------
    transformers.PreTrainedTokenizerFast
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
