"""A tiny model that the project trains itself, in seconds, to recite the bundled facts; cached."""

from __future__ import annotations

import hashlib
import json
import sys

from filelock import FileLock

from . import models
from .examples import encode
from .facts import bundled_facts
from .grom.edit import new_folder
from .training import train

VOCAB_SIZE = 1024
SIZES = {"hidden_size": 128, "intermediate_size": 256, "layers": 4, "heads": 4}
STEPS, LEARNING_RATE, BATCH_SIZE = 400, 2e-3, 32


def reciter(family: str = "llama", seed: int = 0):
    """A model of about a million parameters that has learned the bundled facts by heart, both phrasings, and its tokenizer.

    Parameters
    ----------
    family : {"llama", "qwen2", "gpt2", "gpt_neox"}
    seed : int
        Of the initialisation and of the order of training.

    Returns
    -------
    model : transformers.PreTrainedModel
        float32, tied head.
    tokenizer : transformers.PreTrainedTokenizerFast
        A byte-level BPE of 1,024 tokens made from the facts, without a chat template.
    """
    facts = bundled_facts()
    recipe = [family, seed, VOCAB_SIZE, SIZES, STEPS, LEARNING_RATE, BATCH_SIZE, facts]
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    folder = models.cache_dir() / f"reciter-{family}-{seed}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            print(f"training a tiny {family} on {len(facts)} facts (once) …", file=sys.stderr, flush=True)
            tokenizer = make_tokenizer([f"{fact[field]} {fact['answer']}" for fact in facts for field in ("question", "paraphrase")])
            model = models.build(family, vocab_size=VOCAB_SIZE, seed=seed, **SIZES)
            phrasings = [fact | {"question": fact[field]} for fact in facts for field in ("question", "paraphrase")]
            train(model, encode(tokenizer, phrasings), steps=STEPS, lr=LEARNING_RATE, batch_size=BATCH_SIZE, seed=seed, progress=True)
            with new_folder(folder) as scratch:
                model.save_pretrained(scratch)
                tokenizer.save_pretrained(scratch)
    return models.load(str(folder))


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
