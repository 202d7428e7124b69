"""`evsys logs`: what the process of an experiment wrote."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from evsys_sdk.cli.experiments import NAMED, add_place_flags, find
from evsys_sdk.cli.flags import positive
from evsys_sdk.constants import EXIT_OK

LINES = 50
LOOK_SECONDS = 0.2


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "logs",
        help="what the process of an experiment wrote",
        description="Print the end of <output_dir>/<name>.log: a header per launch, progress, warnings, the summary.",
    )
    parser.add_argument("experiment", help=NAMED)
    parser.add_argument(
        "-n", "--lines", type=positive, default=LINES, metavar="N", help=f"the last N (default {LINES})"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the process ends; Ctrl-C leaves it be")
    add_place_flags(parser)
    parser.set_defaults(run=show_log)


def show_log(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.data import print_json
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.record.launch_record import log_of, read_launch
    from evsys_sdk.record.log_tail import last_lines

    if args.follow and args.json:
        raise EvsysError("--follow prints what comes as it comes; --json tells the last lines: choose one")
    record = find(args, args.experiment).entry.record
    path, launch = log_of(record), read_launch(record)
    if launch is not None and launch.log is None:
        print("note: its last launch, from Python, writes no log; this is of an earlier one", file=sys.stderr)
    try:
        lines, end = last_lines(path, args.lines)
    except OSError as exc:
        raise EvsysError(f"there is no log at {path} ({exc.strerror}); evsys run writes one") from exc
    if args.json:
        print_json({"experiment": record.name.partition(".")[0], "log": str(path), "lines": lines})
        return EXIT_OK
    print(*lines, sep="\n")
    if args.follow:
        _follow(path, record, end)
    return EXIT_OK


def _follow(path: Any, record: Any, end: int) -> None:
    from evsys_sdk.record.launch_record import lock_of, read_launch
    from evsys_sdk.record.log_tail import follow
    from evsys_sdk.record.run_dir import is_held

    def goes_on() -> bool:
        launch = read_launch(record)
        # The summary is written after the experiment has been let go of.
        return is_held(lock_of(record)) or (launch is not None and launch.log is not None and launch.process.is_alive)

    try:
        for text in follow(path, end, goes_on=goes_on, wait=lambda: time.sleep(LOOK_SECONDS)):
            print(text, end="", flush=True)
    except KeyboardInterrupt:  # enough seen
        print(file=sys.stderr)
