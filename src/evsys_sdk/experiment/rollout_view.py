"""What the model said, task by task, read back from a record.

In: a path to a record (an experiment, a run's directory, a file of rollouts). Out: `RolloutView`s with the prompt, the
turns, the expected answer, the reward and the error; and a `Diff` of two arms on the tasks where they differ. Nothing
is written, no model is asked and no code of the project is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, MODEL_ROLLOUTS_FILE
from evsys_sdk.errors import EvsysError, not_known
from evsys_sdk.experiment.regrade_tasks import TaskFinder, config_of, find_record
from evsys_sdk.protocols import of_kept_weights
from evsys_sdk.record.journal import TASKS
from evsys_sdk.record.models import ExperimentRecord, question_to_data
from evsys_sdk.record.rollouts import TRAIN, StoredEval, StoredJournal, evals_in_file, journal_of

UNTRAINED = "untrained"
PASSES = 1.0
"""A reward of at least this is a pass, as in the metric `pass@1`."""
Questions = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """One try of the model at one task, as a person reads it."""

    run: str
    arm: str
    benchmark: str
    """`val/tools`; `train` for what the run was trained on."""
    step: int | None
    """None after training; 0 for the untrained model."""
    stage: str | None
    task_id: str
    sample: int
    messages: list[dict[str, str]]
    """What was asked, `role` and `text` each; empty where the record does not have it."""
    turns: list[str]
    """What the model wrote; the last one is its answer."""
    expected: Any
    reward: float | None
    status: str
    error: str | None
    seconds: float
    is_kept: bool = True
    """False for a step of the loop after the one whose weights `best_by` chose."""

    @property
    def answer(self) -> str:
        return self.turns[-1] if self.turns else ""

    @property
    def is_failed(self) -> bool:
        return self.status != "ok" or self.reward is None or self.reward < PASSES


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDiff:
    """One task on which two sides differ."""

    benchmark: str
    task_id: str
    left: list[RolloutView]
    right: list[RolloutView]

    @property
    def change(self) -> float:
        """Mean reward on the right minus that on the left; an errored rollout counts as 0."""
        return _mean(self.right) - _mean(self.left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Two sides, and the tasks on which they differ, the largest loss first and the largest gain last."""

    left: str
    right: str
    n_tasks: int
    """Tasks that both sides tried."""
    tasks: list[TaskDiff]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """The rollouts of one record."""

    views: list[RolloutView]
    training: list[RolloutView] = field(default_factory=list)
    """The first few rollouts of each training step."""
    baseline_arm: str | None = None
    best_arm: str | None = None

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(view.arm for view in self.views))


def read_rollouts(target: Path, *, run: str | None = None) -> RolloutRecord:
    """All rollouts of the record at `target`; those of one run where it is named."""
    found = find_record(target)
    evals, training = list(found.evals), found.training
    # Rollouts of the hosted models that were scored beside the experiment.
    name = target.name.removesuffix(f".{EXPERIMENT_RESULT_FILE}").removesuffix(".journal.sqlite")
    file = target.parent / f"{name}.{MODEL_ROLLOUTS_FILE}"
    if target.is_file() and name != target.name and file.is_file():
        evals += evals_in_file(file, name)
    record = found.experiment
    arms = {arm.arm for arm in record.arms} if record else set()
    if run is not None:
        runs = {one.run for one in [*evals, *training]}
        if run not in runs and run not in {_arm_of(name, arms) for name in runs}:
            raise EvsysError(not_known(run, "run with rollouts in this record", runs))
        evals, training = (
            [one for one in side if run in (one.run, _arm_of(one.run, arms))] for side in (evals, training)
        )
    chosen = {name: one.chosen_steps for name, one in found.runs.items()}
    questions = _QuestionFinder(target, record, found.regrades.absolute().parent)
    return RolloutRecord(
        views=[view for one in evals for view in _views(one, arms, questions, chosen.get(one.run, {}))],
        training=[view for one in training for view in _views(one, arms, questions)],
        baseline_arm=record.verdict.baseline_arm if record else None,
        best_arm=record.best_arm if record else None,
    )


def latest(views: Iterable[RolloutView]) -> list[RolloutView]:
    """Of each run and benchmark, the rollouts of the final weights; where a run broke off, of its last evaluation."""
    views = [view for view in views if view.is_kept]
    last: dict[tuple[str, str], float] = {}
    for view in views:
        key = (view.run, view.benchmark)
        last[key] = max(last.get(key, -1.0), _order(view))
    return [view for view in views if _order(view) == last[view.run, view.benchmark]]


def compare_sides(record: RolloutRecord, names: Sequence[str], *, only: Callable[[RolloutView], bool]) -> Diff:
    """Two arms (or an arm and the untrained model) on the tasks on which they differ.

    No name: the baseline arm and the best one; with one arm, the untrained model and that arm. One name: the untrained
    model and that arm. Two names: these, in this order."""
    left, right = _sides(record, names)
    sides = [_side(record, name, other) for name, other in ((left, right), (right, left))]
    grouped: list[dict[tuple[str, str], list[RolloutView]]] = []
    for side in sides:
        tasks: dict[tuple[str, str], list[RolloutView]] = {}
        for view in filter(only, side):
            tasks.setdefault((view.benchmark, view.task_id), []).append(view)
        grouped.append(tasks)
    shared = [key for key in grouped[0] if key in grouped[1]]
    differ = [
        TaskDiff(benchmark=key[0], task_id=key[1], left=grouped[0][key], right=grouped[1][key])
        for key in shared
        if _mean(grouped[0][key]) != _mean(grouped[1][key]) or _errors(grouped[0][key]) != _errors(grouped[1][key])
    ]
    return Diff(left=left, right=right, n_tasks=len(shared), tasks=sorted(differ, key=lambda task: task.change))


def _sides(record: RolloutRecord, names: Sequence[str]) -> tuple[str, str]:
    arms = record.arms
    known = [*arms, UNTRAINED]
    for name in names:
        if name not in known:
            raise EvsysError(f"--diff: {not_known(name, 'arm of this record', known)}")
    if len(names) == 2:
        return names[0], names[1]
    if len(names) == 1:
        return UNTRAINED, names[0]
    if len(arms) == 1:
        return UNTRAINED, arms[0]
    baseline, best = record.baseline_arm, record.best_arm
    if baseline in arms and best in arms and baseline != best:
        return str(baseline), str(best)
    raise EvsysError(
        f"--diff: name the two arms to compare, e.g. --diff {' '.join(arms[:2])}; arms: {', '.join(known)}"
    )


def _side(record: RolloutRecord, name: str, other: str) -> list[RolloutView]:
    if name != UNTRAINED:
        trained = [view for view in record.views if view.arm == name and view.step != 0]
        if not trained:
            raise EvsysError(f"--diff: the record has no rollouts of {name} after training")
        return latest(trained)
    untrained = [view for view in record.views if view.step == 0]
    if not untrained:
        raise EvsysError(
            "--diff: the record has no rollouts of the untrained model; set `baseline: true` on the benchmark's entry"
        )
    of_other = [view for view in untrained if view.arm == other]
    return of_other or untrained


def _mean(views: Sequence[RolloutView]) -> float:
    return sum(view.reward or 0.0 for view in views) / len(views)


def _errors(views: Sequence[RolloutView]) -> int:
    return sum(view.status != "ok" or view.reward is None for view in views)


def _order(view: RolloutView) -> float:
    return float("inf") if view.step is None else float(view.step)


def _views(
    stored: StoredEval, arms: set[str], questions: _QuestionFinder, chosen_steps: Mapping[str, int] | None = None
) -> list[RolloutView]:
    asked, seen, found = questions.of(stored), dict[str, int](), []
    is_kept = bool(of_kept_weights([stored], chosen_steps or {}))
    for rollout in stored.rollouts:
        sample = seen.get(rollout.task_id, 0)
        seen[rollout.task_id] = sample + 1
        prompt = rollout.metadata.get("prompt")  # rollouts of `run.eval` and of a user's files carry their own
        own: dict[str, Any] = {
            "messages": [{"role": "user", "text": str(prompt)}] if prompt else [],
            "expected": rollout.metadata.get("target"),
        }
        question = asked.get(rollout.task_id) or own
        found.append(
            RolloutView(
                run=stored.run,
                arm=_arm_of(stored.run, arms),
                benchmark=stored.label,
                step=stored.step,
                stage=stored.stage,
                task_id=rollout.task_id,
                sample=int(rollout.metadata.get("sample", sample)),
                messages=question["messages"],
                turns=[turn.text for turn in rollout.turns],
                expected=question["expected"],
                reward=rollout.reward,
                status=rollout.status,
                error=rollout.error,
                seconds=rollout.seconds,
                is_kept=is_kept,
            )
        )
    return found


class _QuestionFinder:
    """What tasks asked and expected: from the journal; without it from the benchmark as it is now."""

    def __init__(self, target: Path, experiment: ExperimentRecord | None, beside: Path):
        self._experiment, self._beside = experiment, beside
        self._kept = _questions_in_journals(target, experiment)
        self._read: dict[tuple[str, str], Questions] = {}
        self._finder: TaskFinder | None = None

    def of(self, stored: StoredEval) -> Questions:
        kept = self._kept.get(f"{stored.split}/{stored.name}")
        if kept is not None or stored.split == "eval":  # rows of `run.eval` carry their own
            return kept or {}
        key = (stored.run if stored.split == TRAIN else "", stored.label)
        if key not in self._read:
            try:
                if self._finder is None:
                    self._finder = TaskFinder(config=config_of(self._experiment, None, self._beside))
                tasks = self._finder.tasks_of(stored)
            except EvsysError:  # the files have gone or changed: the answers can be read all the same
                tasks = {}
            self._read[key] = {task_id: question_to_data(task) for task_id, task in tasks.items()}
        return self._read[key]


def _questions_in_journals(target: Path, experiment: ExperimentRecord | None) -> dict[str, Questions]:
    folder = target if target.is_dir() else target.parent
    name = experiment.experiment if experiment else None
    places = [journal_of(place, name) for place in (folder, folder.parent)] if name else []
    if target.name.endswith(".sqlite"):
        places = [target]
    elif target.name.endswith(f".{EXPERIMENT_RESULT_FILE}"):
        places = [journal_of(folder, target.name.removesuffix(f".{EXPERIMENT_RESULT_FILE}"))]
    elif not places:
        places = [*folder.glob("*.journal.sqlite"), *folder.parent.glob("*.journal.sqlite")][:1]
    found: dict[str, Questions] = {}
    for place in [place for place in places if place.is_file()][:1]:
        with closing(StoredJournal(place)) as journal:
            query = "SELECT key, data FROM events WHERE kind = ? AND superseded = 0 ORDER BY id"
            for key, data in journal.read(query, (TASKS,)):
                found.setdefault(key, {}).update(json.loads(data)["tasks"])
    return found


def _arm_of(run: str, arms: set[str]) -> str:
    """The arm that a run is a seed of."""
    without_seed = re.sub(r"__s\d+$", "", run)
    # An arm may itself be called `x__s1`: where the record names its arms, only a name among them is cut.
    return without_seed if without_seed in arms or not arms else run
