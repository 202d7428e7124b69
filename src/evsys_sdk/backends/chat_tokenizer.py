"""A Hugging Face tokenizer as the training surface wants it.

In: a tokenizer of `transformers`. Out: plain encode and decode, and the model's own chat template.
"""

from __future__ import annotations

from typing import Any

from evsys_sdk.errors import BackendError
from evsys_sdk.surface import Messages


class ChatTokenizer:
    """A Hugging Face tokenizer as the surface wants it: plain encode and decode, the model's own chat template."""

    def __init__(self, tokenizer: Any):
        self.inner = tokenizer
        self.eos_token_id: int = tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False))

    def decode(self, tokens: Any) -> str:
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))

    def apply_chat_template(self, messages: Messages, *, add_generation_prompt: bool = False) -> list[int]:
        if not getattr(self.inner, "chat_template", None):
            raise BackendError("this model's tokenizer has no chat template; use a chat model")
        tokens = self.inner.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )
        return [int(token) for token in tokens]
