"""Append-only files of lines: written line by line, put in the order of their steps, read from their end.

In: lines, or a file that another process may be writing to. Out: a file that several threads and processes may append
to at once and that a `kill -9` cannot leave half a line in; or the last lines of a file of any size, and what follows.
"""

from __future__ import annotations

import codecs
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from evsys_sdk.errors import EvsysError
from evsys_sdk.files import make_folder, whole_file


def append_durably(path: Path, line: str) -> None:
    """Append one line (without its newline) to a file that is opened for it alone, so that it outlives the machine."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    with open(descriptor, "r+b") as file:
        size = os.fstat(descriptor).st_size
        # A kill may have cut the last line short: without a line end it would swallow this one.
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        file.write(b"\n" * torn + line.encode(errors="backslashreplace") + b"\n")
        file.flush()
        os.fsync(descriptor)


class LineFile:
    """One file, open for appending until `close`. Nothing is buffered: after `append` the line is in the kernel."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = threading.Lock()
        try:
            make_folder(self.path.parent)
            self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as exc:
            raise _cannot_write(self.path, exc) from exc
        self._torn = self._ends_in_mid_line()

    def _ends_in_mid_line(self) -> bool:
        # Only a full disk or a power cut leaves such a tail; the next line must not grow onto it.
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        return size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    @property
    def closed(self) -> bool:
        return self._descriptor is None

    def fileno(self) -> int:
        """The descriptor, for a caller that locks the file."""
        if self._descriptor is None:
            raise EvsysError(f"{self.path} is closed; nothing can be written to it any more")
        return self._descriptor

    def append(self, line: str) -> int:
        """Write one line (without its newline); return the byte offset of its end."""
        # A lone surrogate cannot be UTF-8; `\\udXXX` is its JSON escape, so the line stays valid and loses nothing.
        data = (line + "\n").encode("utf-8", "backslashreplace")
        with self._lock:
            descriptor = self.fileno()
            if self._torn:
                data = b"\n" + data
            try:
                # One write: with O_APPEND the kernel puts it at the end in one piece, beside other processes too.
                written = os.write(descriptor, data)
                end = os.lseek(descriptor, 0, os.SEEK_CUR)
            except OSError as exc:
                raise _cannot_write(self.path, exc) from exc
            self._torn = written != len(data)
        if self._torn:
            raise EvsysError(f"cannot write to {self.path}: only a part of the line fitted; is the disk full?")
        return end

    def read_lines(self, start: int, size: int) -> bytes:
        """Whole lines from byte `start` on: as many as fit into `size` bytes, or one that is longer."""
        with self._lock:
            data = os.pread(self.fileno(), size, start)
        end = data.rfind(b"\n") + 1
        while not end and len(data) == size:
            size *= 4
            with self._lock:
                data = os.pread(self.fileno(), size, start)
            end = data.find(b"\n") + 1
        return data[:end]

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def _cannot_write(path: Path, exc: OSError) -> EvsysError:
    return EvsysError(f"cannot write to {path}: {exc.strerror or exc}")


class StepOrder:
    """The order of rows that does not depend on the clock: by step, training before scores, scores by name.

    Scores are made beside the training and end whenever they are ready; a finished record has them in this order."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, bool, str]] = []
        self._reached = -1.0

    def note(self, step: float | None, name: str = "") -> None:
        """Another row; `name` says which score it is. One without a step was made after all before it: it stays."""
        if step is None:
            # Python's sort is stable: several rows without a step keep the order in which they came.
            self._keys.append((self._reached, True, ""))
        else:
            self._reached = max(self._reached, step)
            self._keys.append((step, False, name))

    def places(self) -> list[int]:
        """The rows as they should stand, by their place now."""
        return sorted(range(len(self._keys)), key=self._keys.__getitem__)

    def settle(self, path: Path, *, header: int = 0) -> None:
        """Put the lines of a finished file in order; a file with other lines than those noted is left as it is."""
        places = self.places()
        if places == list(range(len(places))):
            return
        *lines, rest = path.read_bytes().split(b"\n")
        # An earlier process wrote to it as well, or its last line is torn: which line is which row is not known.
        if rest or len(lines) != header + len(places):
            return
        with whole_file(path) as handle:
            handle.writelines(line + b"\n" for line in [*lines[:header], *(lines[header + at] for at in places)])


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
            # All reads together are then at most a third longer than the last one.
            window *= 4
    kept = found.split(b"\n")[-lines:] if found else []
    return [line.decode(errors="replace") for line in kept], end


def follow(path: Path, start: int, *, is_writing: Callable[[], bool], wait: Callable[[], None]) -> Iterator[str]:
    """What is written after `start`, as it comes, until the writer has gone."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a read may end amid a character
    with open(path, "rb") as handle:
        while True:
            over = not is_writing()  # asked before reading: what was written until then is read
            if os.fstat(handle.fileno()).st_size < start:
                start = 0  # the file was emptied
            handle.seek(start)
            while piece := handle.read(BLOCK):
                start += len(piece)
                yield decoder.decode(piece)
            if over:
                return
            wait()
