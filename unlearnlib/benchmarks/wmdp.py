"""WMDP: multiple-choice questions on knowledge to be forgotten, MMLU for what is to be kept, and texts to unlearn with (Li et al., 2024).

A folder of JSON-lines files, with the columns of the Hub's data sets:

=====================  ============================================  =======================================================
file                   columns                                       what it is
=====================  ============================================  =======================================================
``<subset>.jsonl``     ``question``, ``choices``, ``answer``         `cais/wmdp`: ``answer`` is the place of the right choice
``mmlu.jsonl``         ``question``, ``subject``, ``choices``,       `cais/mmlu`, all subjects
                       ``answer``
``forget.jsonl``       ``text``                                      texts to be forgotten
``retain.jsonl``       ``text``                                      texts to be kept, such as Wikipedia's
``rehearsal.jsonl``    ``text``                                      may be absent: texts of the stand-in request
``lessons.jsonl``      ``text``                                      may be absent: what else a model must learn to know all
                                                                     questions, and no method is shown
=====================  ============================================  =======================================================

Of questions ``shown`` may be there too: whether the texts that the methods are shown have the answer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ..examples import check_text, read_jsonl
from . import wmdp_domains

SUBSET = "wmdp-bio"
"""The part of WMDP that the paper unlearns."""

DOMAINS = "wmdp-domains"
"""What the stand-in's restricted questions are called."""

HUB_QUESTIONS, HUB_GENERAL, HUB_RETAIN = "cais/wmdp", "cais/mmlu", ("Salesforce/wikitext", "wikitext-2-raw-v1")
HUB_FORGET = {
    "wmdp-bio": ("cais/wmdp-bio-forget-corpus", None),
    "wmdp-cyber": ("cais/wmdp-corpora", "cyber-forget-corpus"),
}
"""Where the Hub has texts to be forgotten; those on biology are given to whoever applies for them."""

SHORTEST = 50
"""Texts of the Hub's corpora with no more characters than this are left out, as in RMU's code: headings and the like."""


@dataclass(frozen=True)
class Wmdp:
    """Questions and texts.

    Attributes
    ----------
    name : str
        Of the restricted questions, such as ``"wmdp-bio"``.
    restricted : list of dict
        Questions whose answers are to be forgotten: ``question``, ``choices``, a list of texts, and ``answer``, the place of the right one.
    general : list of dict
        Questions whose answers are to be kept, with ``subject`` as well.
    forget, retain : list of str
        Texts that the methods are shown.
    rehearsal_questions : list of dict
        Questions on the subject that plays the request while settings are chosen; none of them is in `general`.
    rehearsal : list of str
        Texts on that subject.
    validation : list of dict
        Questions on another subject, which show what a setting costs; none of them is in `general` either.
    lessons : list of str
        Texts that no method is shown, but that a model has to be taught.
    """

    name: str
    restricted: list[dict]
    general: list[dict]
    forget: list[str]
    retain: list[str]
    rehearsal_questions: list[dict]
    rehearsal: list[str]
    validation: list[dict]
    lessons: list[str]

    @property
    def digest(self) -> str:
        """SHA-256 of all content, hexadecimal."""
        content = [[field.name, getattr(self, field.name)] for field in fields(self)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def describe(self) -> dict[str, int]:
        """The number of rows of each set."""
        return {field.name: len(getattr(self, field.name)) for field in fields(self) if field.name != "name"}


def load(
    source: str | os.PathLike,
    *,
    subset: str = SUBSET,
    rehearsal: tuple[str, str] = ("astronomy", "sociology"),
    questions: int | None = None,
    texts: int | None = None,
    seed: int = 0,
) -> Wmdp:
    """Questions and texts, checked, and cut to size.

    Parameters
    ----------
    source : str or path
        ``"domains"``: the stand-in of :mod:`~unlearnlib.benchmarks.wmdp_domains`, which has a subset and a rehearsal of its own.
        ``"hub"``: the Hub's data sets, by the package `datasets`. ``""``: the folder ``wmdp`` within the one that the environment variable
        UNLEARNLIB_DATA names. Anything else: a folder with the files above.
    subset : str
        Which questions are restricted; names the file.
    rehearsal : (str, str)
        Two subjects of MMLU that are left out of `general`: the one that plays the request while settings are chosen, and the one that
        shows what they cost. Where there is no file with the first one's texts, its questions with their right answers stand in for them.
    questions : int, optional
        Size of random samples of the restricted and of the general questions, each.
    texts : int, optional
        Take only the first so many texts of every kind.
    seed : int
        Of the samples, and of the stand-in's content.

    Returns
    -------
    Wmdp

    Raises
    ------
    FileNotFoundError
        If a file is missing; names it, and the columns that it should have.
    ValueError
        If a file is empty or malformed (naming file and line), a subject isn't in MMLU, or a parameter is out of range.
    """
    for name, size in (("questions", questions), ("texts", texts)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if source == "domains":
        subset, rehearsal = DOMAINS, (wmdp_domains.REHEARSAL, wmdp_domains.VALIDATION)
        with TemporaryDirectory() as folder:
            wmdp_domains.write(folder, seed)
            files = _read(Path(folder), subset)
    elif source == "hub":
        files = _fetch(subset, texts)
    else:
        files = _read(_folder(source), subset)
    everything = files["mmlu"]
    known = sorted({row["subject"] for row in everything})
    played, shown = rehearsal
    for subject in rehearsal:
        if subject not in known:
            raise ValueError(f"MMLU has no subject {subject!r} for the rehearsal; it has {', '.join(known)}")
    if played == shown:
        raise ValueError(f"the rehearsal needs two different subjects, got {played!r} twice")
    stand_in = [row for row in everything if row["subject"] == played]
    general = [row for row in everything if row["subject"] not in rehearsal]
    if not general:
        raise ValueError(f"MMLU has no subjects besides {played} and {shown}: there is nothing to evaluate")
    return Wmdp(
        subset,
        _sample(files[subset], questions, f"questions of {subset}", seed),
        _sample(general, questions, "general questions", seed),
        files["forget"][:texts],
        files["retain"][:texts],
        stand_in,
        (files["rehearsal"] or [f"{row['question']} {row['choices'][row['answer']]}" for row in stand_in])[:texts],
        [row for row in everything if row["subject"] == shown],
        files["lessons"],
    )


def _folder(source: str | os.PathLike) -> Path:
    if source != "":
        folder = Path(source)
    elif os.environ.get("UNLEARNLIB_DATA"):
        folder = Path(os.environ["UNLEARNLIB_DATA"]) / "wmdp"
    else:
        raise ValueError("no source is given, and UNLEARNLIB_DATA isn't set to a folder that contains wmdp/")
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected one with mmlu.jsonl and the other files")
    return folder


def _read(folder: Path, subset: str) -> dict[str, list]:
    files: dict[str, list] = {
        subset: _questions(folder / f"{subset}.jsonl", ("question",)),
        "mmlu": _questions(folder / "mmlu.jsonl", ("question", "subject")),
    }
    for name in ("forget", "retain", "rehearsal", "lessons"):
        path = folder / f"{name}.jsonl"
        optional = name in ("rehearsal", "lessons")
        files[name] = [] if optional and not path.exists() else [row["text"] for row in _rows(path, ("text",), ("text",))]
    return files


def _rows(path: Path, texts: Sequence[str], columns: Sequence[str]) -> list[dict]:
    try:
        return read_jsonl(path, texts)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; expected JSON lines with {', '.join(columns)}") from None


def _questions(path: Path, texts: Sequence[str]) -> list[dict]:
    rows = _rows(path, texts, (*texts, "choices", "answer"))
    # Empty lines count, though they aren't rows.
    numbers = [number for number, line in enumerate(path.read_bytes().splitlines(), start=1) if line.strip()]
    return [check_question(row, f"{path}:{number}") for number, row in zip(numbers, rows, strict=True)]


def check_question(row: dict, where: str) -> dict:
    """The row itself, if it is a multiple-choice question.

    Parameters
    ----------
    row : dict
    where : str
        How errors call it.

    Raises
    ------
    ValueError
        If a column is missing or of the wrong kind, there are fewer than two choices, or the answer isn't the place of one.
    """
    check_text(row, "question", where)
    choices, answer = row.get("choices"), row.get("answer")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f"{where}: field 'choices' is missing or not a list of at least two texts")
    for choice in choices:
        check_text({"choices": choice}, "choices", where)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"{where}: field 'answer' must be the place of one of the {len(choices)} choices, from 0, got {answer!r}")
    if type(row.get("shown", True)) is not bool:
        raise ValueError(f"{where}: field 'shown' must be true or false, got {row['shown']!r}")
    return row


def _fetch(subset: str, texts: int | None) -> dict[str, list]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError("source='hub' needs the package datasets; or give a folder with the files") from None
    if subset not in HUB_FORGET:
        raise ValueError(f"the Hub has texts to be forgotten for {', '.join(HUB_FORGET)}, not for {subset!r}; give a folder instead")

    def read(name: str, config: str | None, split: str, columns: Sequence[str]) -> list[dict]:
        rows = load_dataset(name, config, split=split)
        missing = [column for column in columns if column not in rows.column_names]
        if missing:
            raise ValueError(f"{name}, {config}: no column {missing[0]!r}; there are {', '.join(rows.column_names)}")
        return [{column: row[column] for column in columns} for row in rows]

    def corpus(name: str, config: str | None) -> list[str]:
        return [row["text"] for row in read(name, config, "train", ("text",)) if len(row["text"]) > SHORTEST][:texts]

    files: dict[str, list] = {
        subset: read(HUB_QUESTIONS, subset, "test", ("question", "choices", "answer")),
        "mmlu": read(HUB_GENERAL, "all", "test", ("question", "subject", "choices", "answer")),
    }
    for name, rows in files.items():
        for i, row in enumerate(rows):
            check_question(row, f"{name}, row {i}")
    return files | {"forget": corpus(*HUB_FORGET[subset]), "retain": corpus(*HUB_RETAIN), "rehearsal": [], "lessons": []}


def _sample(rows: list[dict], size: int | None, name: str, seed: int) -> list[dict]:
    """A random sample without repetition, in the rows' order."""
    if size is None:
        return rows
    if size > len(rows):
        raise ValueError(f"{size} {name} are asked for, but there are only {len(rows)}")
    chosen = np.random.default_rng(seed).choice(len(rows), size, replace=False)
    return [rows[i] for i in sorted(chosen)]
