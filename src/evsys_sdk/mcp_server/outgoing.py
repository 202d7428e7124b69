"""What leaves the server.

In: a result as plain data, or the error of a verb. Out: the text that the verb prints with `--json`, without its last
line end, and the same as data. Secrets are redacted as on the command line. Control characters, which JSON only escapes
and a client would decode again, are taken out of every string.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from evsys_sdk.files import to_json
from evsys_sdk.format import harmless, without_control


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """One answer of a tool."""

    text: str
    data: dict[str, Any]
    is_error: bool = False


def answer_of(result: dict[str, Any]) -> ToolAnswer:
    """The answer that `print_json` of this result would have been."""
    return answer_of_text(harmless(to_json(result, indent=2)))


def answer_of_text(printed: str) -> ToolAnswer:
    """The answer that a verb printed."""
    data = json.loads(printed)
    cleaned = _clean(data)
    if cleaned != data:
        printed = harmless(to_json(cleaned, indent=2))
    return ToolAnswer(text=printed, data=cleaned)


def error_answer(refused: dict[str, Any]) -> ToolAnswer:
    """A refusal: the message for the model as text, and as data what `--json` prints of it."""
    answer = answer_of(refused)
    return ToolAnswer(text=answer.data["error"], data=answer.data, is_error=True)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return without_control(value)
    if isinstance(value, dict):
        return {without_control(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value
