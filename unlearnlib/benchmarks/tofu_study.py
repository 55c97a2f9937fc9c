"""The TOFU study: models, one rule that chooses every method's settings, and the scores of every method's result."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from .. import models
from ..baselines import GradientSettings
from ..examples import Example, encode
from ..finetune import FineTuning, finetuned
from ..grom import HEAD, Edit, FitData, FitSettings, attribution, select_band
from ..grom.choose import Trial, weigh
from ..methods import GROM, METHODS, GromSettings, outcome
from ..metrics import answer_probability, bfloat16
from ..remembered import code_hash, remembered
from ..tiny import scholar
from ..training import train
from . import miniature
from .tofu import SHARES, Tofu
from .tofu_scores import Evaluation, Scores, evaluate

CODE = "import unlearnlib.benchmarks.tofu_study"

LORA = "_lora"
"""A gradient method's name with this at its end is the method with LoRA adapters."""


@dataclass(frozen=True)
class Grid:
    """What every method's settings are chosen from: as many candidates each, the mildest first.

    Attributes
    ----------
    strengths, head_strengths : tuple of float
        β of GROM on a band of MLP outputs and on the LM head; candidates for both at once pair them.
    learning_rates : tuple of float
        Of the gradient methods.
    width : int
        Layers of the band.
    retain_weight, ridge : float
        :math:`w_r` and ρ of GROM.
    epochs, batch_size : int
        Of the gradient methods: passes over the forget rows, and forget rows a step, each with as many retain rows.
    lora_rank : int
        Of the variants with adapters.
    """

    strengths: tuple[float, ...] = (20.0, 65.0, 200.0)
    head_strengths: tuple[float, ...] = (5.0, 10.0, 20.0)
    learning_rates: tuple[float, ...] = (1e-5, 2e-5, 5e-5)
    width: int = 6
    retain_weight: float = 100.0
    ridge: float = 0.03
    epochs: int = 10
    batch_size: int = 8
    lora_rank: int = 8

    def __post_init__(self):
        sizes = {len(self.strengths), len(self.head_strengths), len(self.learning_rates)}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError("strengths, head_strengths and learning_rates must hold equally many candidates, at least one each")


@dataclass(frozen=True)
class Rehearsal:
    """A stand-in for the request, drawn from authors to be kept who are in no evaluation row.

    Attributes
    ----------
    forget : list of dict
        Rows that play the request.
    retain : list of dict
        Rows to keep that the method sees.
    validation : list of dict
        Rows of other authors that it doesn't see, on which the cost is measured.
    """

    forget: list[dict]
    retain: list[dict]
    validation: list[dict]


def rehearse(data: Tofu, authors: int, seed: int) -> Rehearsal:
    """Draw a stand-in request, of authors whom no split forgets and no evaluation row is about.

    Parameters
    ----------
    data : Tofu
    authors : int
        How many play the request, and how many others the validation.
    seed : int

    Raises
    ------
    ValueError
        If too few authors are in no evaluation row.
    """
    evaluated = {row["question"] for row in data.retain_eval}
    asked = {row["author"] for row in data.retain if row["question"] in evaluated}
    everyone = sorted({row["author"] for row in data.full})
    # Whom the largest split forgets is out of the question in every split: a choice made on one is used on the others.
    kept = everyone[: len(everyone) - round(max(SHARES.values()) / 100 * len(everyone))]
    free = [author for author in kept if author not in asked]
    if len(free) < 2 * authors:
        raise ValueError(f"{len(free)} authors to be kept are in no evaluation row: too few to choose settings on 2 × {authors} of them")
    drawn = torch.randperm(len(free), generator=torch.Generator().manual_seed(seed)).tolist()
    forget, validation = ({free[i] for i in part} for part in (drawn[:authors], drawn[authors : 2 * authors]))
    groups = ([row for row in data.retain if row["author"] in part] for part in (forget, validation))
    return Rehearsal(next(groups), [row for row in data.retain if row["author"] not in forget | validation], next(groups))


@dataclass
class Study:
    """TOFU on one base model with one seed. Whatever takes long is kept in the cache and not computed twice.

    Attributes
    ----------
    data : Tofu
    base : str
        Model to fine-tune, in the terms of `load`.
    tuning : FineTuning
        How the model that knows everything and the one that never saw the forget rows are trained.
    how : Evaluation
    grid : Grid
    rehearsal_authors : int
        Authors of the stand-in request.
    load : callable
        ``load(base)`` gives model and tokenizer.
    replay : bool
        Whether fine-tuning repeats the general questions: a tiny model would lose them otherwise.
    full_model, retain_model : str
        Models that are fine-tuned already, for instance on the Hub, in place of training them here.
    dtype : torch.dtype
        Of the weights while unlearning and evaluating.
    device : str
    progress : bool
    """

    data: Tofu
    base: str
    tuning: FineTuning = field(default_factory=FineTuning)
    how: Evaluation = field(default_factory=Evaluation)
    grid: Grid = field(default_factory=Grid)
    rehearsal_authors: int = 2
    load: Callable = models.load
    replay: bool = False
    full_model: str = ""
    retain_model: str = ""
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    progress: bool = False

    # ------------------------------------------------------------------------------------------------------------------------
    # Models

    def folder(self, which: str) -> str:
        """The folder (or Hub id) of the fine-tuned model ``"full"`` or ``"retain"``, trained if it isn't in the cache."""
        given, rows, name = {
            "full": (self.full_model, self.data.full, "tofu-full"),
            "retain": (self.retain_model, self.data.retain, f"tofu-without-{self.data.split}"),
        }[which]
        if self.replay:
            rows = rows + self.data.real_authors + self.data.world_facts
        return given or str(finetuned(self.base, rows, self.tuning, load=self.load, name=name, progress=self.progress))

    @cached_property
    def full(self):
        """The model that knows everything, and its tokenizer."""
        return self._loaded(self.folder("full"))

    def _loaded(self, folder: str):
        return models.load(folder, dtype=self.dtype, device=self.device)

    @contextmanager
    def model(self, method: str, settings: GromSettings | GradientSettings | None = None, *, held_out: bool = False) -> Iterator[nn.Module]:
        """A model of the tables: ``base``, ``full``, ``retain``, or what a method makes of ``full``.

        Parameters
        ----------
        method : str
        settings : GromSettings or GradientSettings
            Of the method; for the other three None.
        held_out : bool
            Whether to leave all rows of the evaluation out of what the method is told to keep.

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
            with outcome(self.full[0], self._unlearn(method, settings, held_out)[0]) as model:
                yield model

    def anchors(self, method: str, *, held_out: bool = False) -> list[dict]:
        """Rows that a method is told to keep.

        The retain rows; for GROM, as in the paper, also the questions on real authors and on the world that Model Utility is measured
        with. `held_out` leaves out every row of the evaluation.
        """
        if held_out:
            evaluated = {row["question"] for row in self.data.retain_eval}
            return [row for row in self.data.retain if row["question"] not in evaluated]
        return self.data.retain + (self.data.real_authors + self.data.world_facts if method in GROM else [])

    def _unlearn(self, method: str, settings, held_out: bool = False) -> tuple[Edit | nn.Module, float]:
        """What a method makes of ``full``, and in how many seconds; a trained model is kept in the cache."""
        rows = self.data.forget, self.anchors(method, held_out=held_out)
        tokenizer = self.full[1]  # loaded before the clock starts
        if method in GROM:
            began = time.perf_counter()
            return self.run(method, *rows, settings), time.perf_counter() - began

        def make(checkpoint: Path):
            began = time.perf_counter()
            trained = self.run(method, *rows, settings, checkpoint=checkpoint)
            trained.config.unlearning_seconds = time.perf_counter() - began
            return trained, tokenizer

        texts = [[[row["question"], row["answer"]] for row in part] for part in rows]
        code = code_hash("import unlearnlib.baselines")
        recipe = [self.folder("full"), asdict(settings), *texts, self.data.refusals, str(self.dtype), code]
        trained, _ = self._loaded(str(models.cached(f"unlearned/{method}", recipe, make)))
        return trained, trained.config.unlearning_seconds

    def run(self, method: str, forget: Sequence[dict], retain: Sequence[dict], settings, **options) -> Edit | nn.Module:
        """What a method makes of ``full`` with these rows and settings, computed anew.

        Parameters
        ----------
        method : str
            From :data:`~unlearnlib.methods.METHODS`, or a gradient method with :data:`LORA` at its end.
        forget, retain : sequence of dict
        settings : GromSettings or GradientSettings
        **options
            Further ones of the method, such as ``checkpoint``.

        Returns
        -------
        Edit or transformers.PreTrainedModel
        """
        name = method.removesuffix(LORA)
        if name == "idk_dpo":
            options["refusals"] = self.data.refusals
        return METHODS[name](*self.full, forget, retain, settings, progress=self.progress, **options)

    # ------------------------------------------------------------------------------------------------------------------------
    # Choosing

    def candidates(self, method: str) -> list[GromSettings | GradientSettings]:
        """Settings to try, the mildest first."""
        grid = self.grid
        if method not in GROM:
            name = method.removesuffix(LORA)
            common = {"epochs": grid.epochs, "batch_size": grid.batch_size, "seed": self.tuning.seed, **self._encoding}
            common["autocast"] = self.tuning.autocast
            common["lora_rank"] = grid.lora_rank if method.endswith(LORA) else 0
            return [replace(GradientSettings.defaults(name), lr=lr, **common) for lr in grid.learning_rates]
        common = {"retain_weight": grid.retain_weight, "ridge": grid.ridge, "batch_size": self.how.batch_size}
        pairs = list(zip(grid.strengths, grid.head_strengths, strict=True))
        if method == "grom_head":
            fits = [FitSettings((HEAD,), strength, **common) for _, strength in pairs]
        elif method == "grom":
            fits = [FitSettings(self.band, strength, **common) for strength, _ in pairs]
        else:
            fits = [FitSettings((*self.band, HEAD), strength, head_strength=head, **common) for strength, head in pairs]
        return [GromSettings(fit, **self._encoding) for fit in fits]

    @property
    def _encoding(self) -> dict:
        return {"template": self.tuning.template, "system": self.tuning.system}

    def _encode(self, rows: Sequence[dict]) -> list[Example]:
        return encode(self.full[1], rows, **self._encoding)

    @cached_property
    def rehearsal(self) -> Rehearsal:
        """The stand-in request on which settings are chosen."""
        return rehearse(self.data, self.rehearsal_authors, self.tuning.seed)

    @cached_property
    def band(self) -> tuple[int, ...]:
        """The band of layers that attribution selects on the stand-in request."""

        def compute() -> list[int]:
            fit = FitData(self.full[0], self._encode(self.rehearsal.forget), self._encode(self.rehearsal.retain), progress=self.progress)
            groups = fit.batches(FitSettings((0,), 1.0, batch_size=self.how.batch_size))
            return list(select_band(attribution(fit.model, *groups, fit.alpha), self._width))

        return tuple(remembered("tofu-band", [*self._recipe(), self.rehearsal_authors, self._width], compute, CODE))

    def set_band(self, first: int) -> None:
        """Take the band that begins at a layer, in place of selecting one: that of a choice made elsewhere."""
        self.band = tuple(range(first, first + self._width))

    @property
    def _width(self) -> int:
        return min(self.grid.width, self.full[0].config.num_hidden_layers // 2)

    def choose(self, method: str) -> list[Trial]:
        """All candidates of a method, tried on the stand-in request.

        Returns
        -------
        list of Trial
            In the order of the candidates; :func:`~unlearnlib.grom.choose.mildest` takes the best.
        """
        found = []
        for settings in self.candidates(method):
            recipe = [self._recipe(), self.rehearsal_authors, method, asdict(settings)]
            numbers = remembered(f"tofu-trial-{method}", recipe, lambda settings=settings: self._try(method, settings), CODE)
            found.append(Trial(settings, *numbers))
        return found

    def _try(self, method: str, settings) -> list[float]:
        model = self.full[0]
        sets = [self._encode(rows) for rows in (self.rehearsal.forget, self.rehearsal.validation)]

        def measure(changed: nn.Module) -> list[torch.Tensor]:
            return [self.probability(changed, examples) for examples in sets]

        before = measure(model)
        result = self.run(method, self.rehearsal.forget, self.rehearsal.retain, settings)
        with outcome(model, result) as changed:
            trial = weigh(settings, before, measure(changed))
        return [trial.forgetting, trial.preservation]

    # ------------------------------------------------------------------------------------------------------------------------
    # Measuring

    def scores(self, method: str, settings=None) -> dict:
        """Everything the tables say of one model.

        Returns
        -------
        dict
            ``scores``; ``utility_scores``, those of a second result whose method was not shown the evaluation's rows (of models that
            no method made, the same ones); ``relearned``, see :meth:`relearn`; ``seconds`` of the method.
        """
        recipe = [self._recipe(), method, None if settings is None else asdict(settings), asdict(self.how)]
        if method in ("base", "retain"):
            # Not made from the full model, which may have been trained elsewhere.
            recipe.append(self.base if method == "base" else self.folder("retain"))
        return remembered(f"tofu-scores-{method}", recipe, lambda: self._score(method, settings), CODE)

    def _score(self, method: str, settings) -> dict:
        def measure(model: nn.Module) -> dict:
            return {"scores": self._evaluate(model), "relearned": self.relearn(model)}

        if settings is None:
            with self.model(method) as model:
                found = measure(model)
            return found | {"utility_scores": found["scores"], "seconds": None}
        result, seconds = self._unlearn(method, settings)
        with outcome(self.full[0], result) as model:
            found = measure(model)
        del result, model
        with self.model(method, settings, held_out=True) as model:
            return found | {"utility_scores": self._evaluate(model, utility_only=True), "seconds": seconds}

    def _evaluate(self, model: nn.Module, **options) -> Scores:
        return evaluate(model, self.full[1], self.data, self.how, progress=self.progress, **options)

    def relearn(self, model: nn.Module, *, rows: int = 8, steps: int = 8) -> dict[str, float]:
        """Train a model on a few of the forget rows again (at most all but one), and see what of the others comes back.

        Returns
        -------
        dict of str to float
            Mean probability of the other forget rows' answers, ``before`` and ``after``.
        """
        examples = self._encode(self.data.forget)
        rows = min(rows, len(examples) - 1)
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(self.tuning.seed)).tolist()
        shown, others = ([examples[i] for i in part] for part in (order[:rows], order[rows:]))
        attacked = copy.deepcopy(model)
        before = self.probability(attacked, others).item()
        options = {"lr": self.tuning.lr, "seed": self.tuning.seed, "autocast": self.tuning.autocast, "progress": self.progress}
        train(attacked, shown, steps=steps, batch_size=len(shown), **options)
        return {"before": before, "after": self.probability(attacked, others).item()}

    def rounding(self) -> float:
        """By how much scoring in bfloat16 changes the probability of a forget row's answer at most, before unlearning."""

        def compute() -> float:
            how = {"batch_size": self.how.batch_size, "progress": self.progress}
            found = []
            for enabled in (False, True):
                with bfloat16(self.full[0], enabled):
                    found.append(answer_probability(self.full[0], self._encode(self.data.forget), **how))
            return (found[1] - found[0]).abs().max().item()

        return remembered("tofu-rounding", self._recipe(), compute, CODE)

    def compat_scores(self) -> Scores:
        """Scores of ``full`` as the common implementation makes them, on the same rows."""
        how = replace(self.how, compat=True)

        def compute() -> Scores:
            return evaluate(*self.full, self.data, how, progress=self.progress)

        return remembered("tofu-compat", [*self._recipe(), asdict(how)], compute, CODE)

    def probability(self, model: nn.Module, examples: Sequence[Example]) -> torch.Tensor:
        """Mean probability of answers, shape ()."""
        with bfloat16(model, self.how.autocast):
            return answer_probability(model, examples, batch_size=self.how.batch_size, progress=self.progress).mean()

    def _recipe(self) -> list:
        return [self.data.digest, self.folder("full"), asdict(self.tuning), str(self.dtype)]


STRANGERS = 1_000_003
"""Seed of the miniature whose authors a tiny base model learns the language from."""

LESSONS = 300
"""Steps that a tiny base model is trained for."""

TINY = "tiny-"
"""A base model whose name begins so is a tiny one of the family that follows. It is trained here, on the general questions and on the
lives of other authors, so that it knows the language before it is fine-tuned."""


def make_study(
    data: Tofu,
    base: str,
    *,
    seed: int = 0,
    system: str | None = None,
    max_new_tokens: int = 200,
    eval_batch_size: int = 16,
    tuning: dict | None = None,
    grid: dict | None = None,
    dtype: str = "float32",
    autocast: bool = False,
    **options,
) -> Study:
    """A study from a notebook's parameters.

    Parameters
    ----------
    data : Tofu
    base : str
        ``"tiny-llama"`` (or another family of :func:`~unlearnlib.models.build`) for a tiny model that is trained here, or what
        :func:`~unlearnlib.models.load` takes.
    seed : int
        Of training.
    system, max_new_tokens, eval_batch_size
        See :class:`~unlearnlib.benchmarks.tofu_scores.Evaluation`.
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
        lessons = data.real_authors + data.world_facts + _strangers(data)
        texts = [f"{row['question']} {row['answer']}" for row in data.full + data.holdout]
        folder = scholar("tofu-base", lessons, texts, family=base.removeprefix(TINY), seed=seed, steps=LESSONS)
        # Its name has the hash of what it was trained on, wherever the cache is.
        base, options["load"], options["replay"] = folder.name, lambda _: models.load(str(folder)), True
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in (grid or {}).items()}
    return Study(
        data,
        base,
        FineTuning(seed=seed, system=system, autocast=autocast, **(tuning or {})),
        Evaluation(max_new_tokens, eval_batch_size, system=system, autocast=autocast),
        Grid(**fields),
        dtype=getattr(torch, dtype),
        **options,
    )


def _strangers(data: Tofu) -> list[dict]:
    taboo = {row["question"] for row in data.full + data.holdout}
    return [row for row in miniature.rows(STRANGERS)["full"] if row["question"] not in taboo]
