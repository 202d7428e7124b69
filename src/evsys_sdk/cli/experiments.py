"""What the verbs that look back have in common: where experiments are looked for, and how one is told."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evsys_sdk.record.history import Entry, History
    from evsys_sdk.record.look_up import Found

NAMED = "its name, the beginning of its name, or the path of its record or folder"


def add_place_flags(parser: Any) -> None:
    parser.add_argument(
        "--dir", action="append", default=[], metavar="DIR",
        help="look through this folder instead of the workspace's index; repeatable",
    )  # fmt: skip
    parser.add_argument("--workspace", metavar="DIR", help="the workspace folder (default: the project's .evsys)")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def open_history(args: argparse.Namespace) -> History:
    """The experiments that the flags name; what could not be read is told on stderr."""
    from evsys_sdk.config.root import project_root
    from evsys_sdk.constants import WORKSPACE_DIR
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.record.history import DEFAULT_OUTPUTS, read_history

    folders = [Path(folder) for folder in args.dir]
    for folder in folders:
        if not folder.is_dir():
            raise EvsysError(f"--dir {folder} is not a folder")
    root = project_root(Path.cwd())
    workspace = Path(args.workspace) if args.workspace else root / WORKSPACE_DIR
    history = read_history(workspace, folders, outputs=Path.cwd() / DEFAULT_OUTPUTS)
    for problem in history.problems:
        print(f"note: {problem}", file=sys.stderr)
    return history


def find(args: argparse.Namespace, ref: str, history: History | None = None) -> Found:
    """The experiment called `ref`; a choice between several of that name is told on stderr."""
    from evsys_sdk.record.look_up import look_up

    found = look_up(ref, history or open_history(args))
    if found.note:
        print(f"note: {found.note}", file=sys.stderr)
    return found


def find_or_newest(args: argparse.Namespace, ref: str | None, history: History | None = None) -> Found:
    """The experiment called `ref`; without a name the newest one, which is named on stderr."""
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.record.look_up import Found

    if ref is not None:
        return find(args, ref, history)
    entries = (history or open_history(args)).entries
    if not entries:
        raise EvsysError("no experiment is known here. Run one, change to its project, or name the path of its record")
    print(f"note: {entries[0].name} is the newest experiment", file=sys.stderr)
    return Found(entry=entries[0])


def plain_entry(entry: Entry) -> dict[str, Any]:
    """An experiment as `--json` tells it in a list."""
    from dataclasses import asdict

    digest, notes = entry.digest, entry.notes
    top = digest.top
    return {
        "name": entry.name,
        "status": entry.status,
        "state": entry.state,
        "when": entry.date,
        "record": str(entry.record),
        "tags": digest.tags,
        "hypothesis": digest.hypothesis,
        "setup": digest.setup,
        "untrained": digest.untrained,
        "outcome": digest.outcome,
        "metric": digest.metric,
        "mode": digest.mode,
        "measured": digest.measured,
        "ranked": digest.selects,
        "best_arm": digest.best_arm,
        "top_arm": top.arm if top else None,
        "score": top.mean if top else None,
        "expected": digest.expected,
        "arms": [asdict(arm) | {"mean": arm.mean} for arm in digest.arms],
        "conclusion": digest.conclusion,
        "leakage": digest.leakage,
        "conclusions": [asdict(note) for note in notes.conclusions],
        "invalid": notes.why_invalid,
        "earlier_notes": notes.earlier,
        "parent": digest.parent,
        "seconds": digest.seconds,
        "problem": entry.problem,
    }


def short(path: Path) -> str:
    """Relative to the current folder where it lies in it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
