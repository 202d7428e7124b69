"""Matches regular expressions in a separate process, which can be killed where a match takes too long.

In: on stdin, one JSON line per question. Out: on stdout, one JSON line per answer. Run as a script, by the Python of
the process that asks, without evsys_sdk and without site-packages.
"""

from __future__ import annotations

import json
import re
import signal
import sys


def main() -> None:
    """Until stdin ends."""
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


if __name__ == "__main__":
    main()
