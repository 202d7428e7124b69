"""A journal that lost its tail in a crash of the machine is not believed: lost steps are done again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
from contextlib import closing

import pytest

from evsys_sdk.experiment.experiment import Experiment, RunOptions

PARTS = [0, 2, 5, *range(10, 100, 8), 97, 99, 100]
"""Of the write-ahead log, in percent, that are left."""
DEADLY = """
import os, signal
from evsys_sdk import register_callback

@register_callback("deadly")
class Deadly:
    only_watches = True

    def on_step(self, ctx, step, metrics):
        if step == 16 and os.path.exists("die"):
            os.remove("die")
            os.kill(os.getpid(), signal.SIGKILL)
"""
SFT = {"kind": "sft", "params": {"max_steps": 20, "batch_size": 4, "learning_rate": 1e-3, "save_every": 5}}
RL = {
    "kind": "rl",
    "params": {"max_steps": 18, "batch_size": 2, "num_samples": 4, "save_every": 5, "max_tokens": 6,
               "learning_rate": 1e-2, "drop_constant_reward": False, "async_steps": 1},
}  # fmt: skip
PHASE = {"max_steps": 9, "batch_size": 4, "learning_rate": 1e-3, "save_every": 3}
COMBO = {
    "kind": "combo",
    "params": {"phases": [{"name": n, "algorithm": {"kind": "sft", "params": PHASE}} for n in "ab"]},
}
ENTRIES = [
    {"name": "colours", "path": "bench", "split": "val", "run_every": 3, "temperature": 0, "baseline": True},
    {"name": "colours", "path": "bench", "split": "test", "temperature": 0},
]


@pytest.mark.parametrize("algorithm", [SFT, RL, COMBO], ids=["sft", "rl", "combo"])
def test_a_run_whose_journal_was_cut_ends_as_if_nothing_had_happened(
    project, minimal_run, record_tree, algorithm, capfd
):
    (project.root / "deadly.py").write_text(DEADLY)
    project.write_tasks()
    data = {"data": {"path": "bench/tasks.jsonl"}} if algorithm is RL else {}
    run = minimal_run(algorithm=algorithm, eval={"enabled": False}, **data)

    def config(folder):
        return project.config(
            run=run,
            imports=["deadly"],
            callbacks=[{"kind": "local_logger"}, {"kind": "csv_metrics"}, {"kind": "deadly"}],
            metadata={"benchmark": ENTRIES, "allow_test_selection": True},
            output_dir=f"./{folder}/out",
        )

    Experiment.from_yaml(config("whole")).run()
    whole = record_tree(project.root / "whole/out")
    (project.root / "die").write_text("")
    assert project.evsys("run", config("killed")).returncode == -signal.SIGKILL
    log = project.root / "killed/out/hello_sft.journal.sqlite-wal"
    size, again = log.stat().st_size, 0
    assert size > 20_000
    for part in PARTS:
        copy = project.root / f"cut{part}"
        shutil.copytree(project.root / "killed", copy)
        with open(copy / "out" / log.name, "r+b") as handle:
            handle.truncate(size * part // 100)
        result = Experiment.from_yaml(config(copy.name)).run()
        assert result.completed, (part, result.runs[0].error)
        found = record_tree(copy / "out")
        assert found.keys() == whole.keys(), part
        for name, records in whole.items():
            assert found[name] == records, f"{part} %: {name}"
        err = capfd.readouterr().err
        again += "the journal lost what happened after step" in err
        is_said = re.search("Resuming .* from step|lost what happened after step|again from step 0|begins anew", err)
        assert is_said, f"{part} %: a run that does not resume says so"
        shutil.rmtree(copy)
    assert again >= 3, "some cuts took steps away that a checkpoint rests on"


def test_a_paused_run_whose_scores_the_journal_lost_is_scored_again(project, minimal_run):
    """Successive halving chooses who continues by these scores; the record of the pause has none of its own."""
    project.write_tasks()
    run = minimal_run(algorithm=SFT, eval={"enabled": False})
    config = project.config(run=run, metadata={"benchmark": ENTRIES[:1]}, output_dir="out")
    first = Experiment.from_yaml(config).run(RunOptions(pause_at=5)).runs[0]
    assert [one.step for one in first.evals] == [0, 3] and first.paused_at == 5
    with closing(sqlite3.connect(project.root / "out/hello_sft.journal.sqlite")) as journal, journal:
        kept = "SELECT max(id) FROM events WHERE kind = 'step' AND at <= 2"
        assert journal.execute(f"DELETE FROM events WHERE id > ({kept})").rowcount > 4
    again = Experiment.from_yaml(config).run(RunOptions(pause_at=5)).runs[0]
    assert again.metrics == first.metrics
    assert [one.scores for one in again.evals] == [one.scores for one in first.evals]


def test_the_journal_is_durable_before_a_checkpoint_is_complete(project, minimal_run, monkeypatch):
    from evsys_sdk.record.journal import Journal

    synced, manifest = [], project.root / "outputs/r0/checkpoints.json"

    def sync(self):
        told = json.loads(manifest.read_text())["checkpoints"]
        synced.append([(found["step"], found["complete"]) for found in told])

    monkeypatch.setattr(Journal, "sync", sync)
    run = minimal_run(algorithm__params={"max_steps": 4, "save_every": 2, "batch_size": 4}, eval={"enabled": False})
    Experiment.from_yaml(project.config(run=run)).run()
    assert synced == [[(2, False)], [(2, True), (4, False)]]


def test_the_training_rollouts_are_durable_before_a_checkpoint_is_complete(project, minimal_run, monkeypatch):
    synced, manifest, fsync = [], project.root / "outputs/r0/checkpoints.json", os.fsync

    def note(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("r0/logs/training/rollouts.jsonl"):
            told = json.loads(manifest.read_text())["checkpoints"]
            synced.append([(found["step"], found["complete"]) for found in told])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    project.write_tasks()
    run = minimal_run(algorithm=RL, eval={"enabled": False}, data={"path": "bench/tasks.jsonl"})
    run["algorithm"]["params"] = RL["params"] | {"max_steps": 4, "save_every": 2}
    Experiment.from_yaml(project.config(run=run)).run()
    assert synced == [[(2, False)], [(2, True), (4, False)]]


@pytest.mark.parametrize("lost", ["journal", "log", "head of the log"])
def test_a_run_whose_journal_is_gone_says_that_it_starts_again(project, minimal_run, lost, record_tree):
    """The checkpoint has the weights; the metrics and scores of the steps before it are nowhere else."""
    (project.root / "deadly.py").write_text(DEADLY)
    run = minimal_run(algorithm=SFT, eval={"enabled": False})

    def config(folder):
        about = {"imports": ["deadly"], "callbacks": [{"kind": "deadly"}], "output_dir": f"./{folder}/out"}
        return project.config(run=run, name=f"{folder}.yaml", **about)

    project.evsys("run", config("whole"), check=True)
    (project.root / "die").write_text("")
    assert project.evsys("run", config("killed")).returncode == -signal.SIGKILL
    journal = project.root / "killed/out/hello_sft.journal.sqlite"
    log = journal.with_name(journal.name + "-wal")
    if lost == "journal":
        for path in journal.parent.glob(journal.name + "*"):
            path.unlink()
    elif lost == "log":
        log.unlink()
    else:
        with open(log, "r+b") as handle:
            handle.truncate(log.stat().st_size * 4 // 100)
    err = project.evsys("run", config("killed"), check=True).stderr
    assert "starts again from step 0: killed/out/r0/checkpoints.json lists a checkpoint of step 15, but the" in err
    assert "the journal killed/out/hello_sft.journal.sqlite has lost the steps" in err
    assert "The earlier files are kept in" in err
    assert [row["step"] for row in project.metrics(folder="killed/out")] == [
        row["step"] for row in project.metrics(folder="whole/out")
    ]
    err = project.evsys("run", config("killed"), "--fresh", check=True).stderr
    assert "starts again" not in err, "who asks for a fresh start is not warned of it"
