"""One trial of the staged study: a model through its three phases, the grid of edits, every baseline, and all of it judged on test prompts.

The phases are realised training runs with everything that decides them held fixed: the order of the data is part of the data. The safety
run T is one map, which is applied to θ_A + ΔM (the shipped model), to θ_A (the oracle) and to θ_A − ΔM (the lower end of the secant).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

from ..examples import Example, batches, encode
from ..lora import lora
from ..models import cache_dir
from ..records import write_text
from ..remembered import code_hash, remembered
from ..sidecar import (
    AdamW,
    GridPoint,
    ProcessSidecar,
    SafetyTrace,
    Selection,
    SelectionRule,
    combine,
    constant,
    evaluate_grid,
    inner,
    linear_decay,
    norm,
    parameters_of,
    select,
)
from ..sidecar.edit import Map
from ..sidecar.functional import Parameters, digest
from ..sidecar.select import Measure
from . import staged, staged_models
from .staged import Staged
from .staged_baselines import GRADIENT, MERGING, Candidates, merged, put, trained
from .staged_measures import DEGENERATE, Measures, closures, degenerate
from .staged_select import FINE, MEMBERS, RULE, best_of, between, choose, selection_row, validation_measures
from .staged_stats import MEASURES, METHODS

CODE = "import unlearnlib.benchmarks.staged_trial"

GRID = tuple(i / 4 for i in range(9))
"""λ and γ: 0, ¼, …, 2. Contains the naive line γ = 0, the diagonal and (1, 1)."""

FIXED = {"naive_at_1": (1.0, 0.0), "sidecar_at_1": (1.0, 1.0)}
"""Edits whose coefficients nobody selects."""

SCHEDULES = {"constant": constant, "linear": linear_decay}


@dataclass(frozen=True)
class Phases:
    """How the three phases train. Each takes its items in the order of the data, round and round, with a fresh AdamW.

    Attributes
    ----------
    skill_steps, memory_steps, safety_steps : int
        Optimiser steps.
    skill_lr, memory_lr, safety_lr : float
        Learning rates.
    batch_size : int
        Items a step.
    schedule : {"constant", "linear"}
        Course of the learning rate within a phase; linear falls to 0.
    adam_epsilon, weight_decay : float
        Of AdamW.
    lora_rank : int
        Each phase trains adapters of this rank on all linear layers, from a fresh start, and merges them at its end; 0 trains all
        parameters.
    autocast : bool
        Forward passes in bfloat16, of training and of all measures alike. Parameters and optimiser stay in float32.

    Raises
    ------
    ValueError
        Naming the setting that is out of range.
    """

    skill_steps: int = 24
    skill_lr: float = 5e-5
    memory_steps: int = 24
    memory_lr: float = 5e-5
    safety_steps: int = 16
    safety_lr: float = 2e-5
    batch_size: int = 8
    schedule: str = "constant"
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    lora_rank: int = 0
    autocast: bool = False

    def __post_init__(self):
        for name in ("skill_steps", "memory_steps", "safety_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("skill_lr", "memory_lr", "safety_lr", "adam_epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number > 0, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be a finite number, at least 0, got {self.weight_decay}")
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank must be at least 0, got {self.lora_rank}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")


@dataclass
class Trial:
    """A model, a data family and a seed, and what they lead to. Runs of training are kept on disk until :meth:`release` discards them.

    Attributes
    ----------
    model_name : str
        In the terms of :func:`unlearnlib.benchmarks.staged_models.load`.
    family : str
    seed : int
        Of the data; see :func:`unlearnlib.benchmarks.staged.make`.
    phases : Phases
    entities : int
        People in the memory.
    template, system : str
        See :func:`unlearnlib.examples.encode`.
    batch_size : int
        Prompts a forward pass, when measuring.
    device : str
    progress : bool
    seconds : dict of str to float
        What a run of each phase took when it was made; filled as they are asked for.
    """

    model_name: str
    family: str
    seed: int
    phases: Phases = field(default_factory=Phases)
    entities: int = staged.ENTITIES
    template: str = "auto"
    system: str | None = None
    batch_size: int = 32
    device: str = "cpu"
    progress: bool = False

    def __post_init__(self):
        self.data = staged.make(self.family, self.seed, entities=self.entities)
        self.seconds: dict[str, float] = {}

    @property
    def recipe(self) -> list:
        """Everything besides code that determines the trial, in JSON's own types."""
        return [self.model_name, self.data.digest, asdict(self.phases), self.template, self.system, self.device]

    @cached_property
    def folder(self) -> Path:
        """Where this trial's runs of training are kept: a folder of the cache, of one process until that releases the trial."""
        content = json.dumps([self.recipe, code_hash(CODE)], sort_keys=True)
        name = f"{Path(self.model_name).name}-{self.family}-{self.seed}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        parent = cache_dir() / "staged"
        parent.mkdir(parents=True, exist_ok=True)
        # Another process that wants the same trial waits, lest one discards what the other is about to read.
        self._lock = FileLock(parent / f"{name}.lock", is_singleton=True)
        self._lock.acquire()
        return parent / name

    def release(self, *, discard: bool = False) -> None:
        """Let go of all parameters in memory; what is asked for again is read from the disk.

        Parameters
        ----------
        discard : bool
            Whether to remove the runs of training from the disk, too: they would have to be trained again.
        """
        for name in ("_start", "shipped", "oracle", "before", "stranger_margin", "validate", "test"):
            self.__dict__.pop(name, None)
        if discard:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.__dict__.pop("folder", None):
            self._lock.release()

    @property
    def kept(self) -> list[dict]:
        """What a method that is told what to keep is told: the items of the safety and of the skill phase."""
        return [*self.data.safety, *self.data.skill_train]

    # ------------------------------------------------------------------------------------------------------------------------
    # Training

    @cached_property
    def _start(self) -> tuple[nn.Module, Any, dict[str, Tensor]]:
        # In one go: once other parameters are in the model, the pretrained ones are gone.
        model, tokenizer = staged_models.load(self.model_name, device=self.device)
        pretrained = {name: tensor.clone() for name, tensor in parameters_of(model).items()}
        return model, tokenizer, self._run("skill", self.data.skill_train, pretrained, model, tokenizer)

    @property
    def model(self) -> nn.Module:
        """The network, with whatever parameters were put in last."""
        return self._start[0]

    @property
    def tokenizer(self):
        """Its tokenizer."""
        return self._start[1]

    @property
    def theta_a(self) -> dict[str, Tensor]:
        """θ_A, after the skill phase."""
        return self._start[2]

    @cached_property
    def shipped(self) -> dict[str, Tensor]:
        """θ_AMS = T(θ_AM)."""
        return self.safety()(self.theta_am())

    @cached_property
    def oracle(self) -> dict[str, Tensor]:
        """θ_AS = T(θ_A)."""
        return self.safety()(self.theta_a)

    def theta_am(self) -> dict[str, Tensor]:
        """θ_AM, after the memory phase; read from the disk each time, since little needs it."""
        return self._run("memory", self.data.memory, self.theta_a, self.model, self.tokenizer)

    def safety(self, order: int | None = None) -> Map:
        """The safety run T as a map of parameters.

        Parameters
        ----------
        order : int, optional
            Seed of another order of the items; by default the realised one.

        Returns
        -------
        callable
            From parameters to parameters; each run is done once and kept.
        """
        items = self.data.safety
        if order is not None:
            items = [items[i] for i in torch.randperm(len(items), generator=torch.Generator().manual_seed(order)).tolist()]
        return lambda start: self._run("safety", items, start, self.model, self.tokenizer)

    def sidecar(self, *, epsilon: float = 1.0) -> ProcessSidecar:
        """The edit, from the realised safety run: one further run of it at ε = 1, two at any other ε."""
        return ProcessSidecar.from_runs(self.theta_a, self.theta_am(), self.shipped, self.safety(), epsilon=epsilon)

    def _run(self, phase: str, items: Sequence[dict], start: Parameters, model: nn.Module, tokenizer) -> dict[str, Tensor]:
        """Train from a start on items, in their order; done once, by the content of both."""
        phases, size = self.phases, self.phases.batch_size
        options = {
            "lr": getattr(phases, f"{phase}_lr"),
            "steps": getattr(phases, f"{phase}_steps"),
            "optimizer": AdamW(eps=phases.adam_epsilon, weight_decay=phases.weight_decay),
            "schedule": SCHEDULES[phases.schedule],
            "autocast": torch.bfloat16 if phases.autocast else None,
        }
        examples = encode(tokenizer, items, template=self.template, system=self.system)
        made = [training_batch(examples[first : first + size]) for first in range(0, len(examples), size)]
        path = self.folder / f"{phase}-{digest(made, start)[:16]}.safetensors"
        clock = path.with_suffix(".seconds")
        if not clock.is_file():
            path.unlink(missing_ok=True)
        began = time.perf_counter()
        # A checkpoint at the end alone: a run is a minute at most, and half-done ones would be three times as large.
        how = {"checkpoint": path, "checkpoint_every": options["steps"], "progress": self.progress}
        if phases.lora_rank:
            put(model, start)
            with lora(model, phases.lora_rank) as adapted:
                adapters = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
                found = SafetyTrace(adapted, made, **options)(adapters, **how)
                with torch.no_grad():
                    for name, p in adapters.items():
                        p.copy_(found[name])
            end = {name: tensor.clone() for name, tensor in parameters_of(model).items()}
        else:
            end = SafetyTrace(model, made, **options)(start, **how)
        if not clock.is_file():
            write_text(clock, f"{time.perf_counter() - began}\n")
        self.seconds[phase] = float(clock.read_text(encoding="utf-8"))
        return end

    # ------------------------------------------------------------------------------------------------------------------------
    # Measuring

    @cached_property
    def before(self) -> dict[str, dict[str, float]]:
        """Measures of θ_A, which has the skill and no secrets, on each split."""
        put(self.model, self.theta_a)
        with self._computing():
            return {split: self._measures(split)(self.model) for split in staged.SPLITS}

    @cached_property
    def stranger_margin(self) -> float:
        """The shipped model's refusal margin on strangers: what the rule asks for on the memory's people."""
        put(self.model, self.shipped)
        strangers = replace(self.data, probes=self.data.strangers)
        with self._computing():
            return self._measures("validation", strangers)(self.model)["refusal_margin"]

    @cached_property
    def validate(self) -> Measure:
        """Takes a model, returns its validation measures: all that a selection may see."""
        before = self.before["validation"]
        measures = self._measures("validation", skill_base=before["skill_accuracy"])
        goals = {"unknown_auc": before["secret_auc"], "stranger_margin": self.stranger_margin}

        def validate(model: nn.Module) -> dict[str, float]:
            with self._computing():
                return validation_measures(measures(model), **goals)

        return validate

    @cached_property
    def test(self) -> Measure:
        """Takes a model, returns its test measures; to get ready, this puts the oracle into the network."""
        measures = self._measures("test", skill_base=self.before["test"]["skill_accuracy"])
        put(self.model, self.oracle)
        with self._computing():
            distributions = measures.distributions(self.model)

        def test(model: nn.Module) -> dict[str, float]:
            with self._computing():
                return measures.score(model, oracle=distributions, generate=True)

        return test

    def judge(self, theta: Parameters) -> dict[str, float]:
        """Test measures of the network with some parameters, and ``distance``, ‖θ − θ_AS‖."""
        test = self.test
        put(self.model, theta)
        return test(self.model) | {"distance": norm(combine((1.0, theta), (-1.0, self.oracle)))}

    def _measures(self, split: str, data: Staged | None = None, **options) -> Measures:
        encoding = {"template": self.template, "system": self.system, "batch_size": self.batch_size}
        return Measures(self.tokenizer, data or self.data, split, **encoding, **options)

    def _computing(self) -> AbstractContextManager:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.phases.autocast)


def parse_trials(model_name: str, names: Sequence[str], phases: Phases, **options) -> list[Trial]:
    """Trials of one model from names like ``"balances-3"``.

    Parameters
    ----------
    model_name : str
    names : sequence of str
        Family and seed, with a hyphen between.
    phases : Phases
    **options
        Of :class:`Trial`.

    Raises
    ------
    ValueError
        If a name isn't of that form, or none is given.
    """
    if not names:
        raise ValueError("trials is empty: name at least one, as family-seed")
    found = []
    for name in names:
        family, _, seed = name.rpartition("-")
        if not (family and seed.isdecimal()):
            raise ValueError(f"a trial is named family-seed, such as balances-3, not {name!r}")
        found.append(Trial(model_name, family, int(seed), phases, **options))
    return found


def training_batch(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Examples as one batch of a training run, with ``labels`` on the answers' tokens alone, as causal language models take them."""
    (batch,) = batches(examples, batch_size=len(examples))
    labels = torch.full_like(batch.input_ids, -100)
    labels[batch.rows, batch.columns + 1] = batch.gold
    return batch.inputs() | {"labels": labels}


# ---------------------------------------------------------------------------------------------------------------------------
# The whole trial


def run_trial(
    trial: Trial,
    *,
    grid: Sequence[float] = GRID,
    subdivisions: int = 4,
    rule: SelectionRule | None = None,
    candidates: Candidates | None = None,
    degenerate_below: float = DEGENERATE,
    keep_runs: bool = False,
) -> dict[str, Any]:
    """Everything that a trial records. Each step is kept in the cache, so that an interrupted trial goes on where it was.

    Parameters
    ----------
    trial : Trial
    grid : sequence of float
        Values of λ and of γ; 0 and 1 are among them.
    subdivisions : int
        Parts of each of the grid's steps on the two lines' finer grids, see :data:`~unlearnlib.benchmarks.staged_select.FINE`.
    rule : SelectionRule, optional
        By which every coefficient is chosen, on validation measures; :data:`~unlearnlib.benchmarks.staged_select.RULE` by default.
    candidates : Candidates, optional
        Of the baselines.
    degenerate_below : float
        The trial is flagged if shipped and oracle differ by less than this in their refusal margin, nats a token.
    keep_runs : bool
        Whether the runs of training stay on the disk when all is done.

    Returns
    -------
    dict of str to number, bool or rows
        ``grid``: a row a point, with ``lam``, ``gamma``, validation measures and ``parameter_error``. ``selected``: a row a method whose
        settings were chosen, with those (a baseline's first setting is called ``lam``) and their validation measures. ``candidates``: the
        baselines' tries, alike, and the points of the finer lines. One row each with a value a method, on test prompts: what
        :data:`~unlearnlib.benchmarks.staged_stats.MEASURES` names, ``skill_accuracy``, ``refusal_rate`` and ``ordinary_refusal_rate``.
        ``cost``: rows of ``method``, ``training_steps`` beyond those of the shipped model, ``evaluations`` of the choice, ``seconds``.
        ``best_parameters``: rows of ``member``, ``lam``, ``gamma`` and ``parameter_error``, the nearest to the oracle that the naive line,
        the diagonal and the plane come in parameter space (no method knows these). ``residual_ratio``, ‖R̂‖/‖ΔM‖; ``curvature``, half the
        second difference of T over ‖ΔM‖; ``drift``, ‖θ_AMS − θ_AM‖/‖ΔM‖; ``zeta``, λ − γ of the chosen two-dimensional edit;
        ``stranger_margin``; ``skill_base`` and ``unknown_auc``, skill accuracy and secret AUC of θ_A on test prompts; ``denominator``, of
        the closure, and ``flagged``. ``phase_seconds``: one row.

    Raises
    ------
    ValueError
        If the grid lacks 0 or 1, or θ_A has none of the skill.
    """
    if absent := {0.0, 1.0} - {float(value) for value in grid}:
        raise ValueError(f"grid lacks {', '.join(f'{value:g}' for value in sorted(absent))}, got {list(grid)}")
    rule, candidates = rule or SelectionRule(**RULE), candidates or Candidates()
    steps = _Steps(trial, list(map(float, grid)), subdivisions, rule, candidates)
    geometry, points = steps.geometry(), steps.grid()
    fine = {name: steps.line(name) for name in FINE}
    selections: dict[str, Selection] = choose(points, rule)
    selections |= {FINE[name]: select([*MEMBERS[name](points), *line], rule) for name, line in fine.items()}
    coefficients = {name: (one.point.lam, one.point.gamma) for name, one in selections.items()} | FIXED
    coefficients["shipped"] = (0.0, 0.0)
    scores = {name: steps.edit(*at) for name, at in coefficients.items()} | {"oracle": steps.oracle()}
    others = {name: steps.baseline(name) for name in (*GRADIENT, *MERGING)}
    scores |= {name: other["scores"] for name, other in others.items()}
    scores = {name: scores[name] for name in METHODS}

    margins = {name: score["refusal_margin"] for name, score in scores.items()}
    ends = margins["shipped"], margins["oracle"]
    closed = {name: closures(margin, *ends) for name, margin in margins.items()}
    own = {
        **{which: {name: one[which] for name, one in closed.items()} for which in ("closure", "closure_signed")},
        "kl_to_oracle": {name: score["kl_memory"] for name, score in scores.items()},
        "parameter_error": {name: score["distance"] / geometry["memory_norm"] for name, score in scores.items()},
    }
    plain = (*(name for name in MEASURES if name not in own), "skill_accuracy", "refusal_rate", "ordinary_refusal_rate")
    own |= {name: {method: score[name] for method, score in scores.items()} for name in plain}
    chosen = [selection_row(name, selection) for name, selection in selections.items()]
    if not keep_runs:
        trial.release(discard=True)
    return {
        "grid": [point.row() | {"parameter_error": _error(geometry, point.lam, point.gamma)} for point in points],
        "selected": chosen + [{"method": name} | other["selected"] for name, other in others.items()],
        "candidates": [{"method": name} | row for name, other in others.items() for row in other["candidates"]]
        + [{"method": FINE[name], **point.row()} for name, line in fine.items() for point in line],
        **{name: [values] for name, values in own.items()},
        "cost": _costs(trial.phases.safety_steps, geometry, steps.grid_seconds, len(points), len(grid), len(fine["naive"]), others),
        "best_parameters": _nearest(geometry),
        **{name: geometry[name] for name in ("residual_ratio", "drift", "stranger_margin", "skill_base", "unknown_auc")},
        "curvature": _error(geometry, 1.0, 1.0),
        "zeta": selections["two_d"].point.lam - selections["two_d"].point.gamma,
        "denominator": ends[1] - ends[0],
        "flagged": degenerate(*ends, degenerate_below),
        "phase_seconds": [geometry["seconds"]],
    }


class _Steps:
    """The steps of a trial, each remembered by what determines it; what several need is loaded when the first one is computed."""

    def __init__(self, trial: Trial, grid: list[float], subdivisions: int, rule: SelectionRule, candidates: Candidates):
        self.trial, self.values, self.subdivisions, self.rule, self.candidates = trial, grid, subdivisions, rule, candidates
        self.grid_seconds = 0.0

    def _remembered(self, step: str, recipe: list, compute: Callable[[], Any]) -> Any:
        return remembered(f"staged-{step}", [*self.trial.recipe, *recipe], compute, CODE)

    @cached_property
    def sidecar(self) -> ProcessSidecar:
        return self.trial.sidecar()

    def geometry(self) -> dict[str, Any]:
        """Norms and inner products of the error of the shipped model, ΔM and R̂, and what training took."""

        def compute() -> dict[str, Any]:
            trial, side = self.trial, self.sidecar
            vectors = [combine((1.0, side.shipped), (-1.0, trial.oracle)), side.memory, side.residual]
            gram = [[inner(a, b) for b in vectors] for a in vectors]
            memory = math.sqrt(gram[1][1])
            moved = combine((1.0, side.shipped), (-1.0, trial.theta_a), (-1.0, side.memory))
            return {
                "gram": {f"{i}{j}": gram[i][j] for i in range(3) for j in range(3)},
                "memory_norm": memory,
                "residual_ratio": math.sqrt(gram[2][2]) / memory,
                "drift": norm(moved) / memory,
                "stranger_margin": trial.stranger_margin,
                "skill_base": trial.before["test"]["skill_accuracy"],
                "unknown_auc": trial.before["test"]["secret_auc"],
                "seconds": trial.seconds,
            }

        return self._remembered("geometry", [], compute)

    def grid(self) -> list[GridPoint]:
        """All edits of the grid with their validation measures."""

        def compute() -> dict[str, Any]:
            validate = self.trial.validate
            began = time.perf_counter()
            points = evaluate_grid(self.sidecar, self.trial.model, self.values, self.values, validate, progress=self.trial.progress)
            return {"points": [asdict(point) for point in points], "seconds": time.perf_counter() - began}

        found = self._remembered("grid", [self.values], compute)
        self.grid_seconds = found["seconds"]
        return [GridPoint(**point) for point in found["points"]]

    def line(self, name: str) -> list[GridPoint]:
        """What a finer grid of one of the two lines has beyond the plane's, with validation measures."""
        steps = between(self.values, self.subdivisions)

        def compute() -> list[dict[str, Any]]:
            made = self.sidecar, self.trial.model
            found = []
            for lam in steps:
                found += evaluate_grid(*made, [lam], [0.0 if name == "naive" else lam], self.trial.validate, progress=False)
            return [asdict(point) for point in found]

        return [GridPoint(**point) for point in self._remembered("line", [name, self.values, self.subdivisions], compute)]

    def edit(self, lam: float, gamma: float) -> dict[str, float]:
        """Test measures of the sidecar's edit at (λ, γ)."""
        return self._remembered("edit", [lam, gamma], lambda: self.trial.judge(self.sidecar.at(lam, gamma)))

    def oracle(self) -> dict[str, float]:
        """Test measures of the oracle."""
        return self._remembered("oracle", [], lambda: self.trial.judge(self.trial.oracle))

    def baseline(self, method: str) -> dict[str, Any]:
        """A baseline's candidates, which of them is chosen, its test measures, and what it took."""

        def compute() -> dict[str, Any]:
            trial, validate = self.trial, self.trial.validate
            vectors = trial.theta_a, trial.shipped, self.sidecar.memory
            began, training_steps = time.perf_counter(), 0
            if method in GRADIENT:
                encoding = {"template": trial.template, "system": trial.system, "autocast": trial.phases.autocast}
                settings = self.candidates.gradient(method, **encoding)
                training_steps = sum(one.epochs * math.ceil(len(trial.data.memory) / one.batch_size) for one in settings)
                put(trial.model, trial.shipped)
                sets = trial.data.memory, trial.kept
                tried = trained(trial.model, trial.tokenizer, *sets, settings, validate, progress=trial.progress)
            else:
                tried = merged(trial.model, method, *vectors, self.candidates, validate, trial.seed)
            selection, theta, points = best_of(tried, self.rule)
            seconds = time.perf_counter() - began
            row = selection_row(method, selection)
            return {
                "selected": {name: value for name, value in row.items() if name != "method"},
                "candidates": [point.row() for point in points],
                "scores": trial.judge(theta),
                "cost": {"training_steps": training_steps, "evaluations": len(points), "seconds": seconds},
            }

        return self._remembered(method, [asdict(self.candidates), asdict(self.rule)], compute)


def _error(geometry: Mapping[str, Any], lam: float, gamma: float) -> float:
    """‖θ̂(λ, γ) − θ_AS‖ / ‖ΔM‖, from the inner products of the three directions that it is a sum of."""
    weights, gram = (1.0, -lam, -gamma), geometry["gram"]
    square = sum(weights[i] * weights[j] * gram[f"{i}{j}"] for i in range(3) for j in range(3))
    return math.sqrt(max(square, 0.0)) / geometry["memory_norm"]


def _nearest(geometry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where the naive line, the diagonal and the plane come nearest to the oracle in parameter space."""
    gram = torch.tensor([[geometry["gram"][f"{i}{j}"] for j in range(3)] for i in range(3)], dtype=torch.float64)
    found = []
    for member, directions in (("naive", [[1.0, 0.0]]), ("jvp_line", [[1.0, 1.0]]), ("two_d", [[1.0, 0.0], [0.0, 1.0]])):
        basis = torch.tensor(directions, dtype=torch.float64)
        solved = torch.linalg.lstsq(basis @ gram[1:, 1:] @ basis.T, basis @ gram[1:, 0], driver="gelsd").solution
        lam, gamma = (solved @ basis).tolist()
        found.append({"member": member, "lam": lam, "gamma": gamma, "parameter_error": _error(geometry, lam, gamma)})
    return found


def _costs(
    safety_steps: int, geometry: Mapping[str, Any], grid_seconds: float, points: int, line: int, finer: int, others: Mapping[str, dict]
) -> list[dict[str, Any]]:
    """What each method costs once the shipped model and the checkpoints before it are there."""
    safety = geometry["seconds"]["safety"]

    def edit(method: str, runs: int, evaluations: int) -> dict[str, Any]:
        seconds = runs * safety + evaluations / points * grid_seconds
        return {"method": method, "training_steps": runs * safety_steps, "evaluations": evaluations, "seconds": seconds}

    own = [
        edit("naive", 0, line),
        edit("jvp_line", 1, line),
        edit("two_d", 1, points),
        edit("naive_fine", 0, line + finer),
        edit("jvp_line_fine", 1, line + finer),
        edit("naive_at_1", 0, 0),
        edit("sidecar_at_1", 1, 0),
    ]
    return own + [{"method": name} | other["cost"] for name, other in others.items()] + [edit("oracle", 1, 0)]
