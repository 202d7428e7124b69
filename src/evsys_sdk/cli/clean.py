"""`evsys clean`: what of finished experiments can be deleted."""

from __future__ import annotations

import argparse
from typing import Any

from evsys_sdk.cli.experiments import NAMED, add_place_flags, find, open_history, short
from evsys_sdk.constants import EXIT_OK


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "clean",
        help="list files that nothing needs any more, and delete them on request",
        description="List what can be deleted and how much space it takes: weights that no checkpoint and no record "
        "names, weights of attempts that were set aside, half-written files and, without a name, rehearsals (--dry). "
        "Nothing is deleted without --yes. "
        "Records, journals, logs, checkpoints, and the weights of runs that can be resumed are kept.",
    )
    parser.add_argument("experiment", nargs="?", help=f"{NAMED} (default: all experiments)")
    parser.add_argument("--yes", action="store_true", help="delete what is listed")
    add_place_flags(parser)
    parser.set_defaults(run=clean)


def clean(args: argparse.Namespace) -> int:
    from pathlib import Path

    from evsys_sdk.cli.data import format_size, print_json, print_table
    from evsys_sdk.config.root import project_root
    from evsys_sdk.running.clean import plan_clean, refuse_running, remove

    history = open_history(args)
    entries = history.entries
    if args.experiment is not None:
        entries = [find(args, args.experiment, history).entry]
        refuse_running(entries[0])
    known, project = [*history.entries, *entries], project_root(Path.cwd())
    plan = plan_clean(entries, known=known, project=project, rehearsals=args.experiment is None)
    freed = remove(plan, entries) if args.yes and plan.leftovers else 0
    if args.json:
        items = [{"experiment": one.experiment, "path": str(one.path), "bytes": one.bytes, "why": one.why}
                 for one in plan.leftovers]  # fmt: skip
        print_json({"leftovers": items, "bytes": plan.bytes, "removed": bool(args.yes), "freed_bytes": freed,
                    "running": plan.running})  # fmt: skip
        return EXIT_OK
    for name in plan.running:
        print(f"{name} is running: nothing of it is touched")
    if not plan.leftovers:
        print("nothing to remove")
        return EXIT_OK
    print_table(["size", "path", "why"], [[format_size(one.bytes), short(one.path), one.why] for one in plan.leftovers])
    count = f"{len(plan.leftovers)} item{'' if len(plan.leftovers) == 1 else 's'}, {format_size(plan.bytes)}"
    named = f" {args.experiment}" if args.experiment else ""
    print(
        f"removed: {count}"
        if args.yes
        else f"can be removed: {count}. Nothing was removed; delete with: evsys clean{named} --yes"
    )
    return EXIT_OK
