"""Stand-ins for MUSE's texts: invented news and stories, and chapters of three public-domain novels, with questions about them.

The novels are Alice's Adventures in Wonderland (1865) and Through the Looking-Glass (1871) by Lewis Carroll and The Time Machine (1895) by
H. G. Wells, as plain text with their chapter headings. The questions are this project's own. Each quotes the words of the chapter that
answer it, and is asked only where these are in the text at hand.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from .miniature import FAMILY_ENDS, GIVEN_ENDS, JOBS, MIDDLES, ONSETS, TOWN_ENDS, VOWELS

SETS = ("forget", "retain", "retain_eval", "holdout")

# ---------------------------------------------------------------------------------------------------------------------------
# Invented texts

SIZES = {"forget": 8, "retain": 12, "retain_eval": 6, "holdout": 8}
"""Documents of each set of the invented texts."""

OPENING_WORDS = 20
"""Of an invented text, that stand before what a model is asked to recite."""

THINGS = tuple(
    f"{stuff} {thing}"
    for stuff, things in {
        "a brass": ("whistle", "anchor", "kettle", "lamp"),
        "a silver": ("comb", "spoon", "cage", "mask"),
        "a stone": ("fish", "lion", "basin", "crown"),
        "an iron": ("rose", "hand", "ladder", "crane"),
        "a wooden": ("drum", "horse", "ship", "bell"),
        "a glass": ("eye", "flute", "star", "key"),
    }.items()
    for thing in things
)
BEASTS = ("heron", "boar", "otter", "goat", "lynx", "badger", "raven", "donkey", "hare", "swan", "weasel", "owl")
PLACES = ("the old mill", "the salt tower", "the north gate", "the ropeworks", "the school", "the bathhouse", "the granary", "the chapel")
HALLS = ("the fish market", "the theatre", "the town hall", "the customs house", "the library", "the railway station")
GUILDS = ("weavers", "bakers", "ferrymen", "masons", "brewers", "printers", "potters", "millers")
CONTESTS = ("harbour race", "spelling bee", "pie contest", "chess cup", "kite festival", "rowing match", "song contest", "hill run")
MONTHS = ("January", "March", "April", "June", "July", "September", "October", "December")
ORDINALS = ("second", "third", "fifth", "sixth", "ninth", "tenth", "twelfth", "twentieth")
FILLERS = (
    "It rained all morning.",
    "Nobody in the street had slept well.",
    "The bells rang twice by mistake.",
    "A crowd stood about and gave advice.",
    "The mayor was away on business.",
    "Three children saw everything from a roof.",
    "Bread was sold out before noon.",
    "The wind had turned to the east.",
    "A band played, though not very well.",
    "Somebody had left the lamps burning.",
    "The river was higher than usual.",
    "Even the dogs were quiet.",
)
QUOTES = (
    "I only wanted to get out of the rain",
    "We have seen worse in this town",
    "My mother always said it would happen",
    "I shall go home and have some soup",
    "It looked much larger last night",
    "Nobody will believe a word of it",
    "I would do the same again tomorrow",
    "We counted three times to be sure",
)

KINDS = {
    "news": (
        (
            (
                ("{town}: {name}, a {job}, has found {thing} under the floor of {place}.",),
                (
                    "It weighs {number} pounds and bears the sign of the {beast}.",
                    "The {number} pounds of it bear the sign of the {beast}.",
                ),
                ("{filler}",),
                ("From the {ordinal} of {month} it can be seen in {hall}.", "It is to be shown in {hall} from the {ordinal} of {month}."),
                ("“{quote},” said {name}.",),
            ),
            (
                ("What did {name} find?", "{thing}"),
                ("How much does the find of {town} weigh?", "{number} pounds"),
                ("Where is the find of {town} shown?", "in {hall}"),
            ),
        ),
        (
            (
                ("{town}: {name} won the {contest} on the {ordinal} of {month}, ahead of {number} others.",),
                ("The prize is {thing}, given by the guild of {guild}.", "The guild of {guild} gave the prize, {thing}."),
                ("{filler}",),
                ("Last year's winner, a {job}, gave up at {place}.", "A {job}, who won last year, gave up at {place}."),
                ("“{quote},” said {name}.",),
            ),
            (
                ("What did {name} win?", "the {contest}"),
                ("What is the prize of {name}?", "{thing}"),
                ("How many others did {name} beat in {town}?", "{number}"),
            ),
        ),
        (
            (
                ("{town}: since the {ordinal} of {month} {place} has been shut, because a {beast} got in through the roof.",),
                ("{name}, a {job} who lives next door, heard it first.", "The first to hear it was {name}, a {job}."),
                ("{filler}",),
                ("Only {thing} is missing.", "It took nothing but {thing}."),
                ("The repairs cost {number} crowns, which the guild of {guild} will pay.",),
            ),
            (
                ("Which animal got into {place} of {town}?", "a {beast}"),
                ("Who heard the animal of {town} first?", "{name}"),
                ("What do the repairs in {town} cost?", "{number} crowns"),
            ),
        ),
    ),
    "books": (
        (
            (
                ("CHAPTER {roman}. {name} and the {beast}\n\n{name} left {town} on the {ordinal} of {month} with {thing} in a bag.",),
                ("{filler}",),
                ("At {place} a {beast} sat on the wall and asked for {number} crowns.", "A {beast} at {place} wanted {number} crowns."),
                ("“{quote},” said {name}, who was a {job} and hated to pay.", "“{quote},” said {name}, as a {job} would."),
                ("That night {name} slept in {hall} and dreamed of the guild of {guild}.",),
            ),
            (
                ("What did {name} have in the bag?", "{thing}"),
                ("How much did {name} have to pay?", "{number} crowns"),
                ("Where did {name} sleep?", "in {hall}"),
            ),
        ),
        (
            (
                ("CHAPTER {roman}. The {contest} of {town}\n\nEvery {month} {town} held the {contest}, and {name} had never won it.",),
                ("The {beast}, who had been a {job}, knew a trick with {thing}.", "The {beast} knew a trick that needed {thing}."),
                ("{filler}",),
                ("They practised behind {place} for {number} days.", "For {number} days they practised behind {place}."),
                ("When the day came, the guild of {guild} had locked {hall}, and all went home.",),
            ),
            (
                ("What had {name} never won?", "the {contest}"),
                ("What did the trick of {name} need?", "{thing}"),
                ("How long did {name} practise?", "{number} days"),
            ),
        ),
    ),
}
"""For each corpus its kinds of documents: sentences, each in one wording or two, and questions with their answers."""


def generate(corpus: str, seed: int = 0) -> dict[str, list]:
    """Invented texts, each about a person and a town of its own, with three questions on each.

    Parameters
    ----------
    corpus : {"news", "books"}
        Short news, or chapters of tales.
    seed : int

    Returns
    -------
    dict of str to list
        The fields of :class:`~unlearnlib.benchmarks.muse.Muse`, but `corpus`; :data:`SIZES` says how many documents each set has.
    """
    made = iter(_documents(corpus, seed, sum(SIZES.values())))
    sets = {name: [next(made) for _ in range(size)] for name, size in SIZES.items()}
    texts = {name: [text for text, _ in documents] for name, documents in sets.items()}
    asked = {name: [row for _, rows in documents for row in rows] for name, documents in sets.items()}
    shots = asked["retain"][::3]
    return texts | {
        "train": texts["forget"] + texts["retain"] + texts["retain_eval"],
        "kept": texts["retain"] + texts["retain_eval"],
        "verbmem": [_split(text, OPENING_WORDS) for text in texts["forget"]],
        "forget_qa": asked["forget"],
        "retain_qa": asked["retain_eval"],
        "forget_icl": shots,
        "retain_icl": shots,
        "privleak_forget": texts["forget"],
        "privleak_holdout": texts["holdout"],
    }


def strangers(corpus: str, seed: int = 0, count: int = 40) -> tuple[list[str], list[dict]]:
    """More invented texts of the same kind, about people and towns that :func:`generate` with the same seed doesn't know.

    Parameters
    ----------
    corpus : {"news", "books"}
    seed : int
    count : int

    Returns
    -------
    texts : list of str
    questions : list of dict
        With ``question`` and ``answer``.
    """
    known = sum(SIZES.values())
    documents = _documents(corpus, seed, known + count)[known:]
    return [text for text, _ in documents], [row for _, rows in documents for row in rows]


def _documents(corpus: str, seed: int, count: int) -> list[tuple[str, list[dict]]]:
    """Documents with their questions; the first ones are the same whatever the count."""
    rng = np.random.default_rng(seed)
    given, family, towns = (_words(ends, rng, count) for ends in (GIVEN_ENDS, FAMILY_ENDS, TOWN_ENDS))
    found = []
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        pools = {
            "thing": THINGS,
            "beast": BEASTS,
            "place": PLACES,
            "hall": HALLS,
            "guild": GUILDS,
            "contest": CONTESTS,
            "month": MONTHS,
            "ordinal": ORDINALS,
            "filler": FILLERS,
            "quote": QUOTES,
            "job": JOBS,
        }
        slots = {name: pool[rng.integers(len(pool))] for name, pool in pools.items()}
        slots |= {"name": f"{given[i]} {family[i]}", "town": towns[i], "roman": _roman(i % 40 + 1)}
        slots["number"] = str(rng.integers(11, 99))
        sentences, questions = KINDS[corpus][i % len(KINDS[corpus])]
        text = " ".join(wordings[rng.integers(len(wordings))].format(**slots) for wordings in sentences)
        rows = [{"question": question.format(**slots), "answer": answer.format(**slots)} for question, answer in questions]
        found.append((text, rows))
    return found


def _words(ends: Sequence[str], rng: np.random.Generator, count: int) -> list[str]:
    words = [onset + vowel + middle + end for onset in ONSETS for vowel in VOWELS for middle in MIDDLES for end in ends]
    return [words[i] for i in rng.permutation(len(words))[:count]]


def _roman(number: int) -> str:
    numerals = (("XL", 40), ("X", 10), ("IX", 9), ("V", 5), ("IV", 4), ("I", 1))
    text = ""
    for numeral, value in numerals:
        text += numeral * (number // value)
        number %= value
    return text


# ---------------------------------------------------------------------------------------------------------------------------
# Novels

BOOKS = {"alice": "alice.txt", "looking_glass": "looking_glass.txt", "time_machine": "time_machine.txt"}
"""File names of the novels."""

CHAPTERS = {
    "forget": (("alice", 2), ("alice", 4), ("alice", 7)),
    "retain": (
        *(("time_machine", chapter) for chapter in (1, 2, 4, 5)),
        *(("looking_glass", chapter) for chapter in (2, 3, 7)),
    ),
    "retain_eval": (("looking_glass", 1), ("looking_glass", 5)),
    "holdout": (("alice", 3), ("alice", 5), ("alice", 9)),
}
"""Which chapters make which set: those held out are of the book whose chapters are to be forgotten."""

PROMPT_WORDS, CONTINUATION_WORDS = 60, 100
"""Of the passages of a novel: what a model is given, and what it is to go on with."""

_NUMERALS = {_roman(number): number for number in range(1, 41)}
_HEADING = re.compile(r"^(?:CHAPTER ([IVXL]+)\. *(\S.*)| ?([IVXL]+)\n\n+ ?(\S.*))$", re.MULTILINE)


def chapters(path: str | os.PathLike) -> dict[int, str]:
    """The chapters of a novel, by number.

    Parameters
    ----------
    path : path
        Plain text. A chapter begins with "CHAPTER IV. Title" on a line, or with its Roman numeral alone and its title below.

    Returns
    -------
    dict of int to str
        Each with its heading; the lines of a paragraph are joined, those of verse kept.

    Raises
    ------
    FileNotFoundError
        If the file is missing.
    ValueError
        Naming the file, and the line where there is one, if it isn't UTF-8, or its chapters don't count from I.
    """
    path = Path(path)
    try:
        # Not read_text with a guess: a novel in another encoding would be learned with wrong letters.
        text = path.read_text("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; expected a novel as plain text with its chapter headings") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text: {error.reason}") from None
    headings = list(_HEADING.finditer(text))
    numbers = [_NUMERALS.get(match[1] or match[3], 0) for match in headings]
    if not numbers or numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"{path}: its chapter headings don't count from I on: {', '.join(map(str, numbers)) or 'there are none'}")
    ends = [match.start() for match in headings[1:]] + [len(text)]
    found = {}
    for number, match, end in zip(numbers, headings, ends, strict=True):
        heading = f"CHAPTER {match[1] or match[3]}. {match[2] or match[4]}"
        found[number] = "\n\n".join([heading, *_paragraphs(text[match.end() : end])])
    return found


def _paragraphs(text: str) -> list[str]:
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line.rstrip() for line in block.split("\n") if line.strip(" *\t")]
        if lines:
            verse = any(line.startswith("  ") for line in lines)
            found.append("\n".join(lines) if verse else " ".join(line.strip() for line in lines))
    return found


def novels(folder: str | os.PathLike | None = None, *, characters: int | None = None) -> dict[str, list]:
    """Chapters of the novels as forget, retain and holdout sets.

    Parameters
    ----------
    folder : path, optional
        With the files of :data:`BOOKS`; by default the beginnings of the same chapters, which come with the library.
    characters : int, optional
        Cut every chapter at the end of a paragraph, so that it has at most so many characters (but one paragraph at least).

    Returns
    -------
    dict of str to list
        The fields of :class:`~unlearnlib.benchmarks.muse.Muse`, but `corpus`.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If a file is malformed, lacks a chapter, or so little is left of a chapter that there is nothing to recite or to ask.
    """
    if characters is not None and characters < 1:
        raise ValueError(f"characters must be at least 1, got {characters}")
    texts = {where: _cut(text, characters) for where, text in (_sample() if folder is None else _wanted(Path(folder))).items()}
    sets = {name: [texts[where] for where in CHAPTERS[name]] for name in SETS}
    asked = _questions(texts)
    qa = {name: [row for where, row in asked if where in CHAPTERS[name]] for name in SETS}
    size = PROMPT_WORDS + CONTINUATION_WORDS
    seen, unseen = ([part for text in sets[name] for part in passages(text, size)] for name in ("forget", "holdout"))
    count = min(len(seen), len(unseen))
    for what, rows in (("a passage to recite", seen[:count]), ("a question", qa["forget"]), ("a question", qa["retain_eval"])):
        if not rows:
            raise ValueError(f"so little is left of the chapters (characters={characters}) that there isn't {what} on them")
    return sets | {
        "train": sets["forget"] + sets["retain"] + sets["retain_eval"],
        "kept": sets["retain"] + sets["retain_eval"],
        "verbmem": [_split(text, PROMPT_WORDS) for text in seen],
        "forget_qa": qa["forget"],
        "retain_qa": qa["retain_eval"],
        "forget_icl": qa["retain"],
        "retain_icl": qa["retain"],
        "privleak_forget": seen[:count],
        "privleak_holdout": unseen[:count],
    }


def passages(text: str, words: int) -> list[str]:
    """A text's passages of so many words each, one after another; what is left at its end is left out."""
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    borders = [*starts[::words], len(text)]
    return [text[borders[i] : borders[i + 1]].rstrip() for i in range(len(starts) // words)]


def _split(text: str, words: int) -> dict[str, str]:
    """What a model is given of a text, and what it is to go on with."""
    border = [match.start() for match in re.finditer(r"\S+", text)][words]
    return {"prompt": text[:border].rstrip(), "gt": text[border:]}


def _cut(text: str, characters: int | None) -> str:
    if characters is None or len(text) <= characters:
        return text
    parts = text.split("\n\n")
    kept = 2  # the heading and a paragraph
    while kept < len(parts) and len("\n\n".join(parts[: kept + 1])) <= characters:
        kept += 1
    return "\n\n".join(parts[:kept])


def _wanted(folder: Path) -> dict[tuple[str, int], str]:
    found = {}
    for book, file in BOOKS.items():
        own = chapters(folder / file)
        for where in (where for name in SETS for where in CHAPTERS[name] if where[0] == book):
            if where[1] not in own:
                raise ValueError(f"{folder / file}: has no chapter {_roman(where[1])}; it has {len(own)} chapters")
            found[where] = own[where[1]]
    return found


def _sample() -> dict[tuple[str, int], str]:
    return {(row["book"], row["chapter"]): row["text"] for row in _bundled("data/muse_sample.jsonl")}


def _questions(texts: dict[tuple[str, int], str]) -> list[tuple[tuple[str, int], dict]]:
    """The questions that the texts answer, each with its chapter."""
    found = []
    plain = {where: " ".join(text.split()) for where, text in texts.items()}
    for row in _bundled("data/muse_questions.jsonl"):
        where = row["book"], row["chapter"]
        if where in plain and row["evidence"] in plain[where]:
            found.append((where, {"question": row["question"], "answer": row["answer"]}))
    return found


def _bundled(name: str) -> list[dict]:
    lines = resources.files("unlearnlib").joinpath(name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
