"""`max_concurrent_arms`: so many runs are under way at the same time, and not one more."""

from __future__ import annotations

import threading

import pytest

from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.experiment.experiment import Experiment, RunOptions

PATIENCE_SECONDS = 300
"""For a world in which arms wait for each other, so that the test fails and does not hang."""


class Meeting:
    """Every run waits at its second step until `expected` of them are there."""

    def __init__(self, expected: int):
        self.barrier = threading.Barrier(expected)
        self.lock = threading.Lock()
        self.present = self.most = 0

    def on_run_start(self, ctx):
        with self.lock:
            self.present += 1
            self.most = max(self.most, self.present)

    def on_step(self, ctx, step, metrics):
        if step == 2:
            self.barrier.wait(PATIENCE_SECONDS)

    def on_run_end(self, ctx, result):
        with self.lock:
            self.present -= 1


@pytest.mark.parametrize("at_once", [1, 4, 8])
def test_so_many_arms_train_at_the_same_time(tmp_path, at_once):
    rows = [{"messages": [{"role": "user", "content": "say red"}, {"role": "assistant", "content": "red"}]}]
    base = {
        "model": {"name": "mock"},
        "data": {"source_kind": "in_memory", "rows": rows},
        "algorithm": {"kind": "sft", "params": {"max_steps": 3}},
        "backend": {"kind": "mock", "params": {"latency_ms": 1}},
    }
    data = {
        "name": "arms",
        "output_dir": str(tmp_path),
        "max_concurrent_arms": at_once,
        "runs": [{**base, "name": f"arm{number}", "seed": number} for number in range(8)],
    }
    meeting = Meeting(at_once)
    config = parse_config(Document(label="config", data=data), folder=tmp_path)
    result = Experiment(config).run(RunOptions(watchers=[meeting]))
    assert [run.status for run in result.runs] == ["completed"] * 8
    assert [run.warnings for run in result.runs] == [[]] * 8, "nobody waited in vain"
    assert meeting.most == at_once
