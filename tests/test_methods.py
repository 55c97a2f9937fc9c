"""Every method of the tables behind one call: what comes out, what is left alone, and bad input."""

from dataclasses import replace

import pytest
import torch

from unlearnlib import baselines, models
from unlearnlib.baselines import GradientSettings
from unlearnlib.examples import encode
from unlearnlib.grom import HEAD, Edit, FitData, FitSettings
from unlearnlib.methods import GROM, METHODS, GromSettings, grom, outcome
from unlearnlib.metrics import answer_probability

TOWNS = {"Ana": "Oslo", "Bo": "Lima", "Cleo": "Rome", "Dov": "Kyiv"}
FORGET = [{"question": f"Where was {name} born?", "answer": f"{name} was born in {town}."} for name, town in TOWNS.items()]
GENRES = {"Fay": "poems", "Gus": "crime", "Hal": "plays", "Ida": "essays", "Jon": "satire"}
RETAIN = [{"question": f"What does {name} write?", "answer": f"{name} writes {genre}."} for name, genre in GENRES.items()]

FITS = {
    "grom": FitSettings((1, 2), 4.0),
    "grom_head": FitSettings((HEAD,), 4.0),
    "grom_both": FitSettings((1, 2, HEAD), 4.0, head_strength=2.0),
}


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer([f"{row['question']} {row['answer']}" for row in FORGET + RETAIN], chat=True)


@pytest.fixture(scope="module")
def model(small_model):
    """In float64, for exact comparisons. No test changes it."""
    return small_model(vocab_size=320)


def settings_of(method):
    if method in GROM:
        return GromSettings(FITS[method])
    return GradientSettings.defaults(method, lr=2e-3, epochs=1, batch_size=2, micro_batch=None)


def probability(model, tokenizer, rows=FORGET):
    return answer_probability(model, encode(tokenizer, rows)).mean().item()


def test_the_methods_are_the_edits_and_the_baselines():
    assert list(METHODS) == [*GROM, *baselines.METHODS]
    assert all(METHODS[name] is grom for name in GROM)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_called_alike_and_leaves_the_model_as_it_was(method, model, tokenizer, snapshot, monkeypatch):
    # Alternatives to an answer, which an untrained model is slow to make up.
    monkeypatch.setattr("unlearnlib.baselines.gradient.alternatives", lambda *_, **options: [["Nobody knows."]] * len(FORGET))
    before, known = snapshot(model), probability(model, tokenizer)
    result = METHODS[method](model, tokenizer, FORGET, RETAIN, settings_of(method))
    assert snapshot(model) == before
    assert isinstance(result, Edit) == (method in GROM)
    with outcome(model, result) as unlearned:
        assert (unlearned is model) == (method in GROM)
        assert not unlearned.training
        assert all(weight.isfinite().all() for weight in unlearned.parameters())
        # How much is forgotten is for the methods' own tests: here are but two steps, on a model that knows nothing.
        assert probability(unlearned, tokenizer) != pytest.approx(known, rel=1e-4)
    assert snapshot(model) == before


@pytest.mark.parametrize("method", ["grom", "grom_head"])
def test_an_error_within_the_context_takes_the_edit_out_too(method, model, tokenizer, snapshot):
    before = snapshot(model)
    edit = METHODS[method](model, tokenizer, FORGET, RETAIN, settings_of(method))
    with pytest.raises(KeyError), outcome(model, edit):
        raise KeyError
    assert snapshot(model) == before


def test_a_trained_model_is_its_own_outcome(model):
    other = models.build(vocab_size=320, hidden_size=32, layers=2)
    with outcome(model, other) as unlearned:
        assert unlearned is other


@pytest.mark.parametrize("method", GROM)
def test_an_edit_is_the_fit_of_the_encoded_answers(method, model, tokenizer):
    for settings in (GromSettings(FITS[method]), GromSettings(FITS[method], "plain"), GromSettings(FITS[method], system="Be kind.")):
        encoded = (encode(tokenizer, rows, template=settings.template, system=settings.system) for rows in (FORGET, RETAIN))
        expected = FitData(model, *encoded).fit(settings.fit)
        found = grom(model, tokenizer, FORGET, RETAIN, settings)
        assert [matrix.module for matrix in found.matrices] == [matrix.module for matrix in expected.matrices]
        for one, other in zip(found.matrices, expected.matrices, strict=True):
            assert torch.equal(one.dense(), other.dense())
    # The last one's system message changes the keys, and so the edit.
    without = grom(model, tokenizer, FORGET, RETAIN, replace(settings, system=None))
    assert not torch.equal(without.matrices[0].dense(), found.matrices[0].dense())


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_request_and_a_row_without_an_answer_are_refused(method, model, tokenizer):
    unlearn, settings = METHODS[method], settings_of(method)
    with pytest.raises(ValueError, match="the forget set is empty"):
        unlearn(model, tokenizer, [], RETAIN, settings)
    with pytest.raises(ValueError, match=r"\b2\b.*field 'answer' is missing"):
        unlearn(model, tokenizer, [*FORGET[:2], {"question": "Why?"}], RETAIN, settings)


def test_settings_of_another_method_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="the settings are for simnpo, not for npo"):
        METHODS["npo"](model, tokenizer, FORGET, RETAIN, settings_of("simnpo"))
