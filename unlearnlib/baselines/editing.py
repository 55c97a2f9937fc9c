"""What the model editors share: facts in their contexts, keys, the search for values, and changes that are taken out again."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..examples import Example, batches, check_text, encode_question
from ..grom.anatomy import Anatomy, weight_view
from ..grom.edit import Edit, MatrixEdit, weight_fingerprint
from ..grom.keys import check_band, collect_keys
from ..metrics import answer_logits, bfloat16

_STARTS = ("The", "Therefore", "Because", "I", "You")
_CHOICES = 5
_CONVERGED = 5e-2
_KEY_BATCH = 64


@dataclass(frozen=True)
class EditorSettings:
    """What all editors have in common: where they write, and how a value is found.

    Attributes
    ----------
    layers : tuple of int
        A contiguous band, first to last, that leaves layers above it to read what it writes. The papers' are in
        :data:`~unlearnlib.baselines.editors.PAPER_LAYERS`; they do not transfer between models.
    v_lr : float
        Learning rate of Adam on the change δ of the activation, in its own units.
    v_steps : int
        Gradient steps at most; they end once the loss is below .05.
    v_decay : float
        Weight of ‖δ‖/‖v₀‖² in the loss, v₀ the activation of the bare prompt.
    clamp : float
        δ is kept within this multiple of ‖v₀‖.
    kl_factor : float
        Weight of the Kullback-Leibler divergence from the model's own next token after "(subject) is a".
    prefix_lengths : tuple of int
        Numbers of tokens of the texts that are put in front of a prompt, made by the model: a key is averaged over them and the bare
        prompt, and a value must hold behind all of them.
    per_round : int, optional
        Facts that are written at once, in their order, each round on the model that the rounds before left. All of them by default.
    batch_size : int
        Facts whose values are sought at the same time; changes no result.
    autocast : bool
        Whether to seek values in bfloat16, which halves the time or better where the processor has instructions for it; keys, what is
        missing at them and all systems keep their type.
    seed : int
        Of the prefixes.
    template : {"auto", "chat", "plain"}
    system : str, optional
        See :func:`~unlearnlib.examples.encode`.

    Raises
    ------
    ValueError
        Naming the first setting that is out of range.
    """

    layers: tuple[int, ...]
    v_lr: float = 0.5
    v_steps: int = 25
    v_decay: float = 0.5
    clamp: float = 0.75
    kl_factor: float = 0.0625
    prefix_lengths: tuple[int, ...] = (10,) * 5
    per_round: int | None = None
    batch_size: int = 16
    autocast: bool = False
    seed: int = 0
    template: str = "auto"
    system: str | None = None

    def __post_init__(self):
        if not self.layers:
            raise ValueError("layers is empty: name a band of layers")
        for name, low in (("v_steps", 0), ("per_round", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        self.check_range(positive=("v_lr", "clamp"), not_negative=("v_decay", "kl_factor"))
        if any(length < 1 for length in self.prefix_lengths):
            raise ValueError(f"prefix_lengths must be positive, got {self.prefix_lengths}")
        if self.template not in ("auto", "chat", "plain"):
            raise ValueError(f"template must be auto, chat or plain, got {self.template!r}")

    def check_range(self, positive: Sequence[str] = (), not_negative: Sequence[str] = ()) -> None:
        """Raise ValueError, naming the first of some settings that isn't a finite number > 0, or ≥ 0."""
        for name in (*positive, *not_negative):
            value = getattr(self, name)
            if not 0 <= value < math.inf or (name in positive and value == 0):
                raise ValueError(f"{name} must be a finite number {'>' if name in positive else '≥'} 0, got {value}")


@dataclass(frozen=True)
class Prompt:
    """A text that mentions a subject, and the position of the subject's last token."""

    ids: tuple[int, ...]
    lookup: int


@dataclass(frozen=True)
class Fact:
    """A fact in its contexts, the bare prompt first, with "(subject) is a"; `answer` is empty where it isn't needed."""

    contexts: tuple[Prompt, ...]
    essence: Prompt
    target: tuple[int, ...]
    answer: tuple[int, ...]


class Editing:
    """Context in which facts are written into a model's weights; on leaving it, the model has its exact original bits again.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    facts : sequence of dict
        As of :func:`~unlearnlib.baselines.editors.rome`.
    settings : EditorSettings
    kind : type
        What they must be.
    moments : dict of int to Tensor, optional
        C of each edited layer.
    need_answer : bool
        Whether the facts' true answers are needed.

    Raises
    ------
    ValueError
        If anything of this doesn't fit.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer,
        facts: Sequence[dict],
        settings: EditorSettings,
        kind: type[EditorSettings],
        moments: dict[int, Tensor] | None,
        *,
        need_answer: bool = False,
    ):
        if not isinstance(settings, kind):
            raise ValueError(f"expected {kind.__name__}, got {type(settings).__name__}")
        _check_facts(facts, need_answer)
        self.model, self.settings, self.anatomy = model, settings, Anatomy(model)
        check_band(self.anatomy, settings.layers)
        self.modules = {layer: self.anatomy.mlp_output(layer) for layer in settings.layers}
        for layer in settings.layers:
            self.anatomy.check_weight(layer)
        self.device = next(model.parameters()).device
        self.moments = self._check_moments(moments)
        prefixes = ("", *make_prefixes(model, tokenizer, settings))
        self.facts = [encode_fact(tokenizer, fact, prefixes, settings, need_answer) for fact in facts]
        room = getattr(model.config, "max_position_embeddings", math.inf)
        for fact, encoded in zip(facts, self.facts, strict=True):
            longest = max(len(prompt.ids) for prompt in encoded.contexts) + max(len(encoded.target), len(encoded.answer))
            bare = encoded.contexts[0]
            if settings.layers[-1] == len(self.anatomy.layers) - 1 and bare.lookup < len(bare.ids) - 1:
                raise ValueError(
                    f"what is written in the last layer, {settings.layers[-1]}, at the subject reaches no other position: "
                    f"{fact['prompt']!r} goes on after it"
                )
            if longest > room:
                raise ValueError(f"{fact['prompt']!r}: {longest} tokens with its prefix, but the model's context has {room}")

    def __enter__(self) -> Editing:
        self._kept = {layer: module.weight.detach().clone() for layer, module in self.modules.items()}
        # Sums of many small edits: kept in float64, and rounded to the weights' type once a change.
        self._sums = {layer: weight_view(module).to(torch.float64, copy=True) for layer, module in self.modules.items()}
        self._factors: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in self.modules}
        return self

    def __exit__(self, *_exception) -> None:
        for layer, module in self.modules.items():
            module.weight.detach().copy_(self._kept[layer])

    def rounds(self, progress: bool) -> Iterator[list[Fact]]:
        """The facts in groups that are written at once."""
        size = self.settings.per_round or len(self.facts)
        starts = range(0, len(self.facts), size)
        for start in tqdm(starts, desc="writing facts", disable=not progress, leave=False):
            yield self.facts[start : start + size]

    def weight(self, layer: int) -> Tensor:
        """W as it is now, (m, n), float64."""
        return weight_view(self.modules[layer]).double()

    def outputs(self, layer: int, keys: Tensor) -> Tensor:
        """What the matrix makes of some keys, its bias included."""
        outputs = keys @ self.weight(layer).T
        bias = getattr(self.modules[layer], "bias", None)
        return outputs if bias is None else outputs + bias.detach().double()

    def keys(self, facts: Sequence[Fact], layer: int) -> Tensor:
        """The keys of some facts, each averaged over its contexts, (facts, n), float64."""
        examples = [_until_lookup(prompt) for fact in facts for prompt in fact.contexts]
        grouped = batches(examples, batch_size=_KEY_BATCH, device=self.device)
        keys = _in_order(grouped, torch.cat(list(collect_keys(self.model, grouped, layer))).double())
        return keys.view(len(facts), -1, keys.shape[1]).mean(1)

    @torch.no_grad()
    def hidden(self, facts: Sequence[Fact], layer: int) -> Tensor:
        """Output of a layer at the bare prompts' subjects, (facts, m), float64."""
        grouped = batches([_until_lookup(fact.contexts[0]) for fact in facts], batch_size=_KEY_BATCH, device=self.device)
        found: list[Tensor] = []
        for batch in grouped:
            with _hooked(self.anatomy.layers[layer], lambda output, batch=batch: found.append(output[batch.rows, batch.columns])):
                self.anatomy.base(**batch.inputs(), use_cache=False)
        return _in_order(grouped, torch.cat(found).double())

    def values(self, facts: Sequence[Fact], layer: int, site: str, *, of_answer: bool = False) -> Tensor:
        """Outputs of a layer or of its MLP that make the model say the facts' targets, or their true answers; (facts, m), float64."""
        module = self.anatomy.layers[layer] if site == "layer" else self.modules[layer]
        searches = self.searches(facts, module, of_answer=of_answer)
        return torch.cat([search.start.double() + search.change().double() for search in searches])

    def searches(self, facts: Sequence[Fact], module: nn.Module, *, of_answer: bool = False) -> Iterator[Search]:
        """The search for the values at a module's output, as many facts at a time as the settings say."""
        size = self.settings.batch_size
        for start in range(0, len(facts), size):
            group = facts[start : start + size]
            answers = [fact.answer if of_answer else fact.target for fact in group]
            yield Search(self.model, module, self.settings, group, answers, self.device)

    def share(self, facts: Sequence[Fact], values: Tensor, layer: int) -> Tensor:
        """The part that a layer takes of what is missing at the last one, (z − h_L)/(L − ℓ + 1)."""
        last = self.settings.layers[-1]
        return (values - self.hidden(facts, last)) / (last - layer + 1)

    def spread(self, facts: Sequence[Fact], directions: Callable[[int, Tensor], Tensor]) -> None:
        """Write some facts into all layers, first to last."""
        values = self.values(facts, self.settings.layers[-1], "layer")
        for layer in self.settings.layers:
            rows = directions(layer, self.keys(facts, layer))
            self.add(layer, self.share(facts, values, layer).T, rows)

    def add(self, layer: int, left: Tensor, right: Tensor) -> None:
        """Add left @ right to a layer's matrix."""
        self._sums[layer] += left @ right
        weight_view(self.modules[layer]).copy_(self._sums[layer])
        self._factors[layer].append((left, right))

    def edit(self, editor: str) -> Edit:
        """All that was added."""
        matrices = []
        for layer, factors in self._factors.items():
            left, right = torch.cat([left for left, _ in factors], 1), torch.cat([right for _, right in factors])
            out_features, in_features = self._sums[layer].shape
            rows = None
            if left.shape[1] > min(out_features, in_features):
                # More factors than entries to save: P itself, all rows of it.
                left, right, rows = None, left @ right, torch.arange(out_features)
            name, base = self.anatomy.name(self.modules[layer]), weight_fingerprint(self._kept[layer])
            matrices.append(MatrixEdit(name, right.cpu(), None if left is None else left.cpu(), rows, out_features, base))
        return Edit(tuple(matrices), {"editor": editor} | asdict(self.settings) | {"layers": list(self.settings.layers)})

    def _check_moments(self, moments: dict[int, Tensor] | None) -> dict[int, Tensor]:
        if moments is None:
            return {}
        checked = {}
        for layer, module in self.modules.items():
            if layer not in moments:
                raise ValueError(f"moments has no layer {layer}, which is edited: it has {sorted(moments)}")
            size = weight_view(module).shape[1]
            if moments[layer].shape != (size, size):
                raise ValueError(f"moments[{layer}] must have shape {(size, size)}, got {tuple(moments[layer].shape)}")
            if not torch.isfinite(moments[layer]).all():
                raise ValueError(f"moments[{layer}] has NaN or infinite entries")
            checked[layer] = moments[layer].to(self.device, torch.float64)
        return checked


class Search:
    """The search for the values of some facts at a module: Adam on one δ a fact, all facts at once.

    Each is found as it would be alone, since a step of Adam is entry by entry.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    module : torch.nn.Module
        Whose output is changed, at the token where each fact is looked up.
    settings : EditorSettings
    facts : sequence of Fact
    answers : sequence of tuple of int
        What the model is to say of each.
    device : torch.device
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        settings: EditorSettings,
        facts: Sequence[Fact],
        answers: Sequence[tuple[int, ...]],
        device: torch.device,
    ):
        self.model, self.module, self.settings = model, module, settings
        self.contexts = len(facts[0].contexts)
        per = self.contexts + 1
        prompts = [prompt for fact in facts for prompt in (*fact.contexts, fact.essence)]
        # The essence predicts no token in particular: its example has the position, and any token.
        wanted = [answer if i < per - 1 else (0,) for answer in answers for i in range(per)]
        examples = [Example(prompt.ids, answer) for prompt, answer in zip(prompts, wanted, strict=True)]
        (self.batch,) = batches(examples, batch_size=len(examples), device=device)
        example = torch.empty(len(examples), dtype=torch.long, device=device)
        example[self.batch.rows] = self.batch.example
        self.rows, self.owner = torch.arange(len(examples), device=device), example // per
        self.columns = torch.tensor([prompt.lookup for prompt in prompts], device=device)[example]
        self.fact, context = self.batch.example // per, self.batch.example % per
        self.essence, self.bare = context == per - 1, context == 0
        self.tokens = torch.tensor([len(answer) for answer in answers], device=device)
        bare = torch.argsort(example)[::per]
        seen: list[Tensor] = []
        with torch.no_grad():
            drift = self._drift(self._log_probs(lambda output: seen.append(output[self.rows[bare], self.columns[bare]])))
            if settings.autocast:
                # v₀ has the weights' type, but what the model says by itself is compared within one arithmetic.
                drift = self._drift(self._log_probs(lambda _output: None, autocast=True))
        self.start, self.reference = seen[0].detach(), drift

    def change(self) -> Tensor:
        """δ of each fact, (facts, m)."""
        settings = self.settings
        wide = torch.promote_types(self.start.dtype, torch.float32)
        norms = self.start.to(wide).norm(dim=1)
        delta = torch.zeros_like(self.start, dtype=wide, requires_grad=True)
        optimiser = torch.optim.Adam([delta], lr=settings.v_lr)
        active = torch.ones(len(norms), dtype=torch.bool, device=norms.device)
        with torch.enable_grad(), _without_gradients(self.model):
            for _ in range(settings.v_steps):
                scores = self._log_probs(self._moved(delta), autocast=settings.autocast)
                said = scores[~self.essence].gather(1, self.batch.gold[~self.essence, None]).squeeze(1)
                nll = torch.zeros_like(norms, dtype=said.dtype).index_add(0, self.fact[~self.essence], -said)
                drift = self._drift(scores)
                divergence = (drift.exp() * (drift - self.reference)).sum(-1)
                loss = nll / (self.tokens * self.contexts)
                loss = loss + settings.kl_factor * divergence + settings.v_decay * delta.norm(dim=1) / norms**2
                if not torch.isfinite(loss).all():
                    raise FloatingPointError(f"the search for a value diverged: losses {loss.tolist()}")
                active &= loss.detach() >= _CONVERGED
                if not active.any():
                    break
                before = delta.detach().clone()
                (delta.grad,) = torch.autograd.grad(loss.sum(), delta)
                optimiser.step()
                with torch.no_grad():
                    delta *= (settings.clamp * norms / delta.norm(dim=1).clamp(min=1e-30)).clamp(max=1)[:, None]
                    delta[~active] = before[~active]
        return delta.detach()

    @torch.no_grad()
    def accuracy(self, delta: Tensor) -> Tensor:
        """Share of each answer's tokens that are the argmax behind the bare prompt, its activation changed by δ; (facts,), float64."""
        hits = self._log_probs(self._moved(delta)).argmax(-1) == self.batch.gold
        return torch.zeros_like(self.tokens, dtype=torch.float64).index_add(0, self.fact[self.bare], hits[self.bare].double()) / self.tokens

    def _moved(self, delta: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda output: output.index_put((self.rows, self.columns), delta[self.owner].to(output.dtype), accumulate=True)

    def _log_probs(self, change: Callable[[Tensor], Tensor | None], autocast: bool = False) -> Tensor:
        with _hooked(self.module, change), bfloat16(self.model, autocast):
            scores = answer_logits(self.model, self.batch)
        return scores.log_softmax(-1)

    def _drift(self, scores: Tensor) -> Tensor:
        """The next token behind each fact's "… is a", (facts, vocabulary)."""
        return scores[self.essence][torch.argsort(self.fact[self.essence])]


def _check_facts(facts: Sequence[dict], need_answer: bool) -> None:
    if not facts:
        raise ValueError("there are no facts to edit")
    for i, fact in enumerate(facts):
        for field in ("prompt", "subject", *(("answer",) if need_answer else ())):
            check_text(fact, field, f"facts[{i}]")
        if "target" not in fact or fact["target"] is not None:
            check_text(fact, "target", f"facts[{i}]")
        if fact["subject"].strip() not in fact["prompt"]:
            raise ValueError(f"facts[{i}]: the subject {fact['subject']!r} isn't in the prompt {fact['prompt']!r}")


def encode_fact(tokenizer, fact: dict, prefixes: Sequence[str], settings: EditorSettings, need_answer: bool) -> Fact:
    """A fact behind each of some prefixes, the first of them empty, as token ids."""
    contexts = tuple(locate(tokenizer, prefix, fact["prompt"], fact["subject"], settings.template, settings.system) for prefix in prefixes)
    subject = fact["subject"].strip()
    essence = locate(tokenizer, "", f"{subject} is a", subject, "plain")
    joined = _is_chat(tokenizer, settings.template) or fact["prompt"][-1].isspace()
    target = _object(tokenizer, fact["target"], joined)
    return Fact(contexts, essence, target, _object(tokenizer, fact["answer"], joined) if need_answer else ())


def locate(tokenizer, prefix: str, prompt: str, subject: str, template: str, system: str | None = None) -> Prompt:
    """A prompt's token ids behind a prefix, as :func:`~unlearnlib.examples.encode` would have them, and where its subject ends."""
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} can't say which token a character belongs to: use a fast tokenizer")
    ids, _ = encode_question(tokenizer, prefix + prompt, template=template, system=system)
    text = prefix + prompt
    if _is_chat(tokenizer, template):
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    bare, word = prompt.strip(), re.escape(subject.strip())
    # As a whole word if it is one somewhere, and where the prompt mentions it last.
    mentions = list(re.finditer(rf"(?<!\w){word}(?!\w)", bare)) or list(re.finditer(word, bare))
    last = text.rindex(bare) + mentions[-1].end() - 1
    lookup = max(i for i, (start, end) in enumerate(encoded.offset_mapping) if start <= last < end)
    return Prompt(tuple(ids), lookup + len(ids) - len(encoded.input_ids))


def _object(tokenizer, text: str | None, joined: bool) -> tuple[int, ...]:
    """Token ids of an object that continues a prompt; None stands for the end-of-text token."""
    if text is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token: name a target")
        return (tokenizer.eos_token_id,)
    text = text.strip()
    if text in tokenizer.all_special_tokens:
        return (tokenizer.convert_tokens_to_ids(text),)
    return tuple(tokenizer(text if joined else " " + text, add_special_tokens=False).input_ids)


def _is_chat(tokenizer, template: str) -> bool:
    return template != "plain" and bool(tokenizer.chat_template)


@torch.no_grad()
def make_prefixes(model: nn.Module, tokenizer, settings: EditorSettings) -> list[str]:
    """Texts to put in front of prompts, made by the model, that end a sentence."""
    generator, device = torch.Generator().manual_seed(settings.seed), next(model.parameters()).device
    texts = []
    for length, start in zip(settings.prefix_lengths, cycle(_STARTS)):
        ids, _ = encode_question(tokenizer, start, template="plain")
        for _ in range(length):
            scores, options = model(input_ids=torch.tensor([ids], device=device)).logits[0, -1].float().topk(_CHOICES)
            ids.append(options[torch.multinomial(scores.softmax(-1).cpu(), 1, generator=generator)].item())
        texts.append(tokenizer.decode(ids, skip_special_tokens=True).strip() + ". ")
    return texts


def _until_lookup(prompt: Prompt) -> Example:
    """An example whose only gold position is the prompt's lookup; what comes after it has no influence there."""
    return Example(prompt.ids[: prompt.lookup + 1], (0,))


def _in_order(grouped: Sequence, rows: Tensor) -> Tensor:
    """Rows of batches, one an example, in the order of the examples."""
    return rows[torch.argsort(torch.cat([batch.example for batch in grouped]))]


@contextmanager
def _hooked(module: nn.Module, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Give a module's output to a function, and its result, if it is a tensor, in place of the output."""

    def hook(_module, _inputs, output):
        changed = change(output[0] if isinstance(output, tuple) else output)
        if not isinstance(changed, Tensor):
            return None
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Let no parameter ask for a gradient: backward passes then end where the activation is changed."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
