"""What the exact derivative of a training run costs, against the run itself and against the secant, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from . import figures, models
from .measure import best_seconds, peak_mb
from .sidecar import AdamW, SafetyTrace, minibatches, parameters_of, secant

STEPS = (10, 20, 40)


def run() -> dict[str, Any]:
    """Measure runs of some lengths of a Llama with a million parameters.

    Returns
    -------
    dict of str to number or rows
        ``jvp_vs_plain_time`` and ``secant_vs_plain_time``, ratios of times at the longest run; ``jvp_extra_mb``, by how much the
        derivative's peak memory exceeds the plain run's, for the longest run, and ``jvp_extra_mb_short``, for the shortest;
        ``by_steps``, all of it for all lengths.
    """
    rows = []
    for steps in STEPS:
        seconds = best_seconds(_works(steps), 2)
        peaks = {name: peak_mb(partial(_do, "plain", 1), partial(_do, name, steps)) for name in ("jvp", "plain")}
        extra = peaks["jvp"] - peaks["plain"]
        ratios = {f"{work}_vs_plain_time": seconds[work] / seconds["plain"] for work in ("jvp", "secant")}
        rows.append({"steps": steps, "plain_seconds": seconds["plain"], **ratios, "jvp_extra_mb": extra})
    longer, shorter = rows[-1], rows[0]
    values: dict[str, Any] = {name: longer[name] for name in ("jvp_vs_plain_time", "secant_vs_plain_time", "jvp_extra_mb")}
    return values | {"jvp_extra_mb_short": shorter["jvp_extra_mb"], "by_steps": rows}


def draw(values: dict[str, Any]) -> Figure:
    """Time and memory of the exact derivative and the secant over the number of training steps.

    Parameters
    ----------
    values : dict
        What :func:`run` returned.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figures.use_style()
    figure, (times, memory) = plt.subplots(1, 2, figsize=(figures.WIDTH, 2.8))
    rows, steps = values["by_steps"], [row["steps"] for row in values["by_steps"]]
    times.plot(steps, [row["plain_seconds"] for row in rows], "o-", label="plain run")
    for work, label in (("secant", "secant"), ("jvp", "exact derivative")):
        times.plot(steps, [row["plain_seconds"] * row[f"{work}_vs_plain_time"] for row in rows], "o-", label=label)
    times.set(xlabel="training steps", ylabel="seconds")
    times.legend()
    memory.plot(steps, [row["jvp_extra_mb"] for row in rows], "o-")
    memory.set(xlabel="training steps", ylabel="MB beyond the plain run", ylim=(0, None))
    return figure


def _works(steps: int) -> dict[str, Any]:
    """The run, its exact derivative and its secant at ε other than 1, each as a function of nothing."""
    module = models.build(
        "llama", vocab_size=1024, hidden_size=128, intermediate_size=384, layers=4, heads=4, max_length=64, dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1024, (32, 32), generator=generator)
    batches = minibatches({"input_ids": tokens, "labels": tokens}, 8, seed=0)
    trace = SafetyTrace(module, batches, lr=1e-4, steps=steps, optimizer=AdamW(), seed=0)
    theta = parameters_of(module)
    delta = {name: 1e-3 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in theta.items()}
    return {
        "plain": lambda: trace(theta, progress=False),
        "jvp": lambda: trace.jvp(theta, delta, progress=False),
        "secant": lambda: secant(trace, theta, delta, epsilon=0.5),
    }


def _do(name: str, steps: int) -> None:
    _works(steps)[name]()
