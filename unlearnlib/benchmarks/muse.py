"""MUSE: news or books, some of which are to be forgotten, as text and as knowledge (Shi et al., 2025, "Six-Way Evaluation").

A model learns the documents of `train`. Those of `forget` are to be unlearned, with those of `retain` at hand to keep; what is kept is
measured by questions on `retain_eval`, which no method is shown, and nothing has seen `holdout`.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from ..examples import check_text, read_jsonl
from . import muse_texts

CORPORA = ("news", "books")
HUB = {"news": "muse-bench/MUSE-News", "books": "muse-bench/MUSE-Books"}

TEXT, PASSAGE, QA = ("text",), ("prompt", "gt"), ("question", "answer")
COLUMNS = {
    ("raw", "forget"): TEXT,
    ("raw", "retain1"): TEXT,
    ("raw", "retain2"): TEXT,
    ("raw", "holdout"): TEXT,
    ("verbmem", "forget"): PASSAGE,
    ("knowmem", "forget_qa"): QA,
    ("knowmem", "retain_qa"): QA,
    ("knowmem", "forget_qa_icl"): QA,
    ("knowmem", "retain_qa_icl"): QA,
    ("privleak", "forget"): TEXT,
    ("privleak", "holdout"): TEXT,
}
"""Columns of the Hub's configurations and splits that are read; from ``train``, where there is one, all three splits, each a text a row."""
TRAIN = ("forget", "retain1", "retain2")
SAMPLED = ("verbmem", "forget_qa", "retain_qa", "privleak_forget", "privleak_holdout")
"""What ``rows`` cuts."""


@dataclass(frozen=True)
class Muse:
    """One corpus of MUSE.

    Attributes
    ----------
    corpus : {"news", "books"}
    train : list of str
        Documents that the model learns.
    kept : list of str
        Those of them that the model learns that never sees anything to be forgotten: all but the Hub's split `forget` of `train`, which
        for the news also has the documents of later requests.
    forget : list of str
        Documents to be forgotten.
    retain : list of str
        Documents to keep, which a method is shown (the Hub's `retain1`).
    retain_eval : list of str
        Documents to keep that no method is shown (`retain2`).
    holdout : list of str
        Documents like those to be forgotten that no model has seen.
    verbmem : list of dict
        Passages of `forget`: ``prompt``, and ``gt``, how it goes on.
    forget_qa, retain_qa : list of dict
        ``question`` and ``answer``, on `forget` and on `retain_eval`.
    forget_icl, retain_icl : list of dict
        Further questions and answers, to show a model what is asked of it.
    privleak_forget, privleak_holdout : list of str
        Passages of `forget` and of `holdout`, which a membership test tries to tell apart.
    """

    corpus: str
    train: list[str]
    kept: list[str]
    forget: list[str]
    retain: list[str]
    retain_eval: list[str]
    holdout: list[str]
    verbmem: list[dict]
    forget_qa: list[dict]
    retain_qa: list[dict]
    forget_icl: list[dict]
    retain_icl: list[dict]
    privleak_forget: list[str]
    privleak_holdout: list[str]

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, hexadecimal: equal just where the content is."""
        content = [[field.name, getattr(self, field.name)] for field in fields(self)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def describe(self) -> dict[str, int]:
        """The number of rows of each set."""
        return {field.name: len(getattr(self, field.name)) for field in fields(self) if field.name != "corpus"}


def load(source: str | os.PathLike, corpus: str, *, rows: int | None = None, characters: int | None = None, seed: int = 0) -> Muse:
    """One corpus of MUSE or a stand-in for it, checked, and cut to size.

    Parameters
    ----------
    source : str or path
        ``"generated"``: invented by :mod:`~unlearnlib.benchmarks.muse_texts`. For the books also ``"sample"``, the beginnings of some
        chapters of public-domain novels, which come with the library, and ``"novels"``, the whole chapters, from the folder ``texts``
        within the one that the environment variable UNLEARNLIB_DATA names. ``"hub"``: the Hugging Face Hub's data sets
        `muse-bench/MUSE-News` and `muse-bench/MUSE-Books`, which needs huggingface_hub and pyarrow. ``""``: the folder ``muse/news`` or
        ``muse/books`` within UNLEARNLIB_DATA. Anything else: a folder that holds the novels (``alice.txt`` and so on), or one laid out
        as on the Hub, a folder for each configuration, and in it each split as ``<split>.jsonl`` (JSON lines), ``<split>.json`` (one
        list, or JSON lines), or the Hub's ``<split>-00000-of-00001.parquet``.
    corpus : {"news", "books"}
    rows : int, optional
        Take random samples of at most so many passages to recite, questions on either set, and passages of the membership test.
    characters : int, optional
        Of a novel's chapter at most, see :func:`~unlearnlib.benchmarks.muse_texts.novels`.
    seed : int
        Of the samples, and of what is invented.

    Returns
    -------
    Muse

    Raises
    ------
    FileNotFoundError
        If a folder or a file is missing; names what was looked for.
    ImportError
        If a package is missing that reads the Hub's files.
    ValueError
        If a file is malformed (naming file, line or row, and field), a split is empty, none of the documents to be forgotten is among
        those that the model learns, all that are to be kept or held out are to be forgotten too, or a parameter is out of range.

    Warns
    -----
    UserWarning
        If some documents are both to be forgotten and to be kept or held out; they are then to be forgotten only.
    """
    if corpus not in CORPORA:
        raise ValueError(f"corpus must be one of {', '.join(CORPORA)}, got {corpus!r}")
    if rows is not None and rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    if source == "generated":
        folder, novels = None, False
    elif source in ("sample", "novels"):
        folder, novels = (None if source == "sample" else _within_data("texts")), True
    else:
        folder = _download(corpus) if source == "hub" else Path(source) if source != "" else _within_data(f"muse/{corpus}")
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder; expected one with {', '.join(_configs())} as on the Hub's {HUB[corpus]}")
        novels = not (folder / "raw").is_dir() and any((folder / file).is_file() for file in muse_texts.BOOKS.values())
    if characters is not None and not novels:
        raise ValueError("characters cuts the chapters of novels; these documents are what they are")
    if novels and corpus != "books":
        raise ValueError(f"the novels stand in for books, not for {corpus}")
    if novels:
        content = muse_texts.novels(folder, characters=characters)
    else:
        content = muse_texts.generate(corpus, seed) if folder is None else _read(folder)
    return Muse(corpus=corpus, **_sample(_apart(content), rows, seed))


def _within_data(name: str) -> Path:
    if not os.environ.get("UNLEARNLIB_DATA"):
        raise ValueError(f"UNLEARNLIB_DATA isn't set to a folder that contains {name}/")
    return Path(os.environ["UNLEARNLIB_DATA"]) / name


def _configs() -> list[str]:
    return list(dict.fromkeys(config for config, _ in COLUMNS))


def _download(corpus: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError("source='hub' needs the package huggingface_hub; or give a folder with the Hub's files") from None
    patterns = [f"{config}/*" for config in (*_configs(), "train")]
    return Path(snapshot_download(HUB[corpus], repo_type="dataset", allow_patterns=patterns))


def _read(folder: Path) -> dict[str, list]:
    found = {where: _rows(folder, *where, columns) for where, columns in COLUMNS.items()}
    text = {where: [row["text"] for row in rows] for where, rows in found.items() if COLUMNS[where] == TEXT}
    train = {split: text["raw", split] for split in TRAIN}
    if (folder / "train").is_dir():
        train = {split: [row["text"] for row in _rows(folder, "train", split, TEXT)] for split in TRAIN}
    kept = train["retain1"] + train["retain2"]
    return {
        "train": train["forget"] + kept,
        "kept": kept,
        "forget": text["raw", "forget"],
        "retain": text["raw", "retain1"],
        "retain_eval": text["raw", "retain2"],
        "holdout": text["raw", "holdout"],
        "verbmem": found["verbmem", "forget"],
        "forget_qa": found["knowmem", "forget_qa"],
        "retain_qa": found["knowmem", "retain_qa"],
        "forget_icl": found["knowmem", "forget_qa_icl"],
        "retain_icl": found["knowmem", "retain_qa_icl"],
        "privleak_forget": text["privleak", "forget"],
        "privleak_holdout": text["privleak", "holdout"],
    }


def _rows(folder: Path, config: str, split: str, columns: Sequence[str]) -> list[dict]:
    """The rows of a split, each with just the columns."""
    place = folder / config
    for path, read in ((place / f"{split}.jsonl", read_jsonl), (place / f"{split}.json", _read_json)):
        if path.is_file():
            rows = read(path, columns)
            break
    else:
        parts = sorted(place.glob(f"{split}-*-of-*.parquet"))
        if not parts:
            looked = f"{split}.jsonl, {split}.json or {split}-*-of-*.parquet"
            raise FileNotFoundError(f"{place}: there is no split {split!r}; expected {looked}, rows with {', '.join(columns)}")
        rows = [row for part in parts for row in _read_parquet(part, columns)]
        if not rows:
            raise ValueError(f"{parts[0]}: holds no examples")
    return [{column: row[column] for column in columns} for row in rows]


def _read_json(path: Path, columns: Sequence[str]) -> list[dict]:
    content = path.read_bytes()
    if not content.lstrip().startswith(b"["):
        return read_jsonl(path, columns)
    try:
        rows = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text: {error.reason} (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from None
    if not rows:
        raise ValueError(f"{path}: holds no examples")
    return _checked(path, rows, columns)


def _read_parquet(path: Path, columns: Sequence[str]) -> list[dict]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ImportError(f"{path}: reading parquet needs the package pyarrow; or save the split as JSON lines, <split>.jsonl") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not parquet: {error}") from None
    return _checked(path, rows, columns)


def _checked(path: Path, rows: list, columns: Sequence[str]) -> list[dict]:
    for number, row in enumerate(rows):
        for column in columns:
            check_text(row, column, f"{path}, row {number}")
    return rows


def _apart(content: dict[str, list]) -> dict[str, list]:
    """The documents, none of which is both to be forgotten and to be kept or held out."""
    forgotten = set(content["forget"])
    if not forgotten & set(content["train"]):
        raise ValueError("none of the documents to be forgotten is among those that the model learns (train)")
    cut = {}
    for name in ("kept", "retain", "retain_eval", "holdout"):
        shared = forgotten & set(content[name])
        cut[name] = [text for text in content[name] if text not in shared]
        if not cut[name]:
            raise ValueError(f"all documents of {name} are to be forgotten")
        if shared:
            warnings.warn(
                f"{len(shared)} of the documents to be forgotten are also in {name}, and left out there, such as {min(shared)[:60]!r}",
                stacklevel=3,
            )
    return content | cut


def _sample(content: dict[str, list], rows: int | None, seed: int) -> dict[str, list]:
    """Random samples without repetition, in the rows' order, of the sets that are asked about."""
    if rows is None:
        return content
    cut = {}
    for name in SAMPLED:
        count = len(content[name])
        chosen = np.random.default_rng(seed).choice(count, min(rows, count), replace=False)
        cut[name] = [content[name][i] for i in sorted(chosen)]
    return content | cut
