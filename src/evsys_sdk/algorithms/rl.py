"""Reinforcement learning from verifiable rewards: do more of what was better than the group's average.

In: tasks. Out: batches with a policy loss on every token the model wrote. Each step rolls the current weights out
several times per task, a verifier rewards each rollout, and a rollout's advantage is how it compares with its group.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from evsys_sdk.algorithms.on_policy import OnPolicyAlgorithm, OnPolicyParams
from evsys_sdk.config.base import tunable
from evsys_sdk.errors import BackendError
from evsys_sdk.protocols import RunContext, Turn
from evsys_sdk.registry import register_algorithm
from evsys_sdk.training.advantages import (
    ADVANTAGES,
    USUAL_NORMALISATION,
    AdvantageName,
    Normalisation,
    differences,
    is_constant,
    kl_penalty,
    mean_of,
    reward_alone,
    token_weights,
)
from evsys_sdk.training.batch import TrainingBatch
from evsys_sdk.training.losses import PolicyLoss, settings_of
from evsys_sdk.training.prompts import Prompt, read_tasks
from evsys_sdk.training.rollout_data import Group, length_of, policy_datum, rewards_of, sampling_drift, written
from evsys_sdk.training.teachers import logprobs_of
from evsys_sdk.training_api import Capabilities, Datum, ForwardBackwardOutput, SamplingClient, TrainingService


@register_algorithm("rl")
class RL(OnPolicyAlgorithm):
    """Policy gradient on groups of rollouts with verified rewards."""

    class Config(OnPolicyParams):
        loss: PolicyLoss = Field(default="importance_sampling", json_schema_extra=tunable())
        """The policy loss."""
        loss_fn_config: dict[str, float] | None = None
        """Settings of the loss: `clip_low_threshold` and `clip_high_threshold` of ppo and cispo, bounds of the
        ratio."""
        advantage: AdvantageName = Field(default="centred", json_schema_extra=tunable())
        """How a rollout compares with its group: reward minus mean; grpo also divides by the deviation; rloo compares
        with the others only; dr_grpo is centred with `loss_normalisation: constant`."""
        loss_normalisation: Normalisation | None = Field(default=None, json_schema_extra=tunable())
        """What counts the same: every token, every rollout (`sequence`), or `constant`. By default as in the
        advantage's own paper: sequence for grpo, constant for dr_grpo, token otherwise."""
        kl_coef: float = Field(default=0.0, ge=0, json_schema_extra=tunable(1e-4, 1.0, log=True))
        """Price of drifting from the weights that this run, or stage, started with."""
        drop_constant_reward: bool = Field(default=True, json_schema_extra=tunable())
        """Leave out groups whose rewards are all the same."""

        @model_validator(mode="after")
        def _groups_can_differ(self) -> RL.Config:
            if self.num_samples == 1 and self.drop_constant_reward:
                raise ValueError(
                    "num_samples: 1 makes every group constant, and drop_constant_reward drops those; "
                    "raise num_samples, or set drop_constant_reward: false"
                )
            if self.num_samples == 1 and "advantage" in self.model_fields_set:
                raise ValueError("advantage compares the rollouts of a group; num_samples: 1 has none to compare")
            return self

        @model_validator(mode="after")
        def _loss_takes_these(self) -> RL.Config:
            try:
                settings_of(self.loss, self.loss_fn_config)
            except BackendError as exc:
                raise ValueError(str(exc)) from exc
            return self

    cfg: Config
    needs_reward = True

    def needs(self, capabilities: Capabilities) -> str | None:
        if self.cfg.loss not in capabilities.losses:
            return (
                f"this backend has no {self.cfg.loss} loss; set loss to one of {', '.join(sorted(capabilities.losses))}"
            )
        if self.cfg.kl_coef and not capabilities.prompt_logprobs:
            return "kl_coef needs logprobs of given tokens, which this backend cannot tell; set kl_coef: 0"
        return None

    def read_rows(self, rows: object) -> list[Prompt]:
        return read_tasks(rows, self.name)

    async def setup(self, ctx: RunContext, backend: TrainingService) -> None:
        await super().setup(ctx, backend)
        self.reference: SamplingClient | None = None
        if self.cfg.kl_coef:
            self.reference = await backend.create_sampling_client(await self.start_weights("reference"))
        self.advantage = reward_alone if self.cfg.num_samples == 1 else ADVANTAGES[self.cfg.advantage]

    async def build_batch(self, step: int) -> TrainingBatch:
        groups, metrics = await self.roll_out(step)
        varied = [group for group in groups if not is_constant(rewards_of(group))]
        if groups:
            metrics["frac_constant_groups"] = 1 - len(varied) / len(groups)
        kept = varied if self.cfg.drop_constant_reward else groups
        chosen = [group for group in kept if any(map(written, group))]
        names = [prompt.task.task_id for prompt in self.prompts_of(step)]
        if not chosen:
            return TrainingBatch([], metrics=self.skipped_metrics(metrics), row_ids=names)
        # All that were asked for, also those of dropped groups: what `constant` makes a token weigh does not depend on
        # what became of other rollouts.
        data, about_kl = await self.policy_data(chosen, asked=len(names) * self.cfg.num_samples)
        return TrainingBatch(
            data,
            loss_fn=self.cfg.loss,
            loss_fn_config=self.cfg.loss_fn_config,
            metrics=metrics | about_kl,
            rollouts=[rollout for group in groups for rollout in group],
            row_ids=names,
            loss_scale=1.0,
        )

    async def policy_data(self, groups: list[Group], *, asked: int) -> tuple[list[Datum], dict[str, float]]:
        """Every turn of every rollout, each written token with the advantage of its rollout. A rollout without tokens
        takes part in the comparison and in nothing else."""
        compared = [pair for group in groups for pair in zip(group, self.advantage(rewards_of(group)), strict=True)]
        speaking = [(rollout, advantage) for rollout, advantage in compared if written(rollout)]
        lengths = [length_of(rollout) for rollout, _ in speaking]
        how = self.cfg.loss_normalisation or USUAL_NORMALISATION[self.cfg.advantage]
        weights = token_weights(lengths, how, asked=asked, max_tokens=self.cfg.max_tokens)
        turns = [
            (turn, advantage, weight)
            for (rollout, advantage), weight in zip(speaking, weights, strict=True)
            for turn in written(rollout)
        ]
        penalties, metrics = await self.penalties([turn for turn, _, _ in turns])
        data = [
            policy_datum(turn, [weight * (advantage + penalty) for penalty in penalty_of_turn])
            for (turn, advantage, weight), penalty_of_turn in zip(turns, penalties, strict=True)
        ]
        return data, metrics

    async def penalties(self, turns: list[Turn]) -> tuple[list[list[float]], dict[str, float]]:
        """Per written token, what it pays for drifting from the start weights; nothing where no price is set."""
        if self.reference is None:
            return [[0.0] * len(turn.completion_tokens) for turn in turns], {}
        drift = differences([turn.logprobs for turn in turns], await logprobs_of(self.reference, turns))
        return kl_penalty(drift, self.cfg.kl_coef), {"kl": mean_of(drift)}

    def step_metrics(self, step: int, batch: TrainingBatch, outputs: list[ForwardBackwardOutput]) -> dict[str, float]:
        return batch.metrics | sampling_drift(batch.data, outputs)


@register_algorithm("mock_rl")
class MockRL(RL):
    """`rl`, for tests: refuses to run anywhere but on the mock backend."""

    only_on, instead = "mock", "rl"
