"""An interrupted on-policy run ends where an uninterrupted one does: same rollouts, same teacher, same totals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evsys_sdk.algorithms.rl import RL
from evsys_sdk.algorithms.sdft import SDFT
from evsys_sdk.rollout.engine import InProcessRolloutEngine
from evsys_sdk.testing import MemoryLog, training_context

COMMON = {"max_steps": 7, "save_every": 2, "batch_size": 2, "max_tokens": 6, "learning_rate": 1e-4}
RECIPES = [
    (RL, {"num_samples": 6, "async_steps": 2, "kl_coef": 0.01}),
    (SDFT, {"teacher": "ema", "ema_decay": 0.5, "top_k": 5}),
]


class Torn(Exception):
    """The machine went away."""


class Breaking(MemoryLog):
    """A log during whose fifth step everything stops; the last checkpoint is that of step 4."""

    def log_metrics(self, metrics, step):
        super().log_metrics(metrics, step)
        if step == 5:
            raise Torn


def _rows():
    verifier = {"fn_name": "regex_match", "expected": "^[0-9a-z]"}
    metadata = {"demonstration": "7"}
    return [
        {"task_id": c, "instruction": f"A letter for {c}?", "verifier": verifier, "metadata": metadata}
        for c in ("red", "green", "blue", "black", "white")
    ]


def _train(kind, params, folder, **given):
    ctx = training_context(folder, _rows(), rollouts=InProcessRolloutEngine(), **given)
    return kind(**COMMON, **params).train(ctx)


def _content(path):
    """The part of the mock's file name that follows from what is in the file."""
    found = re.search(r"-([0-9a-f]{12})\.sampler", Path(path).name)
    return found.group(1)


@pytest.mark.parametrize(("kind", "params"), RECIPES, ids=lambda value: getattr(value, "name", ""))
def test_a_resumed_run_ends_with_the_same_weights_and_totals(tmp_path, kind, params):
    whole = _train(kind, params, tmp_path / "whole")
    with pytest.raises(Torn):
        _train(kind, params, tmp_path / "torn", log_store=Breaking())
    resumed = _train(kind, params, tmp_path / "torn", resume=True)
    assert _content(resumed.artifacts["final_sampler"]) == _content(whole.artifacts["final_sampler"])
    assert resumed.metrics == whole.metrics
