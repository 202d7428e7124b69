"""A search: trials are drawn, run like every other arm, and scored; or all start and the best continue.

In: the experiment's config, its line of the journal, and how to plan and execute an arm. Out: the arms with their
results. Every trial, value and decision is an event in the journal, so that the same command after a kill resumes the
search.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

from evsys_sdk.checks.metrics import objective_of
from evsys_sdk.config.metadata import SuccessMetric
from evsys_sdk.config.schema import ExperimentConfig, RunConfig, SearchSpec
from evsys_sdk.config.sweep import count_trials, origin_of_trials, trial_run
from evsys_sdk.experiment.search_sampler import FinishedTrial, SearchTrial, TrialSampler
from evsys_sdk.format import shown
from evsys_sdk.protocols import PrunedAt, RunResult
from evsys_sdk.record.journal import RunJournal
from evsys_sdk.report.conclusion import alike_text, over_tasks, task_counts
from evsys_sdk.run.plan import RunPlan
from evsys_sdk.run.resume import amend_record, load_result, metrics_at
from evsys_sdk.score_names import resolve

FINAL = "final_"
"""How the last step's number is called among those of the run: `final_loss` is the last `loss`."""


def final_value(name: str, results: Iterable[RunResult]) -> float | None:
    """The objective of a trial whose runs have ended."""
    return _mean(number(result.metrics, name, result) for result in results if result.status == "completed")


def value_at(name: str, step: int, plans: Sequence[RunPlan], results: Sequence[RunResult]) -> float | None:
    """The objective after `step`: the last score or step's number up to there."""
    values = []
    for plan, result in zip(plans, results, strict=True):
        if result.status == "completed" and result.metrics.get("steps", math.inf) <= step:  # it ended before
            values.append(number(result.metrics, name, result))
        elif result.status != "failed" and (journal := plan.journal.latest(plan.run_id)) is not None:
            metrics = metrics_at(journal, step)
            value = number(metrics, name, result)
            values.append(number(metrics, step_name(name, metrics), result) if value is None else value)
    return _mean(values)


def step_name(name: str, known: Iterable[str]) -> str:
    """What a step calls the number that the run's `name` is the last of: `final_reward` -> `reward/mean`."""
    bare = name.removeprefix(FINAL)
    return next((key for key in (bare, f"{bare}/mean") if key in known), bare)


def number(metrics: dict[str, float], name: str, result: RunResult) -> float | None:
    """The metric that `name` means, as in `success_metric`; over all tasks where several benchmarks have it."""
    return over_tasks(metrics, resolve(name, metrics), task_counts(result))


def _mean(values: Iterable[float | None]) -> float | None:
    """Over the seeds that have a finite number."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    return sum(found) / len(found) if found else None


TRIAL, VALUE, RUNG = "trial", "value", "rung"
END = "end"
"""Where a value was measured: at a step, or at the end of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialValue:
    """The objective of a trial at a rung, or at its end."""

    value: float | None
    """None where it has no score there."""
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvingRung:
    """The trials that reached a step, and those of them that continue."""

    step: int
    trials: tuple[int, ...]
    go_on: tuple[int, ...]


@dataclass(slots=True)
class SearchState:
    """The search so far, as events in the experiment's line of the journal. What is written once stands: the trials
    that were drawn and the rungs that were decided. The value of a trial that failed and was tried again is written
    once more, and the last one counts."""

    line: RunJournal
    trials: dict[int, SearchTrial] = field(default_factory=dict)
    values: dict[tuple[int, str], TrialValue] = field(default_factory=dict)
    """(trial, step or `end`) -> its value there."""
    rungs: dict[int, HalvingRung] = field(default_factory=dict)
    written: Counter[tuple[int, str]] = field(default_factory=Counter)
    """(trial, step or `end`) -> values that the journal has of it."""

    @classmethod
    def of(cls, line: RunJournal) -> SearchState:
        """The search that the journal has."""
        state = cls(line)
        for event in line.events(upto=0):
            state._apply(event.kind, event.data)
        return state

    def _apply(self, kind: str, data: dict[str, Any]) -> None:
        if kind == TRIAL:
            self.trials[data["number"]] = SearchTrial(number=data["number"], picks=data["picks"], params=data["params"])
        elif kind == VALUE:
            self.values[data["number"], data["at"]] = TrialValue(value=data["value"], status=data["status"])
            self.written[data["number"], data["at"]] += 1
        elif kind == RUNG:
            rung = HalvingRung(step=data["step"], trials=tuple(data["trials"]), go_on=tuple(data["go_on"]))
            self.rungs[rung.step] = rung

    def add_trial(self, trial: SearchTrial) -> None:
        data = {"number": trial.number, "params": trial.params, "picks": trial.picks}
        self._add(TRIAL, str(trial.number), data)

    def add_value(self, number: int, step: int | None, value: TrialValue) -> None:
        """Of a trial that has run up to `step`, or to its end."""
        at = END if step is None else str(step)
        if self.values.get((number, at)) == value:
            return
        # An event that is there already stays as it is, so another value needs another key.
        again = self.written[number, at]
        key = f"{number}@{at}" + (f"#{again + 1}" if again else "")
        self._add(VALUE, key, {"number": number, "at": at, "value": value.value, "status": value.status})

    def add_rung(self, step: int, trials: Sequence[int], go_on: Sequence[int]) -> HalvingRung:
        self._add(RUNG, str(step), {"step": step, "trials": list(trials), "go_on": list(go_on)})
        return self.rungs[step]

    def _add(self, kind: str, key: str, data: dict[str, Any]) -> None:
        # The journal first: what the search acts on must be there when it is resumed.
        self.line.add(kind, data, at=0, key=key)
        self._apply(kind, data)


DRY_TRIALS = 4
PRUNED, PAUSED = "pruned", "paused"

PlanArm = Callable[[RunConfig, int], list[RunPlan]]
"""An arm and where it stands in the file -> its runs, one per seed."""
Execute = Callable[[RunPlan], RunResult]


@dataclass(slots=True)
class Arm:
    """One trial with its runs."""

    trial: SearchTrial
    run: RunConfig
    plans: list[RunPlan]
    results: list[RunResult] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Whether training has ended, completed or failed."""
        return all(result.status in ("completed", "failed") for result in self.results)

    @property
    def was_stopped(self) -> bool:
        return any(result.status == "cancelled" for result in self.results)

    def scored(self, value: float | None) -> TrialValue:
        return TrialValue(value=value, status=self.results[0].status if self.has_ended else PAUSED)


@dataclass(slots=True, kw_only=True)
class Search:
    """One search under way."""

    config: ExperimentConfig
    plan: PlanArm
    execute: Execute
    state: SearchState
    say: Callable[[str], None]
    """Prints a line on the progress display."""
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
        """Run all trials, or as many as budget and user allow."""
        if self.spec.kind == "halving":
            self._halve()
        else:
            self._try_all()

    def _arm(self, number: int) -> Arm:
        """The arm of a trial, which is drawn if it is not in the journal."""
        if number not in self.arms:
            if number not in self.state.trials:
                sampler = TrialSampler(spec=self.spec, mode=self.objective.direction)
                self.state.add_trial(sampler.ask([self._as_seen_by(other, number) for other in range(number)]))
            trial = self.state.trials[number]
            run = trial_run(self.config, trial.picks, number)
            self.arms[number] = Arm(trial, run, self.plan(run, origin_of_trials(self.config)))
        return self.arms[number]

    def _as_seen_by(self, number: int, asker: int) -> FinishedTrial:
        """A trial as a later one may see it. Whether it is known to have ended goes by its number and not by the
        clock, so that arms that run at the same time draw the same whichever of them is the faster."""
        under_way = number > asker - self._at_once
        end = self.state.values.get((number, END))
        value = end.value if end is not None and not under_way else None
        return FinishedTrial(trial=self.state.trials[number], value=value, under_way=under_way)

    @property
    def _at_once(self) -> int:
        """Trials that run at the same time."""
        return math.ceil(self.config.max_concurrent_arms / self.config.n_repeats)

    def _try_all(self) -> None:
        """Each trial to its end. One that learns from others begins when all it may learn from have ended."""
        learns = TrialSampler(spec=self.spec, mode=self.objective.direction).learns
        ended: set[int] = set()

        def ready(number: int) -> bool:
            return not learns or all(other in ended for other in range(number - self._at_once + 1))

        for arm in self._execute(iter(range(self.total)), ready, pause_at=None):
            ended.add(arm.trial.number)
            self._add_end(arm)

    def _execute(self, numbers: Iterator[int], ready: Callable[[int], bool], *, pause_at: int | None) -> Iterator[Arm]:
        """Arms as they end or pause. After one that was stopped no other starts."""
        # Trials are drawn on the caller's thread alone, so `SearchState` needs no lock; the pool only executes. One
        # that is not ready holds back all later ones: a trial is drawn from all that come before it.
        under_way: list[tuple[Arm, list[Future[RunResult]]]] = []
        following, stopped = next(numbers, None), False
        with ThreadPoolExecutor(max_workers=self.config.max_concurrent_arms, thread_name_prefix="evsys-run") as pool:
            while True:
                while following is not None and not stopped and ready(following):
                    arm = self._arm(following)
                    # What this process has begun it resumes, also under --fresh.
                    fresh = not arm.results
                    plans = [replace(plan, pause_at=pause_at, fresh=plan.fresh and fresh) for plan in arm.plans]
                    under_way.append((arm, [pool.submit(self.execute, plan) for plan in plans]))
                    following = next(numbers, None)
                if not under_way:
                    return
                wait([run for _, runs in under_way for run in runs if not run.done()], return_when=FIRST_COMPLETED)
                for arm, runs in [each for each in under_way if all(run.done() for run in each[1])]:
                    under_way.remove((arm, runs))
                    arm.results = [run.result() for run in runs]
                    stopped = stopped or arm.was_stopped
                    yield arm

    def _halve(self) -> None:
        """Successive halving: all trials run to the first rung, the best of them to the next, the last to the end."""
        alive = list(range(self.total))
        first = 1 if self.dry else self.spec.min_steps or 1
        for step in (first * self.spec.eta**level for level in count()):
            if len(alive) < 2:
                break
            rung = self.state.rungs.get(step)
            if rung is None:
                if not self._climb(alive, step):
                    return
                # Training is shorter than the rung: every trial has its final score, and none is left to continue.
                if all(self._has_ended(number, step) for number in alive):
                    return
                rung = self.state.add_rung(step, alive, self._best(alive, step))
                self._say(rung)
            alive = [number for number in rung.go_on if not self._has_ended(number, step)]
        for arm in self._execute(iter(alive), lambda number: True, pause_at=None):
            self._add_end(arm)

    def _climb(self, alive: list[int], step: int) -> bool:
        """Train these up to `step`; False when something stopped the search before all were there."""
        for arm in self._execute(iter(alive), lambda number: True, pause_at=step):
            if not arm.was_stopped:
                value = value_at(self.objective.name, step, arm.plans, arm.results)
                self.state.add_value(arm.trial.number, step, arm.scored(value))
                self._add_end(arm)
        arms = [self._arm(number) for number in alive]
        if not any(arm.was_stopped for arm in arms):
            return True
        # A rung that not all have reached is not decided: a run that paused there waits, and is not pruned.
        why = f"waits at step {step}: the search was stopped before it was decided which trials continue"
        for arm in arms:
            for place, (plan, result) in enumerate(zip(arm.plans, arm.results, strict=True)):
                if result.status == PRUNED:
                    arm.results[place] = replace(result, status="cancelled", error=why)
                if arm.results[place].status == "cancelled":
                    amend_record(plan.run_dir, arm.results[place])
        return False

    def _best(self, alive: Sequence[int], step: int) -> list[int]:
        """One in `eta`, and at least one; of equals the earlier. A trial without a score is last."""
        sign = -1 if self.objective.direction == "max" else 1

        def place(number: int) -> tuple[float, int]:
            value = self.state.values[number, str(step)].value
            return (math.inf if value is None else sign * value, number)

        return sorted(sorted(alive, key=place)[: max(1, len(alive) // self.spec.eta)])

    def _has_ended(self, number: int, step: int) -> bool:
        return self.state.values[number, str(step)].status != PAUSED

    def _add_end(self, arm: Arm) -> None:
        """The value of a trial that has ended with a score; one that failed is tried again another time."""
        value = final_value(self.objective.name, arm.results) if arm.has_ended else None
        if value is not None:
            self.state.add_value(arm.trial.number, None, arm.scored(value))

    def _say(self, rung: HalvingRung) -> None:
        pick = max if self.objective.direction == "max" else min
        values = [self.state.values[number, str(rung.step)].value for number in rung.trials]
        top = pick((value for value in values if value is not None), default=None)
        best = f"no {self.objective.name} yet" if top is None else f"best {self.objective.name} {shown(top)}"
        alike = alike_text(self._left_alike(rung))
        self.say(f"search: step {rung.step}: {len(rung.go_on)} of {len(rung.trials)} trials continue, {best}{alike}")

    def _left_alike(self, rung: HalvingRung) -> int:
        """Trials that were left behind with no worse a score than one that continues, being the later."""
        values = {number: self.state.values[number, str(rung.step)].value for number in rung.trials}
        kept = {values[number] for number in rung.go_on}
        return sum(values[number] in kept for number in rung.trials if number not in rung.go_on)

    def finished_arms(self) -> list[Arm]:
        """Every trial that was drawn, in order, with its results; those of an earlier process are read from disk."""
        arms = [self._arm(number) for number in sorted(self.state.trials) if number < self.total]
        for arm in arms:
            step, value = self._last_rung(arm.trial.number)
            note = PrunedAt(step=step, metric=self.objective.name, value=value.value if value else None)
            known_results: list[RunResult | None] = [*arm.results] or [None] * len(arm.plans)
            results = []
            for plan, known in zip(arm.plans, known_results, strict=True):
                journal = plan.journal.latest(plan.run_id) if known is None else None
                result = known or (load_result(journal, plan.run_dir) if journal is not None else None)
                result = result or plan.failed_result("cancelled", "not started: the search was stopped")
                results.append(replace(result, pruned=note) if result.status == PRUNED else result)
            arm.results = results
        return arms

    def _last_rung(self, number: int) -> tuple[int | None, TrialValue | None]:
        found = {int(at): value for (trial, at), value in self.state.values.items() if trial == number and at != END}
        return (max(found), found[max(found)]) if found else (None, None)

    def summary(self) -> dict[str, Any]:
        """The search as plain data, for the record."""
        sign = -1 if self.objective.direction == "max" else 1
        ends = {number: value for (number, at), value in self.state.values.items() if at == END}
        trials = []
        for arm in self.finished_arms():
            step, at_rung = self._last_rung(arm.trial.number)
            value = ends.get(arm.trial.number) or at_rung
            trials.append(
                {
                    "number": arm.trial.number,
                    "arm": arm.run.name,
                    "params": arm.trial.params,
                    "statuses": [result.status for result in arm.results],
                    "value": value.value if value else None,
                    "at_step": None if arm.trial.number in ends else step,
                }
            )
        # Of equals the earlier; of the trials above, as a rerun may ask for fewer than have ended.
        listed = {trial["number"] for trial in trials}
        scored = [(sign * value.value, n) for n, value in ends.items() if value.value is not None and n in listed]
        return {
            "kind": self.spec.kind,
            "objective": self.objective.name,
            "mode": self.objective.direction,
            "trials": trials,
            "max_trials": self.total,
            "best": min(scored, default=(0.0, None))[1],
            "rungs": [
                {**asdict(rung), "left_alike": self._left_alike(rung)} for _, rung in sorted(self.state.rungs.items())
            ],
        }
