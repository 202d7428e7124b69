"""The leakage audit of a run: the rows it trains on against every benchmark that the experiment and the workspace know,
and against the rows of its own `eval.eval_data`.

In: a run's data blocks, loaded and transformed. Out: the audits in the run's record, a warning for each benchmark that
was found in the rows, and under `leakage: error` an error before anything is trained. The same rows and the same
benchmark are compared once in a process, however many arms and seeds train on them.
"""

from __future__ import annotations

import hashlib
import marshal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from evsys_sdk.config.models import DataConfig, ExperimentConfig
from evsys_sdk.config.project import search_folders
from evsys_sdk.config.source import source_of
from evsys_sdk.data.columns import fingerprint
from evsys_sdk.data.leakage import SAMPLE_ROWS, Audit, Suite, audit_suites, plain, spread
from evsys_sdk.data.rows import LoadedRows, load_rows
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.errors import DataError, EvsysError, blame
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.eval.row_eval import question_of
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import DataStore, Row
from evsys_sdk.running.scoring import find_benchmark

if TYPE_CHECKING:
    from evsys_sdk.running.workbench import Workbench

CHECK_EVERY = 1_000
"""Rows between two looks at whether somebody wants to stop."""
EVAL_DATA = "eval.eval_data"
Key = tuple[str, str]
"""Hashes of the rows and of the tasks."""
_TOLD = 3
"""Leaks that an error names."""


def audit_block(bench: Workbench, place: str, loaded: LoadedRows) -> LoadedRows:
    """Audit the rows of one data block; they come back as they are."""
    config = bench.plan.experiment
    if config.leakage == "off":
        return loaded
    suites, unread = known_benchmarks(config)
    own, why = _own_eval(bench)
    bench.record.warnings += [text for text in (*unread, *why) if text not in bench.record.warnings]
    audits = audits_of(loaded.rows, [*suites, *own], check=bench.plan.stop.check, on_new=_say_at_once)
    bench.record.leakage += [{"place": place, **plain(audit)} for audit in audits]
    found = [audit for audit in audits if not audit.clean]
    bench.record.warnings += [f"leakage: {audit.text}{'' if place == 'data' else f', {place}'}" for audit in found]
    if found and config.leakage == "error":
        raise DataError(refusal(place, found))
    return loaded


def _say_at_once(audit: Audit) -> None:
    """Once for all arms, and not only when everything has been trained."""
    if not audit.clean:
        get_logger(__name__).warning("leakage: %s", audit.text)


def refusal(place: str, found: Sequence[Audit]) -> str:
    """What is wrong with the rows, the first few by row and place, and what can be done."""
    counts = ", ".join(f"{audit.tasks} of {audit.benchmark}" for audit in found)
    first = "; ".join(leak.text for audit in found for leak in audit.leaks[:_TOLD])
    more = sum(audit.tasks - len(audit.leaks[:_TOLD]) for audit in found)
    return (
        f"the rows of `{place}` hold tasks of benchmarks ({counts}) and `leakage: error` is set, so nothing was "
        f"trained: {first}{f'; and {more} more' if more else ''}; take them out "
        "(`evsys data leakage ROWS BENCHMARK` lists them), or set `leakage: warn`"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A benchmark that rows are compared with."""

    suite: Suite
    sha256: str


class _LastAsked:
    """The benchmarks of the experiments that were asked for last: all runs of one ask for the same."""

    def __init__(self, size: int = 4) -> None:
        self._size, self._lock = size, threading.Lock()
        self._kept: OrderedDict[int, tuple[ExperimentConfig, tuple[list[Known], list[str]]]] = OrderedDict()

    def get(self, config: ExperimentConfig) -> tuple[list[Known], list[str]]:
        with self._lock:
            if id(config) not in self._kept:  # with the config itself kept, nothing else can have its id
                self._kept[id(config)] = config, read_benchmarks(config)
                while len(self._kept) > self._size:
                    self._kept.popitem(last=False)
            return self._kept[id(config)][1]

    def forget(self, config: ExperimentConfig) -> None:
        with self._lock:
            self._kept.pop(id(config), None)


def forget_benchmarks(config: ExperimentConfig) -> None:
    """Their files may have changed since this experiment was run the last time."""
    _BENCHMARKS.forget(config)


def known_benchmarks(config: ExperimentConfig) -> tuple[list[Known], list[str]]:
    """The experiment's benchmarks, then the newest versions of the workspace's others; and which cannot be read."""
    return _BENCHMARKS.get(config)


def read_benchmarks(config: ExperimentConfig) -> tuple[list[Known], list[str]]:
    workspace = Workspace.find(source_of(config).folder)
    newest = {manifest.name: manifest for manifest in workspace.list("benchmark")}
    loaders: list[tuple[str, Callable[[], Benchmark]]] = [
        (f"{entry.role}/{entry.label}", partial(find_benchmark, entry, config)) for entry in config.metadata.benchmark
    ]
    loaders += [
        (f"{manifest.id} (workspace)", partial(Benchmark.load, workspace.path(manifest), name=manifest.name))
        for manifest in newest.values()
    ]
    suites: dict[str, Known] = {}
    unread = []
    for name, load in loaders:
        try:
            benchmark = load()
        except EvsysError as exc:  # scoring says what that means for the scores
            unread.append(f"leakage: benchmark {name} cannot be read and was not compared with the rows: {exc}")
        else:
            suite = Suite(name=name, tasks=benchmark.tasks, places=benchmark.places)
            suites.setdefault(benchmark.sha256, Known(suite=suite, sha256=benchmark.sha256))
    return list(suites.values()), unread


def _own_eval(bench: Workbench) -> tuple[list[Known], list[str]]:
    """The rows that the run's `eval` block will ask, and why they cannot be compared."""
    evaluation, ctx = bench.plan.run.eval, bench.ctx
    if not evaluation.enabled or not evaluation.metrics or evaluation.eval_data is None or ctx is None:
        return [], []
    try:
        return [eval_suite(evaluation.eval_data, bench.plan.experiment, ctx.data_store)], []
    except EvsysError as exc:
        return [], [f"leakage: {EVAL_DATA} cannot be read and was not compared with the rows: {exc}"]


def eval_suite(data: DataConfig, config: ExperimentConfig, store: DataStore) -> Known:
    """The questions of `eval.eval_data` as a benchmark."""
    source = source_of(config)
    loaded = load_rows(data, store=store, folders=search_folders(source), workspace=Workspace.find(source.folder))
    with blame(DataError, f"reading the questions of {EVAL_DATA}"):
        tasks = [_as_task(row, index) for index, row in enumerate(loaded.rows)]
    places = [f"{loaded.source}, row {index}" for index in range(len(tasks))]
    return Known(suite=Suite(name=EVAL_DATA, tasks=tasks, places=places), sha256=f"{EVAL_DATA} {_digest(loaded.rows)}")


def _as_task(row: Row, index: int) -> HarborTask:
    asked = question_of(row, index)
    messages = [{"role": "user", "content": asked.prompt}] if isinstance(asked.prompt, str) else asked.prompt
    verifier = InProcessVerifier(fn_name="", expected=asked.target)
    content, before = messages[-1].get("content") or "", messages[:-1]
    return HarborTask(task_id=asked.id, instruction=content, verifier=verifier, metadata={"history": before})


def audits_of(
    rows: Sequence[Row],
    known: Sequence[Known],
    *,
    check: Callable[[], None] = lambda: None,
    on_new: Callable[[Audit], None] = lambda audit: None,
) -> list[Audit]:
    """One audit per benchmark; what was compared before is not compared again. `check` raises when it is time to stop,
    `on_new` hears of audits that were not made before."""
    digest = _digest(rows) if known else ""
    by_key = {(digest, one.sha256): one for one in known}

    def made(keys: Sequence[Key]) -> list[Audit]:
        suites = [by_key[key].suite for key in keys]
        audits = audit_suites(_watched(rows, check), suites, sample=spread(rows, SAMPLE_ROWS))
        for audit in audits:
            on_new(audit)
        return audits

    audits = _DONE.get(list(by_key), made)
    return [_named(one.suite.name, audit) for one, audit in zip(by_key.values(), audits, strict=True)]


def _named(name: str, audit: Audit) -> Audit:
    """The audit of the same tasks, by what they are called here."""
    return replace(audit, benchmark=name, leaks=tuple(replace(leak, benchmark=name) for leak in audit.leaks))


def _watched(rows: Sequence[Row], check: Callable[[], None]) -> Iterator[Row]:
    for number, row in enumerate(rows):
        if number % CHECK_EVERY == 0:
            check()
        yield row


def _digest(rows: Sequence[Row]) -> str:
    """sha256 of the rows themselves: transforms, also a project's own, decide what is in them."""
    digest = hashlib.sha256()
    for row in rows:
        try:
            digest.update(marshal.dumps(row, 2))  # version 2 of the format depends on content alone
        except ValueError:  # something that is not plain data
            digest.update(fingerprint(row))
    return digest.hexdigest()


class _Done:
    """The audits of this process; whoever asks for one that is being made waits for it."""

    def __init__(self, size: int = 256) -> None:
        self._size, self._lock = size, threading.Lock()
        self._made: OrderedDict[Key, Future[Audit]] = OrderedDict()

    def get(self, keys: Sequence[Key], make: Callable[[Sequence[Key]], list[Audit]]) -> list[Audit]:
        """An audit for each key; `make` makes those that nobody has made."""
        while True:
            with self._lock:
                mine = {key: Future[Audit]() for key in keys if key not in self._made}
                self._made.update(mine)
                futures = [self._made[key] for key in keys]
                while len(self._made) > max(self._size, len(keys)):
                    self._made.popitem(last=False)
            if mine:
                self._make(mine, make)
            if all(future.exception() is None for future in futures):
                return [future.result() for future in futures]

    def _make(self, mine: dict[Key, Future[Audit]], make: Callable[[Sequence[Key]], list[Audit]]) -> None:
        try:
            audits = make(list(mine))
        except BaseException as exc:
            with self._lock:
                for key in mine:
                    self._made.pop(key, None)
            for future in mine.values():
                future.set_exception(exc)  # whoever waits makes its own
            raise
        for future, audit in zip(mine.values(), audits, strict=True):
            future.set_result(audit)


_DONE = _Done()
_BENCHMARKS = _LastAsked()
