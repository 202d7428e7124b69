"""How far an experiment without a result has come.

In: its journal, which is only read. Out: a `RunProgress` per run that was begun. A journal that cannot be read, because
it is torn or being made this moment, tells nothing.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from evsys_sdk.errors import EvsysError
from evsys_sdk.record.journal import EXPERIMENT
from evsys_sdk.record.stored import StoredJournal

STATUS = """
SELECT data FROM events WHERE run = ? AND attempt = (SELECT max(attempt) FROM attempts WHERE run = ?)
AND kind = 'end' AND superseded = 0 ORDER BY id DESC LIMIT 1"""
REACHED = """
SELECT max(at) FROM events WHERE run = ? AND attempt = (SELECT max(attempt) FROM attempts WHERE run = ?)
AND superseded = 0 AND kind = 'step'"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """One run that was begun."""

    run: str
    status: str | None
    """None while it has not ended."""
    step: int
    """The last training step that the journal has."""


def progress_in(journal: Path) -> list[RunProgress]:
    """The runs of a journal, in the order they were begun."""
    try:
        with closing(StoredJournal(journal)) as opened:
            return [_progress(opened, run) for run in opened.runs() if run != EXPERIMENT]
    except (EvsysError, ValueError, KeyError):
        return []


def _progress(journal: StoredJournal, run: str) -> RunProgress:
    ended = journal.read(STATUS, (run, run))
    reached = journal.read(REACHED, (run, run))
    status = json.loads(ended[0][0]).get("status") if ended else None
    return RunProgress(run=run.partition("/")[2] or run, status=status, step=reached[0][0] or 0)
