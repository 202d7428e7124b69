"""What a stored run scored on each task.

In: an experiment's record and journal, and one of its arms. Out: per seed and evaluation the tasks' own values of a
metric, as a verdict takes them. The scores are those of the finished weights; where an evaluation was only made in the
loop, those of its last step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict

from evsys_sdk import registry
from evsys_sdk.errors import EvsysError
from evsys_sdk.eval.arm_scores import ArmScores, Values
from evsys_sdk.eval.metrics import as_metric
from evsys_sdk.eval.scoring import invalid_reason, is_errored, is_share, scores_of_task
from evsys_sdk.protocols import Rollout, TaskScores
from evsys_sdk.record import stored
from evsys_sdk.record.history import Entry, read_record
from evsys_sdk.record.stored import StoredEval

Measure = tuple[str, str, str]
"""Split, name of the evaluation, metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArm:
    """The runs of one arm with what is kept of their evaluations."""

    label: str
    evals: list[dict[tuple[str, str], StoredEval]] = field(default_factory=list)
    """Per seed: the last evaluation of each split and name."""
    failed: dict[int, str] = field(default_factory=dict)
    """Seed's place -> why it has no evaluation."""

    @property
    def measures(self) -> set[Measure]:
        return {(*key, metric) for seed in self.evals for key, found in seed.items() for metric in found.metrics}


def read_arm(entry: Entry, arm: str, label: str) -> StoredArm:
    """The arm's seeds from the journal, or from the runs' logs where the journal has none."""
    record = read_record(entry)
    evals, failed = [], {}
    for number, run in enumerate(_runs_of(record, arm)):
        found = _last_evals(entry, run) if run.get("status") == "completed" else {}
        evals.append(found)
        if not found:
            failed[number] = str(run.get("error") or f"run {run.get('status')}, and no rollouts of it are stored")
    return StoredArm(label=label, evals=evals, failed=failed)


def _runs_of(record: Mapping[str, Any], arm: str) -> list[dict[str, Any]]:
    """Runs are recorded arm by arm, seed by seed."""
    runs = list(record.get("runs") or [])
    for found in record.get("arms") or []:
        mine, runs = runs[: len(found["statuses"])], runs[len(found["statuses"]) :]
        if found["arm"] == arm:
            return mine
    return []


def _last_evals(entry: Entry, run: Mapping[str, Any]) -> dict[tuple[str, str], StoredEval]:
    name = str(run["run_id"]).removeprefix(f"{entry.name}/")
    found = stored.evals_in_journal(entry.journal, {str(run["run_id"]): name}) if entry.journal.is_file() else []
    found = found or stored.evals_in_logs(run_dir_of(entry, run), name)
    scores = {(one["split"], one["name"]): [s["metric"] for s in one["scores"]] for one in run.get("evals") or []}
    last: dict[tuple[str, str], StoredEval] = {}
    for one in sorted(
        (one for one in found if one.step != 0), key=lambda one: math.inf if one.step is None else one.step
    ):
        last[one.split, one.name] = one
    return {key: _with_metrics(one, scores.get(key, [])) for key, one in last.items()}


def _with_metrics(one: StoredEval, metrics: Sequence[str]) -> StoredEval:
    from dataclasses import replace

    return one if one.metrics else replace(one, metrics=list(metrics))


def run_dir_of(entry: Entry, run: Mapping[str, Any]) -> Path:
    """Beside the record, wherever that has been moved to."""
    given = Path(str(run.get("run_dir") or run["run_id"]))
    beside = entry.record.parent / given.name
    return beside if beside.is_dir() else given


def arm_scores(arm: StoredArm, measure: Measure) -> ArmScores:
    """The arm's value on every task, seed by seed; a seed that has none is told with its reason."""
    split, name, metric = measure
    seeds: dict[int, Values] = {}
    failed, rollouts = dict(arm.failed), []
    for number, evals in enumerate(arm.evals):
        found = evals.get((split, name))
        if number in failed:
            continue
        try:
            if found is None:
                raise EvsysError(f"it was not scored on {split}/{name}")
            seeds[number] = task_values(found.rollouts, metric)
            rollouts += found.rollouts
        except EvsysError as exc:
            failed[number] = str(exc)
    return ArmScores(arm=arm.label, seeds=seeds, failed=failed, **error_counts(rollouts))


class ErrorCounts(TypedDict):
    """How many of an arm's rollouts errored, as `ArmScores` takes it."""

    n_rollouts: int
    n_errors: int
    first_error: str | None


def error_counts(rollouts: Sequence[Rollout]) -> ErrorCounts:
    """Of the rollouts behind a score, those that no verifier could grade."""
    errored = [rollout for rollout in rollouts if is_errored(rollout)]
    first = errored[0].error or errored[0].status if errored else None
    return ErrorCounts(n_rollouts=len(rollouts), n_errors=len(errored), first_error=first)


def task_values(rollouts: Sequence[Rollout], metric: str) -> dict[str, float]:
    """Task -> the metric on its rollouts alone; EvsysError for a metric that is not the mean of those."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.task_id, []).append(rollout)
    tasks = [scores_of_task(task, found, target=found[0].metadata.get("target")) for task, found in groups.items()]
    reason = invalid_reason(tasks)
    if reason:
        raise EvsysError(reason)
    return _folded(tasks, metric)


def is_share_of_tasks(metric: str) -> bool:
    """Whether values of the metric of this name are shares; a number that no registered metric made is not."""
    try:
        return is_share(registry.metrics.build(metric, {}))
    except EvsysError:
        return False


def _folded(tasks: list[TaskScores], metric: str) -> dict[str, float]:
    try:
        fold = as_metric(registry.metrics.build(metric, {}))
        values = {task.task_id: fold([task]) for task in tasks}
        whole = fold(tasks)
    except Exception as exc:  # a metric of the project's own, or one that needs more than rewards
        raise EvsysError(f"{metric} cannot be had task by task from stored rollouts: {exc}") from exc
    if not math.isclose(whole, fmean(values.values()), rel_tol=1e-9, abs_tol=1e-12):
        raise EvsysError(f"{metric} is no mean over tasks, so arms cannot be paired by it")
    return values
