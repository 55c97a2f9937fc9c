"""One call that does it all on a model: encode, choose, fit, measure, report."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from torch import nn

from ..elicit import answers_correctly, ask, in_own_words
from ..examples import Example, encode, read_jsonl
from ..metrics import answer_probability, repeated_ngram_rate
from .anatomy import HEAD, Anatomy
from .choose import Trial, best, candidates, split_retain, try_all
from .edit import Edit, fingerprint
from .fit import FitData, FitSettings
from .keys import check_band

STRENGTHS = (10.0, 20.0, 40.0, 80.0)
HEAD_STRENGTHS = (5.0, 10.0, 20.0, 40.0)

Items = Sequence[dict] | str | os.PathLike


@dataclass(frozen=True)
class Report:
    """What an unlearning call did, what was forgotten, and what it cost.

    Attributes
    ----------
    settings : FitSettings
        Of the fit.
    reasons : tuple of str
        Why these settings.
    trials : tuple of Trial
        The candidates and how they did on validation data.
    measures : dict of str to float
        ``<set>_probability_before/after`` for the forget, the retain and the held-out retain examples; ``forget_said_before/after``: how
        many of the request's questions are answered with the forgotten answer when the model generates freely;
        ``repeated_4gram_after``: repetition in these answers.
    generations : tuple of (str, str, str)
        Question, answer before, answer after.
    warnings : tuple of str
        What to worry about.
    seconds : dict of str to float
        Where the time went.
    """

    settings: FitSettings
    reasons: tuple[str, ...]
    trials: tuple[Trial, ...]
    measures: dict[str, float]
    generations: tuple[tuple[str, str, str], ...]
    warnings: tuple[str, ...]
    seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict:
        """The report in JSON's own types."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"edited: {_place(self.settings)}, β = {self.settings.strength:g}, w_r = {self.settings.retain_weight:g}"]
        lines += [f"  because {reason}" for reason in self.reasons]
        for name in dict.fromkeys(key.rsplit("_", 1)[0] for key in self.measures):
            before, after = (self.measures.get(f"{name}_{when}") for when in ("before", "after"))
            lines.append(f"{name.replace('_', ' ')}: " + (f"{before:.3f} → {after:.3f}" if before is not None else f"{after:.3f}"))
        for question, before, after in self.generations[:3]:
            lines += [f"  {question}", f"    before: {before}", f"    after:  {after}"]
        lines += [f"warning: {text}" for text in self.warnings]
        lines.append("seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items()))
        return "\n".join(lines)


def unlearn(
    model: nn.Module,
    tokenizer,
    forget: Items,
    retain: Items,
    *,
    layers: Sequence[int | str] | str = "auto",
    strength: float | None = None,
    target: str = "suppress",
    retain_weight: float = 100.0,
    forget_weight: float = 1.0,
    ridge: float = 0.03,
    head_strength: float | None = None,
    width: int = 6,
    alpha_source: Items | None = None,
    own_words: bool = True,
    template: str = "auto",
    system: str | None = None,
    max_new_tokens: int = 32,
    batch_size: int = 16,
    keep_audit: bool = True,
    seed: int = 0,
    progress: bool = False,
) -> tuple[Edit, Report]:
    """Fit an edit that makes a model forget some answers and keep others.

    Where and how strongly to edit is chosen on validation data: some retain examples play the request, others are held out to see what
    is preserved. The request itself is never used for the choice.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Left as it was; apply the edit that is returned.
    tokenizer : transformers.PreTrainedTokenizerBase
    forget, retain : sequence of dict, or path of a JSON-lines file
        With the text fields ``question`` and ``answer``.
    layers : "auto", "mlp", "head", or sequence of int and "head"
        What to edit. ``"auto"`` chooses between the LM head and the band of layers that attribution selects, ``"mlp"`` takes that band.
    strength : float, optional
        β (c for a corruption); chosen on validation data by default.
    target : {"suppress", "corrupt"}
        See :class:`~unlearnlib.grom.fit.FitSettings`, as for `retain_weight`, `forget_weight` and `ridge`.
    retain_weight, forget_weight, ridge : float
    head_strength : float, optional
        β of the head where it is edited after a band; `strength` by default.
    width : int
        Layers of the band.
    alpha_source : sequence of dict or path, optional
        Where the retain frequencies of the specificity α come from; `retain` by default.
    own_words : bool
        Whether to let the model answer every question first, and edit where it says the answer in its own sentence
        (:func:`~unlearnlib.elicit.in_own_words`). A pass of generation over both sets.
    template, system : str
        How to render questions, see :func:`~unlearnlib.examples.encode`.
    max_new_tokens : int
        How long the model may answer when it is asked.
    batch_size : int
        Examples a forward pass.
    keep_audit : bool
        Whether the edit is to carry what its audit needs.
    seed : int
        Of the validation split and of the corruption direction.
    progress : bool
        Whether to show progress bars.

    Returns
    -------
    edit : Edit
    report : Report

    Raises
    ------
    ValueError, IndexError
        If an input or a parameter is not usable; before any long work.

    Examples
    --------
    >>> edit, report = unlearn(model, tokenizer, "forget.jsonl", "retain.jsonl")  # doctest: +SKIP
    >>> with edit.applied(model):  # doctest: +SKIP
    ...     print(report)
    """
    anatomy = Anatomy(model)
    named = _named_layers(layers, anatomy)
    if target == "corrupt" and layers == "auto":
        layers = "mlp"
    if width < 1:
        raise ValueError(f"width must be positive, got {width}")
    # Where nothing is named, candidates replace the place and the strength.
    unit = 1.0 if strength is None else strength
    base = FitSettings(named or (0,), unit, target, retain_weight, forget_weight, ridge, head_strength, seed, batch_size)
    for where in named or range(len(anatomy.layers)):
        anatomy.check_weight(where)
    sets = {"forget": _items(forget, "forget"), "retain": _items(retain, "retain")}
    encoding = {"template": template, "system": system}
    asking = {"max_new_tokens": max_new_tokens, "progress": progress, **encoding}
    plain = {name: encode(tokenizer, items, **encoding) for name, items in sets.items()}
    source = None if alpha_source is None else encode(tokenizer, _items(alpha_source, "alpha_source"), **encoding)
    choosing = not named or strength is None
    stand_in, held_out, rest = split_retain(sets["retain"], len(sets["forget"]), seed) if choosing else ([], [], [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # An edit that could do nothing is refused before anything is generated.
        FitData(model, plain["forget"], plain["retain"], alpha_source=source).targets(base, base.layers[-1])
    clock = {"start": time.perf_counter()}

    said = ask(model, tokenizer, sets["forget"], **asking)
    examples = plain
    if own_words:
        everything = {"forget": said, "retain": ask(model, tokenizer, sets["retain"], **asking)}
        examples = {name: encode(tokenizer, in_own_words(everything[name], items), **encoding) for name, items in sets.items()}
    clock["answering"] = time.perf_counter()

    options = {"alpha_source": source, "progress": progress}
    kept = [example for i, example in enumerate(examples["retain"]) if i not in set(held_out)]
    request = FitData(model, examples["forget"], kept, **options)
    settings, reasons, trials = base, ("layers and strength were given",), []
    if choosing:
        with warnings.catch_warnings():
            # A low specificity of the stand-in says nothing of the request's, whose own is warned about when it is fitted.
            warnings.simplefilter("ignore")
            data = FitData(model, _pick(examples["retain"], stand_in), _pick(examples["retain"], rest), **options)
            validation = [_whole_answer(examples["retain"][i], plain["retain"][i]) for i in held_out]
            trials = try_all(data, validation, _candidates(data, base, layers, named, strength, width))
        settings, reasons = best(trials).settings, _reasons(best(trials), trials, stand_in, held_out)
    clock["choosing"] = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        edit = request.fit(settings, keep_audit=keep_audit)
    # Fingerprints of the request as it was made, whatever words the model has for it.
    edit = replace(edit, fingerprints=tuple(fingerprint(example, edit.key) for example in plain["forget"]))
    clock["fitting"] = time.perf_counter()

    groups = {"forget": examples["forget"], "retain": kept, "held_out": _pick(examples["retain"], held_out)}
    before = _probabilities(model, groups, progress)
    with edit.applied(model):
        after = _probabilities(model, groups, progress)
        said_after = ask(model, tokenizer, sets["forget"], **asking)
    measures = {f"{name}_probability_{when}": values[name] for name in before for when, values in (("before", before), ("after", after))}
    for when, texts in (("before", said), ("after", said_after)):
        correct = answers_correctly(texts, sets["forget"])
        measures[f"forget_said_{when}"] = sum(correct) / len(correct)
    measures["repeated_4gram_after"] = sum(map(repeated_ngram_rate, said_after)) / len(said_after)
    clock["measuring"] = time.perf_counter()

    concerns = [str(warning.message) for warning in caught] + _concerns(measures, edit, model)
    moments = list(clock.items())
    seconds = {name: now - moments[i][1] for i, (name, now) in enumerate(moments[1:])}
    questions = [item["question"] for item in sets["forget"]]
    generations = tuple(zip(questions, said, said_after, strict=True))
    return edit, Report(settings, reasons, tuple(trials), measures, generations, tuple(concerns), seconds)


def _named_layers(layers: Sequence[int | str] | str, anatomy: Anatomy) -> tuple[int | str, ...]:
    """The layers that are named, none for "auto" and "mlp"; an unknown one is an error."""
    if not isinstance(layers, (str, Sequence)) or (isinstance(layers, str) and layers not in ("auto", "mlp", HEAD)):
        raise ValueError(f"layers must be auto, mlp, head, or a sequence of layer numbers, got {layers!r}")
    if isinstance(layers, str):
        return (HEAD,) if layers == HEAD else ()
    if not layers:
        raise ValueError("layers is empty: name a band of layers, or 'head'")
    if band := [where for where in layers if where != HEAD]:
        check_band(anatomy, band)
    return tuple(layers)


def _items(source: Items, what: str) -> list[dict]:
    items = read_jsonl(source) if isinstance(source, (str, os.PathLike)) else list(source)
    if not items:
        raise ValueError(f"the {what} set is empty")
    return items


def _pick(examples: Sequence[Example], indices: Sequence[int]) -> list[Example]:
    return [examples[i] for i in indices]


def _whole_answer(placed: Example, plain: Example) -> Example:
    """The model's whole sentence as the answer, words before it included: damage may show there first."""
    return Example(plain.prompt, placed.prompt[len(plain.prompt) :] + placed.answer, plain.name)


def _probabilities(model: nn.Module, groups: dict[str, list[Example]], progress: bool) -> dict[str, float]:
    return {name: answer_probability(model, group, progress=progress).mean().item() for name, group in groups.items() if group}


def _candidates(data, base, layers, named, strength, width) -> list[FitSettings]:
    given = () if strength is None else (strength,)
    if named and named != ("head",):
        return [replace(base, layers=named, strength=beta) for beta in STRENGTHS]
    head = () if layers == "mlp" else given or HEAD_STRENGTHS
    band = () if named == ("head",) else given or STRENGTHS
    return candidates(data, base, band, head, width)


def _reasons(chosen: Trial, trials: Sequence[Trial], stand_in: Sequence[int], held_out: Sequence[int]) -> tuple[str, ...]:
    tried = f"{len(trials)} candidates were fitted on {len(stand_in)} retain examples that played the request"
    seen = f"forgetting {chosen.forgetting:.3f} there, preservation {chosen.preservation:.3f} on {len(held_out)} held-out retain examples"
    return (f"{tried}; this one had the best mean of both, or is milder and as good: {seen}",)


def _place(settings: FitSettings) -> str:
    layers = [where for where in settings.layers if isinstance(where, int)]
    band = [f"MLP output of layers {layers[0]}–{layers[-1]}"] if layers else []
    return " and ".join(band + (["LM head"] if "head" in settings.layers else []))


def _concerns(measures: dict[str, float], edit: Edit, model: nn.Module) -> list[str]:
    found = []
    if (unsaid := 1 - measures["forget_said_before"]) > 0:
        found.append(
            f"{unsaid:.0%} of the request's questions weren't answered with the given answer before the edit, in the first words at least: "
            "these were edited where a bare answer would begin. Check the answers' wording"
        )
    if measures["forget_said_after"] > 0.5 * measures["forget_said_before"] > 0:
        found.append(
            "free generation still gives more than half of the forgotten answers: raise the strength, or add phrasings to the request"
        )
    for name in ("held_out", "retain"):
        before, after = (measures.get(f"{name}_probability_{when}", 1.0) for when in ("before", "after"))
        if after < 0.9 * before:
            found.append(f"{name.replace('_', '-')} retain answers lost {1 - after / before:.0%} of their probability")
    if measures["repeated_4gram_after"] > 0.2:
        found.append("answers to the request's questions repeat themselves: the edit may be too strong")
    lost = {name: share for name, share in edit.survival(model).items() if share < 0.9}
    if lost:
        found.append(f"rounding to the weights' type loses part of the edit: {', '.join(f'{k} keeps {v:.0%}' for k, v in lost.items())}")
    return found
