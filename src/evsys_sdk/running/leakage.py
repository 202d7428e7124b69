"""The leakage audit of a run: the rows it trains on against every benchmark that the experiment and the workspace know.

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

from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.config.source import source_of
from evsys_sdk.data.columns import fingerprint
from evsys_sdk.data.leakage import SAMPLE_ROWS, Audit, audit_rows, plain, spread
from evsys_sdk.data.rows import LoadedRows
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.errors import DataError, EvsysError
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import Row
from evsys_sdk.running.scoring import find_benchmark

if TYPE_CHECKING:
    from evsys_sdk.running.workbench import Workbench

CHECK_EVERY = 1_000
"""Rows between two looks at whether somebody wants to stop."""


def audit_block(bench: Workbench, place: str, loaded: LoadedRows) -> LoadedRows:
    """Audit the rows of one data block; they come back as they are."""
    config = bench.plan.experiment
    if config.leakage == "off":
        return loaded
    suites, unread = known_benchmarks(config)
    bench.record.warnings += [text for text in unread if text not in bench.record.warnings]
    audits = audits_of(loaded.rows, suites, check=bench.plan.stop.check, on_new=_say_at_once)
    bench.record.leakage += [{"place": place, **plain(audit)} for audit in audits]
    found = [audit for audit in audits if not audit.clean]
    bench.record.warnings += [f"leakage: {audit.text}{'' if place == 'data' else f', {place}'}" for audit in found]
    if found and config.leakage == "error":
        raise DataError(_refusal(place, found))
    return loaded


def _say_at_once(audit: Audit) -> None:
    """Once for all arms, and not only when everything has been trained."""
    if not audit.clean:
        get_logger(__name__).warning("leakage: %s", audit.text)


def _refusal(place: str, found: Sequence[Audit]) -> str:
    counts = ", ".join(f"{audit.tasks} of {audit.benchmark}" for audit in found)
    return (
        f"the rows of `{place}` hold tasks of benchmarks ({counts}) and `leakage: error` is set, so nothing was "
        "trained; take them out (`evsys data leakage ROWS BENCHMARK` lists them), or set `leakage: warn`"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A benchmark by the name that the audit tells."""

    name: str
    benchmark: Benchmark


def known_benchmarks(config: ExperimentConfig) -> tuple[list[Suite], list[str]]:
    """The experiment's benchmarks, then the newest versions of the workspace's others; and which cannot be read."""
    workspace = Workspace.find(source_of(config).folder)
    newest = {manifest.name: manifest for manifest in workspace.list("benchmark")}
    loaders: list[tuple[str, Callable[[], Benchmark]]] = [
        (f"{entry.role}/{entry.label}", partial(find_benchmark, entry, config)) for entry in config.metadata.benchmark
    ]
    loaders += [
        (f"{manifest.id} (workspace)", partial(Benchmark.load, workspace.path(manifest), name=manifest.name))
        for manifest in newest.values()
    ]
    suites: dict[str, Suite] = {}
    unread = []
    for name, load in loaders:
        try:
            benchmark = load()
        except EvsysError as exc:  # scoring says what that means for the scores
            unread.append(f"leakage: benchmark {name} cannot be read and was not compared with the rows: {exc}")
        else:
            suites.setdefault(benchmark.sha256, Suite(name=name, benchmark=benchmark))
    return list(suites.values()), unread


def audits_of(
    rows: Sequence[Row],
    suites: Sequence[Suite],
    *,
    check: Callable[[], None] = lambda: None,
    on_new: Callable[[Audit], None] = lambda audit: None,
) -> list[Audit]:
    """One audit per suite; what was compared before is not compared again. `check` raises when it is time to stop,
    `on_new` hears of audits that were not made before."""
    digest = _digest(rows) if suites else ""

    def made(suite: Suite) -> Audit:
        sample = spread(rows, SAMPLE_ROWS)
        audit = audit_rows(_watched(rows, check), suite.benchmark.tasks, benchmark=suite.name, sample=sample)
        on_new(audit)
        return audit

    return [_named(suite.name, _DONE.get((digest, suite.benchmark.sha256), partial(made, suite))) for suite in suites]


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
        self._made: OrderedDict[tuple[str, str], Future[Audit]] = OrderedDict()

    def get(self, key: tuple[str, str], make: Callable[[], Audit]) -> Audit:
        while True:
            with self._lock:
                future, mine = self._made.get(key), False
                if future is None:
                    future, mine = Future[Audit](), True
                    self._made[key] = future
                    while len(self._made) > self._size:
                        self._made.popitem(last=False)
            if mine:
                return self._make(key, future, make)
            if future.exception() is None:
                return future.result()

    def _make(self, key: tuple[str, str], future: Future[Audit], make: Callable[[], Audit]) -> Audit:
        try:
            made = make()
        except BaseException as exc:
            with self._lock:
                self._made.pop(key, None)
            future.set_exception(exc)  # whoever waits makes its own
            raise
        future.set_result(made)
        return made


_DONE = _Done()
