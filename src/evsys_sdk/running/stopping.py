"""Stopping an experiment that another process runs.

In: where its record will be. Out: a signal to the process that has the experiment, and to no other, and whether it has
let go of it. The process then ends its runs as after Ctrl-C (`interrupts`): with valid records, to be taken up again.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path

from evsys_sdk.errors import EvsysError
from evsys_sdk.record.launch_record import Launch, asked_to_stop, lock_of, note_stop, running_launch
from evsys_sdk.record.run_dir import held_by, is_held

STARTING_SECONDS = 5.0
"""Between taking the experiment's lock and saying so beside its record a process may take so long."""
LOOK_SECONDS = 0.1


def ask_to_stop(record: Path, *, now: bool) -> Launch | None:
    """Signal the process that has the experiment: to stop after the step it is in, or with `now` where it stands; None
    when none has it. To ask again for what was asked for before changes nothing."""
    launch = _launch(record)
    if not is_held(lock_of(record)):
        return None
    if launch is None:
        raise EvsysError(f"{_holder(record)} has {lock_of(record)} and left no launch record; stop it there")
    _refuse(launch, record)
    if asked_to_stop(launch, record) is None:
        launch.process.send(signal.SIGTERM)
        with suppress(OSError):  # a disk that takes no more keeps nobody from stopping
            note_stop(launch, record)
    if now:
        launch.process.send(signal.SIGINT)  # another signal than the first: two of one kind may arrive as one
    return launch


def wait_for_end(record: Path, seconds: float) -> bool:
    """Whether the experiment is let go of within this time."""
    end = time.monotonic() + seconds
    while is_held(lock_of(record)):
        if time.monotonic() >= end:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def _launch(record: Path) -> Launch | None:
    """What the process that has the experiment says of itself; one that is just starting is given a moment."""
    end = time.monotonic() + STARTING_SECONDS
    while (launch := running_launch(record)) is None and is_held(lock_of(record)) and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
    return launch


def _refuse(launch: Launch, record: Path) -> None:
    """EvsysError where no signal may be sent, or none would do."""
    holder, name = _holder(record), launch.experiment
    if not launch.process.is_here:
        raise EvsysError(f"{name} runs in {holder}, on another machine; evsys stop works on its own: go there")
    if not launch.process.is_alive:
        raise EvsysError(
            f"{holder} has ended, and something that it started still has {lock_of(record)}; end that "
            f"(fuser {lock_of(record)} names it), and evsys run goes on with {name}"
        )
    if not launch.stoppable:
        raise EvsysError(
            f"{name} runs on a thread of a Python program ({holder}), which heeds no signal; stop it there"
        )


def _holder(record: Path) -> str:
    return held_by(lock_of(record)) or "another process"
