"""How sure is the mean of an arm, and the difference of two, when both tasks and seeds are samples?

In: values as arrays, one row per seed, one column per task; for two arms the same tasks in the same order. Out: an
`Estimate` with its standard error and degrees of freedom, from which intervals and p-values follow.

A value is taken for task effect + seed effect + rest. The variance of a mean then has a part over tasks (those of one
task are not independent, so tasks are the clusters: Miller 2024) and a part over seeds; both count. Two arms that
share tasks are compared task by task, which takes the tasks' own difficulty out of the difference. Their seeds are not
paired: equal numbers do not make two recipes' luck alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from evsys_sdk.eval.statistics import LEVEL, Interval, wilson_around, wilson_interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FEW = 5
"""Where fewer tasks than this tell anything apart, their scatter says too little of the tasks not seen."""
WILD = 10.0
"""How many times the usual an arm's seeds may scatter and still count in full for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedSpread:
    """How much the means of an arm's runs scatter, and how much of that the tasks' noise alone would do."""

    scatter: float
    """Variance of the runs' means."""
    noise: float
    """What that variance would be if the seed had no effect of its own."""
    degrees: float


type SeedPart = tuple[SeedSpread, float]
"""The spread of an arm's seeds, and the weight of one seed in the arm's mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean or a difference of means, and how far it can be trusted."""

    value: float
    n_tasks: int
    centre: float
    """Middle of the interval; differs from `value` where that is the better interval (Bonett and Price)."""
    task_variance: float = 0.0
    """Of the mean, from the tasks (and what is left of single values)."""
    seed_variance: float = 0.0
    """Of the mean, from the seeds; 0 where seeds are not known to matter."""
    noise_variance: float = 0.0
    """The part of `task_variance` that more seeds would average out."""
    seed_degrees: float = 0
    """Of the part from the seeds; 0 when no arm has several: then only the tasks are a sample."""
    error: float | None = None
    """Standard error; None where there is nothing to estimate it from."""
    degrees: float = math.inf
    bounds: Interval | None = None
    """Where the interval cannot leave, as (-1, 1) for differences of shares."""

    def interval(self, level: float = LEVEL) -> Interval | None:
        if self.error is None:
            return None
        reach = quantile((1 + level) / 2, self.degrees) * self.error
        low, high = self.centre - reach, self.centre + reach
        return (max(low, self.bounds[0]), min(high, self.bounds[1])) if self.bounds else (low, high)

    def p_value(self) -> float | None:
        """That a difference this large comes about when there is none; two-sided."""
        return None if self.error is None else min(1.0, 2 * self._beyond(abs(self.centre)))

    def p_equivalent(self, margin: float) -> float | None:
        """That it looks this small when it is at least `margin`: the larger of two one-sided tests (Schuirmann)."""
        return None if self.error is None else self._beyond(margin - abs(self.centre))

    def _beyond(self, distance: float) -> float:
        assert self.error is not None
        return tail(distance / self.error, self.degrees)


def quantile(probability: float, degrees: float) -> float:
    """Of Student's t; of the normal distribution for infinite degrees."""
    from scipy.special import ndtri, stdtrit  # late: scipy costs 50 ms

    return float(ndtri(probability) if math.isinf(degrees) else stdtrit(degrees, probability))


def tail(distance: float, degrees: float) -> float:
    """Chance of a value above `distance`."""
    from scipy.special import ndtr, stdtr

    return float(ndtr(-distance) if math.isinf(degrees) else stdtr(degrees, -distance))


def seed_spread(values: Array) -> SeedSpread | None:
    """Of one arm; None for a single seed or a single task, where it cannot be known."""
    seeds, tasks = values.shape
    if seeds < 2 or tasks < 2:
        return None
    runs, columns = values.mean(axis=1), values.mean(axis=0)
    rest = values - runs[:, None] - columns[None, :] + columns.mean()
    noise = float((rest**2).sum()) / ((seeds - 1) * (tasks - 1)) / tasks
    return SeedSpread(scatter=float(runs.var(ddof=1)), noise=noise, degrees=seeds - 1)


def difference(
    arm: Array, other: Array, *, unit: bool, other_is_fixed: bool = False, pooled: SeedSpread | None = None
) -> Estimate:
    """Mean of `arm` less mean of `other`, on the same tasks.

    `unit` says that values lie between 0 and 1. `other_is_fixed` says that the other is one model, as the untrained one
    is, and no draw of a recipe. An arm with a single seed is taken to scatter as the other does, or as all arms do.
    """
    deltas = arm.mean(axis=0) - other.mean(axis=0)
    weights = [1 / len(arm)] if other_is_fixed else [1 / len(arm), 1 / len(other)]
    parts = _seed_parts([arm, other][: len(weights)], weights, pooled)
    if unit and not parts and _all_yes_or_no(arm, other):
        return _bonett_price(deltas)
    if not unit:
        return _estimate(deltas, parts)
    return replace(_estimate(deltas, parts, least=_least_variance(deltas)), bounds=(-1.0, 1.0))


def _seed_parts(arms: list[Array], weights: list[float], pooled: SeedSpread | None) -> list[SeedPart]:
    """The spread of each arm's seeds with its weight in the mean; nothing where no spread is known."""
    own = [(seed_spread(values), weight) for values, weight in zip(arms, weights, strict=True)]
    parts = [(spread, weight) for spread, weight in own if spread]
    if not parts:
        return [(pooled, sum(weights))] if pooled else []
    if len(parts) < len(own):
        parts = [(parts[0][0], sum(weights))]
    return supported(parts, pooled)


def arm_mean(values: Array, pooled: SeedSpread | None = None) -> Estimate:
    """The mean of one arm over its seeds and tasks."""
    return _estimate(values.mean(axis=0), _seed_parts([values], [1 / len(values)], pooled))


def arm_interval(values: Array, estimate: Estimate, *, unit: bool, level: float = LEVEL) -> Interval | None:
    """Of an arm's mean: Wilson's where values lie between 0 and 1, Student's otherwise; None for a single task.

    With several seeds, or values in between, Wilson's form is given the number of yes-or-no answers that would be just
    as uncertain (Korn and Graubard 1998), which is that of the tasks where nearly all of them agree.
    """
    share, n = estimate.value, estimate.n_tasks
    if n < 2 or not unit:
        return estimate.interval(level)
    if len(values) == 1 and _all_yes_or_no(values):
        return wilson_interval(round(share * n), n, level)
    worth = float(n)
    if estimate.error is not None and 0.0 < share < 1.0:
        worth = share * (1 - share) / estimate.error**2
    if _tell_apart(values.mean(axis=0)) < FEW:
        worth = min(worth, n)
    return wilson_around(share, worth, quantile((1 + level) / 2, estimate.degrees))


def pooled_spread(arms: Iterable[SeedSpread | None]) -> SeedSpread | None:
    """That of all arms with several seeds together; None when there are none."""
    known = [spread for spread in arms if spread]
    if not known:
        return None
    degrees = sum(spread.degrees for spread in known)
    most = WILD * median(spread.scatter for spread in known)  # one arm gone wild must not spoil what is said of others
    return SeedSpread(
        scatter=sum(min(s.scatter, most) * s.degrees for s in known) / degrees,
        noise=sum(s.noise * s.degrees for s in known) / degrees,
        degrees=degrees,
    )


def supported(parts: list[SeedPart], pooled: SeedSpread | None) -> list[SeedPart]:
    """The arms' own scatter over seeds where that is large; else partly that of all arms.

    Two seeds that happen to agree do not make an arm certain: the fewer seeds, the more other arms' have a say. Seeds
    that disagree more than those of other arms count as they are.
    """
    own = sum((spread.scatter - spread.noise) * weight for spread, weight in parts)
    if not pooled or own >= (pooled.scatter - pooled.noise) * sum(weight for _, weight in parts):
        return parts
    share = 1 / sum(spread.degrees for spread, _ in parts)
    return [(_blend(spread, pooled, share), weight) for spread, weight in parts]


def _blend(own: SeedSpread, pooled: SeedSpread, share: float) -> SeedSpread:
    """`share` of the pooled spread and the rest of the arm's own."""
    theirs, mine = share * pooled.scatter, (1 - share) * own.scatter
    doubt = theirs**2 / pooled.degrees + mine**2 / own.degrees
    return SeedSpread(
        scatter=theirs + mine,
        noise=share * pooled.noise + (1 - share) * own.noise,
        degrees=(theirs + mine) ** 2 / doubt if doubt > 0 else own.degrees,
    )


def _estimate(per_task: Array, parts: list[SeedPart], *, least: float = 0.0) -> Estimate:
    """The mean of `per_task` with the variance of tasks and, each with its weight in it, of the arms' seeds."""
    n, value = len(per_task), float(per_task.mean())
    if n < 2:
        return Estimate(value=value, centre=value, n_tasks=n)
    task = float(per_task.var(ddof=1)) / n
    noise = sum(spread.noise * share for spread, share in parts)
    seed = sum(spread.scatter * share for spread, share in parts) - noise
    degrees = sum(spread.degrees for spread, _ in parts)
    if seed < 0:
        # An estimate below zero is bad luck; it counts the less the fewer seeds it comes from.
        seed *= max(0.0, 1 - 2 / degrees)
    variance = max(task + seed, task / 2)
    error = math.sqrt(max(variance, least))
    return Estimate(
        value=value,
        centre=value,
        n_tasks=n,
        task_variance=max(task, least),
        seed_variance=max(seed, 0.0),
        noise_variance=noise,
        seed_degrees=_seed_degrees(parts),
        error=error if error > 1e-12 * abs(value) else None,
        degrees=n - 1 if variance <= least else _degrees(variance, task, n - 1, parts if seed > 0 else []),
    )


def _seed_degrees(parts: list[SeedPart]) -> float:
    """Of the seeds' part alone; 0 where there is none."""
    doubt = sum((part.scatter * weight) ** 2 / part.degrees for part, weight in parts)
    if doubt > 0:
        return sum(part.scatter * weight for part, weight in parts) ** 2 / doubt
    return sum(part.degrees for part, _ in parts)


def _degrees(variance: float, task: float, task_degrees: int, parts: list[SeedPart]) -> float:
    """Of a sum of variances (Welch 1947, Satterthwaite 1946)."""
    doubt = task**2 / task_degrees + sum((part.scatter * share) ** 2 / part.degrees for part, share in parts)
    return max(1.0, variance**2 / doubt) if doubt > 0 else float(task_degrees)


def _tell_apart(per_task: Array) -> int:
    """How many tasks differ from what most of them say."""
    import numpy as np

    return len(per_task) - int(np.unique(np.round(per_task, 9), return_counts=True)[1].max())


def _least_variance(deltas: Array) -> float:
    """What the variance of a mean difference cannot be below on a scale from 0 to 1, where nearly all tasks agree.

    Tasks that have not been seen may disagree: as in Bonett and Price's interval, one each way is added.
    """
    import numpy as np

    n = len(deltas)
    kinds, counts = np.unique(np.round(deltas, 9), return_counts=True)
    usual = kinds[counts.argmax()]
    up, down = int(counts[kinds > usual].sum()), int(counts[kinds < usual].sum())
    if up + down >= FEW:
        return 0.0
    return float(((up + down + 2) / (n + 2) - ((up - down) / (n + 2)) ** 2) / (n + 2))


def _all_yes_or_no(*arrays: Array) -> bool:
    return all(bool(((values == 0.0) | (values == 1.0)).all()) for values in arrays)


def _bonett_price(deltas: Array) -> Estimate:
    """Of two shares on the same yes-or-no tasks (Bonett and Price 2012): one disagreement is added on each side."""
    n = len(deltas)
    if n < 2:
        return Estimate(value=float(deltas.mean()), centre=float(deltas.mean()), n_tasks=n)
    up, down = (int((deltas > 0).sum()) + 1) / (n + 2), (int((deltas < 0).sum()) + 1) / (n + 2)
    variance = (up + down - (up - down) ** 2) / (n + 2)
    return Estimate(
        value=float(deltas.mean()),
        centre=up - down,
        n_tasks=n,
        task_variance=variance,
        error=math.sqrt(variance),
        bounds=(-1.0, 1.0),
    )
