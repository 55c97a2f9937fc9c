"""Wall-clock time of works that take turns, and peak memory of a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Work = Callable[[], Any]


def best_seconds(works: Mapping[str, Work], repetitions: int = 3) -> dict[str, float]:
    """Best wall-clock time of each work, the works taking turns so that a disturbance hits them alike, after one round that doesn't count.

    Parameters
    ----------
    works : mapping of str to callable
    repetitions : int
        Rounds that count.

    Returns
    -------
    dict of str to float
        Seconds.
    """
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repetitions):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    return {name: min(seen) for name, seen in times.items()}


def peak_mb(warm_up: Work, work: Work) -> float:
    """Peak resident memory, in MB, of a fresh process that does some work, above what it had after the warm-up.

    Parameters
    ----------
    warm_up, work : callable
        Picklable: a function of a module, or a ``functools.partial`` of one.

    Returns
    -------
    float
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_added_peak_mb, (warm_up, work))


def _added_peak_mb(warm_up: Work, work: Work) -> float:
    import torch

    torch.set_num_threads(1)
    warm_up()
    before = _high_water_mb()
    work()
    return _high_water_mb() - before


def _high_water_mb() -> float:
    """The most memory that this process has held. Linux hands ``ru_maxrss`` on from the parent, so there it is read elsewhere."""
    status = Path("/proc/self/status")
    if status.is_file():
        return next(float(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
