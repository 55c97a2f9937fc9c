"""Runs: execute a notebook with parameters, compare what it computed with the committed record, and promote it.

``python -m unlearnlib.runs --help`` lists the commands. The workflow (``Snakefile``) calls ``run`` once a run and ``compare`` at
the end; people mostly use ``make book``, ``make reproduce`` and ``make promote``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unlearnlib import bench, gather, profiles, provenance, records
from unlearnlib.profiles import ProfileError, Run

if TYPE_CHECKING:
    from nbformat import NotebookNode

RUNS = Path("_build/runs")
"""Where fresh runs go, below the project's folder. Never onto committed files."""

REPORT = Path("_build/reproduction.json")
"""The last comparison."""

SHOWN = 5
"""Differences that a promotion prints of a run; the comparison prints all."""

INJECTED = "injected-parameters"
"""papermill's tag of the cell that it adds when a run sets parameters."""


class RunError(RuntimeError):
    """A run failed or must not start; the message says which, where and why."""


# ---------------------------------------------------------------------------------------------------------------------------
# Executing


def execute(run: Run, root: Path, out: Path, *, allow_dirty: bool = False, show_progress: bool = True) -> dict[str, Any]:
    """Execute one run and write its notebook and record below `out`, both or neither.

    The kernel starts in an empty scratch folder and imports the library from `root`, so a notebook can neither lean on the
    folder it is started from nor leave files there.

    Parameters
    ----------
    run : Run
        From a profile, hence already checked.
    root : Path
        The project's folder.
    out : Path
        ``<out>/<profile>/<notebook>/<run>.ipynb`` and ``.json`` are written.
    allow_dirty : bool
        Whether a run of another profile than tiny may start while tracked files differ from the commit that its record names.
    show_progress : bool
        A bar over the cells where stderr is a terminal; of long runs (all but tiny) also what the notebook itself says on stderr.

    Returns
    -------
    dict
        The record.

    Raises
    ------
    RunError
        If a cell fails (notebook, line, code and error are named), the tree is dirty, or a run that this one gathers has no record.
    records.RecordError
        If the notebook reports one name twice.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError

    commit, dirty = provenance.git_state(root)
    if run.profile != "tiny" and dirty and not allow_dirty:
        raise RunError(
            f"{run}: tracked files differ from HEAD, so the record could not name the commit that made it; "
            "commit first, or pass --allow-dirty (make reproduce ALLOW_DIRTY=1)"
        )
    gathered = {_name_for(run, other): gathered_record(run, other, root, out) for other in run.gathers}
    absent = [name for name, path in gathered.items() if path is None]
    if absent:
        elsewhere = [name for name in absent if name.count("/") > 1]
        if elsewhere:
            raise RunError(f"{run} gathers {', '.join(elsewhere)}, of another profile, of which there is no committed record")
        raise RunError(
            f"{run} gathers {', '.join(absent)}, of which there is no record of today's code and parameters; "
            f"run it first (make reproduce PROFILE={run.profile} ONLY={','.join(absent)})"
        )
    source_hash = run_sources(run, root, out)
    # papermill warns of parameters that its own parser cannot read; ours has read them all.
    logging.getLogger("papermill").setLevel(logging.ERROR)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unlearnlib-run-") as scratch, _kernel_environment(root, gathered):
        try:
            notebook = papermill.execute_notebook(
                profiles.read_notebook(run.source(root)),
                None,
                parameters=run.parameters,
                kernel_name="python3",
                progress_bar=show_progress and sys.stderr.isatty() and {"desc": str(run), "leave": False, "mininterval": 1.0},
                stderr_file=sys.stderr if show_progress and run.profile != "tiny" else None,
                cwd=scratch,
                extra_arguments=["--log-level=50"],
            )
        except PapermillExecutionError as error:
            raise RunError(_explain(run, error, root)) from None
    seconds = time.monotonic() - began

    clean(notebook)
    values, classes = records.collect([output for cell in notebook.cells for output in cell.get("outputs", [])])
    record = {
        "notebook": run.notebook,
        "run": run.name,
        "profile": run.profile,
        "parameters": run.parameters,
        "values": values,
        "classes": classes,
        "provenance": {
            "commit": commit,
            "dirty": dirty,
            "sources": source_hash,
            **provenance.environment(),
            "seconds": round(seconds, 1),
        },
    }
    target = run.record(out)
    # The record last: it is what the workflow takes for a finished run.
    records.write_texts({target.with_suffix(".ipynb"): _to_text(notebook), target: records.to_text(record, str(run))})
    return record


def clean(notebook: NotebookNode) -> None:
    """Strip, in place, all that differs between two executions that computed the same.

    Timestamps, the kernel's version, progress bars and other stderr go; random cell ids become ``c00, c01, …``; a stdout stream
    that arrived in pieces becomes one.
    """
    notebook.metadata.clear()
    notebook.metadata.update(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python", "file_extension": ".py", "pygments_lexer": "ipython3"},
    )
    for i, cell in enumerate(notebook.cells):
        cell.id = f"c{i:02d}"
        for noise in ("papermill", "execution"):
            cell.metadata.pop(noise, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]
        if cell.cell_type == "code":
            cell.outputs = _merge_streams([o for o in cell.outputs if o.get("name") != "stderr"])


def _merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    merged: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and merged and merged[-1].output_type == "stream":
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def _explain(run: Run, error: Any, root: Path) -> str:
    """A failed cell in a few lines: where it is, the frames that led there, the error."""
    source = run.source(root)
    text = source.read_text(encoding="utf-8")
    at = text.find(error.source)
    where = f"{source}:{text[:at].count(chr(10)) + 1}" if at >= 0 else str(source)
    plain = [re.sub("\x1b\\[[0-9;]*m", "", line) for entry in error.traceback for line in entry.splitlines()]
    frames = [line for line in plain if re.match(r"(File |Cell |-+> )", line)][-8:]
    return "\n    ".join([f"{run}: the cell at {where} failed with {error.ename}: {error.evalue}", *frames])


@contextmanager
def _kernel_environment(root: Path, gathered: dict[str, Path]) -> Iterator[None]:
    """The library of this checkout, this environment's own kernel and inline figures, whatever the user has set; and gathered records."""
    path = os.pathsep.join(p for p in (str(root.resolve()), os.environ.get("PYTHONPATH")) if p)
    wanted = {"PYTHONPATH": path, "JUPYTER_PREFER_ENV_PATH": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    # tqdm advises every kernel to install widgets; bars are shown in a terminal here.
    wanted["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:IProgress not found"]))
    wanted[gather.GATHERED] = json.dumps({name: str(file.resolve()) for name, file in gathered.items()})
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def sources(notebook: str, root: Path, run: str = "") -> str:
    """The hash of all code that a notebook runs, see :func:`unlearnlib.provenance.sources`.

    Parameters
    ----------
    notebook : str
        Its name, or ``bench`` for a benchmark.
    root : Path
        The project's folder.
    run : str
        Which benchmark. The runs of a notebook share its code.

    Raises
    ------
    ProfileError
        If there is no such notebook, or a cell or a module isn't Python.
    """
    if notebook == "bench":
        cells = [bench.code(run)]
    else:
        cells = _code(profiles.read_notebook(root / "notebooks" / f"{notebook}.md"))
    try:
        return provenance.sources(cells, root / "unlearnlib")
    except SyntaxError as error:
        raise ProfileError(f"{notebook}: {error.filename}:{error.lineno}: not Python: {error.msg}") from None


def run_sources(run: Run, root: Path, out: Path) -> str:
    """The hash of what a run depends on: its notebook's code and, if it gathers other runs, what their records hold.

    Parameters
    ----------
    run : Run
    root : Path
        The project's folder.
    out : Path
        Where the fresh runs are.

    Returns
    -------
    str
        16 hexadecimal digits.

    Raises
    ------
    ProfileError
        As :func:`sources`.
    """
    return _with_gathered(sources(run.notebook, root), [gathered_record(run, other, root, out) for other in run.gathers])


def _with_gathered(code: str, paths: Iterable[Path | None]) -> str:
    """The hash of code and of gathered records. Seconds, dates and machines of those don't count; missing ones do."""
    contents = []
    for path in paths:
        record = records.read(path) if path and path.is_file() else {}
        contents.append({key: record.get(key) for key in ("notebook", "run", "parameters", "values")})
    return hashlib.sha256(json.dumps([code, contents], sort_keys=True).encode()).hexdigest()[:16] if contents else code


def _name_for(run: Run, other: Run) -> str:
    """How a run's profile names another run."""
    return f"{other.notebook}/{other.name}" if other.profile == run.profile else str(other)


def gathered_record(run: Run, other: Run, root: Path, out: Path) -> Path | None:
    """The record that a run reads of another one that it gathers.

    Parameters
    ----------
    run, other : Run
    root, out : Path
        As in :func:`compare`.

    Returns
    -------
    Path or None
        Of the same profile what :func:`available` says; of another one the committed record, whatever code made it, or None.
    """
    if other.profile == run.profile:
        return available(other, root, out)
    path = other.record(root / "results")
    return path if path.is_file() else None


def available(run: Run, root: Path, out: Path) -> Path | None:
    """The record of a run that one which gathers it reads, the one that a promotion would leave.

    Parameters
    ----------
    run : Run
        To be gathered.
    root, out : Path
        As in :func:`compare`.

    Returns
    -------
    Path or None
        The committed record if it comes from today's code and parameters, unless a fresh run disagrees with it; else the fresh one; None
        if neither comes from today's.

    Raises
    ------
    records.RecordError
        If a record is malformed.
    """
    today = run_sources(run, root, out)

    def current(path: Path) -> dict[str, Any] | None:
        record = records.read(path) if path.is_file() else None
        return record if record and (record["provenance"]["sources"], record["parameters"]) == (today, run.parameters) else None

    committed, fresh = (current(run.record(folder)) for folder in (root / "results", out))
    if committed and not (fresh and records.compare(fresh, committed)):
        return run.record(root / "results")
    return run.record(out) if fresh else None


def missing(selected: Iterable[Run], root: Path) -> list[Run]:
    """Those of some runs that have no committed record, whatever code it comes from."""
    return [run for run in selected if not run.record(root / "results").is_file()]


def _code(notebook: NotebookNode) -> list[str]:
    """The code that a notebook's text holds, without the cell that papermill adds."""
    return [cell.source for cell in notebook.cells if cell.cell_type == "code" and INJECTED not in cell.metadata.get("tags", [])]


def _to_text(notebook: NotebookNode) -> str:
    import nbformat

    return nbformat.writes(notebook).rstrip("\n") + "\n"


# ---------------------------------------------------------------------------------------------------------------------------
# Comparing


def compare(runs: list[Run], root: Path, out: Path) -> dict[str, Any]:
    """Hold each fresh run against the committed record of its name.

    Parameters
    ----------
    runs : list of Run
        Of one profile.
    root : Path
        The project's folder; committed records lie in ``results/``.
    out : Path
        Where the fresh runs are.

    Returns
    -------
    dict
        ``{"versions", "machine", "date", "runs": [{"run", "verdict", "exact", "other", "seconds", "problems"}]}``; a verdict is
        ``agrees``, ``new`` (no committed record), ``DISAGREES``, or ``NOT RUN`` (no fresh run of today's sources).
    """
    entries = [_compare_run(run, root, out) for run in runs]
    return {
        **provenance.environment(),
        "runs": entries,
    }


def _compare_run(run: Run, root: Path, out: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"run": str(run), "verdict": "agrees", "exact": 0, "other": 0, "seconds": None, "problems": []}
    if not run.record(out).is_file():
        return entry | {"verdict": "NOT RUN", "problems": [f"no record {run.record(out)}"]}
    new = records.read(run.record(out))
    exact = sum(kind["class"] == "exact" for kind in new["classes"].values())
    entry |= {"exact": exact, "other": len(new["classes"]) - exact, "seconds": new["provenance"]["seconds"]}
    if new["provenance"]["sources"] != run_sources(run, root, out) or new["parameters"] != run.parameters:
        what = "the code, the parameters or the gathered records" if run.gathers else "the code or the parameters"
        return entry | {"verdict": "NOT RUN", "problems": [f"{what} have changed since this run"]}
    committed = run.record(root / "results")
    if not committed.is_file():
        return entry | {"verdict": "new"}
    old = records.read(committed)
    problems = records.compare(new, old)
    if new["parameters"] != old["parameters"]:
        problems.insert(0, f"parameters: {new['parameters']}, expected {old['parameters']}")
    return entry | {"verdict": "DISAGREES" if problems else "agrees", "problems": problems}


def as_table(report: dict[str, Any]) -> str:
    """A comparison as text, one line a run and one a problem."""
    width = max((len(entry["run"]) for entry in report["runs"]), default=3)
    lines = [f"{'run':<{width}}  exact  other  seconds  verdict"]
    for entry in report["runs"]:
        seconds = "" if entry["seconds"] is None else f"{entry['seconds']:.1f}"
        lines.append(f"{entry['run']:<{width}}  {entry['exact']:>5}  {entry['other']:>5}  {seconds:>7}  {entry['verdict']}")
        lines += [f"    {problem}" for problem in entry["problems"]]
    if any(entry["verdict"] == "new" for entry in report["runs"]):
        lines.append("A new run has no committed record to agree with; `make promote` commits it to results/ and book/executed/.")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------------
# Promoting


def promote(runs: list[Run], root: Path, out: Path, *, everything: bool = False) -> list[str]:
    """Bring committed records, and for the tiny profile executed notebooks, up to date with fresh runs.

    What was computed is replaced only where it must be: an exact value disagrees, the sources, parameters or gathered records changed,
    or something is missing. Timings and trained values alone replace nothing, so that a promotion shows in a diff what really changed.
    Prose, captions and comments are always taken from the text notebook.

    Parameters
    ----------
    runs : list of Run
        What to promote.
    root, out : Path
        As in :func:`compare`.
    everything : bool
        Replace what agrees, too.

    Returns
    -------
    list of str
        One line for each file that changed.

    Raises
    ------
    RunError
        If a run isn't there, is older than today's sources, or has gathered a record that would stay uncommitted; nothing has been
        written then.
    """
    pending: list[tuple[Path, str, str]] = []
    chosen = {str(run) for run in runs}
    for run in runs:
        entry = _compare_run(run, root, out)
        if entry["verdict"] == "NOT RUN":
            raise RunError(f"{run}: {entry['problems'][0]}; run it first")
        for other in run.gathers:
            if other.profile != run.profile:
                continue
            if available(other, root, out) != other.record(root / "results") and str(other) not in chosen:
                raise RunError(f"{run} has gathered the fresh run {other}, which differs from the committed one: promote them together")
        record, notebook = run.record(root / "results"), run.committed_notebook(root)
        new = records.read(run.record(out))
        old = records.read(record) if record.is_file() else None
        reason = ""
        if old is None or (run.profile == "tiny" and not notebook.is_file()):
            reason = "new"
        elif entry["problems"]:
            reason = "; ".join(entry["problems"][:SHOWN])
            if (more := len(entry["problems"]) - SHOWN) > 0:
                reason += f"; and {more} more"
        elif old["provenance"]["sources"] != new["provenance"]["sources"]:
            reason = "sources or gathered records changed" if run.gathers else "sources changed"
        elif everything:
            reason = "asked for"
        if reason:
            pending.append((record, run.record(out).read_text(encoding="utf-8"), reason))
        if run.profile == "tiny":
            executed = run.record(out).with_suffix(".ipynb") if reason else notebook
            text = _to_text(with_outputs(profiles.read_notebook(run.source(root)), _read_ipynb(executed)))
            if not notebook.is_file() or text != notebook.read_text(encoding="utf-8"):
                pending.append((notebook, text, reason or "prose"))
    records.write_texts({path: text for path, text, _ in pending})
    return [f"{path.relative_to(root)}: {reason}" for path, _, reason in pending]


def with_outputs(text: NotebookNode, executed: NotebookNode) -> NotebookNode:
    """The notebook that a text notebook and an execution of the same code make together.

    Parameters
    ----------
    text : NotebookNode
        Just read; gives prose, code and captions.
    executed : NotebookNode
        Gives outputs, execution counts and the cell with injected parameters.

    Returns
    -------
    NotebookNode
        Cleaned as by :func:`clean`.

    Raises
    ------
    RunError
        If their numbers of code cells differ.
    """
    waiting = [cell for cell in executed.cells if cell.cell_type == "code"]
    cells = []
    for cell in text.cells:
        cells.append(cell)
        if cell.cell_type == "code":
            if not waiting:
                raise RunError("the executed notebook has fewer code cells than the text notebook")
            done = waiting.pop(0)
            cell.outputs, cell.execution_count = done.outputs, done.execution_count
            if waiting and INJECTED in waiting[0].metadata.get("tags", []):
                cells.append(waiting.pop(0))
    if waiting:
        raise RunError("the executed notebook has more code cells than the text notebook")
    text.cells = cells
    clean(text)
    return text


def _read_ipynb(path: Path) -> NotebookNode:
    import nbformat

    return nbformat.read(path, as_version=4)


# ---------------------------------------------------------------------------------------------------------------------------
# What has become stale


def status(root: Path) -> list[dict[str, Any]]:
    """All committed records with whether today's code is still what computed them.

    Parameters
    ----------
    root : Path
        The project's folder.

    Returns
    -------
    list of dict
        ``{"path", "record", "state"}``, the state being ``fresh``, ``stale`` (the notebook's code, a module that it reaches, or a
        record that the run has gathered has changed since) or ``orphan`` (the notebook or the benchmark is gone).
    """
    found = []
    current: dict[tuple[str, str], str] = {}
    for path in sorted((root / "results").rglob("*.json")):
        record = records.read(path)
        notebook, run = key = record["notebook"], record["run"]
        source = root / "unlearnlib" / f"bench_{run}.py" if notebook == "bench" else root / "notebooks" / f"{notebook}.md"
        if not source.is_file():
            state = "orphan"
        else:
            if key not in current:
                current[key] = sources(notebook, root, run)
            names = [gather.full_name(notebook, name) for name in record["parameters"].get(profiles.GATHER, [])]
            names = [name if name.count("/") > 1 else f"{path.parts[-3]}/{name}" for name in names]
            gathered = [root / "results" / f"{name}.json" for name in names]
            state = "fresh" if _with_gathered(current[key], gathered) == record["provenance"]["sources"] else "stale"
        found.append({"path": path.relative_to(root).as_posix(), "record": record, "state": state})
    return found


# ---------------------------------------------------------------------------------------------------------------------------
# Command line


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    It is 0 if all is well, 1 for a disagreement or a failed run, 2 for bad input or a file that can't be read or written, and 130 for
    an interruption.
    """
    options = _parser().parse_args(arguments)
    try:
        if not (options.root / "profiles").is_dir():
            raise ProfileError(f"{options.root.resolve()} holds no profiles: call this from the project's folder, or pass --root")
        return options.command(options)
    except (ProfileError, records.RecordError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing of this run was written", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m unlearnlib.runs", description="Run notebooks, compare and promote their records.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=function)
        sub.add_argument("--root", type=Path, default=Path(), help="the project's folder (default: the current one)")
        return sub

    def selecting(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--profile", default="tiny", help="a name from profiles/ (default: tiny)")
        sub.add_argument("--only", default="", metavar="PATTERNS", help="notebook or notebook/run, with * and ?; several by comma")
        sub.add_argument("--missing", action="store_true", help="of these, only runs that have no committed record yet")

    def with_runs(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--out", type=Path, default=None, help=f"folder of fresh runs (default: ROOT/{RUNS})")

    selecting(command("list", _list, "List the runs of a profile with their parameters."))

    sub = command("run", _run, "Execute runs, each into an executed notebook and a record.")
    sub.add_argument("run", nargs="*", metavar="NOTEBOOK/RUN", help="which runs; the same as --only")
    sub.add_argument("--allow-dirty", action="store_true", help="run though tracked files differ from HEAD (never asked of tiny)")
    sub.add_argument("--quiet", action="store_true", help="no progress")
    selecting(sub)
    with_runs(sub)

    sub = command("compare", _compare, "Compare fresh runs with the committed records; exit status 1 if an exact value disagrees.")
    selecting(sub)
    with_runs(sub)

    sub = command("promote", _promote, "Replace committed records and executed notebooks where they disagree with fresh runs.")
    sub.add_argument("--all", action="store_true", dest="everything", help="replace those that agree, too")
    selecting(sub)
    with_runs(sub)

    command("status", _status, "List the committed records and whether their sources have changed since.")
    return parser


def _selected(options: argparse.Namespace) -> list[Run]:
    """The runs that the options choose, those that gather others behind them."""
    selected = sorted(profiles.load(options.profile, options.root).select(options.only), key=lambda run: run.depth)
    return missing(selected, options.root) if options.missing else selected


def _out(options: argparse.Namespace) -> Path:
    return options.out or options.root / RUNS


def _list(options: argparse.Namespace) -> int:
    for run in _selected(options):
        print(run, json.dumps(run.parameters) if run.parameters else "(defaults)")
    return 0


def _run(options: argparse.Namespace) -> int:
    options.only = ",".join(filter(None, [options.only, *options.run]))
    for run in _selected(options):
        sys.stderr.write(f"{run} …\n")
        record = execute(run, options.root, _out(options), allow_dirty=options.allow_dirty, show_progress=not options.quiet)
        sys.stderr.write(f"{run} done in {record['provenance']['seconds']:.1f} s\n")
    return 0


def _compare(options: argparse.Namespace) -> int:
    selected = _selected(options)
    if not selected:
        print("nothing is missing: every run has a committed record")
        return 0
    report = compare(selected, options.root, _out(options))
    records.write_text(options.root / REPORT, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(as_table(report))
    failed = [entry for entry in report["runs"] if entry["problems"]]
    if failed:
        print(f"error: {len(failed)} of {len(report['runs'])} runs do not reproduce the committed records", file=sys.stderr)
    return 1 if failed else 0


def _promote(options: argparse.Namespace) -> int:
    changed = promote(_selected(options), options.root, _out(options), everything=options.everything)
    print("\n".join(changed) or "nothing to promote: every committed record agrees")
    return 0


def _status(options: argparse.Namespace) -> int:
    for entry in status(options.root):
        print(f"{entry['state']:<7} {entry['path']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
