"""What unlearning costs: every method's time, in turns; the parts of a closed-form edit's, and how they grow; peak memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from tqdm.auto import tqdm

from .. import methods, models
from ..baselines import GradientSettings
from ..examples import Example
from ..grom import Edit, FitData, FitSettings
from ..grom.ridge import RidgeFitter
from ..measure import peak_mb
from ..methods import GROM, GromSettings, outcome
from .tofu_study import LORA, Study

LOADING = "loading"
"""In place of a method's name: to load the model and do nothing with it."""

PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "encode": ((methods, "as_examples"),),
    "moments": ((RidgeFitter, "update_forget"), (RidgeFitter, "update_retain")),
    "solve": ((RidgeFitter, "solve"),),
    "apply": ((Edit, "apply"),),
}
"""Parts of a closed-form edit, and the calls that they are the time of. Whatever else it does is for its keys."""

KEYS = "keys"

WARM_UP_ROWS = 8

Settings = GromSettings | GradientSettings


# ---------------------------------------------------------------------------------------------------------------------------
# Every method, in turns


def race(study: Study, names: Sequence[str], *, rounds: int = 3, timed_steps: int = 0) -> list[dict[str, float]]:
    """Seconds that each method takes on the same model and request, in one process.

    Parameters
    ----------
    study : Study
        Its mildest settings are taken: how strong a method is makes no difference to its time.
    names : sequence of str
        Of the methods.
    rounds : int
        How often each has its turn, after a warm-up with a few rows; every other round goes through them backwards.
    timed_steps : int
        Time only so many of a gradient method's steps, see :func:`method_seconds`; 0 for all of them.

    Returns
    -------
    list of dict of str to float
        For each round, the seconds by method.

    Raises
    ------
    ValueError
        If `rounds` is below 1, or `timed_steps` is 1 or negative.
    """
    works = {name: partial(method_seconds, study, name, _mildest(study, name)) for name in names}
    for work in tqdm(works.values(), desc="warming up", disable=not study.progress, leave=False):
        work(timed_steps=2, rows=WARM_UP_ROWS)
    return take_turns({name: partial(work, timed_steps=timed_steps) for name, work in works.items()}, rounds, progress=study.progress)


def take_turns(works: Mapping[str, Callable[[], float]], rounds: int, *, progress: bool = False) -> list[dict[str, float]]:
    """Rounds in which each work has one turn; every other round goes through them backwards.

    Parameters
    ----------
    works : mapping of str to callable
        Each gives its own seconds.
    rounds : int
    progress : bool

    Returns
    -------
    list of dict of str to float
        For each round, the seconds by work, in the order of `works`.

    Raises
    ------
    ValueError
        If there is no round.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    found = []
    for i in tqdm(range(rounds), desc="rounds", disable=not progress, leave=False):
        seconds = {name: works[name]() for name in (reversed(works) if i % 2 else works)}
        found.append({name: seconds[name] for name in works})
    return found


def summary(rounds: Sequence[Mapping[str, float]], reference: str = "grom") -> dict[str, tuple[float, float]]:
    """Each method's median seconds, and the median of its ratios to a reference, each ratio formed within one round.

    Parameters
    ----------
    rounds : sequence of mapping of str to float
        Seconds by method.
    reference : str

    Returns
    -------
    dict of str to (float, float)

    Raises
    ------
    KeyError
        If the reference took no part.
    """
    return {
        name: (
            statistics.median(seconds[name] for seconds in rounds),
            statistics.median(seconds[name] / seconds[reference] for seconds in rounds),
        )
        for name in rounds[0]
    }


def method_seconds(study: Study, name: str, settings: Settings, *, timed_steps: int = 0, rows: int | None = None) -> float:
    """Wall time of one method on the study's request, until its result can be used; without loading a model or measuring anything.

    Parameters
    ----------
    study : Study
    name : str
    settings : GromSettings or GradientSettings
    timed_steps : int
        If it is less than a gradient method's number of steps, only so many are taken, and the rest is extrapolated
        (:func:`extrapolated_seconds`). A closed-form edit has no steps and is always timed whole.
    rows : int, optional
        Take only the first so many rows to forget and to keep.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If `timed_steps` is 1 or negative.
    """
    if timed_steps < 0 or timed_steps == 1:
        raise ValueError(f"timed_steps must be at least 2, or 0 for all, got {timed_steps}")
    model, forget = study.full[0], study.data.forget[:rows]
    work, steps = partial(study.run, name, forget, study.anchors(name)[:rows], settings), step_count(settings, len(forget))
    if 0 < timed_steps < steps:
        return extrapolated_seconds(work, timed_steps, steps)
    began = time.perf_counter()
    with outcome(model, work()):
        return time.perf_counter() - began


def extrapolated_seconds(work: Callable[[], Any], timed: int, total: int) -> float:
    """Seconds of a training, from its first few steps.

    What comes before the second step is counted as it is, and the mean time of the timed steps that follow stands for each of the rest.

    Parameters
    ----------
    work : callable
        Trains with one optimiser of torch; it is left by an exception once enough steps were seen, so whatever it changes must be its own.
    timed : int
        Steps to take, 2 at least.
    total : int
        Steps that the whole training has.

    Returns
    -------
    float

    Raises
    ------
    RuntimeError
        If the work ends earlier.
    """
    moments = [time.perf_counter()]

    def note(*_: Any) -> None:
        moments.append(time.perf_counter())
        if len(moments) > timed:
            raise _EnoughSteps

    hook = register_optimizer_step_post_hook(note)
    try:
        with suppress(_EnoughSteps):
            work()
    finally:
        hook.remove()
    if len(moments) <= timed:
        raise RuntimeError(f"the training ended after {len(moments) - 1} steps, before the {timed} that were to be timed")
    return moments[1] - moments[0] + (total - 1) * (moments[-1] - moments[1]) / (timed - 1)


class _EnoughSteps(Exception):
    """Not an error: it ends a training whose rest isn't needed."""


def step_count(settings: Settings, rows: int) -> int:
    """Optimiser steps of a method that is to forget so many rows; 0 of a closed-form edit."""
    return 0 if isinstance(settings, GromSettings) else settings.epochs * math.ceil(rows / settings.batch_size)


def workload(study: Study, name: str) -> dict[str, int]:
    """What a method sends through the model, counted: this depends on no machine.

    Returns
    -------
    dict of str to int
        ``steps``; ``forward``, rows that go through the model once; ``trained``, rows whose gradient is computed, a row counted as often as
        that happens. Left out is what prepares the training: the reference's probabilities, and the alternatives that AltPO generates.
    """
    settings = _mildest(study, name)
    forget, anchors = len(study.data.forget), len(study.anchors(name))
    if isinstance(settings, GromSettings):
        return {"steps": 0, "forward": forget + anchors, "trained": 0}
    steps, size = step_count(settings, forget), min(settings.batch_size, forget)
    # IdkDPO and AltPO send a preferred answer through the model with each one to forget.
    groups = 1 + (settings.method in ("idk_dpo", "alt_po"))
    trained = steps * (groups * size + (min(size, anchors) if settings.retains else 0))
    return {"steps": steps, "forward": 0, "trained": trained}


def _mildest(study: Study, name: str) -> Settings:
    settings = study.candidates(name)[0]
    # A closed-form edit's passes are in the model's own type: only then are the others' times comparable.
    return settings if isinstance(settings, GromSettings) else replace(settings, autocast=False)


# ---------------------------------------------------------------------------------------------------------------------------
# The parts of a closed-form edit


def edit_parts(fit: Callable[[], Edit], model: nn.Module) -> dict[str, float]:
    """Seconds of the parts of an edit: fitted, and put into the model's weights.

    Parameters
    ----------
    fit : callable
        Gives the edit.
    model : transformers.PreTrainedModel
        Left as it was.

    Returns
    -------
    dict of str to float
        ``encode`` (texts to tokens), ``keys`` (the passes through the model that give the keys, and whatever isn't in another part),
        ``moments`` (Gram matrices and cross moments), ``solve``, ``apply`` (into the weights, of a band after each of its matrices; with
        the fingerprints that tell whether these are the weights it was fitted on).
    """
    spent = dict.fromkeys(("encode", KEYS, "moments", "solve", "apply"), 0.0)
    began = time.perf_counter()
    with ExitStack() as stack:
        for part, calls in PARTS.items():
            for owner, name in calls:
                stack.enter_context(_clocked(owner, name, spent, part))
        handle = fit().apply(model)
    whole = time.perf_counter() - began
    handle.revert()
    spent[KEYS] = whole - sum(spent.values())
    return spent


@contextmanager
def _clocked(owner: Any, name: str, spent: dict[str, float], part: str) -> Iterator[None]:
    """Add up the time of all calls of a function or method within the context."""
    original = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - began

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, original)


def study_parts(study: Study, name: str = "grom", repetitions: int = 2) -> dict[str, float]:
    """The parts of the edit of a study's request, see :func:`edit_parts`.

    Parameters
    ----------
    study : Study
    name : {"grom", "grom_head", "grom_both"}
    repetitions : int
        The one of median time is kept, of an even number the lower median.

    Returns
    -------
    dict of str to float
        Seconds.
    """
    if name not in GROM:
        raise ValueError(f"{name} is no closed-form edit: use {', '.join(GROM)}")
    fit = partial(study.run, name, study.data.forget, study.anchors(name), _mildest(study, name))
    return _median_parts([edit_parts(fit, study.full[0]) for _ in range(repetitions)])


def _median_parts(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return sorted(found, key=lambda parts: sum(parts.values()))[(len(found) - 1) // 2]


def growth(
    depths: Sequence[int],
    widths: Sequence[int],
    keys: Sequence[int],
    *,
    band: int = 2,
    repetitions: int = 2,
    seed: int = 0,
) -> list[dict[str, float | str]]:
    """The parts of an edit of random models and examples, as one of three sizes grows and the other two stay at their middle value.

    Parameters
    ----------
    depths : sequence of int
        Layers of the model.
    widths : sequence of int
        Width n of a key: the intermediate size. The hidden size is half of it.
    keys : sequence of int
        Forget and retain keys together, one forget key in 11.
    band : int
        Layers to edit, the last ones.
    repetitions : int
        As in :func:`study_parts`, after one that doesn't count.
    seed : int

    Returns
    -------
    list of dict
        ``grows`` (``layers``, ``width`` or ``keys``), the three sizes by these names, ``seconds``, and ``<part>_seconds``.

    Raises
    ------
    ValueError
        If a list is empty.
    """
    ranges = {"layers": depths, "width": widths, "keys": keys}
    for name, values in ranges.items():
        if not values:
            raise ValueError(f"no values of {name} are given")
    middle = {name: values[len(values) // 2] for name, values in ranges.items()}
    rows, measured = [], {}
    for name, values in ranges.items():
        for value in values:
            sizes = middle | {name: value}
            # The middle belongs to all three, and is measured once.
            if (at := tuple(sizes.values())) not in measured:
                measured[at] = _random_edit(**sizes, band=band, repetitions=repetitions, seed=seed)
            seconds = {f"{part}_seconds": spent for part, spent in measured[at].items()}
            rows.append({"grows": name, **sizes, "seconds": sum(seconds.values()), **seconds})
    return rows


VOCABULARY, PROMPT, ANSWER = 512, 12, 16
"""Of the random models, and the tokens of each of their examples."""


def _random_edit(*, layers: int, width: int, keys: int, band: int, repetitions: int, seed: int) -> dict[str, float]:
    sizes = {"hidden_size": width // 2, "intermediate_size": width, "layers": layers, "heads": 4}
    model = models.build(vocab_size=VOCABULARY, seed=seed, **sizes)
    count = max(11, round(keys / ANSWER))
    tokens = torch.randint(VOCABULARY, (count, PROMPT + ANSWER), generator=torch.Generator().manual_seed(seed)).tolist()
    examples = [Example(tuple(row[:PROMPT]), tuple(row[PROMPT:])) for row in tokens]
    forget, retain = examples[: count // 11], examples[count // 11 :]
    settings = FitSettings(tuple(range(layers - band, layers)), 1.0)
    found = [edit_parts(lambda: FitData(model, forget, retain).fit(settings), model) for _ in range(1 + repetitions)]
    return _median_parts(found[1:])


# ---------------------------------------------------------------------------------------------------------------------------
# Peak memory


def peaks(study: Study, names: Sequence[str]) -> dict[str, float]:
    """Peak memory, in MB, of a fresh process that loads the model and unlearns with one method, above what it had before.

    Parameters
    ----------
    study : Study
    names : sequence of str
        Methods, and :data:`LOADING`. Two steps of a gradient method are taken, which hold all that it ever holds.

    Returns
    -------
    dict of str to float
        By method.

    Notes
    -----
    What loading a model takes for a moment may be more than the model itself: a method's peak is no lower than that.
    """
    # The study as another process can load it: by the folder of its model, whose own way of loading can't be sent there.
    lean = replace(study, full_model=study.folder("full"), load=models.load, progress=False)
    settings = {name: None if name == LOADING else _mildest(study, name) for name in names}
    return {
        name: peak_mb(partial(_warm_up, name.endswith(LORA)), partial(_load_and_unlearn, lean, name, chosen))
        for name, chosen in settings.items()
    }


def _warm_up(adapters: bool) -> None:
    """Have a process import what a method needs, and do what torch does only once."""
    if adapters:
        import peft  # noqa: F401

    model = models.build(hidden_size=32, intermediate_size=32, layers=1)
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()


def _load_and_unlearn(study: Study, name: str, settings: Settings | None) -> None:
    _ = study.full
    if settings is not None:
        method_seconds(study, name, settings, timed_steps=2)
