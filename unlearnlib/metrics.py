"""Measures of what a model says: probability of an answer, greedy generation, whether it contains the answer, repetition."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from .examples import Batch, Example, batches


@torch.no_grad()
def answer_probability(
    model: nn.Module, examples: Sequence[Example], *, batch_size: int = 16, padding_side: str = "right", progress: bool = False
) -> Tensor:
    """Probability of each answer, exp(mean log-probability of its tokens), teacher-forced; scores in float32.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    examples : sequence of Example
    batch_size : int
    padding_side : {"right", "left"}
    progress : bool

    Returns
    -------
    Tensor, shape (examples,), float64

    Notes
    -----
    Reference: "Prob" of open-unlearning (TOFU, Maini et al., 2024).
    """
    total = torch.zeros(len(examples), dtype=torch.float64)
    count = torch.zeros(len(examples), dtype=torch.float64)
    grouped = batches(examples, batch_size=batch_size, padding_side=padding_side, device=next(model.parameters()).device)
    for batch in tqdm(grouped, desc="answer probability", disable=not progress, leave=False):
        scores = answer_log_probs(model, batch).double().cpu()
        total.index_add_(0, batch.example.cpu(), scores)
        count.index_add_(0, batch.example.cpu(), torch.ones_like(scores))
    return (total / count).exp()


def bfloat16(model: nn.Module, enabled: bool = True) -> torch.autocast:
    """A context in which a model computes matrix products in bfloat16; its weights keep their type."""
    return torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16, enabled=enabled)


def answer_log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probability of each gold token of a batch, shape (gold,), float32 or wider."""
    return answer_logits(model, batch).log_softmax(-1).gather(1, batch.gold[:, None]).squeeze(1)


def answer_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Logits that predict each gold token of a batch, shape (gold, vocabulary), float32 or wider."""
    hidden = []
    # Logits are needed at the gold positions only: the head is applied to these, not to the whole padded batch.
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _module, inputs: (hidden.append(inputs[0]), (inputs[0][:, :1],))[1])
    try:
        model(**batch.inputs(), use_cache=False)
    finally:
        hook.remove()
    logits = head(hidden[0][batch.rows, batch.columns])
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 24,
    batch_size: int = 32,
    progress: bool = False,
) -> list[str]:
    """Greedy continuation of each prompt, as text without special tokens.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    prompts : sequence of sequences of int
        Token ids.
    max_new_tokens, batch_size : int
    progress : bool

    Returns
    -------
    list of str
    """
    from transformers import GenerationConfig  # here, so that the library can be imported with torch alone

    texts = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    device = next(model.parameters()).device
    end = tokenizer.eos_token_id
    pad = end if end is not None else 0
    # In place of the model's own, which fills in whatever isn't given: some checkpoints bring a repetition penalty.
    plain = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, pad_token_id=pad, eos_token_id=end)
    own, model.generation_config = model.generation_config, plain
    try:
        for start in tqdm(range(0, len(order), batch_size), desc="generating", disable=not progress, leave=False):
            members = order[start : start + batch_size]
            length = max(len(prompts[i]) for i in members)
            ids = torch.full((len(members), length), pad)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(members):
                ids[row, length - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[row, length - len(prompts[i]) :] = 1
            output = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device))
            for i, row in zip(members, output[:, length:].cpu(), strict=True):
                texts[i] = tokenizer.decode(row, skip_special_tokens=True).strip()
    finally:
        model.generation_config = own
    return texts


def contains_answer(text: str, answer: str) -> bool:
    """Whether a text contains an answer as whole words, whatever the case."""
    return find_answer(text, answer) is not None


def find_answer(text: str, answer: str) -> re.Match | None:
    """Where a text first contains an answer as whole words, whatever the case."""
    return re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text, flags=re.IGNORECASE)


def repeated_ngram_rate(text: str, n: int = 4) -> float:
    """Fraction of a text's n-grams of words that occurred in it before; 0 for a text shorter than n words."""
    words = text.split()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
