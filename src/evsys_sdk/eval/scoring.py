"""From rollouts to scores: the one place where rewards are folded, for benchmarks and for `run.eval` alike.

In: rollouts per task, and metrics. Out: `Score`s with their interval, denominator and errors. A rollout that broke
stays in the denominator as a failure; when all of them broke there is no score at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evsys_sdk.data_types import Columns
from evsys_sdk.errors import Cancelled, EvsysError, error_boundary
from evsys_sdk.eval.metrics import as_metric
from evsys_sdk.protocols import MACHINE_FAILURES, Rollout, Score, TaskScores
from evsys_sdk.stats.comparison import interval

NamedMetric = tuple[str, object]
"""The name it was asked for by, and the metric instance."""


def is_errored(rollout: Rollout) -> bool:
    """Whether this rollout has no valid reward. An agent that gave up or ran out of time can be graded."""
    return rollout.reward is None or rollout.status in MACHINE_FAILURES


def scores_of_task(
    task_id: str, rollouts: Sequence[Rollout], *, target: object = None, metadata: Columns | None = None
) -> TaskScores:
    """What is known of one task after its rollouts."""
    return TaskScores(
        task_id=task_id,
        rewards=[0.0 if is_errored(rollout) else float(rollout.reward or 0.0) for rollout in rollouts],
        # An empty text could be the right answer of some task; this one never is.
        predictions=[f"[{r.status}: unscored]" if is_errored(r) else r.completion for r in rollouts],
        target=target,
        n_errors=sum(map(is_errored, rollouts)),
        metadata=metadata or {},
        rollouts=list(rollouts),
    )


def score_all(
    metrics: Sequence[NamedMetric], tasks: Sequence[TaskScores], clusters: Mapping[str, str] | None = None
) -> list[Score]:
    """Every metric on the same tasks, in order; `clusters` says which tasks are not independent."""
    return [score_one(name, metric, tasks, clusters) for name, metric in metrics]


def score_one(
    name: str, metric: object, tasks: Sequence[TaskScores], clusters: Mapping[str, str] | None = None
) -> Score:
    """One metric with its 95 % interval; a metric that fails, or an eval where all errored, has no value."""
    value, bounds, error = None, None, invalid_reason(tasks)
    if error is None:
        try:
            with error_boundary(EvsysError, f"metric {name!r}"):
                fold = as_metric(metric)
                value = fold(tasks)
            of = [clusters.get(task.task_id, task.task_id) for task in tasks] if clusters else None
            try:
                bounds = interval(fold, tasks, share=is_share(metric), clusters=of)
            except Cancelled:
                raise
            except Exception:  # a metric that works on all tasks but not on a part of them has no interval
                bounds = None
        except Cancelled:
            raise
        except EvsysError as exc:
            error = str(exc) if name in str(exc) else f"metric {name!r}: {exc}"
    return Score(
        metric=name,
        value=value,
        low=bounds[0] if bounds else None,
        high=bounds[1] if bounds else None,
        n_tasks=len(tasks),
        n_rollouts=sum(len(task.rewards) for task in tasks),
        n_errors=sum(task.n_errors for task in tasks),
        error=error,
        unit=unit_of(metric),
    )


def invalid_reason(tasks: Sequence[TaskScores]) -> str | None:
    """Why these tasks allow no score: there are none, or every rollout errored."""
    total = sum(len(task.rewards) for task in tasks)
    if total == 0:
        return "no tasks"
    if sum(task.n_errors for task in tasks) == total:
        return f"invalid: {'the only rollout' if total == 1 else f'all {total} rollouts'} errored"
    return None


def why_invalid(tasks: Sequence[TaskScores], rollouts: Sequence[Rollout]) -> str | None:
    """`invalid_reason`, with the first of the errors."""
    reason = invalid_reason(tasks)
    first = next((rollout.error or rollout.status for rollout in rollouts if is_errored(rollout)), None)
    return f"{reason}; the first: {first}" if reason and first else reason


def is_share(metric: object) -> bool:
    """Whether values of this metric between 0 and 1 are shares of something; what has a unit, as dollars, is not."""
    return bool(getattr(metric, "share", not unit_of(metric)))


def unit_of(metric: object) -> str:
    """What values of this metric are counted in: `s`, `USD`, `tokens`; empty where the metric names no unit."""
    return str(getattr(metric, "unit", ""))


def break_down(
    keys: Sequence[str], metrics: Sequence[NamedMetric], tasks: Sequence[TaskScores]
) -> dict[str, dict[str, list[Score]]]:
    """metadata key -> each of its values -> the metrics on the tasks that have it."""
    found: dict[str, dict[str, list[Score]]] = {}
    for key in keys:
        groups: dict[str, list[TaskScores]] = {}
        for task in tasks:
            groups.setdefault(str(task.metadata.get(key, "(none)")), []).append(task)
        found[key] = {value: score_all(metrics, groups[value]) for value in sorted(groups)}
    return found
