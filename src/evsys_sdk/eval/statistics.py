"""How far a score can be trusted: 95 % intervals over tasks.

In: a statistic and the tasks it folds. Out: (low, high), or None where there is nothing to estimate from.
Tasks are the units: rollouts of one task are not independent, so a task goes in or stays out as a whole.
Pure functions; the only module that knows a quantile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean

Interval = tuple[float, float]

LEVEL = 0.95
MAX_GROUPS = 200
"""More groups than this would make the interval slower, not better."""


def interval[T](
    statistic: Callable[[Sequence[T]], float],
    tasks: Sequence[T],
    *,
    share: bool = True,
    clusters: Sequence[str] | None = None,
) -> Interval | None:
    """The 95 % interval of `statistic(tasks)`; None for fewer than two tasks.

    A statistic that turns out to be the mean of its values on the single tasks gets the interval that a verdict gives
    an arm with one seed (`paired.arm_interval`), so that a score has one interval wherever it is printed. Any other
    gets the jackknife, or None where that fails: a median may not move when any one task is left out, and that is no
    certainty. `share=False` says that the values are no shares of anything, and that 0 and 1 are numbers like others.
    `clusters` names the cluster of each task, where tasks are not independent.
    """
    if len(tasks) < 2:
        return None
    singles = _values_per_task(statistic, tasks)
    if singles is None or not _is_mean(statistic, tasks, singles):
        low, high = jackknife_interval(statistic, tasks)
        return (low, high) if low < high else None
    from evsys_sdk.eval.paired import interval_of_run  # late: it costs numpy, and it imports this module

    return interval_of_run(singles, share=share, clusters=clusters)


def _values_per_task[T](statistic: Callable[[Sequence[T]], float], tasks: Sequence[T]) -> list[float] | None:
    try:
        return [statistic([task]) for task in tasks]
    except Exception:  # a statistic of several tasks, such as a spread, has no value on one
        return None


def _is_mean[T](statistic: Callable[[Sequence[T]], float], tasks: Sequence[T], singles: list[float]) -> bool:
    # Asked twice: a median may agree with the mean once, by chance.
    return all(
        math.isclose(statistic(tasks[:n]), fmean(singles[:n]), rel_tol=1e-9, abs_tol=1e-12)
        for n in (len(tasks), len(tasks) - 1)
    )


def wilson_interval(successes: int, n: int, level: float = LEVEL) -> Interval:
    """Of a share of yes among n yes-or-no answers; stays inside [0, 1] and does not collapse at the ends."""
    return wilson_around(successes / n, n, NormalDist().inv_cdf((1 + level) / 2))


def wilson_around(share: float, n: float, quantile: float) -> Interval:
    """Wilson's interval of a share that is worth n independent answers; n need not be whole."""
    square = quantile * quantile
    centre = share + square / (2 * n)
    spread = quantile * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    scale = 1 + square / n
    low = 0.0 if share <= 0.0 else (centre - spread) / scale
    high = 1.0 if share >= 1.0 else (centre + spread) / scale
    return low, high


def mean_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Of the mean of independent values: Student's t."""
    n, mean = len(values), fmean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return _around(mean, math.sqrt(variance / n), n - 1, level)


def jackknife_interval[T](
    statistic: Callable[[Sequence[T]], float], tasks: Sequence[T], *, groups: int = MAX_GROUPS, level: float = LEVEL
) -> Interval:
    """Of any smooth statistic: leave out a group of tasks at a time and see how much it moves.

    Groups may differ in size by one; the weights are those of Busing, Meijer and van der Leeden (1999), which for
    groups of one task are the ordinary delete-one jackknife.
    """
    n, count = len(tasks), min(len(tasks), groups)
    value = statistic(tasks)
    pseudo, share = [], []
    for group in range(count):
        rest = [task for index, task in enumerate(tasks) if index % count != group]
        ratio = n / (n - len(rest))
        pseudo.append(ratio * value - (ratio - 1) * statistic(rest))
        share.append(1 / ratio)
    centre = math.fsum(p * s for p, s in zip(pseudo, share, strict=True))
    variance = fmean((p - centre) ** 2 / (1 / s - 1) for p, s in zip(pseudo, share, strict=True))
    return _around(value, math.sqrt(variance), count - 1, level)


def _around(value: float, standard_error: float, degrees: int, level: float) -> Interval:
    from scipy.special import stdtrit  # late: scipy costs 50 ms

    reach = float(stdtrit(degrees, (1 + level) / 2)) * standard_error
    return value - reach, value + reach
