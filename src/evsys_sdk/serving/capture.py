"""What each session made the model read and write, token by token.

In: turns as the endpoint samples them, under the session key that the caller sent. Out: `take(session)`, the turns to
train on. A failure of the sampler is kept too: the harness may swallow it and go on, and what it then does says
nothing about the model.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from evsys_sdk.protocols import Turn


@dataclass(slots=True)
class _Session:
    turns: list[Turn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Capture:
    """Turns by session. Whoever gives out a session key takes its turns, or they stay in memory."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()  # the endpoint may run on a thread of its own

    def add(self, session: str, turn: Turn) -> None:
        with self._lock:
            self._sessions.setdefault(session, _Session()).turns.append(turn)

    def add_error(self, session: str, error: str) -> None:
        with self._lock:
            self._sessions.setdefault(session, _Session()).errors.append(error)

    def errors(self, session: str) -> list[str]:
        """Why the model could not answer this session, each time it could not; to be asked before `take`."""
        with self._lock:
            found = self._sessions.get(session)
            return list(found.errors) if found else []

    def take(self, session: str) -> list[Turn]:
        """The session's turns, in order, with the exact tokens and logprobs; the session is forgotten."""
        with self._lock:
            found = self._sessions.pop(session, None)
        return found.turns if found else []

    def sessions(self) -> list[str]:
        """Keys of the sessions that nobody has taken yet."""
        with self._lock:
            return list(self._sessions)
