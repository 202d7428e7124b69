"""How often the question of an experiment was looked at before.

In: the runs of every arm, what the arms and tasks are, and where records may lie. Out: `Looks`: the earlier results
that a reader saw before this one. Adding seeds or tasks until something is significant finds something among equals; so
each earlier result counts, and the verdict widens its intervals by their number.

A question is identified by its content: two arms or more with the same rows and the same settings, as far as
these can change scores, on tasks of which at least half are the same, by the same metric. Names and folders do not
count.
Earlier looks are experiments with the same question that had other seeds or other scores, and such attempts
that `--fresh` set aside; those that were marked invalid too, since their scores were seen. An identical repeat is no
further look, and has the looks that the first of them had. Where tasks or seeds of an earlier look are left out, no
correction for the number of looks is enough, and that is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.config.schema import ExperimentConfig, RunConfig
from evsys_sdk.config.sweep import REHEARSALS
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.eval.row_eval import EVAL_DATA
from evsys_sdk.experiment.identity import WEIGHTS
from evsys_sdk.experiment.outcome import record_path
from evsys_sdk.experiment.registration import workspaces_of
from evsys_sdk.files import read_object
from evsys_sdk.format import count
from evsys_sdk.history.digest import Digest
from evsys_sdk.history.history import ExperimentEntry, attempts_of, read_history, read_one, records_below
from evsys_sdk.history.leaderboard import looks_of
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.models import RecordedLooks, RunRecord
from evsys_sdk.report.conclusion import over_tasks, score_keys, task_counts
from evsys_sdk.score_names import metric_of, parse_key
from evsys_sdk.stats.task_sketch import TaskSketch, sketch_from, sketch_of

Arms = Mapping[str, Sequence[RunResult]]
Seeds = tuple[list[int], list[float]]
"""The seeds of an arm that have a score (empty where a record does not have them), and the success metric of each."""
Scores = dict[str, Seeds]
"""By the identity of the arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What an experiment asks."""

    arms: dict[str, str]
    """Arm -> hash of what can change its scores; of a trial that a search drew, its name."""
    tasks: dict[str, TaskSketch]
    """Benchmark, as `val/tools` -> the tasks that are scored."""

    def is_asked_by(self, digest: Digest, metrics: set[str]) -> bool:
        """True where the same was measured, and tasks are shared; without a benchmark on one side arms alone tell."""
        if metrics and digest.measured and not metrics & {metric_of(key) for key in digest.measured}:
            return False
        theirs = [found for data in digest.sketches.values() if (found := sketch_from(data))]
        if not theirs or not self.tasks:
            return bool(theirs) == bool(self.tasks) or not digest.sketches
        return any(mine.is_like(other) for mine in self.tasks.values() for other in theirs)


def question_of(
    config: ExperimentConfig,
    results: Arms,
    facts: Mapping[str, Any],
    benchmarks: BenchmarkLoader,
    *,
    max_steps: int | None = None,
) -> Question:
    """By what can change scores: the settings of each arm, and the contents that these only name (`facts`, and the
    rows that the records of its runs tell)."""
    tasks = {}
    for entry in config.metadata.benchmark:
        tasks[f"{entry.role}/{entry.label}"] = sketch_of(benchmarks.get(entry).tasks[: entry.limit])
    arms: dict[str, str] = {}
    for run in config.all_runs():
        records = (RunRecord.find(one.run_dir) for one in results.get(run.name, []) if one.run_dir is not None)
        rows = next(({one.place: one.content for one in found.environment.data if one.content}
                     for found in records if found and found.environment.data), {})  # fmt: skip
        settings = _scored_settings(run, rows, has_benchmark=bool(tasks))
        # Arms that `--steps` cut short are no look at the arms of full length.
        own = config_hash({"settings": _contents(settings, facts), "max_steps": max_steps})[:16]
        # Arms that differ only in what cannot change scores are still several arms: the next is `<hash>-2`.
        same = sum(known.partition("-")[0] == own for known in arms.values())
        arms[run.name] = f"{own}-{same + 1}" if same else own
    return Question(arms=arms, tasks=tasks)


def _scored_settings(run: RunConfig, rows: Mapping[str, str], *, has_benchmark: bool) -> dict[str, Any]:
    """The settings of a run that can change its scores. `rows`: place of a data block -> hash of its
    rows; how they were read and made is then of no matter."""

    def block(place: str, data: Mapping[str, Any] | None) -> object:
        return rows.get(place, data)

    given = run.model_dump()
    algorithm = registry.scored_block(registry.algorithms, **given["algorithm"])
    for index, phase in enumerate(algorithm["params"].get("phases") or []):
        phase["data"] = block(f"algorithm.params.phases[{index}].data", phase.get("data"))
    stages = (given["continual"] or {}).get("stages", [])
    settings = {
        "model": given["model"],
        "backend": registry.scored_block(registry.backends, **given["backend"]),
        "algorithm": algorithm,
        "data": None if stages else block("data", given["data"]),
        "stages": [block(f"continual.stages[{index}].data", stage["data"]) for index, stage in enumerate(stages)],
    }
    if not has_benchmark:  # else the tasks say what is asked, and rows that are scored besides change nothing of it
        asked = block(EVAL_DATA, given["eval"]["eval_data"])
        settings["eval"] = {"inference": given["eval"]["inference"], "eval_data": asked}
    return settings


def _contents(value: Any, facts: Mapping[str, Any]) -> Any:
    """The settings with the hash of the contents where they name a file or a checkpoint."""
    if isinstance(value, Mapping):
        return {key: _contents(inner, facts) for key, inner in value.items()}
    if isinstance(value, list):
        return [_contents(inner, facts) for inner in value]
    if not isinstance(value, str):
        return value
    return facts.get(f"contents of {value}", facts.get(f"{WEIGHTS}{value}", value))


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierLooks:
    """The results on one question that came before this one."""

    before: list[str] = field(default_factory=list)
    """Experiments, each as `name (when)`."""
    set_aside: int = 0
    """Attempts of this experiment that `--fresh` set aside."""
    rerolls: int = 0
    """Those of them with other scores, with other seeds or on a backend that does not repeat exactly."""
    question: Question | None = None
    seeds: dict[str, list[int]] = field(default_factory=dict)
    """Arm -> the seeds that were scored this time."""
    left_out: list[str] = field(default_factory=list)
    """What earlier looks had and this one has not: `10 of 50 tasks of first (when)`."""

    @property
    def count(self) -> int:
        """Looks at the question, this one included."""
        return 1 + len(self.before) + self.rerolls

    def to_record(self) -> RecordedLooks:
        counted = RecordedLooks(
            count=self.count,
            before=self.before,
            set_aside=self.set_aside,
            rerolls=self.rerolls,
            left_out=self.left_out,
        )
        if self.question is None:
            return counted
        tasks = {name: sketch.as_dict() for name, sketch in self.question.tasks.items()}
        return counted.model_copy(update={"arms": self.question.arms, "tasks": tasks, "seeds": self.seeds})

    @property
    def lines(self) -> list[str]:
        """What the conclusion says of them; nothing where this is the first look."""
        if self.count == 1:
            return []
        told = [f"earlier looks: {', '.join(self.before)}"] if self.before else []
        if self.rerolls:
            attempts = "attempt" if self.rerolls == 1 else "attempts"
            told.append(f"{self.rerolls} {attempts} with other seeds or scores set aside by --fresh")
        return [f"Look {self.count} at this question ({'; '.join(told)})."]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """One earlier result on the question."""

    label: str
    scores: Scores
    tasks: list[TaskSketch]
    """Of the benchmarks that it was measured on."""
    ended: str
    is_own: bool
    """Of this experiment: its record as it is, or an attempt at it."""
    is_attempt: bool


def find_looks(
    arms: Arms, metric: str | None, output_dir: Path, config: ExperimentConfig, question: Question
) -> EarlierLooks:
    """The looks at what the arms scored by this metric; none for a rehearsal."""
    if output_dir.name == REHEARSALS:
        return EarlierLooks()
    keys = score_keys(arms, metric) if metric else []
    scored: dict[str, Seeds] = {}
    for arm, runs in arms.items():
        values = [
            (number if run.seed is None else run.seed, value)
            for number, run in enumerate(runs)
            if run.status == "completed" and (value := over_tasks(run.metrics, keys, task_counts(run))) is not None
        ]
        scored[arm] = [seed for seed, _ in values], [value for _, value in values]
    # By what the arm is and not by its name, so that the same arm under another name is the same.
    scores = {question.arms.get(arm, arm): each for arm, each in scored.items()}
    seeds = {arm: each[0] for arm, each in scored.items()}
    own = record_path(output_dir, config.name).absolute()
    metrics = {metric_of(key) for key in keys}
    # `ended` is ISO 8601 in UTC, whose order as text is that of time.
    earlier = sorted(_earlier(own, output_dir, config, question, metrics), key=lambda one: one.ended)
    attempts = len(attempts_of(own))
    if any(values for _, values in scores.values()):
        first = next((one for one in earlier if _is_repeat(one.scores, scores)), None)
        if first is not None and first.is_own and not first.is_attempt:  # told again, at a later time
            known = (read_object(own) or {}).get("looks") or {}
            return EarlierLooks(
                before=list(known.get("before") or []),
                set_aside=attempts,
                rerolls=int(known.get("rerolls") or 0),
                question=question,
                seeds=seeds,
                left_out=list(known.get("left_out") or []),
            )
        if first is not None:  # a repeat of it: what was seen later took no part in it
            earlier = earlier[: earlier.index(first)]
    looks: dict[str, _Result] = {}
    for one in earlier:
        # The result of this experiment when it was interrupted is a part of this result.
        is_part = one.is_own and not one.is_attempt
        shared = [arm for arm in one.scores if one.scores[arm][1] and scores.get(arm, ([], []))[1]]
        # A look compared two arms at least, with other seeds or scores than now.
        if not is_part and len(shared) > 1 and any(not _is_same(one.scores[arm], scores[arm]) for arm in shared):
            # A result may lie in several places, copied or repeated: the same scores of the same seeds are one look.
            looks.setdefault(repr(sorted(one.scores.items())), one)
    return EarlierLooks(
        before=[one.label for one in looks.values() if not one.is_own],
        set_aside=attempts,
        rerolls=sum(one.is_own for one in looks.values()),
        question=question,
        seeds=seeds,
        left_out=[told for one in looks.values() for told in _left_out(one, question, scores)],
    )


def _left_out(earlier: _Result, question: Question, scores: Scores) -> Iterator[str]:
    """Tasks and seeds of an earlier look that this one lacks. Other seeds altogether are no choice among those."""
    for sketch in earlier.tasks:
        if left_out := sketch.left_out_of(list(question.tasks.values())):
            yield f"{left_out} of {count(sketch.count, 'task')} of {earlier.label}"
    then = {seed for arm, (seeds, _) in earlier.scores.items() if arm in scores for seed in seeds}
    now = {seed for seeds, _ in scores.values() for seed in seeds}
    if then & now and then - now:
        seeds = sorted(then - now)
        yield f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))} of {earlier.label}"


def _earlier(
    own: Path, output_dir: Path, config: ExperimentConfig, question: Question, metrics: set[str]
) -> Iterator[_Result]:
    """The results of experiments that ask this question, and of attempts at them: those that the workspaces' indexes
    know and those that lie in the folder of this experiment and its parent's."""
    for path, entry in _known_records(own, output_dir, config).items():
        if REHEARSALS in path.parts[-2:-1]:
            continue
        invalid = ", marked invalid" if entry.notes.why_invalid is not None else ""
        found = [(entry.digest, False), *((attempt, True) for attempt in attempts_of(path))]
        for digest, is_attempt in found:
            if question.is_asked_by(digest, metrics):
                label = f"{digest.name} ({digest.ended}{', set aside by --fresh' if is_attempt else invalid})"
                ended = digest.ended or ""
                # In a record that does not have the identity of arms, an arm is the one of the same name.
                scores = {one.identity or question.arms.get(one.arm, one.arm): (one.seeds, one.scores)
                          for one in digest.arms}  # fmt: skip
                suites = {score.suite for key in digest.measured if (score := parse_key(key))}
                tasks = [known for suite in suites if (known := sketch_from(digest.sketches.get(suite)))]
                is_own = path == own
                yield _Result(
                    label=label, scores=scores, tasks=tasks, ended=ended, is_own=is_own, is_attempt=is_attempt
                )


def _known_records(own: Path, output_dir: Path, config: ExperimentConfig) -> dict[Path, ExperimentEntry]:
    records = {entry.record: entry for space in workspaces_of(config) for entry in read_history(space).entries}
    for path in [*records_below(output_dir, 1), *records_below(output_dir.parent, 1), own]:
        if path not in records and (entry := read_one(path)) is not None:
            records[path] = entry
    return records


def spent_budgets(config: ExperimentConfig, output_dir: Path) -> list[str]:
    """The sets of tasks that this experiment, whose record is written, chose by and that too many arms were compared
    on."""
    if output_dir.name == REHEARSALS:
        return []
    own = record_path(output_dir, config.name).absolute()
    records = _known_records(own, output_dir, config)
    if own in records:  # whose lock is still held
        records[own] = replace(records[own], state=records[own].digest.status)
    found = looks_of(list(records.values()))
    return [str(looks) for looks in found if looks.is_spent and own in looks.experiments]


def _is_repeat(then: Scores, now: Scores) -> bool:
    return then.keys() == now.keys() and all(_is_same(then[arm], now[arm]) for arm in now)


def _is_same(then: Seeds, now: Seeds) -> bool:
    """True for the same scores of the same seeds: other seeds that score alike by chance were another look."""
    return then[1] == now[1] and (not then[0] or then[0] == now[0])
