"""A small world for deployers: an experiment that was trained and scored, and its record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from evsys_sdk import Experiment, registry
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.record.models import ExperimentRecord


@dataclass(frozen=True)
class Trained:
    """A finished experiment."""

    folder: Path
    path: Path
    record: ExperimentRecord
    result: object


def train(folder: Path, backend: dict, *, steps: int = 30, seed: int = 1, **settings) -> Trained:
    """One arm that learns to say yes, scored before and after."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"messages": [{"role": "user", "content": f"{i} plus {i}?"}, {"role": "assistant", "content": "yes"}]}
            for i in range(16)]  # fmt: skip
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"task_id": f"t{i}", "instruction": f"is {i} a number?",
              "verifier": {"fn_name": "contains", "expected": "yes"}} for i in range(12)]  # fmt: skip
    (folder / "val").mkdir(exist_ok=True)
    (folder / "val" / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    params = {"max_steps": steps, "learning_rate": 0.02, "batch_size": 8, "lora_rank": 4}
    config = {
        "name": "Say Yes",
        "output_dir": str(folder / "outputs"),
        "run": {
            "name": "r0",
            "seed": seed,
            "data": {"path": str(folder / "train.jsonl"), "transforms": [{"kind": "jsonl_to_chat"}]},
            "model": {"name": "tiny-random"},
            "algorithm": {"kind": "sft", "params": params},
            "backend": backend,
        },
        "metadata": {
            "success_metric": "pass@1",
            "benchmark": [
                {
                    "name": "val", "path": str(folder / "val"), "split": "val", "baseline": True, "max_tokens": 4,
                    "temperature": 0.0,
                }
            ],
        },
        **settings,
    }  # fmt: skip
    experiment = Experiment(parse_config(Document(label="config", data=config), folder=folder))
    result = experiment.run()
    path = folder / "outputs" / "Say-Yes.experiment_result.json"
    path = path if path.exists() else next((folder / "outputs").glob("*.experiment_result.json"))
    return Trained(folder=folder, path=path, record=ExperimentRecord.load(path), result=result)


@pytest.fixture(scope="session")
def tiny_trained(tmp_path_factory) -> Trained:
    """Real weights: a tiny Llama with an adapter, trained here."""
    pytest.importorskip("torch", reason="the local backend needs torch")
    return train(tmp_path_factory.mktemp("tiny"), {"kind": "local", "params": {"dtype": "float32"}})


@pytest.fixture
def mock_trained(tmp_path) -> Trained:
    return train(tmp_path / "project", {"kind": "mock"}, steps=4)


@pytest.fixture
def forget_afterwards():
    """Deployers that a test registers do not outlive it."""
    registry.load_all()
    before = dict(registry.deployers.entries)
    yield
    registry.deployers.entries.clear()
    registry.deployers.entries.update(before)
