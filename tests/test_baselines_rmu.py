"""RMU: where forget states go, that retain states stay, and that nothing but three matrices is touched."""

from dataclasses import replace

import pytest
import torch

from unlearnlib.baselines.rmu import RmuSettings, hidden_states, rmu
from unlearnlib.examples import batches, encode
from unlearnlib.grom.anatomy import Anatomy, weight_view
from unlearnlib.grom.targets import corruption

SETTINGS = RmuSettings(layer=2, strength=8.0, lr=3e-2, epochs=10, batch_size=4, retain_weight=1.0, weight_decay=0.0)


@pytest.fixture(scope="module")
def sets(random_examples):
    return random_examples(8, seed=1, answers=(0, 30)), random_examples(12, seed=2, answers=(40, 97))


def states(model, examples, layer=2):
    (batch,) = batches(examples, batch_size=len(examples))
    with torch.no_grad():
        return hidden_states(Anatomy(model), batch, layer)


def direction(width=32, seed=0):
    return corruption(width, 1.0, seed).basis.flatten()


def test_forget_states_go_to_the_target_and_retain_states_stay(family, small_model, sets, snapshot):
    model = small_model(family, dtype=torch.float32)
    before = snapshot(model)
    changed = rmu(model, None, *sets, SETTINGS)
    assert snapshot(model) == before
    target = 8 * direction().float()
    forget, retain = sets
    distances = [(states(one, forget) - target).square().mean() for one in (model, changed)]
    assert distances[1] < 0.7 * distances[0]
    moved = [(states(changed, part) - states(model, part)).square().mean() for part in (forget, retain)]
    assert moved[1] < 0.4 * moved[0]
    # Along u, and not only closer to the point: the forget states have come to point that way.
    along = [states(one, forget) @ direction().float() for one in (model, changed)]
    assert along[1].mean() > along[0].mean() + 1


def test_only_the_three_matrices_change(family, small_model, sets):
    model = small_model(family, dtype=torch.float32)
    changed = rmu(model, None, *sets, replace(SETTINGS, epochs=1))
    names = {Anatomy(changed).name(Anatomy(changed).mlp_output(layer)) + ".weight" for layer in (0, 1, 2)}
    old = dict(model.named_parameters())
    assert {name for name, weight in changed.named_parameters() if not torch.equal(weight, old[name])} == names
    assert all(weight.requires_grad for weight in changed.parameters())
    assert not changed.training


@pytest.mark.parametrize(("layer", "trained"), [(0, (0,)), (1, (0, 1)), (3, (1, 2, 3))])
def test_a_low_layer_has_fewer_below_it(layer, trained, small_model, sets):
    model = small_model(dtype=torch.float32)
    changed = rmu(model, None, *sets, replace(SETTINGS, layer=layer, epochs=1))
    old, new = ([weight_view(Anatomy(one).mlp_output(i)) for i in range(4)] for one in (model, changed))
    assert tuple(i for i in range(4) if not torch.equal(old[i], new[i])) == trained


def test_without_a_retain_term_retain_states_move_more(small_model, sets):
    model = small_model(dtype=torch.float32)
    moved = []
    for weight in (0.0, 100.0):
        changed = rmu(model, None, *sets, replace(SETTINGS, retain_weight=weight))
        moved.append((states(changed, sets[1]) - states(model, sets[1])).square().mean().item())
    assert moved[1] < 0.2 * moved[0]


def test_the_first_step_descends_the_loss_of_the_formula(small_model, sets):
    """AdamW's first step is lr × sign(gradient): compare with the gradient of the loss, worked out here."""
    model = small_model()
    forget, retain = sets
    settings = replace(SETTINGS, epochs=1, batch_size=8, lr=1e-3)
    changed = rmu(model, None, forget, retain, settings)
    anatomy = Anatomy(model)
    (batch,) = batches(forget, batch_size=8)
    # At the start the retain term is at its minimum, 0: its gradient is 0.
    states_now = hidden_states(anatomy, batch, 2)
    loss = ((states_now - 8.0 * direction()) ** 2).sum() / states_now.numel()
    weights = [anatomy.mlp_output(layer).weight for layer in (0, 1, 2)]
    gradients = torch.autograd.grad(loss, weights)
    new = [Anatomy(changed).mlp_output(layer).weight for layer in (0, 1, 2)]
    for old, now, gradient in zip(weights, new, gradients, strict=True):
        step = (now - old).detach()
        clear = gradient.abs() > 1e-5
        assert clear.float().mean() > 0.9
        assert torch.equal(step[clear].sign(), -gradient[clear].sign())
        sizes = step[clear].abs()
        assert sizes.max().item() == pytest.approx(sizes.min().item(), rel=0.02)


def test_states_are_those_of_the_model(family, small_model, sets):
    model = small_model(family)
    (batch,) = batches(sets[0], batch_size=8)
    found = hidden_states(Anatomy(model), batch, 1)
    known = model(**batch.inputs(), output_hidden_states=True).hidden_states[2][batch.rows, batch.columns]
    torch.testing.assert_close(found, known)
    assert found.requires_grad


def test_states_do_not_depend_on_padding(small_model, sets):
    model, examples = small_model(), sorted(sets[0], key=len)
    together = states(model, examples)
    torch.testing.assert_close(together, torch.cat([states(model, [example]) for example in examples]))
    assert len(together) == sum(len(example.answer) for example in examples)


def test_it_is_seeded(small_model, sets):
    model = small_model(dtype=torch.float32)
    settings = replace(SETTINGS, epochs=1)
    first, again, other = (rmu(model, None, *sets, one) for one in (settings, settings, replace(settings, seed=1)))
    weights = [torch.cat([weight.flatten() for weight in one.parameters()]) for one in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_it_goes_on_from_a_checkpoint(small_model, sets, tmp_path, monkeypatch):
    from unlearnlib import training

    model = small_model(dtype=torch.float32)
    settings = replace(SETTINGS, epochs=3)
    whole = rmu(model, None, *sets, settings)
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    path, seen = tmp_path / "state", []

    def interrupted(*args, **options):
        seen.append(1)
        if len(seen) == 10:
            raise KeyboardInterrupt
        return hidden_states(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("unlearnlib.baselines.rmu.hidden_states", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rmu(model, None, *sets, settings, checkpoint=path)
    assert path.is_file()
    resumed = rmu(model, None, *sets, settings, checkpoint=path)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert not path.exists()


def test_autocast_computes_in_bfloat16(small_model, sets):
    model = small_model(dtype=torch.float32)
    settings = replace(SETTINGS, epochs=2)
    exact, rounded = (rmu(model, None, *sets, replace(settings, autocast=on)) for on in (False, True))
    moved = [states(one, sets[0]) - states(model, sets[0]) for one in (exact, rounded)]
    assert not torch.equal(*moved)
    assert (moved[1] - moved[0]).norm() < 0.1 * moved[0].norm()
    assert all(weight.dtype == torch.float32 for weight in rounded.parameters())


def test_questions_and_answers_are_encoded(make_tokenizer, small_model):
    tokenizer = make_tokenizer()
    model = small_model(dtype=torch.float32, vocab_size=len(tokenizer))
    items = [[{"question": f"What is {word}?", "answer": f"{word} it is."}] for word in ("blue", "grey")]
    settings = replace(SETTINGS, epochs=1)
    texts, tokens = (rmu(model, tokenizer, *sets, settings) for sets in (items, [encode(tokenizer, part) for part in items]))
    assert all(torch.equal(a, b) for a, b in zip(texts.parameters(), tokens.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": -1}, "layer must be at least 0"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"strength": 0.0}, "strength must be a finite number > 0"),
        ({"lr": float("inf")}, "lr must be a finite number > 0"),
        ({"retain_weight": -1.0}, "retain_weight must be a finite number, at least 0"),
        ({"weight_decay": float("nan")}, "weight_decay must be a finite number"),
    ],
)
def test_settings_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **changes)


def test_what_cannot_be_unlearned(small_model, sets, make_tokenizer):
    model = small_model(dtype=torch.float32)
    with pytest.raises(ValueError, match="the forget set is empty"):
        rmu(model, None, [], sets[1], SETTINGS)
    with pytest.raises(ValueError, match="the retain set is empty"):
        rmu(model, None, sets[0], [], SETTINGS)
    with pytest.raises(ValueError, match=r"example 0: field 'answer'"):
        rmu(model, make_tokenizer(), sets[0], [{"question": "Why?"}], SETTINGS)
    with pytest.raises(IndexError, match="unknown layer 4"):
        rmu(model, None, *sets, replace(SETTINGS, layer=4))
    with pytest.raises(FloatingPointError, match=r"loss of step \d+ of 20"):
        rmu(model, None, *sets, replace(SETTINGS, strength=1e30))
