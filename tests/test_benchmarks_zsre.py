"""zsRE and CounterFact: the four schemas, what is wrong with a file, where it is looked for, and the split."""

import json
import sys
import types

import pytest

from unlearnlib.benchmarks import zsre
from unlearnlib.facts import bundled_facts

MEND = {
    "subject": "Mont Blanc",
    "src": "Which range is Mont Blanc in?",
    "pred": "Alps",
    "rephrase": "What range does Mont Blanc belong to?",
    "alt": "Andes",
    "answers": ["Alps", "the Alps"],
    "loc": "nq question: who wrote the iliad",
    "loc_ans": "Homer",
    "cond": "Alps >> Andes || Which range is Mont Blanc in?",
}
KNOWEDIT = {
    "subject": "Mont Blanc",
    "prompt": "Which range is Mont Blanc in?",
    "target_new": "Andes",
    "ground_truth": ["Alps"],
    "rephrase_prompt": "What range does Mont Blanc belong to?",
    "locality": {"Relation_Specificity": [{"prompt": "The height of Mont Blanc is", "ground_truth": [["4,806 m", "4,807 m"]]}]},
    "portability": {"Reasoning": []},
}
ROME = {
    "case_id": 7,
    "requested_rewrite": {
        "prompt": "{} lies in the",
        "relation_id": "P1",
        "target_new": {"str": "Andes", "id": "Q1"},
        "target_true": {"str": "Alps", "id": "Q2"},
        "subject": "Mont Blanc",
    },
    "paraphrase_prompts": ["A snowy day. Mont Blanc is in the", "Mont Blanc belongs to the"],
    "neighborhood_prompts": ["The Matterhorn lies in the", "Eiger lies in the"],
    "attribute_prompts": ["Aconcagua lies in the"],
    "generation_prompts": ["Mont Blanc is near"],
}
FLAT = {
    "case_id": 7,
    "prompt": "Mont Blanc lies in the",
    "target_new": "Andes",
    "subject": "Mont Blanc",
    "ground_truth": "Alps",
    "rephrase_prompt": "A snowy day. Mont Blanc is in the",
    "locality_prompt": "The Matterhorn lies in the",
    "locality_ground_truth": "Alps",
}
SCHEMAS = {"mend": ("zsre", MEND), "knowedit": ("zsre", KNOWEDIT), "rome": ("counterfact", ROME), "flat": ("counterfact", FLAT)}
FACT = {"subject": "Mont Blanc", "answer": "Alps", "target": "Andes"}
QUESTION = FACT | {"prompt": "Which range is Mont Blanc in?", "paraphrases": ["What range does Mont Blanc belong to?"]}
READ = {
    "mend": QUESTION | {"unrelated": [{"prompt": "nq question: who wrote the iliad?", "answer": "Homer"}]},
    "knowedit": QUESTION | {"unrelated": [{"prompt": "The height of Mont Blanc is", "answer": "4,806 m"}]},
    "rome": FACT
    | {
        "prompt": "Mont Blanc lies in the",
        "paraphrases": ROME["paraphrase_prompts"],
        "unrelated": [{"prompt": prompt, "answer": "Alps"} for prompt in ROME["neighborhood_prompts"]],
    },
    "flat": FACT
    | {
        "prompt": "Mont Blanc lies in the",
        "paraphrases": ["A snowy day. Mont Blanc is in the"],
        "unrelated": [{"prompt": "The Matterhorn lies in the", "answer": "Alps"}],
    },
}


def write(path, records):
    path.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    return path


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("lines", [False, True])
def test_every_schema_becomes_the_same_row(tmp_path, schema, lines):
    dataset, record = SCHEMAS[schema]
    path = tmp_path / f"{dataset}.json"
    path.write_text(f"{json.dumps(record)}\n\n" if lines else json.dumps([record], indent=4), encoding="utf-8")
    assert zsre.load(dataset, path) == [READ[schema]]


def test_question_mark_of_unrelated_questions_is_not_doubled(tmp_path):
    path = write(tmp_path / "zsre.json", [MEND | {"loc": "nq question: who wrote the iliad? "}])
    assert zsre.load("zsre", path)[0]["unrelated"][0]["prompt"] == "nq question: who wrote the iliad?"


def without(record, *path):
    """A deep copy that lacks one field."""
    copy = json.loads(json.dumps(record))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return copy


MISSING = [
    *((schema, (field,), field) for schema in ("mend", "flat", "knowedit") for field in SCHEMAS[schema][1]
      if field not in ("pred", "cond", "case_id", "portability", "locality", "prompt")),
    ("knowedit", ("locality",), "locality_prompt"),
    ("knowedit", ("locality", "Relation_Specificity"), "locality"),
    ("knowedit", ("locality", "Relation_Specificity", 0, "prompt"), "prompt"),
    ("knowedit", ("locality", "Relation_Specificity", 0, "ground_truth"), "ground_truth"),
    ("flat", ("prompt",), "requested_rewrite"),
    ("knowedit", ("prompt",), "src"),
    ("rome", ("requested_rewrite",), "requested_rewrite"),
    *(("rome", ("requested_rewrite", field), field) for field in ("prompt", "subject", "target_new", "target_true")),
    ("rome", ("requested_rewrite", "target_true", "str"), "str"),
    ("rome", ("paraphrase_prompts",), "paraphrase_prompts"),
    ("rome", ("neighborhood_prompts",), "neighborhood_prompts"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path", "named"), MISSING)
def test_a_missing_column_is_named_with_file_and_record(tmp_path, schema, path, named):
    dataset, record = SCHEMAS[schema]
    file = write(tmp_path / f"{dataset}.json", [record, without(record, *path)])
    with pytest.raises(ValueError, match=rf"{dataset}\.json: record 2.*field '{named}' is (missing|not an object)"):
        zsre.load(dataset, file)


WRONG = {
    "answers that are no list": ("mend", {"answers": 5}, "field 'answers' is missing, empty or holds no text"),
    "no answers": ("mend", {"answers": []}, "field 'answers'"),
    "an answer that is no text": ("mend", {"answers": [["", "x"]]}, "field 'answers'"),
    "empty question": ("mend", {"src": " "}, "field 'src' is missing, empty or not text"),
    "false answer that is no text": ("mend", {"alt": None}, "field 'alt' is missing or not text"),
    "subject elsewhere": ("mend", {"subject": "Everest"}, "the subject 'Everest' isn't in the prompt 'Which range"),
    "no paraphrases": ("rome", {"paraphrase_prompts": []}, "field 'paraphrase_prompts' is missing, empty or not a list of texts"),
    "paraphrases that are no texts": ("rome", {"paraphrase_prompts": [1]}, "field 'paraphrase_prompts'"),
    "rewrite that is no object": ("rome", {"requested_rewrite": "x"}, "field 'requested_rewrite' is missing or not an object"),
    "no place for the subject": (
        "rome",
        {"requested_rewrite": ROME["requested_rewrite"] | {"prompt": "It lies in"}},
        "field 'prompt' has no {} where the subject goes",
    ),
    "locality without questions": ("knowedit", {"locality": {"Relation_Specificity": []}}, "field 'locality' is not an object of lists"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_field_is_named(tmp_path, case):
    schema, change, message = WRONG[case]
    dataset, record = SCHEMAS[schema]
    file = write(tmp_path / f"{dataset}.json", [record | change])
    with pytest.raises(ValueError) as caught:
        zsre.load(dataset, file)
    assert f"{file}: record 1" in str(caught.value)
    assert message in str(caught.value)


CONTENT = {
    "an empty file": (b"", "holds no examples"),
    "an empty array": (b" []", "holds no records"),
    "half a file": (b'[\n{"subject": ', "zsre.json:2: not JSON"),
    "another encoding": ('[\n{"subject": "Zürich"}]'.encode("latin-1"), "zsre.json:2: not UTF-8 text"),
    "another encoding, in lines": ('{"subject": "Zürich"}\n'.encode("latin-1"), "zsre.json:1: not UTF-8 text"),
    "an array of texts": (b'["x"]', "zsre.json: record 1: expected a dict"),
    "one object over several lines": (b'{\n"subject": "x"}', "zsre.json:1: not JSON"),
    "no false answer at all": (json.dumps([MEND | {"alt": ""}]).encode(), "no record has a false answer"),
}


@pytest.mark.parametrize("case", CONTENT)
def test_a_broken_file_is_named_with_its_line(tmp_path, case):
    content, message = CONTENT[case]
    (tmp_path / "zsre.json").write_bytes(content)
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        zsre.load("zsre", tmp_path / "zsre.json")


def test_rows_without_a_false_answer_of_their_own_and_repeated_questions_are_left_out(tmp_path):
    records = [
        MEND,
        MEND | {"src": "Where is Mont Blanc?", "alt": ""},
        MEND | {"src": "Which mountains has Mont Blanc?", "alt": "alps"},
        MEND | {"answers": ["Himalayas"]},
        MEND | {"src": "And Mont Blanc?"},
    ]
    rows = zsre.load("zsre", write(tmp_path / "zsre.json", records))
    assert {row["prompt"]: row["answer"] for row in rows} == {MEND["src"]: "Alps", "And Mont Blanc?": "Alps"}


def test_order_is_random_seeded_and_a_sample_is_its_beginning(tmp_path):
    path = write(tmp_path / "zsre.json", [MEND | {"src": f"Mont Blanc {i}?"} for i in range(30)])
    everything = zsre.load("zsre", path)
    assert sorted(row["prompt"] for row in everything) == sorted(f"Mont Blanc {i}?" for i in range(30))
    assert zsre.load("zsre", path) == everything != zsre.load("zsre", path, seed=1)
    assert zsre.load("zsre", path, rows=7) == everything[:7]
    for rows in (0, 31):
        with pytest.raises(ValueError, match=f"{rows} rows are wanted; zsre has 30"):
            zsre.load("zsre", path, rows=rows)


def test_where_a_file_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("UNLEARNLIB_DATA", raising=False)
    with pytest.raises(ValueError, match="UNLEARNLIB_DATA isn't set"):
        zsre.load("zsre")
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder; expected zsre's rows"):
        zsre.load("zsre", tmp_path / "nowhere")
    folder = tmp_path / "facts"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no file \.json or \.jsonl whose name contains 'zsre'"):
        zsre.load("zsre", folder)
    write(folder / "zsre_mend_eval.json", [MEND])
    write(folder / "counterfact.json", [ROME])
    (folder / "zsre.txt").write_text("not this one")
    assert zsre.load("zsre", folder) == [READ["mend"]]
    monkeypatch.setenv("UNLEARNLIB_DATA", str(tmp_path))
    assert zsre.load("counterfact") == [READ["rome"]]
    write(folder / "ZsRE-test-all.json", [KNOWEDIT])
    with pytest.raises(ValueError, match=r"several files may be zsre: ZsRE-test-all\.json, zsre_mend_eval\.json; give the file itself"):
        zsre.load("zsre")
    with pytest.raises(ValueError, match="dataset must be one of bundled, zsre, counterfact, got 'tofu'"):
        zsre.load("tofu")


def test_zsre_from_the_hub(tmp_path, monkeypatch):
    path = write(tmp_path / "downloaded.json", [KNOWEDIT])
    asked = []
    fake = types.SimpleNamespace(hf_hub_download=lambda *args, **options: (asked.append((args, options)), str(path))[1])
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert zsre.load("zsre", "hub") == [READ["knowedit"]]
    assert asked == [(("zjunlp/KnowEdit", "benchmark/ZsRE/ZsRE-test-all.json"), {"repo_type": "dataset"})]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="source='hub' needs the package huggingface_hub"):
        zsre.load("zsre", "hub")


def test_counterfact_from_the_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda name, split: [ROME]))
    assert zsre.load("counterfact", "hub") == [READ["rome"]]
    broken = types.SimpleNamespace(load_dataset=lambda name, split: [without(ROME, "paraphrase_prompts")])
    monkeypatch.setitem(sys.modules, "datasets", broken)
    with pytest.raises(ValueError, match="azhx/counterfact: record 1: field 'paraphrase_prompts'"):
        zsre.load("counterfact", "hub")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="needs the package datasets"):
        zsre.load("counterfact", "hub")


# ---------------------------------------------------------------------------------------------------------------------------
# Our own facts


@pytest.mark.parametrize("seed", [0, 1])
def test_bundled_facts_have_everything_that_a_row_of_the_benchmarks_has(seed):
    rows, facts = zsre.load("bundled", seed=seed), bundled_facts()
    known = {fact["question"]: fact for fact in facts}
    relations = {fact["question"]: fact["relation"] for fact in facts}
    assert {frozenset(row) for row in rows} == {frozenset(READ["mend"])}
    asked = {row["prompt"] for row in rows}
    unrelated = {question["prompt"] for row in rows for question in row["unrelated"]}
    assert not asked & unrelated
    assert len(asked) == len(rows)
    assert len(rows) + len(facts) * zsre.SET_ASIDE == pytest.approx(len(facts), abs=6)
    for row in rows:
        fact = known[row["prompt"]]
        same = {other["answer"] for other in facts if other["relation"] == fact["relation"]}
        assert row["subject"] in row["prompt"]
        assert (row["answer"], row["paraphrases"]) == (fact["answer"], [fact["paraphrase"]])
        assert row["target"] in same - {row["answer"]}
        (question,) = row["unrelated"]
        assert relations[question["prompt"]] != fact["relation"]
        assert question["answer"] == known[question["prompt"]]["answer"]


def test_bundled_facts_are_seeded():
    assert zsre.load("bundled", seed=3) == zsre.load("bundled", seed=3) != zsre.load("bundled", seed=4)
    assert zsre.load("bundled", rows=5) == zsre.load("bundled")[:5]


# ---------------------------------------------------------------------------------------------------------------------------
# The split


def facts(count, name="fact"):
    return [
        {
            "subject": f"{name} {i}",
            "prompt": f"{name} {i} is",
            "answer": f"a{i}",
            "target": f"b{i}",
            "paraphrases": [f"is {name} {i}"],
            "unrelated": [{"prompt": f"unrelated {name} {i // 2}", "answer": "u"}],
        }
        for i in range(count)
    ]


def test_the_parts_of_a_split():
    rows = facts(20)
    found = zsre.split(rows, 6, retain=10, rehearsal=3, unrelated=0)
    assert (found.forget, found.retain) == (rows[:6], rows[6:16])
    assert (found.stand_in, found.validation, found.anchors) == (rows[6:9], rows[9:12], rows[12:16])
    # Two facts share a question each.
    assert [question["prompt"] for question in found.unrelated] == ["unrelated fact 0", "unrelated fact 1", "unrelated fact 2"]
    assert zsre.split(rows, 6, retain=0, rehearsal=3, unrelated=2).retain == rows[6:]
    assert len(zsre.split(rows, 6, retain=0, rehearsal=3, unrelated=2).unrelated) == 2


def test_facts_to_keep_from_elsewhere():
    rows, others = facts(8), [*facts(1), *facts(9, "other")]
    found = zsre.split(rows, 6, retain=0, rehearsal=2, unrelated=0, further=others)
    # Whatever is to be forgotten is not kept; the rehearsal is of the request's own kind as far as that goes.
    assert found.retain == rows[6:] + others[1:]
    assert (found.stand_in, found.validation) == (rows[6:], others[1:3])


def test_a_split_is_told_from_others():
    rows = facts(12)
    one, same, other = (zsre.split(rows, 4, retain=0, rehearsal=size, unrelated=0).digest for size in (2, 2, 3))
    assert one == same != other


def test_questions_that_a_method_is_shown_are_not_unrelated():
    rows = facts(8)
    rows[0]["unrelated"] = [{"prompt": "fact 7 is", "answer": "a7"}, {"prompt": "is fact 6", "answer": "a6"}]
    found = zsre.split(rows, 2, retain=0, rehearsal=2, unrelated=0)
    assert [question["prompt"] for question in found.unrelated] == ["unrelated fact 0"]
    rows[1]["unrelated"] = rows[0]["unrelated"]
    with pytest.raises(ValueError, match="no unrelated question is left"):
        zsre.split(rows, 2, retain=0, rehearsal=2, unrelated=0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"forget": 0}, "forget and rehearsal must be at least 1"),
        ({"rehearsal": 0}, "forget and rehearsal must be at least 1"),
        ({"retain": -1}, "retain and unrelated at least 0"),
        ({"unrelated": -1}, "retain and unrelated at least 0"),
        ({"forget": 11}, "too few facts: 10"),
        ({"forget": 6}, r"too few facts: 10 and 4 others, for 6 to forget and 5 to keep \(2 × 2"),
        ({"retain": 8}, "for 3 to forget and 8 to keep"),
    ],
)
def test_splits_that_cannot_be(sizes, message):
    sizes = {"forget": 3, "retain": 0, "rehearsal": 2, "unrelated": 0} | sizes
    with pytest.raises(ValueError, match=message):
        zsre.split(facts(10), sizes.pop("forget"), **sizes)
