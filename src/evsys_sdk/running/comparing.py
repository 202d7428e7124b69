"""Two or more experiments side by side.

In: experiments, each with the arm that stands for it. Out: a `Side` per arm, the settings in which they differ, their
scores, and a verdict on the tasks that they share: paired, task by task, as between the arms of one experiment. The
first one named is what the others are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from evsys_sdk.errors import Cancelled, EvsysError, not_known
from evsys_sdk.eval.judging import catch_statistics_errors, judge_arms
from evsys_sdk.eval.verdict import Verdict
from evsys_sdk.record.callbacks import steering
from evsys_sdk.record.digest import ArmDigest, flatten
from evsys_sdk.record.history import Entry, History, read_record
from evsys_sdk.record.look_up import look_up
from evsys_sdk.registry import lower_is_better
from evsys_sdk.running.task_values import Measure, StoredArm, arm_scores, is_share_of_tasks, read_arm
from evsys_sdk.score_names import readings_of, score_key

BESIDE = frozenset(["run", "runs", "matrix", "base_run", "name", "description", "output_dir", "callbacks", "version"])
"""Settings of an experiment that are told by its arms, or change nothing; of callbacks, those that only watch."""
WORDS = ("metadata.hypothesis", "metadata.tags")
ON_TEST = "it was measured on a test benchmark, and test scores do not select"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One arm of one experiment."""

    label: str
    entry: Entry
    arm: ArmDigest
    settings: dict[str, Any]

    @property
    def scores(self) -> dict[str, float]:
        return dict(self.arm.metrics)


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

    sides: list[Side]
    settings: dict[str, list[Any]]
    """Dotted place -> the value of each side; None for one that does not have it. Only what differs."""
    scores: dict[str, list[float | None]]
    """Metric -> the mean over seeds of each side."""
    verdicts: list[Judged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(refs: Sequence[str], history: History, *, metric: str | None = None) -> Compared:
    """The experiments (`name` or `name:arm`) side by side; `metric` judges by another than their success metric."""
    notes: list[str] = []
    sides = [side for ref in dict.fromkeys(refs) for side in _sides(ref, history, notes)]
    if len({(side.entry.record, side.arm.arm) for side in sides}) < 2:
        raise EvsysError("a comparison takes two: name two experiments, or two arms of one as name:arm")
    _tell_apart(sides)
    keys = dict.fromkeys(key for side in sides for key in side.settings)
    values = {key: [side.settings.get(key) for side in sides] for key in keys}
    stored = [read_arm(side.entry, side.arm.arm, side.label) for side in sides]
    measures = _measures(stored, sides, metric)
    verdicts = [judged for measure in measures if (judged := _judged(measure, stored, sides, notes))]
    if not measures:
        notes.append(_why_no_verdict(stored, metric))
    return Compared(
        sides=sides,
        settings={key: found for key, found in values.items() if any(value != found[0] for value in found)},
        scores=_scores(sides),
        verdicts=verdicts,
        notes=list(dict.fromkeys(notes)),
    )


def _sides(ref: str, history: History, notes: list[str]) -> list[Side]:
    """The arm that was named; else the experiment's best arm; else all of its arms."""
    entry, arm = _named(ref, history, notes)
    digest = entry.digest
    if entry.notes.why_invalid is not None:
        notes.append(f"{entry.name} is marked as invalid: {entry.notes.why_invalid}")
    if not any(one.statuses for one in digest.arms):
        raise EvsysError(f"{entry.name} is {entry.state} and has no result to compare yet")
    if arm is not None and digest.arm(arm) is None:
        raise EvsysError(f"{entry.name}: {not_known(arm, 'arm', [one.arm for one in digest.arms])}")
    chosen = [one for one in digest.arms if one.arm == (arm or digest.best_arm)] or digest.arms
    beside = {key: value for key, value in flatten(_of_all_arms(entry)) if not key.startswith(WORDS)}
    return [
        Side(
            label=entry.name if len(chosen) == 1 and arm is None else f"{entry.name}:{one.arm}",
            entry=entry,
            arm=one,
            settings={**beside, **_contents(entry), **digest.common, **one.own},
        )
        for one in chosen
    ]


def _named(ref: str, history: History, notes: list[str]) -> tuple[Entry, str | None]:
    name, colon, arm = ref.rpartition(":")
    try:
        found, wanted = look_up(ref, history), None
    except EvsysError:
        if not colon or not name:
            raise
        found, wanted = look_up(name, history), arm
    notes += [found.note] if found.note else []
    return found.entry, wanted


def _config(entry: Entry) -> dict[str, Any]:
    found = read_record(entry).get("config")
    return found if isinstance(found, dict) else {}


def _of_all_arms(entry: Entry) -> dict[str, Any]:
    """The settings beside the arms that may have made a difference."""
    config = _config(entry)
    steered = steering(config.get("callbacks") or [])
    found = {key: value for key, value in config.items() if key not in BESIDE}
    return {**found, "callbacks": steered} if steered else found


def _contents(entry: Entry) -> dict[str, Any]:
    found = read_record(entry).get("contents")
    return {key: str(value)[:12] for key, value in found.items()} if isinstance(found, dict) else {}


def _tell_apart(sides: list[Side]) -> None:
    """Two experiments of one name, told by path, are called by their paths."""
    labels = [side.label for side in sides]
    for index, side in enumerate(sides):
        if labels.count(side.label) > 1:
            sides[index] = replace(side, label=f"{side.entry.record.parent}/{side.label}")


def _scores(sides: Sequence[Side]) -> dict[str, list[float | None]]:
    """Scores of benchmarks first, what training says of itself after them."""
    keys = sorted({key for side in sides for key in side.scores}, key=lambda key: ("/" not in key, key))
    return {key: [side.scores.get(key) for side in sides] for key in keys}


def _measures(stored: Sequence[StoredArm], sides: Sequence[Side], metric: str | None) -> list[Measure]:
    """What at least two sides were scored on: by the metric asked for, else their success metrics, else all."""
    found = [measure for arm in stored for measure in sorted(arm.measures)]
    shared = [one for one in dict.fromkeys(found) if found.count(one) > 1]
    if metric is not None:
        return [one for one in shared if readings_of(metric, score_key(*one))]
    wanted = {key for side in sides for key in side.entry.digest.measured}
    return [one for one in shared if score_key(*one) in wanted] or shared


def _judged(measure: Measure, stored: Sequence[StoredArm], sides: Sequence[Side], notes: list[str]) -> Judged | None:
    """The verdict by one measure; None, and a note with the reason, where it could not be judged."""
    split, name, metric = measure
    hashes = {side.entry.digest.tasks.get(f"{split}/{name}") for side in sides} - {None}
    if len(hashes) > 1:
        notes.append(f"{split}/{name} is not the same in all of them: tasks are paired by id and may have changed")
    try:
        with catch_statistics_errors():
            scores = [arm_scores(arm, measure) for arm in stored]
            share = is_share_of_tasks(metric)
            evals = [found for arm in stored for seed in arm.evals if (found := seed.get((split, name)))]
            clusters = {task: cluster for one in evals for task, cluster in one.clusters.items()}
            mode = _mode(measure, sides)
            verdict = _advised(judge_arms(scores, metric=metric, mode=mode, share=share, clusters=clusters))
            verdict = _with_recorded_intervals(verdict, sides)
    except Cancelled:
        raise
    except EvsysError as exc:
        notes.append(f"no verdict by {score_key(*measure)}: {exc}")
        return None
    if split == "test" and not all(side.entry.digest.allows_test for side in sides):
        notes.append(f"{split}/{name} is a test benchmark: do not choose by it")
        verdict = replace(verdict, best_arm=None, winner=None, why_no_best=ON_TEST)
    elif split == "test":
        notes.append(f"{split}/{name} is a test benchmark (allow_test_selection): only new tasks can confirm a choice")
    return Judged(split=split, name=name, verdict=verdict)


def _with_recorded_intervals(verdict: Verdict, sides: Sequence[Side]) -> Verdict:
    """One number has one interval: where its own experiment gave an arm the same mean over as many tasks and seeds, the
    interval is the one in that record. With two seeds it leans on the arms beside it, which are others here."""
    recorded = {side.label: _recorded_arm(side) for side in sides}
    arms, winner = [], verdict.winner
    for arm in verdict.arms:
        found = recorded.get(arm.arm, {})
        counts = (found.get("n_tasks"), found.get("n_seeds"))
        if arm.mean is not None and counts == (arm.n_tasks, arm.n_seeds) and _is_close(found.get("mean"), arm.mean):
            arm = replace(arm, low=found.get("low"), high=found.get("high"))
            if winner and winner.arm == arm.arm and winner.expected == winner.observed:
                winner = replace(winner, low=arm.low, high=arm.high)
        arms.append(arm)
    return replace(verdict, arms=arms, winner=winner)


def _recorded_arm(side: Side) -> dict[str, Any]:
    """What the verdict of the arm's own experiment says of it; empty where there is none."""
    verdict = read_record(side.entry).get("verdict")
    arms = verdict.get("arms", []) if isinstance(verdict, dict) else []
    return next((arm for arm in arms if isinstance(arm, dict) and arm.get("arm") == side.arm.arm), {})


def _is_close(value: Any, mean: float) -> bool:
    return isinstance(value, float | int) and math.isclose(value, mean, rel_tol=1e-12, abs_tol=1e-15)


def _advised(verdict: Verdict) -> Verdict:
    """Where the baseline has no score, the advice is this command's and not a config's."""
    first, *others = verdict.arms
    if verdict.best_arm is not None or first.mean is not None or all(arm.mean is None for arm in others):
        return verdict
    return replace(verdict, why_no_best=f"{first.arm} has no score to compare with; name another one first")


def _mode(measure: Measure, sides: Sequence[Side]) -> Literal["max", "min"]:
    """As the experiments that measure success by it say; else as the metric is."""
    modes = {side.entry.digest.mode for side in sides if score_key(*measure) in side.entry.digest.measured}
    return "min" if modes == {"min"} or (not modes and lower_is_better(measure[2])) else "max"


def _why_no_verdict(stored: Sequence[StoredArm], metric: str | None) -> str:
    if metric is not None:
        known = sorted({score_key(*one) for arm in stored for one in arm.measures})
        return f"no verdict: two of them were not scored by {metric!r}; scored by: {', '.join(known) or 'nothing'}"
    without = [arm.label for arm in stored if not arm.measures]
    if without:
        return f"no verdict: no rollouts are stored of {', '.join(without)}"
    return "no verdict: they were not scored on the same benchmark by the same metric"
