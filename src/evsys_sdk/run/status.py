"""Where an experiment stands, asked from any process.

In: an experiment's place on disk. Out: its `Status`: whether a process has it, how far each run is, when something last
happened, what is spent, what to do next. Nothing is asked of the process itself and nothing is written.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.errors import EvsysError, JournalDamaged, shorten
from evsys_sdk.history.history import ExperimentEntry, load_record
from evsys_sdk.history.index import stat_of
from evsys_sdk.history.progress import LastScore, RunProgress, progress_in
from evsys_sdk.protocols import RunResult, StoppedAt
from evsys_sdk.record.journal import EXPERIMENT, RunJournal
from evsys_sdk.record.layout import LOCK_FILE, held_by, is_held
from evsys_sdk.record.models import RunRecord
from evsys_sdk.record.processes import (
    ExperimentProcess,
    asked_to_stop,
    lock_of,
    log_of,
    read_launch,
    reference_of,
    resume_command,
    running_launch,
)
from evsys_sdk.record.rollouts import StoredJournal
from evsys_sdk.run.budget import spent_before
from evsys_sdk.score_names import suite_label

# How long the processes of an experiment were at work: each notes when it begins, and has worked until its last write
# to the journal, also one that was killed.
PROCESS = "process"


def last_written(journal: Path) -> float | None:
    """When this journal was last written to, by the file system's clock; None where there is none yet."""
    files = (stat_of(journal), stat_of(journal.with_name(f"{journal.name}-wal")))
    return max((found.st_mtime for found in files if found), default=None)


def seconds_until(line: RunJournal, moment: float | None) -> float:
    """What the processes of an experiment have taken together, the last of which was at work until `moment`."""
    known = _processes(line)
    if not known or moment is None:
        return 0.0
    return float(known[-1]["before"] + max(0.0, moment - known[-1]["began"]))


def seconds_before(line: RunJournal, written: float | None) -> float:
    """What the earlier processes took, the last of which wrote last when it is said; notes that another begins."""
    before = seconds_until(line, written)
    line.add(PROCESS, {"began": time.time(), "before": round(before, 3)}, at=0, key=str(len(_processes(line))))
    return before


def launched_at(line: RunJournal) -> float | None:
    """When the first process of an experiment began, and since when it has been live."""
    return next((float(process["began"]) for process in _processes(line)), None)


def _processes(line: RunJournal) -> list[dict[str, Any]]:
    return [event.data for event in line.events(upto=0) if event.kind == PROCESS]


def stop_sentence(run: str, at: StoppedAt) -> str:
    """Where a run stopped and what is saved."""
    if at.step == 0:
        return f"Stopped {run} before the first step."
    stopped = f"Stopped {run} at step {at.step}" + (f" of {at.total_steps}" if at.total_steps else "")
    if not at.checkpoint_step:
        return f"{stopped}; no checkpoint saved: this run will start again."
    if not at.resumes:
        return f"{stopped}; weights saved. This algorithm or backend cannot resume: this run will start again."
    if at.checkpoint_step < at.step:
        return f"{stopped}; the last checkpoint is of step {at.checkpoint_step}."
    return f"{stopped}; checkpoint saved."


def resume_lines(runs: Iterable[RunResult], command: Iterable[str]) -> list[str]:
    """What to tell after an experiment that was stopped; nothing after one that was not."""
    runs = list(runs)
    cancelled = [run for run in runs if run.status == "cancelled"]
    if not cancelled:
        return []
    larger = " (with a larger budget)" if any("budget is spent" in (run.error or "") for run in cancelled) else ""
    stops = [stop_sentence(run.name, run.stopped_at) for run in cancelled if run.stopped_at]
    return [*stops, f"To resume{larger}: {resume_command(command)}"]


def unscored_lines(runs: Iterable[RunResult]) -> list[str]:
    """A line per evaluation of the final weights in which every rollout errored: the runs are completed (DESIGN 9), and
    have no score."""
    found: dict[str, tuple[list[str], str]] = {}
    for run in runs:
        last = {(one.split, one.name): one for one in run.final_evals if one.step != 0}
        for one in last.values():
            if one.scores and all(0 < score.n_rollouts == score.n_errors for score in one.scores):
                error = next((rollout.error for rollout in one.rollouts if rollout.error), one.scores[0].error or "")
                names, _ = found.setdefault(suite_label(one.split, one.name), ([], error))
                names.append(run.name)
    return [
        f"Warning: every rollout on {suite} errored in {', '.join(names)}, so there is no score. First error: "
        f"{shorten(error, 200)}. Fix the cause and run again with --fresh."
        for suite, (names, error) in found.items()
    ]


UNFINISHED = ("interrupted", "cancelled", "partial", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One run."""

    run: str
    status: str
    """running, waiting (its turn comes), interrupted, or how it ended: completed, failed, cancelled, pruned."""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    reward: float | None = None
    score: LastScore | None = None
    error: str | None = None
    last_written: float | None = None
    """When it last wrote something to its directory, in seconds since the epoch."""
    run_dir: str | None = None
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
    launch: ExperimentProcess | None
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

    def plain(self) -> dict[str, object]:
        """As `--json` prints it."""
        data = asdict(self) | {"when": _iso(self.when), "last_event": _iso(self.last_event)}
        return data | {"runs": [run | {"last_written": _iso(run["last_written"])} for run in data["runs"]]}


def status_of(entry: ExperimentEntry) -> Status:
    """Read the status of one experiment from its files. Its process is not asked, and nothing is written."""
    record = entry.record
    launch, holder, problem = read_launch(record), None, entry.problem
    state, when, written = entry.state, entry.when, stat_of(record)
    if is_held(lock_of(record)):
        launch, holder = running_launch(record), held_by(lock_of(record)) or "a process"
        state, when, problem = "running", launch.started_at if launch else entry.when, None
        if launch and launch.process.is_here and not launch.process.is_alive:
            problem = f"{holder} has ended, and something that it started still has the experiment's lock"
    # On a network drive the file has the server's time, and `started_at` the launching machine's.
    elif launch and (written is None or written.st_mtime < launch.started_at):
        state, when = "interrupted", launch.started_at  # that launch left no result
    recorded = load_record(entry) if state not in ("running", "interrupted") else None
    runs = {run.run: _run_state(run, launch, running=holder is not None) for run in progress_in(entry.journal)}
    for run in recorded.runs if recorded else ():
        if run.status == "failed":  # some could not leave a record themselves
            name = run.run_id.partition("/")[2]
            known = runs.get(name) or RunState(run=name, status="failed")
            runs[name] = replace(known, status="failed", error=run.error)
    planned, spent, damage = _read_journal(entry.journal, state, launch)
    budget_limits = launch.budget if launch else {}
    budget = {"limits": budget_limits, "spent": spent} if budget_limits and spent is not None else None
    if budget_limits and recorded and recorded.budget:
        budget = dict(recorded.budget)
    status = Status(
        experiment=entry.name,
        state=state,
        when=when,
        record=str(record),
        launch=launch,
        holder=holder,
        asked_to_stop=asked_to_stop(launch, record) if launch and holder else None,
        last_event=last_written(entry.journal),
        # Runs that execute at the same time begin in any order: they are listed as planned.
        runs=[runs[name] for name in dict.fromkeys([*planned, *runs]) if name in runs],
        n_runs=launch.n_runs if launch else None,
        budget=budget,
        log=str(log_of(record)) if log_of(record).is_file() else None,
        problem=damage or problem,
    )
    return replace(status, next=_next_commands(status, is_damaged=damage is not None))


def _run_state(run: RunProgress, launch: ExperimentProcess | None, *, running: bool) -> RunState:
    """The record of a run is the truth of how it ended; the journal has that of an earlier attempt as well."""
    folder = Path(run.run_dir) if run.run_dir else None
    result = stat_of(folder / RUN_RESULT_FILE) if folder else None
    ended = RunRecord.find(folder) if folder and result else None
    status, error = (ended.status, ended.error) if ended else (run.status or "interrupted", None)
    final = status in ("completed", "pruned") and result is not None
    if running and folder and is_held(folder / LOCK_FILE) and not final:
        status, error = "running", None
    elif running and not final and (result is None or launch is None or result.st_mtime < launch.started_at):
        status, error = "waiting", None
    elif result is None and run.status != "completed":
        status = "interrupted"
    changes = []
    for place in (folder, folder / "logs") if folder else ():
        with suppress(OSError):  # a folder that is not there, or not any more
            changes += [
                found.st_mtime for file in os.scandir(place) if file.is_file() and (found := stat_of(Path(file.path)))
            ]
    stopped_at = ended.stopped_at if ended and status == "cancelled" else None
    return RunState(
        run=run.run,
        status=status,
        step=run.step,
        total_steps=run.total_steps,
        loss=run.loss,
        reward=run.reward,
        score=run.score,
        error=error,
        last_written=max(changes, default=None),
        run_dir=run.run_dir,
        stopped=stop_sentence(run.run, stopped_at) if stopped_at else None,
    )


def _read_journal(
    path: Path, state: str, launch: ExperimentProcess | None
) -> tuple[list[str], dict[str, float] | None, str | None]:
    """From an experiment's journal: its runs as planned, what they have spent (None where that is not known), and what
    is wrong with the journal of an experiment that would resume from it."""
    if not path.is_file():
        return [], None, None
    planned: list[str] = []
    spent: dict[str, float] | None = None
    try:
        with closing(StoredJournal(path)) as journal:
            with suppress(EvsysError, ValueError, KeyError):
                line = journal.latest(EXPERIMENT)
                arms = [event for event in line.events(upto=0) if event.kind == "arm"] if line else []
                planned = [name for arm in arms for name in arm.data["runs"]]
            with suppress(EvsysError):
                if launch and launch.budget:
                    line, until = journal.latest(EXPERIMENT), time.time() if state == "running" else last_written(path)
                    seconds = round(seconds_until(line, until), 1) if line else 0.0
                    spent = asdict(spent_before(journal, line, seconds=seconds)) if line else {}
            if state in UNFINISHED:
                journal.check()
    except JournalDamaged as exc:
        return planned, spent, str(exc) if state in UNFINISHED else None
    except EvsysError:  # it cannot be read at the moment
        pass
    return planned, spent, None


def _next_commands(status: Status, *, is_damaged: bool) -> list[str]:
    launch = status.launch
    if status.is_running:
        follow = [f"evsys logs {status.ref} -f"] if status.log else []
        return [*follow, f"evsys stop {status.ref}"]
    if status.state not in UNFINISHED or launch is None:
        return [f"evsys show {status.ref}"]
    command = resume_command(launch.command)
    again = command if Path(launch.cwd) == Path.cwd() else f"cd {shlex.quote(launch.cwd)} && {command}"
    if is_damaged:
        return [f"{again} --fresh"]
    limits, spent = (status.budget or {}).get("limits", {}), (status.budget or {}).get("spent", {})
    reached = {name: limit for name, limit in limits.items() if spent.get(name, 0) >= limit}
    if status.n_runs and status.n_runs <= spent.get("trials", 0):
        reached.pop("trials", None)  # runs that were begun need no other trial
    used = [f"{spent[name]:.6g} of {limit:g} {name}" for name, limit in reached.items()]
    return [f"{again}, with a larger budget: {' and '.join(used)} are spent" if used else again]


def _iso(moment: float | None) -> str | None:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds") if moment else None
