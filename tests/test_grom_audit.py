"""The audit: its influences against true refits with s, μ, α and the retain keys held fixed, and that these are what makes it exact."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlearnlib.grom import Audit, Edit, FitData, FitSettings, RidgeFitter, collect_keys, corruption, suppression
from unlearnlib.grom.audit import FitState

EXACT = 1e-10  # relative to the edit: what the refits themselves lose to rounding is far below


def gap(a, b, scale):
    return ((a - b).norm() / scale.norm()).item()


class Problem:
    """Random keys of a few examples with real targets, fitted once, and refitted without some of them."""

    def __init__(self, seed, *, dual, kind, ridge=0.03, sizes=(2, 1, 3, 2, 1, 3)):
        generator = torch.Generator().manual_seed(seed)
        self.out, self.vocab = 9, 8
        self.example = torch.tensor([i for i, size in enumerate(sizes) for _ in range(size)])
        self.example = self.example[torch.randperm(len(self.example), generator=generator)]
        s, n, r = len(self.example), 40 if dual else 7, 21
        self.keys = torch.randn(s, n, generator=generator, dtype=torch.float64)
        self.retain = torch.randn(r, n, generator=generator, dtype=torch.float64)
        self.gold = torch.randint(0, self.vocab, (s,), generator=generator)
        alpha = torch.rand(self.vocab, generator=generator, dtype=torch.float64)
        self.gold[:2] = torch.tensor([0, 1])
        alpha[:2] = torch.tensor([0.0, 1.0])  # one token is not suppressed: its keys are still part of the fit
        weight = torch.randn(self.vocab, self.out, generator=generator, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == "corrupt":
                self.targets = corruption(self.out, 3.0, seed)
            else:
                self.targets = suppression(self.gold, alpha, 3.0, weight if kind == "mlp" else None)
        self.ridge = ridge
        self.solution = self.fit(torch.ones(s, dtype=torch.bool))
        codes, values = self.targets.coordinates(self.gold)
        names = tuple(f"example {i}" for i in range(len(sizes)))
        self.state = FitState("some.matrix", self.solution, self.targets.basis, self.keys, codes, values.clone(), self.example, names)
        self.audit = Audit([self.state])

    def fit(self, kept, **fixed):
        fitter = RidgeFitter(self.keys.shape[1], self.targets.rank)
        codes, values = self.targets.coordinates(self.gold)
        fitter.update_forget(self.keys[kept], (codes[kept], values[kept]))
        fitter.update_retain(self.retain)
        return fitter.solve(retain_weight=10, ridge=self.ridge, **fixed)

    def refit(self, group):
        kept = ~torch.isin(self.example, torch.tensor(group))
        return self.fit(kept, mu=self.solution.mu, forget_count=len(self.keys)).edit

    def dense(self, coordinates):
        """P in full from its coordinates in the basis."""
        if self.targets.basis is not None:
            return self.targets.basis @ coordinates
        full = torch.zeros(self.vocab, coordinates.shape[1], dtype=torch.float64)
        full[self.targets.tokens] = coordinates
        return full


KINDS = ("mlp", "head", "corrupt")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.booleans(), st.sampled_from([1e-4, 0.03, 3.0]))
def test_influence_of_each_example_is_what_a_refit_gives(seed, kind, dual, ridge):
    problem = Problem(seed, dual=dual, kind=kind, ridge=ridge)
    edit = problem.solution.edit
    # Rounding in A⁻¹ is amplified by its condition number, which grows as 1/μ.
    tolerance = EXACT * max(1, 0.03 / ridge)
    assert ("rows" in problem.solution.inverse.tensors()) == dual
    for e in range(6):
        (without,) = problem.audit.without(e)
        refit = problem.refit([e])
        assert gap(without, refit, edit) < tolerance
        (part,) = problem.audit.influence(e)
        assert gap(part.coordinates(), edit - refit, edit) < tolerance
        assert 0 <= part.leverage < 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.booleans(), st.sets(st.integers(0, 5), min_size=2, max_size=5))
def test_influence_of_a_group_is_what_a_refit_without_all_of_it_gives(seed, kind, dual, group):
    problem = Problem(seed, dual=dual, kind=kind)
    (without,) = problem.audit.without(sorted(group))
    assert gap(without, problem.refit(sorted(group)), problem.solution.edit) < EXACT
    (again,) = problem.audit.without([*reversed(sorted(group)), min(group)])
    assert torch.equal(without, again), "order and repetition in a group mean nothing"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dual", [True, False])
def test_without_all_examples_nothing_is_left(kind, dual):
    problem = Problem(3, dual=dual, kind=kind)
    (without,) = problem.audit.without(range(6))
    assert without.norm() < EXACT * problem.solution.edit.norm()


def test_a_group_is_not_the_sum_of_its_members():
    problem = Problem(3, dual=False, kind="mlp")
    (both,) = problem.audit.influence([0, 2])
    singles = sum(problem.audit.influence(e)[0].coordinates() for e in (0, 2))
    assert gap(both.coordinates(), singles, both.coordinates()) > 1e-3


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(KINDS),
    st.booleans(),
    st.lists(st.integers(1, 4), min_size=1, max_size=9),
)
def test_norms_in_one_pass_are_the_norms_of_the_dense_influences(seed, kind, dual, sizes):
    problem = Problem(seed, dual=dual, kind=kind, sizes=[max(sizes[0], 2), *sizes[1:]])
    norms = problem.audit.norms()
    assert norms.shape == (1, len(sizes))
    scale = problem.solution.edit.norm()
    for e in range(len(sizes)):
        (part,) = problem.audit.influence(e)
        dense = problem.dense(part.coordinates()).norm()
        assert abs(norms[0, e] - dense) < 1e-9 * (dense + scale)
        assert abs(part.norm() - dense) < 1e-9 * (dense + scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dual", [True, False])
def test_effect_is_the_change_of_the_outputs_at_given_keys(kind, dual):
    problem = Problem(11, dual=dual, kind=kind)
    probe = torch.randn(5, problem.keys.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (part,) = problem.audit.influence([1, 4])
    expected = probe @ (problem.solution.edit - problem.refit([1, 4])).T
    assert gap(part.effect(probe), expected, expected) < 1e-8
    assert part.effect(probe.float()).dtype == torch.float64


def test_ranking_is_by_the_norm_over_all_matrices():
    first, second = Problem(1, dual=False, kind="mlp"), Problem(1, dual=True, kind="head")
    audit = Audit([first.state, FitState(**{**second.state.__dict__, "example": first.state.example})])
    totals = audit.norms().square().sum(0).sqrt()
    ranking = audit.ranking()
    assert sorted(name for name, _ in ranking) == sorted(first.state.names)
    values = [value for _, value in ranking]
    assert values == sorted(values, reverse=True)
    for name, value in ranking:
        assert value == pytest.approx(totals[int(name.split()[1])].item())


@pytest.mark.parametrize(
    "recomputed",
    [
        pytest.param(lambda p, kept: p.fit(kept, forget_count=len(p.keys)), id="mu"),
        pytest.param(lambda p, kept: p.fit(kept, mu=p.solution.mu), id="s"),
        pytest.param(lambda p, kept: p.fit(kept), id="s and mu"),
    ],
)
def test_it_is_not_exact_when_s_or_mu_are_computed_anew(recomputed):
    problem = Problem(5, dual=False, kind="mlp")
    (without,) = problem.audit.without(2)
    refit = recomputed(problem, problem.example != 2).edit
    assert gap(without, refit, problem.solution.edit) > 1e-5


def test_bad_groups_are_refused():
    audit = Problem(0, dual=False, kind="mlp").audit
    with pytest.raises(IndexError, match="unknown example 6: the edit has examples 0 to 5"):
        audit.influence(6)
    with pytest.raises(IndexError, match="unknown example -1"):
        audit.without([0, -1])
    with pytest.raises(ValueError, match="no examples"):
        audit.influence([])
    with pytest.raises(ValueError, match="nothing to audit"):
        Audit([])
    with pytest.raises(ValueError, match="keep_audit=True"):
        Edit(()).audit()


# On models


def quiet_fit(data, settings, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return data.fit(settings, **options)


@pytest.mark.parametrize(("layers", "target"), [((1,), "suppress"), (("head",), "suppress"), ((2,), "corrupt")])
@pytest.mark.parametrize("short", [True, False], ids=["dual", "primal"])
def test_audit_of_a_fitted_edit_matches_refits_on_the_model(family, small_model, request_sets, layers, target, short):
    forget, retain = request_sets
    if short:
        forget, retain = forget[:4], retain[:7]
    model = small_model(family)
    data = FitData(model, forget, retain)
    chosen = FitSettings(layers, 5.0, target, retain_weight=10.0, batch_size=3)
    edit = quiet_fit(data, chosen, keep_audit=True)
    (state,), audit = edit.states, edit.audit()
    assert audit.names == tuple(example.name for example in forget)

    retain_keys = torch.cat(list(collect_keys(model, data.batches(chosen)[1], layers[0]))).double()
    for e in (0, len(forget) - 1):
        kept = state.example != e
        fitter = RidgeFitter(state.keys.shape[1], len(state.solution.edit))
        fitter.update_forget(state.keys[kept], (state.codes[kept], state.values[kept]))
        fitter.update_retain(retain_keys)
        refit = fitter.solve(retain_weight=10.0, mu=state.solution.mu, forget_count=len(state.keys)).edit
        assert gap(audit.without(e)[0], refit, edit.matrices[0].right) < EXACT
    lengths = torch.bincount(state.example)
    assert lengths.tolist() == [len(example.answer) for example in forget]


def test_leaving_an_example_out_of_a_whole_new_fit_differs(small_model, request_sets):
    """The gap that the book measures: s, μ and α recomputed, and a band's later keys moved by the earlier edits."""
    forget, retain = request_sets
    model = small_model("llama")
    edit = quiet_fit(FitData(model, forget, retain), FitSettings((1, 2), 5.0), keep_audit=True)
    anew = quiet_fit(FitData(model, forget[1:], retain), FitSettings((1, 2), 5.0))
    for matrix, state, part, other in zip(edit.matrices, edit.states, edit.audit().influence(0), anew.matrices, strict=True):
        approximate = matrix.dense() - state.left @ part.coordinates()
        assert gap(approximate, other.dense(), matrix.dense()) > 1e-4


@pytest.mark.parametrize("layers", [(1, 2), (2, "head")])
@pytest.mark.parametrize("short", [True, False], ids=["dual", "primal"])
def test_audit_data_survive_a_round_trip(tmp_path, small_model, request_sets, layers, short):
    forget, retain = request_sets
    if short:
        forget, retain = forget[:3], retain[:5]
    edit = quiet_fit(FitData(small_model("gpt2"), forget, retain), FitSettings(layers, 5.0), keep_audit=True)
    edit.save(tmp_path / "edit", audit=True)
    loaded = Edit.load(tmp_path / "edit")
    # What is stored is stored to the bit; memory layout differs, and with it the last digits of what is computed.
    assert torch.allclose(loaded.audit().norms(), edit.audit().norms(), rtol=1e-10)
    assert [name for name, _ in loaded.audit().ranking()] == [name for name, _ in edit.audit().ranking()]
    for a, b in zip(loaded.audit().without([0, 2]), edit.audit().without([0, 2]), strict=True):
        assert gap(a, b, b) < EXACT
    for a, b in zip(loaded.states, edit.states, strict=True):
        assert (a.left is None) == (b.left is None)
        tensors = [
            {"edit": state.solution.edit, "keys": state.keys, "codes": state.codes, "values": state.values, "example": state.example}
            | state.solution.inverse.tensors()
            for state in (a, b)
        ]
        assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[1])
        assert (a.module, a.names, a.solution.mu, a.solution.retain_weight) == (b.module, b.names, b.solution.mu, b.solution.retain_weight)
        assert (a.solution.forget_scale, a.solution.retain_count) == (b.solution.forget_scale, b.solution.retain_count)


def test_saving_audit_data_that_were_not_kept_is_an_error(tmp_path, small_model, request_sets):
    edit = quiet_fit(FitData(small_model("llama"), *request_sets), FitSettings((1,), 5.0))
    with pytest.raises(ValueError, match="keep_audit=True"):
        edit.save(tmp_path / "edit", audit=True)
    assert list(tmp_path.iterdir()) == []
