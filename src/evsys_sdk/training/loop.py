"""The training loop: batches in, changed weights out, the same on every backend.

In: something that builds batches, a training client, a plan. Out: a `LoopResult` and checkpoints. Each step submits its
forward/backward calls and its optimiser step before it awaits any of them, so that a remote backend never
waits for us in between.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from evsys_sdk.errors import BackendError, not_known
from evsys_sdk.protocols import RunContext
from evsys_sdk.surface import (
    AdamParams,
    Capabilities,
    Datum,
    ForwardBackwardOutput,
    OptimStepOutput,
    SamplingClient,
    TrainingClient,
    TrainingService,
)
from evsys_sdk.training.batch import TrainingBatch
from evsys_sdk.training.checkpoints import Checkpoint, Manifest, manifest_path


class StepBuilder(Protocol):
    """What should the next step learn from?"""

    async def build_batch(self, step: int) -> TrainingBatch: ...

    def step_metrics(
        self, step: int, batch: TrainingBatch, outputs: list[ForwardBackwardOutput]
    ) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """How many steps, how large, and what is kept."""

    total_steps: int
    learning_rate: Callable[[int], float]
    """Step (1-based) -> rate."""
    grad_accumulation: int = 1
    """Forward/backward calls that one batch is split into."""
    max_grad_norm: float = 0.0
    save_every: int | None = None


@dataclass(slots=True)
class LoopResult:
    """What the loop came to."""

    steps: int = 0
    tokens: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    stopped: str | None = None
    """Why it ended before its time, if it did."""
    checkpoint: Checkpoint | None = None
    """The final weights."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step."""

    def note(self, step: int, metrics: dict[str, float]) -> None:
        self.steps, self.metrics = step, metrics
        self.tokens += int(metrics["tokens"])
        if "loss" in metrics:
            self.final_loss = metrics["loss"]
            self.first_loss = self.final_loss if self.first_loss is None else self.first_loss


class Weights:
    """The client's weights after `step`: a sampler over them, for whoever asks before they change."""

    def __init__(self, client: TrainingClient, service: TrainingService, step: int):
        self.client, self.service, self.step = client, service, step
        self.name = f"step-{step:06d}"
        self.changed = False
        """True once the client has moved on to the next step."""
        self._path: asyncio.Future[str] | None = None

    def __call__(self) -> Awaitable[SamplingClient]:
        """A sampler; saving is submitted now, even if the answer is awaited when training has gone on."""
        return self._sampler(self.save_for_sampler())

    def save_for_sampler(self) -> asyncio.Future[str]:
        """The path of these weights for a sampler; saved once, however many ask."""
        if self._path is None:
            if self.changed:
                raise BackendError(f"the weights of step {self.step} have changed since; take a snapshot in step_end")
            self._path = asyncio.ensure_future(self.client.save_weights_for_sampler(self.name))
        return self._path

    async def _sampler(self, path: asyncio.Future[str]) -> SamplingClient:
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
    """Train `plan.total_steps` steps, or until a hook says stop; the final weights are always kept."""
    manifest, result = Manifest(manifest_path(ctx)), LoopResult()
    weights = Weights(client, service, 0)
    if ctx.hooks:
        ctx.hooks.train_start(plan.total_steps)
    for step in range(1, plan.total_steps + 1):
        began = clock()
        batch = await builder.build_batch(step)
        refuse_unsupported(batch, service.capabilities)
        weights.changed = True
        adam = AdamParams(learning_rate=plan.learning_rate(step), grad_clip_norm=plan.max_grad_norm)
        outputs, optim = await _train(client, batch, adam, plan.grad_accumulation)
        metrics = _metrics(batch, outputs, optim, adam) | _speed(batch, clock() - began)
        metrics = {**builder.step_metrics(step, batch, outputs), **metrics}
        _refuse_nan(step, metrics, batch, manifest)
        weights = Weights(client, service, step)
        result.note(step, metrics)
        if plan.save_every and step % plan.save_every == 0:
            await _save(weights, manifest, result, ctx)  # first of all: logs and hooks may raise Cancelled
        ctx.log_store.log_metrics(metrics, step)
        if ctx.hooks:
            await ctx.hooks.step_end(step, metrics, weights)
            result.stopped = ctx.hooks.should_stop()
            if result.stopped:
                break
    if result.checkpoint is None or result.checkpoint.step != result.steps:
        await _save(weights, manifest, result, ctx)
    if ctx.hooks:
        await ctx.hooks.train_end(result.metrics)
    return result


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
    size = -(-len(batch.data) // (pieces * together)) * together
    parts = [batch.data[begin : begin + size] for begin in range(0, len(batch.data), size)]
    calls = [_forward_backward(client, batch, part) for part in parts]
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


def _forward_backward(
    client: TrainingClient, batch: TrainingBatch, part: list[Datum]
) -> Awaitable[ForwardBackwardOutput]:
    if isinstance(batch.loss_fn, str):
        return client.forward_backward(part, batch.loss_fn, batch.loss_fn_config)
    return client.forward_backward_custom(part, batch.loss_fn)


def _metrics(
    batch: TrainingBatch, outputs: list[ForwardBackwardOutput], optim: OptimStepOutput, adam: AdamParams
) -> dict[str, float]:
    metrics = merged([output.metrics for output in outputs]) | optim.metrics
    metrics["lr"] = adam.learning_rate
    if outputs:
        metrics["loss"] = metrics["loss:sum"] / (batch.loss_scale or _weight(batch) or len(outputs))
    return metrics


def merged(parts: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of several calls as one: names that end in `:sum` add up, the others are averaged."""
    together: dict[str, list[float]] = {}
    for part in parts:
        for key, value in part.items():
            together.setdefault(key, []).append(value)
    return {key: sum(values) if key.endswith(":sum") else sum(values) / len(values) for key, values in together.items()}


def _weight(batch: TrainingBatch) -> float:
    """What `loss:sum` is divided by to compare batches: the weight of the tokens that pull. 0 for a custom loss,
    whose scale only its author knows."""
    if not isinstance(batch.loss_fn, str):
        return 0.0
    key = "weights" if batch.loss_fn == "cross_entropy" else "advantages"
    arrays = [datum.loss_fn_inputs[key].to_numpy() for datum in batch.data]
    return float(sum(abs(array).sum() if key == "weights" else (array != 0).sum() for array in arrays))


def _speed(batch: TrainingBatch, seconds: float) -> dict[str, float]:
    tokens = sum(datum.model_input.length for datum in batch.data)
    return {"tokens": tokens, "step_seconds": seconds, "tokens_per_second": tokens / seconds if seconds else 0.0}


def _refuse_nan(step: int, metrics: dict[str, float], batch: TrainingBatch, manifest: Manifest) -> None:
    bad = [key for key in ("loss:sum", "grad_norm") if not math.isfinite(metrics.get(key, 0.0))]
    if not bad:
        return
    last = manifest.last_complete()
    raise BackendError(
        f"step {step}: {bad[0]} is {metrics[bad[0]]}, so the weights are spoilt; rows of this batch: "
        f"{', '.join(batch.row_ids) or 'not known'}; last good checkpoint: {last.state if last else 'none'}; "
        "look at these rows, or lower learning_rate"
    )


async def _save(weights: Weights, manifest: Manifest, result: LoopResult, ctx: RunContext) -> None:
    manifest.begin(weights.step)
    failures: list[Exception] = []
    paths = await _collect([weights.client.save_state(weights.name), weights.save_for_sampler()], failures)
    if failures:
        raise failures[0]
    state, sampler = paths
    result.checkpoint = manifest.complete(weights.step, state=state, sampler=sampler, metrics=result.metrics)
    if ctx.hooks:
        ctx.hooks.checkpoint(weights.step, state)
