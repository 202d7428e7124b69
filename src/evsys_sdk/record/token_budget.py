"""Text that fits: sections of lines, as many as a number of tokens allows.

In: sections whose lines come in order of importance. Out: the sections with the lines that fit, and how many did not.

Tokens are estimated, since every model counts otherwise: a run of ASCII letters counts one for every five begun, any
other sign that is not a space one, the end of a line one. On what `evsys context` prints that is 0-5 % above what the
tokenizer of SmolLM2 says, which takes digits one by one, and some 30 % above GPT-4o's: the budget holds for either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

LETTERS = 5
BESIDE = 4
"""Tokens that a line costs besides its words: the bullet or the quotes, and its end."""
_PIECE = re.compile(r"[A-Za-z]+|[^\sA-Za-z]|\n")


def count_tokens(text: str) -> int:
    """An estimate on the high side."""
    return sum(-(-len(piece) // LETTERS) for piece in _PIECE.findall(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and its lines, the most important first."""

    title: str
    lines: tuple[str, ...]
    left_out: int = 0
    share: int = 1
    """Lines it gets at each turn."""


def fit(sections: Sequence[Section], tokens: int, render: Callable[[Sequence[Section]], str]) -> list[Section]:
    """The sections cut so that `render` of them is within `tokens`; each gets lines in turn, so that none starves."""
    kept = [0] * len(sections)
    room = tokens - count_tokens(render(_cut(sections, kept)))
    hungry = list(range(len(sections)))
    while hungry:
        room, hungry = _serve(sections, kept, hungry, room)
    while any(kept) and count_tokens(render(_cut(sections, kept))) > tokens:
        kept[max(range(len(kept)), key=kept.__getitem__)] -= 1
    return _cut(sections, kept)


def _serve(sections: Sequence[Section], kept: list[int], hungry: list[int], room: int) -> tuple[int, list[int]]:
    """One turn: what room is left, and who can still take more."""
    still = []
    for index in hungry:
        section = sections[index]
        for line in section.lines[kept[index] : kept[index] + section.share]:
            cost = count_tokens(line) + BESIDE
            if cost > room:
                break
            room -= cost
            kept[index] += 1
        else:
            still += [index] if kept[index] < len(section.lines) else []
    return room, still


def _cut(sections: Sequence[Section], kept: Sequence[int]) -> list[Section]:
    return [
        replace(section, lines=section.lines[:count], left_out=len(section.lines) - count)
        for section, count in zip(sections, kept, strict=True)
    ]
