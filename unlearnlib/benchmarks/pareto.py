"""Forgetting against what is kept, over all benchmarks: who is dominated by whom, and GROM's claim to be Pareto-best on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..methods import GROM
from .tofu_study import LORA
from .tofu_tables import MODELS

Point = tuple[float, float]
"""Forgetting and utility, both the higher the better."""

HIGHEST = "highest Final of all methods"
"""The claim of every benchmark's record whose verdict says whether its rows can tell GROM's Final from the best other one."""

UNCLEAR = "can't be told"
"""Such a verdict. With a colon and a reason behind it, the benchmark says nothing of the other methods at all: they don't work there."""


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark's record is read.

    Attributes
    ----------
    title : str
    run : str
        ``notebook/run`` of the record.
    utility : str
        The key of a row's utility.
    method : str
        The variant of GROM that the paper used.
    scale : float
        What the row's numbers are divided by to lie between 0 and 1.
    """

    title: str
    run: str
    utility: str
    method: str = "grom"
    scale: float = 1.0

    def point(self, row: Mapping) -> Point:
        """Forgetting and utility of a row, whose ``final`` is the mean of the two."""
        utility = row[self.utility] / self.scale
        return 2 * row["final"] / self.scale - utility, utility


BENCHMARKS = (
    Benchmark("TOFU 5 %", "grom_tofu/forget05", "model_utility"),
    Benchmark("TOFU 10 %", "grom_tofu/forget10", "model_utility"),
    Benchmark("MUSE News", "grom_muse/news", "know_mem_retain", scale=100),
    Benchmark("MUSE Books", "grom_muse/books", "know_mem_retain", scale=100),
    Benchmark("WMDP", "grom_wmdp/default", "mmlu"),
    Benchmark("zsRE", "grom_zsre/default", "specificity", "grom_head"),
)
"""The paper's tables, one record each."""


def undominated(points: Mapping[str, Point]) -> list[str]:
    """The points that no other is at least as good as in both coordinates, and better in one.

    Parameters
    ----------
    points : mapping of str to (float, float)
        By name; the higher, the better.

    Returns
    -------
    list of str
        By ascending first coordinate.
    """
    return sorted((name for name, point in points.items() if not dominating(points, point)), key=lambda name: points[name])


def dominating(points: Mapping[str, Point], point: Point) -> list[str]:
    """The points that are at least as good as another in both coordinates, and better in one.

    Parameters
    ----------
    points : mapping of str to (float, float)
        By name; the higher, the better.
    point : (float, float)

    Returns
    -------
    list of str
        In the order of `points`.
    """
    return [name for name, other in points.items() if other != point and other[0] >= point[0] and other[1] >= point[1]]


def standings(records: Iterable[Mapping]) -> list[dict]:
    """Every method's place on every benchmark.

    Parameters
    ----------
    records : iterable of record
        Of the runs of :data:`BENCHMARKS`, or of some of them.

    Returns
    -------
    list of dict
        For each benchmark, in their order, and each method (not the models that no method made): ``benchmark``, ``method``, ``forgetting``,
        ``utility`` and ``final``, between 0 and 1; ``dominated_by``, the names of the methods that do, comma-separated, or None;
        ``counts``, whether the benchmark says anything of the methods beside GROM.
    """
    found = []
    for benchmark, record in _known(records):
        rows = [row for row in record["values"]["rows"] if row["method"] not in MODELS]
        points = {row["method"]: benchmark.point(row) for row in rows}
        counts = not (_highest(benchmark, record) or "").startswith(f"{UNCLEAR}:")
        for method, (forgetting, utility) in points.items():
            found.append(
                {
                    "benchmark": benchmark.title,
                    "method": method,
                    "forgetting": forgetting,
                    "utility": utility,
                    "final": (forgetting + utility) / 2,
                    "dominated_by": ", ".join(dominating(points, (forgetting, utility))) or None,
                    "counts": counts,
                }
            )
    return found


def verdicts(records: Iterable[Mapping]) -> list[dict]:
    """The claim that GROM is Pareto-best, benchmark by benchmark.

    Parameters
    ----------
    records : iterable of record
        As for :func:`standings`.

    Returns
    -------
    list of dict
        ``benchmark``; ``method``, the paper's variant of GROM there; ``final``; ``other`` and ``other_final``, the best method that isn't
        GROM; ``dominated_by``, those of them that dominate it, comma-separated, or None; ``pareto_best``: ``holds`` if none does, ``can't
        be told`` if one does though the benchmark's rows can't tell the two Finals apart, or if the others don't work there, else
        ``doesn't hold``; ``highest_final``, the verdict of the benchmark's own page.

    Notes
    -----
    Benchmarks whose record lacks GROM's row, any other method's, or the page's verdict are left out.
    """
    found = []
    for benchmark, record in _known(records):
        rows = {row["method"]: row for row in record["values"]["rows"]}
        others = {name: benchmark.point(row) for name, row in rows.items() if name not in (*MODELS, *GROM)}
        verdict = _highest(benchmark, record)
        if benchmark.method not in rows or not others or verdict is None:
            continue
        point = benchmark.point(rows[benchmark.method])
        beaten_by = dominating(others, point)
        best = max(others, key=lambda name: sum(others[name]))
        unclear = verdict.startswith(f"{UNCLEAR}:") or (beaten_by and verdict == UNCLEAR)
        found.append(
            {
                "benchmark": benchmark.title,
                "method": benchmark.method,
                "final": sum(point) / 2,
                "other": best,
                "other_final": sum(others[best]) / 2,
                "dominated_by": ", ".join(beaten_by) or None,
                "pareto_best": UNCLEAR if unclear else "doesn't hold" if beaten_by else "holds",
                "highest_final": verdict,
            }
        )
    return found


def duels(rows: Sequence[Mapping]) -> list[dict]:
    """GROM against each other method, over the benchmarks on which both have a row that counts.

    Parameters
    ----------
    rows : sequence of dict
        From :func:`standings`.

    Returns
    -------
    list of dict
        ``method``; ``benchmarks``, on how many both have a row; ``grom_dominates``, ``dominates_grom`` and ``neither``, on how many of
        them; ``higher_final``, on how many GROM's Final is the higher one. GROM is the paper's variant of each benchmark.
    """
    variants = {benchmark.title: benchmark.method for benchmark in BENCHMARKS}
    points = {(row["benchmark"], row["method"]): (row["forgetting"], row["utility"]) for row in rows if row["counts"]}
    found = []
    for method in dict.fromkeys(row["method"] for row in rows if row["method"].removesuffix(LORA) not in GROM):
        pairs = [
            (points[title, variant], points[title, method])
            for title, variant in variants.items()
            if (title, variant) in points and (title, method) in points
        ]
        ahead = sum(bool(dominating({"grom": grom}, other)) for grom, other in pairs)
        behind = sum(bool(dominating({method: other}, grom)) for grom, other in pairs)
        found.append(
            {
                "method": method,
                "benchmarks": len(pairs),
                "grom_dominates": ahead,
                "dominates_grom": behind,
                "neither": len(pairs) - ahead - behind,
                "higher_final": sum(sum(grom) > sum(other) for grom, other in pairs),
            }
        )
    return found


def _highest(benchmark: Benchmark, record: Mapping) -> str | None:
    """The verdict of a benchmark's page on the Final of the paper's variant of GROM, if it has one."""
    own = (claim for claim in record["values"]["claims"] if claim.get("method", benchmark.method) == benchmark.method)
    return next((claim["verdict"] for claim in own if claim["claim"] == HIGHEST), None)


def _known(records: Iterable[Mapping]) -> list[tuple[Benchmark, Mapping]]:
    by_run = {f"{record['notebook']}/{record['run']}": record for record in records}
    return [(benchmark, by_run[benchmark.run]) for benchmark in BENCHMARKS if benchmark.run in by_run]
