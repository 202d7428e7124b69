"""What algorithms share that learn from what the model itself does.

In: rows as prompts, and the run's rollout engine. Out: per step the rollouts of recent weights that may be trained on,
and numbers about them. With `async_steps: n` the rollouts of a step are made by the weights of n steps before, while
those steps train; importance sampling makes up for the difference.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace

from pydantic import Field, model_validator

from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams
from evsys_sdk.config.base import JsonDict, tunable
from evsys_sdk.config.metadata import EnvironmentChoice
from evsys_sdk.errors import BackendError
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import AgentSpec, Rollout, Row, RunContext
from evsys_sdk.training.batch import RowOrder
from evsys_sdk.training.prompts import Prompt
from evsys_sdk.training.rollout_data import Gated, Group, gate, log_rollouts, rollout_metrics, with_failing_reward
from evsys_sdk.training_api import SamplingClient, SamplingParams, TrainingService, derive_seed, discard_weights, let_go

# Saved weights that roll out, from the step they are saved before to the last step that learns from them.
#
# In: where weights were saved, and which steps they are to roll out for. Out: samplers over them. What no step needs
# any more is let go: the sampler at once, the files as soon as no checkpoint speaks of them. Checkpoints themselves
# are never touched: these are weights that were saved for rollouts alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSource:
    """Saved weights with a sampler over them."""

    before: int
    """The step that was about to change them."""
    path: str
    sampler: SamplingClient


@dataclass(slots=True)
class RolloutWeights:
    """Which weights roll out for which step."""

    service: TrainingService
    of_step: dict[int, RolloutSource] = field(default_factory=dict)
    """Steps that have still to learn from their rollouts."""
    noted: set[str] = field(default_factory=set)
    """Paths that the last checkpoint names: a run that resumes from it needs them again."""
    idle: set[str] = field(default_factory=set)
    """Paths that no step needs any more."""

    async def open(self, path: str, before: int, steps: list[int]) -> SamplingClient:
        """A sampler over the weights at `path`, which roll out for `steps`."""
        source = RolloutSource(before=before, path=path, sampler=await self.service.create_sampling_client(path))
        self.of_step |= dict.fromkeys(steps, source)
        return source.sampler

    async def done(self, step: int) -> int:
        """Step `step` has its rollouts; returns how many steps old the weights are that made them."""
        source = self.of_step.pop(step)
        if source not in self.of_step.values():
            let_go(source.sampler)
            self.idle.add(source.path)
            await self._sweep()
        return step - source.before

    async def _sweep(self) -> None:
        for path in sorted(self.idle - self.noted):
            self.idle.discard(path)
            await discard_weights(self.service, path)

    def progress(self) -> JsonDict:
        """Which weights are to roll out for which step to come; the checkpoint that keeps this needs their files."""
        saved = {str(step): [source.before, source.path] for step, source in self.of_step.items()}
        # Replaced, not added to: what only an earlier checkpoint named goes with the next sweep, and that checkpoint is
        # then no longer whole.
        self.noted = {source.path for source in self.of_step.values()}
        return saved

    async def restore(self, saved: JsonDict) -> None:
        """Open again the samplers that `progress` returned."""
        by_path: dict[tuple[int, str], list[int]] = {}
        for step, (before, path) in saved.items():
            by_path.setdefault((before, path), []).append(int(step))
        for (before, path), steps in by_path.items():
            await self.open(path, before, steps)
        self.noted = {path for _, path in by_path}


GIVE_UP_AFTER = 3
"""Steps in a row without one usable rollout: then something is broken, and continuing would only look like training."""


class OnPolicyParams(LoopParams):
    """Settings of every algorithm that learns from rollouts. `batch_size` counts tasks."""

    not_scored = frozenset(["n_concurrent", "max_attempts", "log_rollouts"])

    num_samples: int = Field(default=8, ge=1, json_schema_extra=tunable(2, 32, log=True))
    """Rollouts per task and step."""
    max_tokens: int = Field(default=256, ge=1)
    """Tokens per answer."""
    temperature: float = Field(default=1.0, gt=0, json_schema_extra=tunable(0.5, 1.5))
    """Of the rollouts. Logprobs are the model's own, so anything but 1 makes the data slightly off-policy."""
    async_steps: int = Field(default=0, ge=0, json_schema_extra=tunable(0, 4))
    """How many steps old the weights may be that make the rollouts; above 0, rolling out and training overlap."""
    agent_import_path: str | None = None
    """The agent that the model works in: a registered name, or where a harbor BaseAgent is (my_project.agents.ToolUse).
    Without one it answers once."""
    agent_params: JsonDict = Field(default_factory=dict)
    """What the agent is made with."""
    environment: EnvironmentChoice | None = None
    """Where tasks that need an environment find it: `sandbox` (this machine's, the default), `docker` or another of
    harbor's, or where a class of yours is; with settings as `{kind: docker, params: {...}}`."""
    n_concurrent: int | None = Field(default=None, ge=1)
    """Rollouts under way at a time; by default they share the run's 64 places with its evaluations."""
    max_attempts: int | None = Field(default=None, ge=1)
    """How often a call to the model that the machine broke is made, the first time included; by default 3."""
    log_rollouts: int = Field(default=8, ge=0)
    """Rollouts per step that are written to logs/training/rollouts.jsonl."""

    @model_validator(mode="after")
    def _params_of_an_agent(self) -> OnPolicyParams:
        if self.agent_params and self.agent_import_path is None:
            raise ValueError("agent_params are those of an agent: set agent_import_path too")
        return self


class OnPolicyAlgorithm(BaseAlgorithm):
    """Rolls the model out on the rows of each step; a subclass says what is learnt from that."""

    Config = OnPolicyParams
    cfg: OnPolicyParams
    needs_reward = False
    """Whether a rollout without a reward is of no use."""

    def __init__(self, **params: object):
        super().__init__(**params)
        self.ahead: dict[int, asyncio.Task[list[Group]]] = {}
        """Rollouts under way, by the step that will learn from them; the event loop's end stops those left over."""
        self.empty_steps = 0
        self.warned = False
        self.totals = {"rollouts": 0.0, "rollouts_dropped": 0.0, "steps_skipped": 0.0}
        self.rewards: list[float] = []

    @abstractmethod
    def read_rows(self, rows: object) -> list[Prompt]:
        """The training rows as prompts."""

    def usable(self, prompts: list[Prompt]) -> list[Prompt]:
        """Of the training rows, those that this model can be trained on; what is left out must be said."""
        return prompts

    def check_rows(self, rows: list[Row]) -> None:
        self.read_rows(rows)

    async def setup(self, ctx: RunContext, backend: TrainingService) -> None:
        if ctx.rollouts is None:
            raise BackendError("this run has no rollout engine; give one to the context (RunContext.rollouts)")
        self.engine = ctx.rollouts
        limits = {"concurrency": self.cfg.n_concurrent, "max_attempts": self.cfg.max_attempts}
        given = {name: value for name, value in limits.items() if value is not None}
        if given:
            if not hasattr(self.engine, "limited"):
                raise BackendError(f"{self.name}: this rollout engine takes no {' and no '.join(given)}")
            self.engine = self.engine.limited(**given)
        if self.cfg.environment is not None:
            if not hasattr(self.engine, "in_environment"):
                raise BackendError("this rollout engine has one environment; remove `environment` from the params")
            self.engine = self.engine.in_environment(self.cfg.environment.spec)
        self.prompts = self.usable(self.read_rows(ctx.extras.get("train_rows")))
        size = self.cfg.batch_size * self.cfg.grad_accumulation
        self.order = RowOrder(len(self.prompts), batch_size=size, seed=ctx.seed)
        self.last_step = self._plan(ctx).total_steps
        self.weights = RolloutWeights(backend)
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

    async def start_weights(self, name: str) -> str:
        """Where a sampler finds the weights that training starts with; to be asked for in `setup`. They stay."""
        return await self.client.save_weights_for_sampler(name)

    async def roll_out(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The rollouts `step` may learn from, task by task, and what they were like."""
        due = [s for s in range(step, min(step + self.cfg.async_steps, self.last_step) + 1) if s not in self.ahead]
        if due:
            sampler = await self.weights.open(await self.weights_before(step), step, due)
            self.ahead |= {ahead: asyncio.create_task(self._roll_out(ahead, sampler)) for ahead in due}
        groups = await self.ahead.pop(step)
        lag = await self.weights.done(step)
        gated = gate(groups, rewards=self.needs_reward)
        metrics = rollout_metrics(groups, gated) | {"rollout_lag": lag}
        self._note(step, groups, gated, metrics)
        return gated.groups, metrics

    async def progress(self) -> JsonDict:
        """Totals so far, and the weights of the rollouts under way, so that a resumed run makes the same ones again."""
        so_far = {"totals": dict(self.totals), "rewards": list(self.rewards), "empty_steps": self.empty_steps}
        return so_far | {"rollout_weights": self.weights.progress()}

    async def restore(self, progress: JsonDict) -> None:
        self.totals, self.rewards = dict(progress["totals"]), list(progress["rewards"])
        self.empty_steps = progress["empty_steps"]
        await self.weights.restore(progress["rollout_weights"])
        for step, source in self.weights.of_step.items():
            self.ahead[step] = asyncio.create_task(self._roll_out(step, source.sampler))

    async def _roll_out(self, step: int, sampler: SamplingClient) -> list[Group]:
        sampling = SamplingParams(
            max_tokens=self.cfg.max_tokens,
            temperature=self.cfg.temperature,
            # From the step alone: a resumed run draws what the undisturbed one would have drawn.
            seed=derive_seed(self.ctx.seed, "rollout", self.ctx.stage, step),
        )
        prompts = self.prompts_of(step)
        path, params = self.cfg.agent_import_path, self.cfg.agent_params
        groups = await self.engine.roll_out(
            [prompt.task for prompt in prompts],
            sampler=sampler,
            renderer=self.renderer,
            sampling=sampling,
            num_samples=self.cfg.num_samples,
            agent=None if path is None else AgentSpec(kind=path, params=params),
        )
        return [
            [
                with_failing_reward(rollout, prompt.failing_reward) if prompt.judged else replace(rollout, reward=None)
                for rollout in group
            ]
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
        self._warn_of_failures(step, gated)
        self.empty_steps = 0 if gated.with_tokens else self.empty_steps + 1
        # A shorter run would otherwise complete without having learnt anything.
        if self.empty_steps == min(GIVE_UP_AFTER, self.last_step):
            silent = Counter("no_tokens" if one.status == "ok" else one.status for g in gated.groups for one in g)
            reasons = ", ".join(f"{count} {reason}" for reason, count in (gated.dropped + silent).items())
            raise BackendError(
                f"{self.empty_steps} steps in a row had no usable rollout (step {step}: {reasons}); "
                f"first error: {gated.first_error or 'none'}"
            )

    def _warn_of_failures(self, step: int, gated: Gated) -> None:
        """Say it once when every rollout of a step failed: the model may be bad at its task, or the agent broken."""
        if self.warned or not gated.groups or gated.failures.total() < sum(map(len, gated.groups)):
            return
        self.warned = True
        reasons = ", ".join(f"{count} {status}" for status, count in gated.failures.items())
        get_logger(__name__).warning(
            "%s, step %d: every rollout failed (%s); they count as failures. Check the agent if this continues. "
            "First error: %s",
            self.ctx.run_id,
            step,
            reasons,
            gated.first_error,
        )

    def skipped_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a step that has nothing to learn from; it is counted."""
        self.totals["steps_skipped"] += 1
        return {**metrics, "skipped": 1.0}

    def run_metrics(self) -> dict[str, float]:
        ends = {"first_reward": self.rewards[0], "final_reward": self.rewards[-1]} if self.rewards else {}
        return self.totals | ends


def by_task(groups: list[Group], prompts: list[Prompt]) -> list[tuple[Rollout, Prompt]]:
    """Every rollout with the prompt it answers."""
    named = {prompt.task.task_id: prompt for prompt in prompts}
    return [(rollout, named[rollout.task_id]) for group in groups for rollout in group]
