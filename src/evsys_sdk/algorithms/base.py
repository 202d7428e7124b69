"""The plumbing that algorithms share, so that a new one is a `build_batch`.

In: a `RunContext`. Out: a `RunResult`, with the loop, the checkpoints, the hooks and the schedule taken care of.
Nothing here is required: any class with `train(ctx)` is an algorithm.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from evsys_sdk.asyncs import run_async
from evsys_sdk.config.base import Params
from evsys_sdk.errors import BackendError
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import Row, RunContext, RunResult
from evsys_sdk.score_names import names_split
from evsys_sdk.surface import Capabilities, ForwardBackwardOutput, TrainingClient, TrainingService
from evsys_sdk.training.batch import TrainingBatch
from evsys_sdk.training.loop import LoopPlan, LoopResult, run_loop
from evsys_sdk.training.render import ChatRenderer, renderer_of
from evsys_sdk.training.schedule import ScheduleName, learning_rate, warmup_length


class LoopParams(Params):
    """Settings of every algorithm that trains in steps."""

    learning_rate: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    """Of the optimiser, at its highest."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the running mean of gradients."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the running mean of squared gradients."""
    adam_eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """What AdamW adds to the root of the squares before it divides by it."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """AdamW's decoupled weight decay: each step takes learning_rate * weight_decay of every trained weight away."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the rows."""
    max_steps: int | None = Field(default=None, ge=1)
    """The number of steps, however many epochs that takes; wins over `num_epochs`."""
    batch_size: int = Field(default=8, ge=1)
    """Rows per forward/backward call."""
    grad_accumulation: int = Field(default=1, ge=1)
    """Calls per optimiser step, which so learns from batch_size * grad_accumulation rows."""
    max_grad_norm: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Gradients with a larger norm are scaled down to it; 0 turns clipping off."""
    lr_schedule: ScheduleName = "constant"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises from 0."""
    warmup_fraction: float = Field(default=0.0, ge=0, le=1)
    """Instead of `warmup_steps`: this part of all steps."""
    lora_rank: int = Field(default=8, ge=0)
    """0 trains all weights."""
    save_every: int | None = Field(default=None, ge=1)
    """Keep weights and optimiser every so many steps; an interrupted run goes on from the last ones kept."""
    save_at_fractions: list[Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=list)
    """Keep them also after these parts of all steps: 0.5 is half-way, rounded to the nearest step."""
    best_by: str | None = Field(default=None, min_length=1)
    """An in-loop score, such as `pass@1` or `val/<benchmark>/<metric>`: the run ends with the evaluated weights
    that are best by it."""
    best_mode: Literal["max", "min"] = "max"
    """Whether more or less of `best_by` is better."""

    @field_validator("best_by")
    @classmethod
    def _not_by_the_test_set(cls, metric: str | None) -> str | None:
        if metric and (names_split(metric, "test") or names_split(metric, "eval")):
            raise ValueError("weights are chosen by a validation score: val/<benchmark>/<metric>")
        return metric

    @model_validator(mode="after")
    def _one_warmup(self) -> LoopParams:
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError("warmup_steps and warmup_fraction are both set; keep one")
        return self

    def planned_steps(self, per_epoch: int | None) -> int | None:
        """Steps this recipe asks for; None when it names neither steps nor an amount of data."""
        if self.max_steps is not None:
            return self.max_steps
        return None if per_epoch is None else per_epoch * self.num_epochs


class BaseAlgorithm(ABC):
    """Owns client, loop and checkpoints; a subclass says what each step learns from."""

    name: ClassVar[str] = ""
    Config: ClassVar[type[LoopParams]] = LoopParams
    only_on: ClassVar[str | None] = None
    """The one kind of backend it runs on; None: any."""
    goes_on: ClassVar[bool] = True
    """Whether an interrupted run goes on from its checkpoint; False: it starts again."""
    instead: ClassVar[str] = ""
    """The algorithm that does the same on the others."""
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    ctx: RunContext
    service: TrainingService
    client: TrainingClient
    renderer: ChatRenderer

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)
        self.notes: dict[str, Any] = {}
        """What the record should say about this run; ends up in `RunResult.extras`."""

    @abstractmethod
    async def build_batch(self, step: int) -> TrainingBatch:
        """What step `step` (1-based) learns from."""

    async def setup(self, ctx: RunContext, backend: TrainingService) -> None:
        """Get ready: called once, after `client` and `renderer` are there and before the first batch."""
        return None

    def steps_per_epoch(self) -> int | None:
        """Steps that see all data once; None where there is no such thing and `max_steps` must say."""
        return None

    def needs(self, capabilities: Capabilities) -> str | None:
        """What the backend lacks for this recipe and what would help; None when it has all."""
        return None

    @classmethod
    def elsewhere(cls, backend_kind: str) -> str | None:
        """Why this kind of backend is the wrong one, and what to use there; None when it is a right one."""
        if cls.only_on in (None, backend_kind):
            return None
        return (
            f"{cls.name} runs on the {cls.only_on} backend only, not on {backend_kind!r}; "
            f"on {backend_kind!r} use {cls.instead}"
        )

    def check_rows(self, rows: list[Row]) -> None:
        """Raise a DataError if training could not learn from such rows; the first few are shown before anything else
        is done."""
        return None

    def step_metrics(self, step: int, batch: TrainingBatch, outputs: list[ForwardBackwardOutput]) -> dict[str, float]:
        """What to log with a step, beside what the loop itself measures."""
        return batch.metrics

    async def progress(self) -> dict[str, Any]:
        """What this algorithm carries from step to step beside the weights, as JSON data; kept with checkpoints."""
        return {}

    async def restore(self, progress: dict[str, Any]) -> None:
        """Take up what `progress` said when the checkpoint was made that the run now goes on from."""
        return None

    def run_metrics(self) -> dict[str, float]:
        """What to say of the run as a whole, beside loss, steps and tokens."""
        return {}

    def train(self, ctx: RunContext) -> RunResult:
        """Run the recipe from start to end."""
        return run_async(self._train(ctx))

    async def _train(self, ctx: RunContext) -> RunResult:
        self.ctx, self.service = ctx, service_of(ctx)
        wrong = self.elsewhere(backend_kind(ctx))
        if wrong:
            raise BackendError(wrong)
        lack = self.needs(self.service.capabilities)
        if lack:
            raise BackendError(f"{self.name or type(self).__name__}: {lack}")
        self.renderer = renderer_of(ctx, self.service)
        self.client = await self.service.create_training_client(rank=self.rank_of(ctx), seed=ctx.seed)
        if ctx.start_from:
            await self.client.load_state(ctx.start_from, optimizer=False)
        await self.setup(ctx, self.service)
        result = await run_loop(self, self.client, self.service, ctx, self._plan(ctx), clock=self.clock)
        return self._finished(ctx, result)

    def rank_of(self, ctx: RunContext) -> int:
        """`lora_rank`; where it is not set, that of the saved weights to start from, if the backend can tell."""
        saved_rank = getattr(self.service, "saved_rank", None)
        if not ctx.start_from or saved_rank is None or "lora_rank" in self.cfg.model_fields_set:
            return self.cfg.lora_rank
        rank = int(saved_rank(ctx.start_from))
        if rank != self.cfg.lora_rank:
            self.notes["lora_rank"] = rank
            get_logger(__name__).info("lora_rank is %d, as in %s", rank, ctx.start_from)
        return rank

    def _plan(self, ctx: RunContext) -> LoopPlan:
        cfg = self.cfg
        planned = cfg.planned_steps(self.steps_per_epoch())
        if planned is None:
            raise BackendError(f"{self.name or type(self).__name__}: set max_steps, this algorithm has no epochs")
        # The schedule is the recipe's, so that a run cut short by --steps is the beginning of the full one.
        peak, shape = cfg.learning_rate, cfg.lr_schedule
        warmup = warmup_length(planned, warmup_steps=cfg.warmup_steps, warmup_fraction=cfg.warmup_fraction)
        total = planned if ctx.max_steps is None else min(planned, ctx.max_steps)
        return LoopPlan(
            total_steps=total,
            learning_rate=lambda s: learning_rate(s, peak=peak, total_steps=planned, shape=shape, warmup=warmup),
            grad_accumulation=cfg.grad_accumulation,
            max_grad_norm=cfg.max_grad_norm,
            beta1=cfg.adam_beta1,
            beta2=cfg.adam_beta2,
            eps=cfg.adam_eps,
            weight_decay=cfg.weight_decay,
            save_every=cfg.save_every,
            save_at=frozenset(max(1, round(part * planned)) for part in cfg.save_at_fractions),
            best_by=cfg.best_by,
            best_mode=cfg.best_mode,
        )

    def _finished(self, ctx: RunContext, result: LoopResult) -> RunResult:
        metrics: dict[str, float] = {"steps": result.steps, "tokens": result.tokens, **self.run_metrics()}
        if result.first_loss is not None and result.final_loss is not None:
            metrics |= {"first_loss": result.first_loss, "final_loss": result.final_loss}
        extras = {**self.notes, **({"stopped_early": result.stopped} if result.stopped else {})}
        kept = result.best or result.checkpoint
        if self.cfg.best_by:
            extras["best_checkpoint"] = self._about_best(result)
        artifacts = {"final_checkpoint": kept.state, "final_sampler": kept.sampler} if kept else {}
        for name, path in artifacts.items():
            ctx.log_store.log_artifact(name, path)
        return RunResult(run_id=ctx.run_id, status="completed", metrics=metrics, artifacts=artifacts, extras=extras)

    def _about_best(self, result: LoopResult) -> dict[str, Any]:
        """Which weights the run ends with, and why."""
        if result.best is None:
            get_logger(__name__).warning("best_by %s was never scored; the last weights are kept", self.cfg.best_by)
            return {"step": result.steps, "by": self.cfg.best_by, "value": None}
        return {"step": result.best.step, "by": self.cfg.best_by, "value": result.best_value}


def backend_kind(ctx: RunContext) -> str:
    """What the config calls the backend."""
    return str(ctx.extras.get("backend_kind") or getattr(ctx.backend, "name", type(ctx.backend).__name__))


def service_of(ctx: RunContext) -> TrainingService:
    """The training service that the backend handed over."""
    service = ctx.extras.get("backend_handles", {}).get("service")
    if service is None:
        raise BackendError(
            f"backend {backend_kind(ctx)!r} offers no training service: its prepare() must return {{'service': ...}} "
            "with the calls of evsys_sdk.surface.TrainingService; the mock backend has one"
        )
    return service
