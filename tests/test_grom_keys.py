"""Keys: by position from true lengths, whatever the padding, batch or template; and one pass of a band against re-running the model."""

import warnings
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unlearnlib.examples import Example, batches, encode
from unlearnlib.grom import BandStates, Edit, FitData, FitSettings, MatrixEdit, RidgeFitter, UnknownArchitectureError, collect_keys
from unlearnlib.grom.anatomy import Anatomy, weight_view

# RMS norms compute in float32 even in a float64 model, so that a difference in the last digit of float64 can become one of float32.
NORM_ROUNDING = 2e-6
FLOAT32 = 2e-4

MODULES = {
    "llama": ("model.layers.{}.mlp.down_proj", "lm_head"),
    "qwen2": ("model.layers.{}.mlp.down_proj", "lm_head"),
    "gpt2": ("transformer.h.{}.mlp.c_proj", "lm_head"),
    "gpt_neox": ("gpt_neox.layers.{}.mlp.dense_4h_to_h", "lm_head"),
}


def plain_keys(model, name, examples):
    """Keys one example at a time, without padding, taken by a plain hook on the module of a literal name."""
    found = []
    for example in examples:
        seen = []
        hook = model.get_submodule(name).register_forward_hook(lambda _module, inputs, _output, seen=seen: seen.append(inputs[0]))
        with torch.no_grad():
            model(input_ids=torch.tensor([example.prompt + example.answer]))
        hook.remove()
        found.append(seen[0][0, len(example.prompt) - 1 : len(example) - 1])
    return torch.cat(found)


def in_order(grouped, keys):
    """Keys of batches, back in the order of the examples."""
    rows, index = torch.cat(list(keys)), torch.cat([batch.example for batch in grouped])
    return rows[torch.argsort(index, stable=True)]


def gap(a, b):
    assert a.shape == b.shape
    return ((a - b).norm() / b.norm()).item()


def module_name(family, where):
    block, head = MODULES[family]
    return head if where == "head" else block.format(where)


@pytest.mark.parametrize("where", [0, 2, 3, "head"])
def test_keys_are_what_a_plain_hook_sees(family, small_model, random_examples, where):
    model, examples = small_model(family), random_examples(9)
    expected = plain_keys(model, module_name(family, where), examples)
    for side in ("right", "left"):
        for size in (1, 4, 16):
            grouped = batches(examples, batch_size=size, padding_side=side)
            keys = in_order(grouped, collect_keys(model, grouped, where))
            assert gap(keys, expected) < NORM_ROUNDING
            gold = torch.cat([batch.gold for batch in grouped])
            gold = gold[torch.argsort(torch.cat([batch.example for batch in grouped]), stable=True)]
            assert gold.tolist() == [token for example in examples for token in example.answer]


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_padding_token_may_be_any_token_of_the_text(family, small_model, random_examples, side):
    model, examples = small_model(family), random_examples(9)
    tokens = {0, examples[0].answer[-1], examples[1].prompt[0], 96}
    results = []
    for pad in tokens:
        grouped = batches(examples, batch_size=9, padding_side=side, pad_id=pad)
        results.append(in_order(grouped, collect_keys(model, grouped, 2)))
    for other in results[1:]:
        assert gap(other, results[0]) < NORM_ROUNDING


def test_batch_sizes_agree_in_float32(family, small_model, random_examples):
    model, examples = small_model(family, dtype=torch.float32), random_examples(20)
    expected = None
    for side, size in (("right", 1), ("right", 16), ("left", 16)):
        grouped = batches(examples, batch_size=size, padding_side=side)
        keys = in_order(grouped, collect_keys(model, grouped, 3))
        expected = keys if expected is None else expected
        assert gap(keys, expected) < FLOAT32


QUESTIONS = [
    {"question": "What colour is the sky?", "answer": "blue"},
    {"question": "Which hills are grey and far away from here?", "answer": "all of them"},
    {"question": "Why?", "answer": "it is"},
]


@pytest.mark.parametrize("options", [{}, {"bos": True}, {"chat": True}, {"chat": True, "bos": True}, {"end": False}])
def test_beginnings_templates_and_ends_do_not_move_the_keys(family, small_model, make_tokenizer, options):
    """With pad = end token, and the end token inside the prompts of the chat template."""
    tokenizer = make_tokenizer(**options)
    examples = encode(tokenizer, QUESTIONS)
    model = small_model(family, vocab_size=len(tokenizer))
    expected = plain_keys(model, module_name(family, 1), examples)
    pad = tokenizer.pad_token_id or 0
    for side in ("right", "left"):
        for size in (1, 3):
            grouped = batches(examples, batch_size=size, padding_side=side, pad_id=pad)
            assert gap(in_order(grouped, collect_keys(model, grouped, 1)), expected) < NORM_ROUNDING


# One pass for a band


def random_edit(model, layer, seed):
    module = Anatomy(model).mlp_output(layer)
    m, n = weight_view(module).shape
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((m, 3), (3, n)))
    return Edit((MatrixEdit(Anatomy(model).name(module), right, left, None, m),))


def check_band_against_reruns(model, grouped, band, tolerance=1e-10, **how):
    states = BandStates(model, grouped, band, **how)
    with ExitStack() as stack:
        for layer in band:
            once = torch.cat(list(states.keys(layer)))
            again = torch.cat(list(states.keys(layer)))
            assert torch.equal(once, again), "looking at the keys changes nothing"
            rerun = torch.cat(list(collect_keys(model, grouped, layer)))
            assert gap(once, rerun) < tolerance
            before = once
            stack.enter_context(random_edit(model, layer, layer).applied(model))
            if layer != band[-1]:
                states.advance(layer)
                assert gap(torch.cat(list(collect_keys(model, grouped, layer + 1))), before) > 1e-3, "the edit reaches the next layer"


@pytest.mark.parametrize("band", [(0, 1, 2, 3), (1, 2), (3,)])
@pytest.mark.parametrize("side", ["right", "left"])
def test_one_pass_equals_re_running_the_model(family, small_model, random_examples, snapshot, band, side):
    model = small_model(family)
    before = snapshot(model)
    check_band_against_reruns(model, batches(random_examples(8), batch_size=3, padding_side=side), band)
    assert snapshot(model) == before


def test_states_on_disk_are_the_same_and_gone_afterwards(family, small_model, random_examples, tmp_path):
    grouped = batches(random_examples(8), batch_size=3)
    check_band_against_reruns(small_model(family), grouped, (1, 2, 3), folder=tmp_path)
    states = BandStates(small_model(family), grouped, (1, 2), folder=tmp_path)
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(grouped)
    with pytest.raises(ValueError, match="cannot be copied"):
        states.copy()
    del states
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("on_disk", [True, False])
def test_states_in_bfloat16_cost_about_its_precision(family, small_model, random_examples, tmp_path, on_disk):
    model, grouped = small_model(family), batches(random_examples(8), batch_size=3)
    exact = BandStates(model, grouped, (1, 2))
    rough = BandStates(model, grouped, (1, 2), dtype=torch.bfloat16, folder=tmp_path if on_disk else None)
    for layer in (1, 2):
        a, b = (torch.cat(list(states.keys(layer))) for states in (rough, exact))
        assert a.dtype == torch.float64
        assert 1e-6 < gap(a, b) < 0.1
        for states in (exact, rough):
            if layer == 1:
                states.advance(layer)


def test_a_copy_advances_by_itself(small_model, random_examples):
    model, grouped = small_model(), batches(random_examples(6), batch_size=3)
    states = BandStates(model, grouped, (1, 2))
    first = torch.cat(list(states.keys(1)))
    twin = states.copy()
    twin.advance(1)
    assert torch.cat(list(twin.keys(2))).shape == first.shape
    assert torch.equal(torch.cat(list(states.keys(1))), first)
    with pytest.raises(ValueError, match="stand before layer 2"):
        list(twin.keys(1))
    with pytest.raises(ValueError, match="stand before layer 1"):
        states.advance(2)


@pytest.mark.parametrize(
    ("band", "error", "message"),
    [
        ((), ValueError, "no layers"),
        ((1, 3), ValueError, "contiguous"),
        ((2, 1), ValueError, "contiguous"),
        ((1, 1), ValueError, "contiguous"),
        ((3, 4), IndexError, "unknown layer 4: .* has layers 0 to 3"),
        ((-1, 0), IndexError, "unknown layer -1"),
        ((True, 2), IndexError, "unknown layer True"),
        (("1",), IndexError, "unknown layer '1'"),
    ],
)
def test_bad_bands_are_refused(small_model, random_examples, band, error, message):
    with pytest.raises(error, match=message):
        BandStates(small_model(), batches(random_examples(2)), band)


# Layers of other habits: arguments by keyword only, tuples returned


class OddLayer(nn.Module):
    def __init__(self, width, style):
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.up, self.mlp.down_proj = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.style = style

    def forward(self, hidden_states=None, shift=None, *, mask):
        # Mixes positions, so that a wrong mask or a stale argument shows.
        mixed = (mask[..., None] * hidden_states).cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None]
        out = hidden_states + self.mlp.down_proj(torch.tanh(self.mlp.up(mixed + shift)))
        return (out, "cache") if "tuple" in self.style else out


class OddBase(nn.Module):
    def __init__(self, style, width=10, layers=4, vocab=97):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(OddLayer(width, style) for _ in range(layers))
        self.style = style

    def forward(self, input_ids, attention_mask, position_ids, use_cache):
        assert not use_cache
        hidden, mask = self.embed(input_ids), attention_mask.double()
        for i, layer in enumerate(self.layers):
            # Each layer gets a different argument, so that using another layer's shows.
            shift = (i + 1) * torch.sin(position_ids.double())[..., None]
            out = layer(hidden_states=hidden, shift=shift, mask=mask) if "keyword" in self.style else layer(hidden, shift, mask=mask)
            hidden = out[0] if "tuple" in self.style else out
        return self.norm(hidden)


class OddModel(nn.Module):
    base_model_prefix = "model"

    def __init__(self, style):
        super().__init__()
        self.model, self.lm_head = OddBase(style), nn.Linear(10, 97, bias=False)
        self.config = SimpleNamespace(tie_word_embeddings=False)

    def get_output_embeddings(self):
        return self.lm_head

    def get_input_embeddings(self):
        return self.model.embed

    def forward(self, **inputs):
        return self.lm_head(self.model(**inputs))


@pytest.fixture(params=["positional", "keyword", "positional tuple", "keyword tuple"])
def odd_model(request):
    torch.manual_seed(0)
    return OddModel(request.param).double().eval()


@pytest.mark.parametrize("side", ["right", "left"])
def test_layers_of_any_signature_and_return_type_work(odd_model, random_examples, side):
    check_band_against_reruns(odd_model, batches(random_examples(8), batch_size=3, padding_side=side), (0, 1, 2, 3))


def test_keys_of_odd_layers_do_not_depend_on_the_batch(odd_model, random_examples):
    examples = random_examples(8)
    alone, together = (batches(examples, batch_size=size, padding_side="left") for size in (1, 8))
    for where in (2, "head"):
        a, b = (in_order(grouped, collect_keys(odd_model, grouped, where)) for grouped in (alone, together))
        assert gap(a, b) < 1e-10


def test_a_whole_fit_on_odd_layers(odd_model, request_sets):
    forget, retain = request_sets
    edit = FitData(odd_model, forget, retain).fit(FitSettings((1, 2, "head"), 3.0))
    assert [matrix.module for matrix in edit.matrices] == ["model.layers.1.mlp.down_proj", "model.layers.2.mlp.down_proj", "lm_head"]


# Unknown architectures


def broken(change):
    model = OddModel("positional").double().eval()
    change(model)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.model, "layers", None), "list of layers"),
        (lambda model: setattr(model.model, "norm", None), "final norm"),
        (lambda model: setattr(model, "lm_head", None), "no LM head"),
        (lambda model: delattr(model.model.layers[2].mlp, "down_proj"), r"layer 2 of OddModel has no MLP output .*mlp\.down_proj"),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_names_that_were_tried(change, message, request_sets):
    with pytest.raises(UnknownArchitectureError, match=message):
        FitData(broken(change), *request_sets).fit(FitSettings((1, 2), 3.0))


# A fit leaves the model as it was


@contextmanager
def failing(monkeypatch, target, name, at):
    """Let a method fail at its n-th call."""
    own, calls = getattr(target, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == at:
            raise KeyboardInterrupt
        return own(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, wrapped)
        yield


def quietly(action):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return action()


@pytest.mark.parametrize("tied", [True, False])
def test_a_fit_leaves_the_model_to_the_bit_as_it_was(family, small_model, request_sets, snapshot, tied, tmp_path):
    model = small_model(family, tied=tied)
    before = snapshot(model)
    data = FitData(model, *request_sets, states_folder=tmp_path)
    quietly(lambda: data.fit(FitSettings((1, 2, 3, "head"), 5.0), keep_audit=True))
    assert snapshot(model) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "name", "at"),
    [
        (RidgeFitter, "solve", 1),
        (RidgeFitter, "solve", 2),
        (RidgeFitter, "solve", 4),
        (RidgeFitter, "update_retain", 3),
        (BandStates, "advance", 1),
        (BandStates, "advance", 4),
        (BandStates, "_enter", 2),
        (BandStates, "_probe", 1),
    ],
)
def test_so_does_a_fit_that_is_interrupted(family, small_model, request_sets, snapshot, monkeypatch, target, name, at, tmp_path):
    model = small_model(family)
    before = snapshot(model)
    for folder in (None, tmp_path):
        data = FitData(model, *request_sets, states_folder=folder)
        with failing(monkeypatch, target, name, at), pytest.raises(KeyboardInterrupt):
            quietly(lambda data=data: data.fit(FitSettings((1, 2, 3, "head"), 5.0)))
        assert snapshot(model) == before


def test_a_generator_of_keys_that_is_given_up_leaves_no_hook(small_model, random_examples, snapshot):
    model, grouped = small_model(), batches(random_examples(6), batch_size=2)
    before = snapshot(model)
    keys = collect_keys(model, grouped, 2)
    next(keys)
    assert snapshot(model) == before, "no hook waits between two batches either"
    del keys
    assert snapshot(model) == before


def test_an_error_inside_the_forward_pass_leaves_no_hook(small_model, snapshot):
    model = small_model()
    before = snapshot(model)
    outside = batches([Example((1, 9999), (2,))])
    for action in (lambda: list(collect_keys(model, outside, 1)), lambda: BandStates(model, outside, (1, 2))):
        with pytest.raises(IndexError):
            action()
        assert snapshot(model) == before
