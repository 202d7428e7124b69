"""The training loop: batches in, changed weights out, the same on every backend.

In: something that builds batches, a training client, a plan. Out: a `LoopResult` and checkpoints. Each step submits its
forward/backward calls and its optimiser step before it awaits any of them, so that a remote backend never
waits for us in between.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evsys_sdk.errors import BackendError, BackendUnavailable, Cancelled, not_known
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import KeptWeights, RunContext
from evsys_sdk.training.batch import TrainingBatch
from evsys_sdk.training.checkpoints import Checkpoint, CheckpointManifest, manifest_path
from evsys_sdk.training.plan import LoopPlan as LoopPlan
from evsys_sdk.training.rollout_data import trim
from evsys_sdk.training_api import (
    AdamParams,
    Capabilities,
    ForwardBackwardOutput,
    OptimStepOutput,
    SamplingClient,
    TrainingClient,
    TrainingService,
    discard_weights,
)

# The result that is announced for a step.
#
# In: a batch, the backend's answers, the time it took. Out: numbers under the names the logs use.


def learning_metrics(
    batch: TrainingBatch, outputs: list[ForwardBackwardOutput], optim: OptimStepOutput, adam: AdamParams
) -> dict[str, float]:
    """Loss, rate and what the backend measured."""
    # Calls may differ in size: the last one of a batch takes what is left.
    metrics = merge_metrics([output.metrics for output in outputs], [len(output.logprobs) for output in outputs])
    metrics |= optim.metrics
    metrics["lr"] = adam.learning_rate
    if outputs:
        metrics["loss"] = metrics["loss:sum"] / (batch.loss_scale or _weight(batch) or len(outputs))
    return metrics


def merge_metrics(parts: list[dict[str, float]], sizes: list[int]) -> dict[str, float]:
    """Metrics of several calls as one: names that end in `:sum` add up, the others are averaged over the calls' data,
    of which `sizes` has the numbers."""
    together: dict[str, list[tuple[float, int]]] = {}
    for part, size in zip(parts, sizes, strict=True):
        for key, value in part.items():
            together.setdefault(key, []).append((value, size))
    # The suffix is Tinker's: a server names in it how the metrics of several calls are to be merged.
    return {
        key: sum(value for value, _ in values) if key.endswith(":sum") else _mean(values)
        for key, values in together.items()
    }


def _mean(values: list[tuple[float, int]]) -> float:
    """The mean of values with their weights; of calls that do not say how much data they had, the plain one."""
    total = sum(size for _, size in values)
    if not total:
        return sum(value for value, _ in values) / len(values)
    return sum(value * size for value, size in values) / total


def _weight(batch: TrainingBatch) -> float:
    """What `loss:sum` is divided by to compare batches: the weight of the tokens that pull. 0 for a custom loss,
    whose scale only its author knows."""
    if not isinstance(batch.loss_fn, str):
        return 0.0
    key = "weights" if batch.loss_fn == "cross_entropy" else "advantages"
    arrays = [datum.loss_fn_inputs[key].to_numpy() for datum in batch.data]
    # Weights are signed, so they are added by size. Advantages of one batch nearly cancel, so they are counted.
    return float(sum(abs(array).sum() if key == "weights" else (array != 0).sum() for array in arrays))


def speed_metrics(batch: TrainingBatch, seconds: float) -> dict[str, float]:
    tokens = sum(datum.model_input.length for datum in batch.data)
    return {"tokens": tokens, "step_seconds": seconds, "tokens_per_second": tokens / seconds if seconds else 0.0}


@runtime_checkable
class StepBuilder(Protocol):
    """What should the next step learn from?"""

    async def build_batch(self, step: int) -> TrainingBatch: ...

    def step_metrics(
        self, step: int, batch: TrainingBatch, outputs: list[ForwardBackwardOutput]
    ) -> dict[str, float]: ...


@runtime_checkable
class Resumable(Protocol):
    """A builder that carries something from step to step beside the weights."""

    async def progress(self) -> dict[str, Any]:
        """What to keep with a checkpoint, as plain JSON data."""
        ...

    async def restore(self, progress: dict[str, Any]) -> None:
        """Stand where `progress` was taken; called after the weights are loaded."""
        ...


@dataclass(slots=True)
class LoopResult:
    """The result of the loop."""

    steps: int = 0
    tokens: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    stopped: str | None = None
    """Why it ended before its time, if it did."""
    checkpoint: Checkpoint | None = None
    """The final weights."""
    best: Checkpoint | None = None
    """The best of the evaluated ones, where the plan asks for it."""
    best_value: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step."""

    def note(self, step: int, metrics: dict[str, float]) -> None:
        self.steps, self.metrics = step, metrics
        self.tokens += int(metrics["tokens"])
        if "loss" in metrics:
            self.final_loss = metrics["loss"]
            self.first_loss = self.final_loss if self.first_loss is None else self.first_loss

    def resume_from(self, last: Checkpoint) -> None:
        """Stand where the loop stood when it made this checkpoint."""
        self.steps, self.tokens, self.metrics = last.step, last.tokens, dict(last.metrics)
        self.first_loss, self.final_loss, self.checkpoint = last.first_loss, last.final_loss, last


class StepWeights:
    """The client's weights after `step`: a sampler over them, for requests before they change."""

    def __init__(self, client: TrainingClient, service: TrainingService, step: int):
        self.client, self.service, self.step = client, service, step
        self.name = f"step-{step:06d}"
        self.changed = False
        """True once the client has moved on to the next step."""
        self._path: asyncio.Future[str] | None = None

    def __call__(self) -> Awaitable[SamplingClient]:
        """A sampler; saving is submitted now, even if the answer is awaited after later steps."""
        return self._sampler(self.save_for_sampler())

    @property
    def taken(self) -> bool:
        """Whether anybody has asked for them."""
        return self._path is not None

    def save_for_sampler(self) -> asyncio.Future[str]:
        """The path of these weights for a sampler; saved once, however many ask."""
        if self._path is None:
            if self.changed:
                raise BackendError(f"the weights of step {self.step} have changed since; take a snapshot in step_end")
            self._path = asyncio.ensure_future(self.client.save_weights_for_sampler(self.name))
        return self._path

    async def _sampler(self, path: asyncio.Future[str]) -> SamplingClient:
        # Several may wait for the one saving: shielded, one that is cancelled does not cancel it for the others.
        return await self.service.create_sampling_client(await asyncio.shield(path))


async def run_loop(
    builder: StepBuilder,
    client: TrainingClient,
    service: TrainingService,
    ctx: RunContext,
    plan: LoopPlan,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> LoopResult:
    """Train `plan.total_steps` steps, or until a hook says stop; the final weights are always kept.

    Where `ctx.resume` is set and an earlier attempt left a checkpoint, training continues from there."""
    loop = TrainingLoop(builder, client, service, ctx, plan, clock=clock)
    try:
        return await loop.run()
    except BackendUnavailable as exc:
        last = loop.manifest.last_complete()
        kept = f"the checkpoint of step {last.step} ({last.state})" if last else "nothing: no checkpoint was made yet"
        raise BackendUnavailable(
            f"{exc}; kept: {kept}. The same command continues from there when the backend is back"
        ) from exc


class TrainingLoop:
    """Trains `builder`'s batches on `client` by `plan`, with checkpoints, hooks and resume; `run_loop` drives it."""

    def __init__(
        self,
        builder: StepBuilder,
        client: TrainingClient,
        service: TrainingService,
        ctx: RunContext,
        plan: LoopPlan,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.builder, self.client, self.service, self.ctx, self.plan = builder, client, service, ctx, plan
        self.clock = clock
        path = manifest_path(ctx)
        self.manifest = CheckpointManifest.load(path) if ctx.resume else CheckpointManifest(path)
        self.result = LoopResult()
        self.weights = StepWeights(client, service, 0)

    async def run(self) -> LoopResult:
        result, hooks = self.result, self.ctx.hooks
        if hooks:
            hooks.train_start(self.plan.total_steps)
        ended = await self._resume() if self.ctx.resume else False
        try:
            for step in range(result.steps + 1, self.plan.total_steps + 1):
                if ended:
                    break
                if hooks:
                    hooks.step_start(step)
                await self._step(step)
                result.stopped = hooks.should_stop() if hooks else None
                ended = result.stopped is not None
        except Cancelled:
            await self._save_to_resume()
            raise
        if result.checkpoint is None or result.checkpoint.step != result.steps:
            await self._save()
        elif result.checkpoint.temporary and hooks:  # stopped at the very last step: now it is the final checkpoint
            hooks.checkpoint(result.steps, result.checkpoint.state)
        assert result.checkpoint is not None
        result.checkpoint = self.manifest.close(result.checkpoint, stopped=result.stopped)
        if hooks:
            await hooks.train_end(result.metrics)
        self._choose()
        return result

    def _recorded_checkpoints(self) -> list[Checkpoint]:
        """The whole checkpoints, the newest first, whose earlier steps the record has. A checkpoint brings its own step
        with it; the steps before it are only in the record, which a crash of the machine can have cut short."""
        whole = self.manifest.whole()
        if not self.ctx.hooks or not whole:
            return whole
        recorded = self.ctx.hooks.recorded_steps()
        if whole[0].step > recorded + 1:
            get_logger(__name__).warning(
                "%s: the journal lost what happened after step %d, so the checkpoint of step %d is not used",
                self.ctx.run_id,
                recorded,
                whole[0].step,
            )
            self.manifest.distrust(after=recorded + 1)
        return self.manifest.whole()

    async def _save_to_resume(self) -> None:
        """Save the step that the run is stopped at, unless it is saved already. A checkpoint that the plan does not ask
        for is temporary, so that a resumed run leaves what an undisturbed one leaves."""
        last, weights = self.manifest.last_complete(), self.weights
        # A step that broke off in its midst may have moved the weights: what they are now belongs to no step.
        if weights.changed or weights.step <= (last.step if last else 0):
            return
        planned = self.plan.saves(weights.step) or bool(self.plan.best_by and weights.taken)
        await self._save(planned=planned)

    async def _step(self, step: int) -> None:
        plan, ctx, began = self.plan, self.ctx, self.clock()
        batch = await self.builder.build_batch(step)
        refuse_unsupported(batch, self.service.capabilities)
        # Before the first call is sent: a run that is stopped from here on must not save these weights as those of the
        # step before.
        self.weights.changed = True
        adam = plan.adam(step)
        outputs, optim = await _train(self.client, batch, adam, plan.grad_accumulation)
        metrics = learning_metrics(batch, outputs, optim, adam) | speed_metrics(batch, self.clock() - began)
        # The loop's own numbers come last and win: the budget counts by `tokens`, whatever an algorithm calls so.
        metrics = {**batch.metrics, **self.builder.step_metrics(step, batch, outputs), **metrics}
        _refuse_nan(step, metrics, batch, self.manifest)
        self.weights = StepWeights(self.client, self.service, step)
        self.result.note(step, metrics)
        # Saved before the step is in the journal: the checkpoint carries the step's metrics, so that a kill between the
        # two is made good from it (docs/decisions/0006).
        if plan.saves(step):
            await self._save()
        ctx.log_store.log_metrics(metrics, step)
        if ctx.hooks:
            await ctx.hooks.step_end(step, metrics, self.weights)
        if plan.best_by and self.weights.taken and not plan.saves(step):
            await self._save()  # it may turn out to be the best

    async def _resume(self) -> bool:
        """Take up what an earlier attempt left; True when training had ended there."""
        last = await self._load_last()
        # Also without a checkpoint: the steps begin again at 1, and their rollouts are appended to the same file.
        trim(self.ctx.output_dir, self.ctx.stage, upto=last.step if last else 0)
        if last:
            if isinstance(self.builder, Resumable):
                await self.builder.restore(last.progress)
            self.result.resume_from(last)
            self.weights = StepWeights(self.client, self.service, last.step)
        if self.ctx.hooks:
            kept = KeptWeights(step=0)
            if last:
                kept = KeptWeights(
                    step=last.step,
                    state=last.state,
                    sampler=last.sampler,
                    metrics=dict(last.metrics),
                    final=last.final,
                    planned=not last.temporary,
                )
            await self.ctx.hooks.resumed(kept)
            self.result.stopped = self.ctx.hooks.should_stop() if last else None
        if last and last.final:
            self.result.stopped = last.stopped
        return last is not None and (last.final or self.result.stopped is not None)

    async def _load_last(self) -> Checkpoint | None:
        """The newest checkpoint that the backend can load, loaded."""
        for found in self._recorded_checkpoints():
            try:
                await self.client.load_state(found.state, optimizer=True)
                return found
            except BackendUnavailable:
                raise
            except BackendError as exc:
                get_logger(__name__).warning("the checkpoint of step %d cannot be loaded: %s", found.step, exc)
        return None

    async def _save(self, *, planned: bool = True) -> None:
        weights, result = self.weights, self.result
        evaluated = weights.taken  # then the sampler weights are also those of an evaluation, and stay
        self.manifest.begin(weights.step)
        failures: list[Exception] = []
        paths = await _collect([weights.client.save_state(weights.name), weights.save_for_sampler()], failures)
        if failures:
            raise failures[0]
        progress = await self.builder.progress() if isinstance(self.builder, Resumable) else {}
        if self.ctx.hooks:
            self.ctx.hooks.flush()  # a checkpoint must not outlive the record of the steps before it
        result.checkpoint = self.manifest.complete(
            Checkpoint(
                step=weights.step,
                state=paths[0],
                sampler=paths[1],
                metrics=result.metrics,
                tokens=result.tokens,
                first_loss=result.first_loss,
                final_loss=result.final_loss,
                progress=progress,
                temporary=[] if planned else paths[:1] if evaluated else paths,
            )
        )
        if self.ctx.hooks:
            self.ctx.hooks.checkpoint(weights.step, paths[0], planned=planned)
        # The manifest first, the files after it: a kill in between leaves files that nothing names, not an entry
        # without its files.
        for path in self.manifest.drop_temporary(before=weights.step):
            await self._delete(path)

    async def _delete(self, path: str) -> None:
        """Delete weights of this run that nothing refers to any more."""
        try:
            if not Path(path).is_relative_to(self.manifest.run_dir):
                await discard_weights(self.service, path)
            elif Path(path).is_dir():
                shutil.rmtree(path)
            else:
                Path(path).unlink(missing_ok=True)
        except (OSError, BackendError) as exc:  # what is left takes up space, no more
            get_logger(__name__).warning("could not delete the weights at %s: %s", path, exc)

    def _choose(self) -> None:
        """Of the evaluated checkpoints, the best one by the chosen metric."""
        plan = self.plan
        found = self.ctx.hooks.best(plan.best_by, plan.best_mode) if plan.best_by and self.ctx.hooks else None
        if found:
            step, value = found
            self.result.best = self.manifest.of_step(step)
            self.result.best_value = value


def refuse_unsupported(batch: TrainingBatch, capabilities: Capabilities) -> None:
    """Refuse a loss that the backend lacks, saying what would help."""
    if isinstance(batch.loss_fn, str):
        if batch.loss_fn not in capabilities.losses:
            raise BackendError(
                not_known(batch.loss_fn, "loss of this backend", capabilities.losses)
                + "; use one of these, or another backend"
            )
    elif not capabilities.custom_loss:
        raise BackendError(
            "this backend cannot run a custom loss here; custom losses need torch (pip install 'evsys-sdk[local]'), "
            f"or use a loss it has: {', '.join(sorted(capabilities.losses))}"
        )


async def _train(
    client: TrainingClient, batch: TrainingBatch, adam: AdamParams, pieces: int
) -> tuple[list[ForwardBackwardOutput], OptimStepOutput]:
    """One optimiser step. A batch without data moves nothing."""
    if not batch.data:
        return [], OptimStepOutput()
    together = batch.keep_together
    # Rounded up to whole groups: no call gets one half of a pair, and there are at most `pieces` calls.
    size = -(-len(batch.data) // (pieces * together)) * together
    parts = [batch.data[begin : begin + size] for begin in range(0, len(batch.data), size)]
    loss = batch.loss_fn
    # All calls are submitted before the first answer is awaited: the backend works on them without a pause.
    calls = [
        client.forward_backward(part, loss, batch.loss_fn_config)
        if isinstance(loss, str)
        else client.forward_backward_custom(part, loss)
        for part in parts
    ]
    optim = client.optim_step(adam)
    failures: list[Exception] = []
    outputs = await _collect(calls, failures)
    steps = await _collect([optim], failures)
    if failures:
        raise failures[0]
    return outputs, steps[0]


async def _collect[T](calls: list[Awaitable[T]], failures: list[Exception]) -> list[T]:
    """Answers of all calls; none is left unheard because one before it failed."""
    answers = []
    for call in calls:
        try:
            answers.append(await call)
        except Exception as exc:
            failures.append(exc)
    return answers


def _refuse_nan(step: int, metrics: dict[str, float], batch: TrainingBatch, manifest: CheckpointManifest) -> None:
    bad = [key for key in ("loss:sum", "grad_norm") if not math.isfinite(metrics.get(key, 0.0))]
    if not bad:
        return
    # Weights that gave a finite loss are good. A loss that is not finite may be the fault of the step before.
    manifest.distrust(after=step - 2 if bad[0] == "loss:sum" else step - 1)
    last = manifest.last_complete()
    raise BackendError(
        f"step {step}: {bad[0]} is {metrics[bad[0]]}: these rows or the step before spoilt it; rows of this batch: "
        f"{', '.join(batch.row_ids) or 'not known'}; last good checkpoint: {last.state if last else 'none'}; "
        "look at these rows, or lower learning_rate"
    )
