"""What algorithms share that learn from what the model itself does.

In: rows as prompts, and the run's rollout engine. Out: per step the rollouts of recent weights that may be trained on,
and numbers about them. With `async_steps: n` the rollouts of a step are made by the weights of n steps before, while
those steps train; importance sampling makes up for the difference.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from dataclasses import replace
from typing import Any

from pydantic import Field

from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams
from evsys_sdk.errors import BackendError
from evsys_sdk.protocols import Rollout, RolloutEngine, RunContext
from evsys_sdk.surface import SamplingClient, SamplingParams, TrainingService, derive_seed
from evsys_sdk.training.batch import RowOrder
from evsys_sdk.training.prompts import Prompt
from evsys_sdk.training.rollout_data import Gated, Group, gate, rollout_metrics
from evsys_sdk.training.rollout_log import log_rollouts

GIVE_UP_AFTER = 3
"""Steps in a row without one usable rollout: then something is broken, and going on would only look like training."""


class OnPolicyParams(LoopParams):
    """Settings of every algorithm that learns from rollouts. `batch_size` counts tasks."""

    num_samples: int = Field(default=8, ge=1)
    """Rollouts per task and step."""
    max_tokens: int = Field(default=256, ge=1)
    """Tokens per answer."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the rollouts. Logprobs are the model's own, so anything but 1 makes the data slightly off-policy."""
    async_steps: int = Field(default=0, ge=0)
    """How many steps old the weights may be that make the rollouts; above 0, rolling out and training overlap."""
    log_rollouts: int = Field(default=8, ge=0)
    """Rollouts per step that are written to logs/training/rollouts.jsonl."""


class OnPolicyAlgorithm(BaseAlgorithm):
    """Rolls the model out on the rows of each step; a subclass says what is learnt from that."""

    Config = OnPolicyParams
    cfg: OnPolicyParams
    needs_reward = False
    """Whether a rollout without a reward is of no use."""

    def __init__(self, **params: Any):
        super().__init__(**params)
        self.ahead: dict[int, asyncio.Task[list[Group]]] = {}
        """Rollouts under way, by the step that will learn from them; the event loop's end stops those left over."""
        self.weights_of: dict[int, int] = {}
        """Step -> after which step the weights were saved that roll out for it."""
        self.empty_steps = 0
        self.totals = {"rollouts": 0.0, "rollouts_dropped": 0.0, "steps_skipped": 0.0}
        self.rewards: list[float] = []

    @abstractmethod
    def read_rows(self, rows: Any) -> list[Prompt]:
        """The training rows as prompts."""

    async def setup(self, ctx: RunContext, backend: TrainingService) -> None:
        self.engine = _engine_of(ctx)
        self.prompts = self.read_rows(ctx.extras.get("train_rows"))
        size = self.cfg.batch_size * self.cfg.grad_accumulation
        self.order = RowOrder(len(self.prompts), batch_size=size, seed=ctx.seed)
        self.last_step = self._plan(ctx).total_steps
        self._saved: tuple[int, str] | None = None

    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def prompts_of(self, step: int) -> list[Prompt]:
        return [self.prompts[index] for index in self.order.indices(step)]

    async def weights_before(self, step: int) -> str:
        """Where a sampler finds the weights that `step` is about to change; to be asked for in its `build_batch`."""
        if self._saved is None or self._saved[0] != step:
            self._saved = (step, await self.client.save_weights_for_sampler(f"rollout-{step - 1:06d}"))
        return self._saved[1]

    async def sampler_before(self, step: int) -> SamplingClient:
        return await self.service.create_sampling_client(await self.weights_before(step))

    async def roll_out(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The rollouts `step` may learn from, task by task, and what they were like."""
        due = [s for s in range(step, min(step + self.cfg.async_steps, self.last_step) + 1) if s not in self.ahead]
        if due:
            sampler = await self.sampler_before(step)
            for each in due:
                self.weights_of[each] = step - 1
                self.ahead[each] = asyncio.create_task(self._roll_out(each, sampler))
        groups = await self.ahead.pop(step)
        gated = gate(groups, rewards=self.needs_reward)
        metrics = rollout_metrics(groups, gated) | {"rollout_lag": step - 1 - self.weights_of.pop(step)}
        self._note(step, groups, gated, metrics)
        return gated.groups, metrics

    async def _roll_out(self, step: int, sampler: SamplingClient) -> list[Group]:
        sampling = SamplingParams(
            max_tokens=self.cfg.max_tokens,
            temperature=self.cfg.temperature,
            seed=derive_seed(self.ctx.seed, "rollout", self.ctx.stage, step),
        )
        prompts = self.prompts_of(step)
        groups = await self.engine.roll_out(
            [prompt.task for prompt in prompts],
            sampler=sampler,
            renderer=self.renderer,
            sampling=sampling,
            num_samples=self.cfg.num_samples,
        )
        return [
            group if prompt.judged else [replace(rollout, reward=None) for rollout in group]
            for group, prompt in zip(groups, prompts, strict=True)
        ]

    def _note(self, step: int, groups: list[Group], gated: Gated, metrics: dict[str, float]) -> None:
        every = [rollout for group in groups for rollout in group]
        # One of each task before the second of any: a small number of lines shows many tasks.
        mixed = sorted(every, key=lambda rollout: int(rollout.metadata.get("sample", 0)))
        log_rollouts(self.ctx.output_dir, step, mixed, limit=self.cfg.log_rollouts, stage=self.ctx.stage)
        for name in ("rollouts", "rollouts_dropped"):
            self.totals[name] += metrics[name]
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        self.empty_steps = 0 if gated.groups else self.empty_steps + 1
        if self.empty_steps == min(GIVE_UP_AFTER, self.last_step):
            reasons = ", ".join(f"{count} {reason}" for reason, count in gated.dropped.items())
            raise BackendError(
                f"{self.empty_steps} steps in a row had no usable rollout (step {step}: {reasons}); "
                f"first error: {gated.first_error or 'none'}"
            )

    def skipped(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a step that has nothing to learn from; it is counted."""
        self.totals["steps_skipped"] += 1
        return {**metrics, "skipped": 1.0}

    def run_metrics(self) -> dict[str, float]:
        ends = {"first_reward": self.rewards[0], "final_reward": self.rewards[-1]} if self.rewards else {}
        return self.totals | ends


def _engine_of(ctx: RunContext) -> RolloutEngine:
    if ctx.rollouts is None:
        raise BackendError("this run has no rollout engine; give one to the context (RunContext.rollouts)")
    return ctx.rollouts


def by_task(groups: list[Group], prompts: list[Prompt]) -> list[tuple[Rollout, Prompt]]:
    """Every rollout with the prompt it answers."""
    named = {prompt.task.task_id: prompt for prompt in prompts}
    return [(rollout, named[rollout.task_id]) for group in groups for rollout in group]
