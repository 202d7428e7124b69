"""The experiments that were run here, newest first, and which of them a name, a path or conditions mean.

In: a workspace, whose index names the records, or folders to look through. Out: a `History` of `Entry`s, each with its
state, its digest and what people said of it. Nothing here raises for a record that is torn or gone: a torn one is
listed as `unreadable`, with the reason.
An experiment without a result is `running` while a process holds its lock, and `interrupted` when none does.
"""

from __future__ import annotations

import difflib
import json
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, JOURNAL_FILE, RUN_RESULT_FILE
from evsys_sdk.errors import EvsysError, not_known
from evsys_sdk.files import read_object
from evsys_sdk.history.digest import Digest, digest_of
from evsys_sdk.history.index import NO_NOTES, IndexLine, Notes, note_results, read_index, read_notes, stamp_of, stat_of
from evsys_sdk.record.layout import ATTEMPTS, REHEARSALS, is_held, records_in, stem_of
from evsys_sdk.record.models import ExperimentRecord, say_unreadable
from evsys_sdk.score_names import is_test_score, names_split, readings_of

STATUSES = ("completed", "partial", "failed", "cancelled", "running", "interrupted", "invalid", "unreadable")
DEFAULT_OUTPUTS = "outputs"
"""Where experiments write unless they say otherwise; looked through besides the index."""
DEEPEST = 6
_INSIDE_RUNS = frozenset(["attempts", "logs", "weights", "__pycache__", "node_modules"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentEntry:
    """One experiment, as far as the disk tells."""

    digest: Digest
    record: Path
    """Where its result is, or will be."""
    state: str
    """What the machine knows: completed, partial, failed, cancelled, running, interrupted, unreadable."""
    when: float = 0.0
    """When it ended, or began if it has not, in seconds since the epoch."""
    notes: Notes = NO_NOTES
    problem: str | None = None
    """Why the record could not be read."""

    @property
    def name(self) -> str:
        return self.digest.name

    @property
    def status(self) -> str:
        """The state, or `invalid` for an experiment that was taken out of the count."""
        return self.state if self.notes.why_invalid is None else "invalid"

    @property
    def counts(self) -> bool:
        """Whether its scores may be built on."""
        return self.state in ("completed", "partial") and self.notes.why_invalid is None

    @property
    def date(self) -> str:
        return datetime.fromtimestamp(self.when, UTC).strftime("%Y-%m-%d %H:%M") if self.when else "?"

    @property
    def journal(self) -> Path:
        return self.record.with_name(stem_of(self.record) + f".{JOURNAL_FILE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Experiments, newest first, and what could not be read."""

    entries: list[ExperimentEntry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_history(workspace: Path | None, folders: Sequence[Path] = (), *, outputs: Path | None = None) -> History:
    """The experiments of `find_lines`, read."""
    entries, read, stamps = [], {}, {}
    for one in find_lines(workspace, folders, outputs=outputs).values():
        entry, stamp = _entry(one)
        entries += [entry] if entry is not None else []
        if entry is not None and stamp and entry.problem is None:
            read[entry.record], stamps[entry.record] = entry.digest, stamp
    if workspace is not None and not folders and read and workspace.is_dir():  # looking back makes no workspace
        note_results(workspace, read, stamps)
    entries.sort(key=lambda entry: (-entry.when, entry.name))
    problems = [text for entry in entries for text in (entry.problem, entry.notes.problem) if text]
    return History(entries=entries, problems=problems)


def find_lines(
    workspace: Path | None, folders: Sequence[Path] = (), *, outputs: Path | None = None
) -> dict[Path, IndexLine]:
    """Every experiment that may be there, by the path of its record: those that the workspace's index names, and those
    in and below `outputs` and the workspace's own `outputs`, since the index of a folder that was copied or moved names
    the old place; given `folders`, what lies in and below those instead."""
    indexed = {one.record: one for one in read_index(workspace)} if workspace is not None else {}
    usual = [outputs, workspace / DEFAULT_OUTPUTS if workspace is not None else None]
    places = list(folders) or [folder for folder in usual if folder is not None]
    found = {record for folder in places for record in records_below(folder.absolute())}
    lines = {} if folders else dict(indexed)
    if workspace is not None:
        # Of a folder that was copied, the index names the originals too. Each counts once: the one that is here.
        root = str(workspace.absolute().parent) + os.sep
        for record in [one for one in lines if not str(one).startswith(root)]:
            copies = [folder.absolute() / str(record).rpartition(f"/{folder.name}/")[2] for folder in places]
            size = getattr(stat_of(record), "st_size", None)
            if any(one in found and getattr(stat_of(one), "st_size", None) == size for one in copies):
                del lines[record]
    return lines | {record: indexed.get(record, IndexLine(record=record)) for record in found}


def read_one(record: Path) -> ExperimentEntry | None:
    """The experiment with this record (or the journal beside where it would be); None where there is neither."""
    return read_line(IndexLine(record=record.absolute()))


def read_line(line: IndexLine) -> ExperimentEntry | None:
    """The experiment of one line of the index; None where nothing of it is on disk any more."""
    return _entry(line)[0]


def records_below(folder: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """The records of a folder and of those in it; runs, rehearsals and hidden folders are not looked into."""
    yield from records_in(folder)
    try:
        inner = sorted(
            entry.path
            for entry in os.scandir(folder)
            if not entry.name.startswith(".") and entry.name not in (*_INSIDE_RUNS, REHEARSALS)
            if entry.is_dir(follow_symlinks=False) and not os.path.exists(os.path.join(entry.path, RUN_RESULT_FILE))
        )
    except OSError:
        return
    for path in inner if depth else ():
        yield from records_below(Path(path), depth - 1)


def _entry(known: IndexLine) -> tuple[ExperimentEntry | None, str]:
    """The experiment, if there is anything of it on disk; and the stamp that its record had before it was read, empty
    where it did not have to be."""
    record = known.record
    found = stat_of(record)
    held = is_held(record.parent / f".{stem_of(record)}.lock")
    if found is None:  # an experiment that was begun, if its journal is there
        journal = stat_of(record.with_name(f"{stem_of(record)}.{JOURNAL_FILE}"))
        if journal is None:
            return None, ""
        digest, state = known.plan or Digest(name=stem_of(record)), "running" if held else "interrupted"
        when, notes = known.started or journal.st_mtime, read_notes(record, about=digest.result)
        return ExperimentEntry(digest=digest, record=record, state=state, when=when, notes=notes), ""
    fresh, problem, indexed = "", None, known.digest
    if indexed is None or known.stamp != stamp_of(found):
        fresh = stamp_of(found)
        indexed, problem = _read(record)
    digest, ended = indexed, found.st_mtime
    with suppress(TypeError, ValueError):  # a record of another program may say anything
        ended = datetime.fromisoformat(digest.ended).timestamp() if digest.ended else ended
    state, when = "unreadable" if problem else digest.status, ended
    if held:
        state, when = "running", known.started or ended
    elif known.started and known.started > found.st_mtime + 1:
        # It was begun again after this result, and that attempt left none.
        state, when = "interrupted", known.started
    notes = read_notes(record, about=digest.result)
    return ExperimentEntry(digest=digest, record=record, state=state, when=when, problem=problem, notes=notes), fresh


def _read(record: Path) -> tuple[Digest, str | None]:
    """What the record says; or a bare digest and the reason."""
    try:
        return digest_of(json.loads(record.read_bytes())), None
    except OSError as exc:
        reason = exc.strerror or str(exc)
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        reason = f"not whole, valid JSON ({exc})"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        text = say_unreadable(exc) if isinstance(exc, ValueError) else str(exc)
        reason = f"not a record of an experiment ({text or type(exc).__name__})"
    return Digest(name=stem_of(record)), f"{record} cannot be read, so nothing of it counts: {reason}"


def attempts_of(record: Path) -> list[Digest]:
    """The results of attempts that `--fresh` set aside, in order, without unreadable ones."""
    found = []
    folder = record.with_name(f"{stem_of(record)}.{ATTEMPTS}")
    # Attempts are numbered without leading zeros: sorted by length first, 10 comes after 9.
    for path in sorted(folder.glob(f"*/{EXPERIMENT_RESULT_FILE}"), key=lambda path: (len(path.parent.name), path)):
        digest, problem = _read(path)
        found += [digest] if problem is None else []
    return found


def read_record(entry: ExperimentEntry) -> dict[str, Any]:
    """The record as it is in its file; empty for an experiment without a readable one."""
    return read_object(entry.record) or {}


def load_record(entry: ExperimentEntry) -> ExperimentRecord:
    """The record; an empty one for an experiment without a readable one."""
    return ExperimentRecord.find(entry.record) or ExperimentRecord(experiment=entry.name)


def newest_by_name(entries: Iterable[ExperimentEntry]) -> dict[str, ExperimentEntry]:
    found: dict[str, ExperimentEntry] = {}
    for entry in entries:  # newest first
        found.setdefault(entry.name, entry)
    return found


LISTED = 8
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq, "==": operator.eq,
}  # fmt: skip
_DATED = re.compile(r"^\d{8}_(?=.)")
_CONDITION = re.compile(r"(?P<name>[^<>=]+?)\s*(?:(?P<sign>>=|<=|==|>|<|=)\s*(?P<value>\S+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedExperiment:
    """The experiment that was meant, and what the asker should know of the choice."""

    entry: ExperimentEntry
    note: str | None = None


def look_up(ref: str, history: History) -> ResolvedExperiment:
    """By path of its record, journal or folder; by name, also without its date (`first_sft` for
    `20261118_first_sft`); or by the only name that begins so."""
    names = newest_by_name(history.entries)
    # A folder may be called like an experiment: the name wins, and `./name` means the folder.
    begins = bool(ref) and any(name.startswith(ref) or slug_of(name) == ref for name in names)
    if not begins and ("/" in ref or os.path.exists(ref)):
        return ResolvedExperiment(entry=read_at(Path(ref)))
    if ref not in names:
        ref = _only_prefix(ref, names)
    same = [entry for entry in history.entries if entry.name == ref]
    if len(same) == 1:
        return ResolvedExperiment(entry=same[0])
    others = ", ".join(str(entry.record) for entry in same[1:4])
    return ResolvedExperiment(
        entry=same[0],
        note=f"{len(same)} experiments are called {ref}; this is the newest ({same[0].date}). Others by path: {others}",
    )


def slug_of(name: str) -> str:
    """An experiment's name without the date that `evsys new-experiment` puts before it."""
    return _DATED.sub("", name)


def _only_prefix(ref: str, names: dict[str, ExperimentEntry]) -> str:
    slugs = [name for name in names if slug_of(name) == ref]
    if len(slugs) == 1:
        return slugs[0]
    if slugs:
        raise EvsysError(f"{ref!r} is the slug of {len(slugs)} experiments: {_list_names(slugs)}; say which")
    begin = [name for name in names if name.startswith(ref)] if ref else []
    if len(begin) == 1:
        return begin[0]
    if begin:
        raise EvsysError(f"{ref!r} is the beginning of {len(begin)} experiments: {_list_names(begin)}; say which")
    if not names:
        raise EvsysError(
            f"there is no experiment {ref!r}: none is known here. Run one, go to its project, or name the path of its "
            "record (<output_dir>/<name>.experiment_result.json)"
        )
    near = difflib.get_close_matches(ref, list(names), n=3, cutoff=0.4)
    told = f"closest: {', '.join(near)}" if near else f"known: {_list_names(list(names))}"
    raise EvsysError(f"there is no experiment {ref!r}; {told}\nnext: evsys history")


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(sorted(names)[:LISTED]) + more


def read_at(path: Path) -> ExperimentEntry:
    """The experiment whose record, journal or folder this is."""
    if path.is_dir():
        records = records_in(path)
        if len(records) > 1:
            raise EvsysError(f"{path} holds {len(records)} experiments; name the record of one: {records[0]}")
        path = records[0] if records else path
    for kind in (JOURNAL_FILE, EXPERIMENT_RESULT_FILE):
        if path.name.endswith(f".{kind}"):
            path = path.with_name(f"{path.name.removesuffix(f'.{kind}')}.{EXPERIMENT_RESULT_FILE}")
            found = read_one(path)
            if found is not None:
                return found
    raise EvsysError(
        f"there is no record of an experiment at {path}; expected <name>.{EXPERIMENT_RESULT_FILE}, "
        f"<name>.{JOURNAL_FILE}, or a folder with one of them"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Experiments in which some arm has this metric, and within this bound."""

    metric: str
    sign: str = ""
    value: float = 0.0

    def values(self, entry: ExperimentEntry) -> list[float]:
        """The metric's mean for each arm that has it, by any name that means it, or as the success metric."""
        found = []
        for arm in entry.digest.arms:
            keys = [key for key in arm.metrics if self._means(key, entry.digest)]
            found += [arm.metrics[key] for key in keys]
            if not keys and self.metric == entry.digest.metric and arm.mean is not None and self._may_choose(entry):
                found.append(arm.mean)
        return found

    def _means(self, key: str, digest: Digest) -> bool:
        """A bound is not met by a test score, which chooses nothing, unless that is allowed or the bound names it."""
        if not readings_of(self.metric, key):
            return False
        is_open = not is_test_score(key) or digest.allows_test or names_split(self.metric, "test")
        return not self.sign or is_open

    def _may_choose(self, entry: ExperimentEntry) -> bool:
        return not self.sign or entry.digest.selects or names_split(self.metric, "test")

    def holds(self, entry: ExperimentEntry) -> bool:
        values = self.values(entry)
        return bool(values) and (not self.sign or any(_COMPARE[self.sign](value, self.value) for value in values))


def parse_condition(text: str) -> Condition:
    """`pass@1`, `val/tools/pass@1>=0.5`, `loss<0.2`."""
    match = _CONDITION.fullmatch(text.strip())
    example = "--metric takes a name, or a name with a bound in quotes, e.g. --metric 'pass@1>=0.5'"
    if not match:
        raise EvsysError(f"{example}; got {text!r}")
    try:
        value = float(match["value"]) if match["sign"] else 0.0
    except ValueError:
        raise EvsysError(f"{example}; {match['value']!r} is no number") from None
    return Condition(metric=match["name"], sign=match["sign"] or "", value=value)


def select(
    entries: Sequence[ExperimentEntry],
    *,
    tags: Sequence[str] = (),
    statuses: Sequence[str] = (),
    conditions: Sequence[str] = (),
) -> list[ExperimentEntry]:
    """The entries that have every tag, one of the statuses, and meet every condition."""
    for status in statuses:
        if status not in STATUSES:
            raise EvsysError(f"--status: {not_known(status, 'status', STATUSES)}")
    parsed = [parse_condition(text) for text in conditions]
    return [
        entry
        for entry in entries
        if set(tags) <= set(entry.digest.tags)
        and (not statuses or entry.status in statuses)
        and all(condition.holds(entry) for condition in parsed)
    ]
