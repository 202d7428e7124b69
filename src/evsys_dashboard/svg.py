"""SVG from Python: elements whose texts and attributes are escaped, and scales from numbers to pixels.

In: numbers and texts of others. Out: markup that a template may print as it is. Colours come from classes in
dashboard.css, never from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from django.utils.html import conditional_escape, escape
from django.utils.safestring import SafeString, mark_safe

from evsys_sdk.format import shown, visible

Attribute = str | float | int | None


def element(tag: str, *children: str, **attributes: Attribute) -> SafeString:
    """`element("text", name, x=4, class_="axis")`. Texts are escaped, other elements are not; None leaves out."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    inner = "".join(
        str(child) if isinstance(child, SafeString) else str(conditional_escape(visible(child))) for child in children
    )
    # Safe: the tag and the names of attributes are ours, every value and text above is escaped.
    return mark_safe(f"<{tag}{given}>{inner}</{tag}>" if inner else f"<{tag}{given}/>")


def _plain(value: str | float) -> str:
    if isinstance(value, str):
        return visible(value)
    # A tenth of a pixel is enough, and keeps the page small.
    return f"{round(value, 1):g}" if math.isfinite(value) else "0"


def join(parts: Sequence[SafeString]) -> SafeString:
    """Elements one after another."""
    return mark_safe("".join(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From numbers to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.is_log:
            # 5e-324 is the smallest float above 0: a zero on a logarithmic axis stands at its low end.
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, 5e-324))
        share = 0.5 if high == low else (at - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self, n: int = 5) -> list[float]:
        """Round numbers within the scale, about `n` of them."""
        if self.is_log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, (last - first) // n)
            return [10.0**power for power in range(first, last + 1, every)] or [self.low, self.high]
        width = self.high - self.low
        if not width > 0 or not math.isfinite(width):
            return [self.low]
        rough = width / n
        size = 10 ** math.floor(math.log10(rough))
        # The next of 1, 2, 2.5, 5 times a power of ten, so that labels are short; 0.999 forgives rounding.
        step = next((size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999), rough)
        first = math.ceil(self.low / step - 1e-9)
        # Adding 0.0 makes -0.0 a plain 0.
        return [round(number * step, 12) + 0.0 for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def tick_text(value: float) -> str:
    """`0.25`, `1e-05`, `12`: as short as the number allows."""
    return f"{value:g}" if abs(value) < 1e5 else f"{value:.3g}"


def spark_line(values: Sequence[float | None], label: str = "") -> SafeString:
    """A small line of at most some dozens of numbers; gaps where a value is missing or no number."""
    points = [
        (at, float(value))
        for at, value in enumerate(values)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]
    if len(points) < 2:
        return SafeString("")
    heights = [value for _, value in points]
    across = Scale(low=0, high=max(1, len(values) - 1), start=2, end=82)
    up = Scale(low=min(heights), high=max(heights), start=21, end=3)
    path = "M" + "L".join(f"{across(at):.1f} {up(value):.1f}" for at, value in points)
    last_at, last = points[-1]
    text = f"{label or 'from'} {shown(heights[0])} to {shown(last)}"
    return element(
        "svg",
        element("title", text),
        element("path", d=path),
        element("circle", cx=across(last_at), cy=up(last), r=2),
        class_="spark",
        viewBox="0 0 84 24",
        role="img",
        aria_label=text,
    )
