"""The training map T: one run of training, with all that decides it held fixed, as a function of where it starts.

The same trace has two faces. Calling it runs the ordinary loop on ``torch.optim``; :meth:`SafetyTrace.differentiable` is the
same run as a pure function, through which :meth:`SafetyTrace.jvp` pushes a tangent together with the optimiser's moments.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp
from tqdm import tqdm

from .functional import Parameters, bound, cast_like, check_alike, digest, load_tensors, parameters_of, save_tensors, wide

Batch = Any
Loss = Callable[[Callable, Batch], Tensor]
Schedule = Callable[[int, int], float]

_SQRT_FLOOR = 1e-30
_CHECKPOINT = "unlearnlib.trace/1"


# ---------------------------------------------------------------------------------------------------------------------------
# Optimisers: each as torch.optim has it, and as a pure update of (parameters, state)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): a map on parameters and two moments (θ, m, v)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def ordinary(self, leaves: Iterable[Tensor]) -> torch.optim.Optimizer:
        """The optimiser of torch.optim, with a fresh state."""
        return torch.optim.AdamW(leaves, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)

    def fresh(self, theta: Parameters) -> dict[str, dict[str, Tensor]]:
        """Both moments at zero."""
        return {moment: {name: torch.zeros_like(p) for name, p in theta.items()} for moment in ("m", "v")}

    def update(self, theta: Parameters, gradient: Parameters, state: dict, lr: float, step: int) -> tuple[dict, dict]:
        """One step, `step` counted from 1; nothing is changed in place."""
        # Scalars go in as arguments of lerp, add and addcdiv: as factors they would take forward mode through slow Python rules.
        beta_1, beta_2 = self.betas
        m = {name: torch.lerp(state["m"][name], g, 1 - beta_1) for name, g in gradient.items()}
        v = {name: torch.lerp(state["v"][name], g * g, 1 - beta_2) for name, g in gradient.items()}
        correction = math.sqrt(1 - beta_2**step)
        rate = -lr * correction / (1 - beta_1**step)
        moved = {}
        for name, p in theta.items():
            # The floor keeps the square root differentiable where v = 0 (embedding rows of unseen tokens); there m = 0 too.
            denominator = (v[name] + _SQRT_FLOOR).sqrt() + self.eps * correction
            decayed = torch.add(p, p, alpha=-lr * self.weight_decay) if self.weight_decay else p
            moved[name] = torch.addcdiv(decayed, m[name], denominator, value=rate)
        return moved, {"m": m, "v": v}


@dataclass(frozen=True)
class SGD:
    """Gradient descent with (heavy-ball) momentum: unlike Adam's, a smooth map wherever the loss is smooth."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    def ordinary(self, leaves: Iterable[Tensor]) -> torch.optim.Optimizer:
        """The optimiser of torch.optim, with a fresh state."""
        return torch.optim.SGD(leaves, lr=0.0, momentum=self.momentum, weight_decay=self.weight_decay)

    def fresh(self, theta: Parameters) -> dict[str, Tensor]:
        """The velocity at zero."""
        return {name: torch.zeros_like(p) for name, p in theta.items()}

    def update(self, theta: Parameters, gradient: Parameters, state: dict, lr: float, step: int) -> tuple[dict, dict]:
        """One step; nothing is changed in place."""
        pull = {name: torch.add(gradient[name], p, alpha=self.weight_decay) for name, p in theta.items()}
        velocity = {name: torch.add(pull[name], state[name], alpha=self.momentum) for name in theta}
        return {name: torch.add(p, velocity[name], alpha=-lr) for name, p in theta.items()}, velocity


# ---------------------------------------------------------------------------------------------------------------------------
# Schedules, data and loss


def constant(step: int, steps: int) -> float:
    """The same learning rate all along."""
    return 1.0


def linear_decay(step: int, steps: int) -> float:
    """From the full learning rate at step 0 straight down to zero at `steps`."""
    return 1.0 - step / steps


def minibatches(examples: Mapping[str, Tensor], batch_size: int, seed: int) -> list[dict[str, Tensor]]:
    """Cut stacked examples into batches, in an order that the seed decides; the last one may be smaller.

    Parameters
    ----------
    examples : mapping of str to Tensor
        As a causal language model takes them, each ``(examples, length)``.
    batch_size : int
        Rows a batch.
    seed : int
        Of the permutation.

    Raises
    ------
    ValueError
        If the tensors differ in their number of rows, or `batch_size` is below 1.
    """
    rows = {name: len(tensor) for name, tensor in examples.items()}
    if len(set(rows.values())) != 1:
        raise ValueError(f"examples differ in their number of rows: {rows}")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, at least 1 is needed")
    order = torch.randperm(next(iter(rows.values())), generator=torch.Generator().manual_seed(seed))
    return [{name: tensor[chosen] for name, tensor in examples.items()} for chosen in order.split(batch_size)]


def causal_lm_loss(model: Callable, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean negative log-likelihood, in nats a token, of the labels that aren't −100; in float32 or the logits' wider dtype.

    Parameters
    ----------
    model : callable
        Takes the batch without its labels and returns an object with ``logits``, as Hugging Face models do.
    batch : mapping of str to Tensor
        ``input_ids`` and ``labels``, both ``(rows, length)`` and not shifted; ``attention_mask`` if there is padding.
    """
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}, use_cache=False).logits
    return nn.functional.cross_entropy(wide(logits[:, :-1]).flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


# ---------------------------------------------------------------------------------------------------------------------------


class SafetyTrace:
    """The realised training run as a map from parameters to parameters (Sweeney 2026, the map T).

    Data, their order, learning rates and optimiser are fixed here; the optimiser starts afresh in each run. Dropout is off.
    Two calls from the same start give the same bits on one machine with the same number of threads. Nothing in it is particular
    to safety: a skill or a memory phase is one too.

    Parameters
    ----------
    module : nn.Module
        Any causal language model of Hugging Face, or whatever `loss` can use. It is only read: parameters are put in for each call.
    batches : sequence
        The batches, one a step, taken round and round.
    lr : float
        Learning rate, at a schedule factor of 1.
    steps : int
        Number of optimiser steps.
    seed : int, optional
        If given, the batches are permuted anew in each round; otherwise they come in the order of `batches`.
    optimizer : AdamW or SGD
        With its hyperparameters.
    schedule : callable
        The factor on `lr` as a function of the step, from 0, and of the number of steps.
    loss : callable
        ``loss(model, batch)``, a scalar; `model` is the module with the parameters at hand in it.
    autocast : torch.dtype, optional
        Run forward passes under autocast to this type; ordinary face only.

    Raises
    ------
    ValueError
        If there are no batches, no steps, or a learning rate isn't finite.
    """

    def __init__(
        self,
        module: nn.Module,
        batches: Sequence[Batch],
        *,
        lr: float,
        steps: int,
        seed: int | None = None,
        optimizer: AdamW | SGD = AdamW(),
        schedule: Schedule = constant,
        loss: Loss = causal_lm_loss,
        autocast: torch.dtype | None = None,
    ):
        if len(batches) == 0:
            raise ValueError("batches is empty: a trace needs at least one batch")
        if steps < 1:
            raise ValueError(f"steps is {steps}, at least 1 is needed")
        self.rates = [lr * schedule(step, steps) for step in range(steps)]
        if not all(math.isfinite(rate) for rate in self.rates):
            raise ValueError(f"lr and schedule give a learning rate that isn't finite: {self.rates}")
        self.module, self.batches, self.steps = module, list(batches), steps
        self.optimizer, self.loss, self.autocast = optimizer, loss, autocast
        self.order = _order(len(batches), steps, seed)

    def loss_at(self, theta: Parameters, batch: Batch, *, differentiable: bool = True) -> Tensor:
        """The loss of the module with parameters θ on one batch; see :func:`~unlearnlib.sidecar.functional.bound`."""
        model = bound(self.module, theta, differentiable=differentiable)
        return self.loss(model, _on_device(batch, next(iter(theta.values())).device))

    def __call__(
        self,
        theta: nn.Module | Parameters,
        *,
        checkpoint: str | os.PathLike | None = None,
        checkpoint_every: int = 10,
        progress: bool | None = None,
    ) -> dict[str, Tensor]:
        """Train from θ and return where it ends: T(θ).

        Parameters
        ----------
        theta : nn.Module or mapping of str to Tensor
            The start. Exactly the parameters named are trained.
        checkpoint : path, optional
            File in which the state of the run is kept. If it exists, the run goes on from there, to the same bits.
        checkpoint_every : int
            Steps between two writes.
        progress : bool, optional
            Show a bar on stderr; by default if that is a terminal.

        Returns
        -------
        dict of str to Tensor
            New tensors, in the dtypes of the start.

        Raises
        ------
        MismatchError
            If θ doesn't fit the module.
        ValueError
            If `checkpoint` is damaged or belongs to another run, or `checkpoint_every` is below 1.
        ArithmeticError
            If the loss is no longer finite; the step is named.
        """
        if checkpoint_every < 1:
            raise ValueError(f"checkpoint_every is {checkpoint_every}, at least 1 is needed")
        start = self._checked(theta)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        optimizer = self.optimizer.ordinary(leaves.values())
        first, run = 0, ""
        if checkpoint is not None:
            run = self._fingerprint(start)
            if os.path.exists(checkpoint):
                first = _resume(checkpoint, run, leaves, optimizer)
        device = next(iter(leaves.values())).device
        casting = torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()
        with torch.enable_grad():
            for step in _bar(range(first, self.steps), self.steps, progress):
                with casting:
                    loss = self.loss_at(leaves, self.batches[self.order[step]], differentiable=False)
                if not torch.isfinite(loss):
                    raise ArithmeticError(f"the loss is {loss.item()} at step {step} of {self.steps}")
                gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
                for leaf, gradient in zip(leaves.values(), gradients, strict=True):
                    leaf.grad = gradient
                optimizer.param_groups[0]["lr"] = self.rates[step]
                optimizer.step()
                done = step + 1
                if checkpoint is not None and (done % checkpoint_every == 0 or done == self.steps):
                    state = _state(leaves, optimizer) if done < self.steps else {}
                    parameters = {f"parameter/{name}": leaf for name, leaf in leaves.items()}
                    save_tensors(checkpoint, parameters | state, {"format": _CHECKPOINT, "run": run, "step": done})
        return {name: leaf.detach() for name, leaf in leaves.items()}

    def differentiable(self, theta: Parameters, *, progress: bool | None = False) -> dict[str, Tensor]:
        """T(θ) as a pure function, for the transforms of ``torch.func``; it agrees with the ordinary face up to rounding.

        Raises
        ------
        ValueError
            If the trace has an autocast type: the ordinary face then computes another function.
        """
        if self.autocast is not None:
            raise ValueError(f"autocast is {self.autocast}: only a trace without it has a differentiable face")
        state = self.optimizer.fresh(theta)
        gradient_at = grad(self.loss_at)
        for step in _bar(range(self.steps), self.steps, progress):
            gradient = gradient_at(theta, self.batches[self.order[step]])
            theta, state = self.optimizer.update(theta, gradient, state, self.rates[step], step + 1)
        return dict(theta)

    def jvp(
        self, theta: nn.Module | Parameters, direction: Parameters, *, progress: bool | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """T(θ) and the exact derivative DT(θ)·d, by forward-mode differentiation through the whole run.

        The tangent travels through the augmented state, parameters and moments, so what the optimiser does to its own
        history is differentiated too. Memory doesn't grow with the number of steps.

        Parameters
        ----------
        theta : nn.Module or mapping of str to Tensor
            The start, computed with in float32 or wider.
        direction : mapping of str to Tensor
            The direction d, with the names and shapes of θ.

        Returns
        -------
        (dict, dict)
            T(θ) and DT(θ)·d.

        Raises
        ------
        MismatchError
            If θ doesn't fit the module, or the direction doesn't fit θ.
        ValueError
            If the trace has an autocast type.
        """
        start = {name: wide(tensor) for name, tensor in self._checked(theta).items()}
        check_alike(theta=start, direction=direction)
        tangent = cast_like({name: direction[name] for name in start}, start)
        with torch.no_grad():
            return jvp(lambda point: self.differentiable(point, progress=progress), (start,), (tangent,))

    def _checked(self, theta: nn.Module | Parameters) -> dict[str, Tensor]:
        start = parameters_of(theta)
        own = dict(self.module.named_parameters(remove_duplicate=False))
        check_alike(module={name: own[name] for name in start if name in own}, theta=start)
        return start

    def _fingerprint(self, start: Parameters) -> str:
        frozen = {name: p for name, p in self.module.named_parameters() if name not in start}
        realised = [self.batches[index] for index in self.order]
        loss = f"{self.loss.__module__}.{self.loss.__qualname__}"
        return digest(realised, self.rates, self.optimizer, loss, self.autocast, type(self.module).__qualname__, frozen, start)


def _order(batches: int, steps: int, seed: int | None) -> list[int]:
    rounds = math.ceil(steps / batches)
    if seed is None:
        return (list(range(batches)) * rounds)[:steps]
    generator = torch.Generator().manual_seed(seed)
    return [index for _ in range(rounds) for index in torch.randperm(batches, generator=generator).tolist()][:steps]


def _on_device(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, Mapping):
        return {name: _on_device(part, device) for name, part in batch.items()}
    return batch.to(device) if isinstance(batch, Tensor) else batch


def _bar(steps: range, total: int, progress: bool | None) -> Iterator[int]:
    return tqdm(steps, desc="training", unit="step", initial=steps.start, total=total, disable=None if progress is None else not progress)


def _state(leaves: Parameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    entries = ((key, name, value) for name, leaf in leaves.items() for key, value in optimizer.state[leaf].items())
    return {f"{key}/{name}": value for key, name, value in entries if value is not None}


def _resume(path: str | os.PathLike, run: str, leaves: Parameters, optimizer: torch.optim.Optimizer) -> int:
    """Put a checkpoint's parameters and optimiser state in place; returns the number of steps done."""
    tensors, description = load_tensors(path, _CHECKPOINT)
    if description["run"] != run:
        raise ValueError(f"{path} belongs to another run: data, settings or start differ; remove it or choose another name")
    for entry, tensor in tensors.items():
        key, name = entry.split("/", 1)
        if key == "parameter":
            leaves[name].data.copy_(tensor)
        else:
            # torch.optim keeps its count of steps on the CPU and everything else beside the parameter.
            optimizer.state[leaves[name]][key] = tensor if key == "step" else tensor.to(leaves[name].device)
    return description["step"]
