"""Shared by the tests of the edit and its audit: small models of all families, random examples, a tokenizer, and exact snapshots."""

import hashlib

import hypothesis
import pytest
import torch

from unlearnlib import models
from unlearnlib.examples import Example

# The same examples on every machine: a run of CI says something about the change, not about luck. Explore with
# `pytest --hypothesis-profile=default`.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

FAMILIES = ("llama", "qwen2", "gpt2", "gpt_neox")
VOCAB = 97


@pytest.fixture(scope="module")
def staged_network(make_tokenizer):
    """A network for trials of the staged study, see :mod:`staged_tiny`."""
    from staged_tiny import make_network

    return make_network(make_tokenizer)


@pytest.fixture(scope="module")
def staged_cache(tmp_path_factory):
    """A cache that all trials of a module share, so that each run of training is done once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make_staged_trial(staged_network, staged_cache, monkeypatch):
    """Make trials of that network."""
    from staged_tiny import trials_of

    return trials_of(staged_network, staged_cache, monkeypatch)


def pytest_configure(config):
    config.addinivalue_line("markers", "embedded: needs the embedded model, which is fetched once into the cache")


@pytest.fixture(scope="session", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="session")
def small_model():
    """Make a small model whose layers matter: the usual initialisation is so small that most of it cancels out."""

    def make(family="llama", *, tied=True, dtype=torch.float64, layers=4, seed=0, vocab_size=VOCAB):
        sizes = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48, "layers": layers, "heads": 4, "max_length": 128}
        model = models.build(family, **sizes, tied=tied, seed=seed, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(6)
                else:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        return model.to(dtype)

    return make


@pytest.fixture(scope="session")
def random_examples():
    """Make examples of random lengths, answers drawn from a part of the vocabulary."""

    def make(count, seed=0, answers=(0, VOCAB), longest=6):
        generator = torch.Generator().manual_seed(seed)

        def draw(low, high, size):
            return torch.randint(low, high, (size,), generator=generator).tolist()

        return [
            Example(tuple(draw(0, VOCAB, draw(1, longest + 1, 1)[0])), tuple(draw(*answers, draw(1, 4, 1)[0])), f"number {i}")
            for i in range(count)
        ]

    return make


@pytest.fixture(scope="session")
def request_sets(random_examples):
    """A forget and a retain set that share a few gold tokens, so that α takes values between 0 and 1 too."""
    return random_examples(7, seed=1, answers=(0, 24)), random_examples(16, seed=2, answers=(12, VOCAB))


@pytest.fixture(scope="session")
def snapshot():
    """Take down everything about a model that an edit could leave behind, weights to the bit."""

    def take(model):
        parts = {
            name: hashlib.sha256(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy()).hexdigest()
            for name, tensor in _tensors(model)
        }
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        parts["tied"] = head.weight is embedding.weight, model.config.tie_word_embeddings
        parts["training"] = [module.training for module in model.modules()]
        parts["hooks"] = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        parts["replaced"] = [name for name, module in model.named_modules() if "forward" in module.__dict__]
        parts["requires_grad"] = [parameter.requires_grad for parameter in model.parameters()]
        return parts

    return take


def _tensors(model):
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers()


CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|start|>system\nBe brief.<|end|>\n{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer():
    """Train a byte-level BPE tokenizer; its padding token is its end token, as in many real ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def make(texts=("What colour is the sky over the hills? It is blue and grey.",), *, bos=False, end=True, chat=False, size=320):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        special = ["<|start|>", "<|end|>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(texts, trainer)
        if bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<|start|> $A <|end|>", special_tokens=[("<|start|>", 0), ("<|end|>", 1)]
            )
        names = {"bos_token": "<|start|>"} | ({"eos_token": "<|end|>", "pad_token": "<|end|>"} if end else {})
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
        tokenizer.chat_template = CHAT_TEMPLATE if chat else None
        return tokenizer

    return make


@pytest.fixture(scope="session")
def smollm2():
    """The embedded model and its tokenizer. Tests that use it leave it as it was."""
    return models.load()
