"""Claude, through Anthropic's own SDK."""

from __future__ import annotations

from typing import Any

from evsys_sdk.config.base import JsonDict
from evsys_sdk.inference.base import Completion, GenerationRequest
from evsys_sdk.inference.hosted import (
    FrontierClient,
    Provider,
    image_in,
    join_answer,
    spoken,
    system_text,
    tools_of,
    whole,
)
from evsys_sdk.registry import register_inference


@register_inference("claude")
class ClaudeInference(FrontierClient):
    """Claude as a judge or a baseline (extra `claude`)."""

    provider = Provider(kind="claude", module="anthropic", extra="claude", key_variables=("ANTHROPIC_API_KEY",))

    def _connect(self) -> Any:
        return self._sdk.AsyncAnthropic(
            api_key=self._key, base_url=self.cfg.base_url, timeout=self.cfg.timeout_seconds, max_retries=0
        )

    async def _disconnect(self, client: Any) -> None:
        await client.close()

    async def _send(self, client: Any, question: GenerationRequest) -> Completion:
        turns = [
            {"role": role, "content": [_block(block) for block in blocks]} for role, blocks in spoken(question.messages)
        ]
        request: JsonDict = {"model": self.cfg.model, "max_tokens": question.max_tokens, "messages": turns}
        if system := system_text(question.messages):
            request["system"] = system
        if tools := tools_of(question.messages):
            request["tools"] = [
                {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
                for tool in tools
            ]
        if question.stop:
            request["stop_sequences"] = list(question.stop)
        if question.temperature is not None:
            # Newer versions of the SDK have no argument for it; older models still take it.
            request["extra_body"] = {"temperature": question.temperature}
        message = await client.messages.create(**request)
        blocks, usage = whole(message.content, "content"), whole(message.usage, "usage")
        texts = [block.text for block in blocks if block.type == "text"]
        calls = [(block.name, block.input) for block in blocks if block.type == "tool_use"]
        # Anthropic's `input_tokens` leaves out what was written to or read from the cache.
        cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
        return Completion(
            text=join_answer(texts, calls),
            model=message.model,
            input_tokens=whole(usage.input_tokens, "usage") + cached,
            output_tokens=usage.output_tokens,
            stop_reason=message.stop_reason,
        )


def _block(block: JsonDict) -> JsonDict:
    if block.get("type", "text") == "text":
        return {"type": "text", "text": block.get("text") or ""}
    address, media_type, data = image_in(block)
    source = {"type": "url", "url": address} if address else {"type": "base64", "media_type": media_type, "data": data}
    return {"type": "image", "source": source}
