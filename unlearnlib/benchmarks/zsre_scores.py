"""The editing and the unlearning harness of zsRE and CounterFact: what a model says to prompts, paraphrases and unrelated questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..examples import Example, encode_question
from ..metrics import contains_answer, generate, repeated_ngram_rate
from ..stats import bootstrap_interval
from ..unlearning_metrics import teacher_forced

UNLEARNING, EDITING = "unlearning", "editing"
HARNESSES = (UNLEARNING, EDITING)
ANSWERS = {UNLEARNING: "answer", EDITING: "target"}
"""Which answer each harness asks for: the true one, which is to be gone, or the false one, which is to be learned."""

MEASURES = ("efficacy", "generalization", "specificity")

OWN = ("said", "repeated_4gram")
"""Measures of the model's own answers to the prompts."""

_SCORING = (
    "plain prompts; efficacy on the prompt, generalization on its paraphrases, specificity on unrelated questions, each the mean over "
    "facts of the share of the answer's tokens (end of text not among them) that are the argmax after the prompt and the right tokens "
    "before them; *_exact: the share of answers all of whose tokens are, so that greedy decoding gives them"
)
PROTOCOLS = {
    UNLEARNING: f"unlearning harness: the true answer, lower efficacy and generalization are better; {_SCORING}",
    EDITING: f"editing harness: the new answer, higher is better; specificity on the true answers; {_SCORING}",
}
"""What the numbers of a row mean; every row carries the text of its harness."""

Scores = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Evaluation:
    """How models are evaluated.

    Attributes
    ----------
    batch_size : int
        Facts scored at once; changes no result beyond rounding.
    max_new_tokens : int
        Where the model's own answers are cut; 0 leaves them out.
    """

    batch_size: int = 32
    max_new_tokens: int = 12


def encode_pairs(tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Example]:
    """Token ids of prompts and of what comes after a space, without an end of text: the tokens that the harness scores.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    pairs : sequence of (str, str)
        Prompt and answer.

    Returns
    -------
    list of Example
        Named by their prompt.
    """
    return [
        Example(
            tuple(encode_question(tokenizer, prompt, template="plain")[0]),
            tuple(tokenizer(" " + answer.strip(), add_special_tokens=False).input_ids),
            prompt,
        )
        for prompt, answer in pairs
    ]


def evaluate(
    model: nn.Module,
    tokenizer,
    facts: Sequence[dict],
    unrelated: Sequence[dict],
    harness: str = UNLEARNING,
    how: Evaluation | None = None,
    *,
    progress: bool = False,
) -> Scores:
    """Ask a model for facts and for what has nothing to do with them.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    facts : sequence of dict
        From :func:`~unlearnlib.benchmarks.zsre.load`.
    unrelated : sequence of dict
        ``prompt`` and ``answer``.
    harness : {"unlearning", "editing"}
        Which answer to ask for, see :data:`ANSWERS`.
    how : Evaluation, optional
    progress : bool

    Returns
    -------
    dict of str to dict of str to list of float
        By measure, ``token``, ``exact`` and ``prob`` (exp of the mean log-probability of the answer's tokens), a number a fact or
        unrelated question. Where the model was let to speak also ``own``: of each fact ``said``, whether its own answer to the prompt
        contains the one asked for, and ``repeated_4gram``.

    Raises
    ------
    ValueError
        If there are no facts or no unrelated questions, or the harness is unknown.
    """
    if harness not in HARNESSES:
        raise ValueError(f"harness must be one of {', '.join(HARNESSES)}, got {harness!r}")
    if not facts or not unrelated:
        raise ValueError(f"there is nothing to ask: {len(facts)} facts, {len(unrelated)} unrelated questions")
    how, field = how or Evaluation(), ANSWERS[harness]
    asked = {
        "efficacy": [[(fact["prompt"], fact[field])] for fact in facts],
        "generalization": [[(prompt, fact[field]) for prompt in fact["paraphrases"]] for fact in facts],
        "specificity": [[(question["prompt"], question["answer"])] for question in unrelated],
    }
    found: Scores = {}
    for measure, groups in asked.items():
        examples = encode_pairs(tokenizer, [pair for group in groups for pair in group])
        answers = iter(teacher_forced(model, examples, batch_size=how.batch_size, progress=progress))
        scored = [[next(answers) for _ in group] for group in groups]
        found[measure] = {
            "token": [_mean([answer.hits.double().mean().item() for answer in group]) for group in scored],
            "exact": [_mean([float(answer.hits.all()) for answer in group]) for group in scored],
            "prob": [_mean([answer.probability for answer in group]) for group in scored],
        }
    if how.max_new_tokens:
        prompts = [example.prompt for example in encode_pairs(tokenizer, [(fact["prompt"], fact[field]) for fact in facts])]
        options = {"max_new_tokens": how.max_new_tokens, "batch_size": how.batch_size, "progress": progress}
        texts = generate(model, tokenizer, prompts, **options)
        found["own"] = {
            "said": [float(contains_answer(text, fact[field])) for text, fact in zip(texts, facts, strict=True)],
            "repeated_4gram": [repeated_ngram_rate(text) for text in texts],
        }
    return found


def first(scores: Scores, count: int) -> Scores:
    """The scores of the first facts alone; unrelated questions are not about any of them, and stay."""
    return {
        measure: kinds if measure == "specificity" else {kind: values[:count] for kind, values in kinds.items()}
        for measure, kinds in scores.items()
    }


def table_row(scores: Scores, harness: str = UNLEARNING) -> dict:
    """The numbers of one model under one harness.

    Parameters
    ----------
    scores : dict
        From :func:`evaluate`.
    harness : {"unlearning", "editing"}

    Returns
    -------
    dict
        ``efficacy``, ``generalization`` and ``specificity``, token-level; with ``_exact``, ``_prob``, and with ``_low`` and ``_high``, the
        95 % bootstrap interval of the token-level one over facts; ``said`` and ``repeated_4gram`` where they were measured;
        ``final``, see :func:`final`; ``harness`` and ``protocol``.
    """
    row: dict = {measure: _mean(scores[measure]["token"]) for measure in MEASURES}
    row |= {f"{measure}_{kind}": _mean(scores[measure][kind]) for measure in MEASURES for kind in ("exact", "prob")}
    for measure in MEASURES:
        values = scores[measure]["token"]
        low, high = bootstrap_interval(values, method="percentile") if len(values) > 1 else values * 2
        row |= {f"{measure}_low": low, f"{measure}_high": high}
    row |= {name: _mean(values) for name, values in scores.get("own", {}).items()}
    return row | {"final": final(row, harness), "harness": harness, "protocol": PROTOCOLS[harness]}


def final(row: Mapping[str, float], harness: str = UNLEARNING) -> float:
    """½ (specificity + mean of the two terms on the fact): 1 − efficacy and 1 − generalization where the answer is to be gone.

    Notes
    -----
    Ours: the form that fits the GROM paper's other tables. Its table on zsRE isn't at hand.
    """
    terms = [row[measure] if harness == EDITING else 1 - row[measure] for measure in ("efficacy", "generalization")]
    return (row["specificity"] + _mean(terms)) / 2


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
