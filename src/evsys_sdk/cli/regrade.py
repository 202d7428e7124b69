"""`evsys regrade`: what would the scores be with another verifier?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.data import print_json
from evsys_sdk.cli.flags import add_quiet_flag
from evsys_sdk.cli.suites import SUITE
from evsys_sdk.constants import EXIT_OK, EXIT_RUN_FAILED

if TYPE_CHECKING:
    from evsys_sdk.protocols import Score
    from evsys_sdk.running.regrading.comparing import Comparison
    from evsys_sdk.running.regrading.grading import Regraded
    from evsys_sdk.running.regrading.work import Report

SHOWN = 5
"""Changed rollouts that are printed per evaluation; the new record has all."""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "regrade",
        help="grade stored rollouts anew, without asking the model again",
        description="Grade the rollouts of a record anew and compare the scores. Without options the tasks of the "
        "record's own config are used as they are now; the record itself is not touched. Exit code 2 if an evaluation "
        "could not be scored.",
    )
    parser.add_argument("record", help="a run's or an experiment's directory, or a .jsonl file of rollouts")
    parser.add_argument(
        "--benchmark", "--path", metavar="TASKS",
        help=f"grade by the verifiers of these tasks: {SUITE}",
    )  # fmt: skip
    parser.add_argument("--verifier", metavar="NAME", help="grade by this registered verifier instead of the tasks'")
    parser.add_argument(
        "--params", nargs="+", default=[], metavar="KEY=VALUE", help="its params; or all of them as one JSON object"
    )
    parser.add_argument(
        "--metrics", nargs="+", default=[], metavar="NAME", help="instead of the record's, e.g. pass@1 mean_reward"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME",
        help="only these: val, test, eval, train (what was trained on), a benchmark's name, a run's name",
    )  # fmt: skip
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the experiment's config, for tasks and imports (default: the record's)",
    )
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="a module of yours that registers verifiers or metrics, where no config names it",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="where the new record goes (default: beside the old)")
    parser.add_argument("--concurrency", type=int, default=32, help="rollouts graded at once (default: 32)")
    add_quiet_flag(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=regrade_record)


def regrade_record(args: argparse.Namespace) -> int:
    from pathlib import Path

    from evsys_sdk.cli.streams import prints_to_stderr
    from evsys_sdk.cli.suites import import_extensions, load_suite
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.running.regrading.work import Request, regrade, summary

    if args.concurrency < 1:
        raise EvsysError("--concurrency is at least 1")
    params = _params(args)
    with prints_to_stderr():
        if args.imports:
            import_extensions(args.imports)
        request = Request(
            target=Path(args.record),
            benchmark=load_suite(args.benchmark) if args.benchmark else None,
            verifier=args.verifier,
            params=params,
            metrics=args.metrics,
            only=args.only,
            config=args.config,
            out=Path(args.out) if args.out else None,
            concurrency=args.concurrency,
        )
        report = regrade(request)
    if args.json:
        print_json(summary(report, request))
    else:
        print_report(report)
    return EXIT_OK if all(found.is_valid for found in report.comparisons) else EXIT_RUN_FAILED


def _params(args: argparse.Namespace) -> dict[str, Any]:
    import json

    from evsys_sdk.config.document import parse_value
    from evsys_sdk.errors import EvsysError

    if args.params and args.verifier is None:
        raise EvsysError("--params are those of --verifier; name one")
    if len(args.params) == 1 and args.params[0].lstrip().startswith("{"):
        try:
            found: dict[str, Any] = json.loads(args.params[0])
            return found
        except ValueError as exc:
            raise EvsysError(f"--params is not valid JSON: {exc}") from exc
    pairs = [text.partition("=") for text in args.params]
    for key, equals, value in pairs:
        if not equals or not key:
            raise EvsysError(f"--params takes KEY=VALUE or one JSON object; got {key + equals + value!r}")
    return {key: parse_value(value) for key, _, value in pairs}


def print_report(report: Report) -> None:
    """Per evaluation the scores before and after, what changed, and where the new record lies."""
    for comparison in report.comparisons:
        _print_comparison(comparison)
    for note in report.notes:
        print(f"note: {note}")
    print(f"new record: {report.folder} ({report.seconds:.1f} s)")


def _print_comparison(found: Comparison) -> None:
    from evsys_sdk.eval.scoring import is_errored

    stored = found.eval
    when = "" if stored.step is None else f" at step {stored.step}"
    stage = f" of stage {stored.stage}" if stored.stage else ""
    tasks = found.new[0].n_tasks
    print(f"{stored.run}  {stored.label}{when}{stage}: {_count(tasks, 'task')}, {_count(len(found.pairs), 'rollout')}, "
          f"graded by {', '.join(found.graded_by)}")  # fmt: skip
    width = max(len(score.metric) for score in found.new)
    for old, new, change in zip(found.old, found.new, found.changes, strict=True):
        told = f"   change {change.value:+.3f}{_interval(change, '+')}" if change.value is not None else ""
        scores = _value(new) if old == new and new.value is None else f"{_value(old)} -> {_value(new)}"
        print(f"  {new.metric:<{width}}  {scores}{told}")
    before, after = (sum(map(is_errored, side)) for side in zip(*((p.old, p.new) for p in found.pairs), strict=True))
    if before or after:
        print(f"  errors: {before} -> {after}")
    if found.without_task:
        print(f"  {_count(found.without_task, 'rollout')} left out on both sides: the task is not known")
    _print_changed(found.changed, len(found.pairs))


def _print_changed(changed: list[Regraded], total: int) -> None:
    up = sum((pair.new.reward or 0.0) > (pair.old.reward or 0.0) for pair in changed)
    down = sum((pair.new.reward or 0.0) < (pair.old.reward or 0.0) for pair in changed)
    print(f"  changed: {len(changed)} of {total}" + (f" ({up} up, {down} down)" if changed else ""))
    for pair in changed[:SHOWN]:
        print(f"    {_change(pair)}")
    if len(changed) > SHOWN:
        print(f"    ... and {len(changed) - SHOWN} more")


def _change(pair: Regraded) -> str:
    from evsys_sdk.errors import shorten
    from evsys_sdk.running.regrading.grading import answer_of

    sample = pair.old.metadata.get("sample")
    name = pair.old.task_id if sample is None else f"{pair.old.task_id} #{sample}"
    told = f"  {pair.new.error}" if pair.new.reward is None else f"  {shorten(repr(answer_of(pair.new)), 80)}"
    return f"{name}  {_reward(pair.old.reward)} -> {_reward(pair.new.reward)}{told}"


def _reward(value: float | None) -> str:
    return "error" if value is None else f"{value:g}"


def _value(score: Score) -> str:
    return f"not valid ({score.error})" if score.value is None else f"{score.value:.3f}{_interval(score)}"


def _interval(score: Score, sign: str = "") -> str:
    if score.low is None or score.high is None:
        return ""
    return f" [{score.low:{sign}.3f}, {score.high:{sign}.3f}]"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
