"""Model editors: the closed forms against their definitions, keys and values against plain hooks, and whole edits on all families."""

import inspect
import re
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from unlearnlib import models, training
from unlearnlib.baselines.closed_forms import alpha_directions, memit_directions, null_space, rome_directions, zero_unlearn_factors
from unlearnlib.baselines.editing import Editing, encode_fact, locate, make_prefixes
from unlearnlib.baselines.editors import (
    DEVIATIONS,
    EDITORS,
    NOT_ESTABLISHED,
    PAPER_LAYERS,
    SETTINGS,
    AlphaEditSettings,
    MemitSettings,
    RomeSettings,
    ZeroUnlearnSettings,
    alpha_edit,
    key_moments,
    memit,
    rome,
    value_accuracy,
    zero_unlearn,
)
from unlearnlib.examples import Example, batches, encode
from unlearnlib.grom import Edit, MatrixEdit
from unlearnlib.grom.anatomy import Anatomy, weight_view
from unlearnlib.metrics import answer_logits, answer_probability

TOWNS = {"Ana": "Oslo", "Bo": "Lima", "Cleo": "Rome", "Dov Marlowe": "Kyiv", "Eve": "Bonn", "Fay": "Cairo"}
FACTS = [
    {"prompt": f"Where was {name} born?", "subject": name, "answer": town, "target": "Paris"} for name, town in list(TOWNS.items())[:3]
]
OTHERS = [{"question": f"Where was {name} born?", "answer": town} for name, town in list(TOWNS.items())[3:]]
TEXTS = [f"{name} came from {town} to write a book about the sea and the sky." for name, town in TOWNS.items()]
# RMS norms compute in float32 even in a float64 model.
NORM_ROUNDING = 2e-6
SHORT = {"v_steps": 3, "prefix_lengths": (3, 2)}
# Not the last one: what is written there at the subject reaches no other position.
LAYERS = {"rome": (1,), "memit": (1, 2), "alpha_edit": (1, 2), "zero_unlearn": (1, 2)}


def settings_of(name, **changes):
    # The papers' weights and thresholds are for keys that these models don't have.
    small = {"memit": {"mom2_weight": 1.0}, "alpha_edit": {"threshold": 1e-9, "l2": 0.1}, "zero_unlearn": {"general_weight": 1.0}}
    return SETTINGS[name](**({"layers": LAYERS[name]} | SHORT | small.get(name, {}) | changes))


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer([*TEXTS, *(fact["prompt"] for fact in FACTS), "Paris"])


@pytest.fixture(scope="module")
def small(small_model, tokenizer):
    """Make a float64 model of a family whose layers matter."""
    return lambda family="llama", **options: small_model(family, vocab_size=len(tokenizer), **options)


@pytest.fixture(scope="module")
def memorised(tokenizer):
    """A model that knows the towns by heart; never changed."""
    model = models.build(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, layers=3, seed=3)
    items = [{"question": fact["prompt"], "answer": fact["answer"]} for fact in FACTS]
    training.train(model, encode(tokenizer, items + OTHERS), steps=80, lr=2e-2, batch_size=6)
    assert answer_probability(model, encode(tokenizer, items + OTHERS)).min() > 0.9
    return model


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a, b, tolerance=1e-9):
    assert a.shape == b.shape
    return (a - b).norm() <= tolerance * max(b.norm().item(), 1.0)


def outputs(model, layer, keys):
    module = Anatomy(model).mlp_output(layer)
    return keys @ weight_view(module).double().T + (0 if module.bias is None else module.bias.detach().double())


# The closed forms


@examples(max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 9))
def test_rome_is_the_smallest_change_that_gives_a_key_its_value(seed, n):
    key, change, other = draw(1, n, seed=seed), draw(3, 1, seed=seed + 1), draw(3, n, seed=seed + 2)
    moment = (lambda keys: keys.T @ keys / len(keys))(draw(2 * n, n, seed=seed + 3))
    for inverse, metric in ((None, torch.eye(n, dtype=torch.float64)), (torch.linalg.inv(moment), moment)):
        edit = change @ rome_directions(key, inverse)
        assert close(edit @ key.T, change)
        # Any other change with the same effect on the key: that of the key's complement is added.
        rival = edit + other - (other @ key.T) @ key / key.square().sum()
        assert close(rival @ key.T, change, 1e-8)
        cost = [(part @ metric @ part.T).trace().item() for part in (edit, rival)]
        assert cost[0] <= cost[1] * (1 + 1e-9)


@examples(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(1e-3, 1e3))
def test_memit_solves_its_normal_equations(seed, facts, weight):
    n = 6
    keys, change = draw(facts, n, seed=seed), draw(3, facts, seed=seed + 1)
    moment = (lambda keys: keys.T @ keys / len(keys))(draw(20, n, seed=seed + 2))
    edit = change @ memit_directions(keys, moment, weight)
    # The gradient of weight · tr(Δ C Δᵀ) + ‖Δ K − R‖².
    gradient = weight * edit @ moment + (edit @ keys.T - change) @ keys
    assert gradient.norm() <= 1e-9 * (1 + weight) * (1 + change.norm() * keys.norm())


@examples(max_examples=25)
@given(st.integers(0, 10**6))
def test_memit_of_one_fact_without_covariance_is_rome(seed):
    key = draw(1, 7, seed=seed)
    rank_one = key / key.square().sum()
    assert close(memit_directions(key), rank_one)
    assert close(memit_directions(key), rome_directions(key))
    moment = (lambda keys: keys.T @ keys / len(keys))(draw(30, 7, seed=seed + 1))
    nearly = memit_directions(key, moment, 1e-7)
    assert close(nearly, rome_directions(key, torch.linalg.inv(moment)), 1e-5), "and with a vanishing one that of its metric"


def test_memit_without_covariance_gives_every_key_its_output():
    keys, change = draw(4, 9, seed=5), draw(3, 4, seed=6)
    assert close(change @ memit_directions(keys) @ keys.T, change)


@examples(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 4), st.floats(1e-2, 1e2))
def test_alpha_edit_is_its_formula_and_leaves_other_keys(seed, facts, before, l2):
    n = 8
    general = draw(5, n, seed=seed)
    moment = general.T @ general / len(general)
    basis = null_space(moment, 1e-9)
    assert basis.shape == (n, 3)
    keys, change = draw(facts, n, seed=seed + 1), draw(3, facts, seed=seed + 2)
    earlier = draw(before, n, seed=seed + 3) if before else None
    past = earlier if before else keys[:0]
    edit = change @ alpha_directions(keys, basis, l2, earlier)
    project = basis @ basis.T
    system = past.T @ past @ project + keys.T @ keys @ project + l2 * torch.eye(n, dtype=torch.float64)
    assert close(edit, change @ keys @ project @ torch.linalg.inv(system), 1e-8)
    assert (edit @ general.T).norm() < 1e-8
    everywhere = change @ alpha_directions(keys, None, l2)
    assert close(everywhere, change @ keys @ torch.linalg.inv(keys.T @ keys + l2 * torch.eye(n, dtype=torch.float64)), 1e-8)


def test_a_null_space_must_exist():
    with pytest.raises(ValueError, match=r"below the threshold 0.02: they go from 1\.00e\+00 to 1\.00e\+00"):
        null_space(torch.eye(4, dtype=torch.float64), 2e-2)


def zero_unlearn_case(seed, facts=2):
    m, n = 5, 8
    weight, keys, residual, true = (draw(*shape, seed=seed + i) for i, shape in enumerate([(m, n), (facts, n), (facts, m), (facts, m)]))
    moment = (lambda keys: keys.T @ keys / len(keys))(draw(20, n, seed=seed + 9))
    options = {"general_weight": 3.0, "forget_weight": 2.0, "regularization": 0.5}
    left, right = zero_unlearn_factors(weight, keys, residual, true, moment, **options)
    return weight, keys, residual, true, moment, left @ right


@examples(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_zero_unlearn_is_its_formula(seed, facts):
    weight, keys, residual, true, moment, edit = zero_unlearn_case(seed, facts)
    k = keys.T
    kk = 3.0 * moment + 2.0 * k @ k.T
    vk = 3.0 * weight @ moment + 2.0 * (weight @ k + residual.T) @ k.T
    basis = torch.linalg.qr(true.T).Q
    project = torch.eye(5, dtype=torch.float64) - basis @ basis.T
    inner = weight @ (kk + 0.5 * torch.eye(8, dtype=torch.float64)) @ weight.T
    gain = project @ (vk + 0.5 * weight) @ weight.T @ torch.linalg.inv(inner)
    assert close(weight + edit, gain @ weight, 1e-8)
    assert (true @ (weight + edit)).norm() < 1e-8, "nothing is written along the true answers' outputs"


@examples(max_examples=25)
@given(st.integers(0, 10**6))
def test_zero_unlearn_is_the_constrained_minimiser(seed):
    weight, keys, residual, true, moment, edit = zero_unlearn_case(seed)

    def objective(edit):
        general = 3.0 * (edit @ moment @ edit.T).trace()
        return (general + 2.0 * (edit @ keys.T - residual.T).square().sum() + 0.5 * edit.square().sum()).item()

    basis = torch.linalg.qr(true.T).Q
    best = objective(edit)
    for i in range(4):
        step = draw(5, 5, seed=seed + 20 + i)
        step -= basis @ (basis.T @ step)
        assert objective(edit + 0.1 * step @ weight) >= best * (1 - 1e-9)


def test_zero_unlearn_warns_where_nothing_is_left():
    with pytest.warns(UserWarning, match="all 5 output directions"):
        weight, *_, edit = zero_unlearn_case(3, facts=6)
    assert (weight + edit).norm() < 1e-9


def test_a_singular_system_is_an_error():
    keys = torch.zeros(1, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"λ C \+ K Kᵀ is singular: raise the ridge"):
        memit_directions(keys, torch.zeros(4, 4, dtype=torch.float64))


# Where a subject ends, and what stands before and after it


@pytest.mark.parametrize("options", [{}, {"bos": True}, {"chat": True}, {"chat": True, "bos": True}])
@pytest.mark.parametrize(
    ("prompt", "subject", "ending"),
    [
        ("Where was Dov Marlowe born?", "Dov Marlowe", "Marlowe"),
        ("I and the Ivory coast: where do I live?", "I", "I"),
        ("What is Łódź?", "Łódź", "Łódź"),
        ("Oslo", "Oslo", "Oslo"),
    ],
)
def test_the_lookup_is_the_subjects_last_token(make_tokenizer, options, prompt, subject, ending):
    tokenizer = make_tokenizer(**options)
    item = {"question": prompt, "answer": "yes"}
    assert locate(tokenizer, "", prompt, subject, "auto").ids == encode(tokenizer, [item])[0].prompt
    for prefix in ("", "The sea is blue. "):
        found = locate(tokenizer, prefix, prompt, subject, "auto")
        until = tokenizer.decode(found.ids[: found.lookup + 1])
        assert until.rstrip("?").endswith(ending) and prefix.strip() in until
        before = tokenizer.decode(found.ids[: found.lookup])
        assert not before.endswith(ending)
    if subject == "I":
        assert "live" not in until and "where do I" in until, "as a word, where it is mentioned last"


def test_objects_are_encoded_as_answers_are(make_tokenizer):
    for options in ({}, {"chat": True}, {"bos": True}):
        tokenizer = make_tokenizer(**options)
        settings = MemitSettings((1,))
        fact = FACTS[0] | {"target": "grey hills"}
        (example,) = encode(tokenizer, [{"question": fact["prompt"], "answer": fact["target"]}])
        assert encode_fact(tokenizer, fact, ("",), settings, False).target == example.answer[:-1]
        for neutral in (None, tokenizer.eos_token):
            assert encode_fact(tokenizer, fact | {"target": neutral}, ("",), settings, False).target == (tokenizer.eos_token_id,)
    with pytest.raises(ValueError, match="no end-of-text token"):
        encode_fact(make_tokenizer(end=False), FACTS[0] | {"target": None}, ("",), settings, False)


def test_prefixes_are_seeded_and_of_their_lengths(small, tokenizer):
    model = small(dtype=torch.float32)
    before = torch.random.get_rng_state()
    settings = MemitSettings((1,), prefix_lengths=(4, 2, 1))
    texts = make_prefixes(model, tokenizer, settings)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert texts == make_prefixes(model, tokenizer, settings) != make_prefixes(model, tokenizer, replace(settings, seed=1))
    assert [text.split()[0][:3] for text in texts] == ["The", "The", "Bec"] and all(text.endswith(". ") for text in texts)
    assert make_prefixes(model, tokenizer, replace(settings, prefix_lengths=())) == []


# Keys, moments and values


def plain(model, module, ids, position, what):
    """What a hook on a module sees at a position, or at a slice of them."""
    seen = []
    hook = module.register_forward_hook(lambda _module, inputs, output: seen.append(inputs[0] if what == "input" else output))
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    hook.remove()
    found = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    return found[0, position].double()


def test_keys_and_activations_are_what_plain_hooks_see(family, small, tokenizer):
    model = small(family)
    settings = settings_of("memit")
    anatomy = Anatomy(model)
    with Editing(model, tokenizer, FACTS, settings, MemitSettings, None) as editing:
        keys, hidden = editing.keys(editing.facts, 1), editing.hidden(editing.facts, 2)
        for i, fact in enumerate(editing.facts):
            assert len(fact.contexts) == 3
            expected = [plain(model, anatomy.mlp_output(1), prompt.ids, prompt.lookup, "input") for prompt in fact.contexts]
            assert close(keys[i], torch.stack(expected).mean(0), NORM_ROUNDING)
            bare = fact.contexts[0]
            assert close(hidden[i], plain(model, anatomy.layers[2], bare.ids, bare.lookup, "output"), NORM_ROUNDING)
            output = plain(model, anatomy.mlp_output(1), bare.ids, bare.lookup, "output")
            assert close(editing.outputs(1, expected[0][None])[0], output, NORM_ROUNDING), "its bias included"


def test_moments_are_those_of_plain_keys(family, small, tokenizer):
    model = small(family)
    moments = key_moments(model, tokenizer, [*TEXTS, "a"], (0, 2), length=7, batch_size=3)
    module = Anatomy(model).mlp_output(2)
    keys = []
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        windows = [ids[start : start + 7] for start in range(0, len(ids), 7)]
        keys += [plain(model, module, window, slice(len(window) - 1), "input") for window in windows]
    keys = torch.cat(keys)
    assert close(moments[2], keys.T @ keys / len(keys), NORM_ROUNDING) and moments[2].dtype == torch.float64
    assert set(moments) == {0, 2} and not close(moments[0], moments[2], 1e-2)
    with pytest.raises(ValueError, match="no text of two tokens"):
        key_moments(model, tokenizer, ["a"], (0,))


def test_values_say_the_target_and_do_not_depend_on_the_batch(family, small, tokenizer):
    model = small(family)
    settings = settings_of("memit", layers=(2,), v_lr=0.01, v_steps=4, v_decay=0.0)
    with Editing(model, tokenizer, FACTS, settings, MemitSettings, None) as editing:
        start, values = editing.hidden(editing.facts, 2), editing.values(editing.facts, 2, "layer")
        editing.settings = replace(settings, batch_size=1)
        assert close(editing.values(editing.facts, 2, "layer"), values, 1e-4)
        facts = editing.facts
    moved = (values - start).norm(dim=1)
    assert (moved > 0).all() and (moved <= 0.75 * start.norm(dim=1) * (1 + 1e-9)).all()

    def said(change):
        """Mean log-probability of the targets behind all contexts, a fact's activations changed wherever it is looked up."""
        scores = []
        for fact, shift in zip(facts, change, strict=True):
            for prompt in fact.contexts:

                def put(_module, _inputs, output, at=prompt.lookup, shift=shift):
                    state = (output[0] if isinstance(output, tuple) else output).clone()
                    state[0, at] += shift
                    return (state, *output[1:]) if isinstance(output, tuple) else state

                (batch,) = batches([Example(prompt.ids, fact.target)])
                hook = Anatomy(model).layers[2].register_forward_hook(put)
                with torch.no_grad():
                    scores.append(answer_logits(model, batch).log_softmax(-1).gather(1, batch.gold[:, None]).mean())
                hook.remove()
        return torch.stack(scores).view(len(facts), -1).mean(1)

    assert (said(values - start) > said(torch.zeros_like(start))).all()


def test_what_the_values_say(family, small, tokenizer):
    """Against plain hooks: the model's own word, and what it says where the activations are the values."""
    model = small(family)
    settings = settings_of("memit", layers=(1,), v_lr=0.3, v_steps=40, v_decay=0.0, kl_factor=0.0, clamp=1e6, prefix_lengths=())
    with Editing(model, tokenizer, FACTS, settings, MemitSettings, None) as editing:
        shifts = editing.values(editing.facts, 1, "layer") - editing.hidden(editing.facts, 1)
        facts = editing.facts

    def said(change):
        found = []
        for fact, shift in zip(facts, change, strict=True):
            (prompt,) = fact.contexts

            def put(_module, _inputs, output, at=prompt.lookup, shift=shift):
                state = (output[0] if isinstance(output, tuple) else output).clone()
                state[0, at] += shift
                return (state, *output[1:]) if isinstance(output, tuple) else state

            (batch,) = batches([Example(prompt.ids, fact.target)])
            hook = Anatomy(model).layers[1].register_forward_hook(put)
            with torch.no_grad():
                found.append((answer_logits(model, batch).argmax(-1) == batch.gold).double().mean())
            hook.remove()
        return torch.stack(found)

    changed = {}
    for batch_size in (1, 16):
        sized = replace(settings, batch_size=batch_size)
        before, changed[batch_size] = (value_accuracy(model, tokenizer, FACTS, sized, sought=sought) for sought in (False, True))
        assert torch.equal(before, said(torch.zeros_like(shifts)))
    assert torch.equal(changed[16], said(shifts))


def test_a_free_value_says_what_it_should_where_the_model_reads_it(memorised, tokenizer):
    facts = [fact | {"target": "Kyiv"} for fact in FACTS]
    settings = settings_of("memit", layers=(0,), v_lr=0.1, v_steps=40, v_decay=0.0, kl_factor=0.0, clamp=1e6, prefix_lengths=())
    options = [{"sought": False}, {}, {"module": memorised.get_input_embeddings()}]
    before, after, embeddings = (value_accuracy(memorised, tokenizer, facts, settings, **option).mean() for option in options)
    assert before < embeddings and after <= embeddings, "a small model reads the subject itself, before any layer has written there"


def test_bfloat16_changes_the_search_alone(small, tokenizer):
    model = small("llama", dtype=torch.float32)
    plain_settings = settings_of("memit", layers=(2,), v_lr=0.05, v_steps=5)
    found = {}
    for autocast in (False, True):
        settings = replace(plain_settings, autocast=autocast)
        with Editing(model, tokenizer, FACTS, settings, MemitSettings, None) as editing:
            found[autocast] = [
                part(editing)
                for part in (lambda e: e.keys(e.facts, 2), lambda e: e.hidden(e.facts, 2), lambda e: e.values(e.facts, 2, "layer"))
            ]
            (search,) = editing.searches(editing.facts, editing.anatomy.layers[2])
            assert close(search.start.double(), found[autocast][1], 1e-5), "v₀ is that of the weights' type"
    (keys, hidden, values), (other_keys, other_hidden, other_values) = found[False], found[True]
    assert torch.equal(keys, other_keys) and torch.equal(hidden, other_hidden)
    assert not torch.equal(values, other_values)
    assert (values - other_values).norm() < 0.3 * (values - hidden).norm()


def test_the_clamp_and_the_penalties_bind(small, tokenizer):
    model = small()
    with Editing(model, tokenizer, FACTS, settings_of("memit"), MemitSettings, None) as editing:
        start = editing.hidden(editing.facts, 2)

        def moved(**changes):
            editing.settings = settings_of("memit", **changes)
            return ((editing.values(editing.facts, 2, "layer") - start).norm(dim=1) / start.norm(dim=1)).max().item()

        assert moved(clamp=0.01, v_lr=1.0) == pytest.approx(0.01, rel=1e-6)
        free = {"clamp": 100.0, "v_lr": 0.01, "v_steps": 5}
        assert moved(**free, v_decay=1e9) < moved(**free, v_decay=0.0)
        assert moved(v_steps=0) == pytest.approx(0, abs=1e-12)
        assert moved(**free, kl_factor=0.0) != moved(**free, kl_factor=10.0)


# Whole edits


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, name) for kind in ("llama", "gpt2") for name in EDITORS), ("qwen2", "memit"), ("gpt_neox", "zero_unlearn")]
)
def test_an_edit_is_of_its_layers_only_and_comes_out_to_the_bit(kind, small, tokenizer, snapshot, name):
    model = small(kind, dtype=torch.float32)
    before = snapshot(model)
    moments = None if name == "alpha_edit" else key_moments(model, tokenizer, TEXTS, LAYERS[name])
    edit = EDITORS[name](model, tokenizer, FACTS, settings_of(name), moments=moments)
    assert snapshot(model) == before
    names = [Anatomy(model).name(Anatomy(model).mlp_output(layer)) for layer in LAYERS[name]]
    assert isinstance(edit, Edit) and [matrix.module for matrix in edit.matrices] == names
    assert all(matrix.rank <= len(FACTS) * (2 if name == "zero_unlearn" else 1) and matrix.norm() > 0 for matrix in edit.matrices)
    assert edit.settings["editor"] == name and edit.settings["layers"] == list(LAYERS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = edit.apply(model)
    after = snapshot(model)
    assert {key for key in before if before[key] != after[key]} == {f"{module}.weight" for module in names}
    handle.revert()
    assert snapshot(model) == before


@pytest.mark.parametrize(("kind", "per_round"), [("llama", 1), ("llama", 3), ("qwen2", 1), ("gpt2", 1), ("gpt_neox", 1)])
def test_rome_moves_each_key_to_its_value(kind, small, tokenizer, monkeypatch, per_round):
    model = small(kind)
    moments = key_moments(model, tokenizer, TEXTS, (1,))
    values, seen = [], []
    own_values, own_add = Editing.values, Editing.add

    def watched_values(self, facts, layer, site):
        found = own_values(self, facts, layer, site)
        values.extend(found)
        return found

    def watched_add(self, layer, left, right):
        fact = self.facts[len(seen)]
        own_add(self, layer, left, right)
        key = self.keys([fact], layer)
        seen.append((key, self.outputs(layer, key)[0]))

    monkeypatch.setattr(Editing, "values", watched_values)
    monkeypatch.setattr(Editing, "add", watched_add)
    settings = settings_of("rome", v_steps=2, per_round=per_round)
    edit = rome(model, tokenizer, FACTS, settings, moments=moments)
    assert len(seen) == len(values) == len(FACTS)
    for (_, output), value in zip(seen, values, strict=True):
        assert close(output, value, 1e-6)
    with edit.applied(model):
        assert close(outputs(model, 1, seen[-1][0])[0], values[-1], 1e-6), "the last one's is not overwritten"


def test_memit_of_one_fact_and_layer_without_covariance_is_the_rank_one_solution(family, small, tokenizer):
    model = small(family)
    settings = settings_of("memit", layers=(2,))
    with Editing(model, tokenizer, FACTS[:1], settings, MemitSettings, None) as editing:
        facts = editing.facts
        key, missing = editing.keys(facts, 2), editing.share(facts, editing.values(facts, 2, "layer"), 2)
    (matrix,) = memit(model, tokenizer, FACTS[:1], settings).matrices
    assert close(matrix.dense(), missing.T @ key / key.square().sum(), NORM_ROUNDING)
    before = outputs(model, 2, key)
    with Edit((matrix,)).applied(model):
        assert close(outputs(model, 2, key), before + missing, NORM_ROUNDING)


def test_memit_spreads_what_is_missing(small, tokenizer):
    """Without covariance the last layer makes up for all that the others left: the hidden states arrive at their values."""
    model = small("llama")
    settings = settings_of("memit", prefix_lengths=())
    with Editing(model, tokenizer, FACTS, settings, MemitSettings, None) as editing:
        values, start = editing.values(editing.facts, 2, "layer"), editing.hidden(editing.facts, 2)
        edit = memit(model, tokenizer, FACTS, settings)
        with edit.applied(model):
            arrived = editing.hidden(editing.facts, 2)
        assert close(arrived, values, 1e-4) and not close(start, values, 1e-2)
        with Edit(edit.matrices[:1]).applied(model):
            half = editing.hidden(editing.facts, 2)
        assert not close(half, start, 1e-2) and not close(half, values, 1e-2)


def test_alpha_edit_leaves_the_outputs_of_general_keys(family, small, tokenizer):
    model = small(family)
    moments = key_moments(model, tokenizer, TEXTS[:1], (1, 2))
    ids = tokenizer(TEXTS[0]).input_ids
    module = Anatomy(model).mlp_output(1)
    keys = plain(model, module, ids, slice(len(ids) - 1), "input")
    assert len(keys) < keys.shape[1], "or there would be no null space"
    edit = alpha_edit(model, tokenizer, FACTS, settings_of("alpha_edit", threshold=1e-7), moments=moments)
    before = outputs(model, 1, keys)
    subject = next(iter(_subject_keys(model, tokenizer)))
    moved = outputs(model, 1, subject)
    with edit.applied(model):
        assert (outputs(model, 1, keys) - before).abs().max() < 1e-8
        assert (outputs(model, 1, subject) - moved).abs().max() > 1e-4


def _subject_keys(model, tokenizer):
    with Editing(model, tokenizer, FACTS, settings_of("memit"), MemitSettings, None) as editing:
        yield editing.keys(editing.facts, 1)


def test_alpha_edit_in_rounds_protects_the_rounds_before(small, tokenizer):
    model = small()
    settings = settings_of("alpha_edit", layers=(1,), per_round=2, l2=1e-6, prefix_lengths=())
    keys = next(_subject_keys(model, tokenizer))
    edit = alpha_edit(model, tokenizer, FACTS, settings)
    first = alpha_edit(model, tokenizer, FACTS[:2], settings)
    with Editing(model, tokenizer, FACTS, settings, AlphaEditSettings, None) as editing:
        keys = editing.keys(editing.facts, 1)
    with first.applied(model):
        wanted = outputs(model, 1, keys[:2])
    with edit.applied(model):
        kept = outputs(model, 1, keys[:2])
    # A third edit that knows nothing of the first two: what it would have done to their keys.
    with first.applied(model):
        third = alpha_edit(model, tokenizer, FACTS[2:], settings)
        with third.applied(model):
            careless = outputs(model, 1, keys[:2])
    assert (kept - wanted).norm() < 1e-3 * (careless - wanted).norm()


def test_many_facts_make_a_whole_matrix(small, tokenizer):
    model = small()
    facts = [fact | {"subject": subject} for fact in FACTS for subject in ("Where", "was", "born", fact["subject"])] * 3
    settings = settings_of("memit", layers=(1,), v_steps=1, prefix_lengths=())
    moments = key_moments(model, tokenizer, TEXTS, (1,))
    (matrix,) = memit(model, tokenizer, facts, settings, moments=moments).matrices
    assert isinstance(matrix, MatrixEdit) and matrix.left is None and matrix.rows.tolist() == list(range(32))
    (one,) = memit(model, tokenizer, facts[:12], settings, moments=moments).matrices
    assert one.left is not None


@pytest.mark.parametrize("name", EDITORS)
def test_editors_unlearn_a_small_model(memorised, tokenizer, name):
    """With the neutral target the answer goes, and the others stay more than it does."""
    facts = [FACTS[0] | {"target": None}]
    changes = {"layers": (0,) if name == "rome" else (0, 1), "v_lr": 0.5, "v_steps": 20, "clamp": 4.0, "prefix_lengths": ()}
    changes |= {"memit": {"mom2_weight": 0.01}, "zero_unlearn": {"general_weight": 0.1}, "alpha_edit": {"threshold": 1e-3}}.get(name, {})
    moments = key_moments(memorised, tokenizer, TEXTS, (0, 1))
    edit = EDITORS[name](memorised, tokenizer, facts, settings_of(name, **changes), moments=moments)
    forget = encode(tokenizer, [{"question": facts[0]["prompt"], "answer": facts[0]["answer"]}])
    others = encode(tokenizer, OTHERS)
    with edit.applied(memorised):
        after = answer_probability(memorised, forget).item()
        assert after < 0.5 and answer_probability(memorised, others).mean() > after + 0.25
    assert answer_probability(memorised, forget) > 0.9


def test_edits_are_reproducible_and_follow_the_seed(small, tokenizer):
    model = small()
    first, again, other = (memit(model, tokenizer, FACTS, settings_of("memit", seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first.matrices[0].dense(), again.matrices[0].dense())
    assert not torch.equal(first.matrices[0].dense(), other.matrices[0].dense())


def test_a_failing_edit_leaves_the_model_as_it_was(small, tokenizer, snapshot, monkeypatch):
    model = small(dtype=torch.float32)
    before = snapshot(model)
    with monkeypatch.context() as patch:
        patch.setattr(Editing, "edit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            memit(model, tokenizer, FACTS, settings_of("memit"))
    assert snapshot(model) == before
    with pytest.raises(FloatingPointError, match="diverged"):
        memit(model, tokenizer, FACTS, settings_of("memit", v_lr=1e30, clamp=1e300))
    assert snapshot(model) == before


def test_a_chat_model_is_edited_in_its_template(small_model, make_tokenizer):
    tokenizer = make_tokenizer(chat=True)
    model = small_model("llama", vocab_size=len(tokenizer))
    plain_edit, chat_edit = (memit(model, tokenizer, FACTS, settings_of("memit", template=how)) for how in ("plain", "auto"))
    assert not close(plain_edit.matrices[0].dense(), chat_edit.matrices[0].dense(), 1e-2)


# The calls and their settings


def test_all_editors_have_one_call_and_their_own_settings():
    assert set(EDITORS) == set(SETTINGS) == set(PAPER_LAYERS)
    shapes = {tuple(inspect.signature(editor).parameters) for editor in EDITORS.values()}
    assert shapes == {("model", "tokenizer", "facts", "settings", "moments", "progress")}
    assert (RomeSettings((17,)).v_lr, RomeSettings((17,)).v_steps, RomeSettings((17,)).clamp) == (0.5, 20, 4.0)
    assert (MemitSettings((3,)).mom2_weight, MemitSettings((3,)).v_lr, MemitSettings((3,)).clamp) == (15000, 0.5, 0.75)
    alpha = AlphaEditSettings((4,))
    assert (alpha.threshold, alpha.l2, alpha.v_lr, alpha.v_steps, alpha.kl_factor) == (2e-2, 10, 0.1, 25, 0.0625)
    zero = ZeroUnlearnSettings((16,))
    assert (zero.general_weight, zero.forget_weight, zero.regularization) == (15000, 50, 1)
    assert all(len(row) == 3 and all(row) for row in DEVIATIONS) and all(NOT_ESTABLISHED.values())
    assert set(NOT_ESTABLISHED) & set(EDITORS) == {"zero_unlearn"}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("memit", {"layers": ()}, "layers is empty"),
        ("memit", {"v_steps": -1}, "v_steps must be at least 0, got -1"),
        ("memit", {"per_round": 0}, "per_round must be at least 1"),
        ("memit", {"batch_size": 0}, "batch_size must be at least 1"),
        ("memit", {"v_lr": 0.0}, "v_lr must be a finite number > 0"),
        ("memit", {"clamp": float("nan")}, "clamp must be a finite number > 0"),
        ("memit", {"v_decay": -1.0}, "v_decay must be a finite number ≥ 0"),
        ("memit", {"kl_factor": float("inf")}, "kl_factor must be a finite number ≥ 0"),
        ("memit", {"prefix_lengths": (5, 0)}, "prefix_lengths must be positive"),
        ("memit", {"template": "gold"}, "template must be auto, chat or plain"),
        ("memit", {"mom2_weight": 0.0}, "mom2_weight must be a finite number > 0"),
        ("memit", {"ridge": -1e-3}, "ridge must be a finite number ≥ 0"),
        ("rome", {"layers": (1, 2)}, "ROME edits one layer"),
        ("alpha_edit", {"l2": 0.0}, "l2 must be a finite number > 0"),
        ("alpha_edit", {"threshold": 0.0}, "threshold must be"),
        ("zero_unlearn", {"regularization": 0.0}, "regularization must be"),
        ("zero_unlearn", {"general_weight": -1.0}, "general_weight must be"),
    ],
)
def test_settings_out_of_range(name, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        settings_of(name, **changes)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ([], "there are no facts"),
        ([FACTS[0], {"prompt": "x"}], "facts[1]: field 'subject' is missing"),
        ([FACTS[0] | {"target": " "}], "facts[0]: field 'target' is missing, empty or not text"),
        ([{key: FACTS[0][key] for key in ("prompt", "subject")}], "field 'target' is missing"),
        ([FACTS[0] | {"subject": "Zoe"}], "facts[0]: the subject 'Zoe' isn't in the prompt"),
        ([FACTS[0] | {"prompt": "Ana, and " * 60}], "tokens with its prefix, but the model's context has 128"),
    ],
)
def test_facts_that_do_not_fit(small, tokenizer, snapshot, facts, message):
    model = small()
    before = snapshot(model)
    with pytest.raises(ValueError, match=re.escape(message)):
        memit(model, tokenizer, facts, settings_of("memit"))
    assert snapshot(model) == before


def test_calls_that_do_not_fit(small, tokenizer):
    model = small()
    with pytest.raises(ValueError, match="expected MemitSettings, got RomeSettings"):
        memit(model, tokenizer, FACTS, settings_of("rome"))
    without = [{key: value for key, value in FACTS[0].items() if key != "answer"}]
    with pytest.raises(ValueError, match="field 'answer' is missing"):
        zero_unlearn(model, tokenizer, without, settings_of("zero_unlearn"))
    good = key_moments(model, tokenizer, TEXTS, (1, 2))
    for moments, message in (
        ({1: good[1]}, "moments has no layer 2"),
        (good | {2: good[2][:4]}, r"moments\[2\] must have shape \(48, 48\), got \(4, 48\)"),
        (good | {2: good[2] * float("nan")}, r"moments\[2\] has NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            memit(model, tokenizer, FACTS, settings_of("memit"), moments=moments)
    with pytest.raises(IndexError, match="unknown layer 4"):
        memit(model, tokenizer, FACTS, settings_of("memit", layers=(3, 4)))
    with pytest.raises(ValueError, match=r"last layer, 3, at the subject reaches no other position: 'Where was Ana born\?'"):
        memit(model, tokenizer, FACTS, settings_of("memit", layers=(2, 3)))
    at_end = [{"prompt": "The sea came to Ana", "subject": "Ana", "target": "Paris"}]
    assert memit(model, tokenizer, at_end, settings_of("memit", layers=(3,))).norm() > 0
    with pytest.raises(ValueError, match="contiguous"):
        memit(model, tokenizer, FACTS, settings_of("memit", layers=(0, 2)))
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        memit(model, tokenizer, FACTS, settings_of("memit"))
    model.eval()
