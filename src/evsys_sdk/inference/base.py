"""How every client is asked: one prompt or many, awaited or not, and what that took.

In: prompts, as text or messages. Out: the answers' text, or `Completion`s that also say what was used. A client adds
only how it asks once (`_ask`); its settings, the system prompt, batches, the limit on calls under way and the tally are
here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack
from weakref import WeakKeyDictionary

from pydantic import Field

from evsys_sdk.concurrency import run_async
from evsys_sdk.config.base import Params
from evsys_sdk.errors import EvsysError
from evsys_sdk.training_api import Messages

Prompt = str | Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt with the settings it is asked with."""

    messages: Messages
    max_tokens: int
    temperature: float | None
    """None leaves it to the model."""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, and what it took."""

    text: str
    model: str = ""
    """Who answered, by its own account."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: float | None = None
    """At list price; None where the price is not known, never 0 for that."""
    stop_reason: str | None = None
    """In the provider's own word."""
    attempts: int = 1
    seconds: float = 0.0


@dataclass(slots=True)
class Usage:
    """What a client has used so far."""

    calls: int = 0
    failures: int = 0
    """Questions that stayed without an answer."""
    input_tokens: int = 0
    output_tokens: int = 0
    unpriced_calls: int = 0
    """Answers whose cost is not known."""
    _priced_usd: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def cost_usd(self) -> float | None:
        """All of it; None as soon as the cost of one answer is not known."""
        return None if self.unpriced_calls else self._priced_usd

    def add(self, answer: Completion) -> None:
        with self._lock:
            self.calls += 1
            self.input_tokens += answer.input_tokens or 0
            self.output_tokens += answer.output_tokens or 0
            self.unpriced_calls += answer.cost_usd is None
            self._priced_usd += answer.cost_usd or 0.0

    def add_failure(self) -> None:
        with self._lock:
            self.failures += 1


class GenerationSettings(TypedDict, total=False):
    """What a call may set; the client's own settings hold for the rest."""

    max_tokens: int | None
    temperature: float | None
    stop: Sequence[str] | None


class AskingClient:
    """What all clients have in common; a subclass says how to `_ask`."""

    class Config(Params):
        max_tokens: int = Field(default=256, ge=1)
        """Per answer."""
        temperature: float | None = Field(default=0.0, ge=0)
        """null leaves it to the model."""
        stop: list[str] = Field(default_factory=list)
        """Texts at which an answer ends."""
        system_prompt: str | None = None
        """Speaks first, unless the prompt brings a system message."""
        concurrency: int = Field(default=64, ge=1)
        """Calls under way at once, however many are awaited."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        self.usage = Usage()
        # A semaphore belongs to one event loop; a client may be used from several, one after the other.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def _ask(self, question: GenerationRequest) -> Completion:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Give back what asking from this event loop has opened; the client can be asked again."""

    def generate(self, *, prompt: Prompt, **settings: Unpack[GenerationSettings]) -> str:
        """The answer; settings that are not given are the client's own."""
        return self.generate_batch(prompts=[prompt], **settings)[0]

    async def agenerate(self, *, prompt: Prompt, **settings: Unpack[GenerationSettings]) -> str:
        """The answer, awaited: many can be under way at once."""
        return (await self.acomplete(prompt=prompt, **settings)).text

    def generate_batch(self, *, prompts: Sequence[Prompt], **settings: Unpack[GenerationSettings]) -> list[str]:
        """The answers, in order; the first failure is raised."""

        async def ask() -> list[str]:
            try:
                return [answer.text for answer in await self.acomplete_batch(prompts=prompts, **settings)]
            finally:
                await self.aclose()  # this loop ends with the call, and connections cannot outlive it
                self._slots.pop(asyncio.get_running_loop(), None)

        return run_async(ask())

    async def agenerate_batch(self, *, prompts: Sequence[Prompt], **settings: Unpack[GenerationSettings]) -> list[str]:
        """The answers in order, awaited; the first failure is raised."""
        return [answer.text for answer in await self.acomplete_batch(prompts=prompts, **settings)]

    async def acomplete_batch(
        self, *, prompts: Sequence[Prompt], **settings: Unpack[GenerationSettings]
    ) -> list[Completion]:
        """The answers with what they took; when one fails the others are given up and its error is raised."""
        jobs = [asyncio.ensure_future(self.acomplete(prompt=prompt, **settings)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*jobs))
        except BaseException:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            raise

    async def try_batch(
        self, *, prompts: Sequence[Prompt], **settings: Unpack[GenerationSettings]
    ) -> list[Completion | EvsysError]:
        """The answers with what they took; one that failed has its error in its place."""

        async def attempt(prompt: Prompt) -> Completion | EvsysError:
            try:
                return await self.acomplete(prompt=prompt, **settings)
            except EvsysError as exc:
                return exc

        return list(await asyncio.gather(*(attempt(prompt) for prompt in prompts)))

    async def acomplete(
        self,
        *,
        prompt: Prompt,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] | None = None,
    ) -> Completion:
        """One answer, with what it took."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        system = self.cfg.system_prompt
        if system is not None and all(message.get("role") != "system" for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        question = GenerationRequest(
            messages=messages,
            max_tokens=self.cfg.max_tokens if max_tokens is None else max_tokens,
            temperature=self.cfg.temperature if temperature is None else temperature,
            stop=tuple(self.cfg.stop if stop is None else stop),
        )
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.cfg.concurrency))
        async with slots:
            try:
                answer = await self._ask(question)
            except Exception:
                # A cancelled call is no failure: CancelledError is no Exception and does not come here.
                self.usage.add_failure()
                raise
        self.usage.add(answer)
        return answer
