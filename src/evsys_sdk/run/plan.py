"""The plan of one run, and what all runs of an experiment share: parsed inputs, extensions, notes of read settings.

In: a config. Out: `RunPlan`s; extensions that are built with their places in the config, so that unread settings and
bad params can be named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from evsys_sdk.config.base import KindSpec
from evsys_sdk.config.reading import note_read, read, settings_of, track_reads, unread
from evsys_sdk.config.schema import ExperimentConfig, RunConfig
from evsys_sdk.contamination.audit import KnownBenchmark, read_benchmarks
from evsys_sdk.data.rows import RowCache
from evsys_sdk.errors import ConfigError, EvsysError, error_boundary
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.protocols import RunContext, RunResult, RunStatus
from evsys_sdk.record.callbacks import CallbackList
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.journal import ROLLOUT, Journal, RunJournal
from evsys_sdk.registry import Registry, check_params
from evsys_sdk.run.budget import Budget
from evsys_sdk.run.stop import StopFlag


@dataclass(slots=True)
class ExtensionFactory:
    """Builds the extensions that a run names by `{kind, params}`, and knows which of their settings were read."""

    settings: list[tuple[str, BaseModel]] = field(default_factory=list)
    """Place of the block -> the settings object its extension keeps."""

    def build(self, registry: Registry, spec: KindSpec, place: str, params: dict[str, object] | None = None) -> Any:
        """An instance of what `spec` names; `params` replaces the spec's own where we had to complete them."""
        params = dict(spec.params) if params is None else params
        target = registry.get(spec.kind)
        problems = check_params(target, params)
        if problems:
            raise ConfigError(f"{place} ({registry.kind} {spec.kind!r})", problems)
        with error_boundary(EvsysError, f"building {registry.kind} {spec.kind!r}"):
            instance = track_reads(target)(**params)
        kept = settings_of(instance)
        if kept is not None:
            self.settings.append((place, kept))
        return instance

    def unread(self) -> Iterator[str]:
        """Places of params that were given and that no extension built for that place has read."""
        of_place: dict[str, list[set[str]]] = {}
        for place, kept in self.settings:
            of_place.setdefault(place, []).append(set(unread(kept)))
        for place, found in of_place.items():
            yield from (f"{place}.params.{path}" for path in sorted(set.intersection(*found)))

    def read(self) -> Iterator[str]:
        """Places of params that were given and that an extension has read."""
        for place, kept in list(self.settings):
            yield from (f"{place}.params.{path}" for path in read(kept))

    def note_read(self, places: Collection[str]) -> None:
        """Note that these, as `read` names them, were read by another process."""
        for place, kept in self.settings:
            within = f"{place}.params."
            note_read(kept, {path.removeprefix(within) for path in places if path.startswith(within)})


# A resumed process may skip the work in which the process before it read a setting. So the journal notes what was read,
# each note before the event that lets a later process skip that work.
READ = "read"
"""The kind of event that says which settings were read."""


class ReadNotes:
    """Writes down what has been read since the last time. As a callback, at the end of every run."""

    def __init__(self, journal: RunJournal, so_far: Callable[[], Iterable[str]]):
        self._journal, self._so_far = journal, so_far
        self._noted: set[str] = set()

    def take(self) -> None:
        new = sorted(set(self._so_far()) - self._noted)
        if new:
            self._noted.update(new)
            data = {"settings": new}
            self._journal.add(READ, data, at=0, key=config_hash(data))

    def on_run_end(self, ctx: RunContext, result: RunResult) -> None:
        self.take()


class NotingJournal(RunJournal):
    """An attempt's journal that before each event notes what was read until then."""

    def __init__(self, attempt: RunJournal, notes: ReadNotes):
        super().__init__(attempt.journal, attempt.run, attempt.attempt)
        self._notes = notes

    def add(self, kind: str, data: dict[str, object], *, at: int, key: str = "") -> None:
        if kind != ROLLOUT:  # there are thousands of those
            self._notes.take()
        super().add(kind, data, at=at, key=key)


def read_before(journal: RunJournal) -> set[str]:
    """The settings that the journal says were read."""
    events = journal.events(upto=0)
    return {path for event in events if event.kind == READ for path in event.data["settings"]}


class ExperimentInputs:
    """What all runs of an experiment read, parsed once."""

    def __init__(self, config: ExperimentConfig):
        self.benchmarks = BenchmarkLoader(config)
        # For a single run, parsing straight into its transforms is quicker and takes less memory.
        self.rows = RowCache() if config.run is None or config.n_repeats > 1 else None
        self._lock = threading.Lock()
        self._audited: tuple[list[KnownBenchmark], list[str]] | None = None

    def audited_benchmarks(self, config: ExperimentConfig) -> tuple[list[KnownBenchmark], list[str]]:
        """The benchmarks that training rows are compared with, and why others cannot be read."""
        with self._lock:
            if self._audited is None:
                self._audited = read_benchmarks(config, self.benchmarks)
            return self._audited


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One run as the experiment wants it."""

    experiment: ExperimentConfig
    run: RunConfig
    index: int
    """Which arm of the experiment this is; for places in messages."""
    run_dir: Path
    callbacks: CallbackList
    stop: StopFlag
    journal: Journal
    inputs: ExperimentInputs
    fresh: bool = False
    """Start over even where an interrupted attempt could resume."""
    max_steps: int | None = None
    max_tasks: int | None = None
    budget: Budget = field(default_factory=Budget)
    contents: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the rows, tasks and code that the settings name."""
    ignored: tuple[str, ...] = ()
    """Settings that by the meaning of others are not looked at; they go into the record."""
    pause_at: int | None = None
    """Stop after this step, to resume another time; it is no part of the run's identity."""

    @property
    def run_id(self) -> str:
        return f"{self.experiment.name}/{self.run.name}"

    def failed_result(self, status: RunStatus, error: str) -> RunResult:
        """The result of a run that left no record."""
        name, seed = self.run.name, self.run.seed
        return RunResult(run_id=self.run_id, status=status, error=error, run_name=name, seed=seed)
