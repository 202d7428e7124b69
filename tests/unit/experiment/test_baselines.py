"""API models beside the arms: scored once, kept, shown, and never ranked."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from dataclasses import replace
from typing import ClassVar

import pytest

from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.experiment.baselines import Baselines
from evsys_sdk.experiment.experiment import Experiment, RunOptions
from evsys_sdk.record.journal import Journal
from evsys_sdk.registry import inference
from evsys_sdk.run.plan import ExtensionFactory
from evsys_sdk.run.stop import StopFlag

WORDS = ("red", "green", "blue", "black")


class Clever:
    """Answers every question rightly, and remembers what it was asked."""

    asked: ClassVar[list[tuple[str, int, float]]] = []
    breaks_after: int | None = None
    """Questions until it is as if the process were killed."""

    def __init__(self, max_tokens: int = 7):
        self.max_tokens = max_tokens

    def generate(self, *, prompt, max_tokens, temperature, stop):
        type(self).asked.append((prompt, max_tokens, temperature))
        if self.breaks_after is not None and len(self.asked) > self.breaks_after:
            raise KeyboardInterrupt
        return prompt.split()[-1]


@pytest.fixture
def clever(monkeypatch):
    inference.names()
    monkeypatch.setattr(inference, "entries", dict(inference.entries))
    monkeypatch.setattr(Clever, "asked", [])
    monkeypatch.setattr(Clever, "breaks_after", None)
    inference.register("clever")(Clever)
    return Clever


def experiment(tmp_path, *, models=("clever",), arms=2, **entry):
    (tmp_path / "suite").mkdir(exist_ok=True)
    tasks = [
        {"task_id": w, "instruction": f"say {w}", "verifier": {"fn_name": "exact_match", "expected": w}, "kind": w[0]}
        for w in WORDS
    ]
    (tmp_path / "suite" / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    base = {
        "data": {"source_kind": "in_memory", "rows": [{"prompt": "name a colour", "completion": "white"}]},
        "model": {"name": "table-model"},
        "algorithm": {"kind": "sft", "params": {"max_steps": 1}},
        "backend": {"kind": "mock"},
    }
    base["data"]["transforms"] = [{"kind": "jsonl_to_chat"}]
    suite = {"name": "words", "path": "suite", "split": "val", "max_tokens": 8, "models": list(models), **entry}
    metadata = {"success_metric": "val.pass@1", "benchmark": [suite]}
    runs = [{"name": f"arm{index}", "seed": index, **base} for index in range(arms)]
    data = {"name": "x", "output_dir": str(tmp_path / "out"), "metadata": metadata, "runs": runs}
    return Experiment(parse_config(Document(label="config", data=data), folder=tmp_path))


def test_a_model_is_asked_once_however_many_arms_there_are_and_stands_beside_them(tmp_path, clever):
    result = experiment(tmp_path, breakdown_keys=["kind"]).run()
    assert result.completed and sorted(asked[0] for asked in clever.asked) == sorted(f"say {w}" for w in WORDS)
    (found,) = result.models
    score = found.result.scores[0]
    assert (found.model, found.result.split, score.value, score.n_tasks, score.n_errors) == ("clever", "val", 1.0, 4, 0)
    assert set(found.result.breakdown["kind"]) == {"r", "g", "b"}
    assert [arm.arm for arm in result.conclusion.arms] == ["arm0", "arm1"] and result.best_arm is None
    told = result.conclusion.text.splitlines()
    heading = told.index("For comparison, models that were not trained here (never ranked):")
    assert told[heading + 1] == "  clever: val/words pass@1 = 1.000 [0.510, 1.000], 4 tasks"
    assert result.unread_settings == []


def test_the_record_has_the_scores_of_the_models_and_what_they_said(tmp_path, clever):
    experiment(tmp_path, models=[{"kind": "clever", "name": "the clever one"}]).run()
    record = json.loads((tmp_path / "out" / "x.experiment_result.json").read_text())
    (model,) = record["models"]
    assert (model["model"], model["name"], model["scores"][0]["value"], model["error"]) == (
        "the clever one", "words", 1.0, None,
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "out" / "x.models.rollouts.jsonl").read_text().splitlines()]
    assert [line["task_id"] for line in lines] == list(WORDS) and {line["model"] for line in lines} == {
        "the clever one"
    }
    assert lines[0]["turns"][0]["text"] == "red"


def test_a_model_is_asked_as_the_entry_says_and_its_own_params_come_first(tmp_path, clever):
    from evsys_sdk.config.base import Params

    @inference.register("careful")
    class Careful(Clever):
        class Config(Params):
            max_tokens: int = 7

        def __init__(self, **params):
            self.cfg = self.Config(**params)

    experiment(tmp_path, models=["clever"], temperature=0.25).run()
    assert {asked[1:] for asked in clever.asked} == {(8, 0.25)}
    clever.asked.clear()
    (tmp_path / "other").mkdir()
    experiment(
        tmp_path / "other", models=[{"kind": "careful", "params": {"max_tokens": 900}}], temperature=0.25, arms=1
    ).run()
    assert {asked[1:] for asked in Careful.asked} == {(900, 0.25)}


def test_what_was_scored_is_not_asked_again_unless_somebody_wants_it_fresh(tmp_path, clever):
    first = experiment(tmp_path).run()
    clever.asked.clear()
    again = experiment(tmp_path).run()
    assert clever.asked == []
    assert [replace(model.result, seconds=0) for model in again.models] == [
        replace(model.result, seconds=0) for model in first.models
    ]
    assert again.unread_settings == []
    experiment(tmp_path).run(RunOptions(fresh=True))
    assert len(clever.asked) == 4


def test_another_question_is_asked_anew(tmp_path, clever):
    one, other = experiment(tmp_path), experiment(tmp_path, temperature=0.5)
    for found in (one, other, one):
        with closing(Journal(tmp_path / "journal")) as journal:
            benchmarks = BenchmarkLoader(found.config)
            baselines = Baselines(
                config=found.config, parts=ExtensionFactory(), journal=journal, stop=StopFlag(), benchmarks=benchmarks
            )
            with baselines.beside():
                pass
    assert [asked[2] for asked in clever.asked] == [1.0] * 4 + [0.5] * 4 + [1.0] * 4


def test_an_evaluation_that_was_killed_resumes_where_it_was(tmp_path, clever, monkeypatch):
    monkeypatch.setattr(clever, "breaks_after", 2)
    with pytest.raises(KeyboardInterrupt):
        experiment(tmp_path, n_concurrent=1).run()
    assert len(clever.asked) == 3
    done = {prompt for prompt, _, _ in clever.asked[:2]}
    monkeypatch.setattr(clever, "breaks_after", None)
    clever.asked.clear()
    result = experiment(tmp_path, n_concurrent=1).run()
    assert {prompt for prompt, _, _ in clever.asked} == {f"say {w}" for w in WORDS} - done
    assert result.models[0].result.scores[0].n_rollouts == 4


def test_a_model_that_fails_is_a_score_with_an_error_and_is_asked_again_the_next_time(tmp_path, clever, monkeypatch):
    monkeypatch.setattr(clever, "generate", lambda self, **question: 1 / 0)
    result = experiment(tmp_path).run()
    assert result.completed
    assert "invalid: all 4 rollouts errored" in result.models[0].result.error
    assert "clever: val/words pass@1: not valid" in result.conclusion.text
    monkeypatch.undo()
    inference.register("clever")(Clever)
    assert experiment(tmp_path).run().models[0].result.scores[0].value == 1.0


def test_a_rehearsal_asks_for_few_tasks_and_keeps_apart(tmp_path, clever, monkeypatch):
    monkeypatch.setattr("evsys_sdk.experiment.experiment.DRY_TASKS", 2)
    result = experiment(tmp_path).run(RunOptions(dry=True))
    assert len(clever.asked) == 2 and result.models[0].result.scores[0].n_tasks == 2
    experiment(tmp_path).run()
    assert len(clever.asked) == 6


def test_the_arms_do_not_wait_for_a_model_that_thinks(tmp_path, clever, monkeypatch):
    trained = threading.Event()

    class Watcher:
        def on_run_end(self, ctx, result):
            trained.set()

    def generate(self, **question):
        assert trained.wait(300), "the arms wait for the model"
        return "red"

    monkeypatch.setattr(clever, "generate", generate)
    result = experiment(tmp_path, arms=1).run(RunOptions(watchers=[Watcher()]))
    assert result.models[0].result.scores[0].value == 0.25 and result.models[0].result.scores[0].n_errors == 0


def test_whoever_stops_the_experiment_stops_the_models_too(tmp_path, clever, monkeypatch):
    import asyncio

    from evsys_sdk.errors import Cancelled

    asked = threading.Event()

    async def generate(self, **question):
        asked.set()
        await asyncio.sleep(3600)

    class Stopper:
        def on_step(self, ctx, step, metrics):
            assert asked.wait(300)
            raise Cancelled("stopped by the user")

    monkeypatch.setattr(clever, "generate", generate)
    result = experiment(tmp_path, arms=1).run(RunOptions(watchers=[Stopper()]))
    assert [run.status for run in result.runs] == ["cancelled"] and result.models == []


def test_adding_a_model_does_not_make_the_arms_other_arms(tmp_path, clever):
    from evsys_sdk.record.models import RunRecorder

    hashes = {
        RunRecorder(found.config, found.config.all_runs()[0], "x", tmp_path, folder=tmp_path).config_hash()
        for found in (experiment(tmp_path), experiment(tmp_path, models=[]), experiment(tmp_path, n_concurrent=3))
    }
    assert len(hashes) == 1
    other = experiment(tmp_path, temperature=0.1)
    recorder = RunRecorder(other.config, other.config.all_runs()[0], "x", tmp_path, folder=tmp_path)
    assert recorder.config_hash() not in hashes
