"""How many more tasks, or seeds, an undecided comparison would need.

In: an `Estimate` of a difference and the levels it is judged at. Out: numbers to add, or None where no number of them
helps. They rest on the difference and the scatter staying as they were seen, so they are a plan and no promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from evsys_sdk.stats.intervals import Estimate, SeedVariance, quantile

POWER = 0.8
"""How likely the next look is to settle it, if the difference is what it seems."""
MOST_TASKS, MOST_SEEDS = 1_000_000, 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerQuestion:
    """What would settle a comparison: a difference that is not 0, or one that is surely below the margin."""

    estimate: Estimate
    margin: float
    alpha: float
    """Of this one comparison, after correction for the others."""


def more_tasks(question: PowerQuestion) -> int | None:
    """To add to the tasks there are, with the same seeds."""
    n = question.estimate.n_tasks
    found = _least(lambda count: is_settled(question, tasks=count), n + 1, MOST_TASKS)
    return None if found is None else found - n


def more_seeds(question: PowerQuestion, seeds: int) -> int | None:
    """To add to each arm's `seeds`, on the same tasks; None too where a single seed does not show their effect."""
    if not question.estimate.seeds:
        return None
    found = _least(lambda count: is_settled(question, times=count / seeds), seeds + 1, MOST_SEEDS)
    return None if found is None else found - seeds


def more_of_both(question: PowerQuestion, seeds: int) -> tuple[int, int] | None:
    """Tasks and seeds to add where neither helps alone: so many times both."""
    if not question.estimate.seeds:
        return None
    n, most = question.estimate.n_tasks, MOST_SEEDS // seeds
    found = _least(lambda times: is_settled(question, tasks=n * times, times=times), 2, max(most, 2))
    return None if found is None else (n * (found - 1), seeds * (found - 1))


def is_settled(question: PowerQuestion, *, tasks: int | None = None, times: float = 1.0) -> bool:
    """True when so many tasks and so many times the seeds would very likely do."""
    found = question.estimate
    plan = expected_estimate(found, tasks or found.n_tasks, times)
    if plan.error is None:
        return False
    gap, spare = abs(found.value), question.margin - abs(found.value)
    # With chance POWER the next estimate falls short of the true distance by less than this.
    slack = quantile(POWER, math.inf) * plan.error
    # A distance is at least `critical(alpha)` standard errors where the chance to be beyond it is at most alpha.
    # Against 0 the test is two-sided, against the margin each of the two is one-sided: hence alpha / 2 and alpha.
    return (gap > slack and plan.beyond(gap - slack) <= question.alpha / 2) or (
        spare > slack and plan.beyond(spare - slack) <= question.alpha
    )


def expected_estimate(found: Estimate, tasks: int, times: float) -> Estimate:
    """The estimate to expect with other numbers of tasks and seeds than its own."""
    over_tasks = found.n_tasks / tasks
    share = over_tasks / times
    # The effect of seeds averages out over seeds alone; the noise of single values over tasks and seeds both.
    seeds = tuple(
        SeedVariance(
            scatter=max(part.scatter - part.noise, 0.0) / times + part.noise * share,
            noise=part.noise * share,
            degrees=part.degrees * times,
        )
        for part in found.seeds
    )
    return replace(
        found,
        n_tasks=tasks,
        task_variance=max(found.task_variance - found.seed_noise, 0.0) * over_tasks + found.seed_noise * share,
        task_degrees=found.task_degrees if math.isinf(found.task_degrees) else tasks - 1,
        seeds=seeds,
    )


def _least(works: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest count from low to high that works, if more is never worse."""
    if not works(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle + 1, high)
    return low
