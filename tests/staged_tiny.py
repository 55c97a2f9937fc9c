"""For the tests of the staged study: trials of a tiny network that nothing has pretrained, which take a second or two."""

from dataclasses import replace

from unlearnlib import models
from unlearnlib.benchmarks import staged, staged_models
from unlearnlib.benchmarks.staged_baselines import Candidates, put
from unlearnlib.benchmarks.staged_trial import Phases, Trial
from unlearnlib.sidecar import SelectionRule, combine, norm, parameters_of

QUICK = Phases(skill_steps=60, skill_lr=1e-2, memory_steps=6, memory_lr=5e-3, safety_steps=4, safety_lr=2e-3, batch_size=8)
TRIES = Candidates(learning_rates=(1e-4, 1e-3), epochs=(1,), coefficients=(0.5, 1.0), densities=(0.5,))
RULE = SelectionRule({"margin_gap": -1.0}, {"skill": 0.1}, {"auc_gap": 0.2})
SMALL = (0.0, 1.0, 2.0)


def gap(a, b):
    return norm(combine((1.0, a), (-1.0, b)))


def make_network(make_tokenizer):
    """A network, a tokenizer that knows the words of a trial, and the parameters before anything was trained."""
    data = staged.make("codenames", 900)
    items = data.skill_train + data.memory + data.safety
    tokenizer = make_tokenizer([f"{item['question']} {item['answer']}" for item in items])
    model = models.build(vocab_size=320, hidden_size=64, intermediate_size=64, layers=2, heads=4)
    return model, tokenizer, {name: tensor.clone() for name, tensor in parameters_of(model).items()}


def trials_of(network, cache, monkeypatch):
    """Make trials of a network: few items, and a skill that is learned by heart and measured on the very items."""
    monkeypatch.setenv("UNLEARNLIB_CACHE", str(cache))
    monkeypatch.setattr("unlearnlib.remembered.provenance.sources", lambda code: "the same code all the time")
    model, tokenizer, pretrained = network
    make = staged.make

    def load(name, **options):
        put(model, pretrained)
        return model, tokenizer

    def cut(*arguments, **options):
        data = make(*arguments, **options | {"entities": 4})
        learned = {split: data.skill_train[:8] for split in staged.SPLITS}
        few = {name: {split: getattr(data, name)[split][:4] for split in staged.SPLITS} for name in ("probes", "strangers", "ordinary")}
        return replace(data, skill_train=data.skill_train[:8], skill_test=learned, safety=data.safety[:32], **few)

    monkeypatch.setattr(staged_models, "load", load)
    monkeypatch.setattr(staged, "make", cut)
    return lambda phases=QUICK, **options: Trial("tiny", "codenames", 900, phases, **options)
