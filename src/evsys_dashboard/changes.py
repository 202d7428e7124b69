"""What changed in a project since a cursor, for pages that are open and for agents.

In: a cursor of an earlier answer. Out: ids of experiments and runs, and the next cursor. A row is stamped before its
commit (`updated`), so that of two processes that write, the one that stamped first may commit last: each question
looks back by `OVERLAP_SECONDS`, and the cursor names the rows of that time that were sent. A cursor is `<stamp>~<mark>,
<mark>`; `<stamp>` alone asks for exactly what is newer.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evsys_dashboard.auth import Refusal
from evsys_dashboard.models import ExperimentRow, GenerationRow, Project

OVERLAP_SECONDS = 5.0
"""Longer than a commit takes, also where it waits for another."""
MAX_CHANGES = 1000
"""Of experiments, and of runs, in one answer."""
MOST_MARKS = 300
"""In a cursor, which stands in a URL. Where more rows than these change within the overlap, nothing is looked at twice:
hundreds of changes in five seconds are followed by others."""
Kind = type[ExperimentRow] | type[GenerationRow]
KINDS: tuple[Kind, ...] = (ExperimentRow, GenerationRow)
Stamped = tuple[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What changed; ids of experiments, and of runs."""

    cursor: str
    experiments: list[str]
    runs: list[str]
    has_more: bool
    """Whether to ask again at once."""


def current_cursor(project: Project, kinds: Sequence[Kind] = KINDS) -> str:
    """The cursor of all that is stored now. A page takes it before it reads its rows; one that shows experiments alone
    need not look at runs."""
    found: list[Stamped] = []
    for kind in kinds:
        rows = kind.objects.filter(project=project).order_by("-updated").values_list("pk", "updated")
        found += [(str(pk), float(stamp)) for pk, stamp in rows[: MOST_MARKS + 1]]
    return _write_cursor(max((stamp for _, stamp in found), default=0.0), found)


def changes_since(project: Project, text: str) -> Changes:
    """What changed since a cursor; a Refusal for a text that is none."""
    number, tilde, names = text.partition("~")
    try:
        since = float(number)
    except ValueError:
        since = math.nan
    if not math.isfinite(since):
        raise Refusal(422, f"since={text[:40]!r}: pass the `cursor` of an earlier answer")
    # Rows of the overlap that an earlier answer had.
    told = set(names.split(","))
    newer: list[list[Stamped]] = []  # experiments, and runs, the oldest first
    for kind in KINDS:
        rows = kind.objects.filter(project=project, updated__gt=since - OVERLAP_SECONDS if tilde else since)
        pairs = rows.order_by("updated").values_list("pk", "updated")[: MAX_CHANGES + 1]
        newer.append([(str(pk), float(stamp)) for pk, stamp in pairs])
    # Where one list is cut, the cursor stops at its last row, and the other list repeats what lies beyond.
    ends = [rows[MAX_CHANGES - 1][1] for rows in newer if len(rows) > MAX_CHANGES]
    last = max((stamp for rows in newer for _, stamp in rows), default=since)
    until = min(ends) if ends else max(since, last)
    inside = [[row for row in rows if row[1] <= until] for rows in newer]
    experiments, runs = ([pk for pk, stamp in rows if _mark(pk, stamp) not in told] for rows in inside)
    cursor = _write_cursor(until, [row for rows in inside for row in rows])
    return Changes(cursor=cursor, experiments=experiments, runs=runs, has_more=bool(ends))


def _write_cursor(since: float, rows: Iterable[Stamped]) -> str:
    marks = [_mark(pk, stamp) for pk, stamp in rows if stamp > since - OVERLAP_SECONDS]
    return repr(since) if len(marks) > MOST_MARKS else f"{since!r}~{','.join(marks)}"


def _mark(pk: str, stamp: float) -> str:
    """Short, since a cursor stands in a URL; of two rows with one mark, one might be sent late, never wrongly."""
    return f"{zlib.crc32(f'{pk}@{stamp!r}'.encode()):08x}"
