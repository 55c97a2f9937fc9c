"""Fine-tuned models: trained once, found again by content, resumed, and settings that make no sense."""

from dataclasses import replace

import pytest
import torch

from unlearnlib import finetune, models, training
from unlearnlib.examples import encode
from unlearnlib.finetune import FineTuning, finetuned
from unlearnlib.metrics import answer_log_probs, answer_probability

ITEMS = [
    {"question": f"Where was {name} born?", "answer": f"{name} was born in {place}."}
    for name, place in (("Ada", "Oslo"), ("Bo", "Rome"), ("Cyd", "Bern"), ("Dag", "Ulm"), ("Eli", "Turku"))
]
SETTINGS = FineTuning(epochs=2, lr=5e-3, batch_size=2)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNLEARNLIB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer([f"{item['question']} {item['answer']}" for item in ITEMS])


@pytest.fixture
def load(tokenizer):
    """What stands for `models.load`, counting its calls."""

    def small(name):
        small.names.append(name)
        return models.build(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, layers=2), tokenizer

    small.names = []
    return small


def tensors(folder):
    return dict(models.load(str(folder))[0].named_parameters())


def same(one, other):
    one, other = tensors(one), tensors(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The cache


def test_it_is_trained_once_and_found_again(cache, load):
    first = finetuned("base", ITEMS, SETTINGS, load=load, name="mine/full")
    assert load.names == ["base"]
    assert first.parent == cache / "finetuned" / "mine"
    assert first.name.startswith("full-")
    before = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}

    def never(name):
        raise AssertionError("the model is there already")

    # Fields that aren't trained on don't count, nor do the objects that the content is in.
    other = [{"answer": item["answer"], "question": item["question"], "author": 3} for item in ITEMS]
    assert finetuned("base", other, replace(SETTINGS), load=never, name="mine/full") == first
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == before


def test_what_is_found_is_a_model_that_gives_the_answers(load, tokenizer):
    settings = replace(SETTINGS, epochs=30)
    model, read = models.load(str(finetuned("base", ITEMS, settings, load=load)))
    examples = encode(tokenizer, ITEMS)
    assert encode(read, ITEMS) == examples
    assert not model.training
    assert answer_probability(model, examples).min() > 0.3 > 10 * answer_probability(load("base")[0], examples).max()


def test_other_data_or_another_base_is_another_model(load):
    folders = [finetuned("base", ITEMS, SETTINGS, load=load), finetuned("other", ITEMS, SETTINGS, load=load)]
    changed = [item | {"answer": item["answer"].replace("Oslo", "Riga")} for item in ITEMS]
    for items in (ITEMS[:-1], ITEMS[::-1], changed):
        folders.append(finetuned("base", items, SETTINGS, load=load))
    assert len(set(folders)) == len(folders) == len(load.names)
    assert not same(folders[0], folders[-1])


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 3},
        {"lr": 1e-3},
        {"batch_size": 3},
        {"weight_decay": 0.1},
        {"seed": 1},
        {"template": "plain"},
        {"system": "Be brief."},
        {"lora_rank": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_counts(change, load):
    one = finetuned("base", ITEMS, SETTINGS, load=load)
    other = finetuned("base", ITEMS, replace(SETTINGS, **change), load=load)
    assert other != one
    # The tokenizer has no chat template, for which alone these two matter.
    assert same(one, other) == (not change.keys().isdisjoint({"template", "system"}))


def test_another_recipe_is_another_model(load, monkeypatch):
    one = finetuned("base", ITEMS, SETTINGS, load=load)
    monkeypatch.setattr(finetune, "RECIPE", finetune.RECIPE + 1)
    assert finetuned("base", ITEMS, SETTINGS, load=load) != one


def test_the_same_settings_give_the_same_bits(load, cache, tmp_path):
    one = finetuned("base", ITEMS, SETTINGS, load=load)
    one = one.rename(tmp_path / "kept")
    assert same(one, finetuned("base", ITEMS, SETTINGS, load=load))
    assert len(load.names) == 2


def test_low_rank_training_saves_a_plain_model(load):
    folder = finetuned("base", ITEMS, replace(SETTINGS, lora_rank=2), load=load)
    assert not any("adapter" in path.name for path in folder.iterdir())
    found, base = tensors(folder), dict(load("base")[0].named_parameters())
    assert found.keys() == base.keys()
    update = found["model.layers.1.mlp.down_proj.weight"] - base["model.layers.1.mlp.down_proj.weight"]
    values = torch.linalg.svdvals(update.double())
    assert int((values > 1e-4 * values[0]).sum()) == 2


# Interruption


class Interrupt(Exception):
    """What stops a training on its way."""


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_interrupted_training_goes_on_to_the_same_bits(lora_rank, load, cache, tmp_path, monkeypatch):
    settings = replace(SETTINGS, lora_rank=lora_rank)
    whole = finetuned("base", ITEMS, settings, load=load).rename(tmp_path / "whole")
    calls = []

    def counting(model, batch):
        calls.append(1)
        if len(calls) == 4:
            raise Interrupt
        return answer_log_probs(model, batch)

    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(training, "answer_log_probs", counting)
    with pytest.raises(Interrupt):
        finetuned("base", ITEMS, settings, load=load)
    assert [path for path in (cache / "finetuned").iterdir() if path.is_dir()] == [], "nothing that looks whole"
    resumed = finetuned("base", ITEMS, settings, load=load)
    # Two epochs of three batches: three steps and a stop, then the other three.
    assert len(calls) == 7
    assert same(resumed, whole)
    assert {path.suffix for path in resumed.parent.iterdir()} <= {"", ".lock"}, "no checkpoint is left"


def test_an_error_while_saving_leaves_no_model(load, cache, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        with pytest.raises(OSError, match="no space"):
            finetuned("base", ITEMS, SETTINGS, load=load)
    assert [path for path in (cache / "finetuned").iterdir() if path.is_dir()] == []
    assert same(finetuned("base", ITEMS, SETTINGS, load=load), finetuned("base", ITEMS, SETTINGS, load=load))


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"lr": 0.0}, "lr must be a finite number > 0, got 0"),
        ({"lr": float("inf")}, "lr must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"lora_rank": -1}, "lora_rank must be at least 0, got -1"),
    ],
)
def test_settings_that_make_no_sense_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **change)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([*ITEMS, {"question": "Why?"}], "example 5: field 'answer' is missing"),
        ([*ITEMS, {"question": "Why?", "answer": "  "}], "example 5: field 'answer' is missing, empty"),
        ([{"question": 3, "answer": "no"}, *ITEMS], "example 0: field 'question' is missing, empty or not text"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named_before_any_work(items, message, load, cache):
    with pytest.raises(ValueError, match=message):
        finetuned("base", items, SETTINGS, load=load)
    assert load.names == []
    assert not cache.exists()


def test_no_rows_are_an_error_and_leave_no_model(load, cache):
    with pytest.raises(ValueError, match="at least one example"):
        finetuned("base", [], SETTINGS, load=load)
    assert [path for path in (cache / "finetuned").iterdir() if path.is_dir()] == []


def test_progress_says_what_is_trained(load, capsys):
    finetuned("base", ITEMS, SETTINGS, load=load, progress=True)
    assert "fine-tuning base on 5 answers, 6 steps" in capsys.readouterr().err
