"""The mock's tokenizer: one token per byte of UTF-8, plus the marks of a chat.

In: text or messages. Out: token ids, and back without loss. Marks are only ever put in by the template:
a user who types `<|im_end|>` gets its ten bytes, not the mark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from evsys_sdk.data_types import content_text
from evsys_sdk.training_api import Messages

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = range(256, 256 + len(SPECIALS))
VOCAB_SIZE = 256 + len(SPECIALS)
BYTES_OF = tuple(bytes([value]) for value in range(256)) + tuple(mark.encode() for mark in SPECIALS)
"""What each token reads as."""


class ByteTokenizer:
    """Bytes and chat marks; `decode(encode(text)) == text` for every text."""

    vocab_size = VOCAB_SIZE
    eos_token_id = IM_END
    """The end of a turn, as in instruction-tuned models."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`; marks show as themselves, bytes that are no UTF-8 as U+FFFD."""
        raw = b"".join(BYTES_OF[token] for token in tokens)
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")

    def apply_chat_template(self, messages: Messages, *, add_generation_prompt: bool = False) -> list[int]:
        """ChatML: `<|im_start|>role`, newline, content, `<|im_end|>`, newline."""
        tokens: list[int] = []
        for message in messages:
            text, calls = content_text(message.get("content")), message.get("tool_calls")
            if calls:
                text += json.dumps(calls, ensure_ascii=False, sort_keys=True, default=str)
            tokens += [IM_START, *self.encode(f"{message['role']}\n{text}"), IM_END, ord("\n")]
        if add_generation_prompt:
            tokens += [IM_START, *self.encode("assistant\n")]
        return tokens
