"""Low-rank training: what is merged has that rank, what is interrupted leaves no trace."""

import pytest
import torch

from unlearnlib.lora import lora
from unlearnlib.training import train


@pytest.fixture
def model(family, small_model):
    return small_model(family, dtype=torch.float32, layers=2)


def copies(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def numerical_rank(matrix):
    values = torch.linalg.svdvals(matrix.double())
    return int((values > 1e-4 * values[0]).sum())


@pytest.mark.parametrize("rank", [1, 3])
def test_the_merged_update_has_at_most_that_rank_and_is_in_linear_layers_only(rank, model, random_examples):
    before, names = copies(model), [name for name, _ in model.named_parameters()]
    with lora(model, rank) as trainable:
        assert trainable is not model
        assert sum(parameter.requires_grad for parameter in trainable.parameters()) > 0
        losses = train(trainable, random_examples(8), steps=10, lr=1e-2)
    assert losses[-1] < losses[0]
    assert [name for name, _ in model.named_parameters()] == names, "no adapter is left"
    after = copies(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    linear = {name for name in before if before[name].ndim == 2 and (".layers." in name or ".h." in name)}
    assert changed == linear
    for name in changed:
        assert 1 <= numerical_rank(after[name] - before[name]) <= rank, name


def test_a_head_and_the_embedding_tied_to_it_stay_as_they_are(model, random_examples):
    head = model.get_output_embeddings().weight
    before = head.detach().clone()
    with lora(model, 2) as trainable:
        train(trainable, random_examples(4), steps=2, lr=1e-2)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight is head
    assert torch.equal(head, before)


def test_rank_zero_is_the_model_itself(model):
    asked = [parameter.requires_grad for parameter in model.parameters()]
    with lora(model, 0) as trainable:
        assert trainable is model
        assert [parameter.requires_grad for parameter in trainable.parameters()] == asked


def test_what_was_trained_is_what_is_merged(model, random_examples):
    ids = torch.tensor([[5, 17, 60, 3, 3, 88, 9]])
    with lora(model, 2) as trainable:
        train(trainable, random_examples(8), steps=6, lr=1e-2)
        with torch.no_grad():
            expected = trainable(input_ids=ids).logits
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_the_old_weights(error, model, random_examples, snapshot):
    before = snapshot(model)
    with pytest.raises(error), lora(model, 2) as trainable:
        train(trainable, random_examples(8), steps=2, lr=1e-2)
        raise error
    assert snapshot(model) == before
    assert not any("lora" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("fails", [False, True])
def test_what_required_a_gradient_does_so_again(fails, model):
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 > 0)
    asked = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        with lora(model, 1):
            assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} != asked
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == asked


def test_untrained_adapters_change_nothing(model, snapshot):
    before = snapshot(model)
    with lora(model, 4):
        pass
    assert snapshot(model) == before


def test_the_seed_decides_and_the_callers_random_state_stays(small_model, random_examples):
    def run(seed, noise):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        model = small_model("llama", dtype=torch.float32, layers=2)
        with lora(model, 2, seed) as trainable:
            train(trainable, random_examples(8), steps=4, lr=1e-2)
        assert torch.equal(torch.get_rng_state(), state)
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    first, again, other = run(0, 1), run(0, 2), run(1, 1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
