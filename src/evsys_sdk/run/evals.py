"""The evaluations of one run: `metadata.benchmark` entries and the `run.eval` block, through one engine.

In: the config's entries and a sampler over some weights. Out: `EvalResult`s. Whatever goes wrong inside an
evaluation is written into its result; a trained run is never failed by its scoring.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from evsys_sdk import registry
from evsys_sdk.config.metadata import BenchmarkEntry
from evsys_sdk.config.project import path_folders
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.errors import FOREIGN, BackendError, Cancelled, EvsysError
from evsys_sdk.eval.benchmark import Benchmark, BenchmarkLoader
from evsys_sdk.eval.evaluate import WeightsModel
from evsys_sdk.eval.row_eval import EVAL_DATA, score_rows
from evsys_sdk.inference.policy import TrainedModelClient
from evsys_sdk.protocols import (
    AgentSpec,
    EvalResult,
    FinishedRollouts,
    InferenceClient,
    Renderer,
    RolloutEngine,
    Row,
    RunContext,
    RunResult,
)
from evsys_sdk.record.callbacks import eval_metrics
from evsys_sdk.rollout.client_model import ClientModel
from evsys_sdk.rollout.engine import HarborRolloutEngine
from evsys_sdk.rollout.trial import TrialSettings
from evsys_sdk.run.attempt import RunAttempt
from evsys_sdk.run.http_policy import http_front
from evsys_sdk.training.rendering import ChatRenderer, renderer_for, renderer_with, with_prompt
from evsys_sdk.training_api import SamplingClient, SamplingParams, discard_weights, let_go
from evsys_sdk.verifiers.grading import grade

if TYPE_CHECKING:
    from evsys_sdk.run.hooks import LoopHooks

LORA_RANK = 8
"""Of an adapter where neither the config nor the checkpoint says it: the algorithms' default."""


@dataclass(slots=True, kw_only=True)
class RunEvals:
    """How this run is scored."""

    config: ExperimentConfig
    benchmarks: BenchmarkLoader
    engine: RolloutEngine
    seed: int
    max_tasks: int | None = None
    """A ceiling from `--dry`."""
    renderer: ChatRenderer | None = None
    loaded: dict[str, Benchmark] = field(default_factory=dict)
    """`<role>/<label>` -> the benchmarks of entries that were scored."""
    finished: Callable[[str, str, str, int | None], FinishedRollouts] | None = None
    """Where an evaluation (split, name, hash of its tasks, step) keeps its rollouts one by one."""
    render_with: Callable[[str], ChatRenderer] | None = None
    """Makes a renderer of a `chat_template`; None where there is but one template."""
    trained_on: frozenset[str] = frozenset()
    """Hashes of the files and rows that the run trains on."""
    contaminated: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Benchmark, as the leakage audit names it -> how many of its tasks appear in training rows, and of how many."""
    system_prompt: str | None = None
    """Stands before the messages of every task: what an algorithm that searches prompts starts from or has found."""
    client: InferenceClient | None = None
    """Answers in the place of the weights, where the algorithm searches a prompt for a hosted model."""
    engines: dict[str, RolloutEngine] = field(default_factory=dict)
    renderers: dict[str, ChatRenderer] = field(default_factory=dict)
    """By the entries that configure one."""

    @classmethod
    def create(cls, attempt: RunAttempt) -> RunEvals:
        """How the run of this attempt is scored."""
        plan, service, leakage = attempt.plan, attempt.service, attempt.record.leakage
        # The mock model knows one template, whatever the config says.
        is_mock = plan.run.backend.kind == "mock"
        length = getattr(service, "context_length", None)
        settings = TrialSettings(http_front=partial(http_front, length), context_length=length)

        def render_with(template: str) -> ChatRenderer:
            if service is None:
                raise BackendError(f"backend {plan.run.backend.kind!r} has no tokenizer to render with")
            return renderer_with(template, service.get_tokenizer(), path_folders(source_of(plan.experiment)))

        return cls(
            config=plan.experiment,
            benchmarks=plan.inputs.benchmarks,
            engine=HarborRolloutEngine(grade=grade, settings=settings),
            seed=plan.run.seed,
            max_tasks=plan.max_tasks,
            renderer=renderer_for(plan.run.model, service.get_tokenizer(), plan.run.backend.kind) if service else None,
            render_with=None if is_mock else render_with,
            trained_on=frozenset(data.sha256 for data in attempt.record.data),  # only training data is loaded by now
            contaminated={  # a chain audits the data of every stage
                name: max((one["tasks"], one["n_tasks"]) for one in leakage if one["benchmark"] == name)
                for name in {audit["benchmark"] for audit in leakage}
            },
        )

    def use_prompt_of(self, algorithm: object) -> None:
        """Score with the prompt, and by the client, of an algorithm that changes prompts instead of weights."""
        self.system_prompt = getattr(algorithm, "starting_prompt", None)
        make_client = getattr(algorithm, "task_client", None)
        self.client = make_client() if callable(make_client) else None

    def due(self, step: int) -> list[BenchmarkEntry]:
        """Entries to score in the loop after `step`."""
        return [entry for entry in self.config.metadata.benchmark if entry.run_every and step % entry.run_every == 0]

    def outstanding(self, results: list[EvalResult], last_step: int) -> list[BenchmarkEntry]:
        """Entries to score after training: those that the loop has not just scored on the final weights."""
        done = {
            (result.split, result.name)
            for result in results
            if result.step in (None, last_step) and result.error is None
        }
        return [entry for entry in self.config.metadata.benchmark if (entry.role, entry.label) not in done]

    def load(self, entry: BenchmarkEntry) -> str:
        """Have the entry's tasks at hand; returns the key they are under."""
        key = f"{entry.role}/{entry.label}"
        if key not in self.loaded:
            self.loaded[key] = self.benchmarks.get(entry)
        return key

    def load_if_readable(self, entry: BenchmarkEntry) -> None:
        """For what an earlier process scored: the record names the benchmark too."""
        with contextlib.suppress(EvsysError):
            self.load(entry)

    async def score(self, entry: BenchmarkEntry, sampler: SamplingClient | None, *, step: int | None) -> EvalResult:
        """Score one entry; a failure of the scoring itself becomes the result's error. Without a sampler `client`
        answers."""

        async def work() -> EvalResult:
            key = self.load(entry)
            limits = [limit for limit in (entry.limit, self.max_tasks) if limit is not None]
            # The run's seed: the same weights give the same answers when a run is resumed or repeated.
            sampling = SamplingParams(max_tokens=entry.max_tokens, temperature=entry.temperature, seed=self.seed)
            model: ClientModel | WeightsModel
            if self.client is not None:
                if entry.agent_import_path is not None:
                    raise EvsysError("an agent samples from weights; the hosted task_model is asked without an agent")
                model = ClientModel(self.client, sampling=sampling, system_prompt=self.system_prompt)
            else:
                assert sampler is not None
                model = WeightsModel(
                    engine=self._engine(entry, key),
                    sampler=sampler,
                    renderer=self._renderer(entry, key),
                    sampling=sampling,
                    agent=agent_of(entry),
                )
            result = await self.loaded[key].score(
                model,
                metrics=entry.metrics,
                split=entry.role,
                num_samples=entry.num_samples,
                limit=min(limits, default=None),
                breakdown_keys=entry.breakdown_keys,
                cluster_key=entry.cluster_key,
                step=step,
                finished=self.finished and self.finished(entry.role, entry.label, self.loaded[key].sha256, step),
            )
            return self.mark_training_rows(result, key, self.loaded[key].sha256)

        return await run_evaluation(work, name=entry.label, split=entry.role, step=step)

    def mark_training_rows(self, result: EvalResult, audited: str, sha256: str) -> EvalResult:
        """The result with what is known of its tasks and the training rows."""
        # The audit names the same tasks once, by the first entry that has them.
        names = [audited, *(name for name, other in self.loaded.items() if other.sha256 == sha256)]
        found, of = max(self.contaminated.get(name, (0, 0)) for name in names)
        # `0 < of == found`: the audit found every one of its tasks in the training rows, and there is at least one.
        return replace(result, on_training_rows=sha256 in self.trained_on or 0 < of == found, n_training_tasks=found)

    def _engine(self, entry: BenchmarkEntry, key: str) -> RolloutEngine:
        engine: Any = {"harbor": self.engine}[entry.engine]
        if key not in self.engines:  # once per entry: its evaluations at several steps share the concurrency limit
            limits = {"concurrency": entry.n_concurrent, "max_attempts": entry.max_attempts}
            given = {name: value for name, value in limits.items() if value is not None}
            engine = engine.limited(**given) if given else engine
            self.engines[key] = engine.in_environment(entry.environment.spec) if entry.environment else engine
        return self.engines[key]

    def _renderer(self, entry: BenchmarkEntry, key: str) -> Renderer:
        if self.renderer is None:
            raise BackendError("the backend has no tokenizer to render tasks with")
        if self.render_with is None or entry.chat_template is None:
            return with_prompt(self.renderer, self.system_prompt)
        if key not in self.renderers:
            self.renderers[key] = self.render_with(entry.chat_template)
        return with_prompt(self.renderers[key], self.system_prompt)

    async def score_once(
        self, entry: BenchmarkEntry, sampler: SamplingClient | None, *, step: int | None
    ) -> EvalResult:
        """Score one entry and release the sampler."""
        try:
            return await self.score(entry, sampler, step=step)
        finally:
            if sampler is not None:
                let_go(sampler)


def agent_of(entry: BenchmarkEntry) -> AgentSpec | None:
    """The agent that an entry names."""
    path, params = entry.agent_import_path, entry.agent_params
    return None if path is None else AgentSpec(kind=path, params=params)


async def run_evaluation(
    work: Callable[[], Awaitable[EvalResult]], *, name: str, split: str, step: int | None = None
) -> EvalResult:
    """Run an evaluation; an exception in it becomes an `EvalResult` with an error."""
    start = time.monotonic()
    try:
        return replace(await work(), seconds=time.monotonic() - start)
    except Cancelled:
        raise
    except FOREIGN as exc:
        text = f"{type(exc).__name__}: {exc}"
        return EvalResult(name=name, split=split, scores=[], step=step, error=text, seconds=time.monotonic() - start)


async def score_untrained(attempt: RunAttempt, hooks: LoopHooks) -> None:
    """Score the weights that the run starts from, before any training, on the entries with `baseline: true`: the base
    model, or the checkpoint that `load_checkpoint_path` names."""
    if hooks.ctx.resume:
        hooks.replay(upto=0)
    scoring, done = hooks.scoring, {(result.split, result.name) for result in hooks.results}
    for entry in [entry for entry in attempt.plan.experiment.metadata.benchmark if entry.baseline]:
        if (entry.role, entry.label) in done:
            scoring.load_if_readable(entry)
            continue

        hooks.callbacks.doing(hooks.ctx, "scoring")

        # A default binds the entry of this turn: a closure would see that of the last.
        async def work(entry: BenchmarkEntry = entry) -> EvalResult:
            if scoring.client is not None:
                return await scoring.score_once(entry, None, step=0)
            async with _starting_sampler(attempt, hooks.ctx) as sampler:
                return await scoring.score_once(entry, sampler, step=0)

        result = await hooks.stop.unless_set(run_evaluation(work, name=entry.label, split=entry.role, step=0))
        hooks.add(replace(result, start=attempt.plan.run.model.load_checkpoint_path or ""))


@contextlib.asynccontextmanager
async def _starting_sampler(attempt: RunAttempt, ctx: RunContext) -> AsyncIterator[SamplingClient]:
    """A sampler over the weights that training starts from. A checkpoint is a training state, which cannot be sampled
    from: it is loaded as for training, and saved for the sampler as long as it is needed."""
    service = attempt.require_service()
    if ctx.start_from is None:
        yield await service.create_sampling_client()
        return
    saved_rank = getattr(service, "saved_rank", None)
    given = attempt.plan.run.algorithm.params.get("lora_rank")
    rank = given if isinstance(given, int) else saved_rank(ctx.start_from) if saved_rank else LORA_RANK
    # Of the rank of the checkpoint: a state of one rank does not load into an adapter of another.
    client = await service.create_training_client(rank=rank, seed=ctx.seed)
    await client.load_state(ctx.start_from, optimizer=False)
    path = await client.save_weights_for_sampler("start")
    try:
        yield await service.create_sampling_client(path)
    finally:
        await discard_weights(service, path)


async def score_trained(attempt: RunAttempt, hooks: LoopHooks, trained: RunResult, rows: list[Row]) -> dict[str, float]:
    """Score the trained weights on the entries that the loop has not just scored, and on the `run.eval` block; returns
    the scores of these weights."""
    scoring = hooks.scoring
    if hooks.ctx.resume:
        hooks.replay_final()
        for entry in attempt.plan.experiment.metadata.benchmark:
            scoring.load_if_readable(entry)
    for entry in scoring.outstanding(hooks.of_this_stage(), hooks.weights_step):

        async def work(entry: BenchmarkEntry = entry) -> EvalResult:
            sampler = await attempt.sampler_of(trained) if scoring.client is None else None
            return await scoring.score_once(entry, sampler, step=None)

        hooks.add(await hooks.stop.unless_set(run_evaluation(work, name=entry.label, split=entry.role)))
    evaluation = attempt.plan.run.eval
    is_scored = any(result.split == "eval" and result.step is None for result in hooks.of_this_stage())
    if evaluation.enabled and evaluation.metrics and not is_scored:
        block = run_evaluation(lambda: _score_eval_block(attempt, hooks, trained, rows), name="eval", split="eval")
        hooks.add(await hooks.stop.unless_set(block))
    final = [result for result in hooks.of_this_stage() if result.step in (None, hooks.weights_step)]
    return {key: value for result in final for key, value in eval_metrics(result).items()}


async def _score_eval_block(attempt: RunAttempt, hooks: LoopHooks, trained: RunResult, rows: list[Row]) -> EvalResult:
    """The `run.eval` block: ask a client for an answer to each row and compare. The client is what `eval.inference`
    names; without it, or where it names a backend, the trained weights."""
    evaluation, plan = attempt.plan.run.eval, attempt.plan
    metrics = [
        (spec.kind, attempt.extensions.build(registry.metrics, spec, f"eval.metrics[{index}]"))
        for index, spec in enumerate(evaluation.metrics)
    ]
    sha256 = None
    if evaluation.eval_data is not None:
        loaded = attempt.load_rows(evaluation.eval_data, "eval.eval_data", hooks.ctx.data_store)
        rows, sha256 = loaded.rows, loaded.sha256
    limits = [limit for limit in (evaluation.n_samples, plan.max_tasks) if limit is not None]
    client: InferenceClient = TrainedModelClient()
    if evaluation.inference is not None:
        client = attempt.extensions.build(registry.inference, evaluation.inference, "eval.inference")
    if isinstance(client, TrainedModelClient):
        sampler = await attempt.sampler_of(trained)
        assert hooks.scoring.renderer is not None  # sampler_of has refused a backend without a service
        client.attach(sampler, with_prompt(hooks.scoring.renderer, hooks.scoring.system_prompt), plan.run.seed)

    def finished(sha256: str) -> FinishedRollouts:
        return hooks.finished("eval", "eval", sha256, None)

    result = await score_rows(rows, metrics=metrics, client=client, limit=min(limits, default=None), finished=finished)
    if sha256 is None:  # without `eval_data` the block asks the training rows themselves
        return replace(result, on_training_rows=True)
    return hooks.scoring.mark_training_rows(result, EVAL_DATA, sha256)
