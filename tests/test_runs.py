"""Profiles, runs, comparison and promotion, on a project of one small notebook."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from unlearnlib import bench, profiles, provenance, records, runs

ROOT = Path(__file__).parents[1]

NOTEBOOK = """\
---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# Small

Some prose.

```{code-cell}
:tags: [parameters]

scale = 1.5          # a float
count: int | None = None
name = "a = b"
grid = [1e-8, -1.0]
```

```{code-cell}
import sys
from unlearnlib.records import exact, timing, trained

print("one", file=sys.stderr)
print("two", flush=True)
print("three", file=sys.stderr)
print("four")
```

```{code-cell}
exact(twice=2 * scale, rows=[{"n": 1, "p": 0.5}])
trained(loss=0.25)
timing(seconds=0.5)
```

```{code-cell}
import matplotlib.pyplot as plt
from unlearnlib import figures

figures.use_style()
plt.plot([1, 2], [0, scale]);
```
"""

PROFILE = """\
description: for the tests
runs:
  small:
    default: {}
    big: {scale: 3, grid: [1.0]}
"""


def make_project(root):
    """A project of its own, whose library is the real one."""
    for name, text in {"notebooks/small.md": NOTEBOOK, "profiles/tiny.yaml": PROFILE}.items():
        (root / name).parent.mkdir()
        (root / name).write_text(text, encoding="utf-8")
    (root / "unlearnlib").symlink_to(ROOT / "unlearnlib")
    return root


@pytest.fixture
def project(tmp_path):
    return make_project(tmp_path)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The two runs of the small project, executed once for the whole file."""
    root = make_project(tmp_path_factory.mktemp("executed"))
    for run in tiny(root):
        runs.execute(run, root, root / "runs", show_progress=False)
    return root / "runs"


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def tiny(project):
    return profiles.load("tiny", project).runs


# Profiles


def test_parameters_are_read_with_their_types(project):
    expected = {"scale": 1.5, "count": None, "name": "a = b", "grid": [1e-8, -1.0]}
    assert profiles.notebook_parameters(project / "notebooks" / "small.md") == expected
    default, big = tiny(project)
    assert str(default) == "tiny/small/default"
    assert default.parameters == {}
    assert big.parameters == {"scale": 3.0, "grid": [1.0]}
    assert type(big.parameters["scale"]) is float


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("scale: 3", "scal: 3", r"runs\.small\.big\.scal: unknown parameter; the notebook has scale, count, name, grid"),
        ("scale: 3", "scale: x", r"runs\.small\.big\.scale: must be float like its default 1\.5, not 'x'"),
        ("scale: 3", "scale: 1e-4", r"YAML reads 1e-4 as text: write 1\.0e-4"),
        ("scale: 3", "scale: true", r"runs\.small\.big\.scale: must be float"),
        ("grid: [1.0]", "grid: 1.0", r"runs\.small\.big\.grid: must be list"),
        ("grid: [1.0]", "grid: [1.0, a]", r"runs\.small\.big\.grid\[1\]: must be float"),
        ("  small:", "  smal:", r"runs\.smal: there is no notebook .*smal\.md"),
        ("default: {}", "default: [1]", r"runs\.small\.default: must map parameters"),
        ("default: {}", "no way: {}", r"runs\.small\.no way: the name of a run"),
        ("    big:", "    default:", r"tiny\.yaml:5: 'default' is given twice"),
        ("runs:", "run:", r"unknown field 'run'"),
        ("description: for the tests", "threads: 0\ndescription: x", r"threads: must be at least 1"),
        ("description: for the tests", "description: [", r"tiny\.yaml:\d+: "),
        ("description: for the tests\n", "", r"description: must be of type str"),
    ],
)
def test_a_mistake_in_a_profile_names_file_and_field(project, old, new, message):
    edit(project / "profiles" / "tiny.yaml", old, new)
    with pytest.raises(profiles.ProfileError, match=message) as raised:
        profiles.load("tiny", project)
    assert "tiny.yaml" in str(raised.value)


@pytest.mark.parametrize(
    "old, new, message",
    [
        (":tags: [parameters]", ":tags: [other]", r"small\.md: 0 cells are tagged"),
        ("scale = 1.5 ", "scale = 3 / 2 ", r"small\.md:19: the default of scale must be a plain literal, not 3 / 2"),
        ('name = "a = b"', "import os", r"small\.md:21: a parameters cell holds assignments only"),
        ('name = "a = b"', "a = b = 1", r"small\.md:21: "),
        ('name = "a = b"', "name = = 1", r"small\.md:21: not Python"),
    ],
)
def test_a_mistake_in_a_parameters_cell_names_file_and_line(project, old, new, message):
    edit(project / "notebooks" / "small.md", old, new)
    with pytest.raises(profiles.ProfileError, match=message):
        profiles.load("tiny", project)


def test_an_unknown_profile_lists_those_that_there_are(project):
    with pytest.raises(profiles.ProfileError, match="unknown profile 'huge': there are tiny"):
        profiles.load("huge", project)


def test_runs_are_selected_by_pattern(project):
    profile = profiles.load("tiny", project)
    assert [run.name for run in profile.select()] == ["default", "big"]
    assert [run.name for run in profile.select("small/b*")] == ["big"]
    assert [run.name for run in profile.select("sm*")] == ["default", "big"]
    assert [run.name for run in profile.select("x, small/default")] == ["default"]
    with pytest.raises(profiles.ProfileError, match="there are small/default, small/big"):
        profile.select("large")


# Executing


def test_a_run_leaves_a_notebook_and_a_record_that_agree(executed):
    folder = executed / "tiny" / "small"
    assert sorted(path.name for path in folder.iterdir()) == ["big.ipynb", "big.json", "default.ipynb", "default.json"]
    record = records.read(folder / "big.json")
    assert record["parameters"] == {"scale": 3.0, "grid": [1.0]}
    assert record["values"] == {"twice": 6.0, "rows": [{"n": 1, "p": 0.5}], "loss": 0.25, "seconds": 0.5}
    assert record["provenance"]["sources"] == runs.sources("small", executed.parent)
    notebook = nbformat.read(folder / "big.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert records.collect([o for cell in notebook.cells for o in cell.get("outputs", [])]) == (record["values"], record["classes"])
    assert [cell.id for cell in notebook.cells] == [f"c{i:02d}" for i in range(len(notebook.cells))]
    assert records.read(folder / "default.json")["values"]["twice"] == 3.0


def test_executed_notebooks_hold_nothing_volatile(executed, project):
    text = (executed / "tiny" / "small" / "default.ipynb").read_text(encoding="utf-8")
    for word in ("papermill", "start_time", "iopub", '"stderr"', "jupytext", str(executed)):
        assert word not in text
    notebook = nbformat.reads(text, as_version=4)
    assert [output.text for output in notebook.cells[2].outputs] == ["two\nfour\n"]
    (figure,) = notebook.cells[4].outputs
    assert figure.data["image/svg+xml"].startswith("<?xml") and "image/png" not in figure.data
    runs.execute(tiny(project)[0], project, project / "again", show_progress=False)
    assert (project / "again" / "tiny" / "small" / "default.ipynb").read_text(encoding="utf-8") == text


def test_a_failing_cell_is_named_and_nothing_is_written(project, capsys):
    edit(project / "notebooks" / "small.md", "trained(loss=0.25)", "assert scale > 2, 'scale too small'")
    status = runs.main(["run", "--root", str(project), "small/default"])
    message = capsys.readouterr().err
    assert status == 1
    line = NOTEBOOK.splitlines().index('exact(twice=2 * scale, rows=[{"n": 1, "p": 0.5}])') + 1
    assert f"tiny/small/default: the cell at {project}/notebooks/small.md:{line} failed with AssertionError: scale too small" in message
    assert len(message.splitlines()) < 12
    assert not (project / "_build").exists()


def test_a_name_reported_twice_is_an_error_and_nothing_is_written(project, capsys):
    edit(project / "notebooks" / "small.md", "trained(loss=0.25)", "trained(twice=0.25)")
    assert runs.main(["run", "--root", str(project), "small/default"]) == 2
    assert "twice is reported twice" in capsys.readouterr().err
    assert not (project / "_build").exists()


def test_runs_of_other_profiles_refuse_a_dirty_tree(project, monkeypatch):
    (project / "profiles" / "tiny.yaml").rename(project / "profiles" / "smol.yaml")
    run = profiles.load("smol", project).runs[0]
    monkeypatch.setattr("unlearnlib.provenance.git_state", lambda root: ("0" * 40, True))
    with pytest.raises(runs.RunError, match="tracked files differ from HEAD"):
        runs.execute(run, project, project / "out", show_progress=False)
    assert not (project / "out").exists()
    record = runs.execute(run, project, project / "out", allow_dirty=True, show_progress=False)
    assert (record["provenance"]["commit"], record["provenance"]["dirty"]) == ("0" * 40, True)


def test_a_run_whose_record_cannot_be_written_leaves_no_notebook_either(project, monkeypatch, capsys):
    def full(path, *arguments, **options):
        if path.name.startswith(".default.json"):
            raise OSError(28, "No space left on device", str(path))
        return really(path, *arguments, **options)

    really = Path.open
    monkeypatch.setattr(Path, "open", full)
    assert runs.main(["run", "--root", str(project), "--quiet", "small/default"]) == 2
    *_, message = capsys.readouterr().err.splitlines()
    assert message.startswith("error: ") and "No space left on device" in message
    assert list((project / "_build" / "runs" / "tiny" / "small").iterdir()) == []


def test_written_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        records.write_text(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


# Comparing and promoting


def compared(project, executed):
    return {entry["run"]: entry for entry in runs.compare(tiny(project), project, executed)["runs"]}


def test_a_new_run_is_reported_and_is_no_failure(project, executed, capsys):
    assert {entry["verdict"] for entry in compared(project, executed).values()} == {"new"}
    assert runs.main(["compare", "--root", str(project), "--out", str(executed)]) == 0
    assert "make promote" in capsys.readouterr().out


def test_a_promoted_run_agrees_and_needs_no_second_promotion(project, executed, capsys):
    changed = runs.promote(tiny(project), project, executed)
    assert changed == [
        "results/tiny/small/default.json: new",
        "book/executed/small.ipynb: new",
        "results/tiny/small/big.json: new",
        "book/executed/small-big.ipynb: new",
    ]
    assert {entry["verdict"] for entry in compared(project, executed).values()} == {"agrees"}
    assert runs.promote(tiny(project), project, executed) == []
    assert runs.main(["compare", "--root", str(project), "--out", str(executed)]) == 0
    saved = json.loads((project / "_build" / "reproduction.json").read_text(encoding="utf-8"))
    assert [entry["verdict"] for entry in saved["runs"]] == ["agrees", "agrees"]
    assert [entry["state"] for entry in runs.status(project)] == ["fresh", "fresh"]


def test_a_disagreeing_exact_value_fails_and_is_named(project, executed, capsys):
    runs.promote(tiny(project), project, executed)
    edit(project / "results" / "tiny" / "small" / "default.json", '"twice": 3.0', '"twice": 3.1')
    edit(project / "results" / "tiny" / "small" / "big.json", '"loss": 0.25', '"loss": 9.0')
    assert runs.main(["compare", "--root", str(project), "--out", str(executed)]) == 1
    printed = capsys.readouterr()
    assert "twice: 3.0, expected 3.1" in printed.out and "loss" not in printed.out
    assert "1 of 2 runs" in printed.err
    assert runs.promote(tiny(project), project, executed)[0].startswith("results/tiny/small/default.json: twice")
    assert compared(project, executed)["tiny/small/default"]["verdict"] == "agrees"


def test_only_what_must_be_is_replaced(project, executed):
    runs.promote(tiny(project), project, executed)
    committed = project / "results" / "tiny" / "small" / "default.json"
    edit(committed, '"loss": 0.25', '"loss": 9.0')
    assert runs.promote(tiny(project), project, executed) == []
    assert '"loss": 9.0' in committed.read_text(encoding="utf-8")
    assert any("asked for" in line for line in runs.promote(tiny(project), project, executed, everything=True))
    assert '"loss": 0.25' in committed.read_text(encoding="utf-8")


def test_prose_and_comments_are_promoted_without_a_run(project, executed):
    runs.promote(tiny(project), project, executed)
    edit(project / "notebooks" / "small.md", "Some prose.", "Better prose.")
    edit(project / "notebooks" / "small.md", "# a float", "# any float")
    assert runs.promote(tiny(project), project, executed) == [
        "book/executed/small.ipynb: prose",
        "book/executed/small-big.ipynb: prose",
    ]
    notebook = nbformat.read(project / "book" / "executed" / "small-big.ipynb", as_version=4)
    assert "Better prose." in notebook.cells[0].source and "# any float" in notebook.cells[1].source
    assert notebook.cells[2].metadata.tags == ["injected-parameters"]
    assert len(notebook.cells[4].outputs) == 4


def test_changed_code_must_run_before_it_is_compared_or_promoted(project, executed):
    runs.promote(tiny(project), project, executed)
    edit(project / "notebooks" / "small.md", "2 * scale", "3 * scale")
    assert {entry["verdict"] for entry in compared(project, executed).values()} == {"NOT RUN"}
    before = (project / "book" / "executed" / "small.ipynb").read_text(encoding="utf-8")
    with pytest.raises(runs.RunError, match="run it first"):
        runs.promote(tiny(project), project, executed)
    assert (project / "book" / "executed" / "small.ipynb").read_text(encoding="utf-8") == before
    assert [entry["state"] for entry in runs.status(project)] == ["stale", "stale"]


def test_changed_parameters_disagree(project, executed):
    runs.promote(tiny(project), project, executed)
    edit(project / "profiles" / "tiny.yaml", "scale: 3", "scale: 4")
    assert compared(project, executed)["tiny/small/big"]["verdict"] == "NOT RUN"


def test_a_record_without_its_notebook_is_an_orphan(project, executed):
    runs.promote(tiny(project), project, executed)
    (project / "notebooks" / "small.md").unlink()
    assert [entry["state"] for entry in runs.status(project)] == ["orphan", "orphan"]


def test_a_record_of_a_benchmark_goes_stale_with_its_own_suite_only(project):
    (project / "unlearnlib").unlink()
    (project / "unlearnlib").mkdir()
    for suite in bench.SUITES:
        (project / "unlearnlib" / f"bench_{suite}.py").write_text(f"from . import {suite}\n", encoding="utf-8")
        (project / "unlearnlib" / f"{suite}.py").write_text("x = 1\n", encoding="utf-8")
        hashed = provenance.sources([bench.code(suite)], project / "unlearnlib")
        fields = {"commit": None, "dirty": None, "sources": hashed, "seconds": 1, **provenance.environment()}
        record = {
            "notebook": "bench",
            "run": suite,
            "profile": "bench",
            "parameters": {},
            "values": {},
            "classes": {},
            "provenance": fields,
        }
        records.write(record, project / "results" / "bench" / f"{suite}.json")

    def states():
        return {entry["record"]["run"]: entry["state"] for entry in runs.status(project)}

    assert states() == {"grom": "fresh", "sidecar": "fresh"}
    edit(project / "unlearnlib" / "sidecar.py", "1", "2")
    assert states() == {"grom": "fresh", "sidecar": "stale"}
    (project / "unlearnlib" / "bench_grom.py").unlink()
    assert states() == {"grom": "orphan", "sidecar": "stale"}


# Command line and workflow


@pytest.mark.parametrize("command", [[], ["list"], ["run"], ["compare"], ["promote"], ["status"]])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as left:
        runs.main([*command, "--help"])
    assert left.value.code == 0
    assert len(capsys.readouterr().out) > 100


def test_bad_input_on_the_command_line_is_a_short_error(project, capsys):
    assert runs.main(["list", "--root", str(project / "profiles")]) == 2
    assert runs.main(["run", "--root", str(project), "--profile", "huge"]) == 2
    assert runs.main(["run", "--root", str(project), "large"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all(line.startswith("error: ") for line in errors)


def test_the_workflow_runs_what_is_stale_and_nothing_else(project):
    def snakemake(target):
        options = ["--quiet", "all", "--rerun-triggers", "params", "--cores", "2", "--", target]
        command = [sys.executable, "-m", "snakemake", *options]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(line.split()[0] for line in done.stderr.splitlines() if " done in " in line)

    (project / "Snakefile").write_text((ROOT / "Snakefile").read_text(encoding="utf-8"), encoding="utf-8")
    both = ["tiny/small/big", "tiny/small/default"]
    assert snakemake("runs") == both
    (project / "notebooks" / "small.md").touch()
    edit(project / "notebooks" / "small.md", "Some prose.", "Better prose.")
    edit(project / "profiles" / "tiny.yaml", "scale: 3", "scale: 4")
    assert snakemake("runs") == ["tiny/small/big"]
    edit(project / "notebooks" / "small.md", "2 * scale", "4 * scale")
    assert snakemake("reproduce") == both
