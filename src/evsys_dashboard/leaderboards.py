"""The results of a project's experiments, taken together: leaderboards, which settings mattered, and calibration.

In: the rows of a project. Out: `Study`, with a `Leaderboard` for each metric, set of tasks and model (made by
`history.leaderboard`, which also knows the noise), the settings that go with the score, and how well typed hypotheses
predicted. Digests of records are kept in memory by the row's `updated`, so that a second visit reads only what changed.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from django.db.models import Count, Max, QuerySet

from evsys_dashboard.models import ExperimentRow, Project
from evsys_sdk.format import shown
from evsys_sdk.history.digest import Digest, digest_of
from evsys_sdk.history.history import ExperimentEntry
from evsys_sdk.history.index import NO_NOTES, Note, Notes
from evsys_sdk.history.leaderboard import LeaderboardRow, Track, counted_once, tracks_of
from evsys_sdk.stats.intervals import wilson_interval

NEWEST = 2000
"""Experiments with a result that are looked at; with more, the older ones are left out and the page says so."""
ENOUGH = 8
"""Arms with a score below which nothing is said about settings, and predictions below which no curve is drawn."""
MOST_VALUES = 12
"""Values of a setting in words from which on it is not looked at: a name or a path, not a choice."""
BIN_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

Fate = Literal["kept", "discarded", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedPrediction:
    """A typed hypothesis with a confidence, and what came of it."""

    confidence: float
    outcome: str
    """supported, refuted, inconclusive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One experiment on a leaderboard."""

    experiment_id: str
    name: str
    parent: str
    """Name or id of the experiment that it was made from."""
    when: float
    fate: Fate
    score: float
    low: float | None
    high: float | None
    arm: str
    training_mark: str
    """`on training rows` where the arm was scored on tasks that it trained on."""
    n_seeds: int
    gain: float | None
    """Against the best of its time."""
    floor: float | None
    """A smaller difference may be noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingImportance:
    """How much of the score goes with one setting."""

    setting: str
    together_with: tuple[str, ...]
    """Settings that changed exactly when this one did: nothing here tells them apart."""
    explained: float
    """Share of the variance of the score's ranks, adjusted for the number of values; 0 to 1."""
    correlation: float | None
    """Spearman's rank correlation, for a setting in numbers."""
    n: int
    n_values: int
    best: str
    """The value with the best mean score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredArm:
    """One arm, for the parallel coordinates."""

    settings: dict[str, Any]
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """Experiments whose scores can be put side by side."""

    label: str
    mode: str
    selects: bool
    """False: scored on test benchmarks alone, which choose nothing; no leaderboard is made."""
    is_mock: bool
    dots: list[Dot]
    """Oldest first."""
    noise_floor: float | None
    """Two arms with as many seeds as the best has that differ by less may be equal."""
    noise_text: str
    bounds: tuple[float, float]
    """Between which every score lies: shares within 0 and 1, seconds and dollars above 0."""
    n_experiments: int
    arms: list[ScoredArm]
    importance: list[SettingImportance]
    """The most telling first; empty where fewer than `ENOUGH` arms have a score."""

    @property
    def best(self) -> Dot | None:
        return next((dot for dot in reversed(self.dots) if dot.fate == "kept"), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBin:
    """Predictions of about the same confidence."""

    low: float
    high: float
    n: int
    predicted: float
    """Mean confidence."""
    happened: float
    """Share that was supported."""
    happened_low: float
    happened_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Typed hypotheses that stated a confidence, against what came out."""

    n: int
    """Decided: supported or refuted."""
    n_inconclusive: int
    n_known_before: int
    """Written when the results were there; they predicted nothing."""
    brier: float | None
    """Mean of (confidence - outcome) squared: 0 is perfect, 0.25 a coin."""
    base_brier: float | None
    """What always saying the share of supported ones would have scored."""
    bins: list[CalibrationBin]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything of a project taken together."""

    leaderboards: list[Leaderboard]
    calibration: Calibration
    n_results: int
    """Experiments with a result."""
    n_left_out: int
    """Older ones beyond `NEWEST`."""
    n_unreadable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What is kept of one record."""

    updated: float
    digest: Digest | None
    """None for a record that could not be read."""
    prediction: TypedPrediction | None = None
    was_known_before: bool = False


class DigestCache:
    """Digests by experiment, the least used forgotten first; shared by the threads of the server."""

    def __init__(self, size: int = NEWEST + 500):
        self._lock, self._size = threading.Lock(), size
        self._kept: OrderedDict[str, _Read] = OrderedDict()

    def find(self, key: str, updated: float) -> _Read | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None or found.updated != updated:
                return None
            self._kept.move_to_end(key)
            return found

    def keep(self, key: str, found: _Read) -> None:
        with self._lock:
            self._kept[key] = found
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)


KEPT_STUDIES = 4
_cache = DigestCache()
_lock = threading.Lock()
_studies: OrderedDict[str, tuple[dict[str, Any], Study]] = OrderedDict()


def study_of(project: Project) -> Study:
    """The project's experiments taken together; as it was made last, while no experiment has changed since."""
    with_result = ExperimentRow.objects.filter(
        project=project, status__in=("completed", "partial", "invalid"), record__isnull=False
    )
    # Every change moves `updated` forward, and a deletion changes the count: what has both alike is the same data.
    state = with_result.aggregate(total=Count("id"), newest=Max("updated"))
    with _lock:
        kept = _studies.get(project.id)
    if kept is not None and kept[0] == state:
        return kept[1]
    # Outside the lock: two visits at once may both make it, but none waits for the study of another project.
    study = _make_study(with_result, state["total"])
    with _lock:
        _studies[project.id] = (state, study)
        _studies.move_to_end(project.id)
        while len(_studies) > KEPT_STUDIES:
            _studies.popitem(last=False)
    return study


def _make_study(with_result: QuerySet[ExperimentRow], total: int) -> Study:
    fields = ("id", "name", "status", "parent_experiment_id", "source", "created", "ended", "updated")
    rows = list(with_result.order_by("-created", "id").values(*fields)[:NEWEST])
    missing = [row["id"] for row in rows if _cache.find(row["id"], row["updated"]) is None]
    reads: dict[str, _Read] = {}
    for start in range(0, len(missing), 100):  # a hundred records at a time: they may be large
        chunk = ExperimentRow.objects.filter(pk__in=missing[start : start + 100])
        for pk, updated, record in chunk.values_list("id", "updated", "record"):
            reads[pk] = _read(record, updated)
            _cache.keep(pk, reads[pk])
    entries, by_record, readable = [], {}, []
    for row in rows:
        found = reads.get(row["id"]) or _cache.find(row["id"], row["updated"])
        if found is None:  # deleted or changed since: the next visit has it
            continue
        readable.append(found)
        if found.digest is None:
            continue
        # What a client sent has no path, and `tracks_of` tells entries apart by theirs.
        path = Path(row["source"] or f"/{row['id']}/{row['id']}")
        invalid = Notes(current=[Note(kind="invalid", text="")]) if row["status"] == "invalid" else NO_NOTES
        state = "completed" if row["status"] == "invalid" else row["status"]
        when = row["ended"] or row["created"]
        entries.append(ExperimentEntry(digest=found.digest, record=path, state=state, when=when, notes=invalid))
        by_record[path] = row
    leaderboards = [_leaderboard(track, by_record) for track in tracks_of(entries)]
    return Study(
        leaderboards=leaderboards,
        calibration=_calibration(readable),
        n_results=total,
        n_left_out=max(0, total - NEWEST),
        n_unreadable=sum(found.digest is None for found in readable),
    )


def _read(record: object, updated: float) -> _Read:
    """The digest without what leaderboards do not need; a client may have sent anything."""
    try:
        digest = digest_of(record)  # type: ignore[arg-type]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return _Read(updated=updated, digest=None)
    # With 2,500 of them in memory, the sketches and conclusions would be most of it.
    small = replace(digest, sketches={}, conclusion="", warnings=[], setup={}, untrained={}, untrained_marks={})
    result = record.get("hypothesis_result") if isinstance(record, dict) else None
    result = result if isinstance(result, dict) else {}
    confidence, outcome = result.get("confidence"), result.get("outcome")
    is_share = isinstance(confidence, int | float) and not isinstance(confidence, bool) and 0 <= confidence <= 1
    known = bool(result.get("known_before"))
    prediction = None
    if is_share and outcome in ("supported", "refuted", "inconclusive") and not known:
        prediction = TypedPrediction(confidence=float(str(confidence)), outcome=outcome)
    return _Read(updated=updated, digest=small, prediction=prediction, was_known_before=known and is_share)


def _leaderboard(track: Track, by_record: dict[Path, dict[str, Any]]) -> Leaderboard:
    fates: list[tuple[Fate, list[LeaderboardRow]]] = [
        ("kept", track.kept),
        ("discarded", track.dead_ends),
        ("undecided", track.undecided),
    ]
    dots = []
    for fate, row in [(fate, row) for fate, found in fates for row in found]:
        stored = by_record[row.entry.record]
        dots.append(
            Dot(
                experiment_id=stored["id"],
                name=stored["name"],
                parent=stored["parent_experiment_id"],
                when=row.entry.when,
                fate=fate,
                score=row.score,
                low=row.arm.low,
                high=row.arm.high,
                arm=row.arm.arm,
                training_mark=row.arm.training_mark,
                n_seeds=len(row.arm.scores),
                gain=row.gain,
                floor=row.floor,
            )
        )
    # The band is for a rival with as many seeds as the best has.
    seeds = len(track.kept[-1].arm.scores) if track.kept else 1
    noise = track.noise
    is_share = noise.largest == 1.0 and not track.unit
    told = []
    if noise.seed_sd is not None:
        told.append(f"standard deviation over seeds {shown(noise.seed_sd)}, {noise.degrees} degrees of freedom")
    if noise.half_width is not None:
        told.append(f"95 % interval over tasks ±{shown(noise.half_width)}")
    arms = [  # each once, the newest first; none of a track whose scores select nothing
        ScoredArm(settings={**entry.digest.common, **arm.own}, score=arm.mean)
        for entry in counted_once(track.entries[::-1] if track.selects else [])
        for arm in entry.digest.scored
        if arm.mean is not None
    ]
    return Leaderboard(
        label=track.label,
        mode=track.mode,
        selects=track.selects,
        is_mock=track.is_mock,
        dots=sorted(dots, key=lambda dot: dot.when),
        noise_floor=noise.floor(max(1, seeds), max(1, seeds)),
        noise_text="; ".join(told),
        bounds=(0.0 if is_share or track.unit else -math.inf, 1.0 if is_share else math.inf),
        n_experiments=len(track.entries),
        arms=arms,
        importance=rank_settings(arms, track.mode) if len(arms) >= ENOUGH else [],
    )


# Which settings go with the score. Each setting alone: rank correlation for numbers, the correlation ratio of ranks for
# words, both adjusted for the number of values (Ezekiel 1930), since with few arms any setting explains something by
# chance. That is association: what was changed together cannot be distinguished, and nothing here says why.


def rank_settings(arms: Sequence[ScoredArm], mode: str) -> list[SettingImportance]:
    """Settings with several values, the one that explains most first."""
    n, sign = len(arms), 1 if mode == "max" else -1
    ranks = _ranks([arm.score for arm in arms])
    groups: dict[tuple[int, ...], list[str]] = {}
    for key in dict.fromkeys(key for arm in arms for key in arm.settings):
        values = [arm.settings.get(key) for arm in arms]
        # Two settings that split the arms in the same way are one to the statistics.
        numbers: dict[object, int] = {}
        # Told apart by type and text: True is not 1 here, and a list may be a value.
        split = tuple(numbers.setdefault((type(value), repr(value)), len(numbers)) for value in values)
        if len(numbers) > 1 and (_are_numbers(values) or len(numbers) <= min(MOST_VALUES, n // 2)):
            groups.setdefault(split, []).append(key)
    found = []
    for split, keys in groups.items():
        key, *others = sorted(keys, key=lambda key: (not _are_numbers([arm.settings.get(key) for arm in arms]), key))
        values = [arm.settings.get(key) for arm in arms]
        n_values, correlation = len(set(split)), None
        if _are_numbers(values) and n_values > 2:
            # Pearson's of mean ranks is Spearman's, ties included. Equal scores correlate with nothing.
            numbered = _ranks([float(value) for value in values if value is not None])
            correlation = statistics.correlation(numbered, ranks) if len(set(ranks)) > 1 else 0.0
            raw, spent = min(1.0, correlation**2), 1
        else:
            raw, spent = _correlation_ratio(split, ranks), n_values - 1
        scores: dict[str, list[float]] = {}
        for value, arm in zip(values, arms, strict=True):
            text = "(not set)" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
            scores.setdefault(text, []).append(arm.score)
        # Ezekiel's adjustment: what is explained beyond what as many random groups would explain.
        free = n - 1 - spent
        explained = max(0.0, 1 - (1 - raw) * (n - 1) / free) if free > 0 else 0.0
        found.append(
            SettingImportance(
                setting=key,
                together_with=tuple(others),
                explained=explained,
                correlation=correlation,
                n=n,
                n_values=n_values,
                best=max(scores, key=lambda text: sign * fmean(scores[text])),
            )
        )
    # By name where two explain as much, so that the order does not change between visits.
    return sorted(found, key=lambda one: (-one.explained, one.setting))


def _are_numbers(values: Sequence[object]) -> bool:
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )


def _ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; values that are equal share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for place in order[at : end + 1]:
            ranks[place] = (at + end) / 2 + 1
        at = end + 1
    return ranks


def _correlation_ratio(split: Sequence[int], ranks: Sequence[float]) -> float:
    """Share of the variance of the ranks that lies between the groups."""
    mean = fmean(ranks)
    total = sum((rank - mean) ** 2 for rank in ranks)
    groups: dict[int, list[float]] = {}
    for group, rank in zip(split, ranks, strict=True):
        groups.setdefault(group, []).append(rank)
    # Eta squared of a one-way analysis of variance, on ranks (as in the Kruskal-Wallis test).
    between = sum(len(found) * (fmean(found) - mean) ** 2 for found in groups.values())
    return between / total if total else 0.0


def _calibration(reads: Sequence[_Read]) -> Calibration:
    predictions = [found.prediction for found in reads if found.prediction is not None]
    decided = [one for one in predictions if one.outcome != "inconclusive"]
    hits = [float(one.outcome == "supported") for one in decided]
    bins = []
    for low, high in pairwise(BIN_EDGES):
        mine = [
            (one.confidence, hit)
            for one, hit in zip(decided, hits, strict=True)
            if low <= one.confidence < high or one.confidence == high == 1.0  # the last bin has both ends
        ]
        if mine:
            below, above = wilson_interval(int(sum(hit for _, hit in mine)), len(mine))
            bins.append(
                CalibrationBin(
                    low=low,
                    high=high,
                    n=len(mine),
                    predicted=fmean(confidence for confidence, _ in mine),
                    happened=fmean(hit for _, hit in mine),
                    happened_low=below,
                    happened_high=above,
                )
            )
    base = fmean(hits) if hits else 0.0
    return Calibration(
        n=len(decided),
        n_inconclusive=len(predictions) - len(decided),
        n_known_before=sum(found.was_known_before for found in reads),
        brier=fmean((one.confidence - hit) ** 2 for one, hit in zip(decided, hits, strict=True)) if decided else None,
        # Of stating the share that came true each time: what a useful forecast has to be below.
        base_brier=fmean((base - hit) ** 2 for hit in hits) if hits else None,
        bins=bins,
    )
