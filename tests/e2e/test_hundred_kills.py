"""A hundred SIGKILLs at random moments: the records are those of an experiment that nobody disturbed."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

KILLS_PER_TEST = 25


def _killed_until_done(project, path, chance: random.Random, kills: int, longest: float) -> int:
    """Run the experiment, killing it after a random time, until it gets through or `kills` are used up."""
    used = 0
    while used < kills:
        process = project.start("run", path)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=chance.uniform(0.1, longest))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
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
        metadata={"benchmark": entries, "success_metric": "val.pass@1", "allow_test_selection": True},
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
        # A workspace of its own for each: a conclusion says how many experiments have been selected on these tasks.
        shutil.rmtree(project.root / ".evsys", ignore_errors=True)
        left -= _killed_until_done(project, path, chance, left, longest)
        found = record_tree(project.root / f"killed{number}/out")
        assert found.keys() == expected.keys()
        for name, records in expected.items():
            assert found[name] == records, f"killed{number}: {name}"


PARAMS = {"max_steps": 10, "batch_size": 4, "save_every": 3}


def _plain_arms(minimal_run):
    return [
        minimal_run(
            name=f"rate{rate}",
            algorithm__params=PARAMS | {"learning_rate": rate},
            backend__params={"latency_ms": 5},
        )
        for rate in (1e-3, 1e-2)
    ]


def _staged_arms(minimal_run):
    """A chain of two stages, and a combo of two phases."""
    sft = {"kind": "sft", "params": PARAMS | {"max_steps": 8}}
    phases = {"phases": [{"name": "one", "algorithm": sft}, {"name": "two", "algorithm": sft}]}
    combo = minimal_run(name="combo", algorithm={"kind": "combo", "params": phases}, backend__params={"latency_ms": 5})
    chain = minimal_run(name="chain", algorithm=sft, backend__params={"latency_ms": 5})
    stages = [{"name": name, "data": chain["data"]} for name in ("first", "then")]
    return [combo, {key: value for key, value in chain.items() if key != "data"} | {"continual": {"stages": stages}}]


@pytest.mark.parametrize("seed", range(100 // KILLS_PER_TEST))
def test_a_mock_experiment_killed_at_random_moments(project, record_tree, minimal_run, seed):
    runs = _staged_arms(minimal_run) if seed % 2 else _plain_arms(minimal_run)
    _compare(project, record_tree, runs, KILLS_PER_TEST, seed, longest=4.0, n_repeats=2)


def test_a_stage_that_was_gone_on_with_tells_nothing_twice(project, record_tree, minimal_run):
    project.write_tasks()
    runs = _staged_arms(minimal_run)
    project.evsys("run", _config(project, runs, "whole", budget={"steps": 100}), check=True)
    stopped = _config(project, runs, "stopped", budget={"steps": 5}, max_concurrent_arms=2)
    assert project.evsys("run", stopped).returncode == 2
    project.evsys("run", _config(project, runs, "stopped", budget={"steps": 100}), check=True)
    expected, found = (record_tree(project.root / folder / "out") for folder in ("whole", "stopped"))
    for run in ("combo", "chain"):
        of_its_own = ("run_result.json", "checkpoints.json")  # a run that is stopped leaves a checkpoint there
        names = [name for name in expected if name.startswith(f"{run}/") and not name.endswith(of_its_own)]
        assert len(names) > 5 and {name: found[name] for name in names} == {name: expected[name] for name in names}


def test_a_local_experiment_killed_at_random_moments(project, record_tree, minimal_run):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    project.write_rows("data/asked.jsonl", [{"prompt": f"say {word}", "pattern": "o|s"} for word in ("red", "green")])
    on_local = {
        "backend": {"kind": "local", "params": {"threads": 1}},
        "model": {"name": "tiny-random"},
        "eval": {"enabled": False},
    }
    params = {"batch_size": 2, "learning_rate": 1e-3, "save_every": 3, "lora_rank": 4}
    sft = minimal_run(name="sft", algorithm__params=params | {"max_steps": 12}, **on_local)
    rl = minimal_run(
        name="rl",
        algorithm={"kind": "rl", "params": params | {"max_steps": 8, "num_samples": 6, "max_tokens": 8}},
        data={
            "path": "data/asked.jsonl",
            "transforms": [{"kind": "to_harbor_task", "params": {"fn_name": "regex_match", "expected_key": "pattern"}}],
        },
        **on_local,
    )
    _compare(project, record_tree, [sft, rl], 10, 7, longest=12.0)
    rewards = [row["reward/mean"] for row in project.metrics("rl", folder="whole/out") if "reward/mean" in row]
    assert len(rewards) == 8 and any(0 < reward < 1 for reward in rewards), "something was learnt from"
