"""Reading, in a notebook, what other runs have recorded.

A run gathers others of its profile if that says so with the parameter ``gather``, a list of names ``run`` or, of another notebook,
``notebook/run``; that is how a page shows the spread over seeds without computing all of them in one go. The runner looks the records up
and tells the notebook's kernel where they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import records

GATHERED = "UNLEARNLIB_GATHERED"
"""The environment variable in which the runner says where the records are: a JSON object of paths by ``notebook/run``."""

CHECKOUT = Path(__file__).parents[1]
"""Where ``results/`` is looked for without a runner."""


def full_name(notebook: str, name: str) -> str:
    """``notebook/run`` for the name of a run, which may be that already."""
    return name if "/" in name else f"{notebook}/{name}"


def gathered(notebook: str, names: Sequence[str], profile: str = "tiny") -> list[dict[str, Any]]:
    """The records of other runs.

    Under the runner these are the records as a promotion would leave them: the committed one if it comes from today's code and
    parameters and no fresh run disagrees with it, else the fresh one. In a notebook that is executed by other means (papermill, nbval,
    by hand) they are the committed ones.

    Parameters
    ----------
    notebook : str
        The notebook of runs that are named without one.
    names : sequence of str
        The runs, as the parameter ``gather`` lists them.
    profile : str
        Whose runs, where there is no runner to know it.

    Returns
    -------
    list of dict
        Whole records, with ``parameters`` and ``values``, in the order of the names.

    Raises
    ------
    records.RecordError
        If a record is missing, naming it and how to make it, or malformed; or if the run's profile doesn't list it under ``gather``,
        since nothing would then say that this run depends on it.
    """
    names = [full_name(notebook, name) for name in names]
    known = os.environ.get(GATHERED)
    if known is None:
        paths = {name: CHECKOUT / "results" / profile / f"{name}.json" for name in names}
    else:
        found = json.loads(known)
        undeclared = [name for name in names if name not in found]
        if undeclared:
            raise records.RecordError(
                f"{', '.join(undeclared)}: this run's profile doesn't list it under gather, which has {', '.join(found) or 'nothing'}"
            )
        paths = {name: Path(found[name]) for name in names}
    for name, path in paths.items():
        if not path.is_file():
            raise records.RecordError(
                f"there is no record {path} to gather; in a clone of the project, `make promote PROFILE={profile} ONLY={name}` makes it"
            )
    return [records.read(path) for path in paths.values()]
