"""Corpora: running text as examples in which every next token is gold, for keys, gradients and scores alike."""

from __future__ import annotations

from collections.abc import Sequence

from .examples import Example, encode, encode_question

WINDOW = 400
"""Tokens of a window, as in the GROM paper's runs on MUSE and WMDP."""


def windows(tokenizer, texts: Sequence[str], length: int = WINDOW) -> list[Example]:
    """Texts, cut into windows of tokens: a window's first token is the prompt, and all that follow it are gold.

    Neighbouring windows share one token, the last of one and the first of the next, so that every token of a text but its very first is
    gold in exactly one window. Where the tokenizer puts a token in front of a text, each window begins with that one instead, and every
    token of the text is gold once. Nothing is capped, and no end-of-text token is added.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    texts : sequence of str
    length : int
        Tokens of a window, its first one included; a text's last window may be shorter.

    Returns
    -------
    list of Example
        Text after text, each window named by the number of its text and of its first gold token, both from 0.

    Raises
    ------
    ValueError
        If `length` is less than 2, there are no texts, one isn't text or is empty, or one has a single token and nothing before it.
    """
    if length < 2:
        raise ValueError(f"a window needs at least 2 tokens, one of them gold, got {length}")
    if isinstance(texts, str) or not texts:
        raise ValueError("texts must be a sequence of at least one text")
    any_text, _ = encode_question(tokenizer, "a", template="plain")
    front = any_text[: len(any_text) - len(tokenizer("a", add_special_tokens=False).input_ids)]
    start, step = 0 if front else 1, length - max(1, len(front))
    if step < 1:
        raise ValueError(f"a window of {length} tokens has no room beside the {len(front)} that the tokenizer puts in front")
    found = []
    for number, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"text {number}: is empty or not text")
        bare = tokenizer(text, add_special_tokens=False).input_ids
        if start >= len(bare):
            raise ValueError(f"text {number}: has a single token, which nothing predicts: {text!r}")
        for first in range(start, len(bare), step):
            prompt = front or bare[first - 1 : first]
            found.append(Example(tuple(prompt), tuple(bare[first : first + step]), f"text {number}, token {first}"))
    return found


def unshared(found: Sequence[Example], others: Sequence[Example]) -> list[Example]:
    """Windows that are not, token for token, among others: two texts may end in the same few words, and so have a last window in common.

    Parameters
    ----------
    found, others : sequence of Example

    Returns
    -------
    list of Example
        Those of `found`, in their order.
    """
    known = {(window.prompt, window.answer) for window in others}
    return [window for window in found if (window.prompt, window.answer) not in known]


def as_examples(tokenizer, items: Sequence[dict | Example], *, template: str = "auto", system: str | None = None) -> list[Example]:
    """Token ids of questions and answers; items that are examples already, like windows of text, stay as they are.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    items : sequence of dict or Example
        All of one kind.
    template, system
        See :func:`~unlearnlib.examples.encode`.

    Returns
    -------
    list of Example

    Raises
    ------
    ValueError
        If items of both kinds are mixed, or a question or answer is missing.
    """
    ready = [isinstance(item, Example) for item in items]
    if not any(ready):
        return encode(tokenizer, items, template=template, system=system)
    if not all(ready):
        raise ValueError(f"item {ready.index(not ready[0])}: a set holds either questions with answers or Examples, not both")
    return list(items)
