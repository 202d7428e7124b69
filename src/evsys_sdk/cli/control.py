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
    from evsys_sdk.run.status import RunState, Status

LOG_LINES = 50
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0


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
    from evsys_sdk.experiment.process import ask_to_stop, wait_for_end
    from evsys_sdk.history.history import read_one
    from evsys_sdk.run.status import UNFINISHED, status_of

    entry = place.find(experiment).entry
    asked = ask_to_stop(entry.record, now=now)
    if asked is not None and not as_json:
        how = "immediately" if now else "after its current step"
        print(f"asked {asked.process} to stop {how}", file=sys.stderr)
    gone = asked is None or wait_for_end(entry.record, timeout)
    status = status_of(read_one(entry.record) or entry)
    if as_json:
        print_json({"asked": asked is not None, "stopped": gone, **status.plain()})
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
