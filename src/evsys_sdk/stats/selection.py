"""Which arm is on top, and what to expect of the one that is picked.

In: the arms' tables and verdicts. Out: the arms in order, and a `Winner`. A mean over other tasks is another number, so
arms are put in order by what they scored on the tasks that they share with the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from evsys_sdk.stats.arm_scores import ArmTable, shared_tasks
from evsys_sdk.stats.clusters import by_cluster
from evsys_sdk.stats.comparison import (
    SeedSpread,
    arm_interval,
    arm_mean,
    difference,
    pooled_spread,
    seed_spread,
    worth_in_answers,
)
from evsys_sdk.stats.intervals import Estimate, Interval, quantile, wilson_around
from evsys_sdk.stats.verdict import ArmVerdict, Comparison, Mode, Winner

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from evsys_sdk.stats.arm_scores import Array


# How a verdict judges: level, margin, and what is known of seeds.
#
# In: the arms' tables and what the caller asked for. Out: `Rules`, and the estimate of a difference by them.


MARGIN = 0.02
"""Differences below this are of no interest: 2 points where values lie between 0 and 1, else 2 % of the baseline.
A choice, not a measurement: `margin` of `judge_arms` sets another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How this verdict judges."""

    mode: Mode
    alpha: float
    margin: float
    unit: bool
    """All values lie between 0 and 1."""
    pooled: SeedSpread | None
    """How the seeds of all arms scatter."""
    looks: int = 1
    """At this question, with this one."""
    clusters: Mapping[str, str] = field(default_factory=dict)
    """task -> the template it was made from; empty where tasks are independent."""
    per_run: bool = False
    """The values are numbers that a run has once, and not those of tasks."""

    def columns(self, table: ArmTable, tasks: Sequence[str] | None = None) -> Array:
        """The table's values on these tasks (all by default), a column per independent unit: task or template."""
        tasks = table.tasks if tasks is None else tasks
        values = table.on(tasks)
        return by_cluster(values, [self.clusters.get(task, task) for task in tasks]) if self.clusters else values

    @property
    def penalty(self) -> int:
        """By how much a p-value counts more at this look."""
        return penalty_of_look(self.looks)

    @property
    def level(self) -> float:
        return 1 - self.alpha

    @property
    def sign(self) -> float:
        return 1.0 if self.mode == "max" else -1.0


def penalty_of_look(look: int) -> int:
    """By how much a p-value counts more at this look: look k spends alpha / k^3, so that all looks together spend less
    than 1.21 alpha, however many there will be and however they depend on each other (a union bound: the sum of 1 / k^3
    is 1.202). With 1 / k^2 it would be 1.65 alpha, and ten attempts with one new seed each found something among equals
    in 7.4 % instead of 5.5 %. The first look, for most the only one, spends all of alpha."""
    return look**3


def rules_for(
    tables: Mapping[str, ArmTable],
    baseline: ArmTable | None,
    *,
    mode: Mode,
    alpha: float,
    margin: float | None,
    share: bool,
    looks: int = 1,
    clusters: Mapping[str, str] | None = None,
    per_run: bool = False,
) -> Rules:
    """For these arms; `share=False` says that values between 0 and 1 are no shares."""
    bounds = [(float(table.values.min()), float(table.values.max())) for table in tables.values()]
    unit = share and all(low >= 0.0 and high <= 1.0 for low, high in bounds)
    if margin is None:
        margin = MARGIN if unit or baseline is None else MARGIN * abs(float(baseline.values.mean()))
    rules = Rules(
        mode=mode,
        alpha=alpha,
        margin=margin,
        unit=unit,
        pooled=None,
        looks=looks,
        clusters=clusters or {},
        per_run=per_run,
    )
    # Last, because the spread is over the columns that these rules make: templates where tasks are clustered.
    return replace(rules, pooled=pooled_spread(seed_spread(rules.columns(table)) for table in tables.values()))


def estimate_between(arm: ArmTable, vs: ArmTable, rules: Rules) -> Estimate | None:
    """Arm less `vs` on the tasks that both have; None where there are none."""
    tasks = shared_tasks([arm, vs])
    if not tasks:
        return None
    pair = rules.columns(arm, tasks), rules.columns(vs, tasks)
    return difference(*pair, unit=rules.unit, other_is_fixed=vs.fixed, recipes=rules.pooled is not None)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Corrected so that the chance of any false alarm in the family stays at alpha (Holm 1979).

    A test that could not be made (None) stays None and still counts as one of the family.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(order):
        # Never below the corrected p-value of a smaller p: Holm stops at the first test that fails.
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        corrected[index] = largest
    return corrected


ROUNDS = 40
"""Each makes a split for every part. Other splits move the corrected score by 0.5 points (standard deviation; six equal
arms, 100 tasks), little beside its interval of about 9 points each way."""
PARTS = 3
"""Of the tasks, one part scores and the others pick. With halves the pick would be more of a guess than the real one,
and a good arm would be sold short; with smaller parts the score hangs on the few tasks that decide a close race."""

FISSION = math.sqrt(0.5)
"""Of a lone seed, how much noise is added: it then picks like two seeds of three, with half as much variance again."""
UNEVEN, UNLIKE_OTHERS = 0.001, 0.01
"""How seldom seeds lie so far apart by the noise of single values, and in an arm like the others. Choices, and strict
ones: an arm that is left out wrongly hides a part of the selection bias."""


def selected_score(arms: Sequence[Array], *, mode: Literal["max", "min"] = "max", seed: int = 0) -> float | None:
    """The mean score of the arm that would be picked, on tasks and seeds it was not picked by.

    Many times over, the best arm is picked on two thirds of the tasks and scored on the rest; where an arm has several
    seeds, most of them pick and the others score. An arm that is not on top, and whose seeds lie further apart than
    those of the other arms, is left out: with one lucky seed of three it would often be picked by it, and what it loses
    by that is not the winner's to bear.
    Arms are arrays of seeds x tasks. None for fewer than two tasks.
    """
    import numpy as np

    tasks = arms[0].shape[1]
    if tasks < 2:
        return None
    chance = np.random.default_rng(seed)
    scoring = _parts(tasks, chance)
    sign = 1.0 if mode == "max" else -1.0
    deviation = _seed_deviation(arms)
    uneven = _uneven(arms, spared=int(np.argmax([values.mean() * sign for values in arms])))
    arms = [values for index, values in enumerate(arms) if index not in uneven]
    runs = np.concatenate(arms).T * sign
    by_run = np.split(_weights(~scoring) @ runs, _ends(arms), axis=1)
    held_out = np.split(_weights(scoring) @ runs, _ends(arms), axis=1)
    means = np.array([[values.mean() * sign] for values in arms])
    sides = [_over_seeds(*given, deviation, chance) for given in zip(by_run, held_out, strict=True)]
    seen, unseen = np.stack([side[0] for side in sides]), np.stack([side[1] for side in sides])
    # Over all possible splits an arm's unseen scores average to its mean; made so for those that were drawn.
    unseen += means - unseen.mean(axis=1, keepdims=True)
    # Weighted sums of equal arms differ in their last bits, and such arms are ties.
    best = np.isclose(seen, seen.max(axis=0), rtol=0, atol=1e-12 * (1 + np.abs(seen).max()))
    share = best / best.sum(axis=0)  # equals share the pick
    # Of an arm that every split picks alone the sum below is the mean, but for rounding: a clear winner keeps its score
    # to the last digit.
    if len(always := np.flatnonzero(share.min(axis=1) == 1.0)):
        return float(arms[always[0]].mean())
    return sign * float((unseen * share).sum(axis=0).mean())


def _parts(tasks: int, chance: np.random.Generator) -> NDArray[np.bool_]:
    """One row per split: which tasks score. Each task scores once in every round."""
    import numpy as np

    parts = min(PARTS, tasks)
    # A random permutation modulo `parts`: parts differ in size by at most one task.
    place = np.argsort(chance.random((ROUNDS, tasks)), axis=1) % parts
    return np.concatenate([place == part for part in range(parts)])


def _ends(arms: Sequence[Array]) -> list[int]:
    """Where in the list of all runs the next arm begins."""
    return list(accumulate(map(len, arms)))[:-1]


def _uneven(arms: Sequence[Array], *, spared: int) -> set[int]:
    """The arms whose seeds lie further apart than noise explains, and than those of the calmer arms do.

    Each arm is held against those whose seeds lie closer together than its own: against all others, two arms that
    scatter widely would hide each other.
    """
    from scipy.stats import chi2, f

    free = [len(values) - 1 for values in arms]
    spread = [float(values.mean(axis=1).var(ddof=1)) if len(values) > 1 else 0.0 for values in arms]
    found = set()
    calmer, rest = 0.0, 0  # sum of squares and degrees of freedom of the arms that scatter less
    for index in sorted(range(len(arms)), key=lambda index: spread[index]):
        df = free[index]
        if df < 1:
            continue
        noise = float(arms[index].var(axis=0, ddof=1).mean()) / arms[index].shape[1]
        # For the calmest arm there are no others: then only the noise of its single values decides.
        others = calmer / rest if rest else 0.0
        if (
            index != spared
            and spread[index] > noise * chi2.ppf(1 - UNEVEN, df) / df
            and spread[index] > others * f.ppf(1 - UNLIKE_OTHERS, df, max(rest, 1))
        ):
            found.add(index)
        else:
            # An uneven arm is not added: it would raise the bar for the arms that scatter even more.
            calmer, rest = calmer + spread[index] * df, rest + df
    return found


def _seed_deviation(arms: Sequence[Array]) -> float:
    """Standard deviation of what a seed does to a run, as the arms with several seeds tell; 0 where none has."""
    pooled = pooled_spread(seed_spread(values) for values in arms)
    return math.sqrt(max(0.0, pooled.scatter - pooled.noise)) if pooled else 0.0


def _over_seeds(seen: Array, unseen: Array, deviation: float, chance: np.random.Generator) -> tuple[Array, Array]:
    """The means of an arm's runs in every split: of the seeds that pick, and of the seeds that score.

    A lone seed among arms with several cannot be split. Noise as large as a seed's luck is added where it picks and
    taken off where it scores, so that the two are as independent as two seeds (data fission, Leiner et al. 2023).
    """
    import numpy as np
    from scipy.special import ndtri

    splits, seeds = seen.shape
    if seeds == 1 and deviation > 0.0:
        # Quantiles in random order instead of random draws: they sum to 0, so the noise shifts no mean over the splits.
        noise = deviation * ndtri((chance.permutation(splits) + 0.5) / splits)
        # The factors multiply to 1: the noise's covariance, -deviation ** 2, cancels the +deviation ** 2 of the seed
        # that both share.
        return seen[:, 0] + FISSION * noise, unseen[:, 0] - noise / FISSION
    if seeds == 1:
        return seen.mean(axis=1), unseen.mean(axis=1)
    scores = np.argsort(chance.random((splits, seeds)), axis=1) < max(1, round(seeds / PARTS))
    return (seen * _weights(~scores)).sum(axis=1), (unseen * _weights(scores)).sum(axis=1)


def _weights(chosen: NDArray[np.bool_]) -> Array:
    """Of a mean over what each row has chosen."""
    weights: Array = chosen / chosen.sum(axis=1, keepdims=True)
    return weights


Tables = Mapping[str, ArmTable]


def ranking(tables: Tables, baseline: ArmTable | None, rules: Rules) -> list[str]:
    """The arms, the best first: each by its mean, brought to the tasks of the baseline (or else of the arm with most)
    where its own are others. Arms that share no task with it come last: their means say nothing beside the others'."""
    if not tables:
        return []
    scale = baseline or max(tables.values(), key=lambda table: len(table.tasks))

    def place(arm: str) -> tuple[bool, float]:
        table, tasks = tables[arm], shared_tasks([tables[arm], scale])
        level = float(table.values.mean())
        if table.tasks != scale.tasks and tasks:
            level = float(scale.values.mean() + table.on(tasks).mean() - scale.on(tasks).mean())
        return not tasks, -rules.sign * level

    return sorted(tables, key=place)


def is_narrow(arm: ArmTable, tables: Tables) -> bool:
    """Was it scored on fewer than half of the tasks that another arm has?"""
    return 2 * len(arm.tasks) < max(len(table.tasks) for table in tables.values())


def winner_of(
    verdicts: Sequence[ArmVerdict],
    tables: Tables,
    ranked: Sequence[str],
    rules: Rules,
    best: str | None,
    pairs: Sequence[Comparison] = (),
) -> Winner | None:
    """The best arm where one is proven, else the one on top, with the score to expect of it. `pairs`: comparisons that
    were made besides those with the baseline."""
    if not ranked:
        return None
    top = next(arm for arm in verdicts if arm.arm == (best or ranked[0]))
    assert top.mean is not None
    above = list(ranked[: ranked.index(top.arm)])
    made = [*(arm.vs_baseline for arm in verdicts if arm.vs_baseline), *pairs]
    known = {frozenset([found.arm, found.vs]): found for found in made}
    # A comparison that the verdict prints decides as it was printed. For others every pair of arms counts as a test, as
    # the top was picked by looking.
    n_pairs = len(tables) * (len(tables) - 1) / 2
    rivals, not_compared = [], []
    for arm in ranked:
        if arm == top.arm or arm in above:
            continue
        printed, found = known.get(frozenset([top.arm, arm])), estimate_between(tables[top.arm], tables[arm], rules)
        p = found.p_value() if found else None
        # Bonferroni and not Holm: the p-values of the other pairs are not computed.
        p = None if p is None else p * n_pairs * rules.penalty
        if found is None:
            not_compared.append(arm)
        elif printed is not None:
            rivals += [arm] if printed.verdict in ("undecided", "equivalent") else []
        elif p is None or p >= rules.alpha or found.value * rules.sign <= 0:
            rivals.append(arm)
    # Where arms stand above the best one, it was picked among those that are proven better, not among all.
    proven = {arm.arm for arm in verdicts if arm.verdict == "better"}
    pool = {arm: tables[arm] for arm in ranked if arm not in not_compared and (not above or arm in proven)}
    bias = selection_bias(top.arm, pool, rules)
    expected: float | None = None
    interval: Interval | None = None
    if bias is not None and not not_compared and not is_narrow(tables[top.arm], tables):
        expected, interval = correct_score(top, bias, tables[top.arm], rules)
    return Winner(
        arm=top.arm,
        observed=top.mean,
        expected=expected,
        above=above,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        rivals=rivals,
        ties=[
            arm.arm
            for arm in verdicts
            if arm is not top
            and arm.mean is not None
            and math.isclose(arm.mean, top.mean, rel_tol=1e-12, abs_tol=1e-15)  # rounding of a sum over tasks
        ],
        not_compared=not_compared,
    )


def correct_score(top: ArmVerdict, bias: float, table: ArmTable, rules: Rules) -> tuple[float, Interval | None]:
    """The top's score less its selection bias, and the interval of that.

    The corrected score does not contradict the verdict: it stays within the interval of the arm's mean (without one,
    within its values) and, for an arm that is proven better than the baseline, within that of the difference. Two seeds
    borrow the scatter of other arms for their interval, so one wild arm could take the corrected score of a calm one
    far below both of its seeds: it also stays within what the tasks of its worst seed allow.
    """
    assert top.mean is not None
    values = rules.columns(table)
    bad = 0 if rules.mode == "max" else 1  # the end of an interval that is the worse one
    ends = (float(table.values.min()), float(table.values.max())) if top.low is None else (top.low, top.high)
    worst = ends[bad]
    assert worst is not None
    bias = min(bias, abs(top.mean - worst))
    by_seed = values.mean(axis=1) * rules.sign
    worst_seed = values[int(by_seed.argmin())][None, :]
    if reach := arm_interval(worst_seed, arm_mean(worst_seed), unit=rules.unit, level=rules.level):
        bias = min(bias, max(0.0, rules.sign * (top.mean - reach[bad])))
    if top.verdict == "better" and (gain := top.vs_baseline) and gain.difference is not None:
        end = gain.low if rules.mode == "max" else gain.high
        bias = min(bias, abs(gain.difference - end)) if end is not None else bias
    expected = top.mean - rules.sign * bias
    if top.low is None or top.high is None:
        return expected, None
    # The arm's own interval, moved to the corrected score.
    low, high = expected - (top.mean - top.low), expected + (top.high - top.mean)
    if rules.unit:
        worth = worth_in_answers(values, arm_mean(values, rules.pooled), rules.level)
        low, high = wilson_around(expected, worth, quantile((1 + rules.level) / 2, math.inf))
    # The correction may have been uncalled for: on the good side the interval reaches as far as the arm's own.
    return expected, (low, max(high, top.high)) if rules.mode == "max" else (min(low, top.low), high)


def selection_bias(top: str, pool: Tables, rules: Rules) -> float | None:
    """How much of the top's score is probably the luck it was picked for (the winner's curse); None where that is not
    known. Estimated on the tasks that the arms share, without arms that have few of them."""
    if len(pool) == 1:
        return 0.0
    wide = {arm: table for arm, table in pool.items() if not is_narrow(table, pool)}
    tasks = shared_tasks(list(wide.values()))
    if top not in wide or not tasks:
        return None
    columns = {arm: rules.columns(table, tasks) for arm, table in wide.items()}
    picked = selected_score(list(columns.values()), mode=rules.mode)
    if picked is None:
        return None
    # Where two arms solve different tasks, the arm that a split picks does badly on the rest of the tasks: two arms
    # that tie would be expected to score less than either did. The luck of the top cannot be more than its lead over
    # the last of the arms.
    means = {arm: rules.sign * float(values.mean()) for arm, values in columns.items()}
    return max(0.0, min(means[top] - rules.sign * picked, means[top] - min(means.values())))
