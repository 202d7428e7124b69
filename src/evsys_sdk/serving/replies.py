"""Answers in OpenAI's form, whole or as a stream of events.

In: what was sampled. Out: JSON bodies. With `return_token_ids` they carry the exact tokens where vLLM puts them, and
harbor's LiteLLM looks for them: `prompt_token_ids` on the answer, `token_ids` on each choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evsys_engine.http import HttpResponse, json_response
from evsys_engine.types import JsonObject
from evsys_sdk.serving.request import ChatRequest
from evsys_sdk.serving.tools import ToolCall
from evsys_sdk.training_api import SampledSequence, Tokenizer

IMPOSSIBLE = -9999.0
"""The log probability of what cannot be, as OpenAI and vLLM write it: JSON has no infinity."""
WORDS = re.compile(r"\s*\S+\s*|\s+")


def event_stream(events: Iterable[Mapping[str, object]]) -> HttpResponse:
    """The events as a browser's EventSource and OpenAI's clients read them, with OpenAI's end mark."""
    texts = [f"data: {json.dumps(event, ensure_ascii=False, allow_nan=False)}\n\n" for event in events]
    parts = [text.encode("utf-8", "replace") for text in [*texts, "data: [DONE]\n\n"]]
    return HttpResponse(parts, content_type="text/event-stream", headers={"cache-control": "no-cache"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion, ready to be sent."""

    sequence: SampledSequence
    content: str
    calls: list[ToolCall]

    @property
    def finish_reason(self) -> str:
        if self.sequence.stop_reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """All that one answer is made of."""

    id: str
    created: int
    request: ChatRequest
    prompt: list[int]
    choices: list[Choice]
    tokenizer: Tokenizer
    digest: str | None = None
    """Of the weights that answered."""

    def answer(self) -> HttpResponse:
        if not self.request.stream:
            return json_response(self.whole())
        return event_stream(self.events())

    def whole(self) -> JsonObject:
        body = self._body("chat.completion", [self._choice(index) for index in range(len(self.choices))])
        return body | self._prompt_ids() | {"usage": self._usage()}

    def events(self) -> Iterator[JsonObject]:
        """The stream. A sampler gives its completion at once, so the pieces are cut here, for those who read pieces."""
        for index, choice in enumerate(self.choices):
            first = {"role": "assistant", "content": ""}
            yield self._chunk(index, first, **self._details(choice)) | (self._prompt_ids() if index == 0 else {})
            for piece in WORDS.findall(choice.content):
                yield self._chunk(index, {"content": piece})
            for number, call in enumerate(choice.calls):
                yield self._chunk(index, {"tool_calls": [{"index": number, **call.as_dict()}]})
            yield self._chunk(index, {}, finish_reason=choice.finish_reason)
        if self.request.include_usage:
            yield self._body("chat.completion.chunk", []) | {"usage": self._usage()}

    def _body(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        names = {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}
        answered = {} if self.digest is None else {"system_fingerprint": self.digest}
        return {**names, **answered, "choices": choices}

    def _chunk(self, index: int, delta: JsonObject, **fields: Any) -> JsonObject:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return self._body("chat.completion.chunk", [choice])

    def _choice(self, index: int) -> JsonObject:
        choice = self.choices[index]
        message: JsonObject = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [call.as_dict() for call in choice.calls]
        fields = {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}
        return fields | self._details(choice)

    def _details(self, choice: Choice) -> JsonObject:
        details: JsonObject = {}
        if self.request.logprobs:
            details["logprobs"] = {"content": self._logprobs(choice.sequence), "refusal": None}
        if self.request.return_token_ids:
            details["token_ids"] = choice.sequence.tokens
        return details

    def _logprobs(self, sequence: SampledSequence) -> list[JsonObject]:
        texts = [self.tokenizer.decode([token]) for token in sequence.tokens]
        return [
            {
                "token": text,
                "logprob": max(logprob, IMPOSSIBLE),
                "bytes": list(text.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for text, logprob in zip(texts, sequence.logprobs, strict=True)
        ]

    def _prompt_ids(self) -> JsonObject:
        return {"prompt_token_ids": self.prompt} if self.request.return_token_ids else {}

    def _usage(self) -> dict[str, int]:
        written = sum(len(choice.sequence.tokens) for choice in self.choices)
        read = len(self.prompt)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
