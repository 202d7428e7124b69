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


def main() -> None:
    """Until stdin ends."""
    fcntl.fcntl(sys.stdin, fcntl.F_SETOWN, os.getpid())
    for line in sys.stdin:
        asked = json.loads(line)
        # Both by the kernel, whatever this process is doing: also when the process that asked was killed and cannot.
        end_with_stdin(True)
        signal.setitimer(signal.ITIMER_REAL, asked["seconds"])
        try:
            compiled = re.compile(asked["pattern"], asked["flags"])
            found = (compiled.fullmatch if asked["is_full"] else compiled.search)(asked["text"])
            answer: dict[str, object] = {"matches": found is not None}
        except (re.error, RecursionError, OverflowError, MemoryError) as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        end_with_stdin(False)
        print(json.dumps(answer), flush=True)


def end_with_stdin(is_on: bool) -> None:
    """Let SIGIO, which ends a process, come when stdin does: its writer has gone. A further question would bring it
    too, but none is asked before the answer to this one."""
    flags = fcntl.fcntl(sys.stdin, fcntl.F_GETFL)
    fcntl.fcntl(sys.stdin, fcntl.F_SETFL, flags | os.O_ASYNC if is_on else flags & ~os.O_ASYNC)
    if is_on:
        poll = select.poll()
        poll.register(sys.stdin, 0)
        if poll.poll(0):  # it had gone before
            sys.exit()


if __name__ == "__main__":
    main()
