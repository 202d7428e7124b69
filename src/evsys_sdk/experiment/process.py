"""Stopping an experiment that another process runs.

In: where its record will be. Out: a signal to the process that has the experiment, and to no other, and whether it has
released it. The process then ends its runs as after Ctrl-C (`run/stop.py`): with valid records, to resume from.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path

from evsys_sdk.errors import EvsysError
from evsys_sdk.record.layout import held_by, is_held
from evsys_sdk.record.processes import ExperimentProcess, asked_to_stop, lock_of, note_stop, running_launch

STARTING_SECONDS = 5.0
"""A process may take so long between taking the experiment's lock and writing its launch record."""
POLL_SECONDS = 0.1


def ask_to_stop(record: Path, *, now: bool) -> ExperimentProcess | None:
    """Signal the process that has the experiment to stop after the current step, or with `now` immediately; None when
    no process has it. Asking twice for the same changes nothing."""
    lock, end = lock_of(record), time.monotonic() + STARTING_SECONDS
    while (launch := running_launch(record)) is None and is_held(lock) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    if not is_held(lock):
        return None
    holder = held_by(lock) or "another process"
    if launch is None:
        raise EvsysError(f"{holder} has {lock} and left no launch record; stop it there")
    name, process = launch.experiment, launch.process
    if not process.is_here:
        raise EvsysError(f"{name} runs in {holder}, on another machine; run evsys stop on that machine")
    if not process.is_alive:
        raise EvsysError(
            f"{holder} has ended, and something that it started still has {lock}; end that (fuser {lock} names it), "
            f"then evsys run resumes {name}"
        )
    if not launch.stoppable:
        raise EvsysError(
            f"{name} runs on a thread of a Python program ({holder}), which ignores signals; stop it there"
        )
    if asked_to_stop(launch, record) is None:
        process.send(signal.SIGTERM)
        with suppress(OSError):  # a full disk must not prevent a stop
            note_stop(launch, record)
    if now:
        process.send(signal.SIGINT)  # another signal than the first: two of one kind may arrive as one
    return launch


def wait_for_end(record: Path, seconds: float) -> bool:
    """Whether the process releases the experiment within this time."""
    end = time.monotonic() + seconds
    while is_held(lock_of(record)):
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_SECONDS)
    return True
