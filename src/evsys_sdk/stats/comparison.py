"""How sure is the mean of an arm, and the difference of two, when both tasks and seeds are samples?

In: values as arrays, one row per seed, one column per task; for two arms the same tasks in the same order. Out: an
`Estimate`, from which intervals and p-values follow.

A value is taken for task effect + seed effect + rest. The variance of a mean then has a part over tasks (those of one
task are not independent, so tasks are the clusters: Miller 2024) and a part over seeds; both count. Two arms that
share tasks are compared task by task, which takes the tasks' own difficulty out of the difference. Their seeds are not
paired: equal numbers do not make two recipes' luck alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from evsys_sdk.stats.arm_scores import LARGEST
from evsys_sdk.stats.clusters import by_cluster
from evsys_sdk.stats.intervals import (
    LEVEL,
    Estimate,
    Interval,
    SeedVariance,
    jackknife_interval,
    quantile,
    wilson_around,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


# How much an arm's seeds matter.
#
# In: values as arrays, one row per seed, one column per task. Out: a `SeedSpread` per arm, that of all arms together,
# and which of the two to go by.


WILD = 10.0
"""How many times the usual variance an arm's seeds may have and still count in full for the others. A choice: of two
equal arms with three seeds one scatters ten times as much as the other in 18 %, of those with five in 5 %."""
ROUNDING = 1e-12
"""Standard deviations below this share of the largest value are errors of floating point, and count as 0."""
STANDS_OUT = 0.25
"""Level of the test whether two seeds scatter more than those of the other arms (Bancroft 1944, sometimes pooling)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedSpread:
    """How much the means of an arm's runs scatter, and how much of that the tasks' noise alone would do."""

    scatter: float
    """Variance of the runs' means."""
    noise: float
    """What that variance would be if the seed had no effect."""
    degrees: float
    noise_degrees: float = math.inf


def seed_spread(values: Array) -> SeedSpread | None:
    """Of one arm; None for a single seed or a single task, where it cannot be known."""
    seeds, tasks = values.shape
    if seeds < 2 or tasks < 2:
        return None
    runs, columns = values.mean(axis=1), values.mean(axis=0)
    # What is left of a value beside its seed and its task (two-way analysis, one value per cell). Its variance over the
    # number of tasks is that of a run's mean if seeds have no effect.
    rest = values - runs[:, None] - columns[None, :] + columns.mean()
    noise = float((rest**2).sum()) / ((seeds - 1) * (tasks - 1)) / tasks
    scatter, degrees = float(runs.var(ddof=1)), seeds - 1
    rounding = (ROUNDING * float(abs(values).max())) ** 2
    return SeedSpread(
        scatter=scatter if scatter > rounding else 0.0,
        noise=noise if noise > rounding else 0.0,
        degrees=degrees,
        noise_degrees=degrees * (tasks - 1),
    )


def chance_of(spread: SeedSpread) -> float:
    """That seeds without any effect scatter as much as these (the F test of a two-way analysis)."""
    from scipy.special import fdtrc  # late: scipy costs 50 ms

    if spread.noise <= 0:
        return 0.0 if spread.scatter > 0 else 1.0
    return float(fdtrc(spread.degrees, spread.noise_degrees, spread.scatter / spread.noise))


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


def borrows(own: SeedSpread | None, pooled: SeedSpread | None) -> bool:
    """Whether an arm is taken to scatter as all arms do: with one seed, and with two unless these stand out.

    Two seeds that happen to agree are no proof that seeds do not matter. Three say more of their arm than others do.
    """
    if pooled is None or own is None:
        return own is None
    return own.degrees < 2 and not _stands_out(own, pooled)


def _stands_out(own: SeedSpread, pooled: SeedSpread) -> bool:
    from scipy.special import fdtri  # late: scipy costs 50 ms

    rest = pooled.degrees - own.degrees
    # Without another arm, or without noise as a unit, there is nothing to hold the two seeds against.
    if rest <= 0 or own.noise <= 0 or pooled.noise <= 0:
        return True
    times = own.scatter / own.noise
    # The pool holds this arm too, so its own part is taken out.
    others = (pooled.degrees * pooled.scatter / pooled.noise - own.degrees * times) / rest
    return times > 2 and times > others * float(fdtri(own.degrees, rest, 1 - STANDS_OUT))


def borrow_spread(own: SeedSpread | None, pooled: SeedSpread) -> SeedSpread:
    """How all arms scatter, on the scale of this one: near 0 and 1 both noise and seeds move a share less."""
    if own is None or pooled.noise <= 0:
        return pooled
    return SeedSpread(scatter=pooled.scatter * (own.noise / pooled.noise), noise=own.noise, degrees=pooled.degrees)


FEW = 5
"""Where fewer tasks than this tell anything apart, their scatter says too little of the tasks not seen. A choice:
counts below 5 are the usual limit of normal approximations to shares."""


def difference(
    arm: Array, other: Array, *, unit: bool, other_is_fixed: bool = False, recipes: bool = False
) -> Estimate:
    """Mean of `arm` less mean of `other`, on the same tasks.

    `unit` says that values lie between 0 and 1. `other_is_fixed` says that the other is one model, as the untrained one
    is, and no draw of a recipe. `recipes` says that some arm of the experiment has several seeds, so that arms are
    compared as recipes; it is so where one of these two has several. How far the seeds of an arm with one seed scatter
    is then unknown: taken to scatter as the others do, an arm that scatters ten times as much made most verdicts false.
    """
    if arm.shape[1] == 1:
        # One column: a number that a run has once, or a single task. Of a task that is passed or not, seeds say nothing
        # about other tasks, so none are handed on.
        arms = [arm] if other_is_fixed else [arm, other]
        return _over_runs([] if unit else arms, float(arm.mean() - other.mean()))
    deltas = arm.mean(axis=0) - other.mean(axis=0)
    # A fixed model is no draw of a recipe, and adds no variance over seeds.
    spreads = [seed_spread(arm)] if other_is_fixed else [seed_spread(arm), seed_spread(other)]
    if recipes or any(spreads):
        parts = [_part(spread, len(values)) for spread, values in zip(spreads, (arm, other), strict=False) if spread]
        least = _least_variance(deltas) if unit else 0.0
        found = _estimate(deltas, _join_parts(parts), least=least)
        found = replace(found, is_seed_variance_unknown=not all(spreads))
        return replace(found, bounds=_possible(found, arm, other)) if unit else found
    if unit and _all_yes_or_no(arm, other):
        return _bonett_price(deltas)
    if not unit:
        return _estimate(deltas, ())
    return _estimate(deltas, (), least=_least_variance(deltas), bounds=(-1.0, 1.0))


def _possible(found: Estimate, arm: Array, other: Array) -> Interval:
    """What a difference of two shares can be: neither lies below 0 or above 1, so a - b is at least -b and a - 1, and
    at most a and 1 - b, each as far as its own interval reaches. Near 0 and 1 few seeds say more than is possible."""
    a, b, reach = float(arm.mean()), float(other.mean()), 2 * math.sqrt(found.variance)
    if max(-b, a - 1) <= found.value - reach and found.value + reach <= min(a, 1 - b):
        return -1.0, 1.0
    ends = [arm_interval(values, arm_mean(values), unit=True) or (0.0, 1.0) for values in (arm, other)]
    (a_low, a_high), (b_low, b_high) = ends
    return max(-b_high, a_low - 1), min(a_high, 1 - b_low)


def arm_mean(values: Array, pooled: SeedSpread | None = None) -> Estimate:
    """The mean of one arm over its seeds and tasks; with one seed, of these weights over tasks.

    A single seed does not borrow the other arms' scatter: its mean is the score of a run, and that is printed with the
    same interval beside the run. Two seeds borrow it unless they stand out.
    """
    if values.shape[1] == 1:
        return _over_runs([values], float(values.mean()))
    spread = seed_spread(values)
    if spread and pooled and borrows(spread, pooled):
        spread = borrow_spread(spread, pooled)
    return _estimate(values.mean(axis=0), (_part(spread, len(values)),) if spread else ())


def interval_of_run(
    values: Sequence[float], *, share: bool, clusters: Sequence[str] | None = None, level: float = LEVEL
) -> Interval | None:
    """Of the score of one run, from its value on each task: the interval of an arm with this seed alone."""
    import numpy as np

    table = np.array([values], dtype=np.float64)
    unit = share and bool((table >= 0.0).all() and (table <= 1.0).all())
    table = by_cluster(table, clusters) if clusters else table
    return arm_interval(table, arm_mean(table), unit=unit, level=level)


def arm_interval(values: Array, estimate: Estimate, *, unit: bool, level: float = LEVEL) -> Interval | None:
    """Of an arm's mean: Wilson's where values lie between 0 and 1 (None for a single task), else Student's, which stays
    on the side of 0 where all values are: a loss or a time is not negative."""
    if not unit:
        found = estimate.interval(level)
        return (max(found[0], 0.0), found[1]) if found and bool((values >= 0.0).all()) else found
    if estimate.n_tasks < 2:
        return None
    normal = quantile((1 + level) / 2, math.inf)
    return wilson_around(estimate.value, worth_in_answers(values, estimate, level), normal)


def worth_in_answers(values: Array, estimate: Estimate, level: float = LEVEL) -> float:
    """How many yes-or-no answers would be as uncertain as an arm's values between 0 and 1 (Korn and Graubard 1998).

    Where nearly all tasks agree, that is at most their number: seeds that fail at the same tasks are no further
    evidence, and how much seeds matter cannot be seen there.
    """
    n = estimate.n_tasks
    # Then the answers are the tasks themselves, and the interval is Wilson's own.
    if len(values) == 1 and not estimate.seeds and _all_yes_or_no(values):
        return n
    # An arm at 0 or 1 with a seed variance borrowed from other arms: the share is taken one task away from the end
    # (Laplace's rule), as p (1 - p) would be 0 and the arm worth no answer at all.
    share = min(max(estimate.value, 1 / (n + 2)), 1 - 1 / (n + 2))
    worth = share * (1 - share) / estimate.variance if estimate.variance > 0 else float(n)
    if _count_differing(values.mean(axis=0)) < FEW:
        return min(worth, n)
    # Wilson's interval is drawn with the normal quantile: fewer answers make up for a variance that is known from few
    # tasks or seeds.
    return worth * (quantile((1 + level) / 2, math.inf) / estimate.critical((1 - level) / 2)) ** 2


def _part(spread: SeedSpread, seeds: int) -> SeedVariance:
    """What a spread over so many seeds adds to the variance of their mean."""
    return SeedVariance(scatter=spread.scatter / seeds, noise=spread.noise / seeds, degrees=spread.degrees)


def _join_parts(parts: Sequence[SeedVariance]) -> tuple[SeedVariance, ...]:
    """The parts of two arms with the same number of seeds as one; other parts stay apart.

    Degrees of freedom are the mean of Welch's (1947) and of the fewest there can be, those of one arm. Welch's alone
    are too many where one arm scatters ten to twenty times as much and its few seeds agree by chance: 6.5 % false
    verdicts with 2 and 2 seeds, and 0.36 % of p-values below 0.001 with 3 and 3. The mean of the two gives 5.5 % and
    0.19 % at worst (simulated, ratios of 1 to 60), for a power of 67 instead of 75 % at a difference of four standard
    errors with 3 and 3 seeds; separate draws, as for unequal numbers, would leave less.
    """
    if len({part.degrees for part in parts}) != 1 or len(parts) == 1:
        return tuple(parts)
    scatter, noise = sum(part.scatter for part in parts), sum(part.noise for part in parts)
    doubt = math.hypot(*(part.scatter / math.sqrt(part.degrees) for part in parts))  # squares may overflow
    welch = (scatter / doubt) ** 2 if doubt > 0 else sum(part.degrees for part in parts)
    return (SeedVariance(scatter=scatter, noise=noise, degrees=(welch + parts[0].degrees) / 2),)


def _over_runs(arms: list[Array], value: float) -> Estimate:
    """Where a run has one value, as its final loss is, only the seeds are a sample. Without
    several in every arm, and of a single task that is passed or not, nothing is known of the error."""
    bare = Estimate(value=value, centre=value, n_tasks=1)
    if any(len(values) < 2 for values in arms):
        return bare
    parts = [
        SeedVariance(scatter=float(values.var(ddof=1)) / len(values), noise=0.0, degrees=len(values) - 1)
        for values in arms
    ]
    return replace(bare, seeds=_join_parts(parts))


def _estimate(
    per_task: Array, seeds: tuple[SeedVariance, ...], *, least: float = 0.0, bounds: Interval | None = None
) -> Estimate:
    """The mean of `per_task` with the variance of tasks and, each with its weight in it, of the arms' seeds."""
    n, value = len(per_task), float(per_task.mean())
    return Estimate(
        value=value,
        centre=value,
        n_tasks=n,
        task_variance=max(float(per_task.var(ddof=1)) / n, least),
        task_degrees=n - 1,
        seeds=seeds,
        bounds=bounds,
    )


def _count_differing(per_task: Array) -> int:
    """How many tasks differ from what most of them say."""
    import numpy as np

    # Rounded, since means over seeds of equal values differ in their last bits.
    return len(per_task) - int(np.unique(np.round(per_task, 9), return_counts=True)[1].max())


def _least_variance(deltas: Array) -> float:
    """What the variance of a mean difference cannot be below on a scale from 0 to 1, where nearly all tasks agree.

    Tasks that have not been seen may disagree: as in Bonett and Price's interval, one each way is added. Those that
    were seen count by the square of how far they are from what most say: 1 where a task is passed or not, and little
    for templates whose differences are nearly alike (counted as 1, hardly any gain on 3 to 5 templates was found).
    """
    import numpy as np

    n = len(deltas)
    if _count_differing(deltas) >= FEW:
        return 0.0
    # What most tasks say is the median; where no value is frequent it treats both arms alike, as no mode would.
    away = deltas - float(np.median(deltas))
    # With deltas of -1, 0 and 1, most of them 0, this is `task_variance` of `_bonett_price`.
    return ((float((away**2).sum()) + 2) / (n + 2) - (float(away.sum()) / (n + 2)) ** 2) / (n + 2)


def _all_yes_or_no(*arrays: Array) -> bool:
    return all(bool(((values == 0.0) | (values == 1.0)).all()) for values in arrays)


def _bonett_price(deltas: Array) -> Estimate:
    """Of two shares on the same yes-or-no tasks (Bonett and Price 2012): one disagreement is added on each side."""
    n = len(deltas)
    up, down = (int((deltas > 0).sum()) + 1) / (n + 2), (int((deltas < 0).sum()) + 1) / (n + 2)
    return Estimate(
        value=float(deltas.mean()),
        centre=up - down,
        n_tasks=n,
        task_variance=(up + down - (up - down) ** 2) / (n + 2),
        bounds=(-1.0, 1.0),
    )


def interval[T](
    statistic: Callable[[Sequence[T]], float],
    tasks: Sequence[T],
    *,
    share: bool = True,
    clusters: Sequence[str] | None = None,
) -> Interval | None:
    """The 95 % interval of `statistic(tasks)`; None for fewer than two tasks.

    A statistic that turns out to be the mean of its values on the single tasks gets the interval that a verdict gives
    an arm with one seed (`arm_interval`), so that a score has one interval wherever it is printed. Any other
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
    if max(map(abs, singles)) > LARGEST:  # their squares are no floats; a verdict does not count them either
        return None
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
