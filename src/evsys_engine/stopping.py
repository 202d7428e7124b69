"""When a completion is over.

In: the tokens of a row so far. Out: nothing, or how many of them stay. A stop id stays as the last token; a stop
string is cut off, with every token that holds a piece of it, unless it is to stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evsys_engine.types import BadRequest

MARGIN = 8
"""Tokens decoded before those that can hold a stop string: a tokenizer may treat a text's first one differently."""


class StopRule:
    """The stops of one request."""

    def __init__(
        self, stop: Sequence[str | int], end_ids: frozenset[int], tokenizer: Any, *, keep_strings: bool = False
    ):
        self._ids = end_ids | {item for item in stop if isinstance(item, int)}
        self._strings = [item for item in stop if isinstance(item, str)]
        self._tokenizer, self._keep_strings = tokenizer, keep_strings
        if "" in self._strings:
            raise BadRequest("stop has an empty string, which every text contains")
        if self._strings and tokenizer is None:
            raise BadRequest("stop has strings, but this model has no tokenizer; use token ids")
        # A token holds at least one byte, so no more than these can share in a stop string.
        self._window = MARGIN + max((len(item.encode("utf-8", "surrogatepass")) for item in self._strings), default=0)

    def kept(self, tokens: list[int]) -> int | None:
        """How many tokens stay if the last one ended the row; None if the row goes on. Ask after every token."""
        if tokens[-1] in self._ids:
            return len(tokens)
        if self._strings and self._place(tokens[-self._window :]) is not None:
            place = self._place(tokens)
            if place is not None:
                return len(tokens) if self._keep_strings else self._cut(tokens, place)
        return None

    def _place(self, tokens: list[int]) -> int | None:
        """Where in the text the first stop string begins."""
        text = self._text(tokens)
        return min((text.find(item) for item in self._strings if item in text), default=None)

    def _cut(self, tokens: list[int], place: int) -> int:
        kept = len(tokens) - 1
        while kept and len(self._text(tokens[:kept])) > place:
            kept -= 1
        return kept

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """What the model itself means by "the end"; these stop unless the request says otherwise."""
    found: set[int] = set()
    for owner in (tokenizer, getattr(model, "generation_config", None)):
        value = getattr(owner, "eos_token_id", None)
        found |= set(value) if isinstance(value, (list, tuple)) else {value} if value is not None else set()
    return frozenset(int(item) for item in found)
