"""`evsys status`, `logs` and `stop`: an experiment that runs, from any terminal."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evsys_sdk.cli.options import NAMED, POSITIVE, HistoryPlace, experiment_argument, not_negative, place_options, verb
from evsys_sdk.cli.output import print_json, print_table, short_path
from evsys_sdk.constants import EXIT_OK, EXIT_RUN_FAILED

if TYPE_CHECKING:
    from evsys_sdk.operations.control import FollowEvent
    from evsys_sdk.record.processes import ExperimentProcess
    from evsys_sdk.run.status import RunState, Status

LOG_LINES = 50
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0
MOST_EVENTS = 1000
EVENTS = 50


@verb("status")
@experiment_argument(f"{NAMED} (default: everything that is running)", required=False)
@place_options
def status(experiment: str | None, place: HistoryPlace, as_json: bool) -> int:
    """Where an experiment stands, from its files: running or not, each run's step, loss and last score, when something
    last happened. Without a name: what is running now."""
    from evsys_sdk.run.status import status_of

    if experiment is not None:
        found = status_of(place.find(experiment).entry)
        if as_json:
            print_json(found.plain())
        else:
            print_status(found)
        return EXIT_OK
    every = [status_of(entry) for entry in place.history().entries if entry.state == "running"]
    running = [one for one in every if one.is_running]
    if as_json:
        print_json({"running": [one.plain() for one in running]})
    elif running:
        rows = [[s.experiment, _age(s.when), s.holder or "", _runs_text(s), _age(s.last_event)] for s in running]
        print_table(["name", "running for", "in", "runs", "last event"], rows)
    else:
        print("nothing is running here; evsys history lists what was")
    return EXIT_OK


def print_status(status: Status) -> None:
    """As a person reads it."""
    headline = f"{status.experiment}: {status.state}"
    if status.is_running:
        how = ", detached" if status.launch and status.launch.detached else ""
        how = ", asked to stop: it ends after its current step" if status.asked_to_stop else how
        print(f"{headline} for {_age(status.when)} ({status.holder}{how})")
    elif status.state == "interrupted":
        print(f"{headline}: its process has ended without a result (begun {status.date})")
    else:
        print(f"{headline} ({status.date})")
    if status.problem:
        print(f"problem: {status.problem}")
    if status.runs:
        header = ["run", "status", "step", "learning", "score", "last written"]
        print_table(header, [_run_cells(run) for run in status.runs])
    for run in status.runs:
        if run.error:
            print(f"{run.run}: {run.error}")
    event = f", last event {_age(status.last_event)} ago" if status.is_running else ""
    print(f"runs: {_runs_text(status)}{event}")
    if status.budget:
        spent = status.budget["spent"]
        print("budget: " + ", ".join(
            f"{'?' if spent.get(name) is None else _number(spent[name])} of {_number(limit)} {name}"
            for name, limit in status.budget["limits"].items()
        ))  # fmt: skip
    if status.log:
        print(f"log: {short_path(Path(status.log))}")
    print(f"next: {', '.join(status.next)}")


def _run_cells(run: RunState) -> list[str]:
    from evsys_sdk.format import count, shown

    score = ""
    if run.score is not None:
        tasks = count(run.score.n_tasks, "task")
        at = {None: "", 0: " untrained"}.get(run.score.step, f" at step {run.score.step}")
        value = shown(run.score.value, unit=run.score.unit)
        score = f"{run.score.benchmark} {run.score.metric} {value}, {tasks}{at}"
    learning = f"loss {run.loss:.4f}" if run.loss is not None else ""
    learning = f"reward {run.reward:.3f}" if run.reward is not None else learning
    step = f"{run.step}{f'/{run.total_steps}' if run.total_steps else ''}" if run.step else ""
    is_open = run.status in ("running", "interrupted") and run.last_written
    written = f"{_age(run.last_written)} ago" if is_open else ""
    return [run.run, run.status, *(cell or "-" for cell in (step, learning, score, written))]


def _runs_text(status: Status) -> str:
    """`1 of 6 completed, 1 running`."""
    counts = Counter(run.status for run in status.runs)
    done = counts.pop("completed", 0)
    of = f" of {status.n_runs}" if status.n_runs else ""
    if status.n_runs and status.n_runs > len(status.runs):
        counts["not begun"] = status.n_runs - len(status.runs)
    return ", ".join([f"{done}{of} completed", *(f"{n} {word}" for word, n in counts.items())])


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:,.2f}"


def _age(moment: float | None) -> str:
    from evsys_sdk.cli.progress import clock

    return "?" if moment is None else clock(max(0.0, time.time() - moment))


@verb("follow")
@experiment_argument()
@click.option(
    "--since", type=click.IntRange(min=0), default=0, metavar="CURSOR", help="only what came after it (0: all)"
)
@click.option(
    "--limit", type=click.IntRange(1, MOST_EVENTS), default=EVENTS, metavar="N", help=f"at most N (default {EVENTS})"
)
@place_options
def follow(experiment: str, since: int, limit: int, place: HistoryPlace, as_json: bool) -> int:
    """Print what has happened since a cursor and the next cursor, and return at once: runs begun and ended, scores, and
    the last training step of each run. To be called again and again; `evsys logs -f` waits instead."""
    from evsys_sdk.operations.control import follow_experiment

    found = follow_experiment(place, experiment, since=since, limit=limit)
    if as_json:
        print_json(found.plain())
        return EXIT_OK
    for event in found.events:
        print(_event_line(event))
    more = ", more events follow" if found.has_more else ""
    print(f"{found.status.experiment}: {found.status.state}, cursor {found.cursor}{more}")
    return EXIT_OK


def _event_line(event: FollowEvent) -> str:
    """`lr0p001: score at step 100: val/tools pass@1 0.604`."""
    from evsys_sdk.format import shown

    detail = event.detail
    if event.kind == "score":
        values = ", ".join(
            f"{score['metric']} {'no score' if score['value'] is None else shown(score['value'])}"
            for score in detail["scores"]
        )
        at = "" if detail["final"] else " untrained" if event.step == 0 else f" at step {event.step}"
        return f"{event.run}: score{at}: {detail['benchmark']} {values}"
    if event.kind == "ended":
        return f"{event.run}: {detail['status']}{': ' + detail['error'] if detail['error'] else ''}"
    if event.kind == "step":
        values = ", ".join(f"{key} {value:.4f}" for key, value in detail.items())
        return f"{event.run}: step {event.step} {values}".rstrip()
    if event.kind == "training":
        return f"{event.run}: training, {detail['total_steps']} steps"
    return f"{event.run}: {event.kind}"


@verb("logs")
@experiment_argument()
@click.option("-n", "--lines", type=POSITIVE, default=LOG_LINES, metavar="N", help=f"the last N (default {LOG_LINES})")
@click.option("-f", "--follow", is_flag=True, help="print new lines until the process ends; Ctrl-C leaves it running")
@place_options
def logs(experiment: str, lines: int, follow: bool, place: HistoryPlace, as_json: bool) -> int:
    """Print the end of <output_dir>/<name>.log: a header per launch, progress, warnings, the summary."""
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.record.layout import is_held
    from evsys_sdk.record.lines import follow as follow_file
    from evsys_sdk.record.lines import last_lines
    from evsys_sdk.record.processes import lock_of, log_of, read_launch

    if follow and as_json:
        raise EvsysError("--follow prints lines as they are written, --json the last ones; choose one")
    record = place.find(experiment).entry.record
    path, launch = log_of(record), read_launch(record)
    if launch is not None and launch.log is None:
        print("note: its last launch, from Python, writes no log; this is of an earlier one", file=sys.stderr)
    try:
        last, end = last_lines(path, lines)
    except OSError as exc:
        raise EvsysError(f"there is no log at {path} ({exc.strerror}); evsys run writes one") from exc
    if as_json:
        print_json({"experiment": record.name.partition(".")[0], "log": str(path), "lines": last})
        return EXIT_OK
    print(*last, sep="\n")
    if not follow:
        return EXIT_OK

    def is_writing() -> bool:
        launch = read_launch(record)
        # The summary is written after the experiment's lock has been released.
        return is_held(lock_of(record)) or (launch is not None and launch.log is not None and launch.process.is_alive)

    try:
        for text in follow_file(path, end, is_writing=is_writing, wait=lambda: time.sleep(POLL_SECONDS)):
            print(text, end="", flush=True)
    except KeyboardInterrupt:  # the reader has seen enough
        print(file=sys.stderr)
    return EXIT_OK


@verb("stop", epilog="Exit codes: 0 it does not run (any more), 1 it cannot be stopped from here, 2 it still runs.")
@experiment_argument()
@click.option("--now", is_flag=True, help="interrupt its current step; the record is valid all the same")
@click.option(
    "--timeout",
    type=not_negative,
    default=STOP_SECONDS,
    metavar="SECONDS",
    help=f"wait so long (default {STOP_SECONDS:g}; 0: only ask)",
)
@place_options
def stop(experiment: str, now: bool, timeout: float, place: HistoryPlace, as_json: bool) -> int:
    """Ask the process of an experiment to stop after its current step, and wait for it. Each run saves a checkpoint of
    the step it stops at and a record that says `cancelled`; the same `evsys run` resumes there."""
    from evsys_sdk.operations.control import stop_experiment
    from evsys_sdk.run.status import UNFINISHED

    def announce(asked: ExperimentProcess) -> None:
        if not as_json:
            how = "immediately" if now else "after its current step"
            print(f"asked {asked.process} to stop {how}", file=sys.stderr)

    found = stop_experiment(place, experiment, now=now, timeout=timeout, on_asked=announce)
    asked, gone, status = found.asked, found.stopped, found.status
    if as_json:
        print_json(found.plain())
    elif asked is None:
        print(f"{status.experiment} is not running: {status.state}")
    elif gone:
        print(f"{status.experiment} has stopped: {status.state}")
        for run in status.runs:
            if run.stopped is not None:
                print(run.stopped)
        print(f"To resume: {status.next[0]}" if status.state in UNFINISHED else f"next: {', '.join(status.next)}")
    else:
        harder = f"evsys stop {status.ref} --now"
        if now and status.launch:
            harder = f"kill -9 {status.launch.pid} (evsys run resumes from the last checkpoint)"
        what = "has not ended yet" if now else "is still at its current step"
        print(f"{status.experiment} {what} ({status.holder})\nnext: evsys status {status.ref}, {harder}")
    return EXIT_OK if gone else EXIT_RUN_FAILED
