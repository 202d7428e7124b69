"""A model that really learns inside a harness: the example with two tools, on the mock backend."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("harbor", reason="needs the extra harbor")

from evsys_sdk.algorithms.rl import RL
from evsys_sdk.protocols import AgentSpec
from evsys_sdk.registry import verifiers
from evsys_sdk.rollout.engine import HarborRolloutEngine
from evsys_sdk.testing import training_context

EXAMPLE = Path(__file__).parents[3] / "examples" / "07_two_tool_agent"


@pytest.fixture
def example(monkeypatch):
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "two_tool_agent", raising=False)
    importlib.import_module("two_tool_agent")
    yield [json.loads(line) for line in (EXAMPLE / "data" / "train.jsonl").read_text().splitlines()]
    sys.modules.pop("two_tool_agent", None)  # whoever imports it next wants its verifier registered anew


def test_the_model_learns_which_tool_to_ask_and_what_to_say_then(tmp_path, example):
    engine = HarborRolloutEngine(agent=AgentSpec(kind="two_tool_agent.TwoToolAgent"))
    ctx = training_context(tmp_path, example, rollouts=engine)
    result = RL(max_steps=10, num_samples=12, batch_size=4, max_tokens=4, learning_rate=2e-3).train(ctx)
    rewards = ctx.log_store.curve("reward/mean")
    assert rewards[0] < 0.5 and sum(rewards[-3:]) / 3 > 0.85, rewards
    assert result.metrics["rollouts_dropped"] == 0
