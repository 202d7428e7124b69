"""`evsys compare`: experiments side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.experiments import add_place_flags, open_history
from evsys_sdk.cli.flags import add_import_flag
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.running.comparing import Compared


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "compare",
        help="experiments side by side, with a paired verdict",
        description="What differs in the settings, the scores side by side, and a verdict on the tasks that they "
        "share: paired task by task, corrected for the number of comparisons, the first one named as the baseline. "
        "Of an experiment its best arm is taken, or all arms where none is best.",
    )
    parser.add_argument(
        "experiments", nargs="+", metavar="experiment",
        help="a name, the beginning of one, or a path; name:arm for one arm of it",
    )  # fmt: skip
    parser.add_argument("--metric", metavar="NAME", help="judge by this metric (default: the success metric)")
    add_import_flag(parser)
    add_place_flags(parser)
    parser.set_defaults(run=compare_experiments)


def compare_experiments(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.streams import prints_to_stderr
    from evsys_sdk.running.comparing import compare

    with prints_to_stderr():
        import_metrics(args.imports)
        found = compare(args.experiments, open_history(args), metric=args.metric)
    if args.json:
        from evsys_sdk.cli.data import print_json

        print_json(plain(found))
    else:
        _print(found)
    return EXIT_OK


def import_metrics(names: list[str], recorded: Sequence[str] = ()) -> None:
    """The project may have metrics of its own, in `names` or in what a record says was imported; without them the rest
    can still be compared."""
    from evsys_sdk.cli.suites import import_extensions
    from evsys_sdk.errors import EvsysError

    try:
        import_extensions(names or list(recorded))
    except EvsysError as exc:
        if names:
            raise
        print(f"note: the project's own metrics are missing: {exc}", file=sys.stderr)


def plain(found: Compared) -> dict[str, Any]:
    """The comparison as `--json` tells it."""
    return {
        "sides": [
            {
                "label": side.label,
                "experiment": side.entry.name,
                "arm": side.arm.arm,
                "status": side.entry.status,
                "record": str(side.entry.record),
                "seeds": len(side.arm.scores),
            }
            for side in found.sides
        ],
        "settings": found.settings,
        "scores": found.scores,
        "verdicts": [
            {"split": one.split, "benchmark": one.name, **one.verdict.as_dict()} for one in found.verdicts
        ],
        "notes": found.notes,
    }  # fmt: skip


def _print(found: Compared) -> None:
    from evsys_sdk.cli.data import print_table
    from evsys_sdk.eval.verdict_text import verdict_lines

    labels = [side.label for side in found.sides]
    print("settings that differ:" if found.settings else "the settings are the same")
    if found.settings:
        rows = [[place, *(_setting(value) for value in values)] for place, values in found.settings.items()]
        print_table(["", *labels], rows)
    if found.scores:
        print("\nscores (means over seeds):")
        rows = [[key, *("-" if v is None else f"{v:.4g}" for v in values)] for key, values in found.scores.items()]
        print_table(["", *labels], rows)
    for judged in found.verdicts:
        lower = ", lower is better" if judged.verdict.mode == "min" else ""
        print(f"\n{judged.label} on shared tasks, against {judged.verdict.baseline_arm}{lower}:")
        for line in verdict_lines(judged.verdict):
            print(f"  {line}")
    if found.notes:
        print()
    for note in found.notes:
        print(f"note: {note}")


def _setting(value: Any) -> str:
    from evsys_sdk.errors import shorten

    return "(not set)" if value is None else shorten(str(value), 40)
