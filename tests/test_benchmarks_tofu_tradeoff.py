"""The trade-off of a GROM edit: the study's own trial in the middle, nested rows to keep, the cache, and dominance by definition."""

import math
from dataclasses import replace

import pytest

from unlearnlib import models
from unlearnlib.benchmarks import tofu
from unlearnlib.benchmarks.tofu_study import Grid, Study
from unlearnlib.benchmarks.tofu_tradeoff import TradeOff, averaged
from unlearnlib.grom import FitData, FitSettings, attribution, select_band
from unlearnlib.methods import GromSettings


@pytest.fixture(scope="module")
def study(make_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tradeoff")
    data = tofu.load("miniature", "forget05", retain_rows=4, general_rows=4)
    model = models.build(vocab_size=320, hidden_size=32, intermediate_size=48, layers=5, heads=4, max_length=512)
    tokenizer = make_tokenizer([row["answer"] for row in data.full])
    for part in (model, tokenizer):
        part.save_pretrained(folder / "full")
    patch = pytest.MonkeyPatch()
    patch.setenv("UNLEARNLIB_CACHE", str(folder / "cache"))
    yield Study(data, "not used", grid=Grid((2.0,), (1.0,), (1e-5,), width=2), full_model=str(folder / "full"))
    patch.undo()


@pytest.fixture(scope="module")
def middle(study):
    return study.candidates("grom")[0].fit


def test_the_middle_is_the_trial_of_the_study(study, middle, snapshot):
    before = snapshot(study.full[0])
    expected = study._try("grom", GromSettings(middle))
    for knob, value in (("strength", 2.0), ("retain_weight", 100.0), ("ridge", 0.03), ("retain_share", 1.0), ("width", len(middle.layers))):
        (row,) = TradeOff(study, middle).vary(knob, [value])
        # The same edit, whose states may have come from another pass: equal up to the last digits of float32.
        assert [row["forgetting"], row["preservation"]] == pytest.approx(expected, abs=1e-5)
        named = {"knob": knob, "value": value, "draw": 0, "strength": 2.0, "retain_rows": len(study.rehearsal.retain)}
        assert {name: row[name] for name in named} == named
    assert snapshot(study.full[0]) == before


def test_a_share_is_tried_on_every_draw_and_all_rows_once(study, middle):
    sweep, count = TradeOff(study, middle, share=0.5, draws=3), len(study.rehearsal.retain)
    rows = sweep.vary("retain_share", [0.01, 1.0])
    assert [(row["value"], row["draw"]) for row in rows] == [(0.01, 0), (0.01, 1), (0.01, 2), (1.0, 0)]
    assert [row["retain_rows"] for row in rows] == [round(0.01 * count)] * 3 + [count]
    assert len({row["preservation"] for row in rows[:3]}) == 3, "three draws, but not three choices of rows"
    assert [row["retain_rows"] for row in sweep.vary("ridge", [0.1])] == [round(0.5 * count)]


def curve(sweep, monkeypatch, scale, floor=0.0):
    """Have the sweep see a known curve: at strength β, 1 − exp(−β/scale) is forgotten and exp(−(β/scale)²) preserved."""
    tried = []

    def know(fit, share, draw):
        tried.append(fit.strength)
        x = fit.strength / scale
        return {"strength": fit.strength, "retain_rows": 1, "forgetting": max(floor, 1 - math.exp(-x)), "preservation": math.exp(-x * x)}

    monkeypatch.setattr(sweep, "_try", know)
    return tried


@pytest.mark.parametrize("scale", [0.02, 1.0, 3.0, 500.0])
def test_preservation_at_equal_forgetting(study, middle, monkeypatch, scale):
    sweep = TradeOff(study, middle)
    tried = curve(sweep, monkeypatch, scale)
    (row,) = sweep.matched("ridge", [0.1], forgetting=0.6, tries=16)
    x = -math.log(0.4)
    assert row["forgetting"] == 0.6
    assert row["strength"] == pytest.approx(scale * x, rel=1e-3)
    assert row["preservation"] == pytest.approx(math.exp(-x * x), rel=1e-3)
    assert (len(tried), tried[0]) == (16, middle.strength)


def test_two_settings_that_only_differ_in_strength_match(study, middle, monkeypatch):
    found = []
    for scale in (1.0, 30.0):
        sweep = TradeOff(study, middle)
        curve(sweep, monkeypatch, scale)
        found.append(sweep.matched("ridge", [0.1], forgetting=0.8, tries=14)[0]["preservation"])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_what_is_never_reached_has_no_preservation(study, middle, monkeypatch):
    for floor, scale in ((0.0, 1e9), (0.95, 1.0)):
        sweep = TradeOff(study, middle)
        curve(sweep, monkeypatch, scale, floor)
        (row,) = sweep.matched("ridge", [0.1], forgetting=0.9, tries=4)
        assert row["preservation"] is None
        assert averaged([row]) == []


def test_matching_interpolates_between_edits_that_were_fitted(study, middle):
    (whole,) = TradeOff(study, middle).vary("strength", [60.0])
    level = whole["forgetting"] / 2
    (row,) = TradeOff(study, middle).matched("retain_weight", [100.0], forgetting=level, tries=6)
    (there,) = TradeOff(study, middle).vary("strength", [row["strength"]])
    assert there["forgetting"] == pytest.approx(level, rel=0.2)
    assert there["preservation"] == pytest.approx(row["preservation"], abs=0.02)


def test_rows_to_keep_are_nested_and_alpha_is_that_of_all(study, middle):
    sweep = TradeOff(study, middle)
    everything = sweep._shown(1.0, 0)
    assert everything == list(range(len(study.rehearsal.retain)))
    for draw in range(2):
        small, large = (set(sweep._shown(share, draw)) for share in (0.1, 0.4))
        assert small < large < set(everything)
    assert sweep._shown(0.4, 0) != sweep._shown(0.4, 1)
    whole, part = sweep._data(1.0, 0), sweep._data(0.1, 0)
    assert len(part.retain) < len(whole.retain)
    assert part.alpha.equal(whole.alpha)


def test_bands_are_selected_by_attribution_as_late_as_they_fit(study, middle):
    sweep = TradeOff(study, middle)
    data = sweep._data(1.0, 0)
    scores = attribution(data.model, *data.batches(middle), data.alpha)
    # Of 5 layers the last half are 3 and 4.
    assert sweep.band(1) == select_band(scores, 1)
    assert [sweep.band(width) for width in (2, 3, 4, 5)] == [(3, 4), (2, 3, 4), (1, 2, 3, 4), (0, 1, 2, 3, 4)]
    for width in (0, 6):
        with pytest.raises(ValueError, match="1 to 5 layers"):
            sweep.band(width)


def test_what_was_tried_is_not_fitted_again(study, middle, monkeypatch):
    monkeypatch.setattr("unlearnlib.remembered.provenance.sources", lambda code: "the same code all the time")
    values = [1.0, 3.0]
    first = TradeOff(study, middle).vary("ridge", values)
    monkeypatch.setattr(FitData, "fit", lambda *_: pytest.fail("fitted again"))
    assert TradeOff(study, middle).vary("ridge", values) == first
    with pytest.raises(pytest.fail.Exception):
        TradeOff(replace(study, rehearsal_authors=1), middle).vary("ridge", values)


@pytest.mark.parametrize(
    ("knob", "values", "message"),
    [
        ("seed", [1], "unknown setting 'seed'"),
        ("ridge", [0.1, -1.0], "ridge"),
        ("strength", [1.0, 0.0], "strength"),
        ("retain_share", [1.0, 0.0], "share"),
        ("retain_share", [1.5], "share"),
        ("width", [1, 9], "1 to 5 layers"),
    ],
)
def test_impossible_values_are_refused_before_anything_is_fitted(study, middle, monkeypatch, knob, values, message):
    monkeypatch.setattr(FitData, "fit", lambda *_: pytest.fail("fitted"))
    sweep = TradeOff(study, FitSettings(middle.layers, 7.0))
    with pytest.raises(ValueError, match=message):
        sweep.vary(knob, values)
    with pytest.raises(ValueError, match=message):
        sweep.matched(knob, values)


def test_impossible_matches_are_refused(study, middle):
    sweep = TradeOff(study, middle)
    for options in ({"forgetting": 0.0}, {"forgetting": 1.0}, {"tries": 1}):
        with pytest.raises(ValueError, match="forgetting must be between 0 and 1, and tries at least 2"):
            sweep.matched("ridge", [0.1], **options)
    with pytest.raises(ValueError, match="share"):
        TradeOff(study, middle, share=0.0).vary("ridge", [0.1])


def test_averages_by_hand():
    def row(knob, value, preservation):
        return {"knob": knob, "value": value, "preservation": preservation, "other": 1.0}

    rows = [row("a", 1, 0.2), row("a", 1, 0.6), row("a", 2, None), row("a", 3, 0.5), row("b", 1, 0.0), row("a", 1, None)]
    assert averaged(rows) == [
        {"knob": "a", "value": 1, "preservation": 0.4, "low": 0.2, "high": 0.6},
        {"knob": "a", "value": 3, "preservation": 0.5, "low": 0.5, "high": 0.5},
        {"knob": "b", "value": 1, "preservation": 0.0, "low": 0.0, "high": 0.0},
    ]
    assert averaged(rows[:1], "other") == [{"knob": "a", "value": 1, "other": 1.0, "low": 1.0, "high": 1.0}]
