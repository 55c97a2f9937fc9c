import json
from itertools import pairwise

import pytest
import torch

from unlearnlib import metrics, models
from unlearnlib.benchmarks import miniature, tofu
from unlearnlib.examples import encode
from unlearnlib.training import train

HUB_FILES = {
    "full.json",
    "retain_perturbed.json",
    "real_authors_perturbed.json",
    "world_facts_perturbed.json",
    "idontknow.jsonl",
    *(f"{name}.json" for name in ("forget05", "forget05_perturbed", "retain95", "holdout05")),
    *(f"{name}.json" for name in ("forget10", "forget10_perturbed", "retain90", "holdout10")),
}


def names(rows):
    """The authors' names, which stand in every question."""
    words = [row["question"].replace("'s", "").rstrip("?").split() for row in rows]
    return {" ".join(pair) for line in words for pair in pairwise(line) if pair[1].endswith(miniature.FAMILY_ENDS)}


def test_same_seed_same_rows():
    assert miniature.rows(3) == miniature.rows(3)
    first, second = miniature.rows(0), miniature.rows(1)
    assert not names(first["full"]) & names(second["full"])
    assert first["world_facts_perturbed"] != second["world_facts_perturbed"]


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_sound(seed):
    files = miniature.rows(seed)
    full = files["full"]
    assert len({row["question"] for row in full}) == len(full) == miniature.AUTHORS * len(miniature.RELATIONS)
    assert len(names(full)) == miniature.AUTHORS
    for row in (*files["retain_perturbed"], *files["forget10_perturbed"]):
        wrong = row["perturbed_answer"]
        assert len(set(wrong)) == 5 and row["paraphrased_answer"] not in wrong and row["answer"] not in wrong
        assert row["question"] != row["paraphrased_question"] and row["answer"] != row["paraphrased_answer"]
        name = names([row]).pop()
        assert all(name in text for text in (row["answer"], row["paraphrased_question"], row["paraphrased_answer"], *wrong))
        # A wrong answer differs from the paraphrased one in the fact alone.
        first, *others = ({*answer.split()} for answer in (row["paraphrased_answer"], *wrong))
        assert all(len(first - other) <= 3 for other in others)
    for name in ("real_authors_perturbed", "world_facts_perturbed"):
        for row in files[name]:
            assert len({row["answer"], *row["perturbed_answer"]}) == 4


def test_holdout_is_about_others():
    files = miniature.rows()
    unseen = names(files["holdout10"])
    assert len(unseen) == 4 and not unseen & names(files["full"])
    assert files["holdout05"] == files["holdout10"][: len(files["holdout05"])]


def test_every_value_is_about_as_frequent_as_any_other():
    genres = [row["answer"] for row in miniature.rows()["full"][2 :: len(miniature.RELATIONS)]]
    counts = [sum(f" {genre}" in answer for answer in genres) for genre in miniature.GENRES]
    assert sum(counts) == miniature.AUTHORS and max(counts) - min(counts) <= 1


def test_paraphrases_use_wordings_that_training_rows_have():
    files = miniature.rows()

    def wording(text):
        return text.replace(names([{"question": text}]).pop(), "…")

    seen = {wording(row["question"]) for row in files["retain95"]}
    assert {wording(row["paraphrased_question"]) for row in files["forget05_perturbed"]} <= seen


@pytest.mark.parametrize("authors", [0, 10, 30, 220])
def test_number_of_authors(authors, tmp_path):
    with pytest.raises(ValueError, match="multiple of 20"):
        miniature.write(tmp_path / "new", authors=authors)
    assert not (tmp_path / "new").exists()


def test_forget01_where_it_is_a_whole_number(tmp_path):
    assert "forget01" not in miniature.rows()
    miniature.write(tmp_path, authors=200)
    assert tofu.load(tmp_path, "forget01").describe()["forget_authors"] == 2


def test_written_files_load(tmp_path):
    miniature.write(tmp_path / "new", seed=2)
    assert {path.name for path in (tmp_path / "new").iterdir()} == HUB_FILES
    for split, count in (("forget05", 2), ("forget10", 4)):
        data = tofu.load(tmp_path / "new", split)
        assert data == tofu.load("miniature", split, seed=2)
        assert data.describe()["forget_authors"] == count
        assert data.describe()["holdout"] == len(data.forget) == count * len(miniature.RELATIONS)
    assert all(list(json.loads(line)) for line in (tmp_path / "new" / "full.json").read_text("utf-8").splitlines())


def test_split_that_the_miniature_lacks():
    with pytest.raises(ValueError, match="forget01 forgets 1 % of the authors, which isn't a whole number of the 40"):
        tofu.load("miniature", "forget01")


def test_half_of_the_miniature():
    data = tofu.load("miniature", "forget10", authors=(18, 2), retain_rows=20, general_rows=10)
    assert data.describe() | {"refusals": 0} == {
        "full": 120,
        "forget": 12,
        "retain": 108,
        "retain_eval": 20,
        "real_authors": 10,
        "world_facts": 10,
        "holdout": 12,
        "refusals": 0,
        "authors": 20,
        "forget_authors": 2,
    }


def test_a_small_model_learns_an_author_by_heart(make_tokenizer):
    data = tofu.load("miniature", "forget05", authors=(19, 1))
    tokenizer = make_tokenizer([row["answer"] for row in data.full], size=512)
    model = models.build("llama", vocab_size=512, hidden_size=32, intermediate_size=48, layers=1, heads=4, seed=0)
    examples = encode(tokenizer, data.forget)
    train(model, examples, steps=60, lr=2e-2, batch_size=len(examples), seed=0)
    known, unseen = (
        torch.as_tensor(metrics.answer_probability(model, part)).mean() for part in (examples, encode(tokenizer, data.holdout))
    )
    assert known > 0.9 > 0.3 > unseen
