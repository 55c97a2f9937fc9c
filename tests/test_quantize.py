"""Four-bit round trips: levels and codes by hand, parity, grids, the context that takes them back, and what is left of an update."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from unlearnlib import models, quantize
from unlearnlib.grom.anatomy import untie
from unlearnlib.quantize import SCHEMES, Scheme, block_weights, nf4, on_grid, q4_0, q4_1, quantized, rtn_int4, update_survival

EVERY = sorted(SCHEMES)


def gaussian(*shape, seed=0, scale=0.05):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def model(family):
    return models.build(family, vocab_size=64, hidden_size=32, intermediate_size=64, layers=2)


# By hand


def test_the_levels_of_nf4_are_those_quantiles_of_the_normal_distribution():
    # QLoRA, appendix E: equally spaced probabilities, eight steps to the right of zero and seven to the left, scaled to end at 1.
    last = (1 - 1 / 32 + 1 - 1 / 30) / 2
    right, left = norm.ppf(np.linspace(last, 0.5, 9)), -norm.ppf(np.linspace(last, 0.5, 8))
    expected = np.sort(np.concatenate([left[:-1], right]))
    assert pytest.approx(expected / expected.max(), abs=1e-6) == quantize.NF4


def test_nf4_takes_the_nearest_level_of_the_block():
    weight = torch.tensor([[2.0, -0.08, 0.7, -1.9, 0.0, 0.07], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    codes, values = replace(SCHEMES["nf4"], block=3).round_trip(weight)
    assert codes.tolist() == [[15, 7, 11, 0, 7, 7], [7] * 6]
    expected = [2.0, 0.0, 2 * quantize.NF4[11], -1.9, 0.0, 0.0]
    assert values[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert values[1].tolist() == [0.0] * 6


def test_round_to_nearest_by_hand():
    weight = torch.tensor([[7.0, 1.4, -1.6, 2.5, 0.07, -0.014, 0.0, 0.03]])
    assert rtn_int4(weight, group=4)[0].tolist() == pytest.approx([7, 1, -2, 2, 0.07, -0.01, 0, 0.03])
    assert replace(SCHEMES["rtn_int4"], block=4).round_trip(weight)[0].tolist() == [[7, 1, -2, 2, 7, -1, 0, 3]]


def test_q4_0_by_hand():
    # The entry of largest magnitude becomes −8 scales, whatever its sign, so that its opposite is cut off at 7 scales.
    weight = torch.tensor([[8.0, -8.0, 3.4, 0.6] + [0.0] * 28])
    codes, values = SCHEMES["q4_0"].round_trip(weight)
    assert values[0, :5].tolist() == [8, -7, 3, 1, 0]
    assert codes[0, :5].tolist() == [0, 15, 5, 7, 8]


def test_q4_1_by_hand():
    weight = torch.tensor([[-3.0, 27.0, 0.5, 2.1] + [0.0] * 28])
    codes, values = SCHEMES["q4_1"].round_trip(weight)
    assert values[0, :4].tolist() == [-3, 27, 1, 3]
    assert codes[0, :4].tolist() == [0, 15, 2, 3]


def test_the_files_of_llama_cpp_hold_these_values_and_codes():
    weight = gaussian(5, 96)
    for scheme, kind in ((q4_0, GGMLQuantizationType.Q4_0), (q4_1, GGMLQuantizationType.Q4_1)):
        stored = quants.dequantize(quants.quantize(weight.numpy(), kind), kind)
        assert np.array_equal(scheme(weight).numpy(), stored)


def test_nf4_equals_bitsandbytes_to_the_bit():
    functional = pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional: only this parity test needs it").functional
    for seed in range(20):
        weight = gaussian(96, 128, seed=seed) * 10 ** gaussian(96, 1, seed=seed + 100, scale=1)
        # Halves lie on midpoints more often.
        weight = weight.half().float() if seed % 2 else weight
        weight[3:9] = 0
        for block in (64, 128, 4096):
            packed, state = functional.quantize_4bit(weight, blocksize=block, quant_type="nf4", compress_statistics=False)
            assert torch.equal(functional.dequantize_4bit(packed, state), nf4(weight, block))


# Whatever the scheme

MATRICES = st.builds(
    lambda rows, columns, seed, exponent: gaussian(rows, 64 * columns, seed=seed, scale=10.0**exponent),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 999),
    st.integers(-3, 2),
)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=25)
@given(weight=MATRICES)
def test_a_round_trip_leads_onto_a_grid_of_sixteen_levels_a_block(name, weight):
    scheme = SCHEMES[name]
    codes, values = scheme.round_trip(weight)
    assert values.dtype == torch.float32
    assert values.shape == codes.shape == weight.shape
    # What lies on a grid stays there. The scale of round-to-nearest may differ by a rounding of float32.
    again, same = scheme.round_trip(values)
    assert torch.equal(again, codes)
    assert torch.allclose(same, values, rtol=1e-6, atol=0)
    for block_codes, block in zip(codes.view(-1, scheme.block), values.view(-1, scheme.block), strict=True):
        assert len(block.unique()) <= 16
        assert len(block_codes.unique()) == len(block.unique())
    if name != "rtn_int4":
        assert on_grid(values, scheme) == 1


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=25)
@given(weight=MATRICES)
def test_the_error_is_at_most_one_step(name, weight):
    # Half a step inside the range. Q4_0 cuts one end off by a whole one, and NF4's widest step is 0.304 of the largest entry. The
    # halves of scales in float16 add 2⁻¹¹ of the entry.
    scheme = SCHEMES[name]
    blocks = weight.view(-1, scheme.block)
    largest = blocks.abs().amax(1)
    span = blocks.amax(1) - blocks.amin(1)
    step = {"nf4": 0.304 / 2 * largest, "rtn_int4": largest / 14, "q4_0": largest / 8, "q4_1": span / 30}[name]
    error = (scheme(weight).view_as(blocks) - blocks).abs().amax(1)
    assert (error <= step * 1.001 + largest * 2**-10).all()


@pytest.mark.parametrize("name", ["nf4", "rtn_int4", "q4_0"])
@settings(max_examples=40)
@given(weight=MATRICES, exponent=st.integers(-3, 3))
def test_powers_of_two_and_signs_pass_through(name, weight, exponent):
    scheme = SCHEMES[name]
    factor = 2.0**exponent
    # Scales in float16 scale with the weight only while they aren't subnormal.
    tolerance = {"rtol": 0, "atol": 0 if name != "q4_0" else 2**-20}
    assert torch.allclose(scheme(factor * weight), factor * scheme(weight), **tolerance)
    if name != "nf4":
        assert torch.equal(scheme(-weight), -scheme(weight))


def test_blocks_do_not_see_each_other():
    weight = gaussian(2, 128)
    for name in EVERY:
        parts = torch.cat([SCHEMES[name](part.contiguous()) for part in weight.split(64, dim=1)], 1)
        assert torch.equal(SCHEMES[name](weight), parts)


def test_blocks_of_nf4_run_on_into_the_next_row_and_the_last_may_be_short():
    weight = gaussian(3, 50)
    flat = torch.cat([nf4(part.reshape(1, -1)).reshape(-1) for part in weight.reshape(-1).split(64)])
    assert torch.equal(nf4(weight), flat.view(3, 50))
    assert not torch.equal(nf4(weight), torch.cat([nf4(row[None]) for row in weight]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_are_rounded_as_their_float32_values_and_other_strides_as_they_read(dtype):
    weight = gaussian(64, 96).to(dtype)
    for name in EVERY:
        if name != "rtn_int4":
            assert torch.equal(SCHEMES[name](weight), SCHEMES[name](weight.float()))
        assert torch.equal(SCHEMES[name](weight.T), SCHEMES[name](weight.T.contiguous()))


@pytest.mark.parametrize("name", EVERY)
def test_what_cannot_be_rounded_is_an_error(name):
    scheme = SCHEMES[name]
    for shape in ((64,), (2, 2, 64), (0, 64), ()):
        with pytest.raises(ValueError, match="rounds matrices"):
            scheme(torch.zeros(shape))
    weight = torch.ones(2, 64)
    weight[1, 5] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        scheme(weight)


def test_columns_that_do_not_fill_a_block_are_an_error():
    for scheme, columns in ((q4_0, 48), (q4_1, 33), (rtn_int4, 96)):
        with pytest.raises(ValueError, match=rf"multiple of \d+ columns, got shape \(2, {columns}\)"):
            scheme(torch.ones(2, columns))
    assert rtn_int4(torch.ones(2, 96), group=32).shape == (2, 96)
    with pytest.raises(ValueError, match="at least 1 entry"):
        nf4(torch.ones(2, 64), block=0)


def test_weights_beyond_the_scales_of_float16_are_an_error():
    weight = torch.full((1, 32), 1e6)
    weight[0, 0] = -1e6
    for scheme in (q4_0, q4_1):
        with pytest.raises(ValueError, match=r"1e\+06 is too large"):
            scheme(weight)


@pytest.mark.parametrize("name", EVERY)
def test_weights_too_small_for_their_scale_become_zero_or_stay(name):
    # The smallest normal float32 times a few: float16 scales vanish, float32 ones do not.
    weight = gaussian(2, 64, scale=1e-37)
    values = SCHEMES[name](weight)
    assert torch.isfinite(values).all()
    assert (values - weight).abs().max() <= weight.abs().max()


# The grid


@pytest.mark.parametrize("name", EVERY)
def test_a_weight_from_a_file_is_on_its_own_grid_only(name):
    weight = gaussian(64, 128)
    assert on_grid(weight, name) < 0.02
    for other in EVERY:
        share = on_grid(SCHEMES[name](weight), other)
        assert share > 0.999 if other == name else share < 0.5, other


def test_small_changes_to_a_weight_on_the_grid_are_undone():
    weight = q4_1(gaussian(64, 128))
    changed = weight + gaussian(64, 128, seed=1, scale=1e-5)
    # Scales and minima move by a float16 rounding here and there.
    assert (q4_1(changed) == weight).double().mean() > 0.9
    assert torch.equal(SCHEMES["q4_1"].round_trip(changed)[0], SCHEMES["q4_1"].round_trip(weight)[0])


# A model's weights


def test_all_linear_layers_of_the_blocks_and_nothing_else(model):
    ids = torch.arange(7)[None]
    weights = block_weights(model)
    linear = {"llama": 7, "qwen2": 7, "gpt2": 4, "gpt_neox": 4}[model.config.model_type]
    assert len(weights) == 2 * linear
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        assert parameters[name].data_ptr() == weight.data_ptr()
    # Shapes are (out, in): the layer's input has as many entries as the matrix has columns.
    seen = {}
    hooks = [
        model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(
            lambda module, inputs, name=name: seen.__setitem__(name, inputs[0].shape[-1])
        )
        for name in weights
    ]
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    assert seen == {name: weight.shape[1] for name, weight in weights.items()}
    with_head = block_weights(model, head=True)
    assert len(with_head) == len(weights) + 1
    assert with_head.popitem()[1].data_ptr() == model.get_output_embeddings().weight.data_ptr()


def scheme_for(name):
    # Rows of 32 hold no group of 64.
    return replace(SCHEMES[name], block=32)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("head", [False, True])
def test_within_the_context_weights_are_rounded_and_afterwards_what_they_were(name, head, model, snapshot):
    before, scheme = snapshot(model), scheme_for(name)
    expected = {key: scheme(weight) for key, weight in block_weights(model, head=head).items()}
    ids = torch.tensor([[5, 17, 60, 3, 3, 8, 9]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        with quantized(model, scheme, head=head) as given_model:
            assert given_model is model
            during = snapshot(model)
            found = block_weights(model, head=head)
            assert all(torch.equal(found[key], expected[key]) for key in expected)
            assert not torch.equal(model(input_ids=ids).logits, logits)
        assert torch.equal(model(input_ids=ids).logits, logits)
    assert snapshot(model) == before
    # A tied head is one weight of two names.
    rounded = {part.data_ptr() for part in found.values()}
    names = {key for key, part in model.named_parameters(remove_duplicate=False) if part.data_ptr() in rounded}
    assert len(names) == len(expected) + head
    assert {key for key in before if during[key] != before[key]} == names
    assert during["tied"] == before["tied"]


def test_the_head_alone_is_rounded_where_it_is_not_tied(snapshot):
    model = models.build("llama", vocab_size=64, hidden_size=32, intermediate_size=64, layers=1)
    untie(model)
    before = snapshot(model)
    with quantized(model, "nf4", head=True):
        during = snapshot(model)
    assert during["lm_head.weight"] != before["lm_head.weight"]
    assert during["model.embed_tokens.weight"] == before["model.embed_tokens.weight"]


def test_an_error_within_the_context_and_one_on_the_way_in_leave_the_model_as_it_was(model, snapshot):
    before = snapshot(model)
    with pytest.raises(KeyError), quantized(model, "nf4"):
        raise KeyError
    assert snapshot(model) == before
    name = list(block_weights(model))[-1]
    with torch.no_grad():
        model.get_parameter(name)[3, 4] = torch.inf
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"{name}: the weight has NaN"), quantized(model, "nf4"):
        pass
    assert snapshot(model) == before


def test_contexts_within_each_other_are_taken_back_one_by_one(model, snapshot):
    before = snapshot(model)
    with quantized(model, "nf4"):
        outer = snapshot(model)
        with quantized(model, "q4_0"):
            assert snapshot(model) != outer
        assert snapshot(model) == outer
    assert snapshot(model) == before


def test_a_model_keeps_its_type(snapshot):
    model = models.build("llama", vocab_size=64, hidden_size=32, intermediate_size=64, layers=1, dtype=torch.bfloat16)
    before = snapshot(model)
    (name, weight), *_ = block_weights(model).items()
    expected = nf4(weight).bfloat16()
    with quantized(model, "nf4"):
        assert torch.equal(model.get_parameter(name), expected)
    assert snapshot(model) == before


def test_an_unknown_scheme_is_named():
    model = models.build("llama", vocab_size=64, hidden_size=32, intermediate_size=64, layers=1)
    with pytest.raises(ValueError, match=r"unknown scheme 'int3': use nf4, rtn_int4, q4_0, q4_1"), quantized(model, "int3"):
        pass
    with pytest.raises(ValueError, match="unknown scheme"):
        on_grid(torch.ones(1, 64), "int3")
    with pytest.raises(ValueError, match="unknown scheme"):
        update_survival({}, {}, "int3")


# What is left of an update


WHOLE = Scheme("whole", lambda blocks: (blocks.round().to(torch.int8), blocks.round()), 1)
"""Rounds to whole numbers: a scheme to work by hand with."""


def test_survival_by_hand():
    base = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([[0.4, 0.0]]), "c": torch.tensor([[5.0]])}
    edited = {"a": torch.tensor([[1.6, 2.0], [3.3, 4.0]]), "b": torch.tensor([[0.6, 0.0]]), "c": torch.tensor([[5.0]])}
    found = update_survival(base, edited, WHOLE)
    assert [matrix.name for matrix in found.matrices] == ["a", "b"], "c wasn't changed"
    first, second = found.matrices
    # Of 0.6 and 0.3 the first becomes 1 and the second 0; the 0.2 from 0.4 to 0.6 becomes 1.
    assert (first.squared_norm, first.overlap, first.surviving_squared_norm) == pytest.approx((0.45, 0.6, 1.0), rel=1e-6)
    assert (second.squared_norm, second.overlap, second.surviving_squared_norm) == pytest.approx((0.04, 0.2, 1.0), rel=1e-6)
    assert (first.codes_changed, first.entries, second.codes_changed, second.entries) == (1, 4, 1, 2)
    assert found.kept == pytest.approx(0.8 / 0.49, rel=1e-6)
    assert found.norm_ratio == pytest.approx((2 / 0.49) ** 0.5, rel=1e-6)
    assert found.codes_changed == pytest.approx(2 / 6)
    assert (found.rank, found.surviving_rank) == (1, 1)


def test_an_update_on_the_grid_survives_whole():
    base = torch.randint(-9, 9, (6, 8), generator=torch.Generator().manual_seed(0)).float()
    left, right = torch.tensor([1.0, 0, 2, 0, 0, 1]), torch.tensor([0.0, 3, 1, 0, 0, 0, 0, 1])
    found = update_survival({"a": base}, {"a": base + torch.outer(left, right)}, WHOLE)
    assert (found.kept, found.norm_ratio, found.rank, found.surviving_rank) == (1, 1, 1, 1)
    assert found.codes_changed == 9 / 48


def test_an_update_below_the_grid_is_undone():
    base = torch.randint(-9, 9, (6, 8), generator=torch.Generator().manual_seed(0)).float()
    found = update_survival({"a": base}, {"a": base + gaussian(6, 8, scale=0.1)}, WHOLE)
    assert (found.kept, found.norm_ratio, found.codes_changed, found.rank, found.surviving_rank) == (0, 0, 0, 6, 0)


@pytest.mark.parametrize("name", EVERY)
def test_a_large_update_survives_and_a_low_rank_is_lost_in_the_noise(name):
    base, low = gaussian(64, 128), gaussian(64, 2, seed=1, scale=1) @ gaussian(2, 128, seed=2, scale=1)
    large, small = (update_survival({"a": base}, {"a": base + size * low}, name) for size in (1.0, 1e-3))
    assert large.kept == pytest.approx(1, abs=0.02)
    assert large.norm_ratio == pytest.approx(1, abs=0.02)
    assert large.rank == small.rank == 2
    assert small.surviving_rank > 30
    assert small.norm_ratio > 2
    assert small.codes_changed < 0.1 < large.codes_changed


def test_the_same_update_is_undone_on_the_grid_and_comes_through_on_average_elsewhere():
    base, update = gaussian(128, 256), gaussian(128, 256, seed=1, scale=1e-4)
    ordinary, stored = (update_survival({"a": weight}, {"a": weight + update}, "q4_1") for weight in (base, q4_1(base)))
    assert 0.7 < ordinary.kept < 1.3
    assert abs(stored.kept) < 0.2
    assert stored.codes_changed == 0 < ordinary.codes_changed


def test_ranks_are_those_of_the_singular_values():
    update = torch.diag(torch.tensor([4.0, 1.0, 0.5, 0.03]))
    base = torch.zeros(4, 4)
    for tolerance, rank in ((0.5, 1), (0.1, 3), (1e-6, 4)):
        assert update_survival({"a": base}, {"a": update}, WHOLE, rank_tolerance=tolerance).rank == rank
    tall = update_survival({"a": torch.zeros(5, 2)}, {"a": torch.ones(5, 2)}, WHOLE)
    assert (tall.rank, tall.surviving_rank) == (1, 1)


def test_models_are_compared_weight_by_weight(family):
    base, edited = (models.build(family, vocab_size=64, hidden_size=32, intermediate_size=64, layers=2) for _ in range(2))
    name, weight = list(block_weights(edited).items())[3]
    weight.add_(gaussian(*weight.shape))
    with torch.no_grad():
        edited.get_input_embeddings().weight.add_(1)
    found = update_survival(block_weights(base), block_weights(edited), "q4_0")
    assert [matrix.name for matrix in found.matrices] == [name]
    assert len(update_survival(block_weights(base, head=True), block_weights(edited, head=True), "q4_0").matrices) == 2


def test_weights_are_read_one_by_one():
    class File(dict):
        opened = ()

        def __getitem__(self, name):
            File.opened += (name,)
            return super().__getitem__(name)

    base = File(a=torch.zeros(1, 2), b=torch.zeros(1, 2), more=torch.zeros(3))
    update_survival(base, {"a": torch.ones(1, 2), "b": torch.ones(1, 2)}, WHOLE)
    assert File.opened == ("a", "b")


def test_nothing_changed_is_no_number():
    found = update_survival({"a": torch.ones(1, 2)}, {"a": torch.ones(1, 2)}, WHOLE)
    assert found.matrices == ()
    assert (found.kept, found.norm_ratio, found.codes_changed, found.rank, found.surviving_rank) == (None,) * 5


def test_models_that_do_not_belong_together_are_named():
    one = torch.ones(1, 64)
    with pytest.raises(ValueError, match="the base has no 'b', nor 1 more"):
        update_survival({"a": one}, {"a": one, "b": one, "c": one}, "nf4")
    with pytest.raises(ValueError, match=r"a: shape \(2, 64\) in the edited model, \(1, 64\) in the base"):
        update_survival({"a": one}, {"a": torch.ones(2, 64)}, "nf4")
    with pytest.raises(ValueError, match="a: the weight has NaN"):
        update_survival({"a": one}, {"a": one * torch.nan}, "nf4")
    with pytest.raises(ValueError, match="rank_tolerance"):
        update_survival({"a": one}, {"a": one}, "nf4", rank_tolerance=0)
