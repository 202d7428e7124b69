"""A hundred SIGKILLs at random moments: the records are those of an experiment that nobody disturbed."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

KILLS_PER_TEST = 25


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


def _compare(project, record_tree, runs, kills, seed, *, longest, **top):
    """Kill the experiment in one folder after the other until the kills are used up; each must end like the first."""
    project.write_tasks()
    started = time.monotonic()
    project.evsys("run", _config(project, runs, "whole", **top), check=True)
    longest = min(longest, 1.5 * (time.monotonic() - started))
    expected = record_tree(project.root / "whole/out")
    assert len(expected) > 10
    chance, left, number = random.Random(seed), kills, 0
    while left > 0:
        number += 1
        path = _config(project, runs, f"killed{number}", **top)
        left -= _killed_until_done(project, path, chance, left, longest)
        found = record_tree(project.root / f"killed{number}/out")
        assert found.keys() == expected.keys()
        for name, records in expected.items():
            assert found[name] == records, f"killed{number}: {name}"


@pytest.mark.parametrize("seed", range(100 // KILLS_PER_TEST))
def test_a_mock_experiment_killed_at_random_moments(project, record_tree, minimal_run, seed):
    runs = [
        minimal_run(
            name=f"rate{rate}",
            algorithm__params={"max_steps": 10, "batch_size": 4, "learning_rate": rate, "save_every": 3},
            backend__params={"latency_ms": 5},
        )
        for rate in (1e-3, 1e-2)
    ]
    _compare(project, record_tree, runs, KILLS_PER_TEST, seed, longest=4.0, n_repeats=2)


def test_a_local_experiment_killed_at_random_moments(project, record_tree, minimal_run):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    run = minimal_run(
        algorithm__params={"max_steps": 12, "batch_size": 4, "learning_rate": 1e-3, "save_every": 3, "lora_rank": 4},
        backend={"kind": "local", "params": {"threads": 1}},
        model={"name": "tiny-random"},
        eval={"enabled": False},
    )
    _compare(project, record_tree, [run], 10, 7, longest=12.0)
