"""The training map: reproducible, resumable, the same on both faces, and differentiated exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unlearnlib import models, sidecar
from unlearnlib.sidecar import SGD, AdamW, MismatchError, SafetyTrace, combine, inner, minibatches, norm, parameters_of

SIZES = {"vocab_size": 24, "hidden_size": 8, "intermediate_size": 12, "layers": 2, "heads": 2, "max_length": 12}
OPTIMIZERS = [AdamW(), AdamW(betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1), SGD(), SGD(momentum=0.9, weight_decay=0.01)]


def examples(rows=8, length=9, vocabulary=20, seed=0):
    """Random tokens; the last four of the vocabulary never occur, and some rows are padded."""
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[: rows // 2, 6:] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def trace(family="llama", dtype=torch.float64, tied=True, **settings_):
    module = models.build(family, dtype=dtype, tied=tied, **SIZES)
    return SafetyTrace(module, minibatches(examples(), 4, 0), **{"lr": 1e-3, "steps": 5, "seed": 1} | settings_)


def direction(theta, seed=1, size=1e-2):
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(p.shape, dtype=p.dtype, generator=generator) for name, p in theta.items()}


def gap(a, b):
    return norm(combine((1.0, a), (-1.0, b)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox"])
def test_both_faces_are_one_map(family, optimizer):
    """1e-10 is asked for; rounding through five steps leaves about 1e-15."""
    T = trace(family, optimizer=optimizer, schedule=sidecar.linear_decay)
    start = parameters_of(T.module)
    end = T(start)
    assert gap(end, T.differentiable(start)) < 1e-12
    assert gap(end, start) > 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_untied_embedding_rows_of_unseen_tokens_have_a_finite_derivative(tied):
    T = trace(tied=tied)
    start = parameters_of(T.module)
    assert ("lm_head.weight" in start) is not tied
    end, transported = T.jvp(start, direction(start))
    assert gap(end, T(start)) < 1e-12
    assert all(torch.isfinite(t).all() for t in transported.values())
    if not tied:
        unseen = slice(20, 24)
        assert torch.equal(end["model.embed_tokens.weight"][unseen], start["model.embed_tokens.weight"][unseen])
        moved = transported["model.embed_tokens.weight"][unseen] - direction(start)["model.embed_tokens.weight"][unseen]
        assert moved.abs().max() == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_forward_mode_is_the_adjoint_of_reverse_mode(optimizer):
    """⟨w, J d⟩ = ⟨Jᵀ w, d⟩, each side by its own mode of differentiation."""
    T = trace(optimizer=optimizer, steps=4)
    start = parameters_of(T.module)
    d, w = direction(start), direction(start, seed=2)
    _, transported = T.jvp(start, d)
    _, pullback = torch.func.vjp(T.differentiable, start)
    (adjoint,) = pullback(w)
    scale = norm(w) * norm(transported)
    assert abs(inner(w, transported) - inner(adjoint, d)) < 1e-11 * scale


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_forward_mode_is_the_limit_of_central_differences_of_the_ordinary_loop(family):
    """With Adam's ε at 1e-3 the map is smooth enough for differences at 1e-5 of the direction: a gap of 1e-8 was measured."""
    T = trace(family, optimizer=AdamW(eps=1e-3))
    start = parameters_of(T.module)
    d = direction(start)
    _, transported = T.jvp(start, d)
    difference = sidecar.secant(T, start, d, epsilon=1e-5)
    assert gap(transported, difference) < 1e-7 * norm(transported)
    assert gap(transported, d) > 1e-2 * norm(d)


def test_a_run_repeats_to_the_bit_and_leaves_the_module_alone():
    T = trace(dtype=torch.float32)
    T.module.train()
    before = {name: p.clone() for name, p in T.module.state_dict().items()}
    first, second = T(T.module), T(T.module)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(before[name], p) for name, p in T.module.state_dict().items())
    assert T.module.training and all(p.grad is None for p in T.module.parameters())


def test_the_loop_is_torchs_own():
    """Against a training loop written out in full, in float32: the same operations, so the same bits."""
    T = trace(dtype=torch.float32, optimizer=AdamW(weight_decay=0.1))
    model = models.build("llama", dtype=torch.float32, **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for index in T.order:
        batch = T.batches[index]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        shifted = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 24), batch["labels"][:, 1:].reshape(-1), ignore_index=-100)
        optimizer.zero_grad()
        shifted.backward()
        optimizer.step()
    assert all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in T(T.module).items())


@pytest.mark.parametrize("optimizer", [AdamW(), SGD(momentum=0.9), SGD()], ids=str)
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path, optimizer, stop):
    calls = 0

    def interrupted(model, batch):
        nonlocal calls
        calls += 1
        if calls == stop + 1:
            raise KeyboardInterrupt
        return sidecar.causal_lm_loss(model, batch)

    file = tmp_path / "run.safetensors"
    T = trace(dtype=torch.float32, optimizer=optimizer, steps=7, loss=interrupted)
    with pytest.raises(KeyboardInterrupt):
        T(T.module, checkpoint=file, checkpoint_every=2)
    assert [p.name for p in tmp_path.iterdir()] == (["run.safetensors"] if stop >= 2 else [])
    resumed = T(T.module, checkpoint=file, checkpoint_every=2)
    assert calls == stop + 1 + 7 - (stop // 2) * 2  # steps since the last checkpoint are done again, earlier ones are not
    whole = trace(dtype=torch.float32, optimizer=optimizer, steps=7)(T.module)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    calls = 100
    again = T(T.module, checkpoint=file)
    assert calls == 100 and all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused(tmp_path):
    file = tmp_path / "run.safetensors"
    T = trace()
    T(T.module, checkpoint=file)
    start = parameters_of(T.module)
    with pytest.raises(ValueError, match=r"run\.safetensors belongs to another run"):
        T(combine((1.0, start), (1e-9, direction(start))), checkpoint=file)
    with pytest.raises(ValueError, match="belongs to another run"):
        trace(lr=2e-3)(T.module, checkpoint=file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"run\.safetensors: damaged"):
        T(T.module, checkpoint=file)


def test_only_the_named_parameters_are_trained():
    T = trace()
    part = parameters_of(T.module, lambda name: "mlp" in name)
    end = T(part)
    assert end.keys() == part.keys() and gap(end, part) > 0
    assert gap(end, T.differentiable(part)) < 1e-12


def test_parameters_are_listed_when_they_do_not_fit():
    T = trace()
    start = parameters_of(T.module)
    with pytest.raises(MismatchError, match=r"in excess: extra\.weight"):
        T(start | {"extra.weight": torch.zeros(2)})
    name = "model.norm.weight"
    with pytest.raises(MismatchError, match=r"of another shape: model\.norm\.weight \(3,\) against \(8,\)"):
        T(start | {name: torch.zeros(3)})
    with pytest.raises(MismatchError, match=rf"direction doesn't match theta: missing: {name}"):
        T.jvp(start, {n: p for n, p in start.items() if n != name})
    with pytest.raises(MismatchError, match=r"no such parameters.*nowhere"):
        parameters_of(T.module, ["nowhere"])


def test_tied_parameters_come_once():
    module = models.build("llama", dtype=torch.float64, **SIZES)
    assert "lm_head.weight" in module.state_dict()
    assert parameters_of(module).keys() == parameters_of(module.state_dict()).keys()
    assert "lm_head.weight" not in parameters_of(module)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"steps": 0}, "steps is 0"), ({"lr": float("nan")}, "learning rate"), ({"autocast": torch.bfloat16}, None)],
)
def test_bad_settings_are_named(change, message):
    if message:
        with pytest.raises(ValueError, match=message):
            trace(**change)
    else:
        T = trace(dtype=torch.float32, **change)
        with pytest.raises(ValueError, match="autocast"):
            T.jvp(T.module, direction(parameters_of(T.module)))
    with pytest.raises(ValueError, match="checkpoint_every is 0"):
        trace()(nn.Linear(1, 1), checkpoint_every=0)
    with pytest.raises(ValueError, match="batches is empty"):
        SafetyTrace(nn.Linear(1, 1), [], lr=1.0, steps=1)
    with pytest.raises(ValueError, match="differ in their number of rows"):
        minibatches({"a": torch.zeros(2), "b": torch.zeros(3)}, 1, 0)


def test_a_loss_that_is_no_longer_finite_stops_the_run_at_its_step():
    T = trace(optimizer=SGD(), lr=1e160)
    with pytest.raises(ArithmeticError, match=r"at step [1-4] of 5"):
        T(T.module)


def test_autocast_runs_in_bfloat16_and_keeps_float32_parameters():
    seen = []

    def spying(model, batch):
        loss = sidecar.causal_lm_loss(model, batch)
        seen.append(model(input_ids=batch["input_ids"]).logits.dtype)
        return loss

    T = trace(dtype=torch.float32, autocast=torch.bfloat16, steps=2, loss=spying)
    end = T(T.module)
    assert seen == [torch.bfloat16] * 2 and all(p.dtype == torch.float32 for p in end.values())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 25), st.integers(0, 5))
def test_every_round_visits_every_batch_once(batches, steps, seed):
    order = SafetyTrace(nn.Linear(1, 1), range(batches), lr=1.0, steps=steps, seed=seed).order
    assert len(order) == steps
    for begin in range(0, steps - batches + 1, batches):
        assert sorted(order[begin : begin + batches]) == list(range(batches))
    assert SafetyTrace(nn.Linear(1, 1), range(batches), lr=1.0, steps=steps).order == [i % batches for i in range(steps)]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 5))
def test_minibatches_hold_every_example_once(rows, size, seed):
    cut = minibatches({"row": torch.arange(rows)}, size, seed)
    assert sorted(torch.cat([batch["row"] for batch in cut]).tolist()) == list(range(rows))
    assert all(len(batch["row"]) == size for batch in cut[:-1])
