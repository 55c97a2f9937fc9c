"""What the model says: placing an answer in the model's own sentence, the bundled facts, and the embedded model asked."""

import pytest
import torch

from unlearnlib.elicit import answers_correctly, ask, in_own_words
from unlearnlib.examples import encode
from unlearnlib.facts import bundled_facts


@pytest.mark.parametrize(
    ("said", "answer", "lead", "found"),
    [
        ("The capital of France is Paris.", "Paris", "The capital of France is", "Paris"),
        ("paris, of course", "Paris", "", "paris"),
        ("It is New York City", "new york", "It is", "New York"),
        ("Parisian Paris", " Paris ", "Parisian", "Paris"),
        ("It costs $5, or $5.50", "$5", "It costs", "$5"),
    ],
)
def test_the_words_before_the_answer_become_its_lead(said, answer, lead, found):
    item = {"question": "?", "answer": answer, "relation": "r"}
    (placed,) = in_own_words([said], [item])
    assert placed == {"question": "?", "answer": found, "lead": lead, "relation": "r"}
    assert "lead" not in item, "the caller's items are left alone"


def test_items_whose_answer_is_not_said_stay_as_they_are():
    items = [{"question": "?", "answer": "Paris"}, {"question": "!", "answer": "Rome"}]
    placed = in_own_words(["Parisian", "In Rome"], items)
    assert placed[0] == items[0] and placed[0] is not items[0]
    assert placed[1]["lead"] == "In"
    assert answers_correctly(["Parisian", "In Rome"], items) == [False, True]
    with pytest.raises(ValueError, match="zip"):
        in_own_words(["one"], items)


def test_bundled_facts_by_relation():
    everything = bundled_facts()
    assert len(everything) >= 150
    capitals = bundled_facts(["capital"])
    assert capitals == [fact for fact in everything if fact["relation"] == "capital"]
    with pytest.raises(ValueError, match=r"unknown relation 'colour'.*capital"):
        bundled_facts(["capital", "colour"])


def test_asking_without_the_asked_phrasing_names_it(small_model, make_tokenizer):
    tokenizer = make_tokenizer()
    model = small_model(vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match="field 'paraphrase'"):
        ask(model, tokenizer, [{"question": "Why?", "answer": "so"}], field="paraphrase")


@pytest.mark.embedded
def test_the_embedded_model_says_paris_in_both_phrasings_and_in_a_sentence(smollm2):
    model, tokenizer = smollm2
    facts = bundled_facts(["capital"])[:6]
    said = ask(model, tokenizer, facts)
    assert sum(answers_correctly(said, facts)) >= 3
    assert all("\n" not in text for text in said)
    placed = in_own_words(said, facts)
    assert placed[0]["lead"] == "The capital of France is"
    (example,) = encode(tokenizer, placed[:1])
    # Where the lead ends, the model says the answer: that is what placing it is for.
    with torch.no_grad():
        best = model(input_ids=torch.tensor([example.prompt])).logits[0, -1].argmax().item()
    assert best == example.answer[0]
    (bare,) = encode(tokenizer, facts[:1])
    assert bare.answer[-1] == tokenizer.eos_token_id and bare.answer.count(tokenizer.eos_token_id) == 1
    again = ask(model, tokenizer, facts[:3], field="paraphrase")
    assert len(again) == 3 and again != said[:3]
