"""What the model said: which rollouts of which record are meant.

In: a record's name and conditions. Out: the rollouts that fit, or two arms task by task where they differ.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.errors import EvsysError, closest, not_known
from evsys_sdk.experiment.rollout_view import Diff, RolloutView, compare_sides, latest, read_rollouts
from evsys_sdk.history.history import slug_of
from evsys_sdk.operations.place import HistoryPlace
from evsys_sdk.stats.task_sketch import sketch_from, sketch_of

LISTED = 20
"""Names that a message lists; of more only the closest."""
TEST = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRollouts:
    """Which rollouts of a record are asked for."""

    failed: bool = False
    tasks: Sequence[str] = ()
    arms: Sequence[str] = ()
    benchmark: str | None = None
    step: str | None = None
    """A step, `all`, or None for the last evaluation of each run."""
    train: bool = False
    without_test: bool = False
    """Leave out what was tried on tasks that any experiment here tests on, as if the record did not have it."""

    def matches(self, view: RolloutView, *, of_any_arm: bool = False) -> bool:
        is_of_arm = of_any_arm or not self.arms or view.arm in self.arms or view.run in self.arms
        names = (view.benchmark, view.benchmark.rpartition("/")[2])
        is_of_benchmark = self.benchmark is None or self.benchmark in names
        return is_of_arm and is_of_benchmark and (not self.tasks or view.task_id in self.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRollouts:
    """The rollouts that fit."""

    record: Path
    asked: list[RolloutView]
    """Those of the evaluations, arms, benchmarks and tasks that were asked for, failed or not."""
    views: list[RolloutView] = field(default_factory=list)
    limit: int = 0

    @property
    def chosen(self) -> list[RolloutView]:
        return self.views[: self.limit or None]

    def plain(self) -> dict[str, Any]:
        rollouts = [plain_view(view) for view in self.chosen]
        return {"record": str(self.record), "n_rollouts": len(self.views), "rollouts": rollouts}


def plain_view(view: RolloutView) -> dict[str, Any]:
    """A rollout as `--json` prints it."""
    return asdict(view) | {"answer": view.answer, "failed": view.is_failed}


def find_rollouts(place: HistoryPlace, ref: str | None, wanted: WantedRollouts, *, limit: int) -> FoundRollouts:
    """The rollouts of a record that fit; at most `limit`, 0 for all."""
    target, run = find_record(place, ref)
    found = read_rollouts(target, run=run)
    # `every` is what messages may name: what the record has, without what must not be shown.
    every = views = _allowed(found.training if wanted.train else found.views, wanted, place)
    step = wanted.step
    if step is None and not wanted.train:
        views = latest(views)
    elif step not in (None, "all") and not wanted.train:
        if not str(step).isdigit():
            raise EvsysError(f"--step takes a number or `all`, not {step!r}")
        steps = sorted({view.step for view in views if view.step is not None})
        views = [view for view in views if view.step == int(str(step))]
        if not views:
            raise EvsysError(
                f"--step {step}: no evaluation at this step; there are: {', '.join(map(str, steps)) or 'none'}"
            )
    asked = [view for view in views if wanted.matches(view)]
    views = [view for view in asked if view.is_failed or not wanted.failed]
    if not views:
        _refuse_unknown(every, wanted)
    return FoundRollouts(record=target, asked=asked, views=views, limit=limit)


def _allowed(views: list[RolloutView], wanted: WantedRollouts, place: HistoryPlace) -> list[RolloutView]:
    if not wanted.without_test:
        return views
    kept = [view for view in views if view.benchmark.partition("/")[0] != TEST]
    # Tasks are known by what they say: a config may call another experiment's test tasks "val", or train on them.
    sketches = [entry.digest.sketches.items() for entry in (place.history().entries if kept else ())]
    tests = [sketch_from(sketch) for of_one in sketches for name, sketch in of_one if name.partition("/")[0] == TEST]
    asked: dict[str, dict[str, HarborTask]] = {}
    for view in kept:
        text = view.messages[-1]["text"] if view.messages else ""
        task = HarborTask(
            task_id=view.task_id, instruction=text, verifier=InProcessVerifier(fn_name="", expected=view.expected)
        )
        asked.setdefault(view.benchmark, {})[view.task_id] = task
    closed = {
        name
        for name, tasks in asked.items()
        for sketch in [sketch_of([*tasks.values()])]
        if any(test is not None and sketch.is_like(test) for test in tests)
    }
    return [view for view in kept if view.benchmark not in closed]


def find_record(place: HistoryPlace, ref: str | None) -> tuple[Path, str | None]:
    """The record that is meant, and the run in it where one is named: a path, an experiment, `<experiment>/<run>`, or
    the name of a run or an arm of the newest experiment that has it."""
    if ref is not None and os.path.exists(ref):
        path = Path(ref)
        is_record_of_run = path.is_dir() and ((path / RUN_RESULT_FILE).is_file() or (path / "rollouts.jsonl").is_file())
        if is_record_of_run or path.name.endswith((".jsonl", ".jsonl.gz")):
            return path, None
    history, run = place.history(), None
    try:
        entry = place.find_or_newest(ref, history).entry
    except EvsysError:
        for entry in history.entries if ref is not None else []:
            names = {name for arm in entry.digest.arms for name in (arm.arm, *arm.runs)}
            run = str(ref).removeprefix(f"{entry.name}/").removeprefix(f"{slug_of(entry.name)}/")
            # An experiment without arms on record yet can confirm no run: `<experiment>/<run>` is enough there.
            if run in names or (run != ref and not names):
                break
        else:
            raise
    return (entry.record if entry.record.is_file() else entry.journal), run


def _refuse_unknown(views: list[RolloutView], wanted: WantedRollouts) -> None:
    """Say which of the conditions names something that the record does not have."""
    if not views:
        what = "training rollouts (algorithms that roll out keep some)" if wanted.train else "rollouts of evaluations"
        of_test = " beside those of test benchmarks" if wanted.without_test and not wanted.train else ""
        raise EvsysError(f"the record has no {what}{of_test}")
    benchmarks = {name for view in views for name in (view.benchmark, view.benchmark.rpartition("/")[2])}
    for flag, words, what, names in (
        ("--task", wanted.tasks, "task", {view.task_id for view in views}),
        ("--arm", wanted.arms, "arm or run", {name for view in views for name in (view.arm, view.run)}),
        ("--benchmark", [wanted.benchmark] if wanted.benchmark else [], "benchmark", benchmarks),
    ):
        for word in words:
            if word not in names:
                near = closest(word, names)
                known = [near] if near and len(names) > LISTED else sorted(names)[:LISTED]
                more = f" and {len(names) - LISTED:,} more" if len(known) == LISTED < len(names) else ""
                raise EvsysError(f"{flag}: {not_known(word, what, known)}{more}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDiff:
    """Two arms of a record, task by task where they differ."""

    record: Path
    diff: Diff
    limit: int

    @property
    def n_better(self) -> int:
        return sum(task.change > 0 for task in self.diff.tasks)

    @property
    def n_worse(self) -> int:
        return sum(task.change < 0 for task in self.diff.tasks)

    def plain(self) -> dict[str, Any]:
        diff = self.diff
        tasks = [
            {
                "benchmark": task.benchmark,
                "task_id": task.task_id,
                "change": task.change,
                "left": [plain_view(view) for view in task.left],
                "right": [plain_view(view) for view in task.right],
            }
            for task in diff.tasks[: self.limit or None]
        ]
        counts = {
            "n_tasks": diff.n_tasks,
            "n_different": len(diff.tasks),
            "n_better": self.n_better,
            "n_worse": self.n_worse,
        }
        return {"record": str(self.record), "left": diff.left, "right": diff.right, **counts, "tasks": tasks}


def diff_rollouts(
    place: HistoryPlace, ref: str | None, sides: Sequence[str], wanted: WantedRollouts, *, limit: int
) -> FoundDiff:
    """Two arms, or an arm and the untrained model, on the tasks on which they differ; see `compare_sides`."""
    if len(sides) > 2 or wanted.train or wanted.step is not None:
        raise EvsysError("--diff takes at most two arms and compares final evaluations; leave out --train and --step")
    target, run = find_record(place, ref)
    found = read_rollouts(target, run=run)
    sides = list(sides) or [name for name in wanted.arms if name in found.arms][:2]

    allowed = {view.benchmark for view in _allowed(found.views, wanted, place)}

    def only(view: RolloutView) -> bool:
        return view.benchmark in allowed and wanted.matches(view, of_any_arm=True)

    return FoundDiff(record=target, diff=compare_sides(found, sides, only=only), limit=limit)
