"""Results of long steps, kept in the cache until the code that computed them changes, so that an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any

from . import models, provenance
from .records import write_text


def remembered(step: str, recipe: Any, compute: Callable[[], Any], code: str) -> Any:
    """A step's result, computed unless the cache has it.

    Parameters
    ----------
    step : str
        Its name, for people.
    recipe : JSON-serialisable
        Everything besides code that determines the result.
    compute : callable
        Gives a JSON-serialisable result.
    code : str
        Python code that imports whatever computes the step: when a module that it reaches changes, the result is computed again.

    Returns
    -------
    JSON-serialisable
    """
    content = json.dumps([recipe, code_hash(code)], sort_keys=True)
    path = models.cache_dir() / "steps" / f"{step}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    result = compute()
    write_text(path, json.dumps(result))
    return json.loads(json.dumps(result))


@cache
def code_hash(code: str) -> str:
    """The hash of all of the library that some code reaches; a process goes on running what it imported, so once is enough."""
    return provenance.sources([code])
