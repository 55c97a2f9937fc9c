"""Take the README's picture, ``book/_static/tradeoff.svg``, out of the executed quickstart, whose figure it is."""

from __future__ import annotations

import json
from pathlib import Path

from unlearnlib.records import write_text

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "book" / "executed" / "grom_quickstart.ipynb"
FIGURE = "fig-quickstart-tradeoff"
PICTURE = ROOT / "book" / "_static" / "tradeoff.svg"


def figure() -> str:
    """The SVG text of the figure in the committed notebook."""
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["metadata"].get("mystnb", {}).get("figure", {}).get("name") == FIGURE:
            drawn = next(output["data"]["image/svg+xml"] for output in cell["outputs"] if "image/svg+xml" in output.get("data", {}))
            return drawn if isinstance(drawn, str) else "".join(drawn)
    raise LookupError(f"{NOTEBOOK} has no figure named {FIGURE}")


if __name__ == "__main__":
    write_text(PICTURE, figure())
