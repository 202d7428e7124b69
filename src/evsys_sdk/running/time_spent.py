"""How long the processes of an experiment were at work.

In: the experiment's line of the journal, and when the journal was last written to before this process came. Out: the
seconds of the processes before this one. Each process notes when it begins; it has worked until its last write, also
one that was killed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from evsys_sdk.record.index import stat_of
from evsys_sdk.record.journal import RunJournal

PROCESS = "process"


def last_written(journal: Path) -> float | None:
    """When somebody wrote to this journal last, by the file system's clock; None where there is none yet."""
    files = (stat_of(journal), stat_of(journal.with_name(f"{journal.name}-wal")))
    return max((found.st_mtime for found in files if found), default=None)


def seconds_until(line: RunJournal, moment: float | None) -> float:
    """What the processes of an experiment have taken together, the last of which was at work until `moment`."""
    known = _processes(line)
    if not known or moment is None:
        return 0.0
    return float(known[-1]["before"] + max(0.0, moment - known[-1]["began"]))


def seconds_before(line: RunJournal, written: float | None) -> float:
    """What the earlier processes took, the last of which wrote last when it is said; notes that another begins."""
    before = seconds_until(line, written)
    line.add(PROCESS, {"began": time.time(), "before": round(before, 3)}, at=0, key=str(len(_processes(line))))
    return before


def launched_at(line: RunJournal) -> float | None:
    """When the first process of an experiment began, as which it has been going on since."""
    return next((float(process["began"]) for process in _processes(line)), None)


def _processes(line: RunJournal) -> list[dict[str, Any]]:
    return [event.data for event in line.events(upto=0) if event.kind == PROCESS]
