"""The length of the model's context, as far as its backend says it, reaches the agents."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("harbor", reason="needs the extra harbor")

from evsys_sdk.backends.mock import MockService
from evsys_sdk.cli.main import main
from evsys_sdk.rollout.chat_agent import PolicyAgent


class Long(PolicyAgent):
    """Shows the model more than it can read."""

    async def run(self, instruction, environment, context):
        await self.policy.complete([{"role": "user", "content": "word " * 100}])


def test_a_benchmark_calls_a_chat_that_outgrew_the_context_the_agents_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(MockService, "context_length", 100, raising=False)
    verifier = {"kind": "in_process", "fn_name": "exact_match", "expected": "yes"}
    suite = tmp_path / "tasks.jsonl"
    suite.write_text(json.dumps({"task_id": "t", "instruction": "Say yes", "verifier": verifier}) + "\n")
    words = ["--path", suite, "--model", "m", "--backend", "mock", "--agent", f"{__name__}:Long"]
    main(["benchmark", "run", *map(str, words), "--output-dir", str(tmp_path / "out")])
    written = "".join(path.read_text() for path in (tmp_path / "out").rglob("*.json*"))
    assert '"status": "agent_error"' in written and "the model's context length is 100" in written
