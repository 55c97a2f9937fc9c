"""Timing: turns and ratios by hand, extrapolation on a clock of our own, counted work against what is computed, nothing left behind."""

import pickle

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from unlearnlib import methods, models
from unlearnlib.baselines import gradient
from unlearnlib.benchmarks import tofu, tofu_speed
from unlearnlib.benchmarks.tofu_speed import LOADING, edit_parts, extrapolated_seconds, growth, method_seconds, race, summary, take_turns
from unlearnlib.benchmarks.tofu_study import Grid, Study
from unlearnlib.grom import Edit, FitData, FitSettings, RidgeFitter

EVERY = ("grom", "grom_head", "grad_ascent", "grad_diff", "npo", "simnpo", "idk_dpo", "alt_po", "npo_lora")


@pytest.fixture(scope="module")
def study(make_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("speed")
    data = tofu.load("miniature", "forget05", retain_rows=4, general_rows=4)
    model = models.build(vocab_size=320, hidden_size=32, intermediate_size=48, layers=4, heads=4, max_length=512)
    tokenizer = make_tokenizer([row["answer"] for row in data.full])
    for part in (model, tokenizer):
        part.save_pretrained(folder / "full")
    grid = Grid((1.0,), (1.0,), (1e-5,), width=2, epochs=2, batch_size=5, lora_rank=2)
    patch = pytest.MonkeyPatch()
    patch.setenv("UNLEARNLIB_CACHE", str(folder / "cache"))
    yield Study(data, "not used", grid=grid, full_model=str(folder / "full"), load=lambda name: pytest.fail("the base isn't needed"))
    patch.undo()


def test_turns_go_back_and_forth():
    order = []
    works = {name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}
    rounds = take_turns(works, 3)
    assert "".join(order) == "abccbaabc"
    assert rounds == [{"a": 1, "b": 2, "c": 3}, {"a": 6, "b": 5, "c": 4}, {"a": 7, "b": 8, "c": 9}]
    assert list(rounds[1]) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="rounds"):
        take_turns(works, 0)


def test_ratios_are_formed_within_rounds():
    rounds = [{"grom": 1.0, "npo": 10.0}, {"grom": 10.0, "npo": 20.0}, {"grom": 2.0, "npo": 6.0}]
    assert summary(rounds) == {"grom": (2.0, 1.0), "npo": (10.0, 3.0)}
    with pytest.raises(KeyError):
        summary([{"npo": 1.0}])


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(tofu_speed.time, "perf_counter", lambda: self.now)

    def training(self, setup, durations, taken):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        self.now += setup
        for seconds in durations:
            self.now += seconds
            optimizer.step()
            taken.append(seconds)


def test_extrapolation_counts_the_setup_once(monkeypatch):
    clock, taken = Clock(monkeypatch), []
    seconds = extrapolated_seconds(lambda: clock.training(50.0, [4.0, 1.0, 2.0, 3.0, 1000.0], taken), 4, 100)
    assert seconds == 50 + 4 + 99 * 2
    assert taken == [4.0, 1.0, 2.0], "it went on after the timed steps"
    clock.training(0.0, [1.0] * 9, taken)
    assert len(taken) == 12, "the hook is still there"


def test_extrapolation_of_all_steps_is_their_sum_and_of_too_few_an_error(monkeypatch):
    clock = Clock(monkeypatch)
    assert extrapolated_seconds(lambda: clock.training(7.0, [1.0, 2.0, 3.0], []), 3, 3) == 13
    with pytest.raises(RuntimeError, match="after 3 steps, before the 4"):
        extrapolated_seconds(lambda: clock.training(7.0, [1.0, 2.0, 3.0], []), 4, 9)
    with pytest.raises(ZeroDivisionError, match="of the work"):
        extrapolated_seconds(lambda: (_ for _ in ()).throw(ZeroDivisionError("of the work")), 2, 9)


STEPS = [("simnpo", 0, 6), ("simnpo", 2, 2), ("npo_lora", 3, 3), ("grad_diff", 60, 6), ("grom", 2, 0)]


@pytest.mark.parametrize(("name", "timed", "expected"), STEPS)
def test_as_many_steps_are_taken_as_are_timed(study, snapshot, name, timed, expected):
    before, steps = snapshot(study.full[0]), []
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        assert method_seconds(study, name, study.candidates(name)[0], timed_steps=timed) > 0
    finally:
        hook.remove()
    assert len(steps) == expected
    assert snapshot(study.full[0]) == before


def test_one_step_says_nothing(study):
    for steps in (1, -1):
        with pytest.raises(ValueError, match="timed_steps"):
            method_seconds(study, "npo", study.candidates("npo")[0], timed_steps=steps)


@pytest.mark.parametrize("name", ["grad_ascent", "grad_diff", "npo", "simnpo", "idk_dpo", "grom"])
def test_workload_is_what_is_computed(study, monkeypatch, name):
    trained, forward = [], []
    score = gradient.Objective._log_probs

    def count(self, model, examples):
        if torch.is_grad_enabled():
            trained.append(len(examples))
        return score(self, model, examples)

    monkeypatch.setattr(gradient.Objective, "_log_probs", count)

    def fit_data(model, *sets, **options):
        forward.extend(map(len, sets))
        return FitData(model, *sets, **options)

    monkeypatch.setattr(methods, "FitData", fit_data)
    settings = study.candidates(name)[0]
    method_seconds(study, name, settings)
    counted = {"steps": tofu_speed.step_count(settings, len(study.data.forget)), "forward": sum(forward), "trained": sum(trained)}
    assert tofu_speed.workload(study, name) == counted


def test_every_method_has_its_turn(study, monkeypatch):
    # A model that knows nothing would go on making them up.
    monkeypatch.setattr(gradient, "alternatives", lambda model, tokenizer, items, **options: [["Nobody knows."]] * len(items))
    rounds = race(study, EVERY, rounds=1, timed_steps=2)
    assert len(rounds) == 1
    assert all(list(seconds) == list(EVERY) and min(seconds.values()) > 0 for seconds in rounds)


def test_parts_of_an_edit_add_up_and_nothing_stays_behind(study, snapshot):
    model, calls = study.full[0], (methods.as_examples, RidgeFitter.solve, RidgeFitter.update_forget, RidgeFitter.update_retain, Edit.apply)
    before = snapshot(model)
    for name in ("grom", "grom_head", "grom_both"):
        parts = tofu_speed.study_parts(study, name, repetitions=1)
        assert list(parts) == ["encode", "keys", "moments", "solve", "apply"]
        assert min(parts.values()) > 0
    assert snapshot(model) == before
    assert calls == (methods.as_examples, RidgeFitter.solve, RidgeFitter.update_forget, RidgeFitter.update_retain, Edit.apply)
    with pytest.raises(ValueError, match="npo is no closed-form edit"):
        tofu_speed.study_parts(study, "npo")


def test_parts_by_a_clock(monkeypatch, small_model, request_sets):
    clock, model = Clock(monkeypatch), small_model()
    spend = {(RidgeFitter, "solve"): 10.0, (RidgeFitter, "update_retain"): 1.0, (Edit, "apply"): 100.0}
    for (owner, name), seconds in spend.items():
        original = getattr(owner, name)

        def slow(*args, original=original, seconds=seconds, **options):
            clock.now += seconds
            return original(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    def fit():
        clock.now += 1000.0
        return FitData(model, *request_sets).fit(FitSettings((1, 2), 1.0))

    # Two matrices, each of one batch of retain keys; the first one is applied for the second's keys, then both.
    assert edit_parts(fit, model) == {"encode": 0, "keys": 1000, "moments": 2, "solve": 20, "apply": 200}


def test_growth_varies_one_size_at_a_time():
    rows = growth((2, 3), (32, 64), (200, 400, 800), repetitions=1)
    sizes = [(row["grows"], row["layers"], row["width"], row["keys"]) for row in rows]
    middle = (3, 64, 400)
    assert sizes == [
        *(("layers", layers, *middle[1:]) for layers in (2, 3)),
        *(("width", 3, width, 400) for width in (32, 64)),
        *(("keys", 3, 64, keys) for keys in (200, 400, 800)),
    ]
    for row in rows:
        assert sum(row[f"{part}_seconds"] for part in ("encode", "keys", "moments", "solve", "apply")) == pytest.approx(row["seconds"])
    with pytest.raises(ValueError, match="no values of width"):
        growth((2,), (), (100,))


def test_what_is_measured_in_another_process_can_be_sent_there(study, monkeypatch):
    sent = []

    def here(warm_up, work):
        sent.append(len(pickle.dumps((warm_up, work))))
        pickle.loads(pickle.dumps(warm_up))()
        pickle.loads(pickle.dumps(work))()
        return 12.0

    monkeypatch.setattr(tofu_speed, "peak_mb", here)
    assert len(study.full) == 2, "loaded here, but not to be sent"
    assert tofu_speed.peaks(study, [LOADING, "grom", "npo_lora"]) == {LOADING: 12.0, "grom": 12.0, "npo_lora": 12.0}
    weights = sum(weight.numel() * 4 for weight in study.full[0].parameters())
    assert max(sent) < weights + 200_000
