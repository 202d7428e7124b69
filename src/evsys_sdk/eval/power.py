"""How many more tasks, or seeds, an undecided comparison would need.

In: an `Estimate` of a difference and the levels it is judged at. Out: numbers to add, or None where no number of them
helps. They rest on the difference and the scatter staying as they were seen, so they are a plan and no promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from evsys_sdk.eval.paired import Estimate, quantile

POWER = 0.8
"""How likely the next look is to settle it, if the difference is what it seems."""
MOST_TASKS, MOST_SEEDS = 1_000_000, 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What would settle a comparison: a difference that is not 0, or one that is surely below the margin."""

    estimate: Estimate
    margin: float
    alpha: float
    """Of this one comparison, after correction for the others."""


def more_tasks(question: Question) -> int | None:
    """To add to the tasks there are, with the same seeds."""
    n = question.estimate.n_tasks
    found = _least(lambda count: is_settled(question, tasks=count), n + 1, MOST_TASKS)
    return None if found is None else found - n


def more_seeds(question: Question, seeds: int) -> int | None:
    """To add to each arm's `seeds`, on the same tasks; None too where a single seed does not show their effect."""
    if not question.estimate.seed_degrees:
        return None
    found = _least(lambda count: is_settled(question, times=count / seeds), seeds + 1, MOST_SEEDS)
    return None if found is None else found - seeds


def is_settled(question: Question, *, tasks: int | None = None, times: float = 1.0) -> bool:
    """True when so many tasks, or so many times the seeds, would very likely do."""
    found = question.estimate
    if found.error is None:
        return False
    error, degrees = planned_error(found, tasks or found.n_tasks, times)
    gap, spare = abs(found.value), question.margin - abs(found.value)
    slack = quantile(POWER, math.inf)
    return (
        gap >= (quantile(1 - question.alpha / 2, degrees) + slack) * error
        or spare >= (quantile(1 - question.alpha, degrees) + slack) * error
    )


def planned_error(found: Estimate, tasks: int, times: float) -> tuple[float, float]:
    """Standard error and degrees of freedom with other numbers of tasks and seeds than the estimate's own."""
    over_tasks = found.n_tasks / tasks
    noise = min(found.noise_variance, found.task_variance)
    task = (found.task_variance - noise + noise / times) * over_tasks
    seed = found.seed_variance / times
    variance = task + seed
    doubt = task**2 / max(tasks - 1, 1)
    if seed > 0:
        doubt += (seed + noise * over_tasks / times) ** 2 / (found.seed_degrees * times)
    return math.sqrt(variance), max(1.0, variance**2 / doubt) if doubt > 0 else math.inf


def _least(works: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest count from low to high that works, if more is never worse."""
    if not works(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle + 1, high)
    return low
