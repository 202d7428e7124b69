"""The callback contract, over every built-in and over plain classes that inherit nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from evsys_sdk.config.metadata import Metadata
from evsys_sdk.protocols import Callback, EvalResult, Rollout, RunContext, RunResult, Score
from evsys_sdk.record.callbacks import HOOKS, CallbackList, steering, steers
from evsys_sdk.registry import callbacks, list_callbacks, register_callback

BUILT_INS = [name for name in list_callbacks() if callbacks.entries[name].origin.startswith("evsys_sdk.")]


def build(name):
    for module in getattr(callbacks.get(name), "requires", {}):
        pytest.importorskip(module)
    return callbacks.build(name, {})


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch, tmp_path):
    monkeypatch.setattr(callbacks, "entries", dict(callbacks.entries))
    monkeypatch.setenv("EVSYS_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("EVSYS_LOG_DIR", str(tmp_path / "mirror"))


def context(tmp_path, run_id):
    config = SimpleNamespace(name="exp", metadata=SimpleNamespace(hypothesis="h"))
    extras = {"train_rows": [{"q": 1}]}
    return RunContext(
        run_id=run_id, output_dir=tmp_path / run_id, config=config,
        data_store=None, log_store=None, backend=None, extras=extras,
    )  # fmt: skip


def play_run(told, ctx, steps=5):
    """One run, in the order that the protocol promises."""
    scores = [Score(metric="pass@1", value=0.5), Score(metric="broken", value=None, error="x")]
    told.on_run_start(ctx)
    told.on_train_start(ctx, steps)
    for step in range(1, steps + 1):
        told.on_step(ctx, step, {"loss": 1.0 / step})
    told.on_eval(ctx, EvalResult(name="v", split="val", step=steps, scores=scores, rollouts=[Rollout(task_id="t")]))
    told.on_checkpoint(ctx, steps, "/weights")
    told.on_train_end(ctx, {"loss": 1.0})
    told.on_eval(ctx, EvalResult(name="t", split="test", scores=[], error="no tasks"))
    told.on_run_end(ctx, RunResult(run_id=ctx.run_id, status="completed"))


def test_the_hooks_are_those_of_the_protocol():
    assert {name for name in vars(Callback) if name.startswith("on_")} == set(HOOKS)
    assert all(callable(getattr(CallbackList(), hook)) for hook in HOOKS)


@pytest.mark.parametrize("name", BUILT_INS)
def test_a_callback_follows_arms_that_run_at_the_same_time(name, tmp_path):
    told = CallbackList([(name, build(name))])
    told.on_experiment_start(SimpleNamespace(name="exp", config=SimpleNamespace(metadata=Metadata())))
    runs = [context(tmp_path, f"r{number}") for number in range(3)]
    threads = [threading.Thread(target=play_run, args=(told, ctx)) for ctx in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.on_experiment_end([RunResult(run_id=ctx.run_id, status="completed") for ctx in runs])
    assert told.errors == []
    assert [told.stop_reason(ctx.run_id) for ctx in runs] == [None] * 3


@pytest.mark.parametrize("name", BUILT_INS)
def test_a_callback_follows_a_run_without_an_experiment_around_it(name, tmp_path):
    told = CallbackList([(name, build(name))])
    play_run(told, context(tmp_path, "alone"))
    assert told.errors == []


@pytest.mark.parametrize("name", BUILT_INS)
def test_a_callback_bears_a_run_that_fails_before_it_trains(name, tmp_path):
    told = CallbackList([(name, build(name))])
    told.on_experiment_start(SimpleNamespace(name="exp", config=SimpleNamespace(metadata=Metadata())))
    told.on_run_start(context(tmp_path, "r0"))
    told.on_experiment_end([RunResult(run_id=run_id, status="failed", error="x") for run_id in ("r0", "never")])
    assert told.errors == []


def test_of_the_built_ins_only_early_stopping_steers():
    assert {name for name in BUILT_INS if steers(name)} == {"early_stopping"}


def test_a_callback_steers_unless_its_own_class_says_that_it_only_watches():
    @register_callback("silent")
    class Silent:
        pass

    @register_callback("watcher")
    class Watcher:
        only_watches = True

    @register_callback("heir")
    class Heir(Watcher):
        pass

    @register_callback("liar")
    class Liar:
        only_watches = True
        stop_reason = None

    assert [steers(kind) for kind in ("silent", "watcher", "heir", "liar", "nobody")] == [True, False, True, True, True]
    specs = [{"kind": "silent"}, {"kind": "watcher"}, {"kind": "silent", "params": {"x": 1}}]
    assert steering(specs) == {"silent": {}, "silent[1]": {"x": 1}}


def test_a_plain_class_with_one_hook_is_a_callback(tmp_path):
    @register_callback("count_steps")
    class CountSteps:
        def __init__(self, start=0):
            self.count = start

        def on_step(self, ctx, step, metrics):
            self.count += 1

    told = CallbackList.from_specs([SimpleNamespace(kind="count_steps", params={"start": 10})])
    play_run(told, context(tmp_path, "r0"))
    (kind, callback) = told.members[0]
    assert (kind, callback.count, told.errors, CountSteps.name) == ("count_steps", 15, [], "count_steps")
