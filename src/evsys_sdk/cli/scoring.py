"""`evsys benchmark run` and `evsys eval model`: the score of one model, without a run around it; `evsys benchmark
upload`: a suite for other machines."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evsys_sdk.cli.options import (
    POSITIVE,
    ScoringOptions,
    WordsOption,
    environment_option,
    group,
    json_option,
    limit_option,
    parse_params,
    scoring_options,
    workspace_option,
)
from evsys_sdk.cli.output import print_json, print_table, prints_to_stderr
from evsys_sdk.cli.suites import SUITE, load_suite
from evsys_sdk.constants import EXIT_OK, EXIT_RUN_FAILED
from evsys_sdk.format import raw_stream, shown, span
from evsys_sdk.operations.place import import_extensions

if TYPE_CHECKING:
    from evsys_sdk.experiment.standalone import EvaluationRequest, Hosted
    from evsys_sdk.protocols import Rollout
    from evsys_sdk.run.open_model import Target

OUTPUTS = Path("outputs") / "benchmarks"
DEFAULT_SEED = 42
MAX_TOKENS, HOSTED_MAX_TOKENS = 256, 1024
SHOWN_ERRORS = 5
RESUMES = "interrupted; the same command resumes from here"


@group("benchmark")
def benchmark() -> None:
    """Suites of tasks."""


@benchmark.command(
    "run", epilog="Exit codes: 0 scored, 1 refused, 2 no valid score (every rollout errored) or interrupted."
)
@click.option("--path", required=True, help=SUITE)
@click.option(
    "--model",
    required=True,
    help="a run's directory or name, a checkpoint (<run>@final, <run>@step-12), sampler weights, a model's name, or "
    "with --inference the provider's name for it",
)
@click.option("--backend", help="where the model runs: local, mock, tinker (default: local, or the run's)")
@click.option("--base-model", help="the base model of weights that do not lie in their run's directory")
@click.option("--inference", metavar="KIND", help="ask a hosted model: openai, claude, gemini, or your own")
@click.option("--metrics", cls=WordsOption, default=["pass@1"], metavar="METRIC...", help="default: pass@1")
@limit_option
@click.option("--breakdown-keys", cls=WordsOption, metavar="KEY...", help="also score per value of these metadata keys")
@click.option(
    "--cluster-key",
    metavar="KEY",
    help="metadata key of the template that a task was made from: intervals count templates, not tasks (default: "
    "templates are found in ids and texts)",
)
@click.option("--agent", metavar="AGENT", help="who works on the tasks: a registered name, or module:Class")
@click.option(
    "--agent-set",
    "agent_texts",
    multiple=True,
    metavar="PARAM=VALUE",
    help="an agent's param; {base_url} and {policy} stand for the model's address and its name there",
)
@environment_option
@click.option("--n-concurrent", type=POSITIVE, default=64, metavar="N", help="rollouts at once (default: 64)")
@click.option(
    "--output-dir", metavar="DIR", help=f"default: {OUTPUTS}/<suite>/<model>-<hash of what decides the rollouts>"
)
@scoring_options(
    params="a param of the backend or of the inference client, e.g. base_url=http://127.0.0.1:8000/v1",
    temperature=1.0,
    num_samples=(None, "rollouts per task (default: the largest k)"),
    max_tokens=(
        None,
        f"per answer (default: {MAX_TOKENS}; {HOSTED_MAX_TOKENS} with --inference, where thinking counts)",
    ),
    seed=(None, f"of the sampling (default: {DEFAULT_SEED}); not with --inference"),
    max_attempts=(None, "tries per call that the machine broke, the first included (default: 3; with --inference 6)"),
)
def run_benchmark(
    path: str, model: str, backend: str | None, base_model: str | None, inference: str | None,
    metrics: tuple[str, ...], limit: int | None, breakdown_keys: tuple[str, ...], cluster_key: str | None,
    agent: str | None, agent_texts: tuple[str, ...], environment: str | None, n_concurrent: int,
    output_dir: str | None, scoring: ScoringOptions, as_json: bool,
) -> int:  # fmt: skip
    """Score one model on one suite: a model, a run, saved weights or a hosted model. If it is killed, the same command
    resumes it."""
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.experiment.standalone import EvaluationRequest, Hosted, score_suite
    from evsys_sdk.protocols import SANDBOX, AgentSpec
    from evsys_sdk.run.open_model import ModelRef, find_target

    agent_params = parse_params(agent_texts, flag="--agent-set", example="max_turns=4")
    if agent_params and not agent:
        raise EvsysError("--agent-set has no --agent to set")
    own = {"--backend": backend, "--base-model": base_model, "--seed": scoring.seed, "--agent": agent}
    wrong = [flag for flag, value in (own | {"--environment": environment}).items() if value is not None]
    if inference is not None and wrong:
        raise EvsysError(f"--inference asks a hosted model, which has no use for {', '.join(wrong)}")
    with prints_to_stderr():
        import_extensions(scoring.imports, agent, agent_params, environment)
        suite, params = load_suite(path), parse_params(scoring.params)
        target: Target | Hosted
        if inference is not None:
            target = Hosted(kind=inference, name=model, params=params)
        else:
            ref = ModelRef(
                text=model, backend=backend, base_model=base_model, params=params, base_model_flag="--base-model"
            )
            target = find_target(ref)
        request = EvaluationRequest(
            benchmark=suite,
            model=target,
            metrics=list(metrics),
            num_samples=scoring.num_samples,
            max_tokens=scoring.max_tokens or (HOSTED_MAX_TOKENS if inference else MAX_TOKENS),
            temperature=scoring.temperature,
            limit=limit,
            breakdown_keys=list(breakdown_keys),
            cluster_key=cluster_key,
            seed=DEFAULT_SEED if scoring.seed is None else scoring.seed,
            agent=AgentSpec(kind=agent, params=agent_params) if agent else None,
            environment=environment or SANDBOX,
            n_concurrent=n_concurrent,
            max_attempts=scoring.max_attempts,
        )
        folder = OUTPUTS / _slug(suite.name) / f"{_slug(target.name)}-{request.asked().fingerprint[:8]}"
        folder = Path(output_dir) if output_dir else folder
        again = {"fresh": scoring.fresh, "retry_errors": scoring.retry_errors}
        progress = ProgressCounter(request, quiet=scoring.quiet)
        try:
            result, reused = score_suite(request, folder, **again, on_start=progress.start, on_rollout=progress.step)
        except KeyboardInterrupt:
            print(f"\n{RESUMES}", file=sys.stderr)
            return EXIT_RUN_FAILED
        finally:
            progress.end()
    if as_json:
        print_json({**result, "reused": reused, "output_dir": str(folder)})
    else:
        print_scores(result)
        retry = "; --retry-errors only what errored" if result["errors"] else ""
        print(f"result: {folder}" + (f" (finished before; --fresh scores it anew{retry})" if reused else ""))
    return EXIT_RUN_FAILED if result["error"] else EXIT_OK


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "unnamed"


class ProgressCounter:
    """A counter on stderr: one line that moves on a terminal, a first line elsewhere."""

    def __init__(self, request: EvaluationRequest, *, quiet: bool = False):
        self.what = f"{request.model.name} on {request.benchmark.name}"
        self.total = self.done = self.errors = 0
        self.quiet, self.moves = quiet, sys.stderr.isatty() and not quiet
        self.started = False

    def start(self, total: int, known: int) -> None:
        self.total, self.done, self.started = total, known, True
        before = f", {known} of them there from before" if known else ""
        if not self.quiet:
            print(f"{self.what}: {total} rollouts{before}", file=sys.stderr, flush=True)

    def step(self, rollout: Rollout) -> None:
        self.done += 1
        self.errors += rollout.status == "infra_error"
        if self.moves:
            errors = f", {self.errors} errors" if self.errors else ""
            print(f"\r{self.done} of {self.total}{errors}", end="", file=raw_stream(sys.stderr), flush=True)

    def end(self) -> None:
        if self.moves and self.started:
            print(file=sys.stderr)


def print_scores(result: dict[str, Any]) -> None:
    """What `score_suite` returned, as a person reads it."""
    from evsys_sdk.protocols import training_mark

    model, suite, usage = result["model"], result["benchmark"], result["usage"]
    where = model.get("checkpoint") or model.get("kind") or model["backend"]
    print(f"{model['name']} ({where}) on {suite['name']}, {result['seconds']:.1f} s")
    parts = [("all", result["scores"])]
    for key, values in result["breakdown"].items():
        parts += [(f"{key} = {value}", scores) for value, scores in values.items()]
    rows = [
        [
            part,
            score["metric"],
            "-" if score["value"] is None else shown(score["value"], unit=score["unit"]),
            span(score["low"], score["high"], unit=score["unit"]).strip() or "-",
            *(str(score[count]) for count in ("n_tasks", "n_rollouts", "n_errors")),
        ]
        for part, scores in parts
        for score in scores
    ]
    print_table(["part", "metric", "score", "95 % interval", "tasks", "rollouts", "errors"], rows)
    mark = training_mark(bool(result.get("on_training_rows")), result.get("n_training_tasks") or 0)
    if mark:
        print(f"scored {mark if mark.startswith('on ') else f'with {mark}'}: it shows what was memorised, not learnt")
    clusters = result.get("clusters") or {}
    if clusters.get("count"):
        origin = f"{clusters['count']} templates ({clusters['found_by']})"
        print(f"tasks come from {origin}: intervals count templates, not tasks")
    for score in result["scores"]:
        if score["error"]:
            print(f"{score['metric']}: {score['error']}")
    for error, count in list(result["errors"].items())[:SHOWN_ERRORS]:
        print(f"error, {count} {'time' if count == 1 else 'times'}: {error}")
    cost = (
        ", cost not known" if usage["cost_usd"] is None else f", ${usage['cost_usd']:.4f}" if usage["cost_usd"] else ""
    )
    print(f"{usage['input_tokens']:,} tokens read, {usage['output_tokens']:,} written{cost}")


@benchmark.command("upload")
@click.argument("suite", help="an id or a name in the workspace, or tasks.jsonl or its folder")
@click.option("--split", default="", metavar="SPLIT", help="val or test; rows of a test split are for people")
@click.option("--name", metavar="NAME", help="the name to find it by (default: that of the file or its folder)")
@workspace_option
@json_option
def upload(suite: str, split: str, name: str | None, workspace: str | None, as_json: bool) -> int:
    """Send a benchmark to the dashboard (EVSYS_API_URL, EVSYS_API_KEY, EVSYS_PROJECT_ID). A file is registered in the
    workspace first. Rows of --split test never go through an agent-scoped key."""
    from evsys_sdk.cli.data import find_entry, open_workspace, upload_entry
    from evsys_sdk.data.workspace import Workspace

    place = Workspace(open_workspace(workspace).root)  # without a source: what is sent is what is here
    path = Path(suite)
    if path.exists() or "/" in suite:
        own = path.resolve()
        shown_name = own.parent.name if own.name == "tasks.jsonl" else own.name.split(".")[0]
        entry = place.add(path, name=name or shown_name, kind="benchmark")
    elif name is not None:
        raise click.UsageError("--name is for a file; an entry of the workspace has its name")
    else:
        entry = find_entry(place, suite, benchmark=True)
    return upload_entry(place, entry, split=split, as_json=as_json)


@group("eval")
def evaluation() -> None:
    """Evaluations outside a run."""


@evaluation.command(
    "model",
    epilog="Exit codes: 0 scored, 1 refused, 2 no valid score, interrupted, or (with --fail-on-retries) a call that "
    "failed for good.",
)
@click.option("--dataset", required=True, metavar="FILE", help="JSONL of rows with a question and an answer")
@click.option(
    "--aliases",
    required=True,
    metavar="FILE",
    help='JSON of verified aliases: {"NAME": ["OTHER", ...]} or groups [["A", "B"], ...]',
)
@click.option("--secondary-aliases", metavar="FILE", help="aliases that count only loosely, in the form of --aliases")
@click.option(
    "--inference-kind",
    "kind",
    required=True,
    type=click.Choice(["local", "tinker", "mock"]),
    help="where the model runs",
)
@click.option("--model-name", required=True, metavar="NAME", help="the base model")
@click.option("--adapter-path", metavar="DIR", help="an adapter over it (local): a run's weights, or PEFT's")
@click.option(
    "--checkpoint-path",
    metavar="PATH",
    help="sampler weights over it: a run, <run>@step-12, a path, or tinker://...",
)
@click.option("--batch-size", type=POSITIVE, default=16, metavar="N", help="calls at once (default: 16)")
@click.option(
    "--system-prompt",
    metavar="TEXT",
    help="before rows that have only a `query`; empty for none (default: asks for a slug in <answer> tags)",
)
@click.option("--output-dir", required=True, metavar="DIR", help="where the artifacts go")
@click.option("--fail-on-retries", is_flag=True, help="exit with 2 if a call failed for good, tries and all")
@scoring_options(
    params="a backend param",
    temperature=0.0,
    num_samples=(1, "answers per row, for pass@N (default: 1)"),
    max_tokens=(MAX_TOKENS, f"per answer (default: {MAX_TOKENS})"),
    seed=(DEFAULT_SEED, f"of the sampling (default: {DEFAULT_SEED})"),
    max_attempts=(3, "tries per call (default: 3)"),
)
def evaluate(
    dataset: str, aliases: str, secondary_aliases: str | None, kind: str, model_name: str, adapter_path: str | None,
    checkpoint_path: str | None, batch_size: int, system_prompt: str | None, output_dir: str, fail_on_retries: bool,
    scoring: ScoringOptions, as_json: bool,
) -> int:  # fmt: skip
    """Ask a model every row's question and score its answers: pass@k, by the very answer and by its aliases. If it is
    killed, the same command resumes it."""
    from evsys_sdk.errors import DataError, EvsysError
    from evsys_sdk.eval import DEFAULT_SYSTEM, AliasMatcher, ModelEvalConfig, format_summary_markdown
    from evsys_sdk.eval.model_eval import MAX_ATTEMPTS
    from evsys_sdk.experiment.standalone import ModelOrder, score_model
    from evsys_sdk.run.open_model import Target, find_weights

    with prints_to_stderr():
        import_extensions(scoring.imports)
        if not Path(dataset).is_file():
            raise DataError(f"--dataset {dataset}: no such file")
        matcher = AliasMatcher.from_files(aliases, secondary_aliases)
        if adapter_path and checkpoint_path:
            raise EvsysError("--adapter-path and --checkpoint-path both name the weights; keep one")
        if adapter_path and kind != "local":
            raise EvsysError(f"--adapter-path is for --inference-kind local; with {kind} say --checkpoint-path")
        backend_params, weights = parse_params(scoring.params), adapter_path or checkpoint_path
        if weights is None:
            target = Target(name=model_name, model=model_name, backend=kind, backend_params=backend_params)
        else:
            target = find_weights(weights, model=model_name, backend=kind, params=backend_params)
        config = ModelEvalConfig(
            max_tokens=scoring.max_tokens or MAX_TOKENS,
            temperature=scoring.temperature,
            num_samples=scoring.num_samples or 1,
            max_attempts=scoring.max_attempts or MAX_ATTEMPTS,
            batch_size=batch_size,
            model_name=model_name,
        )
        order = ModelOrder(
            dataset=Path(dataset),
            matcher=matcher,
            target=target,
            config=config,
            inference_kind=kind,
            system=DEFAULT_SYSTEM if system_prompt is None else system_prompt or None,
            seed=DEFAULT_SEED if scoring.seed is None else scoring.seed,
        )
        try:
            summary, reused = score_model(
                order, Path(output_dir), fresh=scoring.fresh, retry_errors=scoring.retry_errors
            )
        except KeyboardInterrupt:
            print(RESUMES, file=sys.stderr)
            return EXIT_RUN_FAILED
    if as_json:
        print_json({**summary.to_dict(), "reused": reused, "output_dir": output_dir})
    else:
        print(format_summary_markdown(summary, title=f"Evaluation of {summary.model}"))
        print(f"artifacts: {output_dir}" + (" (finished before; --fresh scores it anew)" if reused else ""))
    failed = summary.error or (fail_on_retries and summary.retry_report.total_failures)
    return EXIT_RUN_FAILED if failed else EXIT_OK
