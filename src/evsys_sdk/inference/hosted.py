"""What the clients of hosted models have in common: a key, retries, a price.

In: a question. Out: the provider's answer with its usage and cost. They are judges and baselines and are never
trained. A provider adds how to connect and how one request looks, through its own SDK.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from pydantic import Field

from evsys_sdk.config.base import JsonDict, Params
from evsys_sdk.data_types import block_to_image_src, content_text, text_block
from evsys_sdk.errors import DataError, EvsysAuthError, need
from evsys_sdk.inference.base import AskingClient, Completion, GenerationRequest
from evsys_sdk.logs import get_logger
from evsys_sdk.redaction import add_secrets
from evsys_sdk.retry import RetryPolicy
from evsys_sdk.training_api import Messages

# Our messages in the words that every provider understands.
#
# In: messages as rows and tasks have them. Out: their system text, their tools, and turns of user and assistant with
# text and images only. Tool calls and tool results of earlier turns are written out as text, in the form that the
# verifiers read; so are the calls that a provider's model makes.


SYSTEM_ROLES = ("system", "developer")


def system_text(messages: Messages) -> str:
    """What the system messages say, together."""
    return "\n\n".join(content_text(message.get("content")) for message in messages if message["role"] in SYSTEM_ROLES)


def spoken(messages: Messages) -> list[tuple[str, list[JsonDict]]]:
    """Role (`user` or `assistant`) and blocks of each turn; the system's messages are left out."""
    turns = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role in SYSTEM_ROLES:
            continue
        if role == "tool":
            turns.append(("user", [text_block(f"<tool_response>\n{content_text(content)}\n</tool_response>")]))
            continue
        blocks = list(content) if isinstance(content, list) else [text_block(content)] if content else []
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            blocks.append(text_block(call_text(function.get("name"), function.get("arguments"))))
        turns.append(("assistant" if role == "assistant" else "user", blocks))
    return turns


def call_text(name: object, arguments: object) -> str:
    """A tool call as text."""
    if isinstance(arguments, str):
        with suppress(ValueError):  # half a call stays as the model made it
            arguments = json.loads(arguments)
    body = json.dumps({"name": name, "arguments": arguments or {}}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def join_answer(texts: list[str], calls: list[tuple[object, object]]) -> str:
    """What a model said and called, as one text."""
    return "\n".join([text for text in ["".join(texts)] if text] + [call_text(*call) for call in calls])


def tools_of(messages: Messages) -> list[JsonDict]:
    """Name, description and parameters of the tools that stand on the messages."""
    tools = [tool.get("function", tool) for message in messages for tool in message.get("tools") or []]
    return [
        {
            "name": tool.get("name"),
            "description": tool.get("description") or "",
            "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
        }
        for tool in tools
    ]


def image_in(block: JsonDict) -> tuple[str, str, str]:
    """An image block as (address, "", "") or as ("", media type, base64)."""
    source = block_to_image_src(block)
    if source is None:
        raise DataError(f"a block of type {block.get('type')!r} cannot be sent: text and images can")
    if not source.startswith("data:"):
        return source, "", ""
    head, _, data = source.removeprefix("data:").partition(",")
    return "", head.removesuffix(";base64"), data


# What the providers' models cost, as of a date.
#
# In: a model's name. Out: dollars per million tokens, or None for a model that is not listed. List prices of plain
# requests: discounts (batches, cached input) and surcharges (very long prompts) are not in them. A client's `price`
# setting comes first.


AS_OF = "2026-11-15"
"""The day the table was taken, from the price list in litellm 1.106.2."""


class Price(Params):
    """US dollars per million tokens."""

    input: float = Field(ge=0)
    """Dollars per million tokens read."""
    output: float = Field(ge=0)
    """Dollars per million tokens written."""

    def cost_usd(self, input_tokens: int, output_tokens: int) -> float:
        return (input_tokens * self.input + output_tokens * self.output) / 1e6


_LISTED: dict[str, tuple[float, float]] = {
    "claude-haiku-4-5": (1.0, 5.0),
    "claude-sonnet-4-5": (3.0, 15.0),
    "claude-sonnet-4-6": (3.0, 15.0),
    "claude-sonnet-5": (2.0, 10.0),
    "claude-sonnet-5-5": (2.0, 10.0),
    "claude-opus-4-5": (5.0, 25.0),
    "claude-opus-4-6": (5.0, 25.0),
    "claude-opus-4-7": (5.0, 25.0),
    "claude-opus-4-8": (5.0, 25.0),
    "claude-opus-5": (5.0, 25.0),
    "claude-opus-5-5": (4.0, 20.0),
    "gpt-4o": (2.5, 10.0),
    "gpt-4o-mini": (0.15, 0.6),
    "gpt-4.1": (2.0, 8.0),
    "gpt-4.1-mini": (0.4, 1.6),
    "gpt-5": (1.25, 10.0),
    "gpt-5-mini": (0.25, 2.0),
    "gpt-5-nano": (0.05, 0.4),
    "gpt-5.4": (2.5, 15.0),
    "gpt-5.4-mini": (0.75, 4.5),
    "gpt-5.4-nano": (0.2, 1.25),
    "gpt-5.5": (5.0, 30.0),
    "gpt-6-astra": (10.0, 50.0),
    "gpt-6-luna": (0.1, 0.5),
    "gpt-6-sol": (2.0, 10.0),
    "o3": (2.0, 8.0),
    "gemini-2.5-flash": (0.3, 2.5),
    "gemini-2.5-flash-lite": (0.1, 0.4),
    "gemini-2.5-pro": (1.25, 10.0),
    "gemini-3.1-pro-preview": (2.0, 12.0),
    "gemini-3.5-flash": (1.5, 9.0),
    "gemini-3.5-flash-lite": (0.3, 2.5),
    "gemini-3.8-flash": (0.75, 3.75),
}
_DATE = re.compile(r"-(\d{8}|\d{4}-\d{2}-\d{2})$")


def price_of(model: str) -> Price | None:
    """The list price; a dated name (`gpt-4o-2024-11-20`) costs what its undated name does."""
    found = _LISTED.get(_DATE.sub("", model.removeprefix("models/")))
    return None if found is None else Price(input=found[0], output=found[1])


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
        """US dollars per million tokens, `{input, output}`; by default the dated list in `inference/hosted.py`."""

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._key = find_key(self.provider, self.cfg.api_key_env, self.cfg.base_url, os.environ)
        self._sdk = need(self.provider.module, extra=self.provider.extra)
        self._patience = RetryPolicy(
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
        """A client of the SDK, without retries."""

    @abstractmethod
    async def _disconnect(self, client: Any) -> None: ...

    @abstractmethod
    async def _send(self, client: Any, question: GenerationRequest) -> Completion:
        """One request, one answer; cost, tries and time are filled in here."""

    async def aclose(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await self._disconnect(client)

    async def _ask(self, question: GenerationRequest) -> Completion:
        began, who = time.monotonic(), f"{self.provider.kind} ({self.cfg.model})"
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # Connections end with their loop, so such a client can be neither used nor closed: it is dropped.
            for closed in [other for other in self._clients if other.is_closed()]:
                del self._clients[closed]
            self._clients[loop] = self._connect()
        client = self._clients[loop]
        answer, attempts = await self._patience.ask(who, lambda: self._send_once(client, question))
        cost = None
        if self._price is not None and answer.input_tokens is not None and answer.output_tokens is not None:
            cost = self._price.cost_usd(answer.input_tokens, answer.output_tokens)
        return replace(answer, attempts=attempts, seconds=time.monotonic() - began, cost_usd=cost)

    async def _send_once(self, client: Any, question: GenerationRequest) -> Completion:
        if self._temperature_refused:
            question = replace(question, temperature=None)
        try:
            return await self._send(client, question)
        except Exception as exc:
            # `status_code` in the SDKs of Anthropic and OpenAI, `code` in Google's.
            status = getattr(exc, "status_code", None) or getattr(exc, "code", None)
            if question.temperature is None or status != 400 or "temperature" not in str(exc):
                raise
            # Reasoning models take no temperature; asking them at all is worth more than asking them greedily.
            self._temperature_refused = True
            get_logger(__name__).warning("%s takes no temperature; it is left out", self.cfg.model)
            return await self._send(client, replace(question, temperature=None))


def find_key(provider: Provider, variable: str | None, base_url: str | None, environ: Mapping[str, str]) -> str:
    """The key: the named variable's, else the provider's usual one's; a dummy for a server on this machine."""
    variables = (variable,) if variable else provider.key_variables
    for name in variables:
        if environ.get(name):
            add_secrets([environ[name]])
            return environ[name]
    if base_url and urlsplit(base_url).hostname in ("127.0.0.1", "localhost", "::1"):
        return LOOPBACK_KEY
    raise EvsysAuthError(f"{provider.kind} needs a key: set {' or '.join(variables)}")


def whole[T](value: T | None, what: str) -> T:
    """`value`, which a readable answer has."""
    if value is None:
        raise ValueError(f"it has no {what}")
    return value
