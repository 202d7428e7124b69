"""A mean or a difference of means, and how far it can be trusted.

In: its value, and how much of it comes from which tasks and which seeds there were. Out: an `Estimate`: its standard
error, intervals and p-values.

The variance of a mean has a part over tasks, known from many of them, and a part over seeds, known from few. Student's
quantiles of the two are averaged by their parts of the variance (Cochran 1964). Satterthwaite's degrees of freedom
take the parts for known; with two or three seeds they are not, and his intervals come out too short.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from evsys_sdk.eval.statistics import LEVEL, Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What was found, with what is known of its error."""

    value: float
    n_tasks: int
    centre: float
    """Middle of the interval; differs from `value` where that is the better interval (Bonett and Price)."""
    task_variance: float = 0.0
    """Of the mean, as the scatter over tasks has it; with seeds that have no effect of their own, this is all."""
    task_degrees: float = math.inf
    seed_scatter: float = 0.0
    """Of the mean, as the scatter of the runs' means has it: effects of seeds, and noise."""
    seed_noise: float = 0.0
    """What of `seed_scatter` the noise of single values would make, which is also part of `task_variance`."""
    seed_degrees: float = 0.0
    """0 when no arm has several seeds: then only the tasks are a sample."""
    bounds: Interval | None = None
    """Where the interval cannot leave, as (-1, 1) for differences of shares."""

    @property
    def variance(self) -> float:
        """Tasks and seeds together, the noise counted once; never below what the tasks alone say."""
        of_tasks = max(self.task_variance - self.seed_noise, 0.0)
        return max(self.task_variance, self.seed_scatter + of_tasks)

    @property
    def error(self) -> float | None:
        """Standard error; None where there is nothing to estimate it from."""
        error = math.sqrt(self.variance)
        return error if error > 1e-12 * abs(self.value) else None

    @property
    def seed_share(self) -> float:
        """How much of the variance counts as known from the seeds only.

        None of it while the runs scatter no more than noise makes them, all of `seed_scatter` when they clearly do; the
        fewer seeds there are, the sooner, as they may well agree by chance.
        """
        if not self.seed_degrees or self.seed_scatter <= 0.0:
            return 0.0
        times = self.seed_scatter / self.seed_noise if self.seed_noise > 0.0 else math.inf
        shown = (times - 1.5 * (1 - 1 / self.seed_degrees)) / 0.5
        return min(max(shown, 0.0), 1.0) * self.seed_scatter / self.variance

    def critical(self, tail: float) -> float:
        """How many standard errors are exceeded with this chance, on one side."""
        share = self.seed_share
        of_tasks = -quantile(tail, self.task_degrees) if share < 1.0 else 0.0
        return (1 - share) * of_tasks + (share * -quantile(tail, self.seed_degrees) if share else 0.0)

    def interval(self, level: float = LEVEL) -> Interval | None:
        if self.error is None:
            return None
        reach = self.critical((1 - level) / 2) * self.error
        low, high = self.centre - reach, self.centre + reach
        return (max(low, self.bounds[0]), min(high, self.bounds[1])) if self.bounds else (low, high)

    def p_value(self) -> float | None:
        """That a difference this large comes about when there is none; two-sided."""
        return None if self.error is None else min(1.0, 2 * self._beyond(abs(self.centre)))

    def p_equivalent(self, margin: float) -> float | None:
        """That it looks this small when it is at least `margin`: the larger of two one-sided tests (Schuirmann)."""
        return None if self.error is None else self._beyond(margin - abs(self.centre))

    def _beyond(self, distance: float) -> float:
        """Chance of an error above `distance`; the inverse of `critical`."""
        assert self.error is not None
        if distance < 0:
            return 1.0 - self._beyond(-distance)
        times, share = distance / self.error, self.seed_share
        if share in (0.0, 1.0):
            return tail(times, self.seed_degrees if share else self.task_degrees)
        ends = tail(times, self.task_degrees), tail(times, self.seed_degrees)
        return _crossing(self.critical, times, min(ends), max(ends))


def _crossing(falling: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where between low and high a falling function meets its target; chances are halved on their logarithm."""
    low = max(low, 1e-300)
    while high > low * (1 + 1e-12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if falling(middle) > target else (low, middle)
    return high


def quantile(probability: float, degrees: float) -> float:
    """Of Student's t; of the normal distribution for infinite degrees."""
    from scipy.special import ndtri, stdtrit  # late: scipy costs 50 ms

    return float(ndtri(probability) if math.isinf(degrees) else stdtrit(degrees, probability))


def tail(distance: float, degrees: float) -> float:
    """Chance of a value above `distance`."""
    from scipy.special import ndtr, stdtr

    return float(ndtr(-distance) if math.isinf(degrees) else stdtr(degrees, -distance))
