"""`evsys judge`: a finished experiment judged again against another baseline arm."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.experiments import NAMED, add_place_flags, find, short
from evsys_sdk.cli.flags import add_import_flag
from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.record.history import Entry


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "judge",
        help="judge a finished experiment again, against another baseline arm",
        description="Compare the arms of a finished experiment with another baseline arm, from the recorded rollouts "
        "and without training. Rewrites the record, the page and the runs' conclusions; the conclusion says that the "
        "baseline was chosen after the results were known.",
    )
    parser.add_argument("experiment", help=NAMED)
    parser.add_argument(
        "--baseline-arm",
        required=True,
        metavar="ARM",
        help="the arm that the others are compared with; it needs a score",
    )
    add_import_flag(parser)
    add_place_flags(parser)
    parser.set_defaults(run=judge_again)


def _recorded_imports(entry: Entry) -> list[str]:
    """The modules that the experiment's config imported; its metrics may be theirs."""
    from evsys_sdk.record.history import read_record

    return [str(name) for name in (read_record(entry).get("config") or {}).get("imports") or []]


def judge_again(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.compare import import_metrics
    from evsys_sdk.cli.streams import prints_to_stderr
    from evsys_sdk.running.rejudging import rejudge

    entry = find(args, args.experiment).entry
    with prints_to_stderr():
        import_metrics(args.imports, recorded=_recorded_imports(entry))
        found = rejudge(entry, args.baseline_arm)
    if args.json:
        from evsys_sdk.cli.data import print_json

        print_json(
            {
                "experiment": found.entry.name,
                "record": str(found.entry.record),
                "baseline_arm": found.baseline_arm,
                "baseline_arm_before": found.before,
                "best_arm": found.conclusion.best_arm,
                "conclusion": found.conclusion.text,
                **found.conclusion.findings.data,
            }
        )
    else:
        print(found.conclusion.text)
        print(f"record: {short(found.entry.record)}")
    return EXIT_OK
