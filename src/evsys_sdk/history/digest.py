"""What history needs to know of one experiment, and no more.

In: the plain data of an `experiment_result.json`. Out: a `Digest`, small enough to keep hundreds of in an index, as
plain data and back. Records of any version are read: what one does not have is left empty.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from statistics import fmean
from typing import Any

from evsys_sdk.constants import MANY_ERRORS
from evsys_sdk.errors import shorten
from evsys_sdk.format import plan_text
from evsys_sdk.protocols import Score
from evsys_sdk.record.models import ExperimentRecord, JudgedArm, RecordedArm, RecordedRun
from evsys_sdk.registry import better_direction
from evsys_sdk.report.setup import setup_of
from evsys_sdk.score_names import AmbiguousName, parse_key, resolve, score_key
from evsys_sdk.stats.arm_scores import LARGEST

VERSION = 8
"""Of the digest; one that an older SDK made is made anew."""
LONGEST_VALUE = 60
LONGEST_TEXT = 600
DECIDING = ("config", "arms", "best_arm")
"""What of a record makes it another result. Clock readings do not."""
LEAKAGE = "Leakage:"
LEAKED = re.compile(rf"{LEAKAGE} (?:(?P<arms>.+): )?[\d,]+ of [\d,]+ (?P<suite>.+?) tasks appears? in ")
"""A finding in a conclusion; with the arms it is true of where not all."""
TEST = "test/"
"""How metrics of test benchmarks begin."""
NOT_COMPARED = frozenset(["name", "tags"])
"""Settings of a run that say nothing of how it was trained."""

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
    """One arm: what was special about it, and its result."""

    arm: str
    identity: str = ""
    """Hash of its settings and data, whatever it is called; empty in records that do not have it."""
    own: Settings = field(default_factory=dict)
    """Settings in which the arms of the experiment differ."""
    statuses: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    """The success metric of each seed that has one."""
    seeds: list[int] = field(default_factory=list)
    """The seeds of these scores; empty in records that do not have them."""
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
    training_marks: dict[str, str] = field(default_factory=dict)
    """Metric -> `on training rows` or `3 tasks in training rows`, for scores on tasks that the arm trained on."""
    training_mark: str = ""
    """That of the success metric."""
    error_marks: dict[str, str] = field(default_factory=dict)
    """Metric -> `8 of 60 rollouts errored`, over all seeds."""

    @property
    def errors(self) -> str:
        """`20 of 60 rollouts errored`; empty where none did."""
        return f"{self.n_errors:,} of {self.n_rollouts:,} rollouts errored" if self.n_errors else ""

    @property
    def has_many_errors(self) -> bool:
        """True where so many rollouts errored that the score says more about the errors than about the arm."""
        return self.n_errors >= MANY_ERRORS * self.n_rollouts > 0

    @property
    def why_unscored(self) -> str:
        """Why an arm that ran has no score; empty for one that has, and for one that a search left behind."""
        if self.scores or not self.statuses or set(self.statuses) == {"pruned"}:
            return ""
        return self.errors or self.error or self.why_unranked or "no score"

    @property
    def mean(self) -> float | None:
        return sum(self.scores) / len(self.scores) if self.scores else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """One experiment."""

    name: str
    result: str = ""
    """Hash of its result: the same for the same config and scores, whenever it was run. Empty before that."""
    arms: list[ArmDigest] = field(default_factory=list)
    common: Settings = field(default_factory=dict)
    """Settings that all arms share."""
    setup: dict[str, str] = field(default_factory=dict)
    """Model, backend, data, algorithm and params in words."""
    untrained: dict[str, float] = field(default_factory=dict)
    """What the untrained model scored, by metric, where it was scored."""
    untrained_marks: dict[str, str] = field(default_factory=dict)
    """Metric -> `8 of 30 rollouts errored`, of the untrained model."""
    start: str = ""
    """The saved weights that `untrained` is about, where training starts from some."""
    tags: list[str] = field(default_factory=list)
    hypothesis: str = ""
    outcome: str | None = None
    """Of a typed hypothesis: supported, refuted, inconclusive; `post hoc` where the results were there before."""
    metric: str | None = None
    mode: str = "max"
    measured: list[str] = field(default_factory=list)
    """The metrics of the runs that the success metric stands for, such as `val/tools/pass@1`."""
    allows_test: bool = False
    """Whether the config says `allow_test_selection`."""
    tasks: dict[str, str] = field(default_factory=dict)
    """Benchmark -> hash of its tasks, where the record has it."""
    sketches: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Benchmark -> `TaskSketch` of the tasks that were scored, as plain data, where the record has it."""
    paths: dict[str, str] = field(default_factory=dict)
    """Benchmark -> where its tasks come from, where the config says so."""
    limits: dict[str, int] = field(default_factory=dict)
    """Benchmark -> how many of its tasks, where not all."""
    units: dict[str, str] = field(default_factory=dict)
    """Score -> what it is counted in, for those that have a unit: `val/tools/latency` in `s`."""
    share: bool | None = None
    """Whether its scores are shares, between 0 and 1, by the verdict; None where there is none."""
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
    """The ceiling of `--steps`, where the experiment was cut short by it."""
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

    @property
    def unit(self) -> str:
        """Of the success metric."""
        return next((self.units[key] for key in self.measured if key in self.units), "")

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


def digest_of(data: Mapping[str, Any]) -> Digest:
    """The digest of a record as it is in its file; ValueError for something that is no record of an experiment."""
    record = ExperimentRecord.model_validate(data)
    config, verdict = record.config, record.verdict
    metadata = _mapping(config.get("metadata"))
    success = metadata.get("success_metric")
    success = {"name": success} if isinstance(success, str) else _mapping(success)
    metric = success.get("name")
    common, own = split_settings(config)
    measured_by = cache(partial(_measured_by, metric))  # the runs of an experiment have the same metrics
    keys = {
        run.run_id: measured_by(tuple(key for key, value in run.metrics.items() if _is_number(value)))
        for run in record.runs
    }
    benchmarks = benchmark_entries(metadata)
    # The untrained model is scored once per experiment or in every run, and is one model.
    untrained = {
        score_key(one.split, one.name, score.metric): score
        for run in record.runs
        for one in run.evals
        for score in one.scores
        if one.step == 0
    }
    # The conclusion has the finding in words; records of all versions do.
    leakage = [line for line in record.conclusion.splitlines() if line.startswith(LEAKAGE)]
    outcome = record.hypothesis_result.get("outcome")
    if outcome and record.hypothesis_result.get("known_before"):
        outcome = f"{outcome} post hoc"  # written when the results were there, it predicted nothing
    word = "tasks of "
    return Digest(
        name=record.experiment,
        result=result_id(data) if record.arms else "",
        arms=[_arm(record, arm, runs, metric, keys, own) for arm, runs in record.runs_of()],
        common=common,
        setup=setup_of(config),
        untrained={key: score.value for key, score in untrained.items() if score.value is not None},
        untrained_marks={key: mark for key, score in untrained.items() if (mark := _say_errors([score]))},
        start=next((one.start for run in record.runs for one in run.evals if one.start), ""),
        tags=record.tags or [str(tag) for tag in metadata.get("tags") or []],
        hypothesis=hypothesis_text(record.hypothesis or metadata.get("hypothesis")),
        outcome=outcome,
        metric=metric,
        mode=success.get("mode") or verdict.mode or better_direction(metric or ""),
        measured=sorted({key for found in keys.values() for key in found}),
        allows_test=bool(metadata.get("allow_test_selection")),
        # 12 of 64 hex digits: an index has hundreds of them, and 48 bits tell them apart.
        tasks={key.removeprefix(word): sha[:12] for key, sha in record.contents.items() if key.startswith(word)},
        sketches=record.looks.tasks,
        paths={name: str(entry["path"]) for name, entry in benchmarks.items() if entry.get("path")},
        limits={name: entry["limit"] for name, entry in benchmarks.items() if entry.get("limit")},
        units={
            score_key(one.split, one.name, score.metric): score.unit
            for run in record.runs
            for one in run.evals
            for score in one.scores
            if score.unit
        },
        share=verdict.share,
        # One arm with one value on every task is compared with nothing.
        constant=verdict.constant if len(record.arms) > 1 else None,
        best_arm=record.best_arm,
        expected=verdict.winner.expected if verdict.winner else None,
        conclusion=_text(record.conclusion),
        leakage=_text("; ".join(line.removeprefix(LEAKAGE).strip() for line in leakage)) or None,
        max_steps=record.options.max_steps,
        dry=record.options.dry,
        parent=record.parent_experiment_id,
        started=record.started,
        ended=record.ts,
        seconds=record.seconds,
        # The first few: an index is read whole at every start of a command.
        warnings=[_text(warning) for warning in record.warnings][:5],
    )


def result_id(record: Mapping[str, Any]) -> str:
    # Judged again against another arm, it is the same result: what people noted about it still holds.
    first = _mapping(_mapping(record.get("judged_again")).get("first"))
    told = {**record, "best_arm": first["best_arm"]} if "best_arm" in first else record
    decisive = json.dumps([told.get(key) for key in DECIDING], sort_keys=True, default=str)
    return hashlib.sha256(decisive.encode()).hexdigest()[:16]


def to_plain(digest: Digest) -> dict[str, Any]:
    """As plain data, without what is empty: hundreds of these are read at a time."""

    def drop_empty(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # 0 and False are values and stay; what is left out is each field's default.
        return {key: value for key, value in pairs if value is not None and value != [] and value != {} and value != ""}

    return asdict(digest, dict_factory=drop_empty)


def from_plain(data: Mapping[str, Any]) -> Digest:
    return Digest(**{**data, "arms": [ArmDigest(**arm) for arm in data.get("arms", [])]})


def hypothesis_text(hypothesis: Any) -> str:
    """The claim, whether the hypothesis was given as text or typed."""
    claim = hypothesis.get("claim") if isinstance(hypothesis, Mapping) else hypothesis
    return _text(claim or "")


def split_settings(config: Mapping[str, Any]) -> tuple[Settings, dict[str, Settings]]:
    """Settings that all runs of a config share, and per run those that differ."""
    runs = config.get("runs") or [config.get("run") or {}]
    short = cache(short_text)  # arms share most of their texts: each is shortened once
    flat = {
        str(run.get("name", "")): dict(flatten({key: run[key] for key in run if key not in NOT_COMPARED}, short=short))
        for run in runs
        if isinstance(run, Mapping)
    }
    tables = list(flat.values())
    if len(tables) < 2:
        return (tables[0] if tables else {}), {name: {} for name in flat}
    first, *others = (table.items() for table in tables)
    common = {key: value for key, value in first if all((key, value) in items for items in others)}
    own = {name: {key: value for key, value in table.items() if key not in common} for name, table in flat.items()}
    return common, own


def short_text(text: str) -> str:
    """The text without the middle of a long one, whose hash then tells it from others with the same ends."""
    if len(text) <= LONGEST_VALUE:
        return shorten(text, LONGEST_VALUE)
    return f"{shorten(text, LONGEST_VALUE)} #{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:6]}"


def flatten(value: Any, place: str = "", *, short: Callable[[str], str] = short_text) -> Iterator[tuple[str, Any]]:
    """Dotted places and short values."""
    if isinstance(value, str):
        yield place, short(value)
    elif isinstance(value, bool | int | float | None):
        yield place, value
    elif isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{place}.{key}" if place else str(key), short=short)
    else:
        yield place, short(repr(value))


def _arm(
    record: ExperimentRecord,
    arm: RecordedArm,
    runs: list[RecordedRun],
    metric: str | None,
    keys: Mapping[str, list[str]],
    own: dict[str, Settings],
) -> ArmDigest:
    """One arm; `keys` are, per run, the metrics that the success metric stands for."""
    judged = next((found for found in record.verdict.arms if found.arm == arm.arm), JudgedArm())
    finals = [(keys[run.run_id], run, run.last_scores()) for run in runs]
    only = [found[measured[0]] for measured, _, found in finals if len(measured) == 1 and measured[0] in found]
    widths = [(score.low, score.high) for score in only if score.low is not None and score.high is not None]
    low, high, covers = None, None, ""
    if judged.low is not None and judged.high is not None:
        low, high, covers = judged.low, judged.high, "tasks and seeds" if judged.n_seeds > 1 else "tasks"
    elif widths and len(runs) == 1:
        (low, high), covers = widths[0], "tasks"
    # A run whose rollouts all errored has no such metric; its evaluation still says how many there were.
    counted = [
        score
        for measured, run, found in finals
        for key in measured or _measured_by(metric, _score_keys(run))
        if (score := found.get(key))
    ]
    marks = {
        score_key(one.split, one.name, score.metric): one.training_mark
        for run in runs
        for one in run.evals
        for score in one.scores
        if one.training_mark
    }
    completed = [run for run in runs if run.status == "completed"]
    values: dict[str, list[float]] = {}
    for run in completed:
        for key, value in run.metrics.items():
            if _is_number(value):
                values.setdefault(key, []).append(value)
    errored = {}
    if any(score.n_errors for _, _, found in finals for score in found.values()):
        for key in dict.fromkeys(key for run in runs for key in (*run.metrics, *_score_keys(run))):
            errored[key] = _say_errors([found[key] for _, _, found in finals if key in found])
    versus, needs = judged.vs_baseline, None
    if versus and versus.verdict == "undecided":
        needs = plan_text(versus.more_tasks, versus.more_seeds, versus.more_of_both, versus.more_templates) or None
    return ArmDigest(
        arm=arm.arm,
        identity=record.looks.arms.get(arm.arm, ""),
        own=own.get(arm.arm, {}),
        statuses=list(arm.statuses),
        scores=[score for score in arm.scores if _is_number(score)],
        seeds=record.looks.seeds.get(arm.arm, []),
        # Own runs lie in the record's folder.
        runs=[run.reused_from or run.run_dir.rpartition("/")[2] for run in completed if run.run_dir],
        reused=[run.reused_from for run in runs if run.reused_from],
        low=low,
        high=high,
        covers=covers,
        half_width=fmean((high - low) / 2 for low, high in widths) if widths else None,
        verdict=judged.verdict if record.verdict.constant is None else None,
        needs=needs,
        metrics={key: fmean(found) for key, found in values.items()},
        why_unranked=arm.why_unranked or judged.why_unranked,
        error=_text(arm.errors[0]) if arm.errors else None,
        n_rollouts=sum(score.n_rollouts for score in counted),
        n_errors=sum(score.n_errors for score in counted),
        training_marks=marks,
        error_marks={key: mark for key, mark in errored.items() if mark},
        training_mark=next((marks[key] for run in runs for key in keys[run.run_id] if key in marks), "")
        or _infer_training_mark(record, arm.arm, [key for run in runs for key in keys[run.run_id]]),
    )


def _infer_training_mark(record: ExperimentRecord, arm: str, keys: list[str]) -> str:
    """Of a record from before scores were marked: its leakage lines name benchmarks, and arms where not all."""
    if LEAKAGE not in record.conclusion:
        return ""
    suites = {score.suite for key in keys if (score := parse_key(key)) is not None}
    found = (LEAKED.match(line) for line in record.conclusion.splitlines())
    is_leaked = any(
        one["suite"] in suites and (one["arms"] is None or arm in one["arms"].split(", ")) for one in found if one
    )
    return "tasks in training rows" if is_leaked else ""


def _say_errors(scores: list[Score]) -> str:
    errors, rollouts = sum(score.n_errors for score in scores), sum(score.n_rollouts for score in scores)
    return f"{errors:,} of {rollouts:,} rollouts errored" if errors else ""


def _score_keys(run: RecordedRun) -> list[str]:
    """The metrics by which the trained weights were to be scored, whether a score came of it or not."""
    return [score_key(one.split, one.name, score.metric) for one in run.evals if one.step != 0 for score in one.scores]


def _measured_by(metric: str | None, keys: Sequence[str]) -> list[str]:
    """The metrics that the success metric stands for; of a name that is ambiguous, all that it can mean."""
    try:
        return resolve(metric, keys) if metric else []
    except AmbiguousName as exc:
        return exc.keys


def benchmark_entries(metadata: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The config's benchmarks, each by the name that its tasks have; an entry without a label is a test."""
    found = metadata.get("benchmark") or []
    entries = {}
    for one in [found] if isinstance(found, Mapping) else found:
        entry = _mapping(one)
        role = entry.get("split") or ("val" if "val" in (entry.get("tags") or []) else "test")
        name = entry.get("name") or entry.get("id") or str(entry.get("path")).rstrip("/").rpartition("/")[2]
        entries[f"{role}/{name}"] = entry
    return entries


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:
    """A finite number whose square is one too; a verdict counts no others either."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _text(value: Any) -> str:
    text = str(value or "").strip()
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."
