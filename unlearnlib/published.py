"""What the GROM paper (arXiv:2608.05783) published, for the columns and pictures that set it beside this project's own numbers.

Only what is known to be in the paper is here. A number that it does not give, or that isn't at hand, is ``None``, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

NAMES = {
    "base": "base model",
    "full": "before unlearning",
    "retain": "Retain",
    "grom": "GROM",
    "grom_head": "GROM, LM head",
    "grom_both": "GROM, both",
    "grad_ascent": "GA",
    "grad_diff": "GradDiff",
    "npo": "NPO",
    "simnpo": "SimNPO",
    "idk_dpo": "IdkDPO",
    "alt_po": "AltPO",
    "rmu": "RMU",
    "rome": "ROME",
    "memit": "MEMIT",
    "alpha_edit": "AlphaEdit",
    "zero_unlearn": "ZeroUnlearn",
}
"""How a table or a picture calls a method, in the order of their rows. A LoRA variant is called ``<method>_lora`` and has no entry."""


@dataclass(frozen=True)
class Table:
    """One published table.

    Attributes
    ----------
    name, title : str
        As in ``tofu_05``, and for a reader.
    headings, formats : dict of str to str
        Of each column, by its key; the format shows as many decimals as the paper prints. Minutes are those of one H100, for GROM
        with key collection, without loading or evaluation.
    rows : dict of str to dict
        Methods, by the keys of :data:`NAMES`, with their values by column; ``None`` where the paper prints a dash.
    """

    name: str
    title: str
    headings: dict[str, str]
    formats: dict[str, str]
    rows: dict[str, dict[str, float | None]]

    def value(self, method: str, column: str) -> float | None:
        """What the paper gives for a method, or None.

        Parameters
        ----------
        method : str
            Any; of one without a row nothing is known.
        column : str

        Raises
        ------
        ValueError
            If the table has no such column.
        """
        if column not in self.headings:
            raise ValueError(f"the published table {self.name} has no column {column!r}; it has {', '.join(self.headings)}")
        return self.rows.get(method, {}).get(column)


@cache
def _content() -> dict[str, Any]:
    return json.loads(resources.files("unlearnlib").joinpath("data/published.json").read_text(encoding="utf-8"))


def tables() -> list[str]:
    """The names of the published tables."""
    return list(_content()["tables"])


def table(name: str) -> Table:
    """A published table.

    Parameters
    ----------
    name : str
        One of :func:`tables`.

    Returns
    -------
    Table

    Raises
    ------
    ValueError
        If there is no such table.
    """
    if name not in tables():
        raise ValueError(f"there is no published table {name!r}; there are {', '.join(tables())}")
    content = _content()["tables"][name]
    columns = content["columns"]
    return Table(
        name,
        content["title"],
        {key: column["heading"] for key, column in columns.items()},
        {key: column["format"] for key, column in columns.items()},
        {method: dict(zip(columns, values, strict=True)) for method, values in content["rows"].items()},
    )


def claim(name: str) -> float:
    """A number of the paper's text.

    Parameters
    ----------
    name : {"speedup_over_simnpo_on_muse_books", "baseline_minutes_least", "baseline_minutes_most"}
        The speed-up over SimNPO that the paper gives for MUSE Books ("about"), and the range of the gradient baselines' minutes.

    Raises
    ------
    ValueError
        If there is no such claim.
    """
    claims = _content()["claims"]
    if name not in claims:
        raise ValueError(f"there is no claim {name!r}; there are {', '.join(claims)}")
    return claims[name]


def source() -> tuple[str, str]:
    """Where all of this stands: an address, and the key in the book's bibliography."""
    return _content()["source"], _content()["bibkey"]


def final(utility: float, forgetting: Sequence[float]) -> float:
    """The tables' summary, half utility and half forgetting.

    ``Final = ½ (utility + mean(forgetting))``. The paper doesn't spell it out: this form was inferred from its rows, which it fits to
    within the rounding of what they print (.01 on scales of 1, .05 on scales of 100).

    Parameters
    ----------
    utility : float
        TOFU: Model Utility. MUSE: knowledge memorisation of the retain set. WMDP: accuracy on MMLU.
    forgetting : sequence of float
        The forget terms, each the higher the better. TOFU: 1 − ROUGE-L, 1 − probability, 1 − extraction strength. MUSE: 100 − verbatim
        memorisation, 100 − knowledge memorisation, both of the forget set, and 100 minus the size of PrivLeak. WMDP: 1 − accuracy.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If there is no forget term.
    """
    if not forgetting:
        raise ValueError("Final needs at least one forget term")
    return (utility + sum(forgetting) / len(forgetting)) / 2
