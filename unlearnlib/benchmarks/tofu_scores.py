"""What a model does on TOFU: scores row by row, and the numbers of the benchmark's tables made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..examples import encode, encode_question
from ..metrics import bfloat16, generate, repeated_ngram_rate
from ..stats import bootstrap_interval
from ..unlearning_metrics import (
    AnswerScores,
    auc,
    compat_encode,
    compat_generate,
    compat_prompt,
    forget_quality,
    model_utility,
    normalised_probability,
    priv_leak,
    rouge_l,
    teacher_forced,
    truth_ratio,
    truth_ratio_forget,
    truth_ratio_kept,
)
from .tofu import Tofu

Scores = dict[str, dict[str, list[float]]]
"""Scores by group of rows (``forget``, ``retain``, ``real_authors``, ``world_facts``, ``holdout``), measure and row."""

FINAL_TERMS = ("rouge_l", "prob", "extraction")
UTILITY_GROUPS = ("retain", "real_authors", "world_facts")

LARGEST_RATIO = 1e300
"""In place of an infinite truth ratio, which JSON cannot hold; no measure tells them apart."""


@dataclass(frozen=True)
class Evaluation:
    """How a model is asked and scored.

    Attributes
    ----------
    max_new_tokens : int
        Where generated answers are cut; the field's common implementation takes 200.
    batch_size : int
        Rows a forward pass; changes no score.
    template : {"auto", "chat", "plain"}
    system : str, optional
        See :func:`~unlearnlib.examples.encode`.
    compat : bool
        Whether to follow the common implementation where it deviates, see :data:`~unlearnlib.unlearning_metrics.DEVIATIONS`.
    autocast : bool
        Whether the model computes in bfloat16 (:func:`~unlearnlib.metrics.bfloat16`); scores are made of its logits in float32.
    """

    max_new_tokens: int = 200
    batch_size: int = 16
    template: str = "auto"
    system: str | None = None
    compat: bool = False
    autocast: bool = False


def evaluate(model: nn.Module, tokenizer, data: Tofu, how: Evaluation, *, utility_only: bool = False, progress: bool = False) -> Scores:
    """Score a model on all evaluation rows.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    data : Tofu
    how : Evaluation
    utility_only : bool
        Whether to leave out the forget and the holdout rows.
    progress : bool

    Returns
    -------
    dict of str to dict of str to list of float
        For ``forget``: ``prob``, ``rouge_l`` (recall), ``extraction``, ``memorization``, ``truth_ratio``, ``min_k``, ``repeated_4gram``,
        ``paraphrase_prob`` and ``paraphrase_rouge_l`` (the question in other words). For the three sets of Model Utility ``prob``,
        ``rouge_l`` and ``truth_ratio``. For ``holdout`` ``min_k``.
    """
    ask = _Asking(model, tokenizer, how, progress)
    scores: Scores = {}
    if not utility_only:
        scores["forget"] = _forget(ask, data.forget)
        scores["holdout"] = {"min_k": [answer.min_k() for answer in ask.score(data.holdout)]}
    for group, rows in (("retain", data.retain_eval), ("real_authors", data.real_authors), ("world_facts", data.world_facts)):
        scores[group] = _kept(ask, rows, normalised=group != "retain")
    return scores


class _Asking:
    """A model with the way it is asked."""

    def __init__(self, model: nn.Module, tokenizer, how: Evaluation, progress: bool):
        self.model, self.tokenizer, self.how, self.progress = model, tokenizer, how, progress

    def score(self, rows: Sequence[dict], answer: str | Callable[[dict], str] = "answer", question: str = "question") -> list[AnswerScores]:
        pick = answer if callable(answer) else lambda row: row[answer]
        items = [{"question": row[question], "answer": pick(row)} for row in rows]
        options = {"batch_size": self.how.batch_size, "progress": self.progress}
        if self.how.compat:
            examples = compat_encode(self.tokenizer, items, system=self.how.system)
            options["compat"] = self.tokenizer
        else:
            examples = encode(self.tokenizer, items, template=self.how.template, system=self.how.system)
        with bfloat16(self.model, self.how.autocast):
            return teacher_forced(self.model, examples, **options)

    def wrong(self, rows: Sequence[dict]) -> list[list[float]]:
        """Losses of each row's wrong answers."""
        pairs = [{"question": row["question"], "answer": text} for row in rows for text in row["perturbed_answer"]]
        losses = iter([answer.loss for answer in self.score(pairs)])
        return [[next(losses) for _ in row["perturbed_answer"]] for row in rows]

    def ratios(self, right: Sequence[float], wrong: Sequence[Sequence[float]]) -> list[float]:
        found = (truth_ratio(loss, losses, compat=self.how.compat) for loss, losses in zip(right, wrong, strict=True))
        return [min(ratio, LARGEST_RATIO) for ratio in found]

    def say(self, rows: Sequence[dict], question: str = "question") -> list[str]:
        options = {"max_new_tokens": self.how.max_new_tokens, "batch_size": 2 * self.how.batch_size, "progress": self.progress}
        if self.how.compat:
            prompts = [compat_prompt(self.tokenizer, row[question], system=self.how.system) for row in rows]
        else:
            encoding = {"template": self.how.template, "system": self.how.system}
            prompts = [encode_question(self.tokenizer, row[question], **encoding)[0] for row in rows]
        with bfloat16(self.model, self.how.autocast):
            return (compat_generate if self.how.compat else generate)(self.model, self.tokenizer, prompts, **options)


def _forget(ask: _Asking, rows: Sequence[dict]) -> dict[str, list[float]]:
    answers = ask.score(rows)
    paraphrased = [answer.loss for answer in ask.score(rows, "paraphrased_answer")]
    said = ask.say(rows)
    references = [row["answer"] for row in rows]
    return {
        "prob": [answer.probability for answer in answers],
        "rouge_l": rouge_l(said, references),
        "extraction": [answer.extraction_strength for answer in answers],
        "memorization": [answer.exact_memorization for answer in answers],
        "truth_ratio": ask.ratios(paraphrased, ask.wrong(rows)),
        "min_k": [answer.min_k() for answer in answers],
        "repeated_4gram": [repeated_ngram_rate(text) for text in said],
        "paraphrase_prob": [answer.probability for answer in ask.score(rows, question="paraphrased_question")],
        "paraphrase_rouge_l": rouge_l(ask.say(rows, "paraphrased_question"), references),
    }


def _kept(ask: _Asking, rows: Sequence[dict], *, normalised: bool) -> dict[str, list[float]]:
    answers, wrong = ask.score(rows), ask.wrong(rows)
    probabilities = [answer.probability for answer in answers]
    # The general questions have no paraphrased answer: the answer itself stands in for it.
    right = [answer.loss for answer in (answers if normalised else ask.score(rows, "paraphrased_answer"))]
    if normalised:
        pairs = zip(answers, wrong, strict=True)
        probabilities = [normalised_probability(answer.loss, losses, compat=ask.how.compat) for answer, losses in pairs]
    return {
        "prob": probabilities,
        "rouge_l": rouge_l(ask.say(rows), [row["answer"] for row in rows]),
        "truth_ratio": ask.ratios(right, wrong),
    }


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def utility(scores: Scores) -> float:
    """Model Utility: harmonic mean of probability, ROUGE-L and truth ratio on the three sets of rows to be kept."""
    return model_utility(utility_terms(scores))


def utility_terms(scores: Scores) -> dict[str, float]:
    """The nine terms of Model Utility, by group and measure."""
    terms = {}
    for group in UTILITY_GROUPS:
        terms[f"{group}_prob"] = mean(scores[group]["prob"])
        terms[f"{group}_rouge_l"] = mean(scores[group]["rouge_l"])
        terms[f"{group}_truth_ratio"] = truth_ratio_kept(scores[group]["truth_ratio"])
    return terms


def table_row(scores: Scores, full: Scores, retain: Scores) -> dict[str, float]:
    """A model's row of the tables.

    Parameters
    ----------
    scores : Scores
        Of the model.
    full, retain : Scores
        Of the model before unlearning and of the one that never saw the forget rows, on the same rows.

    Returns
    -------
    dict of str to float
        Means over rows of ``prob``, ``rouge_l``, ``extraction``, ``memorization``, ``repeated_4gram``, ``paraphrase_prob`` and
        ``paraphrase_rouge_l``; ``truth_ratio``, ``model_utility``, ``forget_quality``, ``priv_leak`` and ``forget_auc``; ``final``, the
        mean of Model Utility and the mean of 1 − ROUGE-L, 1 − Prob and 1 − Extraction; and the parts of the forget rows that count as
        forgotten, ``generation_forget`` (ROUGE-L of the model's own answer below half of what it was before unlearning) and
        ``teacher_forget`` (the same of the probability).
    """
    forget = scores["forget"]
    row = {name: mean(values) for name, values in forget.items() if name not in ("truth_ratio", "min_k")}
    row["truth_ratio"] = truth_ratio_forget(forget["truth_ratio"])
    row["model_utility"] = utility(scores)
    row["forget_quality"] = forget_quality(forget["truth_ratio"], retain["forget"]["truth_ratio"])
    row["forget_auc"] = auc(forget["min_k"], scores["holdout"]["min_k"])
    row["priv_leak"] = priv_leak(row["forget_auc"], auc(retain["forget"]["min_k"], retain["holdout"]["min_k"]))
    row["generation_forget"] = _below_half(forget["rouge_l"], full["forget"]["rouge_l"])
    row["teacher_forget"] = _below_half(forget["prob"], full["forget"]["prob"])
    row["final"] = final(row)
    return row


def final(row: Mapping[str, float]) -> float:
    """``½ (Model Utility + mean of 1 − ROUGE-L, 1 − Prob, 1 − Extraction)``; inferred from the published rows, which it fits."""
    return (row["model_utility"] + mean([1 - row[term] for term in FINAL_TERMS])) / 2


def intervals(scores: Scores, seed: int = 0) -> dict[str, float]:
    """Bootstrap intervals (95 %) over the forget rows of the three forget terms: ``<term>_low`` and ``<term>_high``."""
    found = {}
    for term in FINAL_TERMS:
        interval = bootstrap_interval(scores["forget"][term], seed=seed)
        found[f"{term}_low"], found[f"{term}_high"] = interval
    return found


def _below_half(values: Sequence[float], before: Sequence[float]) -> float:
    return mean([float(value < old / 2) for value, old in zip(values, before, strict=True)])
