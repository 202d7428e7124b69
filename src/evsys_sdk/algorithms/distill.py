"""On-policy distillation: the student writes, the teacher says what it thinks of every token.

In: rows with prompts (chats, tasks, or inputs) and a teacher. Out: batches with a policy loss, in which a token's
advantage is the teacher's logprob minus the student's: the reverse KL, token by token, on text the student really
produces.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from evsys_sdk.algorithms.on_policy import OnPolicyAlgorithm, OnPolicyParams
from evsys_sdk.config.base import Params, tunable
from evsys_sdk.errors import BackendError
from evsys_sdk.protocols import RunContext
from evsys_sdk.registry import register_algorithm
from evsys_sdk.training.advantages import differences, kl_penalty, mean_of
from evsys_sdk.training.batch import TrainingBatch
from evsys_sdk.training.prompts import Prompt, read_prompts
from evsys_sdk.training.rollout_data import policy_datum, sampling_drift, written
from evsys_sdk.training.teachers import logprobs_of
from evsys_sdk.training_api import Capabilities, ForwardBackwardOutput, SamplingClient, TrainingService


class TeacherParams(Params):
    """Whom to learn from."""

    load_checkpoint_path: str | None = None
    """Sampler weights of the same model: `<run>@final`, or the artifact `final_sampler` of another run."""
    model: str | None = None
    """A model by name; only the run's own model, untrained, can be had from the run's backend."""

    @model_validator(mode="after")
    def _one(self) -> TeacherParams:
        if (self.load_checkpoint_path is None) == (self.model is None):
            raise ValueError("set either load_checkpoint_path or model")
        return self


@register_algorithm("distill")
class Distill(OnPolicyAlgorithm):
    """Brings the model closer to a teacher, on what the model itself writes."""

    class Config(OnPolicyParams):
        teacher: TeacherParams
        """The model that teaches."""
        num_samples: int = Field(default=4, ge=1, json_schema_extra=tunable(1, 16, log=True))
        """Rollouts per prompt and step."""
        centre: bool = Field(default=True, json_schema_extra=tunable())
        """Compare each token's gap to the teacher with the batch's mean gap: the same on average, with less noise."""

    cfg: Config

    def needs(self, capabilities: Capabilities) -> str | None:
        if not capabilities.prompt_logprobs:
            return "the teacher must tell logprobs of given tokens, which this backend cannot; use one that can"
        if "importance_sampling" not in capabilities.losses:
            return "this backend has no importance_sampling loss; use one that has, such as mock"
        return None

    def read_rows(self, rows: object) -> list[Prompt]:
        return read_prompts(rows, self.name)

    async def setup(self, ctx: RunContext, backend: TrainingService) -> None:
        await super().setup(ctx, backend)
        self.teacher = await self.find_teacher(ctx)

    async def find_teacher(self, ctx: RunContext) -> SamplingClient:
        wanted, own = self.cfg.teacher, ctx.extras.get("model_name")
        if wanted.model is not None and wanted.model != own:
            raise BackendError(
                f"teacher.model {wanted.model!r}: this run's backend serves {own!r} alone; give weights of that one in "
                "teacher.load_checkpoint_path, or let the teacher write its answers to a file and learn those with sft"
            )
        path = wanted.load_checkpoint_path
        if path is not None and "checkpoint_path" in ctx.extras:
            path = ctx.extras["checkpoint_path"](path, "sampler")
        try:
            return await self.service.create_sampling_client(path)
        except BackendError as exc:
            raise BackendError(f"teacher.load_checkpoint_path: {exc}; give the final_sampler of a run") from exc

    async def build_batch(self, step: int) -> TrainingBatch:
        groups, metrics = await self.roll_out(step)
        turns = [turn for group in groups for rollout in group for turn in written(rollout)]
        names = [prompt.task.task_id for prompt in self.prompts_of(step)]
        if not turns:
            return TrainingBatch([], metrics=self.skipped_metrics(metrics), row_ids=names)
        drift = differences([turn.logprobs for turn in turns], await logprobs_of(self.teacher, turns))
        advantages = kl_penalty(drift, 1 / sum(map(len, drift)), centre=self.cfg.centre)
        return TrainingBatch(
            [policy_datum(*each) for each in zip(turns, advantages, strict=True)],
            loss_fn="importance_sampling",
            metrics=metrics | {"teacher_kl": mean_of(drift)},
            rollouts=[rollout for group in groups for rollout in group],
            row_ids=names,
            loss_scale=1.0,
        )

    def step_metrics(self, step: int, batch: TrainingBatch, outputs: list[ForwardBackwardOutput]) -> dict[str, float]:
        return batch.metrics | sampling_drift(batch.data, outputs)
