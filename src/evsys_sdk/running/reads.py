"""Which settings were read, through kills: what one process read, the next need not read again.

In: the settings that this process has read so far. Out: notes in the journal, each written before the event that could
let a later process do without reading them; and the settings that processes before this one read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.config.reading import read, unread
from evsys_sdk.protocols import RunContext, RunResult
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.journal import ROLLOUT, RunJournal

READ = "read"
"""The kind of event that says which settings were read."""
OF_ARMS = ("run", "runs")
"""Settings of the config that are the arms' own."""


class ReadNotes:
    """Writes down what has been read since the last time. As a callback, at the end of every run."""

    def __init__(self, journal: RunJournal, so_far: Callable[[], Iterable[str]]):
        self._journal, self._so_far = journal, so_far
        self._told: set[str] = set()

    def take(self) -> None:
        new = sorted(set(self._so_far()) - self._told)
        if new:
            self._told.update(new)
            data = {"settings": new}
            self._journal.add(READ, data, at=0, key=config_hash(data))

    def on_run_end(self, ctx: RunContext, result: RunResult) -> None:
        self.take()


class NotingJournal(RunJournal):
    """An attempt's journal that before each event notes what was read until then."""

    def __init__(self, attempt: RunJournal, notes: Sequence[ReadNotes]):
        super().__init__(attempt.journal, attempt.run, attempt.attempt)
        self._notes = notes

    def add(self, kind: str, data: dict[str, Any], *, at: int, key: str = "") -> None:
        for notes in self._notes if kind != ROLLOUT else ():  # there are thousands of those
            notes.take()
        super().add(kind, data, at=at, key=key)


def shared_reads(config: ExperimentConfig) -> Iterator[str]:
    """What was read of an experiment's settings, but for those of its arms."""
    return read(config, but=OF_ARMS)


def shared_unread(config: ExperimentConfig) -> Iterator[str]:
    """What was not, likewise."""
    return (path for path in unread(config) if path.partition(".")[0].partition("[")[0] not in OF_ARMS)


def read_before(journal: RunJournal) -> set[str]:
    """The settings that the journal says were read."""
    events = journal.events(upto=0)
    return {path for event in events if event.kind == READ for path in event.data["settings"]}
