"""Template filters of all pages: numbers, times and intervals in the house format.

`visible` is for every text that a person or a model wrote: control characters and marks that turn the writing
direction become escapes that are only printed. The template engine escapes HTML.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

from django import template

from evsys_sdk import format as house

register = template.Library()


@register.filter
def visible(text: object) -> str:
    """Text of others with its control characters as text."""
    return house.visible(str(text)) if text is not None else ""


@register.filter
def number(value: float | None) -> str:
    """`0.938`, or `-` where there is none."""
    return "-" if value is None else house.shown(value) if math.isfinite(value) else str(value)


@register.filter
def interval(low: float | None, high: float | None) -> str:
    """`[0.832, 0.979]`, or nothing."""
    return house.span(low, high).strip()


@register.filter
def day(seconds: float | None) -> str:
    """`2026-11-18`."""
    return _clock(seconds, "%Y-%m-%d")


@register.filter
def moment(seconds: float | None) -> str:
    """`2026-11-18 13:05` in UTC."""
    return _clock(seconds, "%Y-%m-%d %H:%M")


@register.filter
def iso(seconds: float | None) -> str:
    """For the `datetime` attribute of `time`."""
    return _clock(seconds, "%Y-%m-%dT%H:%M:%SZ")


def _clock(seconds: float | None, pattern: str) -> str:
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(pattern)
    except (OverflowError, ValueError, OSError):  # a client may send any number
        return "?"


@register.filter
def duration(seconds: float | None) -> str:
    """`45 s`, `12 min`, `3.4 h`, `2.1 d`."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    for size, unit in ((86400.0, "d"), (3600.0, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    # Minutes from 90 s on: below, a rounded minute would hide up to a third of the time.
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.2g} s"


@register.filter
def dollars(value: float | None) -> str:
    """`$0.0042`, `$12.30`."""
    if value is None or not math.isfinite(value):
        return ""
    return f"${value:,.2f}" if value == 0 or value >= 0.1 else f"${value:.2g}"


@register.filter
def amount(n: int | None, what: str) -> str:
    """`1 task`, `1,200 tasks`."""
    return house.count(n or 0, what)


@register.filter
def size(n_bytes: int | None) -> str:
    """`812 B`, `4.2 kB`, `1.3 MB`."""
    if n_bytes is None:
        return ""
    value, unit = float(n_bytes), "B"
    # Powers of 1,000 (SI), as disks and networks count.
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
