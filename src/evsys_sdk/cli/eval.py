"""`evsys eval model`: evaluate a checkpoint on rows whose answer is one identifier, with aliases."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.data import print_json
from evsys_sdk.cli.flags import add_import_flag, add_quiet_flag, not_negative, parse_params, positive
from evsys_sdk.constants import EXIT_OK, EXIT_RUN_FAILED

if TYPE_CHECKING:
    from evsys_sdk.eval.summary import EvalSummary
    from evsys_sdk.running.model_score import ModelOrder
    from evsys_sdk.running.opening import Target

KINDS = ("local", "tinker", "mock")


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("eval", help="evaluate a checkpoint", description="Evaluations outside a run.")
    own = parser.add_subparsers(dest="eval_verb", metavar="<verb>", required=True)
    model = own.add_parser(
        "model",
        help="evaluate a checkpoint over an eval set",
        description="Ask a model every row's question and score its answers: pass@k, by the very answer and by its "
        "aliases. Killed and run again with the same flags it goes on where it was.",
        epilog="Exit codes: 0 scored, 1 refused, 2 no valid score, interrupted, or (with --fail-on-retries) a call "
        "that failed for good.",
    )
    _add_subject(model)
    _add_asking(model)
    model.add_argument("--output-dir", required=True, metavar="DIR", help="where the artifacts go")
    model.add_argument("--fresh", action="store_true", help="begin anew; what is there is set aside")
    model.add_argument("--retry-errors", action="store_true", help="of a finished evaluation, ask again what failed")
    model.add_argument(
        "--fail-on-retries", action="store_true", help="exit with 2 if a call failed for good, tries and all"
    )
    add_quiet_flag(model)
    model.add_argument("--json", action="store_true", help="print the summary as JSON")
    model.set_defaults(run=evaluate)


def _add_subject(model: Any) -> None:
    model.add_argument("--dataset", required=True, metavar="FILE", help="JSONL of rows with a question and an answer")
    model.add_argument(
        "--aliases", required=True, metavar="FILE",
        help='JSON of verified aliases: {"NAME": ["OTHER", ...]} or groups [["A", "B"], ...]',
    )  # fmt: skip
    model.add_argument("--secondary-aliases", metavar="FILE", help="the same, of aliases that count only loosely")
    model.add_argument("--inference-kind", required=True, choices=KINDS, help="where the model runs")
    model.add_argument("--model-name", required=True, metavar="NAME", help="the base model")
    model.add_argument("--adapter-path", metavar="DIR", help="an adapter over it (local): a run's weights, or PEFT's")
    model.add_argument(
        "--checkpoint-path",
        metavar="PATH",
        help="sampler weights over it: a run, <run>@step-12, a path, or tinker://...",
    )
    model.add_argument(
        "--set", dest="params", action="append", default=[], metavar="PARAM=VALUE", help="a backend param"
    )
    add_import_flag(model)


def _add_asking(model: Any) -> None:
    model.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="per answer (default: 256)")
    model.add_argument("--temperature", type=not_negative, default=0.0, metavar="T", help="default: 0")
    model.add_argument("--max-attempts", type=positive, default=3, metavar="N", help="tries per call (default: 3)")
    model.add_argument("--batch-size", type=positive, default=16, metavar="N", help="calls at once (default: 16)")
    model.add_argument("--num-samples", type=positive, default=1, metavar="N", help="answers per row, for pass@N")
    model.add_argument("--seed", type=int, default=42, help="of the sampling (default: 42)")
    model.add_argument(
        "--system-prompt", metavar="TEXT",
        help="before rows that have only a `query`; empty for none (default: asks for a slug in <answer> tags)",
    )  # fmt: skip


def evaluate(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.streams import prints_to_stderr
    from evsys_sdk.cli.suites import import_extensions
    from evsys_sdk.running.model_score import score_model

    with prints_to_stderr():
        import_extensions(args.imports)
        try:
            summary, reused = score_model(
                _order(args), Path(args.output_dir), fresh=args.fresh, retry_errors=args.retry_errors
            )
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            return EXIT_RUN_FAILED
    _print(args, summary, reused)
    failed = summary.error or (args.fail_on_retries and summary.retry_report.total_failures)
    return EXIT_RUN_FAILED if failed else EXIT_OK


def _order(args: argparse.Namespace) -> ModelOrder:
    from evsys_sdk.errors import DataError
    from evsys_sdk.eval import DEFAULT_SYSTEM, AliasMatcher, ModelEvalConfig
    from evsys_sdk.running.model_score import ModelOrder

    if not Path(args.dataset).is_file():
        raise DataError(f"--dataset {args.dataset}: there is no such file")
    return ModelOrder(
        dataset=Path(args.dataset),
        matcher=AliasMatcher.from_files(args.aliases, args.secondary_aliases),
        target=_target(args),
        config=ModelEvalConfig(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            num_samples=args.num_samples,
            max_attempts=args.max_attempts,
            batch_size=args.batch_size,
            model_name=args.model_name,
        ),
        inference_kind=args.inference_kind,
        system=DEFAULT_SYSTEM if args.system_prompt is None else args.system_prompt or None,
        seed=args.seed,
    )


def _target(args: argparse.Namespace) -> Target:
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.running.opening import Target, find_weights

    kind, params = args.inference_kind, parse_params(args.params)
    if args.adapter_path and args.checkpoint_path:
        raise EvsysError("--adapter-path and --checkpoint-path both name the weights; keep one")
    if args.adapter_path and kind != "local":
        raise EvsysError(f"--adapter-path is for --inference-kind local; with {kind} say --checkpoint-path")
    path = args.adapter_path or args.checkpoint_path
    if path is None:
        return Target(name=args.model_name, model=args.model_name, backend=kind, backend_params=params)
    return find_weights(path, model=args.model_name, backend=kind, params=params)


def _print(args: argparse.Namespace, summary: EvalSummary, reused: bool) -> None:
    from evsys_sdk.eval import format_summary_markdown

    if args.json:
        print_json({**summary.to_dict(), "reused": reused, "output_dir": args.output_dir})
        return
    print(format_summary_markdown(summary, title=f"Evaluation of {summary.model}"))
    print(f"artifacts: {args.output_dir}" + (" (finished before; --fresh scores it anew)" if reused else ""))
