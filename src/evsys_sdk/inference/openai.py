"""OpenAI's models, and any server that speaks its chat protocol, through OpenAI's own SDK."""

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


@register_inference("openai")
class OpenAIInference(FrontierClient):
    """An OpenAI model, or one behind a compatible `base_url`, as a judge or a baseline (extra `openai`)."""

    provider = Provider(kind="openai", module="openai", extra="openai", key_variables=("OPENAI_API_KEY",))

    def _connect(self) -> Any:
        return self._sdk.AsyncOpenAI(
            api_key=self._key, base_url=self.cfg.base_url, timeout=self.cfg.timeout_seconds, max_retries=0
        )

    async def _disconnect(self, client: Any) -> None:
        await client.close()

    async def _send(self, client: Any, question: GenerationRequest) -> Completion:
        system = system_text(question.messages)
        messages: list[JsonDict] = []
        if system:
            messages.append({"role": "system", "content": system})
        for role, blocks in spoken(question.messages):
            is_text = all(block.get("type", "text") == "text" for block in blocks)  # every compatible server reads it
            text = "\n".join(block.get("text") or "" for block in blocks)
            messages.append({"role": role, "content": text if is_text else [_block(block) for block in blocks]})
        # The older `max_tokens` is refused by reasoning models.
        request: JsonDict = {"max_completion_tokens": question.max_tokens, "messages": messages}
        if tools := tools_of(question.messages):
            request["tools"] = [{"type": "function", "function": tool} for tool in tools]
        if question.stop:
            request["stop"] = list(question.stop)
        if question.temperature is not None:
            request["temperature"] = question.temperature
        answer = await client.chat.completions.create(model=self.cfg.model, **request)
        choice = whole(answer.choices or None, "choices")[0]
        message, usage = whole(choice.message, "message"), answer.usage
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        return Completion(
            text=join_answer([message.content or message.refusal or ""], calls),
            model=answer.model or "",
            input_tokens=usage and usage.prompt_tokens,
            output_tokens=usage and usage.completion_tokens,
            stop_reason=choice.finish_reason,
        )


def _block(block: JsonDict) -> JsonDict:
    if block.get("type", "text") == "text":
        return {"type": "text", "text": block.get("text") or ""}
    address, media_type, data = image_in(block)
    return {"type": "image_url", "image_url": {"url": address or f"data:{media_type};base64,{data}"}}
