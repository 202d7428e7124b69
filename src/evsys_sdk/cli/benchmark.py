"""`evsys benchmark run`: the score of one model on one suite, without a run around it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.data import print_json, print_table
from evsys_sdk.cli.flags import add_import_flag, add_quiet_flag, not_negative, parse_params, positive
from evsys_sdk.cli.suites import SUITE, import_extensions, load_suite
from evsys_sdk.constants import EXIT_OK, EXIT_RUN_FAILED
from evsys_sdk.terminal import raw_stream

if TYPE_CHECKING:
    from evsys_sdk.running.opening import Target
    from evsys_sdk.running.suite_score import Hosted, Order

OUTPUTS = Path("outputs") / "benchmarks"
DEFAULT_SEED = 42
MAX_TOKENS, HOSTED_MAX_TOKENS = 256, 1024
SHOWN_ERRORS = 5


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("benchmark", help="score a model on a suite", description="Suites of tasks.")
    own = parser.add_subparsers(dest="benchmark_verb", metavar="<verb>", required=True)
    run = own.add_parser(
        "run",
        help="score one model on one suite",
        description="Score a model, a run, saved weights or a hosted model on a suite. Killed and run again with the "
        "same flags it goes on where it was.",
        epilog="Exit codes: 0 scored, 1 refused, 2 no valid score (every rollout errored) or interrupted.",
    )
    _add_subject(run)
    _add_scoring(run)
    _add_output(run)
    run.set_defaults(run=run_benchmark)


def _add_subject(run: Any) -> None:
    run.add_argument("--path", required=True, help=SUITE)
    run.add_argument(
        "--model", required=True,
        help="a run's directory, a checkpoint (<run>@final, <run>@step-12), sampler weights, a model's name, or with "
        "--inference the provider's name for it",
    )  # fmt: skip
    run.add_argument("--backend", help="where the model runs: local, mock, tinker (default: local, or the run's)")
    run.add_argument("--base-model", help="the base model of weights that do not lie in their run's directory")
    run.add_argument("--inference", metavar="KIND", help="ask a hosted model: openai, claude, gemini, or your own")
    run.add_argument(
        "--set", dest="params", action="append", default=[], metavar="PARAM=VALUE",
        help="a param of the backend or of the inference client, e.g. base_url=http://127.0.0.1:8000/v1",
    )  # fmt: skip
    add_import_flag(run)


def _add_scoring(run: Any) -> None:
    run.add_argument("--metrics", nargs="+", default=["pass@1"], metavar="METRIC", help="default: pass@1")
    run.add_argument("--num-samples", type=positive, metavar="N", help="rollouts per task (default: the largest k)")
    run.add_argument(
        "--max-tokens", type=positive, metavar="N",
        help=f"per answer (default: {MAX_TOKENS}; {HOSTED_MAX_TOKENS} with --inference, where thinking counts)",
    )  # fmt: skip
    run.add_argument("--temperature", type=not_negative, default=1.0, metavar="T", help="default: 1.0")
    run.add_argument("--limit", type=positive, metavar="N", help="only the first tasks")
    run.add_argument(
        "--breakdown-keys", nargs="+", default=[], metavar="KEY", help="also score per value of these metadata keys"
    )
    run.add_argument("--seed", type=int, help=f"of the sampling (default: {DEFAULT_SEED}); not with --inference")
    run.add_argument("--agent", metavar="AGENT", help="who works on the tasks: a registered name, or module:Class")
    run.add_argument(
        "--agent-set",
        dest="agent_params",
        action="append",
        default=[],
        metavar="PARAM=VALUE",
        help="an agent's param; {base_url} and {policy} stand for the model's address and its name there",
    )
    run.add_argument("--n-concurrent", type=positive, default=64, metavar="N", help="rollouts at once (default: 64)")
    run.add_argument(
        "--max-attempts", type=positive, metavar="N",
        help="tries per call that the machine broke, the first included (default: 3; with --inference 6)",
    )  # fmt: skip


def _add_output(run: Any) -> None:
    run.add_argument(
        "--output-dir", metavar="DIR", help=f"default: {OUTPUTS}/<suite>/<model>-<hash of what decides the rollouts>"
    )
    run.add_argument("--fresh", action="store_true", help="begin anew; what is there is set aside")
    run.add_argument(
        "--retry-errors", action="store_true", help="of a finished evaluation, make the rollouts that errored again"
    )
    add_quiet_flag(run)
    run.add_argument("--json", action="store_true", help="print the result as JSON")


def run_benchmark(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.streams import prints_to_stderr
    from evsys_sdk.running.suite_score import score_suite

    with prints_to_stderr():
        import_extensions(args.imports)
        order = _order(args)
        folder = Path(args.output_dir) if args.output_dir else _default_folder(order)
        progress = Progress(order, quiet=args.quiet)
        try:
            found, reused = score_suite(
                order,
                folder,
                fresh=args.fresh,
                retry_errors=args.retry_errors,
                on_start=progress.start,
                on_rollout=progress.step,
            )
        except KeyboardInterrupt:
            print("\ninterrupted; the same command goes on from here", file=sys.stderr)
            return EXIT_RUN_FAILED
        finally:
            progress.end()
    if args.json:
        print_json({**found, "reused": reused, "output_dir": str(folder)})
    else:
        _print(found, folder, reused)
    return EXIT_RUN_FAILED if found["error"] else EXIT_OK


def _order(args: argparse.Namespace) -> Order:
    from evsys_sdk.protocols import AgentSpec
    from evsys_sdk.running.suite_score import Order

    agent_params = parse_params(args.agent_params, flag="--agent-set", example="max_turns=4")
    default_tokens = HOSTED_MAX_TOKENS if args.inference else MAX_TOKENS
    return Order(
        benchmark=load_suite(args.path),
        model=_model(args),
        metrics=args.metrics,
        num_samples=args.num_samples,
        max_tokens=args.max_tokens or default_tokens,
        temperature=args.temperature,
        limit=args.limit,
        breakdown_keys=args.breakdown_keys,
        seed=DEFAULT_SEED if args.seed is None else args.seed,
        agent=AgentSpec(kind=args.agent, params=agent_params) if args.agent else None,
        n_concurrent=args.n_concurrent,
        max_attempts=args.max_attempts,
    )


def _model(args: argparse.Namespace) -> Target | Hosted:
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.running.opening import Wish, find_target
    from evsys_sdk.running.suite_score import Hosted

    params = parse_params(args.params)
    if args.agent_params and not args.agent:
        raise EvsysError("--agent-set has no --agent to set")
    if args.inference is None:
        wish = Wish(
            text=args.model,
            backend=args.backend,
            base_model=args.base_model,
            params=params,
            base_model_flag="--base-model",
        )
        return find_target(wish)
    given = {"--backend": args.backend, "--base-model": args.base_model, "--seed": args.seed, "--agent": args.agent}
    wrong = [flag for flag, value in given.items() if value is not None]
    if wrong:
        raise EvsysError(f"--inference asks a hosted model, which has no use for {', '.join(wrong)}")
    return Hosted(kind=args.inference, name=args.model, params=params)


def _default_folder(order: Order) -> Path:
    return OUTPUTS / _slug(order.benchmark.name) / f"{_slug(order.model.name)}-{order.asked().fingerprint[:8]}"


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "unnamed"


class Progress:
    """A counter on stderr: one line that moves on a terminal, a first line elsewhere."""

    def __init__(self, order: Order, *, quiet: bool = False):
        self.what = f"{order.model.name} on {order.benchmark.name}"
        self.total = self.done = self.errors = 0
        self.quiet, self.moves = quiet, sys.stderr.isatty() and not quiet
        self.started = False

    def start(self, total: int, known: int) -> None:
        self.total, self.done, self.started = total, known, True
        before = f", {known} of them there from before" if known else ""
        if not self.quiet:
            print(f"{self.what}: {total} rollouts{before}", file=sys.stderr, flush=True)

    def step(self, rollout: Any) -> None:
        self.done += 1
        self.errors += rollout.status == "infra_error"
        if self.moves:
            errors = f", {self.errors} errors" if self.errors else ""
            print(f"\r{self.done} of {self.total}{errors}", end="", file=raw_stream(sys.stderr), flush=True)

    def end(self) -> None:
        if self.moves and self.started:
            print(file=sys.stderr)


def _print(found: dict[str, Any], folder: Path, reused: bool) -> None:
    model, suite = found["model"], found["benchmark"]
    where = model.get("checkpoint") or model.get("kind") or model["backend"]
    print(f"{model['name']} ({where}) on {suite['name']}, {found['seconds']:.1f} s")
    header = ["part", "metric", "score", "95 % interval", "tasks", "rollouts", "errors"]
    print_table(header, [row for part, scores in _parts(found) for row in _rows(part, scores)])
    for score in found["scores"]:
        if score["error"]:
            print(f"{score['metric']}: {score['error']}")
    for error, count in list(found["errors"].items())[:SHOWN_ERRORS]:
        print(f"error, {count} {'time' if count == 1 else 'times'}: {error}")
    print(_usage(found["usage"]))
    print(f"result: {folder}" + (" (finished before; --fresh scores it anew" if reused else "") + _retry(found, reused))


def _parts(found: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    broken = [
        (f"{key} = {value}", scores) for key, parts in found["breakdown"].items() for value, scores in parts.items()
    ]
    return [("all", found["scores"]), *broken]


def _rows(part: str, scores: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            part,
            score["metric"],
            "-" if score["value"] is None else f"{score['value']:.4g}",
            "-" if score["low"] is None else f"[{score['low']:.4g}, {score['high']:.4g}]",
            str(score["n_tasks"]),
            str(score["n_rollouts"]),
            str(score["n_errors"]),
        ]
        for score in scores
    ]


def _usage(usage: dict[str, Any]) -> str:
    cost = "cost not known" if usage["cost_usd"] is None else f"${usage['cost_usd']:.4f}" if usage["cost_usd"] else ""
    tokens = f"{usage['input_tokens']:,} tokens read, {usage['output_tokens']:,} written"
    return f"{tokens}, {cost}" if cost else tokens


def _retry(found: dict[str, Any], reused: bool) -> str:
    if not reused:
        return ""
    return "; --retry-errors only what errored)" if found["errors"] else ")"
