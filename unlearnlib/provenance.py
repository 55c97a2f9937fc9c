"""Where a record comes from: a hash of the code that computed it, the commit, versions and the machine.

The hash of the sources answers one question: could this run give something else today? It covers the notebook's code and every
module of the library that the notebook reaches through imports, each as its syntax tree without docstrings. A comment, a
docstring or a module that the notebook never imports therefore changes nothing.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
"""The library whose modules count as sources."""

_REPORTED_VERSIONS = ("torch", "transformers", "tokenizers", "numpy", "scipy", "matplotlib")


# ---------------------------------------------------------------------------------------------------------------------------
# The hash of the sources


def sources(code_cells: Iterable[str], package: Path = PACKAGE) -> str:
    """The hash of a notebook's code and of all of the library that it reaches.

    Parameters
    ----------
    code_cells : iterable of str
        The notebook's code cells, in order. Comments in them do not count.
    package : Path
        Folder of the library's top package. A file in its ``data`` folder counts if a reached module names it, or if no module
        of the package does (then nobody can say who reads it).

    Returns
    -------
    str
        16 hexadecimal digits.

    Raises
    ------
    SyntaxError
        If a cell or a reached module isn't Python.
    """
    trees = [ast.parse(cell, f"<cell {i}>") for i, cell in enumerate(code_cells)]
    reached = reached_modules(trees, package)
    digest = hashlib.sha256()
    for tree in trees:
        digest.update(ast.dump(tree).encode())
    for path in [*reached, *_data_files(trees, reached, package)]:
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(_fingerprint(path, _stamp(path)) if path.suffix == ".py" else path.read_bytes())
    return digest.hexdigest()[:16]


def reached_modules(trees: Iterable[ast.AST], package: Path = PACKAGE) -> list[Path]:
    """The files of the package that some code imports, directly or through other modules of it, in alphabetical order.

    Parameters
    ----------
    trees : iterable of ast.AST
        Code outside the package.
    package : Path
        Folder of the top package.

    Returns
    -------
    list of Path
        Modules and the ``__init__.py`` of every package on the way. Imports inside functions count like any other.
    """
    reached: set[Path] = set()
    waiting = [path for tree in trees for path in _imported(tree, None, package)]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += _imports_of_file(path, _stamp(path), package)
    return sorted(reached)


@cache
def _imports_of_file(path: Path, stamp: tuple[int, int], package: Path) -> tuple[Path, ...]:
    return tuple(_imported(ast.parse(path.read_bytes(), str(path)), path, package))


@cache
def _fingerprint(path: Path, stamp: tuple[int, int]) -> bytes:
    """What of a module can change its results: the tree without strings that stand alone, which is what docstrings are."""
    tree = ast.parse(path.read_bytes(), str(path))
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, [statement for statement in block if not _is_loose_string(statement)])
    return ast.dump(tree).encode()


def _is_loose_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _stamp(path: Path) -> tuple[int, int]:
    """Key of the caches: a file edited within one process (as the tests do) is read again."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _imported(tree: ast.AST, importer: Path | None, package: Path) -> list[Path]:
    found: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found += _files(alias.name.split("."), package)
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            if node.level:
                if importer is None:
                    continue
                inside = [package.name, *importer.relative_to(package).parts[:-1]]
                parts = inside[: len(inside) - node.level + 1] + parts
            found += _files(parts, package)
            for alias in node.names:  # `from package import module` reaches the module too
                found += _files([*parts, alias.name], package)
    return found


def _files(parts: list[str], package: Path) -> list[Path]:
    """The files that importing a dotted name runs, as far as the name denotes modules of the package."""
    if not parts or parts[0] != package.name:
        return []
    files, folder = [package / "__init__.py"], package
    for part in parts[1:]:
        if (folder / part / "__init__.py").is_file():
            folder = folder / part
            files.append(folder / "__init__.py")
        else:
            files.append(folder / f"{part}.py")
            break
    return [file for file in files if file.is_file()]


def _data_files(trees: list[ast.Module], reached: list[Path], package: Path) -> list[Path]:
    files = sorted(f for f in (package / "data").rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc"))
    named_here = _strings(trees) | {s for path in reached for s in _strings_of_file(path, _stamp(path))}
    named_anywhere = {s for path in package.rglob("*.py") for s in _strings_of_file(path, _stamp(path))}

    def named(file: Path, strings: set[str]) -> bool:
        folder = file.parent.relative_to(package).as_posix()
        return any(file.name in s or (folder != "data" and folder in s) for s in strings)

    return [file for file in files if named(file, named_here) or not named(file, named_anywhere)]


@cache
def _strings_of_file(path: Path, stamp: tuple[int, int]) -> frozenset[str]:
    return frozenset(_strings([ast.parse(path.read_bytes(), str(path))]))


def _strings(trees: Iterable[ast.AST]) -> set[str]:
    return {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200
    }


# ---------------------------------------------------------------------------------------------------------------------------
# Everything else


def environment() -> dict[str, Any]:
    """What a computation ran on: ``{"versions", "machine", "date"}``, the date in UTC."""
    return {"versions": versions(), "machine": machine(), "date": datetime.now(UTC).isoformat(timespec="seconds")}


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """The commit of a checkout and whether its tracked files differ from it; (None, None) outside of one or before the first."""
    commit = _output(["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD"])
    if not commit:
        return None, None
    changes = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return commit, changes != ""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in _REPORTED_VERSIONS}


def machine() -> dict[str, str | int]:
    """Processor, usable cores, threads a process may use, platform, and the GPU if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": cores,
        "threads": int(os.environ.get("OMP_NUM_THREADS") or cores),
        "platform": platform.platform(terse=True),
    }
    if shutil.which("nvidia-smi"):
        gpu = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
        if gpu:
            found["gpu"] = ", ".join(gpu.splitlines())
    return found


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(command: list[str]) -> str | None:
    """What a command prints, or None if it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
