"""The edit's identities (on maps T built to be affine, quadratic or trivial), and its life on a model and on disk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unlearnlib import models, sidecar
from unlearnlib.sidecar import SGD, MismatchError, ProcessSidecar, SafetyTrace, combine, norm, parameters_of, second_difference

SIZES = {"vocab_size": 24, "hidden_size": 8, "intermediate_size": 12, "layers": 1, "heads": 2, "max_length": 12}
COEFFICIENT = st.floats(-3, 3, allow_nan=False)
SEED = st.integers(0, 10_000)


class Cubic(nn.Module):
    """Its output is the loss ``b·θ + ½ θᵀAθ + ⅙ C[θ,θ,θ]`` of its two parameters, read as one vector θ of five."""

    def __init__(self, seed, cubic):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.u = nn.Parameter(torch.randn(2, dtype=torch.float64, generator=g))
        self.w = nn.Parameter(torch.randn(1, 3, dtype=torch.float64, generator=g))
        self.b, self.a, self.c = (torch.randn(*[5] * order, dtype=torch.float64, generator=g) for order in (1, 2, 3))
        self.cubic = cubic

    def forward(self, scale):
        theta = torch.cat([self.u, self.w.flatten()])
        quadratic = self.b @ theta + theta @ self.a @ theta / 2
        return scale * (quadratic + self.cubic * torch.einsum("ijk,i,j,k->", self.c, theta, theta, theta) / 6)


def synthetic(seed, *, cubic=0.0, steps=4, lr=0.05):
    """Affine if `cubic` is 0 (gradient descent with momentum on a quadratic loss); quadratic with one step on a cubic loss."""
    module = Cubic(seed, cubic)
    trace = SafetyTrace(module, [1.0, 0.5], lr=lr, steps=steps, optimizer=SGD(momentum=0.9), loss=lambda model, batch: model(batch))
    theta_a = {name: p.clone() for name, p in parameters_of(module).items()}
    g = torch.Generator().manual_seed(seed + 1)
    delta = {name: torch.randn(p.shape, dtype=p.dtype, generator=g) for name, p in theta_a.items()}
    return trace, theta_a, delta


def edit_of(trace, theta_a, delta, **how):
    theta_am = combine((1.0, theta_a), (1.0, delta))
    return ProcessSidecar.from_runs(theta_a, theta_am, trace(theta_am), trace, **how)


def gap(a, b):
    return norm(combine((1.0, a), (-1.0, b)))


# ---------------------------------------------------------------------------------------------------------------------------
# Identities; the tolerance 1e-10 leaves room for a few hundred roundings of numbers of size 1 to 100


@settings(max_examples=40, deadline=None)
@given(SEED, COEFFICIENT)
def test_without_gamma_it_is_task_arithmetic(seed, lam):
    trace, theta_a, delta = synthetic(seed)
    edit = edit_of(trace, theta_a, delta)
    theta_am = combine((1.0, theta_a), (1.0, delta))
    shipped = trace(theta_am)
    for name, p in edit.at(lam, 0.0).items():
        assert torch.equal(p, shipped[name] - lam * (theta_am[name] - theta_a[name]))


@settings(max_examples=40, deadline=None)
@given(SEED, st.floats(-0.05, 0.05))
def test_at_one_one_with_epsilon_one_it_is_the_midpoint_of_two_runs(seed, cubic):
    trace, theta_a, delta = synthetic(seed, cubic=cubic)
    minus = trace(combine((1.0, theta_a), (-1.0, delta)))
    plus = trace(combine((1.0, theta_a), (1.0, delta)))
    assert gap(edit_of(trace, theta_a, delta).at(1, 1), combine((0.5, plus), (0.5, minus))) < 1e-10


@settings(max_examples=30, deadline=None)
@given(SEED, st.floats(0.01, 4), st.booleans())
def test_an_affine_map_gives_the_oracle_exactly(seed, epsilon, exact):
    trace, theta_a, delta = synthetic(seed)
    oracle = trace(theta_a)
    edit = edit_of(trace, theta_a, delta, epsilon=epsilon, exact=exact)
    assert gap(edit.at(1, 1), oracle) < 1e-9
    assert gap(edit.at(1, 0), oracle) > 1e-3  # the map does bend the direction
    assert norm(second_difference(trace, theta_a, delta)) < 1e-10


@settings(max_examples=30, deadline=None)
@given(SEED, st.sampled_from([0.25, 0.5, 1.0]), st.booleans())
def test_a_quadratic_map_leaves_half_its_second_derivative(seed, scale, exact):
    trace, theta_a, delta = synthetic(seed, cubic=1.0, steps=1)
    delta = {name: scale * d for name, d in delta.items()}
    edit = edit_of(trace, theta_a, delta, exact=exact)
    error = combine((1.0, edit.at(1, 1)), (-1.0, trace(theta_a)))
    flat = torch.cat([delta["u"], delta["w"].flatten()])
    c = trace.module.c
    symmetric = sum(c.permute(*order) for order in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]) / 6
    expected = -0.05 / 2 * torch.einsum("ijk,j,k->i", symmetric, flat, flat)
    assert torch.allclose(torch.cat([error["u"], error["w"].flatten()]), expected, rtol=1e-9, atol=1e-11)
    assert gap(error, combine((0.5, second_difference(trace, theta_a, delta)))) < 1e-10


@settings(max_examples=20, deadline=None)
@given(SEED)
def test_halving_the_memory_quarters_the_error_of_a_quadratic_map(seed):
    trace, theta_a, delta = synthetic(seed, cubic=1.0, steps=1)
    oracle = trace(theta_a)
    errors = [gap(edit_of(trace, theta_a, {n: s * d for n, d in delta.items()}).at(1, 1), oracle) for s in (1.0, 0.5)]
    assert errors[0] == pytest.approx(4 * errors[1], rel=1e-8)


@settings(max_examples=20, deadline=None)
@given(SEED, st.booleans())
def test_the_identity_map_transports_nothing(seed, exact):
    trace, theta_a, delta = synthetic(seed, lr=0.0)
    assert norm(edit_of(trace, theta_a, delta, exact=exact).residual) < 1e-14


def test_epsilon_one_needs_one_run_and_other_epsilons_two():
    trace, theta_a, delta = synthetic(0)
    starts = []

    def counting(theta):
        starts.append(theta)
        return trace(theta)

    theta_am = combine((1.0, theta_a), (1.0, delta))
    shipped = trace(theta_am)
    ProcessSidecar.from_runs(theta_a, theta_am, shipped, counting)
    assert len(starts) == 1 and gap(starts[0], combine((1.0, theta_a), (-1.0, delta))) < 1e-14
    ProcessSidecar.from_runs(theta_a, theta_am, shipped, counting, epsilon=0.5)
    assert len(starts) == 3 and gap(starts[1], combine((1.0, theta_a), (0.5, delta))) < 1e-14
    with pytest.raises(ValueError, match="epsilon is 0"):
        ProcessSidecar.from_runs(theta_a, theta_am, shipped, counting, epsilon=0)


# ---------------------------------------------------------------------------------------------------------------------------
# On a model and on disk


def model_and_edit(dtype, seed=0):
    model = models.build("llama", dtype=dtype, **SIZES)
    theta = parameters_of(model)
    g = torch.Generator().manual_seed(seed)
    noise = [{name: 1e-2 * torch.randn(p.shape, generator=g) for name, p in theta.items()} for _ in range(2)]
    return model, ProcessSidecar(theta, *noise)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(COEFFICIENT, COEFFICIENT), min_size=1, max_size=4), st.sampled_from([torch.bfloat16, torch.float32]))
def test_edits_never_add_up_and_reverting_is_exact_to_the_bit(pairs, dtype):
    model, edit = model_and_edit(dtype)
    original = {name: p.clone() for name, p in model.state_dict().items()}
    for lam, gamma in pairs:
        edit.apply_(model, lam=lam, gamma=gamma)
        wanted = edit.at(lam, gamma)
        assert all(torch.equal(p, wanted[name]) for name, p in parameters_of(model).items())
    edit.revert_(model)
    assert all(torch.equal(p, original[name]) for name, p in model.state_dict().items())


def test_the_block_reverts_after_an_error():
    model, edit = model_and_edit(torch.float32)
    with pytest.raises(KeyError), edit.applied(model, lam=1, gamma=1):
        assert not torch.equal(model.model.norm.weight, edit.shipped["model.norm.weight"])
        raise KeyError
    assert all(torch.equal(p, edit.shipped[name]) for name, p in parameters_of(model).items())


def test_directions_of_a_bfloat16_model_are_float32():
    """ΔM in bfloat16 would round away half of its digits: the float32 difference of the two models is exact here."""
    model = models.build("llama", dtype=torch.bfloat16, **SIZES)
    T = SafetyTrace(model, [{"input_ids": torch.arange(20).view(2, 10), "labels": torch.arange(20).view(2, 10)}], lr=1e-3, steps=2)
    theta_a = {name: p.clone() for name, p in parameters_of(model).items()}
    theta_am = T(theta_a)
    edit = ProcessSidecar.from_runs(theta_a, theta_am, T(theta_am), T)
    assert {p.dtype for p in edit.memory.values()} | {p.dtype for p in edit.residual.values()} == {torch.float32}
    assert {p.dtype for p in edit.shipped.values()} | {p.dtype for p in edit.at(1, 1).values()} == {torch.bfloat16}
    for name, d in edit.memory.items():
        assert torch.equal(d.double(), theta_am[name].double() - theta_a[name].double())


def test_a_restricted_edit_touches_only_its_own():
    model, edit = model_and_edit(torch.float32)
    part = edit.restricted(lambda name: "mlp" in name)
    assert part.shipped.keys() == part.memory.keys() == {name for name in edit.shipped if "mlp" in name}
    part.apply_(model, lam=1.0, gamma=0.5)
    whole = edit.at(1.0, 0.5)
    for name, p in parameters_of(model).items():
        assert torch.equal(p, whole[name] if "mlp" in name else edit.shipped[name])
    assert edit.restricted(part.memory.keys()).shipped.keys() == part.shipped.keys()
    with pytest.raises(MismatchError, match="no such parameters"):
        edit.restricted(["nowhere"])
    with pytest.raises(MismatchError, match="no parameters are left"):
        edit.restricted(lambda name: False)


def test_tied_parameters_count_once():
    model, edit = model_and_edit(torch.float32)
    assert "lm_head.weight" not in edit.memory
    edit.apply_(model, lam=1.0, gamma=1.0)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    state = dict(model.state_dict())
    from_state = ProcessSidecar.from_runs(state, state, state, lambda theta: dict(theta))
    assert from_state.memory.keys() == edit.memory.keys()
    cloned = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(MismatchError, match=r"model\.embed_tokens\.weight and lm_head\.weight are tied"):
        ProcessSidecar(cloned, cloned, cloned).apply_(model, lam=0.0, gamma=0.0)


def test_parameters_that_do_not_fit_are_listed_and_nothing_is_changed():
    _, edit = model_and_edit(torch.float32)
    theta = edit.shipped
    fewer = {name: p for name, p in theta.items() if "norm" not in name}
    with pytest.raises(MismatchError, match=r"theta_am doesn't match theta_a: missing: .*input_layernorm.*model\.norm\.weight"):
        ProcessSidecar.from_runs(theta, fewer, theta, lambda t: dict(t))
    larger = models.build("llama", **SIZES | {"intermediate_size": 16})
    before = {name: p.clone() for name, p in larger.state_dict().items()}
    with pytest.raises(MismatchError, match=r"of another shape: model\.layers\.0\.mlp\.gate_proj\.weight \(16, 8\) against \(12, 8\)"):
        edit.apply_(larger, lam=1.0, gamma=1.0)
    with pytest.raises(MismatchError, match=r"model doesn't match edit: missing: model\.embed_tokens\.weight"):
        edit.apply_(models.build("gpt2", **SIZES), lam=1.0, gamma=1.0)
    assert all(torch.equal(p, before[name]) for name, p in larger.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_saved_and_loaded_it_is_the_same_to_the_bit(tmp_path, dtype):
    _, edit = model_and_edit(dtype)
    edit.save(tmp_path / "edit.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["edit.safetensors"]
    loaded = ProcessSidecar.load(tmp_path / "edit.safetensors")
    assert list(loaded.shipped) == list(edit.shipped)
    for part in ("shipped", "memory", "residual"):
        theta = getattr(loaded, part)
        assert all(torch.equal(p, theta[name]) and p.dtype == theta[name].dtype for name, p in getattr(edit, part).items())


def test_a_loaded_edit_does_not_change_with_its_file(tmp_path):
    _, edit = model_and_edit(torch.float32)
    file = tmp_path / "edit.safetensors"
    edit.save(file)
    loaded = ProcessSidecar.load(file)
    with file.open("r+b") as raw:
        raw.seek(-1000, 2)
        raw.write(bytes(1000))
    for part in ("shipped", "memory", "residual"):
        assert all(torch.equal(p, getattr(loaded, part)[name]) for name, p in getattr(edit, part).items())


@pytest.mark.parametrize("build", ["directly", "from runs"])
def test_an_edit_of_a_live_model_keeps_its_own_originals(build):
    model, edit = model_and_edit(torch.float32)
    live = parameters_of(model)
    if build == "directly":
        edit = ProcessSidecar(live, live, live)
    else:
        edit = ProcessSidecar.from_runs(edit.memory, model, model, lambda theta: theta)
    parts = (edit.shipped, edit.memory, edit.residual)
    before = [{name: p.clone() for name, p in theta.items()} for theta in parts]
    edit.apply_(model, lam=1.0, gamma=0.5)
    edit.restricted(lambda name: "mlp" in name).apply_(model, lam=-2.0, gamma=1.0)
    for theta, kept in zip(parts, before, strict=True):
        assert all(torch.equal(p, kept[name]) for name, p in theta.items())
    edit.revert_(model)
    assert all(torch.equal(p, before[0][name]) for name, p in parameters_of(model).items())


def test_a_restricted_edit_shares_the_tensors_of_the_whole():
    _, edit = model_and_edit(torch.bfloat16)
    part = edit.restricted(lambda name: "mlp" in name)
    for kept, whole in ((part.shipped, edit.shipped), (part.memory, edit.memory), (part.residual, edit.residual)):
        assert all(p.data_ptr() == whole[name].data_ptr() for name, p in kept.items())


def test_a_bad_file_is_named(tmp_path):
    file = tmp_path / "edit.safetensors"
    with pytest.raises(FileNotFoundError, match=r"edit\.safetensors"):
        ProcessSidecar.load(file)
    _, edit = model_and_edit(torch.float32)
    edit.save(file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"edit\.safetensors: damaged"):
        ProcessSidecar.load(file)
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"edit\.safetensors: field format is None"):
        ProcessSidecar.load(file)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    _, edit = model_and_edit(torch.float32)
    file = tmp_path / "edit.safetensors"
    edit.save(file)
    before = file.read_bytes()
    monkeypatch.setattr(sidecar.functional.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        edit.save(file)
    assert file.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["edit.safetensors"]
