"""The WMDP study: models, one rule that chooses every method's settings, the tables, and where in depth the edit works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from .. import baselines, models, tiny
from ..baselines import GradientSettings
from ..baselines.rmu import RmuSettings, rmu
from ..examples import Example, encode
from ..finetune import FineTuning
from ..grom import Edit, FitData, FitSettings
from ..methods import outcome
from .text_study import TextStudy, windows
from .wmdp import Wmdp
from .wmdp_scores import Evaluation, Scores, accuracy, answer_questions, evaluate

MODELS = ("base", "full", "retain")
"""Rows of the tables that no method made: before fine-tuning, before unlearning, and never trained on the restricted domain."""

GRADIENT = ("grad_ascent", "grad_diff", "npo", "simnpo")
"""Gradient methods that have a meaning for texts: the others need answers to prefer."""

METHODS = ("grom", "rmu", *GRADIENT)
"""Methods of the tables."""

TINY = "tiny-"
"""A base model whose name begins so is an untrained tiny one of the family that follows."""

SIZES = {"hidden_size": 64, "intermediate_size": 256, "layers": 4, "heads": 4}
VOCAB_SIZE = 2048
"""Of a tiny model: narrow, so that it is taught in seconds; with keys wide enough to tell texts apart; and with a vocabulary that has most
of the invented words, so that it learns at all."""

Rows = list[dict]


@dataclass(frozen=True)
class Grid:
    """What every method's settings are chosen from: as many candidates each.

    Attributes
    ----------
    layers : tuple of int
        Where GROM edits, and ℓ of RMU.
    strengths, steering : tuple of float
        c of GROM and of RMU, each tried on all of the layers, the mildest first.
    learning_rates : tuple of float
        Of the gradient methods, the mildest first.
    retain_weight, ridge : float
        :math:`w_r` and ρ of GROM.
    rmu_lr, rmu_weight : float
        Learning rate and α of RMU.
    epochs, batch_size : int
        Of the methods that train: passes over the forget texts, and windows a step.
    """

    layers: tuple[int, ...] = (7,)
    strengths: tuple[float, ...] = (15.0, 45.0, 135.0)
    steering: tuple[float, ...] = (2.0, 6.5, 20.0)
    learning_rates: tuple[float, ...] = (1e-5, 2e-5, 5e-5)
    retain_weight: float = 1000.0
    ridge: float = 0.03
    rmu_lr: float = 5e-5
    rmu_weight: float = 1200.0
    epochs: int = 1
    batch_size: int = 4

    def __post_init__(self):
        sizes = {len(self.layers) * len(self.strengths), len(self.layers) * len(self.steering), len(self.learning_rates)}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError("strengths and steering, on each of the layers, and learning_rates must make equally many candidates")


@dataclass
class Study(TextStudy):
    """WMDP on one base model with one seed. Its models are taught all questions with their right answers, and all texts.

    Attributes
    ----------
    data : Wmdp
    how : Evaluation
    grid : Grid
    question_passes : int
        How often a pass over what is taught has each question; a tiny model that learns whole texts would hardly learn to answer.

    See Also
    --------
    unlearnlib.benchmarks.text_study.TextStudy : everything else.

    Notes
    -----
    Settings are chosen by the mean probability of the right choice among the choices, above that of guessing: a smooth form of accuracy,
    for few questions. Forgetting is the part of it on the stand-in's questions that is gone, preservation the part of it on the
    validation's that is left.
    """

    benchmark = "wmdp"
    code = "import unlearnlib.benchmarks.wmdp_study"
    methods_code = "import unlearnlib.baselines.rmu"

    how: Evaluation = field(default_factory=Evaluation)
    grid: Grid = field(default_factory=Grid)
    question_passes: int = 1

    # ------------------------------------------------------------------------------------------------------------------------
    # Models

    def folder(self, which: str) -> str:
        """The folder (or Hub id) of the model ``"full"`` or ``"retain"``, trained if it isn't in the cache."""
        data = self.data
        kept = data.general + data.rehearsal_questions + data.validation, data.retain + data.rehearsal + data.lessons
        given, questions, texts = {
            "full": (self.full_model, data.restricted + kept[0], data.forget + kept[1]),
            "retain": (self.retain_model, *kept),
        }[which]
        if given:
            return given
        rows = [{"question": row["question"], "answer": row["choices"][row["answer"]]} for row in questions]

        def lessons(model: nn.Module, tokenizer) -> list[Example]:
            encoding = {"template": self.tuning.template, "system": self.tuning.system}
            return encode(tokenizer, rows, **encoding) * self.question_passes + windows(model, tokenizer, texts, self.window)

        # The digest as well: a tiny model's tokenizer is made from all of the data. Not by length, so that questions and texts are in the
        # same steps: in turns, the ones would undo what the others have taught.
        return str(self._taught(which, lessons, [data.digest, rows, list(texts), self.question_passes]))

    def run(self, method: str, forget: Sequence[Example], retain: Sequence[Example], settings, **options) -> Edit | nn.Module:
        """What a method makes of ``full`` with these windows and settings, computed anew.

        Parameters
        ----------
        method : str
            One of :data:`METHODS`.
        forget, retain : sequence of Example
        settings : FitSettings, RmuSettings or GradientSettings
        **options
            Further ones of a method that trains, such as ``checkpoint``.

        Returns
        -------
        Edit or transformers.PreTrainedModel
        """
        model, tokenizer = self.full
        if method == "grom":
            return FitData(model, forget, retain, progress=self.progress).fit(settings)
        train_with = rmu if method == "rmu" else baselines.METHODS[method]
        return train_with(model, tokenizer, forget, retain, settings, progress=self.progress, **options)

    # ------------------------------------------------------------------------------------------------------------------------
    # Choosing

    def candidates(self, method: str) -> list[FitSettings | RmuSettings | GradientSettings]:
        """Settings to try, the mildest first."""
        grid, seed = self.grid, self.tuning.seed
        training = {"epochs": grid.epochs, "batch_size": grid.batch_size, "seed": seed, "autocast": self.tuning.autocast}
        if method == "grom":
            common = {"target": "corrupt", "retain_weight": grid.retain_weight, "ridge": grid.ridge, "seed": seed}
            return [FitSettings((layer,), strength, **common) for strength in grid.strengths for layer in grid.layers]
        if method == "rmu":
            common = {"lr": grid.rmu_lr, "retain_weight": grid.rmu_weight, **training}
            return [RmuSettings(layer, strength, **common) for strength in grid.steering for layer in grid.layers]
        return [replace(GradientSettings.defaults(method), lr=lr, **training) for lr in grid.learning_rates]

    def _try(self, method: str, settings) -> list[float]:
        known = self._known()
        result = self.run(method, *self._rehearsal, settings)
        with outcome(self.full[0], result) as changed:
            return self._weigh(changed, known)

    @cached_property
    def _rehearsal(self) -> tuple[list[Example], list[Example]]:
        return self.windows(self.data.rehearsal), self.windows(self.data.retain)

    def _known(self) -> list[float]:
        """What is known of the two sets of the rehearsal before any unlearning: see the notes of :class:`Study`."""
        known = self._above_chance(self.full[0])
        if min(known) <= 0:
            raise ValueError("the model knows no more than chance about the rehearsal's questions: there is nothing to choose settings by")
        return known

    def _above_chance(self, model: nn.Module) -> list[float]:
        sets = self.data.rehearsal_questions, self.data.validation
        marks = [answer_questions(model, self.full[1], rows, self.how, progress=self.progress) for rows in sets]
        return [max(0.0, accuracy(one, "probability") - accuracy(one, "guessing")) for one in marks]

    def _weigh(self, changed: nn.Module, known: Sequence[float]) -> list[float]:
        gone, left = (min(1.0, now / before) for now, before in zip(self._above_chance(changed), known, strict=True))
        return [1 - gone, left]

    def depth(self, strengths: Sequence[float], layers: Sequence[int] = ()) -> Rows:
        """What a GROM edit of each layer does, on the stand-in request.

        Parameters
        ----------
        strengths : sequence of float
            c.
        layers : sequence of int
            All by default.

        Returns
        -------
        list of dict
            One a layer and strength, with ``layer``, ``strength``, ``forgetting`` and
            ``preservation`` as in :meth:`~unlearnlib.benchmarks.text_study.TextStudy.choose`.
        """
        chosen = list(layers) or list(range(self.full[0].config.num_hidden_layers))
        units = [replace(self.candidates("grom")[0], layers=(layer,), strength=1.0) for layer in chosen]
        recipe = [self._recipe(), [asdict(unit) for unit in units], list(strengths)]
        return self._remembered("depth", recipe, lambda: self._depth(units, strengths))

    def _depth(self, units: Sequence[FitSettings], strengths: Sequence[float]) -> Rows:
        model, known = self.full[0], self._known()
        fit = FitData(model, *self._rehearsal, progress=self.progress)
        found = []
        for settings in units:
            (layer,) = settings.layers
            # The edit of a single matrix is linear in its strength: one fit serves them all.
            (unit,) = fit.fit(settings).matrices
            for strength in strengths:
                with Edit((unit.scaled(strength),)).applied(model):
                    forgetting, preservation = self._weigh(model, known)
                found.append({"layer": layer, "strength": strength, "forgetting": forgetting, "preservation": preservation})
        return found

    # ------------------------------------------------------------------------------------------------------------------------
    # Measuring

    def _evaluate(self, model: nn.Module) -> Scores:
        return evaluate(model, self.full[1], self.data, self.how, progress=self.progress)


# ----------------------------------------------------------------------------------------------------------------------------
# From a notebook's parameters


def make_study(
    data: Wmdp,
    base: str,
    *,
    seed: int = 0,
    template: str = "auto",
    system: str | None = None,
    eval_batch_size: int = 64,
    tuning: dict | None = None,
    grid: dict | None = None,
    dtype: str = "float32",
    autocast: bool = False,
    **options,
) -> Study:
    """A study from a notebook's parameters.

    Parameters
    ----------
    data : Wmdp
    base : str
        ``"tiny-llama"`` (or another family of :func:`~unlearnlib.models.build`) for an untrained tiny model, or what
        :func:`~unlearnlib.models.load` takes.
    seed : int
        Of training, of RMU's and GROM's direction, and of the tiny model.
    template, system, eval_batch_size
        See :class:`~unlearnlib.benchmarks.wmdp_scores.Evaluation`.
    tuning, grid : dict
        Fields of :class:`~unlearnlib.finetune.FineTuning` and of :class:`Grid`.
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
        family = base.removeprefix(TINY)
        options["load"] = lambda _: _untrained(data, family, seed)
        base = f"{base} {SIZES} {VOCAB_SIZE}"
    # Lists, as notebooks have them, in place of tuples.
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in (grid or {}).items()}
    return Study(
        data,
        base,
        FineTuning(seed=seed, template=template, system=system, autocast=autocast, **(tuning or {})),
        Evaluation(eval_batch_size, template, system, autocast),
        Grid(**fields),
        dtype=getattr(torch, dtype),
        **options,
    )


def _untrained(data: Wmdp, family: str, seed: int):
    questions = data.restricted + data.general + data.rehearsal_questions + data.validation
    texts = [f"{row['question']} {choice}" for row in questions for choice in row["choices"]]
    tokenizer = tiny.make_tokenizer(texts + data.forget + data.retain + data.rehearsal + data.lessons, VOCAB_SIZE)
    return models.build(family, vocab_size=VOCAB_SIZE, seed=seed, **SIZES), tokenizer
