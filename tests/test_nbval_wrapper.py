"""The comparison that nbval uses here catches what it must and lets pass what it may."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_notebook, new_output

ROOT = Path(__file__).parents[1]

# By its path: `import conftest` could as well be the one beside this file.
specification = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
wrapper = importlib.util.module_from_spec(specification)
specification.loader.exec_module(wrapper)
differences, text_differences = wrapper.differences, wrapper.text_differences

EXACT = {"class": "exact", "rtol": 1e-6, "atol": 1e-12}


def reported(name, value, kind=EXACT):
    metadata = {"unlearnlib": {"name": name, "value": value, "class": kind}}
    return new_output("display_data", data={"text/plain": f"{name} = {value}"}, metadata=metadata)


def printed(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def shown(**data):
    return new_output("display_data", data={mime.replace("_", "/"): text for mime, text in data.items()})


def test_equal_outputs_pass():
    outputs = [reported("gap", 0.5), printed("n = 3, gap 0.25\n"), shown(text_plain="<Figure size 1x1>", image_png="AAAA")]
    assert differences(outputs, outputs) == []


@pytest.mark.parametrize("value, problems", [(0.5 * (1 + 1e-7), 0), (0.5 * (1 + 1e-5), 1)])
def test_exact_value_is_held_to_its_tolerance(value, problems):
    found = differences([reported("gap", value)], [reported("gap", 0.5)])
    assert len(found) == problems
    assert all("gap" in message for message in found)


def test_integer_value_must_be_equal():
    assert differences([reported("rank", 1_000_001)], [reported("rank", 1_000_000)])


@pytest.mark.parametrize("kind", ["trained", "timing"])
def test_trained_and_timing_values_need_only_be_there(kind):
    kind = {"class": kind}
    assert differences([reported("loss", 3.0, kind)], [reported("loss", 1.0, kind)]) == []
    assert differences([], [reported("loss", 1.0, kind)]) == ["loss: no longer reported"]


def test_a_value_cannot_leave_its_class():
    assert differences([reported("gap", 0.5, {"class": "trained"})], [reported("gap", 0.5)])


def test_a_table_is_compared_by_cell():
    table = [{"n": 1, "p": 0.5}, {"n": 2, "p": 0.25}]
    wrong = [{"n": 1, "p": 0.5}, {"n": 2, "p": 0.26}]
    (message,) = differences([reported("rows", wrong)], [reported("rows", table)])
    assert message.startswith("rows[1].p")


@pytest.mark.parametrize(
    "new, reference",
    [
        ([], [printed("hello\n")]),
        ([printed("hello\n")], []),
        ([], [shown(text_plain="<Figure>", image_svg="<svg/>")]),
        ([printed("gap 0.251\n")], [printed("gap 0.25\n")]),
        ([printed("rank 4\n")], [printed("rank 3\n")]),
        ([printed("passes: False\n")], [printed("passes: True\n")]),
        ([printed("layer3 1.0\n")], [printed("layer4 1.0\n")]),
        ([shown(text_markdown="**1.5**")], [shown(text_markdown="**1.6**")]),
        ([new_output("error", ename="ValueError", evalue="a")], [new_output("error", ename="ValueError", evalue="b")]),
    ],
)
def test_wrong_or_missing_outputs_are_caught(new, reference):
    assert differences(new, reference)


def test_stderr_pictures_and_pieces_of_stdout_do_not_matter():
    new = [printed("1%", "stderr"), printed("a 0."), printed("50000000001\n"), shown(text_plain="<Figure>", image_png="AAAA")]
    reference = [printed("a 0.5\n"), shown(text_plain="<Figure>", image_png="BBBB")]
    assert differences(new, reference) == []


def test_two_integers_are_never_close():
    assert text_differences("1000000000", "1000000001")
    assert not text_differences("1000000000.0", "1000000001.0")


@given(st.floats(-1e12, 1e12, allow_subnormal=False), st.floats(-1, 1))
def test_printed_floats_pass_within_the_tolerance_and_fail_beyond(value, direction):
    assert text_differences(f"x = {value!r}", f"x = {value * (1 + 4e-7 * direction)!r}") == []
    if abs(value) > 1e-2:
        assert text_differences(f"x = {value!r}", f"x = {value * 1.00001!r}")


def test_nbval_itself_uses_the_comparison(tmp_path):
    """A real nbval run: one tolerable cell, one with a wrong value, one whose output is gone, one with a wrong printed number."""
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    code = {
        "from unlearnlib.records import exact\nexact(good=0.5)": reported("good", 0.5 + 1e-11, kind := EXACT | {"rtol": 1e-9}),
        "exact(bad=0.5)": reported("bad", 0.6, kind),
        "1;": printed("gone\n"),
        "print(0.25)": printed("0.26\n"),
    }
    cells = [new_code_cell(source, execution_count=i, outputs=[output]) for i, (source, output) in enumerate(code.items(), 1)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(metadata={"kernelspec": kernel}, cells=cells), tmp_path / "small.ipynb")
    options = ["-p", "no:cacheprovider", "--nbval", "--nbval-current-env"]
    command = [sys.executable, "-m", "pytest", *options, "small.ipynb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "3 failed, 1 passed" in done.stdout
    for message in ("bad: 0.5, expected 0.6", "stdout: 0 outputs, expected 1", "0.25, expected 0.26"):
        assert message in done.stdout
