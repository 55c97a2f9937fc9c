"""The project's own list of well-known facts, and fits on it for the pages of the book."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch
from torch import nn

from .elicit import answers_correctly, ask, in_own_words
from .examples import Example, encode, read_jsonl
from .grom.fit import FitData


def bundled_facts(relations: Sequence[str] | None = None) -> list[dict]:
    """The project's own list of well-known facts.

    Parameters
    ----------
    relations : sequence of str, optional
        Which relations to take, such as ``"capital"``; all by default.

    Returns
    -------
    list of dict
        With the text fields ``relation``, ``subject``, ``question``, ``paraphrase`` and ``answer``.

    Raises
    ------
    ValueError
        If a relation is unknown.
    """
    facts = read_jsonl(Path(str(resources.files("unlearnlib").joinpath("data/facts.jsonl"))))
    known = {fact["relation"] for fact in facts}
    for relation in relations or ():
        if relation not in known:
            raise ValueError(f"unknown relation {relation!r}: the list has {', '.join(sorted(known))}")
    return [fact for fact in facts if relations is None or fact["relation"] in relations]


def split_facts(
    facts: Sequence[dict], known: Sequence[bool], relation: str, forget: int, held_out: float, seed: int
) -> dict[str, list[dict]]:
    """Split the known facts into a request to forget, facts to retain and facts that are held out.

    Parameters
    ----------
    facts : sequence of dict
        With the field ``relation``.
    known : sequence of bool
        Which of them to use.
    relation : str
        Where the request comes from.
    forget : int
        Size of the request.
    held_out : float
        Part of the other facts that is held out, of the request's relation and of the others alike.
    seed : int

    Returns
    -------
    dict of str to list of dict
        ``forget``, ``retain`` and ``held_out``.

    Raises
    ------
    ValueError
        If there are not enough known facts of the relation.
    """
    usable = [fact for fact, is_known in zip(facts, known, strict=True) if is_known]
    generator = torch.Generator().manual_seed(seed)
    usable = [usable[i] for i in torch.randperm(len(usable), generator=generator).tolist()]
    same = [fact for fact in usable if fact["relation"] == relation]
    others = [fact for fact in usable if fact["relation"] != relation]
    if len(same) <= forget:
        raise ValueError(f"the model knows {len(same)} facts of the relation {relation!r}: too few to forget {forget} and keep some")
    request, same = same[:forget], same[forget:]
    cuts = [round(held_out * len(group)) for group in (same, others)]
    return {
        "forget": request,
        "retain": same[cuts[0] :] + others[cuts[1] :],
        "held_out": same[: cuts[0]] + others[: cuts[1]],
    }


def recited_facts(
    model: nn.Module, tokenizer, relation: str, forget: int, retain: int, validation: int, seed: int
) -> tuple[FitData, list[Example]]:
    """A fit on facts that a model has learned by heart: some of one relation to forget, some of the others to retain and to validate on.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    relation : str
    forget, retain, validation : int
        Numbers of facts.
    seed : int
        Of their choice.

    Returns
    -------
    data : FitData
    validation : list of Example
    """
    facts = bundled_facts()
    groups = split_facts(facts, [True] * len(facts), relation, forget, 0.0, seed)
    others = encode(tokenizer, [fact for fact in groups["retain"] if fact["relation"] != relation])
    return FitData(model, encode(tokenizer, groups["forget"]), others[:retain]), others[retain : retain + validation]


def spoken_facts(
    model: nn.Module, tokenizer, relation: str, forget: int, retain: int, validation: int, seed: int
) -> tuple[FitData, list[Example]]:
    """A fit on facts of one relation that a model knows, each placed in the model's own words; and further ones to validate on.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    relation : str
    forget, retain, validation : int
        Numbers of facts.
    seed : int
        Of their choice.

    Returns
    -------
    data : FitData
    validation : list of Example

    Raises
    ------
    ValueError
        If the model knows too few.
    """
    facts = bundled_facts([relation])
    said = ask(model, tokenizer, facts, max_new_tokens=16)
    groups = split_facts(in_own_words(said, facts), answers_correctly(said, facts), relation, forget, 0.0, seed)
    kept = encode(tokenizer, groups["retain"])
    if len(kept) < retain + validation:
        raise ValueError(f"the model knows {len(kept)} other facts: too few for {retain} to retain and {validation} to validate on")
    return FitData(model, encode(tokenizer, groups["forget"]), kept[:retain]), kept[retain : retain + validation]
