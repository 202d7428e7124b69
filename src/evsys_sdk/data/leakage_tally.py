"""What the matches of all rows come to: which tasks are leaked, and which only resemble the rows.

In: the matches of one row after the other. Out: a `Finding`. A match that is not word for word counts as a leak only
when all rows have passed: a near copy in too many different rows is a template, unless a text with words of its own has
other numbers in them, which is how a test set is multiplied. Of templates only those rows are copies that
`leakage_family` can tell from accidents. What stands in a prompt that many rows share is nobody's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from evsys_sdk.data.leakage_family import Family, Meeting
from evsys_sdk.data.leakage_index import Level, Match, closeness
from evsys_sdk.data.leakage_tasks import TaskText

MAX_VARIANTS = 20
"""Different rows that may be near copies of one task; with more, task and rows are of one family."""
MAX_SHARE = 0.5
"""Of the rows that may have a text as a part; with more, it is part of their prompt."""
_FEW_WORDS = 3


@dataclass(slots=True)
class Sightings:
    """The rows that hold one task text in one way."""

    best: Match
    row: int
    """The first with that best copy."""
    rows: int = 0
    variants: set[int] = field(default_factory=set)

    def add(self, match: Match, row: int) -> None:
        self.rows += 1
        is_like = match.kind == self.best.kind and match.overlap == self.best.overlap
        if not is_like and closeness(match) < closeness(self.best):
            self.best, self.row = match, row
        if len(self.variants) <= MAX_VARIANTS:
            self.variants.add(match.row_key)


Seen = tuple[TaskText, Level]


@dataclass(slots=True)
class Finding:
    """What is leaked, and what is not counted."""

    leaked: dict[TaskText, Sightings]
    """The closest copy of each text."""
    rows: int
    alike: set[TaskText]
    """Texts that share a template with rows, and are not leaked."""
    alike_rows: int
    shared: set[TaskText]
    """Texts that stand in a prompt of many rows, and are not leaked otherwise."""


@dataclass(slots=True)
class Tally:
    """Counts while the rows pass."""

    seen: dict[Seen, Sightings] = field(default_factory=dict)
    rows: Counter[tuple[Seen, ...]] = field(default_factory=Counter)
    """What was seen together in a row -> rows."""
    met: dict[tuple[Family, Meeting], set[int]] = field(default_factory=dict)

    def add(self, row: int, matches: Iterable[Match]) -> None:
        closest: dict[Seen, Match] = {}
        for match in matches:
            known = closest.setdefault((match.text, match.level), match)
            if known is not match and closeness(match) < closeness(known):
                closest[match.text, match.level] = match
        for key, match in closest.items():
            self.seen.setdefault(key, Sightings(match, row)).add(match, row)
            if (match.level == "one" or match.level == "many") and match.text.family is not None:
                self.met.setdefault((match.text.family, match.level), set()).add(match.row_key)
        self.rows[tuple(closest)] += 1

    def finding(self, n_rows: int, scale: float) -> Finding:
        """`scale`: rows for each sampled one."""
        copies = {
            (family, how)
            for (family, how), rows in self.met.items()
            if family.are_copies(how, len(rows), n_rows, scale)
        }
        counted = {seen for seen, sightings in self.seen.items() if _counts(seen, sightings, copies, n_rows)}
        leaked: dict[TaskText, Sightings] = {}
        for text, level in self.seen:
            if (text, level) in counted:
                new, known = self.seen[text, level], leaked.get(text)
                if known is None or (*closeness(new.best), new.row) < (*closeness(known.best), known.row):
                    leaked[text] = new
        other = [(text, level) for text, level in self.seen if text not in leaked]
        alike = {text for text, level in other if level in ("near", "one", "many")}
        return Finding(
            leaked=leaked,
            rows=sum(count for seen, count in self.rows.items() if not counted.isdisjoint(seen)),
            alike=alike,
            alike_rows=self._rows_alike(counted),
            shared={text for text, _ in other} - alike,
        )

    def _rows_alike(self, counted: set[Seen]) -> int:
        return sum(
            count
            for seen, count in self.rows.items()
            if counted.isdisjoint(seen) and any(level in ("near", "one", "many") for _, level in seen)
        )


def _counts(seen: Seen, sightings: Sightings, copies: set[tuple[Family, Meeting]], n_rows: int) -> bool:
    text, level = seen
    many = len(sightings.variants) > MAX_VARIANTS
    if level == "whole":
        says_little = text.n_words < _FEW_WORDS and "#" not in text.mask
        return not (says_little and sightings.rows > MAX_VARIANTS)
    if level == "within":
        return not many or (not text.is_short and sightings.rows <= MAX_SHARE * n_rows)
    if level == "prompt":
        return sightings.rows <= MAX_VARIANTS
    if level == "near":
        return not many or (sightings.best.kind == "numbers" and text.has_own_words)
    return (not many or not text.is_short) and (text.family, level) in copies
