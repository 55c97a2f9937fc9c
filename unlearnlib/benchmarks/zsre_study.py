"""The study of single facts: GROM and the model editors on requests of growing size, under both harnesses, with one rule for settings."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from .. import models
from ..baselines.editing import EditorSettings
from ..baselines.editors import EDITORS, SETTINGS, MemitSettings, key_moments, value_accuracy
from ..examples import Example, encode
from ..finetune import FineTuning, finetuned
from ..grom import HEAD, Edit, FitData, FitSettings, attribution, select_band
from ..grom.choose import Trial, try_all, weigh
from ..methods import GromSettings, grom
from ..metrics import answer_probability
from ..remembered import remembered
from ..tiny import reciter, scholar
from .zsre import BUNDLED, Split
from .zsre_scores import EDITING, UNLEARNING, Evaluation, Scores, evaluate, first

CODE = "import unlearnlib.benchmarks.zsre_study"

BEFORE = "full"
"""The row of the model as it was."""

GROM = ("grom_head", "grom")
METHODS = (*GROM, *EDITORS)
"""Methods of the tables."""

PUBLISHED_STRENGTHS = {"grom_head": 20.0, "grom": 65.0}
"""β of the GROM paper: of its LM-head edit for zsRE, and of the band for the smaller of its two TOFU models (none is published for a band
and zsRE)."""

VALUE_LR = 0.5
"""Learning rate of every search for a value, ROME's and MEMIT's; AlphaEdit's smaller one was set for the activations of Llama 3."""

TINY = "tiny-"
"""A base model whose name begins so is a tiny one of the family that follows, which is trained here to know all facts by heart."""


@dataclass(frozen=True)
class Grid:
    """What every method's settings are chosen from: published values and multiples of them, as many candidates each, the mildest first.

    Attributes
    ----------
    multiples : tuple of float
        Of β of GROM, see :data:`PUBLISHED_STRENGTHS`.
    depths : tuple of float
        Where the editors write: the last layer of their band, as a part of the model's depth. The last layer of the model is left out:
        what is written there at a subject reaches no other position.
    relaxations : tuple of float
        Multiples of what holds an editor back, each tried at all depths: λ of MEMIT, L2 of AlphaEdit, the weight of general text of
        ZeroUnlearn.
    clamps : tuple of float
        Clamp of ROME, which has no such weight, in their place.
    width, editor_width : int
        Layers of GROM's band, and of the editors'.
    retain_weight, ridge : float
        :math:`w_r` and ρ of GROM.
    contexts : int
        Texts made by the model in front of each fact that the editors see, besides the bare prompt; -1 for each one's default.
    rome_round : int
        Facts whose values ROME seeks before it writes any of them; 1 as published, more are faster.
    value_batch_size : int
        Facts whose values are sought at once; changes no result.
    autocast : bool
        Whether values are sought in bfloat16.
    """

    multiples: tuple[float, ...] = (0.0625, 0.25, 1.0, 4.0)
    depths: tuple[float, ...] = (0.65, 0.35)
    relaxations: tuple[float, ...] = (1.0, 0.01)
    clamps: tuple[float, ...] = (0.75, 4.0)
    width: int = 6
    editor_width: int = 3
    retain_weight: float = 30.0
    ridge: float = 0.03
    contexts: int = -1
    rome_round: int = 1
    value_batch_size: int = 16
    autocast: bool = False

    def __post_init__(self):
        if not self.multiples or len(self.multiples) != len(self.depths) * len(self.relaxations):
            raise ValueError(
                f"GROM has {len(self.multiples)} candidates, of multiples, and an editor {len(self.depths)} × {len(self.relaxations)}, of "
                "depths and relaxations: every method must have as many, at least one"
            )
        if len(self.clamps) != len(self.relaxations):
            raise ValueError(f"ROME has {len(self.clamps)} clamps in place of {len(self.relaxations)} relaxations: there must be as many")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths are parts of the model's depth, 0 to 1, got {self.depths}")


@dataclass
class Study:
    """One split of facts on one model that knows them. Whatever takes long is kept in the cache and not computed twice.

    Attributes
    ----------
    split : Split
    load : callable
        Gives the model's name, which tells it from others in the cache, the model and its tokenizer; called once, when they are needed.
        The model is left as it was by everything.
    grid : Grid
    how : Evaluation
    progress : bool
    """

    split: Split
    load: Callable[[], tuple[str, nn.Module, object]]
    grid: Grid = field(default_factory=Grid)
    how: Evaluation = field(default_factory=Evaluation)
    progress: bool = False

    def __post_init__(self):
        self._moments: dict[tuple[str, int], tuple[torch.Tensor, float]] = {}

    @cached_property
    def _loaded(self) -> tuple[str, nn.Module, object]:
        return self.load()

    @property
    def model(self) -> nn.Module:
        """The model that knows the facts."""
        return self._loaded[1]

    @property
    def tokenizer(self):
        """Its tokenizer."""
        return self._loaded[2]

    # ------------------------------------------------------------------------------------------------------------------------
    # Choosing

    def candidates(self, method: str) -> list[GromSettings | EditorSettings]:
        """Settings to try, the mildest first.

        Raises
        ------
        ValueError
            If the method is unknown.
        """
        grid = self.grid
        if method in GROM:
            common = {"retain_weight": grid.retain_weight, "ridge": grid.ridge, "batch_size": self.how.batch_size}
            where, published = (HEAD,) if method == "grom_head" else self.band, PUBLISHED_STRENGTHS[method]
            return [GromSettings(FitSettings(where, multiple * published, **common), template="plain") for multiple in grid.multiples]
        if method not in EDITORS:
            raise ValueError(f"unknown method {method!r}: use {', '.join(METHODS)}")
        options = {"template": "plain", "batch_size": grid.value_batch_size, "autocast": grid.autocast}
        published = SETTINGS[method]((0,), v_lr=VALUE_LR, **options)
        if grid.contexts >= 0:
            published = replace(published, prefix_lengths=(_CONTEXT_LENGTH,) * grid.contexts)
        if method == "rome":
            strengths = [{"clamp": clamp, "per_round": grid.rome_round} for clamp in grid.clamps]
        else:
            knob = {"memit": "mom2_weight", "alpha_edit": "l2", "zero_unlearn": "general_weight"}[method]
            strengths = [{knob: relaxation * getattr(published, knob)} for relaxation in grid.relaxations]
        places = [self._window(depth, 1 if method == "rome" else grid.editor_width) for depth in grid.depths]
        return [replace(published, layers=layers, **strength) for strength in strengths for layers in places]

    def _window(self, depth: float, width: int) -> tuple[int, ...]:
        """Layers up to a depth; fewer where the model has too few below."""
        layers = self.model.config.num_hidden_layers
        last = max(0, min(int(depth * layers), layers - 2))
        return tuple(range(max(0, last - width + 1), last + 1))

    @cached_property
    def band(self) -> tuple[int, ...]:
        """The band of layers that attribution selects for GROM on the stand-in request."""
        width = min(self.grid.width, self.model.config.num_hidden_layers // 2)

        def compute() -> list[int]:
            fit = self._rehearsal()
            groups = fit.batches(FitSettings((0,), 1.0, batch_size=self.how.batch_size))
            return list(select_band(attribution(fit.model, *groups, fit.alpha), width))

        return tuple(remembered("zsre-band", [*self._recipe(), width], compute, CODE))

    def choose(self, method: str) -> list[Trial]:
        """All candidates of a method, tried on the stand-in request under the unlearning harness.

        Returns
        -------
        list of Trial
            In the order of the candidates; :func:`~unlearnlib.grom.choose.mildest` takes the best.
        """
        settings, validation = self.candidates(method), self._encode(self.split.validation)
        if method in GROM:
            fits = [one.fit for one in settings]

            def compute() -> list[list[float]]:
                return [[trial.forgetting, trial.preservation] for trial in try_all(self._rehearsal(), validation, fits)]

            found = remembered(f"zsre-trials-{method}", [self._recipe(), [asdict(one) for one in settings]], compute, CODE)
        else:
            recipes = [[self._recipe(), method, asdict(one)] for one in settings]
            found = [
                remembered(f"zsre-trial-{method}", recipe, lambda one=one: self._try(method, one, validation), CODE)
                for one, recipe in zip(settings, recipes, strict=True)
            ]
        return [Trial(one, *numbers) for one, numbers in zip(settings, found, strict=True)]

    def _rehearsal(self) -> FitData:
        return FitData(self.model, self._encode(self.split.stand_in), self._encode(self.split.anchors), progress=self.progress)

    def _try(self, method: str, settings: EditorSettings, validation: Sequence[Example]) -> list[float]:
        sets = [self._encode(self.split.stand_in), validation]

        def measure() -> list[torch.Tensor]:
            return [answer_probability(self.model, examples, batch_size=self.how.batch_size).mean() for examples in sets]

        before = measure()
        edit = self.run(method, self.split.stand_in, self.split.anchors, settings)
        with edit.applied(self.model):
            trial = weigh(settings, before, measure())
        return [trial.forgetting, trial.preservation]

    # ------------------------------------------------------------------------------------------------------------------------
    # Editing

    def run(self, method: str, facts: Sequence[dict], kept: Sequence[dict], settings, harness: str = UNLEARNING) -> Edit:
        """What a method makes of some facts, computed anew.

        Parameters
        ----------
        method : str
            From :data:`METHODS`.
        facts : sequence of dict
            To forget, or under the editing harness to change to their ``target``.
        kept : sequence of dict
            Facts that the method is told to keep: GROM's retain keys, and the text of which the editors take the keys' second moment.
        settings : GromSettings or EditorSettings
        harness : {"unlearning", "editing"}

        Returns
        -------
        Edit

        Raises
        ------
        ValueError
            If GROM is asked to teach an answer, or the method is unknown.
        """
        if method in GROM:
            if harness == EDITING:
                raise ValueError(f"{method} takes answers away and teaches none: it has no place in the editing harness")
            return grom(self.model, self.tokenizer, *(_items(rows) for rows in (facts, kept)), settings, progress=self.progress)
        if method not in EDITORS:
            raise ValueError(f"unknown method {method!r}: use {', '.join(METHODS)}")
        # None stands for the neutral object, the end of the text.
        wanted = facts if harness == EDITING else [fact | {"target": None} for fact in facts]
        moments, _ = self.moments(kept, settings.layers)
        return EDITORS[method](self.model, self.tokenizer, wanted, settings, moments=moments, progress=self.progress)

    def moments(self, kept: Sequence[dict], layers: Sequence[int]) -> tuple[dict[int, torch.Tensor], float]:
        """Second moments of the editors' keys over the text of facts to keep, a layer at a time, and the seconds that they took.

        Each layer's is computed once and kept in memory.
        """
        texts = [f"{fact['prompt']} {fact['answer']}" for fact in kept]
        digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
        for layer in layers:
            if (digest, layer) not in self._moments:
                began = time.perf_counter()
                found = key_moments(self.model, self.tokenizer, texts, [layer], batch_size=self.how.batch_size)
                self._moments[digest, layer] = found[layer], time.perf_counter() - began
        parts = [self._moments[digest, layer] for layer in layers]
        return {layer: moment for layer, (moment, _) in zip(layers, parts, strict=True)}, sum(seconds for _, seconds in parts)

    def reach(self, steps: int) -> list[dict]:
        """How much of a new answer the model says if an activation at the subject's last token may be anything: all that editors can do.

        Parameters
        ----------
        steps : int
            Gradient steps for each activation; nothing else holds it back.

        Returns
        -------
        list of dict
            One a depth: ``layer``, whose output is changed (−1 for the embeddings), and the shares of the stand-in facts' false answers'
            tokens that are said ``before`` and ``after``.
        """
        bands = [self._window(depth, self.grid.editor_width) for depth in self.grid.depths]
        free = {
            "clamp": 1e6,
            "v_decay": 0.0,
            "kl_factor": 0.0,
            "v_lr": VALUE_LR,
            "v_steps": steps,
            "prefix_lengths": (),
            "template": "plain",
        }
        free |= {"batch_size": self.grid.value_batch_size, "autocast": self.grid.autocast}

        def compute(layer: int) -> list[float]:
            settings, module = MemitSettings((max(layer, 0),), **free), self.model.get_input_embeddings() if layer < 0 else None
            facts = self.split.stand_in
            found = (value_accuracy(self.model, self.tokenizer, facts, settings, module=module, sought=sought) for sought in (False, True))
            return [accuracies.mean().item() for accuracies in found]

        found = []
        for layer in (-1, *sorted({layer for band in bands for layer in (band[0], band[-1])})):
            before, after = remembered("zsre-reach", [self._recipe(), layer, free], lambda layer=layer: compute(layer), CODE)
            found.append({"layer": layer, "before": before, "after": after})
        return found

    # ------------------------------------------------------------------------------------------------------------------------
    # Measuring

    def scores(self, method: str, count: int, settings=None, harness: str = UNLEARNING, *, speak: bool = False) -> dict:
        """How the first facts of the request are answered after a method has seen them.

        Parameters
        ----------
        method : str
            From :data:`METHODS`, or :data:`BEFORE`.
        count : int
            Size of the request.
        settings : GromSettings or EditorSettings, optional
            None for :data:`BEFORE`.
        harness : {"unlearning", "editing"}
        speak : bool
            Whether to let the model answer in its own words too.

        Returns
        -------
        dict
            ``scores``, see :func:`~unlearnlib.benchmarks.zsre_scores.evaluate`; ``seconds`` of the method, without the second moments of
            the editors' keys, which are ``moments_seconds``; both None for :data:`BEFORE`.

        Raises
        ------
        ValueError
            If the request has fewer facts.
        """
        if not 1 <= count <= len(self.split.forget):
            raise ValueError(f"a request of {count} facts is wanted; the split has {len(self.split.forget)}")
        # A model that no method touched is asked for all facts at once; the smaller requests are the first of them.
        asked = len(self.split.forget) if method == BEFORE and not speak else count
        how = self.how if speak else replace(self.how, max_new_tokens=0)
        recipe = [self._recipe(), method, asked, harness, None if settings is None else asdict(settings), asdict(how)]
        found = remembered(f"zsre-scores-{method}", recipe, lambda: self._score(method, asked, settings, harness, how), CODE)
        return found | {"scores": first(found["scores"], count)}

    def _score(self, method: str, count: int, settings, harness: str, how: Evaluation) -> dict:
        facts = self.split.forget[:count]

        def measure() -> Scores:
            return evaluate(self.model, self.tokenizer, facts, self.split.unrelated, harness, how, progress=self.progress)

        if method == BEFORE:
            return {"scores": measure(), "seconds": None, "moments_seconds": None}
        # Computed once for all edits, so not within their time.
        moments_seconds = 0.0 if method in GROM else self.moments(self.split.retain, settings.layers)[1]
        began = time.perf_counter()
        edit = self.run(method, facts, self.split.retain, settings, harness)
        seconds = time.perf_counter() - began
        with edit.applied(self.model):
            return {"scores": measure(), "seconds": seconds, "moments_seconds": moments_seconds}

    def _encode(self, facts: Sequence[dict]) -> list[Example]:
        return encode(self.tokenizer, _items(facts), template="plain")

    def _recipe(self) -> list:
        return [self._loaded[0], str(next(self.model.parameters()).dtype), asdict(self.split)]


_CONTEXT_LENGTH = 10
"""Tokens of the texts in front of a fact, as in the code of MEMIT and AlphaEdit."""


def _items(facts: Sequence[dict]) -> list[dict]:
    return [{"question": fact["prompt"], "answer": fact["answer"]} for fact in facts]


def lessons(split: Split) -> list[dict]:
    """What a model must have learned for the harness to mean something: the facts to forget in both phrasings, those to keep, of which
    those of the rehearsal in both too, and the unrelated questions.

    Returns
    -------
    list of dict
        ``question`` and ``answer``, no question twice.
    """
    twice = [*split.forget, *split.stand_in, *split.validation]
    pairs = [(prompt, fact["answer"]) for fact in twice for prompt in (fact["prompt"], fact["paraphrases"][0])]
    pairs += [(fact["prompt"], fact["answer"]) for fact in split.retain]
    pairs += [(question["prompt"], question["answer"]) for question in split.unrelated]
    return [{"question": question, "answer": answer} for question, answer in dict(reversed(pairs)).items()][::-1]


def make_study(
    split: Split,
    base: str,
    *,
    dataset: str = BUNDLED,
    seed: int = 0,
    tuning: dict | None = None,
    grid: dict | None = None,
    eval_batch_size: int = 32,
    max_new_tokens: int = 12,
    dtype: str = "float32",
    autocast: bool = False,
    device: str = "cpu",
    progress: bool = False,
) -> Study:
    """A study from a notebook's parameters.

    Parameters
    ----------
    split : Split
    base : str
        ``"tiny-llama"`` (or another family of :func:`~unlearnlib.models.build`) for a tiny model that is trained here to know the facts, or
        what :func:`~unlearnlib.models.load` takes.
    dataset : str
        Where the facts are from: a tiny model learns all bundled facts, of which the split may be a part, or else those of the split.
    seed : int
        Of training.
    tuning : dict
        Fields of :class:`~unlearnlib.finetune.FineTuning`, for a base model that is to be taught the facts first (:func:`lessons`); with
        ``epochs`` 0 or without `tuning` it is taken as it is.
    grid : dict
        Fields of :class:`Grid`.
    eval_batch_size, max_new_tokens : int
        See :class:`~unlearnlib.benchmarks.zsre_scores.Evaluation`.
    dtype : str
        Name of a torch type.
    autocast : bool
        Whether training and the search for values compute in bfloat16; weights, keys, all systems and scoring keep their type. Of two
        near tokens, bfloat16 can't say which is the argmax.
    device : str
    progress : bool

    Returns
    -------
    Study
        Which loads, and if need be trains, the model when it is needed.
    """

    def load() -> tuple[str, nn.Module, object]:
        if base.startswith(TINY):
            family = base.removeprefix(TINY)
            if dataset == BUNDLED:
                name, (model, tokenizer) = f"reciter-{family}-{seed}", reciter(family, seed)
            else:
                folder = scholar("facts", lessons(split), family=family, seed=seed)
                name, (model, tokenizer) = folder.name, models.load(str(folder))
            return name, model.to(device, getattr(torch, dtype)), tokenizer
        name, source = base, base
        if (tuning or {}).get("epochs"):
            settings = FineTuning(seed=seed, template="plain", autocast=autocast, **tuning)
            folder = finetuned(base, lessons(split), settings, name="facts", progress=progress)
            # Its name has the hash of what it was trained on, wherever the cache is.
            name, source = folder.name, str(folder)
        return name, *models.load(source, dtype=getattr(torch, dtype), device=device)

    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in (grid or {}).items()}
    return Study(split, load, Grid(**fields, autocast=autocast), Evaluation(eval_batch_size, max_new_tokens), progress)
