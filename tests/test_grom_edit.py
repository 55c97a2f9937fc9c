"""The edit as an object: what it is, applying and reverting to the bit, saving, exporting, and what survives the weights' type."""

import json
import warnings

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from unlearnlib.examples import Example
from unlearnlib.grom import Edit, FitData, FitSettings, MatrixEdit, untie
from unlearnlib.grom.anatomy import Anatomy, is_tied, tie, weight_view
from unlearnlib.grom.edit import AppliedEdit, fingerprint, new_folder

LAYERS = [(1,), (1, 2), ("head",), (1, 2, "head")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def fitted(model, sets, layers=(1, 2, "head"), strength=8.0, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FitData(model, *sets).fit(FitSettings(layers, strength, retain_weight=10.0), **options)


def logits(model):
    ids = torch.tensor([[5, 17, 60, 3, 3, 88, 9], [1, 0, 96, 41, 2, 7, 30]])
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.fixture
def llama(small_model):
    return small_model("llama", dtype=torch.float32)


# What it is


@pytest.mark.parametrize("layers", LAYERS)
def test_rank_is_at_most_the_number_of_distinct_gold_tokens(family, small_model, request_sets, layers):
    forget, _ = request_sets
    edit = fitted(small_model(family), request_sets, layers)
    distinct = len({token for example in forget for token in example.answer})
    assert distinct < 32, "or the bound would say nothing"
    for matrix, where in zip(edit.matrices, layers, strict=True):
        values = torch.linalg.svdvals(matrix.dense())
        rank = int((values > 1e-12 * values[0]).sum())
        assert 1 <= rank <= matrix.rank <= distinct
        assert matrix.dense().shape == weight_view(Anatomy(small_model(family)).edited(where)).shape
        assert matrix.norm() == pytest.approx(matrix.dense().norm().item(), rel=1e-10)
    assert edit.norm() == pytest.approx(sum(matrix.dense().norm() ** 2 for matrix in edit.matrices).sqrt().item(), rel=1e-10)


def test_corruption_has_rank_one(small_model, request_sets):
    edit = FitData(small_model("gpt2"), *request_sets).fit(FitSettings((1, 2), 8.0, "corrupt"))
    for matrix in edit.matrices:
        values = torch.linalg.svdvals(matrix.dense())
        assert matrix.rank == 1 and values[1] < 1e-12 * values[0]


def test_a_single_matrix_edit_is_linear_in_the_strength(family, small_model, request_sets):
    model = small_model(family)
    for where in (2, "head"):
        once, thrice = (fitted(model, request_sets, (where,), strength).matrices[0] for strength in (4.0, 12.0))
        assert torch.allclose(once.scaled(3.0).dense(), thrice.dense(), rtol=1e-9, atol=1e-12)


def test_matrix_edits_by_hand():
    right = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    rows = MatrixEdit("x", right, None, torch.tensor([2, 0]), 3)
    assert rows.dense().tolist() == [[3, 4], [0, 0], [1, 2]]
    left = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    factors = MatrixEdit("x", right, left, None, 3)
    assert factors.dense().tolist() == [[1, 2], [6, 8], [4, 6]]
    for edit in (rows, factors):
        weight = torch.full((3, 2), 10.0)
        edit.add_to(weight)
        assert torch.equal(weight, (10 + edit.dense()).float())
        assert edit.norm() == pytest.approx(edit.dense().norm().item())


# Applying and reverting


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_apply_adds_the_edit_and_revert_gives_the_exact_bits(family, small_model, request_sets, snapshot, dtype, layers, tied):
    model = small_model(family, tied=tied, dtype=dtype)
    before = snapshot(model)
    edit = fitted(model, request_sets, layers)
    assert snapshot(model) == before
    anatomy = Anatomy(model)
    expected = {
        where: (weight_view(anatomy.edited(where)).double() + matrix.dense()).to(dtype)
        for where, matrix in zip(layers, edit.matrices, strict=True)
    }
    embedding = model.get_input_embeddings().weight.detach().clone()
    handle = edit.apply(model)
    for where, weight in expected.items():
        assert torch.equal(weight_view(Anatomy(model).edited(where)), weight)
    assert torch.equal(model.get_input_embeddings().weight, embedding), "the input embedding is not edited with the head"
    assert is_tied(model) == (tied and "head" not in layers)
    assert model.config.tie_word_embeddings == is_tied(model)
    changed = {name for name, value in snapshot(model).items() if before.get(name) != value} - {"tied", "requires_grad"}
    assert {name.removesuffix(".weight") for name in changed} == {matrix.module for matrix in edit.matrices}
    handle.revert()
    assert snapshot(model) == before
    handle.revert()
    assert snapshot(model) == before


def test_originals_may_be_kept_on_disk(family, small_model, request_sets, snapshot, tmp_path):
    model = small_model(family, dtype=torch.bfloat16)
    before = snapshot(model)
    handle = fitted(model, request_sets).apply(model, originals=tmp_path)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2, "the head's original is the embedding, which it was tied to"
    handle.revert()
    assert snapshot(model) == before
    del handle
    assert list(tmp_path.iterdir()) == []


def test_the_context_manager_reverts_after_an_error(llama, request_sets, snapshot):
    before = snapshot(llama)
    edit = fitted(llama, request_sets)
    with pytest.raises(ZeroDivisionError), edit.applied(llama) as model:
        assert model is llama and snapshot(llama) != before
        raise ZeroDivisionError
    assert snapshot(llama) == before


@pytest.mark.parametrize("tied", [True, False])
def test_nested_edits_come_out_in_the_opposite_order(small_model, request_sets, snapshot, tied):
    model = small_model("llama", tied=tied, dtype=torch.float32)
    edits = [fitted(model, request_sets, layers, strength) for layers, strength in (((1, "head"), 3.0), ((1, 2), 5.0), (("head",), 9.0))]
    seen, handles = [snapshot(model)], []
    for edit in edits:
        handles.append(edit.apply(model))
        seen.append(snapshot(model))
    while handles:
        assert snapshot(model) == seen.pop()
        handles.pop().revert()
    assert snapshot(model) == seen.pop()


def test_reverting_out_of_order_is_refused_and_changes_nothing(llama, request_sets, snapshot):
    first, second, apart = (fitted(llama, request_sets, layers) for layers in ((1, "head"), ("head",), (2,)))
    before = snapshot(llama)
    one, two, three = first.apply(llama), second.apply(llama), apart.apply(llama)
    all_in = snapshot(llama)
    with pytest.raises(RuntimeError, match="later edit"):
        one.revert()
    assert snapshot(llama) == all_in
    two.revert()
    one.revert()  # the third edit is on another matrix: it may stay
    three.revert()
    assert snapshot(llama) == before


def test_an_edit_of_another_model_is_refused_and_nothing_is_changed(small_model, request_sets, snapshot):
    llama, gpt2 = small_model("llama"), small_model("gpt2")
    edit = fitted(llama, request_sets)
    before = snapshot(gpt2)
    with pytest.raises(ValueError, match=r"no module 'model\.layers\.1\.mlp\.down_proj'"):
        edit.apply(gpt2)
    assert snapshot(gpt2) == before
    wider = small_model("llama", vocab_size=103)
    before = snapshot(wider)
    with pytest.raises(ValueError, match=r"lm_head: the edit has shape \(97, 32\), the model's weight \(103, 32\)"):
        edit.apply(wider)
    assert snapshot(wider) == before


@pytest.mark.parametrize(("method", "at"), [("_keep", 1), ("_keep", 2), ("add_to", 1), ("add_to", 2), ("add_to", 3)])
def test_an_apply_that_fails_half_way_leaves_the_model_as_it_was(family, small_model, request_sets, snapshot, monkeypatch, method, at):
    """A full disk or no memory for a matrix."""
    model = small_model(family, dtype=torch.float32)
    before, edit = snapshot(model), fitted(model, request_sets)
    owner, calls = AppliedEdit if method == "_keep" else MatrixEdit, []
    own = getattr(owner, method)

    def failing(*args):
        calls.append(args)
        if len(calls) == at:
            raise OSError("no space left")
        return own(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, failing)
        with pytest.raises(OSError, match="no space"):
            edit.apply(model)
    assert snapshot(model) == before
    with edit.applied(model):
        pass
    assert snapshot(model) == before


def test_untie_and_tie_are_inverse(family, small_model, snapshot):
    model = small_model(family)
    before = snapshot(model)
    untie(model)
    assert not is_tied(model) and not model.config.tie_word_embeddings
    untie(model)
    tie(model)
    assert snapshot(model) == before


def test_transformers_does_not_tie_an_edited_head_again(family, small_model, request_sets, snapshot):
    model = small_model(family, dtype=torch.float32)
    before = snapshot(model)
    with fitted(model, request_sets, ("head",)).applied(model):
        edited = snapshot(model)
        model.tie_weights()
        assert snapshot(model) == edited
    model.tie_weights()
    assert snapshot(model) == before


# Saving the edited model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_an_edited_model_that_is_saved_and_reloaded_says_the_same(family, small_model, request_sets, tmp_path, layers, tied):
    model = small_model(family, tied=tied, dtype=torch.float32)
    original = logits(model)
    edit = fitted(model, request_sets, layers)
    with edit.applied(model):
        edited = logits(model)
        model.save_pretrained(tmp_path / "edited")
    model.save_pretrained(tmp_path / "original")
    assert not torch.allclose(edited, original, atol=1e-2)
    for name, expected in (("edited", edited), ("original", original)):
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        assert torch.equal(logits(reloaded), expected)
        assert is_tied(reloaded) == (tied and not (name == "edited" and "head" in layers))


# Saving the edit


@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("audit", [True, False])
def test_round_trip(tmp_path, llama, request_sets, layers, audit):
    edit = fitted(llama, request_sets, layers, keep_audit=True)
    edit.save(tmp_path / "a" / "b", audit=audit)
    loaded = Edit.load(str(tmp_path / "a" / "b"))
    for a, b in zip(loaded.matrices, edit.matrices, strict=True):
        assert (a.module, a.out_features) == (b.module, b.out_features)
        assert torch.equal(a.dense(), b.dense())
    assert loaded.settings == edit.settings
    assert loaded.settings["layers"] == list(layers) and loaded.settings["strength"] == 8.0
    assert loaded.fingerprints == edit.fingerprints and loaded.key is None
    assert bool(loaded.states) == audit
    if not audit:
        with pytest.raises(ValueError, match="audit=True"):
            loaded.audit()
    with loaded.applied(llama):
        after = logits(llama)
    with edit.applied(llama):
        assert torch.equal(logits(llama), after)


def test_what_is_there_is_never_overwritten(tmp_path, llama, request_sets):
    edit = fitted(llama, request_sets)
    (tmp_path / "empty").mkdir()
    edit.save(tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    for write in (edit.save, lambda folder: fitted(llama, request_sets, (1,)).export_lora(folder, llama)):
        for name in ("empty", "file"):
            before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            with pytest.raises(FileExistsError, match=name):
                write(tmp_path / name)
            assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_failed_save_leaves_nothing(tmp_path, llama, request_sets, monkeypatch):
    edit = fitted(llama, request_sets, keep_audit=True)
    unsavable = Edit(edit.matrices, {"layers": object()}, edit.fingerprints, edit.key, edit.states)
    with pytest.raises(TypeError):
        unsavable.save(tmp_path / "edit", audit=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "edit") as scratch:
        (scratch / "half").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 1,\n "matrices": [', r"edit\.json:2: not JSON"),
        ('{"format": 99}', r"edit\.json: field format: 99"),
        ("[]", r"edit\.json"),
        ('{"format": 1}', "matrices"),
        ('{"format": 1, "matrices": [{"module": "x"}], "settings": {}, "fingerprints": []}', r"out_features|right"),
    ],
)
def test_a_file_that_is_not_an_edit_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "edit.json").write_text(text)
    save_file({"0.left": torch.ones(2, 2)}, tmp_path / "edit.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        Edit.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_tensors_that_cannot_be_read_are_refused_by_name(tmp_path, llama, request_sets):
    fitted(llama, request_sets).save(tmp_path / "edit")
    path = tmp_path / "edit" / "edit.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"edit\.safetensors"):
        Edit.load(tmp_path / "edit")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"edit\.safetensors"):
        Edit.load(tmp_path / "edit")


# Fingerprints


def test_fingerprints_need_their_key(tmp_path, llama, request_sets):
    forget, retain = request_sets
    edit = fitted(llama, request_sets)
    assert all(edit.covers(example) for example in forget)
    assert not any(edit.covers(example) for example in retain)
    renamed = Example(forget[0].prompt, forget[0].answer, "another name")
    assert edit.covers(renamed), "the name is no part of the data"
    moved = Example(forget[0].prompt + forget[0].answer[:1], forget[0].answer[1:] or (1,))
    assert not edit.covers(moved), "where the answer begins is"
    edit.save(tmp_path / "edit")
    loaded = Edit.load(tmp_path / "edit")
    with pytest.raises(ValueError, match="key"):
        loaded.covers(forget[0])
    assert loaded.covers(forget[0], edit.key)
    assert not loaded.covers(forget[0], b"a guess")
    stored = b"".join(path.read_bytes() for path in (tmp_path / "edit").iterdir())
    assert edit.key not in stored and edit.key.hex().encode() not in stored
    other = fitted(llama, request_sets)
    assert other.key != edit.key and not set(other.fingerprints) & set(edit.fingerprints)
    assert fingerprint(forget[0], b"k") == fingerprint(renamed, b"k")


# PEFT


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_merged_adapter_is_the_edited_model(family, small_model, request_sets, tmp_path, layers):
    model = small_model(family, tied=False, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    edit = fitted(model, request_sets, layers)
    edit.export_lora(tmp_path / "adapter", model)
    with edit.applied(model):
        expected = logits(model)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it sets fan_in_fan_out where GPT-2's layout needs it
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    # Factors and their product are in float32: seven digits of the edit.
    assert torch.allclose(logits(adapted), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    merged = adapted.merge_and_unload()
    assert torch.allclose(logits(merged), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    merged_weights = merged.state_dict()
    assert merged_weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.allclose(merged_weights[name], weight, rtol=1e-5, atol=2e-6 * weight.abs().max().item()), name


def test_an_adapter_of_the_head_is_refused_for_a_tied_base(family, small_model, request_sets, tmp_path):
    model = small_model(family)
    with pytest.raises(ValueError, match="untie"):
        fitted(model, request_sets, (1, "head")).export_lora(tmp_path / "adapter", model)
    assert list(tmp_path.iterdir()) == []
    fitted(model, request_sets, (1,)).export_lora(tmp_path / "adapter", model)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert config["fan_in_fan_out"] == (family == "gpt2")


def test_layer_numbers_with_a_common_ending_are_told_apart(small_model, request_sets, tmp_path):
    """Layer 1 of a model that has a layer 11: PEFT matches names by patterns."""
    model = small_model("llama", layers=12, dtype=torch.float32)
    edit = fitted(model, request_sets, (1,))
    edit.export_lora(tmp_path / "adapter", model)
    model.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    changed = [name for name, weight in merged.state_dict().items() if not torch.equal(weight, model.state_dict()[name])]
    assert changed == ["model.layers.1.mlp.down_proj.weight"]


# Survival


class OneMatrix(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.x = nn.Linear(*weight.shape[::-1], bias=False)
        self.x.weight = nn.Parameter(weight)


def test_survival_by_hand():
    """Next to 1, bfloat16 has a grid of 2⁻⁷: a change of 2⁻⁹ is lost, one of 2⁻⁷ is kept, one of 0.6 · 2⁻⁷ becomes 2⁻⁷."""
    model = OneMatrix(torch.ones(1, 1))
    for change, kept in ((2**-9, 0.0), (2**-7, 1.0), (0.6 * 2**-7, 1 / 0.6)):
        edit = Edit((MatrixEdit("x", torch.tensor([[change]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64), None, 1),))
        assert edit.survival(model, torch.bfloat16)["x"] == pytest.approx(kept)
        assert edit.survival(model)["x"] == pytest.approx(1.0, abs=1e-4)


def test_survival_is_the_share_in_the_edits_own_direction():
    change = torch.tensor([[2**-9, 2**-7]], dtype=torch.float64)  # the first is lost, the second kept: 16 parts of 17 of ‖P‖²
    edit = Edit((MatrixEdit("x", change, torch.ones(1, 1, dtype=torch.float64), None, 1),))
    assert edit.survival(OneMatrix(torch.ones(1, 2)), torch.bfloat16)["x"] == pytest.approx(16 / 17)


def test_survival_of_a_fitted_edit(family, small_model, request_sets, snapshot):
    model = small_model(family, dtype=torch.bfloat16)
    edit = fitted(model, request_sets)
    before = snapshot(model)
    fractions = edit.survival(model)
    assert set(fractions) == {matrix.module for matrix in edit.matrices}
    assert all(0 <= fraction <= 1.05 for fraction in fractions.values())
    faint = Edit(tuple(matrix.scaled(1e-5) for matrix in edit.matrices)).survival(model)
    strong = Edit(tuple(matrix.scaled(1e3) for matrix in edit.matrices)).survival(model)
    # The weights lie on bfloat16's grid, and changes that small stay within half a step of nearly all of them.
    assert all(fraction < 0.3 for fraction in faint.values())
    assert all(abs(fraction - 1) < 1e-2 for fraction in strong.values())
    assert all(abs(fraction - 1) < 1e-3 for fraction in edit.survival(model, torch.float32).values())
    assert snapshot(model) == before
