"""Grade stored rollouts anew: `evaluate` with the answers of a record, so no model is asked.

In: a `RegradeRequest`. Out: a `Report`: per evaluation the old and the new scores and what changed, also written to a
new folder. The record that was read stays as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.concurrency import run_async
from evsys_sdk.config.project import import_extensions
from evsys_sdk.data.rows import collector_paused
from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import Cancelled, EvsysError, closest
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.eval.evaluate import evaluate, score_tasks
from evsys_sdk.eval.metrics import MetricFunction, as_metric
from evsys_sdk.eval.scoring import NamedMetric, is_errored, is_share
from evsys_sdk.experiment.regrade_tasks import (
    GradableRecord,
    TaskFinder,
    carried_task,
    config_of,
    find_record,
    with_verifier,
)
from evsys_sdk.files import to_json, whole_file, write_json
from evsys_sdk.protocols import FinishedRollouts, Rollout, Score, TaskScores
from evsys_sdk.record.models import RunRecord, rollout_to_data
from evsys_sdk.record.rollouts import ROLLOUTS_FILE, TRAIN, StoredEval
from evsys_sdk.rollout.task_dirs import has_own_tests
from evsys_sdk.rollout.trial import STOPS, TrialTimeouts
from evsys_sdk.stats.comparison import difference
from evsys_sdk.stats.intervals import Interval, jackknife_interval
from evsys_sdk.verifiers.grading import grade, grading_problem, plan_of

# The verdict of now on a rollout of then.
#
# In: rollouts and the tasks they are graded by. Out: each before and after. A rollout that never had an answer
# cannot be graded and keeps its error; one whose old verifier broke can.


Job = tuple[Rollout, HarborTask | None]
"""A rollout, and the task it is graded by where that is known."""
AGENT_GAVE_UP = "NonZeroAgentExitCodeError"
"""An agent that ends like this is graded for what it had done by then."""
CONCURRENCY = 32
GONE = "its tests look at the environment, which is gone; grade the answer with --verifier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regraded:
    """One rollout, before and after."""

    old: Rollout
    new: Rollout

    @property
    def changed(self) -> bool:
        return self.old.reward != self.new.reward


def refuse_ungradable(tasks: Iterable[HarborTask]) -> None:
    """Refuse, before anything is graded, what cannot be: an unknown verifier, no sandbox, an environment long gone."""
    # One task stands for all that have its verifier and params: a suite of thousands mostly has one of these.
    plans = {
        (plan.name, repr(plan.params), has_own_tests(task)): task for task in tasks for plan in [plan_of(task.verifier)]
    }
    problems: dict[str, str] = {}
    for (_, _, gone), task in plans.items():
        problem = GONE if gone else grading_problem(task)
        if problem is not None:
            problems.setdefault(problem, task.task_id)
    if problems:
        raise EvsysError("\n".join(f"task {task_id!r}: {problem}" for problem, task_id in problems.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedModel:
    """The rollouts of a record as an `EvaluatedModel`: the model answered when they were recorded."""

    rollouts: Mapping[str, list[Rollout]]
    """By task id."""
    keep_rewards: bool = False
    """Whether the rollouts keep the rewards of the record, instead of being graded by the tasks' verifiers."""
    concurrency: int = CONCURRENCY

    async def roll_out(
        self, tasks: Sequence[HarborTask], *, num_samples: int = 1, finished: FinishedRollouts | None = None
    ) -> list[list[Rollout]]:
        """As many rollouts per task as the record has, whatever `num_samples` says."""
        groups = [list(self.rollouts[task.task_id]) for task in tasks]
        if self.keep_rewards:
            return groups
        waiting = iter(
            [(task, group, at) for task, group in zip(tasks, groups, strict=True) for at in range(len(group))]
        )

        # Each worker takes the next rollout: an asyncio task per rollout would cost more than most verifiers. They
        # share one iterator without a lock, as asyncio changes workers only at an `await`.
        async def work() -> None:
            for task, group, at in waiting:
                group[at] = await grade_rollout(group[at], task)

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self.concurrency, sum(map(len, groups)))):
                workers.create_task(work())
        return groups


def is_gradable(rollout: Rollout) -> bool:
    """Whether the model gave an answer: then only a verifier can have failed since."""
    about = rollout.metadata
    match rollout.status:
        case "cancelled":
            return False
        case "agent_error":
            return rollout.reward is not None or about.get("exception") == AGENT_GAVE_UP
        case "infra_error":
            in_lane, error = "lane" in about, rollout.error or ""
            return bool(rollout.turns) and (not in_lane or error.startswith("the verifier"))
    return True


def answer_of(rollout: Rollout) -> str:
    """What a verifier looks at: what the agent gave as its answer, else the model's last words."""
    told = rollout.metadata.get("answer")
    return told if isinstance(told, str) else rollout.completion


async def grade_rollout(rollout: Rollout, task: HarborTask) -> Rollout:
    """The rollout with the verdict of now, or with the failure to reach one."""
    if not is_gradable(rollout):
        return rollout
    about = {key: value for key, value in rollout.metadata.items() if key != "verifier"}
    try:
        verdict = await grade(task, answer_of(rollout), seconds=TrialTimeouts().of(task).verifier_seconds)
    except STOPS:
        raise
    except EvsysError as exc:
        return replace(rollout, reward=None, status="infra_error", error=str(exc), metadata=about)
    said = {"verifier": verdict.info} if verdict.info else {}
    healed = rollout.status == "infra_error"
    return replace(
        rollout,
        reward=verdict.reward,
        status="ok" if healed else rollout.status,
        error=None if healed else rollout.error,
        metadata={**about, **said},
    )


# Scores before and after.
#
# In: one evaluation's rollouts, graded anew, and metrics. Out: a `RegradeComparison`, folded as every score is.


LISTED = 100
"""Changed rollouts that a summary lists; the new record has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegradeComparison:
    """One evaluation, before and after."""

    eval: StoredEval
    graded_by: list[str]
    pairs: list[Regraded]
    old: list[Score]
    new: list[Score]
    changes: list[Score]
    """New minus old, task by task: the interval of a difference is not that of two scores that have nothing in
    common."""
    without_task: int = 0
    """Rollouts whose task is not among those they were to be graded by; they count neither here nor there."""

    @property
    def changed(self) -> list[Regraded]:
        return [pair for pair in self.pairs if pair.changed]

    @property
    def is_valid(self) -> bool:
        return any(score.value is not None for score in self.new)


async def compare(
    stored: StoredEval, jobs: list[Job], metrics: list[NamedMetric], concurrency: int = CONCURRENCY
) -> RegradeComparison:
    """Old and new scores of the rollouts whose task is known, and the difference."""
    known = [(rollout, task) for rollout, task in jobs if task is not None]
    tasks = list({task.task_id: task for _, task in known}.values())
    recorded: dict[str, list[Rollout]] = {}
    for rollout, task in known:
        recorded.setdefault(task.task_id, []).append(rollout)
    # The old rewards go through `evaluate` too, so that both scores count the same rollouts and are folded alike.
    old, new = [
        await evaluate(
            RecordedModel(rollouts=recorded, keep_rewards=keep, concurrency=concurrency),
            tasks,
            metrics,
            name=stored.name,
            split=stored.split,
            step=stored.step,
        )
        for keep in (True, False)
    ]
    # `evaluate` gives the rollouts of all tasks in a row, in the order of `tasks`, which is that of `recorded`.
    in_order = iter(new.rollouts)
    regraded = {task_id: list(islice(in_order, len(group))) for task_id, group in recorded.items()}
    paired = list(zip(score_tasks(tasks, recorded.values()), score_tasks(tasks, regraded.values()), strict=True))
    next_new = {task_id: iter(group) for task_id, group in regraded.items()}
    return RegradeComparison(
        eval=stored,
        graded_by=sorted({plan_of(task.verifier).name for task in tasks}),
        pairs=[Regraded(old=rollout, new=next(next_new[task.task_id])) for rollout, task in known],
        old=old.scores,
        new=new.scores,
        changes=[
            _change(metric, before, after, paired)
            for (_, metric), before, after in zip(metrics, old.scores, new.scores, strict=True)
        ],
        without_task=len(jobs) - len(known),
    )


def _change(metric: Any, old: Score, new: Score, tasks: list[tuple[TaskScores, TaskScores]]) -> Score:
    if old.value is None or new.value is None:
        return Score(metric=new.metric, value=None, n_tasks=len(tasks), error=new.error or old.error)
    bounds = None
    if new.low is not None and any(before.rewards != after.rewards for before, after in tasks):
        try:
            bounds = _paired_interval(as_metric(metric), (old.value, new.value), tasks, is_share(metric))
        except Cancelled:
            raise
        except Exception:  # a metric that works on all tasks but not on a part of them has a change and no interval
            bounds = None
    # Where every task changed by the same amount there may be nothing to estimate from, which is no certainty.
    low, high = bounds if bounds and bounds[0] < bounds[1] else (None, None)
    return Score(metric=new.metric, value=new.value - old.value, low=low, high=high, n_tasks=len(tasks))


def _paired_interval(
    fold: MetricFunction, means: tuple[float, float], tasks: list[tuple[TaskScores, TaskScores]], share: bool
) -> Interval | None:
    """Of new minus old on the same tasks: as for two arms where the metric is a mean over tasks, else the jackknife."""
    import numpy

    def change(part: Sequence[tuple[TaskScores, TaskScores]]) -> float:
        return fold([after for _, after in part]) - fold([before for before, _ in part])

    try:
        sides = numpy.array([[fold([task]) for task in side] for side in zip(*tasks, strict=True)])
    except EvsysError:  # a metric of several tasks has no value on one
        return jackknife_interval(change, tasks)
    if not numpy.allclose(sides.mean(axis=1), means):
        return jackknife_interval(change, tasks)
    unit = share and bool((sides >= 0).all() and (sides <= 1).all())
    return difference(sides[1:], sides[:1], unit=unit).interval()


def plain(comparison: RegradeComparison) -> dict[str, Any]:
    stored, changed = comparison.eval, comparison.changed
    return {
        "run": stored.run,
        "split": stored.split,
        "name": stored.name,
        "step": stored.step,
        "stage": stored.stage,
        "graded_by": comparison.graded_by,
        "n_rollouts": len(comparison.pairs),
        "n_changed": len(changed),
        "n_errors_old": sum(is_errored(pair.old) for pair in comparison.pairs),
        "n_errors_new": sum(is_errored(pair.new) for pair in comparison.pairs),
        "n_without_task": comparison.without_task,
        "scores": [
            {"metric": new.metric, "old": asdict(old), "new": asdict(new), "change": asdict(change)}
            for old, new, change in zip(comparison.old, comparison.new, comparison.changes, strict=True)
        ],
        "changed": [
            {
                "task_id": pair.old.task_id,
                "sample": pair.old.metadata.get("sample"),
                "old_reward": pair.old.reward,
                "new_reward": pair.new.reward,
                "error": pair.new.error,
                "completion": answer_of(pair.new),
            }
            for pair in changed[:LISTED]
        ],
    }


SUMMARY_FILE = "regrade.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegradeRequest:
    """What to grade, and by what."""

    target: Path
    benchmark: Benchmark | None = None
    """Tasks whose verifiers are used, instead of those that the config names."""
    verifier: str | None = None
    """A registered verifier that stands for every task's own."""
    params: dict[str, Any] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    """Instead of those of the record."""
    only: Sequence[str] = ()
    """Splits, names of evaluations or runs."""
    config: str | None = None
    out: Path | None = None
    concurrency: int = CONCURRENCY


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of it."""

    comparisons: list[RegradeComparison]
    notes: list[str]
    folder: Path
    seconds: float


def regrade(request: RegradeRequest) -> Report:
    """Read, grade, compare, write."""
    with collector_paused():
        started, out = time.monotonic(), request.out
        if out and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise EvsysError(f"--out {out} is not an empty folder; a new record is never written over another")
        found = find_record(request.target)
        evals = _choose_evals(found, request)
        config = config_of(found.experiment, request.config, found.regrades.absolute().parent)
        if config is not None:
            import_extensions(config)
        finder = TaskFinder(config=config, benchmark=request.benchmark, only_targets=request.verifier is not None)
        jobs, notes = _find_jobs(evals, found, finder, request)
        refuse_ungradable({id(task): task for _, pairs in jobs for _, task in pairs if task is not None}.values())
        comparisons = [
            run_async(compare(stored, pairs, _metrics(stored, request, found, finder), request.concurrency))
            for stored, pairs in jobs
        ]
        numbers = [int(entry.name) for entry in found.regrades.glob("*") if entry.name.isdigit()]
        folder = out or found.regrades / str(max(numbers, default=0) + 1)
        report = Report(comparisons=comparisons, notes=notes, folder=folder, seconds=time.monotonic() - started)
        write(report, request)
        return report


def _choose_evals(found: GradableRecord, request: RegradeRequest) -> list[StoredEval]:
    """The evaluations that were asked for: by default all of them, and not what was trained on."""
    everything = [*found.evals, *found.training]
    if not request.only:
        if not found.evals:
            hint = "; it has training rollouts: --only train" if found.training else ""
            raise EvsysError(f"{request.target} holds no rollouts of evaluations{hint}")
        return found.evals
    words = [(stored, {stored.split, stored.name, stored.label, stored.run}) for stored in everything]
    known = {word for _, own in words for word in own}
    for word in request.only:
        if word not in known:
            near = closest(word, known)
            hint = f"; closest: {near}" if near else ""
            has = ", ".join(sorted(known)) or "none"
            raise EvsysError(f"--only {word}: the record has no such rollouts{hint}; it has: {has}")
    return [stored for stored, own in words if set(request.only) & own]


def _find_jobs(
    evals: list[StoredEval], found: GradableRecord, finder: TaskFinder, request: RegradeRequest
) -> tuple[list[tuple[StoredEval, list[Job]]], list[str]]:
    """Each evaluation's rollouts with the tasks they are graded by, and notes on what changed or is left out."""
    notes: dict[str, None] = {}
    for stored in evals if request.benchmark is None else ():
        suite = finder.suite_of(stored)
        known = found.runs.get(stored.run, RunRecord()).environment.benchmarks
        then = next((one.sha256 for one in known if one.name == f"{stored.split}/{stored.name}"), None)
        if suite is not None and then is not None and suite.sha256 != then:
            notes[f"{stored.label}: the tasks are not the ones of the run any more; graded by those of now"] = None
    jobs = []
    for stored in evals:
        tasks = finder.tasks_of(stored)
        graded_by: dict[str, HarborTask | None] = {}
        for rollout in stored.rollouts:
            if rollout.task_id not in graded_by:
                task = tasks.get(rollout.task_id) or carried_task(rollout)
                replaced = task and request.verifier and with_verifier(task, request.verifier, request.params)
                graded_by[rollout.task_id] = replaced or task
        if any(task is not None for task in graded_by.values()):
            jobs.append((stored, [(rollout, graded_by[rollout.task_id]) for rollout in stored.rollouts]))
        else:
            notes[f"{stored.label} of {stored.run} is left out: none of its tasks is known"] = None
    if not jobs:
        raise EvsysError(
            f"the tasks of these rollouts are not known (e.g. {evals[0].rollouts[0].task_id!r}): a rollout keeps its "
            "task's id, and the task says what was asked and expected. Name them with --benchmark PATH, or the config "
            "with --config FILE; or give each line of your own file `expected`"
        )
    return jobs, list(notes)


def _metrics(
    stored: StoredEval, request: RegradeRequest, found: GradableRecord, finder: TaskFinder
) -> list[NamedMetric]:
    """What to fold with: as asked, else as the evaluation was, with the mean reward that any verifier changes."""
    if request.metrics:
        return [(name, registry.metrics.build(name, {})) for name in request.metrics]
    block, entry = found.runs.get(stored.run, RunRecord()).hparams.get("eval", {}), finder.entry_of(stored)
    if stored.split == "eval" and block.get("metrics"):
        own = {spec["kind"]: spec.get("params", {}) for spec in block["metrics"]}
    else:
        usual = [] if stored.split == TRAIN else ["pass@1"]
        own = {name: {} for name in stored.metrics or (entry.metrics if entry else usual)}
    own.setdefault("mean_reward", {})
    return [(name, registry.metrics.build(name, params)) for name, params in own.items()]


def write(report: Report, request: RegradeRequest) -> None:
    """The new record: every rollout with its old and new reward, and last of all the summary."""
    try:
        with whole_file(report.folder / ROLLOUTS_FILE) as handle:
            for comparison in report.comparisons:
                for pair in comparison.pairs:
                    line = to_json(_line(comparison.eval, pair)) + "\n"
                    handle.write(line.encode("utf-8", "backslashreplace"))
        write_json(report.folder / SUMMARY_FILE, summary(report, request))
    except OSError as exc:
        raise EvsysError(f"the new record cannot be written to {report.folder}: {exc.strerror or exc}") from exc


def _line(stored: StoredEval, pair: Regraded) -> dict[str, Any]:
    """A line of the new record. Tokens are counted and not listed: the old record has them."""
    place = {"run": stored.run, "split": stored.split, "eval": stored.name, "step": stored.step, "stage": stored.stage}
    before = {"old_reward": pair.old.reward, "old_status": pair.old.status, "old_error": pair.old.error}
    counted = {
        "n_input_tokens": sum(len(turn.prompt_tokens) for turn in pair.new.turns),
        "n_output_tokens": sum(len(turn.completion_tokens) for turn in pair.new.turns),
    }
    known = {name: count for name, count in counted.items() if count}
    turns = [replace(turn, prompt_tokens=[], completion_tokens=[], logprobs=[]) for turn in pair.new.turns]
    rollout = replace(pair.new, turns=turns, metadata={**pair.new.metadata, **known})
    return {**place, "completion": pair.new.completion, **rollout_to_data(rollout), **before}


def summary(report: Report, request: RegradeRequest) -> dict[str, Any]:
    """The report as plain data: what `--json` prints and `regrade.json` holds."""
    suite = request.benchmark
    return {
        "source": str(request.target.absolute()),
        "benchmark": suite and {"name": suite.name, "sha256": suite.sha256},
        "verifier": request.verifier,
        "params": request.params,
        "evals": [plain(comparison) for comparison in report.comparisons],
        "notes": report.notes,
        "record": str(report.folder),
        "seconds": round(report.seconds, 3),
        "ts": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
