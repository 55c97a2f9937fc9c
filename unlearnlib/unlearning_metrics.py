"""The field's measures of unlearning: probability, extraction, ROUGE-L, truth ratio, Forget Quality, Model Utility, PrivLeak.

They are defined as the common implementation, open-unlearning (Dorna et al., 2025), defines them, with the deviations that
:data:`DEVIATIONS` lists. Its numbers come out where ``compat`` is asked for: :func:`compat_encode` for the tokens, ``compat`` of
:func:`teacher_forced`, :func:`truth_ratio` and :func:`normalised_probability`, and :func:`compat_generate` for the texts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats
from torch import Tensor, nn
from tqdm.auto import tqdm

from .examples import Example, batches, check_text
from .metrics import answer_logits

GUARD = 1e-10
"""What the common implementation adds to denominators."""

UTILITY_TERMS = tuple(
    f"{rows}_{measure}" for rows in ("retain", "real_authors", "world_facts") for measure in ("prob", "rouge_l", "truth_ratio")
)
"""The nine terms of Model Utility: three measures on three sets of rows."""


class Deviation(NamedTuple):
    """A point at which the common implementation departs from the definitions used here, or from its papers."""

    name: str
    theirs: str
    ours: str


DEVIATIONS = (
    Deviation(
        "end of the answer",
        "An end token is added unless the tokens already end with one. A chat template that closes the turn and writes a newline after "
        "it so yields two ends: on SmolLM2 the answer is followed by <|im_end|>, a newline and <|im_end|>, all three of them labels.",
        "The answer and exactly one end-of-turn token.",
    ),
    Deviation(
        "tokens of the answer",
        "Question and answer are tokenised in one piece, and the answer's tokens are those beyond as many as the prompt has alone: where "
        "a token spans the border, part of the answer counts as prompt.",
        "Prompt and answer are tokenised apart, so that the answer's tokens are always its own.",
    ),
    Deviation(
        "last token",
        "Probability and truth ratio score all labels; Extraction Strength, Exact Memorization and Min-K % leave the last one out (in "
        "earlier revisions only that of the longest row of a batch, so that the batch size changes the score).",
        "All measures score the same tokens.",
    ),
    Deviation(
        "attention mask",
        "Every position that holds the padding token is masked. Where that is also the end token, as on SmolLM2, the ends of the system "
        "and user turns are hidden from the model, and in generation the positions after them shift.",
        "Only the padding is masked; it is known from the lengths, never from the token.",
    ),
    Deviation(
        "rounding",
        "On a CPU, the softmax behind probability and truth ratio adds up the vocabulary one token after the other in float32, since the "
        "vocabulary is not the last axis there. With 49,152 tokens this is off by about 1e-4 in the loss.",
        "The sum runs along the last axis, in several parts, and is off by about 1e-5.",
    ),
    Deviation(
        "extraction floor",
        "Extraction Strength of n tokens is at least 1/n, even where the last token is predicted wrongly.",
        "It is 0 there, as in its definition: no proper suffix is reproduced.",
    ),
    Deviation(
        "mean over wrong answers",
        "The truth ratio averages the losses of the wrong answers, a geometric mean of their probabilities; the TOFU paper writes an "
        "arithmetic one.",
        "The geometric mean too, to be comparable with published tables; the paper's is available.",
    ),
    Deviation(
        "guarded denominators",
        "1e-10 is added to the probability of the paraphrased answer and to the sum of the normalised probability. After strong "
        "unlearning all probabilities are of that size, and the guard, not the model, decides the ratio.",
        "The ratios are taken of losses, and need no guard.",
    ),
    Deviation(
        "generation",
        "Greedy, but with whatever else the model's own generation settings ask for, like a repetition penalty.",
        "Plain greedy decoding, whatever the model brings along.",
    ),
    Deviation(
        "PrivLeak's reference",
        "The AUC of the retain model if its results are given, else ½. A reference AUC of 1 gives a number of the order of 1e12.",
        "The reference is always given and shown. With an AUC of 1 it leaves PrivLeak undefined, which is an error.",
    ),
)
"""Where the common implementation deviates. All but the mean over wrong answers and PrivLeak's reference are reproduced by ``compat``."""


def deviations_table() -> str:
    """:data:`DEVIATIONS` as a Markdown table."""
    cells = [[text.replace("|", r"\|").replace("<", r"\<") for text in deviation] for deviation in DEVIATIONS]
    return "\n".join(["| point | theirs | ours |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in cells)])


# ---------------------------------------------------------------------------------------------------------------------------
# Teacher-forced scores


@dataclass(frozen=True, eq=False)
class AnswerScores:
    """How a model predicts one given answer, token by token.

    Attributes
    ----------
    log_probs : Tensor, shape (tokens,), float32 or wider
        Log-probability of each token of the answer, given the prompt and the tokens before it.
    hits : Tensor of bool, shape (tokens,)
        Whether each is the most probable token there.
    compat_losses : Tensor, shape (tokens,), optional
        The tokens' losses as the common implementation rounds them. If given, the measures below follow it, see :data:`DEVIATIONS`.
    """

    log_probs: Tensor
    hits: Tensor
    compat_losses: Tensor | None = None

    @property
    def loss(self) -> float:
        """Mean negative log-probability of the answer's tokens, in nats."""
        losses = -self.log_probs if self.compat_losses is None else self.compat_losses
        return losses.double().mean().item()

    @property
    def probability(self) -> float:
        """exp(−loss): the geometric mean of the tokens' probabilities."""
        return math.exp(-self.loss)

    @property
    def extraction_strength(self) -> float:
        """1 − k/n, where k of the answer's n tokens must be given for greedy decoding to reproduce all the others (Carlini et al., 2021).

        1 if the prompt is enough, 0 if even the last token must be given.
        """
        hits = self.hits[self._measured]
        if not len(hits):
            return 0.0
        misses = (~hits).nonzero()
        given = int(misses[-1]) + 1 if len(misses) else 0
        if self.compat_losses is not None:
            given = min(given, len(hits) - 1)
        return 1 - given / len(hits)

    @property
    def exact_memorization(self) -> float:
        """Share of the answer's tokens that are the most probable ones; NaN if ``compat_losses`` leave none."""
        return self.hits[self._measured].double().mean().item()

    def min_k(self, share: float = 0.4) -> float:
        """Mean log-probability of the least probable tokens (Shi et al., 2024): the higher, the more the answer looks like training data.

        Parameters
        ----------
        share : float
            Of the tokens, in (0, 1]; rounded down to whole tokens, and at least one.

        Returns
        -------
        float
            At most 0. The common implementation reports its negative, and orients :func:`auc` accordingly.

        Raises
        ------
        ValueError
            If `share` is out of range.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share must lie in (0, 1], got {share}")
        scores = self.log_probs[self._measured].double()
        if not len(scores):
            return 0.0
        return scores.sort().values[: max(1, int(share * len(scores)))].mean().item()

    @property
    def _measured(self) -> slice:
        return slice(None) if self.compat_losses is None else slice(-1)


@torch.no_grad()
def teacher_forced(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    batch_size: int = 16,
    padding_side: str = "right",
    compat=None,
    progress: bool = False,
) -> list[AnswerScores]:
    """Score every given answer in one pass, each token on the prompt and the true tokens before it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Half-precision models are scored in float32.
    examples : sequence of Example
    batch_size : int
    padding_side : {"right", "left"}
        Neither changes a score beyond rounding.
    compat : transformers.PreTrainedTokenizerBase, optional
        The model's tokenizer, to score as the common implementation does: positions that hold its padding token are masked, and the
        scores follow :data:`DEVIATIONS`. The examples are then those of :func:`compat_encode`.
    progress : bool

    Returns
    -------
    list of AnswerScores
        In the order of the examples, on the CPU.

    Raises
    ------
    ValueError
        If there are no examples, or a parameter is out of range.
    """
    found: list = [None] * len(examples)
    grouped = batches(examples, batch_size=batch_size, padding_side=padding_side, device=next(model.parameters()).device)
    for batch in tqdm(grouped, desc="scoring answers", disable=not progress, leave=False):
        if compat is not None:
            batch = replace(batch, attention_mask=batch.attention_mask * batch.input_ids.ne(_pad_id(compat)))
        logits = answer_logits(model, batch)
        scores = logits.log_softmax(-1)
        parts = [scores.gather(1, batch.gold[:, None]).squeeze(1), scores.argmax(-1) == batch.gold]
        if compat is not None:
            # With the vocabulary on the middle axis, where the sum behind the softmax is rounded as theirs is.
            parts.append(nn.functional.cross_entropy(logits.T[None], batch.gold[None], reduction="none")[0])
        members, lengths = batch.example.cpu().unique_consecutive(return_counts=True)
        answers = zip(*(part.cpu().split(lengths.tolist()) for part in parts), strict=True)
        for index, answer in zip(members.tolist(), answers, strict=True):
            found[index] = AnswerScores(*answer)
    return found


# ---------------------------------------------------------------------------------------------------------------------------
# Texts


def rouge_l(texts: Sequence[str], references: Sequence[str], measure: Literal["recall", "f1"] = "recall") -> list[float]:
    """ROUGE-L of each text with its reference: the longest common subsequence of their stemmed words.

    Parameters
    ----------
    texts : sequence of str
        What the model said.
    references : sequence of str
        What it should have said, or have forgotten.
    measure : {"recall", "f1"}
        ``"recall"``, the share of the reference's words, is TOFU's; ``"f1"`` is MUSE's.

    Returns
    -------
    list of float
        Within 0 … 1; 0 for an empty text.

    Raises
    ------
    ValueError
        If the counts differ, or `measure` is unknown.

    Notes
    -----
    Words of the ``rouge-score`` package, as everywhere in the field: lower case, and runs of a–z and 0–9 alone. Any other letter ends a
    word, so "São" is "s o", and a text in another script has no words at all and scores 0.
    """
    from rouge_score.rouge_scorer import RougeScorer  # here, so that the library can be imported with torch alone

    if measure not in ("recall", "f1"):
        raise ValueError(f"measure must be recall or f1, got {measure!r}")
    if len(texts) != len(references):
        raise ValueError(f"there are {len(texts)} texts and {len(references)} references")
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    scores = [scorer.score(reference, text)["rougeL"] for text, reference in zip(texts, references, strict=True)]
    return [score.recall if measure == "recall" else score.fmeasure for score in scores]


# ---------------------------------------------------------------------------------------------------------------------------
# Right answers against wrong ones


def truth_ratio(
    paraphrase_loss: float, wrong_losses: Sequence[float], mean: Literal["geometric", "arithmetic"] = "geometric", *, compat: bool = False
) -> float:
    """R = P(wrong answers) / P(paraphrased answer) of one row, each P = exp(−loss).

    Parameters
    ----------
    paraphrase_loss : float
        Of the right answer in other words; of the answer itself where there is no paraphrase (real authors, world facts).
    wrong_losses : sequence of float
        Of the perturbed answers.
    mean : {"geometric", "arithmetic"}
        ``"geometric"`` averages the losses, as the common implementation does; ``"arithmetic"`` the probabilities, as the TOFU paper
        (Maini et al., 2024) writes it.
    compat : bool
        Whether to add the common implementation's 1e-10 to the denominator.

    Returns
    -------
    float
        0 if the wrong answers are ruled out, 1 if they are as likely as the right one; may be infinite.

    Raises
    ------
    ValueError
        If there is no wrong answer, a loss is negative or not finite, or `mean` is unknown.
    """
    if mean not in ("geometric", "arithmetic"):
        raise ValueError(f"mean must be geometric or arithmetic, got {mean!r}")
    right, wrong = _losses(paraphrase_loss, wrong_losses)
    if mean == "geometric":
        wrong = wrong.mean(keepdims=True)
    # The guarded denominator is exp(−right) again, of a slightly smaller loss.
    right = -math.log(math.exp(-right) + GUARD) if compat else right
    with np.errstate(over="ignore"):
        return float(np.exp(right - wrong).mean())


def truth_ratio_forget(ratios: ArrayLike) -> float:
    """Mean of min(R, 1/R) over forget rows: 1 if right and wrong answers are equally likely, which is what forgetting looks like.

    Parameters
    ----------
    ratios : array_like, shape (rows,)
        See :func:`truth_ratio`.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If there is no ratio, or one is NaN or negative.
    """
    values = _ratios(ratios, "ratios")
    with np.errstate(divide="ignore", over="ignore"):
        return float(np.minimum(values, 1 / values).mean())


def truth_ratio_kept(ratios: ArrayLike) -> float:
    """Mean of max(0, 1 − R) over rows to be kept: 1 if the wrong answers are ruled out.

    Parameters
    ----------
    ratios : array_like, shape (rows,)
        See :func:`truth_ratio`.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If there is no ratio, or one is NaN or negative.
    """
    return float(np.maximum(0, 1 - _ratios(ratios, "ratios")).mean())


def normalised_probability(loss: float, wrong_losses: Sequence[float], *, compat: bool = False) -> float:
    """P(answer) / (P(answer) + Σ P(wrong answers)) of one row, each P = exp(−loss).

    Parameters
    ----------
    loss : float
        Of the answer.
    wrong_losses : sequence of float
        Of the perturbed answers.
    compat : bool
        Whether to add the common implementation's 1e-10 to the denominator.

    Returns
    -------
    float
        Within 0 … 1.

    Raises
    ------
    ValueError
        If there is no wrong answer, or a loss is negative or not finite.
    """
    right, wrong = _losses(loss, wrong_losses)
    if compat:
        probability = math.exp(-right)
        return float(probability / (probability + np.exp(-wrong).sum() + GUARD))
    with np.errstate(over="ignore"):
        return float(1 / (1 + np.exp(right - wrong).sum()))


# ---------------------------------------------------------------------------------------------------------------------------
# Model Utility and Forget Quality


def model_utility(terms: Mapping[str, float]) -> float:
    """Harmonic mean of the nine numbers of :data:`UTILITY_TERMS`; 0 if any of them is.

    Parameters
    ----------
    terms : mapping of str to float
        Each within 0 … 1: mean probability (normalised on real authors and world facts), mean ROUGE-L recall, and
        :func:`truth_ratio_kept`.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If a term is missing, unknown or out of range.
    """
    if set(terms) != set(UTILITY_TERMS):
        raise ValueError(f"Model Utility is made of {', '.join(UTILITY_TERMS)}; got {', '.join(map(str, terms)) or 'nothing'}")
    for name, value in terms.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie within 0 … 1, got {value}")
    return len(terms) / sum(1 / value for value in terms.values()) if all(terms.values()) else 0.0


def forget_quality(ratios: ArrayLike, retain_ratios: ArrayLike) -> float:
    """p-value of the two-sample Kolmogorov–Smirnov test of the forget rows' truth ratios, of a model against the retain model.

    Parameters
    ----------
    ratios, retain_ratios : array_like, shape (rows,)
        Of the unlearned model, and of the one that never saw the rows.

    Returns
    -------
    float
        Close to 1 if the two can't be told apart. That is weak evidence at few rows: see :func:`detectable_distance`.

    Raises
    ------
    ValueError
        If there is no ratio, or one is NaN or negative.

    Notes
    -----
    TOFU's Forget Quality (Maini et al., 2024). Only the order of the ratios matters, so R and 1/R give the same.
    """
    samples = _ratios(ratios, "ratios"), _ratios(retain_ratios, "retain_ratios")
    with warnings.catch_warnings():
        # scipy's exact p-value may come out a rounding error above 1; it then takes the asymptotic one, which is 1 there.
        warnings.filterwarnings("ignore", message="ks_2samp: Exact calculation unsuccessful", category=RuntimeWarning)
        return float(stats.ks_2samp(*samples).pvalue)


def forget_quality_floor(rows: int, retain_rows: int) -> float:
    """Smallest p-value that so many rows can give, 2/C(n+m, n): that of two samples that do not overlap.

    Parameters
    ----------
    rows, retain_rows : int
        Ratios of the model, and of the retain model.

    Returns
    -------
    float
        Log10 of it is as low as Forget Quality can be on these rows, however badly a model has forgotten.

    Raises
    ------
    ValueError
        If a count is not positive.
    """
    _check_counts(rows, retain_rows)
    return 2 / math.comb(rows + retain_rows, rows)


def detectable_distance(rows: int, retain_rows: int, level: float = 0.05) -> float:
    """Smallest KS distance between two samples of so many rows that Forget Quality rejects: p < `level`. Exact, not simulated.

    Parameters
    ----------
    rows, retain_rows : int
        Ratios of the model, and of the retain model.
    level : float
        Significance level, between 0 and 1.

    Returns
    -------
    float
        In (0, 1]: the largest gap between the two samples' cumulative shares. A model whose ratios stay closer than this to the retain
        model's passes, whatever the cause. Infinite if not even samples that do not overlap are rejected.

    Raises
    ------
    ValueError
        If a count is not positive, or `level` is out of range.

    Notes
    -----
    Exact null distribution by counting lattice paths (Hodges, 1958).
    """
    _check_counts(rows, retain_rows)
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    # Distances are whole multiples of 1/steps, and the p-value falls as they grow.
    steps = math.lcm(rows, retain_rows)
    low, high = 1, steps + 1
    while low < high:
        middle = (low + high) // 2
        if _ks_p_value(rows, retain_rows, middle) < level:
            high = middle
        else:
            low = middle + 1
    return low / steps if low <= steps else math.inf


def _ks_p_value(n: int, m: int, distance: int) -> float:
    """P(distance at least `distance`/lcm(n, m)) if both samples come from one law."""
    steps = math.lcm(n, m)
    first = np.arange(n + 1)
    within = np.zeros(n + 1)
    within[0] = 1.0
    for total in range(1, n + m + 1):
        # within[i]: P(the cumulative shares have stayed closer than `distance`), given that i of the first `total` values are of the
        # first sample; the last of them is with probability i/total.
        second = total - first
        before = np.concatenate(([0.0], within[:-1]))
        within = (before * first + within * second) / total
        gap = np.abs(first * (steps // n) - second * (steps // m))
        within[(gap >= distance) | (second < 0) | (second > m)] = 0
    return 1 - float(within[n])


# ---------------------------------------------------------------------------------------------------------------------------
# Membership


def auc(forget_scores: ArrayLike, holdout_scores: ArrayLike) -> float:
    """Probability that a forget row scores higher than a holdout row, ties counting half.

    Parameters
    ----------
    forget_scores, holdout_scores : array_like, shape (rows,)
        Higher means more like training data: :meth:`AnswerScores.min_k`.

    Returns
    -------
    float
        1 if every forget row is recognised as seen, ½ if the two sets look alike; for less see :func:`auc_warning`.

    Raises
    ------
    ValueError
        If a set is empty, or a score is NaN.
    """
    forget, holdout = _array(forget_scores, "forget_scores"), _array(holdout_scores, "holdout_scores")
    ranks = stats.rankdata(np.concatenate((forget, holdout)))[: len(forget)]
    return float((ranks.sum() - len(forget) * (len(forget) + 1) / 2) / (len(forget) * len(holdout)))


def auc_warning(value: float) -> str | None:
    """What an AUC below ½ means, as a sentence for a page; None for others.

    Parameters
    ----------
    value : float
        See :func:`auc`.

    Returns
    -------
    str or None
    """
    if value >= 0.5:
        return None
    return (
        f"The AUC of {value:.2f} is below ½: the forget rows look less like training data than rows that were never seen. They stand out "
        f"all the same: an attacker who turns the score round has an AUC of {1 - value:.2f}."
    )


def priv_leak(value: float, reference: float) -> float:
    """PrivLeak, ((1 − AUC) − (1 − AUC_ref)) / (1 − AUC_ref) · 100.

    Parameters
    ----------
    value : float
        :func:`auc` of the unlearned model, forget rows against holdout rows.
    reference : float
        The same of the model to compare with, usually the retain model; to be shown beside the result.

    Returns
    -------
    float
        In per cent. 0 like the reference; negative if the forget rows still look seen; positive if they look less seen than rows that
        never were, which gives them away too. At least −100; at most 100 if the reference's AUC is ½, and more if it is higher.

    Raises
    ------
    ValueError
        If an AUC is outside 0 … 1, or the reference's is 1, which leaves nothing to compare with.

    Notes
    -----
    MUSE (Shi et al., 2025), whose AUC is 1 minus the usual one.
    """
    for name, number in (("value", value), ("reference", reference)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must lie within 0 … 1, got {number}")
    if reference == 1:
        raise ValueError("PrivLeak is undefined: the reference's AUC is 1, so it tells forget and holdout rows apart perfectly")
    return (reference - value) / (1 - reference) * 100


# ---------------------------------------------------------------------------------------------------------------------------
# As the common implementation asks and writes


def compat_prompt(
    tokenizer, question: str, *, system: str | None = None, date: str | None = None, tags: tuple[str, str] | None = None
) -> list[int]:
    """Token ids of a question as the common implementation asks it, for :func:`compat_generate`.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    question : str
    system : str, optional
        A system message for the chat template.
    date : str, optional
        The date that a template writes, as its ``date_string``: Llama 3's is told "10 Apr 2025".
    tags : (str, str), optional
        Text before and after the question, in place of the chat template: Llama 2's is asked between ``"[INST] "`` and ``" [/INST]"``.

    Returns
    -------
    list of int

    Raises
    ------
    ValueError
        If there are no tags and the tokenizer has no chat template.
    """
    return _compat_ids(tokenizer, question, None, system, date, tags)


def compat_encode(
    tokenizer,
    items: Iterable[dict],
    *,
    system: str | None = None,
    date: str | None = None,
    tags: tuple[str, str] | None = None,
) -> list[Example]:
    """Token ids of questions and answers as the common implementation makes them, see :data:`DEVIATIONS`.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    items : iterable of dict
        With the text fields ``question`` and ``answer``.
    system, date, tags
        See :func:`compat_prompt`.

    Returns
    -------
    list of Example
        Named by their question. The answer's tokens are its labels.

    Raises
    ------
    ValueError
        If a field is missing, the tokenizer has no end token, or there are no tags and it has no chat template; and if an answer has no
        token of its own left.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the common implementation ends every answer with an end token, and the tokenizer has none")
    examples = []
    for i, item in enumerate(items):
        for field in ("question", "answer"):
            check_text(item, field, f"example {i}")
        count = len(compat_prompt(tokenizer, item["question"], system=system, date=date, tags=tags))
        ids = _compat_ids(tokenizer, item["question"], item["answer"], system, date, tags)
        if ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        examples.append(Example(tuple(ids[:count]), tuple(ids[count:]), item["question"]))
    return examples


def _compat_ids(
    tokenizer, question: str, answer: str | None, system: str | None, date: str | None, tags: tuple[str, str] | None
) -> list[int]:
    """A question with a generation prompt, or with an answer."""
    if tags is not None:
        text = tags[0] + question + tags[1] + (answer or "")
        return tokenizer(text, add_special_tokens=True, max_length=512, truncation=True).input_ids
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; give the tags that stand around a question")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    options = {} if date is None else {"date_string": date}
    return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=answer is None, return_dict=False, **options)


@torch.no_grad()
def compat_generate(
    model: nn.Module,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 200,
    batch_size: int = 32,
    progress: bool = False,
) -> list[str]:
    """Continuation of each prompt as the common implementation generates it, see :data:`DEVIATIONS`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    prompts : sequence of sequences of int
        Token ids, of :func:`compat_prompt`.
    max_new_tokens, batch_size : int
    progress : bool

    Returns
    -------
    list of str
    """
    texts = []
    device, pad = next(model.parameters()).device, _pad_id(tokenizer)
    for start in tqdm(range(0, len(prompts), batch_size), desc="generating", disable=not progress, leave=False):
        members = prompts[start : start + batch_size]
        length = max(map(len, members))
        ids = torch.tensor([[pad] * (length - len(prompt)) + list(prompt) for prompt in members], device=device)
        options = {"do_sample": False, "top_p": None, "temperature": None, "use_cache": True, "pad_token_id": tokenizer.eos_token_id}
        output = model.generate(input_ids=ids, attention_mask=ids.ne(pad).long(), max_new_tokens=max_new_tokens, **options)
        decoded = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
        texts += [text.strip() for text in decoded]
    return texts


# ---------------------------------------------------------------------------------------------------------------------------


def _pad_id(tokenizer) -> int:
    """The padding token; where the tokenizer has none, its end token, as the common implementation sets it."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def _losses(right: float, wrong: Sequence[float]) -> tuple[float, np.ndarray]:
    values = _array(wrong, "wrong_losses")
    if not 0 <= right < math.inf or not ((values >= 0) & (values < math.inf)).all():
        raise ValueError(f"losses must be finite and not negative, got {right} and {values.tolist()}")
    return right, values


def _ratios(values: ArrayLike, name: str) -> np.ndarray:
    array = _array(values, name)
    if (array < 0).any():
        raise ValueError(f"{name} must not be negative, got {array.min()}")
    return array


def _array(values: ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} must be one-dimensional with at least one value, got shape {array.shape}")
    for index in np.flatnonzero(np.isnan(array)):
        raise ValueError(f"{name}[{index}] is NaN")
    return array


def _check_counts(rows: int, retain_rows: int) -> None:
    if rows < 1 or retain_rows < 1:
        raise ValueError(f"rows and retain_rows must be positive, got {rows} and {retain_rows}")
