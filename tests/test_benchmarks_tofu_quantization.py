"""The quantisation attack: recovery and verdict by hand, each model rounded within its edit, and updates that exporting again undoes."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib import models
from unlearnlib.benchmarks import tofu
from unlearnlib.benchmarks.tofu_quantization import (
    NONE,
    attack,
    exported_again,
    grid_shares,
    recovery,
    rounding_again,
    say,
    size,
    summary,
    table,
    verdict,
)
from unlearnlib.benchmarks.tofu_scores import Evaluation, mean
from unlearnlib.benchmarks.tofu_settings import chosen_settings
from unlearnlib.benchmarks.tofu_study import Grid, Study
from unlearnlib.quantize import SCHEMES, block_weights, quantized, update_survival

RELATIVE = 1e-5


def build(seed=0):
    return models.build(vocab_size=320, hidden_size=64, intermediate_size=64, layers=4, heads=4, max_length=512, seed=seed)


@pytest.fixture(scope="module")
def study(make_tokenizer, tmp_path_factory):
    """`full` is a base from a Q4_1 file, moved by a hundred-thousandth of its size."""
    folder = tmp_path_factory.mktemp("quantization")
    data = tofu.load("miniature", "forget05", retain_rows=4, general_rows=4)
    tokenizer = make_tokenizer([row["answer"] for row in data.full])
    base = build()
    with quantized(base, "q4_1"):
        base.save_pretrained(folder / "base")
        generator = torch.Generator().manual_seed(1)
        for weight in block_weights(base).values():
            update = torch.randn(weight.shape, generator=generator)
            weight.add_(RELATIVE * weight.norm() / update.norm() * update)
        base.save_pretrained(folder / "full")
    build(seed=2).save_pretrained(folder / "retain")
    for name in ("base", "full", "retain"):
        tokenizer.save_pretrained(folder / name)
    patch = pytest.MonkeyPatch()
    patch.setenv("UNLEARNLIB_CACHE", str(folder / "cache"))
    grid = Grid((30.0,), (20.0,), (1e-3,), width=2, epochs=1)
    how = Evaluation(max_new_tokens=3)
    yield Study(data, str(folder / "base"), how=how, grid=grid, full_model=str(folder / "full"), retain_model=str(folder / "retain"))
    patch.undo()


def prob(model, study):
    return mean(say(model, study.full[1], study.data.forget, study.how)["prob"])


# Recovery


@pytest.mark.parametrize(
    ("unlearned", "rounded", "known", "share"),
    [
        (0.1, 0.1, 0.9, 0.0),
        (0.1, 0.5, 0.9, 0.5),
        (0.1, 0.9, 0.9, 1.0),
        (0.5, 0.3, 0.9, -0.5),
        (0.25, 0.75, 0.5, 2.0),
        (0.75, 0.75, 1.0, 0.0),
        (0.76, 1.0, 1.0, None),
        (0.9, 0.5, 0.2, None),
        (0.0, 0.0, 0.0, None),
    ],
)
def test_recovery_by_hand(unlearned, rounded, known, share):
    assert recovery(unlearned, rounded, known) == (None if share is None else pytest.approx(share))


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1), st.floats(0.1, 10))
def test_recovery_does_not_depend_on_the_unit(unlearned, rounded, gap, unit):
    known = 1.4 * unlearned + gap
    moved = recovery(unit * unlearned, unit * rounded, unit * known)
    assert moved == pytest.approx(recovery(unlearned, rounded, known), abs=1e-9)
    assert recovery(unlearned, known, known) == 1


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([0.0, -3.0], "stays forgotten"),
        ([0.1, None], "stays forgotten"),
        ([0.0, 0.11], "partly"),
        ([0.5, -1.0], "comes back"),
        ([None, 0.49], "partly"),
        ([None, None], "can't be told"),
        ([], "can't be told"),
    ],
)
def test_the_verdict_is_that_of_the_score_that_came_back_most(shares, words):
    assert verdict(shares) == words


def answers(prob, rouge_l):
    return {"prob": prob, "rouge_l": rouge_l, "extraction": [0.5, 0.5]}


FOUND = {
    "full": {
        NONE: {"answers": answers([0.9, 0.9], [1.0, 1.0]), "update": None},
        "nf4": {"answers": answers([0.9, 0.7], [0.5, 0.3]), "update": None},
        "q4_0": {"answers": answers([1.0, 1.0], [0.0, 0.0]), "update": None},
    },
    "npo": {
        NONE: {"answers": answers([0.1, 0.3], [0.4, 0.4]), "update": {"update_survival": 1.0}},
        "nf4": {"answers": answers([0.3, 0.4], [0.4, 0.4]), "update": {"update_survival": 0.25}},
        "q4_0": {"answers": answers([0.1, 0.3], [0.1, 0.3]), "update": {"update_survival": 0.5}},
    },
}


def test_the_table_by_hand():
    rows = {(row["method"], row["scheme"]): row for row in table(FOUND)}
    assert list(rows) == [(method, scheme) for method in FOUND for scheme in (NONE, "nf4", "q4_0")]
    attacked = rows["npo", "nf4"]
    assert attacked["rows"] == 2
    assert [attacked[name] for name in ("prob", "rouge_l", "extraction", "update_survival")] == pytest.approx([0.35, 0.4, 0.5, 0.25])
    assert attacked["prob_change"] == pytest.approx(0.15)
    assert 0.1 - 1e-9 <= attacked["prob_change_low"] <= attacked["prob_change"] <= attacked["prob_change_high"] <= 0.2 + 1e-9
    # From .2 towards the .8 that the model before unlearning has when it is rounded too; of ROUGE-L it has no more than before.
    assert attacked["prob_recovery"] == pytest.approx(0.15 / 0.6)
    assert attacked["rouge_l_recovery"] is None
    assert attacked["verdict"] == "partly"
    assert rows["npo", "q4_0"]["prob_recovery"] == 0
    assert rows["npo", "q4_0"]["verdict"] == "stays forgotten"
    for key in (("npo", NONE), ("full", "nf4"), ("full", NONE)):
        assert [rows[key][name] for name in ("prob_recovery", "rouge_l_recovery", "verdict")] == [None] * 3
    assert rows["full", "nf4"]["update_survival"] is None
    assert rows["full", "nf4"]["prob_change"] == pytest.approx(-0.1)


def test_the_summary_takes_the_worst_scheme():
    full, npo = summary(table(FOUND))
    assert (full["method"], full["verdict"], full["prob_recovery"]) == ("full", None, None)
    assert [full[f"prob_{scheme}"] for scheme in (NONE, "nf4", "q4_0")] == pytest.approx([0.9, 0.8, 1.0])
    assert [npo[f"rouge_l_{scheme}"] for scheme in (NONE, "nf4", "q4_0")] == pytest.approx([0.4, 0.4, 0.2])
    assert npo["prob_recovery"] == pytest.approx(0.25)
    assert npo["rouge_l_recovery"] is None
    assert npo["verdict"] == "partly"


def test_the_size_of_an_update_is_that_of_the_matrices_it_changed():
    before = {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[0.0, 12.0]]), "c": torch.tensor([[100.0]])}
    after = before | {"a": torch.tensor([[3.0, 5.0]]), "b": torch.tensor([[0.0, 12.5]])}
    assert size(before, after) == pytest.approx((1.25 / 169) ** 0.5)
    assert size(before, before) is None


# The attack


@pytest.mark.parametrize("method", ["retain", "grom", "npo"])
def test_each_model_is_rounded_as_it_is_and_measured_against_the_one_before(study, method, snapshot):
    before = snapshot(study.full[0])
    settings = chosen_settings(study, method)
    assert settings == (None if method == "retain" else study.candidates(method)[0])
    found = attack(study, method, ["nf4"], settings)
    assert snapshot(study.full[0]) == before
    assert list(found) == [NONE, "nf4"]
    original = {name: weight.clone() for name, weight in block_weights(study.full[0]).items()}
    with study.model(method, settings) as model:
        assert found[NONE]["answers"] == say(model, study.full[1], study.data.forget, study.how)
        expected = update_survival(original, block_weights(model), "nf4")
        with quantized(model, "nf4"):
            assert found["nf4"]["answers"] == say(model, study.full[1], study.data.forget, study.how)
    if method == "retain":
        assert all(result["update"] is None for result in found.values())
        return
    assert found[NONE]["update"]["update_survival"] == 1
    update = found["nf4"]["update"]
    assert update["update_survival"] == pytest.approx(expected.kept)
    assert update["rank_before"] == expected.rank
    assert update["rank_after"] == expected.surviving_rank
    # GROM's two matrices alone, or all 7 of each layer.
    assert len(expected.matrices) == (2 if method == "grom" else 7 * 4)


def test_settings_are_taken_from_the_first_record_that_chose_the_method(study, monkeypatch):
    study = replace(study, grid=replace(study.grid, strengths=(5.0, 15.0), head_strengths=(20.0, 60.0), learning_rates=(1e-4, 2e-4)))

    def record(method, chosen, band):
        choices = [{"method": method, "candidate": i, "chosen": i == chosen, "band": band} for i in range(2)]
        return {"values": {"choices": choices}}

    records = [record("npo", 1, None), record("grom", 1, 1), record("grom", 0, 0)]
    monkeypatch.setattr(Study, "choose", lambda *_: pytest.fail("chosen again"))
    assert chosen_settings(study, "npo", records).lr == 2e-4
    fit = chosen_settings(study, "grom", records).fit
    assert (fit.layers, fit.strength) == ((1, 2), 15.0)
    assert chosen_settings(study, "full", records) is None
    with pytest.raises(BaseException, match="chosen again"):
        chosen_settings(study, "simnpo", records)


def test_an_edit_of_the_head_is_rounded_only_if_the_head_is(study, snapshot):
    before = snapshot(study.full[0])
    settings = chosen_settings(study, "grom_head")
    spared = attack(study, "grom_head", ["nf4"], settings)
    assert spared["nf4"]["update"] | {"codes_changed": None} == spared[NONE]["update"]
    assert spared["nf4"]["update"]["update_survival"] == 1
    rounded = attack(study, "grom_head", ["nf4"], settings, head=True)
    assert rounded["nf4"]["update"]["codes_changed"] > 0
    assert rounded["nf4"]["answers"]["prob"] != spared["nf4"]["answers"]["prob"]
    assert rounded[NONE]["answers"] == spared[NONE]["answers"]
    assert snapshot(study.full[0]) == before


def test_what_was_attacked_is_not_computed_again(study, monkeypatch):
    found = attack(study, "full", ["q4_0"])

    @contextmanager
    def fail(*_, **__):
        pytest.fail("computed again")
        yield

    monkeypatch.setattr(Study, "model", fail)
    assert attack(study, "full", ["q4_0"]) == found


def test_the_compat_mode_is_refused(study):
    with pytest.raises(ValueError, match="compat"):
        say(*study.full, study.data.forget, Evaluation(compat=True))


# Weights from a 4-bit file


def test_shares_on_a_grid():
    model = build()
    assert {row["scheme"]: row["share"] < 0.1 for row in grid_shares(model, list(SCHEMES))} == dict.fromkeys(SCHEMES, True)
    with quantized(model, "q4_1"):
        assert grid_shares(model, ["q4_1"]) == [{"scheme": "q4_1", "share": 1.0}]


def test_rounding_again_undoes_small_updates_on_its_own_grid_only(snapshot):
    model = build()
    before = snapshot(model)
    placed = rounding_again(model, ["q4_1", "nf4"], [1e-5, 1e-2, 0.5], grid="q4_1")
    assert [(row["scheme"], row["size"]) for row in placed] == [(s, size) for size in (1e-5, 1e-2, 0.5) for s in ("q4_1", "nf4")]
    assert placed[0] == {"scheme": "q4_1", "size": 1e-5, "codes_changed": 0, "update_survival": 0, "update_norm": 0}
    assert placed[2]["update_survival"] < 0.3 < placed[3]["update_survival"]
    assert all(row["update_survival"] == pytest.approx(1, abs=0.1) for row in placed[4:])
    (ordinary,) = rounding_again(model, ["q4_1"], [1e-2])
    assert ordinary["update_survival"] == pytest.approx(1, abs=0.2)
    assert snapshot(model) == before


def test_an_update_has_a_size():
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            rounding_again(build(), ["q4_1"], [wrong])


def test_exporting_again_undoes_a_small_fine_tuning(study, snapshot):
    before = snapshot(study.full[0])
    rows = {row["scheme"]: row for row in exported_again(study, "q4_1", ["q4_1", "nf4"])}
    assert snapshot(study.full[0]) == before
    assert list(rows) == [NONE, "q4_1", "nf4"]
    assert all(row["size"] == pytest.approx(RELATIVE, rel=1e-2) for row in rows.values())
    assert rows[NONE]["prob"] == prob(study.full[0], study)
    with study.model("base") as base:
        assert rows["q4_1"]["prob"] == pytest.approx(prob(base, study), rel=1e-6)
    assert (rows["q4_1"]["update_survival"], rows["q4_1"]["codes_changed"]) == (0, 0)
    assert rows["nf4"]["codes_changed"] > 0
