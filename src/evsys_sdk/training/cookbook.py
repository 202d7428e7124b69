"""Render as tinker-cookbook does, for models that were tuned with its renderers.

In: the name of one of its renderers (`model.renderer_name`) and a Hugging Face tokenizer. Out: a `ChatRenderer` whose
tokens are that renderer's. The library is imported when a name asks for it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from evsys_sdk.data_types import content_text
from evsys_sdk.errors import BackendError, DataError, EvsysError, MissingDependency, blame, need, not_known
from evsys_sdk.surface import Messages, Tokenizer
from evsys_sdk.training.render import ChatRenderer

WHERE = "model.renderer_name"
THOUGHT = re.compile(r"<think>(.*?)</think>(.*)", re.DOTALL)
"""Text that begins with a thought, which the cookbook keeps apart from the answer."""


class CookbookRenderer(ChatRenderer):
    """`renderers.get_renderer(name, tokenizer)` of tinker-cookbook."""

    def __init__(self, name: str, tokenizer: Tokenizer, where: str = WHERE):
        super().__init__(tokenizer)
        self.name, self.where = name, where
        self.inner = _renderer(name, tokenizer, where)

    def prompt(self, messages: Messages) -> list[int]:
        with blame(DataError, f"renderer {self.name!r}"):
            return list(self.inner.build_generation_prompt(_theirs(messages, self.where)).to_ints())

    def whole(self, messages: Messages) -> list[int]:
        with blame(DataError, f"renderer {self.name!r}"):
            return list(self.inner.build_supervised_example(_theirs(messages, self.where))[0].to_ints())


def renderer_problem(name: str, where: str = WHERE) -> str | None:
    """Why there is no renderer of that name, or None."""
    try:
        _known(name, where)
    except EvsysError as exc:
        return str(exc)
    return None


def _known(name: str, where: str) -> Any:
    """The cookbook's renderers, if `name` is one of them."""
    try:
        renderers = need("tinker_cookbook.renderers", extra="tinker")
    except MissingDependency as exc:
        raise MissingDependency(f"{where}: {exc}; or leave it out, and the model's own template is used") from exc
    known = known_names(renderers)
    if name not in known:
        raise BackendError(f"{where}: {not_known(name, 'renderer of tinker-cookbook', known)}")
    return renderers


def _renderer(name: str, tokenizer: Tokenizer, where: str) -> Any:
    renderers = _known(name, where)
    if not hasattr(tokenizer, "inner"):
        raise BackendError(f"{where}: a Hugging Face tokenizer is needed, and this backend has none; leave it out")
    with blame(BackendError, f"{where}: {name!r} with this model's tokenizer"):
        made = renderers.get_renderer(name, tokenizer.inner)
        stops = made.get_stop_sequences()
    if tokenizer.eos_token_id not in stops:
        # Sampling ends at the tokenizer's end of turn; a model that is taught another end would never be seen to end.
        raise BackendError(
            f"{where}: {name!r} ends a turn with {stops}, this model's tokenizer with {tokenizer.eos_token_id}; "
            "take the renderer that belongs to the model, or leave it out"
        )
    return made


def known_names(renderers: Any) -> set[str]:
    """The names that its `get_renderer` documents, and those that a project registered."""
    listed = re.findall(r'- ``"(\w+)"``', renderers.get_renderer.__doc__ or "")
    return {*listed, *renderers.get_registered_renderer_names()}


def _theirs(messages: Messages, where: str = WHERE) -> list[dict[str, Any]]:
    """Our messages in the cookbook's form: text as content, calls as its own records."""
    if any(message.get("tools") for message in messages):
        raise DataError(f"tools cannot be shown with {where}; leave it out, and the model's own template shows them")
    return [_message(message) for message in messages]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    text = content_text(message.get("content"))
    thought = THOUGHT.fullmatch(text) if message["role"] == "assistant" else None
    parts = [{"type": "thinking", "thinking": thought[1]}, {"type": "text", "text": thought[2]}] if thought else None
    theirs = {**message, "content": parts or text}
    if message.get("tool_calls"):
        theirs["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return theirs


def _call(call: dict[str, Any]) -> Any:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    record = need("tinker_cookbook.renderers", extra="tinker").ToolCall
    return record.model_validate({"function": {"name": function.get("name"), "arguments": text}, "id": call.get("id")})
