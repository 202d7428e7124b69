"""A search: trials asked for, run like every other arm, and told; or all begun and the best gone on with.

In: the experiment's config, its line of the journal, and how to plan and execute an arm. Out: the arms that came of it
with their results. What is asked, told and decided goes through `search_state`, so that the same command after a kill
goes on where the search was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

from evsys_sdk.config.metadata import SuccessMetric
from evsys_sdk.config.models import ExperimentConfig, RunConfig, SearchSpec
from evsys_sdk.config.search import count_trials, origin_of_trials, trial_run
from evsys_sdk.protocols import RunResult
from evsys_sdk.running.attempts import read_back
from evsys_sdk.running.pausing import amend
from evsys_sdk.running.search_sampler import Sampler, Seen, Trial
from evsys_sdk.running.search_state import END, Rung, SearchState, Told
from evsys_sdk.running.search_text import alike_text
from evsys_sdk.running.search_value import final_value, objective_of, value_at
from evsys_sdk.running.workbench import RunPlan

DRY_TRIALS = 4
PRUNED, PAUSED = "pruned", "paused"

PlanArm = Callable[[RunConfig, int], list[RunPlan]]
"""An arm and where it stands in the file -> its runs, one per seed."""
Execute = Callable[[RunPlan], RunResult]


@dataclass(slots=True)
class Arm:
    """One trial on its way."""

    trial: Trial
    run: RunConfig
    plans: list[RunPlan]
    results: list[RunResult] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether training has come to its end, good or bad."""
        return all(result.status in ("completed", "failed") for result in self.results)

    @property
    def stopped(self) -> bool:
        """Whether something kept it from getting where it was to get."""
        return any(result.status == "cancelled" for result in self.results)

    def told(self, value: float | None) -> Told:
        return Told(value=value, status=self.results[0].status if self.ended else PAUSED)


@dataclass(slots=True, kw_only=True)
class Search:
    """One search in motion."""

    config: ExperimentConfig
    plan: PlanArm
    execute: Execute
    state: SearchState
    say: Callable[[str], None]
    """Tells whoever watches."""
    dry: bool = False
    arms: dict[int, Arm] = field(default_factory=dict)

    @property
    def spec(self) -> SearchSpec:
        assert self.config.search is not None
        return self.config.search

    @property
    def objective(self) -> SuccessMetric:
        found = objective_of(self.config)
        assert found is not None  # a search without one is refused before it begins
        return found

    @property
    def total(self) -> int:
        total = count_trials(self.spec)
        return min(total, DRY_TRIALS) if self.dry else total

    def run(self) -> None:
        """Carry it out, as far as it may."""
        if self.spec.kind == "halving":
            self._halve()
        else:
            self._try_all()

    def _arm(self, number: int) -> Arm:
        """The arm of a trial, which is asked for if nobody has yet."""
        if number not in self.arms:
            if number not in self.state.trials:
                sampler = Sampler(spec=self.spec, mode=self.objective.mode)
                self.state.asked(sampler.ask([self._seen(other, number) for other in range(number)]))
            trial = self.state.trials[number]
            run = trial_run(self.config, trial.picks, number)
            self.arms[number] = Arm(trial, run, self.plan(run, origin_of_trials(self.config)))
        return self.arms[number]

    def _seen(self, number: int, asker: int) -> Seen:
        """A trial as a later one may see it. Whether it is known to have ended goes by its number and not by the
        clock, so that arms that run at the same time draw the same whichever of them is the faster."""
        under_way = number > asker - self._at_once
        told = self.state.values.get((number, END))
        value = told.value if told is not None and not under_way else None
        return Seen(trial=self.state.trials[number], value=value, under_way=under_way)

    @property
    def _at_once(self) -> int:
        """Trials that run at the same time."""
        return math.ceil(self.config.max_concurrent_arms / self.config.n_repeats)

    def _try_all(self) -> None:
        """Each trial to its end. One that learns from others begins when all it may learn from have ended."""
        learns = Sampler(spec=self.spec, mode=self.objective.mode).learns
        ended: set[int] = set()

        def ready(number: int) -> bool:
            return not learns or all(other in ended for other in range(number - self._at_once + 1))

        for arm in self._executed(iter(range(self.total)), ready, pause_at=None):
            ended.add(arm.trial.number)
            self._tell_end(arm)

    def _executed(self, numbers: Iterator[int], ready: Callable[[int], bool], *, pause_at: int | None) -> Iterator[Arm]:
        """Arms as they come to their end or their pause. After one that was stopped no other is begun."""
        under_way: list[tuple[Arm, list[Future[RunResult]]]] = []
        following, stopped = next(numbers, None), False
        with ThreadPoolExecutor(max_workers=self.config.max_concurrent_arms, thread_name_prefix="evsys-run") as pool:
            while True:
                while following is not None and not stopped and ready(following):
                    arm = self._arm(following)
                    under_way.append((arm, [pool.submit(self.execute, plan) for plan in _leg(arm, pause_at)]))
                    following = next(numbers, None)
                if not under_way:
                    return
                wait([run for _, runs in under_way for run in runs if not run.done()], return_when=FIRST_COMPLETED)
                for arm, runs in [each for each in under_way if all(run.done() for run in each[1])]:
                    under_way.remove((arm, runs))
                    arm.results = [run.result() for run in runs]
                    stopped = stopped or arm.stopped
                    yield arm

    def _halve(self) -> None:
        """All to the first rung, the best of them to the next, and so on; who is left goes on to the end."""
        alive = list(range(self.total))
        for step in self._rungs():
            if len(alive) < 2:
                break
            rung = self.state.rungs.get(step)
            if rung is None:
                if not self._climb(alive, step):
                    return
                if all(self._has_ended(number, step) for number in alive):
                    return
                rung = self.state.decided(step, alive, self._best(alive, step))
                self._say(rung)
            alive = [number for number in rung.go_on if not self._has_ended(number, step)]
        for arm in self._executed(iter(alive), lambda number: True, pause_at=None):
            self._tell_end(arm)

    def _rungs(self) -> Iterator[int]:
        """Steps at which some are left behind: `min_steps`, and each time `eta` times as many."""
        first = 1 if self.dry else self.spec.min_steps or 1
        yield from (first * self.spec.eta**level for level in count())

    def _climb(self, alive: list[int], step: int) -> bool:
        """Train these as far as `step`; False when something stopped the search before all were there."""
        for arm in self._executed(iter(alive), lambda number: True, pause_at=step):
            if not arm.stopped:
                value = value_at(self.objective.name, step, arm.plans, arm.results)
                self.state.told(arm.trial.number, step, arm.told(value))
                self._tell_end(arm)
        arms = [self._arm(number) for number in alive]
        if any(arm.stopped for arm in arms):
            for arm in arms:
                _call_off(arm, step)
            return False
        return True

    def _best(self, alive: Sequence[int], step: int) -> list[int]:
        """One in `eta`, and at least one; of equals the earlier. Who has no score is behind all others."""
        sign = -1 if self.objective.mode == "max" else 1

        def place(number: int) -> tuple[float, int]:
            value = self.state.values[number, str(step)].value
            return (math.inf if value is None else sign * value, number)

        return sorted(sorted(alive, key=place)[: max(1, len(alive) // self.spec.eta)])

    def _has_ended(self, number: int, step: int) -> bool:
        return self.state.values[number, str(step)].status != PAUSED

    def _tell_end(self, arm: Arm) -> None:
        """What it came to in the end, once it has a score there; one that failed is tried again another time."""
        value = final_value(self.objective.name, arm.results) if arm.ended else None
        if value is not None:
            self.state.told(arm.trial.number, None, arm.told(value))

    def _say(self, rung: Rung) -> None:
        pick = max if self.objective.mode == "max" else min
        values = [self.state.values[number, str(rung.step)].value for number in rung.trials]
        top = pick((value for value in values if value is not None), default=None)
        told = f"no {self.objective.name} yet" if top is None else f"best {self.objective.name} {top:.4g}"
        alike = alike_text(self._left_alike(rung))
        self.say(f"search: step {rung.step}: {len(rung.go_on)} of {len(rung.trials)} trials go on, {told}{alike}")

    def _left_alike(self, rung: Rung) -> int:
        """Trials that were left behind with no worse a score than one that went on: it was the earlier."""
        values = {number: self.state.values[number, str(rung.step)].value for number in rung.trials}
        kept = {values[number] for number in rung.go_on}
        return sum(values[number] in kept for number in rung.trials if number not in rung.go_on)

    def finished_arms(self) -> list[Arm]:
        """Every trial that was asked for, in order, with its results; those of an earlier process are read back."""
        arms = [self._arm(number) for number in sorted(self.state.trials) if number < self.total]
        for arm in arms:
            arm.results = [
                self._noted(arm, result) for result in arm.results or [_read_back(plan) for plan in arm.plans]
            ]
        return arms

    def _noted(self, arm: Arm, result: RunResult) -> RunResult:
        """A pruned run with the step and the score at which it was left behind."""
        if result.status != PRUNED:
            return result
        step, told = self._last_rung(arm.trial.number)
        note = {"step": step, "metric": self.objective.name, "value": told.value if told else None}
        return replace(result, extras={**result.extras, PRUNED: note})

    def _last_rung(self, number: int) -> tuple[int | None, Told | None]:
        found = {int(at): told for (trial, at), told in self.state.values.items() if trial == number and at != END}
        return (max(found), found[max(found)]) if found else (None, None)

    def summary(self) -> dict[str, Any]:
        """The search as plain data, for the record."""
        return {
            "kind": self.spec.kind,
            "objective": self.objective.name,
            "mode": self.objective.mode,
            "trials": [self._told_of(arm) for arm in self.finished_arms()],
            "max_trials": self.total,
            "best": self._best_of_all(),
            "rungs": [
                {**asdict(rung), "left_alike": self._left_alike(rung)} for _, rung in sorted(self.state.rungs.items())
            ],
        }

    def _best_of_all(self) -> int | None:
        """The trial that scored best in the end; of equals the earlier."""
        sign = -1 if self.objective.mode == "max" else 1
        scored = [
            (sign * told.value, number)
            for (number, at), told in self.state.values.items()
            if at == END and told.value is not None
        ]
        return min(scored, default=(0.0, None))[1]

    def _told_of(self, arm: Arm) -> dict[str, Any]:
        number, statuses = arm.trial.number, [result.status for result in arm.results]
        step, at_rung = self._last_rung(number)
        told = self.state.values.get((number, END))
        return {
            "number": number,
            "arm": arm.run.name,
            "params": arm.trial.params,
            "statuses": statuses,
            "value": told.value if told else at_rung.value if at_rung else None,
            "at_step": None if told else step,
        }


def _leg(arm: Arm, pause_at: int | None) -> list[RunPlan]:
    """The arm's plans up to the next pause; what this process has begun it goes on with, also under --fresh."""
    return [replace(plan, pause_at=pause_at, fresh=plan.fresh and not arm.results) for plan in arm.plans]


def _call_off(arm: Arm, step: int) -> None:
    """A rung that not all have reached is not decided: who stands there waits, and is not pruned."""
    why = f"waits at step {step}: the search was stopped before it was decided who goes on"
    for place, (plan, result) in enumerate(zip(arm.plans, arm.results, strict=True)):
        if result.status == PRUNED:
            arm.results[place] = replace(result, status="cancelled", error=why)
        if arm.results[place].status == "cancelled":
            amend(plan.run_dir, arm.results[place])


def _read_back(plan: RunPlan) -> RunResult:
    """What an earlier process left of a run that this one had no need to go on with."""
    journal = plan.journal.latest(plan.run_id)
    found = read_back(journal, plan.run_dir) if journal is not None else None
    return found or plan.came_to_nothing("cancelled", "not started: the search was stopped")
