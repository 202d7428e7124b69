"""Tasks made from templates: the YAML names the key, or ids show it, and the verdict counts templates."""

from __future__ import annotations

import json

import pytest
import yaml

from evsys_sdk.errors import ConfigError
from evsys_sdk.experiment.experiment import Experiment, RunOptions
from evsys_sdk.experiment.outcome import record_path

TOPICS = ("mail", "maps", "web", "code")


@pytest.fixture
def run(project):
    words = [f"{topic}{letter}" for topic in TOPICS for letter in "abcde"]
    project.write_rows("data/all.jsonl", [{"prompt": f"say {word}", "completion": word} for word in words])

    def go(*, ids="x{letter}", **entry):
        verifier = {"kind": "in_process", "fn_name": "exact_match"}
        tasks = [
            {
                "task_id": ids.format(topic=topic, number=number, letter=f"{topic}{letter}"),
                "instruction": f"say {topic}{letter}",
                "verifier": {**verifier, "expected": f"{topic}{letter}"},
                "metadata": {"topic": topic},
            }
            for topic in TOPICS
            for number, letter in enumerate("abcde")
        ]
        project.write_rows("bench/tasks.jsonl", tasks)
        arms = [
            {
                "name": name, "data": {"path": "data/all.jsonl", "transforms": [{"kind": "jsonl_to_chat"}]},
                "model": {"name": "table"}, "backend": {"kind": "mock", "params": {}},
                "algorithm": {"kind": "sft", "params": {"learning_rate": rate, "max_steps": 4, "batch_size": 4}},
            }
            for name, rate in (("slow", 0.001), ("quick", 0.004))
        ]  # fmt: skip
        benchmark = [{"name": "words", "path": "bench", "split": "val", "temperature": 0, **entry}]
        settings = {
            "version": 1, "name": "made", "output_dir": "out", "leakage": "off", "runs": arms,
            "metadata": {"success_metric": "val.pass@1", "benchmark": benchmark},
        }  # fmt: skip
        path = project.root / "made.yaml"
        path.write_text(yaml.safe_dump(settings))
        result = Experiment.from_yaml(path).run(RunOptions(fresh=True))
        return json.loads(record_path(result.output_dir, result.name).read_text())

    return go


def test_templates_are_counted_by_key_or_by_ids_and_one_number_has_one_interval(run):
    plain = run()
    assert plain["verdict"]["n_clusters"] is None and "templates" not in plain["conclusion"]
    for told, record in (
        ("metadata key topic", run(cluster_key="topic")),
        ("task ids", run(ids="{topic}-{number:02d}")),
    ):
        assert record["verdict"]["n_clusters"] == 4
        assert f"tasks come from 4 templates ({told})" in record["conclusion"]
        for arm, one in zip(record["verdict"]["arms"], record["runs"], strict=True):
            [score] = one["evals"][-1]["scores"]
            assert (score["low"], score["high"]) == pytest.approx((arm["low"], arm["high"]), abs=1e-12)


def test_a_cluster_key_that_no_task_has_is_refused_before_anything_is_spent(run):
    refused = r"cluster_key = 'template'\s+no task has the metadata key 'template'; keys: topic"
    with pytest.raises(ConfigError, match=refused):
        run(cluster_key="template")
