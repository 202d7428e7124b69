"""`run_result.json` is written and read by one class; `extras` holds what the algorithm put there, and nothing else."""

import json
import math

import pytest

from evsys_sdk.config import ExperimentConfig
from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.experiment import Experiment
from evsys_sdk.protocols import EvalResult, RunResult, Score, StoppedAt
from evsys_sdk.record.models import ExperimentRecord, RunRecord, eval_summary
from evsys_sdk.registry import register_algorithm

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def _config(tmp_path, algorithm="mock_sft"):
    return {
        "name": "e",
        "output_dir": str(tmp_path / "out"),
        "run": {
            "name": "r",
            "model": {"name": "m"},
            "backend": {"kind": "mock"},
            "algorithm": {"kind": algorithm},
            "data": {"source_kind": "in_memory", "rows": [CHAT]},
        },
    }


def test_a_record_comes_back_as_it_was_written(tmp_path):
    evals = [EvalResult(name="tools", split="val", scores=[Score(metric="pass@1", value=0.5, n_tasks=4)], step=3)]
    stopped = StoppedAt(step=3, total_steps=9, checkpoint_step=2, resumes=False)
    metrics = {"steps": 3, "loss": math.inf, "rate": 0.5}
    record = RunRecord(run_id="e/r", status="cancelled", metrics=metrics, evals=evals, stopped_at=stopped)
    record.write(tmp_path)
    assert RunRecord.load(tmp_path) == record
    assert json.loads((tmp_path / RUN_RESULT_FILE).read_text())["metrics"] == {
        "steps": 3, "loss": "Infinity", "rate": 0.5,
    }  # fmt: skip


def test_notes_of_ours_in_records_of_earlier_versions_are_found(tmp_path):
    notes = {"paused_at": 4, "stopped_early": "good enough", "dropped_rows": ["far"]}
    (tmp_path / RUN_RESULT_FILE).write_text(json.dumps({"run_id": "e/r", "status": "pruned", "notes": notes}))
    found = RunRecord.load(tmp_path)
    assert (found.paused_at, found.stopped_early, found.notes) == (4, "good enough", {"dropped_rows": ["far"]})


def test_a_record_older_than_chosen_steps_takes_the_step_from_the_name_of_its_weights(tmp_path):
    evals = [
        {"name": "tools", "split": "val", "step": step, "scores": [{"metric": "pass@1", "value": value, "n_tasks": 4}]}
        for step, value in ((5, 0.75), (10, 0.25))
    ]
    run = {"run_id": "e/r", "status": "completed", "metrics": {"steps": 12}, "evals": evals}
    run["artifacts"] = {"final_sampler": "/out/r/weights/step-000005-9213f65fa381.sampler.npz"}
    (tmp_path / RUN_RESULT_FILE).write_text(json.dumps(run))
    assert RunRecord.load(tmp_path).chosen_steps == {"": 5}
    [found] = ExperimentRecord.model_validate({"experiment": "e", "runs": [run]}).runs
    assert found.last_score("val/tools/pass@1").value == 0.75
    for change in (
        {"metrics": {"steps": 5}},  # ended with its last weights
        {"metrics": {"sft/steps": 12}},  # phases count their steps from 1
        {"status": "failed"},
        {"artifacts": {"final_sampler": "/out/r/weights/mine"}},
    ):
        [other] = ExperimentRecord.model_validate({"experiment": "e", "runs": [run | change]}).runs
        assert other.chosen_steps == {} and other.last_score("val/tools/pass@1").value == 0.25, change


def test_a_note_of_the_algorithm_may_have_any_name(tmp_path):
    RunRecord(run_id="e/r", status="completed", notes={"paused_at": 7, "stopped_at": "noon"}).write(tmp_path)
    found = RunRecord.load(tmp_path)
    assert found.paused_at is None and found.notes == {"paused_at": 7, "stopped_at": "noon"}


def test_a_broken_record_names_the_file_and_the_place(tmp_path):
    assert RunRecord.load(tmp_path) is None and RunRecord.find(tmp_path) is None
    (tmp_path / RUN_RESULT_FILE).write_text('{"run_id": "e/r", "metrics": {"loss": "high"}}')
    with pytest.raises(EvsysError, match=r"run_result.json cannot be read: metrics.loss"):
        RunRecord.load(tmp_path)
    assert RunRecord.find(tmp_path) is None


def test_half_a_surrogate_pair_in_a_text_does_not_make_a_record_unreadable(tmp_path):
    RunRecord(run_id="e/r", error="said \ud83d").write(tmp_path)
    assert RunRecord.load(tmp_path).error == "said \ud83d"
    path = tmp_path / "e.experiment_result.json"
    ExperimentRecord(experiment="e", conclusion="said \ud83d").write(path)
    assert ExperimentRecord.load(path).conclusion == "said \ud83d"


def test_a_summary_has_no_transcripts():
    summary = eval_summary(EvalResult(name="t", split="val", scores=[], clusters={"a": "b"}, seconds=1.23456))
    assert summary["seconds"] == 1.235 and not {"rollouts", "clusters", "clustered_by"} & summary.keys()


def test_extras_of_a_result_are_the_algorithms_own(tmp_path, monkeypatch):
    from evsys_sdk import registry

    registry.algorithms.get("sft")  # so that the built-ins are there when the entries are restored
    monkeypatch.setattr(registry.algorithms, "entries", dict(registry.algorithms.entries))

    @register_algorithm("noting")
    class Noting:
        name = "noting"

        def train(self, ctx):
            return RunResult(run_id=ctx.run_id, status="completed", extras={"mine": 1, "seed": "own"})

    config = _config(tmp_path, algorithm="noting")
    for _ in range(2):  # the second time it is read back
        (run,) = Experiment(ExperimentConfig(**config)).run().runs
        assert run.extras == {"mine": 1, "seed": "own"}
        assert (run.name, run.seed, run.run_dir) == ("r", 42, tmp_path / "out/r")
    assert run.finished_before


def test_an_experiments_record_is_read_as_it_was_written(tmp_path):
    config = ExperimentConfig(**{**_config(tmp_path), "metadata": {"success_metric": "final_loss"}})
    result = Experiment(config).run()
    path = tmp_path / "out/e.experiment_result.json"
    written = json.loads(path.read_text())
    record = ExperimentRecord.load(path)
    assert (record.experiment, record.status, record.best_arm) == ("e", "completed", result.best_arm)
    assert record.runs[0].metrics == result.runs[0].metrics and record.config["run"]["name"] == "r"
    record.write(path)
    assert json.loads(path.read_text()) == written


def test_a_null_is_the_default_and_keys_of_other_versions_are_kept(tmp_path):
    path = tmp_path / "e.experiment_result.json"
    path.write_text('{"name": "e", "arms": null, "best_arm": null, "verdict": null, "of_tomorrow": {"a": null}}')
    record = ExperimentRecord.load(path)
    assert record.experiment == "e" and record.arms == [] and record.verdict.arms == []
    record.write(path)
    again = json.loads(path.read_text())
    assert again["of_tomorrow"] == {"a": None} and again["best_arm"] is None
    path.write_text('{"arms": []}')
    with pytest.raises(EvsysError, match=r"cannot be read: experiment: Field required"):
        ExperimentRecord.load(path)
    assert ExperimentRecord.find(path) is None
