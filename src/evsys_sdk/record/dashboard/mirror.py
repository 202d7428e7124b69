"""The dashboard's mirror on disk: one file per client session, and how much of it the server has acknowledged.

In: events. Out: `<log_dir>/<project or "local">/<session>.jsonl`, whose first line says for which server it is, and
`<session>.ack`, the byte offset up to which the server has everything. A session is owned through a kernel lock on
its file: it goes with the process, and the next client may then send what is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evsys_sdk import files
from evsys_sdk.errors import EvsysError
from evsys_sdk.format import visible
from evsys_sdk.logs import get_logger
from evsys_sdk.record.dashboard.wire import MAX_BATCH_BYTES, MAX_BATCH_LINES, LineFrame, WireEvent, WireLine
from evsys_sdk.record.lines import LineFile
from evsys_sdk.redaction import has_numeric_secrets, redact, secrets_known

LOCAL = "local"
"""Folder of sessions without a project; nothing sends those by itself."""
MAX_SEARCHED = 1000
"""Sets of metric names that a session remembers; more would be names that are made anew at each step."""


def project_folder(log_dir: str | Path, project_id: str | None) -> Path:
    """Where a project's sessions lie."""
    return Path(log_dir) / (re.sub(r"[^\w.-]", "_", project_id).lstrip(".") or LOCAL if project_id else LOCAL)


@dataclass(slots=True)
class Window:
    """A stretch of a session that goes out together."""

    lines: list[WireLine] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Byte offset behind each line."""
    end: int = 0
    """Byte offset behind the whole stretch, unreadable lines included."""


class MirrorSession:
    """One session file, held by this process until `close`."""

    def __init__(self, file: LineFile, acknowledged: int, *, secrets_searched: int = -1):
        self.path = file.path
        self._file = file
        self.acknowledged = acknowledged
        self.read_up_to = acknowledged
        """Byte offset behind the last window, which may still be on its way."""
        self._secrets_searched = secrets_searched
        """How many secrets were known when the first line was written, and so at least for every line; -1 for lines of
        another process."""
        self._searched: set[tuple[str | int, ...]] = set()
        """Texts of steps in which there was nothing to redact."""

    @classmethod
    def create(cls, folder: Path, target: Mapping[str, object]) -> MirrorSession:
        """A new session; `target` (api_url, project_id, offline) becomes its first line."""
        name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-{secrets.token_hex(4)}"
        file = LineFile(folder / f"{name}.jsonl")
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        # The header after the lock: a client that looks in between (`left_behind`) finds an empty file and passes it
        # over.
        start = file.append(files.to_json({"session": name, **target}))
        return cls(file, start, secrets_searched=secrets_known())

    @classmethod
    def claim(cls, path: Path, *, from_start: bool = False) -> MirrorSession | None:
        """Take over a session whose owner is gone; None when another process holds it."""
        with open(path, "rb") as handle:
            start = len(handle.readline())
        file = LineFile(path)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return cls(file, start if from_start else max(start, _read_offset(path)))

    def append(self, event: WireEvent) -> int:
        """Keep `event`; return the offset behind it."""
        return self._file.append(self._line(event))

    def _line(self, event: WireEvent) -> str:
        """The event as JSON without secrets."""
        if event.batch != "steps":
            return visible(redact(files.plain_json(event.to_dict())))
        # A step has text only in its path and in the names of its metrics. Once a search has found nothing in those,
        # steps with the same names are not searched: the search takes two thirds of a `log_step`. Secrets that the
        # process learns later make another key.
        texts = (event.path, secrets_known(), *event.body["metrics"])
        plain = files.plain_json(event.to_dict())
        if texts in self._searched:
            return plain
        line = visible(redact(plain))
        if line == plain and len(self._searched) < MAX_SEARCHED and not has_numeric_secrets():
            self._searched.add(texts)
        return line

    @property
    def is_searched(self) -> bool:
        """Whether every line was searched for all secrets that are known now."""
        return self._secrets_searched == secrets_known()

    @property
    def unsent_bytes(self) -> int:
        return max(0, self.path.stat().st_size - self.acknowledged)

    def unsent_lines(self) -> int:
        with open(self.path, "rb") as handle:
            handle.seek(self.acknowledged)
            return sum(1 for _ in handle)

    def read(self) -> Window:
        """The next lines that were not acknowledged, up to the size of a batch."""
        window = Window(end=self.acknowledged)
        frame = LineFrame()
        # One read, and not one for each 8 kB as a buffered file has it: after each the sender waits up to 5 ms for a
        # training loop that does not let go of the interpreter.
        lines = self._file.read_lines(self.acknowledged, MAX_BATCH_BYTES).split(b"\n")
        for line in lines[: min(MAX_BATCH_LINES, len(lines) - 1)]:
            window.end += len(line) + 1
            try:
                window.lines.append(WireLine.read(line, frame))
                window.ends.append(window.end)
            except (ValueError, KeyError, TypeError) as exc:
                if line.strip():
                    self.warn_unreadable(exc)
        self.read_up_to = window.end
        return window

    def warn_unreadable(self, why: object) -> None:
        get_logger(__name__).warning("skipped an unreadable line of %s: %s", self.path, why)

    def acknowledge(self, offset: int) -> None:
        """The server has everything up to `offset`."""
        if offset > self.acknowledged:
            self.acknowledged = offset
            # Memory first: if this cannot be written, the session continues, and only the next client sends something
            # twice. For the same reason there is no fsync, which takes longer than a batch. One write of as many bytes
            # as the one before: a kill leaves the old number or the new one, never a mixture.
            descriptor = os.open(self.path.with_suffix(".ack"), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, b"%020d" % offset, 0)
            finally:
                os.close(descriptor)

    def reject(self, line: WireLine, reason: str) -> None:
        """Note a line that the server will never take; the mirror itself keeps it too."""
        file = LineFile(self.path.with_suffix(".rejected"))
        file.append(redact(files.to_json({"reason": reason, **line.event().to_dict()})))
        file.close()

    def close(self) -> None:
        self._file.close()


def _read_offset(path: Path) -> int:
    try:
        return int(path.with_suffix(".ack").read_text())
    except (OSError, ValueError):
        return 0  # sending again is harmless, losing is not


def left_behind(folder: Path, target: Mapping[str, object]) -> Iterator[MirrorSession]:
    """Sessions for the same server that ended before everything was sent, claimed one by one."""
    for path in sorted(folder.glob("*.jsonl")):
        try:
            if path.stat().st_size > _read_offset(path) and _is_for(path, target):
                session = MirrorSession.claim(path)
                if session is not None:
                    yield session
        except (OSError, EvsysError) as exc:
            get_logger(__name__).warning("cannot look at mirror session %s: %s", path, exc)


def _is_for(path: Path, target: Mapping[str, object]) -> bool:
    with open(path, "rb") as handle:
        try:
            header = json.loads(handle.readline())
        except ValueError:
            return False
    return isinstance(header, dict) and all(header.get(key) == value for key, value in target.items())
