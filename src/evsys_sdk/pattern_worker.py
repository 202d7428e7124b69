"""Matches regular expressions in a separate process, which can be killed where a match takes too long.

In: on stdin, one JSON line per question. Out: on stdout, one JSON line per answer. Run as a script, by the Python of
the process that asks, without evsys_sdk and without site-packages.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Until stdin ends."""
    with suppress(OSError):  # where a pipe cannot do it the alarm remains
        _end_with_the_asker()
    for line in sys.stdin:
        asked = json.loads(line)
        # By the kernel, whatever this process is doing: also when the process that asked was killed and cannot do it.
        signal.setitimer(signal.ITIMER_REAL, asked["seconds"])
        try:
            compiled = re.compile(asked["pattern"], asked["flags"])
            found = (compiled.fullmatch if asked["is_full"] else compiled.search)(asked["text"])
            answer: dict[str, object] = {"matches": found is not None}
        except (re.error, RecursionError, OverflowError, MemoryError) as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


def _end_with_the_asker() -> None:
    """Have the kernel end this process as soon as the other end of stderr, a pipe that is never read, is closed.

    A match cannot be interrupted by anything in Python, and PR_SET_PDEATHSIG would go by the thread that asked first.
    """
    pipe = sys.stderr.fileno()
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO, which ends a process
    watch = select.poll()
    watch.register(pipe, 0)
    if watch.poll(0):  # it was gone before
        raise SystemExit(1)


if __name__ == "__main__":
    main()
