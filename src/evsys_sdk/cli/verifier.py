"""`evsys verifier test`: can a benchmark be passed without solving it?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.data import print_json, print_table
from evsys_sdk.cli.flags import add_import_flag
from evsys_sdk.cli.suites import SUITE, import_extensions, load_suite
from evsys_sdk.constants import EXIT_BAD_INPUT, EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.verifiers.stress import Finding, Findings

SHOWN = 20
"""Findings that are printed; `--json` gives all."""
WORDS = {"passes": "passes without solving it", "fails": "solves it and fails", "breaks": "breaks the verifier"}


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("verifier", help="try a benchmark's verifiers", description="Look at verifiers.")
    own = parser.add_subparsers(dest="verifier_verb", metavar="<verb>", required=True)
    test = own.add_parser(
        "test",
        help="find tasks that a non-solver passes or the solution fails",
        description="Let agents that solve nothing (null, empty, echo_prompt, long_repeat, answer_list, grader_attack) "
        "and an oracle answer every task. Exit code 1 if a non-solver passes, the oracle fails or a verifier breaks.",
    )
    test.add_argument("benchmark", help=SUITE)
    test.add_argument("--limit", type=int, help="only the first tasks")
    test.add_argument("--concurrency", type=int, default=32, help="tasks graded at once (default: 32)")
    test.add_argument(
        "--environment",
        default="sandbox",
        metavar="KIND",
        help="where tasks that need one are tried: sandbox (the default), docker or another of harbor's",
    )
    add_import_flag(test)
    test.add_argument("--json", action="store_true", help="print as JSON")
    test.set_defaults(run=test_verifiers)


def test_verifiers(args: argparse.Namespace) -> int:
    from evsys_sdk.asyncs import run_async
    from evsys_sdk.cli.streams import prints_to_stderr
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.running.verifier_trials import try_verifiers

    if args.concurrency < 1 or (args.limit is not None and args.limit < 1):
        raise EvsysError("--limit and --concurrency are at least 1")
    with prints_to_stderr():
        import_extensions(args.imports)
        suite = load_suite(args.benchmark)
        tasks = suite.tasks[: args.limit]
        trials = try_verifiers(tasks, concurrency=args.concurrency, environment=args.environment)
        found = run_async(trials)
    _print(args, suite.name, len(tasks), found)
    return EXIT_OK if _is_sound(found, len(tasks)) else EXIT_BAD_INPUT


def _is_sound(found: Findings, n_tasks: int) -> bool:
    """Nothing was found, and something was looked at."""
    return not found.findings and len(found.not_run) < n_tasks


def _print(args: argparse.Namespace, name: str, n_tasks: int, found: Findings) -> None:
    from dataclasses import asdict

    if args.json:
        print_json({"benchmark": name, "n_tasks": n_tasks, "ok": _is_sound(found, n_tasks), **asdict(found)})
        return
    rows = [
        [each.agent, f"{each.passed} of {each.tasks}", "-" if each.mean_reward is None else f"{each.mean_reward:.3f}"]
        for each in found.agents
    ]
    print_table(["agent", "passes", "mean reward"], rows)
    if found.without_solution:
        count = len(found.without_solution)
        where = "`metadata.solution` or solution/solve.sh would tell"
        print(f"no solution is known for {count} of {n_tasks} tasks ({where}), e.g. {found.without_solution[0]}")
    for finding in found.findings[:SHOWN]:
        print(_line(finding))
    if len(found.findings) > SHOWN:
        print(f"... and {len(found.findings) - SHOWN} more; --json gives all")
    for line in _not_run(found):
        print(line)
    tasks, tried = len({finding.task_id for finding in found.findings}), n_tasks - len(found.not_run)
    of = f"{tried} of {n_tasks} tasks tried: " if tried < n_tasks else ""
    if tried == 0:
        print(f"{name}: none of {n_tasks} tasks can run here")
    else:
        print(f"{name}: {of}{f'{tasks} of {tried} tasks have a weak verifier' if tasks else 'nothing found'}")


def _not_run(found: Findings) -> list[str]:
    """One line per reason, with the first task that has it."""
    tasks: dict[str, list[str]] = {}
    for each in found.not_run:
        tasks.setdefault(each.why, []).append(each.task_id)
    lines = [
        f"{ids[0]}: not run here: {why}" + (f" (and {len(ids) - 1} more)" if len(ids) > 1 else "")
        for why, ids in tasks.items()
    ]
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], f"... and {more} more reasons; --json gives all"] if more > 0 else lines


def _line(finding: Finding) -> str:
    told = finding.error or f"reward {finding.reward:g} for {finding.output!r}"
    return f"{finding.task_id}: {finding.agent} {WORDS[finding.what]}: {told}"
