"""What the clients of hosted models have in common: a key, patience, a price.

In: a question. Out: the provider's answer with its usage and cost. They are judges and baselines and are never
trained. A provider adds how to connect and how one request looks, through its own SDK.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from pydantic import Field

from evsys_sdk.errors import EvsysAuthError, need
from evsys_sdk.inference.asking import AskingClient, Completion, Question
from evsys_sdk.inference.patience import Patience
from evsys_sdk.inference.prices import Price, price_of
from evsys_sdk.logs import get_logger

LOOPBACK_KEY = "local"
"""What a server on this machine gets when there is no key: the SDKs insist on one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Where a kind of client comes from."""

    kind: str
    module: str
    extra: str
    key_variables: tuple[str, ...]


class FrontierClient(AskingClient):
    """A hosted model; a subclass knows one provider's SDK."""

    provider: ClassVar[Provider]

    class Config(AskingClient.Config):
        model: str = Field(min_length=1)
        """The provider's name for it."""
        max_tokens: int = Field(default=1024, ge=1)
        """Thinking counts."""
        concurrency: int = Field(default=8, ge=1)
        base_url: str | None = None
        """Another server that speaks the provider's protocol; by default the SDK's own."""
        api_key_env: str | None = None
        """Name of the environment variable that holds the key; by default the provider's usual one."""
        timeout_seconds: float = Field(default=120.0, gt=0)
        """For one try."""
        max_retries: int = Field(default=5, ge=0)
        """Tries after the first, when the provider is overloaded, broken or silent."""
        max_wait_seconds: float = Field(default=60.0, ge=0)
        """The longest pause between tries; a provider that asks for more is given up."""
        price: Price | None = None
        """US dollars per million tokens, `{input, output}`; by default the dated list in `inference.prices`."""

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._key = find_key(self.provider, self.cfg.api_key_env, self.cfg.base_url, os.environ)
        self._sdk = need(self.provider.module, extra=self.provider.extra)
        self._patience = Patience(
            max_retries=self.cfg.max_retries,
            max_wait_seconds=self.cfg.max_wait_seconds,
            timeout_seconds=self.cfg.timeout_seconds,
        )
        self._price = self.cfg.price or price_of(self.cfg.model)
        self._temperature_refused = False
        # Connections belong to one event loop.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    @abstractmethod
    def _connect(self) -> Any:
        """A client of the SDK, without retries of its own."""

    @abstractmethod
    async def _disconnect(self, client: Any) -> None: ...

    @abstractmethod
    async def _send(self, client: Any, question: Question) -> Completion:
        """One request, one answer; cost, tries and time are filled in here."""

    async def aclose(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await self._disconnect(client)

    async def _ask(self, question: Question) -> Completion:
        began, who = time.monotonic(), f"{self.provider.kind} ({self.cfg.model})"
        client = self._clients.get(asyncio.get_running_loop()) or self._open()
        answer, attempts = await self._patience.ask(who, lambda: self._send_once(client, question))
        return replace(answer, attempts=attempts, seconds=time.monotonic() - began, cost_usd=self._cost(answer))

    async def _send_once(self, client: Any, question: Question) -> Completion:
        if self._temperature_refused:
            question = replace(question, temperature=None)
        try:
            return await self._send(client, question)
        except Exception as exc:
            if question.temperature is None or not _is_about_temperature(exc):
                raise
            # Reasoning models take no temperature; asking them at all is worth more than asking them greedily.
            self._temperature_refused = True
            get_logger(__name__).warning("%s takes no temperature; it is left out", self.cfg.model)
            return await self._send(client, replace(question, temperature=None))

    def _open(self) -> Any:
        for loop in [loop for loop in self._clients if loop.is_closed()]:
            del self._clients[loop]
        client = self._clients[asyncio.get_running_loop()] = self._connect()
        return client

    def _cost(self, answer: Completion) -> float | None:
        if self._price is None or answer.input_tokens is None or answer.output_tokens is None:
            return None
        return self._price.cost_usd(answer.input_tokens, answer.output_tokens)


def _is_about_temperature(exc: Exception) -> bool:
    status = getattr(exc, "status_code", None) or getattr(exc, "code", None)
    return status == 400 and "temperature" in str(exc)


def find_key(provider: Provider, variable: str | None, base_url: str | None, environ: Mapping[str, str]) -> str:
    """The key: the named variable's, else the provider's usual one's; a dummy for a server on this machine."""
    variables = (variable,) if variable else provider.key_variables
    for name in variables:
        if environ.get(name):
            return environ[name]
    if base_url and urlsplit(base_url).hostname in ("127.0.0.1", "localhost", "::1"):
        return LOOPBACK_KEY
    raise EvsysAuthError(f"{provider.kind} needs a key: set {' or '.join(variables)}")


def whole(value: Any, what: str) -> Any:
    """`value`, which a readable answer has."""
    if value is None:
        raise ValueError(f"it has no {what}")
    return value
