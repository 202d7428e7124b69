"""`evsys validate`: is this config right?"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.config.models import SearchSpec


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "validate",
        help="check a config",
        description="Check a config and list its runs: structure, every kind/params block, data file, agent and "
        "verifier. This imports the project's own code (`imports`, `src/`, agents, tools); --no-code does not.",
    )
    parser.add_argument("path", help="the YAML file")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument(
        "--shallow", action="store_true", help="check the structure only, not blocks, files and verifiers"
    )
    depth.add_argument("--deep", action="store_true", help="the default; accepted for older scripts")
    parser.add_argument(
        "--no-code", action="store_true", help="do not import the project's own code; what it registers is not checked"
    )
    parser.add_argument("--strict", action="store_true", help="settings that nothing will read are errors")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE", help="override")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=validate)


def validate(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.data import print_json
    from evsys_sdk.cli.streams import prints_to_stderr
    from evsys_sdk.preflight import deep_warnings, ignored_settings, validate_yaml

    is_deep, run_code = not args.shallow, not args.no_code
    with prints_to_stderr():
        config = validate_yaml(args.path, deep=is_deep, strict=args.strict, overrides=args.overrides, run_code=run_code)
        drawn = config.search is not None and config.search.kind != "grid"
        runs = [] if drawn else [run.name for run in config.all_runs()]
        ignored = ignored_settings(config) + (deep_warnings(config, run_code=run_code) if is_deep else [])
    if args.json:
        print_json({"ok": True, "path": args.path, "runs": runs, "warnings": [asdict(found) for found in ignored]})
        return EXIT_OK
    seeds = f" x {config.n_repeats} seeds" if config.n_repeats > 1 else ""
    if config.search is not None and drawn:
        print(f"{args.path}: ok, {_described(config.search)}{seeds}")
    else:
        print(f"{args.path}: ok, {len(runs)} run{'s' if len(runs) != 1 else ''}{seeds}")
        for name in runs:
            print(f"  {name}")
    for problem in ignored:
        print(f"warning: line {problem.line or '?'}  {problem.path}   {problem.message}", file=sys.stderr)
    return EXIT_OK


def _described(search: SearchSpec) -> str:
    """A search whose runs are not known before it has begun."""
    from evsys_sdk.config.search import count_trials

    trials, axes = count_trials(search), len(search.space)
    return f"a search ({search.kind}) of {trials} trials over {axes} setting{'s' if axes != 1 else ''}"
