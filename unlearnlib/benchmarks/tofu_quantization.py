"""Rounding to 4 bits as an attack on unlearning: what the models of the TOFU study then say, and what is left of the updates.

Two things are told apart: what rounding does to a method's update of the weights, and whether the forgotten answers come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

import torch
from torch import Tensor, nn

from ..baselines import GradientSettings
from ..examples import encode, encode_question
from ..grom.anatomy import Anatomy
from ..methods import GromSettings
from ..metrics import bfloat16, generate
from ..quantize import SCHEMES, Survival, block_weights, on_grid, quantized, update_survival
from ..remembered import remembered
from ..stats import bootstrap_interval
from ..unlearning_metrics import rouge_l, teacher_forced
from .tofu_scores import Evaluation, mean
from .tofu_study import Study
from .tofu_tables import MODELS

CODE = "import unlearnlib.benchmarks.tofu_quantization"

NONE = "none"
"""In place of a scheme: the weights as they are."""

FORGOTTEN = 0.25
"""Where unlearning has taken less than this part of a score away there is too little to come back, and no share of it is given."""

COMES_BACK, STAYS = 0.5, 0.1
"""Shares of the difference from which on a score counts as recovered, and up to which as not."""

RECOVERED = ("prob", "rouge_l")
"""The scores that :func:`recovery` is told of."""

UPDATE = ("update_size", "update_survival", "update_norm", "codes_changed", "rank_before", "rank_after")
"""What is told of an update."""

Answers = dict[str, list[float]]
"""Scores by measure and forget row: ``prob``, ``rouge_l`` and ``extraction``."""


# ---------------------------------------------------------------------------------------------------------------------------
# The attack


def attack(
    study: Study, method: str, schemes: Sequence[str], settings: GromSettings | GradientSettings | None = None, *, head: bool = False
) -> dict[str, dict]:
    """What a model of the study says of the forget rows, as it is and rounded; kept in the cache.

    Parameters
    ----------
    study : Study
    method : str
        From :data:`~unlearnlib.methods.METHODS` or :data:`~unlearnlib.benchmarks.tofu_tables.MODELS`.
    schemes : sequence of str
        Keys of :data:`~unlearnlib.quantize.SCHEMES`.
    settings : GromSettings or GradientSettings, optional
        Of the method, see :func:`~unlearnlib.benchmarks.tofu_settings.chosen_settings`; None for a model that no method made.
    head : bool
        Whether the LM head is rounded as well, see :func:`~unlearnlib.quantize.block_weights`.

    Returns
    -------
    dict of str to dict
        By scheme, :data:`NONE` first: ``answers``, see :data:`Answers`, and ``update``, the change from the model before unlearning:
        ``update_size``, see :func:`size`, and what rounding leaves of it, see :func:`describe`; None for a model that no method made.
    """
    made = None if settings is None else asdict(settings)
    recipe = [study.data.digest, study.base, study.folder("full"), method, made, asdict(study.how), str(study.dtype), *schemes, head]
    if method == "retain":
        recipe.append(study.folder("retain"))
    return remembered(f"tofu-quantized-{method}", recipe, lambda: _attack(study, method, settings, schemes, head), CODE)


def _attack(study: Study, method: str, settings, schemes: Sequence[str], head: bool) -> dict[str, dict]:
    full, tokenizer = study.full
    # Copies: an edit is applied to these very weights.
    before = {} if method in MODELS else {name: weight.clone() for name, weight in block_weights(full, head=head).items()}
    found = {}
    with study.model(method, settings) as model:
        for scheme in (NONE, *schemes):
            update = None
            if before:
                after = block_weights(model, head=head)
                survival = Survival(()) if scheme == NONE else update_survival(before, after, scheme)
                update = {"update_size": size(before, after), **describe(survival)}
            with _rounded(model, scheme, head=head):
                answers = say(model, tokenizer, study.data.forget, study.how, progress=study.progress)
            found[scheme] = {"answers": answers, "update": update}
    return found


def _rounded(model: nn.Module, scheme: str, **options) -> AbstractContextManager[nn.Module]:
    return nullcontext(model) if scheme == NONE else quantized(model, scheme, **options)


def say(model: nn.Module, tokenizer, rows: Sequence[dict], how: Evaluation, *, progress: bool = False) -> Answers:
    """Scores of a model on some rows: probability and extraction strength of the answers, ROUGE-L recall of its own.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    rows : sequence of dict
        With the text fields ``question`` and ``answer``.
    how : Evaluation
        Not in compat mode, which changes none of the comparisons made here.
    progress : bool

    Returns
    -------
    dict of str to list of float

    Raises
    ------
    ValueError
        If compat mode is asked for.
    """
    if how.compat:
        raise ValueError("the quantisation study doesn't know the compat mode of the scores")
    encoding = {"template": how.template, "system": how.system}
    prompts = [encode_question(tokenizer, row["question"], **encoding)[0] for row in rows]
    options = {"max_new_tokens": how.max_new_tokens, "batch_size": 2 * how.batch_size, "progress": progress}
    with bfloat16(model, how.autocast):
        given = teacher_forced(model, encode(tokenizer, rows, **encoding), batch_size=how.batch_size, progress=progress)
        said = generate(model, tokenizer, prompts, **options)
    return {
        "prob": [answer.probability for answer in given],
        "rouge_l": rouge_l(said, [row["answer"] for row in rows]),
        "extraction": [answer.extraction_strength for answer in given],
    }


def size(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float | None:
    r""":math:`\|\Delta\| / \|W\|` over all matrices that differ, Δ the difference; None if none does.

    Parameters
    ----------
    before, after : mapping of str to Tensor
        With the same names.
    """
    changed = [name for name, weight in after.items() if not torch.equal(before[name], weight)]
    if not changed:
        return None
    change, whole = (
        sum(part.double().square().sum().item() for part in parts)
        for parts in ([after[name].double() - before[name].double() for name in changed], [before[name] for name in changed])
    )
    return (change / whole) ** 0.5


def describe(survival: Survival) -> dict[str, float | None]:
    """What rounding leaves of an update, as columns of a table.

    Parameters
    ----------
    survival : Survival

    Returns
    -------
    dict of str to float or None
        ``update_survival``, the share that is left in the update's own direction; ``update_norm``, the norm of all that is left relative
        to the update's; ``codes_changed``, the share of entries that have another code; ``rank_before`` and ``rank_after``. If no
        rounded matrix was changed, the update is there whole: survival and norm are 1 and the others None.
    """
    return {
        "update_survival": survival.kept if survival.matrices else 1.0,
        "update_norm": survival.norm_ratio if survival.matrices else 1.0,
        "codes_changed": survival.codes_changed,
        "rank_before": survival.rank,
        "rank_after": survival.surviving_rank,
    }


def table(found: Mapping[str, Mapping[str, dict]], *, seed: int = 0) -> list[dict]:
    """Rows of the quantisation table, one a model and scheme.

    Parameters
    ----------
    found : mapping of str to result of attack
        By method; ``"full"`` must be among them.
    seed : int
        Of the bootstrap.

    Returns
    -------
    list of dict
        ``method``, ``scheme``, ``rows``; the means ``prob``, ``rouge_l`` and ``extraction``; ``prob_change``, by how much rounding
        raised the probability, mean over rows, with its 95 % bootstrap interval ``prob_change_low`` … ``prob_change_high``;
        ``prob_recovery`` and ``rouge_l_recovery``, see :func:`recovery`, and the :func:`verdict` on them, all three None for
        unrounded weights and for models that no method made; and what :func:`attack` tells of the update, None where it tells nothing.
    """
    rows = []
    for method, schemes in found.items():
        before = schemes[NONE]["answers"]
        for scheme, result in schemes.items():
            answers, known = result["answers"], found["full"][scheme]["answers"]
            row = {"method": method, "scheme": scheme, "rows": len(answers["prob"])}
            row |= {name: mean(values) for name, values in answers.items()}
            changes = [after - old for after, old in zip(answers["prob"], before["prob"], strict=True)]
            row["prob_change"] = mean(changes)
            row["prob_change_low"], row["prob_change_high"] = bootstrap_interval(changes, seed=seed)
            attacked = method not in MODELS and scheme != NONE
            shares = [recovery(*(mean(scores[name]) for scores in (before, answers, known))) if attacked else None for name in RECOVERED]
            row |= {f"{name}_recovery": share for name, share in zip(RECOVERED, shares, strict=True)}
            row["verdict"] = verdict(shares) if attacked else None
            rows.append(row | dict.fromkeys(UPDATE) | (result["update"] or {}))
    return rows


def recovery(unlearned: float, rounded: float, known: float) -> float | None:
    """How far rounding brings a score back: 0 not at all, 1 to where the model before unlearning is when it is rounded too.

    Parameters
    ----------
    unlearned, rounded : float
        Score on the forget rows of the unlearned model, as it is and rounded.
    known : float
        Score of the model before unlearning, rounded in the same way: what rounding itself costs isn't held against the attack.

    Returns
    -------
    float or None
        Negative if the score fell. None if `unlearned` is below `known` by less than :data:`FORGOTTEN` of it.
    """
    gap = known - unlearned
    return (rounded - unlearned) / gap if gap > 0 and gap >= FORGOTTEN * known else None


def verdict(shares: Sequence[float | None]) -> str:
    """What the shares of several scores that come back say, in words.

    Parameters
    ----------
    shares : sequence of float or None
        See :func:`recovery`.

    Returns
    -------
    str
        ``"comes back"`` if one of them is at least :data:`COMES_BACK`, ``"stays forgotten"`` if none is above :data:`STAYS`, ``"partly"``
        between the two, and ``"can't be told"`` if there is no share.
    """
    known = [share for share in shares if share is not None]
    if not known:
        return "can't be told"
    if max(known) >= COMES_BACK:
        return "comes back"
    return "stays forgotten" if max(known) <= STAYS else "partly"


def summary(rows: Sequence[Mapping]) -> list[dict]:
    """The table with one row a method.

    Parameters
    ----------
    rows : sequence of mapping
        From :func:`table`.

    Returns
    -------
    list of dict
        ``method``; ``prob_<scheme>`` and ``rouge_l_<scheme>`` for each scheme; ``prob_recovery`` and ``rouge_l_recovery``, the largest over
        the schemes, and the :func:`verdict` on these.
    """
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        line = {"method": method} | {f"{name}_{row['scheme']}": row[name] for name in RECOVERED for row in own}
        shares = [max((row[f"{name}_recovery"] for row in own if row[f"{name}_recovery"] is not None), default=None) for name in RECOVERED]
        line |= {f"{name}_recovery": share for name, share in zip(RECOVERED, shares, strict=True)}
        found.append(line | {"verdict": None if method in MODELS else verdict(shares)})
    return found


# ---------------------------------------------------------------------------------------------------------------------------
# Weights that come from a 4-bit file


def grid_shares(model: nn.Module, schemes: Sequence[str]) -> list[dict]:
    """How much of a model lies on each scheme's grid: ``scheme``, and ``share`` of all entries that rounding leaves as they are."""
    weights = block_weights(model).values()
    total = sum(weight.numel() for weight in weights)
    return [{"scheme": one, "share": sum(on_grid(w, one) * w.numel() for w in weights) / total} for one in schemes]


def rounding_again(
    model: nn.Module, schemes: Sequence[str], sizes: Sequence[float], *, grid: str | None = None, seed: int = 0
) -> list[dict]:
    r"""What rounding leaves of random updates of the model's middle layer.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Only read.
    schemes : sequence of str
        To round base and updated weights with.
    sizes : sequence of float
        :math:`\|\Delta\| / \|W\|` of the Gaussian update of each matrix, above 0.
    grid : str, optional
        The scheme whose grid the weights are put on first, as if they came from such a file.
    seed : int

    Returns
    -------
    list of dict
        One a scheme and size: ``scheme``, ``size``, ``codes_changed``, ``update_survival`` and ``update_norm``, as in :func:`describe`.

    Raises
    ------
    ValueError
        If a size isn't above 0.
    """
    anatomy = Anatomy(model)
    layer = anatomy.name(anatomy.layers[len(anatomy.layers) // 2])
    weights = {name: weight.float() for name, weight in block_weights(model).items() if name.startswith(f"{layer}.")}
    if grid is not None:
        weights = {name: SCHEMES[grid](weight) for name, weight in weights.items()}
    rows = []
    for size in sizes:
        if not size > 0:
            raise ValueError(f"the size of an update must be above 0, got {size}")
        generator = torch.Generator().manual_seed(seed)
        updated = {name: weight + _random(weight, size, generator) for name, weight in weights.items()}
        for scheme in schemes:
            left = update_survival(weights, updated, scheme)
            found = {"codes_changed": left.codes_changed, "update_survival": left.kept, "update_norm": left.norm_ratio}
            rows.append({"scheme": scheme, "size": size} | found)
    return rows


def _random(weight: Tensor, size: float, generator: torch.Generator) -> Tensor:
    direction = torch.randn(weight.shape, generator=generator).to(weight)
    return direction * (size * weight.norm() / direction.norm())


def exported_again(study: Study, grid: str, schemes: Sequence[str]) -> list[dict]:
    """What is left of the fine-tuning itself, of a base that came in a 4-bit format, once the tuned model is rounded.

    The base is put on the grid (where the embedded model lies already) and the update that fine-tuning made is added to it.

    Parameters
    ----------
    study : Study
    grid : str
        The scheme that the base's file is in.
    schemes : sequence of str
        To round the tuned model with.

    Returns
    -------
    list of dict
        One a scheme, :data:`NONE` first: ``scheme``; ``size``, the update's norm relative to the base's; ``prob``, that of the forget
        rows; and what :func:`describe` tells of the update.
    """
    recipe = [study.data.digest, study.base, study.folder("full"), asdict(study.how), str(study.dtype), grid, *schemes]
    return remembered("tofu-exported-again", recipe, lambda: _exported_again(study, grid, schemes), CODE)


def _exported_again(study: Study, grid: str, schemes: Sequence[str]) -> list[dict]:
    full, tokenizer = study.full
    with study.model("base") as base:
        loaded = {name: weight.clone() for name, weight in block_weights(base).items()}
        with quantized(base, grid):
            placed = {name: weight.clone() for name, weight in block_weights(base).items()}
    tuned = block_weights(full)
    original = {name: weight.clone() for name, weight in tuned.items()}
    examples = encode(tokenizer, study.data.forget, template=study.how.template, system=study.how.system)
    rows = []
    try:
        for name, weight in tuned.items():
            weight.add_(placed[name] - loaded[name])
        for scheme in (NONE, *schemes):
            survival = Survival(()) if scheme == NONE else update_survival(placed, tuned, scheme)
            with _rounded(full, scheme):
                scores = teacher_forced(full, examples, batch_size=study.how.batch_size, progress=study.progress)
            row = {"scheme": scheme, "size": size(placed, tuned), "prob": mean([answer.probability for answer in scores])}
            rows.append(row | describe(survival))
    finally:
        for name, weight in tuned.items():
            weight.copy_(original[name])
    return rows
