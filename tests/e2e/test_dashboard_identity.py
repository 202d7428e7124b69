"""What an experiment sends to the dashboard: one experiment, however often it is resumed or run again."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.experiment.experiment import Experiment, RunOptions


class StopOnce:
    """Sends the process a signal after step 2 of the first run it sees."""

    def __init__(self, interrupt):
        self.interrupt, self.done = interrupt, False

    def on_step(self, ctx, step, metrics):
        if step == 2 and not self.done:
            self.done = True
            self.interrupt()


@pytest.fixture
def launch(project, minimal_run, monkeypatch):
    monkeypatch.setenv("EVSYS_OFFLINE", "1")
    monkeypatch.setenv("EVSYS_LOG_DIR", str(project.root / "mirror"))
    project.write_tasks()
    entry = {"name": "colours", "path": "bench", "split": "val", "run_every": 2, "num_samples": 2, "baseline": True}
    metadata = {"benchmark": [entry], "success_metric": "val.pass@1", "hypothesis": "it learns"}

    def go(*watchers, steps=4, **options):
        run = minimal_run(
            algorithm__params={"max_steps": steps, "batch_size": 4, "learning_rate": 1e-2}, eval={"enabled": False}
        )
        path = project.config(run=run, n_repeats=2, callbacks=[{"kind": "evsys_logger"}], metadata=metadata)
        return Experiment.from_yaml(path).run(RunOptions(watchers=watchers, **options))

    return go


def _sent(project):
    files = sorted((project.root / "mirror/local").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if "path" in line]


def _ids(sent, ending):
    return [line["body"]["id"] for line in sent if line["method"] == "POST" and line["path"].endswith(ending)]


def test_one_experiment_whether_it_is_stopped_resumed_run_again_or_started_over(project, launch, interrupt):
    stop = StopOnce(interrupt)
    assert not launch(stop).completed
    result = launch(stop)
    assert result.completed
    launch()
    again = _sent(project)
    launch(fresh=True)
    sent = _sent(project)
    assert len(sent) > len(again) and len(_ids(sent, "/experiments/")) == 4
    assert len(set(_ids(sent, "/experiments/"))) == 1
    assert len(set(_ids(sent, "/generations/"))) == 2
    evals = {line["body"]["id"]: line["body"] for line in sent if line["path"].endswith("/eval/")}
    assert len(evals) == 2 * 3, "per run: untrained, step 2, step 4"
    predictions = {line["body"]["id"]: line["body"] for line in sent if line["path"].endswith("/predictions/")}
    assert len(predictions) == len(evals) * 4 * 2
    last = [line["body"] for line in again if line["path"].endswith("/generations/")][-1]
    assert last["recipe_kind"] == "sft" and last["name"] == "r0__s43" and last["run_config"]["seed"] == 43, (
        "a run that was finished before keeps what is known of it"
    )


def test_other_settings_are_another_experiment(project, launch):
    launch()
    launch(steps=2, fresh=True)
    assert len(set(_ids(_sent(project), "/experiments/"))) == 2


def test_the_best_score_is_sent_and_what_has_no_value_is_left_out(project, launch):
    result = launch()
    sent = _sent(project)
    [end, record] = [line["body"] for line in sent if line["method"] == "PATCH" and "/experiments/" in line["path"]]
    [arm] = result.conclusion.arms
    assert end["best_score"] == arm.mean and end["status"] == "completed"
    assert record["record"]["conclusion"] == end["conclusion"]

    def nulls(value, place):
        if value is None:
            yield place
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            yield from nulls(item, f"{place}.{key}")

    assert not [place for line in sent for place in nulls(line["body"], line["path"])]
