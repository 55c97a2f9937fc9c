"""A staged trial on a tiny network: realised runs that are done once, the identities of the edit, and a record that judges fairly."""

from dataclasses import replace

import pytest
import torch
from filelock import FileLock, Timeout
from staged_tiny import QUICK, RULE, SMALL, TRIES, gap

from unlearnlib import records
from unlearnlib.benchmarks import staged, staged_models, staged_trial
from unlearnlib.benchmarks.staged_baselines import put
from unlearnlib.benchmarks.staged_stats import MEASURES, METHODS, trial_rows
from unlearnlib.benchmarks.staged_trial import Phases, Trial, parse_trials, run_trial, training_batch
from unlearnlib.examples import batches, encode
from unlearnlib.metrics import answer_log_probs
from unlearnlib.sidecar import SafetyTrace, combine, norm
from unlearnlib.sidecar.trace import causal_lm_loss


@pytest.fixture
def empty_cache(make_staged_trial, tmp_path, monkeypatch):
    monkeypatch.setenv("UNLEARNLIB_CACHE", str(tmp_path))


def count_training(monkeypatch):
    """Whether each run that is asked for from now on is trained, or read."""
    counted, run = [], SafetyTrace.__call__

    def called(self, theta, *, checkpoint=None, **options):
        counted.append(not checkpoint.exists())
        return run(self, theta, checkpoint=checkpoint, **options)

    monkeypatch.setattr(SafetyTrace, "__call__", called)
    return counted


# ---------------------------------------------------------------------------------------------------------------------------
# Training


def test_a_training_batch_has_the_loss_of_the_answers(staged_network):
    model, tokenizer, _ = staged_network
    examples = encode(tokenizer, staged.make("balances", 901).safety[:5])
    (batch,) = batches(examples, batch_size=5)
    with torch.no_grad():
        loss = causal_lm_loss(model, training_batch(examples))
        assert loss.item() == pytest.approx(-answer_log_probs(model, batch).mean().item(), abs=1e-5)


def test_phases_follow_each_other_and_are_run_once(make_staged_trial, empty_cache, monkeypatch):
    runs = count_training(monkeypatch)
    trial = make_staged_trial()
    states = {"a": trial.theta_a, "am": trial.theta_am(), "ams": trial.shipped, "as": trial.oracle}
    assert sum(runs) == 4
    assert len({round(gap(states["a"], other), 6) for other in states.values()}) == 4, "each phase must move the model somewhere else"
    again = make_staged_trial()
    for name, theta in {"a": again.theta_a, "am": again.theta_am(), "ams": again.shipped, "as": again.oracle}.items():
        assert gap(theta, states[name]) == 0
    assert sum(runs) == 4 < len(runs)
    assert again.seconds == trial.seconds and set(trial.seconds) == {"skill", "memory", "safety"}
    trial.release()
    assert trial.folder.exists() and gap(trial.oracle, states["as"]) == 0
    assert sum(runs) == 4
    trial.release(discard=True)
    assert not trial.folder.exists()
    assert gap(make_staged_trial().oracle, states["as"]) == 0
    assert sum(runs) == 6


def test_another_process_waits_for_a_trial_that_is_in_work(make_staged_trial, empty_cache):
    trial = make_staged_trial()
    theirs = FileLock(f"{trial.folder}.lock", timeout=0)
    with pytest.raises(Timeout):
        theirs.acquire()
    trial.release()
    with theirs:
        pass


def test_a_run_whose_end_was_not_noted_is_done_anew(make_staged_trial, monkeypatch):
    trial = make_staged_trial()
    theta = trial.theta_am()
    (clock,) = trial.folder.glob("memory-*.seconds")
    clock.unlink()
    runs = count_training(monkeypatch)
    assert gap(trial.theta_am(), theta) == 0
    assert runs == [True]


def test_the_safety_run_is_one_map_and_another_order_another_one(make_staged_trial):
    trial = make_staged_trial()
    realised = trial.safety()(trial.theta_am())
    assert gap(realised, trial.shipped) == 0
    other, again = (trial.safety(order=5)(trial.theta_am()) for _ in range(2))
    assert gap(other, again) == 0 < gap(other, realised)


def test_identities_of_the_edit(make_staged_trial):
    trial = make_staged_trial()
    side = trial.sidecar()
    assert gap(side.at(0.0, 0.0), trial.shipped) == 0
    start, delta = trial.theta_a, side.memory
    lower = trial.safety()(combine((1.0, start), (-1.0, delta)))
    middle = combine((0.5, trial.shipped), (0.5, lower))
    assert gap(side.at(1.0, 1.0), middle) < 1e-5 * norm(middle)
    assert gap(combine((1.0, start), (1.0, delta)), trial.theta_am()) < 1e-5
    assert gap(trial.sidecar(epsilon=0.5).residual, side.residual) > 0


def test_lora_phases_change_linear_layers_by_little_rank(make_staged_trial):
    trial = make_staged_trial(replace(QUICK, lora_rank=2, skill_steps=3))
    start, end = trial.theta_a, trial.theta_am()
    changed = {name: end[name] - start[name] for name in start}
    assert changed["model.embed_tokens.weight"].abs().max() == 0
    weight = changed["model.layers.1.mlp.down_proj.weight"]
    singular = torch.linalg.svdvals(weight)
    assert singular[1] > 1e-6 and singular[2] < 1e-5 * singular[0]
    again = make_staged_trial(replace(QUICK, lora_rank=2, skill_steps=3))
    assert gap(again.theta_am(), end) == 0
    side = trial.sidecar()
    assert gap(side.at(0.0, 0.0), trial.shipped) == 0 < norm(side.residual)


def test_autocast_trains_in_float32_parameters(make_staged_trial):
    trial = make_staged_trial(replace(QUICK, autocast=True))
    assert all(tensor.dtype == torch.float32 for tensor in trial.theta_am().values())
    assert gap(trial.theta_a, make_staged_trial().theta_a) > 0
    put(trial.model, trial.shipped)
    assert set(trial.validate(trial.model)) >= {"auc_gap", "margin_gap", "skill"}
    rounded, exact = trial.judge(trial.shipped), make_staged_trial().judge(trial.shipped)
    assert 0 < abs(rounded["refusal_margin"] - exact["refusal_margin"]) < 0.1
    assert trial.judge(trial.oracle)["kl_memory"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"safety_steps": 0}, "safety_steps must be at least 1"),
        ({"memory_lr": 0.0}, "memory_lr must be a finite number > 0"),
        ({"adam_epsilon": float("inf")}, "adam_epsilon must be"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"lora_rank": -1}, "lora_rank must be at least 0"),
        ({"schedule": "cosine"}, "schedule must be one of constant, linear"),
    ],
)
def test_bad_phases(bad, message):
    with pytest.raises(ValueError, match=message):
        Phases(**bad)


def test_a_bad_trial_is_refused_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(staged_models, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="family must be one of"):
        Trial("tiny", "recipes", 0)
    with pytest.raises(ValueError, match="grid lacks 1"):
        run_trial(Trial("tiny", "balances", 900), grid=(0.0, 0.5))


def test_trials_by_name():
    found = parse_trials("tiny", ["balances-900", "codenames-901"], QUICK, batch_size=4)
    assert [(one.model_name, one.family, one.seed, one.batch_size) for one in found] == [
        ("tiny", "balances", 900, 4),
        ("tiny", "codenames", 901, 4),
    ]
    for bad in ("balances", "balances-x", "-3"):
        with pytest.raises(ValueError, match="a trial is named family-seed"):
            parse_trials("tiny", [bad], QUICK)
    with pytest.raises(ValueError, match="trials is empty"):
        parse_trials("tiny", [], QUICK)


# ---------------------------------------------------------------------------------------------------------------------------
# The whole trial


@pytest.fixture
def run(make_staged_trial):
    return lambda **options: run_trial(
        make_staged_trial(), **({"grid": SMALL, "subdivisions": 2, "rule": RULE, "candidates": TRIES} | options)
    )


def test_a_trial_records_what_the_study_reads(run, make_staged_trial):
    values = run(keep_runs=True)
    trial, side = make_staged_trial(), make_staged_trial().sidecar()

    for measure in (*MEASURES, "skill_accuracy", "refusal_rate", "ordinary_refusal_rate"):
        assert list(values[measure][0]) == list(METHODS)
    assert {row["method"] for row in values["selected"]} == {
        *("naive", "jvp_line", "two_d", "naive_fine", "jvp_line_fine", "ft_unlearn", "npo", "ties", "dare")
    }
    assert [(row["lam"], row["gamma"]) for row in values["grid"]] == [(a, b) for a in SMALL for b in SMALL]
    assert {row["method"] for row in values["cost"]} == {*METHODS} - {"shipped"}

    ends = {name: (values["closure"][0][name], values["closure_signed"][0][name]) for name in ("oracle", "shipped")}
    assert ends == {"oracle": (1.0, 1.0), "shipped": (0.0, 0.0)}
    assert values["parameter_error"][0]["oracle"] == 0 == values["kl_to_oracle"][0]["oracle"]

    memory = norm(side.memory)
    for row in values["grid"]:
        expected = gap(side.at(row["lam"], row["gamma"]), trial.oracle) / memory
        assert row["parameter_error"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert values["curvature"] == pytest.approx(gap(side.at(1.0, 1.0), trial.oracle) / memory, rel=1e-3)
    assert values["residual_ratio"] == pytest.approx(norm(side.residual) / memory)
    best = {row["member"]: row["parameter_error"] for row in values["best_parameters"]}
    for row in values["grid"]:
        assert best["two_d"] <= row["parameter_error"] + 1e-6
    assert best["two_d"] <= min(best["naive"], best["jvp_line"]) + 1e-9
    naive = next(row for row in values["best_parameters"] if row["member"] == "naive")
    assert gap(side.at(naive["lam"], 0.0), trial.oracle) / memory == pytest.approx(naive["parameter_error"], rel=1e-3)

    chosen = {row["method"]: (row["lam"], row["gamma"]) for row in values["selected"]}
    halves = {row["lam"] for row in values["candidates"] if row["method"] == "naive_fine"}
    assert halves == {0.5, 1.5} and chosen["naive_fine"][1] == 0 and chosen["jvp_line_fine"][0] == chosen["jvp_line_fine"][1]
    keys = {row["method"]: (RULE.violation(row), -row["score"]) for row in values["selected"]}
    assert keys["naive_fine"] <= keys["naive"] and keys["jvp_line_fine"] <= keys["jvp_line"], "the finer line contains the coarser one"
    assert values["zeta"] == chosen["two_d"][0] - chosen["two_d"][1]
    assert chosen["naive"][1] == 0 and chosen["jvp_line"][0] == chosen["jvp_line"][1]
    assert values["denominator"] == values["refusal_margin"][0]["oracle"] - values["refusal_margin"][0]["shipped"]
    for method, (lam, gamma) in {name: chosen[name] for name in ("naive", "jvp_line", "two_d")}.items():
        assert trial.judge(side.at(lam, gamma))["refusal_margin"] == pytest.approx(values["refusal_margin"][0][method], abs=1e-4)

    cost = {row["method"]: row for row in values["cost"]}
    assert {name: cost[name]["training_steps"] for name in ("naive", "two_d", "oracle", "ft_unlearn", "dare")} == {
        "naive": 0,
        "two_d": QUICK.safety_steps,
        "oracle": QUICK.safety_steps,
        "ft_unlearn": 2 * 2,
        "dare": 0,
    }
    assert [cost[name]["evaluations"] for name in ("two_d", "naive", "naive_fine", "ties")] == [9, 3, 5, 2]

    record = {"notebook": "sidecar_trial", "run": "x", "profile": "tiny", "parameters": {}}
    own = {"model": "tiny", "family": "codenames", "seed": 900} | values
    record |= {"values": {name: records._to_plain(name, value) for name, value in own.items()}}
    (row,) = trial_rows([record])
    assert row["closure_two_d"] == values["closure"][0]["two_d"] and row["lam_two_d"] == chosen["two_d"][0]


def test_what_was_computed_is_not_computed_again(run, make_staged_trial, monkeypatch):
    first = run()
    assert not make_staged_trial().folder.exists()
    monkeypatch.setattr(staged_models, "load", lambda *_, **__: pytest.fail("loaded a model"))
    assert run() == first


def test_an_interrupted_trial_goes_on(run, empty_cache, monkeypatch):
    real = staged_trial.merged
    monkeypatch.setattr(staged_trial, "merged", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(staged_trial, "merged", real)
    runs = count_training(monkeypatch)
    resumed = run()
    assert runs and not any(runs), "a run of training was done twice"
    assert resumed["closure"][0]["oracle"] == 1.0


def test_neither_test_prompts_nor_the_oracle_take_part_in_a_choice(run, make_staged_trial, monkeypatch):
    """The same choices with other test prompts, and a grid and its choice with no oracle to be had."""
    first, cut = run(), staged.make

    def elsewhere(*arguments, **options):
        data, other = cut(*arguments, **options), cut("balances", 901)
        changed = {name: getattr(data, name) | {"test": getattr(other, name)["test"]} for name in ("probes", "ordinary")}
        return replace(data, **changed)

    monkeypatch.setattr(staged, "make", elsewhere)
    second = run()
    assert second["selected"] == first["selected"] and second["grid"] == first["grid"]
    assert second["refusal_margin"] != first["refusal_margin"]

    monkeypatch.setattr(Trial, "oracle", property(lambda _: pytest.fail("asked the oracle")))
    monkeypatch.setattr(Trial, "test", property(lambda _: pytest.fail("asked the test split")))
    steps = staged_trial._Steps(make_staged_trial(replace(QUICK, safety_steps=5)), list(SMALL), 2, RULE, TRIES)
    assert set(staged_trial.choose(steps.grid(), RULE)) == {"naive", "jvp_line", "two_d"}


def test_a_small_difference_is_flagged(run):
    values = run()
    distance = abs(values["denominator"])
    assert not run(degenerate_below=distance / 2)["flagged"]
    assert run(degenerate_below=distance * 2)["flagged"]
