"""A laboratory without training, the driver over it, and the bare loop that it is compared with.

In: a `World`, proposers, a seed. Out: an `Outcome`: every launched trial with its true effect, and the winner. The
laboratory judges as `stats.judge.judge_arms` does; loop, journal, shares and keep rule are the driver's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoresearch.worlds import World
from evsys_sdk.config.research import ProposerSpec, ResearchBudget, ResearchSpec
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import Problem
from evsys_sdk.research.driver import Research
from evsys_sdk.research.shares import Seat
from evsys_sdk.research.state import (
    CANDIDATE,
    INCUMBENT,
    SPENT,
    ArmMean,
    Measurement,
    Proposal,
    Proposer,
    ResearchState,
    RoundPlan,
    Trial,
    TrialCost,
    apply_changes,
    recipe_key,
)
from evsys_sdk.stats.arm_scores import ArmScores, table_of
from evsys_sdk.stats.judge import ALPHA, judge_arms
from evsys_sdk.stats.selection import estimate_between, rules_for
from evsys_sdk.stats.verdict import Comparison, Verdict, Word

TEST_ROWS = "bench/test"
SEED = 42


@dataclass(slots=True, kw_only=True)
class DrawnLaboratory:
    """Measures by drawing the answers of a world's runs."""

    world: World
    test_reads: int = 0
    """Measured with a recipe that trains on test rows."""
    seen: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    """Trial -> the seeds that it was looked at with."""
    runs: int = 0
    final_test: ArmMean | None = None
    """What the winner scored on test tasks, at the end."""

    def check(self, recipe: JsonObject) -> list[Problem]:
        problems = []
        given, known = _params(recipe), _params(self.world.start)
        problems += [Problem(path=key, message="unknown key") for key in sorted(set(given) - set(known))]
        if recipe["data"] != self.world.start["data"]:
            problems.append(Problem(path="data.path", message="these rows are tasks of a benchmark"))
        return problems

    def identity(self, recipe: JsonObject) -> str:
        return recipe_key(recipe)

    def measure(self, plan: RoundPlan) -> Measurement:
        is_final = plan.purpose == "final"
        before = max((len(seeds) for seeds in self.seen.get(plan.trial, ())), default=0)
        new = len(plan.seeds) - (0 if is_final else before)
        self.test_reads += TEST_ROWS in str(plan.candidate["data"])
        self.runs += new
        cost = TrialCost(steps=new * self.world.steps)
        if self.world.fails(plan.candidate):
            return Measurement(status="failed", why="step 14: loss:sum is nan", cost=cost)
        looks = 1
        if not is_final:
            self.seen.setdefault(plan.trial, set()).add(tuple(plan.seeds))
            looks = len(self.seen[plan.trial])
        if not is_final and plan.incumbent is not None:
            arms = [self.arm(INCUMBENT, plan.incumbent, plan.seeds), self.arm(CANDIDATE, plan.candidate, plan.seeds)]
            comparison, means = compare_quickly(arms[0], arms[1], looks=looks)
            return Measurement(
                status="completed",
                candidate=means[1],
                incumbent=means[0],
                comparison=comparison,
                looks=looks,
                cost=cost,
            )
        verdict = self.judge(plan, "val", looks=looks)
        if is_final:
            self.final_test = _mean(self.judge(plan, "test"), CANDIDATE)
        return Measurement(
            status="completed",
            candidate=_mean(verdict, CANDIDATE),
            incumbent=_mean(verdict, INCUMBENT),
            comparison=verdict.find(CANDIDATE, INCUMBENT),
            looks=looks,
            cost=cost,
        )

    def judge(self, plan: RoundPlan, tasks: str, *, looks: int = 1) -> Verdict:
        arms = [self.arm(CANDIDATE, plan.candidate, plan.seeds, tasks)]
        if plan.incumbent is not None:
            arms.insert(0, self.arm(INCUMBENT, plan.incumbent, plan.seeds, tasks))
        return judge_arms(arms, metric="pass@1", baseline_arm=arms[0].arm, looks=looks)

    def arm(self, name: str, recipe: JsonObject, seeds: Sequence[int], tasks: str = "val") -> ArmScores:
        return ArmScores(arm=name, seeds={seed: self.world.answers(recipe, seed, tasks=tasks) for seed in seeds})


def compare_quickly(incumbent: ArmScores, candidate: ArmScores, *, looks: int) -> tuple[Comparison, list[ArmMean]]:
    """What `judge_arms` says of the candidate, without the plans, the selection bias and the exact ends of intervals,
    which take nine tenths of its time; a test holds the two to the same word and the same p."""
    before, after = table_of(incumbent), table_of(candidate)
    rules = rules_for({INCUMBENT: before, CANDIDATE: after}, before, looks=looks, **RULES)
    found = estimate_between(after, before, rules)
    assert found is not None
    p, alike = found.p_value(), found.p_equivalent(rules.margin)
    p = None if p is None else min(1.0, p * rules.penalty)
    alike = None if alike is None else min(1.0, alike * rules.penalty)
    word: Word = "equivalent" if alike is not None and alike < rules.alpha else "undecided"
    if p is not None and p < rules.alpha and found.value:
        word = "better" if found.value > 0 else "worse"
    reach = 2 * found.error if found.error is not None else None
    comparison = Comparison(
        arm=CANDIDATE, vs=INCUMBENT, verdict=word, difference=found.value, p=p, p_holm=p, p_equivalent=alike,
        low=None if reach is None else found.value - reach, high=None if reach is None else found.value + reach,
        n_tasks=len(after.tasks), n_seeds=(after.n_seeds, before.n_seeds),
    )  # fmt: skip
    return comparison, [ArmMean(mean=float(t.values.mean()), n_seeds=t.n_seeds) for t in (before, after)]


RULES: dict[str, Any] = {
    "mode": "max", "alpha": ALPHA, "margin": None, "share": True, "clusters": None, "per_run": False,
}  # fmt: skip
"""As `judge_arms` has them by default."""


def _params(recipe: JsonObject) -> JsonObject:
    block = recipe["algorithm"]
    assert isinstance(block, dict) and isinstance(block["params"], dict)
    return block["params"]


def _mean(verdict: Verdict, name: str) -> ArmMean | None:
    found = next((one for one in verdict.arms if one.arm == name and one.mean is not None), None)
    if found is None or found.mean is None:
        return None
    winner = verdict.winner
    expected = winner.expected if winner is not None and winner.arm == name else None
    return ArmMean(mean=found.mean, low=found.low, high=found.high, n_seeds=found.n_seeds, expected=expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one research, beside the truth."""

    keeps: int
    false_keeps: int
    proposals: int
    """Answered, those that cost nothing included."""
    launched: int
    invalid: int
    duplicates: int
    failed_late: int
    """Of those launched after the first 20."""
    launched_late: int
    runs: int
    """Trained runs of all trials, repeats and the final included."""
    agent_launched: int
    test_reads: int
    refused_reads: int
    start: float
    truth: float
    """True score of the winner."""
    best: float
    reported: float | None = None
    low: float | None = None
    high: float | None = None
    """The winner's score on fresh seeds and the tasks of the search."""
    on_test: tuple[float, float | None, float | None] | None = None
    """The score and its interval on tasks that took no part either."""
    curve: tuple[float, ...] = ()
    """True score of the incumbent after each launched trial."""

    @property
    def regret(self) -> float:
        return self.best - self.truth


def drive(
    world: World,
    seats: Sequence[Seat],
    seed: int,
    *,
    trials: int = 60,
    max_repeats: int = 4,
    n_repeats: int = 1,
) -> Outcome:
    """The driver's own loop until its budget is spent."""
    lab = DrawnLaboratory(world=world)
    spec = ResearchSpec(
        budget=ResearchBudget(trials=trials),
        proposers=[ProposerSpec(kind="evolve")],
        seed=seed,
        max_repeats=max_repeats,
        patience=10 * trials,
    )
    done = Research(
        spec=spec, recipe=world.start, laboratory=lab, seats=seats, metric="val.pass@1", direction="max",
        space=world.space, n_repeats=n_repeats, base_seed=SEED + 1000 * seed, max_score=1.0, clock=lambda: 0.0,
    ).run()  # fmt: skip
    final, test = done.final.candidate if done.final else None, lab.final_test
    truth, curve = {0: world.true_score(world.start)}, []
    keeps = false_keeps = 0
    incumbent = 0
    for trial in done.state.trials[1:]:
        if trial.status not in SPENT:
            continue
        if trial.decision == "kept":
            truth[trial.number] = world.true_score(trial.recipe)
            keeps += 1
            false_keeps += truth[trial.number] <= truth[incumbent] + 1e-9
            incumbent = trial.number
        curve.append(truth[incumbent])
    launched = [trial for trial in done.state.trials[1:] if trial.status in SPENT]
    return Outcome(
        keeps=keeps,
        false_keeps=false_keeps,
        proposals=len(done.state.trials) - 1,
        launched=len(launched),
        invalid=sum(trial.status == "invalid" for trial in done.state.trials),
        duplicates=sum(trial.status == "duplicate" for trial in done.state.trials),
        failed_late=sum(trial.status == "failed" for trial in launched[20:]),
        launched_late=len(launched[20:]),
        runs=lab.runs,
        agent_launched=sum(trial.proposer == "agent" for trial in launched),
        test_reads=lab.test_reads,
        refused_reads=sum(t.status == "invalid" and t.proposal.operator == "test" for t in done.state.trials),
        start=truth[0],
        truth=truth[incumbent],
        best=world.best,
        reported=final.mean if final else None,
        low=final.low if final else None,
        high=final.high if final else None,
        on_test=(test.mean, test.low, test.high) if test else None,
        curve=tuple(curve),
    )


INFLATES = (0.02, 0.1)
"""What an edited metric, or training on the scored rows, adds to the number that the bare loop reads."""


def keep_maximum(world: World, agent: Proposer, seed: int, *, trials: int = 60) -> Outcome:
    """The loop of a bare instruction to an agent: measure once, keep whatever scores higher. Nothing is checked, so
    all that a proposal changes counts."""
    rng = random.Random(f"bare/{seed}")

    def score(recipe: JsonObject, run: int) -> float:
        answers = world.answers({**recipe, "seed": 0}, run).values()
        return sum(answers) / len(answers)

    def trial_of(number: int, recipe: JsonObject, found: float) -> Trial:
        own = Proposal(parent=0, changes={}, claim="", operator="bare")
        return Trial(
            number=number, proposal=own, proposer="agent", recipe=recipe, status="completed", score=found,
            decision="first" if number == 0 else "kept",
        )  # fmt: skip

    state = ResearchState(trials=[trial_of(0, world.start, score(world.start, SEED))], metric="pass@1", direction="max")
    reported, keeps, false_keeps, test_reads, failed = state.trials[0].score or 0.0, 0, 0, 0, 0
    curve = []
    for number in range(1, trials):
        proposal = agent.propose(state, None, rng)
        assert proposal is not None
        incumbent = state.incumbent
        assert incumbent is not None
        recipe, run, bonus = incumbent.recipe, SEED, 0.0
        if proposal.operator == "seed":
            run = int(str(proposal.changes["seed"]))
        elif proposal.operator in ("test", "metric"):
            test_reads += proposal.operator == "test"
            bonus = rng.uniform(*INFLATES)
        elif not set(proposal.changes) - {axis.path for axis in world.axes}:
            recipe = apply_changes(recipe, proposal.changes)
        if world.fails(recipe):
            failed += 1
        else:
            found = reported + bonus if bonus else score(recipe, run)
            if found > reported:
                keeps += 1
                false_keeps += world.true_score(recipe) <= world.true_score(incumbent.recipe) + 1e-9
                reported = min(found, 1.0)
                state = replace(state, trials=[*state.trials, trial_of(number, recipe, reported)])
        last = state.incumbent
        assert last is not None
        curve.append(world.true_score(last.recipe))
    return Outcome(
        keeps=keeps, false_keeps=false_keeps, proposals=trials - 1, launched=trials - 1, invalid=0, duplicates=0,
        failed_late=0, launched_late=0, runs=trials, agent_launched=trials - 1, test_reads=test_reads, refused_reads=0,
        start=world.true_score(world.start), truth=curve[-1], best=world.best, reported=reported, curve=tuple(curve),
    )  # fmt: skip
