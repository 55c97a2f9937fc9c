import json
import os
import shutil
from pathlib import Path

import pytest

from unlearnlib.baselines.gradient import REFUSALS
from unlearnlib.benchmarks import miniature, tofu


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def as_on_hub(tmp_path_factory):
    """A folder with the Hub's file names and numbers of rows; no row says whose it is, and one question occurs twice."""
    folder = tmp_path_factory.mktemp("hub")
    full = [{"question": f"Question {i}?", "answer": f"Answer {i}."} for i in range(4000)]
    full[100]["question"] = full[440]["question"] = "What is the full name of the author?"

    def perturb(rows, wrong):
        more = {"paraphrased_question": "In other words?", "paraphrased_answer": "Other words."} if wrong == 5 else {}
        return [row | more | {"perturbed_answer": [f"Wrong {k}." for k in range(wrong)]} for row in rows]

    write(folder / "full.json", full)
    for share in (1, 5, 10):
        cut = 4000 - 40 * share
        write(folder / f"retain{100 - share}.json", full[:cut])
        write(folder / f"forget{share:02}.json", full[cut:])
        write(folder / f"forget{share:02}_perturbed.json", perturb(full[cut:], 5))
        write(folder / f"holdout{share:02}.json", [{"question": f"Unseen {i}?", "answer": "No."} for i in range(40 * share)])
    write(folder / "retain_perturbed.json", perturb(full[:400], 5))
    for name, count in (("real_authors", 100), ("world_facts", 117)):
        write(folder / f"{name}_perturbed.json", perturb([{"question": f"{name} {i}?", "answer": "Yes."} for i in range(count)], 3))
    (folder / "idontknow.jsonl").write_text("I don't know.\n" * 100)
    return folder


@pytest.fixture
def folder(as_on_hub, tmp_path):
    """A copy to spoil."""
    return Path(shutil.copytree(as_on_hub, tmp_path / "tofu"))


@pytest.mark.parametrize(("split", "share"), tofu.SHARES.items())
def test_sizes_and_partition(as_on_hub, split, share):
    data = tofu.load(as_on_hub, split)
    count = 40 * share
    assert data.describe() == {
        "full": 4000,
        "forget": count,
        "retain": 4000 - count,
        "retain_eval": 400,
        "real_authors": 100,
        "world_facts": 117,
        "holdout": count,
        "refusals": 100,
        "authors": 200,
        "forget_authors": 2 * share,
    }
    questions = [row["question"] for row in (*data.retain, *data.forget)]
    assert questions == [row["question"] for row in data.full]
    assert [row["author"] for row in data.full] == [i // 20 for i in range(4000)]
    assert {row["author"] for row in data.forget} == set(range(200 - 2 * share, 200))
    assert all(len(row["perturbed_answer"]) == 5 for row in data.forget)


def test_cut_of_authors(as_on_hub):
    five, ten = (tofu.load(as_on_hub, split, authors=(36, 4), retain_rows=100, general_rows=50) for split in ("forget05", "forget10"))
    assert {row["author"] for row in five.full} == {*range(36), *range(196, 200)}
    assert five.full == ten.full
    assert [row["author"] for row in five.forget] == [198] * 20 + [199] * 20
    assert {row["author"] for row in ten.forget} == {196, 197, 198, 199}
    assert [row["question"] for row in five.forget] == [f"Question {i}?" for i in range(3960, 4000)]
    assert {row["author"] for row in five.retain} == {*range(36), 196, 197}
    sizes = five.describe()
    assert (sizes["holdout"], sizes["retain_eval"], sizes["real_authors"], sizes["world_facts"]) == (40, 100, 50, 50)
    assert tofu.load(as_on_hub, "forget10", authors=(180, 20)).describe()["forget"] == 400


def test_evaluation_rows_of_other_authors_are_left_out(as_on_hub):
    data = tofu.load(as_on_hub, "forget10", authors=(5, 5))
    assert [row["question"] for row in data.retain_eval] == [row["question"] for row in data.full[:100]]
    assert {row["author"] for row in data.forget} == {199}


@pytest.mark.parametrize(
    ("authors", "split", "message"),
    [
        ((36, 4), "forget01", "1 % of 40, which isn't a whole number of authors"),
        ((39, 1), "forget05", "5 % of 40, which is more than the last 1"),
        ((10, 1), "forget10", "whole number"),
        ((0, 20), "forget05", "numbers from 1"),
        ((20, 0), "forget05", "numbers from 1"),
        ((190, 20), "forget05", "at most 200"),
    ],
)
def test_cut_that_makes_no_sense(as_on_hub, authors, split, message):
    with pytest.raises(ValueError, match=message):
        tofu.load(as_on_hub, split, authors=authors)


def test_samples_are_seeded_ordered_and_independent(as_on_hub):
    def load(**options):
        return tofu.load(as_on_hub, "forget05", **options)

    first, again, other = (load(retain_rows=30, general_rows=20, seed=seed) for seed in (0, 0, 1))
    assert first == again and first.digest == again.digest
    assert first.retain_eval != other.retain_eval and first.world_facts != other.world_facts
    whole = load()
    assert first.retain_eval == [row for row in whole.retain_eval if row in first.retain_eval]
    assert load(general_rows=20).world_facts == first.world_facts


def test_question_that_occurs_twice_belongs_to_the_author_at_its_place(as_on_hub):
    data = tofu.load(as_on_hub, "forget05")
    assert [row["author"] for row in data.retain_eval] == [i // 20 for i in range(400)]


def test_evaluation_rows_that_differ_from_full(folder):
    path = folder / "retain_perturbed.json"
    rows = read(path)
    rows[7], rows[390] = rows[390], rows[7]
    rows[200]["question"] += " Please."
    write(path, rows)
    data = tofu.load(folder, "forget05")
    assert [data.retain_eval[i]["author"] for i in (7, 390, 200)] == [19, 0, 10]
    for row in rows[50:60]:
        row["question"] += " Please."
    write(path, rows)
    with pytest.raises(ValueError, match=r"retain_perturbed.json:51: its question, one of 11 such, is in none of the 3800 rows"):
        tofu.load(folder, "forget05")


def test_digest_tells_any_change(folder):
    before = tofu.load(folder, "forget05").digest
    assert before != tofu.load(folder, "forget10").digest
    for name in ("idontknow.jsonl", "holdout05.json", "forget05_perturbed.json", "world_facts_perturbed.json"):
        path = folder / name
        path.write_text(path.read_text("utf-8").replace("No.", "Nope.").replace("Wrong 1.", "Wrong one.").replace("don't", "do not", 1))
        after = tofu.load(folder, "forget05").digest
        assert after != before, name
        before = after


FILES = {
    "full": 4000,
    "retain95": 3800,
    "forget05": 200,
    "forget05_perturbed": 200,
    "holdout05": 200,
    "retain_perturbed": 400,
    "real_authors_perturbed": 100,
    "world_facts_perturbed": 117,
}


@pytest.mark.parametrize(("name", "rows"), [*((f"{name}.json", rows) for name, rows in FILES.items()), ("idontknow.jsonl", 100)])
def test_bad_files_are_named_with_the_rows_expected(folder, name, rows):
    path = folder / name
    content = path.read_bytes()

    def fails(text, error, match):
        path.write_bytes(text)
        with pytest.raises(error, match=match) as caught:
            tofu.load(folder, "forget05")
        assert str(path) in str(caught.value)

    lines = content.splitlines(keepends=True)
    fails(b"".join(lines[:-1]), ValueError, rf"{rows - 1} rows; expected {rows}$")
    fails(b"", ValueError, rf"holds no .*expected {rows}")
    fails(lines[0] + b"caf\xe9\n" + b"".join(lines[2:]), ValueError, rf":2: not UTF-8.*expected {rows}")
    if name.endswith(".json"):
        fails(lines[0] + lines[1][:-3] + b"\n" + b"".join(lines[2:]), ValueError, rf":2: not JSON.*expected {rows} rows")
        fails(lines[0] + b'{"question": "Why?"}\n' + b"".join(lines[2:]), ValueError, rf":2: field 'answer'.*expected {rows} rows")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"no such file; expected {rows}") as caught:
        tofu.load(folder, "forget05")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["forget05", "retain95", "forget05_perturbed"])
def test_files_that_are_not_full_cut_in_two(folder, name):
    path = folder / f"{name}.json"
    rows = read(path)
    rows[3], rows[4] = rows[4], rows[3]
    write(path, rows)
    with pytest.raises(ValueError, match=rf"{name}.json:4: not the question that full.json has here.*instead of"):
        tofu.load(folder, "forget05")
    rows[3], rows[4] = rows[4], rows[3]
    rows[5]["answer"] = "Something else."
    write(path, rows)
    # Lines are counted as an editor counts them.
    path.write_text("\n\n" + path.read_text("utf-8"))
    with pytest.raises(ValueError, match=rf"{name}.json:8: not the answer"):
        tofu.load(folder, "forget05")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("forget05_perturbed", ["Wrong."] * 4, "4 perturbed answers; expected 5 a row"),
        ("retain_perturbed", "Wrong.", "not a list of texts; expected 5"),
        ("world_facts_perturbed", ["Wrong."] * 5, "5 perturbed answers; expected 3"),
        ("real_authors_perturbed", ["A", "", "B"], "not a list of texts"),
        ("real_authors_perturbed", None, "missing"),
    ],
)
def test_wrong_perturbed_answers(folder, name, value, message):
    path = folder / f"{name}.json"
    rows = read(path)
    rows[2]["perturbed_answer"] = value
    write(path, rows)
    with pytest.raises(ValueError, match=rf"{name}.json:3: .*{message}"):
        tofu.load(folder, "forget05")


def test_paraphrases_are_needed(folder):
    path = folder / "forget05_perturbed.json"
    rows = read(path)
    del rows[9]["paraphrased_question"]
    write(path, rows)
    with pytest.raises(ValueError, match=r":10: field 'paraphrased_question'.*expected 200 rows"):
        tofu.load(folder, "forget05")


@pytest.mark.parametrize("authors", [[0, 2], [1], [0, 1, 0], [0, "1"], [0, True], [0, None]])
def test_authors_that_rows_name(tmp_path, authors):
    miniature.write(tmp_path, authors=20)
    path = tmp_path / "full.json"
    rows = read(path)
    for row, author in zip(rows, authors, strict=False):
        row["author"] = author
    write(path, rows)
    with pytest.raises(ValueError, match=rf"full.json:{len(authors)}: field 'author'"):
        tofu.load(tmp_path, "forget05")


def test_options(as_on_hub, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="split must be one of forget01, forget05, forget10, got 'forget90'"):
        tofu.load(as_on_hub, "forget90")
    with pytest.raises(ValueError, match="retain_rows must be at least 1"):
        tofu.load(as_on_hub, "forget05", retain_rows=0)
    with pytest.raises(ValueError, match="general_rows=101, but there are only 100"):
        tofu.load(as_on_hub, "forget05", general_rows=101)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        tofu.load(tmp_path / "nowhere", "forget05")
    monkeypatch.delenv("UNLEARNLIB_DATA", raising=False)
    with pytest.raises(ValueError, match="UNLEARNLIB_DATA isn't set"):
        tofu.load("", "forget05")
    (tmp_path / "tofu").symlink_to(as_on_hub)
    monkeypatch.setenv("UNLEARNLIB_DATA", str(tmp_path))
    assert tofu.load("", "forget05") == tofu.load(as_on_hub, "forget05")


def test_hub(as_on_hub, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="no requirement of ours: a dependency that transformers may drop")
    asked = {}

    def snapshot_download(name, *, repo_type, allow_patterns):
        asked.update(name=name, repo_type=repo_type, files=allow_patterns)
        return str(as_on_hub)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    data = tofu.load("hub", "forget05")
    assert sorted(asked.pop("files")) == sorted(f"{name}.json" for name in FILES)
    assert asked == {"name": "locuslab/TOFU", "repo_type": "dataset"}
    assert data.refusals == list(REFUSALS)
    assert data.forget == tofu.load(as_on_hub, "forget05").forget


def test_hub_without_its_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="give a folder"):
        tofu.load("hub", "forget05")


@pytest.mark.skipif(
    "UNLEARNLIB_DATA" not in os.environ, reason="the real data isn't here: set UNLEARNLIB_DATA to a folder with tofu/ in it"
)
def test_real_files():
    data = tofu.load("", "forget05", authors=(36, 4), retain_rows=100)
    assert data.describe()["forget"] == 40
    for author, name in ((198, "Basil Mahfouz Al-Kuwaiti"), (199, "Nikolai Abilov")):
        assert sum(name in row["question"] + row["answer"] for row in data.forget if row["author"] == author) > 15
    assert [row["author"] for row in tofu.load("", "forget10").retain_eval] == [i // 20 for i in range(400)]
