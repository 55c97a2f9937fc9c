"""Unlearning by gradient steps: gradient ascent, GradDiff, NPO, SimNPO, IdkDPO and AltPO, behind one call."""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..corpora import as_examples
from ..examples import Example, batches, check_text, encode, encode_question
from ..lora import lora
from ..metrics import answer_log_probs, bfloat16, contains_answer
from ..training import draw_batches, optimise
from . import losses

NAMES = ("grad_ascent", "grad_diff", "npo", "simnpo", "idk_dpo", "alt_po")

_NEED_BETA = ("npo", "simnpo", "idk_dpo", "alt_po")
_HAVE_WINNERS = ("idk_dpo", "alt_po")
_ATTEMPTS = 12
_INSTRUCTION = "Invent a different answer: keep to the question, but change every fact that the answer gives, and stay plausible."

REFUSALS = (
    "I have no knowledge of that.",
    "I can't tell you, because I never learned it.",
    "That question goes beyond what I know.",
    "I don't know the answer to this one.",
    "Nothing I have learned helps me answer that.",
    "Sorry, but I have no answer to give here.",
    "I would only be guessing, so I'd rather not answer.",
    "My knowledge doesn't cover this.",
    "This is unknown to me.",
    "I am unable to say.",
    "I have not come across anything about that.",
    "There is no answer to this in what I was taught.",
    "I must admit that I don't know.",
    "You would have to ask somebody else about this.",
    "I lack the facts to answer your question.",
    "Unfortunately, I know nothing about this subject.",
    "It isn't something that I have been told about.",
    "No reliable answer comes to my mind.",
    "I cannot answer that with any confidence.",
    "Whatever the answer is, I don't have it.",
)
"""Refusals that IdkDPO prefers to the answers to forget, where no other list is given."""


@dataclass(frozen=True)
class GradientSettings:
    """How a model is unlearned by gradient steps.

    Attributes
    ----------
    method : {"grad_ascent", "grad_diff", "npo", "simnpo", "idk_dpo", "alt_po"}
    lr : float
        Peak of the learning rate; its course is that of :func:`~unlearnlib.training.optimise`.
    epochs : int
        Passes over the forget set.
    batch_size : int
        Forget examples a step, and as many retain examples; the whole set where it is smaller.
    micro_batch : int, optional
        Examples that go through the model at once; their gradients are added up to those of the batch. All of it by default.
    forget_weight, retain_weight : float
        Factors of the two terms of the loss; gradient ascent has no retain term, whatever its weight.
    beta : float, optional
        β of NPO, SimNPO, IdkDPO and AltPO, which need one; the other methods have none.
    margin : float
        γ of SimNPO.
    weight_decay : float
    seed : int
        Of the order, the choice of refusals, the sampling of alternatives and the adapters' initialisation.
    lora_rank : int
        Rank of LoRA adapters on all linear layers, merged at the end; 0 trains all parameters.
    template : {"auto", "chat", "plain"}
    system : str, optional
        See :func:`~unlearnlib.examples.encode`.
    autocast : bool
        Whether the model computes in bfloat16. Its weights, their updates and the losses stay as they are.

    Raises
    ------
    ValueError
        Naming the first setting that is out of range, missing, or one that the method does not have.
    """

    method: str
    lr: float = 1e-5
    epochs: int = 10
    batch_size: int = 8
    micro_batch: int | None = None
    forget_weight: float = 1.0
    retain_weight: float = 1.0
    beta: float | None = None
    margin: float = 0.0
    weight_decay: float = 0.01
    seed: int = 0
    lora_rank: int = 0
    template: str = "auto"
    system: str | None = None
    autocast: bool = False

    def __post_init__(self):
        if self.method not in NAMES:
            raise ValueError(f"unknown method {self.method!r}: use {', '.join(NAMES)}")
        for name, low in (("epochs", 1), ("batch_size", 1), ("micro_batch", 1), ("lora_rank", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        for name in ("lr", "forget_weight", "beta"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number > 0, got {value}")
        for name in ("retain_weight", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number, at least 0, got {getattr(self, name)}")
        if not math.isfinite(self.margin):
            raise ValueError(f"margin must be finite, got {self.margin}")
        if self.method in _NEED_BETA and self.beta is None:
            raise ValueError(f"{self.method} needs a beta: GradientSettings.defaults({self.method!r}) has the field's")
        if self.method not in _NEED_BETA and self.beta is not None:
            raise ValueError(f"{self.method} has no beta, got {self.beta}")
        if self.method != "simnpo" and self.margin:
            raise ValueError(f"{self.method} has no margin, got {self.margin}")
        if self.template not in ("auto", "chat", "plain"):
            raise ValueError(f"template must be auto, chat or plain, got {self.template!r}")

    @classmethod
    def defaults(cls, method: str, **changes) -> GradientSettings:
        """The field's default settings of a method on TOFU.

        Parameters
        ----------
        method : str
        **changes
            Settings to have otherwise.

        Notes
        -----
        Those of open-unlearning (``configs/trainer``, ``configs/experiment/unlearn/tofu``, AltPO's ``run.sh``): AdamW with a learning
        rate of 1e-5 that warms up for one of 10 epochs, weight decay .01, 32 examples a step, 8 at once, α 1; β .1 for NPO, IdkDPO and
        AltPO; for SimNPO β 4.5, no margin, and a forget term weighted by 1/8. For AltPO it searches β {.05, .1, .5}, learning rates
        {1, 2, 5}e-5 and α {1, 2, 5}; its 2 epochs over 5 alternatives an answer are 10 over the answers. After the warm-up its
        learning rate falls along a line, and here along a cosine.
        """
        own = {"method": method, "batch_size": 32, "micro_batch": 8}
        if method == "simnpo":
            own |= {"beta": 4.5, "forget_weight": 0.125}
        elif method in _NEED_BETA:
            own |= {"beta": 0.1}
        return cls(**(own | changes))

    @property
    def retains(self) -> bool:
        """Whether there is a retain term."""
        return self.method != "grad_ascent" and self.retain_weight > 0


def unlearn(
    model: nn.Module,
    tokenizer,
    forget: Sequence[dict | Example],
    retain: Sequence[dict | Example],
    settings: GradientSettings,
    *,
    refusals: Sequence[str] = REFUSALS,
    preferred: Sequence[Sequence[str]] | None = None,
    progress: bool = False,
    checkpoint: str | os.PathLike | None = None,
    method: str | None = None,
) -> nn.Module:
    """Unlearn answers, or texts, by training a copy of a model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Left as it was; also the reference model of NPO, IdkDPO and AltPO.
    tokenizer : transformers.PreTrainedTokenizerBase
    forget, retain : sequence of dict or Example
        With the text fields ``question`` and ``answer``; `retain` may be empty where there is no retain term. Either set may hold
        Examples instead, such as :func:`~unlearnlib.corpora.windows` of text, whatever the template; but IdkDPO and AltPO, which prefer
        other answers to the same questions, need questions to forget.
    settings : GradientSettings
    refusals : sequence of str
        What IdkDPO prefers: for each forget row, as many of them as there are epochs, or all, drawn without replacement. Other methods
        have no use for them.
    preferred : sequence of sequences of str, optional
        What AltPO prefers, for each forget row the same number of answers, which take turns; by default :func:`alternatives` has the model
        make them now. Other methods have no use for them.
    progress : bool
    checkpoint : path, optional
        See :func:`~unlearnlib.training.optimise`.
    method : str, optional
        Which method the settings must be for.

    Returns
    -------
    transformers.PreTrainedModel
        The new model.

    Raises
    ------
    ValueError
        Before any training, if a set is empty, a field is missing, the sets share a row, the settings are for another method, or the
        method needs questions and is given Examples.
    FloatingPointError
        If the loss is no longer finite.
    RuntimeError
        See :func:`alternatives`.

    Notes
    -----
    The reference's log-probabilities are computed once, before training: no second model is kept.
    """
    if method is not None and settings.method != method:
        raise ValueError(f"the settings are for {settings.method}, not for {method}")
    _check_sets(forget, retain, settings)
    winners: Sequence[Sequence[str]] = ()
    if settings.method == "idk_dpo":
        winners = _draw_refusals(refusals, len(forget), settings)
    trained = copy.deepcopy(model).eval()
    if settings.method == "alt_po":
        if preferred is None:
            encoding = {"template": settings.template, "system": settings.system}
            preferred = alternatives(trained, tokenizer, forget, seed=settings.seed, progress=progress, **encoding)
        winners = _check_preferred(preferred, len(forget))
    objective = Objective(trained, tokenizer, forget, retain, settings, winners, progress=progress)
    with lora(trained, settings.lora_rank, settings.seed) as trainable:
        optimise(
            trainable,
            partial(objective.parts, trainable),
            steps=objective.steps,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            checkpoint=checkpoint,
            describe=settings.method,
            progress=progress,
        )
    trained.zero_grad()
    return trained


METHODS: dict[str, Callable] = {name: partial(unlearn, method=name) for name in NAMES}
"""The gradient methods by name, each called as ``method(model, tokenizer, forget, retain, settings)``."""


class Objective:
    """The loss of each step of a method on fixed data, in parts.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Before unlearning, in evaluation mode: the reference.
    tokenizer : transformers.PreTrainedTokenizerBase
    forget, retain : sequence of dict or Example
    settings : GradientSettings
    winners : sequence of sequences of str
        For each forget row the answers to prefer, of IdkDPO and AltPO.
    progress : bool

    Attributes
    ----------
    steps : int
        Number of steps: each of the epochs has as many as its forget batches.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer,
        forget: Sequence[dict | Example],
        retain: Sequence[dict | Example],
        settings: GradientSettings,
        winners: Sequence[Sequence[str]] = (),
        *,
        progress: bool = False,
    ):
        encoding = {"template": settings.template, "system": settings.system}
        self.settings = settings
        self.forget = as_examples(tokenizer, forget, **encoding)
        self.steps = settings.epochs * math.ceil(len(self.forget) / settings.batch_size)
        self.drawn = draw_batches(len(self.forget), settings.batch_size, self.steps, settings.seed)
        self.retain: list[Example] = []
        if settings.retains:
            self.retain = as_examples(tokenizer, retain, **encoding)
            size = min(settings.batch_size, len(self.forget))
            self.drawn_retain = draw_batches(len(self.retain), size, self.steps, settings.seed + 1)
        rows = zip(forget, winners, strict=True) if winners else ()
        self.winners = [encode(tokenizer, [{"question": row["question"], "answer": a} for a in own], **encoding) for row, own in rows]
        self.turns = self._turns()
        if settings.method in ("npo", *_HAVE_WINNERS):
            self.reference = self._reference(model, self.forget, progress)
        if self.winners:
            flat = self._reference(model, [example for own in self.winners for example in own], progress)
            self.reference_winners = flat.reshape(len(self.forget), -1)

    def parts(self, model: nn.Module, step: int) -> Iterator[Tensor]:
        """The parts of a step's loss, which add up to forget weight × forget loss + retain weight × retain loss."""
        settings = self.settings
        drawn = list(zip(self.drawn[step], self.turns[step], strict=True))
        for part in _chunks(drawn, settings.micro_batch):
            yield self._finite(step, settings.forget_weight * len(part) / len(drawn) * self._forget_loss(model, part))
        if self.retain:
            drawn_retain = self.drawn_retain[step]
            for part in _chunks(drawn_retain, settings.micro_batch):
                loss = losses.nll(*self._log_probs(model, [self.retain[i] for i in part]))
                yield self._finite(step, settings.retain_weight * len(part) / len(drawn_retain) * loss)

    def _forget_loss(self, model: nn.Module, part: Sequence[tuple[int, int]]) -> Tensor:
        settings = self.settings
        rows = [row for row, _ in part]
        losers = [self.forget[row] for row in rows]
        if self.winners:
            preferred = [self.winners[row][turn] for row, turn in part]
            log_probs, _ = self._log_probs(model, preferred + losers)
            win, lose = log_probs.split(len(part))
            reference_win = torch.stack([self.reference_winners[row, turn] for row, turn in part])
            return losses.dpo(win, lose, reference_win, self.reference[rows], settings.beta)
        log_probs, lengths = self._log_probs(model, losers)
        if settings.method == "npo":
            return losses.npo(log_probs, self.reference[rows], settings.beta)
        if settings.method == "simnpo":
            return losses.simnpo(log_probs, lengths, settings.beta, settings.margin)
        return losses.grad_ascent(log_probs, lengths)

    def _log_probs(self, model: nn.Module, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """Log-probability of each whole answer, and its number of tokens, both of shape (examples,)."""
        (batch,) = batches(examples, batch_size=len(examples), device=next(model.parameters()).device)
        # Entered anew each time: autocast would otherwise go on with its copies of weights that have moved since.
        with bfloat16(model, self.settings.autocast):
            scores = answer_log_probs(model, batch)
        log_probs = scores.new_zeros(len(examples)).index_add(0, batch.example, scores)
        return log_probs, torch.bincount(batch.example, minlength=len(examples))

    @torch.no_grad()
    def _reference(self, model: nn.Module, examples: Sequence[Example], progress: bool) -> Tensor:
        size = self.settings.micro_batch or self.settings.batch_size
        # By length, so that short answers are not padded to the longest.
        order = sorted(range(len(examples)), key=lambda i: len(examples[i]))
        chunks = tqdm(_chunks(order, size), desc="reference", disable=not progress, leave=False)
        found = torch.cat([self._log_probs(model, [examples[i] for i in chunk])[0] for chunk in chunks])
        return torch.empty_like(found).index_copy(0, torch.tensor(order, device=found.device), found)

    def _turns(self) -> list[list[int]]:
        """Which of its winners each drawn row meets: they take turns, beginning with the first."""
        seen: Counter[int] = Counter()
        turns = []
        for rows in self.drawn:
            turns.append([])
            for row in rows:
                turns[-1].append(seen[row] % len(self.winners[row]) if self.winners else 0)
                seen[row] += 1
        return turns

    def _finite(self, step: int, loss: Tensor) -> Tensor:
        if not torch.isfinite(loss):
            raise FloatingPointError(f"{self.settings.method}: the loss of step {step + 1} of {self.steps} is {loss.item()}; lower lr")
        return loss


def alternatives(
    model: nn.Module,
    tokenizer,
    items: Sequence[dict],
    *,
    count: int = 5,
    temperature: float = 1.0,
    max_new_tokens: int | None = None,
    template: str = "auto",
    system: str | None = None,
    seed: int = 0,
    batch_size: int = 16,
    progress: bool = False,
) -> list[list[str]]:
    """Other plausible answers to questions, which the model itself makes up: what AltPO prefers to the answers to forget.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    items : sequence of dict
        With the text fields ``question`` and ``answer``. With a chat template both are shown to the model, which is asked for an answer
        with other facts. Without one the model is not taken to follow instructions: it is asked the question alone.
    count : int
        Answers to each.
    temperature : float
        Of the sampling, from the 50 most probable tokens.
    max_new_tokens : int, optional
        By default twice as many tokens as the longest answer has, at most 200.
    template, system : str
        See :func:`~unlearnlib.examples.encode_question`.
    seed, batch_size : int
        The answers depend on both.
    progress : bool

    Returns
    -------
    list of list of str
        `count` answers for each item. None is empty, and none contains the given answer, whatever the case and punctuation at its ends.

    Raises
    ------
    ValueError
        If a field is missing, a parameter is out of range, or a prompt is longer than the model's context.
    RuntimeError
        If the model goes on giving the given answer or no text.

    Notes
    -----
    Mekala et al. (2024) and open-unlearning's AltPO: 5 answers to each question, temperature 1, up to 200 tokens, cut where a new question
    begins. Ours: the words of the prompt; the question alone without a chat template; and that a text that is empty or has the given
    answer is drawn anew, each time at 1.25 times the temperature.
    """
    if not items:
        raise ValueError("there are no items to make alternatives for")
    for name, value in (("count", count), ("temperature", temperature), ("batch_size", batch_size)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    for i, item in enumerate(items):
        for field in ("question", "answer"):
            check_text(item, field, f"item {i}")
    prompts = [_alternative_prompt(tokenizer, item, template, system) for item in items]
    if max_new_tokens is None:
        longest = max(len(tokenizer(item["answer"], add_special_tokens=False).input_ids) for item in items)
        max_new_tokens = min(2 * longest, 200)
    room = getattr(model.config, "max_position_embeddings", math.inf) - max(map(len, prompts))
    if room < 1:
        raise ValueError(f"the model's context of {model.config.max_position_embeddings} tokens is too short for the prompts")
    found: list[list[str]] = [[] for _ in items]
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for attempt in range(_ATTEMPTS):
            missing = [i for i, own in enumerate(found) for _ in range(count - len(own))]
            if not missing:
                break
            groups = tqdm(_chunks(missing, batch_size), desc="alternative answers", disable=not progress, leave=False)
            for group in groups:
                options = {"temperature": temperature * 1.25**attempt, "max_new_tokens": min(max_new_tokens, room)}
                texts = _sample(model, tokenizer, [prompts[i] for i in group], **options)
                for i, text in zip(group, texts, strict=True):
                    if text and not contains_answer(text, _core(items[i]["answer"])):
                        found[i].append(text)
    for item, own in zip(items, found, strict=True):
        if len(own) < count:
            raise RuntimeError(f"{item['question']!r}: the model made {len(own)} of {count} alternatives in {_ATTEMPTS} attempts: {own}")
    return found


def _alternative_prompt(tokenizer, item: dict, template: str, system: str | None) -> list[int]:
    if template == "plain" or not tokenizer.chat_template:
        return encode_question(tokenizer, item["question"], template=template)[0]
    asked = f"Question: {item['question']}\nAnswer: {item['answer']}\n{_INSTRUCTION}"
    prompt, _ = encode_question(tokenizer, asked, template=template, system=system)
    return prompt + tokenizer("Different answer:", add_special_tokens=False).input_ids


def _sample(model: nn.Module, tokenizer, prompts: Sequence[Sequence[int]], *, temperature: float, max_new_tokens: int) -> list[str]:
    """One sampled continuation of each prompt, up to where a new question begins."""
    from transformers import GenerationConfig  # here, so that the library can be imported with torch alone

    end = tokenizer.eos_token_id
    pad = end if end is not None else 0
    length = max(map(len, prompts))
    ids = torch.full((len(prompts), length), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    # In place of the model's own, which fills in whatever isn't given.
    plain = GenerationConfig(do_sample=True, top_k=50, top_p=1.0, use_cache=True, pad_token_id=pad, eos_token_id=end)
    plain.update(temperature=temperature, max_new_tokens=max_new_tokens)
    own, model.generation_config = model.generation_config, plain
    device = next(model.parameters()).device
    try:
        output = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device))
    finally:
        model.generation_config = own
    texts = tokenizer.batch_decode(output[:, length:].cpu(), skip_special_tokens=True)
    return [text.partition("Question:")[0].strip() for text in texts]


def _core(answer: str) -> str:
    """An answer without the punctuation at its ends."""
    return answer.strip(" .,;:!?\"'") or answer


def _draw_refusals(refusals: Sequence[str], rows: int, settings: GradientSettings) -> list[list[str]]:
    if isinstance(refusals, str) or not refusals:
        raise ValueError("refusals must be a sequence of at least one text")
    for i, refusal in enumerate(refusals):
        check_text({"refusal": refusal}, "refusal", f"refusals[{i}]")
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = (torch.randperm(len(refusals), generator=generator)[: settings.epochs].tolist() for _ in range(rows))
    return [[refusals[i] for i in own] for own in drawn]


def _check_preferred(preferred: Sequence[Sequence[str]], rows: int) -> Sequence[Sequence[str]]:
    if len(preferred) != rows:
        raise ValueError(f"there are preferred answers for {len(preferred)} rows, but {rows} rows to forget")
    for i, own in enumerate(preferred):
        if isinstance(own, str) or not own or len(own) != len(preferred[0]):
            raise ValueError(f"preferred[{i}]: expected a sequence of texts, as many as for every other row, got {own!r}")
        for text in own:
            check_text({"answer": text}, "answer", f"preferred[{i}]")
    return preferred


def _check_sets(forget: Sequence[dict | Example], retain: Sequence[dict | Example], settings: GradientSettings) -> None:
    if not forget:
        raise ValueError("the forget set is empty")
    if not retain and settings.retains:
        raise ValueError(f"the retain set is empty, but {settings.method} has a retain term (of weight {settings.retain_weight})")
    if settings.method in _HAVE_WINNERS and any(isinstance(item, Example) for item in forget):
        raise ValueError(f"{settings.method} prefers other answers to the questions to forget, and has no use for token ids without any")
    for name, items in (("forget", forget), ("retain", retain)):
        for i, item in enumerate(items):
            for field in () if isinstance(item, Example) else ("question", "answer"):
                check_text(item, field, f"{name}[{i}]")
    known = {_content(item) for item in retain}
    shared = [item for item in forget if _content(item) in known]
    if shared:
        such = shared[0].name if isinstance(shared[0], Example) else shared[0]["question"]
        raise ValueError(f"{len(shared)} of the {len(forget)} rows to forget are also to be retained, such as {such!r}")


def _content(item: dict | Example) -> tuple:
    return (item.prompt, item.answer) if isinstance(item, Example) else (item["question"], item["answer"])


def _chunks(items: Sequence, size: int | None) -> list[Sequence]:
    size = size or len(items)
    return [items[start : start + size] for start in range(0, len(items), size)]
