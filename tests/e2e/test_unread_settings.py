"""Which settings nothing reads does not depend on how many processes an experiment took."""

from __future__ import annotations

import json

import pytest

WATCHER = """
from pydantic import BaseModel
import evsys_sdk

@evsys_sdk.register_callback("half_deaf")
class HalfDeaf:
    class Config(BaseModel, extra="forbid"):
        heard: int = 0
        unheard: int = 0

    def __init__(self, **params):
        self.cfg = self.Config(**params)

    def on_step(self, ctx, step, metrics):
        self.cfg.heard
"""
CALLBACKS = [
    {"kind": "early_stopping", "params": {"metric": "loss", "patience": 3}},
    {"kind": "half_deaf", "params": {"heard": 1, "unheard": 1}},
]


@pytest.fixture
def config(project, minimal_run):
    """Two arms on a benchmark, with a setting that nothing reads in the algorithm, an entry and a callback each."""
    (project.root / "watching.py").write_text(WATCHER)
    project.write_tasks()
    entry = {"name": "colours", "path": "bench", "split": "val", "temperature": 0, "baseline": True}
    sdft = {"kind": "sdft", "params": {"max_steps": 4, "num_samples": 1, "max_tokens": 4, "ema_decay": 0.5}}

    def write(**top):
        runs = [minimal_run(name=name, algorithm=sdft, eval={"enabled": False}) for name in ("one", "other")]
        for run in runs:
            del run["model"]["renderer_name"]
        given = {"imports": ["watching"], "callbacks": CALLBACKS, "metadata": {"benchmark": [entry]}, **top}
        return project.config(run=None, runs=runs, **given)

    return write


UNREAD = [
    "callbacks[1].params.unheard",
    "runs[0].algorithm.params.ema_decay",
    "runs[1].algorithm.params.ema_decay",
]


def _unread(project, path):
    done = project.evsys("run", path, "--json")
    record = json.loads((project.root / "outputs/hello_sft.experiment_result.json").read_text())
    told = json.loads(done.stdout)
    assert told["unread_settings"] == record["unread_settings"]
    return done.returncode, told["unread_settings"]


def test_a_finished_experiment_that_is_run_again_says_the_same(project, config):
    assert _unread(project, config()) == (0, UNREAD)
    assert _unread(project, config()) == (0, UNREAD)


def test_strict_has_nothing_against_a_finished_experiment_that_read_all(project, config):
    path = project.config(callbacks=CALLBACKS[:1], run=_read_whole())
    for _ in range(2):
        done = project.evsys("run", path, "--strict")
        assert done.returncode == 0, done.stderr


def _read_whole():
    chat = [{"kind": "jsonl_to_chat", "params": {}}]
    return {
        "name": "r0",
        "data": {"path": "data/train.jsonl", "transforms": chat},
        "model": {"name": "any"},
        "algorithm": {"kind": "sft", "params": {"max_steps": 2}},
        "backend": {"kind": "mock"},
    }


@pytest.mark.parametrize("steps", [1, 4])
def test_an_interrupted_experiment_says_the_same_as_an_undisturbed_one(project, config, steps):
    assert _unread(project, config(budget={"steps": steps}))[0] == 2
    assert _unread(project, config(budget={"steps": 8})) == (0, UNREAD)
    assert _unread(project, config(budget={"steps": 8})) == (0, UNREAD)


def test_an_experiment_that_took_over_all_its_runs_blames_no_callback(project, config):
    project.evsys("run", config(), check=True)
    taken = project.evsys("run", config(), "--set", "name=copy", "--json", check=True)
    assert taken.stderr.count("is not run again") == 2
    assert json.loads(taken.stdout)["unread_settings"] == UNREAD[2:], "the arms are alike: one run is both"
