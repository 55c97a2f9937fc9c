"""What the closed-form edit, its keys and its audit cost, against the obvious other way to do each, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from . import figures, models
from .examples import batches, encode
from .facts import bundled_facts
from .grom.audit import FitState
from .grom.keys import BandStates, collect_keys
from .grom.ridge import RidgeFitter
from .grom.theory import time_audit
from .measure import best_seconds, peak_mb

LARGE = 8192
RIGHT_HAND_SIDES = 576


def run() -> dict[str, Any]:
    """Measure everything, largest problems first.

    Returns
    -------
    dict of str to number or rows
        ``solve_vs_lu``, ``head_solve_vs_dense``, ``band_vs_rerun``, ``audit_vs_refit`` are ratios of times, the other way over ours;
        ``solve_share`` and ``gram_share`` are rates relative to a matrix product's in the same run; the rest are rows of curves.
    """
    values = _solve(LARGE)
    values["gram_share"] = _gram_share(LARGE // 2)
    values["head_solve_vs_dense"] = _head_solve()
    values["band_vs_rerun"] = _band()
    values["audit_vs_refit"] = _audit(200, 10, 2)["ratio"]
    values["audit_columns_curve"] = [_audit(200, columns) for columns in (1, 10, 30)]
    values["audit_examples_curve"] = [_audit(examples, 10) for examples in (25, 50, 100)]
    values["solve_curve"] = [_solve_seconds(n) for n in (512, 1024, 2048, 4096)]
    peaks = [
        {"keys": keys, "peak_mb": peak_mb(partial(_fit_primal, 1_000, 64), partial(_fit_primal, keys))} for keys in (1_000, 10_000, 100_000)
    ]
    values["fit_peak_mb"] = max(row["peak_mb"] for row in peaks)
    values["fit_peak_curve"] = peaks
    values["fit_seconds_curve"] = [
        {"keys": keys, **best_seconds({"seconds": partial(_fit_primal, keys)}, 1)} for keys in (1_000, 3_000, 10_000, 30_000)
    ]
    return values


def draw(values: dict[str, Any]) -> Figure:
    """How cost grows with the width of a key, the number of keys, and the number of examples audited.

    Parameters
    ----------
    values : dict
        What :func:`run` returned.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figures.use_style()
    figure, axes = plt.subplots(1, 3, figsize=(figures.WIDTH * 1.25, 2.8))
    curves = ((values["solve_curve"], "n", "width n of a key"), (values["fit_seconds_curve"], "keys", "keys (n = 1536)"))
    for axis, (rows, name, label) in zip(axes, curves, strict=False):
        axis.loglog([row[name] for row in rows], [row["seconds"] for row in rows], "o-")
        axis.set(xlabel=label, ylabel="seconds")
        _mark(axis, [row[name] for row in rows])
    axes[0].set_title("solve")
    axes[1].set_title("stream and solve")
    rows = values["audit_examples_curve"]
    for name, label in (("refit_seconds", "refits"), ("audit_seconds", "audit")):
        axes[2].loglog([row["examples"] for row in rows], [row[name] for row in rows], "o-", label=label)
    axes[2].set(xlabel="examples audited", ylabel="seconds", title="audit")
    _mark(axes[2], [row["examples"] for row in rows])
    axes[2].legend()
    return figure


def _mark(axis: Axes, places: list[int]) -> None:
    """Ticks where something was measured: a short logarithmic axis crowds its own."""
    axis.set_xticks(places, [f"{place:,}" for place in places], rotation=30)
    axis.minorticks_off()


def _gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _fitter(n: int, rank: int) -> RidgeFitter:
    fitter = RidgeFitter(n, rank)
    for seed in range(2):
        fitter.update_retain(_gaussian(n, n, seed=seed))
    fitter.update_forget(_gaussian(n, n, seed=2), (torch.arange(n) % rank, torch.ones(n, dtype=torch.float64)))
    return fitter


def _solve(n: int) -> dict[str, float]:
    fitter = _fitter(n, RIGHT_HAND_SIDES)
    lower = fitter.normal_matrix(100 / fitter.retain_count, 1 / fitter.forget_count)
    lower.diagonal().add_(0.03 * lower.diagonal().mean())
    normal = lower.tril() + lower.tril(-1).T
    right = fitter.cross.T / fitter.forget_count
    del lower
    factor = _gaussian(n // 2, n // 2)
    seconds = best_seconds(
        {
            "ours": lambda: fitter.solve(form="primal"),
            # Adding the Gram matrices up is not part of a solve: it is taken off.
            "sum": lambda: fitter.normal_matrix(1.0, 1.0),
            "general": lambda: torch.linalg.solve(normal, right),
            "product": lambda: factor @ factor,
        },
        2,
    )
    ours = seconds["ours"] - seconds["sum"]
    operations, rate = n**3 / 3 + 2 * n**2 * RIGHT_HAND_SIDES, 2 * (n // 2) ** 3 / seconds["product"]
    return {"solve_vs_lu": seconds["general"] / ours, "solve_share": operations / ours / rate, "solve_seconds": ours}


def _gram_share(n: int) -> float:
    fitter, keys = RidgeFitter(n, 1), _gaussian(n, n)
    seconds = best_seconds({"gram": lambda: fitter.update_retain(keys), "product": lambda: keys @ keys})
    return seconds["product"] / seconds["gram"]


def _head_solve(n: int = 576, rows: int = 49_152, distinct: int = 64) -> float:
    """The edit of SmolLM2's head from the right-hand sides of the distinct gold tokens, against all rows of the vocabulary."""
    fitter = _fitter(n, distinct)
    dense = RidgeFitter(n, rows)
    for seed in range(2):
        dense.update_retain(_gaussian(n, n, seed=seed))
    dense.update_forget(_gaussian(n, n, seed=2), (torch.arange(n) % distinct, torch.ones(n, dtype=torch.float64)))
    seconds = best_seconds({"all": dense.solve, "distinct": fitter.solve})
    return seconds["all"] / seconds["distinct"]


def _band(layers: int = 6, examples: int = 48) -> float:
    """Keys of the last layers of SmolLM2: one pass that advances from layer to layer, against a run of the model for every layer."""
    model, tokenizer = models.load()
    grouped = batches(encode(tokenizer, bundled_facts()[:examples]), batch_size=16)
    depth = len(model.model.layers)
    band = range(depth - layers, depth)

    def one_pass() -> None:
        states = BandStates(model, grouped, band)
        for layer in band:
            for _ in states.keys(layer):
                pass
            if layer != band[-1]:
                states.advance(layer)

    def rerun() -> None:
        for layer in band:
            for _ in collect_keys(model, grouped, layer):
                pass

    seconds = best_seconds({"one pass": one_pass, "rerun": rerun})
    return seconds["rerun"] / seconds["one pass"]


def _audit(examples: int, columns: int, repetitions: int = 1, n: int = 1536, rank: int = 576) -> dict[str, float]:
    """Influence of all examples of a fit, against as many refits."""
    retain = _gaussian(2 * n, n, seed=5)
    count = examples * columns
    codes, values = torch.arange(count) % rank, torch.ones(count, dtype=torch.float64)
    keys, example = _gaussian(count, n, seed=6), torch.arange(examples).repeat_interleave(columns)
    fitter = RidgeFitter(n, rank)
    fitter.update_retain(retain)
    fitter.update_forget(keys, (codes, values))
    names = tuple(str(i) for i in range(examples))
    state = FitState("", fitter.solve(form="primal"), None, keys, codes, values, example, names)
    audited, refitted = time_audit(state, retain, repetitions)
    return {"examples": examples, "columns": columns, "audit_seconds": audited, "refit_seconds": refitted, "ratio": refitted / audited}


def _solve_seconds(n: int) -> dict[str, float]:
    fitter = _fitter(n, RIGHT_HAND_SIDES)
    return {"n": n, **best_seconds({"seconds": lambda: fitter.solve(form="primal")})}


def _stream(keys: int, n: int = 1536, chunk: int = 500) -> RidgeFitter:
    fitter = RidgeFitter(n, 64)
    for start in range(0, keys, chunk):
        rows = _gaussian(chunk, n, seed=start)
        if start % (2 * chunk):
            fitter.update_forget(rows, (torch.arange(chunk) % 64, torch.ones(chunk, dtype=torch.float64)))
        else:
            fitter.update_retain(rows)
    return fitter


def _fit_primal(keys: int, n: int = 1536) -> None:
    _stream(keys, n).solve(form="primal")
