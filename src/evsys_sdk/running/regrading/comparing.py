"""Scores before and after.

In: one evaluation's rollouts, graded anew, and metrics. Out: a `Comparison`, folded as every score is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evsys_sdk.errors import Cancelled, EvsysError
from evsys_sdk.eval.metrics import MetricFunction, as_metric
from evsys_sdk.eval.paired import difference
from evsys_sdk.eval.scoring import NamedMetric, is_errored, is_share, score_all, scores_of_task
from evsys_sdk.eval.statistics import Interval, jackknife_interval
from evsys_sdk.protocols import Rollout, Score, TaskScores
from evsys_sdk.record.stored import StoredEval
from evsys_sdk.running.regrading.grading import Regraded, answer_of
from evsys_sdk.verifiers.grading import plan_of

LISTED = 100
"""Changed rollouts that a summary lists; the new record has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One evaluation, before and after."""

    eval: StoredEval
    graded_by: list[str]
    pairs: list[Regraded]
    old: list[Score]
    new: list[Score]
    changes: list[Score]
    """New minus old, task by task: the interval of a difference is not that of two scores that have nothing in
    common."""
    without_task: int = 0
    """Rollouts whose task is not among those they were to be graded by; they count neither here nor there."""

    @property
    def changed(self) -> list[Regraded]:
        return [pair for pair in self.pairs if pair.changed]

    @property
    def is_valid(self) -> bool:
        return any(score.value is not None for score in self.new)


def compare(stored: StoredEval, graded: tuple[list[Regraded], int], metrics: list[NamedMetric]) -> Comparison:
    """Old and new scores of the same rollouts, and the difference."""
    pairs, without_task = graded
    groups: dict[str, list[Regraded]] = {}
    for pair in pairs:
        groups.setdefault(pair.task.task_id, []).append(pair)
    old = [_scores(group, [pair.old for pair in group]) for group in groups.values()]
    new = [_scores(group, [pair.new for pair in group]) for group in groups.values()]
    old_scores, new_scores = score_all(metrics, old), score_all(metrics, new)
    return Comparison(
        eval=stored,
        graded_by=sorted({plan_of(pair.task.verifier).name for pair in pairs}),
        pairs=pairs,
        old=old_scores,
        new=new_scores,
        changes=[
            _change(metric, before, after, list(zip(old, new, strict=True)))
            for (_, metric), before, after in zip(metrics, old_scores, new_scores, strict=True)
        ],
        without_task=without_task,
    )


def _scores(group: list[Regraded], rollouts: list[Rollout]) -> TaskScores:
    task = group[0].task
    return scores_of_task(task.task_id, rollouts, target=plan_of(task.verifier).expected, metadata=task.metadata)


def _change(metric: Any, old: Score, new: Score, tasks: list[tuple[TaskScores, TaskScores]]) -> Score:
    if old.value is None or new.value is None:
        return Score(metric=new.metric, value=None, n_tasks=len(tasks), error=new.error or old.error)
    bounds = None
    if new.low is not None and any(before.rewards != after.rewards for before, after in tasks):
        try:
            bounds = _paired_interval(as_metric(metric), (old.value, new.value), tasks, is_share(metric))
        except Cancelled:
            raise
        except Exception:  # a metric that works on all tasks but not on a part of them has a change and no interval
            bounds = None
    # Where every task changed by the same amount there may be nothing to estimate from, which is no certainty.
    low, high = bounds if bounds and bounds[0] < bounds[1] else (None, None)
    return Score(metric=new.metric, value=new.value - old.value, low=low, high=high, n_tasks=len(tasks))


def _paired_interval(
    fold: MetricFunction, means: tuple[float, float], tasks: list[tuple[TaskScores, TaskScores]], share: bool
) -> Interval | None:
    """Of new minus old on the same tasks: as for two arms where the metric is a mean over tasks, else the jackknife."""
    import numpy

    def change(part: Sequence[tuple[TaskScores, TaskScores]]) -> float:
        return fold([after for _, after in part]) - fold([before for before, _ in part])

    try:
        sides = numpy.array([[fold([task]) for task in side] for side in zip(*tasks, strict=True)])
    except EvsysError:  # a metric of several tasks has no value on one
        return jackknife_interval(change, tasks)
    if not numpy.allclose(sides.mean(axis=1), means):
        return jackknife_interval(change, tasks)
    unit = share and bool((sides >= 0).all() and (sides <= 1).all())
    return difference(sides[1:], sides[:1], unit=unit).interval()


def plain(comparison: Comparison) -> dict[str, Any]:
    stored, changed = comparison.eval, comparison.changed
    return {
        "run": stored.run,
        "split": stored.split,
        "name": stored.name,
        "step": stored.step,
        "stage": stored.stage,
        "graded_by": comparison.graded_by,
        "n_rollouts": len(comparison.pairs),
        "n_changed": len(changed),
        "n_errors_old": sum(is_errored(pair.old) for pair in comparison.pairs),
        "n_errors_new": sum(is_errored(pair.new) for pair in comparison.pairs),
        "n_without_task": comparison.without_task,
        "scores": [
            {"metric": new.metric, "old": asdict(old), "new": asdict(new), "change": asdict(change)}
            for old, new, change in zip(comparison.old, comparison.new, comparison.changes, strict=True)
        ],
        "changed": [_change_line(pair) for pair in changed[:LISTED]],
    }


def _change_line(pair: Regraded) -> dict[str, Any]:
    return {
        "task_id": pair.old.task_id,
        "sample": pair.old.metadata.get("sample"),
        "old_reward": pair.old.reward,
        "new_reward": pair.new.reward,
        "error": pair.new.error,
        "completion": answer_of(pair.new),
    }
