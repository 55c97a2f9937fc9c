"""The baselines: mergers against peft's own, gradient methods and GROM as candidates that leave the shipped model alone."""

import math

import pytest
import torch
from peft.utils import merge_utils

from unlearnlib import models
from unlearnlib.benchmarks import staged_baselines
from unlearnlib.benchmarks.staged_baselines import Candidates, MergedLine, merged, merged_line, put, trained
from unlearnlib.examples import encode
from unlearnlib.metrics import answer_probability
from unlearnlib.sidecar import MismatchError, combine, norm, parameters_of

MEMORY = [{"question": f"Where does {name} live?", "answer": f"{name} Street"} for name in ("Ada", "Bea", "Cleo", "Dan")]
KEPT = [{"question": f"Who is {name}?", "answer": "Nobody can tell"} for name in ("Eve", "Flo", "Gus")]


@pytest.fixture
def network(make_tokenizer):
    model = models.build(vocab_size=320, hidden_size=32, intermediate_size=48, layers=2, heads=4, seed=3)
    return model, make_tokenizer([item["answer"] for item in MEMORY + KEPT])


def random_like(theta, seed, size=0.1):
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(tensor.shape, generator=generator) for name, tensor in theta.items()}


@pytest.fixture
def vectors(network):
    """θ_A, θ_AMS and ΔM of a made-up trial."""
    theta_a = {name: tensor.clone() for name, tensor in parameters_of(network[0]).items()}
    return theta_a, combine((1.0, theta_a), (1.0, random_like(theta_a, 1))), random_like(theta_a, 2)


def gap(a, b):
    return norm(combine((1.0, a), (-1.0, b)))


@pytest.mark.parametrize("lam", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("density", [0.3, 0.8])
@pytest.mark.parametrize("method", ["ties", "dare"])
def test_a_merger_is_pefts(vectors, method, density, lam):
    theta_a, shipped, delta = vectors
    line = merged_line(method, theta_a, shipped, delta, density, seed=7)
    theirs = {"ties": merge_utils.ties, "dare": merge_utils.dare_linear}[method]
    torch.manual_seed(7)
    expected = {
        name: theta_a[name] + theirs([shipped[name] - theta_a[name], -delta[name]], torch.tensor([1.0, lam]), density) for name in theta_a
    }
    assert gap(line.at(theta_a, lam), expected) < 1e-5 * norm(expected)


def test_dare_that_drops_nothing_is_task_arithmetic(vectors):
    theta_a, shipped, delta = vectors
    line = merged_line("dare", theta_a, shipped, delta, 1.0)
    assert gap(line.at(theta_a, 0.75), combine((1.0, shipped), (-0.75, delta))) < 1e-5
    ties = merged_line("ties", theta_a, shipped, delta, 1.0)
    assert gap(ties.at(theta_a, 1.0), combine((1.0, shipped), (-1.0, delta))) > 0.1, "the elected signs must leave something out"


def test_dare_is_drawn_by_its_seed_and_leaves_the_callers_chance_alone(vectors):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first, again, other = (merged_line("dare", *vectors, 0.5, seed).slope for seed in (1, 1, 2))
    assert torch.rand(3).equal(expected)
    assert gap(first, again) == 0 < gap(first, other)


def test_bad_mergers(vectors):
    theta_a, shipped, delta = vectors
    with pytest.raises(ValueError, match=r"method must be one of ties, dare, got 'slerp'"):
        merged_line("slerp", *vectors, 0.5)
    for density in (0.0, 1.5):
        with pytest.raises(ValueError, match="density must lie in"):
            merged_line("ties", *vectors, density)
    with pytest.raises(MismatchError, match="delta doesn't match theta_a"):
        merged_line("ties", theta_a, shipped, dict(list(delta.items())[1:]), 0.5)


def test_a_merger_is_tried_with_every_density_and_coefficient(network, vectors):
    seen = []

    def measure(model):
        seen.append({name: tensor.clone() for name, tensor in parameters_of(model).items()})
        return {"number": float(len(seen))}

    tries = Candidates(coefficients=(0.5, 1.0), densities=(0.2, 0.6))
    found = list(merged(network[0], "ties", *vectors, tries, measure))
    assert [(point.lam, point.measures["density"]) for point, _ in found] == [(0.5, 0.2), (1.0, 0.2), (0.5, 0.6), (1.0, 0.6)]
    assert all(gap(theta, put_in) == 0 for (_, theta), put_in in zip(found, seen, strict=True))


@pytest.mark.parametrize(("method", "retains"), [("ft_unlearn", False), ("npo", True)])
def test_gradient_candidates(network, snapshot, method, retains):
    model, tokenizer = network
    before = snapshot(model)
    settings = Candidates(learning_rates=(1e-4, 1e-2), epochs=(1,), batch_size=2).gradient(method, autocast=False)
    assert [one.retains for one in settings] == [retains] * 2
    found = list(trained(model, tokenizer, MEMORY, KEPT, settings, lambda changed: {"first": next(changed.parameters()).sum().item()}))
    assert snapshot(model) == before
    assert [point.lam for point, _ in found] == [1e-4, 1e-2]
    moved = [gap(theta, parameters_of(model)) for _, theta in found]
    assert 0 < moved[0] < moved[1], "a larger learning rate must move the model further"


def test_ascent_on_the_memory_makes_it_less_likely(network):
    model, tokenizer = network
    (one,) = Candidates(learning_rates=(1e-2,), epochs=(6,), batch_size=4).gradient("ft_unlearn")
    ((_, theta),) = trained(model, tokenizer, MEMORY, KEPT, [one], lambda changed: {})
    examples = encode(tokenizer, MEMORY)
    before = answer_probability(model, examples).mean()
    put(model, theta)
    assert answer_probability(model, examples).mean() < 0.5 * before


def test_what_is_not_finite_is_no_candidate(network, monkeypatch):
    model, tokenizer = network
    settings = Candidates(learning_rates=(1e-4, 1e-3, 1e-2), epochs=(1,)).gradient("ft_unlearn")
    real = staged_baselines.unlearn_by_gradient

    def breaks(*arguments, **options):
        if arguments[4].lr == 1e-3:
            raise FloatingPointError("not finite")
        return real(*arguments, **options)

    monkeypatch.setattr(staged_baselines, "unlearn_by_gradient", breaks)
    values = iter((1.0, math.nan))
    found = list(trained(model, tokenizer, MEMORY, KEPT, settings, lambda changed: {"value": next(values)}))
    assert [point.lam for point, _ in found] == [1e-4]


def test_parameters_are_put_in_place(network, vectors):
    model, _ = network
    shipped = vectors[1]
    put(model, shipped)
    assert gap(parameters_of(model), shipped) == 0
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with pytest.raises(MismatchError, match="missing"):
        put(model, dict(list(shipped.items())[1:]))


def test_bad_candidates():
    for name in ("learning_rates", "epochs", "coefficients", "densities"):
        with pytest.raises(ValueError, match=f"{name} is empty"):
            Candidates(**{name: ()})
    with pytest.raises(ValueError, match="densities must lie in"):
        Candidates(densities=(0.0,))


def test_a_line_is_affine(vectors):
    theta_a, _, delta = vectors
    line = MergedLine(random_like(theta_a, 5), delta)
    middle = combine((0.5, line.at(theta_a, 0.0)), (0.5, line.at(theta_a, 2.0)))
    assert gap(middle, line.at(theta_a, 1.0)) < 1e-5
