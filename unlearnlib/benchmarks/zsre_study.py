"""The study of single facts: GROM and the model editors on requests of growing size, under both harnesses, with one rule for settings."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from .. import models
from ..baselines.editing import EditorSettings
from ..baselines.editors import DEVIATIONS, EDITORS, NOT_ESTABLISHED, SETTINGS, MemitSettings, key_moments, value_accuracy
from ..examples import Example, encode
from ..finetune import FineTuning, finetuned
from ..grom import HEAD, Edit, FitData, FitSettings, attribution, select_band
from ..grom.choose import Trial, mildest, try_all, weigh
from ..methods import GromSettings, grom
from ..metrics import answer_probability
from ..published import NAMES as COMMON_NAMES
from ..remembered import remembered
from ..tiny import reciter, scholar
from .zsre import BUNDLED, Split
from .zsre_scores import EDITING, OWN, UNLEARNING, Evaluation, Scores, evaluate, first, table_row

CODE = "import unlearnlib.benchmarks.zsre_study"

BEFORE = "full"
"""The row of the model as it was."""

GROM = ("grom_head", "grom")
METHODS = (*GROM, *EDITORS)
"""Methods of the tables."""

NAMES = COMMON_NAMES | {"zero_unlearn_gd": "ZeroUnlearn-GD"}
"""How a table or a picture calls a method."""

PUBLISHED_STRENGTHS = {"grom_head": 20.0, "grom": 65.0}
"""β of the GROM paper: of its LM-head edit for zsRE, and of the band for the smaller of its two TOFU models (none is published for a band
and zsRE)."""

EDITABLE = 0.5
"""Editors count in a comparison if the best of them gets to this efficacy in the editing harness, which is what they were built for."""

NOT_EDITABLE = "can't be told: no editor can edit this model"
"""The verdict on what would hold against editors where none gets so far."""

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
        published = SETTINGS[method]((0,), template="plain", batch_size=grid.value_batch_size, autocast=self.how.autocast)
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
            "v_lr": _FREE_LR,
            "v_steps": steps,
            "prefix_lengths": (),
            "template": "plain",
        }
        free |= {"batch_size": self.grid.value_batch_size, "autocast": self.how.autocast}

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

_FREE_LR = 0.1
"""Learning rate where an activation may be anything."""


def _items(facts: Sequence[dict]) -> list[dict]:
    return [{"question": fact["prompt"], "answer": fact["answer"]} for fact in facts]


def lessons(split: Split) -> list[dict]:
    """What a model must have learned for the harness to mean something: the facts to forget in both phrasings, those to keep, and the
    unrelated questions.

    Returns
    -------
    list of dict
        ``question`` and ``answer``, no question twice.
    """
    pairs = [(prompt, fact["answer"]) for fact in split.forget for prompt in (fact["prompt"], fact["paraphrases"][0])]
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
        Whether training, the search for values and scoring compute in bfloat16; weights, keys and all systems keep their type.
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
    return Study(split, load, Grid(**fields), Evaluation(eval_batch_size, max_new_tokens, autocast), progress)


# ---------------------------------------------------------------------------------------------------------------------------
# Tables


@dataclass
class Tables:
    """What a run of the page records; every row of scores has ``method``, ``facts``, ``harness`` and ``protocol``.

    Attributes
    ----------
    rows : list of dict
        The unlearning harness at one size of request: a row a method, see :func:`~unlearnlib.benchmarks.zsre_scores.table_row`, with
        ``seconds`` and ``moments_seconds``.
    dilution : list of dict
        The same for every size, without the model's own answers.
    editing : list of dict
        The editing harness: a row an editor, and the model before it.
    choices : list of dict
        One a candidate: ``method``, ``candidate`` (from 0, the mildest first), ``settings``, ``forgetting``, ``preservation``, ``score``
        and ``chosen``.
    reach : list of dict
        See :meth:`Study.reach`.
    """

    rows: list[dict] = field(default_factory=list)
    dilution: list[dict] = field(default_factory=list)
    editing: list[dict] = field(default_factory=list)
    choices: list[dict] = field(default_factory=list)
    reach: list[dict] = field(default_factory=list)

    @property
    def editable(self) -> bool:
        """Whether editors can edit the model, as far as that was measured: see :data:`EDITABLE`."""
        found = [row["efficacy"] for row in self.editing if row["method"] in EDITORS]
        return not found or max(found) >= EDITABLE


def make_tables(
    study: Study,
    methods: Sequence[str],
    *,
    facts: int,
    counts: Sequence[int],
    editor_counts: Sequence[int],
    editing_facts: int = 0,
    reach_steps: int = 0,
    gathered: Iterable[Mapping] = (),
) -> Tables:
    """Choose every method's settings, and measure it on requests of several sizes; or take that from records of other runs.

    Parameters
    ----------
    study : Study
    methods : sequence of str
        From :data:`METHODS` and :data:`BEFORE`.
    facts : int
        The size of request that the main table has.
    counts, editor_counts : sequence of int
        The sizes that GROM and the model before it are measured on, and those of the editors, which take longer.
    editing_facts : int
        The size of request of the editing harness; 0 leaves it out.
    reach_steps : int
        See :meth:`Study.reach`; 0 leaves it out.
    gathered : iterable of record
        Records of other runs of the page on the same split. A method's choices and rows are taken from them where they are there.

    Returns
    -------
    Tables
        In the order of `methods`.

    Raises
    ------
    ValueError
        Before any work, if a method is unknown, a request is larger than the split's, `facts` is not among the sizes, or a record is of
        another split.
    """
    for method in methods:
        if method not in (*METHODS, BEFORE):
            raise ValueError(f"unknown method {method!r}: use {', '.join((BEFORE, *METHODS))}")
    for name, sizes in (("counts", counts), ("editor_counts", editor_counts)):
        if facts not in sizes:
            raise ValueError(f"{name} must contain facts = {facts}, the size of the main table, got {list(sizes)}")
        if max(sizes) > len(study.split.forget) or min(sizes) < 1:
            raise ValueError(f"{name} must lie within 1 … {len(study.split.forget)}, the facts to forget, got {list(sizes)}")
    if not 0 <= editing_facts <= len(study.split.forget):
        raise ValueError(f"editing_facts must lie within 0 … {len(study.split.forget)}, the facts to forget, got {editing_facts}")
    if reach_steps < 0:
        raise ValueError(f"reach_steps must be at least 0, got {reach_steps}")
    known, tables = _gather(gathered, study.split.digest), Tables()

    def measured(table: str, method: str, count: int, settings, *options) -> dict:
        """A row that a record has, or a new one."""
        same = [row for row in getattr(known, table) if (row["method"], row["facts"]) == (method, count)]
        return same[0] if same else _row(study, method, count, settings(), *options)

    for method in methods:
        tables.choices += (choices := _choices(study, method, known.choices))

        def settings(method=method, choices=choices):
            return next((study.candidates(method)[choice["candidate"]] for choice in choices if choice["chosen"]), None)

        row = measured("rows", method, facts, settings, UNLEARNING, True)
        tables.rows.append(row)
        for count in editor_counts if method in EDITORS else counts:
            if count == facts:
                tables.dilution.append({name: value for name, value in row.items() if name not in OWN})
            else:
                tables.dilution.append(measured("dilution", method, count, settings))
        if editing_facts and method not in GROM:
            tables.editing.append(measured("editing", method, editing_facts, settings, EDITING, True))
    if reach_steps:
        tables.reach = known.reach or study.reach(reach_steps)
    return tables


def _gather(gathered: Iterable[Mapping], digest: str) -> Tables:
    """What records of other runs have; of what several have, the first one's counts."""
    known = Tables()
    for record in gathered:
        values = record["values"]
        if values["split"] != digest:
            raise ValueError(f"the record {record['notebook']}/{record['run']} is of other facts (split {values['split']}, here {digest})")
        for table in ("rows", "dilution", "editing"):
            getattr(known, table).extend(values[table])
        known.reach = known.reach or values["reach"]
        new = {choice["method"] for choice in values["choices"]} - {choice["method"] for choice in known.choices}
        known.choices += [choice for choice in values["choices"] if choice["method"] in new]
    return known


def _choices(study: Study, method: str, known: Sequence[dict]) -> list[dict]:
    found = [choice for choice in known if choice["method"] == method]
    if method == BEFORE or found:
        return found
    trials = study.choose(method)
    best = mildest(trials)
    return [
        {
            "method": method,
            "candidate": i,
            "settings": describe(trial.settings),
            "forgetting": trial.forgetting,
            "preservation": trial.preservation,
            "score": trial.score,
            "chosen": trial is best,
        }
        for i, trial in enumerate(trials)
    ]


def _row(study: Study, method: str, count: int, settings, harness: str = UNLEARNING, speak: bool = False) -> dict:
    found = study.scores(method, count, settings, harness, speak=speak)
    times = {name: found[name] for name in ("seconds", "moments_seconds")}
    return {"method": method, "facts": count} | table_row(found["scores"], harness) | times


def blank_rows() -> list[dict]:
    """Rows that a table of this benchmark would have, and that are left blank: ``method`` and the ``reason``."""
    return [{"method": NAMES[name], "reason": reason} for name, reason in NOT_ESTABLISHED.items()]


def claims(tables: Tables) -> list[dict]:
    """What is claimed of GROM, held against the table's rows.

    Returns
    -------
    list of dict
        ``method``, the variant of GROM; ``claim``; ``grom`` and ``other``, the two numbers that decide it; ``against``, whose the second
        is; ``verdict``: ``holds``, ``doesn't hold``, or ``can't be told`` where the two differ by less than half the width of the 95 %
        bootstrap interval, over facts and unrelated questions, of GROM's number, or, with :data:`NOT_EDITABLE`, where editors can't do
        on this model what they were built for.

    Notes
    -----
    Claims of a table that lacks a row they need are left out. Pareto-best: no editor forgets at least as well and keeps at least as much,
    and does one of both better.
    """
    rows = {row["method"]: row for row in tables.rows}
    editors = [row for name, row in rows.items() if name in EDITORS]
    found = []
    for method in GROM:
        if method not in rows:
            continue
        row = rows[method]
        if editors:
            best = max(editors, key=lambda other: other["final"])
            dominating = [other for other in editors if _dominates(other, row)]
            against_editors = [
                _verdict(method, "highest Final of all methods", row["final"], best["final"], best["method"], _final_noise(row)),
                {
                    "method": method,
                    "claim": "Pareto-best: no editor dominates it",
                    "grom": row["final"],
                    "other": max((other["final"] for other in dominating), default=None),
                    "against": ", ".join(other["method"] for other in dominating) or None,
                    "verdict": "doesn't hold" if dominating else "holds",
                },
            ]
            # An editor that can't work here is no rival. One that is better all the same is.
            for claim in against_editors:
                if claim["verdict"] == "holds" and not tables.editable:
                    claim["verdict"] = NOT_EDITABLE
            found += against_editors
        sizes = sorted((other for other in tables.dilution if other["method"] == method), key=lambda other: other["facts"])
        if len(sizes) > 1:
            few, many = sizes[0], sizes[-1]
            noise = (few["efficacy_high"] - few["efficacy_low"]) / 2
            claim = f"one solve dilutes: efficacy is worse on {many['facts']} facts than on {few['facts']}"
            found.append(_verdict(method, claim, many["efficacy"], few["efficacy"], method, noise))
    return found


def _verdict(method: str, claim: str, value: float, other: float, against: str, noise: float) -> dict:
    verdict = "can't be told" if abs(value - other) < noise else "holds" if value > other else "doesn't hold"
    return {"method": method, "claim": claim, "grom": value, "other": other, "against": against, "verdict": verdict}


def _final_noise(row: Mapping[str, float]) -> float:
    """Half the width of an interval of Final: its three terms are independent to the first order."""
    widths = {name: (row[f"{name}_high"] - row[f"{name}_low"]) / 2 for name in ("efficacy", "generalization", "specificity")}
    # Efficacy and generalization are about the same facts, so that their errors add up.
    return 0.5 * (widths["specificity"] ** 2 + (0.5 * (widths["efficacy"] + widths["generalization"])) ** 2) ** 0.5


def _dominates(other: Mapping[str, float], row: Mapping[str, float]) -> bool:
    pairs = [(-(one["efficacy"] + one["generalization"]), one["specificity"]) for one in (other, row)]
    return all(a >= b for a, b in zip(*pairs, strict=True)) and pairs[0] != pairs[1]


def describe(settings: GromSettings | EditorSettings) -> str:
    """Settings in a few words: the place, and what was varied."""
    if isinstance(settings, GromSettings):
        layers, what = settings.fit.layers, f"β {settings.fit.strength:g}"
    else:
        knobs = {"mom2_weight": "λ", "l2": "L2", "general_weight": "a"}
        found = [f"{sign} {getattr(settings, name):g}" for name, sign in knobs.items() if hasattr(settings, name)]
        layers, what = settings.layers, found[0] if found else f"clamp {settings.clamp:g}"
    if layers == (HEAD,):
        return f"LM head, {what}"
    return (f"layer {layers[0]}, " if len(layers) == 1 else f"layers {layers[0]}–{layers[-1]}, ") + what


def deviations_table() -> str:
    """Where the editors depart from their official code, as a Markdown table."""
    lines = ["| method | official code | here |", "|---|---|---|"]
    return "\n".join(lines + [f"| {method} | {theirs} | {ours} |" for method, theirs, ours in DEVIATIONS])
