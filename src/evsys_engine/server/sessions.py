"""Sessions and what belongs to them: models in training and sets of weights to sample from.

In: ids. Out: the records behind them, or `NotFound`/`Gone` that say what to do. A session nobody has heard of for a
while is over, and with it everything it held.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evsys_engine.server.lanes import Lane
from evsys_engine.types import Adapter, BadRequest, LoraSettings

REMEMBERED = 1000
"""Sessions that are over and still known as such."""


class NotFound(BadRequest):
    """No such thing here; 404."""


class Gone(BadRequest):
    """It was here once; 410."""


@dataclass(slots=True, eq=False)
class Model:
    """An adapter in training."""

    model_id: str
    session: Session
    settings: LoraSettings
    adapter: Adapter
    lane: Lane
    user_metadata: dict[str, Any] | None = None
    used_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampling:
    """Weights that a client samples from."""

    sampler_id: str
    session: Session
    folder: Path | None
    """None is the base model."""
    model_path: str | None = None
    unnamed: bool = False
    """Its folder goes with the session."""


@dataclass(slots=True, eq=False)
class Session:
    session_id: str
    heard_at: float
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    models: dict[str, Model] = field(default_factory=dict)
    samplings: dict[str, Sampling] = field(default_factory=dict)
    """In the order they were last used."""


class Sessions:
    """All living sessions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._living: dict[str, Session] = {}
        self._over: deque[str] = deque(maxlen=REMEMBERED)

    def open(self, user_metadata: dict[str, Any] | None, display_name: str | None) -> Session:
        session = Session(f"session-{secrets.token_hex(8)}", self._clock(), user_metadata, display_name)
        self._living[session.session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """The session, which has thereby been heard of."""
        if session_id in self._over:
            raise Gone(f"session {session_id} is over; make a new tinker.ServiceClient")
        session = self._living.get(session_id)
        if session is None:
            raise NotFound(f"session {session_id!r} is unknown, perhaps from before a restart of this server")
        session.heard_at = self._clock()
        return session

    def model(self, model_id: str) -> Model:
        model = self._session_of(model_id).models.get(model_id)
        if model is None:
            raise NotFound(f"model {model_id!r} is not loaded here; create it, or load its last checkpoint")
        model.used_at = datetime.now(UTC)
        return model

    def sampling(self, sampler_id: str) -> Sampling:
        session = self._session_of(sampler_id)
        sampling = session.samplings.pop(sampler_id, None)
        if sampling is None:
            raise NotFound(f"sampler {sampler_id!r} is unknown or was put away; create a sampling client again")
        session.samplings[sampler_id] = sampling
        return sampling

    def all(self) -> list[Session]:
        return list(self._living.values())

    def silent_for(self, seconds: float) -> list[Session]:
        return [session for session in self._living.values() if self._clock() - session.heard_at >= seconds]

    def remove(self, session: Session) -> None:
        self._living.pop(session.session_id, None)
        self._over.append(session.session_id)

    def _session_of(self, identifier: str) -> Session:
        """Ids of models and samplers begin with their session's."""
        return self.get("-".join(identifier.split("-")[:2]))
