"""The hash of the sources changes with what can change a result, and with nothing else."""

import ast
import subprocess

import pytest

from unlearnlib import provenance

SOLVE = '''\
from ..tools import helper


def solve():
    """Solve."""
    from . import late

    return helper() + late.value
'''
FILES = {
    "__init__.py": '"""Top."""\n',
    "alone.py": "x = 1\n",
    "figures.py": '"""Draw."""\n\n\ndef draw():\n    """Draw it."""\n    return 1\n',
    "core/__init__.py": "from .solve import solve\n",
    "core/solve.py": SOLVE,
    "core/late.py": "value = 2\n",
    "core/unused.py": "value = 3\n",
    "tools.py": "import json\n\n\ndef helper():\n    return json.loads('1'), 'data/known.json'\n",
    "data/known.json": "{}\n",
    "data/other.json": "{}\n",
    "data/unnamed.json": "{}\n",
    "reader.py": "path = 'other.json'\n",
}
CELLS = ["n = 3  # how many", "from lib import core\n\nprint(core.solve())"]
REACHED = {"__init__.py", "core/__init__.py", "core/solve.py", "core/late.py", "tools.py"}


@pytest.fixture
def package(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "lib"


def edit(package, name, old, new):
    path = package / name
    assert old in path.read_text(encoding="utf-8")
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def test_reached_modules_are_found_through_packages_relative_and_local_imports(package):
    found = provenance.reached_modules([ast.parse(cell) for cell in CELLS], package)
    assert {path.relative_to(package).as_posix() for path in found} == REACHED


@pytest.mark.parametrize(
    "code, expected",
    [
        ("import lib.core.unused as u", "core/unused.py"),
        ("from lib.core import unused", "core/unused.py"),
        ("from lib.core.unused import value", "core/unused.py"),
        ("def f():\n    import lib.figures", "figures.py"),
        ("import lib", "__init__.py"),
    ],
)
def test_every_form_of_import_is_followed(package, code, expected):
    assert package / expected in provenance.reached_modules([ast.parse(code)], package)


def test_other_packages_are_not_followed(package):
    assert provenance.reached_modules([ast.parse("import json, lib2.core\nfrom library import core")], package) == []


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("core/solve.py", '"""Solve."""', '"""Solve it well."""'),
        ("core/solve.py", "def solve", "# a comment\n\n\n\ndef solve"),
        ("core/__init__.py", "from .solve", '"""A docstring."""\n\nfrom .solve'),
        ("alone.py", "1", "2"),
        ("figures.py", "return 1", "return 2"),
        ("core/unused.py", "3", "4"),
        ("data/other.json", "{}", "[]"),
    ],
)
def test_comments_docstrings_and_unrelated_modules_make_nothing_stale(package, name, old, new):
    before = provenance.sources(CELLS, package)
    edit(package, name, old, new)
    assert provenance.sources(CELLS, package) == before


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("core/solve.py", "helper() +", "helper() -"),
        ("core/late.py", "2", "3"),
        ("tools.py", "loads('1')", "loads('2')"),
        ("__init__.py", '"""Top."""', '"""Top."""\nversion = 2'),
        ("data/known.json", "{}", "[]"),
        ("data/unnamed.json", "{}", "[]"),
    ],
)
def test_code_and_data_that_are_reached_count(package, name, old, new):
    before = provenance.sources(CELLS, package)
    edit(package, name, old, new)
    assert provenance.sources(CELLS, package) != before


def test_a_new_module_that_is_imported_counts(package):
    before = provenance.sources(CELLS, package)
    (package / "core" / "more.py").write_text("value = 1\n")
    assert provenance.sources(CELLS, package) == before
    edit(package, "core/late.py", "value = 2", "from .more import value")
    after = provenance.sources(CELLS, package)
    edit(package, "core/more.py", "1", "5")
    assert len({before, after, provenance.sources(CELLS, package)}) == 3


def test_comments_of_a_notebook_do_not_count_and_its_code_does(package):
    before = provenance.sources(CELLS, package)
    assert provenance.sources(["n = 3      # another comment", CELLS[1]], package) == before
    assert provenance.sources(["n = 4", CELLS[1]], package) != before
    assert provenance.sources(CELLS[1:], package) != before


def test_a_cell_that_is_not_python_is_named(package):
    with pytest.raises(SyntaxError) as raised:
        provenance.sources(["x = 1", "%matplotlib inline"], package)
    assert raised.value.filename == "<cell 1>"


def test_git_state_knows_tracked_files_only(tmp_path):
    def git(*arguments):
        settings = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", tmp_path, *settings, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert provenance.git_state(tmp_path) == (None, None)
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    assert provenance.git_state(tmp_path) == (None, None)
    git("commit", "-m", "a")
    (tmp_path / "untracked").write_text("1")
    assert provenance.git_state(tmp_path) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "a").write_text("2")
    assert provenance.git_state(tmp_path) == (git("rev-parse", "HEAD"), True)


def test_machine_and_versions_are_filled(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    machine = provenance.machine()
    assert machine["cpu"] and machine["platform"] and machine["cores"] >= 1
    assert machine["threads"] == 3
    assert {"python", "torch", "numpy"} <= provenance.versions().keys()
    assert all(provenance.versions().values())
