"""A key that something echoes reaches no file and no terminal; escape sequences reach a terminal as text only."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

BY_VALUE = "quite-plain-value-4711"
BY_SET = "given-by-set-0815"
AS_ENV_NAME = "zz9 given as env name"
IN_URL = "pa55word-in-url"
BY_SHAPE = "sk-proj-Abc123def456ghi789"
ALL = (BY_VALUE, BY_SET, AS_ENV_NAME, IN_URL, BY_SHAPE)

HOSTILE = '''
"""Everything here fails and says too much."""
from evsys_sdk import register_verifier

KEYS = {keys!r}

@register_verifier("leaky")
def leaky(completion, expected, **params):
    if expected == "red":
        raise RuntimeError("401 for " + " and ".join(KEYS))
    return 0.0
'''


def files_with(root: Path, words: tuple[str, ...]) -> list[str]:
    """Every file below the output, hidden ones and databases included, that holds one of the words."""
    found = []
    for path in root.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            found += [f"{path.relative_to(root)}: {word}" for word in words if word.encode() in content]
    return found


@pytest.fixture
def hostile(project: Any, minimal_run: Any) -> Path:
    (project.root / "leaky_code.py").write_text(HOSTILE.format(keys=list(ALL)))
    project.write_tasks(fn_name="leaky")
    run = minimal_run(eval__inference={"kind": "openai", "params": {
        "model": "m", "base_url": f"http://ann:{IN_URL}@127.0.0.1:9/v1", "api_key_env": "ODD_NAME", "max_retries": 0,
    }})  # fmt: skip
    run["eval"]["n_samples"] = 2
    entry = {"name": "tools", "path": "bench/tasks.jsonl", "split": "val", "run_every": 6}
    config = {
        "version": 1,
        "name": "leaks",
        "output_dir": "./outputs",
        "imports": ["leaky_code"],
        "callbacks": [{"kind": "local_logger"}],
        "metadata": {"benchmark": [entry], "hypothesis": f"{BY_SHAPE} works \x1b[2J"},
        "run": run,
    }
    path: Path = project.root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_key_that_is_echoed_reaches_no_file_and_no_stream(project, hostile):
    environ = {"ODD_NAME": BY_VALUE, "PYTHONPATH": str(project.root), "EVSYS_LOGGING_LEVEL": "DEBUG"}
    settings = ("--set", f"metadata.api_key={BY_SET}", "--set", f"metadata.judge_key_env={AS_ENV_NAME}")
    done = project.evsys("run", hostile, *settings, **environ)
    assert "r0: completed" in done.stdout and (project.root / "outputs/leaks.experiment_result.json").is_file()
    assert not [word for word in ALL if word in done.stdout + done.stderr]
    leaked = files_with(project.root / "outputs", ALL) + files_with(project.root / ".evsys", ALL)
    assert leaked == []
    journal = (project.root / "outputs/leaks.journal.sqlite").read_bytes()
    assert b"401 for [redacted] and [redacted]" in journal
    for verb in (
        ("show", "leaks"),
        ("rollouts", "leaks", "--limit", "0"),
        ("status", "leaks"),
        ("context",),
        ("logs", "leaks"),
    ):
        told = project.evsys(*verb, **environ)
        assert not [word for word in ALL if word in told.stdout + told.stderr]
    again = project.evsys("run", hostile, *settings, **environ)  # the same settings are the same experiment
    assert "launched with other settings" not in again.stderr


def test_a_sweep_ends_with_a_table_of_its_arms_on_a_terminal(project, minimal_run):
    project.write_tasks()
    entry = {"name": "tools", "path": "bench/tasks.jsonl", "split": "val"}
    config = {
        "version": 1,
        "name": "sweep",
        "output_dir": "./outputs",
        "metadata": {"benchmark": [entry], "success_metric": "val/tools/pass@1"},
        "base_run": minimal_run(eval__enabled=False),
        "matrix": {"axes": {"algorithm.params.learning_rate": [1e-5, 1e-2]}},
    }
    path = project.root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    told = re.sub("\x1b\\[[0-9;]*m", "", on_a_terminal(project, "run", str(path)))
    head, best, base = next(
        told.splitlines()[place : place + 3] for place, line in enumerate(told.splitlines()) if "vs baseline" in line
    )
    assert head.split() == ["arm", "pass@1", "95", "%", "CI", "vs", "baseline", "verdict", "seeds"]
    assert best.split()[:4] == ["*", "…0p01", "100.0", "%"] and "+100.0 points" in best
    assert base.split()[:3] == ["…1e-05", "0.0", "%"] and "baseline" in base
    assert "* best arm" in told and "next: evsys show sweep" in told


def on_a_terminal(project: Any, *arguments: str) -> str:
    """What the command writes to a terminal of its own."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "evsys_sdk.cli.main", *arguments],
        cwd=project.root, stdout=follower, stderr=follower, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    process.wait(timeout=60)
    return shown.decode(errors="replace")


CLEAR = "\x1b[2J\x1b]0;owned\x07"


def test_escape_sequences_of_others_reach_a_terminal_as_text(project, minimal_run):
    rows = [{"prompt": f"say {word}", "completion": f"{CLEAR}{word}"} for word in ("red", "blue")] * 12
    project.write_rows("data/train.jsonl", rows)
    task = {"task_id": f"red{CLEAR}", "instruction": f"say {CLEAR} red", "metadata": {"kind": CLEAR},
            "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": f"{CLEAR}red"}}  # fmt: skip
    project.write_rows("bench/tasks.jsonl", [task])
    entry = {"name": "tools", "path": "bench/tasks.jsonl", "split": "val", "breakdown_keys": ["kind"]}
    config = {
        "version": 1,
        "name": "escapes",
        "output_dir": "./outputs",
        "metadata": {"benchmark": [entry], "hypothesis": f"it works {CLEAR}", "tags": [CLEAR]},
        "run": minimal_run(eval__enabled=False, algorithm__params__num_epochs=12),
    }
    path = project.root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    attacks = ("\x1b[2J", "\x1b]0;", "\x07")
    for verb in (("run", str(path)), ("show",), ("rollouts",), ("rollouts", "--json"), ("history",), ("context",),
                 ("status", "escapes"), ("logs", "escapes"), ("data", "preview", "data/train.jsonl"),
                 ("rollouts", "--task", CLEAR), ("run", f"no{CLEAR}such.yaml"), (f"ve{CLEAR}rb",)):  # fmt: skip
        told = on_a_terminal(project, *verb)
        assert not [attack for attack in attacks if attack in told], verb
    assert "\\u001b[2J\\u001b]0;owned\\u0007red" in on_a_terminal(project, "rollouts")
