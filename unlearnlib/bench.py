"""``python -m unlearnlib.bench``: measure what things cost here, and write ``results/bench/<what>.json`` with a figure.

Ratios are of two measurements of one run; nothing here is ever compared or asserted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

SUITES = ("grom", "sidecar")


def code(suite: str) -> str:
    """The code that a suite's record is hashed by: what this imports is all that it measures."""
    return f"from unlearnlib import bench_{suite}"


def main(arguments: list[str] | None = None) -> int:
    """Run the suites that the command line names, all by default, and write a record for each."""
    parser = argparse.ArgumentParser(prog="python -m unlearnlib.bench", description=__doc__.split("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"which to run: {', '.join(SUITES)} (default: all)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the matrix library (default: all cores)")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder of the records (default: results/bench)")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.suites) - set(SUITES)):
        parser.error(f"unknown suite {unknown[0]!r}: use {', '.join(SUITES)}")
    # The libraries read these when they are first imported, so they come before torch.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)

    import torch

    from . import bench_grom, bench_sidecar, provenance, records

    torch.set_num_threads(options.threads)
    root = Path.cwd()
    for suite in options.suites or SUITES:
        module = {"grom": bench_grom, "sidecar": bench_sidecar}[suite]
        print(f"{suite} …", file=sys.stderr, flush=True)
        origin = provenance.environment() | dict(zip(("commit", "dirty"), provenance.git_state(root), strict=True))
        start = time.perf_counter()
        values = module.run()
        origin |= {"sources": provenance.sources([code(suite)]), "seconds": time.perf_counter() - start}
        record = {"notebook": "bench", "run": suite, "profile": "bench", "parameters": {"threads": options.threads}, "values": values}
        record |= {"classes": {name: {"class": "timing"} for name in values}, "provenance": origin}
        records.write(record, options.out / f"{suite}.json")
        module.draw(values).savefig(options.out / f"{suite}.svg", metadata={"Date": None})
        for name, value in values.items():
            print(f"  {name}: {value if isinstance(value, list) else format(value, '.3g')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
