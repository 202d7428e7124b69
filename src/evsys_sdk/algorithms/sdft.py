"""Self-distillation fine-tuning: the model learns from itself, shown a demonstration it will not see later.

In: rows with a prompt and a demonstrated answer. Out: batches in which the student, who sees the prompt alone, is drawn
towards the teacher, who sees the demonstration too, on text that the student wrote. Teacher and student are the same
model and are asked by the same renderer, so the new skill comes in the model's own words and old ones stay.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Literal, cast

from pydantic import Field, field_validator

from evsys_sdk.algorithms.on_policy import OnPolicyAlgorithm, OnPolicyParams, by_task
from evsys_sdk.config.base import JsonDict, tunable
from evsys_sdk.data_types import content_text
from evsys_sdk.errors import DataError
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import RunContext, Turn
from evsys_sdk.registry import register_algorithm
from evsys_sdk.training.advantages import differences, kl_penalty, mean_of
from evsys_sdk.training.batch import TrainingBatch
from evsys_sdk.training.prompts import Prompt, read_prompts
from evsys_sdk.training.rollout_data import entropy_of, policy_datum, sampling_drift, soft_target_datum, written
from evsys_sdk.training.teachers import AveragingService, MovingAverage, completion_logprobs, completion_top_k
from evsys_sdk.training_api import Capabilities, ForwardBackwardOutput, SamplingClient, TrainingService, let_go

Shown = list[tuple[list[int], Turn]]
"""The teacher's prompt, and the turn that the student wrote without it."""


@register_algorithm("sdft")
class SDFT(OnPolicyAlgorithm):
    """Distils what the model can do with a demonstration into what it does without one."""

    class Config(OnPolicyParams):
        teacher: Literal["start", "base", "ema"] = Field(default="start", json_schema_extra=tunable())
        """The weights this run or stage starts with, the untrained model, or a moving average of the student."""
        ema_decay: float = Field(
            default=0.99, gt=0, lt=1, json_schema_extra=tunable(0.9, 0.999, when={"teacher": "ema"})
        )
        """With `teacher: ema`: the part of itself that the teacher keeps at each step."""
        kl: Literal["forward", "reverse"] = Field(default="forward", json_schema_extra=tunable())
        """forward: cross-entropy with the teacher's `top_k` tokens; reverse: its logprobs of the student's own
        tokens."""
        top_k: int = Field(default=20, ge=1, json_schema_extra=tunable(1, 100, log=True, when={"kl": "forward"}))
        """How many of the likeliest tokens of the teacher are compared."""
        skip_first_n_tokens: int = Field(default=0, ge=0, json_schema_extra=tunable(0, 8))
        """Do not learn the first tokens of an answer: a teacher who was shown one may open with a remark on it."""
        demonstration_template: str = (
            "{question}\n\nThis is how somebody answered it well:\n{demonstration}\n\nNow answer it yourself."
        )
        """What the teacher is asked in the place of the question."""
        num_samples: int = Field(default=1, ge=1, json_schema_extra=tunable(1, 8, log=True))
        """Rollouts per prompt and step."""
        max_length: int = Field(default=2048, ge=2)
        """Tokens of the teacher's prompt, demonstration included, and an answer of `max_tokens`; rows that need more,
        or more than the model's context, are left out, counted and named."""

        @field_validator("demonstration_template")
        @classmethod
        def _has_both_holes(cls, template: str) -> str:
            for hole in ("{question}", "{demonstration}"):
                if hole not in template:
                    raise ValueError(f"must contain {hole}")
            return template

    cfg: Config

    def needs(self, capabilities: Capabilities) -> str | None:
        if self.cfg.kl == "forward":
            if not capabilities.topk_prompt_logprobs:
                return "this backend does not tell a teacher's likeliest tokens; set kl: reverse, which needs none"
            loss = "cross_entropy"
        else:
            if not capabilities.prompt_logprobs:
                return "the teacher must tell logprobs of given tokens, which this backend cannot; use one that can"
            loss = "importance_sampling"
        if loss not in capabilities.losses:
            return f"this backend has no {loss} loss, which kl: {self.cfg.kl} needs; try the other kl"
        if self.cfg.teacher == "ema" and not capabilities.average_weights:
            return "this backend cannot average weights; set teacher: start, or run on one that can, such as mock"
        return None

    def read_rows(self, rows: object) -> list[Prompt]:
        prompts = read_prompts(rows, self.name)
        for prompt in prompts:
            if not prompt.answer:
                raise DataError(f"row {prompt.task.task_id} shows no answer, and sdft needs one as demonstration")
        return prompts

    def usable(self, prompts: list[Prompt]) -> list[Prompt]:
        context = getattr(self.service, "context_length", None) or self.cfg.max_length
        room = min(self.cfg.max_length, context)
        kept = [each for each in prompts if len(self.teacher_prompt(each)) + self.cfg.max_tokens <= room]
        fits = {each.task.task_id for each in kept}
        dropped = [each.task.task_id for each in prompts if each.task.task_id not in fits]
        self.totals["rows_dropped"] = float(len(dropped))
        if dropped:
            self.notes["dropped_rows"] = dropped
            limit = f"max_length {room}" if room == self.cfg.max_length else f"the model's context of {room} tokens"
            said = f"{len(dropped)} demonstrations do not fit into {limit} with an answer of {self.cfg.max_tokens}"
            if not kept:
                raise DataError(f"no row is left to train on: {said}; shorten them, or lower max_tokens")
            more = f" and {len(dropped) - 20} more" if len(dropped) > 20 else ""
            get_logger(__name__).warning("%s; left out: %s%s", said, ", ".join(dropped[:20]), more)
        return kept

    async def setup(self, ctx: RunContext, backend: TrainingService) -> None:
        await super().setup(ctx, backend)
        start = None if self.cfg.teacher == "base" else await self.start_weights("teacher-000000")
        self.teacher = await backend.create_sampling_client(start)
        self.average: MovingAverage | None = None
        if self.cfg.teacher == "ema" and start is not None:
            self.average = MovingAverage(cast(AveragingService, backend), start=start, decay=self.cfg.ema_decay)

    async def progress(self) -> JsonDict:
        about_teacher = {} if self.average is None else {"teacher": self.average.progress()}
        return await super().progress() | about_teacher

    async def restore(self, progress: JsonDict) -> None:
        await super().restore(progress)
        if self.average is not None:
            self.average.restore(progress["teacher"])

    async def build_batch(self, step: int) -> TrainingBatch:
        teacher = await self.teacher_at(step)
        groups, metrics = await self.roll_out(step)
        shown, too_short = self.show(groups, step)
        metrics |= {"answers_too_short": too_short}
        names = [prompt.task.task_id for prompt in self.prompts_of(step)]
        if not shown:
            return TrainingBatch([], metrics=self.skipped_metrics(metrics), row_ids=names)
        distil = self.forward if self.cfg.kl == "forward" else self.reverse
        batch = await distil(teacher, shown)
        batch.metrics, batch.row_ids = metrics | batch.metrics, names
        batch.rollouts = [rollout for group in groups for rollout in group]
        return batch

    def show(self, groups: list[Any], step: int) -> tuple[Shown, int]:
        """Each answer beside the prompt that the teacher sees; and how many are too short to learn from."""
        answers = [(written(rollout), prompt) for rollout, prompt in by_task(groups, self.prompts_of(step))]
        for turns, prompt in answers:
            if len(turns) > 1:
                raise DataError(
                    f"row {prompt.task.task_id}: sdft learns from one answer, this rollout has {len(turns)} turns"
                )
        # Without a need for rewards, `gate` has dropped rollouts in which the model wrote nothing: there is a turn.
        long = [each for each in answers if len(each[0][0].completion_tokens) > self.cfg.skip_first_n_tokens]
        return [(self.teacher_prompt(prompt), turns[0]) for turns, prompt in long], len(answers) - len(long)

    def teacher_prompt(self, prompt: Prompt) -> list[int]:
        *before, asked = prompt.messages
        words = {"{question}": content_text(asked["content"]), "{demonstration}": prompt.answer or ""}
        # In one pass: a question that holds the text `{demonstration}` is not filled in.
        filled = re.sub(
            "|".join(map(re.escape, words)), lambda hole: words[hole.group()], self.cfg.demonstration_template
        )
        return self.renderer.prompt([*before, {**asked, "content": filled}])

    async def teacher_at(self, step: int) -> SamplingClient:
        """The teacher of this step; `ema` first takes in a little of the student."""
        if self.average is not None and step > 1:
            path = await self.average.follow(await self.weights_before(step), step)
            let_go(self.teacher)
            self.teacher = await self.service.create_sampling_client(path)
        return self.teacher

    async def forward(self, teacher: SamplingClient, shown: Shown) -> TrainingBatch:
        """Forward KL: towards the teacher's likeliest tokens in every place, as soft targets."""
        k, skip = self.cfg.top_k, self.cfg.skip_first_n_tokens
        skipped = [None] * skip
        asked = [completion_top_k(teacher, prompt, turn.completion_tokens, k) for prompt, turn in shown]
        wanted = [rows[skip:] for rows in await asyncio.gather(*asked)]
        data = [soft_target_datum(turn, [*skipped, *rows], k) for (_, turn), rows in zip(shown, wanted, strict=True)]
        spread = mean_of([[entropy_of(row) for row in rows] for rows in wanted])
        return TrainingBatch(data, metrics={"teacher_entropy": spread, "distilled_tokens": sum(map(len, wanted))})

    async def reverse(self, teacher: SamplingClient, shown: Shown) -> TrainingBatch:
        """Reverse KL: each token of the student's gains what the teacher likes it better."""
        skip = self.cfg.skip_first_n_tokens
        asked = [completion_logprobs(teacher, prompt, turn.completion_tokens) for prompt, turn in shown]
        drift = differences([turn.logprobs for _, turn in shown], await asyncio.gather(*asked))
        drift = [part[skip:] for part in drift]
        tokens = sum(map(len, drift))
        advantages = kl_penalty(drift, 1 / tokens)
        data = [policy_datum(turn, [0.0] * skip + part) for (_, turn), part in zip(shown, advantages, strict=True)]
        metrics = {"teacher_kl": mean_of(drift), "distilled_tokens": tokens}
        return TrainingBatch(data, loss_fn="importance_sampling", metrics=metrics, loss_scale=1.0)

    def step_metrics(self, step: int, batch: TrainingBatch, outputs: list[ForwardBackwardOutput]) -> dict[str, float]:
        if not outputs or batch.loss_fn != "cross_entropy":
            return batch.metrics | sampling_drift(batch.data, outputs)
        # KL(teacher, student) = cross-entropy - entropy, in nats per token; the teacher is its `top_k` tokens alone,
        # made to add up to 1.
        surprise = sum(output.metrics["loss:sum"] for output in outputs) / batch.metrics["distilled_tokens"]
        return batch.metrics | {"teacher_kl": surprise - batch.metrics["teacher_entropy"]}
