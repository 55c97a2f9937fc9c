"""MUSE's loader on files of the Hub's schema that are made here, and its stand-ins."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from unlearnlib.benchmarks import muse, muse_texts
from unlearnlib.benchmarks.muse import COLUMNS, TRAIN

COUNTS = {("knowmem", "forget_qa_icl"): 2, ("knowmem", "retain_qa_icl"): 2, ("raw", "holdout"): 4}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def make_rows(config, split, columns):
    # As on the Hub: the documents that the model learns are the raw ones.
    config = "raw" if config == "train" else config
    return [{column: f"{config} {split} {column} {i}" for column in columns} for i in range(COUNTS.get((config, split), 3))]


@pytest.fixture
def folder(tmp_path):
    for (config, split), columns in COLUMNS.items():
        write(tmp_path / config / f"{split}.jsonl", make_rows(config, split, columns))
    for split in TRAIN:
        write(tmp_path / "train" / f"{split}.jsonl", make_rows("train", split, ("text",)))
    return tmp_path


# ---------------------------------------------------------------------------------------------------------------------------
# The Hub's schema


@pytest.mark.parametrize("corpus", muse.CORPORA)
def test_a_folder_as_on_the_hub(folder, corpus):
    data = muse.load(folder, corpus)
    assert data.corpus == corpus
    assert data.forget == [f"raw forget text {i}" for i in range(3)]
    assert data.retain == [f"raw retain1 text {i}" for i in range(3)]
    assert data.retain_eval == [f"raw retain2 text {i}" for i in range(3)]
    assert data.train == data.forget + data.retain + data.retain_eval
    assert data.kept == data.retain + data.retain_eval
    assert data.verbmem[2] == {"prompt": "verbmem forget prompt 2", "gt": "verbmem forget gt 2"}
    assert data.retain_qa[0] == {"question": "knowmem retain_qa question 0", "answer": "knowmem retain_qa answer 0"}
    assert data.describe()["holdout"] == 4 and data.describe()["forget_icl"] == 2
    assert data.privleak_holdout == [f"privleak holdout text {i}" for i in range(3)]


def test_what_the_model_learns_is_the_train_configuration_if_there_is_one(folder):
    more = make_rows("raw", "forget", ("text",)) + [{"text": "a further document"}]
    write(folder / "train" / "forget.jsonl", more)
    data = muse.load(folder, "news")
    # As for the news, where what is to be forgotten later is learned too: no part of what the retrained model sees.
    assert len(data.train) == 10 and "a further document" in data.train
    assert data.kept == data.retain + data.retain_eval
    for split in TRAIN:
        (folder / "train" / f"{split}.jsonl").unlink()
    (folder / "train").rmdir()
    assert len(muse.load(folder, "news").train) == 9


@pytest.mark.parametrize("lines", [True, False])
def test_a_split_may_be_a_json_list(folder, lines):
    path = folder / "knowmem" / "forget_qa.jsonl"
    rows, expected = read(path), muse.load(folder, "news")
    path.unlink()
    text = "\n".join(map(json.dumps, rows)) if lines else json.dumps(rows, indent=1)
    (folder / "knowmem" / "forget_qa.json").write_text(text)
    assert muse.load(folder, "news") == expected


def test_the_hubs_parquet(folder):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is no requirement: only the Hub's Parquet files need it")
    table = pytest.importorskip("pyarrow", reason="as above").Table
    path = folder / "raw" / "forget.jsonl"
    rows, expected = read(path), muse.load(folder, "news")
    path.unlink()
    for part, own in enumerate((rows[:2], rows[2:])):
        parquet.write_table(table.from_pylist(own), folder / "raw" / f"forget-0000{part}-of-00002.parquet")
    assert muse.load(folder, "news") == expected
    parquet.write_table(table.from_pylist([{"document": "x"}]), folder / "raw" / "forget-00000-of-00002.parquet")
    with pytest.raises(ValueError, match=r"forget-00000-of-00002.parquet, row 0: field 'text' is missing"):
        muse.load(folder, "news")


def test_parquet_without_its_reader_says_what_to_do(folder, monkeypatch):
    (folder / "raw" / "forget.jsonl").unlink()
    (folder / "raw" / "forget-00000-of-00001.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match="needs the package pyarrow; or save the split as JSON lines"):
        muse.load(folder, "news")


@pytest.mark.parametrize(("config", "split"), COLUMNS)
def test_a_missing_split_is_named(folder, config, split):
    (folder / config / f"{split}.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=rf"{config}: there is no split '{split}'; expected {split}.jsonl, .*rows with"):
        muse.load(folder, "news")


@pytest.mark.parametrize(("config", "split"), COLUMNS)
def test_an_empty_split_is_named(folder, config, split):
    (folder / config / f"{split}.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=rf"{split}.jsonl: holds no examples"):
        muse.load(folder, "news")


def test_an_empty_json_list_is_refused(folder):
    (folder / "raw" / "forget.jsonl").unlink()
    (folder / "raw" / "forget.json").write_text("[]")
    with pytest.raises(ValueError, match=r"forget.json: holds no examples"):
        muse.load(folder, "news")


@pytest.mark.parametrize(
    ("config", "split", "column"), [(config, split, column) for (config, split), columns in COLUMNS.items() for column in columns]
)
def test_a_missing_column_is_named_with_its_line(folder, config, split, column):
    path = folder / config / f"{split}.jsonl"
    rows = read(path)
    del rows[1][column]
    write(path, rows)
    with pytest.raises(ValueError, match=rf"{split}.jsonl:2: field '{column}' is missing"):
        muse.load(folder, "news")


@pytest.mark.parametrize(("value", "what"), [("", "empty"), (None, "missing"), (3, "not text"), (["x"], "not text")])
def test_a_value_that_is_no_text_is_refused(folder, value, what):
    path = folder / "verbmem" / "forget.jsonl"
    write(path, [{"prompt": "Once upon", "gt": value}])
    with pytest.raises(ValueError, match=r"forget.jsonl:1: field 'gt' is missing, empty or not text"):
        muse.load(folder, "news")
    path.rename(path.with_suffix(".json"))
    path.with_suffix(".json").write_text(json.dumps([{"prompt": "Once", "gt": "upon"}, {"prompt": "Once upon", "gt": value}]))
    with pytest.raises(ValueError, match=r"forget.json, row 1: field 'gt' is missing, empty or not text"):
        muse.load(folder, "news")


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_bytes_that_are_not_utf8_are_named_with_their_line(folder, suffix):
    path = folder / "raw" / "retain1.jsonl"
    path.unlink()
    lines = [b'{"text": "fine"}', b'{"text": "caf\xe9"}']
    content = b"\n".join(lines) if suffix == "jsonl" else b"[" + b",\n".join(lines) + b"]"
    (folder / "raw" / f"retain1.{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"retain1.{suffix}:2: not UTF-8 text"):
        muse.load(folder, "news")


def test_what_is_not_json_is_named_with_its_line(folder):
    path = folder / "raw" / "retain2.jsonl"
    path.write_text('{"text": "fine"}\n{"text": ')
    with pytest.raises(ValueError, match=r"retain2.jsonl:2: not JSON"):
        muse.load(folder, "news")
    path.unlink()
    (folder / "raw" / "retain2.json").write_text('[{"text": "fine"},\n{"text": ]')
    with pytest.raises(ValueError, match=r"retain2.json:2: not JSON"):
        muse.load(folder, "news")


def test_documents_to_be_forgotten_must_have_been_learned(folder):
    write(folder / "raw" / "forget.jsonl", [{"text": "never learned"}])
    with pytest.raises(ValueError, match="none of the documents to be forgotten"):
        muse.load(folder, "news")


@pytest.mark.parametrize(
    ("config", "split", "name"), [("raw", "holdout", "holdout"), ("raw", "retain1", "retain"), ("train", "retain2", "kept")]
)
def test_documents_are_not_both_to_be_forgotten_and_kept(folder, config, split, name):
    path = folder / config / f"{split}.jsonl"
    rows, expected = read(path), muse.load(folder, "news")
    write(path, [{"text": "raw forget text 1"}, *rows])
    with pytest.warns(
        UserWarning, match=f"1 of the documents to be forgotten are also in {name}, and left out there, such as 'raw forget text 1'"
    ):
        data = muse.load(folder, "news")
    assert getattr(data, name) == getattr(expected, name) and data.forget == expected.forget
    write(path, [{"text": "raw forget text 1"}])
    if name == "kept":
        write(folder / "train" / "retain1.jsonl", make_rows("raw", "forget", ("text",)))
    with pytest.raises(ValueError, match=f"all documents of {name} are to be forgotten"):
        muse.load(folder, "news")


# ---------------------------------------------------------------------------------------------------------------------------
# Where it comes from, and how much


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": "films"}, "corpus must be one of news, books"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"corpus": "news", "source": "sample"}, "the novels stand in for books"),
        ({"characters": 900}, "characters cuts the chapters of novels"),
        ({"source": "sample", "characters": 0}, "characters must be at least 1"),
        ({"source": "sample", "characters": 10}, "so little is left"),
    ],
)
def test_parameters_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        muse.load(**({"source": "generated", "corpus": "books"} | options))


def test_a_missing_folder_and_a_missing_variable(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no such folder; expected one with raw, verbmem, knowmem, privleak"):
        muse.load(tmp_path / "nowhere", "news")
    monkeypatch.delenv("UNLEARNLIB_DATA", raising=False)
    for source, place in (("", "muse/news"), ("novels", "texts")):
        with pytest.raises(ValueError, match=f"UNLEARNLIB_DATA isn't set to a folder that contains {place}"):
            muse.load(source, "news" if source == "" else "books")


def test_the_variable_names_the_folder(folder, tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("data")
    (home / "muse").mkdir()
    (home / "muse" / "books").symlink_to(folder)
    monkeypatch.setenv("UNLEARNLIB_DATA", str(home))
    assert muse.load("", "books") == muse.load(folder, "books")


def test_samples_are_seeded_and_in_order():
    whole, some = (muse.load("generated", "news", rows=rows) for rows in (None, 5))
    assert {name: count for name, count in some.describe().items() if count == 5} == dict.fromkeys(muse.SAMPLED, 5)
    places = [whole.forget_qa.index(row) for row in some.forget_qa]
    assert places == sorted(places)
    assert some == muse.load("generated", "news", rows=5)
    assert some.digest != whole.digest == muse.load("generated", "news").digest
    assert muse.load("generated", "news", rows=1000) == whole


# ---------------------------------------------------------------------------------------------------------------------------
# Invented texts


@pytest.mark.parametrize("corpus", muse.CORPORA)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_invented_documents_answer_their_questions_and_nobody_elses(corpus, seed):
    data = muse.load("generated", corpus, seed=seed)
    for texts, rows in ((data.forget, data.forget_qa), (data.retain_eval, data.retain_qa)):
        assert len(rows) == 3 * len(texts)
        for i, row in enumerate(rows):
            assert row["answer"].lower() in texts[i // 3].lower()
            # The question names a person or a town, and no other document does.
            names = [word for word in row["question"].replace("?", "").split() if word[0].isupper()][1:]
            assert names and [sum(name in text for text in data.train) for name in names] == [1] * len(names)
    documents = data.train + data.holdout
    assert len(set(documents)) == len(documents) == sum(muse_texts.SIZES.values())
    for row, text in zip(data.verbmem, data.forget, strict=True):
        assert text.startswith(row["prompt"]) and text.endswith(" " + row["gt"])
    assert all(len(row["prompt"].split()) == muse_texts.OPENING_WORDS for row in data.verbmem)


@pytest.mark.parametrize("corpus", muse.CORPORA)
def test_strangers_are_in_no_document(corpus):
    data = muse.load("generated", corpus)
    texts, questions = muse_texts.strangers(corpus, count=10)
    assert len(texts) == 10 and len(questions) == 30
    assert not set(texts) & set(data.train + data.holdout)
    known = Counter(word for text in data.train + data.holdout for word in text.split())
    names = {" ".join(text.split(": ")[0].split()) for text in texts} if corpus == "news" else set()
    assert not names & set(known)
    assert muse_texts.strangers(corpus, count=4)[0] == texts[:4]
    assert muse_texts.strangers(corpus, seed=1, count=10)[0] != texts


def test_seeds_make_other_texts():
    assert not set(muse.load("generated", "news").train) & set(muse.load("generated", "news", seed=1).train)
    assert not set(muse.load("generated", "news").train) & set(muse.load("generated", "books").train)


# ---------------------------------------------------------------------------------------------------------------------------
# Novels

NOVEL = """A TALE

CHAPTER I. The Beginning

It was a wet
morning in May.

  *    *    *

     Row, row,
       row.

CHAPTER II. The End

That was all.
"""
NUMERALS = """The Tale

CONTENTS

 I Beginning
 II End


 I


 Beginning

It was I
who spoke.

 II


 End

All.
"""


def test_chapters_by_either_kind_of_heading(tmp_path):
    path = tmp_path / "tale.txt"
    path.write_text(NOVEL)
    assert muse_texts.chapters(path) == {
        1: "CHAPTER I. The Beginning\n\nIt was a wet morning in May.\n\n     Row, row,\n       row.",
        2: "CHAPTER II. The End\n\nThat was all.",
    }
    path.write_bytes(NUMERALS.replace("\n", "\r\n").encode())
    assert muse_texts.chapters(path) == {1: "CHAPTER I. Beginning\n\nIt was I who spoke.", 2: "CHAPTER II. End\n\nAll."}


def test_malformed_novels(tmp_path):
    path = tmp_path / "tale.txt"
    with pytest.raises(FileNotFoundError, match=r"tale.txt: no such file"):
        muse_texts.chapters(path)
    path.write_text("No headings.\n")
    with pytest.raises(ValueError, match="there are none"):
        muse_texts.chapters(path)
    path.write_text(NOVEL.replace("CHAPTER II.", "CHAPTER III."))
    with pytest.raises(ValueError, match="don't count from I on: 1, 3"):
        muse_texts.chapters(path)
    path.write_bytes(NOVEL.replace("wet", "w\xe9t").encode("latin-1"))
    with pytest.raises(ValueError, match=r"tale.txt:5: not UTF-8"):
        muse_texts.chapters(path)


def test_a_folder_of_novels_must_have_all_chapters(tmp_path):
    for file in muse_texts.BOOKS.values():
        (tmp_path / file).write_text(NOVEL)
    with pytest.raises(ValueError, match=r"alice.txt: has no chapter IV; it has 2 chapters"):
        muse.load(tmp_path, "books")
    (tmp_path / "looking_glass.txt").unlink()
    with pytest.raises(ValueError, match="the novels stand in for books"):
        muse.load(tmp_path, "news")


def test_passages_are_the_texts_own_words():
    text = "one two  three\nfour five six seven"
    assert muse_texts.passages(text, 3) == ["one two  three", "four five six"]
    assert muse_texts.passages(text, 8) == []


def check_novels(data):
    assert {len(data.forget), len(data.holdout), len(data.retain), len(data.retain_eval)} == {2, 3, 7}
    documents = data.train + data.holdout
    assert len(set(documents)) == len(documents) and all(text.startswith("CHAPTER ") for text in documents)
    for row in data.verbmem:
        assert any(row["prompt"] in text and row["gt"] in text for text in data.forget)
        assert len(row["prompt"].split()) == muse_texts.PROMPT_WORDS and len(row["gt"].split()) == muse_texts.CONTINUATION_WORDS
    assert len(data.privleak_forget) == len(data.privleak_holdout) > 0
    assert not set(data.privleak_forget) & set(data.privleak_holdout)
    shown = {row["question"] for row in data.forget_icl}
    asked = [row["question"] for row in data.forget_qa + data.retain_qa]
    assert len(set(asked)) == len(asked) and not shown & set(asked)


def test_the_bundled_sample():
    data = muse.load("sample", "books")
    check_novels(data)
    assert len(data.forget_qa) >= 15 and len(data.retain_qa) >= 15
    short = muse.load("sample", "books", characters=1500)
    assert all(len(text) <= 1500 or text.count("\n\n") == 1 for text in short.train)
    assert len(short.forget_qa) < len(data.forget_qa) and all(a.startswith(b) for a, b in zip(data.forget, short.forget, strict=True))


def test_there_are_enough_questions_and_each_names_its_evidence():
    rows = muse_texts._bundled("data/muse_questions.jsonl")
    where = Counter(name for row in rows for name in muse_texts.SETS if (row["book"], row["chapter"]) in muse_texts.CHAPTERS[name])
    assert where["forget"] >= 40 and where["retain_eval"] >= 40 and where.total() == len(rows)
    assert all(row[field].strip() for row in rows for field in ("question", "answer", "evidence"))


def test_every_question_is_answered_by_the_novels():
    folder = Path(os.environ.get("UNLEARNLIB_DATA", "")) / "texts"
    if not os.environ.get("UNLEARNLIB_DATA") or not (folder / "alice.txt").is_file():
        pytest.skip("UNLEARNLIB_DATA names no folder with texts/alice.txt")
    data = muse.load("novels", "books")
    check_novels(data)
    rows = muse_texts._bundled("data/muse_questions.jsonl")
    assert len(data.forget_qa) + len(data.retain_qa) + len(data.forget_icl) == len(rows)
    sample = muse.load("sample", "books")
    for name in muse_texts.SETS:
        assert all(whole.startswith(part) for whole, part in zip(getattr(data, name), getattr(sample, name), strict=True))
