"""Where runs of a Ray cluster are carried out: a process, one run at a time, its backend warm for the next.

In: orders, from the launcher. Out: results; in between, calls that the launcher takes to the experiment's own process.
The methods run on threads of the actor: `run` on one, the others beside it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping

from evsys_sdk import __version__
from evsys_sdk.errors import EvsysError
from evsys_sdk.logs import configure_logger
from evsys_sdk.running.distant import Order, work
from evsys_sdk.running.errands import Answer, Call, Line, sendable
from evsys_sdk.running.interrupts import StopFlag

THREADS = 4
"""A run, the wait for its calls, an answer, a signal."""
LOOK_SECONDS = 1.0


class RayWorker:
    """An actor; `ray_launcher` makes it one."""

    def __init__(self, environment: Mapping[str, str]):
        os.environ.update(environment)
        configure_logger()
        threading.Thread(target=_end_with, args=(os.getppid(),), name="evsys-parent", daemon=True).start()
        self._line, self._stop = Line(), StopFlag()

    def ready(self, folder: str, version: str) -> None:
        """Go to the folder in which the experiment was started, as the same SDK."""
        if version != __version__:
            raise EvsysError(f"{self._where()} has evsys-sdk {__version__}, and the experiment is run by {version}")
        try:
            os.chdir(folder)
        except OSError as exc:
            raise EvsysError(
                f"{self._where()} cannot go to {folder}: {exc.strerror}. Runs on other machines need the project on a "
                "disk that all of them share"
            ) from exc

    def run(self, order: Order) -> Answer:
        self._stop = StopFlag()
        try:
            return Answer(value=work(order, self._line, self._stop, where=self._where()))
        except Exception as exc:
            return Answer(error=sendable(exc))

    def calls(self, seconds: float) -> list[Call]:
        return self._line.calls(seconds)

    def answer(self, number: int, answer: Answer) -> None:
        self._line.answer(number, answer)

    def stop(self) -> None:
        self._stop.set()

    def interrupt(self) -> None:
        self._stop.interrupt()

    def _where(self) -> str:
        return f"Ray worker {os.getpid()} on {socket.gethostname()}"


def _end_with(parent: int) -> None:
    """End this process with the one that started it, the raylet: without that it reaches nobody, and would keep its run
    directory locked. Ray itself waits for the run to end, or takes a raylet that nobody has buried for a living one."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)
