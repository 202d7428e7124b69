"""`evsys research` and `evsys ablate`: propose, run, judge and go again; which of several changes did it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from evsys_sdk.cli.options import (
    POSITIVE,
    HistoryPlace,
    experiment_argument,
    json_option,
    override_option,
    parse_params,
    place_options,
    quiet_option,
    verb,
)
from evsys_sdk.cli.output import print_json, print_text, prints_to_stderr
from evsys_sdk.constants import EXIT_OK, EXIT_RUN_FAILED

if TYPE_CHECKING:
    from evsys_sdk.config.research import ResearchBudget
    from evsys_sdk.data_types import JsonObject
    from evsys_sdk.research.driver import Approval
    from evsys_sdk.research.state import Proposal


@verb("research", epilog="Exit codes: 0 it ended, 1 the config was refused, 2 it was stopped before.")
@click.argument("path", help="the YAML file, with one run and a success metric")
@click.option("--goal", metavar="GOAL", help="end when this is reached, as 'val.pass@1 >= 0.8'")
@click.option("--budget", metavar="LIMITS", help="end when this is spent: trials=12,steps=,tokens=,seconds=,usd=")
@click.option("--approve", is_flag=True, help="ask before each launch: y, n and a reason, or q")
@click.option("--fresh", is_flag=True, help="start over; what there is is set aside")
@override_option
@quiet_option
@json_option
def research(
    path: str, goal: str | None, budget: str | None, approve: bool, fresh: bool, overrides: tuple[str, ...],
    quiet: bool, as_json: bool,
) -> int:  # fmt: skip
    """Research from a config: each round is an experiment with a candidate beside the best so far, kept only where the
    verdict says better. The same command resumes it after an interruption."""
    from evsys_sdk.research.launch import ResearchOptions, run_research

    def say(text: str) -> None:
        if not quiet:
            print_text(text, stream=sys.stderr)

    options = ResearchOptions(
        goal=goal,
        budget=_parse_budget(budget) if budget is not None else None,
        fresh=fresh,
        approve=ask_person if approve else None,
        overrides=overrides,
        say=say,
    )
    with prints_to_stderr():
        report = run_research(path, options)
    if as_json:
        print_json(report.plain())
    else:
        for line in report.lines:
            print_text(line)
    is_over = report.result.reason not in ("stopped", "person")
    return EXIT_OK if is_over else EXIT_RUN_FAILED


@verb("ablate")
@experiment_argument()
@click.option(
    "--seeds", type=POSITIVE, metavar="N", help="seeds per arm (default: those of the experiment, at least 2)"
)
@place_options
def ablate(experiment: str, seeds: int | None, place: HistoryPlace, as_json: bool) -> int:
    """Run leave-one-out arms of an experiment whose best arm differs from its baseline in several settings, and say
    which change did it. What was trained is reused; the conclusion is noted on the experiment."""
    from evsys_sdk.research.ablation import ablate_experiment

    with prints_to_stderr():
        report = ablate_experiment(place, experiment, seeds=seeds)
    if as_json:
        print_json(report.plain())
    else:
        print(f"{report.experiment}: {len(report.changes)} changes of {report.of}")
        for one in report.changes:
            print_text(f"  {one.line}")
    return EXIT_OK if report.result.completed else EXIT_RUN_FAILED


def _parse_budget(text: str) -> ResearchBudget:
    """`trials=12,seconds=3600`."""
    from pydantic import ValidationError

    from evsys_sdk.config.research import ResearchBudget
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.explain import problems_of

    given = parse_params([part.strip() for part in text.split(",")], flag="--budget", example="trials=12,seconds=3600")
    try:
        return ResearchBudget.model_validate(given)
    except ValidationError as exc:
        problems = "; ".join(f"{one.path}: {one.message}" for one in problems_of(exc, ResearchBudget))
        raise EvsysError(f"--budget {text}: {problems}") from None


def ask_person(trial: int, proposal: Proposal, incumbent: JsonObject) -> Approval:
    """One line from stdin; the end of the input means quit."""
    from evsys_sdk.config.sweep import get_dotted
    from evsys_sdk.explain import split_path
    from evsys_sdk.research.driver import Approval

    print(f"\ntrial {trial}: {proposal.claim}", file=sys.stderr)
    for path, value in proposal.changes.items():
        try:
            before = json.dumps(get_dotted(incumbent, split_path(path)))
        except KeyError:
            before = "(not set)"
        print(f"  {path}: {before} -> {json.dumps(value)}", file=sys.stderr)
    while True:
        print("launch? [y / n REASON / q] ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        word, _, why = line.strip().partition(" ")
        if not line or word.lower() in ("q", "quit"):
            return Approval(word="quit")
        if word.lower() in ("y", "yes"):
            return Approval(word="yes")
        if word.lower() in ("n", "no"):
            return Approval(word="no", why=why.strip())
