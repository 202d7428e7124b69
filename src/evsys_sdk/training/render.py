"""Chat becomes tokens, by the model's own template; rows become training data.

In: messages, or a `ChatMessagesRow`. Out: token ids with a mask of what the assistant wrote, or a `Datum`. Training,
validation and benchmarks all render here, so the model is asked in exactly the words it was taught in.
"""

from __future__ import annotations

from array import array
from typing import Any, Literal

from evsys_sdk.data_types import ChatMessagesRow
from evsys_sdk.errors import DataError, blame
from evsys_sdk.protocols import Renderer
from evsys_sdk.surface import Datum, ModelInput, TensorData, Tokenizer

TrainOn = Literal["all", "last"]


class ChatRenderer:
    """Renders by prefixes: what a message adds to the tokens before it is that message's own."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Tokens up to where the assistant is to speak."""
        return self._render(messages, speak=True)

    def conversation(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Tokens of the whole chat and, per token, 1 where the assistant wrote it."""
        tokens = self._render(messages)
        mask = [0] * len(tokens)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                begin, end = self._span(messages, index, tokens)
                mask[begin:end] = [1] * (end - begin)
        return tokens, mask

    def _span(self, messages: list[dict[str, Any]], index: int, tokens: list[int]) -> tuple[int, int]:
        before = self.prompt(messages[:index])
        after = tokens if index == len(messages) - 1 else self._render(messages[: index + 1])
        if after[: len(before)] != before or tokens[: len(after)] != after:
            raise DataError(
                f"messages[{index}]: this model's chat template renders earlier turns differently once later ones "
                "follow, so the tokens of this turn cannot be told apart; keep one assistant message per row"
            )
        return len(before), self._end_of_turn(after, len(before))

    def _end_of_turn(self, tokens: list[int], begin: int) -> int:
        # What the template puts behind the end-of-turn token (ChatML: a newline) nobody ever generates.
        for position in range(len(tokens) - 1, begin - 1, -1):
            if tokens[position] == self.tokenizer.eos_token_id:
                return position + 1
        return len(tokens)

    def _render(self, messages: list[dict[str, Any]], *, speak: bool = False) -> list[int]:
        with blame(DataError, "the chat template"):
            return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=speak))


def messages_of(row: ChatMessagesRow) -> list[dict[str, Any]]:
    """The whole chat to imitate, with `target_assistant` as the last turn unless it is there already."""
    target = row.target_assistant
    if target is None or (row.messages[-1]["role"] == "assistant" and row.messages[-1].get("content") == target):
        return row.messages
    return [*row.messages, {"role": "assistant", "content": target}]


def row_to_datum(
    row: ChatMessagesRow, renderer: Renderer, *, train_on: TrainOn, max_length: int
) -> tuple[Datum | None, bool]:
    """The row as training data, and whether it was cut to `max_length` tokens. None where nothing is left to learn."""
    tokens, mask = renderer.conversation(messages_of(row))
    if train_on == "last":
        mask = _last_run(mask)
    truncated = len(tokens) > max_length
    tokens, mask = tokens[:max_length], mask[:max_length]
    if not any(mask[1:]):
        return None, truncated
    inputs = {
        "target_tokens": TensorData(array("q", tokens[1:]), "int64"),
        "weights": TensorData(array("f", mask[1:])),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs), truncated


def _last_run(mask: list[int]) -> list[int]:
    """Only the last unbroken stretch of 1s."""
    end = len(mask) - mask[::-1].index(1) if 1 in mask else 0
    begin = end
    while begin > 0 and mask[begin - 1]:
        begin -= 1
    return [int(begin <= position < end) for position in range(len(mask))]
