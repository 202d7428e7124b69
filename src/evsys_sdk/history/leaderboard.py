"""Which experiments moved the best score, which did not, and how much of a difference is noise.

In: entries. Out: `Track`s, one per success metric, set of tasks, model, and mock or real backend, each with its noise,
its kept experiments and its dead ends. Scores of different metrics, tasks or models never share one leaderboard, nor do
scores of the mock backend beside real ones, nor scores on tasks that an arm trained on beside others. Scores on test
benchmarks alone make no leaderboard, unless the experiment's config allows test scores to select. A run that other
experiments took over is counted once. Also out: how often each set of tasks was selected on by each metric
(`BenchmarkLooks`), and what the best of so many arms is worth by chance.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist, median, variance
from typing import Any, Literal

from evsys_sdk.format import count, shown
from evsys_sdk.history.digest import ArmDigest, Digest, Settings
from evsys_sdk.history.history import ExperimentEntry, attempts_of
from evsys_sdk.score_names import parse_key, suite_label
from evsys_sdk.stats.task_sketch import TaskSketch, sketch_from

STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % points of Student's t for 1 to 30 degrees of freedom."""
MANY = 2.04
"""For more: that of 31, so that the noise is never called smaller than it is (at 120 by 3 %)."""
MOCK = "mock"
"""The backend whose scores say nothing about real models."""
WILD = 10.0
"""How many times the usual variance over seeds an arm may have and still count in full for the noise of all. A choice:
of two equal arms with three seeds one scatters ten times as much as the other in 18 %, of those with five in 5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much scores differ when nothing does."""

    seed_sd: float | None = None
    """Standard deviation over seeds, pooled over the arms that have several."""
    degrees: int = 0
    half_width: float | None = None
    """Median of the scores' 95 % half-widths over tasks."""
    largest: float = math.inf
    """The largest difference there can be: 1 where scores are shares."""
    wild: float = math.inf
    """Variance over seeds from which an arm does not count in full for the noise of all."""
    wildest_sd: float | None = None
    """The largest standard deviation over the seeds of one arm, where that arm does not count in full."""

    def floor(self, seeds: int = 1, other_seeds: int = 1) -> float | None:
        """Two arms with so many seeds that differ by less are not told apart; None where nothing is known of noise.

        From the scatter over seeds where that was seen; else from the intervals over tasks, as if the two had been
        scored on different tasks, which is on the safe side.
        """
        # Not for 0 either: seeds that agree exactly are no proof that there is no noise.
        if self.seed_sd:
            return min(_student(self.degrees) * self.seed_sd * math.sqrt(1 / seeds + 1 / other_seeds), self.largest)
        return min(math.sqrt(2) * self.half_width, self.largest) if self.half_width else None

    def floor_between(self, scores: Sequence[float], other: Sequence[float]) -> float | None:
        """The floor for two arms whose seeds have these scores: not less than their own seeds say (Welch 1947).

        On an open scale, where one arm's loss is a thousand times another's, arms do not share one scatter: two arms
        with several seeds each are held to their own, as in a verdict.
        """
        general = self.floor(len(scores), len(other))
        parts = [(variance(one) / len(one), len(one) - 1) for one in (scores, other) if len(one) > 1]
        total = sum(part for part, _ in parts)
        if not total:
            return general
        degrees = total**2 / sum(part**2 / free for part, free in parts)
        # Degrees are rounded down, to the safe side; 1e-9 because equal variances may give 3.9999999 for 4.
        own = min(_student(max(1, int(degrees + 1e-9))) * math.sqrt(total), self.largest)
        if len(parts) == 2 and math.isinf(self.largest):
            return own
        is_wild = any(part * (free + 1) > self.wild for part, free in parts)
        return max(own, general or 0.0) if is_wild else general


def _student(degrees: int) -> float:
    return STUDENT[degrees - 1] if degrees <= len(STUDENT) else MANY


Outcome = Literal["first", "kept", "within noise", "no gain", "worse"]
"""Against the best of its time. `no gain`: not higher, where nothing is known of noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderboardRow:
    """One experiment on a leaderboard, or beside it."""

    entry: ExperimentEntry
    arm: ArmDigest
    score: float
    before: LeaderboardRow | None = None
    """The best so far when this one was run."""
    outcome: Outcome = "first"
    floor: float | None = None

    @property
    def gain(self) -> float | None:
        return None if self.before is None else self.score - self.before.score

    @property
    def settings(self) -> Settings:
        return {**self.entry.digest.common, **self.arm.own}


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Experiments whose scores can be put side by side."""

    metric: str
    """What was measured, as `val/tools/pass@1`."""
    mode: str
    entries: list[ExperimentEntry]
    """Oldest first."""
    noise: Noise
    kept: list[LeaderboardRow] = field(default_factory=list)
    """Kept ones, oldest first; the last is the best so far."""
    dead_ends: list[LeaderboardRow] = field(default_factory=list)
    """Below the best of their time by more than noise; oldest first."""
    undecided: list[LeaderboardRow] = field(default_factory=list)
    """Higher or lower than the best of their time, by no more than noise; oldest first."""
    tasks: str = ""
    """Hash of the tasks, where it is known, and how many of them if not all."""
    selects: bool = True
    """False: measured on test benchmarks alone, which select nothing."""
    model: str = ""
    """The model that was trained, where the records name it."""
    is_mock: bool = False
    """Trained on the mock backend, whose scores say nothing about real models."""
    is_memory: bool = False
    """Tasks stood in the training rows of these arms: their scores show memory, and honest ones need not beat them."""
    label: str = ""
    """The metric, and what tells the track from others of that metric."""

    @property
    def unit(self) -> str:
        """Of its scores."""
        return next((entry.digest.unit for entry in self.entries if entry.digest.unit), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparable:
    """What two experiments must share for their scores to be put side by side."""

    metric: str
    mode: str
    tasks: str
    selects: bool
    model: str
    is_mock: bool
    is_memory: bool


def tracks_of(entries: Sequence[ExperimentEntry]) -> list[Track]:
    """The tracks of all entries that count, the one that was worked on last first; those with tasks in training rows
    after all others."""
    groups: dict[Comparable, list[ExperimentEntry]] = {}
    void = {place for entry in entries if entry.status == "invalid" for place in runs_of(entry, own=True)}
    counting = [_without(entry, void) for entry in entries if entry.counts]
    for entry in sorted(counting, key=lambda entry: entry.when):
        if not entry.digest.measured:
            continue
        # The entry once per model, mock or real backend, and tasks trained on or not, of its arms; each time with the
        # scores of those only.
        arms: dict[tuple[str, bool, bool], list[ArmDigest]] = {}
        mock = mock_arms(entry.digest)
        for arm in entry.digest.scored:
            model = str({**entry.digest.common, **arm.own}.get("model.name") or "")
            arms.setdefault((model, arm.arm in mock, bool(arm.training_mark)), []).append(arm)
        for (model, is_mock, is_memory), mine in arms.items():
            part = _scoreless(entry, [arm for arm in entry.digest.scored if arm not in mine])
            digest = part.digest
            known = digest.tasks.keys() | digest.paths.keys()
            key = Comparable(
                metric=" + ".join(digest.measured),
                mode=digest.mode,
                tasks=" + ".join(name_tasks(digest, suite) for suite in _suites(digest) if suite in known),
                selects=digest.selects,
                model=model,
                is_mock=is_mock,
                is_memory=is_memory,
            )
            groups.setdefault(key, []).append(part)
    tracks = [_track(key, group) for key, group in groups.items()]
    tracks.sort(key=lambda track: (track.is_memory, -track.entries[-1].when))
    return [replace(track, label=_label(track, tracks)) for track in tracks]


def mock_arms(digest: Digest) -> set[str]:
    """The arms of an experiment that were trained on the mock backend."""
    settings = {arm.arm: {**digest.common, **arm.own} for arm in digest.arms}
    return {
        name
        for name, given in settings.items()
        if given.get("backend.kind") == MOCK or str(given.get("algorithm.kind")).startswith(f"{MOCK}_")
    }


def _suites(digest: Digest) -> list[str]:
    """The benchmarks that measured it, as `val/tools`."""
    return list(dict.fromkeys(score.suite for key in digest.measured if (score := parse_key(key)) is not None))


def name_tasks(digest: Digest, suite: str) -> str:
    """`tasks 5f0c1a2b` or `the first 8 of tasks 5f0c1a2b`; by path, else by suite, where no hash is known."""
    first = f"the first {digest.limits[suite]} of " if suite in digest.limits else ""
    if suite in digest.tasks:
        return f"{first}tasks {digest.tasks[suite][:8]}"
    return f"{first}tasks in {digest.paths[suite]}" if suite in digest.paths else f"{first}tasks of {suite}"


def _label(track: Track, tracks: Sequence[Track]) -> str:
    """`val/tools/pass@1 (tasks 5f0c1a2b in data/val)` where tracks of one metric have to be distinguished."""
    others = [other for other in tracks if other.metric == track.metric]
    told = []
    if len({other.tasks for other in others}) > 1:
        digest = track.entries[-1].digest
        paths = [digest.paths[suite] for suite in _suites(digest) if suite in digest.paths and suite in digest.tasks]
        told.append(f"{track.tasks or 'tasks not known'}{' in ' if paths else ''}{' + '.join(paths)}")
    if len({other.mode for other in others}) > 1:
        told.append("lower is better" if track.mode == "min" else "higher is better")
    if len({other.selects for other in others}) > 1:
        told.append("allow_test_selection" if track.selects else "no allow_test_selection")
    if len({other.model for other in others}) > 1:
        told.append(track.model or "model not known")
    if track.is_mock:
        told.append("mock backend")
    if track.is_memory:
        told.append("tasks in training rows")
    return f"{track.metric} ({'; '.join(told)})" if told else track.metric


def runs_of(entry: ExperimentEntry, *, own: bool = False) -> frozenset[str]:
    """Folders of the runs that an experiment is made of; `own`: without those that it took over."""
    taken = {place for arm in entry.digest.arms for place in arm.reused} if own else set()
    return _places(entry, [place for arm in entry.digest.arms for place in arm.runs if place not in taken])


def _places(entry: ExperimentEntry, runs: Iterable[str]) -> frozenset[str]:
    folder = os.path.dirname(entry.record)
    return frozenset(os.path.normpath(f"{folder}/{run}") if "/" in run else f"{folder}/{run}" for run in runs)


def counted_once(entries: Sequence[ExperimentEntry]) -> Iterator[ExperimentEntry]:
    """The entries without the scores of arms all of whose runs an entry before them has."""
    seen: set[str] = set()
    if not any(arm.reused for entry in entries for arm in entry.digest.arms):
        yield from entries
        return
    for entry in entries:
        yield _without(entry, seen)
        seen |= runs_of(entry)


def _without(entry: ExperimentEntry, seen: Set[str]) -> ExperimentEntry:
    """The entry without the scores of arms all of whose runs are among those `seen`."""
    digest = entry.digest
    return _scoreless(entry, [arm for arm in digest.arms if seen and arm.runs and _places(entry, arm.runs) <= seen])


def _scoreless(entry: ExperimentEntry, known: Sequence[ArmDigest]) -> ExperimentEntry:
    """The entry without the scores of these arms."""
    if not known:
        return entry
    digest = entry.digest
    top = digest.top
    less = replace(
        digest,
        arms=[replace(arm, scores=[], half_width=None) if arm in known else arm for arm in digest.arms],
        best_arm=None if digest.best_arm in [arm.arm for arm in known] else digest.best_arm,
        expected=None if top in known else digest.expected,
    )
    return replace(entry, digest=less)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingEffect:
    """One value of a setting, over all arms that had it."""

    value: Any
    scores: list[float]
    """Means of those arms, the best first."""


def values_tried(track: Track) -> dict[str, list[SettingEffect]]:
    """Setting -> its values, for settings of which several were tried; what was tried most first, and of a setting's
    values the one with the best score. None of a track whose scores select nothing."""
    found: dict[str, dict[Any, list[float]]] = {}
    entries = track.entries[::-1] if track.selects else []
    # The newest first: an arm that was run again with more seeds holds what the one before it had.
    for digest in (entry.digest for entry in counted_once(entries)):
        for arm in digest.scored:
            mean = arm.mean or 0.0
            for key, value in {**digest.common, **arm.own}.items():
                found.setdefault(key, {}).setdefault(value, []).append(mean)
    down = track.mode == "max"
    tried = {
        key: sorted(
            (SettingEffect(value=value, scores=sorted(scores, reverse=down)) for value, scores in values.items()),
            key=lambda one: one.scores[0],
            reverse=down,
        )
        for key, values in found.items()
        if len(values) > 1
    }
    return dict(sorted(tried.items(), key=lambda pair: -len(pair[1])))


def noise_of(entries: Sequence[ExperimentEntry]) -> Noise:
    arms = [arm for entry in entries for arm in entry.digest.arms if arm.scores]
    repeated = [arm.scores for arm in arms if len(arm.scores) > 1]
    degrees = sum(len(scores) - 1 for scores in repeated)
    spreads = [variance(scores) for scores in repeated]
    seen = [value for arm in arms for value in (*arm.scores, arm.low, arm.high) if value is not None]
    is_share = all(entry.digest.share is not False and all(map(parse_key, entry.digest.measured)) for entry in entries)
    largest = 1.0 if is_share and all(0.0 <= value <= 1.0 for value in seen) else math.inf
    # One arm whose seeds lie far apart must not hide every other arm's gain: as in a verdict, it counts at most with
    # WILD times the usual spread. On an open scale there is no usual one: that of a tiny loss would be next to nothing.
    most = WILD * median(spreads) if spreads and median(spreads) > 0 and largest == 1.0 else math.inf
    pooled = sum(min(spread, most) * (len(scores) - 1) for spread, scores in zip(spreads, repeated, strict=True))
    widths = [arm.half_width for arm in arms if arm.half_width is not None]
    return Noise(
        seed_sd=math.sqrt(pooled / degrees) if degrees else None,
        degrees=degrees,
        half_width=median(widths) if widths else None,
        largest=largest,
        wild=most,
        wildest_sd=math.sqrt(max(spreads)) if spreads and max(spreads) > most else None,
    )


def _track(key: Comparable, entries: list[ExperimentEntry]) -> Track:
    noise = noise_of(list(counted_once(entries[::-1])))
    track = Track(
        metric=key.metric,
        mode=key.mode,
        entries=entries,
        noise=noise,
        tasks=key.tasks,
        selects=key.selects,
        model=key.model,
        is_mock=key.is_mock,
        is_memory=key.is_memory,
    )
    for entry in counted_once(entries if key.selects else []):
        arm, best = entry.digest.top, track.kept[-1] if track.kept else None
        if arm is None or arm.mean is None:
            continue
        # A winner was picked for its score; what is to be expected of it is lower, and the record may know by how much.
        score = arm.mean if entry.digest.expected is None else entry.digest.expected
        if best is None:
            track.kept.append(LeaderboardRow(entry=entry, arm=arm, score=score))
            continue
        floor = noise.floor_between(arm.scores, best.arm.scores)
        gain = (score - best.score) * (1 if track.mode == "max" else -1)
        # A difference within noise is no answer, whichever way it points: neither kept nor a dead end.
        outcome: Outcome = "kept" if gain > 0 else "worse" if gain < 0 else "no gain"
        rows = track.kept if gain > 0 else track.dead_ends
        if floor is not None and abs(gain) <= floor:
            outcome, rows = "within noise", track.undecided
        rows.append(LeaderboardRow(entry=entry, arm=arm, score=score, before=best, outcome=outcome, floor=floor))
    return track


# Every arm whose score may select counts as one look at the tasks, in any experiment, also in attempts that `--fresh`
# set aside; scores on test benchmarks count only where `allow_test_selection` lets them select. Sets of tasks
# are distinguished by what the tasks ask, not by names or paths. Arms of the mock backend are counted apart.


BUDGET = 25
"""Arms that may be compared on one set of tasks. The best of 25 equal arms is expected 1.96 standard errors above its
true level, which is half the width of a 95 % interval: that of the best score lies wholly above what the arm is worth
in 47 % of cases, in 29 to 36 % where arms fail the same tasks (simulated, 200 tasks), and more often beyond 25."""


@dataclass(slots=True, kw_only=True)
class BenchmarkLooks:
    """One set of tasks with one metric, and who chose by it."""

    benchmark: str
    """Split and name, as `val/tools`."""
    metric: str
    mode: str = "max"
    unit: str = ""
    """What the metric is counted in."""
    tasks: str
    """What tells the tasks from others: the beginning of their hash, or the path where no hash is known."""
    is_mock: bool = False
    sketch: TaskSketch | None = None
    experiments: list[Path] = field(default_factory=list)
    """Their records: experiments in two folders may have one name."""
    n_arms: int = 0
    """Arms with a score, each in every experiment and attempt that scored it with its own seeds."""
    n_attempts: int = 0
    """Attempts that `--fresh` set aside and that have other scores; their arms are counted."""
    half_widths: list[float] = field(default_factory=list)
    """Of the arms' 95 % intervals over tasks, one seed each."""

    @property
    def by_chance(self) -> float | None:
        """How far the best of so many equal arms is expected from its true level, in the metric's unit; None where no
        score has an interval."""
        if not self.half_widths or self.n_arms < 2:
            return None
        # Half of a 95 % interval is 1.96 standard errors.
        return expected_maximum(self.n_arms) * median(self.half_widths) / NormalDist().inv_cdf(0.975)

    @property
    def is_spent(self) -> bool:
        return self.n_arms >= BUDGET

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "metric": self.metric,
            "tasks": self.tasks,
            "mock": self.is_mock,
            "experiments": len(self.experiments),
            "arms": self.n_arms,
            "attempts_set_aside": self.n_attempts,
            "budget": BUDGET,
            "spent": self.is_spent,
            "best_by_chance": self.by_chance,
        }

    def __str__(self) -> str:
        """`val/tools pass@1 (tasks 5f0c1a2b): 31 arms of 12 experiments compared on it; ...`."""
        mock = "; mock backend" if self.is_mock else ""
        arms, experiments = count(self.n_arms, "arm"), count(len(self.experiments), "experiment")
        if self.n_attempts:
            experiments += f" and {count(self.n_attempts, 'attempt')} set aside by --fresh"
        name = f"{self.benchmark} {self.metric}"
        text = f"{name} ({self.tasks}{mock}): {arms} of {experiments} compared on it (budget {BUDGET})"
        if self.by_chance is not None:
            off = f"{shown(self.by_chance, unit=self.unit)} too {'low' if self.mode == 'min' else 'high'} by chance"
            text += f"; the best of {self.n_arms} equal arms scores about {off}"
        return f"{text}. The budget is spent: choose on a fresh validation set." if self.is_spent else text


def expected_maximum(n: int) -> float:
    """Of n independent standard normal values (Blom 1958, within 2 % from n = 5 on)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def looks_of(entries: Sequence[ExperimentEntry]) -> list[BenchmarkLooks]:
    """Every set of tasks and metric that was selected on, the most used first."""
    found: list[BenchmarkLooks] = []
    counting = sorted((entry for entry in entries if entry.counts), key=lambda entry: entry.when)
    for entry in counted_once(counting):
        _count(found, entry, entry.digest)
        known = [_scores(entry.digest)]
        for attempt in attempts_of(entry.record):
            if any(_scores(attempt)) and _scores(attempt) not in known:
                known.append(_scores(attempt))
                for looks in _count(found, entry, attempt):
                    looks.n_attempts += 1
    return sorted(found, key=lambda one: (one.is_mock, -one.n_arms))


def _scores(digest: Digest) -> list[list[float]]:
    return [arm.scores for arm in digest.arms]


def _count(found: list[BenchmarkLooks], entry: ExperimentEntry, digest: Digest) -> list[BenchmarkLooks]:
    """Add the arms of an experiment, or of an attempt at it, to the sets of tasks that they were scored on; these."""
    if not digest.selects:
        return []
    mock, touched = mock_arms(digest), []
    for key in digest.measured:
        if (score := parse_key(key)) is None:
            continue
        tasks, sketch = name_tasks(digest, score.suite), sketch_from(digest.sketches.get(score.suite))
        label = suite_label(score.split, score.benchmark)
        # Trials that a search left behind were compared too, and have no final score.
        for arm in [*digest.scored, *(arm for arm in digest.arms if set(arm.statuses) == {"pruned"})]:
            # The set with these tasks, or one that shares at least half of them; a new one where there is none.
            # Metrics are apart: a width in seconds says nothing of a share, nor the best by one metric of another.
            is_mock = arm.arm in mock
            for looks in found:
                is_same = looks.tasks == tasks or (sketch and looks.sketch and sketch.is_like(looks.sketch))
                if is_same and (looks.is_mock, looks.metric, looks.mode) == (is_mock, score.metric, digest.mode):
                    looks.sketch = looks.sketch or sketch
                    break
            else:
                looks = BenchmarkLooks(
                    benchmark=label,
                    metric=score.metric,
                    mode=digest.mode,
                    unit=digest.units.get(key, ""),
                    tasks=tasks,
                    is_mock=is_mock,
                    sketch=sketch,
                )
                found.append(looks)
            looks.n_arms += 1
            looks.half_widths += [arm.half_width] if arm.half_width is not None else []
            looks.experiments += [entry.record] if entry.record not in looks.experiments else []
            looks.benchmark += f", {label}" if label not in looks.benchmark.split(", ") else ""
            touched += [looks] if looks not in touched else []
    return touched
