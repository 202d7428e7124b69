"""`evsys invalidate` and `evsys conclude`: what a person or an agent has to say of an experiment."""

from __future__ import annotations

import argparse
from typing import Any

from evsys_sdk.cli.experiments import NAMED, add_place_flags, find, short
from evsys_sdk.constants import EXIT_OK


def add_parser(verbs: Any) -> None:
    invalidate = verbs.add_parser(
        "invalidate",
        help="take an experiment out of the count, with a reason",
        description="Mark an experiment as invalid: it stays on disk and in the history, and no longer counts for the "
        "context and its ladder. The mark holds for the result it was made for: run anew with another result, the "
        "experiment counts again.",
    )
    invalidate.add_argument("experiment", help=NAMED)
    why = invalidate.add_mutually_exclusive_group(required=True)
    why.add_argument("--why", metavar="TEXT", help="what is wrong with it")
    why.add_argument("--undo", action="store_true", help="count it again")
    add_place_flags(invalidate)
    invalidate.set_defaults(run=mark_invalid)
    conclude = verbs.add_parser(
        "conclude",
        help="add a conclusion of your own to an experiment",
        description="Add a conclusion to an experiment's record, beside the machine's own, which stays as it is.",
    )
    conclude.add_argument("experiment", help=NAMED)
    conclude.add_argument("--text", required=True, metavar="TEXT", help="the conclusion")
    add_place_flags(conclude)
    conclude.set_defaults(run=add_conclusion)


def mark_invalid(args: argparse.Namespace) -> int:
    from evsys_sdk.errors import EvsysError

    entry = find(args, args.experiment).entry
    if args.undo and entry.notes.why_invalid is None:
        raise EvsysError(f"{entry.name} is not marked as invalid, so there is nothing to undo")
    if args.undo:
        return _add(args, entry, "valid", "", f"{entry.name} counts again")
    return _add(args, entry, "invalid", args.why, f"{entry.name} is invalid from now on; --undo takes that back")


def add_conclusion(args: argparse.Namespace) -> int:
    entry = find(args, args.experiment).entry
    return _add(args, entry, "conclusion", args.text, f"noted of {entry.name}")


def _add(args: argparse.Namespace, entry: Any, kind: Any, text: str, told: str) -> int:
    from dataclasses import asdict

    from evsys_sdk.cli.data import print_json
    from evsys_sdk.record.notes import add_note, notes_path

    note = add_note(entry.record, kind, text, about=entry.digest.result)
    if args.json:
        print_json({"experiment": entry.name, "file": str(notes_path(entry.record)), **asdict(note)})
    else:
        print(f"{told} ({short(notes_path(entry.record))})")
    return EXIT_OK
