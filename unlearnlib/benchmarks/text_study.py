"""What the studies of running text have in common: taught models, what a method makes of them, and settings tried on a stand-in request."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import ceil, inf
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from .. import corpora, models
from ..examples import Example
from ..finetune import FineTuning
from ..grom import Edit
from ..grom.choose import Trial
from ..lora import lora
from ..methods import GROM, outcome
from ..remembered import code_hash, remembered
from ..training import train

RECIPE = 1
"""Part of the hash of every model that is taught here: to be raised when the code would train other weights from the same settings."""


@dataclass
class TextStudy(ABC):
    """A benchmark of texts to be forgotten, on one base model with one seed.

    Whatever takes long is kept in the cache and not computed twice.

    Attributes
    ----------
    data : object
        Of the benchmark: with ``forget`` and ``retain``, the texts of the request and those to keep, and ``digest``, the content's hash.
    base : str
        Model to teach, in the terms of `load`.
    tuning : FineTuning
        How the model that knows all texts and the one that never saw those to be forgotten are trained.
    how : object
        The benchmark's ``Evaluation``.
    grid : object
        What every method's settings are chosen from.
    window : int
        Tokens of a window of text, see :func:`~unlearnlib.corpora.windows`: in training, and for every method.
    load : callable
        ``load(base)`` gives model and tokenizer.
    full_model, retain_model : str
        Models that are trained already, for instance on the Hub, in place of training them here.
    tokenizer : str
        Where those two find their tokenizer, if not with their weights: MUSE's have none.
    dtype : torch.dtype
        Of the weights while unlearning and evaluating.
    device : str
    progress : bool
    """

    benchmark: ClassVar[str]
    """Begins the name of whatever is kept in the cache."""

    code: ClassVar[str]
    """Code that imports whatever computes the study, see :func:`~unlearnlib.remembered.remembered`."""

    methods_code: ClassVar[str] = "import unlearnlib.baselines"
    """Code that imports the methods that train a model."""

    data: Any
    base: str
    tuning: FineTuning = field(default_factory=FineTuning)
    how: Any = None
    grid: Any = None
    window: int = corpora.WINDOW
    load: Callable = models.load
    full_model: str = ""
    retain_model: str = ""
    tokenizer: str = ""
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    progress: bool = False

    # ------------------------------------------------------------------------------------------------------------------------
    # What a benchmark says for itself

    @abstractmethod
    def folder(self, which: str) -> str:
        """The folder (or Hub id) of the model ``"full"`` or ``"retain"``, trained if it isn't in the cache."""

    @abstractmethod
    def run(self, method: str, forget: Sequence[Example], retain: Sequence[Example], settings, **options) -> Edit | nn.Module:
        """What a method makes of ``full`` with these windows and settings, computed anew.

        Parameters
        ----------
        method : str
        forget, retain : sequence of Example
        settings : object
            One of :meth:`candidates`.
        **options
            Further ones of a method that trains, such as ``checkpoint``.

        Returns
        -------
        Edit or transformers.PreTrainedModel
        """

    @abstractmethod
    def candidates(self, method: str) -> list:
        """Settings to try, the mildest first."""

    @abstractmethod
    def _try(self, method: str, settings) -> list[float]:
        """What a candidate forgets of the stand-in request, and what it preserves."""

    @abstractmethod
    def _evaluate(self, model: nn.Module) -> dict:
        """The benchmark's scores of one model."""

    def _recipe(self) -> list:
        """Everything besides code and a method's settings that determines a result; a model made elsewhere is known by its name."""
        return [self.data.digest, self.folder("full"), asdict(self.tuning), asdict(self.how), self.window, str(self.dtype)]

    # ------------------------------------------------------------------------------------------------------------------------
    # Models

    def _taught(self, which: str, lessons: Callable[[nn.Module, Any], list[Example]], recipe: list, *, by_length: bool = False) -> Path:
        """The folder of a model that was trained on lessons, a function of the model before and of its tokenizer; from the cache."""
        tuning = self.tuning

        def make(checkpoint: Path):
            model, tokenizer = self.load(self.base)
            examples = lessons(model, tokenizer)
            steps = tuning.epochs * ceil(len(examples) / tuning.batch_size)
            if self.progress:
                print(f"{which}: training on {len(examples)} windows and answers, {steps} steps (once) …", file=sys.stderr, flush=True)
            options = {name: getattr(tuning, name) for name in ("lr", "batch_size", "weight_decay", "seed", "autocast")}
            with lora(model, tuning.lora_rank, tuning.seed) as trainable:
                train(trainable, examples, steps=steps, by_length=by_length, checkpoint=checkpoint, progress=self.progress, **options)
            return model, tokenizer

        name = f"finetuned/{self.benchmark}-{which}"
        return models.cached(name, [RECIPE, self.base, asdict(tuning), self.window, *recipe], make)

    @cached_property
    def full(self):
        """The model that knows all texts, and its tokenizer."""
        return self._loaded(self.folder("full"))

    def _loaded(self, folder: str):
        given = self.tokenizer and folder in (self.full_model, self.retain_model)
        options = {"tokenizer": self.tokenizer} if given else {}
        return models.load(folder, dtype=self.dtype, device=self.device, **options)

    @contextmanager
    def model(self, method: str, settings=None) -> Iterator[nn.Module]:
        """A model of the tables: ``base``, ``full``, ``retain``, or what a method makes of ``full``.

        Parameters
        ----------
        method : str
        settings : object
            Of the method; for the other three None.

        Yields
        ------
        transformers.PreTrainedModel
            For a GROM edit it is ``full`` itself, edited within the context.
        """
        if method == "full":
            yield self.full[0]
        elif method == "retain":
            yield self._loaded(self.folder("retain"))[0]
        elif method == "base":
            yield self.load(self.base)[0].to(self.device, self.dtype)
        else:
            with outcome(self.full[0], self._unlearn(method, settings)[0]) as model:
                yield model

    def windows(self, texts: Sequence[str]) -> list[Example]:
        """Texts as windows of the full model's tokens: as methods are shown them."""
        return windows(*self.full, texts, self.window)

    def _unlearn(self, method: str, settings) -> tuple[Edit | nn.Module, float]:
        """What a method makes of ``full``, and in how many seconds; a trained model is kept in the cache."""
        sets = self.windows(self.data.forget), self.windows(self.data.retain)
        if method in GROM:
            began = time.perf_counter()
            return self.run(method, *sets, settings), time.perf_counter() - began

        def make(checkpoint: Path):
            began = time.perf_counter()
            trained = self.run(method, *sets, settings, checkpoint=checkpoint)
            trained.config.unlearning_seconds = time.perf_counter() - began
            return trained, self.full[1]

        recipe = [self._recipe(), asdict(settings), code_hash(self.methods_code)]
        trained, _ = self._loaded(str(models.cached(f"unlearned/{self.benchmark}-{method}", recipe, make)))
        return trained, trained.config.unlearning_seconds

    # ------------------------------------------------------------------------------------------------------------------------
    # Choosing and measuring

    def choose(self, method: str) -> list[Trial]:
        """All candidates of a method, tried on the stand-in request.

        Returns
        -------
        list of Trial
            In the order of the candidates; :func:`~unlearnlib.grom.choose.mildest` takes the best.
        """
        found = []
        for settings in self.candidates(method):
            recipe = [self._recipe(), method, asdict(settings)]
            numbers = self._remembered(f"trial-{method}", recipe, lambda settings=settings: self._try(method, settings))
            found.append(Trial(settings, *numbers))
        return found

    def scores(self, method: str, settings=None) -> dict:
        """What the tables need of one model.

        Returns
        -------
        dict
            The benchmark's ``scores``, and the ``seconds`` that the method took, None where there is none.
        """
        recipe = [self._recipe(), method, None if settings is None else asdict(settings)]
        if method in ("base", "retain"):
            # Not made from the full model, which may have been trained elsewhere.
            recipe.append(self.base if method == "base" else self.folder("retain"))
        return self._remembered(f"scores-{method}", recipe, lambda: self._score(method, settings))

    def _score(self, method: str, settings) -> dict:
        if settings is None:
            with self.model(method) as model:
                return {"scores": self._evaluate(model), "seconds": None}
        result, seconds = self._unlearn(method, settings)
        with outcome(self.full[0], result) as model:
            return {"scores": self._evaluate(model), "seconds": seconds}

    def _remembered(self, step: str, recipe: list, compute: Callable[[], Any]) -> Any:
        return remembered(f"{self.benchmark}-{step}", recipe, compute, self.code)


def windows(model: nn.Module, tokenizer, texts: Sequence[str], window: int) -> list[Example]:
    """Windows of texts, see :func:`unlearnlib.corpora.windows`, that a model has room for.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    texts : sequence of str
    window : int
        Tokens of a window at most.

    Returns
    -------
    list of Example

    Raises
    ------
    ValueError
        If a window exceeds the model's context.
    """
    found = corpora.windows(tokenizer, texts, window)
    context, longest = getattr(model.config, "max_position_embeddings", inf), max(map(len, found))
    if longest > context:
        raise ValueError(f"a window of {longest} tokens exceeds the model's context of {context}")
    return found
