"""A laboratory whose recipes are one number, `x`: the score is known, its noise is drawn, nothing is trained."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import Problem
from evsys_sdk.research.state import (
    CANDIDATE,
    INCUMBENT,
    ArmMean,
    Measurement,
    Proposal,
    RoundPlan,
    TrialCost,
    recipe_key,
)
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.judge import judge_arms

N_TASKS = 60


def score_of(x: float) -> float:
    """Best at 0.8, where it is 0.9."""
    return 0.9 - abs(0.8 - x)


def arm_scores(name: str, x: float, seeds: range) -> ArmScores:
    by_seed = {}
    for seed in seeds:
        rng = random.Random(f"{x}/{seed}")
        luck = rng.gauss(0, 0.01)
        by_seed[seed] = {f"t{n}": float(rng.random() < score_of(x) + luck) for n in range(N_TASKS)}
    return ArmScores(arm=name, seeds=by_seed)


@dataclass
class SimulatedLab:
    """Counts what it was asked to measure; `x` above 1 is illegal, and exactly 0.66 fails."""

    plans: list[RoundPlan] = field(default_factory=list)

    def check(self, recipe: JsonObject) -> list[Problem]:
        return [Problem(path="x", message="must be at most 1")] if recipe["x"] > 1 else []

    def identity(self, recipe: JsonObject) -> str:
        return recipe_key(recipe)

    def measure(self, plan: RoundPlan) -> Measurement:
        self.plans.append(plan)
        seeds, cost = range(plan.seeds[0], plan.seeds[-1] + 1), TrialCost(steps=10 * len(plan.seeds), seconds=1.0)
        if plan.candidate["x"] == 0.66:
            return Measurement(status="failed", why="out of memory", cost=cost)
        arms = [arm_scores(CANDIDATE, plan.candidate["x"], seeds)]
        if plan.incumbent is not None:
            arms.insert(0, arm_scores(INCUMBENT, plan.incumbent["x"], seeds))
        # The same seeds measured again are the same look.
        seen = {tuple(other.seeds) for other in self.plans if plan.trial == other.trial and other.until is None}
        looks = max(1, len(seen))
        verdict = judge_arms(arms, metric="pass@1", baseline_arm=arms[0].arm, looks=looks)
        means = {
            arm.arm: ArmMean(mean=arm.mean, low=arm.low, high=arm.high, n_seeds=arm.n_seeds) for arm in verdict.arms
        }
        return Measurement(
            status="completed",
            experiment=f"sim-{plan.trial}",
            candidate=means[CANDIDATE],
            incumbent=means.get(INCUMBENT),
            comparison=verdict.find(CANDIDATE, INCUMBENT),
            looks=looks,
            cost=cost,
        )


def change(x: float, *, parent: int = 0, **more: object) -> Proposal:
    return Proposal(parent=parent, changes={"x": x, **more}, claim=f"x = {x} is better", operator="scripted")
