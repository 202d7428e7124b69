"""Append-only files of JSON lines: a line is one write, so it is there whole or not at all.

In: records. Out: a file that several threads (and processes) may append to at once and that a `kill -9`
cannot leave half a line in. Nothing is buffered: after `append` the line is the kernel's to keep. Scores come in beside
the training, whenever they are ready; when a run has ended, `StepOrder` puts them where they belong.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from evsys_sdk.atomic import make_folder, whole_file
from evsys_sdk.errors import EvsysError


class LineFile:
    """One file, open for appending until `close`."""

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
        """The descriptor, for whoever wants to lock the file."""
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
                written = os.write(descriptor, data)
                end = os.lseek(descriptor, 0, os.SEEK_CUR)
            except OSError as exc:
                raise _cannot_write(self.path, exc) from exc
            self._torn = written != len(data)
        if self._torn:
            raise EvsysError(f"cannot write to {self.path}: only a part of the line fitted; is the disk full?")
        return end

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def _cannot_write(path: Path, exc: OSError) -> EvsysError:
    return EvsysError(f"cannot write to {path}: {exc.strerror or exc}")


class StepOrder:
    """The order of rows that does not depend on the clock: by step, training before scores, scores by name."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, bool, str]] = []
        self._reached = -1.0

    def note(self, step: float | None, name: str = "") -> None:
        """Another row; `name` says which score it is. One without a step was made after all before it: it stays."""
        if step is None:
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
        if rest or len(lines) != header + len(places):
            return
        with whole_file(path) as handle:
            handle.writelines(line + b"\n" for line in [*lines[:header], *(lines[header + at] for at in places)])
