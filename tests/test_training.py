"""Training: resuming to the very same weights, gradients in parts, and which examples each step sees."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib import training
from unlearnlib.examples import batches
from unlearnlib.metrics import answer_log_probs, answer_probability
from unlearnlib.training import draw_batches, optimise, train


class Interrupt(Exception):
    """What stops a run on its way."""


@pytest.fixture
def every_step(monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)


@pytest.fixture
def fresh(small_model):
    return lambda **options: small_model("llama", dtype=torch.float32, layers=2, **options)


@pytest.fixture(scope="module")
def examples(random_examples):
    return random_examples(11)


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def mean_loss(model, examples, per_step=4):
    """A loss over batches in order, and which steps were asked for."""
    asked = []

    def loss(step):
        asked.append(step)
        members = [examples[(per_step * step + i) % len(examples)] for i in range(per_step)]
        (batch,) = batches(members)
        yield -answer_log_probs(model, batch).mean()

    return loss, asked


def stopping(loss, at):
    def stopped(step):
        if step == at:
            raise Interrupt
        return loss(step)

    return stopped


# Interruption


@pytest.mark.parametrize("stops", [(1,), (7,), (3, 4, 11)])
def test_an_interrupted_run_ends_with_the_same_bits(stops, fresh, examples, tmp_path, every_step):
    whole = fresh()
    expected = optimise(whole, mean_loss(whole, examples)[0], steps=12, lr=1e-2)
    assert len(expected) == 12

    path = tmp_path / "deep" / "run.checkpoint"
    seen = []
    for stop in stops:
        # A model as a new process would load it.
        model = fresh()
        loss, asked = mean_loss(model, examples)
        with pytest.raises(Interrupt):
            optimise(model, stopping(loss, stop), steps=12, lr=1e-2, checkpoint=path)
        seen += asked
        assert path.is_file()
    model = fresh()
    loss, asked = mean_loss(model, examples)
    losses = optimise(model, loss, steps=12, lr=1e-2, checkpoint=path)
    assert losses == expected
    assert same(weights(model), weights(whole))
    assert seen + asked == list(range(12)), "no step is taken twice"
    assert list(path.parent.iterdir()) == [], "the checkpoint is removed at the end, and nothing else is left"


def test_a_checkpoint_between_two_saves_repeats_the_steps_since(fresh, examples, tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(training.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 3.0)
    whole, model, path = fresh(), fresh(), tmp_path / "run.checkpoint"
    expected = optimise(whole, mean_loss(whole, examples)[0], steps=8, lr=1e-2)
    with pytest.raises(Interrupt):
        optimise(model, stopping(mean_loss(model, examples)[0], 6), steps=8, lr=1e-2, checkpoint=path)
    model = fresh()
    loss, asked = mean_loss(model, examples)
    assert optimise(model, loss, steps=8, lr=1e-2, checkpoint=path) == expected
    assert 0 < asked[0] < 6
    assert same(weights(model), weights(whole))


def test_without_a_checkpoint_nothing_is_written_and_one_that_is_not_due_is_not(fresh, examples, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = fresh()
    optimise(model, mean_loss(model, examples)[0], steps=3, lr=1e-2)
    with pytest.raises(Interrupt):
        optimise(model, stopping(mean_loss(model, examples)[0], 2), steps=3, lr=1e-2, checkpoint=tmp_path / "run.checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_train_resumes_too_its_order_included(fresh, examples, tmp_path, every_step, monkeypatch):
    options = {"steps": 9, "lr": 1e-2, "batch_size": 4, "seed": 3, "by_length": True}
    whole = fresh()
    expected = train(whole, examples, **options)
    path, calls = tmp_path / "run.checkpoint", []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == 5:
            raise Interrupt
        return answer_log_probs(model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(training, "answer_log_probs", failing)
        with pytest.raises(Interrupt):
            train(fresh(), examples, checkpoint=path, **options)
    model = fresh()
    assert train(model, examples, checkpoint=path, **options) == expected
    assert same(weights(model), weights(whole))


def test_a_checkpoint_of_another_number_of_weights_is_refused(fresh, small_model, examples, tmp_path, every_step):
    model, path = fresh(), tmp_path / "run.checkpoint"
    with pytest.raises(Interrupt):
        optimise(model, stopping(mean_loss(model, examples)[0], 2), steps=3, lr=1e-2, checkpoint=path)
    deeper = small_model("llama", dtype=torch.float32, layers=3)
    with pytest.raises(ValueError, match=r"belongs to other training"):
        optimise(deeper, mean_loss(deeper, examples)[0], steps=3, lr=1e-2, checkpoint=path)


# The loss


def test_accumulated_parts_are_one_batch(small_model, examples):
    def run(parts):
        model = small_model("llama", layers=2)
        total = sum(len(example.answer) for example in examples)

        def loss(step):
            for group in parts:
                (batch,) = batches([examples[i] for i in group])
                yield -answer_log_probs(model, batch).sum() / total

        return optimise(model, loss, steps=4, lr=1e-3), weights(model)

    whole_losses, whole = run([range(11)])
    split_losses, split = run([range(5), range(5, 7), range(7, 11)])
    assert split_losses == pytest.approx(whole_losses, rel=1e-9)
    assert whole_losses[-1] < whole_losses[0]
    # AdamW divides by the gradient's size, and so makes more of the rounding of small gradients: 1e-7 is 1e-4 of a step.
    for name in whole:
        assert torch.allclose(split[name], whole[name], rtol=0, atol=1e-7), name


def test_each_part_is_differentiated_before_the_next_is_asked_for(fresh, examples):
    model = fresh()
    (batch,) = batches(examples[:3])
    seen = []

    def loss(step):
        for _ in range(2):
            seen.append(model.lm_head.weight.grad is not None)
            yield -answer_log_probs(model, batch).mean()

    assert optimise(model, loss, steps=1, lr=1e-3)[0] == pytest.approx(2 * -answer_log_probs(fresh(), batch).mean().item(), rel=1e-5)
    assert seen == [False, True]


def test_the_rate_rises_and_falls_as_described(fresh, examples, monkeypatch):
    model, rates = fresh(), []
    real = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *args, **kwargs: (rates.append(self.param_groups[0]["lr"]), real(self, *args, **kwargs))[1]
    )
    optimise(model, mean_loss(model, examples)[0], steps=20, lr=1e-2)
    expected = [1e-2 / 3, 2e-2 / 3] + [0.5e-2 * (1 + math.cos(math.pi * i / 18)) for i in range(18)]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_only_what_requires_a_gradient_is_trained_and_the_model_ends_in_evaluation_mode(fresh, examples):
    model = fresh()
    before = weights(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.mlp" in name)
    modes = []
    hook = model.register_forward_pre_hook(lambda module, inputs: modes.append(module.training))
    optimise(model, mean_loss(model, examples)[0], steps=2, lr=1e-2)
    hook.remove()
    after = weights(model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {name for name in before if "layers.1.mlp" in name}
    assert modes == [True, True]
    assert not any(module.training for module in model.modules())


def test_training_makes_answers_probable_whatever_the_order(fresh, examples):
    for by_length in (False, True):
        model = fresh()
        before = answer_probability(model, examples).mean()
        losses = train(model, examples, steps=60, lr=1e-2, batch_size=4, by_length=by_length)
        assert len(losses) == 60
        assert losses[-1] < losses[0] / 2
        assert answer_probability(model, examples).mean() > 0.5 > before


def test_nothing_to_train_on_is_an_error(fresh, examples):
    for rows, steps in (([], 3), (examples, 0)):
        with pytest.raises(ValueError, match="at least one example and one step"):
            train(fresh(), rows, steps=steps, lr=1e-3)


# The order

SIZES = {"count": st.integers(1, 60), "batch_size": st.integers(1, 25), "seed": st.integers(0, 99)}


@given(**SIZES, passes=st.integers(1, 4))
def test_without_lengths_the_order_is_one_permutation_after_the_other(count, batch_size, seed, passes):
    drawn = draw_batches(count, batch_size, passes * math.ceil(count / batch_size) + 3, seed)
    assert len(drawn) == passes * math.ceil(count / batch_size) + 3
    assert all(len(batch) == min(batch_size, count) for batch in drawn)
    order = [i for batch in drawn for i in batch]
    for start in range(0, len(order) - count + 1, count):
        assert sorted(order[start : start + count]) == list(range(count))


@given(**SIZES, passes=st.integers(1, 4), data=st.data())
def test_with_lengths_every_pass_covers_each_example_exactly_once(count, batch_size, seed, passes, data):
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    a_pass = math.ceil(count / batch_size)
    drawn = draw_batches(count, batch_size, passes * a_pass, seed, lengths)
    for start in range(0, len(drawn), a_pass):
        batches_of_pass = drawn[start : start + a_pass]
        assert sorted(i for batch in batches_of_pass for i in batch) == list(range(count))
        assert all(0 < len(batch) <= batch_size for batch in batches_of_pass)
        assert sum(len(batch) < batch_size for batch in batches_of_pass) <= 1


@given(**SIZES, steps=st.integers(1, 30), more=st.integers(0, 10), by_length=st.booleans())
def test_the_order_is_seeded_and_more_steps_go_on_with_it(count, batch_size, seed, steps, more, by_length):
    lengths = [(7 * i) % 13 for i in range(count)] if by_length else None
    drawn = draw_batches(count, batch_size, steps, seed, lengths)
    assert len(drawn) == steps
    assert draw_batches(count, batch_size, steps + more, seed, lengths)[:steps] == drawn


def test_another_seed_and_another_pass_are_other_orders():
    for lengths in (None, [i % 9 for i in range(40)]):
        first, other = (draw_batches(40, 8, 10, seed, lengths) for seed in (0, 1))
        assert first != other
        assert first[:5] != first[5:]


def test_the_global_random_state_is_neither_used_nor_moved():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn = draw_batches(20, 4, 9, 5, list(range(20)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert draw_batches(20, 4, 9, 5, list(range(20))) == drawn


def test_similar_lengths_share_a_batch_and_long_ones_do_not_come_last():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 100, (400,), generator=generator).tolist()

    def padding(drawn):
        return sum(len(batch) * max(lengths[i] for i in batch) for batch in drawn) / sum(lengths[i] for batch in drawn for i in batch) - 1

    plain, sorted_ones = draw_batches(400, 8, 50, 0), draw_batches(400, 8, 50, 0, lengths)
    assert padding(plain) > 0.5
    assert padding(sorted_ones) < 0.25 * padding(plain)
    longest = [max(lengths[i] for i in batch) for batch in sorted_ones]
    rises = sum(b > a for a, b in itertools.pairwise(longest))
    assert 15 < rises < 35, "batches of a window come in no order of length"
