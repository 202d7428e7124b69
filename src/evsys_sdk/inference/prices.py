"""What the providers' models cost, as of a date.

In: a model's name. Out: dollars per million tokens, or None for a model that is not listed. List prices of plain
requests: discounts (batches, cached input) and surcharges (very long prompts) are not in them. A client's `price`
setting comes first.
"""

from __future__ import annotations

import re

from pydantic import Field

from evsys_sdk.config.base import Params

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
