"""Sessions and what belongs to them: models in training and sets of weights to sample from.

In: ids. Out: the records behind them, or `NotFound`/`SessionOver` that say what to do. A session that has been silent
for a while is over, and with it everything it held.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from evsys_engine.http import HttpResponse
from evsys_engine.server.futures import Futures, Promise, failure
from evsys_engine.server.limits import ServerLimits
from evsys_engine.types import Adapter, BadRequest, EngineError, JsonObject, LoraSettings, ModelInfo

# What the model is called, by us and by clients.
#
# In: the loaded model's `ModelInfo`. Out: the one name that clients get, a check of the names they send, and a
# fingerprint that tells whether a checkpoint belongs to it.


class Naming:
    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        is_hub_id = info.name.count("/") == 1 and not Path(info.name).exists()
        name = info.name if is_hub_id else str(info.path.absolute())
        # The client takes a name with two slashes for `org/model/variant` and would cut /models/tiny down to /models.
        self.public = f"{name}/" if name.count("/") == 2 else name
        """Clients load the tokenizer by this name: a hub id, or a folder on this machine."""
        self.known = list(dict.fromkeys([info.name, self.public, str(info.path)]))

    def check(self, base_model: str) -> None:
        with suppress(OSError, ValueError):
            if base_model in self.known or Path(base_model).samefile(self._info.path):
                return
        raise BadRequest(f"base model {base_model!r} is not served here; this server has {' alias '.join(self.known)}")

    def answer(self, asked: str | None) -> str:
        """The name to answer a client with that asked for the model by `asked`: that one, where it is a name of this
        server's model; else the one that always works."""
        return asked if asked in self.known else self.public

    def facts(self) -> JsonObject:
        """What a checkpoint remembers of the model it was trained on."""
        info = self._info
        print_of = info.extra.get("fingerprint") or f"{info.vocab_size}-{info.parameters}"
        return {"base_model": info.name, "fingerprint": print_of}

    def check_facts(self, path: str, facts: JsonObject) -> None:
        if facts.get("fingerprint") != self.facts()["fingerprint"]:
            raise BadRequest(f"{path} was trained on {facts.get('base_model')!r}; this server has {self._info.name!r}")


# Calls of one model, one after another, in the order of their numbers.
#
# In: numbered calls in any order, some of them twice, some of them refused before they could wait here. Out: each
# done once, in order. The client numbers its calls from 1 and sends the pieces of one batch side by side, so a later
# number may well arrive first.


logger = logging.getLogger("evsys_engine.server")

FARTHEST_AHEAD = 100_000
"""A number farther ahead than this is no lost call but nonsense."""


class Conflict(EngineError):
    """The number belongs to another call; the server answers 409."""


@dataclass(frozen=True, slots=True)
class ModelJob:
    promise: Promise
    work: Callable[[], Awaitable[HttpResponse]]


class ModelQueue:
    """The queue of one model."""

    def __init__(self, name: str, futures: Futures, limits: ServerLimits, is_arriving: Callable[[], bool]) -> None:
        self._name, self._futures, self._limits, self._is_arriving = name, futures, limits, is_arriving
        self._waiting: dict[int, ModelJob] = {}
        self._given_up: list[range] = []
        self._refused: set[int] = set()
        self._skipped: set[int] = set()
        self._next = 1
        self._closed = False
        self._arrived = asyncio.Event()
        self._runner = asyncio.create_task(self._run())

    def number(self, asked: int | None) -> int:
        """The number a call has; a client that does not count is served in the order it comes."""
        if asked and asked > self._next + FARTHEST_AHEAD:
            raise BadRequest(f"seq_id {asked} is far ahead of {self._next}, the next one due")
        return asked or max(self._waiting, default=self._next - 1) + 1

    def has_seen(self, number: int) -> bool:
        """Is this call waiting, running or done? Then it was sent twice."""
        if any(number in missing for missing in self._given_up):
            raise BadRequest(f"seq_id {number} is too late: later calls have run; send this one as seq_id {self._next}")
        if number in self._skipped:
            raise Conflict(f"seq_id {number} belongs to a call that was refused; send this one as seq_id {self._next}")
        return number < self._next or number in self._waiting

    def put(self, number: int, job: ModelJob) -> None:
        self._refused.discard(number)
        self._waiting[number] = job
        self._arrived.set()

    def refuse(self, number: int) -> None:
        """The call with this number was answered with an error: later ones do not wait for it.

        Until a later one arrives, the caller may send a corrected call under the same number.
        """
        if self._next <= number <= self._next + FARTHEST_AHEAD and number not in self._waiting:
            self._refused.add(number)
            self._arrived.set()

    async def close(self) -> None:
        """Let the running call end; refuse those that wait."""
        self._closed = True
        for job in self._waiting.values():
            self._futures.settle(job.promise, failure(BadRequest(f"{self._name} was unloaded before this was done")))
        self._waiting.clear()
        self._arrived.set()
        await self._runner

    def abandon(self) -> None:
        """Stop without waiting: the server goes down."""
        self._runner.cancel()

    async def _run(self) -> None:
        while job := await self._next_due():
            await self._futures.keep(job.promise, job.work())

    async def _next_due(self) -> ModelJob | None:
        clock = asyncio.get_running_loop().time
        gap_began: float | None = None
        while self._next not in self._waiting:
            if self._closed:
                return None
            # Only when a later call waits: until then the caller may send the refused one again, corrected.
            if self._next in self._refused and self._waiting:
                self._refused.remove(self._next)
                self._skipped.add(self._next)
                self._next += 1
                continue
            # While nothing waits there is no hurry. Later numbers wait for a missing one, but not for ever.
            if self._waiting and gap_began is None:
                gap_began = clock()
            # Awake every `quiet_seconds`, to see whether calls are still arriving; `gap_began` bounds the wait as a
            # whole.
            seconds = min(self._limits.quiet_seconds, self._limits.gap_seconds) if self._waiting else None
            # No await lies between the look at `_waiting` and this, so no arrival is missed.
            self._arrived.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._arrived.wait()
            except TimeoutError:
                if not self._waiting:  # closed before this task had its turn
                    continue
                if not self._is_arriving() or clock() - (gap_began or 0.0) >= self._limits.gap_seconds:
                    self._give_up_on_missing()
        self._next += 1
        return self._waiting.pop(self._next - 1)

    def _give_up_on_missing(self) -> None:
        missing = range(self._next, min({*self._waiting, *self._refused}))
        logger.warning("%s: calls %d to %d did not arrive; skipping them", self._name, missing.start, missing.stop - 1)
        self._given_up.append(missing)
        self._next = missing.stop


REMEMBERED = 1000
"""Sessions that are over and still known as such."""


class NotFound(BadRequest):
    """No such thing here; 404."""


class SessionOver(BadRequest):
    """The session or what it held has ended; 410."""


@dataclass(slots=True, eq=False)
class Model:
    """An adapter in training."""

    model_id: str
    session: EngineSession
    settings: LoraSettings
    adapter: Adapter
    queue: ModelQueue
    base_model: str
    """As the client called it."""
    user_metadata: JsonObject | None = None
    used_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampling:
    """Weights that a client samples from."""

    sampler_id: str
    session: EngineSession
    folder: Path | None
    """None is the base model."""
    model_path: str | None = None
    unnamed: bool = False
    """The folder is deleted with the session."""


@dataclass(slots=True, eq=False)
class EngineSession:
    session_id: str
    heard_at: float
    user_metadata: JsonObject | None = None
    display_name: str | None = None
    models: dict[str, Model] = field(default_factory=dict)
    samplings: dict[str, Sampling] = field(default_factory=dict)
    """In the order they were last used."""


class Sessions:
    """All living sessions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._living: dict[str, EngineSession] = {}
        self._over: deque[str] = deque(maxlen=REMEMBERED)

    def open(self, user_metadata: JsonObject | None, display_name: str | None) -> EngineSession:
        session = EngineSession(f"session-{secrets.token_hex(8)}", self._clock(), user_metadata, display_name)
        self._living[session.session_id] = session
        return session

    def get(self, session_id: str) -> EngineSession:
        """The session, which has thereby been heard of."""
        if session_id in self._over:
            raise SessionOver(f"session {session_id} is over; make a new tinker.ServiceClient")
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
        # Put back at the end: the order of the dict is that of last use.
        session.samplings[sampler_id] = sampling
        return sampling

    def all(self) -> list[EngineSession]:
        return list(self._living.values())

    def silent_for(self, seconds: float) -> list[EngineSession]:
        return [session for session in self._living.values() if self._clock() - session.heard_at >= seconds]

    def remove(self, session: EngineSession) -> None:
        self._living.pop(session.session_id, None)
        self._over.append(session.session_id)

    def _session_of(self, identifier: str) -> EngineSession:
        """Ids of models and samplers begin with their session's."""
        return self.get("-".join(identifier.split("-")[:2]))
