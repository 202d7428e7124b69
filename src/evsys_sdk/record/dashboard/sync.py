"""Mirrors replayed into a server: the backup, and the way to another one.

In: a mirror's folder, and a server (address, key, project). Out: per session what became of it. Records are keyed by
their ids, so that sending them again changes nothing; sessions of other servers and of offline runs are sent as well.
A session that its owner is still writing to is left for the owner.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evsys_sdk.errors import DashboardClientError, EvsysError
from evsys_sdk.files import write_json
from evsys_sdk.record.dashboard.mirror import MirrorSession
from evsys_sdk.record.dashboard.sender import Transport, Unreachable, send_group
from evsys_sdk.record.dashboard.wire import batched

SyncState = Literal["sent", "unchanged", "rejected", "busy", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncedSession:
    """What became of one session."""

    path: Path
    state: SyncState
    """`unchanged`: this server had all of it from an earlier sync, and nothing was sent. `busy`: its owner is still
    writing, and sends it."""
    records: int = 0
    rejected: int = 0
    """Records that the server will never take; `<session>.rejected` has them with the reasons."""
    why: str = ""

    @property
    def is_complete(self) -> bool:
        return self.state in ("sent", "unchanged", "busy")


def find_sessions(folder: Path) -> list[Path]:
    """Every session below a mirror's folder, or in it, oldest first."""
    return sorted({*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")}, key=lambda path: (path.name, path))


def sync_sessions(
    sessions: Sequence[Path], transport: Transport, *, project_id: str, anew: bool
) -> Iterator[SyncedSession]:
    """Send each session, one after the other; ends early where the server refuses the key or is away.

    `anew` also sends what this server has taken in an earlier sync: for a server that lost its database."""
    for path in sessions:
        found = sync_session(path, transport, project_id=project_id, anew=anew)
        yield found
        if found.state == "failed":
            return


def sync_session(path: Path, transport: Transport, *, project_id: str, anew: bool) -> SyncedSession:
    """Send one session from its beginning, or from where the last sync to the same server ended."""
    try:
        session = MirrorSession.claim(path, from_start=True)
    except (OSError, EvsysError) as exc:
        return SyncedSession(path=path, state="rejected", why=f"cannot be read: {exc}")
    if session is None:
        return SyncedSession(path=path, state="busy", why="its owner is still writing to it, and sends it")
    try:
        marks = SyncMarks(path)
        target = f"{transport.api_url} {project_id}"
        # In memory only: `.ack` is how far the session's own server has it, which this may not be.
        session.acknowledged = max(session.acknowledged, 0 if anew else marks.read(target))
        sent = rejected = 0
        while True:
            window = session.read()
            if window.end == session.acknowledged:
                break
            for group in batched(window.lines):
                rejected += len(send_group(transport, session, group))
                sent += len(group)
            session.acknowledged = window.end
            marks.write(target, window.end)
        state: SyncState = "rejected" if rejected else "sent" if sent else "unchanged"
        return SyncedSession(path=path, state=state, records=sent - rejected, rejected=rejected)
    except Unreachable as exc:
        return SyncedSession(path=path, state="failed", why=f"the server is out of reach: {exc}")
    except DashboardClientError as exc:
        return SyncedSession(path=path, state="failed", why=str(exc))
    finally:
        session.close()


class SyncMarks:
    """How far each server has a session, beside it in `<session>.synced`."""

    def __init__(self, session: Path):
        self.path = session.with_suffix(".synced")

    def read(self, target: str) -> int:
        offset = self._all().get(target)
        return offset if isinstance(offset, int) and offset > 0 else 0

    def write(self, target: str, offset: int) -> None:
        write_json(self.path, {**self._all(), target: offset})

    def _all(self) -> dict[str, object]:
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}  # sending again is harmless, losing is not
        return found if isinstance(found, dict) else {}
