"""Gemini, through Google's own SDK."""

from __future__ import annotations

import json
import traceback
from typing import Any

from evsys_sdk.config.base import JsonDict
from evsys_sdk.errors import BackendError
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
from evsys_sdk.retry import ErrorPage


@register_inference("gemini")
class GeminiInference(FrontierClient):
    """Gemini as a judge or a baseline (extra `gemini`)."""

    provider = Provider(
        kind="gemini", module="google.genai", extra="gemini", key_variables=("GEMINI_API_KEY", "GOOGLE_API_KEY")
    )

    def _connect(self) -> Any:
        # In milliseconds, unlike the other SDKs. One attempt: the retries are `RetryPolicy`'s.
        options: JsonDict = {"timeout": int(self.cfg.timeout_seconds * 1000), "retry_options": {"attempts": 1}}
        if self.cfg.base_url:
            options["base_url"] = self.cfg.base_url
        # `vertexai` is named so that a variable in the environment cannot send the request elsewhere.
        return self._sdk.Client(api_key=self._key, vertexai=False, http_options=options)

    async def _disconnect(self, client: Any) -> None:
        await client.aio.aclose()
        client.close()

    async def _send(self, client: Any, question: GenerationRequest) -> Completion:
        contents = [
            {"role": "model" if role == "assistant" else "user", "parts": [_part(block) for block in blocks]}
            for role, blocks in spoken(question.messages)
        ]
        config: JsonDict = {
            "max_output_tokens": question.max_tokens,
            "temperature": question.temperature,
            "stop_sequences": list(question.stop) or None,
            "system_instruction": system_text(question.messages) or None,
        }
        tools = [
            {"name": tool["name"], "description": tool["description"], "parameters_json_schema": tool["parameters"]}
            for tool in tools_of(question.messages)
        ]
        if tools:
            config["tools"] = [{"function_declarations": tools}]
            config["automatic_function_calling"] = {"disable": True}
        try:
            answer = await client.aio.models.generate_content(model=self.cfg.model, contents=contents, config=config)
        except json.JSONDecodeError as exc:
            # Whether the SDK stumbled over an error's text, and not over an answer's: nothing else tells them apart.
            frames = traceback.extract_tb(exc.__traceback__)
            if all(frame.name != "raise_for_async_response" for frame in frames):
                raise
            raise ErrorPage("an error whose text is not JSON") from exc
        if not answer.candidates:
            blocked = getattr(answer.prompt_feedback, "block_reason", None)
            raise BackendError(f"gemini ({self.cfg.model}) gave no answer; the reason it names: {blocked or 'none'}")
        candidate, usage = answer.candidates[0], answer.usage_metadata
        parts = (candidate.content and candidate.content.parts) or []
        texts = [part.text for part in parts if part.text and not part.thought]
        calls = [(part.function_call.name, part.function_call.args) for part in parts if part.function_call]
        return Completion(
            text=join_answer(texts, calls),
            model=answer.model_version or "",
            input_tokens=usage and whole(usage.prompt_token_count, "usage"),
            # Thoughts are billed as output.
            output_tokens=usage and (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0),
            stop_reason=candidate.finish_reason and candidate.finish_reason.value,
        )


def _part(block: JsonDict) -> JsonDict:
    if block.get("type", "text") == "text":
        return {"text": block.get("text") or ""}
    address, media_type, data = image_in(block)
    if address:
        return {"file_data": {"file_uri": address, "mime_type": "image/*"}}
    return {"inline_data": {"mime_type": media_type, "data": data}}
