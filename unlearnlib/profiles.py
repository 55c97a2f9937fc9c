"""Profiles: which runs of which notebook, with which parameters. Everything about them is checked before anything runs."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from unlearnlib.gather import full_name

if TYPE_CHECKING:
    from nbformat import NotebookNode

_FIELDS = ("description", "threads", "resources", "settings", "runs")
_NAME = re.compile(r"[a-z]+")
_RUN_NAME = re.compile(r"[A-Za-z0-9._-]+")

GATHER = "gather"
"""The parameter of a notebook that names other runs, whose records the run reads."""


class ProfileError(ValueError):
    """A profile, or a notebook that it names, is at fault; the message names the file and the field or line."""


@dataclass(frozen=True)
class Run:
    """One run: a notebook with parameters.

    Attributes
    ----------
    profile, notebook, name : str
        Their combination names the run, as ``tiny/grom_audit/default``.
    parameters : dict
        What differs from the notebook's defaults.
    gathers : tuple of Run
        The runs whose records this one reads (:mod:`unlearnlib.gather`): those that its parameter ``gather`` names. One of another
        profile gathers nothing here: its record is read as it is committed.
    """

    profile: str
    notebook: str
    name: str
    parameters: dict[str, Any]
    gathers: tuple[Run, ...] = ()

    def __str__(self) -> str:
        return f"{self.profile}/{self.notebook}/{self.name}"

    @property
    def depth(self) -> int:
        """0 for a run that gathers none, else more than that of each which it gathers."""
        return max((other.depth + 1 for other in self.gathers), default=0)

    def source(self, root: Path) -> Path:
        """The text notebook."""
        return root / "notebooks" / f"{self.notebook}.md"

    def record(self, results: Path) -> Path:
        """Its record below ``results/`` or below the folder of fresh runs."""
        return results / self.profile / self.notebook / f"{self.name}.json"

    def committed_notebook(self, root: Path) -> Path:
        """The executed notebook that the book shows."""
        name = self.notebook if self.name == "default" else f"{self.notebook}-{self.name}"
        return root / "book" / "executed" / f"{name}.ipynb"


@dataclass(frozen=True)
class Profile:
    """A profile.

    Attributes
    ----------
    name, description : str
        Of the profile.
    runs : list of Run
        In the order of the file.
    threads : int
        Threads that one run uses.
    resources : dict of str to int or str
        What a cluster is asked for, for each run: ``mem_mb``, ``runtime`` (minutes), and so on, in Snakemake's terms.
    """

    name: str
    description: str
    runs: list[Run]
    threads: int = 1
    resources: dict[str, int | str] = field(default_factory=dict)

    def select(self, only: str = "") -> list[Run]:
        """The runs whose notebook, or ``notebook/run``, fits one of the comma-separated patterns; all of them by default.

        Raises
        ------
        ProfileError
            If nothing fits.
        """
        patterns = [pattern.strip() for pattern in only.split(",") if pattern.strip()]
        chosen = [
            run
            for run in self.runs
            if not patterns or any(fnmatch(run.notebook, p) or fnmatch(f"{run.notebook}/{run.name}", p) for p in patterns)
        ]
        if not chosen and patterns:
            known = ", ".join(f"{run.notebook}/{run.name}" for run in self.runs)
            raise ProfileError(f"no run of the profile {self.name} fits {only!r}; there are {known or 'none'}")
        return chosen


def names(root: Path) -> list[str]:
    """The profiles that there are."""
    return sorted(path.stem for path in (root / "profiles").glob("*.yaml"))


def load(name: str, root: Path, *, linked: bool = True) -> Profile:
    """Read a profile and check it against the notebooks that it names.

    Parameters
    ----------
    name : str
        ``profiles/<name>.yaml`` is read.
    root : Path
        The project's folder.
    linked : bool
        Whether its runs know the runs that they gather.

    Returns
    -------
    Profile

    Raises
    ------
    ProfileError
        For an unknown profile, field, notebook or parameter, a parameter of another type than its default, or a run that gathers
        what it can't; file and field are named.
    """
    path = root / "profiles" / f"{name}.yaml"
    if not path.is_file():
        raise ProfileError(f"unknown profile {name!r}: there are {', '.join(names(root)) or 'none'} in {root / 'profiles'}")
    if not _NAME.fullmatch(name):
        raise ProfileError(f"{path}: the name of a profile is made of small letters")
    content = _read_yaml(path)
    for key in content:
        if key not in _FIELDS:
            raise ProfileError(f"{path}: unknown field {key!r}; known are {', '.join(_FIELDS)}")
    description = _expect(content, "description", str, path)
    threads = _expect(content, "threads", int, path, default=1)
    if threads < 1:
        raise ProfileError(f"{path}: threads: must be at least 1, not {threads}")
    resources = _expect(content, "resources", dict, path, default={})
    for key, value in resources.items():
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            raise ProfileError(f"{path}: resources.{key}: must be a whole number or a text, not {value!r}")
    made = {}
    for notebook, variants in _expect(content, "runs", dict, path).items():
        source = root / "notebooks" / f"{notebook}.md"
        if not source.is_file():
            raise ProfileError(f"{path}: runs.{notebook}: there is no notebook {source}")
        defaults = notebook_parameters(source)
        if not isinstance(variants, dict) or not variants:
            raise ProfileError(f"{path}: runs.{notebook}: must map names of runs to their parameters, as in `default: {{}}`")
        for run, parameters in variants.items():
            where = f"{path}: runs.{notebook}.{run}"
            if not isinstance(run, str) or not _RUN_NAME.fullmatch(run):
                raise ProfileError(f"{where}: the name of a run is made of letters, digits, '.', '_' and '-'")
            if not isinstance(parameters, dict):
                raise ProfileError(f"{where}: must map parameters to values ({{}} for none), not {parameters!r}")
            made[f"{notebook}/{run}"] = Run(
                name, notebook, run, {key: _fit(value, key, defaults, where) for key, value in parameters.items()}
            )
        if defaults.get(GATHER, []) != []:
            raise ProfileError(f"{source}: the default of {GATHER} must be []: it is a profile that says what a run gathers")
    return Profile(name, description.strip(), _link(made, path, root) if linked else list(made.values()), threads, resources)


def _link(made: dict[str, Run], path: Path, root: Path) -> list[Run]:
    """The runs of a profile, by ``notebook/run``, each with those that it gathers: of the profile and in no circle, or of another one."""
    linked: dict[str, Run] = {}
    others: dict[str, dict[str, Run]] = {}

    def elsewhere(name: str, where: str) -> Run:
        profile = name.partition("/")[0]
        if profile == path.stem:
            raise ProfileError(f"{where}: {name} is of this very profile: name it {name.partition('/')[2]}")
        if profile not in others:
            others[profile] = {str(run): run for run in load(profile, root, linked=False).runs}
        if name not in others[profile]:
            raise ProfileError(f"{where}: there is no run {name}")
        return others[profile][name]

    def link(name: str, way: tuple[str, ...] = ()) -> Run:
        if name not in linked:
            run, way = made[name], (*way, name)
            where = f"{path}: runs.{run.notebook}.{run.name}.{GATHER}"
            names = [full_name(run.notebook, str(other)) for other in run.parameters.get(GATHER, [])]
            for other in names:
                if other.count("/") > 1:
                    linked[other] = elsewhere(other, where)
                elif other not in made:
                    raise ProfileError(f"{where}: there is no run {other} in this profile")
                if other in way:
                    raise ProfileError(f"{where}: runs gather each other in a circle: {', '.join((*way, other))}")
                if names.count(other) > 1:
                    raise ProfileError(f"{where}: {other} is named twice")
            linked[name] = replace(run, gathers=tuple(link(other, way) for other in names))
        return linked[name]

    return [link(name) for name in made]


def read_notebook(source: Path) -> NotebookNode:
    """A text notebook as a notebook object.

    Raises
    ------
    ProfileError
        If there is no such file.
    """
    import jupytext
    import nbformat

    if not source.is_file():
        raise ProfileError(f"there is no notebook {source}")
    return nbformat.v4.upgrade(jupytext.read(source))


def notebook_parameters(source: Path) -> dict[str, Any]:
    """The parameters of a text notebook and their defaults, read from the one cell that is tagged so.

    Parameters
    ----------
    source : Path
        A MyST notebook.

    Returns
    -------
    dict
        Defaults by name.

    Raises
    ------
    ProfileError
        If there isn't exactly one such cell, or something in it isn't the assignment of a literal; file and line are named.
    """
    cells = [cell.source for cell in read_notebook(source).cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise ProfileError(f"{source}: {len(cells)} cells are tagged 'parameters', there must be exactly one")
    text = source.read_text(encoding="utf-8")
    first_line = text[: text.find(cells[0])].count("\n") + 1
    try:
        statements = ast.parse(cells[0]).body
    except SyntaxError as error:
        raise ProfileError(f"{source}:{first_line + (error.lineno or 1) - 1}: not Python: {error.msg}") from None
    found: dict[str, Any] = {}
    for statement in statements:
        where = f"{source}:{first_line + statement.lineno - 1}"
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or len(targets) != 1 or value is None:
            raise ProfileError(f"{where}: a parameters cell holds assignments only, one name each: {ast.unparse(statement)}")
        if not isinstance(targets[0], ast.Name):
            raise ProfileError(f"{where}: not the name of a parameter: {ast.unparse(targets[0])}")
        try:
            found[targets[0].id] = ast.literal_eval(value)
        except (ValueError, TypeError):
            raise ProfileError(f"{where}: the default of {targets[0].id} must be a plain literal, not {ast.unparse(value)}") from None
    return found


def _fit(value: Any, name: str, defaults: dict[str, Any], where: str) -> Any:
    """A parameter's value in the type of its default."""
    if name not in defaults:
        raise ProfileError(f"{where}.{name}: unknown parameter; the notebook has {', '.join(defaults) or 'none'}")
    return _fit_type(value, defaults[name], f"{where}.{name}")


def _fit_type(value: Any, default: Any, where: str) -> Any:
    if default is None:
        return value
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, (list, tuple)) and isinstance(value, list):
        return [_fit_type(item, default[0], f"{where}[{i}]") for i, item in enumerate(value)] if default else value
    if type(value) is not type(default):
        hint = ""
        if isinstance(default, float) and isinstance(value, str):
            hint = " (YAML reads 1e-4 as text: write 1.0e-4)"
        raise ProfileError(f"{where}: must be {type(default).__name__} like its default {default!r}, not {value!r}{hint}")
    return value


def _expect(content: dict[str, Any], key: str, kind: type, path: Path, default: Any = None) -> Any:
    value = content.get(key, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ProfileError(f"{path}: {key}: must be of type {kind.__name__}, not {value!r}")
    return value


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a name that is given twice is an error, where PyYAML takes the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *name` brings in what an anchor names; what is written beside it wins
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ProfileError(f"{path}{line}: {error.problem}") from None
    if not isinstance(content, dict):
        raise ProfileError(f"{path}: must map fields to values: {', '.join(_FIELDS)}")
    return content
