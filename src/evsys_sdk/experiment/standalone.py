"""Evaluations outside of a run: `evsys benchmark run` (`score_suite`) and `evsys eval model` (`score_model`).

In: an `EvaluationRequest` (one model, one suite) or a `ModelOrder` (a checkpoint, a dataset with aliases). Out: the
result, and the same on disk in its own directory. Weights are opened as `evsys serve` opens them and rolled out by
the one rollout engine; a hosted model is asked through its inference client. Answers are kept as they come, so that a
killed evaluation resumes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evsys_sdk import registry
from evsys_sdk.checks.blocks import all_data
from evsys_sdk.concurrency import run_async
from evsys_sdk.config.base import JsonDict
from evsys_sdk.config.project import project_root
from evsys_sdk.config.schema import RunConfig
from evsys_sdk.constants import JOURNAL_FILE
from evsys_sdk.contamination.audit import KnownBenchmark, Suite, audits_of, read_questions
from evsys_sdk.data.rows import load_rows
from evsys_sdk.data.stores import LocalDataStore
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import EvsysError, shorten
from evsys_sdk.eval.aliases import DEFAULT_SYSTEM, AliasMatcher
from evsys_sdk.eval.benchmark import Benchmark, cluster_problem, sampling_problem, task_problems
from evsys_sdk.eval.evaluate import WeightsModel
from evsys_sdk.eval.hosted import score_hosted
from evsys_sdk.eval.metrics import samples_needed
from evsys_sdk.eval.model_eval import EvalSummary, ModelEvalConfig, evaluate_answers, load_eval_dataset
from evsys_sdk.eval.scoring import is_errored
from evsys_sdk.files import read_object, write_json, write_rows
from evsys_sdk.inference.policy import TrainedModelClient
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import (
    SANDBOX,
    AgentSpec,
    EnvironmentSpec,
    EvalResult,
    FinishedRollouts,
    InferenceClient,
    Rollout,
    Row,
)
from evsys_sdk.record.environment import config_hash, describe_environment
from evsys_sdk.record.journal import Journal, JournalledRollouts
from evsys_sdk.record.layout import ATTEMPTS, open_run_dir, set_aside
from evsys_sdk.record.local_logger import rollout_record
from evsys_sdk.record.models import RunRecord, eval_summary
from evsys_sdk.redaction import redact_data
from evsys_sdk.rollout.agents import find_agent
from evsys_sdk.rollout.client_model import hosted_problems
from evsys_sdk.rollout.engine import HarborRolloutEngine, refusal
from evsys_sdk.rollout.requirements import kind_problem
from evsys_sdk.rollout.task_dirs import has_own_tests
from evsys_sdk.rollout.trial import TrialSettings
from evsys_sdk.run.http_policy import http_front
from evsys_sdk.run.open_model import OpenModel, Target, check_target, open_model, run_dir_around
from evsys_sdk.training_api import SamplingParams, derive_seed, leave_retries_to_caller, let_go
from evsys_sdk.verifiers.grading import grade, grading_problems

# The directory of an evaluation, locked while it runs:
#
#     settings.json     what was asked
#     journal.sqlite    every rollout, kept as it ends: a killed evaluation resumes from here
#     result.json       the scores; written last, so that it means "finished"
#     rollouts.jsonl    of a benchmark: a line per try, in the form of a run's logs
#
# Settings come in two parts: the *subject* decides what the model does (tasks, model, sampling), the *folding* only
# what is made of that (metrics, breakdowns, a limit). With the same subject the rollouts are used again.

SETTINGS_FILE, RESULT_FILE, ROLLOUTS_FILE = "settings.json", "result.json", "rollouts.jsonl"
EVALUATION = "evaluation"

OnRollout = Callable[[Rollout], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """What is evaluated, and how it is reported; plain JSON."""

    subject: dict[str, object]
    folding: dict[str, object] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        return config_hash(self.subject)

    def data(self) -> dict[str, Any]:
        # Through JSON and back: what was written and read must compare equal.
        settings = redact_data({"subject": self.subject, "folding": self.folding})  # as the file has them
        plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
        return plain


class WatchedRollouts:
    """Finished rollouts that call `on_rollout` for each new one."""

    def __init__(self, kept: FinishedRollouts, on_rollout: OnRollout):
        self.kept, self.on_rollout = kept, on_rollout

    def find(self, task_id: str, sample: int) -> Rollout | None:
        return self.kept.find(task_id, sample)

    def add(self, task_id: str, sample: int, rollout: Rollout) -> None:
        self.kept.add(task_id, sample, rollout)
        self.on_rollout(rollout)


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """An evaluation's directory, held by this process."""

    folder: Path
    asked: EvaluationSpec
    rollouts: JournalledRollouts
    started: datetime

    def finished(self, on_rollout: OnRollout | None = None) -> FinishedRollouts:
        """The rollouts that need not be made again; new ones are added to them."""
        return self.rollouts if on_rollout is None else WatchedRollouts(self.rollouts, on_rollout)

    def write_rollouts(self, result: EvalResult) -> None:
        """A line per try."""
        lines = (rollout_record(result, rollout) for rollout in result.rollouts)
        write_rows(self.folder / ROLLOUTS_FILE, lines, record=True)

    def finish(self, found: Mapping[str, object]) -> dict[str, Any]:
        """Put the result on disk, last of all; returns it."""
        record = {
            **found,
            "settings": self.asked.data(),
            "environment": describe_environment(Path.cwd()),
            "started": self.started.isoformat(timespec="milliseconds"),
            "ts": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        write_json(self.folder / RESULT_FILE, record)
        return record


def finished_result(folder: Path, asked: EvaluationSpec) -> dict[str, Any] | None:
    """What came of the evaluation in `folder`, if it is finished and nothing else was asked then."""
    found = read_object(folder / RESULT_FILE)
    return found if found and found.get("settings") == asked.data() else None


@contextmanager
def open_evaluation(folder: Path, asked: EvaluationSpec, *, fresh: bool = False) -> Iterator[Evaluation]:
    """Hold `folder` for this evaluation, with what an earlier process finished of it."""
    if folder.is_dir() and not (folder / SETTINGS_FILE).exists():
        # Nothing that is not an evaluation's is written beside or set aside. Dot-files are a lock, or what a kill left
        # of a file that was being written.
        others = sorted(one.name for one in folder.iterdir() if one.name != ATTEMPTS and not one.name.startswith("."))
        if others:
            raise EvsysError(
                f"{folder} holds something else ({shorten(', '.join(others), 100)}); choose another --output-dir"
            )
    with open_run_dir(folder):
        before, settings = read_object(folder / SETTINGS_FILE), asked.data()
        if before is not None and fresh:
            set_aside(folder)
        elif before is not None and before["subject"] != settings["subject"]:
            then, now = before["subject"], settings["subject"]
            changes = "; ".join(
                f"{key} was {shorten(json.dumps(then.get(key)))} and is {shorten(json.dumps(now.get(key)))}"
                for key in dict.fromkeys([*then, *now])
                if then.get(key) != now.get(key)
            )
            raise EvsysError(
                f"{folder} holds another evaluation: {changes}. Choose another --output-dir, or set that one aside "
                "with --fresh"
            )
        write_json(folder / SETTINGS_FILE, settings)  # first: it says whose the folder is
        with closing(Journal(folder / JOURNAL_FILE)) as journal:
            attempt = journal.unfinished(EVALUATION, asked.fingerprint) or journal.begin(EVALUATION, asked.fingerprint)
            rollouts = JournalledRollouts(attempt, EVALUATION)
            yield Evaluation(folder=folder, asked=asked, rollouts=rollouts, started=datetime.now(UTC))


def stamp_of(path: str | None) -> str | None:
    """Changes when files at this place are written anew; None for what is no place on this machine."""
    if path is None or not Path(path).exists():
        return None
    files = [Path(path)] if Path(path).is_file() else sorted(file for file in Path(path).rglob("*") if file.is_file())
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return config_hash({"files": facts})[:16]


SHOWN_PROBLEMS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """A model behind an inference client."""

    kind: str
    name: str
    """The provider's name for it."""
    params: JsonDict = field(default_factory=dict)

    def client(self, max_attempts: int | None = None) -> InferenceClient:
        """The client, which makes a lost call so often; a project's own that knows no `model` is built without."""
        cls = registry.inference.get(self.kind)
        if isinstance(cls, type) and issubclass(cls, TrainedModelClient):
            raise EvsysError(f"inference {self.kind!r} asks a model on its backend; say --backend {self.kind} instead")
        retries = {} if max_attempts is None else {"max_retries": max_attempts - 1}
        params = {"model": self.name, **retries, **self.params}
        if retries and any(problem.path == "max_retries" for problem in registry.check_params(cls, params)):
            raise EvsysError(f"inference {self.kind!r} has no max_retries, so --max-attempts cannot be set for it")
        if any(problem.path == "model" for problem in registry.check_params(cls, params)):
            del params["model"]
        client: InferenceClient = registry.inference.build(self.kind, params)
        return client


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What to score, on what, and how."""

    benchmark: Benchmark
    model: Target | Hosted
    metrics: Sequence[str] = ("pass@1",)
    num_samples: int | None = None
    max_tokens: int = 256
    temperature: float = 1.0
    limit: int | None = None
    breakdown_keys: Sequence[str] = ()
    cluster_key: str | None = None
    """Metadata key of the template that a task was made from; templates are then the units of intervals."""
    seed: int | None = 42
    """Not for a hosted model."""
    agent: AgentSpec | None = None
    n_concurrent: int = 64
    environment: str = SANDBOX
    """Of tasks that need one: a kind, or where a class is. Not for a hosted model, which only answers questions."""
    max_attempts: int | None = None
    """How often a call that the machine broke is made, the first time included; by default as often as the engine, or
    the hosted model's client, does."""

    @property
    def tasks(self) -> list[HarborTask]:
        return self.benchmark.tasks[: self.limit]

    @property
    def each(self) -> int:
        """Rollouts per task."""
        needed = [samples_needed(name, registry.metrics.build(name, {})) for name in self.metrics]
        return self.num_samples or max(needed)

    def asked(self) -> EvaluationSpec:
        model = asdict(self.model)
        if isinstance(self.model, Target):
            model["written"] = stamp_of(self.model.checkpoint) or stamp_of(self.model.model)
        return EvaluationSpec(
            subject={
                "benchmark": {"name": self.benchmark.name, "sha256": self.benchmark.sha256},
                "model": model,
                "num_samples": self.each,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "seed": self.seed if isinstance(self.model, Target) else None,
                "agent": asdict(self.agent) if self.agent else None,
                **({"environment": self.environment} if self.environment != SANDBOX else {}),
            },
            folding={
                "metrics": list(self.metrics),
                "limit": self.limit,
                "breakdown_keys": list(self.breakdown_keys),
                "cluster_key": self.cluster_key,
            },
        )

    def known(self, finished: FinishedRollouts) -> int:
        """How many of the rollouts are there already."""
        return sum(finished.find(task.task_id, n) is not None for task in self.tasks for n in range(self.each))

    def check(self) -> None:
        """Refuse what can be known not to work."""
        if not self.metrics:
            raise EvsysError("name at least one metric")
        wrong = [problem for problem in [sampling_problem(self.metrics, self.num_samples)] if problem]
        unknown = cluster_problem(self.tasks, self.cluster_key)
        wrong += [f"--cluster-key: {unknown}"] if unknown else []
        wrong += task_problems(self.benchmark)
        # `task_problems` has looked at functions of ours; tests in an environment are harbor's to run.
        others = [task for task in self.tasks if not has_own_tests(task) and task.verifier.kind != "in_process"]
        wrong += grading_problems(others)
        wrong += [reason for task in self.tasks if has_own_tests(task) and (reason := refusal(task))][:1]
        unusable = kind_problem(self.environment)
        wrong += [unusable] if unusable else []
        if isinstance(self.model, Hosted):
            wrong += hosted_problems(self.tasks)
        if wrong:
            raise EvsysError("\n".join(wrong[:SHOWN_PROBLEMS]))
        if isinstance(self.model, Target):
            check_target(self.model)
        if self.agent is not None:
            find_agent(self.agent)

    def score(self, client: InferenceClient | None, finished: FinishedRollouts) -> EvalResult:
        """Make the rollouts that are missing, with the hosted model's `client` or the weights, and score them all."""
        options: dict[str, Any] = {
            "metrics": self.metrics,
            "num_samples": self.each,
            "limit": self.limit,
            "breakdown_keys": self.breakdown_keys,
            "cluster_key": self.cluster_key,
            "finished": finished,
        }
        if isinstance(self.model, Hosted):
            assert client is not None
            options |= {"max_tokens": self.max_tokens, "temperature": self.temperature}
            return run_async(score_hosted(self.benchmark, client, concurrency=self.n_concurrent, **options))

        async def score_weights(model: OpenModel) -> EvalResult:
            settings = TrialSettings(
                http_front=partial(http_front, model.context_length),
                context_length=model.context_length,
                environment=EnvironmentSpec(kind=self.environment),
            )
            engine = HarborRolloutEngine(
                concurrency=self.n_concurrent, agent=self.agent, grade=grade, settings=settings
            ).limited(max_attempts=self.max_attempts)
            sampler = await model.sampler()
            try:
                sampling = SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)
                weights = WeightsModel(engine=engine, sampler=sampler, renderer=model.renderer(), sampling=sampling)
                return await self.benchmark.score(weights, **options)
            finally:
                let_go(sampler)

        with open_model(self.model) as model:
            return run_async(score_weights(model))


def score_suite(
    order: EvaluationRequest,
    folder: Path,
    *,
    fresh: bool = False,
    retry_errors: bool = False,
    on_start: Callable[[int, int], None] | None = None,
    on_rollout: OnRollout | None = None,
) -> tuple[dict[str, Any], bool]:
    """The result, and whether it was there already. `on_start` gets the number of rollouts, and how many of them are
    there from before."""
    asked = order.asked()
    known = None if fresh else finished_result(folder, asked)
    if known is not None and not (retry_errors and known["errors"]):
        return known, True
    order.check()
    client = order.model.client(order.max_attempts) if isinstance(order.model, Hosted) else None
    with open_evaluation(folder, asked, fresh=fresh) as evaluation:
        finished = evaluation.finished(on_rollout)
        if on_start is not None:
            on_start(len(order.tasks) * order.each, order.known(finished))
        result = order.score(client, finished)
        if isinstance(order.model, Target):
            suite = order.benchmark
            is_all, count = find_trained_tasks(
                order.model, suite.name, order.tasks, sha256=suite.sha256, limit=order.limit
            )
            result = replace(result, on_training_rows=is_all, n_training_tasks=count)
        evaluation.write_rollouts(result)
        return evaluation.finish(describe(order, result)), False


def find_trained_tasks(
    target: Target, name: str, tasks: Sequence[HarborTask], *, sha256: str, limit: int | None = None
) -> tuple[bool, int]:
    """Whether all tasks stand in the rows that the weights' run was trained on, and how many do. `sha256`: of the file
    that the tasks are from, of which only the first `limit` may be meant.

    The rows are loaded again by the settings in the run's record; where that is not possible nothing is found."""
    run_dir = run_dir_around(target.checkpoint)
    record = RunRecord.find(run_dir) if run_dir else None
    if run_dir is None or record is None:
        return False, 0
    if sha256 in {data.sha256 for data in record.environment.data}:
        return True, len(tasks)
    root = project_root(run_dir)
    folders = list(dict.fromkeys([Path.cwd(), root]))
    rows: list[Row] = []
    try:
        for place, data in all_data(RunConfig.model_validate(record.hparams)):
            if not place.startswith("eval."):
                loaded = load_rows(data, store=LocalDataStore(), folders=folders, workspace=Workspace.find(root))
                rows += loaded.rows
    except (EvsysError, ValidationError) as exc:
        get_logger(__name__).warning("training rows of %s cannot be read, so scores on them are not marked: %s",
                                     target.name, shorten(str(exc), 300))  # fmt: skip
        return False, 0
    [audit] = audits_of(rows, [KnownBenchmark(suite=Suite(name=name, tasks=tasks), sha256=f"{sha256} {limit}")])
    return 0 < audit.n_tasks == audit.tasks, audit.tasks


def describe(order: EvaluationRequest, result: EvalResult) -> dict[str, object]:
    """The result as it is written and printed."""
    suite = order.benchmark
    return {
        "benchmark": {"name": suite.name, "sha256": suite.sha256, "tasks": len(suite.tasks)},
        "model": asdict(order.model),
        **eval_summary(result),
        "clusters": {"count": len(set(result.clusters.values())), "found_by": result.clustered_by},
        "errors": errors_in(result.rollouts),
        "usage": usage_of(result.rollouts),
    }


def errors_in(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """What went wrong, and how often; the most frequent first."""
    found = Counter(shorten(rollout.error or rollout.status, 300) for rollout in rollouts if is_errored(rollout))
    return dict(found.most_common())


def usage_of(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """Tokens and dollars of all rollouts; a cost that is not known is None."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    reported = [rollout.metadata for rollout in rollouts if not any(turn.completion_tokens for turn in rollout.turns)]
    unpriced = any(rollout.metadata.get("unpriced") for rollout in rollouts)
    return {
        "input_tokens": sum(len(turn.prompt_tokens) for turn in turns)
        + sum(one.get("n_input_tokens") or 0 for one in reported),
        "output_tokens": sum(len(turn.completion_tokens) for turn in turns)
        + sum(one.get("n_output_tokens") or 0 for one in reported),
        "cost_usd": None if unpriced else sum(rollout.cost_usd for rollout in rollouts),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrder:
    """What to evaluate, on what, and how."""

    dataset: Path
    matcher: AliasMatcher
    target: Target
    config: ModelEvalConfig
    inference_kind: str
    system: str | None = DEFAULT_SYSTEM
    seed: int = 42

    def asked(self) -> EvaluationSpec:
        written = stamp_of(self.target.checkpoint) or stamp_of(self.target.model)
        return EvaluationSpec(
            subject={
                "dataset": {
                    "path": str(self.dataset),
                    "sha256": hashlib.sha256(self.dataset.read_bytes()).hexdigest(),
                },
                "system": self.system,
                "model": {**asdict(self.target), "written": written},
                "num_samples": self.config.num_samples,
                "max_tokens": self.config.max_tokens,
                "temperature": self.config.temperature,
                "seed": self.seed,
            },
            folding={"aliases": self.matcher.sha256},
        )


def score_model(
    order: ModelOrder, folder: Path, *, fresh: bool = False, retry_errors: bool = False
) -> tuple[EvalSummary, bool]:
    """The summary, and whether it was there already."""
    rows = load_eval_dataset(order.dataset, system=order.system)
    asked = order.asked()
    known = None if fresh else finished_result(folder, asked)
    if known is not None:
        before = EvalSummary.from_dict(known)
        if not (retry_errors and before.retry_report.total_failures):
            return before, True
    check_target(order.target)
    target, cfg = order.target, order.config
    if target.backend == "tinker":
        target = replace(target, backend_params={"connect_attempts": cfg.max_attempts} | target.backend_params)

    sha256 = hashlib.sha256(order.dataset.read_bytes()).hexdigest()
    on_training_rows, n_training_rows = find_trained_tasks(
        target, order.dataset.name, read_questions(rows), sha256=sha256
    )

    async def evaluate(model: OpenModel, finished: FinishedRollouts) -> EvalSummary:
        sampler, renderer = await model.sampler(), model.renderer()
        leave_retries_to_caller(model.service)  # `max_attempts` says how often a call is made
        # A client asks the same question with the same seed; samples of one question need a client each.
        clients: list[TrainedModelClient] = []
        for sample in range(cfg.num_samples):
            client = registry.inference.build(order.inference_kind, {"concurrency": cfg.batch_size})
            client.attach(sampler, renderer, derive_seed(order.seed, "sample", sample))
            clients.append(client)

        async def ask(prompt: Any, sample: int) -> str:
            return await clients[sample].agenerate(
                prompt=prompt, max_tokens=cfg.max_tokens, temperature=cfg.temperature
            )

        try:
            artifacts = await evaluate_answers(
                ask, rows, matcher=order.matcher, output_dir=folder, config=cfg, finished=finished,
                on_training_rows=on_training_rows, n_training_rows=n_training_rows,
            )  # fmt: skip
            return artifacts.summary
        finally:
            let_go(sampler)

    with open_evaluation(folder, asked, fresh=fresh) as evaluation:
        with open_model(target) as model:
            summary = run_async(evaluate(model, evaluation.finished()))
        evaluation.finish(summary.to_dict())
        return summary, False
