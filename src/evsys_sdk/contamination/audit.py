"""Do the training rows hold tasks of a benchmark?

In: rows and benchmarks' tasks. Out: an `Audit` for each: how many tasks appear in how many rows, as what kind of copy,
and the first of them by place; the lines of the conclusion about it. `normalize` and `tasks` decide what is text,
`index` what is a copy and what counts. Rows are read once, however many benchmarks there are, and the same rows and the
same benchmark are compared once in a process, however many arms and seeds train on them.
"""

from __future__ import annotations

import hashlib
import marshal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice

from evsys_sdk.config.base import JsonDict
from evsys_sdk.config.project import search_folders
from evsys_sdk.config.schema import DataConfig, ExperimentConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.contamination.index import ContaminationFinding, Kind, RowSample, RowSearch, Tally, TaskIndex
from evsys_sdk.data.columns import fingerprint
from evsys_sdk.data.rows import RowCache, collector_paused, load_rows
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.errors import DataError, EvsysError, error_boundary, shorten
from evsys_sdk.eval.benchmark import Benchmark, BenchmarkLoader
from evsys_sdk.eval.row_eval import EVAL_DATA, question_of
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import DataStore, Row, RunResult

SAMPLE_ROWS = 5_000
MAX_LEAKS = 50
WORDS: dict[Kind, str] = {
    "exact": "verbatim",
    "normalised": "up to case, punctuation or spaces",
    "numbers": "with other numbers",
    "ngram": "in part",
}
RANKS: dict[Kind, int] = {kind: rank for rank, kind in enumerate(WORDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A benchmark, by the name that the audit tells."""

    name: str
    tasks: Sequence[HarborTask]
    places: Sequence[str] = ()
    """Where each task stands, such as `tasks.jsonl:12`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contamination:
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
    leaks: tuple[Contamination, ...] = ()
    """The first row of each task, the closest copies first, at most as many as were asked for."""
    templated: int = 0
    """Tasks that share a template with rows, so that a row cannot be distinguished from a copy; not counted above."""
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
        notes = []
        if self.templated:
            notes.append(
                f"{self.templated} of {self.n_tasks} {self.benchmark} tasks share a template with "
                f"{self.templated_rows} of {self.n_rows} training rows, so copies cannot be distinguished from new "
                "instances"
            )
        if self.shared:
            appear = "appears" if self.shared == 1 else "appear"
            notes.append(
                f"{self.shared} of {self.n_tasks} {self.benchmark} tasks {appear} in a prompt that many rows share"
            )
        return "; ".join(notes)


def plain(audit: Audit) -> JsonDict:
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
    """Look for every task in every row. Rows that can be passed over once only need a `sample`."""
    return audit_suites(rows, [Suite(name=benchmark, tasks=tasks)], sample=sample, max_leaks=max_leaks)[0]


def audit_suites(
    rows: Iterable[Row],
    suites: Sequence[Suite],
    *,
    sample: Iterable[Row] | None = None,
    max_leaks: int = MAX_LEAKS,
) -> list[Audit]:
    """Look for every task of several benchmarks in every row, which is read once."""
    if sample is None:
        rows = rows if isinstance(rows, Sequence) else list(rows)
        sample = sample_evenly(rows, SAMPLE_ROWS)
    with collector_paused():
        learned = RowSample.of(sample)
        search = RowSearch([TaskIndex(suite.tasks, learned) for suite in suites])
        n_rows = 0
        tallies = [Tally() for _ in suites]
        for number, row in enumerate(rows):
            n_rows += 1
            for which, matches in search.find(row).items():
                tallies[which].add(number, matches)
        scale = n_rows / max(learned.n_rows, 1)
        found = zip(suites, tallies, strict=True)
        return [_audit(suite, tally.finding(n_rows, scale), n_rows, max_leaks) for suite, tally in found]


def sample_evenly[T](rows: Iterable[T], limit: int) -> list[T]:
    """At most `limit` rows, evenly from the beginning to the end."""
    if isinstance(rows, Sequence):
        return list(islice(rows, 0, None, max(1, -(-len(rows) // limit))))
    kept: list[T] = []
    step = 1
    for number, row in enumerate(rows):
        if number % step == 0:
            kept.append(row)
            if len(kept) > limit:
                # Every second one of those kept is every (2 * step)th row: evenly spread, in one pass over any length.
                kept, step = kept[::2], 2 * step
    return kept


def _audit(suite: Suite, finding: ContaminationFinding, n_rows: int, max_leaks: int) -> Audit:
    closest: dict[int, Contamination] = {}  # number of a task -> its closest copy
    for text, sightings in finding.leaked.items():
        for number, part in text.tasks:
            known, best = closest.get(number), sightings.best
            if known is None or RANKS[best.kind] < RANKS[known.kind]:
                closest[number] = Contamination(
                    benchmark=suite.name,
                    kind=best.kind,
                    row=sightings.row,
                    task_id=suite.tasks[number].task_id,
                    place=suite.places[number] if suite.places else "",
                    overlap=round(best.overlap, 3),
                    part=part,
                )
    leaks = [closest[number] for number in sorted(closest, key=lambda n: (RANKS[closest[n].kind], n))]
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


CHECK_EVERY = 1_000
"""Rows between two looks at whether the run is to stop."""
Key = tuple[str, str, tuple[str, ...]]
"""Hashes of the rows and of the tasks, and where the tasks stand: a copy of a benchmark in another project is known by
its own paths."""
_AUDITS: dict[Key, Audit] = {}
"""The audits of this process: a few kilobytes for each data block and benchmark."""
_MAKING = threading.Lock()
_TOLD = 3
"""Leaks that an error names."""


def say_at_once(audit: Audit) -> None:
    """Once for all arms, and not only when everything has been trained."""
    if not audit.clean:
        get_logger(__name__).warning("leakage: %s", audit.text)


def refusal(place: str, found: Sequence[Audit]) -> str:
    """What is wrong with the rows, the first few by row and place, and what can be done."""
    counts = ", ".join(f"{audit.tasks} of {audit.benchmark}" for audit in found)
    first = "; ".join(leak.text for audit in found for leak in audit.leaks[:_TOLD])
    more = sum(audit.tasks - len(audit.leaks[:_TOLD]) for audit in found)
    return (
        f"the rows of `{place}` hold tasks of benchmarks ({counts}) and `leakage: error` is set, so nothing was "
        f"trained: {first}{f'; and {more} more' if more else ''}; take them out "
        "(`evsys data leakage ROWS BENCHMARK` lists them), or set `leakage: warn`"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBenchmark:
    """A benchmark that rows are compared with."""

    suite: Suite
    sha256: str


def read_benchmarks(config: ExperimentConfig, benchmarks: BenchmarkLoader) -> tuple[list[KnownBenchmark], list[str]]:
    """The experiment's benchmarks, then the newest versions of the workspace's others; and which cannot be read."""
    workspace = Workspace.find(source_of(config).folder)
    # Versions are listed oldest first, so the last one of a name stays.
    newest = {manifest.name: manifest for manifest in workspace.list("benchmark")}
    loaders: list[tuple[str, Callable[[], Benchmark]]] = [
        (f"{entry.role}/{entry.label}", partial(benchmarks.get, entry)) for entry in config.metadata.benchmark
    ]
    loaders += [
        (f"{manifest.id} (workspace)", partial(Benchmark.load, workspace.path(manifest), name=manifest.name))
        for manifest in newest.values()
    ]
    suites: dict[str, KnownBenchmark] = {}
    unread = []
    for name, load in loaders:
        try:
            benchmark = load()
        except EvsysError as exc:  # scoring says what that means for the scores
            unread.append(f"leakage: benchmark {name} cannot be read and was not compared with the rows: {exc}")
        else:
            suite = Suite(name=name, tasks=benchmark.tasks, places=benchmark.places)
            # The experiment's own come first: a copy in the workspace is compared once, under the experiment's name.
            suites.setdefault(benchmark.sha256, KnownBenchmark(suite=suite, sha256=benchmark.sha256))
    return list(suites.values()), unread


def eval_suite(
    data: DataConfig, config: ExperimentConfig, store: DataStore, cache: RowCache | None = None
) -> KnownBenchmark:
    """The questions of `eval.eval_data` as a benchmark."""
    source = source_of(config)
    folders, workspace = search_folders(source), Workspace.find(source.folder)
    loaded = load_rows(data, store=store, folders=folders, workspace=workspace, cache=cache)
    with error_boundary(DataError, f"reading the questions of {EVAL_DATA}"):
        tasks = read_questions(loaded.rows)
    places = [f"{loaded.source}, row {index}" for index in range(len(tasks))]
    return KnownBenchmark(
        suite=Suite(name=EVAL_DATA, tasks=tasks, places=places), sha256=f"{EVAL_DATA} {_digest(loaded.rows)}"
    )


def read_questions(rows: Sequence[Row]) -> list[HarborTask]:
    """The questions of rows as tasks, to be compared with training rows."""
    tasks = []
    for index, row in enumerate(rows):
        asked = question_of(row, index)
        messages = [{"role": "user", "content": asked.prompt}] if isinstance(asked.prompt, str) else asked.prompt
        verifier = InProcessVerifier(fn_name="", expected=asked.target)
        content, about = messages[-1].get("content") or "", {"history": messages[:-1]}
        tasks.append(HarborTask(task_id=asked.task_id, instruction=content, verifier=verifier, metadata=about))
    return tasks


def audits_of(
    rows: Sequence[Row],
    known: Sequence[KnownBenchmark],
    *,
    check: Callable[[], None] = lambda: None,
    on_new: Callable[[Audit], None] = lambda audit: None,
) -> list[Audit]:
    """One audit per benchmark; what was compared before is not compared again. `check` raises when it is time to stop,
    `on_new` hears of audits that were not made before."""
    digest = _digest(rows) if known else ""
    by_key = {(digest, one.sha256, tuple(one.suite.places)): one for one in known}

    def read_rows() -> Iterator[Row]:
        for number, row in enumerate(rows):
            if number % CHECK_EVERY == 0:
                check()
            yield row

    def make(keys: Sequence[Key]) -> list[Audit]:
        suites = [by_key[key].suite for key in keys]
        audits = audit_suites(read_rows(), suites, sample=sample_evenly(rows, SAMPLE_ROWS))
        for audit in audits:
            on_new(audit)
        return audits

    # Without the lock first: an audit that was made is never removed.
    if not _AUDITS.keys() >= by_key.keys():
        with _MAKING:  # an arm that needs the same audits waits for them, and finds them made
            if missing := [key for key in by_key if key not in _AUDITS]:
                _AUDITS.update(zip(missing, make(missing), strict=True))
    named = []  # the audit of the same tasks may have been made under another name
    for one, audit in zip(by_key.values(), [_AUDITS[key] for key in by_key], strict=True):
        leaks = tuple(replace(leak, benchmark=one.suite.name) for leak in audit.leaks)
        named.append(replace(audit, benchmark=one.suite.name, leaks=leaks))
    return named


def _digest(rows: Sequence[Row]) -> str:
    """sha256 of the rows themselves: transforms, also a project's own, decide what is in them."""
    digest = hashlib.sha256()
    for row in rows:
        try:
            digest.update(marshal.dumps(row, 2))  # version 2 of the format depends on content alone
        except ValueError:  # something that is not plain data
            digest.update(fingerprint(row))
    return digest.hexdigest()


MEANING = "scores on these tasks show memory, not learning"


def leakage_lines(arms: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """`Leakage: 3 of 40 val/tools tasks appear in 5 of 200 training rows (2 verbatim); scores on ...`, a line per
    finding, with the arms it is true of where not all; then what was seen and not counted."""
    lines = [f"Leakage: {names}{text}; {MEANING}." for text, names in _list_texts(arms, "text")]
    return [*lines, *(f"Not counted as leakage: {names}{text}." for text, names in _list_texts(arms, "note"))]


def _list_texts(arms: Mapping[str, Sequence[RunResult]], what: str) -> Iterator[tuple[str, str]]:
    """Each text with the arms that it is true of, as `lr1e-3, lr1e-5: `; nothing where it is true of all arms."""
    arms_of: dict[str, list[str]] = {}
    for arm, results in arms.items():
        audits: list[JsonDict] = [audit for result in results for audit in result.leakage]
        texts = dict.fromkeys(
            audit[what] + ("" if audit.get("place", "data") == "data" else f", {audit['place']}")
            for audit in audits
            if audit.get(what) and (what == "note" or audit.get("tasks"))
        )
        for text in texts:
            arms_of.setdefault(text, []).append(arm)
    audited = [arm for arm, results in arms.items() if any(result.leakage for result in results)]
    yield from ((text, "" if names == audited else f"{', '.join(names)}: ") for text, names in arms_of.items())
