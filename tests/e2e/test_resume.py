"""A run that was killed goes on where its last checkpoint stands, and ends as if nothing had happened."""

from __future__ import annotations

import csv
import json
import random
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import pytest

CLOCKS = ("ts", "step_seconds", "tokens_per_second", "seconds", "started")


def _without_clocks(row):
    return {key: value for key, value in row.items() if key.rsplit("/", 1)[-1] not in CLOCKS}


def _lines(path: Path):
    return [_without_clocks(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _facts(folder: Path):
    """Everything a run leaves that does not tell the time or the place."""
    result = json.loads((folder / "run_result.json").read_text())
    evals = sorted((_without_clocks(found) for found in result["evals"]), key=lambda e: (e["split"], e["step"] or 0))
    weights = Path(result["artifacts"]["final_checkpoint"])
    logs = folder / "logs"
    return {
        "status": result["status"],
        "metrics": result["metrics"],
        "evals": evals,
        "warnings": result["warnings"],
        "steps": [row for row in _lines(logs / "metrics.jsonl") if "loss" in row],
        "scores": sorted(map(str, (row for row in _lines(logs / "metrics.jsonl") if "loss" not in row))),
        "logger": _lines(logs / "training/metrics.jsonl"),
        "rollouts": len(_lines(logs / "training/rollouts.jsonl")),
        "tries": sorted(row["task_id"] for row in _lines(logs / "validation/rollouts.jsonl")),
        "csv": _table(logs / "metrics.csv"),
        "weights": _contents(weights),
    }


def _table(path: Path):
    with open(path, newline="") as handle:
        return sorted(str(_without_clocks(row)) for row in csv.DictReader(handle))


def _contents(path: Path):
    if path.is_file():
        return path.read_bytes()
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def _kill_at(project, path, lines, *, number=signal.SIGKILL) -> int:
    """Run the config until its metrics have so many lines, then send the signal; returns the exit code."""
    logged = project.root / "outputs/r0/logs/metrics.jsonl"
    process = project.start("run", path, signal_at=(logged, lines, number))
    process.communicate(timeout=300)
    return process.returncode


def _kill_when(project, path, ready) -> int:
    process = project.start("run", path)
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None and not ready():
        time.sleep(0.002)
    process.kill()
    process.communicate(timeout=300)
    return process.returncode


CALLBACKS = [{"kind": "local_logger"}, {"kind": "csv_metrics"}]


def _benchmark(project):
    project.write_tasks()
    return {
        "benchmark": [
            {"name": "colours", "path": "bench", "split": "val", "run_every": 3, "temperature": 0, "baseline": True},
            {"name": "colours", "path": "bench", "split": "test", "temperature": 0},
        ],
        "allow_test_selection": True,
    }


def _both(project, run, *, kills, output="outputs", **top):
    """The run without and with kills; returns the facts of both."""
    whole = project.config(name="whole.yaml", run=run, callbacks=CALLBACKS, output_dir="./whole", **top)
    project.evsys("run", whole, check=True)
    path = project.config(run=run, callbacks=CALLBACKS, **top)
    for lines in kills:
        assert _kill_at(project, path, lines) == -signal.SIGKILL, "the run ended before it could be killed"
    done = project.evsys("run", path)
    assert done.returncode == 0, done.stdout + done.stderr
    return _facts(project.root / "whole/r0"), _facts(project.root / "outputs/r0"), done


def _lines_of(path: Path):
    try:
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        return []


def test_killed_twice_and_resumed_is_the_same_run(project, minimal_run):
    run = minimal_run(
        algorithm__params={"max_steps": 40, "batch_size": 4, "learning_rate": 1e-3, "save_every": 5},
        backend__params={"latency_ms": 10},
    )
    whole, resumed, done = _both(project, run, kills=[12, 30], metadata=_benchmark(project))
    assert "Resuming hello_sft" in done.stderr
    assert whole == resumed
    assert len(resumed["steps"]) == 40 and resumed["metrics"]["val/colours/pass@1"] == 1.0


def test_rl_resumes_with_its_rollouts_and_totals(project, minimal_run):
    project.write_tasks("tasks.jsonl")
    run = minimal_run(
        algorithm={"kind": "rl", "params": {"max_steps": 12, "batch_size": 2, "num_samples": 4, "save_every": 4,
                                            "max_tokens": 8, "learning_rate": 1e-2, "drop_constant_reward": False}},
        backend__params={"latency_ms": 10},
        data={"path": "tasks.jsonl"},
        eval={"enabled": False},
    )  # fmt: skip
    whole, resumed, _ = _both(project, run, kills=[6])
    assert whole == resumed
    assert resumed["rollouts"] == 12 * 8


def test_a_chain_resumes_in_the_stage_it_was_killed_in(project, minimal_run):
    project.write_rows(
        "data/second.jsonl", [{"prompt": f"shout {w}", "completion": w.upper()} for w in ("a", "b", "c")]
    )
    chat = [{"kind": "jsonl_to_chat", "params": {}}]
    stages = [
        {"name": "first", "data": {"path": "data/train.jsonl", "transforms": chat}},
        {"name": "second", "data": {"path": "data/second.jsonl", "transforms": chat}},
    ]
    run = minimal_run(
        algorithm__params={"max_steps": 10, "batch_size": 4, "learning_rate": 1e-3, "save_every": 4},
        backend__params={"latency_ms": 10},
        continual={"stages": stages},
    )
    run.pop("data")
    run["eval"] = {"enabled": False}
    whole, resumed, _ = _both(project, run, kills=[6, 25], metadata=_benchmark(project))
    assert whole == resumed and len(resumed["steps"]) == 20


def test_combo_resumes_in_the_phase_it_was_killed_in(project, minimal_run):
    params = {"max_steps": 8, "batch_size": 4, "learning_rate": 1e-3, "save_every": 3}
    phases = [{"name": name, "algorithm": {"kind": "sft", "params": params}} for name in ("one", "two")]
    run = minimal_run(
        algorithm={"kind": "combo", "params": {"phases": phases}},
        backend__params={"latency_ms": 10},
        eval={"enabled": False},
    )
    whole, resumed, _ = _both(project, run, kills=[13])
    assert whole == resumed and resumed["metrics"]["steps"] == 16


def test_ctrl_c_is_taken_up_too_and_fresh_begins_anew(project, minimal_run):
    run = minimal_run(
        algorithm__params={"max_steps": 30, "save_every": 2, "batch_size": 4}, backend__params={"latency_ms": 10}
    )
    path = project.config(run=run)
    assert _kill_at(project, path, 6, number=signal.SIGINT) == 2
    assert project.record()["status"] == "cancelled"
    fresh = project.evsys("run", path, "--fresh", "--steps", "2")
    assert "Resuming" not in fresh.stderr and project.record()["metrics"]["steps"] == 2
    shutil.rmtree(project.root / "outputs")
    assert _kill_at(project, path, 6, number=signal.SIGINT) == 2
    again = project.evsys("run", path)
    assert "Resuming hello_sft" in again.stderr and project.record()["metrics"]["steps"] == 30


def test_weights_that_somebody_removed_are_not_gone_on_from(project, minimal_run):
    run = minimal_run(
        algorithm__params={"max_steps": 20, "save_every": 2, "batch_size": 4}, backend__params={"latency_ms": 10}
    )
    path = project.config(run=run)
    assert _kill_at(project, path, 8) == -signal.SIGKILL
    shutil.rmtree(project.root / "outputs/r0/weights")
    done = project.evsys("run", path, check=True)
    assert "Resuming" not in done.stderr and project.record()["metrics"]["steps"] == 20


def test_strict_does_not_blame_a_resumed_run_for_what_was_read_before(project, minimal_run):
    project.write_tasks("tasks.jsonl")
    run = minimal_run(
        algorithm={"kind": "rl", "params": {"max_steps": 3, "batch_size": 2, "num_samples": 2, "max_tokens": 8,
                                            "temperature": 1.0, "drop_constant_reward": False}},
        backend__params={"latency_ms": 30},
        data={"path": "tasks.jsonl"},
        model={"name": "any"},
        eval={"enabled": False},
    )  # fmt: skip
    path = project.config(run=run, metadata=_benchmark(project))
    final = project.root / "outputs/r0/checkpoints.json"
    _kill_when(project, path, lambda: final.exists() and '"final": true' in final.read_text())
    done = project.evsys("run", path, "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


DEADLY = """
import os, signal
import evsys_sdk
from evsys_sdk.record.log_stores import JsonlLogStore

def die_once(where, step):
    if step == 3 and os.path.exists(where):
        os.remove(where)
        os.kill(os.getpid(), signal.SIGKILL)

@evsys_sdk.register_log_store("deadly")
class Deadly(JsonlLogStore):
    def log_metrics(self, metrics, step):
        die_once("die in the log store", step)
        super().log_metrics(metrics, step)

@evsys_sdk.register_callback("spy")
class Spy:
    def on_run_start(self, ctx):
        self.told = open(ctx.output_dir / "told.txt", "w")

    def on_step(self, ctx, step, metrics):
        print("step", step, file=self.told, flush=True)
        die_once("die in on_step", step)

    def on_checkpoint(self, ctx, step, path):
        print("checkpoint", step, file=self.told, flush=True)
        die_once("die in on_checkpoint", step)
"""


@pytest.mark.parametrize("where", ["nowhere", "die in the log store", "die in on_step", "die in on_checkpoint"])
def test_a_checkpoint_is_told_after_its_step_also_when_it_is_told_again(project, minimal_run, where):
    (project.root / "deadly.py").write_text(DEADLY)
    (project.root / where).write_text("")
    run = minimal_run(algorithm__params={"max_steps": 4, "batch_size": 4, "save_every": 3}, eval={"enabled": False})
    store = {"kind": "deadly", "params": {"log_dir": "outputs/r0/logs"}}
    path = project.config(run=run, imports=["deadly"], callbacks=[{"kind": "spy"}], log_store=store)
    if where != "nowhere":
        assert project.evsys("run", path).returncode == -signal.SIGKILL
    done = project.evsys("run", path, check=True)
    assert where == "nowhere" or "r0 from step 3" in done.stderr
    told = (project.root / "outputs/r0/told.txt").read_text().splitlines()
    assert told == ["step 1", "step 2", "step 3", "checkpoint 3", "step 4", "checkpoint 4"]
    assert [row["step"] for row in project.metrics() if "loss" in row] == [1, 2, 3, 4]


COUNTING = """
import os, time
import evsys_sdk

@evsys_sdk.register_verifier("slow_and_counted")
def slow_and_counted(model_output, expected, params):
    with open(params["file"], "a") as handle:
        handle.write(expected + "\\n")
    time.sleep(0.01)
    return float(model_output.strip() == expected)
"""


@pytest.mark.parametrize("where", ["of the untrained model", "of the trained model", "in run.eval"])
def test_a_half_finished_evaluation_resumes_without_repeating_a_rollout(project, minimal_run, where):
    (project.root / "counting.py").write_text(COUNTING)
    counted = project.root / "counted"
    words = [f"word{number}" for number in range(120)]
    verifier = {"kind": "in_process", "fn_name": "slow_and_counted", "params": {"file": str(counted)}}
    tasks = [{"task_id": w, "instruction": w, "verifier": {**verifier, "expected": w}, "metadata": {}} for w in words]
    project.write_rows("bench/tasks.jsonl", tasks)
    entry = {"name": "words", "path": "bench", "split": "test", "temperature": 0}
    run = minimal_run(algorithm__params={"max_steps": 2}, eval={"enabled": False})
    top = {"imports": ["counting"], "metadata": {"benchmark": [{**entry, "baseline": "untrained" in where}]}}
    if where == "in run.eval":
        top["metadata"] = {}
        run["eval"] = {
            "enabled": True,
            "eval_data": {"path": "bench/tasks.jsonl"},
            "metrics": [{"kind": "mean_reward"}],
        }
    path = project.config(run=run, callbacks=CALLBACKS, **top)
    assert _kill_when(project, path, lambda: len(_lines_of(counted)) >= 80) == -signal.SIGKILL
    [journal] = (project.root / "outputs").glob("*.journal.sqlite")
    with sqlite3.connect(journal) as db:
        kept = [json.loads(row[0]) for row in db.execute("SELECT data FROM events WHERE kind = 'rollout'")]
    before = len(_lines_of(counted))
    done = project.evsys("run", path)
    assert done.returncode == 0, done.stdout + done.stderr
    again = [line.decode() for line in _lines_of(counted)[before:]]
    finished = {rollout["task_id"].split("(")[-1].rstrip(")") for rollout in kept}
    assert len(finished) >= 10 and not finished & set(again[: len(words) - len(finished)])
    result = json.loads((project.root / "outputs/r0/run_result.json").read_text())
    assert [score["n_tasks"] for found in result["evals"] for score in found["scores"]] == [120] * len(result["evals"])
    rollouts = _lines(project.root / f"outputs/r0/logs/{'eval' if 'run.eval' in where else 'test'}/rollouts.jsonl")
    assert sorted(row["task_id"].split("(")[-1].rstrip(")") for row in rollouts) == sorted(words * len(result["evals"]))


def test_a_moved_output_directory_resumes_from_its_own_files(project, minimal_run):
    run = minimal_run(
        algorithm__params={"max_steps": 20, "save_every": 2, "batch_size": 4}, backend__params={"latency_ms": 10}
    )
    path = project.config(run=run)
    assert _kill_at(project, path, 8) == -signal.SIGKILL
    (project.root / "outputs").rename(project.root / "moved")
    done = project.evsys("run", project.config(run=run, output_dir="./moved"), check=True)
    assert "Resuming hello_sft" in done.stderr and str(project.root / "moved") in done.stderr


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_at_any_moment(project, minimal_run, seed):
    run = minimal_run(
        algorithm__params={"max_steps": 15, "batch_size": 4, "learning_rate": 1e-3, "save_every": 2},
        backend__params={"latency_ms": 4},
    )
    metadata = _benchmark(project)
    whole = project.config(name="whole.yaml", run=run, callbacks=CALLBACKS, output_dir="./whole", metadata=metadata)
    project.evsys("run", whole, check=True)
    path = project.config(run=run, callbacks=CALLBACKS, metadata=metadata)
    moment = time.monotonic() + 0.3 + random.Random(seed).random()
    _kill_when(project, path, lambda: time.monotonic() > moment)
    done = project.evsys("run", path)
    assert done.returncode == 0, done.stderr
    assert _facts(project.root / "whole/r0") == _facts(project.root / "outputs/r0")


def test_an_interrupted_local_run_ends_with_bit_equal_weights(project, minimal_run):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    run = minimal_run(
        algorithm__params={"max_steps": 14, "batch_size": 4, "learning_rate": 1e-3, "save_every": 3, "lora_rank": 4},
        backend={"kind": "local", "params": {"threads": 1}},
        model={"name": "tiny-random"},
        eval={"enabled": False},
    )
    whole, resumed, done = _both(project, run, kills=[5, 8])
    assert "Resuming hello_sft" in done.stderr
    assert whole["weights"].keys() == resumed["weights"].keys() and len(whole["weights"]) > 1
    assert whole == resumed
