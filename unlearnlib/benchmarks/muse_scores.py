"""What a model does on MUSE: scores row by row, and the numbers of the benchmark's tables made from them, all in per cent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from torch import nn

from .. import published
from ..corpora import windows
from ..examples import Example, encode_question
from ..metrics import bfloat16, generate, repeated_ngram_rate
from ..unlearning_metrics import auc, priv_leak, rouge_l, teacher_forced
from .muse import Muse

Scores = dict[str, list[float]]
"""Scores by measure and row."""

STOPS = ("\n\n", "\nQuestion", "Question:")
"""Where a generated answer ends: with a blank line, or where the model goes on with a question of its own."""

RESAMPLES = 1000


@dataclass(frozen=True)
class Evaluation:
    """How a model is asked and scored.

    Attributes
    ----------
    verbmem_tokens, knowmem_tokens : int
        Where continuations and answers are cut: 128 and 32 in MUSE. What a passage really goes on with is cut there too.
    privleak_tokens : int
        How much of a passage the membership test sees at most; no more than the model's context in any case.
    shots : int
        Questions with answers that are shown before the one that is asked, at most: MUSE shows 10.
    min_k : float
        Share of the least probable tokens that the membership test looks at.
    batch_size : int
        Rows a forward pass; changes no score.
    autocast : bool
        Whether the model computes in bfloat16 (:func:`~unlearnlib.metrics.bfloat16`); scores are made of its logits in float32.
    """

    verbmem_tokens: int = 128
    knowmem_tokens: int = 32
    privleak_tokens: int = 2048
    shots: int = 10
    min_k: float = 0.4
    batch_size: int = 16
    autocast: bool = False

    def __post_init__(self):
        for name, low in (("verbmem_tokens", 1), ("knowmem_tokens", 1), ("privleak_tokens", 2), ("shots", 0), ("batch_size", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not 0 < self.min_k <= 1:
            raise ValueError(f"min_k must lie in (0, 1], got {self.min_k}")


def asked(row: Mapping[str, str], shots: Sequence[Mapping[str, str]] = ()) -> str:
    """A question as MUSE puts it to a model, after some answered ones.

    Parameters
    ----------
    row : mapping
        With ``question``.
    shots : sequence of mapping
        With ``question`` and ``answer``.

    Returns
    -------
    str
        It ends with "Answer:", without MUSE's space, which would be part of the answer's first token.
    """
    shown = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in shots)
    return f"{shown}Question: {row['question']}\nAnswer:"


def first_answer(text: str) -> str:
    """A generated text up to the first of :data:`STOPS`."""
    for stop in STOPS:
        text = text.partition(stop)[0]
    return text.strip()


def evaluate(model: nn.Module, tokenizer, data: Muse, how: Evaluation, *, progress: bool = False) -> Scores:
    """Score a model on all evaluation rows.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
        Nothing goes through its chat template: documents and questions are text to continue.
    data : Muse
    how : Evaluation
    progress : bool

    Returns
    -------
    dict of str to list of float
        ROUGE-L F1 of what the model says, ``verb_mem`` (continuations of passages to be forgotten), ``know_mem_forget`` and
        ``know_mem_retain`` (answers), within 0 … 1; ``repeated_4gram`` of its continuations; ``min_k_forget`` and ``min_k_holdout`` of
        the membership test.

    Raises
    ------
    ValueError
        If a prompt leaves no room in the model's context for an answer.
    """
    context = getattr(model.config, "max_position_embeddings", inf)

    def say(prompts: Sequence[str], tokens: int) -> list[str]:
        ids = [encode_question(tokenizer, prompt, template="plain")[0] for prompt in prompts]
        longest = max(map(len, ids))
        if longest + tokens > context:
            raise ValueError(f"a prompt of {longest} tokens and {tokens} new ones exceed the context of {context}: show fewer shots")
        with bfloat16(model, how.autocast):
            return generate(model, tokenizer, ids, max_new_tokens=tokens, batch_size=2 * how.batch_size, progress=progress)

    def known(rows: Sequence[dict], shots: Sequence[dict]) -> list[float]:
        said = say([asked(row, shots[: how.shots]) for row in rows], how.knowmem_tokens)
        return rouge_l([first_answer(text) for text in said], [row["answer"] for row in rows], "f1")

    def familiar(texts: Sequence[str]) -> list[float]:
        examples = [_beginning(tokenizer, text, min(how.privleak_tokens, context)) for text in texts]
        with bfloat16(model, how.autocast):
            scored = teacher_forced(model, examples, batch_size=how.batch_size, progress=progress)
        return [answer.min_k(how.min_k) for answer in scored]

    recited = say([row["prompt"] for row in data.verbmem], how.verbmem_tokens)
    truth = [_shortened(tokenizer, row["gt"], how.verbmem_tokens) for row in data.verbmem]
    return {
        "verb_mem": rouge_l(recited, truth, "f1"),
        "know_mem_forget": known(data.forget_qa, data.forget_icl),
        "know_mem_retain": known(data.retain_qa, data.retain_icl),
        "repeated_4gram": [repeated_ngram_rate(text) for text in recited],
        "min_k_forget": familiar(data.privleak_forget),
        "min_k_holdout": familiar(data.privleak_holdout),
    }


def _beginning(tokenizer, text: str, tokens: int) -> Example:
    return windows(tokenizer, [text], tokens)[0]


def _shortened(tokenizer, text: str, tokens: int) -> str:
    return tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids[:tokens])


def membership(scores: Scores) -> float:
    """AUC of the membership test, passages to be forgotten against passages that no model has seen."""
    return auc(scores["min_k_forget"], scores["min_k_holdout"])


def table_row(scores: Scores, reference_auc: float) -> dict[str, float]:
    """A model's row of the tables.

    Parameters
    ----------
    scores : Scores
        Of the model.
    reference_auc : float
        :func:`membership` of the model that never saw the documents to be forgotten.

    Returns
    -------
    dict of str to float
        In per cent: ``verb_mem_forget``, ``know_mem_forget``, ``priv_leak``, ``know_mem_retain``, ``final``. As parts of 1:
        ``repeated_4gram``, ``auc``, ``reference_auc``. And ``<measure>_low`` and ``<measure>_high`` of the first five, 95 % percentile
        bootstrap intervals over the rows, the reference held fixed.

    Raises
    ------
    ValueError
        If the reference's AUC is 1, which leaves PrivLeak undefined.
    """
    arrays = {name: np.array(values) for name, values in scores.items()}
    forget, holdout = arrays["min_k_forget"], arrays["min_k_holdout"]
    # How often, of each passage, a resample has it: all measures are means over passages, or over pairs of passages.
    rng = np.random.default_rng(0)
    times = {name: rng.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n for name, n in ((name, len(own)) for name, own in arrays.items())}
    pairs = (np.sign(forget[:, None] - holdout) + 1) / 2
    drawn_auc = ((times["min_k_forget"] @ pairs) * times["min_k_holdout"]).sum(1)
    drawn_means = {name: times[name] @ own for name, own in arrays.items()}
    drawn = [_measures({name: values[i] for name, values in drawn_means.items()}, drawn_auc[i], reference_auc) for i in range(RESAMPLES)]
    row = _measures({name: own.mean() for name, own in arrays.items()}, membership(scores), reference_auc)
    extra = {"repeated_4gram": arrays["repeated_4gram"].mean().item(), "auc": membership(scores), "reference_auc": reference_auc}
    intervals = {}
    for name in row:
        ends = np.quantile([one[name] for one in drawn], [0.025, 0.975])
        intervals[f"{name}_low"], intervals[f"{name}_high"] = ends.tolist()
    return row | extra | intervals


def _measures(means: Mapping[str, float], found_auc: float, reference_auc: float) -> dict[str, float]:
    row = {
        "verb_mem_forget": 100 * float(means["verb_mem"]),
        "know_mem_forget": 100 * float(means["know_mem_forget"]),
        # Rounding may take a mean over pairs beyond 1.
        "priv_leak": priv_leak(min(1.0, float(found_auc)), reference_auc),
        "know_mem_retain": 100 * float(means["know_mem_retain"]),
    }
    return row | {"final": final(row)}


def final(row: Mapping[str, float]) -> float:
    """``½ [KnowMem_r + mean of 100 − VerbMem, 100 − KnowMem_f, 100 − |PrivLeak|]``, in per cent; inferred from the published rows."""
    return published.final(row["know_mem_retain"], forgetting(row))


def forgetting(row: Mapping[str, float]) -> list[float]:
    """The three forget terms of a row, each the higher the better."""
    return [100 - row["verb_mem_forget"], 100 - row["know_mem_forget"], 100 - abs(row["priv_leak"])]
