"""Evaluations outside a run, killed with SIGKILL in the middle and started again with the same command.

A verifier of the project's own writes down what it graded, and at one task waits until it is killed; nothing here
depends on how fast the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

VERIFIER = """
import os, time
from evsys_sdk import register_verifier

@register_verifier("written_down")
def written_down(model_output, expected, params):
    with open("graded.txt", "a") as file:
        file.write(expected + "\\n")
    if expected == os.environ.get("HANG_AT"):
        time.sleep(600)
    return float(len(model_output) % 2)
"""
CLIENT = """
import os, time
from evsys_sdk.backends.mock import MockSamplingClient

real = MockSamplingClient.sample

def sample(self, prompt, *args, **kwargs):
    asked = bytes(token for token in prompt.tokens if token < 256).decode(errors="replace")
    word = next(word for word in ("red", "green", "blue", "black") if word in asked)
    with open("graded.txt", "a") as file:
        file.write(word + "\\n")
    if word == os.environ.get("HANG_AT"):
        time.sleep(600)
    return real(self, prompt, *args, **kwargs)

MockSamplingClient.sample = sample
"""
WORDS = ["red", "green", "blue", "black"]


def kill_at(project, word, flags):
    """Run the command until it is at work on `word`, then SIGKILL it."""
    environ = {**os.environ, "HANG_AT": word}
    command = [sys.executable, "-m", "evsys_sdk.cli.main", *flags]
    graded = project.root / "graded.txt"
    process = subprocess.Popen(command, cwd=project.root, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        while not (graded.exists() and f"{word}\n" in graded.read_text()):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    return graded


@pytest.mark.parametrize("agent", [[], ["--agent", "chat"]], ids=["answers", "agent"])
def test_a_killed_benchmark_resumes_without_repeating_finished_rollouts(project, agent):
    if agent:
        pytest.importorskip("harbor", reason="needs the extra harbor")
    (project.root / "own.py").write_text(VERIFIER)
    project.write_tasks(fn_name="written_down")
    flags = ["benchmark", "run", "--path", "bench", "--model", "m", "--backend", "mock", "--import", "own", "--json"]
    flags += ["--n-concurrent", "1", "--max-tokens", "8", *agent]
    graded = kill_at(project, "blue", [*flags, "--output-dir", "out"])
    assert graded.read_text().split() == ["red", "green", "blue"]
    assert not (project.root / "out" / "result.json").exists()

    done = project.evsys(*flags, "--output-dir", "out", check=True)
    assert graded.read_text().split() == ["red", "green", "blue", "blue", "black"]
    assert "4 rollouts, 2 of them there from before" in done.stderr

    whole = project.evsys(*flags, "--output-dir", "whole", check=True)
    rollouts = [
        [(line["task_id"], line["completion"], line["reward"]) for line in map(json.loads, path.open())]
        for path in (project.root / "out" / "rollouts.jsonl", project.root / "whole" / "rollouts.jsonl")
    ]
    assert rollouts[0] == rollouts[1], "the result is the same as if nothing had happened"
    assert json.loads(done.stdout)["scores"] == json.loads(whole.stdout)["scores"]


def test_a_killed_model_evaluation_resumes_without_asking_again(project):
    (project.root / "own.py").write_text(CLIENT)
    project.write_rows("rows.jsonl", [{"prompt": f"say {word}", "tool_slug": word} for word in WORDS])
    (project.root / "aliases.json").write_text("{}")
    flags = [
        *("eval", "model", "--dataset", "rows.jsonl", "--aliases", "aliases.json", "--output-dir", "out"),
        *("--inference-kind", "mock", "--model-name", "m", "--import", "own", "--batch-size", "1", "--json"),
    ]
    graded = kill_at(project, "blue", flags)
    done = project.evsys(*flags, check=True)
    assert graded.read_text().split() == ["red", "green", "blue", "blue", "black"]
    summary = json.loads(done.stdout)
    assert (summary["n_rows"], summary["retry_report"]["total_calls"]) == (4, 4)
    predictions = [json.loads(line) for line in (project.root / "out" / "predictions.jsonl").open()]
    assert [line["target"] for line in predictions] == WORDS
