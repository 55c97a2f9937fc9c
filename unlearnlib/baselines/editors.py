r"""Model editors: ROME, MEMIT, AlphaEdit and the closed form of ZeroUnlearn, behind one call.

An editor takes facts, each a text up to its object, the subject in it, and the object that is to be said instead, and changes the MLP
output matrix W of a few layers. What such a matrix reads at the subject's last token is the fact's *key* k, and the output that makes the
model say the new object is its *value*, found by gradient steps on the activation; the change of the weights is then in closed form. For
unlearning, the new object is the neutral end-of-text token.

K has the keys of all facts as columns, R the wanted changes of the outputs, and C is the uncentred second moment of keys over general
text, a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..examples import Example, batches, encode_question
from ..grom.edit import Edit
from ..grom.keys import collect_keys
from .closed_forms import alpha_directions, inverse, memit_directions, null_space, rome_directions, with_ridge, zero_unlearn_factors
from .editing import Editing, EditorSettings

PAPER_LAYERS = {
    "rome": {"gpt2-xl": (17,), "Llama-3.2-3B-Instruct": (18,)},
    "memit": {"gpt-j-6B": (3, 4, 5, 6, 7, 8), "Llama-3.2-3B-Instruct": (16, 17, 18)},
    "alpha_edit": {"gpt-j-6B": (3, 4, 5, 6, 7, 8), "Llama3-8B": (4, 5, 6, 7, 8), "Llama-3.2-3B-Instruct": (16, 17, 18)},
    "zero_unlearn": {"Llama-3.2-3B-Instruct": (16, 17, 18), "Qwen3-4B": (9, 10, 11)},
}
"""The layers that each method's official settings edit, by model; those of Llama-3.2-3B-Instruct are ZeroUnlearn's, for all four."""

DEVIATIONS = (
    ("ROME", "the prefixes continue “The”, or nothing", "they continue five words in turn, as in MEMIT's code"),
    ("all", "a prefix stands before the whole prompt", "it stands before the user's words where there is a chat template"),
    ("ROME", "the change is measured at the bare prompt's key", "it is measured at the averaged key, as in the paper"),
    ("MEMIT, AlphaEdit, ZeroUnlearn", "the bare prompt has half of a key's weight", "all contexts have the same, as in the paper"),
    ("all", "drift is measured at the subject's last token", "it is measured behind “… is a”, as in the papers"),
    ("all", "the last of a value's steps is only looked at", "it is taken"),
    ("ROME, MEMIT", "C is taken as it is", "a ridge is added to C, which may then come from few tokens"),
    ("AlphaEdit", "the system is solved in float32", "all systems are solved in float64"),
    ("ZeroUnlearn", "Q = 1.01 I − U Uᵀ, which scales all outputs by 1.01", "Q = I − U Uᵀ, the projection"),
    ("ZeroUnlearn", "V Kᵀ of general text is centred, K Kᵀ is not", "neither is: V Kᵀ = W C"),
)
"""Where these editors differ from the official code: (method, theirs, ours)."""

NOT_ESTABLISHED = {
    "zero_unlearn": (
        "its paper's equations weren't at hand to hold its official code against, and that has two things which change the edit and may or "
        "may not be meant: all outputs are scaled by 1.01, and V Kᵀ of general text is centred where K Kᵀ isn't"
    ),
    "zero_unlearn_gd": (
        "the gradient variant is no closed form; its loss weights, learning rate and threshold are literals of the code, of which the "
        "repository holds two versions"
    ),
}
"""Rows that are left blank in tables, with the reason. :func:`zero_unlearn` is there all the same, for whoever wants to try it."""


@dataclass(frozen=True)
class RomeSettings(EditorSettings):
    """Settings of ROME; the defaults are those for GPT-2 XL.

    Attributes
    ----------
    per_round : int, optional
        Facts are always written one after another. By default, and in the paper, each value is sought on the model that the facts before
        left; those of a larger round are all sought before any of it is written, which is faster.
    ridge : float
        Added to the diagonal of C, in units of its mean diagonal.
    """

    v_steps: int = 20
    clamp: float = 4.0
    prefix_lengths: tuple[int, ...] = (5,) * 10 + (10,) * 10
    per_round: int | None = 1
    ridge: float = 1e-6

    def __post_init__(self):
        super().__post_init__()
        self.check_range(not_negative=("ridge",))
        if len(self.layers) != 1:
            raise ValueError(f"ROME edits one layer, got layers {self.layers}")


@dataclass(frozen=True)
class MemitSettings(EditorSettings):
    """Settings of MEMIT; the defaults are those for GPT-J.

    Attributes
    ----------
    mom2_weight : float
        λ, the number of general tokens that C stands for.
    ridge : float
        Added to the diagonal of C, in units of its mean diagonal.
    """

    mom2_weight: float = 15000.0
    ridge: float = 1e-6

    def __post_init__(self):
        super().__post_init__()
        self.check_range(positive=("mom2_weight",), not_negative=("ridge",))


@dataclass(frozen=True)
class AlphaEditSettings(EditorSettings):
    """Settings of AlphaEdit; the defaults are those for Llama 3.

    Attributes
    ----------
    threshold : float
        Eigenvalues of C below it count as 0: their eigenvectors span the null space that is written to.
    l2 : float
        Weight of ‖Δ‖².
    """

    v_lr: float = 0.1
    threshold: float = 2e-2
    l2: float = 10.0

    def __post_init__(self):
        super().__post_init__()
        self.check_range(positive=("threshold", "l2"))


@dataclass(frozen=True)
class ZeroUnlearnSettings(EditorSettings):
    """Settings of ZeroUnlearn's closed form; the defaults are those for Llama 3.2.

    Attributes
    ----------
    general_weight : float
        Weight of general text, the number of general tokens that C stands for.
    forget_weight : float
        Weight of each fact.
    regularization : float
        λ, weight of ‖G W − W‖².
    """

    v_lr: float = 0.1
    general_weight: float = 15000.0
    forget_weight: float = 50.0
    regularization: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        self.check_range(positive=("forget_weight", "regularization"), not_negative=("general_weight",))


def rome(
    model: nn.Module, tokenizer, facts: Sequence[dict], settings: RomeSettings, *, moments: dict[int, Tensor] | None = None, progress=False
) -> Edit:
    """Edit facts by ROME, one rank-one change of one matrix after another.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Left as it was.
    tokenizer : transformers.PreTrainedTokenizerBase
        A fast one: it has to say which token a character belongs to.
    facts : sequence of dict
        With the text fields ``prompt``, up to the object; ``subject``, a part of it; and ``target``, the object that is to be said, or None
        for the end-of-text token. ZeroUnlearn needs the true object too, ``answer``.
    settings : RomeSettings
        So each method has its own, see :data:`SETTINGS`.
    moments : dict of int to Tensor, optional
        C of each edited layer, from :func:`key_moments`. Without it the method has no general text to preserve.
    progress : bool

    Returns
    -------
    Edit
        Of the MLP output matrices of the settings' layers.

    Raises
    ------
    ValueError
        If a fact, a layer or a moment doesn't fit, before any work; or a system of equations is singular.
    FloatingPointError
        If the search for a value diverges.

    Notes
    -----
    Meng et al. (2022). Its key is exact: behind its own edit, the averaged key is mapped to the value.
    """
    (layer,) = settings.layers
    with Editing(model, tokenizer, facts, settings, RomeSettings, moments) as editing:
        moment = editing.moments.get(layer)
        metric = None if moment is None else inverse(with_ridge(moment, settings.ridge))
        for group in editing.rounds(progress):
            # Keys come from below the only edited matrix: no edit changes them.
            keys, values = editing.keys(group, layer), editing.values(group, layer, "mlp")
            for key, value in zip(keys.split(1), values.split(1), strict=True):
                editing.add(layer, (value - editing.outputs(layer, key)).T, rome_directions(key, metric))
        return editing.edit("rome")


def memit(
    model: nn.Module, tokenizer, facts: Sequence[dict], settings: MemitSettings, *, moments: dict[int, Tensor] | None = None, progress=False
) -> Edit:
    """Edit facts by MEMIT, all at once, the change spread over a band of layers; called as :func:`rome`.

    Notes
    -----
    Meng et al. (2023), algorithm 1: layer after layer, each takes its share of what is missing at the last one.
    """
    with Editing(model, tokenizer, facts, settings, MemitSettings, moments) as editing:
        moment = {layer: with_ridge(moment, settings.ridge) for layer, moment in editing.moments.items()}
        for group in editing.rounds(progress):
            editing.spread(group, lambda layer, keys: memit_directions(keys, moment.get(layer), settings.mom2_weight))
        return editing.edit("memit")


def alpha_edit(
    model: nn.Module,
    tokenizer,
    facts: Sequence[dict],
    settings: AlphaEditSettings,
    *,
    moments: dict[int, Tensor] | None = None,
    progress=False,
) -> Edit:
    """Edit facts by AlphaEdit, MEMIT's steps in the null space of general text; called as :func:`rome`.

    Notes
    -----
    Fang et al. (2025). The keys of each round are preserved by the rounds after it.
    """
    with Editing(model, tokenizer, facts, settings, AlphaEditSettings, moments) as editing:
        bases = {layer: null_space(moment, settings.threshold) for layer, moment in editing.moments.items()}
        earlier: dict[int, Tensor] = {}

        def directions(layer: int, keys: Tensor) -> Tensor:
            return alpha_directions(keys, bases.get(layer), settings.l2, earlier.get(layer))

        for group in editing.rounds(progress):
            editing.spread(group, directions)
            for layer in settings.layers:
                keys = editing.keys(group, layer)
                earlier[layer] = torch.cat([earlier[layer], keys]) if layer in earlier else keys
        return editing.edit("alpha_edit")


def zero_unlearn(
    model: nn.Module,
    tokenizer,
    facts: Sequence[dict],
    settings: ZeroUnlearnSettings,
    *,
    moments: dict[int, Tensor] | None = None,
    progress=False,
) -> Edit:
    """Unlearn facts by the closed form of ZeroUnlearn, a multiplicative change of each matrix; called as :func:`rome`.

    Notes
    -----
    Lin et al. (2026), by its official code, without what is in :data:`NOT_ESTABLISHED`; see
    :func:`~unlearnlib.baselines.closed_forms.zero_unlearn_factors`.
    """
    options = {name: getattr(settings, name) for name in ("general_weight", "forget_weight", "regularization")}
    with Editing(model, tokenizer, facts, settings, ZeroUnlearnSettings, moments, need_answer=True) as editing:
        for group in editing.rounds(progress):
            values = editing.values(group, settings.layers[-1], "layer")
            for layer in settings.layers:
                true = editing.values(group, layer, "mlp", of_answer=True)
                keys = editing.keys(group, layer)
                factors = zero_unlearn_factors(
                    editing.weight(layer), keys, editing.share(group, values, layer), true, editing.moments.get(layer), **options
                )
                editing.add(layer, *factors)
        return editing.edit("zero_unlearn")


EDITORS: dict[str, Callable[..., Edit]] = {"rome": rome, "memit": memit, "alpha_edit": alpha_edit, "zero_unlearn": zero_unlearn}
"""The editors by name, each called as ``editor(model, tokenizer, facts, settings, moments=…)``."""

SETTINGS: dict[str, type[EditorSettings]] = {
    "rome": RomeSettings,
    "memit": MemitSettings,
    "alpha_edit": AlphaEditSettings,
    "zero_unlearn": ZeroUnlearnSettings,
}
"""The settings that each editor takes."""


def key_moments(
    model: nn.Module,
    tokenizer,
    texts: Iterable[str],
    layers: Sequence[int],
    *,
    length: int = 400,
    batch_size: int = 16,
    progress: bool = False,
) -> dict[int, Tensor]:
    """C of some layers, the uncentred second moment of the inputs of their MLP output matrices over general text, a token.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    texts : iterable of str
        Cut into windows; the last token of each is not counted, nor a text of fewer than two tokens.
    layers : sequence of int
    length : int
        Tokens a window; the model's context if that is shorter.
    batch_size : int
        Windows a forward pass; changes no result.
    progress : bool

    Returns
    -------
    dict of int to Tensor, shape (n, n), float64

    Raises
    ------
    ValueError
        If there is no text to count.
    """
    length = min(length, getattr(model.config, "max_position_embeddings", length))
    windows = []
    for text in texts:
        ids, _ = encode_question(tokenizer, text, template="plain")
        parts = (ids[start : start + length] for start in range(0, len(ids), length))
        windows += [Example((part[0],), tuple(part[1:])) for part in parts if len(part) > 1]
    if not windows:
        raise ValueError("there is no text of two tokens or more to take the keys' moments from")
    grouped = batches(windows, batch_size=batch_size, device=next(model.parameters()).device)
    moments = {}
    for layer in layers:
        total, count = 0.0, 0
        for keys in collect_keys(model, grouped, layer, progress=progress):
            total = total + keys.double().T @ keys.double()
            count += len(keys)
        moments[layer] = total / count
    return moments


def value_accuracy(
    model: nn.Module, tokenizer, facts: Sequence[dict], settings: EditorSettings, *, module: nn.Module | None = None, sought: bool = True
) -> Tensor:
    """How much of the targets a model says where the value of each fact stands in the place of its activation: nothing is written.

    This is what an editor can get to at best with one layer. Where it is low, what the model says isn't decided by that activation, and no
    closed form helps.

    Parameters
    ----------
    model, tokenizer, facts
        As of :func:`rome`.
    settings : EditorSettings
    module : torch.nn.Module, optional
        Whose output is changed, at the token where the fact is looked up: the last of the settings' layers by default.
    sought : bool
        Whether to seek the values; else the model says what it says by itself.

    Returns
    -------
    Tensor, shape (facts,), float64
        Share of the target's tokens that are the argmax behind the bare prompt and the right tokens before them.

    Raises
    ------
    ValueError
        If a fact or a layer doesn't fit.
    """
    with Editing(model, tokenizer, facts, settings, EditorSettings, None) as editing:
        searches = editing.searches(editing.facts, module or editing.anatomy.layers[settings.layers[-1]])
        return torch.cat([search.accuracy(search.change() if sought else torch.zeros_like(search.start)) for search in searches]).cpu()
