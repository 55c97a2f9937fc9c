"""The MUSE study: models that learned documents, one rule that chooses every method's settings, and the scores of every method's result."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from .. import corpora, models, tiny
from ..baselines import GradientSettings
from ..examples import Example, encode
from ..finetune import FineTuning
from ..grom import HEAD, Edit, FitData, FitSettings, attribution, select_band
from ..grom.choose import weigh
from ..methods import GROM, METHODS, GromSettings, outcome
from ..metrics import answer_probability, bfloat16
from ..training import train
from . import muse_texts
from .muse import Muse
from .muse_scores import Evaluation, asked, evaluate
from .text_study import RECIPE, TextStudy, windows
from .tofu_study import LORA, TINY, Grid

LESSONS, LESSON_SIZE = 200, 4
"""Steps that a tiny base model is trained for, and windows and answers a step."""

TEXT_METHODS = (*GROM, "grad_ascent", "grad_diff", "npo", "simnpo")
"""Methods that need no questions: IdkDPO and AltPO prefer other answers to the same question, and running text has none."""

SIMNPO = {name: {"beta": beta, "forget_weight": 1.0, "retain_weight": 0.1} for name, beta in (("news", 0.7), ("books", 0.75))}
"""SimNPO's settings for MUSE, those of its authors (Fan et al., 2024, the scripts of their code); the defaults are those for TOFU."""


@dataclass(frozen=True)
class Rehearsal:
    """A stand-in for the request, drawn from the documents to keep that methods are shown; no evaluation row is about these.

    Attributes
    ----------
    forget : list of str
        Documents that play the request.
    retain : list of str
        Documents to keep that the method sees.
    validation : list of str
        Documents that it doesn't see, on which the cost is measured.
    """

    forget: list[str]
    retain: list[str]
    validation: list[str]


def rehearse(data: Muse, documents: int, seed: int) -> Rehearsal:
    """Draw a stand-in request.

    Parameters
    ----------
    data : Muse
    documents : int
        How many play the request, and how many others the validation.
    seed : int

    Raises
    ------
    ValueError
        If nothing would be left to keep.
    """
    if documents < 1 or len(data.retain) <= 2 * documents:
        raise ValueError(f"of {len(data.retain)} documents to keep, 2 × {documents} can't play the request and the validation")
    order = torch.randperm(len(data.retain), generator=torch.Generator().manual_seed(seed)).tolist()
    forget, validation = sorted(order[:documents]), sorted(order[documents : 2 * documents])
    retain = sorted(order[2 * documents :])
    return Rehearsal(*([data.retain[i] for i in part] for part in (forget, retain, validation)))


@dataclass
class Study(TextStudy):
    """MUSE on one base model with one seed.

    Attributes
    ----------
    data : Muse
    how : Evaluation
    grid : Grid
    teach : bool
        Whether the two models are trained on the questions about their documents too. Small models don't make knowledge out of text
        that they read a few times, and there would be none to forget. The request is the text alone in any case.
    rehearsal_documents : int
        Documents of the stand-in request.

    See Also
    --------
    unlearnlib.benchmarks.text_study.TextStudy : everything else.
    """

    benchmark = "muse"
    code = "import unlearnlib.benchmarks.muse_study"

    how: Evaluation = field(default_factory=Evaluation)
    grid: Grid = field(default_factory=Grid)
    teach: bool = False
    rehearsal_documents: int = 2

    # ------------------------------------------------------------------------------------------------------------------------
    # Models

    def folder(self, which: str) -> str:
        """The folder (or Hub id) of the model ``"full"`` or ``"retain"``, trained if it isn't in the cache."""
        data = self.data
        given, texts, questions = {
            "full": (self.full_model, data.train, data.forget_qa + data.retain_qa),
            "retain": (self.retain_model, data.kept, data.retain_qa),
        }[which]
        if given:
            return given
        asked_too = questions if self.teach else []
        recipe = [list(texts), [[row["question"], row["answer"]] for row in asked_too]]

        def examples(model: nn.Module, tokenizer) -> list[Example]:
            return lessons(model, tokenizer, texts, asked_too, self.window)

        return str(self._taught(f"{data.corpus}-{which}", examples, recipe, by_length=True))

    def run(self, method: str, forget: Sequence[Example], retain: Sequence[Example], settings, **options) -> Edit | nn.Module:
        """What a method makes of ``full`` with these windows and settings, computed anew.

        Parameters
        ----------
        method : str
            From :data:`TEXT_METHODS`, or a gradient method with ``_lora`` at its end.
        forget, retain : sequence of Example
        settings : GromSettings or GradientSettings
        **options
            Further ones of the method, such as ``checkpoint``.

        Returns
        -------
        Edit or transformers.PreTrainedModel
        """
        retain = corpora.unshared(retain, forget)
        return METHODS[method.removesuffix(LORA)](*self.full, forget, retain, settings, progress=self.progress, **options)

    # ------------------------------------------------------------------------------------------------------------------------
    # Choosing

    def candidates(self, method: str) -> list[GromSettings | GradientSettings]:
        """Settings to try, the mildest first."""
        grid = self.grid
        if method not in GROM:
            name = method.removesuffix(LORA)
            own = {"epochs": grid.epochs, "batch_size": grid.batch_size, "seed": self.tuning.seed, "autocast": self.tuning.autocast}
            own |= {"lora_rank": grid.lora_rank if method.endswith(LORA) else 0} | (SIMNPO[self.data.corpus] if name == "simnpo" else {})
            return [GradientSettings.defaults(name, lr=lr, **own) for lr in grid.learning_rates]
        common = {"retain_weight": grid.retain_weight, "ridge": grid.ridge, "batch_size": self.how.batch_size}
        pairs = list(zip(grid.strengths, grid.head_strengths, strict=True))
        if method == "grom_head":
            fits = [FitSettings((HEAD,), strength, **common) for _, strength in pairs]
        elif method == "grom":
            fits = [FitSettings(self.band, strength, **common) for strength, _ in pairs]
        else:
            fits = [FitSettings((*self.band, HEAD), strength, head_strength=head, **common) for strength, head in pairs]
        return [GromSettings(fit) for fit in fits]

    @cached_property
    def rehearsal(self) -> Rehearsal:
        """The stand-in request on which settings are chosen."""
        return rehearse(self.data, self.rehearsal_documents, self.tuning.seed)

    @cached_property
    def band(self) -> tuple[int, ...]:
        """The band of layers that attribution selects on the stand-in request."""

        def compute() -> list[int]:
            sets = (self.windows(texts) for texts in (self.rehearsal.forget, self.rehearsal.retain))
            fit = FitData(self.full[0], *sets, progress=self.progress)
            groups = fit.batches(FitSettings((0,), 1.0, batch_size=self.how.batch_size))
            return list(select_band(attribution(fit.model, *groups, fit.alpha), self._width))

        return tuple(self._remembered("band", [self._recipe(), self._width], compute))

    def set_band(self, first: int) -> None:
        """Take the band that begins at a layer, in place of selecting one: that of a choice made elsewhere."""
        self.band = tuple(range(first, first + self._width))

    @property
    def _width(self) -> int:
        return min(self.grid.width, self.full[0].config.num_hidden_layers // 2)

    def _try(self, method: str, settings) -> list[float]:
        model, rehearsal = self.full[0], self.rehearsal
        forget, retain, validation = (self.windows(texts) for texts in (rehearsal.forget, rehearsal.retain, rehearsal.validation))

        def measure(changed: nn.Module) -> list[torch.Tensor]:
            options = {"batch_size": self.how.batch_size, "progress": self.progress}
            with bfloat16(changed, self.how.autocast):
                return [answer_probability(changed, examples, **options).mean() for examples in (forget, validation)]

        before = measure(model)
        with outcome(model, self.run(method, forget, retain, settings)) as changed:
            trial = weigh(settings, before, measure(changed))
        return [trial.forgetting, trial.preservation]

    # ------------------------------------------------------------------------------------------------------------------------
    # Measuring

    def _evaluate(self, model: nn.Module) -> dict[str, list[float]]:
        return evaluate(model, self.full[1], self.data, self.how, progress=self.progress)

    def _recipe(self) -> list:
        return [*super()._recipe(), self.rehearsal_documents]


def lessons(model: nn.Module, tokenizer, texts: Sequence[str], questions: Sequence[dict], window: int) -> list[Example]:
    """What a model learns documents and answers from: windows of text, and questions put as the benchmark puts them."""
    rows = [{"question": asked(row), "answer": row["answer"]} for row in questions]
    return windows(model, tokenizer, texts, window) + encode(tokenizer, rows, template="plain")


def make_study(
    data: Muse,
    base: str,
    *,
    seed: int = 0,
    how: dict | None = None,
    tuning: dict | None = None,
    grid: dict | None = None,
    dtype: str = "float32",
    autocast: bool = False,
    **options,
) -> Study:
    """A study from a notebook's parameters.

    Parameters
    ----------
    data : Muse
    base : str
        ``"tiny-llama"`` (or another family of :func:`~unlearnlib.models.build`) for a tiny model that is trained here, on more invented
        texts and their questions, or what :func:`~unlearnlib.models.load` takes.
    seed : int
        Of training.
    how, tuning, grid : dict
        Fields of :class:`~unlearnlib.benchmarks.muse_scores.Evaluation`, of :class:`~unlearnlib.finetune.FineTuning` and of
        :class:`~unlearnlib.benchmarks.tofu_study.Grid`.
    dtype : str
        Name of a torch type.
    autocast : bool
        Whether models compute in bfloat16 while they are trained and scored; GROM's keys are collected in `dtype` all the same.
    **options
        Fields of :class:`Study`.

    Returns
    -------
    Study
    """
    if base.startswith(TINY):
        folder = _tiny_base(data, base.removeprefix(TINY), seed, options.get("window", corpora.WINDOW))
        # Its name has the hash of what it was trained on, wherever the cache is.
        base, options["load"] = folder.name, lambda _: models.load(str(folder))
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in (grid or {}).items()}
    return Study(
        data,
        base,
        FineTuning(seed=seed, autocast=autocast, **(tuning or {})),
        Evaluation(autocast=autocast, **(how or {})),
        Grid(**fields),
        dtype=getattr(torch, dtype),
        **options,
    )


def _tiny_base(data: Muse, family: str, seed: int, window: int) -> Path:
    """The folder of a tiny model that knows the language of the invented texts, and how questions are put, but none of the documents."""
    texts, questions = muse_texts.strangers(data.corpus, seed)
    # The tokenizer knows the words of all documents; the model doesn't.
    words = [*texts, *data.train, *data.holdout] + [f"{asked(row)} {row['answer']}" for row in questions + data.forget_qa + data.retain_qa]

    def make(checkpoint: Path):
        print(f"training a tiny {family} on {len(texts)} invented texts (once) …", file=sys.stderr, flush=True)
        tokenizer = tiny.make_tokenizer(words)
        model = models.build(family, vocab_size=tiny.VOCAB_SIZE, seed=seed, **tiny.SIZES)
        examples = lessons(model, tokenizer, texts, questions, window)
        options = {"steps": LESSONS, "lr": tiny.LEARNING_RATE, "batch_size": LESSON_SIZE, "seed": seed, "checkpoint": checkpoint}
        train(model, examples, by_length=True, progress=True, **options)
        return model, tokenizer

    recipe = [RECIPE, family, seed, tiny.VOCAB_SIZE, tiny.SIZES, LESSONS, tiny.LEARNING_RATE, LESSON_SIZE, window, words]
    return models.cached(f"muse-base-{family}-{seed}", recipe, make)
