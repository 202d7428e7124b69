"""Where an experiment stands, asked from any process.

In: an experiment's place on disk. Out: its `Status`: whether a process has it, how far each run is, when something last
happened, what is spent, what to do next. Nothing is asked of the process itself and nothing is written.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evsys_sdk.atomic import read_object
from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.errors import EvsysError, JournalDamaged
from evsys_sdk.record.history import Entry, read_record
from evsys_sdk.record.index import stat_of
from evsys_sdk.record.journal import EXPERIMENT
from evsys_sdk.record.launch_record import (
    Launch,
    asked_to_stop,
    lock_of,
    log_of,
    read_launch,
    reference_of,
    running_launch,
)
from evsys_sdk.record.progress import LastScore, RunProgress, progress_in
from evsys_sdk.record.run_dir import LOCK_FILE, held_by, is_held
from evsys_sdk.record.stored import StoredJournal
from evsys_sdk.running.budget import spent_before
from evsys_sdk.running.resume_hint import STOPPED_AT, StoppedRun, resume_command
from evsys_sdk.running.time_spent import last_written, seconds_until

UNFINISHED = ("interrupted", "cancelled", "partial", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One run."""

    run: str
    status: str
    """running, waiting (its turn comes), interrupted, or how it ended: completed, failed, cancelled, pruned."""
    step: int
    total_steps: int | None
    loss: float | None
    reward: float | None
    score: LastScore | None
    error: str | None
    last_written: float | None
    """When it last wrote something to its directory, in seconds since the epoch."""
    run_dir: str | None
    stopped: str | None = None
    """Of a run that was stopped: at which step, and what is saved to resume from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One experiment."""

    experiment: str
    state: str
    """running, interrupted, or how it ended: completed, partial, failed, cancelled."""
    when: float
    """Since when it is running; otherwise when it ended, or was begun."""
    record: str
    launch: Launch | None
    """The last launch, whether its process lives or not."""
    holder: str | None
    """The process that has the experiment now."""
    asked_to_stop: str | None
    last_event: float | None
    """When something last went into the journal."""
    runs: list[RunState]
    n_runs: int | None
    """All that there will be; None where that is not known."""
    budget: dict[str, Any] | None
    log: str | None
    problem: str | None = None
    next: list[str] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return self.holder is not None

    @property
    def ref(self) -> str:
        """How commands name it."""
        return reference_of(self.experiment, Path(self.record))

    @property
    def date(self) -> str:
        return datetime.fromtimestamp(self.when, UTC).strftime("%Y-%m-%d %H:%M UTC")

    def plain(self) -> dict[str, Any]:
        """As `--json` tells it."""
        told = asdict(self) | {"when": _iso(self.when), "last_event": _iso(self.last_event)}
        return told | {"runs": [run | {"last_written": _iso(run["last_written"])} for run in told["runs"]]}


def status_of(entry: Entry) -> Status:
    record = entry.record
    launch, holder = read_launch(record), None
    if is_held(lock_of(record)):
        launch, holder = running_launch(record), held_by(lock_of(record)) or "a process"
    state, when = _state(entry, launch, running=holder is not None)
    begun = {run.run: _run_state(run, launch, running=holder is not None) for run in progress_in(entry.journal)}
    failed = _failed(entry, begun) if state not in ("running", "interrupted") else {}
    damage = _damage(entry.journal) if state in UNFINISHED else None
    status = Status(
        experiment=entry.name,
        state=state,
        when=when,
        record=str(record),
        launch=launch,
        holder=holder,
        asked_to_stop=asked_to_stop(launch, record) if launch and holder else None,
        last_event=last_written(entry.journal),
        runs=_in_order_of_the_plan(begun | failed, entry.journal),
        n_runs=launch.n_runs if launch else None,
        budget=_budget(entry, launch, state),
        log=str(log_of(record)) if log_of(record).is_file() else None,
        problem=_problem(launch, holder) if holder else damage or entry.problem,
    )
    return replace(status, next=_next(status, anew=damage is not None))


def _state(entry: Entry, launch: Launch | None, *, running: bool) -> tuple[str, float]:
    if running:
        return "running", launch.started_at if launch else entry.when
    found = stat_of(entry.record)
    if launch and (found is None or found.st_mtime < launch.started_at):
        return "interrupted", launch.started_at  # that launch left no result
    return entry.state, entry.when


def _problem(launch: Launch | None, holder: str) -> str | None:
    if launch and launch.process.is_here and not launch.process.is_alive:
        return f"{holder} has ended, and something that it started still has the experiment's lock"
    return None


def _damage(journal: Path) -> str | None:
    """What is wrong with the journal from which the experiment would go on."""
    if not journal.is_file():
        return None
    try:
        with closing(StoredJournal(journal)) as opened:
            opened.check()
    except JournalDamaged as exc:
        return str(exc)
    except EvsysError:  # it cannot be read at the moment
        return None
    return None


def _run_state(run: RunProgress, launch: Launch | None, *, running: bool) -> RunState:
    """The record of a run is the truth of how it ended; the journal has that of an earlier attempt as well."""
    folder = Path(run.run_dir) if run.run_dir else None
    result = stat_of(folder / RUN_RESULT_FILE) if folder else None
    ended = (read_object(folder / RUN_RESULT_FILE) if folder and result else None) or {}
    status, error = ended.get("status") or run.status or "interrupted", ended.get("error")
    final = status in ("completed", "pruned") and result is not None
    if running and folder and is_held(folder / LOCK_FILE) and not final:
        status, error = "running", None
    elif running and not final and (result is None or launch is None or result.st_mtime < launch.started_at):
        status, error = "waiting", None
    elif result is None and run.status != "completed":
        status = "interrupted"
    return RunState(
        run=run.run,
        status=status,
        step=run.step,
        total_steps=run.total_steps,
        loss=run.loss,
        reward=run.reward,
        score=run.score,
        error=error,
        last_written=_last_change(_files_of(folder)) if folder else None,
        run_dir=run.run_dir,
        stopped=_stopped(run.run, ended) if status == "cancelled" else None,
    )


def _stopped(run: str, record: Mapping[str, Any]) -> str | None:
    note = record.get("notes", {}).get(STOPPED_AT)
    return StoppedRun(run=run, **note).sentence() if note else None


def _failed(entry: Entry, begun: dict[str, RunState]) -> dict[str, RunState]:
    """The runs that failed by the experiment's own record, by name: some could not leave one themselves."""
    told = [run for run in read_record(entry).get("runs", []) if run.get("status") == "failed"]
    found = {}
    for run in told:
        name = str(run.get("run_id")).partition("/")[2]
        known = begun.get(name) or _not_begun(name)
        found[name] = replace(known, status="failed", error=run.get("error"))
    return found


def _not_begun(name: str) -> RunState:
    none: dict[str, Any] = dict.fromkeys(("total_steps", "loss", "reward", "score", "error", "last_written", "run_dir"))
    return RunState(run=name, status="waiting", step=0, **none)


def _in_order_of_the_plan(runs: dict[str, RunState], journal: Path) -> list[RunState]:
    """Runs that are carried out at the same time begin in any order."""
    try:
        with closing(StoredJournal(journal)) as opened:
            line = opened.latest(EXPERIMENT)
            arms = [event.data["runs"] for event in line.events(upto=0) if event.kind == "arm"] if line else []
    except (EvsysError, ValueError, KeyError):
        arms = []
    planned = [name for arm in arms for name in arm if name in runs]
    return [runs[name] for name in dict.fromkeys([*planned, *runs])]


def _files_of(folder: Path) -> Iterable[Path]:
    for place in (folder, folder / "logs"):
        try:
            yield from (Path(entry.path) for entry in os.scandir(place) if entry.is_file())
        except OSError:
            continue


def _budget(entry: Entry, launch: Launch | None, state: str) -> dict[str, Any] | None:
    """Limits and spending: of an experiment with a result, what that says; of another, what the journal has."""
    if not launch or not launch.budget:
        return None
    recorded = read_record(entry).get("budget") if state not in ("running", "interrupted") else None
    if recorded:
        return dict(recorded)
    try:
        with closing(StoredJournal(entry.journal)) as journal:
            line = journal.latest(EXPERIMENT)
            if line is None:
                return {"limits": launch.budget, "spent": {}}
            until = time.time() if state == "running" else last_written(entry.journal)
            spent = spent_before(journal, line, seconds=round(seconds_until(line, until), 1))
    except EvsysError:
        return None
    return {"limits": launch.budget, "spent": asdict(spent)}


def _next(status: Status, *, anew: bool) -> list[str]:
    if status.is_running:
        follow = [f"evsys logs {status.ref} -f"] if status.log else []
        return [*follow, f"evsys stop {status.ref}"]
    if status.state in UNFINISHED and status.launch:
        again, spent = _again(status.launch), _used_up(status)
        if anew:
            return [f"{again} --fresh"]
        return [f"{again}, with a larger budget: {' and '.join(spent)} are spent" if spent else again]
    return [f"evsys show {status.ref}"]


def _used_up(status: Status) -> list[str]:
    """The limits that keep it from going on: `100 of 100 steps`. Runs that were begun need no other trial."""
    limits, spent = (status.budget or {}).get("limits", {}), (status.budget or {}).get("spent", {})
    reached = {name: limit for name, limit in limits.items() if spent.get(name, 0) >= limit}
    if status.n_runs and status.n_runs <= spent.get("trials", 0):
        reached.pop("trials", None)
    return [f"{spent[name]:.6g} of {limit:g} {name}" for name, limit in reached.items()]


def _again(launch: Launch) -> str:
    """The command that resumes it."""
    command = resume_command(launch.command)
    return command if Path(launch.cwd) == Path.cwd() else f"cd {shlex.quote(launch.cwd)} && {command}"


def _last_change(files: Iterable[Path]) -> float | None:
    return max((found.st_mtime for file in files if (found := stat_of(file))), default=None)


def _iso(moment: float | None) -> str | None:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds") if moment else None
