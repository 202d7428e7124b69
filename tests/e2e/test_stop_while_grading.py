"""A stop while rollouts are graded: a pattern that hangs holds nothing up, and an evaluation is resumed."""

from __future__ import annotations

import signal
import time
from contextlib import suppress

import psutil
import pytest

# Nothing on the empty text, which `validate` tries; on any other, more ways than there is time for.
CHOICES = "." + "(?:a?|b?)" * 60 + "!"
RL = {"max_steps": 4, "batch_size": 4, "num_samples": 2, "max_tokens": 6, "learning_rate": 1e-3}


def _hanging(project, minimal_run, where):
    rows = [
        {
            "task_id": word,
            "instruction": f"say {word}",
            "verifier": {"kind": "in_process", "fn_name": "regex_match", "expected": CHOICES},
        }
        for word in ("red", "green", "blue", "black", "white", "grey")
    ]
    project.write_rows("bench/tasks.jsonl", rows)
    if where == "training":
        run = minimal_run(algorithm={"kind": "rl", "params": RL}, data={"path": "bench/tasks.jsonl"})
        top = {}
    else:
        run = minimal_run(algorithm__params={"max_steps": 2, "batch_size": 4})
        top = {"metadata": {"benchmark": [{"name": "slow", "path": "bench", "split": "val", "num_samples": 8}]}}
    return project.config(run={**run, "eval": {"enabled": False}}, **top)


def _wait_for_a_pattern(process):
    """Until a worker is at a match that does not end. Without one, the run itself is: the stop will tell."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        for child in psutil.Process(process.pid).children():
            with suppress(psutil.NoSuchProcess):
                if "pattern_worker.py" in " ".join(child.cmdline()) and child.cpu_times().user > 0.5:
                    return
        time.sleep(0.05)


def _twice(project, process):
    process.send_signal(signal.SIGINT)
    # The kernel makes one of two that come at once: the second is sent when the first was heard.
    assert any("Stopping after the current step" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)


def _terminate(project, process):
    process.send_signal(signal.SIGTERM)


def _stop_now(project, process):
    said = project.evsys("stop", "hello_sft", "--now", "--timeout", "60", check=True)
    assert "has stopped" in said.stdout


@pytest.mark.parametrize("stop", [_twice, _terminate, _stop_now])
@pytest.mark.parametrize("where", ["training", "benchmark"])
def test_a_run_whose_verifier_hangs_can_be_stopped(project, minimal_run, where, stop):
    process = project.start("run", _hanging(project, minimal_run, where))
    try:
        _wait_for_a_pattern(process)
        stop(project, process)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 2, err
    assert project.record()["status"] == "cancelled"


SLOW = """
import asyncio, os
from evsys_sdk import register_verifier

@register_verifier("slow")
async def slow(completion: str, expected: str) -> float:
    with open("graded.txt", "a") as file:
        file.write("x")
    await asyncio.sleep(float(os.environ.get("SLOW_SECONDS", "0")))
    return float(completion.strip() == expected)
"""


@pytest.mark.parametrize("when", ["baseline", "in the loop", "after training"])
def test_a_first_ctrl_c_does_not_wait_for_an_evaluation_which_is_resumed(project, minimal_run, monkeypatch, when):
    plan = {"kind": "in_process", "fn_name": "slow", "expected": "red"}
    tasks = [{"task_id": f"t{n}", "instruction": f"say red {n} times", "verifier": plan} for n in range(60)]
    project.write_rows("bench/tasks.jsonl", tasks)
    (project.root / "slow.py").write_text(SLOW)
    graded = project.root / "graded.txt"
    asked = {"baseline": {"baseline": True}, "in the loop": {"run_every": 2}, "after training": {}}[when]
    entry = {"name": "long", "path": "bench", "split": "val", "num_samples": 2, "n_concurrent": 2, **asked}
    # Early stopping waits for the scores: the loop stands still meanwhile.
    stopping = {"kind": "early_stopping", "params": {"metric": "val.pass@1", "patience": 9}}
    run = minimal_run(algorithm__params={"max_steps": 4, "batch_size": 4}, eval={"enabled": False})
    callbacks = [stopping] if when == "in the loop" else []

    def config(folder):
        about = {"metadata": {"benchmark": [entry]}, "imports": ["slow"], "callbacks": callbacks}
        return project.config(run=run, output_dir=folder, name=f"{folder}.yaml", **about)

    monkeypatch.setenv("SLOW_SECONDS", "0.3")
    process = project.start("run", config("stopped"))
    try:
        while process.poll() is None and not (graded.exists() and graded.stat().st_size >= 20):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 2 and "To resume" in err, err
    record, before = project.record(output_dir="stopped"), graded.stat().st_size
    assert record["status"] == "cancelled" and record["evals"] == [] and before < 120
    monkeypatch.setenv("SLOW_SECONDS", "0")
    project.evsys("run", config("stopped"), check=True)
    resumed = graded.stat().st_size - before
    project.evsys("run", config("whole"), check=True)
    whole = graded.stat().st_size - before - resumed
    assert resumed <= whole - 15, "what was graded before the stop is not graded again"
    scores = [[eval_["scores"] for eval_ in project.record(output_dir=name)["evals"]] for name in ("stopped", "whole")]
    assert scores[0] == scores[1] and len(scores[0]) == {"baseline": 2, "in the loop": 2, "after training": 1}[when]
