"""Charts of the Progress page, as SVG.

In: leaderboards, importances and calibration (`leaderboards`). Out: markup. Each chart has a table beside it on the
page for readers who do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from django.utils.safestring import SafeString

from evsys_dashboard.leaderboards import Calibration, Dot, Leaderboard, ScoredArm, SettingImportance
from evsys_dashboard.svg import Scale, element, join, tick_text
from evsys_sdk.format import shown, span

WIDTH, HEIGHT = 960.0, 340.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 16.0, 12.0, 34.0
CROWDED = 150
"""Dots from which on they are drawn smaller, and only the lineage of kept ones is."""
MOST_LINES = 300
"""Arms in the parallel coordinates; the newest."""
MOST_AXES = 6
HOUR, DAY = 3600.0, 86400.0
MINUTE = 60.0
TIME_STEPS = (
    MINUTE,
    5 * MINUTE,
    15 * MINUTE,
    30 * MINUTE,
    HOUR,
    3 * HOUR,
    6 * HOUR,
    12 * HOUR,
    DAY,
    2 * DAY,
    7 * DAY,
    14 * DAY,
    30 * DAY,
    90 * DAY,
    365 * DAY,
)
FATE_CLASS = {"kept": "kept", "discarded": "discarded", "undecided": "unclear"}


def _frame(*children: SafeString, width: float, height: float, label: str) -> SafeString:
    return element(
        "svg", *children, class_="chart", viewBox=f"0 0 {width:g} {height:g}", role="group", aria_label=label
    )


def _value_axis(up: Scale, right: float) -> SafeString:
    """Grid lines across, with their numbers."""
    parts = []
    for tick in up.ticks(5):
        parts.append(element("line", x1=LEFT, x2=right, y1=up(tick), y2=up(tick), class_="grid"))
        parts.append(element("text", tick_text(tick), x=LEFT - 8, y=up(tick) + 4, text_anchor="end"))
    return join(parts)


def _time_axis(across: Scale, y: float) -> SafeString:
    """Dates along the bottom, at round times."""
    width = across.high - across.low
    if not width:
        text = datetime.fromtimestamp(across.low, UTC).strftime("%Y-%m-%d %H:%M")
        return element("text", text, x=across(across.low), y=y + 18, text_anchor="middle")
    # At most 7 labels: more would run into each other, with the hour beside the date.
    step = next((size for size in TIME_STEPS if width / size <= 7), max(365 * DAY, width / 7))
    first = math.ceil(across.low / step)
    marks = [number * step for number in range(first, math.floor(across.high / step) + 1)]
    pattern = "%Y-%m-%d" if step >= DAY else "%Y-%m-%d %H:%M"
    if len(marks) < 2:  # experiments that ended within a minute or two: the time of the first and of the last
        marks, pattern = [across.low, across.high], "%Y-%m-%d %H:%M:%S"
    parts = []
    for at in marks:
        text = datetime.fromtimestamp(at, UTC).strftime(pattern)
        # A label at an end must not stand out of the picture.
        anchor = "start" if at == across.low else "end" if at == across.high else "middle"
        parts.append(element("line", x1=across(at), x2=across(at), y1=y, y2=y + 4, class_="axis"))
        parts.append(element("text", text, x=across(at), y=y + 18, text_anchor=anchor))
    return join(parts)


def progress_chart(leaderboard: Leaderboard, *, by_order: bool = False) -> SafeString:
    """The best score over time with the noise around it, and each experiment as a dot with its interval.

    `by_order`: evenly spaced, one experiment after another, instead of by the clock.
    """
    dots = leaderboard.dots
    if not dots:
        return SafeString("")
    places = [float(number) for number in range(len(dots))] if by_order else [dot.when for dot in dots]
    heights = [value for dot in dots for value in (dot.score, dot.low, dot.high) if value is not None]
    low, high = min(heights), max(heights)
    pad = (high - low) * 0.06 or max(abs(high) * 0.05, 0.01)
    floor_y, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    # Neither the axis nor the band goes where no score can be, such as beyond 1.
    least, most = leaderboard.bounds
    up = Scale(low=max(low - pad, min(least, low)), high=min(high + pad, max(most, high)), start=floor_y, end=TOP)
    across = Scale(low=min(places), high=max(places), start=LEFT + 12, end=right - 12)
    spots = [(across(place), up(dot.score)) for place, dot in zip(places, dots, strict=True)]
    bottom = SafeString("") if by_order else _time_axis(across, floor_y)
    return _frame(
        _value_axis(up, right),
        element("line", x1=LEFT, x2=right, y1=floor_y, y2=floor_y, class_="axis"),
        bottom,
        _best_line(leaderboard, spots, up, right),
        _lineage(dots, spots),
        _whiskers(dots, spots, up),
        *(_dot(dot, spot, len(dots)) for dot, spot in zip(dots, spots, strict=True)),
        width=WIDTH,
        height=HEIGHT,
        label=f"{leaderboard.label} over time, {len(dots)} experiments; the table below has the numbers",
    )


def _best_line(leaderboard: Leaderboard, spots: Sequence[tuple[float, float]], up: Scale, right: float) -> SafeString:
    """Steps from one kept experiment to the next, and around each as much as may be noise."""
    kept = [(x, dot) for dot, (x, _) in zip(leaderboard.dots, spots, strict=True) if dot.fate == "kept"]
    if not kept:
        return SafeString("")
    ends = [x for x, _ in kept[1:]] + [right]
    line = " ".join(
        f"{'M' if number == 0 else 'L'}{x:.1f} {up(dot.score):.1f}H{end:.1f}"
        for number, ((x, dot), end) in enumerate(zip(kept, ends, strict=True))
    )
    bands = []
    if leaderboard.noise_floor is not None:
        for (x, dot), end in zip(kept, ends, strict=True):
            top = up(min(dot.score + leaderboard.noise_floor, up.high))
            bottom = up(max(dot.score - leaderboard.noise_floor, up.low))
            bands.append(element("rect", x=x, y=top, width=max(0.0, end - x), height=bottom - top, class_="band"))
    return join([*bands, element("path", d=line, class_="best")])


def _lineage(dots: Sequence[Dot], spots: Sequence[tuple[float, float]]) -> SafeString:
    """A line from each experiment's parent to it; of many experiments only to those that were kept."""
    by_name: dict[str, tuple[float, float]] = {}
    paths = []
    for dot, (x, y) in zip(dots, spots, strict=True):
        start = by_name.get(dot.parent) if dot.parent else None
        if start is not None and (len(dots) <= CROWDED or dot.fate == "kept"):
            paths.append(f"M{start[0]:.1f} {start[1]:.1f}L{x:.1f} {y:.1f}")
        # Names may repeat: the newest before the child is meant, and an id always is.
        by_name[dot.name] = by_name[dot.experiment_id] = (x, y)
    return element("path", d="".join(paths), class_="lineage") if paths else SafeString("")


def _whiskers(dots: Sequence[Dot], spots: Sequence[tuple[float, float]], up: Scale) -> SafeString:
    parts = []
    for fate, name in FATE_CLASS.items():
        path = "".join(
            f"M{x:.1f} {up(dot.low):.1f}V{up(dot.high):.1f}"
            for dot, (x, _) in zip(dots, spots, strict=True)
            if dot.fate == fate and dot.low is not None and dot.high is not None
        )
        if path:
            thin = " thin" if len(dots) > CROWDED else ""
            parts.append(element("g", element("path", d=path, class_=f"whisker{thin}"), class_=name))
    return join(parts)


def _dot(dot: Dot, spot: tuple[float, float], n: int) -> SafeString:
    mark = f" ({dot.training_mark})" if dot.training_mark else ""
    text = f"{dot.name}: {shown(dot.score)}{span(dot.low, dot.high)}{mark}, {dot.fate}"
    circle = element("circle", cx=spot[0], cy=spot[1], r=3 if n > CROWDED else 5, class_=f"dot {FATE_CLASS[dot.fate]}")
    # Not a stop of the Tab key: the table has the same links, and there may be a thousand dots.
    return element(
        "a",
        element("title", text[:300]),
        circle,
        href=f"experiments/{quote(dot.experiment_id, safe='')}",
        tabindex="-1",
    )


def importance_chart(found: Sequence[SettingImportance]) -> SafeString:
    """A bar per setting."""
    height = 26.0
    across = Scale(low=0, high=1, start=200, end=520)
    parts = []
    for number, one in enumerate(found):
        y = number * height
        parts += [
            element("text", _short(one.setting, 30), x=192, y=y + 17, text_anchor="end"),
            element("rect", x=200, y=y + 6, width=320, height=14, rx=3, class_="bar-back"),
            element("rect", x=200, y=y + 6, width=across(one.explained) - 200, height=14, rx=3, class_="bar-fill"),
            element("text", f"{100 * one.explained:.0f} %", x=530, y=y + 17),
        ]
    total = len(found) * height
    return _frame(*parts, width=600, height=total, label="Variance explained per setting; the table has the numbers")


def parallel_chart(arms: Sequence[ScoredArm], found: Sequence[SettingImportance], mode: str) -> SafeString:
    """A line per arm over its settings to its score; the best tenth stands out."""
    arms = arms[:MOST_LINES]
    keys = [one.setting for one in found][:MOST_AXES]
    if not keys or not arms:
        return SafeString("")
    axes = [_axis([arm.settings.get(key) for arm in arms]) for key in keys]
    scores = [arm.score for arm in arms]
    score_scale = Scale(low=min(scores), high=max(scores), start=HEIGHT - BOTTOM, end=TOP + 24)
    spots = [80 + number * (WIDTH - 160) / len(keys) for number in range(len(keys) + 1)]
    ranked = sorted(scores, reverse=mode == "max")
    sign = 1 if mode == "max" else -1
    top, middle = sign * ranked[max(0, math.ceil(len(ranked) / 10) - 1)], sign * ranked[(len(ranked) - 1) // 2]
    # Lines through one value lie beside each other, by their score: so a reader sees how many they are.
    beside = {score: 14 * (rank / max(1, len(ranked) - 1) - 0.5) for rank, score in enumerate(ranked)}
    lines = []
    for arm in arms:
        shift = beside[arm.score]
        heights = [place(arm.settings.get(key)) + shift for key, (place, _) in zip(keys, axes, strict=True)]
        path = "M" + "L".join(
            f"{x:.1f} {y:.1f}" for x, y in zip(spots, [*heights, score_scale(arm.score)], strict=True)
        )
        level = 2 if sign * arm.score >= top else 1 if sign * arm.score >= middle else 0
        lines.append((level, element("path", d=path, class_=f"polyline q{level}")))
    # In SVG what comes last lies on top: the best tenth.
    parts = [line for _, line in sorted(lines, key=lambda pair: pair[0])]
    score_ticks = [(tick_text(tick), score_scale(tick)) for tick in score_scale.ticks(5)]
    for x, key, (_, ticks) in zip(spots, [*keys, "score"], [*axes, (None, score_ticks)], strict=True):
        parts.append(element("line", x1=x, x2=x, y1=TOP + 24, y2=HEIGHT - BOTTOM, class_="axis"))
        parts.append(
            element("text", _short(key.rsplit(".", 1)[-1], 20), x=x, y=TOP + 8, text_anchor="middle", class_="title")
        )
        parts += [element("text", text, x=x + 7, y=y + 4, class_="halo") for text, y in ticks]
    return _frame(*parts, width=WIDTH, height=HEIGHT, label=f"Settings and scores of {len(arms)} arms")


def _axis(values: Sequence[Any]) -> tuple[Any, list[tuple[str, float]]]:
    """Where a value stands on its axis, and the axis' labels: by size for numbers, else one place per value."""
    top, bottom = TOP + 34, HEIGHT - BOTTOM - 10
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == len(values) and all(map(math.isfinite, numbers)):
        low, high = min(numbers), max(numbers)
        # From a factor of 50 on, as of learning rates, a linear axis would put most values in one place.
        scale = Scale(low=low, high=high, start=bottom, end=top, is_log=low > 0 and high / low >= 50)
        distinct = sorted(set(numbers))
        ticks = distinct if len(distinct) <= 8 else scale.ticks(5)
        return (lambda value: scale(float(value))), [(tick_text(tick), scale(tick)) for tick in ticks]
    # Numbers by size and words after them: where an arm lacks the setting, 16 must not stand before 2.
    distinct_values = {"(not set)" if value is None else str(value): value for value in values}
    is_number = {text: isinstance(value, int | float) for text, value in distinct_values.items()}
    texts = sorted(
        distinct_values, key=lambda one: (not is_number[one], distinct_values[one] if is_number[one] else 0, one)
    )
    places = Scale(low=0, high=max(1, len(texts) - 1), start=bottom, end=top)
    at = {text: places(number) for number, text in enumerate(texts)}
    labels = [(_short(text, 18), place) for text, place in at.items()]
    return (lambda value: at["(not set)" if value is None else str(value)]), labels


def calibration_chart(found: Calibration) -> SafeString:
    """Share that came true against the confidence stated; on the diagonal the two agree."""
    size = 360.0
    across = Scale(low=0, high=1, start=LEFT, end=size - RIGHT)
    up = Scale(low=0, high=1, start=size - 44, end=TOP)
    parts = [_value_axis(up, size - RIGHT)]
    for tick in across.ticks(5):
        parts.append(element("text", tick_text(tick), x=across(tick), y=size - 26, text_anchor="middle"))
    parts.append(element("text", "confidence stated", x=across(0.5), y=size - 8, text_anchor="middle"))
    parts.append(element("line", x1=across(0), y1=up(0), x2=across(1), y2=up(1), class_="diagonal"))
    for one in found.bins:
        x = across(one.predicted)
        text = f"{one.n} predictions with {100 * one.predicted:.0f} % on average: {100 * one.happened:.0f} % supported"
        parts.append(
            element(
                "g",
                element("title", text),
                element("path", d=f"M{x:.1f} {up(one.happened_low):.1f}V{up(one.happened_high):.1f}", class_="whisker"),
                element("circle", cx=x, cy=up(one.happened), r=4 + min(6.0, math.sqrt(one.n)), class_="dot"),
                class_="calibrated",
            )
        )
    return _frame(
        *parts, width=size, height=size, label=f"Calibration of {found.n} predictions; the table has the numbers"
    )


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
