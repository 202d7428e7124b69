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
from typing import Any, Literal, Protocol, runtime_checkable

from evsys_sdk.errors import BackendError, BackendUnavailable, Cancelled, not_known
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import KeptWeights, RunContext
from evsys_sdk.surface import (
    AdamParams,
    Capabilities,
    Datum,
    ForwardBackwardOutput,
    OptimStepOutput,
    SamplingClient,
    TrainingClient,
    TrainingService,
    discard_weights,
)
from evsys_sdk.training.batch import TrainingBatch
from evsys_sdk.training.checkpoints import Checkpoint, Manifest, manifest_path
from evsys_sdk.training.rollout_log import trim
from evsys_sdk.training.step_metrics import learning_metrics, speed_metrics


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """How many steps, how large, and what is kept."""

    total_steps: int
    learning_rate: Callable[[int], float]
    """Step (1-based) -> rate."""
    grad_accumulation: int = 1
    """Forward/backward calls that one batch is split into."""
    max_grad_norm: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    save_every: int | None = None
    save_at: frozenset[int] = frozenset()
    """Steps to keep the weights of, beside those."""
    best_by: str | None = None
    """The in-loop score that says which evaluated checkpoint is the best one."""
    best_mode: Literal["max", "min"] = "max"

    def adam(self, step: int) -> AdamParams:
        """The optimiser's settings of a step."""
        return AdamParams(
            learning_rate=self.learning_rate(step),
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.max_grad_norm,
        )

    def saves(self, step: int) -> bool:
        return step in self.save_at or bool(self.save_every and step % self.save_every == 0)


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

    def take_up(self, last: Checkpoint) -> None:
        """Stand where the loop stood when it made this checkpoint."""
        self.steps, self.tokens, self.metrics = last.step, last.tokens, dict(last.metrics)
        self.first_loss, self.final_loss, self.checkpoint = last.first_loss, last.final_loss, last


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

    Where `ctx.resume` is set and an earlier attempt left a checkpoint, training goes on from there."""
    loop = TrainingLoop(builder, client, service, ctx, plan, clock=clock)
    try:
        return await loop.run()
    except BackendUnavailable as exc:
        last = loop.manifest.last_complete()
        kept = f"the checkpoint of step {last.step} ({last.state})" if last else "nothing: no checkpoint was made yet"
        raise BackendUnavailable(
            f"{exc}; kept: {kept}. The same command goes on from there when the backend is back"
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
        self.manifest = Manifest.load(path) if ctx.resume else Manifest(path)
        self.result = LoopResult()
        self.weights = Weights(client, service, 0)

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

    def _recorded(self) -> list[Checkpoint]:
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
        if weights.changed or weights.step <= (last.step if last else 0):
            return
        planned = self.plan.saves(weights.step) or bool(self.plan.best_by and weights.taken)
        await self._save(planned=planned)

    async def _step(self, step: int) -> None:
        plan, ctx, began = self.plan, self.ctx, self.clock()
        batch = await self.builder.build_batch(step)
        refuse_unsupported(batch, self.service.capabilities)
        self.weights.changed = True
        adam = plan.adam(step)
        outputs, optim = await _train(self.client, batch, adam, plan.grad_accumulation)
        metrics = learning_metrics(batch, outputs, optim, adam) | speed_metrics(batch, self.clock() - began)
        metrics = {**batch.metrics, **self.builder.step_metrics(step, batch, outputs), **metrics}
        _refuse_nan(step, metrics, batch, self.manifest)
        self.weights = Weights(self.client, self.service, step)
        self.result.note(step, metrics)
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
        trim(self.ctx.output_dir, self.ctx.stage, upto=last.step if last else 0)
        if last:
            if isinstance(self.builder, Resumable):
                await self.builder.restore(last.progress)
            self.result.take_up(last)
            self.weights = Weights(self.client, self.service, last.step)
        if self.ctx.hooks:
            await self.ctx.hooks.resumed(_kept(last))
            self.result.stopped = self.ctx.hooks.should_stop() if last else None
        if last and last.final:
            self.result.stopped = last.stopped
        return last is not None and (last.final or self.result.stopped is not None)

    async def _load_last(self) -> Checkpoint | None:
        """The newest checkpoint that the backend can load, loaded."""
        for found in self._recorded():
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


def _kept(last: Checkpoint | None) -> KeptWeights:
    if last is None:
        return KeptWeights(step=0)
    return KeptWeights(
        step=last.step,
        state=last.state,
        sampler=last.sampler,
        metrics=dict(last.metrics),
        final=last.final,
        planned=not last.temporary,
    )


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


def _refuse_nan(step: int, metrics: dict[str, float], batch: TrainingBatch, manifest: Manifest) -> None:
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
