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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from evsys_sdk.eval.clusters import by_cluster
from evsys_sdk.eval.estimate import Estimate, quantile
from evsys_sdk.eval.seed_spread import SeedSpread, borrowed, borrows, pooled_spread, seed_spread
from evsys_sdk.eval.statistics import LEVEL, Interval, wilson_around

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FEW = 5
"""Where fewer tasks than this tell anything apart, their scatter says too little of the tasks not seen."""

type SeedPart = tuple[SeedSpread, float]
"""A spread over seeds, and the weight of one seed in the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeedParts:
    """What the seeds of one or two arms add to the variance of a mean."""

    own: list[SeedPart] = field(default_factory=list)
    loans: list[SeedPart] = field(default_factory=list)
    """Spreads of all arms; they rest on the same seeds."""

    @property
    def scatter(self) -> float:
        return sum(spread.scatter * weight for spread, weight in self.own + self.loans)

    @property
    def noise(self) -> float:
        return sum(spread.noise * weight for spread, weight in self.own + self.loans)

    @property
    def degrees(self) -> float:
        """Of a sum of variances (Welch 1947); 0 where there is none. What was lent may rest on the arms' own seeds, so
        its error is added to theirs in full."""
        own, loans = ([(s.scatter * weight, s.degrees) for s, weight in some] for some in (self.own, self.loans))
        doubt = math.hypot(*(part / math.sqrt(degrees) for part, degrees in own))
        doubt += sum(part / math.sqrt(degrees) for part, degrees in loans)
        return (self.scatter / doubt) ** 2 if doubt > 0 else sum(degrees for _, degrees in own + loans)

    def __bool__(self) -> bool:
        return bool(self.own or self.loans)


def difference(
    arm: Array, other: Array, *, unit: bool, other_is_fixed: bool = False, pooled: SeedSpread | None = None
) -> Estimate:
    """Mean of `arm` less mean of `other`, on the same tasks.

    `unit` says that values lie between 0 and 1. `other_is_fixed` says that the other is one model, as the untrained one
    is, and no draw of a recipe. `pooled` is how the seeds of all arms scatter, by default of these two.
    """
    if arm.shape[1] == 1:
        arms = [arm] if other_is_fixed else [arm, other]
        return _over_runs([] if unit else arms, float(arm.mean() - other.mean()))
    deltas = arm.mean(axis=0) - other.mean(axis=0)
    parts = _seed_parts([arm] if other_is_fixed else [arm, other], pooled)
    if unit and not parts and _all_yes_or_no(arm, other):
        return _bonett_price(deltas)
    if not unit:
        return _estimate(deltas, parts)
    return _estimate(deltas, parts, least=_least_variance(deltas), bounds=(-1.0, 1.0))


def arm_mean(values: Array, pooled: SeedSpread | None = None) -> Estimate:
    """The mean of one arm over its seeds and tasks; with one seed, of these weights over tasks.

    A lone seed does not borrow the other arms' scatter here, as it does in a difference: its mean is the score of a
    run, and that is printed with the same interval beside the run.
    """
    if values.shape[1] == 1:
        return _over_runs([values], float(values.mean()))
    return _estimate(values.mean(axis=0), _seed_parts([values], pooled if len(values) > 1 else None, lend_to_two=True))


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
    """Of an arm's mean: Wilson's where values lie between 0 and 1 (None for a single task), else Student's."""
    if not unit:
        return estimate.interval(level)
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
    if len(values) == 1 and not estimate.seed_degrees and _all_yes_or_no(values):
        return n
    # An arm at 0 or 1 with a seed variance borrowed from other arms: the share is taken one task away from the end
    # (Laplace's rule), as p (1 - p) would be 0 and the arm worth no answer at all.
    share = min(max(estimate.value, 1 / (n + 2)), 1 - 1 / (n + 2))
    worth = share * (1 - share) / estimate.variance if estimate.variance > 0 else float(n)
    if _tell_apart(values.mean(axis=0)) < FEW:
        return min(worth, n)
    return worth * (quantile((1 + level) / 2, math.inf) / estimate.critical((1 - level) / 2)) ** 2


def _seed_parts(arms: list[Array], pooled: SeedSpread | None, *, lend_to_two: bool = False) -> _SeedParts:
    """The spread of each arm's seeds with its weight in the mean; nothing where no spread is known. An arm with one
    seed borrows the spread of all arms, one with two only where `lend_to_two` says so."""
    own = [(seed_spread(values), 1 / len(values)) for values in arms]
    pooled = pooled or pooled_spread(spread for spread, _ in own)
    if pooled is None:
        return _SeedParts()
    # Between arms, two seeds speak for themselves: lent the calm of the others, an arm that scatters ten times as much
    # and agrees by chance made 10 % false verdicts, and a test whether it stands out cannot see that.
    lends = [spread is None or (lend_to_two and borrows(spread, pooled)) for spread, _ in own]
    return _SeedParts(
        own=[(spread, weight) for (spread, weight), lent in zip(own, lends, strict=True) if spread and not lent],
        loans=[(borrowed(spread, pooled), weight) for (spread, weight), lent in zip(own, lends, strict=True) if lent],
    )


def _over_runs(arms: list[Array], value: float) -> Estimate:
    """Where a run has one value, as its final loss is, only the seeds are a sample (Welch 1947 for two arms). Without
    several in every arm, and of a single task that is passed or not, nothing is known of the error."""
    bare = Estimate(value=value, centre=value, n_tasks=1)
    if any(len(values) < 2 for values in arms):
        return bare
    own = [SeedSpread(scatter=float(values.var(ddof=1)), noise=0.0, degrees=len(values) - 1) for values in arms]
    parts = _SeedParts(own=[(spread, 1 / len(values)) for spread, values in zip(own, arms, strict=True)])
    return replace(bare, seed_scatter=parts.scatter, seed_degrees=parts.degrees)


def _estimate(per_task: Array, parts: _SeedParts, *, least: float = 0.0, bounds: Interval | None = None) -> Estimate:
    """The mean of `per_task` with the variance of tasks and, each with its weight in it, of the arms' seeds."""
    n, value = len(per_task), float(per_task.mean())
    return Estimate(
        value=value,
        centre=value,
        n_tasks=n,
        task_variance=max(float(per_task.var(ddof=1)) / n, least),
        task_degrees=n - 1,
        seed_scatter=parts.scatter,
        seed_noise=parts.noise,
        seed_degrees=parts.degrees,
        bounds=bounds,
    )


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
    up, down = (int((deltas > 0).sum()) + 1) / (n + 2), (int((deltas < 0).sum()) + 1) / (n + 2)
    return Estimate(
        value=float(deltas.mean()),
        centre=up - down,
        n_tasks=n,
        task_variance=(up + down - (up - down) ** 2) / (n + 2),
        bounds=(-1.0, 1.0),
    )
