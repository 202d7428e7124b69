"""What history needs to know of one experiment, and no more.

In: the plain data of an `experiment_result.json`. Out: a `Digest`, small enough to keep hundreds of in an index, as
plain data and back. Records of any version are read: what one does not have is left empty.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from evsys_sdk.constants import MANY_ERRORS
from evsys_sdk.errors import shorten
from evsys_sdk.numbers import plan_text
from evsys_sdk.record.setup import setup_of
from evsys_sdk.score_names import AmbiguousName, resolve, score_key

VERSION = 3
"""Of the digest; one that an older SDK made is made anew."""
LONGEST_VALUE = 60
LONGEST_TEXT = 600
DECIDING = ("config", "arms", "best_arm")
"""What of a record makes it another result. Clock readings do not."""
LEAKAGE = "Leakage:"
TEST = "test/"
"""How metrics of test benchmarks begin."""
NOT_COMPARED = frozenset(["name", "tags"])
"""Settings of a run that say nothing of how it was trained."""

MeasuredRun = tuple[Mapping[str, Any], list[str]]
"""A run of a record, and its metrics that the success metric stands for."""
Bounds = tuple[float, float]
Settings = dict[str, Any]
"""Dotted place -> value; what is long is shortened to text."""


def overall_status(statuses: Iterable[str]) -> str:
    """The status of an experiment by those of its runs: the one that all share, else partial where some completed."""
    found = set(statuses)
    if found - {"pruned"}:  # runs that a search pruned do not tell how the experiment ended
        found.discard("pruned")
    if len(found) == 1:
        return found.pop()
    return "partial" if "completed" in found else "failed" if "failed" in found else "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDigest:
    """One arm: what was special about it, and what it came to."""

    arm: str
    own: Settings = field(default_factory=dict)
    """Settings in which the arms of the experiment differ."""
    statuses: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    """The success metric of each seed that has one."""
    runs: list[str] = field(default_factory=list)
    """Folders of its completed runs, as seen from the record's; of one that was taken over, that of the run it is."""
    reused: list[str] = field(default_factory=list)
    """Those of them that were taken over from another experiment."""
    low: float | None = None
    high: float | None = None
    """95 % interval of the mean."""
    covers: str = ""
    """Over what the interval is: `tasks`, or `tasks and seeds`."""
    half_width: float | None = None
    """Of a single seed's 95 % interval over tasks, as a mean over seeds; what noise is made of."""
    verdict: str | None = None
    """Against the baseline arm: better, worse, equivalent, undecided."""
    needs: str | None = None
    """What an undecided comparison would take."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Final numbers, as means over the completed runs."""
    why_unranked: str | None = None
    error: str | None = None
    n_rollouts: int = 0
    """Behind its scores by the success metric, over all seeds."""
    n_errors: int = 0
    """Of these, those that errored and count as failures."""

    @property
    def errors(self) -> str:
        """`20 of 60 rollouts errored`; empty where none did."""
        return f"{self.n_errors:,} of {self.n_rollouts:,} rollouts errored" if self.n_errors else ""

    @property
    def has_many_errors(self) -> bool:
        """True where so many rollouts errored that the score says more about the errors than about the arm."""
        return self.n_errors >= MANY_ERRORS * self.n_rollouts > 0

    @property
    def mean(self) -> float | None:
        return sum(self.scores) / len(self.scores) if self.scores else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """One experiment."""

    name: str
    result: str = ""
    """Hash of what it came to: the same for the same config and scores, whenever it was run. Empty before that."""
    arms: list[ArmDigest] = field(default_factory=list)
    common: Settings = field(default_factory=dict)
    """Settings that all arms share."""
    setup: dict[str, str] = field(default_factory=dict)
    """Model, backend, data, algorithm and params in words."""
    untrained: dict[str, float] = field(default_factory=dict)
    """What the untrained model scored, by metric, where it was scored."""
    tags: list[str] = field(default_factory=list)
    hypothesis: str = ""
    outcome: str | None = None
    """Of a typed hypothesis: supported, refuted, inconclusive; `in hindsight` where the results were there before."""
    metric: str | None = None
    mode: str = "max"
    measured: list[str] = field(default_factory=list)
    """The metrics of the runs that the success metric stands for, such as `val/tools/pass@1`."""
    allows_test: bool = False
    """Its config says `allow_test_selection`."""
    tasks: dict[str, str] = field(default_factory=dict)
    """Benchmark -> hash of its tasks, where the record has it."""
    paths: dict[str, str] = field(default_factory=dict)
    """Benchmark -> where its tasks come from, where the config says so."""
    limits: dict[str, int] = field(default_factory=dict)
    """Benchmark -> how many of its tasks, where not all."""
    constant: float | None = None
    """The one score that several arms all have on every task, where there is nothing to compare."""
    best_arm: str | None = None
    expected: float | None = None
    """Of the winner, corrected for having been picked."""
    conclusion: str = ""
    """The beginning of it."""
    leakage: str | None = None
    """Which tasks stand in the training rows, where that was found."""
    max_steps: int | None = None
    """It was cut short on purpose, by `--steps`."""
    dry: bool = False
    parent: str | None = None
    started: str | None = None
    ended: str | None = None
    seconds: float | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """completed, failed, cancelled (all runs ended so), or partial."""
        return overall_status(status for arm in self.arms for status in arm.statuses)

    @property
    def is_repeat(self) -> bool:
        """Whether all its completed runs are those of other experiments."""
        return any(arm.reused for arm in self.arms) and all(len(arm.reused) == len(arm.runs) for arm in self.arms)

    def arm(self, name: str) -> ArmDigest | None:
        return next((arm for arm in self.arms if arm.arm == name), None)

    @property
    def selects(self) -> bool:
        """Whether its scores may rank anything: those on test benchmarks alone may not, unless its config allows it."""
        return self.allows_test or not self.measured or not all(key.startswith(TEST) for key in self.measured)

    @property
    def scored(self) -> list[ArmDigest]:
        """Arms with a score, the highest (or lowest, as the metric has it) mean first; in their own order where scores
        may rank nothing."""
        found = [arm for arm in self.arms if arm.scores]
        if not self.selects:
            return found
        return sorted(found, key=lambda arm: (arm.mean or 0.0) * (-1 if self.mode == "max" else 1))

    @property
    def top(self) -> ArmDigest | None:
        """The arm that was named best, else the one with the best mean; None where scores may rank nothing."""
        if not self.selects:
            return None
        return (self.arm(self.best_arm) if self.best_arm else None) or next(iter(self.scored), None)


def digest_of(record: Mapping[str, Any]) -> Digest:
    """The digest of a record; ValueError for something that is no record of an experiment."""
    name = record.get("experiment") or record.get("name")
    if not isinstance(name, str):
        raise ValueError("it has no `experiment`")
    config = _mapping(record.get("config"))
    metadata = _mapping(config.get("metadata"))
    success = metadata.get("success_metric")
    success = {"name": success} if isinstance(success, str) else _mapping(success)
    metric = success.get("name")
    verdict = _mapping(record.get("verdict"))
    common, own = split_settings(config)
    runs = [run for run in record.get("runs") or [] if isinstance(run, Mapping)]
    keys = [_measured_by(metric, run) for run in runs]
    benchmarks = _entries(metadata)
    return Digest(
        name=name,
        result=result_id(record) if record.get("arms") else "",
        arms=_arms(record, list(zip(runs, keys, strict=True)), own, verdict),
        common=common,
        setup=setup_of(config),
        untrained=_untrained(runs),
        tags=[str(tag) for tag in record.get("tags") or metadata.get("tags") or []],
        hypothesis=hypothesis_text(record.get("hypothesis") or metadata.get("hypothesis")),
        outcome=_outcome(_mapping(record.get("hypothesis_result"))),
        metric=metric,
        mode=success.get("mode") or "max",
        measured=sorted({key for found in keys for key in found}),
        allows_test=bool(metadata.get("allow_test_selection")),
        tasks=_tasks(record),
        paths={name: str(entry["path"]) for name, entry in benchmarks.items() if entry.get("path")},
        limits={name: entry["limit"] for name, entry in benchmarks.items() if entry.get("limit")},
        constant=verdict.get("constant") if len(record.get("arms") or []) > 1 else None,
        best_arm=record.get("best_arm"),
        expected=_mapping(verdict.get("winner")).get("expected"),
        conclusion=_text(record.get("conclusion")),
        leakage=_leakage(record),
        max_steps=_mapping(record.get("options")).get("max_steps"),
        dry=bool(_mapping(record.get("options")).get("dry")),
        parent=record.get("parent_experiment_id"),
        started=record.get("started"),
        ended=record.get("ts"),
        seconds=record.get("seconds"),
        warnings=[_text(warning) for warning in record.get("warnings") or []][:5],
    )


def result_id(record: Mapping[str, Any]) -> str:
    # Judged again against another arm, it is the same result: what people noted about it still holds.
    first = _mapping(_mapping(record.get("judged_again")).get("first"))
    told = {**record, "best_arm": first["best_arm"]} if "best_arm" in first else record
    decisive = json.dumps([told.get(key) for key in DECIDING], sort_keys=True, default=str)
    return hashlib.sha256(decisive.encode()).hexdigest()[:16]


def to_plain(digest: Digest) -> dict[str, Any]:
    """As plain data, without what is empty: hundreds of these are read at a time."""
    return asdict(digest, dict_factory=_filled)


def _filled(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if value is not None and value != [] and value != {} and value != ""}


def from_plain(data: Mapping[str, Any]) -> Digest:
    return Digest(**{**data, "arms": [ArmDigest(**arm) for arm in data.get("arms", [])]})


def hypothesis_text(hypothesis: Any) -> str:
    """The claim, whether the hypothesis was given as text or typed."""
    claim = hypothesis.get("claim") if isinstance(hypothesis, Mapping) else hypothesis
    return _text(claim or "")


def split_settings(config: Mapping[str, Any]) -> tuple[Settings, dict[str, Settings]]:
    """What all runs of a config share, and per run what it has of its own."""
    runs = config.get("runs") or [config.get("run") or {}]
    flat = {str(run.get("name", "")): _settings_of(run) for run in runs if isinstance(run, Mapping)}
    tables = list(flat.values())
    if len(tables) < 2:
        return (tables[0] if tables else {}), {name: {} for name in flat}
    common = {key: value for key, value in tables[0].items() if all(_has(table, key, value) for table in tables)}
    own = {name: {key: value for key, value in table.items() if key not in common} for name, table in flat.items()}
    return common, own


def _settings_of(run: Mapping[str, Any]) -> Settings:
    return dict(flatten({key: value for key, value in run.items() if key not in NOT_COMPARED}))


def _has(table: Settings, key: str, value: Any) -> bool:
    return key in table and table[key] == value


def flatten(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted places and short values."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, bool | int | float | None):
        yield place, value
    else:
        yield place, shorten(value if isinstance(value, str) else repr(value), LONGEST_VALUE)


def _arms(
    record: Mapping[str, Any], runs: list[MeasuredRun], own: dict[str, Settings], verdict: Mapping[str, Any]
) -> list[ArmDigest]:
    judged = {arm["arm"]: arm for arm in verdict.get("arms") or [] if isinstance(arm, Mapping) and "arm" in arm}
    arms = []
    for arm in record.get("arms") or []:
        statuses = [str(status) for status in arm.get("statuses") or []]
        # Runs are recorded arm by arm, seed by seed.
        mine, runs = runs[: len(statuses)], runs[len(statuses) :]
        found = judged.get(arm["arm"], {})
        errors = arm.get("errors") or []
        widths = [bounds for run, keys in mine if len(keys) == 1 and (bounds := _bounds(run, keys[0]))]
        covers = "tasks and seeds" if (found.get("n_seeds") or 1) > 1 else "tasks"
        low, high, over = _interval(found, covers, widths if len(mine) == 1 else [])
        counted = [score for run, keys in mine for key in keys if (score := _last_score(run, key))]
        arms.append(
            ArmDigest(
                arm=str(arm["arm"]),
                own=own.get(arm["arm"], {}),
                statuses=statuses,
                scores=[score for score in arm.get("scores") or [] if _is_number(score)],
                runs=_places(mine),
                reused=[run["reused_from"] for run, _ in mine if run.get("reused_from")],
                low=low,
                high=high,
                covers=over,
                half_width=fmean((high - low) / 2 for low, high in widths) if widths else None,
                verdict=None if _is_number(verdict.get("constant")) else found.get("verdict"),
                needs=_needs(found.get("vs_baseline")),
                metrics=_means([run for run, _ in mine]),
                why_unranked=arm.get("why_unranked") or found.get("why_unranked"),
                error=_text(errors[0]) if errors else None,
                n_rollouts=sum(score.get("n_rollouts") or 0 for score in counted),
                n_errors=sum(score.get("n_errors") or 0 for score in counted),
            )
        )
    return arms


def _outcome(judged: Mapping[str, Any]) -> str | None:
    """What became of the hypothesis; one that was written when the results were there predicted nothing."""
    outcome = judged.get("outcome")
    return f"{outcome} in hindsight" if outcome and judged.get("known_before") else outcome


def _needs(comparison: Any) -> str | None:
    """`about 120 more tasks or 3 more seeds per arm` for an undecided comparison that more of either would settle."""
    found = _mapping(comparison)
    if found.get("verdict") != "undecided":
        return None
    return plan_text(found.get("more_tasks"), found.get("more_seeds"), found.get("more_of_both")) or None


def _places(runs: list[MeasuredRun]) -> list[str]:
    """Where the completed runs lie; own ones in the record's folder."""
    return [
        run.get("reused_from") or run["run_dir"].rpartition("/")[2]
        for run, _ in runs
        if run.get("status") == "completed" and run.get("run_dir")
    ]


def _means(runs: list[Mapping[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for run in runs:
        if run.get("status") == "completed":
            for key, value in _mapping(run.get("metrics")).items():
                if _is_number(value):
                    values.setdefault(key, []).append(value)
    return {key: fmean(found) for key, found in values.items()}


def _measured_by(metric: str | None, run: Mapping[str, Any]) -> list[str]:
    """The run's metrics that the success metric stands for; of a name that is ambiguous, all that it can mean."""
    keys = [key for key, value in _mapping(run.get("metrics")).items() if _is_number(value)]
    try:
        return resolve(metric, keys) if metric else []
    except AmbiguousName as exc:
        return exc.keys


def _interval(
    judged: Mapping[str, Any], covers: str, of_the_run: list[Bounds]
) -> tuple[float | None, float | None, str]:
    """The verdict's interval of an arm and what it covers; else that of its only run."""
    if _is_number(judged.get("low")) and _is_number(judged.get("high")):
        return judged["low"], judged["high"], covers
    return (*of_the_run[0], "tasks") if of_the_run else (None, None, "")


def _bounds(run: Mapping[str, Any], key: str) -> Bounds | None:
    """The interval over tasks of the last such score."""
    score = _last_score(run, key)
    if not (_is_number(score.get("low")) and _is_number(score.get("high"))):
        return None
    return float(score["low"]), float(score["high"])


def _last_score(run: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The last score by this metric: that of the final weights comes after those of the loop. Empty for none."""
    for one in reversed(run.get("evals") or []):
        for score in one.get("scores") or []:
            if one.get("step") != 0 and key == _metric_key(one, score):
                return _mapping(score)
    return {}


def _metric_key(one: Mapping[str, Any], score: Mapping[str, Any]) -> str:
    return score_key(str(one.get("split")), str(one.get("name")), str(score["metric"]))


def _untrained(runs: list[Mapping[str, Any]]) -> dict[str, float]:
    """Metric -> the untrained model's score; it is scored once per experiment or in every run, and is one model."""
    return {
        _metric_key(one, score): score["value"]
        for run in runs
        for one in run.get("evals") or []
        for score in one.get("scores") or []
        if one.get("step") == 0 and _is_number(score.get("value"))
    }


def _tasks(record: Mapping[str, Any]) -> dict[str, str]:
    """`{"val/tools": "5f0c..."}` from what the experiment was launched with."""
    word = "tasks of "
    found = _mapping(record.get("contents"))
    return {key.removeprefix(word): str(value)[:12] for key, value in found.items() if key.startswith(word)}


def _entries(metadata: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The config's benchmarks, each by the name that its tasks have; an entry without a label is a test."""
    found = metadata.get("benchmark") or []
    entries = [_mapping(entry) for entry in ([found] if isinstance(found, Mapping) else found)]
    return {f"{_role(entry)}/{_name(entry)}": entry for entry in entries}


def _role(entry: Mapping[str, Any]) -> str:
    return str(entry.get("split") or ("val" if "val" in (entry.get("tags") or []) else "test"))


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name") or entry.get("id") or str(entry.get("path")).rstrip("/").rpartition("/")[2])


def _leakage(record: Mapping[str, Any]) -> str | None:
    """What the conclusion says of training rows that stand in a benchmark."""
    found = [line for line in str(record.get("conclusion") or "").splitlines() if line.startswith(LEAKAGE)]
    return _text("; ".join(line.removeprefix(LEAKAGE).strip() for line in found)) or None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: Any) -> str:
    text = str(value or "").strip()
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."
