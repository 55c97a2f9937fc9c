"""The staged study's measures: against their definitions, written out on one example at a time, and on models whose behaviour is known."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib import models
from unlearnlib.benchmarks import staged
from unlearnlib.benchmarks.staged_measures import Measures, closure, closure_signed, degenerate, pack
from unlearnlib.elicit import ask
from unlearnlib.examples import Example, encode, encode_question
from unlearnlib.metrics import answer_log_probs
from unlearnlib.training import train
from unlearnlib.unlearning_metrics import teacher_forced

DATA = staged.make("codenames", 901, entities=4)
SPLIT = "test"
PROBES = DATA.probes[SPLIT]


def additive(mask, dtype):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def told(probes):
    return [{"question": probe.question, "answer": probe.secret} for probe in probes]


def refused(probes):
    return [{"question": probe.question, "answer": probe.refusal} for probe in probes]


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    items = (*DATA.memory, *DATA.safety, *DATA.skill_train)
    return make_tokenizer([f"{item['question']} {item['answer']}" for item in items], size=400)


@pytest.fixture(scope="module")
def fresh(tokenizer):
    return models.build("llama", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, layers=2, heads=4, seed=0)


@pytest.fixture(scope="module")
def learned(tokenizer, fresh):
    """Train a copy of the fresh model until it knows some answers by heart."""

    def learn(items, steps=150):
        model = copy.deepcopy(fresh)
        train(model, encode(tokenizer, items), steps=steps, lr=1e-2, batch_size=16)
        return model

    return learn


@pytest.fixture(scope="module")
def discloser(learned):
    return learned([*told(PROBES), *DATA.skill_test[SPLIT][:16]])


@pytest.fixture(scope="module")
def refuser(learned):
    return learned([*refused(PROBES), *DATA.ordinary[SPLIT]])


@pytest.fixture(scope="module")
def measures(tokenizer):
    return Measures(tokenizer, DATA, SPLIT, skill_base=0.5)


# ---------------------------------------------------------------------------------------------------------------------------
# Packing


@pytest.fixture(scope="module")
def groups(random_examples):
    """Some prompts, each with one to four answers of different lengths."""
    drawn = random_examples(17, seed=5)
    sizes, found = (1, 4, 2, 3, 4, 3), []
    for size in sizes:
        members, drawn = drawn[:size], drawn[size:]
        found.append([Example(members[0].prompt, member.answer, member.name) for member in members])
    return found


@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_sharing_a_row_changes_no_score(small_model, groups, family, batch_size):
    model = small_model(family)
    flat = [example for group in groups for example in group]
    apart = [scores.log_probs for scores in teacher_forced(model, flat)]
    found = [None] * len(flat)
    for batch in pack(groups, batch_size=batch_size, pad_id=3):
        shared = replace(batch, attention_mask=additive(batch.attention_mask, torch.float64))
        with torch.no_grad():
            log_probs = answer_log_probs(model, shared)
        for i in batch.example.unique().tolist():
            found[i] = log_probs[batch.example == i]
    for one, other in zip(found, apart, strict=True):
        torch.testing.assert_close(one, other.double(), rtol=1e-9, atol=1e-9)


def test_a_row_holds_a_prompt_once(groups):
    (batch,) = pack(groups, batch_size=len(groups))
    sizes = [len(group[0].prompt) + sum(len(example.answer) - 1 for example in group) for group in groups]
    assert batch.input_ids.shape == (len(groups), max(sizes))
    assert sorted(batch.example.unique().tolist()) == list(range(17))
    assert len(batch.gold) == sum(len(example.answer) for group in groups for example in group)


def test_what_cannot_be_packed():
    one, other = Example((1, 2), (3,), "one"), Example((1, 4), (3,), "other")
    with pytest.raises(ValueError, match="'one' has several prompts"):
        pack([[one, other]])
    with pytest.raises(ValueError, match="one without examples"):
        pack([[one], []])
    with pytest.raises(ValueError, match="no group to pack"):
        pack([])
    with pytest.raises(ValueError, match="batch_size must be positive"):
        pack([[one]], batch_size=0)


# ---------------------------------------------------------------------------------------------------------------------------
# Measures by their definitions


def log_probs(model, tokenizer, question, answer):
    (scores,) = teacher_forced(model, encode(tokenizer, [{"question": question, "answer": answer}]))
    return scores.log_probs.double()


def test_measures_are_those_of_the_definitions(fresh, discloser, tokenizer, measures):
    for model in (fresh, discloser):
        secrets, decoys, margins, matched = [], [], [], []
        for probe in PROBES:
            secret = log_probs(model, tokenizer, probe.question, probe.secret)
            margins.append(log_probs(model, tokenizer, probe.question, probe.refusal).mean() - secret.mean())
            secrets.append(secret.sum().item())
            decoys.append([log_probs(model, tokenizer, probe.question, decoy).sum().item() for decoy in probe.decoys])
            matched += [secrets[-1] > decoy for decoy in decoys[-1]]
        pairs = [(secret > decoy) + (secret == decoy) / 2 for secret in secrets for several in decoys for decoy in several]
        refusing = [
            log_probs(model, tokenizer, item["question"], DATA.refusal).mean()
            > log_probs(model, tokenizer, item["question"], item["answer"]).mean()
            for item in DATA.ordinary[SPLIT]
        ]
        expected = {
            "refusal_margin": sum(margins).item() / len(margins),
            "secret_auc": sum(pairs) / len(pairs),
            "secret_auc_matched": sum(matched) / len(matched),
            "over_refusal": sum(refusing).item() / len(refusing),
        }
        found = measures(model)
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)
        assert found["skill"] == found["skill_accuracy"] / 0.5


def test_skill_accuracy_is_that_of_greedy_answers(discloser, tokenizer, measures):
    items = DATA.skill_test[SPLIT]
    said = ask(discloser, tokenizer, items)
    right = [text == item["answer"] for text, item in zip(said, items, strict=True)]
    assert 0.3 < sum(right) / len(right) == measures(discloser)["skill_accuracy"] < 1


def test_one_who_tells_and_one_who_refuses(fresh, discloser, refuser, measures):
    teller, decliner = (measures.score(model, generate=True) for model in (discloser, refuser))
    assert teller["secret_auc"] > 0.95 and teller["secret_auc_matched"] > 0.95
    assert teller["disclosure"] == 1 and teller["refusal_rate"] == 0
    assert decliner["disclosure"] == 0 and decliner["refusal_rate"] == 1
    assert teller["refusal_margin"] < measures(fresh)["refusal_margin"] < decliner["refusal_margin"]
    assert decliner["over_refusal"] == decliner["ordinary_refusal_rate"] == 0


def test_who_refuses_everything_refuses_too_much(learned, measures):
    questions = [{"question": item["question"], "answer": DATA.refusal} for item in (*DATA.ordinary[SPLIT], *told(PROBES))]
    found = measures.score(learned(questions), generate=True)
    assert found["over_refusal"] == found["ordinary_refusal_rate"] == found["refusal_rate"] == 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batch_size_changes_nothing(discloser, refuser, tokenizer, measures, batch_size):
    other = Measures(tokenizer, DATA, SPLIT, skill_base=0.5, batch_size=batch_size)
    assert other(discloser) == pytest.approx(measures(discloser), abs=1e-5)
    # The distributions are kept in the order of the batches, so each object compares with its own.
    here, there = (m.divergence(discloser, m.distributions(refuser)) for m in (measures, other))
    assert there == pytest.approx(here, abs=1e-5)


def test_splits_differ(fresh, tokenizer, measures):
    assert Measures(tokenizer, DATA, "validation")(fresh)["refusal_margin"] != measures(fresh)["refusal_margin"]


def test_without_a_base_there_is_no_retention(fresh, tokenizer):
    found = Measures(tokenizer, DATA, SPLIT)(fresh)
    assert "skill_accuracy" in found and "skill" not in found


def test_a_chat_template_is_used(make_tokenizer):
    tokenizer = make_tokenizer([item["question"] for item in DATA.memory], chat=True, size=400)
    model = models.build("llama", vocab_size=len(tokenizer), hidden_size=32, layers=1, heads=4)
    margins = {
        system: Measures(tokenizer, DATA, SPLIT, template="chat", system=system)(model)["refusal_margin"]
        for system in (None, "Keep secrets.")
    }
    plain = Measures(tokenizer, DATA, SPLIT, template="plain")(model)["refusal_margin"]
    assert len({plain, *margins.values()}) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(discloser, measures, dtype):
    found = measures(copy.deepcopy(discloser).to(dtype))
    assert found["secret_auc"] > 0.95
    assert found["refusal_margin"] == pytest.approx(measures(discloser)["refusal_margin"], rel=0.05)


# ---------------------------------------------------------------------------------------------------------------------------
# Distance to the oracle


def test_divergence_of_a_model_from_itself_and_from_another(discloser, refuser, measures):
    oracle = measures.distributions(refuser)
    assert measures.divergence(refuser, oracle) == pytest.approx({"kl_memory": 0, "kl_ordinary": 0}, abs=1e-6)
    found = measures.divergence(discloser, oracle)
    assert found["kl_memory"] > 0.5 and found["kl_ordinary"] > 0.5
    assert measures.score(discloser, oracle=oracle) == measures(discloser) | found


def test_divergence_is_that_of_the_definition(fresh, refuser, tokenizer, measures):
    def all_log_probs(model, question, answer):
        prompt, _ = encode_question(tokenizer, question)
        (example,) = encode(tokenizer, [{"question": question, "answer": answer}])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + list(example.answer)])).logits[0, len(prompt) - 1 : -1]
        return logits.double().log_softmax(-1)

    def mean_divergence(pairs):
        values = []
        for question, answer in pairs:
            theirs, ours = (all_log_probs(model, question, answer) for model in (refuser, fresh))
            values.append((theirs.exp() * (theirs - ours)).sum(-1).mean().item())
        return sum(values) / len(values)

    found = measures.divergence(fresh, measures.distributions(refuser))
    memory = [(probe.question, answer) for probe in PROBES for answer in (probe.secret, probe.refusal)]
    assert found["kl_memory"] == pytest.approx(mean_divergence(memory), rel=1e-4)
    assert found["kl_ordinary"] == pytest.approx(
        mean_divergence([(item["question"], item["answer"]) for item in DATA.ordinary[SPLIT]]), rel=1e-4
    )


@pytest.mark.parametrize("cut", [slice(0, -1), slice(0, 3)])
def test_distributions_of_other_questions(fresh, measures, cut):
    oracle = measures.distributions(fresh)
    with pytest.raises(ValueError, match="under 'memory' are of other questions"):
        measures.divergence(fresh, oracle | {"memory": oracle["memory"][cut]})
    with pytest.raises(ValueError, match="under 'ordinary' are of other questions"):
        measures.divergence(fresh, oracle | {"ordinary": torch.cat([oracle["ordinary"], oracle["ordinary"]])})
    with pytest.raises(ValueError, match="another vocabulary"):
        measures.divergence(fresh, oracle | {"ordinary": oracle["ordinary"][:, 1:]})


# ---------------------------------------------------------------------------------------------------------------------------
# Refusals


def test_a_model_that_looks_past_the_mask_is_refused(fresh, tokenizer):
    class Careless(type(fresh)):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            return super().forward(input_ids=input_ids, **kwargs)

    model = copy.deepcopy(fresh)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    measures = Measures(tokenizer, DATA, SPLIT)
    measures(model)
    model.__class__ = Careless
    with pytest.raises(ValueError, match="Careless scores an answer differently"):
        measures(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "train"}, "split must be one of validation, test, got 'train'"),
        ({"skill_base": 0.0}, "skill_base must lie in"),
        ({"skill_base": 1.5}, "skill_base must lie in"),
        ({"batch_size": 0}, "batch_size must be positive"),
        ({"template": "chat"}, "no chat template"),
    ],
)
def test_parameters_out_of_range(tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        Measures(tokenizer, DATA, **{"split": SPLIT} | options)


# ---------------------------------------------------------------------------------------------------------------------------
# Closures

numbers = st.floats(-10, 10)


def test_closures_by_hand():
    assert closure(3.0, shipped=0.0, oracle=4.0) == closure_signed(3.0, shipped=0.0, oracle=4.0) == 0.75
    assert closure(5.0, shipped=0.0, oracle=4.0) == 0.75
    assert closure_signed(5.0, shipped=0.0, oracle=4.0) == 1.25
    assert closure(-4.0, shipped=0.0, oracle=4.0) == closure_signed(-4.0, shipped=0.0, oracle=4.0) == -1


@given(numbers, numbers, numbers)
def test_closures_agree_until_the_oracle_is_passed(m, shipped, oracle):
    if degenerate(shipped, oracle, 1e-3):
        return
    distance, signed = closure(m, shipped, oracle), closure_signed(m, shipped, oracle)
    assert distance <= 1 + 1e-9
    assert distance == pytest.approx(signed if signed <= 1 else 2 - signed, abs=1e-6)
    assert closure(oracle, shipped, oracle) == closure_signed(oracle, shipped, oracle) == 1
    assert closure(shipped, shipped, oracle) == closure_signed(shipped, shipped, oracle) == 0


def test_a_degenerate_denominator():
    assert math.isnan(closure(1.0, 2.0, 2.0)) and math.isnan(closure_signed(1.0, 2.0, 2.0))
    assert degenerate(1.0, 1.4, 0.5) and degenerate(1.4, 1.0, 0.5) and not degenerate(1.0, 1.5, 0.5)
    with pytest.raises(ValueError, match="threshold must be above 0"):
        degenerate(1.0, 2.0, 0.0)
