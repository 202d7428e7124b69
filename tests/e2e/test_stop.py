"""A stop saves the step it stops at, says how to resume, and the resumed run leaves what an undisturbed one leaves."""

from __future__ import annotations

import importlib.util
import json
import signal
import time

import psutil
import pytest

from evsys_sdk.experiment.experiment import Experiment, RunOptions
from evsys_sdk.protocols import StoppedAt

WORDS = ("red", "green", "blue", "black")
CHATS = {"path": "data/train.jsonl", "transforms": [{"kind": "jsonl_to_chat", "params": {}}]}
TASKS = {"path": "bench/tasks.jsonl"}
STEPS = {"max_steps": 5, "batch_size": 2, "learning_rate": 1e-3}
SAMPLED = {**STEPS, "num_samples": 4, "max_tokens": 6, "drop_constant_reward": False}
LEARNT = {key: value for key, value in SAMPLED.items() if key != "drop_constant_reward"}
PHASES = [
    {"algorithm": {"kind": "sft", "params": STEPS}},
    {"algorithm": {"kind": "rl", "params": SAMPLED}, "data": TASKS},
]
ENTRIES = [
    {"name": "colours", "path": "bench", "split": "val", "run_every": 3, "temperature": 0, "baseline": True},
    {"name": "colours", "path": "bench", "split": "test", "temperature": 0},
]
CALLBACKS = [{"kind": "local_logger"}, {"kind": "csv_metrics"}]


class StopAt:
    """Sends the process a signal after a step of a run, once per run and step."""

    def __init__(self, interrupt, *steps):
        self.interrupt, self.left, self.steps = interrupt, {}, steps

    def on_step(self, ctx, step, metrics):
        left = self.left.setdefault(ctx.run_id, list(self.steps))
        if left and step >= left[0] and not ctx.replaying:
            left.pop(0)
            self.interrupt()


def _arm(name, kind, params, data, backend, **block):
    about = {"name": name, "model": {"name": "tiny-random"}, "backend": backend}
    return {**about, "algorithm": {"kind": kind, "params": params}, "data": data, **block}


def _arms(project, backend):
    """One arm per kind of training."""
    project.write_tasks()
    project.write_rows("data/pairs.jsonl", [{"prompt": f"say {w}", "chosen": w, "rejected": w[::-1]} for w in WORDS])
    stages = [{"name": name, "data": CHATS} for name in ("first", "second")]
    chain = _arm("chain", "sft", STEPS, None, backend, continual={"stages": stages})
    del chain["data"]
    arms = [
        _arm("sft", "sft", STEPS, CHATS, backend),
        _arm("kept", "sft", {**STEPS, "save_every": 2}, CHATS, backend),
        _arm("rl", "rl", {**SAMPLED, "async_steps": 1, "kl_coef": 0.1}, TASKS, backend),
        _arm("sdft", "sdft", {**LEARNT, "teacher": "ema"}, CHATS, backend),
        _arm("distill", "distill", {**LEARNT, "teacher": {"model": "tiny-random"}}, CHATS, backend),
        _arm("combo", "combo", {"phases": PHASES}, CHATS, backend),
        chain,
    ]
    if importlib.util.find_spec("torch"):
        arms.append(_arm("dpo", "dpo", STEPS, {"path": "data/pairs.jsonl"}, backend))
    return arms


def _config(project, arms, folder, **top):
    metadata = {"benchmark": ENTRIES, "success_metric": "val.pass@1", "allow_test_selection": True}
    top = {"callbacks": CALLBACKS, "metadata": metadata, **top}
    return project.config(f"name: {top.pop('called', 'stopped')}", runs=arms, output_dir=folder, name="c.yaml", **top)


def _until_done(path, watcher, most):
    """Run the config again and again until every run is completed; returns the results of all launches."""
    results = []
    while not results or not results[-1].completed:
        assert len(results) < most, [(run.run_id, run.status, run.error) for run in results[-1].runs]
        results.append(Experiment.from_yaml(path).run(RunOptions(watchers=[watcher])))
    return results


def _stops(results):
    return [run.stopped_at for result in results for run in result.runs if run.stopped_at]


def test_every_algorithm_resumes_at_the_step_it_was_stopped_at(project, record_tree, interrupt):
    arms = _arms(project, {"kind": "mock"})
    Experiment.from_yaml(_config(project, arms, "./whole/out")).run()
    path = _config(project, arms, "./stopped/out")
    results = _until_done(path, StopAt(interrupt, 2, 5), 2 * len(arms) + 1)
    stops = _stops(results)
    assert len(stops) == 2 * len(arms)
    assert all(stop.checkpoint_step == stop.step > 0 and stop.resumes for stop in stops)
    whole, stopped = record_tree(project.root / "whole/out"), record_tree(project.root / "stopped/out")
    assert whole.keys() == stopped.keys() and len(whole) > 50
    for name, records in whole.items():
        assert stopped[name] == records, name
    kept = {
        arm["name"]: sorted(p.name for p in (project.root / "whole/out" / arm["name"]).rglob("*.state.npz"))
        for arm in arms
    }
    for name, files in kept.items():
        found = sorted(p.name for p in (project.root / "stopped/out" / name).rglob("*.state.npz"))
        assert found == files, "what was only saved to resume from is deleted"


def test_real_weights_resume_at_the_step_they_were_stopped_at(project, record_tree, interrupt):
    pytest.importorskip("torch")
    backend = {"kind": "local", "params": {"threads": 1}}
    arms = [arm for arm in _arms(project, backend) if arm["name"] in ("sft", "rl", "chain")]
    Experiment.from_yaml(_config(project, arms, "./whole/out", metadata={})).run()
    results = _until_done(_config(project, arms, "./stopped/out", metadata={}), StopAt(interrupt, 2), len(arms) + 1)
    assert [stop.checkpoint_step for stop in _stops(results)] == [2, 2, 2]
    whole, stopped = record_tree(project.root / "whole/out"), record_tree(project.root / "stopped/out")
    assert whole == stopped
    folders = [sorted(p.name for p in (project.root / f"{f}/out/sft/weights").iterdir()) for f in ("whole", "stopped")]
    assert folders[0] == folders[1]


def test_a_server_resumes_at_the_step_it_was_stopped_at(project, tinker_server, interrupt):
    pytest.importorskip("tinker")
    backend = {"kind": "tinker", "params": {"base_url": tinker_server.url}}
    arms = [arm for arm in _arms(project, backend) if arm["name"] in ("sft", "rl")]
    [whole] = _until_done(_config(project, arms, "./whole", metadata={}), StopAt(interrupt), 1)
    results = _until_done(_config(project, arms, "./stopped", metadata={}), StopAt(interrupt, 2), len(arms) + 1)
    assert [stop.checkpoint_step for stop in _stops(results)] == [2, 2]
    for one, other in zip(whole.runs, results[-1].runs, strict=True):
        learnt = {key: value for key, value in one.metrics.items() if "second" not in key}
        assert {key: other.metrics[key] for key in learnt} == pytest.approx(learnt, rel=1e-4, abs=1e-4)


def test_trl_says_that_it_starts_again(project, capfd, interrupt):
    pytest.importorskip("trl")
    arms = [_arm("trl", "local_sft", STEPS, CHATS, {"kind": "local", "params": {"threads": 1}})]
    results = _until_done(_config(project, arms, "./out", metadata={}), StopAt(interrupt, 2), 2)
    assert _stops(results) == [StoppedAt(step=2, total_steps=5, checkpoint_step=2, resumes=False)]
    assert "training starts again instead of resuming from step 2" in capfd.readouterr().err
    assert [row["step"] for row in project.metrics("trl", folder="out") if "loss" in row] == [1, 2, 3, 4, 5]


LOGS_IN_THE_STEP = """
from evsys_sdk import register_algorithm
from evsys_sdk.algorithms.sft import SFT

@register_algorithm("chatty")
class Chatty(SFT):
    name = "chatty"

    async def build_batch(self, step):
        self.ctx.log_store.log_scalar("before", float(step), step)
        return await super().build_batch(step)

    def step_metrics(self, step, batch, outputs):
        self.ctx.log_store.log_scalar("within", float(step), step)
        return super().step_metrics(step, batch, outputs)
"""


def test_an_algorithm_that_logs_inside_its_step_is_stopped_when_the_step_is_done(project, interrupt):
    (project.root / "chatty.py").write_text(LOGS_IN_THE_STEP)
    arms = [_arm("loud", "chatty", STEPS, CHATS, {"kind": "mock"})]
    path = _config(project, arms, "./out", metadata={}, imports=["chatty"])
    results = _until_done(path, StopAt(interrupt, 3), 2)
    [stop] = _stops(results)
    assert stop.checkpoint_step == stop.step == 3
    assert [row["step"] for row in project.metrics("loud", folder="out") if "loss" in row] == [1, 2, 3, 4, 5]


def _wait_for_steps(project, process, lines, folder="outputs"):
    logged, end = project.root / folder / "r0/logs/metrics.jsonl", time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        if logged.exists() and len(logged.read_bytes().splitlines()) >= lines:
            return
        time.sleep(0.01)
    raise AssertionError("the run did not get that far")


@pytest.fixture
def slow(project, minimal_run):
    run = minimal_run(algorithm__params={"max_steps": 120, "batch_size": 4}, backend__params={"latency_ms": 50})
    return project.config(run={**run, "eval": {"enabled": False}})


def test_ctrl_c_says_what_it_does_and_what_to_type_next(project, slow):
    logged = project.root / "outputs/r0/logs/metrics.jsonl"
    process = project.start("run", slow, "--fresh", signal_at=(logged, 3, signal.SIGINT))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "Stopping after the current step. Press Ctrl-C again to stop immediately.\n" in err
    step = project.record()["stopped_at"]["step"]
    assert 3 <= step < 120
    assert f"Stopped r0 at step {step} of 120; checkpoint saved.\nTo resume: evsys run {slow}\n" in err
    again = project.evsys("run", slow, check=True)
    assert f"Resuming hello_sft/r0 from step {step}" in again.stderr and "To resume" not in again.stderr
    assert project.record()["stopped_at"] is None and project.record()["metrics"]["steps"] == 120


def test_evsys_stop_says_what_is_saved_and_what_to_type_next(project, minimal_run):
    # So many steps that a second process has the time to start and stop it, however busy the machine is.
    params = {"max_steps": 20_000, "batch_size": 4}
    run = minimal_run(algorithm__params=params, backend__params={"latency_ms": 20})
    slow = project.config(run={**run, "eval": {"enabled": False}})
    process = project.start("run", slow)
    _wait_for_steps(project, process, 3)
    told = project.evsys("stop", "hello_sft", check=True).stdout
    process.communicate(timeout=300)
    step = project.record()["stopped_at"]["step"]
    assert f"Stopped r0 at step {step} of 20000; checkpoint saved.\nTo resume: evsys run {slow}\n" in told
    [run] = json.loads(project.evsys("status", "hello_sft", "--json", check=True).stdout)["runs"]
    assert run["stopped"] == f"Stopped r0 at step {step} of 20000; checkpoint saved."


def test_a_second_ctrl_c_ends_at_once_and_the_older_checkpoint_counts(project, minimal_run):
    params = {"max_steps": 24, "batch_size": 4, "save_every": 2}
    run = minimal_run(algorithm__params=params, backend__params={"latency_ms": 20}, eval={"enabled": False})
    path = project.config(run=run)
    logged = project.root / "outputs/r0/logs/metrics.jsonl"
    # It stops itself, so that both signals are there before it can do anything.
    process = project.start("run", path, signal_at=(logged, 3, signal.SIGSTOP))
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=300)
    note = project.record()["stopped_at"]
    assert process.returncode == 2 and note["checkpoint_step"] <= note["step"] < 24
    done = project.evsys("run", path, check=True)
    assert f"Resuming hello_sft/r0 from step {note['checkpoint_step']}" in done.stderr


def test_a_spent_budget_is_resumed_with_a_larger_one(project, minimal_run):
    run = minimal_run(algorithm__params={"max_steps": 10, "batch_size": 4}, eval={"enabled": False})
    path = project.config(run=run, budget={"steps": 4})
    first = project.evsys("run", path)
    assert "Stopped r0 at step 4 of 10; checkpoint saved.\n" in first.stderr
    assert f"To resume (with a larger budget): evsys run {path}\n" in first.stderr
    done = project.evsys("run", project.config(run=run, budget={"steps": 20}), check=True)
    assert "Resuming hello_sft/r0 from step 4" in done.stderr
