"""The bundled list of well-known facts: its schema, its counts, and that no question gives its answer away."""

import json
import re
from collections import Counter
from importlib import resources

import pytest

FIELDS = ["relation", "subject", "question", "paraphrase", "answer"]


@pytest.fixture(scope="module")
def facts():
    text = resources.files("unlearnlib").joinpath("data/facts.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def words(text):
    return set(re.findall(r"\w+", text.lower()))


def test_every_line_has_exactly_the_five_fields_as_trimmed_text(facts):
    for number, fact in enumerate(facts, 1):
        assert list(fact) == FIELDS, f"line {number}"
        assert all(isinstance(value, str) and value and value == value.strip() for value in fact.values()), f"line {number}"


def test_counts(facts):
    relations = Counter(fact["relation"] for fact in facts)
    assert len(facts) >= 200
    assert relations["capital"] >= 45
    assert len(relations) >= 8
    assert min(relations.values()) >= 5


def test_no_relation_asks_twice_about_one_subject(facts):
    keys = Counter((fact["relation"], fact["subject"].lower()) for fact in facts)
    assert [key for key, count in keys.items() if count > 1] == []
    texts = Counter(fact[field].lower() for fact in facts for field in ("question", "paraphrase"))
    assert [text for text, count in texts.items() if count > 1] == []


def test_both_phrasings_name_the_subject_and_differ_in_more_than_one_word(facts):
    for fact in facts:
        assert fact["subject"].lower() in fact["question"].lower(), fact
        assert fact["subject"].lower() in fact["paraphrase"].lower(), fact
        assert len(words(fact["question"]) ^ words(fact["paraphrase"])) >= 4, fact


def test_a_relation_has_one_pattern_per_phrasing(facts):
    for field in ("question", "paraphrase"):
        patterns = {}
        for fact in facts:
            subject = re.escape(fact["subject"])
            pattern = re.sub(rf"(?i)(\bthe )?(?<!\w){subject}(?!\w)", "*", fact[field], count=1)
            patterns.setdefault(fact["relation"], set()).add(pattern)
        assert {relation: found for relation, found in patterns.items() if len(found) > 1} == {}


def test_answers_are_short_and_never_given_away(facts):
    for fact in facts:
        assert 1 <= len(fact["answer"].split()) <= 3, fact
        for field in ("question", "paraphrase"):
            assert fact["answer"].lower() not in fact[field].lower(), fact
