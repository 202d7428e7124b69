"""`evsys stop`: let an experiment end after the step it is in."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.experiments import NAMED, add_place_flags, find
from evsys_sdk.cli.flags import not_negative
from evsys_sdk.constants import EXIT_OK, EXIT_RUN_FAILED

if TYPE_CHECKING:
    from evsys_sdk.running.status import Status

PATIENCE_SECONDS = 60.0


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "stop",
        help="let an experiment end after the step it is in",
        description="Ask the process of an experiment to stop after the step it is in, and wait for it. Each run saves "
        "a checkpoint of the step it stops at and a record that says `cancelled`; the same `evsys run` resumes there.",
        epilog="Exit codes: 0 it does not run (any more), 1 it cannot be stopped from here, 2 it still runs.",
    )
    parser.add_argument("experiment", help=NAMED)
    parser.add_argument(
        "--now", action="store_true", help="interrupt the step it is in; the record is valid all the same"
    )
    parser.add_argument(
        "--timeout", type=not_negative, default=PATIENCE_SECONDS, metavar="SECONDS",
        help=f"wait so long (default {PATIENCE_SECONDS:g}; 0: only ask)",
    )  # fmt: skip
    add_place_flags(parser)
    parser.set_defaults(run=stop)


def stop(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.data import print_json
    from evsys_sdk.record.history import read_one
    from evsys_sdk.running.status import UNFINISHED, status_of
    from evsys_sdk.running.stopping import ask_to_stop, wait_for_end

    entry = find(args, args.experiment).entry
    asked = ask_to_stop(entry.record, now=args.now)
    if asked is not None and not args.json:
        how = "where it stands" if args.now else "after the step it is in"
        print(f"asked {asked.process} to stop {how}", file=sys.stderr)
    gone = asked is None or wait_for_end(entry.record, args.timeout)
    status = status_of(read_one(entry.record) or entry)
    if args.json:
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
        print(_still_running(status, now=args.now))
    return EXIT_OK if gone else EXIT_RUN_FAILED


def _still_running(status: Status, *, now: bool) -> str:
    ref = status.ref
    harder = f"evsys stop {ref} --now"
    if now and status.launch:
        harder = f"kill -9 {status.launch.pid} (evsys run goes on from the last checkpoint)"
    what = "is still at the step it is in" if not now else "has not ended yet"
    return f"{status.experiment} {what} ({status.holder})\nnext: evsys status {ref}, {harder}"
