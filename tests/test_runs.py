"""Profiles, runs, comparison and promotion, on a project of one small notebook."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from unlearnlib import bench, gather, profiles, provenance, records, runs

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


SPREAD = """\
# Spread

```{code-cell}
:tags: [parameters]

seed = 0
gather = []
```

```{code-cell}
from unlearnlib.gather import gathered
from unlearnlib.records import exact, trained

others = gathered("spread", gather)
exact(seeds=[{"seed": other["parameters"]["seed"]} for other in others], double=2 * seed)
trained(sum=sum(other["values"]["score"] for other in others), score=0.5 + seed)
```
"""

SPREAD_PROFILE = """\
description: runs, and one that gathers two of them
runs:
  spread:
    both: {gather: [two, one]}
    one: {seed: 1}
    two: {seed: 2}
    three: {seed: 3}
"""


def add_spread(project):
    (project / "notebooks" / "spread.md").write_text(NOTEBOOK.partition("# Small")[0] + SPREAD, encoding="utf-8")
    (project / "profiles" / "seeds.yaml").write_text(SPREAD_PROFILE, encoding="utf-8")
    return project


@pytest.fixture
def spread(project):
    """A project with a further profile, one of whose runs gathers two others."""
    return add_spread(project)


@pytest.fixture(scope="module")
def spread_executed(tmp_path_factory):
    """Its runs `one`, `two` and `both`, executed once, the gathering one last."""
    root = add_spread(make_project(tmp_path_factory.mktemp("spread")))
    assert runs.main(["run", "--root", str(root), "--profile", "seeds", "--quiet", "spread/both,spread/one,spread/two"]) == 0
    return root / "_build" / "runs"


@pytest.fixture
def spread_run(spread, spread_executed):
    """The project with its fresh runs, to change at will."""
    shutil.copytree(spread_executed, spread / "_build" / "runs")
    return spread


def seeds(project, only="both,one,two"):
    return profiles.load("seeds", project).select(",".join(f"spread/{name}" for name in only.split(",")))


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


@pytest.mark.parametrize(
    "gathers, message",
    [
        (
            "[one, four]",
            r"runs\.spread\.both\.gather: there is no run spread/four in this profile",
        ),
        ("[1]", r"there is no run spread/1 in"),
        ("[small/default]", r"there is no run small/default in"),
        ("one", r"runs\.spread\.both\.gather: must be list"),
        ("[one, spread/one]", r"spread/one is named twice"),
        ("[both]", r"in a circle: spread/both, spread/both"),
    ],
)
def test_a_run_gathers_other_runs_of_its_profile(spread, gathers, message):
    assert [str(run) for run in seeds(spread)[0].gathers] == ["seeds/spread/two", "seeds/spread/one"]
    edit(spread / "profiles" / "seeds.yaml", "[two, one]", gathers)
    with pytest.raises(profiles.ProfileError, match=message) as raised:
        profiles.load("seeds", spread)
    assert "seeds.yaml" in str(raised.value)


def test_runs_are_gathered_in_chains_but_not_in_circles(spread):
    edit(spread / "profiles" / "seeds.yaml", "one: {seed: 1}", "one: {gather: [three]}")
    assert {run.name: run.depth for run in seeds(spread, "both,one,two,three")} == {"both": 2, "one": 1, "two": 0, "three": 0}
    edit(spread / "profiles" / "seeds.yaml", "three: {seed: 3}", "three: {gather: [both]}")
    with pytest.raises(
        profiles.ProfileError, match=r"runs\.spread\.three\.gather: .* in a circle: spread/both, spread/one, spread/three, spread/both"
    ):
        profiles.load("seeds", spread)


def test_runs_of_another_notebook_are_gathered_by_their_full_name(spread):
    edit(spread / "profiles" / "seeds.yaml", "  spread:", "  small:\n    default: {}\n  spread:")
    edit(spread / "profiles" / "seeds.yaml", "[two, one]", "[small/default, one]")
    assert [str(run) for run in seeds(spread, "both")[0].gathers] == ["seeds/small/default", "seeds/spread/one"]


ALL_PROFILE = """\
description: one run, over records of another profile
runs:
  spread:
    default: {gather: [seeds/spread/two, seeds/spread/one]}
"""


@pytest.fixture
def over_all(spread_run):
    """The project with a profile that gathers from another one, whose records aren't committed yet."""
    (spread_run / "profiles" / "all.yaml").write_text(ALL_PROFILE, encoding="utf-8")
    return spread_run


def test_runs_of_another_profile_are_gathered_by_their_whole_name(over_all):
    (run,) = profiles.load("all", over_all).runs
    assert [str(other) for other in run.gathers] == ["seeds/spread/two", "seeds/spread/one"]
    for gathers, message in (
        ("[seeds/spread/four]", r"runs\.spread\.default\.gather: there is no run seeds/spread/four"),
        ("[none/spread/two]", "unknown profile 'none'"),
        ("[all/spread/default]", r"all/spread/default is of this very profile: name it spread/default"),
    ):
        (over_all / "profiles" / "all.yaml").write_text(
            ALL_PROFILE.replace("[seeds/spread/two, seeds/spread/one]", gathers), encoding="utf-8"
        )
        with pytest.raises(profiles.ProfileError, match=message):
            profiles.load("all", over_all)


def test_profiles_may_gather_from_each_other(over_all):
    """Only one step is followed, since records of another profile are read and never made."""
    edit(over_all / "profiles" / "seeds.yaml", "three: {seed: 3}", "three: {gather: [all/spread/default]}")
    assert [str(other) for other in seeds(over_all, "three")[0].gathers] == ["all/spread/default"]
    assert [len(other.gathers) for other in profiles.load("all", over_all).runs[0].gathers] == [0, 0]


def test_records_of_another_profile_are_read_as_committed(over_all, capsys):
    call = ["run", "--root", str(over_all), "--profile", "all", "--quiet", "--allow-dirty"]
    assert runs.main(call) == 1
    missing = "all/spread/default gathers seeds/spread/two, seeds/spread/one, of another profile, of which there is no committed record"
    assert capsys.readouterr().err.splitlines()[-1].endswith(missing)
    out = over_all / "_build" / "runs"
    runs.promote(seeds(over_all), over_all, out)
    two = over_all / "results" / "seeds" / "spread" / "two.json"
    edit(two, '"sources": "', '"sources": "0')
    assert runs.main(call) == 0, "a record of other code counts as well"
    (run,) = profiles.load("all", over_all).runs
    assert records.read(run.record(out))["values"]["sum"] == 2.5 + 1.5
    assert runs.promote([run], over_all, out) == ["results/all/spread/default.json: new"]

    def state():
        return {entry["path"]: entry["state"] for entry in runs.status(over_all)}["results/all/spread/default.json"]

    assert state() == "fresh"
    edit(two, '"score": 2.5', '"score": 2.25')
    assert state() == "stale"


def test_no_notebook_gathers_by_itself(spread):
    edit(spread / "notebooks" / "spread.md", "gather = []", 'gather = ["one"]')
    with pytest.raises(profiles.ProfileError, match=r"spread\.md: the default of gather must be \[\]"):
        profiles.load("seeds", spread)


def test_the_name_of_a_profile_is_one_that_records_can_carry(spread):
    (spread / "profiles" / "seeds.yaml").rename(spread / "profiles" / "seeds-2.yaml")
    with pytest.raises(profiles.ProfileError, match=r"seeds-2\.yaml: the name of a profile is made of small letters"):
        profiles.load("seeds-2", spread)


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


def test_a_promotion_prints_a_few_differences_of_many(project, executed, monkeypatch):
    runs.promote(tiny(project), project, executed)
    monkeypatch.setattr(runs.records, "compare", lambda new, old: [f"value{i}: 1, expected 2" for i in range(8)])
    line = runs.promote(tiny(project), project, executed)[0]
    assert "value4: 1" in line and "value5" not in line and line.endswith("; and 3 more")


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


# Gathering


def test_a_gathering_run_reads_the_others_in_the_order_of_its_profile(spread_run):
    record = records.read(spread_run / "_build" / "runs" / "seeds" / "spread" / "both.json")
    assert record["values"] == {"seeds": [{"seed": 2}, {"seed": 1}], "double": 0, "sum": 4.0, "score": 0.5}
    assert record["parameters"] == {"gather": ["two", "one"]}
    assert record["provenance"]["sources"] != runs.sources("spread", spread_run)
    both, one, _ = seeds(spread_run)
    out = spread_run / "_build" / "runs"
    assert runs.run_sources(both, spread_run, out) == record["provenance"]["sources"]
    assert runs.run_sources(one, spread_run, out) == runs.sources("spread", spread_run)


def test_a_gathering_run_whose_others_are_missing_or_old_does_not_start(spread_run, capsys):
    (spread_run / "_build" / "runs" / "seeds" / "spread" / "one.json").unlink()
    edit(spread_run / "profiles" / "seeds.yaml", "{seed: 2}", "{seed: 4}")
    assert runs.main(["run", "--root", str(spread_run), "--profile", "seeds", "--quiet", "spread/both"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: seeds/spread/both gathers spread/two, spread/one, of which there is no record of today's")
    assert "make reproduce PROFILE=seeds ONLY=spread/two,spread/one" in message


def test_a_gathering_run_goes_stale_with_what_the_others_hold(spread_run):
    out = spread_run / "_build" / "runs"
    runs.promote(seeds(spread_run), spread_run, out)

    def stale():
        return [entry["record"]["run"] for entry in runs.status(spread_run) if entry["state"] != "fresh"]

    assert stale() == []
    one = spread_run / "results" / "seeds" / "spread" / "one.json"
    edit(one, '"date": "2', '"date": "1')
    assert stale() == []
    edit(one, '"score": 1.5', '"score": 1.75')
    assert stale() == ["both"]
    (entry,) = runs.compare(seeds(spread_run, "both"), spread_run, out)["runs"]
    assert entry["problems"] == ["the code, the parameters or the gathered records have changed since this run"]
    one.unlink()
    assert stale() == ["both"]


def test_gathered_is_what_a_promotion_would_leave(spread_run):
    out, one = spread_run / "_build" / "runs", seeds(spread_run, "one")[0]
    fresh, committed = one.record(out), one.record(spread_run / "results")
    assert runs.available(one, spread_run, out) == fresh
    runs.promote([one], spread_run, out)
    assert runs.available(one, spread_run, out) == committed
    edit(fresh, '"score": 1.5', '"score": 1.75')  # trained: no reason to replace the record
    assert runs.available(one, spread_run, out) == committed
    edit(fresh, '"double": 2', '"double": 3')
    assert runs.available(one, spread_run, out) == fresh
    fresh.unlink()
    assert runs.available(one, spread_run, out) == committed
    edit(spread_run / "notebooks" / "spread.md", "0.5 + seed", "0.25 + seed")
    assert runs.available(one, spread_run, out) is None


def test_a_gathering_run_is_promoted_with_what_it_gathered_or_after(spread_run):
    out = spread_run / "_build" / "runs"
    with pytest.raises(runs.RunError, match=r"both has gathered the fresh run seeds/spread/two, .*: promote them together"):
        runs.promote(seeds(spread_run, "both"), spread_run, out)
    assert not (spread_run / "results").exists()
    runs.promote(seeds(spread_run, "one,two"), spread_run, out)
    assert runs.promote(seeds(spread_run, "both"), spread_run, out) == ["results/seeds/spread/both.json: new"]
    assert not (spread_run / "book" / "executed").exists(), "executed notebooks are committed of the tiny profile alone"


def test_without_a_runner_the_committed_records_are_gathered(spread_run, monkeypatch):
    monkeypatch.delenv(gather.GATHERED, raising=False)
    monkeypatch.setattr(gather, "CHECKOUT", spread_run)
    assert gather.gathered("spread", []) == []
    expected = r"no record .*results/seeds/spread/one\.json to gather; .*`make promote PROFILE=seeds ONLY=spread/one` makes it"
    with pytest.raises(records.RecordError, match=expected):
        gather.gathered("spread", ["one"], "seeds")
    runs.promote(seeds(spread_run), spread_run, spread_run / "_build" / "runs")
    assert [record["run"] for record in gather.gathered("spread", ["two", "one"], "seeds")] == ["two", "one"]
    assert [record["run"] for record in gather.gathered("other", ["spread/one"], "seeds")] == ["one"]


def test_under_the_runner_only_what_the_profile_says_is_gathered(spread_run, monkeypatch):
    one = spread_run / "_build" / "runs" / "seeds" / "spread" / "one.json"
    monkeypatch.setenv(gather.GATHERED, json.dumps({"spread/one": str(one)}))
    assert gather.gathered("spread", ["one"]) == [records.read(one)]
    with pytest.raises(records.RecordError, match="three: this run's profile doesn't list it under gather, which has spread/one"):
        gather.gathered("spread", ["one", "three"])


# Command line and workflow


def test_missing_leaves_out_what_has_a_record(spread_run, capsys):
    def listed(*options):
        assert runs.main(["list", "--root", str(spread_run), "--profile", "seeds", *options]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    everything = ["seeds/spread/one", "seeds/spread/two", "seeds/spread/three", "seeds/spread/both"]
    assert listed() == listed("--missing") == everything
    runs.promote(seeds(spread_run, "one,two"), spread_run, spread_run / "_build" / "runs")
    edit(spread_run / "notebooks" / "spread.md", "0.5 + seed", "0.25 + seed")
    assert listed("--missing") == ["seeds/spread/three", "seeds/spread/both"], "a stale record isn't missing"
    assert listed("--missing", "--only", "*/one") == []
    assert runs.main(["compare", "--root", str(spread_run), "--profile", "seeds", "--missing", "--only", "*/one"]) == 0
    assert "every run has a committed record" in capsys.readouterr().out
    assert not (spread_run / "_build" / "reproduction.json").exists()


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


def test_the_workflow_gathers_what_is_there_and_makes_what_is_not(spread_run):
    (spread_run / "Snakefile").write_text((ROOT / "Snakefile").read_text(encoding="utf-8"), encoding="utf-8")
    out, fresh = spread_run / "_build" / "runs", spread_run / "_build" / "runs" / "seeds" / "spread"

    def snakemake(*config, dry=True):
        options = ["--rerun-triggers", "params", "--cores", "2", *(["--dry-run"] if dry else []), "runs", "--config", "profile=seeds"]
        done = subprocess.run(
            [sys.executable, "-m", "snakemake", *options, *config], cwd=spread_run, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"wildcards: .*run=(\w+)", done.stdout + done.stderr)

    (fresh / "both.json").unlink()
    runs.promote(seeds(spread_run, "one"), spread_run, out)
    (fresh / "two.json").unlink()
    (fresh / "one.json").unlink()
    # The committed record of one run is of today, so it isn't made again for the sake of the one that gathers it.
    assert snakemake("only=spread/both", dry=False) == ["two", "both"]
    assert records.read(fresh / "both.json")["values"]["sum"] == 4.0
    assert snakemake("only=spread/both") == []
    runs.promote(seeds(spread_run, "both,two"), spread_run, out)
    assert snakemake("missing=1") == ["three"]
    edit(spread_run / "profiles" / "seeds.yaml", "{seed: 2}", "{seed: 4}")
    assert snakemake("only=spread/both") == ["two", "both"]


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
