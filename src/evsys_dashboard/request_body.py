"""What a request may hold: its JSON without what no database stores, and a check of each field.

In: a body as a client sent it, or data that `follow` read from a folder. Out: `ReadFields`, by column. What is wrong is
a `Refusal` that names the field; nothing here touches a table.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evsys_dashboard.auth import Refusal
from evsys_dashboard.points import MAX_NAME, MAX_STEP
from evsys_dashboard.settings import MAX_BODY_BYTES
from evsys_sdk.record.dashboard import wire

JsonDict = dict[str, Any]

STATUSES = frozenset(
    ["running", "completed", "partial", "failed", "cancelled", "pruned", "interrupted", "invalid", "unreadable"]
)
MAX_ID = 100
MAX_DEPTH = 60
"""Of JSON: deeper data is no record of ours, and would end in a RecursionError somewhere."""
MAX_SECONDS = 1e11
"""Since the epoch."""
UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
"""Characters that PostgreSQL cannot store: NUL and half a surrogate pair."""
HINTS = (b"\\u0000", b"\\ud", b"\\uD")
"""How JSON writes them; a body without these need not be searched."""
TEXT_HINTS = tuple(hint.decode() for hint in HINTS)


def unpack(data: bytes, encoding: str, *, limit: int = MAX_BODY_BYTES) -> bytes:
    """A request's body without its compression; a Refusal where it is larger than `limit` or no such stream."""
    if encoding in ("", "identity"):
        return data
    if encoding != "gzip":
        raise Refusal(415, f"Content-Encoding {encoding!r} is not known here; send gzip or plain JSON")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        # One byte more than allowed is asked for, never the whole: a bomb of a kilobyte unpacks to gigabytes.
        plain = unpacker.decompress(data, limit + 1)
    except zlib.error as exc:
        raise Refusal(422, f"the body is no gzip stream: {exc}") from None
    if len(plain) > limit:
        raise Refusal(413, f"the body unpacks to more than {limit:,} bytes; send smaller batches")
    if not unpacker.eof:
        raise Refusal(422, "the gzip stream is cut short")
    return plain


def parse_body(data: bytes, encoding: str = "") -> JsonDict:
    """The JSON object of a request; a Refusal where it is none."""
    plain = unpack(data, encoding)
    try:
        body = json.loads(plain, parse_constant=_refuse_constant)
    except RecursionError:
        raise Refusal(422, "the JSON is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as exc:
        raise Refusal(422, f"the body is no JSON: {exc}") from None
    if not isinstance(body, dict):
        raise Refusal(422, f"expected a JSON object, got {type(body).__name__}")
    if any(hint in plain for hint in HINTS):
        body = storable(body)
    return body


def _refuse_constant(text: str) -> None:
    raise ValueError(f'{text} is not JSON; send it as the string "{text}"')


def storable(value: object, depth: int = 0) -> Any:
    """The data with every character that a database cannot store replaced by U+FFFD."""
    if depth > MAX_DEPTH:
        raise Refusal(422, "the JSON is nested too deeply")
    if isinstance(value, str):
        return UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {storable(key): storable(item, depth + 1) for key, item in value.items()}
    return [storable(item, depth + 1) for item in value] if isinstance(value, list) else value


def finite(value: object) -> Any:
    """Plain data as JSON columns take it: NaN and infinities as their words, tuples as lists."""
    if isinstance(value, float):
        return (
            value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        )
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def clean(value: object) -> Any:
    """Plain data as a JSON column stores it: `finite` and `storable`. Most data is, and is only looked at."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return storable(finite(value))
    return storable(finite(value)) if any(hint in text for hint in TEXT_HINTS) else value


# Fields. Each reader takes a value of a request and returns what the column takes, or raises ValueError.


def read_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {type(value).__name__}")
    return value


def read_name(value: object) -> str:
    return read_text(value)[:MAX_NAME]


def read_claim(value: object) -> str:
    # A typed hypothesis is a mapping; the column has its claim, the config the whole.
    return read_text(value.get("claim", "") if isinstance(value, dict) else value)


def read_status(value: object) -> str:
    if value not in STATUSES:
        raise ValueError(f"{value!r} is no status; known: {', '.join(sorted(STATUSES))}")
    return str(value)


def read_dict(value: object) -> JsonDict:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


def read_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {type(value).__name__}")
    return value


def read_objects(value: object) -> list[JsonDict]:
    return [read_dict(item) for item in read_list(value)]


def read_scores(value: object) -> list[JsonDict]:
    """Pages format these numbers: a word among them would be an error on every page of the run."""
    found = read_objects(value)
    for score in found:
        for key in ("value", "low", "high"):
            if score.get(key) is not None:
                read_number(score[key])
        for key in ("n_tasks", "n_rollouts", "n_errors"):
            if score.get(key) is not None:
                read_step(score[key])
    return found


def read_checkpoints(value: object) -> list[JsonDict]:
    return [{**one, "step": read_step(one.get("step"))} for one in read_objects(value)]


def finite_or_none(value: object) -> float | None:
    """None for what is not finite, where a column is only sorted by."""
    found = read_number(value)
    return found if math.isfinite(found) else None


def read_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a number, got {type(value).__name__}")
    try:
        return wire.number(value)
    except OverflowError:
        raise ValueError("the number is too large") from None


def read_step(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_STEP:
        raise ValueError(f"{value!r} is no step: a whole number, at most {MAX_STEP:,}")
    return value


def read_id(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID or "/" in value:
        raise ValueError(f"{str(value)[:120]!r} is no id: 1 to {MAX_ID} characters without a slash")
    return value


Readers = Mapping[str, Callable[[object], Any]]
EXPERIMENT: Readers = {
    "name": read_name, "description": read_text, "hypothesis": read_claim, "status": read_status, "tags": read_list,
    "metadata": read_dict, "config": read_dict, "parent_experiment_id": read_name, "conclusion": read_text,
    "best_score": finite_or_none, "record": read_dict, "notes": read_objects, "figures": read_dict,
    "problem": read_text, "cost_usd": finite_or_none,
}  # fmt: skip
GENERATION: Readers = {
    "name": read_name, "recipe_kind": read_name, "status": read_status, "run_config": read_dict,
    "metrics": read_dict, "artifacts": read_dict, "checkpoints": read_checkpoints, "error": read_text,
    "conclusion": read_text, "record": read_dict, "log_tail": read_text, "arm": read_name, "seed": read_step,
}  # fmt: skip
EVAL: Readers = {
    "name": read_name, "split": read_name, "stage": read_name, "step": read_step, "metrics": read_dict,
    "scores": read_scores, "breakdown": read_dict, "benchmark_id": read_name, "error": read_text,
    "seconds": finite_or_none,
}  # fmt: skip
SUITE: Readers = {
    "name": read_name, "version": read_name, "split": read_name, "n_rows": read_step, "sha256": read_name,
    "lineage": read_dict, "description": read_text,
}  # fmt: skip
NOT_STORED = frozenset(["id", "ts", "experiment_id", "generation_id"])


def read_time(value: object) -> float:
    found = read_number(value)
    if not 0 <= found < MAX_SECONDS:
        raise ValueError(f"{value!r} is no time in seconds since the epoch")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFields:
    """The fields of a request, checked."""

    ts: float
    known: JsonDict
    """By column."""
    extra: JsonDict = field(default_factory=dict)
    """What has no column."""


def read_fields(body: Mapping[str, object], readers: Readers) -> ReadFields:
    """Check a body; a Refusal names the field that is wrong."""
    known = {key: read_field(readers[key], body, key) for key in body if key in readers and body[key] is not None}
    extra = {key: value for key, value in body.items() if key not in readers and key not in NOT_STORED}
    return ReadFields(ts=read_field(read_number, body, "ts"), known=known, extra=extra)


def read_field[T](reader: Callable[[object], T], body: Mapping[str, object], key: str) -> T:
    try:
        return reader(body[key])
    except KeyError:
        raise Refusal(422, f"{key}: missing") from None
    except ValueError as exc:
        raise Refusal(422, f"{key}: {exc}") from None


def id_in(body: Mapping[str, object]) -> str:
    """The id that a client gave a new record."""
    return read_field(read_id, body, "id")
