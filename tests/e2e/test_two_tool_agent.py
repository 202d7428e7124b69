"""The example with two tools, as a user runs it: a model really learns inside that harness."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("harbor", reason="needs the extra harbor")

from evsys_sdk.cli.main import main
from evsys_sdk.registry import verifiers

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_two_tool_agent"


@pytest.fixture
def example(tmp_path, monkeypatch):
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "two_tool_agent", raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLE, tmp_path / "example")
    yield tmp_path
    sys.modules.pop("two_tool_agent", None)


def test_evsys_run_trains_the_model_in_its_harness_and_shows_it_on_stones_it_never_saw(example, capsys):
    assert main(["run", "example/config.yaml", "--steps", "8", "--strict"]) == 0
    out = capsys.readouterr().out
    assert "rl: completed, reward 0.1875 -> " in out and "by tool: ruler " in out
    record = json.loads((example / ".evsys/outputs/two_tool_agent/rl/run_result.json").read_text())
    assert record["metrics"]["final_reward"] > 0.7
    means = {found["step"]: found["scores"][0] for found in record["evals"]}
    assert means[0]["value"] < 0.4 and means[8]["value"] > 0.9
    assert means[0]["high"] < means[8]["low"]
    assert all((score["n_tasks"], score["n_rollouts"], score["n_errors"]) == (24, 96, 0) for score in means.values())


def test_every_rollout_is_two_turns_with_the_tool_between_them(example):
    assert main(["run", "example/config.yaml", "--dry", "--strict"]) == 0
    logs = next((example / ".evsys/outputs/two_tool_agent").glob("dry/**/logs"))
    for kind in ("training", "validation"):
        lines = [json.loads(line) for line in (logs / kind / "rollouts.jsonl").read_text().splitlines()]
        used = [line for line in lines if line["metadata"]["agent"]["tools"]]
        assert used and all(len(line["turns"]) == 2 for line in used)
        assert all(len(turn["completion_tokens"]) == len(turn["logprobs"]) for line in used for turn in line["turns"])
