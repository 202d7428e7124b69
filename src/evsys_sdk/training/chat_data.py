"""Chats to imitate, ready to train on.

In: rows of any run that imitates, a renderer, what to learn of each row and how long it may be. Out: data with the row
each came from, and an account of what was cut or left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from evsys_sdk.data_types import ChatMessagesRow, TargetFormat, is_learnt, parse_rows
from evsys_sdk.errors import DataError
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import Renderer
from evsys_sdk.training.rendering import TrainOn, messages_of, row_to_data
from evsys_sdk.training_api import Datum

SHOWN_IDS = 20
OnTruncate = Literal["cut", "drop", "error"]


@dataclass(slots=True, kw_only=True)
class ChatData:
    """The rows as data; what is said of `truncated` and `dropped` are row ids."""

    data: list[Datum] = field(default_factory=list)
    row_ids: list[str] = field(default_factory=list)
    """Of each datum; a row can make several."""
    truncated: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        return {"rows_truncated": len(self.truncated), "rows_dropped": len(self.dropped)}

    def notes(self) -> dict[str, Any]:
        """For the record."""
        return {"truncated_rows": self.truncated, "dropped_rows": self.dropped} if self.truncated else {}


def chat_data(
    rows: Any,
    renderer: Renderer,
    *,
    algorithm: str,
    train_on: TrainOn = "all",
    max_length: int,
    on_truncate: OnTruncate = "cut",
) -> ChatData:
    """All rows rendered, once; an error names the row it is about."""
    found = ChatData()
    for index, row in enumerate(read_chats(rows, algorithm)):
        name = row_id(row, index)
        try:
            data, truncated = row_to_data(row, renderer, train_on=train_on, max_length=max_length)
        except DataError as exc:
            raise DataError(f"row {name}: {exc}") from exc
        if truncated:
            found.truncated.append(name)
        elif not data:
            raise DataError(_nothing_to_learn(row, name, "no assistant message with content"))
        if not data or (on_truncate == "drop" and truncated):
            found.dropped.append(name)
        else:
            found.data += data
            found.row_ids += [name] * len(data)
    if found.truncated:
        more = len(found.truncated) - SHOWN_IDS
        said = (
            f"{len(found.truncated)} rows are longer than max_length {max_length} ({len(found.dropped)} of them left "
            f"out): {', '.join(found.truncated[:SHOWN_IDS])}{f' and {more} more' if more > 0 else ''}"
        )
        if on_truncate == "error":
            raise DataError(f"{said}; raise max_length, or set on_truncate to cut or drop")
        get_logger(__name__).warning(said)
    if not found.data:
        raise DataError("no row is left to train on")
    return found


def read_chats(rows: Any, algorithm: str) -> list[ChatMessagesRow]:
    """Typed chat rows, or an error that says how to get them."""
    rows = list(rows or [])
    if not rows:
        raise DataError("there are no training rows")
    try:
        return parse_rows(rows, TargetFormat.CHAT_MESSAGES)
    except DataError as exc:
        other = next((row for row in rows if not (isinstance(row, dict) and "messages" in row)), None)
        if other is None:
            raise  # all are chats, with a mistake in one of them: a transform would not mend it
        raise DataError(f"{exc}\n{algorithm} needs chats: {_way_to_chats(other)}") from exc


def _way_to_chats(other: object) -> str:
    """The transform that makes chats of such rows."""
    row = other if isinstance(other, dict) else {}
    if "conversations" in row or "conversation" in row:
        kind = "sharegpt_to_chat"
    elif {"instruction", "output"} <= row.keys():
        kind = "alpaca_to_chat"
    elif "chosen" in row and "rejected" in row:
        return "these rows are pairs of answers, for the algorithm dpo (transform to_preference)"
    else:
        kind = "to_plain_text" if "text" in row else "jsonl_to_chat"
    return f"add the transform {kind} to data.transforms"


def check_chats(rows: Any, algorithm: str) -> None:
    """Raise if these rows are no chats, or if in one of them the assistant says nothing."""
    for index, row in enumerate(read_chats(rows, algorithm)):
        if not any(is_learnt(message) for message in messages_of(row)):
            raise DataError(_nothing_to_learn(row, row_id(row, index), "no assistant message"))


def _nothing_to_learn(row: ChatMessagesRow, name: str, reason: str) -> str:
    if any(message.get("weight") == 0 and message["role"] != "user" for message in row.messages):
        reason = "every assistant message has weight 0; leave the row out, or give one of them weight 1"
    return f"row {name} has nothing to learn from: {reason}"


def row_id(row: ChatMessagesRow, index: int) -> str:
    """The row's own id where it has one, else its number (from 0)."""
    return str(row.metadata.get("id", index))
