"""The evaluations of one run: `metadata.benchmark` entries and the `run.eval` block, through one engine.

In: the config's entries and a sampler over some weights. Out: `EvalResult`s. Whatever goes wrong inside an
evaluation is written into its result; a trained run is never failed by its scoring.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evsys_sdk import registry
from evsys_sdk.asyncs import run_async
from evsys_sdk.config.metadata import BenchmarkEntry
from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.config.project import path_folders
from evsys_sdk.config.source import source_of
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.errors import FOREIGN, BackendError, Cancelled, DataError, EvsysError, closest, shorten
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.eval.row_eval import score_rows
from evsys_sdk.inference.trained import TrainedModelClient
from evsys_sdk.protocols import AgentSpec, EvalResult, FinishedRollouts, Renderer, RolloutEngine, Row, RunResult
from evsys_sdk.record.callbacks import eval_metrics
from evsys_sdk.surface import SamplingClient, let_go

if TYPE_CHECKING:
    from evsys_sdk.running.live import LoopHooks
    from evsys_sdk.running.workbench import Workbench


def find_benchmark(entry: BenchmarkEntry, config: ExperimentConfig) -> Benchmark:
    """The tasks that an entry means: its path, else its id or name in the workspace."""
    source = source_of(config)
    if entry.path is not None:
        return Benchmark.load(_find_path(entry.path, path_folders(source)), name=entry.label)
    workspace = Workspace.find(source.folder)
    return Benchmark.load(workspace.pull_benchmark(str(entry.id or entry.name)), name=entry.label)


def _find_path(path: str, folders: list[Path]) -> Path:
    for folder in folders:
        try:
            if (folder / path).exists():
                return folder / path
        except (OSError, ValueError):  # a name that no file can have
            break
    places = ", ".join(str(folder) for folder in dict.fromkeys(folders))
    near = closest(Path(path).name, _beside(path, folders))
    hint = f"; closest: {Path(path).parent / near}" if near else ""
    raise DataError(f"no benchmark at {shorten(repr(path))}; looked in {places}{hint}")


def _beside(path: str, folders: list[Path]) -> set[str]:
    """Names that lie where `path` was looked for."""
    parents = [(folder / path).parent for folder in folders]
    try:
        return {entry.name for parent in parents if parent.is_dir() for entry in parent.iterdir()}
    except (OSError, ValueError):
        return set()


@dataclass(slots=True, kw_only=True)
class Scoring:
    """How this run is scored; benchmarks are loaded once, at first use."""

    config: ExperimentConfig
    engine: RolloutEngine
    seed: int
    max_tasks: int | None = None
    """A ceiling from `--dry`."""
    renderer: Renderer | None = None
    loaded: dict[str, Benchmark] = field(default_factory=dict)
    finished: Callable[[str, str, str, int | None], FinishedRollouts] | None = None
    """Where an evaluation (split, name, hash of its tasks, step) keeps its rollouts one by one."""
    render_with: Callable[[str], Renderer] | None = None
    """Makes a renderer of a `chat_template`; None where there is but one template."""
    trained_on: frozenset[str] = frozenset()
    """Hashes of the files and rows that the run trains on."""
    made: dict[str, Any] = field(default_factory=dict)
    """Engines and renderers that entries asked for."""

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
            self.loaded[key] = find_benchmark(entry, self.config)
        return key

    async def score(self, entry: BenchmarkEntry, sampler: SamplingClient, *, step: int | None) -> EvalResult:
        """Score one entry; a failure of the scoring itself becomes the result's error."""

        async def work() -> EvalResult:
            key = self.load(entry)
            limits = [limit for limit in (entry.limit, self.max_tasks) if limit is not None]
            result = await self.loaded[key].score(
                engine=self._engine(entry, key),
                sampler=sampler,
                renderer=self._renderer(entry, key),
                metrics=entry.metrics,
                split=entry.role,
                num_samples=entry.num_samples,
                max_tokens=entry.max_tokens,
                temperature=entry.temperature,
                limit=min(limits, default=None),
                breakdown_keys=entry.breakdown_keys,
                cluster_key=entry.cluster_key,
                seed=self.seed,
                step=step,
                agent=agent_of(entry),
                finished=self.finished and self.finished(entry.role, entry.label, self.loaded[key].sha256, step),
            )
            return replace(result, on_training_rows=self.loaded[key].sha256 in self.trained_on)

        return await guarded(work, name=entry.label, split=entry.role, step=step)

    def _engine(self, entry: BenchmarkEntry, key: str) -> RolloutEngine:
        engine: Any = {"harbor": self.engine}[entry.engine]
        key = f"{key} engine"
        if key not in self.made:  # once per entry: its evaluations at several steps share its places
            limits = {"concurrency": entry.n_concurrent, "max_attempts": entry.max_attempts}
            given = {name: value for name, value in limits.items() if value is not None}
            engine = engine.limited(**given) if given else engine
            environment = entry.environment
            self.made[key] = engine if environment is None else engine.in_environment(environment.spec)
        found: RolloutEngine = self.made[key]
        return found

    def _renderer(self, entry: BenchmarkEntry, key: str) -> Renderer:
        if self.renderer is None:
            raise BackendError("the backend has no tokenizer to render tasks with")
        template = None if self.render_with is None else entry.chat_template
        if self.render_with is None or template is None:
            return self.renderer
        key = f"{key} renderer"
        if key not in self.made:
            self.made[key] = self.render_with(template)
        renderer: Renderer = self.made[key]
        return renderer

    async def score_once(self, entry: BenchmarkEntry, sampler: SamplingClient, *, step: int | None) -> EvalResult:
        """The same with a sampler that nobody needs afterwards."""
        try:
            return await self.score(entry, sampler, step=step)
        finally:
            let_go(sampler)


def agent_of(entry: BenchmarkEntry) -> AgentSpec | None:
    """The agent that an entry names."""
    path, params = entry.agent_import_path, entry.agent_params
    return None if path is None else AgentSpec(kind=path, params=params)


async def guarded(
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


def score_untrained(bench: Workbench, hooks: LoopHooks) -> None:
    """Score the model as it is before any training on the entries that ask for it (`baseline: true`)."""
    run_async(_score_untrained(bench, hooks))


async def _score_untrained(bench: Workbench, hooks: LoopHooks) -> None:
    if hooks.ctx.resume:
        hooks.replay(upto=0)
    scoring, done = hooks.scoring, {(result.split, result.name) for result in hooks.results}
    entries = [entry for entry in bench.plan.experiment.metadata.benchmark if entry.baseline]
    for entry in entries:
        if (entry.role, entry.label) in done:
            _load_quietly(scoring, entry)
            continue

        hooks.callbacks.doing(hooks.ctx, "scoring")

        async def work(entry: BenchmarkEntry = entry) -> EvalResult:
            if bench.service is None:
                raise BackendError(f"backend {bench.plan.run.backend.kind!r} offers no training service to sample from")
            return await scoring.score_once(entry, await bench.service.create_sampling_client(), step=0)

        hooks.add(await guarded(work, name=entry.label, split=entry.role, step=0))


def _load_quietly(scoring: Scoring, entry: BenchmarkEntry) -> None:
    """What an earlier process scored is in the record as well."""
    with contextlib.suppress(EvsysError):
        scoring.load(entry)


def score_after_training(bench: Workbench, hooks: LoopHooks, trained: RunResult, rows: list[Row]) -> dict[str, float]:
    """Score the trained weights on whatever the loop has not just scored; returns the numbers of these weights."""
    return run_async(_score_after_training(bench, hooks, trained, rows))


async def _score_after_training(
    bench: Workbench, hooks: LoopHooks, trained: RunResult, rows: list[Row]
) -> dict[str, float]:
    scoring = hooks.scoring
    if hooks.ctx.resume:
        hooks.replay_final()
        for entry in bench.plan.experiment.metadata.benchmark:
            _load_quietly(scoring, entry)
    for entry in scoring.outstanding(hooks.of_this_stage(), hooks.weights_step):

        async def work(entry: BenchmarkEntry = entry) -> EvalResult:
            return await scoring.score_once(entry, await bench.sampler_of(trained), step=None)

        hooks.add(await guarded(work, name=entry.label, split=entry.role))
    evaluation = bench.plan.run.eval
    scored = any(result.split == "eval" and result.step is None for result in hooks.of_this_stage())
    if evaluation.enabled and evaluation.metrics and not scored:
        hooks.add(await guarded(lambda: _score_eval_block(bench, hooks, trained, rows), name="eval", split="eval"))
    final = [result for result in hooks.of_this_stage() if result.step in (None, hooks.weights_step)]
    return {key: value for result in final for key, value in eval_metrics(result).items()}


async def _score_eval_block(bench: Workbench, hooks: LoopHooks, trained: RunResult, rows: list[Row]) -> EvalResult:
    """The `run.eval` block: ask a client for an answer to each row and compare."""
    evaluation, plan = bench.plan.run.eval, bench.plan
    metrics = [
        (spec.kind, bench.parts.build(registry.metrics, spec, f"eval.metrics[{index}]"))
        for index, spec in enumerate(evaluation.metrics)
    ]
    on_training_rows = evaluation.eval_data is None
    if evaluation.eval_data is not None:
        loaded = bench.load(evaluation.eval_data, "eval.eval_data", hooks.ctx.data_store)
        rows, on_training_rows = loaded.rows, loaded.sha256 in hooks.scoring.trained_on
    limits = [limit for limit in (evaluation.n_samples, plan.max_tasks) if limit is not None]
    client = await _inference_client(bench, hooks, trained)

    def finished(sha256: str) -> FinishedRollouts:
        return hooks.finished("eval", "eval", sha256, None)

    result = await score_rows(rows, metrics=metrics, client=client, limit=min(limits, default=None), finished=finished)
    return replace(result, on_training_rows=on_training_rows)


async def _inference_client(bench: Workbench, hooks: LoopHooks, trained: RunResult) -> Any:
    """What `eval.inference` names; without it, or where it names a backend, the weights where they live."""
    spec = bench.plan.run.eval.inference
    if spec is None:
        client: Any = TrainedModelClient()
    else:
        client = bench.parts.build(registry.inference, spec, "eval.inference")
    if isinstance(client, TrainedModelClient):
        sampler = await bench.sampler_of(trained)
        assert hooks.scoring.renderer is not None  # sampler_of has refused a backend without a service
        client.attach(sampler, hooks.scoring.renderer, bench.plan.run.seed)
    return client
