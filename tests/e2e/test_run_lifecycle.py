from __future__ import annotations

import json
import re
import signal
import time

import pytest

from evsys_sdk import Experiment, load_yaml, run_experiment
from evsys_sdk.experiment.experiment import RunOptions


def test_the_minimal_config_of_the_reference_runs_and_learns(project):
    done = project.evsys("run", project.config())
    assert done.returncode == 0, done.stderr
    record = project.record()
    assert record["status"] == "completed" and record["error"] is None and record["traceback"] is None
    assert record["metrics"]["final_loss"] < record["metrics"]["first_loss"] / 5
    assert record["metrics"]["eval/exact_match"] == 1.0
    (score,) = record["evals"][0]["scores"]
    assert score["n_tasks"] == 24 and score["low"] < 1.0 == score["high"] and score["n_errors"] == 0


def test_the_record_says_what_the_result_depended_on(project):
    project.evsys("run", project.config(), check=True)
    environment = project.record()["environment"]
    assert environment["packages"]["evsys-sdk"] and environment["python"]
    assert len(environment["config_hash"]) == 64
    (data,) = environment["data"]
    assert data["place"] == "data" and data["rows"] == 24 and data["source"].endswith("data/train.jsonl")
    import hashlib

    assert data["sha256"] == hashlib.sha256((project.root / "data/train.jsonl").read_bytes()).hexdigest()


def test_python_and_command_line_are_one_path(project):
    path = project.config()
    project.evsys("run", path, check=True)
    from_cli = project.record()
    results = run_experiment(load_yaml(path))
    assert [r.status for r in results] == ["completed"]
    assert results[0].metrics == from_cli["metrics"]
    assert [r.metrics for r in run_experiment(str(path))] == [results[0].metrics]


def test_one_seed_repeats_exactly_and_another_differs(project, minimal_run):
    def losses(seed: int) -> list[float]:
        project.evsys("run", project.config(run=minimal_run(seed=seed)), "--fresh", check=True)
        return [row["loss"] for row in project.metrics() if "loss" in row]

    first = losses(1)
    assert len(first) == 12 and first == losses(1)
    assert first != losses(2)


def test_a_backend_that_does_not_come_up_fails_the_run_and_says_so(project, minimal_run):
    done = project.evsys("run", project.config(run=minimal_run(backend__params={"fail_on_prepare": True})))
    assert done.returncode == 2
    record = project.record()
    assert record["status"] == "failed" and "fail_on_prepare" in record["error"]
    assert "Traceback" in record["traceback"] and record["metrics"] == {}


def test_a_crash_in_training_fails_the_run_and_keeps_what_was_logged(project, minimal_run):
    done = project.evsys("run", project.config(run=minimal_run(backend__params={"fail_at_step": 3})))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    record = project.record()
    assert record["status"] == "failed" and "fail_at_step" in record["error"] and "Traceback" in record["traceback"]
    assert [row["step"] for row in project.metrics()] == [1, 2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_run_and_leaves_a_valid_record(project, minimal_run, number):
    slow = minimal_run(backend__params={"latency_ms": 30}, algorithm__params={"max_steps": 2000})
    process = project.start("run", project.config(run=slow))
    _wait_for(lambda: (project.root / "outputs/r0/logs/metrics.jsonl").exists() and len(project.metrics()) > 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2, err
    assert "Traceback" not in err
    record = project.record()
    assert record["status"] == "cancelled" and "r0: cancelled" in out


def test_what_was_trained_stays_in_the_record_when_scoring_is_interrupted(project, minimal_run):
    project.write_tasks()
    slow = minimal_run(backend__params={"latency_ms": 400}, algorithm__params={"max_steps": 1})
    entry = {"name": "colours", "path": "bench", "num_samples": 8}
    process = project.start(
        "run", project.config(run=slow, metadata={"benchmark": [{**entry, "name": f"b{i}"} for i in range(9)]})
    )
    _wait_for(lambda: (project.root / "outputs/r0/logs/artifacts.jsonl").exists())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    record = project.record()
    assert record["status"] == "cancelled" and record["metrics"]["steps"] == 1
    assert record["artifacts"]["final_checkpoint"]


SPINNING = """
from pathlib import Path
import evsys_sdk

@evsys_sdk.register_verifier("spinning")
async def spinning(model_output, expected, params):
    Path("spins").touch()
    while True:
        sum(range(100))
"""


def test_a_second_signal_in_the_midst_of_scoring_cancels_the_run_too(project, minimal_run):
    (project.root / "spinning.py").write_text(SPINNING)
    project.write_tasks(fn_name="spinning")
    entry = {"name": "colours", "path": "bench", "split": "val", "run_every": 1}
    run = minimal_run(algorithm__params={"max_steps": 3}, eval={"enabled": False})
    process = project.start("run", project.config(run=run, imports=["spinning"], metadata={"benchmark": [entry]}))
    _wait_for((project.root / "spins").exists)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 2 and "r0: cancelled" in out, err
    assert not re.search("Traceback|Task|KeyboardInterrupt", err), err
    record = project.record()
    assert (record["status"], record["traceback"]) == ("cancelled", None)
    assert record["error"] in ("stopped by the user", "interrupted")  # which signal the scoring saw first
    assert record["evals"] == []


def test_a_second_process_on_the_run_directory_is_refused_and_a_dead_one_does_not_block(project, minimal_run):
    slow = minimal_run(backend__params={"latency_ms": 30}, algorithm__params={"max_steps": 2000})
    path = project.config(run=slow)
    first = project.start("run", path)
    _wait_for(lambda: (project.root / "outputs/r0/logs/metrics.jsonl").exists())
    second = project.evsys("run", path)
    assert second.returncode == 1
    assert f"is in use by process {first.pid}" in second.stdout + second.stderr
    first.kill()
    first.communicate(timeout=300)
    third = project.evsys("run", path, "--steps", "2")
    assert third.returncode == 0, third.stderr
    assert project.record()["metrics"]["steps"] == 2


def test_an_earlier_attempt_is_set_aside_not_lost(project):
    path = project.config()
    project.evsys("run", path, check=True)
    first = project.record()["ts"]
    project.evsys("run", path, "--fresh", check=True)
    kept = json.loads((project.root / "outputs/r0/attempts/1/run_result.json").read_text())
    assert kept["ts"] == first != project.record()["ts"]


def test_failing_evaluation_never_fails_the_run(project, minimal_run):
    run = minimal_run(eval__eval_data={"path": "data/train.jsonl"})  # rows without messages still have a prompt
    run["eval"]["metrics"] = [{"kind": "pass@3"}]  # one answer per row: pass@3 cannot be had
    done = project.evsys("run", project.config(run=run))
    assert done.returncode == 0, done.stderr
    record = project.record()
    assert record["status"] == "completed"
    (score,) = record["evals"][0]["scores"]
    assert score["value"] is None and "3" in score["error"]
    assert not any(key.startswith("eval/") for key in record["metrics"])


def test_the_run_ends_with_the_weights_that_validated_best(project, minimal_run):
    project.write_tasks()
    entries = [
        {"name": "colours", "path": "bench", "split": "val", "run_every": 4, "temperature": 0, "baseline": True},
        {"name": "colours", "path": "bench", "split": "test", "temperature": 0},
    ]
    best = {"best_by": "val/colours/pass@1", "learning_rate": 1e-3, "max_steps": 14, "batch_size": 4}
    metadata = {"benchmark": entries, "allow_test_selection": True}
    path = project.config(run=minimal_run(algorithm__params=best), metadata=metadata)
    done = project.evsys("run", path, check=True)
    record = project.record()
    values = {found["step"]: found["scores"][0]["value"] for found in record["evals"] if found["split"] == "val"}
    assert list(values) == [0, 4, 8, 12] and values[0] == 0.0
    chosen = record["notes"]["best_checkpoint"]
    assert chosen["value"] == max(values.values()) and values[chosen["step"]] == chosen["value"]
    assert f"step-{chosen['step']:06d}" in record["artifacts"]["final_sampler"]
    assert record["metrics"]["val/colours/pass@1"] == record["metrics"]["test/colours/pass@1"] == chosen["value"]
    assert "(untrained 0.000 [0.000, 0.490])" in done.stdout


def test_a_phase_that_chose_its_weights_does_not_choose_for_the_phase_after_it(project, minimal_run):
    project.write_tasks()
    entry = {"name": "colours", "path": "bench", "split": "val", "run_every": 4, "temperature": 0}
    first = {"best_by": "val/colours/pass@1", "best_mode": "min", "learning_rate": 1e-3, "max_steps": 8}
    phases = [
        {"algorithm": {"kind": "sft", "params": {**first, "batch_size": 4}}},
        {"algorithm": {"kind": "sft", "params": {"learning_rate": 1e-2, "max_steps": 12, "batch_size": 4}}},
    ]
    run = minimal_run(algorithm={"kind": "combo", "params": {"phases": phases}})
    project.evsys("run", project.config(run=run, metadata={"benchmark": [entry]}), check=True)
    record = project.record()
    values = {found["step"]: found["scores"][0]["value"] for found in record["evals"] if found["split"] == "val"}
    assert list(values) == [4, 8, 12, 16, 20] and values[4] < values[20]
    assert record["metrics"]["val/colours/pass@1"] == values[20] and record["chosen_steps"] == {}


def test_weights_are_not_chosen_by_a_score_that_nobody_makes(project, minimal_run):
    project.write_tasks()
    entry = {"name": "colours", "path": "bench", "split": "val"}
    run = minimal_run(algorithm__params={"best_by": "val/colours/pass@1"})
    done = project.evsys("run", project.config(run=run, metadata={"benchmark": [entry]}))
    assert done.returncode == 1 and "run.algorithm.params.best_by" in done.stderr and "run_every" in done.stderr


def test_benchmarks_are_scored_in_the_loop_and_after(project):
    project.write_tasks()
    entries = [
        {"name": "colours", "path": "bench", "split": "val", "run_every": 5, "temperature": 0},
        {"name": "colours", "path": "bench", "split": "test", "temperature": 0, "breakdown_keys": ["n"]},
    ]
    metadata = {"benchmark": entries, "allow_test_selection": True}
    project.evsys("run", project.config(metadata=metadata), check=True)
    record = project.record()
    steps = [(e["split"], e["step"]) for e in record["evals"] if e["split"] != "eval"]
    assert steps == [("val", 5), ("val", 10), ("val", None), ("test", None)]
    assert record["metrics"]["val/colours/pass@1"] == 1.0 and record["metrics"]["test/colours/pass@1"] == 1.0
    assert set(record["evals"][3]["breakdown"]["n"]) == {"3", "4", "5"}


def test_a_failing_arm_leaves_the_others_running(project, minimal_run):
    bad = {**minimal_run(backend__params={"fail_at_step": 2}), "name": "bad"}
    good = {**minimal_run(), "name": "good"}
    done = project.evsys("run", project.config(run=None, runs=[bad, good], max_concurrent_arms=2))
    assert done.returncode == 2
    assert project.record("bad")["status"] == "failed" and project.record("good")["status"] == "completed"


def test_seeds_make_named_runs(project):
    result = Experiment.from_yaml(project.config(n_repeats=3, base_seed=7)).run()
    assert [run.run_name for run in result.runs] == ["r0__s7", "r0__s8", "r0__s9"]
    assert {project.record(f"r0__s{seed}")["seed"] for seed in (7, 8, 9)} == {7, 8, 9}


def test_a_chain_of_stages_hands_its_weights_on(project, minimal_run):
    project.write_rows("data/a.jsonl", [{"prompt": "a?", "completion": "alpha"}] * 8)
    project.write_rows("data/b.jsonl", [{"prompt": "b?", "completion": "beta"}] * 8)
    chat = [{"kind": "jsonl_to_chat"}]
    run = minimal_run(algorithm__params={"learning_rate": 3e-3, "num_epochs": 6})
    run["eval"]["eval_data"] = {"path": "data/a.jsonl"}
    del run["data"]
    run["continual"] = {
        "stages": [
            {"name": "first", "data": {"path": "data/a.jsonl", "transforms": chat}},
            {"name": "second", "data": {"path": "data/b.jsonl", "transforms": chat}},
        ]
    }
    project.evsys("run", project.config(run=run), check=True)
    record = project.record()
    assert record["metrics"]["first/final_loss"] < record["metrics"]["first/first_loss"]
    by_stage = {e["stage"]: e["scores"][0]["value"] for e in record["evals"]}
    assert by_stage == {"first": 1.0, "second": 1.0}, "the second stage began from base weights and forgot the first"
    steps = [row["step"] for row in project.metrics() if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)), "the second stage's curve goes on where the first ended"
    for stage in ("first", "second"):
        listed = json.loads((project.root / f"outputs/r0/stages/{stage}/checkpoints.json").read_text())["checkpoints"]
        assert [entry["complete"] for entry in listed] == [True]


def test_dry_rehearses_in_a_place_of_its_own(project):
    done = project.evsys("run", project.config(), "--dry", check=True)
    record = project.record(output_dir="outputs/dry")
    assert record["metrics"]["steps"] == 2 and record["evals"][0]["scores"][0]["n_tasks"] == 4
    assert not (project.root / "outputs/r0").exists(), done.stdout


def test_a_run_inside_an_event_loop_works(project):
    import asyncio

    path = project.config()

    async def notebook() -> list[str]:
        return [run.status for run in Experiment.from_yaml(path).run(RunOptions(max_steps=2)).runs]

    assert asyncio.run(notebook()) == ["completed"]


def test_an_output_directory_that_cannot_be_made_is_refused_before_anything_is_spent(project):
    (project.root / "file").write_text("")
    done = project.evsys("run", project.config(output_dir="file/outputs"))
    assert done.returncode == 1 and "output_dir file/outputs cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("room", [4096, 65536])
def test_a_disk_that_takes_no_more_is_said_and_does_not_hang(project, room):
    import resource
    import subprocess
    import sys

    def small_disk() -> None:  # every write beyond `room` bytes of a file fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    done = subprocess.run(
        [sys.executable, "-m", "evsys_sdk.cli.main", "run", str(project.config())],
        cwd=project.root, capture_output=True, text=True, timeout=300, check=False, preexec_fn=small_disk,
    )  # fmt: skip
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert re.search("too large|disk i/o error|disk is full", (done.stdout + done.stderr).lower())
    left = [path.name for path in (project.root / "outputs").rglob("*.part")]
    assert left == [], "half-written files stay behind"


def _wait_for(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("waited in vain")
