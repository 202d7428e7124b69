"""The plumbing that algorithms share, so that a new one is a `build_batch`.

In: a `RunContext`. Out: a `RunResult`, with the loop, the checkpoints, the hooks and the schedule taken care of.
Nothing here is required: any class with `train(ctx)` is an algorithm.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from evsys_sdk.concurrency import run_async
from evsys_sdk.config.base import JsonDict
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import BackendError
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import Row, RunContext, RunResult
from evsys_sdk.training.batch import TrainingBatch
from evsys_sdk.training.loop import LoopResult, run_loop
from evsys_sdk.training.plan import LoopParams as LoopParams
from evsys_sdk.training.plan import LoopPlan
from evsys_sdk.training.rendering import ChatRenderer, renderer_of
from evsys_sdk.training_api import Capabilities, ForwardBackwardOutput, TrainingClient, TrainingService


class BaseAlgorithm(ABC):
    """Owns client, loop and checkpoints; a subclass says what each step learns from."""

    name: ClassVar[str] = ""
    Config: ClassVar[type[LoopParams]] = LoopParams
    only_on: ClassVar[str | None] = None
    """The one kind of backend it runs on; None: any."""
    supports_resume: ClassVar[bool] = True
    """Whether an interrupted run resumes from its checkpoint; False: it starts again."""
    instead: ClassVar[str] = ""
    """The algorithm that does the same on the others."""
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    ctx: RunContext
    service: TrainingService
    client: TrainingClient
    renderer: ChatRenderer

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)
        self.notes: JsonDict = {}
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

    async def progress(self) -> JsonDict:
        """What this algorithm carries from step to step beside the weights, as JSON data; kept with checkpoints."""
        return {}

    async def restore(self, progress: JsonDict) -> None:
        """Restore what `progress` returned when the checkpoint was made that the run resumes from."""
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
        return self._to_run_result(ctx, result)

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
        return cfg.plan(planned, at_most=ctx.max_steps)

    def _to_run_result(self, ctx: RunContext, result: LoopResult) -> RunResult:
        metrics: dict[str, float] = {"steps": result.steps, "tokens": result.tokens, **self.run_metrics()}
        if result.first_loss is not None and result.final_loss is not None:
            metrics |= {"first_loss": result.first_loss, "final_loss": result.final_loss}
        extras = dict(self.notes)
        kept = result.best or result.checkpoint
        if self.cfg.best_by:
            extras["best_checkpoint"] = self._about_best(result)
        artifacts = {"final_checkpoint": kept.state, "final_sampler": kept.sampler} if kept else {}
        for name, path in artifacts.items():
            ctx.log_store.log_artifact(name, path)
        return RunResult(
            run_id=ctx.run_id,
            status="completed",
            metrics=metrics,
            artifacts=artifacts,
            extras=extras,
            stopped_early=result.stopped or None,
        )

    def _about_best(self, result: LoopResult) -> JsonObject:
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
            "with the calls of evsys_sdk.training_api.TrainingService; the mock backend has one"
        )
    return service
