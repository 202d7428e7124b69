"""Whole runs on the local backend with a model made on the spot: the walkthrough's own loss, TRL's trainers, chains."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pytest

pytest.importorskip("torch")

FOCAL_LOSS = """
import torch


def my_focal_loss(data, logprobs):
    loss = torch.zeros(())
    for datum, lp in zip(data, logprobs):
        weights = datum.loss_fn_inputs["weights"].to_torch()
        loss = loss - (weights * (1 - lp.exp()) ** 2 * lp).sum()
    return loss, {"focal": float(loss.detach())}
"""
FOCAL_SFT = """
from evsys_sdk import register_algorithm
from evsys_sdk.algorithms.sft import SFT

@register_algorithm("focal_sft")
class FocalSFT(SFT):
    name = "focal_sft"

    async def build_batch(self, step_idx):
        batch = await super().build_batch(step_idx)
        batch.loss_fn = my_focal_loss   # a client-side LossCallable
        return batch
"""
"""As printed in 002; what a user adds is the loss."""
ONE_THREAD = {"kind": "local", "params": {"threads": 1}}
BENCHMARK = {"benchmark": {"name": "colours", "path": "bench", "metrics": ["pass@1"], "max_tokens": 8}}


def _run(minimal_run, algorithm, **more):
    run = minimal_run(model={"name": "tiny-random"}, backend=ONE_THREAD, algorithm=algorithm, **more)
    del run["eval"]
    return run


def test_the_focal_loss_of_002_trains_a_real_model(project, minimal_run):
    (project.root / "my_algorithm.py").write_text(FOCAL_LOSS + FOCAL_SFT)
    run = _run(minimal_run, {"kind": "focal_sft", "params": {"max_steps": 200, "lora_rank": 8}})
    done = project.evsys("run", project.config(run=run, imports=["my_algorithm"]), "--json")
    assert done.returncode == 0, done.stderr
    focal = [line["focal"] for line in project.metrics() if "focal" in line]
    assert len(focal) == 200 and focal[-1] < 0.9 * focal[0], "the loss that was written is the one that fell"


def test_a_chain_of_trl_stages_hands_weights_on_is_scored_and_stays_quiet(project, minimal_run):
    pytest.importorskip("trl")
    project.write_tasks()
    algorithm = {"kind": "local_sft", "params": {"max_steps": 2, "batch_size": 24, "learning_rate": 1e-2}}
    run = _run(minimal_run, algorithm)
    data = run.pop("data")
    run["continual"] = {"stages": [{"name": "one", "data": data}, {"name": "two", "data": data}]}
    path = project.config(run=run, metadata=BENCHMARK)
    done = project.evsys("run", path, "--json", HF_HOME=str(project.root / "hf"))
    assert done.returncode == 0, done.stdout + done.stderr
    json.loads(done.stdout)
    record = project.record()
    metrics = record["metrics"]
    assert metrics["two/first_loss"] < metrics["one/final_loss"] < metrics["one/first_loss"]
    assert record["unread_settings"] == []
    assert [(scored["stage"], scored["error"]) for scored in record["evals"]] == [("one", None), ("two", None)]
    assert all(scored["scores"][0]["value"] is not None for scored in record["evals"])
    assert [line["step"] for line in project.metrics() if "loss" in line] == [1, 2, 3, 4]
    left = {found.name for found in project.root.iterdir()}
    assert left <= {"data", "bench", "config.yaml", "outputs", ".evsys", "hf"}
    assert not [found for found in (project.root / "hf").rglob("*") if found.is_file()], "nothing outside the run"


def test_a_chain_of_trl_stages_that_was_killed_at_its_very_end_keeps_what_it_told(project, minimal_run):
    pytest.importorskip("trl")
    algorithm = {"kind": "local_sft", "params": {"max_steps": 2, "batch_size": 24, "learning_rate": 1e-2}}
    run = _run(minimal_run, algorithm)
    data = run.pop("data")
    run["continual"] = {"stages": [{"name": "one", "data": data}, {"name": "two", "data": data}]}
    path = project.config(run=run)
    project.evsys("run", path, check=True)
    before = [row | {"ts": 0} for row in project.metrics()]
    (project.root / "outputs/r0/run_result.json").unlink()
    with closing(sqlite3.connect(project.root / "outputs/hello_sft.journal.sqlite")) as db, db:
        db.execute("DELETE FROM events WHERE kind = 'end'")
    again = project.evsys("run", path, check=True)
    assert [row | {"ts": 0} for row in project.metrics()] == before and "it starts again" not in again.stderr
