"""Do the training rows hold tasks of a benchmark?

In: rows and benchmarks' tasks. Out: an `Audit` for each: how many tasks stand in how many rows, as what kind of copy,
and the first of them by place. Pure functions; what is text is decided in `leakage_text`, what is a copy in
`leakage_index`, what counts in `leakage_tally`. Rows are read once, however many benchmarks there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from evsys_sdk.data.leakage_encodings import turned
from evsys_sdk.data.leakage_index import Kind, Match, Sample, TaskIndex, readings_of
from evsys_sdk.data.leakage_tally import Finding, Tally
from evsys_sdk.data.leakage_tasks import GRAM_WORDS, TaskText
from evsys_sdk.data.leakage_text import row_texts
from evsys_sdk.data.leakage_words import Gram
from evsys_sdk.data.rows import collector_paused
from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import shorten
from evsys_sdk.protocols import Row

SAMPLE_ROWS = 5_000
MAX_LEAKS = 50
WORDS: dict[Kind, str] = {
    "exact": "verbatim",
    "normalised": "up to case, punctuation or spaces",
    "numbers": "with other numbers",
    "ngram": "in part",
}
RANKS: dict[Kind, int] = {kind: rank for rank, kind in enumerate(WORDS)}
MIN_TURNED = 16
"""Letters of the shortest text that is looked for in rot13 as a whole."""
TURNED_GRAMS = 8
"""Phrases of a text that it is looked for by in rot13; more would make the index larger than the tasks' own."""
_LONG, _MEMORY = 200, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A benchmark, by the name that the audit tells."""

    name: str
    tasks: Sequence[HarborTask]
    places: Sequence[str] = ()
    """Where each task stands, such as `tasks.jsonl:12`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leakage:
    """One task that stands in one training row."""

    benchmark: str
    kind: Kind
    row: int
    """Index of the row, from 0, among the rows that were audited."""
    task_id: str
    place: str
    """Where the task stands; empty where that is not known."""
    overlap: float
    """Share of the task's text that the row has."""
    part: str = "instruction"
    """Or `answer`: the long answer that the task expects."""

    @property
    def text(self) -> str:
        where = f" ({self.place})" if self.place else ""
        return f"task {shorten(self.task_id)}{where} in row {self.row} {WORDS[self.kind]}"


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
    """Tasks that share a template with rows, so that nobody can tell whether a row is a copy; not counted above."""
    templated_rows: int = 0
    """Rows that do, and hold no task that is counted."""
    shared: int = 0
    """Tasks that stand in a prompt which many rows share; not counted above."""

    @property
    def clean(self) -> bool:
        return self.tasks == 0

    @property
    def text(self) -> str:
        """`3 of 40 val/tools tasks appear in 5 of 200 training rows (2 verbatim, 1 with other numbers)`."""
        if self.clean:
            alike = f", but {self.templated} of {self.n_tasks} share a template with rows" if self.templated else ""
            return f"no {self.benchmark} task found in {self.n_rows} training rows{alike}"
        kinds = ", ".join(f"{count} {WORDS[kind]}" for kind in WORDS if (count := self.kinds.get(kind)))
        first = self.leaks[0]
        appear = "appears" if self.tasks == 1 else "appear"
        return (
            f"{self.tasks} of {self.n_tasks} {self.benchmark} tasks {appear} in {self.rows} of {self.n_rows} "
            f"training rows ({kinds}; first: task {shorten(first.task_id)} in row {first.row})"
        )

    @property
    def note(self) -> str:
        """What a user should know though it is not counted: rows and tasks from one template, shared prompts. Empty
        where there is neither."""
        told = []
        if self.templated:
            told.append(
                f"{self.templated} of {self.n_tasks} {self.benchmark} tasks share a template with "
                f"{self.templated_rows} of {self.n_rows} training rows, so copies cannot be told from new instances"
            )
        if self.shared:
            appear = "appears" if self.shared == 1 else "appear"
            told.append(
                f"{self.shared} of {self.n_tasks} {self.benchmark} tasks {appear} in a prompt that many rows share"
            )
        return "; ".join(told)


def plain(audit: Audit) -> dict[str, Any]:
    """The audit as plain data, for records and `--json`."""
    return {
        **asdict(audit), "leaks": [asdict(leak) for leak in audit.leaks], "text": audit.text, "note": audit.note,
    }  # fmt: skip


def audit_rows(
    rows: Iterable[Row],
    tasks: Sequence[HarborTask],
    *,
    benchmark: str,
    sample: Iterable[Row] | None = None,
    max_leaks: int = MAX_LEAKS,
) -> Audit:
    """Look for every task in every row. Rows that can be passed over once only come with a `sample` of their own."""
    return audit_suites(rows, [Suite(name=benchmark, tasks=tasks)], sample=sample, max_leaks=max_leaks)[0]


def audit_suites(
    rows: Iterable[Row],
    suites: Sequence[Suite],
    *,
    sample: Iterable[Row] | None = None,
    max_leaks: int = MAX_LEAKS,
) -> list[Audit]:
    """The same for several benchmarks at once."""
    if sample is None:
        rows = rows if isinstance(rows, Sequence) else list(rows)
        sample = spread(rows, SAMPLE_ROWS)
    with collector_paused():
        learned = Sample.of(sample)
        search = _Search([TaskIndex(suite.tasks, learned) for suite in suites])
        n_rows = 0
        tallies = [Tally() for _ in suites]
        for number, row in enumerate(rows):
            n_rows += 1
            for which, matches in search.find(row).items():
                tallies[which].add(number, matches)
        return [
            _audit(suite, tally, n_rows, n_rows / max(learned.n_rows, 1), max_leaks)
            for suite, tally in zip(suites, tallies, strict=True)
        ]


def spread[T](rows: Iterable[T], limit: int) -> list[T]:
    """At most `limit` rows, evenly from the beginning to the end."""
    if isinstance(rows, Sequence):
        return list(islice(rows, 0, None, max(1, -(-len(rows) // limit))))
    kept: list[T] = []
    step = 1
    for number, row in enumerate(rows):
        if number % step == 0:
            kept.append(row)
            if len(kept) > limit:
                kept, step = kept[::2], 2 * step
    return kept


class _Search:
    """Looks rows up in several indexes; most rows resemble nothing in any, and are done with at the first look."""

    def __init__(self, indexes: list[TaskIndex]):
        self.indexes = indexes
        self.grams: frozenset[Gram] = frozenset().union(*(index.grams for index in indexes))
        self.whole = {name for index in indexes for name in (*index.by_mask, *index.by_raw)}
        self.longest = max((index.longest for index in indexes), default=0)
        self.has_pieces = any(index.pieces for index in indexes)
        # What rot13 would make of them: the rows are turned only where one of these stands in them.
        self.turned_grams = frozenset(gram for index in indexes for text in index.texts for gram in _turned_grams(text))
        self.turned_whole = {turned(name) for index in indexes for name in index.by_mask if len(name) >= MIN_TURNED}
        self.first_look = self.grams | self.turned_grams
        self._without_match: set[str] = set()

    def find(self, row: Row) -> dict[int, list[Match]]:
        """Number of the index -> what the row holds."""
        found: dict[int, list[Match]] = {}
        for text, from_prompt in row_texts(row).items():
            if text in self._without_match:
                continue
            matched = self._look(text, from_prompt, found, may_be_turned=True)
            if not matched and len(text) >= _LONG:
                self._remember(text)
        return found

    def _look(self, text: str, from_prompt: bool, found: dict[int, list[Match]], *, may_be_turned: bool) -> bool:
        """Add what the text holds to `found`, also where it holds it in rot13; whether there was anything."""
        matched = False
        for reading in readings_of(text, from_prompt, self.longest):
            run = reading.run
            hits = self.first_look.intersection(zip(run, run[1:], run[2:], run[3:], run[4:], strict=False))
            if may_be_turned and ((hits and hits & self.turned_grams) or reading.mask in self.turned_whole):
                matched |= self._look(turned(reading.text), from_prompt, found, may_be_turned=False)
            if not (hits or self.has_pieces or reading.mask in self.whole or text.strip() in self.whole):
                continue
            for number, index in enumerate(self.indexes):
                if matches := index.matches(reading, hits & index.grams if hits else hits):
                    found.setdefault(number, []).extend(matches)
                    matched = True
        return matched

    def _remember(self, text: str) -> None:
        """System prompts come again and again."""
        if len(self._without_match) >= _MEMORY:
            self._without_match.clear()
        self._without_match.add(text)


def _turned_grams(text: TaskText) -> Iterator[Gram]:
    """Some of the text's phrases in rot13, spread over all of it."""
    last = len(text.run) - GRAM_WORDS
    for at in range(0, last + 1, max(1, last // TURNED_GRAMS)):
        first, second, third, fourth, fifth = map(turned, text.run[at : at + GRAM_WORDS])
        yield first, second, third, fourth, fifth


def _audit(suite: Suite, tally: Tally, n_rows: int, scale: float, max_leaks: int) -> Audit:
    finding = tally.finding(n_rows, scale)
    leaks = _leaks(suite, finding)
    kinds = Counter(leak.kind for leak in leaks)
    leaked = {number for text in finding.leaked for number, _ in text.tasks}
    alike = {number for text in finding.alike for number, _ in text.tasks} - leaked
    shared = {number for text in finding.shared for number, _ in text.tasks} - leaked - alike
    return Audit(
        benchmark=suite.name,
        n_rows=n_rows,
        n_tasks=len(suite.tasks),
        rows=finding.rows,
        tasks=len(leaks),
        kinds={kind: kinds[kind] for kind in WORDS if kinds[kind]},
        leaks=tuple(leaks[:max_leaks]),
        templated=len(alike),
        templated_rows=finding.alike_rows if alike else 0,
        shared=len(shared),
    )


def _leaks(suite: Suite, finding: Finding) -> list[Leakage]:
    """One per task, its closest copy; the closest first, then in the order of the tasks."""
    closest: dict[int, Leakage] = {}
    for text, sightings in finding.leaked.items():
        for number, part in text.tasks:
            known, best = closest.get(number), sightings.best
            if known is None or RANKS[best.kind] < RANKS[known.kind]:
                closest[number] = Leakage(
                    benchmark=suite.name,
                    kind=best.kind,
                    row=sightings.row,
                    task_id=suite.tasks[number].task_id,
                    place=suite.places[number] if suite.places else "",
                    overlap=round(best.overlap, 3),
                    part=part,
                )
    return [closest[number] for number in sorted(closest, key=lambda n: (RANKS[closest[n].kind], n))]
