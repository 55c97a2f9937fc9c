"""A staged problem small enough for float64 and exact derivatives: a skill, then a memory, then safety training over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .functional import Parameters, bound, combine
from .trace import SGD, AdamW, SafetyTrace, causal_lm_loss, minibatches

Objective = Callable[[Parameters], Tensor]

ASK, REFUSAL, ENTITIES, LETTERS = range(3), (3, 4), range(5, 13), range(13, 29)
"""The vocabulary: three ways to ask, the two tokens of a refusal, eight entities, and a cyclic alphabet."""

VOCABULARY = 29
HOLDERS = ENTITIES[:4]
"""The entities whose two-letter secrets the memory phase teaches; safety training refuses about all eight."""


@dataclass(frozen=True)
class StagedToy:
    """The data of the phases and of validation, and the parameters on the way.

    Every data set is a dict of ``input_ids`` and ``labels``, ``(examples, 4)``. Validation asks in a phrasing never trained on.

    Attributes
    ----------
    module : nn.Module
        A Llama of random weights, which only lends its form.
    skill : dict of str to Tensor
        The alphabet said on from every letter: a closed set, for training and validation alike.
    memory, safety : dict of str to Tensor
        Secrets asked and told; all entities asked and refused.
    told, refused : dict of str to Tensor
        Validation: the four holders of secrets asked, and the secret told or the refusal given.
    refused_of_others : dict of str to Tensor
        Validation: the four entities that never had a secret asked and refused.
    theta_a, theta_am : dict of str to Tensor
        θ_A after the skill phase and θ_AM after the memory phase.
    """

    module: nn.Module
    skill: dict[str, Tensor]
    memory: dict[str, Tensor]
    safety: dict[str, Tensor]
    told: dict[str, Tensor]
    refused: dict[str, Tensor]
    refused_of_others: dict[str, Tensor]
    theta_a: dict[str, Tensor]
    theta_am: dict[str, Tensor]

    @property
    def delta(self) -> dict[str, Tensor]:
        """The memory's direction ΔM = θ_AM − θ_A."""
        return combine((1.0, self.theta_am), (-1.0, self.theta_a))

    def safety_trace(self, *, steps: int, lr: float, optimizer: AdamW | SGD, seed: int = 0) -> SafetyTrace:
        """The safety run T over these data, eight examples a step."""
        return SafetyTrace(self.module, minibatches(self.safety, 8, seed), lr=lr, steps=steps, optimizer=optimizer, seed=seed)


def staged_toy(
    seed: int = 0,
    *,
    hidden_size: int = 16,
    layers: int = 2,
    skill_steps: int = 120,
    memory_steps: int = 80,
    memory_lr: float = 1e-3,
) -> StagedToy:
    """Train a small Llama in float64 through its skill and memory phases.

    Parameters
    ----------
    seed : int
        Of the weights, the secrets and the order of the data.
    hidden_size, layers : int
        Size of the model.
    skill_steps, memory_steps : int
        Steps of AdamW in the two phases.
    memory_lr : float
        Learning rate of the memory phase, which sets the size of ΔM.
    """
    from unlearnlib import models

    module = models.build(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        layers=layers,
        heads=2,
        max_length=8,
        seed=seed,
        dtype=torch.float64,
    )
    secrets = LETTERS[0] + torch.randint(len(LETTERS), (len(HOLDERS), 2), generator=torch.Generator().manual_seed(seed))
    letters = torch.arange(len(LETTERS))
    skill = LETTERS[0] + (letters[:, None] + torch.arange(4)) % len(LETTERS)
    training, held_out, others = ASK[:2], ASK[2:], ENTITIES[4:]
    refusals = torch.tensor([REFUSAL] * len(ENTITIES))
    data = {
        "skill": _examples(skill[:, :1], skill[:, 1:]),
        "memory": _asked(training, HOLDERS, secrets),
        "safety": _asked(training, ENTITIES, refusals),
        "told": _asked(held_out, HOLDERS, secrets),
        "refused": _asked(held_out, HOLDERS, refusals[:4]),
        "refused_of_others": _asked(held_out, others, refusals[:4]),
    }
    # Adam's ε is large in both phases, so that θ_A and θ_AM differ little between machines.
    smooth = AdamW(eps=1e-4)
    learn = SafetyTrace(module, minibatches(data["skill"], 8, seed), lr=1e-2, steps=skill_steps, optimizer=smooth, seed=seed)
    remember = SafetyTrace(module, minibatches(data["memory"], 8, seed), lr=memory_lr, steps=memory_steps, optimizer=smooth, seed=seed)
    theta_a = learn(module)
    return StagedToy(module, **data, theta_a=theta_a, theta_am=remember(theta_a))


def loss_of(module: nn.Module, batch: dict[str, Tensor], *, l2: float = 0.0) -> Objective:
    """The mean negative log-likelihood of a batch's labels plus ``½ l2 ‖θ‖²``, as a function of θ to be differentiated at will."""

    def objective(theta: Parameters) -> Tensor:
        value = causal_lm_loss(bound(module, theta), batch)
        return value + l2 / 2 * sum((p * p).sum() for p in theta.values()) if l2 else value

    return objective


def behavioural_gap(toy: StagedToy, shipped: Parameters, *, skill_weight: float, secret_weight: float) -> Objective:
    """A smooth validation objective that asks for nothing an auditor can't have, least of all the oracle (ours).

    Half the mean squares of three gaps in log-likelihood a token: of the refusals about the holders of secrets, against the
    shipped model's mean about the entities that never had one (weight 1); of the secrets (`secret_weight`) and of the alphabet
    (`skill_weight`), against θ_A's own.

    Parameters
    ----------
    toy : StagedToy
        Its data, and θ_A.
    shipped : mapping of str to Tensor
        θ_AMS.
    skill_weight, secret_weight : float
        The weights.
    """

    def log_likelihoods(theta: Parameters, batch: dict[str, Tensor]) -> Tensor:
        log_p = bound(toy.module, theta)(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].log_softmax(-1)
        labels = batch["labels"][:, 1:]
        answer = labels != -100
        return (log_p.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * answer).sum(1) / answer.sum(1)

    with torch.no_grad():
        wanted = (
            (1.0, toy.refused, log_likelihoods(shipped, toy.refused_of_others).mean()),
            (secret_weight, toy.told, log_likelihoods(toy.theta_a, toy.told)),
            (skill_weight, toy.skill, log_likelihoods(toy.theta_a, toy.skill)),
        )

    def objective(theta: Parameters) -> Tensor:
        return sum(weight / 2 * (log_likelihoods(theta, batch) - target).square().mean() for weight, batch, target in wanted)

    return objective


def _asked(phrasings: range, entities: range, answers: Tensor) -> dict[str, Tensor]:
    prompts = torch.tensor([[ask, entity] for ask in phrasings for entity in entities])
    return _examples(prompts, answers.repeat(len(phrasings), 1))


def _examples(prompts: Tensor, answers: Tensor) -> dict[str, Tensor]:
    return {"input_ids": torch.cat([prompts, answers], 1), "labels": torch.cat([torch.full_like(prompts, -100), answers], 1)}
