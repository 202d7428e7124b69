"""`evsys status`: where an experiment stands, asked from any terminal."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.experiments import NAMED, add_place_flags, find, open_history, short
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.running.status import RunState, Status


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "status",
        help="is it running, how far is it, is it stuck",
        description="Where an experiment stands, from its files: running or not, each run's step, loss and last score, "
        "when something last happened. Without a name: what is running now.",
    )
    parser.add_argument("experiment", nargs="?", help=NAMED)
    add_place_flags(parser)
    parser.set_defaults(run=show_status)


def show_status(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.data import print_json
    from evsys_sdk.running.status import status_of

    if args.experiment is None:
        return _show_running(args)
    status = status_of(find(args, args.experiment).entry)
    if args.json:
        print_json(status.plain())
    else:
        print_status(status)
    return EXIT_OK


def _show_running(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.data import print_json, print_table
    from evsys_sdk.running.status import status_of

    found = [status_of(entry) for entry in open_history(args).entries if entry.state == "running"]
    running = [status for status in found if status.is_running]
    if args.json:
        print_json({"running": [status.plain() for status in running]})
    elif running:
        rows = [[s.experiment, _ago(s.when), s.holder or "", _runs_text(s), _ago(s.last_event)] for s in running]
        print_table(["name", "running for", "in", "runs", "last event"], rows)
    else:
        print("nothing is running here; evsys history lists what was")
    return EXIT_OK


def print_status(status: Status) -> None:
    """As a person reads it."""
    from evsys_sdk.cli.data import print_table

    print(_headline(status))
    if status.problem:
        print(f"problem: {status.problem}")
    if status.runs:
        header = ["run", "status", "step", "learning", "score", "last written"]
        print_table(header, [_row(run) for run in status.runs])
    for run in status.runs:
        if run.error:
            print(f"{run.run}: {run.error}")
    for line in _further(status):
        print(line)


def _headline(status: Status) -> str:
    text = f"{status.experiment}: {status.state}"
    if status.is_running:
        return f"{text} for {_length(status.when)} ({status.holder}{_how(status)})"
    if status.state == "interrupted":
        return f"{text}: its process has ended without a result (begun {status.date})"
    return f"{text} ({status.date})"


def _how(status: Status) -> str:
    if status.asked_to_stop:
        return ", asked to stop: it ends after the step it is in"
    return ", detached" if status.launch and status.launch.detached else ""


def _further(status: Status) -> Iterator[str]:
    runs = _runs_text(status)
    event = f", last event {_ago(status.last_event)} ago" if status.is_running else ""
    yield f"runs: {runs}{event}"
    if status.budget:
        yield f"budget: {_budget_text(status.budget)}"
    if status.log:
        yield f"log: {short(Path(status.log))}"
    yield f"next: {', '.join(status.next)}"


def _runs_text(status: Status) -> str:
    """`1 of 6 completed, 1 running`."""
    counts: dict[str, int] = {}
    for run in status.runs:
        counts[run.status] = counts.get(run.status, 0) + 1
    done = counts.pop("completed", 0)
    of = f" of {status.n_runs}" if status.n_runs else ""
    if status.n_runs and status.n_runs > len(status.runs):
        counts["not begun"] = status.n_runs - len(status.runs)
    return ", ".join([f"{done}{of} completed", *(f"{n} {word}" for word, n in counts.items())])


def _row(run: RunState) -> list[str]:
    score = run.score
    told = ""
    if score is not None:
        at = {None: "", 0: " untrained"}.get(score.step, f" at step {score.step}")
        told = f"{score.benchmark} {score.metric} {score.value:.3f} (n={score.n_tasks}){at}"
    learning = f"reward {run.reward:.3f}" if run.reward is not None else ""
    learning = learning or (f"loss {run.loss:.4f}" if run.loss is not None else "")
    of = f"/{run.total_steps}" if run.total_steps else ""
    alive = run.status in ("running", "interrupted") and run.last_written
    written = f"{_ago(run.last_written)} ago" if alive else ""
    return [run.run, run.status, f"{run.step}{of}" if run.step else "-", learning or "-", told or "-", written or "-"]


def _budget_text(budget: dict[str, Any]) -> str:
    spent = budget["spent"]
    used = {name: spent.get(name) for name in budget["limits"]}
    return ", ".join(
        f"{'?' if used[name] is None else _number(used[name])} of {_number(limit)} {name}"
        for name, limit in budget["limits"].items()
    )


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:,.2f}"


def _length(since: float) -> str:
    from evsys_sdk.cli.progress import clock

    return clock(max(0.0, time.time() - since))


def _ago(moment: float | None) -> str:
    return "?" if moment is None else _length(moment)
