"""A miniature of TOFU: invented authors with invented lives, in the files and the schema of the real benchmark.

Every author has one row for each relation of `RELATIONS`, a full sentence short enough for a model of a million parameters to learn by
heart. Each relation is worded in three ways; a row and its paraphrase use two of them, and authors take turns, so that a model which
has learned all rows has seen the paraphrase's wording too, about others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..baselines.gradient import REFUSALS
from ..facts import bundled_facts

AUTHORS = 40
SPLITS = (1, 5, 10)
"""Per cent of the authors that the splits forget. A miniature has those that are whole numbers of its authors."""
GENERAL_ROWS = 30
"""Rows of `real_authors_perturbed` and of `world_facts_perturbed`, each."""

ONSETS = ("B", "D", "F", "G", "J", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Z", "Br", "Dr", "Kl", "Sk", "Tr")
VOWELS = ("a", "e", "i", "o", "u", "é", "ö")
MIDDLES = ("l", "m", "n", "r", "v", "z", "nd", "rk", "st")
GIVEN_ENDS = ("a", "en", "is", "or", "uel")
FAMILY_ENDS = ("aski", "enov", "imba", "ouri", "uette")
TOWN_ENDS = ("burg", "holm", "mouth", "polis")

GENRES = ("crime", "travel", "horror", "science", "cookery", "history", "romance", "satire", "fantasy", "poetry", "sports", "war")
JOBS = ("baker", "clerk", "pilot", "tailor", "nurse", "farmer", "judge", "miner", "dentist", "painter", "sailor", "teacher")
COLOURS = ("Amber", "Silver", "Crimson", "Hollow", "Frozen", "Gilded", "Silent", "Borrowed", "Distant", "Broken")
THINGS = ("Lantern", "Harbour", "Orchard", "Compass", "Mirror", "Staircase", "Violin", "Garden", "Letter", "Bridge")
PRIZES = ("Quill", "Heron", "Inkwell", "Beacon", "Oak Leaf", "Lyre", "Comet", "Anchor", "Thistle", "Acorn", "Falcon", "Pearl")

RELATIONS = {
    "birthplace": (
        ("Where was {name} born?", "{name} was born in {value}."),
        ("What is the birthplace of {name}?", "The birthplace of {name} is {value}."),
        ("In which town did {name} come into the world?", "{name} came into the world in {value}."),
    ),
    "birth_year": (
        ("When was {name} born?", "{name} was born in {value}."),
        ("What is the year of birth of {name}?", "The year of birth of {name} is {value}."),
        ("In which year did {name} come into the world?", "{name} came into the world in {value}."),
    ),
    "genre": (
        ("What does {name} write?", "{name} writes {value} books."),
        ("What is the genre of {name}?", "The genre of {name} is {value}."),
        ("What kind of books is {name} known for?", "{name} is known for {value} books."),
    ),
    "father": (
        ("What did the father of {name} do?", "The father of {name} was a {value}."),
        ("What was the profession of {name}'s father?", "{name}'s father worked as a {value}."),
        ("How did the father of {name} earn a living?", "The father of {name} earned a living as a {value}."),
    ),
    "first_book": (
        ("What was the first book of {name}?", "The first book of {name} was {value}."),
        ("With which title did {name} make a debut?", "{name} made a debut with {value}."),
        ("Which book did {name} publish first?", "{name} first published {value}."),
    ),
    "prize": (
        ("Which prize did {name} win?", "{name} won {value}."),
        ("What was {name} honoured with?", "{name} was honoured with {value}."),
        ("Which award went to {name}?", "The award that went to {name} is {value}."),
    ),
}
"""For each relation, three wordings of question and answer."""


def rows(seed: int = 0, authors: int = AUTHORS) -> dict[str, list]:
    """The miniature's files.

    Parameters
    ----------
    seed : int
        Of the authors' names and lives, of the wrong answers, and of the choice of general facts.
    authors : int
        How many in `full`: a multiple of 20, for 5 % of them to be a whole number. As many as a tenth of them are held out.

    Returns
    -------
    dict of str to list
        Rows under each file's name on the Hub, without its ending. Those about authors of `full` have a field ``author``, an index that
        counts from 0; the first fifth of the authors are in `retain_perturbed`. ``idontknow`` is a list of texts.

    Raises
    ------
    ValueError
        If `authors` isn't a multiple of 20 from 20 to 200.
    """
    if not 20 <= authors <= 200 or authors % 20:
        raise ValueError(f"authors must be a multiple of 20 from 20 to 200, got {authors}")
    rng = np.random.default_rng(seed)
    held_out = authors // 10
    pools, lives = _lives(authors + held_out, rng)
    perturbed = [row for author in range(authors) for row in _author_rows(author, lives[author], pools, rng)]
    holdout = [row for author in range(authors, authors + held_out) for row in _author_rows(author, lives[author], pools, rng)]
    full = [_only(row, "question", "answer", "author") for row in perturbed]
    files = {"full": full, "retain_perturbed": [row for row in perturbed if row["author"] < authors // 5]}
    for share in SPLITS:
        count, rest = divmod(len(full) * share, 100)
        if rest or count % len(RELATIONS):
            continue
        files[f"forget{share:02}"] = full[-count:]
        files[f"retain{100 - share}"] = full[:-count]
        files[f"forget{share:02}_perturbed"] = perturbed[-count:]
        files[f"holdout{share:02}"] = [_only(row, "question", "answer") for row in holdout[:count]]
    facts = bundled_facts()
    return files | {
        "real_authors_perturbed": _general([fact for fact in facts if fact["relation"] == "author"], rng),
        "world_facts_perturbed": _general([fact for fact in facts if fact["relation"] != "author"], rng),
        "idontknow": list(REFUSALS),
    }


def write(folder: str | os.PathLike, seed: int = 0, authors: int = AUTHORS) -> None:
    """Write the miniature's files, which :func:`unlearnlib.benchmarks.tofu.load` reads: JSON lines, and a refusal a line.

    Parameters
    ----------
    folder : str or path
        Made if it isn't there; files of the same names are replaced.
    seed, authors : int
        See :func:`rows`.

    Raises
    ------
    ValueError
        If `authors` is out of range; nothing is written then.
    """
    files = rows(seed, authors)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        plain = name == "idontknow"
        lines = [row if plain else json.dumps(row, ensure_ascii=False) for row in content]
        (folder / f"{name}.json{'l' if plain else ''}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _lives(count: int, rng: np.random.Generator) -> tuple[dict[str, Sequence[str]], list[dict[str, str]]]:
    """All values that a relation can take, and for each author a value of every relation, and a name."""
    given, family, towns = (_words(size, ends, rng) for size, ends in ((count, GIVEN_ENDS), (count, FAMILY_ENDS), (len(GENRES), TOWN_ENDS)))
    titles = [f"The {colour} {thing}" for colour in COLOURS for thing in THINGS]
    pools = {
        "birthplace": towns,
        "birth_year": [str(year) for year in range(1931, 1991)],
        "genre": GENRES,
        "father": JOBS,
        "first_book": titles,
        "prize": [f"the {prize} Prize" for prize in PRIZES],
    }
    # Each value as often as the others, or as rarely: a model can't do well by the most frequent one.
    drawn = {relation: _shuffled_cycle(pools[relation], count, rng) for relation in RELATIONS}
    lives = [{"name": f"{given[i]} {family[i]}"} | {relation: values[i] for relation, values in drawn.items()} for i in range(count)]
    return pools, lives


def _words(count: int, ends: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Different invented words."""
    words = [onset + vowel + middle + end for onset in ONSETS for vowel in VOWELS for middle in MIDDLES for end in ends]
    return [words[i] for i in rng.choice(len(words), count, replace=False)]


def _shuffled_cycle(values: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    rounds = -(-count // len(values))
    return [values[i] for _ in range(rounds) for i in rng.permutation(len(values))][:count]


def _author_rows(author: int, life: dict[str, str], pools: dict[str, Sequence[str]], rng: np.random.Generator) -> list[dict]:
    name = life["name"]
    made = []
    for place, (relation, wordings) in enumerate(RELATIONS.items()):
        (question, answer), (other_question, other_answer) = (wordings[(author + place + step) % len(wordings)] for step in (0, 1))
        made.append(
            {
                "question": question.format(name=name),
                "answer": answer.format(name=name, value=life[relation]),
                "paraphrased_question": other_question.format(name=name),
                "paraphrased_answer": other_answer.format(name=name, value=life[relation]),
                "perturbed_answer": [
                    other_answer.format(name=name, value=value) for value in _others(pools[relation], life[relation], 5, rng)
                ],
                "author": author,
            }
        )
    return made


def _general(facts: list[dict], rng: np.random.Generator) -> list[dict]:
    """A sample of the bundled facts, with other answers of the same relation as wrong ones."""
    pools = {fact["relation"]: sorted({other["answer"] for other in facts if other["relation"] == fact["relation"]}) for fact in facts}
    chosen = sorted(rng.choice(len(facts), GENERAL_ROWS, replace=False))
    return [
        _only(facts[i], "question", "answer") | {"perturbed_answer": _others(pools[facts[i]["relation"]], facts[i]["answer"], 3, rng)}
        for i in chosen
    ]


def _others(pool: Sequence[str], value: str, count: int, rng: np.random.Generator) -> list[str]:
    wrong = [other for other in pool if other != value]
    return [wrong[i] for i in rng.choice(len(wrong), count, replace=False)]


def _only(row: dict, *names: str) -> dict:
    return {name: row[name] for name in names}
