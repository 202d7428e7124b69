"""Which experiments moved the best score, which did not, and how much of a difference is noise.

In: entries. Out: `Track`s, one per success metric, set of tasks, model, and mock or real backend, each with its noise,
its kept rungs and its dead ends. Scores of different metrics, tasks or models are never put on one ladder, nor are
scores of the mock backend beside real ones. Scores on test benchmarks alone make no ladder, unless the experiment's
config allows test scores to select. A run that other experiments took over is counted once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import median, variance
from typing import Any, Literal

from evsys_sdk.record.digest import ArmDigest, Digest, Settings
from evsys_sdk.record.history import Entry
from evsys_sdk.score_names import parse_key

STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % points of Student's t for 1 to 30 degrees of freedom."""
MANY = 1.98
MOCK = "mock"
"""The backend whose scores say nothing about real models."""
WILD = 10.0
"""How many times the usual variance over seeds an arm may have and still count in full for the noise of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much scores differ when nothing does."""

    seed_sd: float | None = None
    """Standard deviation over seeds, pooled over the arms that have several."""
    degrees: int = 0
    half_width: float | None = None
    """Median of the scores' 95 % half-widths over tasks."""
    largest: float = math.inf
    """The largest difference there can be: 1 where all scores and their intervals lie between 0 and 1."""

    def floor(self, seeds: int = 1, other_seeds: int = 1) -> float | None:
        """Two arms with so many seeds that differ by less are not told apart; None where nothing is known of noise.

        From the scatter over seeds where that was seen; else from the intervals over tasks, as if the two had been
        scored on different tasks, which is on the safe side.
        """
        if self.seed_sd:
            quantile = STUDENT[self.degrees - 1] if self.degrees <= len(STUDENT) else MANY
            return min(quantile * self.seed_sd * math.sqrt(1 / seeds + 1 / other_seeds), self.largest)
        return min(math.sqrt(2) * self.half_width, self.largest) if self.half_width else None


Outcome = Literal["first", "kept", "within noise", "no gain", "worse"]
"""Against the best of its time. `no gain`: not higher, where nothing is known of noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One experiment on a ladder, or beside it."""

    entry: Entry
    arm: ArmDigest
    score: float
    before: Rung | None = None
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
    entries: list[Entry]
    """Oldest first."""
    noise: Noise
    rungs: list[Rung] = field(default_factory=list)
    """Kept ones, oldest first; the last is the best so far."""
    dead_ends: list[Rung] = field(default_factory=list)
    """Below the best of their time by more than noise; oldest first."""
    undecided: list[Rung] = field(default_factory=list)
    """Higher or lower than the best of their time, by no more than noise; oldest first."""
    tasks: str = ""
    """Hash of the tasks, where it is known, and how many of them if not all."""
    selects: bool = True
    """False: measured on test benchmarks alone, which select nothing."""
    model: str = ""
    """The model that was trained, where the records name it."""
    is_mock: bool = False
    """Trained on the mock backend, whose scores say nothing about real models."""
    label: str = ""
    """The metric, and what tells the track from others of that metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparable:
    """What two experiments must share for their scores to be put side by side."""

    metric: str
    mode: str
    tasks: str
    selects: bool
    model: str
    is_mock: bool


def tracks_of(entries: Sequence[Entry]) -> list[Track]:
    """The tracks of all entries that count, the one that was worked on last first."""
    groups: dict[Comparable, list[Entry]] = {}
    void = {place for entry in entries if entry.status == "invalid" for place in runs_of(entry, own=True)}
    counting = [_without(entry, void) for entry in entries if entry.counts]
    for entry in sorted(counting, key=lambda entry: entry.when):
        if not entry.digest.measured:
            continue
        for model, is_mock, part in _by_model(entry):
            digest = part.digest
            key = Comparable(
                metric=" + ".join(digest.measured),
                mode=digest.mode,
                tasks=_tasks(digest),
                selects=digest.selects,
                model=model,
                is_mock=is_mock,
            )
            groups.setdefault(key, []).append(part)
    tracks = [_track(key, group) for key, group in groups.items()]
    tracks.sort(key=lambda track: -track.entries[-1].when)
    return [replace(track, label=_label(track, tracks)) for track in tracks]


def mock_arms(digest: Digest) -> set[str]:
    """The arms of an experiment that were trained on the mock backend."""
    settings = {arm.arm: {**digest.common, **arm.own} for arm in digest.arms}
    return {
        name
        for name, given in settings.items()
        if given.get("backend.kind") == MOCK or str(given.get("algorithm.kind")).startswith(f"{MOCK}_")
    }


def _by_model(entry: Entry) -> Iterator[tuple[str, bool, Entry]]:
    """The entry once per model, and per mock or real backend, of its arms; each time with the scores of those only."""
    arms: dict[tuple[str, bool], list[ArmDigest]] = {}
    mock = mock_arms(entry.digest)
    for arm in entry.digest.scored:
        model = str({**entry.digest.common, **arm.own}.get("model.name") or "")
        arms.setdefault((model, arm.arm in mock), []).append(arm)
    for (model, is_mock), mine in arms.items():
        yield model, is_mock, _scoreless(entry, [arm for arm in entry.digest.scored if arm not in mine])


def _suites(digest: Digest) -> list[str]:
    """The benchmarks that measured it, as `val/tools`."""
    return list(dict.fromkeys(score.suite for key in digest.measured if (score := parse_key(key)) is not None))


def _tasks(digest: Digest) -> str:
    """The same for experiments measured on the same tasks: `tasks 5f0c1a2b`, `the first 8 of tasks 5f0c1a2b`."""
    firsts = {suite: f"the first {limit} of " for suite, limit in digest.limits.items()}
    told = {suite: f"tasks in {path}" for suite, path in digest.paths.items()}  # where no hash is known
    told |= {suite: f"tasks {found[:8]}" for suite, found in digest.tasks.items()}
    return " + ".join(f"{firsts.get(suite, '')}{told[suite]}" for suite in _suites(digest) if suite in told)


def _label(track: Track, tracks: Sequence[Track]) -> str:
    """`val/tools/pass@1 (tasks 5f0c1a2b in data/val)` where tracks of one metric have to be told apart."""
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
    return f"{track.metric} ({'; '.join(told)})" if told else track.metric


def runs_of(entry: Entry, *, own: bool = False) -> frozenset[str]:
    """Folders of the runs that an experiment is made of; `own`: without those that it took over."""
    taken = {place for arm in entry.digest.arms for place in arm.reused} if own else set()
    return _places(entry, [place for arm in entry.digest.arms for place in arm.runs if place not in taken])


def _places(entry: Entry, runs: Iterable[str]) -> frozenset[str]:
    folder = os.path.dirname(entry.record)
    return frozenset(os.path.normpath(f"{folder}/{run}") if "/" in run else f"{folder}/{run}" for run in runs)


def counted_once(entries: Sequence[Entry]) -> Iterator[Entry]:
    """The entries without the scores of arms all of whose runs an entry before them has."""
    seen: set[str] = set()
    if not any(arm.reused for entry in entries for arm in entry.digest.arms):
        yield from entries
        return
    for entry in entries:
        yield _without(entry, seen)
        seen |= runs_of(entry)


def _without(entry: Entry, seen: Set[str]) -> Entry:
    """The entry without the scores of arms all of whose runs are among those `seen`."""
    digest = entry.digest
    return _scoreless(entry, [arm for arm in digest.arms if seen and arm.runs and _places(entry, arm.runs) <= seen])


def _scoreless(entry: Entry, known: Sequence[ArmDigest]) -> Entry:
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
class Tried:
    """One value of a setting, over all arms that had it."""

    value: Any
    scores: list[float]
    """Means of those arms, the best first."""


def values_tried(track: Track) -> dict[str, list[Tried]]:
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
            (Tried(value=value, scores=sorted(scores, reverse=down)) for value, scores in values.items()),
            key=lambda one: one.scores[0],
            reverse=down,
        )
        for key, values in found.items()
        if len(values) > 1
    }
    return dict(sorted(tried.items(), key=lambda pair: -len(pair[1])))


def noise_of(entries: Sequence[Entry]) -> Noise:
    arms = [arm for entry in entries for arm in entry.digest.arms if arm.scores]
    repeated = [arm.scores for arm in arms if len(arm.scores) > 1]
    degrees = sum(len(scores) - 1 for scores in repeated)
    spreads = [variance(scores) for scores in repeated]
    # One arm whose seeds lie far apart must not hide every other arm's gain: as in a verdict, it counts at most with
    # WILD times the usual spread.
    most = WILD * median(spreads) if spreads and median(spreads) > 0 else math.inf
    pooled = sum(min(spread, most) * (len(scores) - 1) for spread, scores in zip(spreads, repeated, strict=True))
    widths = [arm.half_width for arm in arms if arm.half_width is not None]
    seen = [value for arm in arms for value in (*arm.scores, arm.low, arm.high) if value is not None]
    return Noise(
        seed_sd=math.sqrt(pooled / degrees) if degrees else None,
        degrees=degrees,
        half_width=median(widths) if widths else None,
        largest=1.0 if all(0.0 <= value <= 1.0 for value in seen) else math.inf,
    )


def _track(key: Comparable, entries: list[Entry]) -> Track:
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
    )
    for entry in counted_once(entries if key.selects else []):
        rung = _rung(entry, track)
        if rung is not None:
            places = {"first": track.rungs, "kept": track.rungs, "within noise": track.undecided}
            places.get(rung.outcome, track.dead_ends).append(rung)
    return track


def _rung(entry: Entry, track: Track) -> Rung | None:
    arm = entry.digest.top
    if arm is None or arm.mean is None:
        return None
    # A winner was picked for its score; what is to be expected of it is lower, and the record may know by how much.
    score = arm.mean if entry.digest.expected is None else entry.digest.expected
    best = track.rungs[-1] if track.rungs else None
    if best is None:
        return Rung(entry=entry, arm=arm, score=score)
    floor = track.noise.floor(len(arm.scores), len(best.arm.scores))
    gain = (score - best.score) * (1 if track.mode == "max" else -1)
    return Rung(entry=entry, arm=arm, score=score, before=best, outcome=_outcome(gain, floor), floor=floor)


def _outcome(gain: float, floor: float | None) -> Outcome:
    """A difference within noise is no answer, whichever way it points: neither kept nor a dead end."""
    if floor is not None and abs(gain) <= floor:
        return "within noise"
    return "kept" if gain > 0 else "worse" if gain < 0 else "no gain"
