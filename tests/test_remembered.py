"""Steps kept in the cache: computed once, again when recipe or code changes, and whole or not at all."""

import math

import pytest

from unlearnlib import provenance, remembered
from unlearnlib.remembered import code_hash

CODE = "import unlearnlib.remembered"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNLEARNLIB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "steps"


class Step:
    """A computation that counts how often it is done."""

    def __init__(self, result):
        self.result, self.count = result, 0

    def __call__(self):
        self.count += 1
        return self.result


def never():
    raise AssertionError("computed again")


def test_a_step_is_computed_once(cache):
    step = Step({"numbers": (1, 2.5), "name": "É", 3: None})
    first = remembered.remembered("a-step", [1, {"x": 2}], step, CODE)
    # The first call gives just what later ones read: lists for tuples, and text for keys.
    assert first == {"numbers": [1, 2.5], "name": "É", "3": None}
    assert remembered.remembered("a-step", [1, {"x": 2}], never, CODE) == first
    assert step.count == 1
    assert [path.name.startswith("a-step-") for path in cache.iterdir()] == [True]


def test_a_result_that_is_false_is_remembered_too():
    for result in (None, 0, False, [], ""):
        assert remembered.remembered("empty", repr(result), Step(result), CODE) == result
        assert remembered.remembered("empty", repr(result), never, CODE) == result


def test_floats_come_back_to_the_last_bit():
    values = [0.1 + 0.2, 1 / 3, 5e-324, 1e300, math.inf]
    for compute in (Step(values), never):
        assert remembered.remembered("floats", 0, compute, CODE) == values


def test_the_recipe_counts_by_content():
    step = Step(1)
    remembered.remembered("a-step", {"a": 1, "b": [2, 3]}, step, CODE)
    remembered.remembered("a-step", {"b": (2, 3), "a": 1}, never, CODE)
    for other in ({"a": 1, "b": [2, 4]}, {"a": 1}, [], {"a": "1", "b": [2, 3]}):
        remembered.remembered("a-step", other, step, CODE)
    remembered.remembered("another-step", {"a": 1, "b": [2, 3]}, step, CODE)
    assert step.count == 6


def test_it_is_computed_again_when_the_code_changes(monkeypatch):
    code = "import unlearnlib.stats"
    digest = "one"
    monkeypatch.setattr(provenance, "sources", lambda cells: f"{digest} of {cells}")
    code_hash.cache_clear()
    step = Step(7)
    try:
        remembered.remembered("a-step", 0, step, code)
        digest = "other"
        # What a process has imported stays as it is, whatever happens to the files.
        remembered.remembered("a-step", 0, never, code)
        code_hash.cache_clear()
        remembered.remembered("a-step", 0, step, code)
        digest = "one"
        code_hash.cache_clear()
        remembered.remembered("a-step", 0, never, code)
    finally:
        code_hash.cache_clear()
    assert step.count == 2


def test_the_code_is_all_that_it_reaches():
    assert code_hash(CODE) == provenance.sources([CODE])
    assert code_hash(CODE) != code_hash("import unlearnlib.stats")


def test_what_fails_leaves_nothing_behind(cache):
    def fail():
        raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        remembered.remembered("a-step", 0, fail, CODE)
    with pytest.raises(TypeError, match="set is not JSON"):
        remembered.remembered("a-step", 0, Step({1, 2}), CODE)
    assert not cache.exists() or not list(cache.iterdir())
    assert remembered.remembered("a-step", 0, Step(1), CODE) == 1


def test_an_error_while_writing_leaves_nothing_half_written(cache, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(OSError, match="no space"):
            remembered.remembered("a-step", 0, Step(1), CODE)
    assert not list(cache.iterdir())
    assert remembered.remembered("a-step", 0, Step(2), CODE) == 2


def test_a_recipe_without_a_content_is_refused_before_any_work():
    with pytest.raises(TypeError, match="JSON"):
        remembered.remembered("a-step", object(), never, CODE)
