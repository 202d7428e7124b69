"""How good a trial is: the objective, at its end or at a step.

In: the results of a trial's seeds and their journals. Out: one number, the mean over the seeds that have one. A number
that is not finite is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from evsys_sdk.config.metadata import SuccessMetric
from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.conclusion import over_tasks, task_counts
from evsys_sdk.running.pausing import metrics_at
from evsys_sdk.running.workbench import RunPlan
from evsys_sdk.score_names import resolve

FINAL = "final_"
"""How the last step's number is called among those of the run: `final_loss` is the last `loss`."""


def objective_of(config: ExperimentConfig) -> SuccessMetric | None:
    """What the search is for."""
    own = config.search.objective if config.search is not None else None
    return own if own is not None else config.metadata.success_metric


def final_value(name: str, results: Iterable[RunResult]) -> float | None:
    """The objective of a trial whose runs have ended."""
    return _mean(number(result.metrics, name, result) for result in results if result.status == "completed")


def value_at(name: str, step: int, plans: Sequence[RunPlan], results: Sequence[RunResult]) -> float | None:
    """The objective after `step`: the last score or step's number up to there."""
    return _mean(_at(name, step, plan, result) for plan, result in zip(plans, results, strict=True))


def _at(name: str, step: int, plan: RunPlan, result: RunResult) -> float | None:
    if result.status == "completed" and result.metrics.get("steps", math.inf) <= step:
        return number(result.metrics, name, result)  # it ended before
    journal = plan.journal.latest(plan.run_id)
    if journal is None or result.status == "failed":
        return None
    metrics = metrics_at(journal, step)
    found = number(metrics, name, result)
    return number(metrics, step_name(name, metrics), result) if found is None else found


def step_name(name: str, known: Iterable[str]) -> str:
    """What a step calls the number that the run's `name` is the last of: `final_reward` -> `reward/mean`."""
    bare = name.removeprefix(FINAL)
    return next((key for key in (bare, f"{bare}/mean") if key in known), bare)


def number(metrics: dict[str, float], name: str, result: RunResult) -> float | None:
    """The metric that `name` means, as in `success_metric`; over all tasks where several benchmarks have it."""
    return over_tasks(metrics, resolve(name, metrics), task_counts(result))


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None and math.isfinite(value)]
    return sum(found) / len(found) if found else None
