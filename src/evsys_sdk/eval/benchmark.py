"""A benchmark: a suite of tasks, read once and scored any number of times.

In: a `tasks.jsonl`, the directory that holds one, or a directory of harbor's task directories; and, to score, a rollout
engine with something to sample from. Out: an `EvalResult`. Where rollouts come from is the engine's business; how they
fold into scores is `scoring`'s.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from evsys_sdk.config.metadata import BenchmarkEntry
from evsys_sdk.config.project import path_folders
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.data_types import Columns, HarborTask, InProcessVerifier, detect_format, from_dict, to_dict
from evsys_sdk.errors import DataError, EvsysError, UnknownKind, closest, shorten
from evsys_sdk.eval.evaluate import EvaluatedModel, evaluate
from evsys_sdk.eval.metrics import samples_needed
from evsys_sdk.files import open_bytes, parse_object
from evsys_sdk.protocols import EvalResult, FinishedRollouts
from evsys_sdk.registry import metrics as metric_registry
from evsys_sdk.registry import verifiers
from evsys_sdk.rollout.task_dirs import CONFIG, contents_sha256, read_tasks, task_directory
from evsys_sdk.stats.clusters import find_clusters

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
    def load(
        cls, path: str | Path, *, name: str | None = None, on_unreadable: Callable[[str, DataError], None] | None = None
    ) -> Benchmark:
        """The suite in a `tasks.jsonl`, in a directory that holds one, or in a directory of harbor's task directories
        (or one such directory alone). A task that cannot be read is an error; with `on_unreadable` it is reported
        there, by its place, and left out, unless no other is left."""
        path = Path(path)
        if path.is_dir() and not (path / TASKS_FILE).exists() and next(path.rglob(CONFIG), None) is not None:
            return cls.from_dir(path, name=name, on_unreadable=on_unreadable)
        file = path / TASKS_FILE if path.is_dir() else path
        if not file.is_file():
            what = f"there is no {TASKS_FILE} and no task directory in it" if path.is_dir() else "it does not exist"
            raise DataError(
                f"{path} is not a benchmark: {what}; a benchmark is a {TASKS_FILE}, a directory holding one, or a "
                "directory of task directories (task.toml, instruction.md, tests/test.sh)"
            )
        digest = hashlib.sha256()
        tasks, places = [], []
        unreadable: list[DataError] = []
        with open_bytes(file) as lines:
            for number, line in enumerate(lines, 1):
                # Blank lines too: the hash is that of the file's whole content.
                digest.update(line)
                if line.strip():
                    place = f"{file}:{number}"
                    try:
                        tasks.append(_task(line, place))
                    except DataError as exc:
                        if on_unreadable is None:
                            raise
                        unreadable.append(exc)
                        on_unreadable(place, exc)
                    else:
                        places.append(place)
        if unreadable and not tasks:
            raise unreadable[0]
        own_name = file.parent.name if file.name == TASKS_FILE else file.name.split(".")[0]
        return cls._of(name or own_name, tasks, places, digest.hexdigest())

    @classmethod
    def from_dir(
        cls, path: str | Path, *, name: str | None = None, on_unreadable: Callable[[str, DataError], None] | None = None
    ) -> Benchmark:
        """The suite of harbor's task directories below `path`, or the one task that `path` is; `on_unreadable` is that
        of `load`."""
        root = Path(path)
        if not root.is_dir():
            what = "is a file" if root.exists() else "does not exist"
            raise DataError(f"{root} is not a directory of task directories: it {what}")
        tasks = read_tasks(root, on_unreadable=on_unreadable)
        if not tasks:
            read_tasks(root)  # which raises what is wrong with the first
        places = [str(task_directory(task)) for task in tasks]
        return cls._of(name or root.absolute().name, tasks, places, contents_sha256(root, places))

    @classmethod
    def from_iterable(cls, name: str, rows: Iterable[HarborTask | Columns]) -> Benchmark:
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
        model: EvaluatedModel[HarborTask],
        *,
        metrics: Sequence[str] = ("pass@1",),
        split: str = "test",
        num_samples: int | None = None,
        limit: int | None = None,
        breakdown_keys: Sequence[str] = (),
        cluster_key: str | None = None,
        step: int | None = None,
        finished: FinishedRollouts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> EvalResult:
        """Evaluate a model on the tasks; the options are those of a `metadata.benchmark` entry.

        `limit` takes the first tasks, the same ones for every arm, so that arms can be compared task by task. A k that
        is too large for `num_samples`, and a cluster key that no task has, are refused before anything is spent.
        """
        tasks = self.tasks[:limit]
        unknown = cluster_problem(tasks, cluster_key)
        problem = sampling_problem(metrics, num_samples) or (unknown and f"cluster_key: {unknown}")
        if problem:
            raise EvsysError(problem)
        named = [(name, metric_registry.build(name, {})) for name in metrics]
        labels = {task.task_id: str(task.metadata[cluster_key]) for task in tasks if cluster_key in task.metadata}
        texts = {task.task_id: task.instruction for task in tasks if isinstance(task.instruction, str)}
        return await evaluate(
            model,
            tasks,
            named,
            name=self.name,
            split=split,
            num_samples=num_samples or max(samples_needed(name, metric) for name, metric in named),
            finished=finished,
            breakdown_keys=breakdown_keys,
            clusters=find_clusters(
                [task.task_id for task in tasks], texts, labels, key=cluster_key, copies=find_copies(tasks)
            ),
            step=step,
            clock=clock,
        )


def find_copies(tasks: Sequence[HarborTask]) -> dict[str, str]:
    """Task -> the first one that asks and expects the same, for tasks that are not the first; white space and case play
    no part. Tasks in directories are copies where their files are the same too."""

    def key(task: HarborTask) -> str:
        asked = " ".join(str(task.instruction).split()).casefold()
        return f"{asked}\t{task.verifier!r}\t{task.metadata.get('history')}"

    times = Counter(map(key, tasks))
    first: dict[str, str] = {}
    copies = {}
    for task in tasks:
        if times[known := key(task)] > 1:
            folder = task_directory(task)
            known += contents_sha256(folder, [folder]) if folder else ""
            if first.setdefault(known, task.task_id) != task.task_id:
                copies[task.task_id] = first[known]
    return copies


def cluster_problem(tasks: Sequence[HarborTask], key: str | None) -> str | None:
    """Why tasks cannot be clustered by this metadata key: none of them has it."""
    if key is None or not tasks or any(key in task.metadata for task in tasks):
        return None
    known = sorted({name for task in tasks for name in task.metadata})
    return f"no task has the metadata key {key!r}; keys: {', '.join(known) or 'none'}"


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
            try:
                problem = verifiers.adapted(plan.fn_name).problem(plan.params)
                problem = problem and f"params of verifier {plan.fn_name!r}: {problem}"
            except UnknownKind as exc:
                problem = str(exc)
            if problem and problem not in seen:
                seen.add(problem)
                found.append(f"{place}: task {task.task_id!r}: {problem}")
    return found


def _task(row: HarborTask | Columns | bytes, place: str) -> HarborTask:
    """The task in a row, or in a line of a file."""
    if isinstance(row, HarborTask):
        return row
    try:
        row = parse_object(row.removeprefix(BOM_UTF8)) if isinstance(row, bytes) else row
        task = from_dict(row)
    except DataError as exc:
        raise DataError(f"{place}: {exc}") from exc
    if not isinstance(task, HarborTask):
        raise DataError(f"{place}: this row is {detect_format(row)}; a task has `instruction` and `verifier`")
    return task


def _with_distinct_ids(tasks: list[HarborTask]) -> list[HarborTask]:
    """Tasks that share an id stay distinct: the second becomes `id#2`, the third `id#3`."""
    # All ids of the file first: a task further down may be called `a#2` by its author.
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


class BenchmarkLoader:
    """The benchmarks of one experiment. Each is read and parsed once, for all checks, arms and seeds."""

    def __init__(self, config: ExperimentConfig):
        self._source = source_of(config)
        self._parsed: dict[tuple[bool, str, str], Benchmark] = {}
        self._lock = threading.Lock()

    def get(self, entry: BenchmarkEntry) -> Benchmark:
        """The tasks that an entry means: its path, else its id or name in the workspace."""
        is_path = entry.path is not None
        ref = str(entry.path if is_path else entry.id or entry.name)
        with self._lock:  # arms that ask at the same time wait for one parse
            # The label belongs to the key, because a suite carries it as its name.
            if (is_path, ref, entry.label) not in self._parsed:
                folders, workspace = path_folders(self._source), Workspace.find(self._source.folder)
                path = _find_path(ref, folders) if is_path else workspace.pull_benchmark(ref)
                self._parsed[is_path, ref, entry.label] = Benchmark.load(path, name=entry.label)
            return self._parsed[is_path, ref, entry.label]


def find_benchmark(entry: BenchmarkEntry, config: ExperimentConfig) -> Benchmark:
    """The tasks that an entry means, read anew."""
    return BenchmarkLoader(config).get(entry)


def _find_path(path: str, folders: list[Path]) -> Path:
    for folder in folders:
        try:
            if (folder / path).exists():
                return folder / path
        except (OSError, ValueError):  # a name that no file can have
            break
    places = ", ".join(str(folder) for folder in dict.fromkeys(folders))
    beside: set[str] = set()
    with suppress(OSError, ValueError):
        parents = [(folder / path).parent for folder in folders]
        beside = {entry.name for parent in parents if parent.is_dir() for entry in parent.iterdir()}
    near = closest(Path(path).name, beside)
    hint = f"; closest: {Path(path).parent / near}" if near else ""
    raise DataError(f"no benchmark at {shorten(repr(path))}; looked in {places}{hint}")
