"""The end of a log, however long the log is.

In: a file that another process may be writing to. Out: its last lines, and what comes after them. Of a file of any size
only the end is read.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator
from pathlib import Path

BLOCK = 1 << 16
LONGEST = 1 << 26
"""Bytes that the last lines may take; what is before is cut off, so that a file without line ends is no trap."""


def last_lines(path: Path, lines: int) -> tuple[list[str], int]:
    """The last lines of a file, and the place in it where they end."""
    with open(path, "rb") as handle:
        end, window = handle.seek(0, os.SEEK_END), BLOCK
        while True:
            start = max(0, end - window)
            handle.seek(start)
            found = handle.read(end - start).removesuffix(b"\n")
            if start == 0 or window >= LONGEST or found.count(b"\n") >= lines:
                break
            window *= 4
    kept = found.split(b"\n")[-lines:] if found else []
    return [line.decode(errors="replace") for line in kept], end


def follow(path: Path, start: int, *, goes_on: Callable[[], bool], wait: Callable[[], None]) -> Iterator[str]:
    """What is written after `start`, as it comes, until the writer has gone."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a read may end amid a character
    with open(path, "rb") as handle:
        while True:
            over = not goes_on()  # asked before reading: what was written until then is read
            if os.fstat(handle.fileno()).st_size < start:
                start = 0  # somebody emptied the file
            handle.seek(start)
            while piece := handle.read(BLOCK):
                start += len(piece)
                yield decoder.decode(piece)
            if over:
                return
            wait()
