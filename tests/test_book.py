"""What is committed belongs together: notebooks, their executed copies, records, the table of contents, the pins."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from papermill.cli import _resolve_type

from unlearnlib import cli, profiles, published, records, runs

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))

import check_pages  # noqa: E402
import readme_picture  # noqa: E402
import records_ext  # noqa: E402

SOURCES = sorted((ROOT / "notebooks").glob("*.md"))
TINY = profiles.load("tiny", ROOT).runs
RECORDS = sorted((ROOT / "results").rglob("*.json"))


# Notebooks and records


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_has_one_parameters_cell_of_literals(source):
    assert profiles.notebook_parameters(source)


def test_every_notebook_belongs_to_the_tiny_profile():
    assert {run.notebook for run in TINY} == {path.stem for path in SOURCES}


@pytest.mark.parametrize("name", profiles.names(ROOT))
def test_every_profile_is_valid(name):
    profile = profiles.load(name, ROOT)
    assert profile.description


@pytest.mark.parametrize("run", TINY, ids=str)
def test_an_executed_notebook_shows_what_the_record_holds(run):
    record = records.read(run.record(ROOT / "results"))
    executed = nbformat.read(run.committed_notebook(ROOT), as_version=4)
    values, classes = records.collect([output for cell in executed.cells for output in cell.get("outputs", [])])
    assert (values, classes) == (record["values"], record["classes"])
    assert record["parameters"] == run.parameters
    assert (record["profile"], record["notebook"], record["run"]) == (run.profile, run.notebook, run.name)


@pytest.mark.parametrize("run", TINY, ids=str)
def test_an_executed_notebook_is_its_source_with_outputs(run):
    source = profiles.read_notebook(run.source(ROOT))
    executed = nbformat.read(run.committed_notebook(ROOT), as_version=4)
    assert nbformat.writes(runs.with_outputs(source, executed)) == nbformat.writes(executed), "run `make promote`"


@pytest.mark.parametrize("run", TINY, ids=str)
def test_an_executed_notebook_is_complete_and_holds_nothing_of_its_machine(run):
    executed = nbformat.read(run.committed_notebook(ROOT), as_version=4)
    assert all(cell.execution_count for cell in executed.cells if cell.cell_type == "code")
    for cell in executed.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            text = "".join(str(output.get("text", "")) + "".join(map(str, output.get("data", {}).values())))
            assert not re.search(r"at 0x[0-9a-f]{6,}", text), "an address in memory: end the cell's last line with ;"
            assert str(Path.home()) + "/" not in text and str(ROOT) not in text


def test_every_executed_notebook_has_a_run():
    assert {path.name for path in (ROOT / "book" / "executed").iterdir()} == {run.committed_notebook(ROOT).name for run in TINY}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.relative_to(ROOT / "results").as_posix())
def test_a_record_lies_where_its_fields_say(path):
    record = records.read(path)
    if record["notebook"] == "bench":
        assert path == ROOT / "results" / "bench" / f"{record['run']}.json"
    else:
        assert path == ROOT / "results" / record["profile"] / record["notebook"] / f"{record['run']}.json"


@pytest.mark.parametrize("source", [*SOURCES, *sorted((ROOT / "book").glob("*.md"))], ids=lambda path: path.stem)
def test_a_page_names_only_values_that_there_are(source):
    """The build would say so too, but only after everything has run, and not for the examples in code blocks."""
    text = source.read_text(encoding="utf-8")
    for place in re.findall(r"\{result\}`([^`]+)`", text):
        reference = records_ext.parse(place)
        assert records_ext.show(records_ext.look_up(reference, ROOT), reference.format)
    for argument, body in re.findall(r"\{result-table\} *(.*)\n((?:.+\n)*?)(?::::|```)", text):
        options = dict(re.findall(r"^:(\w+): (.*)$", body, re.M))
        for place in [argument] if argument else re.findall(r"^\w[^:\n]*: (\S+)$", body, re.M):
            reference = records_ext.parse(place)
            if reference.record.startswith(("tiny/", "bench/")):
                row = records_ext.look_up(reference, ROOT)[0]
                assert {column.strip() for column in options.get("columns", "").split("|")} - {""} <= row.keys(), place
            else:
                assert profiles.load(reference.record.partition("/")[0], ROOT).select(reference.record.partition("/")[2])
    for argument, body in re.findall(r"\{comparison-table\} *(.*)\n((?:.*\n)*?)(?::::|```)", text):
        options = dict(re.findall(r"^:(\w+): (.*)$", body, re.M))
        measures = [records_ext.measure(line) for line in body.splitlines() if line.strip() and not line.startswith(":")]
        assert options.keys() & {"profiles", "published"}
        places = [place for place in options.get("profiles", "").split("|") if place and argument != "notebook/run"]
        for place in places:
            reference = records_ext.parse(f"{place.strip()}/{argument}")
            reference = reference._replace(value=reference.value or "rows")
            if reference.path(ROOT).is_file():
                assert records_ext.by_method(reference, [m for m in measures if m.record], ROOT)
            else:
                assert profiles.load(place.strip(), ROOT).select(reference.record.partition("/")[2])
        if "published" in options:
            assert {m.published for m in measures} - {""} <= published.table(options["published"]).headings.keys()


# Pages


def test_every_page_of_the_contents_has_a_source_and_the_other_way_round():
    pages = check_pages.pages()
    assert max(Counter(pages).values()) == 1
    for page in pages:
        assert any((ROOT / f"{page}{suffix}").is_file() for suffix in (".md", ".ipynb")), page
    sources = {p.relative_to(ROOT).with_suffix("").as_posix() for p in (ROOT / "book").rglob("*.md")}
    assert sources <= set(pages)
    defaults = {run.committed_notebook(ROOT).relative_to(ROOT).with_suffix("").as_posix() for run in TINY if run.name == "default"}
    assert defaults <= set(pages)


def test_every_module_of_the_library_has_its_place_in_the_reference():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "book" / "api").glob("*.md"))
    documented = set(re.findall(r"automodule:: (\S+)", pages))
    for path in (ROOT / "unlearnlib").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not any(part.startswith("_") for part in module.split(".")) and module != "unlearnlib":
            assert module in documented, f"{module} is on no page of book/api/"


def test_missing_pages_and_remote_scripts_are_found(tmp_path):
    (tmp_path / "_toc.yml").write_text("root: a\nparts:\n- chapters:\n  - file: b\n    sections:\n    - file: c\n")
    for name in ("index", "a", "b"):
        (tmp_path / f"{name}.html").write_text("<p>fine</p>")
    assert check_pages.problems(tmp_path, tmp_path / "_toc.yml") == ["c.html is in the table of contents but was not built"]
    (tmp_path / "c.html").write_text('<script src="https://cdn.example.org/x.js"></script><a href="https://arxiv.org">fine</a>')
    assert check_pages.problems(tmp_path, tmp_path / "_toc.yml") == ["c.html loads https://cdn.example.org/x.js"]


@pytest.mark.parametrize(
    "markup, address",
    [
        ('<script async src="https://example.org/x.js"></script>', "https://example.org/x.js"),
        ("<img alt='' src='http://example.org/x.png'/>", "http://example.org/x.png"),
        ('<iframe src="//example.org/x"></iframe>', "//example.org/x"),
        ('<link href="https://fonts.example.org/x.css" rel="stylesheet">', "https://fonts.example.org/x.css"),
        ('<link rel="preload" as="font" href="https://example.org/x.woff2">', "https://example.org/x.woff2"),
        ('<link rel="preconnect" href="https://example.org">', "https://example.org"),
        ("<script>load('https://unpkg.com/x.js')</script>", "https://unpkg.com/x.js"),
        ('<a href="https://example.org">link</a><link rel="canonical" href="https://example.org"><img src="x.svg">', None),
        ("<pre>&lt;script src=&quot;https://example.org/x.js&quot;&gt;</pre>", None),
    ],
)
def test_whatever_a_browser_fetches_by_itself_must_be_local(tmp_path, markup, address):
    (tmp_path / "_toc.yml").write_text("root: a\n")
    (tmp_path / "index.html").write_text("<p>fine</p>")
    (tmp_path / "a.html").write_text(markup)
    assert check_pages.problems(tmp_path, tmp_path / "_toc.yml") == ([] if address is None else [f"a.html loads {address}"])


# Commands on the pages

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "book").glob("*.md")), *SOURCES]
PLACEHOLDERS = ("PROFILE=profile", "ONLY=notebook/run")


def commands(page):
    """The commands in a page's console blocks and inline code, each as a list of words, without the environment's folder."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```console\n(.*?)```", text, re.S):
        lines = block.replace("\\\n", " ").splitlines()
        assert all(line.startswith("$ ") for line in lines if line), page
        found += [line[2:] for line in lines if line]
    found += re.findall(r"(?<!`)`((?:make|papermill) [^`\n]+)`(?!`)", text)
    words = [shlex.split(line, comments=True) for line in found]
    return [[first.removeprefix(".venv/bin/"), *rest] for first, *rest in words]


def check_selection(settings):
    """The runs that ``profile`` and ``only`` name exist; raises ProfileError if not."""
    assert profiles.load(settings.get("profile", "tiny"), ROOT).select(settings.get("only", ""))


def check_papermill(arguments):
    source, _, *options = arguments
    source = ROOT / source
    assert source.parent == ROOT / "book" / "executed" and source.with_suffix(".ipynb").is_file()
    # A run that isn't called default has its name behind the notebook's.
    defaults = profiles.notebook_parameters(ROOT / "notebooks" / f"{source.stem.partition('-')[0]}.md")
    while options:
        flag = options.pop(0)
        if flag == "-p":
            name, text = options.pop(0), options.pop(0)
            given = {name: _resolve_type(text)}  # numbers, words, True, None; never a list
        else:
            assert flag == "-y", f"papermill {flag}"
            given = yaml.safe_load(options.pop(0))
        for name, value in given.items():
            profiles._fit(value, name, defaults, str(source.name))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_on_a_page_name_what_there_is(page):
    targets = set(re.findall(r"^([a-z]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    variables = set(re.findall(r"^([A-Z_]+) +\?=", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for program, *arguments in commands(page):
        if program == "make":
            settings = dict(word.split("=", 1) for word in arguments if "=" in word)
            assert settings.keys() <= variables and {word for word in arguments if "=" not in word} <= targets, arguments
            if not set(arguments) & set(PLACEHOLDERS):
                check_selection({name.lower(): value for name, value in settings.items()})
        elif program == "papermill":
            check_papermill(arguments)
        elif program == "unlearnlib":
            cli._parser().parse_args(arguments)
        elif program == "snakemake":
            check_selection(dict(word.split("=", 1) for word in arguments if word.startswith(("profile=", "only="))))
        elif [program, *arguments[:2]] == ["python", "-m", "unlearnlib.runs"]:
            options = runs._parser().parse_args(arguments[2:])
            check_selection({"profile": options.profile, "only": ",".join([options.only, *getattr(options, "run", [])])})
        else:
            assert program in (".", "pip", "export", "aws"), f"{page.name}: no test looks at {program}"


PAGE = """\
# Page

The gap is {result}`page/default:gap:.1e`, {cite}`grom2026`, of $\\norm{P}$, in {numref}`tab-one`.

```{result-table} page/default:rows
:columns: p | n
:headers: $p$ | **n**
:formats: .2f | d
:caption: One table.
:name: tab-one
```

```{result-table}
:key: n
:columns: p
paper: bench/small:rows
tiny: page/default:rows
```

```{comparison-table} grom_quickstart/llama-3.2-1b
:published: tofu_05
:profiles: paper | tiny
:caption: The paper and ours.
:name: tab-two

1 − ROUGE-L: one_minus_rouge_l = 1 - rouge_l
$F$: final = final
minutes: = seconds / 60 | .3f
```

```{record-values} tiny/page/*
```

```{provenance} page/default
```

```{provenance}
```
"""


@pytest.fixture
def small_book(tmp_path):
    """A project with this one's configuration, extension and looks, but of one page and two records."""
    for name in ("_config.yml", "book/_ext", "book/_static", "book/references.bib", "notebooks", "profiles", "unlearnlib"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/page\nchapters:\n- file: book/bibliography\n")
    (tmp_path / "book" / "bibliography.md").write_text("# Bibliography\n\n```{bibliography}\n```\n")
    (tmp_path / "book" / "page.md").write_text(PAGE)
    provenance = {"commit": None, "dirty": None, "sources": "0", "versions": {}, "seconds": 1, "date": "2026-01-01"}
    provenance["machine"] = {"cpu": "some", "cores": 2, "threads": 1, "platform": "any"}
    exact = {"class": "exact", "rtol": 1e-9, "atol": 0}
    values = {"gap": 1.25e-13, "rows": [{"n": 1, "p": 0.5}, {"n": 2, "p": 0.25}]}
    record = {"parameters": {}, "values": values, "classes": dict.fromkeys(values, exact), "provenance": provenance}
    methods = [{"method": "grom", "rouge_l": 0.0625, "final": 0.8125, "seconds": 90.0}, {"method": "npo", "rouge_l": None, "seconds": 3}]
    tofu = record | {"values": {"rows": methods}, "classes": {"rows": exact}}
    written = {
        "tiny/page/default": {"notebook": "page", "run": "default", "profile": "tiny"} | record,
        "bench/small": {"notebook": "bench", "run": "small", "profile": "bench"} | record,
        "tiny/grom_quickstart/llama-3.2-1b": {"notebook": "grom_quickstart", "run": "llama-3.2-1b", "profile": "tiny"} | tofu,
    }
    for path, content in written.items():
        records.write(content, tmp_path / "results" / f"{path}.json")
    return tmp_path


def build(book):
    command = [Path(sys.executable).with_name("jupyter-book"), "build", ".", "--all", "-W", "-n", "--keep-going", "--quiet"]
    return subprocess.run(command, cwd=book, capture_output=True, text=True, check=False)


def test_a_book_with_records_builds_without_warnings_and_loads_nothing_remote(small_book):
    done = build(small_book)
    assert done.returncode == 0, done.stderr
    assert check_pages.problems(small_book / "_build" / "html", small_book / "_toc.yml") == []
    html = (small_book / "_build" / "html" / "book" / "page.html").read_text(encoding="utf-8")
    for text in ("1.2·10⁻¹³", "Table 1", "ONLY=page/default", "orphan", "mathjax"):
        assert text in html
    assert html.count("0.25") >= 3
    # The paper's group has no minutes; the record of its profile is awaited; NPO has no published row, no ROUGE-L and no final here.
    table = html[html.index("The paper and ours.") :].partition("</table>")[0]
    rows = [re.findall(r"<t[dh][^>]*>(?:<p>)?(.*?)(?:</p>)?</t[dh]>", row, re.S) for row in re.findall(r"<tr.*?</tr>", table, re.S)]
    assert rows[0] == ["method", "paper", "tiny"]
    assert [len(row) for row in rows] == [3, 5, 6, 6, 6, 6]
    assert rows[2:] == [
        ["Retain", "0.61", "0.71", *[""] * 3],
        ["GROM", "0.95", "0.79", "0.94", "0.81", "1.500"],
        ["NPO", *[""] * 4, "0.050"],
        ["SimNPO", "0.74", "0.73", *[""] * 3],
    ]
    assert "(not computed yet)" in html and "TOFU, forget 5 %" in html


COMPARISON = "```{comparison-table} grom_quickstart/llama-3.2-1b"


def test_missing_values_fail_the_build_and_are_named(small_book):
    mistakes = {
        "{result}`page/default:gab`": "tiny/page/default holds no value 'gab'; it holds gap, rows",
        "{result}`pag/default:gap`": "there is no record results/tiny/pag/default.json",
        "{result}`page/default:rows[2].p`": "there is no rows[2].p",
        "{result}`page/default:gap:.1q`": "Unknown format code 'q'",
        "```{result-table} page/default:rows\n:columns: p | m\n```": "there is no column m; there are n, p",
        "```{result-table} page/default:gap\n```": "tiny/page/default:gap is not a table",
        "```{result-table}\n:key: n\ntiny: pag/default:rows\n```": "there is no record results/tiny/pag/default.json",
        "```{provenance} page/other\n```": "there is no record tiny/page/other",
        "```{comparison-table} page/default\n:profiles: tiny\n\nn: = n\n```": "tiny/page/default:rows is not a table with the column",
        "```{comparison-table} page/other\n:profiles: tiny\n\nn: = n\n```": "there is no record results/tiny/page/other.json",
        f"{COMPARISON}\n:profiles: tiny\n\nn: = n\n```": "rows has no column n; it has method, rouge_l, final, seconds",
        f"{COMPARISON}\n:published: tofu_05\n\nn: n =\n```": "the published table tofu_05 has no column 'n'",
        f"{COMPARISON}\n:published: tofu\n\nn: n =\n```": "there is no published table 'tofu'",
        f"{COMPARISON}\n:profiles: tiny\n\nn: final =\n```": "published columns need the option :published:",
        f"{COMPARISON}\n:profiles: tiny\n:methods: grom | ga\n\nn: = final\n```": "there is no method ga; there are grom, npo",
        f"{COMPARISON}\n:profiles: tiny\n:published: tofu_05\n\nn: = final\n```": "in the body a column for each",
        f"{COMPARISON}\n:profiles: tiny\n\nn: 1 + final\n```": "isn't of the form `heading: published = column`",
    }
    (small_book / "book" / "page.md").write_text("\n\n".join([PAGE, *mistakes]))
    done = build(small_book)
    assert done.returncode != 0
    for message in mistakes.values():
        assert message in done.stderr
    assert done.stderr.count("WARNING: ") == len(mistakes)


# References to records


@pytest.mark.parametrize(
    "text, record, value, format_",
    [
        ("page/default:gap:.1e", "tiny/page/default", "gap", ".1e"),
        ("smol/page/forget05:rows[2].p", "smol/page/forget05", "rows[2].p", ""),
        ("bench/grom:solve_vs_lu:.2f", "bench/grom", "solve_vs_lu", ".2f"),
    ],
)
def test_references_are_parsed(text, record, value, format_):
    assert records_ext.parse(text) == (record, value, format_)


@pytest.mark.parametrize("text", ["page", "a/b/c/d:x", "/default:x", "bench/a/b:x"])
def test_a_reference_that_names_no_record_is_refused(text):
    with pytest.raises(records_ext.Missing, match="doesn't name a record"):
        records_ext.parse(text)


@pytest.mark.parametrize(
    "value, format_, shown",
    [
        (1.25e-13, ".1e", "1.2·10⁻¹³"),
        (-0.5, ".2f", "−0.50"),
        (49152, ",", "49,152"),
        (0.123456, "", "0.1235"),
        (7, "", "7"),
        (True, "", "yes"),
        ("Paris", "", "Paris"),
        (0.125, ".1%", "12.5%"),
        (None, ".2f", ""),
    ],
)
def test_values_are_shown_as_a_reader_wants_them(value, format_, shown):
    assert records_ext.show(value, format_) == shown


@pytest.mark.parametrize(
    "line, expected",
    [
        ("Final: final = final", ("Final", "final", "final")),
        ("1 − ROUGE-L: one_minus_rouge_l = 1 - rouge_l | .3f", ("1 − ROUGE-L", "one_minus_rouge_l", "rouge_l", True, 1.0, ".3f")),
        ("minutes: minutes = seconds / 60", ("minutes", "minutes", "seconds", False, 60.0)),
        ("utility: held out: = utility_held_out", ("utility: held out", "", "utility_held_out")),
        ("minutes: minutes =", ("minutes", "minutes", "")),
    ],
)
def test_columns_of_a_comparison_are_parsed(line, expected):
    assert records_ext.measure(line) == records_ext.Measure(*expected)


@pytest.mark.parametrize(
    "line", ["Final: final", "Final: =", "final = final", "x: a = 1 - b / 60", "x: a = b / 0", "x: a = 2 - b", "x: a = b = c"]
)
def test_a_column_of_a_comparison_of_another_form_is_refused(line):
    with pytest.raises(records_ext.Missing, match="isn't of the form"):
        records_ext.measure(line)


def test_a_measure_is_calculated_from_numbers_only():
    complement = records_ext.measure("x: = 1 - p")
    assert (complement.of({"p": 0.25}), complement.of({"p": None}), complement.of({})) == (0.75, None, None)
    assert records_ext.measure("x: = s / 60").of({"s": 90}) == 1.5
    with pytest.raises(records_ext.Missing, match="p is 'high', which is no number"):
        complement.of({"p": "high"})


# Pins


def pins():
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines), "exact pins only, no local versions"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_the_lock_satisfies_the_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: requirements for name, requirements in project["optional-dependencies"].items() if name != "cluster"}
    for text in [*project["dependencies"], *(text for requirements in extras.values() for text in requirements)]:
        requirement = Requirement(text)
        version = pins().get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), text


def test_the_lock_is_what_is_installed():
    from importlib import metadata

    installed = {canonicalize_name(d.name): d.version.partition("+")[0] for d in metadata.distributions()}
    assert {name: installed.get(name) for name in pins()} == pins()
    assert "pip" not in pins(), "the pip that installs the rest is whichever there is"


def test_environment_and_project_ask_for_the_same_python_and_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert environment["dependencies"] == ["python=3.11", "pip", {"pip": ["-r requirements.lock", "-e ."]}]
    assert project["requires-python"] == ">=3.11,<3.12"


def test_the_picture_of_the_readme_is_the_quickstarts():
    assert readme_picture.PICTURE.read_text(encoding="utf-8") == readme_picture.figure(), "run: make promote"
