"""`evsys run`: train, score, conclude."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.flags import add_quiet_flag, positive
from evsys_sdk.constants import EXIT_BAD_INPUT, EXIT_OK, EXIT_RUN_FAILED

if TYPE_CHECKING:
    from evsys_sdk.cli.run_log import RunLog
    from evsys_sdk.experiment import Experiment
    from evsys_sdk.running.outcome import ExperimentResult


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "run",
        help="run an experiment",
        description="Run every arm and seed of a config. Results go to stdout, progress and logs to stderr.",
        epilog="Exit codes: 0 all runs completed, 1 the config was refused, 2 a run did not complete.",
    )
    parser.add_argument("path", help="the YAML file")
    parser.add_argument("-o", "--output", metavar="FILE", help="also write the JSON summary to FILE")
    parser.add_argument("--dry", action="store_true", help="rehearse: 2 steps, 4 tasks, results under <output_dir>/dry")
    parser.add_argument("--steps", type=positive, metavar="N", help="at most N training steps per run")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start every run again; without it, finished runs are reused and an interrupted run resumes from its last "
        "checkpoint",
    )
    parser.add_argument(
        "--fork", action="store_true", help="where the settings have changed since the launch, run a child experiment"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE", help="override")
    parser.add_argument("--strict", action="store_true", help="settings that nothing reads are errors")
    parser.add_argument(
        "--detach",
        action="store_true",
        help="run in a process of its own and print its launch record; see evsys status, logs and stop",
    )
    add_quiet_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the summary (or the launch record) as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.detach import run_detached, starter_of_this

    starter = starter_of_this()
    if args.detach and starter is None:
        return run_detached(args.argv, as_json=args.json)
    from evsys_sdk.cli.run_log import RunLog

    return _run_here(args, RunLog(["evsys", *args.argv], starter=starter))


def _run_here(args: argparse.Namespace, log: RunLog) -> int:
    from evsys_sdk.atomic import to_json
    from evsys_sdk.cli.streams import check_result_path, write_result
    from evsys_sdk.cli.summary import print_summary
    from evsys_sdk.errors import ConfigError
    from evsys_sdk.experiment import Experiment
    from evsys_sdk.running.outcome import strict_problems, summarise
    from evsys_sdk.running.resume_hint import resume_lines

    if args.output:
        check_result_path(args.output)
    experiment = Experiment.from_yaml(args.path, overrides=args.overrides)
    result = _result(experiment, args, log)
    log.summary(result)
    summary = to_json(summarise(result), indent=2)
    if args.output:
        write_result(args.output, summary + "\n")
    if args.json and not args.detach:
        print(summary)
    elif not args.detach:
        print_summary(result, brief=args.quiet)
    for line in resume_lines(result.runs, log.command):
        print(line, file=sys.stderr)
    if not result.completed:
        return EXIT_RUN_FAILED
    if args.strict and result.unread_settings:
        print(ConfigError(args.path, strict_problems(result, experiment.config)), file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_OK


def _result(experiment: Experiment, args: argparse.Namespace, log: RunLog) -> ExperimentResult:
    from evsys_sdk.config.names import REHEARSALS
    from evsys_sdk.errors import RunLocked
    from evsys_sdk.experiment import RunOptions

    with log.display(live=not args.json, quiet=args.quiet) as watchers:
        options = RunOptions(
            max_steps=args.steps,
            dry=args.dry,
            fresh=args.fresh,
            fork=args.fork,
            strict=args.strict,
            watchers=watchers,
            launched=log.launched,
        )
        try:
            return experiment.run(options)
        except RunLocked as exc:
            config = experiment.config
            ref = str(Path(config.output_dir) / REHEARSALS) if args.dry else config.name
            raise RunLocked(f"{exc}\nnext: evsys status {shlex.quote(ref)}") from None
