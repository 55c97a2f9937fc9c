"""zsRE and CounterFact: single facts with their prompts, paraphrases and unrelated questions, and the project's own facts in the same form.

zsRE (Levy et al., 2017; Mitchell et al., 2022) asks questions, CounterFact (Meng et al., 2022) begins sentences. Every row of either is
one fact about a subject.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..examples import check_text, read_jsonl
from ..facts import bundled_facts

BUNDLED = "bundled"
FILE_DATASETS = ("zsre", "counterfact")
HUB = {"zsre": "zjunlp/KnowEdit", "counterfact": "azhx/counterfact"}
HUB_ZSRE_FILE = "benchmark/ZsRE/ZsRE-test-all.json"
SET_ASIDE = 0.2
"""Part of the bundled facts of each relation that serve as the others' unrelated questions, and as nothing else."""


def load(dataset: str, source: str | os.PathLike = "", *, rows: int | None = None, seed: int = 0) -> list[dict]:
    """Facts in one form, whatever file they come from, in random order.

    Parameters
    ----------
    dataset : {"bundled", "zsre", "counterfact"}
        ``"bundled"``: the project's own list of well-known facts.
    source : str or path
        For the other two. ``""``: the folder ``facts`` within the one that the environment variable UNLEARNLIB_DATA names. ``"hub"``:
        the Hugging Face Hub, `zjunlp/KnowEdit` for zsRE and `azhx/counterfact`, whose rows are in parquet, for CounterFact. Anything
        else: a file, or a folder with one file whose name contains ``zsre`` or ``counterfact``.
    rows : int, optional
        How many to take; all by default.
    seed : int
        Of the order, so also of which are taken.

    Returns
    -------
    list of dict
        ``subject``; ``prompt``, which contains it; ``answer``, the true one; ``target``, a false one of the same kind; ``paraphrases``,
        a list of prompts with the same answer; ``unrelated``, a list of dicts with ``prompt`` and ``answer``. Rows whose false answer
        is missing or is the true one are left out, as is a row that asks what an earlier one asks.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ImportError
        If the Hub is asked for and the package that reads it is missing.
    ValueError
        If a file is malformed (naming file and record), there are fewer rows than asked for, or a parameter is unknown.

    Notes
    -----
    Files are a JSON array or JSON lines. Four schemas are read: zsRE's as the editors' own code has it (``src``, ``rephrase``,
    ``answers``, ``alt``, ``loc``, ``loc_ans``) and KnowEdit's; CounterFact's own (``requested_rewrite``, ``paraphrase_prompts``,
    ``neighborhood_prompts``) and the flat one of EasyEdit. zsRE's ``loc`` is asked with a question mark at its end, as in the code of
    ROME. The answer to CounterFact's neighbourhood prompts is the true one: they are about other subjects of which the same holds.
    """
    if dataset == BUNDLED:
        facts = _bundled(seed)
    elif dataset in FILE_DATASETS:
        facts = _from_hub(dataset) if source == "hub" else _read(_file(dataset, source), dataset)
    else:
        raise ValueError(f"dataset must be one of {', '.join((BUNDLED, *FILE_DATASETS))}, got {dataset!r}")
    # Some rows of zsRE have the true answer for the false one.
    facts = [fact for fact in facts if fact["target"].casefold() != fact["answer"].casefold()]
    facts = list({fact["prompt"]: fact for fact in reversed(facts)}.values())[::-1]
    if rows is not None and not 1 <= rows <= len(facts):
        raise ValueError(f"{rows} rows are wanted; {dataset} has {len(facts)}")
    return [facts[i] for i in _shuffled(len(facts), seed)[:rows]]


@dataclass(frozen=True)
class Split:
    """What is forgotten, kept and only measured.

    Attributes
    ----------
    forget : list of dict
        The largest request; its first rows are the smaller ones.
    retain : list of dict
        Facts that a method is told to keep.
    unrelated : list of dict
        Questions, ``prompt`` and ``answer``, that no method is shown.
    stand_in, validation : list of dict
        Rows of `retain` that, while settings are chosen, play the request, and are held back from the method.
    """

    forget: list[dict]
    retain: list[dict]
    unrelated: list[dict]
    stand_in: list[dict]
    validation: list[dict]

    @property
    def digest(self) -> str:
        """Tells the split from others."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    @property
    def anchors(self) -> list[dict]:
        """What a method is told to keep while settings are chosen: the rest of `retain`."""
        drawn = {row["prompt"] for row in self.stand_in + self.validation}
        return [row for row in self.retain if row["prompt"] not in drawn]


def split(facts: Sequence[dict], forget: int, *, retain: int, rehearsal: int, unrelated: int, further: Sequence[dict] = ()) -> Split:
    """Divide facts into a request, what is to be kept, and what is measured only.

    Parameters
    ----------
    facts : sequence of dict
        From :func:`load`; taken in order.
    forget, retain : int
        Facts to forget, and to keep; 0 keeps all that are there.
    rehearsal : int
        Facts of the stand-in request, and of the validation set.
    unrelated : int
        How many unrelated questions to ask at most; 0 for all that go with the facts to forget.
    further : sequence of dict
        Facts to keep that come from elsewhere, after the rest of `facts`.

    Returns
    -------
    Split

    Raises
    ------
    ValueError
        If there are too few facts, or an unrelated question is also among what a method is shown.
    """
    if min(forget, rehearsal) < 1 or min(retain, unrelated) < 0:
        raise ValueError(
            f"forget and rehearsal must be at least 1, retain and unrelated at least 0: {forget=}, {rehearsal=}, {retain=}, {unrelated=}"
        )
    asked = {fact["prompt"] for fact in facts[:forget]}
    rest = [fact for fact in [*facts[forget:], *further] if fact["prompt"] not in asked]
    kept = rest[:retain] if retain else rest
    if len(facts) < forget or len(kept) < max(retain, 2 * rehearsal + 1):
        wanted = f"{forget} to forget and {max(retain, 2 * rehearsal + 1)} to keep"
        raise ValueError(f"too few facts: {len(facts)} and {len(rest)} others, for {wanted} (2 × {rehearsal} of these for the rehearsal)")
    # Of neighbourhood questions, any may be about a subject whose own row is shown; those are not unseen.
    shown = {prompt for fact in [*facts[:forget], *kept] for prompt in (fact["prompt"], *fact["paraphrases"])}
    questions = {
        question["prompt"]: question for fact in facts[:forget] for question in fact["unrelated"] if question["prompt"] not in shown
    }
    if not questions:
        raise ValueError("no unrelated question is left that no method is shown")
    return Split(
        forget=list(facts[:forget]),
        retain=kept,
        unrelated=list(questions.values())[: unrelated or None],
        stand_in=kept[:rehearsal],
        validation=kept[rehearsal : 2 * rehearsal],
    )


# ---------------------------------------------------------------------------------------------------------------------------
# The project's own facts


def _bundled(seed: int) -> list[dict]:
    facts = bundled_facts()
    facts = [facts[i] for i in _shuffled(len(facts), seed)]
    groups = {relation: [fact for fact in facts if fact["relation"] == relation] for relation in {fact["relation"]: None for fact in facts}}
    aside = {relation: group[: round(SET_ASIDE * len(group))] for relation, group in groups.items()}
    found = []
    for relation, group in groups.items():
        rows = group[len(aside[relation]) :]
        others = [fact for other, reserved in aside.items() if other != relation for fact in reserved]
        others = [others[i] for i in _shuffled(len(others), seed)]
        for i, fact in enumerate(rows):
            # The next different answer of the relation is as plausible, and false: no fact of the list has two.
            target = next(other["answer"] for other in rows[i + 1 :] + rows[:i] if other["answer"] != fact["answer"])
            question = others[i % len(others)]
            found.append(
                {
                    "subject": fact["subject"],
                    "prompt": fact["question"],
                    "answer": fact["answer"],
                    "target": target,
                    "paraphrases": [fact["paraphrase"]],
                    "unrelated": [{"prompt": question["question"], "answer": question["answer"]}],
                }
            )
    return found


def _shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


# ---------------------------------------------------------------------------------------------------------------------------
# Files


def _file(dataset: str, source: str | os.PathLike) -> Path:
    if source != "":
        path = Path(source)
    elif os.environ.get("UNLEARNLIB_DATA"):
        path = Path(os.environ["UNLEARNLIB_DATA"]) / "facts"
    else:
        raise ValueError("no source is given, and UNLEARNLIB_DATA isn't set to a folder that contains facts/")
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or folder; expected {dataset}'s rows as JSON, or a folder with that file")
    found = sorted(file for file in path.iterdir() if dataset in file.name.lower() and file.suffix in (".json", ".jsonl"))
    if not found:
        raise FileNotFoundError(f"{path}: holds no file .json or .jsonl whose name contains {dataset!r}")
    if len(found) > 1:
        raise ValueError(
            f"{path}: several files may be {dataset}: {', '.join(file.name for file in found)}; give the file itself as the source"
        )
    return found[0]


def _from_hub(dataset: str) -> list[dict]:
    if dataset == "zsre":
        try:
            from huggingface_hub import hf_hub_download
        except ImportError:
            raise ImportError("source='hub' needs the package huggingface_hub; or give a file or a folder") from None
        return _read(Path(hf_hub_download(HUB[dataset], HUB_ZSRE_FILE, repo_type="dataset")), dataset)
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError("CounterFact from the Hub needs the package datasets, since it is stored as parquet; or give a file") from None
    records = load_dataset(HUB[dataset], split="test")
    return [_counterfact(record, f"{HUB[dataset]}: record {i}") for i, record in enumerate(records, start=1)]


def _read(path: Path, dataset: str) -> list[dict]:
    records = _records(path)
    reader = _zsre if dataset == "zsre" else _counterfact
    facts = [reader(record, f"{path}: record {i}") for i, record in enumerate(records, start=1)]
    facts = [fact for fact in facts if fact["target"]]
    if not facts:
        raise ValueError(f"{path}: no record has a false answer to be learned")
    return facts


def _records(path: Path) -> list:
    """The records of a JSON array, or of JSON lines."""
    content = path.read_bytes()
    if not content.lstrip().startswith(b"["):
        return read_jsonl(path, ())
    try:
        records = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text: {error.reason} (byte {error.start} of the file)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from None
    if not records:
        raise ValueError(f"{path}: holds no records")
    return records


def _zsre(record: Any, where: str) -> dict:
    if isinstance(record, dict) and "prompt" in record:
        return _easyedit(record, where)
    for field in ("subject", "src", "rephrase", "loc", "loc_ans"):
        check_text(record, field, where)
    # An empty one stands for a question to which the authors had no false answer.
    if not isinstance(record.get("alt"), str):
        raise ValueError(f"{where}: field 'alt' is missing or not text")
    question = record["loc"].strip()
    return _fact(
        where,
        subject=record["subject"],
        prompt=record["src"],
        answer=_first_text(record, "answers", where),
        target=record["alt"],
        paraphrases=[record["rephrase"]],
        unrelated=[(question if question.endswith("?") else question + "?", record["loc_ans"])],
    )


def _counterfact(record: Any, where: str) -> dict:
    if isinstance(record, dict) and "prompt" in record:
        return _easyedit(record, where)
    if not isinstance(record, dict) or not isinstance(record.get("requested_rewrite"), dict):
        raise ValueError(f"{where}: field 'requested_rewrite' is missing or not an object")
    rewrite = record["requested_rewrite"]
    for field in ("prompt", "subject"):
        check_text(rewrite, field, f"{where}: requested_rewrite")
    if "{}" not in rewrite["prompt"]:
        raise ValueError(f"{where}: requested_rewrite: field 'prompt' has no {{}} where the subject goes")
    answers = {}
    for field in ("target_true", "target_new"):
        if not isinstance(rewrite.get(field), dict):
            raise ValueError(f"{where}: requested_rewrite: field {field!r} is missing or not an object")
        check_text(rewrite[field], "str", f"{where}: requested_rewrite: {field}")
        answers[field] = rewrite[field]["str"]
    return _fact(
        where,
        subject=rewrite["subject"],
        prompt=rewrite["prompt"].replace("{}", rewrite["subject"]),
        answer=answers["target_true"],
        target=answers["target_new"],
        paraphrases=_texts(record, "paraphrase_prompts", where),
        unrelated=[(prompt, answers["target_true"]) for prompt in _texts(record, "neighborhood_prompts", where)],
    )


def _easyedit(record: dict, where: str) -> dict:
    """A row as EasyEdit has CounterFact, or as KnowEdit has zsRE: they differ in where the unrelated questions are."""
    for field in ("subject", "prompt", "target_new", "rephrase_prompt"):
        check_text(record, field, where)
    if "locality" in record:
        groups = record["locality"]
        if not isinstance(groups, dict) or not all(isinstance(group, list) and group for group in groups.values()) or not groups:
            raise ValueError(f"{where}: field 'locality' is not an object of lists of questions")
        questions = [question for group in groups.values() for question in group]
        for question in questions:
            check_text(question, "prompt", f"{where}: locality")
        unrelated = [(question["prompt"], _first_text(question, "ground_truth", f"{where}: locality")) for question in questions]
    else:
        for field in ("locality_prompt", "locality_ground_truth"):
            check_text(record, field, where)
        unrelated = [(record["locality_prompt"], record["locality_ground_truth"])]
    return _fact(
        where,
        subject=record["subject"],
        prompt=record["prompt"],
        answer=_first_text(record, "ground_truth", where),
        target=record["target_new"],
        paraphrases=[record["rephrase_prompt"]],
        unrelated=unrelated,
    )


def _fact(
    where: str, *, subject: str, prompt: str, answer: str, target: str, paraphrases: list[str], unrelated: list[tuple[str, str]]
) -> dict:
    subject = subject.strip()
    if subject not in prompt:
        raise ValueError(f"{where}: the subject {subject!r} isn't in the prompt {prompt[:80]!r}")
    return {
        "subject": subject,
        "prompt": prompt.strip(),
        "answer": answer.strip(),
        "target": target.strip(),
        "paraphrases": [text.strip() for text in paraphrases],
        "unrelated": [{"prompt": question.strip(), "answer": said.strip()} for question, said in unrelated],
    }


def _texts(record: dict, field: str, where: str) -> list[str]:
    texts = record.get(field)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"{where}: field {field!r} is missing, empty or not a list of texts")
    return texts


def _first_text(record: dict, field: str, where: str) -> str:
    """A text, or the first of a list of accepted answers, which may be lists themselves."""
    value = record.get(field)
    while isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: field {field!r} is missing, empty or holds no text")
    return value
