"""Records: what may be reported, what is read back, and when two agree."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib import records

EXACT = {"class": "exact", "rtol": 1e-6, "atol": 1e-9}
FLOATS = st.floats(-1e9, 1e9, allow_nan=False, allow_subnormal=False)
SCALARS = st.one_of(st.booleans(), st.integers(-(2**53), 2**53), FLOATS, st.text(max_size=8), st.none())
TABLES = st.lists(st.dictionaries(st.just("x"), SCALARS))


def record(**values):
    return {
        "notebook": "page",
        "run": "default",
        "profile": "tiny",
        "parameters": {},
        "values": values,
        "classes": dict.fromkeys(values, EXACT),
        "provenance": {
            "commit": None,
            "dirty": None,
            "sources": "0",
            "versions": {},
            "machine": {},
            "seconds": 1.0,
            "date": "2026-01-01T00:00:00+00:00",
        },
    }


@pytest.fixture
def shown(monkeypatch):
    """The outputs that reporting functions display."""
    outputs = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, metadata, raw: outputs.append({"data": data, "metadata": metadata, "raw": raw})
    )
    return outputs


def test_reported_values_are_collected_in_full_precision(shown):
    records.exact(third=torch.tensor(1 / 3, dtype=torch.float64), rank=np.int64(7), rtol=1e-3)
    records.trained(loss=0.5)
    records.timing(seconds=2.0)
    values, classes = records.collect(shown)
    assert values == {"third": 1 / 3, "rank": 7, "loss": 0.5, "seconds": 2.0}
    assert type(values["rank"]) is int
    assert classes["third"] == {"class": "exact", "rtol": 1e-3, "atol": 1e-12}
    assert classes["loss"] == {"class": "trained"}
    assert classes["seconds"] == {"class": "timing"}


def test_a_value_below_its_tolerance_is_shown_as_a_bound(shown):
    records.exact(gap=3e-15, atol=1e-12)
    assert "≤ 1e-12" in shown[0]["data"]["text/plain"]
    assert records.collect(shown)[0]["gap"] == 3e-15


def test_a_name_reported_twice_is_an_error(shown):
    records.exact(a=1)
    records.trained(a=2.0)
    with pytest.raises(records.RecordError, match="a is reported twice"):
        records.collect(shown)


@pytest.mark.parametrize("value", [math.nan, math.inf, torch.ones(2), [1, 2], object(), {"a": 1}])
def test_what_is_no_value_is_refused(shown, value):
    with pytest.raises(records.RecordError, match="bad"):
        records.exact(bad=value)
    assert not shown


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.one_of(SCALARS, st.lists(st.dictionaries(st.just("x"), SCALARS)))))
def test_a_record_is_read_as_it_was_written(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("records") / "r.json"
    records.write(record(**values), path)
    assert records.read(path) == record(**values)
    assert records.compare(records.read(path), record(**values)) == []


def test_a_broken_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{\n "notebook": ,\n}', encoding="utf-8")
    with pytest.raises(records.RecordError, match=r"r\.json:2:\d+: not JSON"):
        records.read(path)


@pytest.mark.parametrize(
    "change, field",
    [
        ({"notebook": "No Name"}, "notebook"),
        ({"values": {"a": [1]}, "classes": {"a": EXACT}}, "values.a"),
        ({"values": {"a": 1}, "classes": {"a": {"class": "exact"}}}, "classes.a"),
        ({"values": {"a": 1}, "classes": {}}, "a"),
        ({"more": 1}, "more"),
    ],
)
def test_a_record_that_does_not_fit_the_schema_is_refused_and_not_written(tmp_path, change, field):
    with pytest.raises(records.RecordError, match=field):
        records.write(record() | change, tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_writing_replaces_whole_files_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    records.write_text(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        records.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


@given(FLOATS, st.floats(-1, 1))
def test_floats_agree_within_the_tolerance_and_not_beyond(value, direction):
    allowed = EXACT["atol"] + EXACT["rtol"] * abs(value)
    assert records.disagreements(value + 0.99 * direction * allowed, value, EXACT, "v") == []
    assert records.disagreements(value + 1.1 * allowed + 1e-9, value, EXACT, "v")


@pytest.mark.parametrize(
    "new, old",
    [
        (3, 4),
        (True, 1),
        ("a", "b"),
        (None, 0.0),
        ([{"a": 1}], []),
        ([{"a": 1}], [{"b": 1}]),
        ([{"a": 1.0}], [{"a": 1.1}]),
        ("1", 1),
    ],
)
def test_unequal_values_disagree(new, old):
    assert records.disagreements(new, old, EXACT, "value")


def test_only_exact_values_are_compared():
    for kind in ("trained", "timing"):
        assert records.disagreements(1.0, 2.0, {"class": kind}, "v") == []


def test_comparison_names_what_is_missing_new_or_of_another_class():
    old, new = record(a=1, b=2), record(b=2, c=3)
    new["classes"]["b"] = {"class": "trained"}
    found = records.compare(new, old)
    assert [message.split(":")[0] for message in found] == ["a", "c", "b"]


def test_the_schema_is_part_of_the_package():
    schema = json.loads((records.resources.files("unlearnlib") / "data" / "record.schema.json").read_text(encoding="utf-8"))
    assert schema["additionalProperties"] is False
