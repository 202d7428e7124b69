"""How a verdict judges: level, margin, and what is known of seeds.

In: the arms' tables and what the caller asked for. Out: `Rules`, and the estimate of a difference by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from evsys_sdk.eval.arm_scores import ArmTable, shared_tasks
from evsys_sdk.eval.clusters import by_cluster
from evsys_sdk.eval.estimate import Estimate
from evsys_sdk.eval.paired import difference
from evsys_sdk.eval.seed_spread import SeedSpread, pooled_spread, seed_spread
from evsys_sdk.eval.verdict import Mode

if TYPE_CHECKING:
    from evsys_sdk.eval.arm_scores import Array

MARGIN = 0.02
"""Differences below this are of no interest: 2 points where values lie between 0 and 1, else 2 % of the baseline."""


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

    def columns(self, table: ArmTable, tasks: Sequence[str] | None = None) -> Array:
        """The table's values on these tasks (all by default), a column per independent unit: task or template."""
        tasks = table.tasks if tasks is None else tasks
        values = table.on(tasks)
        return by_cluster(values, [self.clusters.get(task, task) for task in tasks]) if self.clusters else values

    @property
    def penalty(self) -> int:
        """By how much a p-value counts more: the k-th look spends alpha / k squared, so that all looks after the first
        together spend less than 0.65 alpha, however many there will be (a union bound)."""
        return self.looks**2

    @property
    def level(self) -> float:
        return 1 - self.alpha

    @property
    def sign(self) -> float:
        return 1.0 if self.mode == "max" else -1.0


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
) -> Rules:
    """For these arms; `share=False` says that values between 0 and 1 are no shares."""
    bounds = [(float(table.values.min()), float(table.values.max())) for table in tables.values()]
    unit = share and all(low >= 0.0 and high <= 1.0 for low, high in bounds)
    if margin is None:
        margin = MARGIN if unit or baseline is None else MARGIN * abs(float(baseline.values.mean()))
    rules = Rules(mode=mode, alpha=alpha, margin=margin, unit=unit, pooled=None, looks=looks, clusters=clusters or {})
    return replace(rules, pooled=pooled_spread(seed_spread(rules.columns(table)) for table in tables.values()))


def estimate_between(arm: ArmTable, vs: ArmTable, rules: Rules) -> Estimate | None:
    """Arm less `vs` on the tasks that both have; None where there are none."""
    tasks = shared_tasks([arm, vs])
    if not tasks:
        return None
    pair = rules.columns(arm, tasks), rules.columns(vs, tasks)
    return difference(*pair, unit=rules.unit, other_is_fixed=vs.fixed, pooled=rules.pooled)
