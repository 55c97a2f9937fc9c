"""Examples: questions and answers as token ids, and padded batches of them that know which positions predict an answer token."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One prompt with its answer.

    Attributes
    ----------
    prompt, answer : tuple of int
        Token ids. The answer's are the gold tokens; an end-of-turn token, if there is one, is one of them.
    name : str
        How reports call the example.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    name: str = ""

    def __post_init__(self):
        if not self.prompt:
            raise ValueError(f"example {self.name!r}: the prompt has no tokens, so nothing predicts the answer's first token")
        if not self.answer:
            raise ValueError(f"example {self.name!r}: the answer has no tokens")

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Batch:
    """Padded examples, with the positions that predict their answer tokens.

    Attributes
    ----------
    input_ids, attention_mask, position_ids : Tensor of int64, shape (batch, length)
    rows, columns : Tensor of int64, shape (gold,)
        Where each gold token is predicted: one position before it. Derived from true lengths, never from the padding token.
    gold : Tensor of int64, shape (gold,)
        The gold tokens.
    example : Tensor of int64, shape (gold,)
        Index of the example that each belongs to, in the list that was batched.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    rows: Tensor
    columns: Tensor
    gold: Tensor
    example: Tensor

    def inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of a model's forward."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "position_ids": self.position_ids}

    def first(self) -> Batch:
        """The batch of the first example alone."""
        alone = self.rows == 0
        gold = (part[alone] for part in (self.rows, self.columns, self.gold, self.example))
        return Batch(self.input_ids[:1], self.attention_mask[:1], self.position_ids[:1], *gold)


def read_jsonl(path: str | os.PathLike, fields: Sequence[str] = ("question", "answer")) -> list[dict]:
    """Read a JSON-lines file of objects with the given text fields; other fields are kept.

    Raises
    ------
    ValueError
        Naming file, line and field if a line isn't a JSON object or a field is missing, empty or not text, and if there is no line at all.
    """
    with Path(path).open("rb") as file:
        items = [_parse_line(line, f"{path}:{number}", fields) for number, line in enumerate(file, start=1) if line.strip()]
    if not items:
        raise ValueError(f"{path}: holds no examples")
    return items


def _parse_line(line: bytes, where: str, fields: Sequence[str]) -> dict:
    try:
        item = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text: {error.reason} (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(item, dict):
        raise ValueError(f"{where}: expected an object with {', '.join(fields)}, got {type(item).__name__}")
    for field in fields:
        check_text(item, field, where)
    return item


def encode(tokenizer, items: Iterable[dict], *, template: str = "auto", system: str | None = None) -> list[Example]:
    """Token ids of questions and answers.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    items : iterable of dict
        With the text fields ``question`` and ``answer``, and optionally ``lead``: words of the answering side that stand before
        the answer, like "The capital of France is". They belong to the prompt, and the answer is then a piece of a sentence: no
        end-of-turn token is added to it.
    template, system : str
        See :func:`encode_question`. A chat template's answer ends with exactly one end-of-turn token; a plain one's is joined to the
        question with a space, and ends with the end-of-text token if there is one.

    Returns
    -------
    list of Example
        Named by their question.

    Raises
    ------
    ValueError
        If an answer has no text, a field is missing, or a chat template is asked for and there is none.
    """
    chat = _is_chat(tokenizer, template)
    examples = []
    for i, item in enumerate(items):
        for field in ("question", "answer"):
            check_text(item, field, f"example {i}")
        question, lead = item["question"], item.get("lead", "")
        prompt, end = encode_question(tokenizer, question, template=template, system=system)
        # A chat template ends where the answer's first word begins; everywhere else a space comes before it.
        joined = chat or question[-1].isspace()
        if lead:
            prompt += tokenizer(lead if joined else " " + lead, add_special_tokens=False).input_ids
        text = item["answer"].strip() if joined and not lead else " " + item["answer"].strip()
        answer = tokenizer(text, add_special_tokens=False).input_ids
        examples.append(Example(tuple(prompt), tuple(answer if lead else answer + end), question))
    return examples


def encode_question(tokenizer, question: str, *, template: str = "auto", system: str | None = None) -> tuple[list[int], list[int]]:
    """Token ids of a question as a prompt, and those that end an answer to it.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    question : str
    template : {"auto", "chat", "plain"}
        ``"chat"`` renders the question through the tokenizer's chat template with a generation prompt. ``"plain"`` takes it as it is,
        with the special tokens that the tokenizer puts in front, and without any that it puts behind. ``"auto"`` is ``"chat"`` where
        the tokenizer has a template.
    system : str, optional
        A system message for the chat template. Without one a template may insert its own: SmolLM2's does.

    Returns
    -------
    prompt, end : list of int
        `end` is one token, or none where the tokenizer knows none.

    Raises
    ------
    ValueError
        If `template` is unknown, or a chat template is asked for and there is none.
    """
    if not _is_chat(tokenizer, template):
        bare = tokenizer(question, add_special_tokens=False).input_ids
        full = tokenizer(question).input_ids
        start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
        return full[:start] + bare, _end_of_text(tokenizer)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # What the template writes right after the assistant's words is this model's end of turn.
    turn = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "·"}], tokenize=False)
    after = tokenizer(turn.rpartition("·")[2], add_special_tokens=False).input_ids
    end = after[:1] if after and after[0] in tokenizer.all_special_ids else _end_of_text(tokenizer)
    return tokenizer(prompt, add_special_tokens=False).input_ids, end


def check_text(item: dict, field: str, where: str) -> None:
    """Raise ValueError, naming `where` and the field, unless the item has it and it is text."""
    if not isinstance(item, dict):
        raise ValueError(f"{where}: expected a dict with the field {field!r}, got {type(item).__name__}")
    if not isinstance(item.get(field), str) or not item[field].strip():
        raise ValueError(f"{where}: field {field!r} is missing, empty or not text")


def _is_chat(tokenizer, template: str) -> bool:
    if template not in ("auto", "chat", "plain"):
        raise ValueError(f"template must be auto, chat or plain, got {template!r}")
    if template == "chat" and not tokenizer.chat_template:
        raise ValueError("template='chat', but the tokenizer has no chat template")
    return template != "plain" and bool(tokenizer.chat_template)


def _end_of_text(tokenizer) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def batches(
    examples: Sequence[Example],
    *,
    batch_size: int = 16,
    padding_side: str = "right",
    pad_id: int = 0,
    device: str | torch.device = "cpu",
) -> list[Batch]:
    """Padded batches of examples of similar length.

    Parameters
    ----------
    examples : sequence of Example
    batch_size : int
    padding_side : {"right", "left"}
    pad_id : int
        Any token: masks and positions come from true lengths, so it may equal a token that the text uses.
    device : str or torch.device

    Returns
    -------
    list of Batch

    Raises
    ------
    ValueError
        If there are no examples, or a parameter is out of range.
    """
    if not examples:
        raise ValueError("there are no examples to batch")
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    if padding_side not in ("right", "left"):
        raise ValueError(f"padding_side must be right or left, got {padding_side!r}")
    order = sorted(range(len(examples)), key=lambda i: len(examples[i]))
    return [
        _batch([(i, examples[i]) for i in order[start : start + batch_size]], padding_side, pad_id, device)
        for start in range(0, len(order), batch_size)
    ]


def _batch(numbered: list[tuple[int, Example]], padding_side: str, pad_id: int, device: str | torch.device) -> Batch:
    length = max(len(example) for _, example in numbered)
    input_ids = torch.full((len(numbered), length), pad_id)
    attention_mask, position_ids = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    rows, columns, gold, index = [], [], [], []
    for row, (i, example) in enumerate(numbered):
        start = 0 if padding_side == "right" else length - len(example)
        where = slice(start, start + len(example))
        input_ids[row, where] = torch.tensor(example.prompt + example.answer)
        attention_mask[row, where] = 1
        position_ids[row, where] = torch.arange(len(example))
        first = start + len(example.prompt) - 1
        rows += [row] * len(example.answer)
        columns += range(first, first + len(example.answer))
        gold += example.answer
        index += [i] * len(example.answer)
    tensors = (input_ids, attention_mask, position_ids, *(torch.tensor(values) for values in (rows, columns, gold, index)))
    return Batch(*(tensor.to(device) for tensor in tensors))
