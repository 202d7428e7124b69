"""A benchmark: a suite of tasks, read once and scored any number of times.

In: a `tasks.jsonl`, the directory that holds one, or a directory of harbor's task directories; and, to score, a rollout
engine with something to sample from. Out: an `EvalResult`. Where rollouts come from is the engine's business; how they
fold into scores is `scoring`'s.
"""

from __future__ import annotations

import hashlib
import json
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evsys_sdk.data_types import HarborTask, InProcessVerifier, detect_format, from_dict, to_dict
from evsys_sdk.errors import DataError, EvsysError, UnknownKind
from evsys_sdk.eval.clusters import Clusters, find_clusters
from evsys_sdk.eval.metrics import samples_needed
from evsys_sdk.eval.scoring import NamedMetric, break_down, score_all, scores_of_task, why_invalid
from evsys_sdk.jsonl import open_bytes, parse_object
from evsys_sdk.protocols import AgentSpec, EvalResult, FinishedRollouts, Renderer, RolloutEngine
from evsys_sdk.registry import metrics as metric_registry
from evsys_sdk.registry import verifiers
from evsys_sdk.surface import SamplingClient, SamplingParams
from evsys_sdk.task_dirs import CONFIG, contents_sha256, read_tasks, task_directory

TASKS_FILE = "tasks.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A named suite of tasks."""

    name: str
    tasks: list[HarborTask]
    sha256: str
    """Of the file, of the rows in canonical JSON, or of all files of the task directories: the same hash, the same
    suite, wherever it lies."""
    places: list[str] = field(default_factory=list)
    """Where each task stands, `tasks.jsonl:12` or its directory, for messages."""

    @classmethod
    def load(cls, path: str | Path, *, name: str | None = None) -> Benchmark:
        """The suite in a `tasks.jsonl`, in a directory that holds one, or in a directory of harbor's task directories
        (or one such directory alone)."""
        if _holds_task_directories(Path(path)):
            return cls.from_dir(path, name=name)
        file = _tasks_file(Path(path))
        digest = hashlib.sha256()
        tasks, places = [], []
        with open_bytes(file) as lines:
            for number, line in enumerate(lines, 1):
                digest.update(line)
                if line.strip():
                    places.append(f"{file}:{number}")
                    tasks.append(_parsed(line, places[-1]))
        own_name = file.parent.name if file.name == TASKS_FILE else file.name.split(".")[0]
        return cls._of(name or own_name, tasks, places, digest.hexdigest())

    @classmethod
    def from_dir(cls, path: str | Path, *, name: str | None = None) -> Benchmark:
        """The suite of harbor's task directories below `path`, or the one task that `path` is."""
        root = Path(path)
        if not root.is_dir():
            raise DataError(f"{root} is not a directory of task directories: it {_what_it_is(root)}")
        tasks = read_tasks(root)
        places = [str(task_directory(task)) for task in tasks]
        return cls._of(name or root.absolute().name, tasks, places, contents_sha256(root, places))

    @classmethod
    def from_iterable(cls, name: str, rows: Iterable[HarborTask | dict[str, Any]]) -> Benchmark:
        """A suite of rows that are at hand already."""
        tasks = [_task(row, f"row {index}") for index, row in enumerate(rows)]
        text = "\n".join(json.dumps(to_dict(task), sort_keys=True, default=str) for task in tasks)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls._of(name, tasks, [f"row {index}" for index in range(len(tasks))], digest)

    @classmethod
    def _of(cls, name: str, tasks: list[HarborTask], places: list[str], sha256: str) -> Benchmark:
        if not tasks:
            raise DataError(f"benchmark {name!r} has no tasks")
        return cls(name=name, tasks=_with_distinct_ids(tasks), sha256=sha256, places=places)

    async def score(
        self,
        *,
        engine: RolloutEngine,
        sampler: SamplingClient,
        renderer: Renderer,
        metrics: Sequence[str] = ("pass@1",),
        split: str = "test",
        num_samples: int | None = None,
        max_tokens: int = 256,
        temperature: float = 1.0,
        limit: int | None = None,
        breakdown_keys: Sequence[str] = (),
        cluster_key: str | None = None,
        seed: int | None = None,
        step: int | None = None,
        agent: AgentSpec | None = None,
        finished: FinishedRollouts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> EvalResult:
        """Roll the model out on the tasks and fold the rewards; the options are those of a `metadata.benchmark` entry.

        `limit` takes the first tasks, the same ones for every arm, so that arms can be compared task by task.
        """
        started = clock()
        named, each = _plan(metrics, num_samples)
        tasks = self.tasks[:limit]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        worker = {} if agent is None else {"agent": agent}
        groups = await engine.roll_out(
            tasks, sampler=sampler, renderer=renderer, sampling=sampling, num_samples=each, finished=finished, **worker
        )
        scored = [
            scores_of_task(task.task_id, rollouts, target=_target(task), metadata=task.metadata)
            for task, rollouts in zip(tasks, groups, strict=True)
        ]
        rollouts = [rollout for group in groups for rollout in group]
        clusters = _clusters(tasks, cluster_key)
        return EvalResult(
            name=self.name,
            split=split,
            scores=score_all(named, scored, clusters.of),
            step=step,
            clusters=clusters.of,
            clustered_by=clusters.found_by,
            breakdown=break_down(breakdown_keys, named, scored),
            rollouts=rollouts,
            error=why_invalid(scored, rollouts),
            seconds=clock() - started,
        )


def cluster_problem(tasks: Sequence[HarborTask], key: str | None) -> str | None:
    """Why tasks cannot be clustered by this metadata key: none of them has it."""
    if key is None or not tasks or any(key in task.metadata for task in tasks):
        return None
    known = sorted({name for task in tasks for name in task.metadata})
    return f"no task has the metadata key {key!r}; keys: {', '.join(known) or 'none'}"


def _clusters(tasks: Sequence[HarborTask], key: str | None) -> Clusters:
    """Which tasks were made from one template."""
    problem = cluster_problem(tasks, key)
    if problem:
        raise EvsysError(f"cluster_key: {problem}")
    labels = {task.task_id: str(task.metadata[key]) for task in tasks if key is not None and key in task.metadata}
    texts = {task.task_id: task.instruction for task in tasks if isinstance(task.instruction, str)}
    return find_clusters([task.task_id for task in tasks], texts, labels, key=key)


def _plan(names: Sequence[str], num_samples: int | None) -> tuple[list[NamedMetric], int]:
    """The metrics, and how many rollouts each task gets; a k that is too large is refused before anything is spent."""
    problem = sampling_problem(names, num_samples)
    if problem:
        raise EvsysError(problem)
    named = [(name, metric_registry.build(name, {})) for name in names]
    return named, num_samples or max(samples_needed(name, metric) for name, metric in named)


def sampling_problem(names: Sequence[str], num_samples: int | None) -> str | None:
    """Which metric asks for more rollouts per task than `num_samples` allows, or None."""
    for name in names:
        needed = samples_needed(name, metric_registry.build(name, {}))
        if num_samples is not None and num_samples < needed:
            return f"{name} needs num_samples of at least {needed}; it is {num_samples}"
    return None


def task_problems(benchmark: Benchmark) -> list[str]:
    """One line per verifier function that is not registered or whose params do not fit, at its first use."""
    seen: set[str] = set()
    found = []
    for task, place in zip(benchmark.tasks, benchmark.places, strict=True):
        plan = task.verifier
        if not isinstance(plan, InProcessVerifier):
            continue
        key = json.dumps([plan.fn_name, plan.params], sort_keys=True, default=repr)
        if key not in seen:
            seen.add(key)
            problem = _problem(plan)
            if problem and problem not in seen:
                seen.add(problem)
                found.append(f"{place}: task {task.task_id!r}: {problem}")
    return found


def _problem(plan: InProcessVerifier) -> str | None:
    try:
        problem = verifiers.adapted(plan.fn_name).problem(plan.params)
    except UnknownKind as exc:
        return str(exc)
    return f"params of verifier {plan.fn_name!r}: {problem}" if problem else None


def _tasks_file(path: Path) -> Path:
    file = path / TASKS_FILE if path.is_dir() else path
    if not file.is_file():
        what = f"there is no {TASKS_FILE} and no task directory in it" if path.is_dir() else "it does not exist"
        raise DataError(
            f"{path} is not a benchmark: {what}; a benchmark is a {TASKS_FILE}, a directory holding one, or a "
            "directory of task directories (task.toml, instruction.md, tests/test.sh)"
        )
    return file


def _holds_task_directories(path: Path) -> bool:
    return path.is_dir() and not (path / TASKS_FILE).exists() and next(path.rglob(CONFIG), None) is not None


def _what_it_is(path: Path) -> str:
    return "is a file" if path.exists() else "does not exist"


def _parsed(line: bytes, place: str) -> HarborTask:
    try:
        row = parse_object(line.removeprefix(BOM_UTF8))
    except DataError as exc:
        raise DataError(f"{place}: {exc}") from exc
    return _task(row, place)


def _task(row: Any, place: str) -> HarborTask:
    if isinstance(row, HarborTask):
        return row
    try:
        task = from_dict(row)
    except DataError as exc:
        raise DataError(f"{place}: {exc}") from exc
    if not isinstance(task, HarborTask):
        raise DataError(f"{place}: this row is {detect_format(row)}; a task has `instruction` and `verifier`")
    return task


def _with_distinct_ids(tasks: list[HarborTask]) -> list[HarborTask]:
    """Tasks that share an id stay distinct: the second becomes `id#2`, the third `id#3`."""
    taken = {task.task_id for task in tasks}
    seen: dict[str, int] = {}
    distinct = []
    for task in tasks:
        count = seen.get(task.task_id, 0) + 1
        while count > 1 and f"{task.task_id}#{count}" in taken:
            count += 1
        seen[task.task_id] = count
        new_id = task.task_id if count == 1 else f"{task.task_id}#{count}"
        taken.add(new_id)
        distinct.append(task if count == 1 else replace(task, task_id=new_id))
    return distinct


def _target(task: HarborTask) -> Any:
    return task.verifier.expected if isinstance(task.verifier, InProcessVerifier) else None
