"""Direct effects against an explicit computation, the sum of all contributions, and the choice of a band."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlearnlib.examples import batches
from unlearnlib.grom import attribution, direct_effect, select_band

# Effects are computed in float32.
FLOAT32 = 2e-5


def contributions(family, model, example):
    """What every part adds to the final residual at the positions that predict the answer: (embedding, attention, MLP), residual."""
    parts = {"attention": {}, "mlp": {}}
    if family in ("llama", "qwen2"):
        layers, embed, names, norm = model.model.layers, model.model.embed_tokens, ("self_attn", "mlp"), model.model.norm
    elif family == "gpt2":
        layers, embed, names, norm = model.transformer.h, model.transformer.drop, ("attn", "mlp"), model.transformer.ln_f
    else:
        layers, embed, names, norm = (
            model.gpt_neox.layers,
            model.gpt_neox.emb_dropout,
            ("attention", "mlp"),
            model.gpt_neox.final_layer_norm,
        )
    where = slice(len(example.prompt) - 1, len(example) - 1)
    hooks = []

    def watch(module, key, store):
        def note(_module, _inputs, output):
            store[key] = (output[0] if isinstance(output, tuple) else output)[0, where]

        hooks.append(module.register_forward_hook(note))

    for i, layer in enumerate(layers):
        watch(getattr(layer, names[0]), i, parts["attention"])
        watch(getattr(layer, names[1]), i, parts["mlp"])
    watch(embed, "embedding", parts)
    hooks.append(norm.register_forward_pre_hook(lambda _module, inputs: parts.__setitem__("residual", inputs[0][0, where])))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([example.prompt + example.answer])).logits[0, where]
    for hook in hooks:
        hook.remove()
    return parts, norm, logits


def by_hand(family, norm, residual, part, unembedding, gold):
    """Logit of the gold token minus the mean logit, from one contribution, with the final norm's scale held fixed."""
    if family in ("llama", "qwen2"):
        scale = (residual.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        normed = part / scale * norm.weight
    else:
        scale = (residual.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        normed = (part - part.mean(-1, keepdim=True)) / scale * norm.weight
    return (normed * (unembedding[gold] - unembedding.mean(0))).sum(-1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_direct_effect_is_the_explicit_computation(family, small_model, random_examples, tied, weighted):
    model, examples = small_model(family, tied=tied), random_examples(7)
    unembedding = model.get_output_embeddings().weight.detach()
    alpha = torch.rand(97, generator=torch.Generator().manual_seed(0), dtype=torch.float64) if weighted else None
    total, weight = torch.zeros(4, dtype=torch.float64), 0.0
    for example in examples:
        parts, norm, _ = contributions(family, model, example)
        gold = torch.tensor(example.answer)
        weights = torch.ones(len(gold), dtype=torch.float64) if alpha is None else alpha[gold]
        for layer in range(4):
            total[layer] += weights @ by_hand(family, norm, parts["residual"], parts["mlp"][layer], unembedding, gold).detach()
        weight += weights.sum()
    expected = total / weight
    assert (expected[:, None] - expected).abs()[~torch.eye(4, dtype=torch.bool)].min() > 1e-4, "or a wrong layer would not show"
    for side, size in (("right", 3), ("left", 7), ("left", 1)):
        found = direct_effect(model, batches(examples, batch_size=size, padding_side=side), alpha)
        assert torch.allclose(found, expected, rtol=FLOAT32, atol=FLOAT32 * expected.abs().max().item())


def test_all_contributions_together_are_the_logit(family, small_model, random_examples):
    """Embedding, attentions and MLPs sum to the centred gold logit, less what the final norm's bias adds: the linearisation is exact."""
    model = small_model(family, tied=False)
    unembedding = model.get_output_embeddings().weight.detach()
    for example in random_examples(5):
        parts, norm, logits = contributions(family, model, example)
        gold = torch.tensor(example.answer)
        pieces = [parts["embedding"], *parts["attention"].values(), *parts["mlp"].values()]
        assert len(pieces) == 9
        assert torch.allclose(sum(pieces), parts["residual"], atol=1e-10)
        total = sum(by_hand(family, norm, parts["residual"], piece, unembedding, gold) for piece in pieces)
        bias = getattr(norm, "bias", None)
        if bias is not None:
            total = total + (bias * (unembedding[gold] - unembedding.mean(0))).sum(-1)
        expected = logits.gather(1, gold[:, None]).squeeze(1) - logits.mean(-1)
        assert torch.allclose(total, expected, rtol=1e-5, atol=1e-5), "RMS norms compute in float32"


def test_attribution_weighs_the_forget_side_only(small_model, random_examples):
    model = small_model()
    forget, retain = batches(random_examples(5, seed=1)), batches(random_examples(9, seed=2))
    alpha = torch.rand(97, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = direct_effect(model, forget, alpha) - direct_effect(model, retain)
    assert torch.equal(attribution(model, forget, retain, alpha), expected)
    assert not torch.allclose(expected, attribution(model, forget, retain, torch.ones(97)))


def test_alpha_zero_everywhere_leaves_nothing_to_attribute(small_model, random_examples):
    with pytest.raises(ValueError, match="α"):
        direct_effect(small_model(), batches(random_examples(3)), torch.zeros(97))


def test_attribution_leaves_the_model_alone(family, small_model, random_examples, snapshot):
    model = small_model(family)
    before = snapshot(model)
    direct_effect(model, batches(random_examples(3)))
    with pytest.raises(IndexError):
        direct_effect(model, batches(random_examples(3)), torch.ones(2))
    assert snapshot(model) == before


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.integers(1, 12), st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]))
def test_the_band_is_the_best_late_window(scores, width, late):
    first = math.ceil(round(late * len(scores), 9))
    windows = [range(start, start + width) for start in range(first, len(scores) - width + 1)]
    if not windows:
        with pytest.raises(ValueError, match="change width or late"):
            select_band(torch.tensor(scores, dtype=torch.float64), width, late)
        return
    band = select_band(torch.tensor(scores, dtype=torch.float64), width, late)
    means = [sum(scores[i] for i in window) / width for window in windows]
    assert band in [tuple(window) for window in windows]
    assert sum(scores[i] for i in band) / width == pytest.approx(max(means), abs=1e-12)


def test_band_by_hand():
    scores = torch.tensor([9.0, 9.0, 0.0, 1.0, 2.0, 1.0])
    assert select_band(scores, 2) == (3, 4)
    assert select_band(scores, 3) == (3, 4, 5)
    assert select_band(scores, 2, late=0.0) == (0, 1)
    assert select_band(scores, 1) == (4,)
    for width, late in ((4, 0.5), (0, 0.5), (1, 1.0), (1, -0.1), (1, 1.5)):
        with pytest.raises(ValueError, match="no window"):
            select_band(scores, width, late)
