"""The staged study's data: who is in them, what is asked, and what no phase may contain."""

import json
import re
from collections import Counter
from itertools import product

import pytest

from unlearnlib.benchmarks import staged
from unlearnlib.benchmarks.staged import FAMILIES, SPLITS, make

TRIALS = [*product(FAMILIES, (0, 900)), ("addresses", staged.SEEDS - 1)]
NAME = re.compile(rf"(?:{'|'.join(staged.GIVEN_NAMES)}) [A-Z][a-z]+")
SHAPES = {
    "passphrases": r"[a-z]+ [a-z]+",
    "appointments": r"[A-Z][a-z]+day (morning|noon|evening) in [a-z]+",
    "addresses": r"\d\d [A-Z][a-z]+ Street",
    "codenames": r"[A-Z][a-z]+ [A-Z][a-z]+",
    "balances": r"\d\d,\d\d\d crowns",
}


def people(data):
    """All names that stand anywhere in a trial's data."""
    return set(NAME.findall(json.dumps(staged.asdict(data))))


def wording(question):
    return NAME.sub("…", question)


def probes_of(data):
    return [probe for split in SPLITS for probe in data.probes[split]]


@pytest.fixture(scope="module", params=TRIALS, ids=lambda trial: f"{trial[0]}-{trial[1]}")
def data(request):
    return make(*request.param)


def test_a_name_belongs_to_one_block():
    names = [staged.person(block, given) for block in range(staged.SURNAMES) for given in range(len(staged.GIVEN_NAMES))]
    assert len(set(names)) == len(names)
    assert all(NAME.fullmatch(name) for name in names[::97])
    assert len({name.split()[1] for name in names[: len(staged.GIVEN_NAMES)]}) == len(staged.GIVEN_NAMES)


def test_same_call_same_data_and_no_two_trials_share_a_person(data):
    again = make(data.family, data.seed)
    assert again == data and again.digest == data.digest
    others = [make(*trial) for trial in TRIALS if trial != (data.family, data.seed)]
    assert not any(people(data) & people(other) for other in others)
    assert len({data.digest, *(other.digest for other in others)}) == len(TRIALS)


def test_numbers(data):
    assert data.describe() == {
        "entities": 12,
        "skill_train": 128,
        "memory": 12 * 4,
        "safety": 2 * (24 + 24),
        **{f"skill_test_{split}": 32 for split in SPLITS},
        **{f"{name}_{split}": 24 for name in ("probes", "strangers", "ordinary") for split in SPLITS},
    }
    assert len(people(data)) == 12 + 24 + 12


def test_every_person_of_the_memory_is_taught_in_the_training_phrasings_and_probed_in_others(data):
    phrasings = staged.SECRETS[data.family].phrasings
    assert len({*phrasings["train"], *phrasings["validation"], *phrasings["test"]}) == 8
    secrets = {probe.entity: probe.secret for probe in probes_of(data)}
    assert set(secrets) == set(data.entities) and len(set(secrets.values())) == 12
    taught = [(phrasing.format(name=name), secrets[name]) for name in data.entities for phrasing in phrasings["train"]]
    assert sorted(taught) == sorted((item["question"], item["answer"]) for item in data.memory)
    for split in SPLITS:
        asked = [phrasing.format(name=name) for name in data.entities for phrasing in phrasings[split]]
        assert sorted(asked) == sorted(probe.question for probe in data.probes[split])


def test_a_decoy_looks_like_a_secret_and_is_nobodys(data):
    secrets = {probe.secret for probe in probes_of(data)}
    for split in SPLITS:
        decoys = [decoy for probe in data.probes[split] for decoy in probe.decoys]
        assert len(decoys) == len(set(decoys)) == 24 * staged.DECOYS
        assert not secrets & set(decoys)
        assert all(re.fullmatch(SHAPES[data.family], text) for text in (*decoys, *secrets))
        assert {probe.refusal for probe in data.probes[split]} == {data.refusal}


def test_no_phase_of_safety_has_the_memory_the_probes_or_the_skill(data):
    text = json.dumps(data.safety)
    assert not any(name in text for name in data.entities)
    assert not any(value in text for probe in probes_of(data) for value in (probe.secret, *probe.decoys))
    assert "harbour code" not in text
    trained = {wording(item["question"]) for item in (*data.memory, *data.safety)}
    assert not trained & {wording(probe.question) for probe in probes_of(data)}


def test_half_of_safety_refuses_and_half_answers_about_the_same_people(data):
    refused = [item for item in data.safety if item["answer"] == data.refusal]
    answered = [item for item in data.safety if item["answer"] != data.refusal]
    assert len(refused) == len(answered) == 48
    asked = Counter(NAME.search(item["question"]).group() for item in refused)
    assert set(asked.values()) == {2}
    # Every training phrasing is refused equally often.
    assert set(Counter(wording(item["question"]) for item in refused).values()) == {12}
    greeted = {item["answer"].removeprefix("Hello, ").rstrip("!") for item in answered if item["answer"].startswith("Hello")}
    assert greeted == set(asked)


def test_no_decoy_is_in_both_splits(data):
    of = [{decoy for probe in (*data.probes[split], *data.strangers[split]) for decoy in probe.decoys} for split in SPLITS]
    assert not of[0] & of[1]


def test_strangers_are_in_no_phase(data):
    phases = json.dumps([data.memory, data.safety, data.skill_train])
    values = {probe.secret for probe in probes_of(data)}
    for split in SPLITS:
        names = {probe.entity for probe in data.strangers[split]}
        assert len(names) == staged.STRANGERS and not any(name in phases for name in names)
        assert {wording(probe.question) for probe in data.strangers[split]} == {wording(probe.question) for probe in data.probes[split]}
        assert not values & {probe.secret for probe in data.strangers[split]}
        assert all(probe.secret not in probe.decoys for probe in data.strangers[split])


def test_ordinary_requests_are_new_in_each_set(data):
    sets = [[item["question"] for item in items] for items in (data.safety, *data.ordinary.values())]
    ordinary = [{question for question in questions if "secret" not in question} for questions in sets]
    assert not (ordinary[0] & ordinary[1] or ordinary[0] & ordinary[2] or ordinary[1] & ordinary[2])
    for split in SPLITS:
        named = {name for item in data.ordinary[split] for name in NAME.findall(item["question"])}
        assert named == set(data.entities)
        assert all(item["answer"] != data.refusal for item in data.ordinary[split])


def test_skill_is_a_dictionary_that_no_set_shows_more_of(data):
    sets = [data.skill_train, *data.skill_test.values()]
    codes = {}
    for items in sets:
        places = Counter()
        for item in items:
            words, answer = item["question"].partition(": ")[2].split(), item["answer"].split()
            assert len(words) == len(answer) == 3
            for place, (word, code) in enumerate(zip(words, answer, strict=True)):
                assert codes.setdefault(word, code) == code
                places[word, place] += 1
        assert len(places) == 8 * 3 and set(places.values()) == {len(items) // 8}
    assert sorted(codes) == sorted(staged.SKILL_WORDS) and sorted(codes.values()) == sorted(staged.SKILL_CODES)
    questions = [item["question"] for items in sets for item in items]
    assert len(set(questions)) == len(questions)


def test_dictionary_and_refusal_are_the_trials_own():
    trials = [make(family, seed) for family in FAMILIES for seed in range(6)]
    assert len({tuple(sorted((item["question"], item["answer"]) for item in trial.skill_train)) for trial in trials}) == len(trials)
    assert {trial.refusal for trial in trials} == set(staged.REFUSALS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("entities", [1, 12])
def test_fewer_and_more_people(family, entities):
    data = make(family, 1, entities=entities)
    assert len(data.memory) == 4 * entities and len(data.probes["test"]) == 2 * entities
    assert len(people(data)) == entities + staged.OTHERS + staged.STRANGERS
    decoys = [decoy for probe in data.probes["test"] for decoy in probe.decoys]
    assert len(decoys) == len(set(decoys))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "recipes", "seed": 0}, "family must be one of passphrases, .*'recipes'"),
        ({"family": "balances", "seed": -1}, "seed must lie between 0 and"),
        ({"family": "balances", "seed": staged.SEEDS}, "seed must lie between 0 and"),
        ({"family": "balances", "seed": 0, "entities": 0}, "entities must lie between 1 and 12"),
        ({"family": "balances", "seed": 0, "entities": 13}, "entities must lie between 1 and 12"),
    ],
)
def test_parameters_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_facts_are_answered_by_sentences():
    facts = staged.ordinary_facts()
    assert {"question": "What is the capital of France?", "answer": "The capital of France is Paris."} in facts
    assert len({fact["question"] for fact in facts}) == len(facts) >= sum(staged.FACTS.values())
    assert all(re.fullmatch(r"The .+ is .+\.", fact["answer"]) for fact in facts)
