"""Do the training rows hold tasks of a benchmark?

In: rows and a benchmark's tasks. Out: an `Audit`: how many tasks stand in how many rows, as what kind of copy, and the
first of them by place. Pure functions; what is text is decided in `leakage_text`, what is a copy in `leakage_index`.
Only here it is decided that a near copy found in too many different rows is a template and no copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from evsys_sdk.data.leakage_index import RANKS, Kind, Match, TaskIndex, TaskText
from evsys_sdk.data.rows import collector_paused
from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import shorten
from evsys_sdk.protocols import Row

SAMPLE_ROWS = 5_000
MAX_LEAKS = 50
MAX_VARIANTS = 20
"""Different rows that may be near copies of one task; with more, task and rows are of one family."""
WORDS: dict[Kind, str] = {
    "exact": "word for word",
    "normalised": "but for case, punctuation or spaces",
    "numbers": "with other numbers",
    "ngram": "in part",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leakage:
    """One task that stands in one training row."""

    benchmark: str
    kind: Kind
    row: int
    """Index of the row, from 0, among the rows that were audited."""
    task_id: str
    overlap: float
    """Share of the task's text that the row has."""
    part: str = "instruction"
    """Or `answer`: the long answer that the task expects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the rows and one benchmark have in common."""

    benchmark: str
    n_rows: int
    n_tasks: int
    rows: int = 0
    """Rows that hold a task."""
    tasks: int = 0
    """Tasks that stand in a row."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Kind of copy -> tasks; each counts as the closest copy there is of it."""
    leaks: tuple[Leakage, ...] = ()
    """The first row of each task, the closest copies first, at most as many as were asked for."""
    templated: int = 0
    """Tasks with so many near copies that they share a template with the rows; they are not counted above."""

    @property
    def clean(self) -> bool:
        return self.tasks == 0

    @property
    def text(self) -> str:
        """`3 of 40 tasks of val/tools stand in 5 of 200 training rows: 2 word for word, 1 with other numbers`."""
        if self.clean:
            return f"no task of {self.benchmark} found in {self.n_rows} training rows"
        kinds = ", ".join(f"{count} {WORDS[kind]}" for kind in RANKS if (count := self.kinds.get(kind)))
        first = self.leaks[0]
        stand = "stands" if self.tasks == 1 else "stand"
        return (
            f"{self.tasks} of {self.n_tasks} tasks of {self.benchmark} {stand} in {self.rows} of {self.n_rows} "
            f"training rows: {kinds} (first: task {shorten(first.task_id)} in row {first.row})"
        )


def plain(audit: Audit) -> dict[str, Any]:
    """The audit as plain data, for records and `--json`."""
    return {**asdict(audit), "leaks": [asdict(leak) for leak in audit.leaks], "text": audit.text}


def audit_rows(
    rows: Iterable[Row],
    tasks: Sequence[HarborTask],
    *,
    benchmark: str,
    sample: Iterable[Row] | None = None,
    max_leaks: int = MAX_LEAKS,
) -> Audit:
    """Look for every task in every row. Rows that can be passed over once only come with a `sample` of their own."""
    if sample is None:
        rows = rows if isinstance(rows, Sequence) else list(rows)
        sample = spread(rows, SAMPLE_ROWS)
    tally = _Tally()
    with collector_paused():
        index = TaskIndex(tasks, sample)
        for number, row in enumerate(rows):
            tally.n_rows += 1
            matches = index.match(row)
            if matches:
                tally.add(number, matches)
    return tally.audit(benchmark, tasks, max_leaks)


def spread(rows: Iterable[Row], limit: int) -> list[Row]:
    """At most `limit` rows, evenly from the beginning to the end."""
    if isinstance(rows, Sequence):
        return list(islice(rows, 0, None, max(1, -(-len(rows) // limit))))
    kept: list[Row] = []
    step = 1
    for number, row in enumerate(rows):
        if number % step == 0:
            kept.append(row)
            if len(kept) > limit:
                kept, step = kept[::2], 2 * step
    return kept


@dataclass(slots=True)
class _Found:
    """One task text: its closest copy, and how many different rows are near copies."""

    best: Match
    row: int
    variants: set[int] = field(default_factory=set)

    @property
    def is_template(self) -> bool:
        return RANKS[self.best.kind] >= RANKS["numbers"] and len(self.variants) > MAX_VARIANTS


@dataclass(slots=True)
class _Tally:
    n_rows: int = 0
    found: dict[TaskText, _Found] = field(default_factory=dict)
    rows: Counter[tuple[TaskText, ...]] = field(default_factory=Counter)
    """Task texts -> rows that hold just these. Rows with an equal text are counted under `()`."""

    def add(self, row: int, matches: list[Match]) -> None:
        for match in matches:
            known = self.found.setdefault(match.text, _Found(best=match, row=row))
            if RANKS[match.kind] < RANKS[known.best.kind]:
                known.best, known.row = match, row
            if len(known.variants) <= MAX_VARIANTS:
                known.variants.add(match.row_key)
        firm = any(RANKS[match.kind] < RANKS["numbers"] for match in matches)
        self.rows[() if firm else tuple(match.text for match in matches)] += 1

    def audit(self, benchmark: str, tasks: Sequence[HarborTask], max_leaks: int) -> Audit:
        templated = {text for text, found in self.found.items() if found.is_template}
        leaks = self._leaks(benchmark, tasks, templated)
        kinds = Counter(leak.kind for leak in leaks)
        return Audit(
            benchmark=benchmark,
            n_rows=self.n_rows,
            n_tasks=len(tasks),
            rows=sum(count for texts, count in self.rows.items() if not texts or set(texts) - templated),
            tasks=len(leaks),
            kinds={kind: kinds[kind] for kind in RANKS if kinds[kind]},
            leaks=tuple(leaks[:max_leaks]),
            templated=len({number for text in templated for number, _ in text.tasks}),
        )

    def _leaks(self, benchmark: str, tasks: Sequence[HarborTask], templated: set[TaskText]) -> list[Leakage]:
        """One per task, its closest copy; the closest first, then in the order of the tasks."""
        closest: dict[int, Leakage] = {}
        for text, found in self.found.items():
            for number, part in text.tasks if text not in templated else ():
                known = closest.get(number)
                if known is None or RANKS[found.best.kind] < RANKS[known.kind]:
                    closest[number] = Leakage(
                        benchmark=benchmark,
                        kind=found.best.kind,
                        row=found.row,
                        task_id=tasks[number].task_id,
                        overlap=round(found.best.overlap, 3),
                        part=part,
                    )
        return [closest[number] for number in sorted(closest, key=lambda n: (RANKS[closest[n].kind], n))]
