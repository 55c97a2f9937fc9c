"""WMDP: files of the real schema that we make, whatever can be wrong with them, and the stand-in's two domains."""

import json
import sys
from collections import Counter

import pytest

from unlearnlib.benchmarks import wmdp, wmdp_domains
from unlearnlib.benchmarks.wmdp import check_question, load

SUBJECTS = ("astronomy", "sociology", "law")
QUESTION = {"question": "Which gas do plants take in?", "choices": ["argon", "neon", "carbon dioxide", "helium"], "answer": 2}


def write(folder, **changes):
    """A folder of the real schema; a change is a file's rows, or its bytes."""
    files = {
        "wmdp-bio": [QUESTION | {"question": f"Restricted {i}?"} for i in range(6)],
        "mmlu": [QUESTION | {"question": f"{subject} {i}?", "subject": subject} for subject in SUBJECTS for i in range(4)],
        "forget": [{"title": "t", "abstract": "a", "text": f"To be forgotten, {i}.", "doi": "d"} for i in range(3)],
        "retain": [{"text": f"To be kept, {i}."} for i in range(5)],
    }
    for name, content in (files | {name.replace("_", "-"): rows for name, rows in changes.items()}).items():
        if content is None:
            continue
        if not isinstance(content, bytes):
            content = "".join(json.dumps(row) + "\n" for row in content).encode()
        (folder / f"{name}.jsonl").write_bytes(content)
    return folder


# ---------------------------------------------------------------------------------------------------------------------------
# Files


def test_a_folder_of_the_hubs_schema(tmp_path):
    data = load(write(tmp_path))
    assert data.describe() == {
        "restricted": 6,
        "general": 4,
        "forget": 3,
        "retain": 5,
        "rehearsal_questions": 4,
        "rehearsal": 4,
        "validation": 4,
        "lessons": 0,
    }
    assert data.name == "wmdp-bio"
    assert {row["subject"] for row in data.general} == {"law"}
    assert {row["subject"] for row in data.rehearsal_questions} == {"astronomy"}
    assert {row["subject"] for row in data.validation} == {"sociology"}
    assert data.restricted[0] == QUESTION | {"question": "Restricted 0?"}
    assert data.forget == [f"To be forgotten, {i}." for i in range(3)]
    # Without texts of its own, the stand-in request is its questions with their right answers.
    assert data.rehearsal[0] == "astronomy 0? carbon dioxide"


def test_texts_of_the_stand_in_request_and_lessons_may_be_there(tmp_path):
    data = load(write(tmp_path, rehearsal=[{"text": "Stars."}], lessons=[{"text": "More."}]), rehearsal=("law", "astronomy"))
    assert (data.rehearsal, data.lessons) == (["Stars."], ["More."])
    assert {row["subject"] for row in data.rehearsal_questions} == {"law"}


def test_another_subset_is_another_file(tmp_path):
    data = load(write(tmp_path, wmdp_cyber=[QUESTION]), subset="wmdp-cyber")
    assert (data.name, data.restricted) == ("wmdp-cyber", [QUESTION])


def test_the_folder_that_the_environment_names(tmp_path, monkeypatch):
    (tmp_path / "wmdp").mkdir()
    write(tmp_path / "wmdp")
    monkeypatch.setenv("UNLEARNLIB_DATA", str(tmp_path))
    assert load("") == load(tmp_path / "wmdp")
    monkeypatch.setenv("UNLEARNLIB_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match=r"wmdp: no such folder"):
        load("")
    monkeypatch.delenv("UNLEARNLIB_DATA")
    with pytest.raises(ValueError, match="UNLEARNLIB_DATA isn't set"):
        load("")


def test_samples_are_seeded_and_in_order(tmp_path):
    folder = write(tmp_path)
    data = load(folder, questions=3, texts=2, seed=1)
    assert data.describe() | {"rehearsal_questions": 4, "validation": 4} == {
        "restricted": 3,
        "general": 3,
        "forget": 2,
        "retain": 2,
        "rehearsal_questions": 4,
        "rehearsal": 2,
        "validation": 4,
        "lessons": 0,
    }
    everything = load(folder)
    places = [everything.restricted.index(row) for row in data.restricted]
    assert places == sorted(places)
    assert load(folder, questions=3, texts=2, seed=1) == data
    assert any(load(folder, questions=3, seed=seed).restricted != data.restricted for seed in range(2, 5))
    with pytest.raises(ValueError, match="5 general questions are asked for, but there are only 4"):
        load(folder, questions=5)


@pytest.mark.parametrize("option", ["questions", "texts"])
def test_sizes_are_positive(option, tmp_path):
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        load(write(tmp_path), **{option: 0})


def test_the_rehearsals_subjects(tmp_path):
    folder = write(tmp_path)
    with pytest.raises(ValueError, match=r"no subject 'alchemy'.*astronomy, law, sociology"):
        load(folder, rehearsal=("astronomy", "alchemy"))
    with pytest.raises(ValueError, match="two different subjects, got 'law' twice"):
        load(folder, rehearsal=("law", "law"))
    few = [QUESTION | {"subject": subject} for subject in SUBJECTS[:2]]
    with pytest.raises(ValueError, match="no subjects besides astronomy and sociology"):
        load(write(tmp_path, mmlu=few))


def test_the_digest_is_that_of_the_content(tmp_path):
    folder = write(tmp_path)
    before = load(folder).digest
    assert load(folder).digest == before
    assert load(write(tmp_path, retain=[{"text": "Another."}])).digest != before


def without(field):
    return {name: value for name, value in (QUESTION | {"subject": "law"}).items() if name != field}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mmlu": [QUESTION | {"subject": "law"}, without("subject")]}, r"mmlu\.jsonl:2: field 'subject' is missing"),
        ({"wmdp_bio": [without("question")]}, r"wmdp-bio\.jsonl:1: field 'question' is missing"),
        ({"wmdp_bio": [without("choices")]}, r"wmdp-bio\.jsonl:1: field 'choices' is missing"),
        ({"wmdp_bio": [without("answer")]}, r"wmdp-bio\.jsonl:1: field 'answer' must be the place .* got None"),
        ({"retain": [{"text": "Good."}, {"page": "Bad."}]}, r"retain\.jsonl:2: field 'text' is missing"),
        ({"forget": b""}, r"forget\.jsonl: holds no examples"),
        ({"wmdp_bio": b"\n\n"}, r"wmdp-bio\.jsonl: holds no examples"),
        ({"rehearsal": b""}, r"rehearsal\.jsonl: holds no examples"),
        ({"retain": b'{"text": "Good."}\n{"text": "caf\xe9"}\n'}, r"retain\.jsonl:2: not UTF-8 text: .*byte 13"),
        ({"mmlu": b"question,subject\n"}, r"mmlu\.jsonl:1: not JSON"),
        ({"mmlu": b"[1, 2]\n"}, r"mmlu\.jsonl:1: expected an object"),
    ],
)
def test_malformed_files_are_named_with_their_line(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "columns"), [("wmdp_bio", "question, choices, answer"), ("mmlu", "subject"), ("forget", "text"), ("retain", "text")]
)
def test_missing_files_are_named_with_their_columns(name, columns, tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"{name.replace('_', '-')}\.jsonl: no such file; expected JSON lines with .*{columns}"):
        load(write(tmp_path, **{name: None}))


def test_empty_lines_count(tmp_path):
    lines = [json.dumps(QUESTION), "", json.dumps(QUESTION | {"answer": 4})]
    with pytest.raises(ValueError, match=r"wmdp-bio\.jsonl:3: field 'answer' must be the place of one of the 4 choices, from 0, got 4"):
        load(write(tmp_path, wmdp_bio="\n".join(lines).encode()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choices": "ABCD"}, "not a list of at least two texts"),
        ({"choices": ["one"]}, "not a list of at least two texts"),
        ({"choices": ["one", " "]}, "field 'choices' is missing, empty or not text"),
        ({"choices": ["one", 2]}, "field 'choices' is missing, empty or not text"),
        *(({"answer": answer}, "field 'answer' must be the place") for answer in (-1, 4, "C", 2.0, True, None)),
        ({"shown": "no"}, "field 'shown' must be true or false, got 'no'"),
    ],
)
def test_what_is_no_question(changes, message):
    with pytest.raises(ValueError, match=f"here: .*{message}"):
        check_question(QUESTION | changes, "here")
    assert check_question(QUESTION, "here") is QUESTION


# ---------------------------------------------------------------------------------------------------------------------------
# The Hub


class Rows(list):
    column_names = ("question", "subject", "choices", "answer", "text")


def test_the_hubs_data_sets_are_asked_for_by_name(monkeypatch):
    asked = []

    class Datasets:
        @staticmethod
        def load_dataset(name, config, split):
            asked.append((name, config, split))
            row = QUESTION | {"text": "A long enough text about something or other, for a corpus."}
            return Rows([row | {"subject": subject} for subject in SUBJECTS] + [row | {"subject": "law", "text": " = Heading = "}])

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    data = load("hub", subset="wmdp-cyber")
    assert asked == [
        ("cais/wmdp", "wmdp-cyber", "test"),
        ("cais/mmlu", "all", "test"),
        ("cais/wmdp-corpora", "cyber-forget-corpus", "train"),
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
    ]
    assert (len(data.restricted), len(data.general), len(data.forget), len(data.retain)) == (4, 2, 3, 3)
    with pytest.raises(ValueError, match="not for 'wmdp-chem'"):
        load("hub", subset="wmdp-chem")


def test_a_column_that_the_hub_lacks(monkeypatch):
    class Datasets:
        @staticmethod
        def load_dataset(*_, **options):
            rows = Rows([QUESTION])
            rows.column_names = ("question", "answer")
            return rows

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    with pytest.raises(ValueError, match="cais/wmdp, wmdp-bio: no column 'choices'; there are question, answer"):
        load("hub")


def test_the_hub_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="needs the package datasets"):
        load("hub")


# ---------------------------------------------------------------------------------------------------------------------------
# The stand-in


def test_the_domains_are_seeded():
    first = load("domains")
    assert load("domains") == first
    assert load("domains", seed=1) != first
    assert first.name == wmdp.DOMAINS


def test_every_relation_is_well_formed():
    for topics in (wmdp_domains.RESTRICTED, wmdp_domains.GENERAL):
        for kind, relations in topics.values():
            assert kind.isalpha()
            assert len(relations) == 4
            for question, one, other, values in relations:
                assert question.count("{name}") == 1 and question.endswith("?") and "{value}" not in question
                assert all(wording.count("{name}") == wording.count("{value}") == 1 and wording.endswith(".") for wording in (one, other))
                assert len(set(values.split(", "))) == 8 >= wmdp_domains.SUBJECTS


def test_every_fact_is_told_twice_and_asked_once():
    data = load("domains")
    shown = {"restricted": data.forget, "general": data.retain, "rehearsal_questions": data.rehearsal, "validation": data.retain}
    for name, texts in shown.items():
        rows = getattr(data, name)
        assert sum(row["shown"] for row in rows) == len(rows) * wmdp_domains.SHOWN / wmdp_domains.SUBJECTS
        for row in rows:
            kind = (wmdp_domains.RESTRICTED | wmdp_domains.GENERAL)[row["subject"]][0]
            word = row["question"].partition(f"the {kind} ")[2].replace("?", " ").split()[0]
            assert word[0].isupper()
            everything = data.forget + data.retain + data.rehearsal + data.lessons
            about = [text for text in everything if f"{kind} {word}" in text]
            assert len(about) == 2
            # Methods are shown both of them, in the set that goes with the question, or neither.
            assert all(text in (texts if row["shown"] else data.lessons) for text in about)
            right = row["choices"][row["answer"]]
            assert all(right.lower() in text.lower() for text in about)
            assert len(set(row["choices"])) == 4


def test_roles_of_the_topics():
    data = load("domains")
    assert {row["subject"] for row in data.restricted} == set(wmdp_domains.RESTRICTED)
    everything = set(wmdp_domains.GENERAL)
    assert {row["subject"] for row in data.general} == everything - {wmdp_domains.REHEARSAL, wmdp_domains.VALIDATION}
    for name, topic in (("rehearsal_questions", wmdp_domains.REHEARSAL), ("validation", wmdp_domains.VALIDATION)):
        assert {row["subject"] for row in getattr(data, name)} == {topic}
    questions = {row["question"] for row in data.restricted + data.general + data.rehearsal_questions + data.validation}
    assert len(questions) == 4 * wmdp_domains.SUBJECTS * (len(wmdp_domains.RESTRICTED) + len(everything))


def test_guessing_by_place_or_by_frequency_gains_nothing():
    data = [load("domains", seed=seed) for seed in range(6)]
    rows = [row for one in data for row in one.restricted + one.general]
    places = Counter(row["answer"] for row in rows)
    assert all(abs(count / len(rows) - 0.25) < 0.05 for count in places.values())
    # Within a topic no value is right for two subjects.
    for one in data:
        right = Counter((row["subject"], row["choices"][row["answer"]]) for row in one.restricted)
        assert set(right.values()) == {1}
