"""`evsys history`: which experiments were run, and what they came to."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.experiments import add_place_flags, open_history, plain_entry
from evsys_sdk.cli.flags import positive
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.record.history import Entry


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "history",
        help="experiments that were run here, newest first",
        description="List experiments from disk, newest first: those that the workspace's index knows and those in "
        "./outputs. Rehearsals (--dry) are not listed.",
    )
    parser.add_argument(
        "--tag", action="append", default=[], metavar="TAG", help="only those with this tag; repeatable"
    )
    parser.add_argument(
        "--status", action="append", default=[], metavar="STATUS",
        help="only those: completed, partial, failed, cancelled, running, interrupted, invalid, unreadable; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--metric", action="append", default=[], metavar="NAME[>=X]",
        help="only those with an arm that has this metric, and within the bound: 'pass@1>=0.5', 'final_loss<0.1'; "
        "the mean over an arm's seeds counts; repeatable",
    )  # fmt: skip
    parser.add_argument("--limit", type=positive, metavar="N", help="at most N")
    add_place_flags(parser)
    parser.set_defaults(run=list_experiments)


def list_experiments(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.data import print_json, print_table
    from evsys_sdk.record.look_up import select
    from evsys_sdk.record.looks import looks_of

    history = open_history(args)
    looks = looks_of(history.entries)
    found = select(history.entries, tags=args.tag, statuses=args.status, conditions=args.metric)
    shown = found[: args.limit]
    if args.json:
        told = {"experiments": [plain_entry(entry) for entry in shown], "left_out": len(found) - len(shown)}
        print_json(told | {"benchmarks": [one.as_dict() for one in looks], "problems": history.problems})
    elif shown:
        print_table(["when", "name", "status", "runs", "metric", "best", "tags"], [_row(entry) for entry in shown])
        if len(shown) < len(found):
            print(f"({len(found) - len(shown)} more; --limit)")
        for one in looks:
            if one.n_arms > 1:
                print(f"{'warning' if one.is_spent else 'selected on'}: {one}")
    else:
        print(_nothing(len(history.entries)))
    return EXIT_OK


def _nothing(known: int) -> str:
    if known:
        return f"none of the {known} experiments fits"
    return "no experiment is known here; evsys run makes one, --dir looks through a folder"


def _row(entry: Entry) -> list[str]:
    digest = entry.digest
    runs = sum(len(arm.statuses) for arm in digest.arms)
    done = sum(status in ("completed", "pruned") for arm in digest.arms for status in arm.statuses)
    return [
        entry.date,
        entry.name,
        entry.status,
        f"{done}/{runs}" if runs else "-",
        digest.metric or "-",
        _best(entry),
        ", ".join(digest.tags) or "-",
    ]


def _best(entry: Entry) -> str:
    """`0.950 lr=0.1`; a score on a test benchmark is nobody's best, and `evsys show` reports it."""
    digest, top = entry.digest, entry.digest.top
    if entry.state == "running" or not digest.scored:
        return "-"
    if not digest.selects:
        return "(test, not ranked)"
    named = f" {top.arm}" if top and len(digest.arms) > 1 else ""
    errors = f" ({top.errors})" if top and top.has_many_errors else ""
    return f"{top.mean:.3f}{named}{errors}" if top and top.mean is not None else "-"
