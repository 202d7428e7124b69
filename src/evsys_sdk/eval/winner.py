"""Which arm is on top, and what to expect of the one that is picked.

In: the arms' tables and verdicts. Out: the arms in order, and a `Winner`. A mean over other tasks is another number, so
arms are put in order by what they scored on the tasks that they share with the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from evsys_sdk.eval.arm_scores import ArmTable, shared_tasks
from evsys_sdk.eval.estimate import quantile
from evsys_sdk.eval.paired import arm_mean, worth_in_answers
from evsys_sdk.eval.rules import Rules, estimate_between
from evsys_sdk.eval.selection import picked_score
from evsys_sdk.eval.statistics import Interval, wilson_around
from evsys_sdk.eval.verdict import ArmVerdict, Winner

if TYPE_CHECKING:
    from evsys_sdk.eval.arm_scores import Array

Tables = Mapping[str, ArmTable]


def ranking(tables: Tables, baseline: ArmTable | None, rules: Rules) -> list[str]:
    """The arms, the best first: each by its mean, brought to the tasks of the baseline (or else of the arm with most)
    where its own are others."""
    if not tables:
        return []
    scale = baseline or max(tables.values(), key=lambda table: len(table.tasks))
    return sorted(tables, key=lambda arm: -rules.sign * _level(tables[arm], scale))


def _level(arm: ArmTable, scale: ArmTable) -> float:
    tasks = shared_tasks([arm, scale])
    if arm.tasks == scale.tasks or not tasks:
        return float(arm.values.mean())
    return float(scale.values.mean() + arm.on(tasks).mean() - scale.on(tasks).mean())


def is_narrow(arm: ArmTable, tables: Tables) -> bool:
    """Was it scored on fewer than half of the tasks that another arm has?"""
    return 2 * len(arm.tasks) < max(len(table.tasks) for table in tables.values())


def winner_of(
    verdicts: Sequence[ArmVerdict], tables: Tables, ranked: Sequence[str], rules: Rules, best: str | None
) -> Winner | None:
    """The best arm where one is proven, else the one on top, with the score to expect of it."""
    if not ranked:
        return None
    top = next(arm for arm in verdicts if arm.arm == (best or ranked[0]))
    assert top.mean is not None
    above = list(ranked[: ranked.index(top.arm)])
    # Where arms stand above the best one, it was picked among those that are proven better, not among all.
    proven = {arm.arm for arm in verdicts if arm.verdict == "better"}
    luck = _luck(top.arm, {arm: tables[arm] for arm in ranked if not above or arm in proven}, rules)
    expected = None if luck is None else top.mean - rules.sign * min(luck, _most_luck(top, tables[top.arm], rules))
    bare = Winner(
        arm=top.arm,
        observed=top.mean,
        expected=expected,
        above=above,
        rivals=_rivals(top.arm, [arm for arm in ranked if arm not in above], tables, rules),
    )
    if expected is None or top.low is None or top.high is None:
        return bare
    low, high = _around(expected, top, rules.columns(tables[top.arm]), rules)
    # The correction may have been uncalled for: on the good side the interval reaches as far as the arm's own.
    if rules.mode == "max":
        return replace(bare, low=low, high=max(high, top.high))
    return replace(bare, low=min(low, top.low), high=high)


def _luck(top: str, pool: Tables, rules: Rules) -> float | None:
    """How much of the top's score is probably the luck it was picked for; None where that cannot be said.

    It is told on the tasks that the arms share, without arms that have few of them.
    """
    if len(pool) == 1:
        return 0.0
    wide = {arm: table for arm, table in pool.items() if not is_narrow(table, pool)}
    tasks = shared_tasks(list(wide.values()))
    if top not in wide or not tasks:
        return None
    picked = picked_score([rules.columns(table, tasks) for table in wide.values()], mode=rules.mode)
    return None if picked is None else max(0.0, rules.sign * (float(wide[top].on(tasks).mean()) - picked))


def _most_luck(top: ArmVerdict, table: ArmTable, rules: Rules) -> float:
    """How much luck the verdict leaves room for.

    Splitting estimates what picking among all arms is worth, and an arm whose seeds scatter widely can make that far
    less than the picked arm scored. The corrected score stays within the interval of the arm's mean (without one,
    within its values) and, where the arm is proven better than the baseline, within the interval of that difference.
    """
    assert top.mean is not None
    low, high = (float(table.values.min()), float(table.values.max())) if top.low is None else (top.low, top.high)
    assert high is not None
    limits = [abs(top.mean - (low if rules.mode == "max" else high))]
    found = top.vs_baseline
    if found and found.verdict == "better" and found.low is not None and found.high is not None:
        assert found.difference is not None
        limits.append(abs(found.difference - (found.low if rules.mode == "max" else found.high)))
    return min(limits)


def _around(expected: float, top: ArmVerdict, values: Array, rules: Rules) -> Interval:
    """The arm's own interval, moved to what is expected of it."""
    assert top.mean is not None and top.low is not None and top.high is not None
    if not rules.unit:
        return expected - (top.mean - top.low), expected + (top.high - top.mean)
    worth = worth_in_answers(values, arm_mean(values, rules.pooled), rules.level)
    return wilson_around(expected, worth, quantile((1 + rules.level) / 2, math.inf))


def _rivals(top: str, ranked: Sequence[str], tables: Tables, rules: Rules) -> list[str]:
    """Arms not proven to be behind. The top was picked by looking, so every pair of arms counts as a test."""
    tests = len(tables) * (len(tables) - 1) / 2
    rivals = []
    for arm in ranked:
        if arm == top:
            continue
        found = estimate_between(tables[top], tables[arm], rules)
        p = found.p_value() if found else None
        if found is None or p is None or p * tests * rules.penalty >= rules.alpha or found.value * rules.sign <= 0:
            rivals.append(arm)
    return rivals
