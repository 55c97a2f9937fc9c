"""What a model says when it is asked: whether it knows an answer, and the words in which it gives it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .examples import check_text, encode_question
from .metrics import contains_answer, find_answer, generate


def ask(
    model: nn.Module,
    tokenizer,
    items: Sequence[dict],
    *,
    field: str = "question",
    max_new_tokens: int = 32,
    progress: bool = False,
    **encoding,
) -> list[str]:
    """The model's own greedy answer to each item's question, up to the end of its first line.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    items : sequence of dict
        With the text field `field`.
    field : str
        Which phrasing of the question to ask.
    max_new_tokens : int
    progress : bool
        Whether to show a progress bar.
    **encoding
        ``template`` and ``system`` of :func:`~unlearnlib.examples.encode_question`.

    Returns
    -------
    list of str

    Raises
    ------
    ValueError
        If an item lacks the field.
    """
    for i, item in enumerate(items):
        check_text(item, field, f"example {i}")
    prompts = [encode_question(tokenizer, item[field], **encoding)[0] for item in items]
    texts = generate(model, tokenizer, prompts, max_new_tokens=max_new_tokens, progress=progress)
    return [text.strip().split("\n")[0] for text in texts]


def answers_correctly(said: Sequence[str], items: Sequence[dict]) -> list[bool]:
    """Whether each text that :func:`ask` gave contains the item's answer."""
    return [contains_answer(text, item["answer"]) for text, item in zip(said, items, strict=True)]


def in_own_words(said: Sequence[str], items: Sequence[dict]) -> list[dict]:
    """Items whose answer stands where the model itself says it.

    An instruction-tuned model answers "What is the capital of France?" with a sentence, "The capital of France is Paris.": the
    position that predicts a bare "Paris" is not the one at which it would say it. Where the model's sentence contains the answer, the
    words before it become the item's ``lead``; other items stay as they are.

    Parameters
    ----------
    said : sequence of str
        What :func:`ask` gave.
    items : sequence of dict

    Returns
    -------
    list of dict
    """
    found = []
    for text, item in zip(said, items, strict=True):
        match = find_answer(text, item["answer"])
        found.append(item | {"lead": text[: match.start()].rstrip(), "answer": match.group()} if match else dict(item))
    return found
