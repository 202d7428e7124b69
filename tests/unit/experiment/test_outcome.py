"""The record of an experiment is built, written and read by one class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evsys_sdk.experiment.outcome import ExperimentResult, summarise
from evsys_sdk.protocols import EvalResult, Rollout, RunResult, Score
from evsys_sdk.record.models import ExperimentRecord, RecordedLooks
from evsys_sdk.report.conclusion import ArmSummary, Conclusion, VerdictFindings
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.judge import judge_arms


def result(folder: Path, **metrics: Any) -> ExperimentResult:
    values = {f"t{task}": float(task < 30) for task in range(40)}
    arms = [ArmScores(arm="base", seeds={1: dict.fromkeys(values, 0.0)}), ArmScores(arm="new", seeds={1: values})]
    verdict = judge_arms(arms, metric="val.pass@1")
    looks = RecordedLooks(count=2, before=["first (yesterday)"], rerolls=0)
    findings = VerdictFindings(best_arm="new", verdict=verdict, looks=looks)
    summaries = [
        ArmSummary(arm=arm, statuses=["completed"], scores=[score]) for arm, score in (("base", 0), ("new", 0.75))
    ]
    score = Score(metric="pass@1", value=0.75, low=0.6, high=0.86, n_tasks=40, n_rollouts=40)
    evals = [EvalResult(name="v", split="val", scores=[score], rollouts=[Rollout(task_id="t0")])]
    runs = [
        RunResult(run_id="e/base", status="completed", metrics={"val/v/pass@1": 0.0}),
        RunResult(run_id="e/new", status="completed", metrics={"val/v/pass@1": 0.75, **metrics}, evals=evals),
    ]
    conclusion = Conclusion(arms=summaries, best_arm="new", text="new is best", metric="val.pass@1", findings=findings)
    return ExperimentResult(name="e", runs=runs, conclusion=conclusion, output_dir=folder)


def test_the_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "e.experiment_result.json"
    record = summarise(result(tmp_path, worst=float("nan"), steps=3), {"tags": ["a"], "config": {"name": "e"}})
    record.write(path)
    again = ExperimentRecord.load(path)
    assert again is not None
    copy = tmp_path / "copy.json"
    again.write(copy)
    assert copy.read_bytes() == path.read_bytes()
    assert (again.best_arm, again.verdict.arms[1].mean, again.looks.before) == ("new", 0.75, ["first (yesterday)"])
    assert again.runs[1].evals[0].scores[0].n_tasks == 40 and again.runs[1].evals[0].rollouts == []


def test_a_metric_that_does_not_fit_is_a_warning_and_never_costs_the_record(
    tmp_path: Path, log_lines: list[Any]
) -> None:
    path = tmp_path / "e.experiment_result.json"
    summarise(result(tmp_path, note="not a number")).write(path)
    assert '"not a number"' in path.read_text() and '"new is best"' in path.read_text()
    assert "e/new" in log_lines[-1].getMessage() and "metrics.note" in log_lines[-1].getMessage()
