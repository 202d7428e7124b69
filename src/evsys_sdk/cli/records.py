"""`evsys invalidate`, `conclude` and `clean`: what a person adds to a record, and what can be deleted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from evsys_sdk.cli.options import NAMED, HistoryPlace, experiment_argument, place_options, verb
from evsys_sdk.cli.output import format_size, print_json, print_table, short_path
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.operations.records import WrittenNote


@verb("invalidate")
@experiment_argument()
@click.option("--why", metavar="TEXT", help="what is wrong with it")
@click.option("--undo", is_flag=True, help="count it again")
@place_options
def invalidate(experiment: str, why: str | None, undo: bool, place: HistoryPlace, as_json: bool) -> int:
    """Mark an experiment as invalid: it stays on disk and in the history, and no longer counts for the context and its
    leaderboard. The mark holds for the result it was made for: with a new result, the experiment counts again."""
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.operations.records import write_note

    if (why is None) != undo:
        raise click.UsageError("one of --why TEXT and --undo is needed, not both")
    entry = place.find(experiment).entry
    if undo and entry.notes.why_invalid is None:
        raise EvsysError(f"{entry.name} is not marked as invalid, so there is nothing to undo")
    if why is None:
        _print_note(write_note(entry, "valid", ""), f"{entry.name} counts again", as_json=as_json)
    else:
        done = f"{entry.name} is invalid from now on; --undo takes that back"
        _print_note(write_note(entry, "invalid", why), done, as_json=as_json)
    return EXIT_OK


@verb("conclude")
@experiment_argument()
@click.option("--text", required=True, metavar="TEXT", help="the conclusion")
@place_options
def conclude(experiment: str, text: str, place: HistoryPlace, as_json: bool) -> int:
    """Add a conclusion to an experiment's record, beside the machine's own, which stays as it is."""
    from evsys_sdk.operations.records import conclude_experiment

    written = conclude_experiment(place, experiment, text)
    _print_note(written, f"noted of {written.experiment}", as_json=as_json)
    return EXIT_OK


def _print_note(written: WrittenNote, done: str, *, as_json: bool) -> None:
    if as_json:
        print_json(written.plain())
    else:
        print(f"{done} ({short_path(written.file)})")


@verb("clean")
@experiment_argument(f"{NAMED} (default: all experiments)", required=False)
@click.option("--yes", is_flag=True, help="delete what is listed")
@place_options
def clean(experiment: str | None, yes: bool, place: HistoryPlace, as_json: bool) -> int:
    """List what can be deleted and how much space it takes: weights that no checkpoint and no record names, weights of
    attempts that were set aside, half-written files and, without a name, rehearsals (--dry). Nothing is deleted without
    --yes. Records, journals, logs, checkpoints, and the weights of runs that can be resumed are kept."""
    from evsys_sdk.config.project import project_root
    from evsys_sdk.experiment.clean import plan_clean, refuse_running, remove

    history = place.history()
    entries = history.entries
    if experiment is not None:
        entries = [place.find(experiment, history).entry]
        refuse_running(entries[0])
    known, project = [*history.entries, *entries], project_root(Path.cwd())
    plan = plan_clean(entries, known=known, project=project, rehearsals=experiment is None)
    freed = remove(plan, entries) if yes and plan.leftovers else 0
    if as_json:
        items = [
            {"experiment": one.experiment, "path": str(one.path), "bytes": one.bytes, "why": one.why}
            for one in plan.leftovers
        ]
        sizes = {"bytes": plan.bytes, "removed": yes, "freed_bytes": freed}
        print_json({"leftovers": items, **sizes, "running": plan.running})
        return EXIT_OK
    for name in plan.running:
        print(f"{name} is running: nothing of it is touched")
    if not plan.leftovers:
        print("nothing to remove")
        return EXIT_OK
    rows = [[format_size(one.bytes), short_path(one.path), one.why] for one in plan.leftovers]
    print_table(["size", "path", "why"], rows)
    count = f"{len(rows)} item{'' if len(rows) == 1 else 's'}, {format_size(plan.bytes)}"
    if yes:
        print(f"removed: {count}")
    else:
        named = f" {experiment}" if experiment else ""
        print(f"can be removed: {count}. Nothing was removed; delete with: evsys clean{named} --yes")
    return EXIT_OK
