"""A mean or a difference of means, and how far it can be trusted.

In: its value, and how much of it comes from which tasks and which seeds there were. Out: an `Estimate`: its standard
error, intervals and p-values.

The variance of a mean has a part over tasks, known from many of them, and a part over seeds, known from few. What the
few seeds leave open is averaged over: p is the mean, over the values that the seeds' true variance may have given what
was seen of it (scaled inverse chi-squared, never below the noise of single values, which is known well), of the p that
each would give. That is a generalised p-value (Tsui and Weerahandi 1989); with seeds alone it is Student's t with
Welch's degrees of freedom, with tasks alone Student's t over tasks. Averaging Student's quantiles by the observed parts
of the variance (Cochran 1964), as was done before, takes seeds that agree by chance for seeds that do not matter: with
two seeds 1.2 % of p-values were below 0.001.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from evsys_sdk.eval.statistics import LEVEL, Interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

NODES, POWER = 64, 4
"""Of the integral over the seeds' variance: with these, Student's t with 1 to 20 degrees of freedom comes out within 1
part in 30,000 for p from 1e-6 up."""


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

    def critical(self, tail: float) -> float:
        """How many standard errors are exceeded with this chance, on one side."""
        error = self.error
        if error is None or not self._seeds_count:
            return -quantile(tail, self.task_degrees)
        if self._only_seeds:
            return -quantile(tail, self.seed_degrees)
        # Halved on the logarithm: with two seeds the chance falls off as slowly as Cauchy's.
        low, high = math.log(error) - 20.0, math.log(error) + 60.0
        while high - low > 1e-10:
            middle = (low + high) / 2
            low, high = (middle, high) if self.beyond(math.exp(middle)) > tail else (low, middle)
        return math.exp(high) / error

    def interval(self, level: float = LEVEL) -> Interval | None:
        if self.error is None:
            return None
        reach = self.critical((1 - level) / 2) * self.error
        low, high = self.centre - reach, self.centre + reach
        return (max(low, self.bounds[0]), min(high, self.bounds[1])) if self.bounds else (low, high)

    def p_value(self) -> float | None:
        """That a difference this large comes about when there is none; two-sided."""
        return None if self.error is None else min(1.0, 2 * self.beyond(abs(self.centre)))

    def p_equivalent(self, margin: float) -> float | None:
        """That it looks this small when it is at least `margin`: the larger of two one-sided tests (Schuirmann)."""
        return None if self.error is None else self.beyond(margin - abs(self.centre))

    def beyond(self, distance: float) -> float:
        """Chance of an error above `distance`; the inverse of `critical`."""
        assert self.error is not None
        if distance < 0:
            return 1.0 - self.beyond(-distance)
        if not self._seeds_count:
            return tail(distance / self.error, self.task_degrees)
        if self._only_seeds:
            return tail(distance / self.error, self.seed_degrees)
        import numpy as np
        from scipy.special import stdtr

        chi_squared, weights = _seed_draws(round(self.seed_degrees, 6))
        of_seeds = np.maximum(self.seed_degrees * self.seed_scatter / chi_squared, self.seed_noise)
        variance = of_seeds + max(self.task_variance - self.seed_noise, 0.0)
        # Where the seeds make most of the variance, how well that of the tasks is known matters less (Satterthwaite).
        times = np.minimum(np.sqrt(variance) / max(math.sqrt(self.task_variance), 1e-90), 1e3) ** 4
        degrees = np.minimum(self.task_degrees * times, 1e6)
        return float(weights @ stdtr(degrees, -distance / np.sqrt(variance)))

    @property
    def _seeds_count(self) -> bool:
        return bool(self.seed_degrees) and (self.seed_scatter > 0.0 or self.seed_noise > 0.0)

    @property
    def _only_seeds(self) -> bool:
        return self.task_variance <= 0.0 and self.seed_noise <= 0.0


@cache
def _seed_draws(degrees: float) -> tuple[Array, Array]:
    """Values of chi-squared, and their weights, that stand for its distribution: close together where it is small, as
    the rare values that make the seeds' variance large decide about small p-values."""
    import numpy as np
    from scipy.special import gammaincinv

    places, weights = np.polynomial.legendre.leggauss(NODES)
    places, weights = (places + 1) / 2, weights / 2
    return 2 * gammaincinv(degrees / 2, places**POWER), weights * POWER * places ** (POWER - 1)


def quantile(probability: float, degrees: float) -> float:
    """Of Student's t; of the normal distribution for infinite degrees."""
    from scipy.special import ndtri, stdtrit  # late: scipy costs 50 ms

    return float(ndtri(probability) if math.isinf(degrees) else stdtrit(degrees, probability))


def tail(distance: float, degrees: float) -> float:
    """Chance of a value above `distance`."""
    from scipy.special import ndtr, stdtr

    return float(ndtr(-distance) if math.isinf(degrees) else stdtr(degrees, -distance))
