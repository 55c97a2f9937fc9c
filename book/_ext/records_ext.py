"""Sphinx roles and directives that print records, so that no computed number is typed by hand.

A record is named ``notebook/run`` (of the tiny profile), ``profile/notebook/run``, or ``bench/name``; a value in it follows a
colon, and a cell of a table of values is ``rows[2].p``.

- role ``result``: one value, ``{result}`grom_audit/default:max_refit_gap:.1e```. The number links to where it comes from.
- directive ``result-table``: a table of values as a table, or the tables of several records side by side.
- directive ``comparison-table``: methods as rows, the paper's numbers and those of several profiles as groups of columns.
- directive ``record-values``: everything that some records hold.
- directive ``provenance``: where records come from, whether their sources have changed since, what makes them again.

A name that isn't there is a warning, and the book is built with warnings as errors.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

from unlearnlib import profiles, published, records, runs

logger = logging.getLogger(__name__)

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Missing(LookupError):
    """A record, or a value in it, that a page names isn't there."""


class Reference(NamedTuple):
    """Where a value is: the record's path below ``results/`` without its suffix, and the rest."""

    record: str
    value: str = ""
    format: str = ""

    def path(self, root: Path) -> Path:
        return root / "results" / f"{self.record}.json"

    @property
    def label(self) -> str:
        return label(self.record)


def label(record: str) -> str:
    """The cross-reference label of a record's line on the page of records."""
    return "record-" + re.sub(r"[^a-z0-9]+", "-", record.lower())


def parse(text: str) -> Reference:
    """Take ``[profile/]notebook/run[:value[:format]]`` apart."""
    record, _, rest = text.strip().partition(":")
    value, _, format_ = rest.partition(":")
    parts = record.split("/")
    if len(parts) == 2 and parts[0] != "bench":
        parts.insert(0, "tiny")
    if len(parts) != (2 if parts[0] == "bench" else 3) or not all(parts):
        raise Missing(f"{text!r} doesn't name a record: write notebook/run, profile/notebook/run or bench/name")
    return Reference("/".join(parts), value, format_)


def read(reference: Reference, root: Path) -> dict[str, Any]:
    path = reference.path(root)
    if not path.is_file():
        raise Missing(f"there is no record {path.relative_to(root)}")
    try:
        return records.read(path)
    except records.RecordError as error:
        raise Missing(str(error)) from None


def look_up(reference: Reference, root: Path) -> Any:
    """The value that a reference names."""
    steps = re.fullmatch(r"(\w+)(?:\[(\d+)\]\.(.+))?", reference.value)
    if not steps:
        raise Missing(f"{reference.value!r} doesn't name a value: write name, or name[row].column")
    name, row, column = steps.groups()
    value = read(reference, root)["values"]
    if name not in value:
        raise Missing(f"{reference.record} holds no value {name!r}; it holds {', '.join(value) or 'none'}")
    value = value[name]
    if row is None:
        return value
    if not isinstance(value, list) or int(row) >= len(value) or column not in value[int(row)]:
        raise Missing(f"{reference.record}: there is no {reference.value}")
    return value[int(row)][column]


def show(value: Any, format_: str = "") -> str:
    """A value as a reader wants it: 1.2·10⁻¹³ rather than 1.2e-13, a dash for what isn't there."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    text = format(value, format_ or ("d" if isinstance(value, int) else ".4g"))
    mantissa, e, exponent = text.partition("e")
    if e:
        text = f"{mantissa}·10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return re.sub(r"^-(?=\d)", "−", text)


def link(record: str, content: nodes.Node, docname: str) -> nodes.Node:
    """A link to the record's line on the page of records."""
    from sphinx.addnodes import pending_xref

    return pending_xref(
        "", content, refdoc=docname, refdomain="std", reftype="ref", reftarget=label(record), refexplicit=True, refwarn=True
    )


class ResultRole(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        root = Path(self.env.srcdir)
        try:
            reference = parse(self.text)
            self.env.note_dependency(str(reference.path(root)))
            text = show(look_up(reference, root), reference.format)
        except (Missing, ValueError) as error:
            logger.warning("result: %s", error, location=self.get_location())
            return [nodes.literal(self.text, self.text)], []
        return [link(reference.record, nodes.inline(text, text, classes=["result"]), self.env.docname)], []


def split(argument: str) -> list[str]:
    """An option that is a list: ``a | b | c``."""
    return [part.strip() for part in argument.split("|")]


class RecordDirective(SphinxDirective):
    """What the directives share: reading records and making tables of docutils nodes."""

    @property
    def root(self) -> Path:
        return Path(self.env.srcdir)

    def depend(self, reference: Reference) -> Reference:
        self.env.note_dependency(str(reference.path(self.root)))
        return reference

    def awaited(self, reference: Reference) -> bool:
        """Whether a profile lists the run but nobody has committed its record yet: its cells stay empty."""
        if reference.path(self.root).is_file() or reference.record.startswith(("tiny/", "bench/")):
            return False
        profile = reference.record.partition("/")[0]
        if profile not in profiles.names(self.root):
            return False
        return reference.record in [str(run) for run in profiles.load(profile, self.root).runs]

    def warn(self, message: object) -> list[nodes.Node]:
        logger.warning("%s: %s", self.name, message, location=self.get_location())
        return []

    def inline(self, text: str) -> list[nodes.Node]:
        """Text of the page's author, which may hold markup."""
        return self.parse_inline(text)[0]

    def entry(self, content: str | nodes.Node | list[nodes.Node], **spans: int) -> nodes.entry:
        if isinstance(content, str):
            content = nodes.Text(content)
        return nodes.entry("", nodes.paragraph("", "", *(content if isinstance(content, list) else [content])), **spans)

    def table(self, head: list[list[nodes.entry]], body: list[list[nodes.entry]], columns: int, caption: str = "") -> nodes.table:
        group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in range(columns)), cols=columns)
        group += nodes.thead("", *(nodes.row("", *row) for row in head))
        group += nodes.tbody("", *(nodes.row("", *row) for row in body))
        table = nodes.table("", classes=["colwidths-auto", "record-table"])
        if caption:
            table += nodes.title("", "", *self.inline(caption))
        table += group
        self.set_source_info(table)
        return table


class ResultTable(RecordDirective):
    """A table of values. The argument names it, or lines ``label: reference`` in the body name several to be set side by side."""

    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec = {  # noqa: RUF012
        "key": directives.unchanged,
        "columns": split,
        "headers": split,
        "formats": split,
        "caption": directives.unchanged,
        "name": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        try:
            table = self._side_by_side() if self.content else self._single()
        except (Missing, ValueError) as error:
            return self.warn(error)
        self.add_name(table)
        return [table]

    def _rows(self, text: str) -> list[dict[str, Any]]:
        reference = self.depend(parse(text))
        value = look_up(reference, self.root)
        if not isinstance(value, list):
            raise Missing(f"{reference.record}:{reference.value} is not a table")
        return value

    def _columns(self, rows: list[dict[str, Any]], without: str = "") -> tuple[list[str], list[str], list[str]]:
        """Names, headings and formats of the columns."""
        known = list(dict.fromkeys(name for row in rows for name in row if name != without))
        columns = self.options.get("columns", known)
        unknown = [name for name in columns if name not in known]
        if unknown:
            raise Missing(f"there is no column {', '.join(unknown)}; there are {', '.join(known)}")
        headers = self.options.get("headers", columns)
        formats = self.options.get("formats", [""] * len(columns))
        if len(headers) != len(columns) or len(formats) != len(columns):
            raise Missing(f"{len(columns)} columns, but {len(headers)} headers and {len(formats)} formats")
        return columns, headers, formats

    def _single(self) -> nodes.Element:
        if not self.arguments:
            raise Missing("name a table of values, or several in the body")
        reference = parse(self.arguments[0])
        if self.awaited(reference):
            return nodes.paragraph("", "", nodes.literal("", reference.record), nodes.Text(" is not computed yet."))
        rows = self._rows(self.arguments[0])
        columns, headers, formats = self._columns(rows)
        head = [[self.entry(self.inline(text)) for text in headers]]
        body = [[self.entry(show(row.get(c), f)) for c, f in zip(columns, formats, strict=True)] for row in rows]
        return self.table(head, body, len(columns), self.options.get("caption", ""))

    def _side_by_side(self) -> nodes.table:
        key = self.options.get("key")
        if not key:
            raise Missing("tables side by side need :key:, the column that names their rows")
        sources: dict[str, dict[Any, dict[str, Any]]] = {}
        for line in self.content:
            name, colon, text = line.partition(":")
            if not colon:
                raise Missing(f"{line!r} isn't of the form `label: reference`")
            rows = [] if self.awaited(parse(text)) else self._rows(text)
            if any(key not in row for row in rows):
                raise Missing(f"{text.strip()} has no column {key!r}")
            sources[name.strip()] = {row[key]: row for row in rows}
        columns, headers, formats = self._columns([row for rows in sources.values() for row in rows.values()], without=key)
        head = [
            [self.entry(key, morerows=1), *(self.entry(self.inline(text), morecols=len(sources) - 1) for text in headers)],
            [self.entry(name) for _ in columns for name in sources],
        ]
        body = [
            [
                self.entry(show(name)),
                *(
                    self.entry(show(rows.get(name, {}).get(column), format_))
                    for column, format_ in zip(columns, formats, strict=True)
                    for rows in sources.values()
                ),
            ]
            for name in dict.fromkeys(name for rows in sources.values() for name in rows)
        ]
        return self.table(head, body, 1 + len(columns) * len(sources), self.options.get("caption", ""))


class Measure(NamedTuple):
    """A column of a comparison: its heading, the key of the published column, and how to make it of a record's row; either may be ""."""

    heading: str
    published: str
    record: str
    complement: bool = False
    divisor: float = 1.0
    format: str = ""

    def of(self, row: dict[str, Any]) -> Any:
        """The value of a record's row, as ``1 - column`` or ``column / number`` if the page asks for that."""
        value = row.get(self.record)
        if value is None or not (self.complement or self.divisor != 1):
            return value
        if isinstance(value, (str, bool)):
            raise Missing(f"{self.record} is {value!r}, which is no number to calculate with")
        return 1 - value if self.complement else value / self.divisor


def measure(line: str) -> Measure:
    """Take ``heading: published = record | format`` apart; ``record`` is ``column``, ``1 - column`` or ``column / number``."""
    fits = re.fullmatch(r"(.+?): +(\w*) *= *(?:(1 - )?([a-z]\w*)(?: */ *(\d+(?:\.\d+)?))?)? *(?:\| *(\S+))?", line.strip())
    heading, key, complement, column, divisor, format_ = fits.groups(default="") if fits else [""] * 6
    if not (key or column) or (complement and divisor) or (divisor and not float(divisor)):
        raise Missing(
            f"{line!r} isn't of the form `heading: published = column`; either side of the = may be left out, and instead of the "
            "column there may be `1 - column` or `column / number`, and behind it `| format`"
        )
    return Measure(heading, key, column, bool(complement), float(divisor or 1), format_)


class Group(NamedTuple):
    """The columns of a comparison that come from one place: their headings, the cells by method, and where that place is.

    One that is awaited has no columns yet.
    """

    name: str
    headings: list[str]
    cells: dict[str, list[str]]
    origin: list[nodes.Node]
    awaited: bool = False


class ComparisonTable(RecordDirective):
    """Methods as rows, and as groups of columns the paper's table and the tables that a run of the same name has in several profiles.

    The argument is ``notebook/run``, with ``:value`` if the table isn't called rows. Each line of the body is a column, see
    :func:`measure`, and left out of a group that has nothing for it. What the paper doesn't give stays empty; a
    record that is awaited has no columns, and is named beneath.
    """

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec = {  # noqa: RUF012
        "published": directives.unchanged,
        "profiles": split,
        "methods": split,
        "caption": directives.unchanged,
        "name": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        try:
            measures = [measure(line) for line in self.content if line.strip()]
            table = published.table(self.options["published"]) if "published" in self.options else None
            if table:
                measures = [m._replace(format=m.format or table.formats.get(m.published, "")) for m in measures]
            elif any(m.published for m in measures):
                raise Missing("published columns need the option :published:, the name of their table")
            groups = [self._published(table, measures)] if table else []
            groups += [self._recorded(profile, measures) for profile in self.options.get("profiles", [])]
            if not all(group.headings or group.awaited for group in groups) or not groups or not measures:
                raise Missing("there must be :published: or :profiles:, and in the body a column for each, `heading: published = column`")
            there = [group for group in groups if not group.awaited]
            shown = self._table(there) if there else nodes.paragraph()
        except (Missing, ValueError) as error:
            return self.warn(error)
        self.add_name(shown)
        origins = nodes.paragraph()
        for group in groups:
            origins += [nodes.Text(f"{'; ' if len(origins) else ''}{group.name}: "), *group.origin]
        return [shown, origins]

    def _published(self, table: published.Table, measures: list[Measure]) -> Group:
        chosen = [m for m in measures if m.published]
        cells = {method: [show(table.value(method, m.published), m.format) for m in chosen] for method in table.rows}
        origin = self.inline(f"{table.title}, {{cite}}`{published.source()[1]}`")
        return Group("paper", [m.heading for m in chosen], cells, origin)

    def _recorded(self, profile: str, measures: list[Measure]) -> Group:
        reference = self.depend(parse(f"{profile}/{self.arguments[0]}"))
        chosen = [m for m in measures if m.record]
        name = nodes.literal("", reference.record)
        if self.awaited(reference):
            return Group(profile, [], {}, [name, nodes.Text(" (not computed yet)")], awaited=True)
        rows = by_method(reference._replace(value=reference.value or "rows"), chosen, self.root)
        cells = {method: [show(m.of(row), m.format) for m in chosen] for method, row in rows.items()}
        return Group(profile, [m.heading for m in chosen], cells, [link(reference.record, name, self.env.docname)])

    def _table(self, groups: list[Group]) -> nodes.table:
        present = {method for group in groups for method in group.cells}
        methods = self.options.get("methods") or [
            *(method for method in published.NAMES if method in present),
            *sorted(present - published.NAMES.keys()),
        ]
        unknown = [method for method in methods if method not in present and method not in published.NAMES]
        if unknown:
            raise Missing(f"there is no method {', '.join(unknown)}; there are {', '.join(sorted(present))}")
        head = [
            [self.entry("method", morerows=1), *(self.entry(group.name, morecols=len(group.headings) - 1) for group in groups)],
            [self.entry(self.inline(text)) for group in groups for text in group.headings],
        ]
        body = [
            [
                self.entry(published.NAMES.get(method, method)),
                *(self.entry(text) for group in groups for text in group.cells.get(method, [""] * len(group.headings))),
            ]
            for method in methods
        ]
        return self.table(head, body, 1 + sum(len(group.headings) for group in groups), self.options.get("caption", ""))


def by_method(reference: Reference, measures: list[Measure], root: Path) -> dict[str, dict[str, Any]]:
    """The rows of a record's table by their column ``method``; each measure's column must be there."""
    rows = look_up(reference, root)
    if not isinstance(rows, list) or not all("method" in row for row in rows):
        raise Missing(f"{reference.record}:{reference.value} is not a table with the column 'method'")
    known = dict.fromkeys(name for row in rows for name in row)
    unknown = [m.record for m in measures if m.record not in known]
    if unknown:
        raise Missing(f"{reference.record}:{reference.value} has no column {', '.join(unknown)}; it has {', '.join(known)}")
    found = {row["method"]: row for row in rows}
    if len(found) < len(rows):
        raise Missing(f"{reference.record}:{reference.value} has several rows of one method")
    return found


class RecordValues(RecordDirective):
    """All values of the records that a pattern fits (``bench/*``), with their class and where they come from."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        entries = [e for e in runs.status(self.root) if fnmatch(_name(e), self.arguments[0])]
        if not entries:
            text = f"No record fits {self.arguments[0]} yet."
            return [nodes.paragraph(text, text)]
        found: list[nodes.Node] = []
        for entry in entries:
            record = entry["record"]
            found.append(nodes.rubric("", "", link(_name(entry), nodes.literal("", _name(entry)), self.env.docname)))
            scalars = {name: value for name, value in record["values"].items() if not isinstance(value, list)}
            if scalars:
                head = [[self.entry(text) for text in ("value", "", "class")]]
                body = [
                    [self.entry(nodes.literal("", name)), self.entry(show(value)), self.entry(_class(record["classes"][name]))]
                    for name, value in scalars.items()
                ]
                found.append(self.table(head, body, 3))
            for name, rows in record["values"].items():
                if isinstance(rows, list) and rows:
                    columns = list(dict.fromkeys(column for row in rows for column in row))
                    body = [[self.entry(show(row.get(column))) for column in columns] for row in rows]
                    found.append(nodes.paragraph("", "", nodes.literal("", name)))
                    found.append(self.table([[self.entry(c) for c in columns]], body, len(columns)))
        return found


def _class(kind: dict[str, Any]) -> str:
    if kind["class"] != "exact":
        return kind["class"]
    return f"exact, within {show(kind['rtol'])} relative or {show(kind['atol'])} absolute"


class Provenance(RecordDirective):
    """Where records come from: of those that the argument names, or with none of all, then with their cross-reference labels."""

    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        entries = {_name(entry): entry for entry in runs.status(self.root)}
        if not self.arguments:
            return self._all(entries) if entries else [nodes.paragraph("", "No record is committed yet.")]
        try:
            wanted = [self.depend(parse(text)).record for text in self.arguments[0].split()]
        except Missing as error:
            return self.warn(error)
        unknown = [name for name in wanted if name not in entries]
        if unknown:
            return self.warn(f"there is no record {', '.join(unknown)}")
        return [self._one(name, entries[name]) for name in wanted]

    def _one(self, name: str, entry: dict[str, Any]) -> nodes.Node:
        """Everything about one record, a line a fact."""
        source = entry["record"]["provenance"]
        facts = {
            "Record": [link(name, nodes.literal("", name), self.env.docname)],
            "Made again by": [nodes.literal("", _command(entry["record"]))],
            "Commit": [nodes.literal("", _commit(source))],
            "Sources": [nodes.literal("", source["sources"]), nodes.Text(f", {entry['state']}")],
            "Took": [nodes.Text(f"{source['seconds']:.0f} seconds on {source['date'][:10]}")],
            "On": [nodes.Text(_environment(source))],
        }
        if entry["record"]["parameters"]:
            facts["Parameters"] = [nodes.literal("", ", ".join(f"{k} = {v!r}" for k, v in entry["record"]["parameters"].items()))]
        fields = nodes.field_list("", classes=["provenance"])
        for fact, content in facts.items():
            fields += nodes.field("", nodes.field_name("", fact), nodes.field_body("", nodes.paragraph("", "", *content)))
        return fields

    def _all(self, entries: dict[str, dict[str, Any]]) -> list[nodes.Node]:
        """A line a record; machines and versions, which many share, in a numbered list."""
        environments: list[str] = []
        body = []
        for name, entry in entries.items():
            source = entry["record"]["provenance"]
            environment = _environment(source)
            if environment not in environments:
                environments.append(environment)
            named = self.entry(nodes.literal("", name))
            named["ids"].append(label(name))
            self.env.get_domain("std").note_hyperlink_target(label(name), self.env.docname, label(name), name)
            body.append(
                [
                    named,
                    self.entry([nodes.literal("", source["sources"]), nodes.Text(f" {entry['state']}")]),
                    self.entry(nodes.literal("", _commit(source))),
                    self.entry(nodes.literal("", source["date"][:10])),
                    self.entry(f"{source['seconds']:.0f}"),
                    self.entry(str(environments.index(environment) + 1)),
                ]
            )
        headings = ("record", "sources", "commit", "date", "seconds", "on")
        items = [nodes.list_item("", nodes.paragraph("", text)) for text in environments]
        return [
            self.table([[self.entry(text) for text in headings]], body, len(headings)),
            nodes.enumerated_list("", *items, enumtype="arabic", prefix="", suffix="."),
        ]


def _commit(source: dict[str, Any]) -> str:
    if source["commit"] is None:
        return "–"
    return source["commit"][:10] + (" and changes" if source["dirty"] else "")


def _name(entry: dict[str, Any]) -> str:
    return entry["path"].removeprefix("results/").removesuffix(".json")


def _environment(source: dict[str, Any]) -> str:
    machine, versions = source["machine"], source["versions"]
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads a run, {machine['platform']}"
    if "gpu" in machine:
        hardware = f"{machine['gpu']}; {hardware}"
    return hardware + "; " + ", ".join(f"{name} {version}" for name, version in versions.items())


def _command(record: dict[str, Any]) -> str:
    if record["notebook"] == "bench":
        return "make bench"
    profile = "" if record["profile"] == "tiny" else f"PROFILE={record['profile']} "
    return f"make reproduce {profile}ONLY={record['notebook']}/{record['run']}"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_role("result", ResultRole())
    app.add_directive("result-table", ResultTable)
    app.add_directive("comparison-table", ComparisonTable)
    app.add_directive("record-values", RecordValues)
    app.add_directive("provenance", Provenance)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
