"""A mean or a difference of means, and how far it can be trusted.

In: its value, and how much of it comes from which tasks and which seeds there were. Out: an `Estimate`: its standard
error, intervals and p-values.

The variance of a mean has a part over tasks, known from many of them, and a part over seeds, known from few. What the
few seeds leave open is averaged over: p is the mean, over the values that the seeds' true variance may have given what
was seen of it (scaled inverse chi-squared, never below the noise of single values, which is known well), of the p that
each would give. That is a generalised p-value (Tsui and Weerahandi 1989); with tasks alone it is Student's t over
tasks. Averaging Student's quantiles by the observed parts of the variance (Cochran 1964), as was done before, takes
seeds that agree by chance for seeds that do not matter: with two seeds 1.2 % of p-values were below 0.001.

Two arms with the same number of seeds have one variance over seeds; its degrees of freedom are the mean of Welch's and
those of one arm (`comparison` says why). Where the numbers differ, each arm's variance is drawn on its own (the
Behrens-Fisher problem; with seeds alone that is the Behrens-Fisher test): Welch's degrees of freedom are then those of
the arm with many seeds whenever the few seeds of the other agree by chance. With 2 and 5 seeds, the 2 scattering ten
times as much, that made 8.5 % false verdicts and 3 % of p-values below 0.001.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


# How far a score can be trusted: 95 % intervals over tasks.
#
# In: a statistic and the tasks it folds, two or more. Out: (low, high). Tasks are the units: rollouts of one task are
# not independent, so a task goes in or stays out as a whole. Pure functions.


Interval = tuple[float, float]

LEVEL = 0.95
MAX_GROUPS = 200
"""More groups than this would make the interval slower, not better."""


def wilson_interval(successes: int, n: int, level: float = LEVEL) -> Interval:
    """Of a share of yes among n yes-or-no answers; stays inside [0, 1] and does not collapse at the ends."""
    return wilson_around(successes / n, n, NormalDist().inv_cdf((1 + level) / 2))


def wilson_around(share: float, n: float, quantile: float) -> Interval:
    """Wilson's interval of a share that is worth n independent answers; n need not be whole."""
    square = quantile * quantile
    centre = share + square / (2 * n)
    spread = quantile * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    scale = 1 + square / n
    # At 0 and 1 centre and spread cancel exactly; rounding would leave an end of 1e-18 where 0 is meant, and next to 1
    # one of 1 + 2e-16.
    low = 0.0 if share <= 0.0 else max((centre - spread) / scale, 0.0)
    high = 1.0 if share >= 1.0 else min((centre + spread) / scale, 1.0)
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
        # All tasks over those of the group, h_j in the paper: the pseudo-value extrapolates from `rest` to all tasks,
        # and its squared distance is divided by h_j - 1.
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


NODES, NODES_OF_TWO, POWER = 64, 40, 4
"""Of the integral over one variance over seeds, and over each of two: with 64, Student's t with 1 to 20 degrees of
freedom comes out within 1 part in 30,000 for p from 1e-6 up; with 40 x 40, the Behrens-Fisher test within 1 part in
1,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedVariance:
    """What the seeds of one arm, or of two with as many seeds, add to the variance of a mean."""

    scatter: float
    """As the scatter of the runs' means has it: effects of seeds, and noise."""
    noise: float
    """What of `scatter` the noise of single values would make, which is also part of the variance over tasks."""
    degrees: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What was found, with what is known of its error."""

    value: float
    n_tasks: int
    centre: float
    """Middle of the interval; differs from `value` where that is the better interval (Bonett and Price)."""
    task_variance: float = 0.0
    """Of the mean, as the scatter over tasks has it; with seeds that have no effect, this is all."""
    task_degrees: float = math.inf
    seeds: tuple[SeedVariance, ...] = ()
    """At most two, independent of each other. Empty when no arm has several seeds: then only the tasks are a sample."""
    is_seed_variance_unknown: bool = False
    """An arm has one seed where others have several: how far its seeds scatter cannot be known, so there is neither an
    error nor an interval nor a p-value."""
    bounds: Interval | None = None
    """Where the interval cannot leave, as (-1, 1) for differences of shares."""

    @property
    def seed_scatter(self) -> float:
        return sum(part.scatter for part in self.seeds)

    @property
    def seed_noise(self) -> float:
        return sum(part.noise for part in self.seeds)

    @property
    def variance(self) -> float:
        """Tasks and seeds together, the noise counted once; never below what the tasks alone say."""
        of_tasks = max(self.task_variance - self.seed_noise, 0.0)
        return max(self.task_variance, self.seed_scatter + of_tasks)

    @property
    def error(self) -> float | None:
        """Standard error; None where there is nothing to estimate it from."""
        if self.is_seed_variance_unknown:
            return None
        # The limit is relative to the value: a difference that is the same on every task has a variance of rounding
        # errors, and a p-value made from those would be next to 0.
        error = math.sqrt(self.variance)
        return error if error > 1e-12 * abs(self.value) else None

    def critical(self, tail: float) -> float:
        """How many standard errors are exceeded with this chance, on one side."""
        error = self.error
        if error is None or not self._seeds_count:
            return -quantile(tail, self.task_degrees)
        if self._only_one_seed_variance:
            return -quantile(tail, self.seeds[0].degrees)
        from scipy.optimize import brentq

        def excess(x: float) -> float:
            return math.log(max(self.beyond(math.exp(x)), 1e-300)) - wanted

        # On logarithms: with two seeds the chance falls off as slowly as Cauchy's. A chance that is not reached between
        # these ends, as for variances at the end of what floating point holds, has the end for an answer.
        wanted, low, high = math.log(tail), math.log(error) - 20.0, math.log(error) + 60.0
        if excess(low) <= 0.0 or excess(high) >= 0.0:
            return math.exp(low if excess(low) <= 0.0 else high) / error
        return math.exp(brentq(excess, low, high)) / error

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
        # The nearer end of the margin gives the larger of the two p-values; outside the margin the distance is negative
        # and p above 0.5.
        return None if self.error is None else self.beyond(margin - abs(self.centre))

    def beyond(self, distance: float) -> float:
        """Chance of an error above `distance`; the inverse of `critical`."""
        assert self.error is not None
        if distance < 0:
            return 1.0 - self.beyond(-distance)
        if not self._seeds_count:
            return tail(distance / self.error, self.task_degrees)
        if self._only_one_seed_variance:
            return tail(distance / self.error, self.seeds[0].degrees)
        import numpy as np
        from scipy.special import stdtr

        # A grid over the variances that the seeds may have: 64 nodes for one part, all 40 x 40 pairs for two.
        of_seeds, weights = np.zeros(1), np.ones(1)
        for part in self.seeds:
            # Welch's degrees are no whole numbers; rounded, they are a usable key of the cache.
            chi_squared, chances = _seed_draws(round(part.degrees, 6), NODES if len(self.seeds) == 1 else NODES_OF_TWO)
            drawn = np.maximum(part.degrees * part.scatter / chi_squared, part.noise)
            of_seeds, weights = np.add.outer(of_seeds, drawn).ravel(), np.multiply.outer(weights, chances).ravel()
        variance = of_seeds + max(self.task_variance - self.seed_noise, 0.0)
        # Where the seeds make most of the variance, how well that of the tasks is known matters less (Satterthwaite).
        # As a ratio: values of 1e-100 have variances of 1e-200, and a floor in their unit would take all degrees away.
        with np.errstate(over="ignore"):
            times = variance / self.task_variance if self.task_variance > 0.0 else np.full_like(variance, math.inf)
        # A million degrees differ from the normal distribution in no digit that is printed; infinite ones end here too.
        degrees = np.minimum(self.task_degrees * np.minimum(times, 1e6) ** 2, 1e6)
        return float(weights @ stdtr(degrees, -distance / np.sqrt(variance)))

    @property
    def _seeds_count(self) -> bool:
        return self.seed_scatter > 0.0 or self.seed_noise > 0.0

    @property
    def _only_one_seed_variance(self) -> bool:
        return len(self.seeds) == 1 and self.task_variance <= 0.0 and self.seed_noise <= 0.0


@cache
def _seed_draws(degrees: float, nodes: int) -> tuple[Array, Array]:
    """Values of chi-squared, and their weights, that stand for its distribution: close together where it is small, as
    the rare values that make the seeds' variance large decide about small p-values."""
    from scipy.special import gammaincinv

    # The integral over u, chi-squared's distribution function, with u = x ** POWER: that crowds the nodes near u = 0,
    # and the last factor is du/dx.
    places, weights = _places(nodes)
    return 2 * gammaincinv(degrees / 2, places**POWER), weights * POWER * places ** (POWER - 1)


@cache
def _places(nodes: int) -> tuple[Array, Array]:
    """Gauss and Legendre's places between 0 and 1, with their weights; an eigenvalue problem, so solved once."""
    import numpy as np

    places, weights = np.polynomial.legendre.leggauss(nodes)
    return (places + 1) / 2, weights / 2


def quantile(probability: float, degrees: float) -> float:
    """Of Student's t; of the normal distribution for infinite degrees."""
    from scipy.special import ndtri, stdtrit  # late: scipy costs 50 ms

    return float(ndtri(probability) if math.isinf(degrees) else stdtrit(degrees, probability))


def tail(distance: float, degrees: float) -> float:
    """Chance of a value above `distance`."""
    from scipy.special import ndtr, stdtr

    # The lower tail of the negative, and not 1 - cdf: that would be 0 for every chance below 1e-16.
    return float(ndtr(-distance) if math.isinf(degrees) else stdtr(degrees, -distance))
