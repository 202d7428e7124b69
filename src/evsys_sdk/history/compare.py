"""Two or more experiments side by side.

In: experiments, each with the arm that stands for it. Out: a `Side` per arm, the settings in which they differ, their
scores, and a verdict on the tasks that they share: paired, task by task, as between the arms of one experiment. The
first one named is what the others are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict

from evsys_sdk import registry
from evsys_sdk.errors import Cancelled, EvsysError, not_known
from evsys_sdk.eval.metrics import as_metric
from evsys_sdk.eval.scoring import invalid_reason, is_errored, is_share, scores_of_task
from evsys_sdk.format import shown
from evsys_sdk.history.digest import ArmDigest, flatten
from evsys_sdk.history.history import ExperimentEntry, History, load_record, look_up
from evsys_sdk.protocols import Rollout, of_kept_weights
from evsys_sdk.record.callbacks import steering
from evsys_sdk.record.models import ExperimentRecord, JudgedArm, RecordedRun, RunRecord
from evsys_sdk.record.rollouts import StoredEval, evals_in_journal, evals_in_logs
from evsys_sdk.registry import better_direction
from evsys_sdk.score_names import readings_of, score_key
from evsys_sdk.stats.arm_scores import ArmScores, Values
from evsys_sdk.stats.judge import catch_statistics_errors, judge_arms
from evsys_sdk.stats.verdict import Verdict

# What a stored run scored on each task.
#
# In: an experiment's record and journal, and one of its arms. Out: per seed and evaluation the tasks' own values of a
# metric, as a verdict takes them. The scores are those of the finished weights; where an evaluation was only made in
# the loop, those of its last step.


Measure = tuple[str, str, str]
"""Split, name of the evaluation, metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArm:
    """The runs of one arm with what is kept of their evaluations."""

    label: str
    evals: dict[int, dict[tuple[str, str], StoredEval]] = field(default_factory=dict)
    """By seed: the last evaluation of each split and name."""
    failed: dict[int, str] = field(default_factory=dict)
    """Seed -> why it has no evaluation."""

    @property
    def measures(self) -> set[Measure]:
        return {
            (*key, metric) for seed in self.evals.values() for key, found in seed.items() for metric in found.metrics
        }


def read_arm(entry: ExperimentEntry, arm: str, label: str) -> StoredArm:
    """The arm's seeds from the journal, or from the runs' logs where the journal has none."""
    evals: dict[int, dict[tuple[str, str], StoredEval]] = {}
    failed: dict[int, str] = {}
    runs = next((runs for found, runs in load_record(entry).runs_of() if found.arm == arm), [])
    records = [RunRecord.find(run_dir_of(entry, run)) for run in runs]
    # A config that names no seed has the default one, which only the record tells.
    known = {record.hparams.get("seed") if record.seed is None else record.seed: None for record in records if record}
    seeds = [seed for seed in known if isinstance(seed, int)]
    if len(seeds) < len(runs):  # a run without a record, or with that of another
        seeds = list(range(len(runs)))
    for seed, run in zip(seeds, runs, strict=True):
        last: dict[tuple[str, str], StoredEval] = {}
        if run.status == "completed":
            name = run.run_id.removeprefix(f"{entry.name}/")
            found = evals_in_journal(entry.journal, {run.run_id: name}) if entry.journal.is_file() else []
            found = found or evals_in_logs(run_dir_of(entry, run), name)
            scored_by = {(one.split, one.name): [score.metric for score in one.scores] for one in run.evals}
            trained = [one for one in of_kept_weights(found, run.chosen_steps) if one.step != 0]
            # Step None is the evaluation after training, and so the last; a later one replaces an earlier one.
            for one in sorted(trained, key=lambda one: math.inf if one.step is None else one.step):
                key = one.split, one.name
                last[key] = one if one.metrics else replace(one, metrics=scored_by.get(key, []))
        evals[seed] = last
        if not last:
            failed[seed] = run.error or f"run {run.status}, and no rollouts of it are stored"
    return StoredArm(label=label, evals=evals, failed=failed)


def run_dir_of(entry: ExperimentEntry, run: RecordedRun) -> Path:
    """Beside the record, wherever that has been moved to."""
    given = Path(run.run_dir or run.run_id)
    beside = entry.record.parent / given.name
    return beside if beside.is_dir() else given


def arm_scores(arm: StoredArm, measure: Measure, *, training_mark: str = "") -> ArmScores:
    """The arm's value on every task, seed by seed; `failed` has the reason of a seed without one."""
    split, name, metric = measure
    seeds: dict[int, Values] = {}
    failed, rollouts = dict(arm.failed), []
    for seed, evals in arm.evals.items():
        found = evals.get((split, name))
        if seed in failed:
            continue
        try:
            if found is None:
                raise EvsysError(f"it was not scored on {split}/{name}")
            seeds[seed] = task_values(found.rollouts, metric)
            rollouts += found.rollouts
        except EvsysError as exc:
            failed[seed] = str(exc)
    counts = error_counts(rollouts)
    return ArmScores(arm=arm.label, seeds=seeds, failed=failed, training_mark=training_mark, **counts)


class ErrorCounts(TypedDict):
    """How many of an arm's rollouts errored, as `ArmScores` takes it."""

    n_rollouts: int
    n_errors: int
    first_error: str | None


def error_counts(rollouts: Sequence[Rollout]) -> ErrorCounts:
    """Of the rollouts behind a score, those that no verifier could grade."""
    errored = [rollout for rollout in rollouts if is_errored(rollout)]
    first = errored[0].error or errored[0].status if errored else None
    return ErrorCounts(n_rollouts=len(rollouts), n_errors=len(errored), first_error=first)


def task_values(rollouts: Sequence[Rollout], metric: str) -> dict[str, float]:
    """Task -> the metric on its rollouts alone; EvsysError for a metric that is not the mean of those."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.task_id, []).append(rollout)
    tasks = [scores_of_task(task, found, target=found[0].metadata.get("target")) for task, found in groups.items()]
    reason = invalid_reason(tasks)
    if reason:
        raise EvsysError(reason)
    try:
        fold = as_metric(registry.metrics.build(metric, {}))
        values = {task.task_id: fold([task]) for task in tasks}
        whole = fold(tasks)
    except Exception as exc:  # a metric of the project's own, or one that needs more than rewards
        raise EvsysError(f"{metric} cannot be had task by task from stored rollouts: {exc}") from exc
    if not math.isclose(whole, fmean(values.values()), rel_tol=1e-9, abs_tol=1e-12):
        raise EvsysError(f"{metric} is no mean over tasks, so arms cannot be paired by it")
    return values


def is_share_of_tasks(metric: str) -> bool:
    """Whether values of the metric of this name are shares; a number that no registered metric made is not."""
    try:
        return is_share(registry.metrics.build(metric, {}))
    except EvsysError:
        return False


BESIDE = frozenset(["run", "runs", "matrix", "base_run", "name", "description", "output_dir", "callbacks", "version"])
"""Settings of an experiment that its arms state, or that change nothing; of callbacks, those that only watch."""
WORDS = ("metadata.hypothesis", "metadata.tags")
ON_TEST = "it was measured on a test benchmark, and test scores do not select"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedArm:
    """One arm of one experiment."""

    label: str
    entry: ExperimentEntry
    arm: ArmDigest
    record: ExperimentRecord
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One measure on the tasks that the sides share."""

    split: str
    name: str
    verdict: Verdict

    @property
    def label(self) -> str:
        return score_key(self.split, self.name, self.verdict.metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What there is to say of them together."""

    sides: list[ComparedArm]
    settings: dict[str, list[Any]]
    """Dotted place -> the value of each side; None for one that does not have it. Only what differs."""
    scores: dict[str, list[float | None]]
    """Metric -> the mean over seeds of each side."""
    verdicts: list[Judged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def score_texts(self, key: str) -> list[str]:
        """A score of each side in words, with its unit and what marks it."""
        values = self.scores[key]
        unit = next((side.entry.digest.units[key] for side in self.sides if key in side.entry.digest.units), "")
        # Steps, tokens and rows of a run are counted.
        whole = "/" not in key and all(value is None or float(value).is_integer() for value in values)
        texts = []
        for side, value in zip(self.sides, values, strict=True):
            text = "-" if value is None else f"{value:,.0f}" if whole else shown(value, unit=unit)
            mark = side.arm.training_marks.get(key)
            texts.append(f"{text} ({mark})" if mark else text)
        return texts


def compare(refs: Sequence[str], history: History, *, metric: str | None = None) -> Compared:
    """The experiments (`name` or `name:arm`) side by side; `metric` judges by another than their success metric."""
    notes: list[str] = []
    sides = [side for ref in dict.fromkeys(refs) for side in find_sides(ref, history, notes)]
    if len({(side.entry.record, side.arm.arm) for side in sides}) < 2:
        raise EvsysError("a comparison takes two: name two experiments, or two arms of one as name:arm")
    labels = [side.label for side in sides]
    for index, side in enumerate(sides):  # two experiments of one name are called by their paths
        if labels.count(side.label) > 1:
            sides[index] = replace(side, label=f"{side.entry.record.parent}/{side.label}")
    arms = [read_arm(side.entry, side.arm.arm, side.label) for side in sides]
    return compare_sides(sides, arms, metric=metric, notes=notes)


def compare_sides(
    sides: Sequence[ComparedArm], arms: Sequence[StoredArm], *, metric: str | None, notes: list[str]
) -> Compared:
    """Sides that were chosen, with what is kept of their evaluations, wherever that was read; `notes` come first."""
    # What at least two sides were scored on: by the metric asked for, else their success metrics, else all.
    every = [measure for arm in arms for measure in sorted(arm.measures)]
    shared = [one for one in dict.fromkeys(every) if every.count(one) > 1]
    if metric is not None:
        measures = [one for one in shared if readings_of(metric, score_key(*one))]
    else:
        wanted = {key for side in sides for key in side.entry.digest.measured}
        measures = [one for one in shared if score_key(*one) in wanted] or shared
    verdicts = [judged for measure in measures if (judged := judge(measure, arms, sides, notes))]
    for side in sides:
        for key, mark in side.arm.training_marks.items():
            notes.append(f"{side.label}: {key} was measured {mark if mark.startswith('on ') else f'with {mark}'}")
    without = [arm.label for arm in arms if not arm.measures]
    if not measures and metric is not None:
        known = sorted({score_key(*one) for one in every})
        scored_by = ", ".join(known) or "nothing"
        notes.append(f"no verdict: two of them were not scored by {metric!r}; scored by: {scored_by}")
    elif not measures and without:
        notes.append(f"no verdict: no rollouts are stored of {', '.join(without)}")
    elif not measures:
        notes.append("no verdict: they were not scored on the same benchmark by the same metric")
    settings = dict.fromkeys(key for side in sides for key in side.settings)
    values = {key: [side.settings.get(key) for side in sides] for key in settings}
    # Scores of benchmarks first, what training says of itself after them.
    keys = sorted({key for side in sides for key in side.arm.metrics}, key=lambda key: ("/" not in key, key))
    return Compared(
        sides=list(sides),
        settings={key: found for key, found in values.items() if any(value != found[0] for value in found)},
        scores={key: [side.arm.metrics.get(key) for side in sides] for key in keys},
        verdicts=verdicts,
        notes=list(dict.fromkeys(notes)),
    )


def find_sides(ref: str, history: History, notes: list[str]) -> list[ComparedArm]:
    """The arm that was named (`name:arm`); else the experiment's best arm; else all of its arms."""
    name, colon, arm = ref.rpartition(":")
    try:
        # The whole text first, since an experiment's name may hold a colon.
        found, wanted = look_up(ref, history), None
    except EvsysError:
        if not colon or not name:
            raise
        found, wanted = look_up(name, history), arm
    notes += [found.note] if found.note else []
    return sides_of(found.entry, load_record(found.entry), [wanted] if wanted is not None else [], notes)


def sides_of(
    entry: ExperimentEntry, record: ExperimentRecord, wanted: Sequence[str], notes: list[str]
) -> list[ComparedArm]:
    """The arms of this experiment that are `wanted`; else its best arm; else all."""
    digest = entry.digest
    if entry.notes.why_invalid is not None:
        notes.append(f"{entry.name} is marked as invalid: {entry.notes.why_invalid}")
    if not any(one.statuses for one in digest.arms):
        raise EvsysError(f"{entry.name} is {entry.state} and has no result to compare yet")
    for arm in wanted:
        if digest.arm(arm) is None:
            raise EvsysError(f"{entry.name}: {not_known(arm, 'arm', [one.arm for one in digest.arms])}")
    names: list[str | None] = [*wanted] or [digest.best_arm]
    chosen = [one for one in digest.arms if one.arm in names] or digest.arms
    # Settings beside the arms that may have made a difference; of the callbacks only those that steer.
    steered = steering(record.config.get("callbacks") or [])
    beside = {key: value for key, value in record.config.items() if key not in BESIDE}
    beside |= {"callbacks": steered} if steered else {}
    settings = {key: value for key, value in flatten(beside) if not key.startswith(WORDS)}
    settings |= {key: sha256[:12] for key, sha256 in record.contents.items()}
    return [
        ComparedArm(
            label=entry.name if len(chosen) == 1 and not wanted else f"{entry.name}:{one.arm}",
            entry=entry,
            arm=one,
            record=record,
            settings={**settings, **digest.common, **one.own},
        )
        for one in chosen
    ]


def judge(measure: Measure, arms: Sequence[StoredArm], sides: Sequence[ComparedArm], notes: list[str]) -> Judged | None:
    """The verdict by one measure; None, and a note with the reason, where it could not be judged."""
    (split, name, metric), key = measure, score_key(*measure)
    hashes = {side.entry.digest.tasks.get(f"{split}/{name}") for side in sides} - {None}
    if len(hashes) > 1:
        notes.append(f"{split}/{name} is not the same in all of them: tasks are paired by id and may have changed")
    try:
        with catch_statistics_errors():
            marks = [side.arm.training_marks.get(key, "") for side in sides]
            scores = [arm_scores(arm, measure, training_mark=mark) for arm, mark in zip(arms, marks, strict=True)]
            evals = [found for arm in arms for seed in arm.evals.values() if (found := seed.get((split, name)))]
            clusters = {task: cluster for one in evals for task, cluster in one.clusters.items()}
            # The direction is what the experiments that measure success by it say; else the metric's own.
            modes = {side.entry.digest.mode for side in sides if key in side.entry.digest.measured}
            mode = better_direction(metric, "min" if modes == {"min"} else "max" if modes else None)
            share = is_share_of_tasks(metric)
            unit = next((side.entry.digest.units[key] for side in sides if key in side.entry.digest.units), "")
            verdict = judge_arms(scores, metric=metric, mode=mode, share=share, clusters=clusters, unit=unit)
    except Cancelled:
        raise
    except EvsysError as exc:
        notes.append(f"no verdict by {key}: {exc}")
        return None
    first, *others = verdict.arms
    if verdict.best_arm is None and first.mean is None and any(arm.mean is not None for arm in others):
        # The judge's advice is about a config; here the order of the names decides.
        why = f"{first.arm} has no score to compare with; name another one first"
        verdict = replace(verdict, why_no_best=why)
    verdict = with_recorded_intervals(verdict, sides)
    if split == "test" and not all(side.entry.digest.allows_test for side in sides):
        notes.append(f"{split}/{name} is a test benchmark: do not choose by it")
        verdict = replace(verdict, best_arm=None, winner=None, why_no_best=ON_TEST)
    elif split == "test":
        notes.append(f"{split}/{name} is a test benchmark (allow_test_selection): only new tasks can confirm a choice")
    return Judged(split=split, name=name, verdict=verdict)


def with_recorded_intervals(verdict: Verdict, sides: Sequence[ComparedArm]) -> Verdict:
    """One number has one interval: where its own experiment gave an arm the same mean over as many tasks and seeds, the
    interval is the one in that record. With two seeds it leans on the arms beside it, which are others here."""
    recorded = {side.label: found for side in sides for found in side.record.verdict.arms if found.arm == side.arm.arm}
    arms, winner = [], verdict.winner
    for arm in verdict.arms:
        own = recorded.get(arm.arm) or JudgedArm()
        is_same = (own.n_tasks, own.n_seeds) == (arm.n_tasks, arm.n_seeds) and own.mean is not None
        if is_same and arm.mean is not None and math.isclose(own.mean or 0.0, arm.mean, rel_tol=1e-12, abs_tol=1e-15):
            arm = replace(arm, low=own.low, high=own.high)
            if winner and winner.arm == arm.arm and winner.expected == winner.observed:
                winner = replace(winner, low=arm.low, high=arm.high)
        arms.append(arm)
    return replace(verdict, arms=arms, winner=winner)
