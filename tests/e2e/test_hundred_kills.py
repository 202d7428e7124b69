"""A hundred SIGKILLs at random moments: the records are those of an experiment that nobody disturbed."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import re
import signal
import time
from pathlib import Path

import pytest

CLOCKS = {"ts", "step_seconds", "tokens_per_second", "seconds", "started", "time_per_task"}
NOT_COMPARED = ("attempts", "weights", "checkpoints.json")
"""Earlier attempts, and files whose names are drawn by lot; final weights are compared where a record names them."""
KILLS_PER_TEST = 25


def _scrubbed(value, root: Path):
    """Without clock readings; a path of weights as the hash of what lies there, any other path without its root."""
    if isinstance(value, dict):
        return {key: _scrubbed(inner, root) for key, inner in value.items() if str(key).split("/")[-1] not in CLOCKS}
    if isinstance(value, list):
        return [_scrubbed(inner, root) for inner in value]
    if isinstance(value, str) and str(root) in value and "weights" in Path(value).parts:
        return _content(Path(value))
    return _placeless(value, root) if isinstance(value, str) else value


def _placeless(text: str, root: Path) -> str:
    return text.replace(str(root), "").replace(str(root.relative_to(Path.cwd())), "")


def _content(path: Path) -> str:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _tree(folder: Path):
    """Every record below `folder`, by its path."""
    found = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if not file.is_file() or ".sqlite" in file.name or file.name.startswith("."):
            continue
        if any(part in NOT_COMPARED for part in inside.parts):
            continue
        found[str(inside)] = _records(file, folder)
    return found


def _records(file: Path, root: Path):
    if file.suffix == ".png":
        return hashlib.sha256(file.read_bytes()).hexdigest()
    text = file.read_text()
    if file.suffix == ".json":
        return _scrubbed(json.loads(text), root)
    if file.suffix == ".jsonl":  # scores of the loop arrive beside the steps, in whatever order
        return sorted(json.dumps(_scrubbed(json.loads(line), root), sort_keys=True) for line in text.splitlines())
    if file.suffix == ".csv":
        return sorted(str(_scrubbed(row, root)) for row in csv.DictReader(text.splitlines()))
    return _placeless(re.sub(r"\d+(\.\d+)? s\b", "", text), root)


def _killed_until_done(project, path, chance: random.Random, kills: int, longest: float) -> int:
    """Run the experiment, killing it after a random time, until it gets through or `kills` are used up."""
    used = 0
    while used < kills:
        process = project.start("run", path)
        end = time.monotonic() + chance.uniform(0.1, longest)
        while time.monotonic() < end and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        if process.returncode == 0:
            return used
        assert process.returncode == -signal.SIGKILL, "a run that is taken up again must not fail"
        used += 1
    project.evsys("run", path, check=True)
    return used


def _config(project, runs, output_dir, **top):
    entries = [
        {"name": "colours", "path": "bench", "split": "val", "run_every": 4, "temperature": 0.5, "baseline": True},
        {"name": "colours", "path": "bench", "split": "test", "num_samples": 2, "breakdown_keys": ["n"]},
    ]
    return project.config(
        name=f"{Path(output_dir).name}.yaml",
        run=None,
        runs=runs,
        output_dir=f"./{output_dir}/out",
        callbacks=[{"kind": "local_logger"}, {"kind": "csv_metrics"}],
        metadata={"benchmark": entries, "success_metric": "val.pass@1"},
        **top,
    )


def _compare(project, runs, kills, seed, *, longest, **top):
    """Kill the experiment in one folder after the other until the kills are used up; each must end like the first."""
    project.write_tasks()
    started = time.monotonic()
    project.evsys("run", _config(project, runs, "whole", **top), check=True)
    longest = min(longest, 1.5 * (time.monotonic() - started))
    expected = _tree(project.root / "whole/out")
    assert len(expected) > 10
    chance, left, number = random.Random(seed), kills, 0
    while left > 0:
        number += 1
        path = _config(project, runs, f"killed{number}", **top)
        left -= _killed_until_done(project, path, chance, left, longest)
        found = _tree(project.root / f"killed{number}/out")
        assert found.keys() == expected.keys()
        for name, records in expected.items():
            assert found[name] == records, f"killed{number}: {name}"


@pytest.mark.parametrize("seed", range(100 // KILLS_PER_TEST))
def test_a_mock_experiment_killed_at_random_moments(project, minimal_run, seed):
    runs = [
        minimal_run(
            name=f"rate{rate}",
            algorithm__params={"max_steps": 10, "batch_size": 4, "learning_rate": rate, "save_every": 3},
            backend__params={"latency_ms": 5},
        )
        for rate in (1e-3, 1e-2)
    ]
    _compare(project, runs, KILLS_PER_TEST, seed, longest=4.0, n_repeats=2)


def test_a_local_experiment_killed_at_random_moments(project, minimal_run):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    run = minimal_run(
        algorithm__params={"max_steps": 12, "batch_size": 4, "learning_rate": 1e-3, "save_every": 3, "lora_rank": 4},
        backend={"kind": "local", "params": {"threads": 1}},
        model={"name": "tiny-random"},
        eval={"enabled": False},
    )
    _compare(project, [run], 10, 7, longest=12.0)
