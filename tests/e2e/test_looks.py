"""Looking at one question again and again is counted, and widens what the verdict says."""

from __future__ import annotations

import json

import pytest
import yaml

from evsys_sdk.experiment import Experiment, RunOptions
from evsys_sdk.running.outcome import record_path

WORDS = [f"{first}{second}" for first in ("ba", "de", "fi", "go") for second in "bdfgl"]


@pytest.fixture
def ask(project):
    project.write_rows("data/all.jsonl", [{"prompt": f"say {word}", "completion": word} for word in WORDS])
    verifier = {"kind": "in_process", "fn_name": "exact_match"}
    project.write_rows(
        "bench/tasks.jsonl",
        [{"task_id": word, "instruction": f"say {word}", "verifier": {**verifier, "expected": word}} for word in WORDS],
    )

    def arm(name, rate):
        params = {"learning_rate": rate, "max_steps": 4, "batch_size": 4}
        data = {"path": "data/all.jsonl", "transforms": [{"kind": "jsonl_to_chat"}]}
        backend = {"kind": "mock", "params": {}}
        return {"name": name, "data": data, "model": {"name": "table"}, "backend": backend,
                "algorithm": {"kind": "sft", "params": params}}  # fmt: skip

    def run(name="asked", *, repeats=2, base_seed=1, **options):
        entry = {"name": "words", "path": "bench", "split": "val", "temperature": 0}
        settings = {
            "version": 1, "name": name, "output_dir": "out", "n_repeats": repeats, "base_seed": base_seed,
            "leakage": "off", "runs": [arm("slow", 0.002), arm("quick", 0.004)],
            "metadata": {"success_metric": "val.pass@1", "benchmark": [entry]},
        }  # fmt: skip
        path = project.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings))
        result = Experiment.from_yaml(path).run(RunOptions(**options))
        return json.loads(record_path(result.output_dir, result.name).read_text())

    return run


def test_more_seeds_of_the_same_arms_are_a_further_look(ask):
    first = ask(repeats=2)
    assert first["looks"]["count"] == 1 and first["verdict"]["looks"] == 1 and "Look 2" not in first["conclusion"]
    again = ask(repeats=2)
    assert again["looks"]["count"] == 1, "the same result told again is no further look"
    second = ask(repeats=3, fork=True)
    assert second["looks"]["count"] == second["verdict"]["looks"] == 2
    assert [one.split(" ")[0] for one in second["looks"]["before"]] == ["asked"]
    assert "Look 2 at this question (earlier looks: asked (" in second["conclusion"]
    assert any("look 2 at this question" in note for note in second["verdict"]["notes"])
    third = ask(repeats=4, fork=True)
    assert third["looks"]["count"] == 3


def test_runs_taken_over_into_an_experiment_of_another_name_are_a_further_look(ask):
    ask("one", repeats=2)
    assert ask("two", repeats=3)["looks"]["count"] == 2
    assert ask("three", repeats=2)["looks"]["before"] == [], "the same seeds under another name"


def test_attempts_with_other_seeds_that_fresh_set_aside_are_counted(ask):
    first = ask(base_seed=1)
    same = ask(base_seed=1, fresh=True)
    assert same["looks"] == {"count": 1, "before": [], "set_aside": 1, "rerolls": 0}, "the mock backend repeats exactly"
    seeds = iter(range(11, 99, 10))
    other = ask(base_seed=next(seeds), fresh=True)
    while other["arms"] == first["arms"]:  # by chance two seeds may score alike
        other = ask(base_seed=next(seeds), fresh=True)
    assert other["looks"]["rerolls"] == 1 and other["looks"]["count"] == 2
    assert "1 attempt with other scores set aside by --fresh" in other["conclusion"]
