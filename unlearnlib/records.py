"""Records: the numbers that leave a notebook, what may be expected of each, and how two are compared.

A notebook reports a value with :func:`exact`, :func:`trained` or :func:`timing`. The cell then shows the value rounded, and carries
it in full precision in the metadata of that output, from where the runner collects it into one JSON record a run.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

METADATA_KEY = "unlearnlib"


class RecordError(ValueError):
    """A record, or a value meant for one, is malformed."""


# ---------------------------------------------------------------------------------------------------------------------------
# Reporting from a notebook


def exact(*, rtol: float = 1e-9, atol: float = 1e-12, **values: Any) -> None:
    """Report values that any machine must reproduce: algebra in float64, counts, published statistics.

    Parameters
    ----------
    rtol, atol : float
        What two machines may differ by, ``|a − b| ≤ atol + rtol·|b|``. Integers, booleans and strings must be equal.
    **values : number, str, bool or list of dict
        The values by name. A list of dicts is a table, one dict a row.

    Raises
    ------
    RecordError
        If a value is of another type, or a number is NaN.
    """
    _show(values, {"class": "exact", "rtol": rtol, "atol": atol})


def trained(**values: Any) -> None:
    """Report values that depend on a network's arithmetic through many steps; what is certain of them, the notebook asserts.

    Parameters
    ----------
    **values : number, str, bool or list of dict
        The values by name, as in :func:`exact`.

    Raises
    ------
    RecordError
        If a value is of another type, or a number is NaN.
    """
    _show(values, {"class": "trained"})


def timing(**values: Any) -> None:
    """Report seconds, bytes and ratios of them: never compared.

    Parameters
    ----------
    **values : number, str, bool or list of dict
        The values by name, as in :func:`exact`; the unit belongs in the name (``edit_seconds``).

    Raises
    ------
    RecordError
        If a value is of another type, or a number is NaN.
    """
    _show(values, {"class": "timing"})


def _show(values: dict[str, Any], kind: dict[str, Any]) -> None:
    from IPython.display import display

    for name, value in values.items():
        plain = _to_plain(name, value)
        metadata = {METADATA_KEY: {"name": name, "value": plain, "class": kind}}
        display({"text/plain": f"{name} = {_text(plain, kind)}"}, metadata=metadata, raw=True)


def _to_plain(name: str, value: Any) -> Any:
    """The value in JSON's own types; tensors and NumPy scalars of one element become numbers."""
    if isinstance(value, (str, bool)):
        return value
    if isinstance(value, (list, tuple)):
        if not all(isinstance(row, dict) for row in value):
            raise RecordError(f"{name}: a list must hold dicts, one a row")
        return [{str(k): _to_plain(f"{name}[{i}].{k}", v) for k, v in row.items()} for i, row in enumerate(value)]
    if value is None:
        return None
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            raise RecordError(f"{name}: only single numbers can be recorded, not an array") from error
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            raise RecordError(f"{name} is NaN: a record holds numbers only")
        if math.isinf(value):
            raise RecordError(f"{name} is infinite: a record holds finite numbers only")
        return value
    raise RecordError(f"{name}: cannot record a {type(value).__name__}")


def _text(value: Any, kind: dict[str, Any]) -> str:
    """A short text; numbers below the tolerance are shown as a bound, since their digits are noise."""
    if isinstance(value, list):
        return _table(value, kind)
    if isinstance(value, float):
        atol = kind.get("atol", 0.0)
        if kind["class"] == "exact" and 0 < abs(value) <= atol:
            return f"|·| ≤ {atol:g}"
        return f"{value:.4g}"
    return "–" if value is None else str(value)


def _table(rows: list[dict[str, Any]], kind: dict[str, Any]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_text(row.get(column), kind) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return f"{len(rows)} rows\n" + "\n".join("  " + line for line in lines)


# ---------------------------------------------------------------------------------------------------------------------------
# Reading and writing


@cache
def _schema() -> dict[str, Any]:
    return json.loads(resources.files("unlearnlib").joinpath("data/record.schema.json").read_text(encoding="utf-8"))


def validate(record: dict[str, Any], where: str = "record") -> None:
    """Check a record against the JSON Schema that the package carries.

    Raises
    ------
    RecordError
        Naming `where` and the field at fault.
    """
    import jsonschema

    try:
        jsonschema.validate(record, _schema())
    except jsonschema.ValidationError as error:
        field = ".".join(str(part) for part in error.absolute_path) or "(top level)"
        raise RecordError(f"{where}: field {field}: {error.message}") from None
    unmatched = set(record["values"]) ^ set(record["classes"])
    if unmatched:
        raise RecordError(f"{where}: values and classes differ in {', '.join(sorted(unmatched))}")


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Read and validate one record.

    Raises
    ------
    RecordError
        If the file isn't JSON (line and column named) or doesn't fit the schema (field named).
    FileNotFoundError
        If there is no such file.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    validate(record, str(path))
    return record


def write(record: dict[str, Any], path: str | os.PathLike) -> None:
    """Validate a record and write it, whole or not at all."""
    write_text(path, to_text(record, str(path)))


def to_text(record: dict[str, Any], where: str = "record") -> str:
    """The text of a record's file.

    Raises
    ------
    RecordError
        If the record doesn't fit the schema, naming `where` and the field at fault.
    """
    validate(record, where)
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file under a temporary name, then put it in place, so that no reader ever sees half of it."""
    write_texts({path: text})


def write_texts(texts: Mapping[str | os.PathLike, str]) -> None:
    """Write text files that belong together: none is put in place before all are written, under temporary names.

    Parameters
    ----------
    texts : mapping of path to str
        What to write where. Files are put in place in this order, each at once; their permissions follow the umask.

    Raises
    ------
    OSError
        If a file cannot be written; if that shows before the first is put in place, all are as they were.
    """
    temporaries: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            path = Path(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporaries[path] = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            with temporaries[path].open("x", encoding="utf-8") as file:
                file.write(text)
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def collect(outputs: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values and their classes that a list of notebook outputs carries.

    Raises
    ------
    RecordError
        If one name was reported twice.
    """
    values: dict[str, Any] = {}
    classes: dict[str, Any] = {}
    for output in outputs:
        entry = output.get("metadata", {}).get(METADATA_KEY)
        if entry is None:
            continue
        name = entry["name"]
        if name in values:
            raise RecordError(f"the value {name} is reported twice")
        values[name], classes[name] = entry["value"], dict(entry["class"])
    return values, classes


# ---------------------------------------------------------------------------------------------------------------------------
# Comparing


def disagreements(new: Any, old: Any, kind: dict[str, Any], name: str) -> list[str]:
    """What of a value disagrees with its committed counterpart; empty when all is well.

    Parameters
    ----------
    new, old : number, str, bool, None or list of dict
        The value just computed, and the one it should agree with.
    kind : dict
        The class of the value, as in a record. Only ``exact`` values are compared.
    name : str
        How to call the value in the messages.

    Returns
    -------
    list of str
        One message a disagreement.
    """
    if kind["class"] != "exact":
        return []
    if isinstance(new, list) and isinstance(old, list):
        if len(new) != len(old):
            return [f"{name}: {len(new)} rows, expected {len(old)}"]
        found = []
        for i, (a, b) in enumerate(zip(new, old, strict=True)):
            if a.keys() != b.keys():
                found.append(f"{name}[{i}]: columns {sorted(a)}, expected {sorted(b)}")
                continue
            for key in a:
                found += disagreements(a[key], b[key], kind, f"{name}[{i}].{key}")
        return found
    floats = isinstance(new, float) or isinstance(old, float)
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (new, old))
    if floats and numbers:
        if abs(new - old) <= kind["atol"] + kind["rtol"] * abs(old):
            return []
        return [f"{name}: {new!r}, expected {old!r} within rtol {kind['rtol']:g}, atol {kind['atol']:g}"]
    return [] if type(new) is type(old) and new == old else [f"{name}: {new!r}, expected {old!r}"]


def compare(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """What disagrees between two records of the same run: missing or added names, changed classes, unequal ``exact`` values."""
    found = [f"{name}: no longer reported" for name in old["values"] if name not in new["values"]]
    found += [f"{name}: not in the committed record" for name in new["values"] if name not in old["values"]]
    for name, value in new["values"].items():
        if name in old["values"]:
            if new["classes"][name] != old["classes"][name]:
                found.append(f"{name}: class {new['classes'][name]}, expected {old['classes'][name]}")
            else:
                found += disagreements(value, old["values"][name], old["classes"][name], name)
    return found
