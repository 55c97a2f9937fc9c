"""What nbval compares: reported values by their class, other text by its numbers with a tolerance, pictures by their presence.

nbval compares text exactly, and floating-point results of two machines differ in the last digits. Here a value that carries record
metadata is compared as its record would be, and in all other text integers must be equal, floats close, and the rest the same.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from nbval.plugin import IPyNbCell

from unlearnlib import records

RTOL, ATOL = 1e-6, 1e-9
PICTURES = ("image/svg+xml", "image/png", "text/html")
NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?!\w)")

# The notebooks' kernels import this checkout and draw inline, like the runs that the notebooks come from.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
# One thread each, as in the runs: several processes of several threads on few cores crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"


def differences(new: list[dict[str, Any]], reference: list[dict[str, Any]]) -> list[str]:
    """What of a cell's outputs disagrees with the committed ones, one message each; stderr doesn't count."""
    new_values, reference_values = _reported(new), _reported(reference)
    found = [f"{name}: no longer reported" for name in reference_values if name not in new_values]
    found += [f"{name}: reported, but not in the committed notebook" for name in new_values if name not in reference_values]
    for name in new_values.keys() & reference_values.keys():
        (value, kind), (expected, expected_kind) = new_values[name], reference_values[name]
        if kind != expected_kind:
            found.append(f"{name}: class {kind}, expected {expected_kind}")
        else:
            found += records.disagreements(value, expected, kind, name)

    new_rest, reference_rest = _by_type(new), _by_type(reference)
    for kind in sorted(new_rest.keys() | reference_rest.keys()):
        ours, theirs = new_rest.get(kind, []), reference_rest.get(kind, [])
        if len(ours) != len(theirs):
            found.append(f"{kind}: {len(ours)} outputs, expected {len(theirs)}")
        elif kind not in PICTURES:
            found += [f"{kind}: {problem}" for a, b in zip(ours, theirs, strict=True) for problem in text_differences(a, b)]
    return found


def text_differences(new: str, reference: str) -> list[str]:
    """Where two texts differ by more than white space and the tolerance of floats."""
    if _skeleton(new) != _skeleton(reference):
        return [f"{new.strip()!r}, expected {reference.strip()!r}"]
    pairs = zip(NUMBER.findall(new), NUMBER.findall(reference), strict=True)
    return [f"{a}, expected {b}, in {new.strip()!r}" for a, b in pairs if not _close(a, b)]


def _skeleton(text: str) -> list[str]:
    return NUMBER.sub("#", text).split()


def _close(a: str, b: str) -> bool:
    a, b = a.replace("−", "-"), b.replace("−", "-")
    if re.fullmatch(r"[-+]?\d+", a) and re.fullmatch(r"[-+]?\d+", b):
        return int(a) == int(b)
    return math.isclose(float(a), float(b), rel_tol=RTOL, abs_tol=ATOL)


def _reported(outputs: list[dict[str, Any]]) -> dict[str, tuple[Any, dict[str, Any]]]:
    values, classes = records.collect(outputs)
    return {name: (value, classes[name]) for name, value in values.items()}


def _by_type(outputs: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Outputs without record metadata as texts by type: stdout in one piece, errors, and each MIME type."""
    found: dict[str, list[str]] = {}
    for output in outputs:
        if records.METADATA_KEY in output.get("metadata", {}):
            continue
        if output["output_type"] == "stream":
            if output["name"] == "stdout":
                found["stdout"] = ["".join(found.get("stdout", [])) + output["text"]]
        elif output["output_type"] == "error":
            found.setdefault("error", []).append(f"{output['ename']}: {output['evalue']}")
        else:
            for mime, content in output["data"].items():
                found.setdefault(mime, []).append(content if isinstance(content, str) else repr(content))
    return found


def compare_outputs(cell: IPyNbCell, test: list[dict[str, Any]], ref: list[dict[str, Any]], skip_compare: Any = None) -> bool:
    """What nbval calls for each cell: the outputs just computed, and those in the committed notebook."""
    cell.comparison_traceback = [f"cell {cell.cell_num}: {problem}" for problem in differences(test, ref)]
    return not cell.comparison_traceback


assert hasattr(IPyNbCell, "compare_outputs"), "nbval has changed: the comparison with tolerances would not be used"
IPyNbCell.compare_outputs = compare_outputs
