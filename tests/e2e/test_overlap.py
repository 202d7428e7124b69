"""Scoring in the loop: on a snapshot, beside the training, which does not wait for it."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.experiment.experiment import Experiment, RunOptions
from evsys_sdk.record.callbacks import EarlyStopping
from evsys_sdk.registry import verifiers
from evsys_sdk.run.hooks import EVALS_AHEAD

WORDS = ("red", "green", "blue", "black")
STEPS = 6
PATIENCE_SECONDS = 300
"""For a world in which training waits, so that the test fails and does not hang."""


class Watch:
    """Writes down what happens, in order; and lets graders go when the last step is done."""

    def __init__(self):
        self.events = []
        self.trained = threading.Event()

    def on_step(self, ctx, step, metrics):
        self.events.append(("step", step))
        if step == STEPS:
            self.trained.set()

    def on_eval(self, ctx, result):
        self.events.append(("eval", result.step))


@pytest.fixture
def watch(monkeypatch):
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))
    watch = Watch()

    @verifiers.register("slow")
    class Slow:
        async def verify(self, *, prompt, completion, target):
            for _ in range(PATIENCE_SECONDS * 100):
                if watch.trained.is_set():
                    return float(completion == target)
                await asyncio.sleep(0.01)
            raise AssertionError("training waits for its scoring")

    return watch


def experiment(tmp_path, name, *, fn_name, steps=STEPS, entries=None, **entry):
    (tmp_path / "suite").mkdir(exist_ok=True)
    tasks = [{"task_id": w, "instruction": f"say {w}", "verifier": {"fn_name": fn_name, "expected": w}} for w in WORDS]
    (tmp_path / "suite" / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    rows = [{"prompt": f"say {w}", "completion": w} for w in WORDS]
    suite = {"name": "words", "path": "suite", "split": "val", "max_tokens": 8, "temperature": 0, **entry}
    data = {
        "name": name,
        "output_dir": str(tmp_path / name),
        "metadata": {"benchmark": entries or [suite]},
        "run": {
            "name": "arm",
            "data": {"source_kind": "in_memory", "rows": rows, "transforms": [{"kind": "jsonl_to_chat"}]},
            "model": {"name": "table-model"},
            "algorithm": {"kind": "sft", "params": {"max_steps": steps, "batch_size": 2, "learning_rate": 2e-4}},
            "backend": {"kind": "mock", "params": {"latency_ms": 2}},
        },
    }
    return Experiment(parse_config(Document(label="config", data=data), folder=tmp_path))


def test_training_continues_while_snapshots_are_scored_and_ends_when_all_are(tmp_path, watch):
    result = experiment(tmp_path, "x", fn_name="slow", run_every=2).run(RunOptions(watchers=[watch]))
    # No grader lets go before the last step is done: every step came before any score.
    assert watch.events[:STEPS] == [("step", step) for step in range(1, STEPS + 1)]
    assert sorted(watch.events[STEPS:]) == [("eval", 2), ("eval", 4), ("eval", 6)]
    (run,) = result.runs
    assert run.status == "completed"
    # Which of the three is done first is chance; the record has them in the order of their steps.
    scored = [(one.step, one.error, one.scores[0].n_errors) for one in run.evals]
    assert scored == [(2, None, 0), (4, None, 0), (6, None, 0)]


def test_training_waits_where_more_evaluations_are_under_way_than_have_room(tmp_path, watch):
    full = EVALS_AHEAD + 1
    released, seen = threading.Event(), []

    @verifiers.register("behind")
    class Behind:
        async def verify(self, *, prompt, completion, target):
            while ("step", full) not in watch.events:
                await asyncio.sleep(0.01)
            for _ in range(100):  # time for one more step, if training did not wait
                if released.is_set() or ("step", full + 1) in watch.events:
                    break
                await asyncio.sleep(0.01)
            seen.append(watch.events[-1])
            released.set()
            return 1.0

    result = experiment(tmp_path, "x", fn_name="behind", steps=full + 3, run_every=1).run(RunOptions(watchers=[watch]))
    assert seen[0] == ("step", full)
    assert [one.step for one in result.runs[0].evals] == list(range(1, full + 4))


def test_the_record_has_evaluations_in_the_order_of_their_steps_however_they_end(tmp_path, watch):
    scored = threading.Event()

    class Release:
        def on_eval(self, ctx, result):
            watch.events.append(("eval", result.step))
            scored.set()

    @verifiers.register("after_the_other")
    class AfterTheOther:
        async def verify(self, *, prompt, completion, target):
            for _ in range(PATIENCE_SECONDS * 100):
                if scored.is_set():
                    return 1.0
                await asyncio.sleep(0.01)
            raise AssertionError("the evaluation of step 3 does not end")

    suites = [("late", "after_the_other", 2), ("early", "exact_match", 3)]
    for name, fn_name, _ in suites:
        (tmp_path / name).mkdir()
        task = {"task_id": "red", "instruction": "say red", "verifier": {"fn_name": fn_name, "expected": "red"}}
        (tmp_path / name / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    entries = [
        {"name": name, "path": name, "split": "val", "max_tokens": 8, "run_every": every} for name, _, every in suites
    ]
    made = experiment(tmp_path, "x", fn_name="exact_match", steps=3, entries=entries)
    result = made.run(RunOptions(watchers=[Release()]))
    # The evaluation of step 2 ends last: it waits for that of step 3.
    assert watch.events == [("eval", 3), ("eval", 2), ("eval", None)]
    in_order = [(2, "late"), (3, "early"), (None, "late")]
    assert [(one.step, one.name) for one in result.runs[0].evals] == in_order
    record = json.loads((tmp_path / "x" / "arm" / "run_result.json").read_text())
    assert [(one["step"], one["name"]) for one in record["evals"]] == in_order
    completed = made.run().runs[0]  # read back from the journal, which has them as they ended
    assert completed.finished_before and [(one.step, one.name) for one in completed.evals] == in_order


def test_a_score_is_that_of_the_snapshots_weights_and_not_of_later_ones(tmp_path, watch):
    result = experiment(tmp_path, "whole", fn_name="slow", run_every=2).run(RunOptions(watchers=[watch]))
    said = {found.step: _said(found) for found in result.runs[0].evals}
    for step in (2, 4, 6):
        short = experiment(tmp_path, f"until{step}", fn_name="exact_match", steps=step).run()
        (final,) = short.runs[0].evals
        assert final.step is None and _said(final) == said[step]
    assert said[2] != said[4] != said[6]


def _said(result):
    return [rollout.completion for rollout in result.rollouts]


def test_what_a_score_is_made_of_stands_in_the_record(tmp_path, watch):
    watch.trained.set()
    entry = {"num_samples": 3, "temperature": 1, "breakdown_keys": ["task"], "metrics": ["pass@1", "mean_reward"]}
    experiment(tmp_path, "x", fn_name="slow", run_every=3, **entry).run()
    record = json.loads((tmp_path / "x" / "arm" / "run_result.json").read_text())
    evals = {found["step"]: found for found in record["evals"]}
    assert set(evals) == {3, 6}
    for found in evals.values():
        parts = [scores for values in found["breakdown"].values() for scores in values.values()]
        for score in [*found["scores"], *(score for scores in parts for score in scores)]:
            assert (score["n_tasks"], score["n_rollouts"], score["n_errors"]) == (4, 12, 0)
            assert score["low"] <= score["value"] <= score["high"]
        assert [score["metric"] for score in found["scores"]] == ["pass@1", "mean_reward"]


def test_an_entry_has_as_many_places_as_it_asks_for(tmp_path, watch):
    inside, most, places = set(), [0], [0]

    @verifiers.register("gathers")
    class Gathers:
        async def verify(self, *, prompt, completion, target):
            inside.add(target)
            most[0] = max(most[0], len(inside))
            for _ in range(PATIENCE_SECONDS * 100):
                await asyncio.sleep(0.01)  # time for one more to come in, if there were a place
                if most[0] >= places[0]:
                    inside.discard(target)
                    return 1.0
            raise AssertionError(f"{most[0]} places, not {places[0]}")

    for asked, places[0] in ((1, 1), (2, 2), (None, 4)):
        most[0] = 0
        entry = {} if asked is None else {"n_concurrent": asked}
        result = experiment(tmp_path, f"places{asked}", fn_name="gathers", steps=1, **entry).run(RunOptions(fresh=True))
        assert most == places and result.runs[0].evals[0].scores[0].value == 1.0


def test_a_stop_that_hangs_on_scores_comes_at_the_same_step_however_slow_they_are(tmp_path, watch):
    @verifiers.register("takes_its_time")
    class TakesItsTime:
        async def verify(self, *, prompt, completion, target):
            await asyncio.sleep(0.2)
            return 0.0

    stopping = EarlyStopping(metric="val/words/pass@1", mode="max", patience=1)
    result = experiment(tmp_path, "x", fn_name="takes_its_time", steps=60, run_every=2).run(
        RunOptions(watchers=[stopping])
    )
    (run,) = result.runs
    assert run.metrics["steps"] == 4, "the second score is the first that is no better"
    assert "best 0 at step 2" in run.stopped_early
