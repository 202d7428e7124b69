"""`rl` by TRL's GRPOTrainer, for people who want TRL.

In: `ctx.extras["train_rows"]`, tasks with in-process verifiers, on the local backend. Out: weights that the local
backend loads. Prompts are rendered by our renderer and rewards are the verifiers'; sampling, advantages and loss are
TRL's. A completion whose verifier broke has no reward: TRL leaves it out of its group, and it is counted.
"""

from __future__ import annotations

import asyncio
import copy

from pydantic import Field

from evsys_sdk.algorithms.trl_loop import TrlAlgorithm, TrlParams, trl_settings
from evsys_sdk.concurrency import run_async
from evsys_sdk.config.base import tunable
from evsys_sdk.constants import VERIFIER_SECONDS
from evsys_sdk.data_types import InProcessVerifier, JsonObject
from evsys_sdk.errors import FOREIGN, BackendError, Cancelled, DataError, need
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import Row, RunContext
from evsys_sdk.registry import register_algorithm, verifiers
from evsys_sdk.training.prompts import Prompt, read_tasks
from evsys_sdk.training_api import TrainingService, text_of


@register_algorithm("local_rl")
class LocalRL(TrlAlgorithm):
    """Policy gradient on groups of completions with verified rewards, by TRL's GRPOTrainer on the local model."""

    class Config(TrlParams):
        num_samples: int = Field(default=8, ge=2, json_schema_extra=tunable(2, 32, log=True))
        """Completions per task and step: the group. `batch_size` counts tasks."""
        max_tokens: int = Field(default=256, ge=1)
        """Tokens per answer."""
        temperature: float = Field(default=1.0, gt=0, json_schema_extra=tunable(0.5, 1.5))
        """Of the sampling."""
        kl_coef: float = Field(default=0.0, ge=0, json_schema_extra=tunable(1e-4, 1.0, log=True))
        """Price of drifting from the weights that this run, or stage, started with (TRL's `beta`)."""

    cfg: Config
    instead = "rl"

    def check_rows(self, rows: list[Row]) -> None:
        self._tasks(rows)

    def _tasks(self, rows: object) -> list[Prompt]:
        prompts = read_tasks(rows, self.name)
        for prompt in prompts:
            if not isinstance(prompt.task.verifier, InProcessVerifier):
                kind = prompt.task.verifier.kind
                raise DataError(f"task {prompt.task.task_id!r}: {self.name} takes in-process verifiers, not {kind!r}")
        return prompts

    async def setup(self, ctx: RunContext, backend: TrainingService) -> None:
        self.prompts = self._tasks(ctx.extras.get("train_rows"))
        if self.cfg.kl_coef and not self.cfg.lora_rank and ctx.start_from:
            raise BackendError(
                f"{self.name}: with lora_rank 0, TRL measures kl_coef against the untrained model and not against the "
                "weights this starts from; set kl_coef: 0, or a lora_rank"
            )
        self.tokens = [self.renderer.prompt(prompt.messages) for prompt in self.prompts]
        self.broken = 0

    def steps_per_epoch(self) -> int:
        return -(-len(self.prompts) // self._tasks_per_step)

    @property
    def _tasks_per_step(self) -> int:
        return self.cfg.batch_size * self.cfg.grad_accumulation

    def run_metrics(self) -> dict[str, float]:
        return {"rewards_missing": self.broken}

    def make_trainer(self, model: object, tokenizer: object, settings: JsonObject, callback: object) -> object:
        trl, datasets = need("trl", extra="local"), need("datasets", extra="local")
        ours = settings | {
            "per_device_train_batch_size": self.cfg.batch_size * self.cfg.num_samples,
            "num_generations": self.cfg.num_samples,
            "max_completion_length": self.cfg.max_tokens,
            "temperature": self.cfg.temperature,
            "beta": self.cfg.kl_coef,
        }
        tokens = self.tokens

        class Trainer(trl.GRPOTrainer):  # type: ignore[name-defined]
            def _send_telemetry(self) -> None:
                """TRL reports nothing: the loop logs its steps."""

            def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, object]]:
                """Prompts are numbers of tasks, and the tokens are ours."""
                return [list(tokens[int(number)]) for number in prompts], None, {}

        if not hasattr(trl.GRPOTrainer, "_tokenize_prompts"):
            raise BackendError("this version of TRL renders prompts in another way; install trl>=1.0,<2")
        return Trainer(
            model=model,
            reward_funcs=self.reward,
            args=trl.GRPOConfig(**trl_settings(trl.GRPOConfig, ours, self.cfg.trl)),
            train_dataset=datasets.Dataset.from_list([{"prompt": str(number)} for number in self._numbers()]),
            processing_class=copy.deepcopy(tokenizer),  # TRL sets its pad token and side
            callbacks=[callback],
        )

    def _numbers(self) -> list[int]:
        """Every task once. TRL leaves out an incomplete last batch, so that one is filled up from the beginning."""
        count = self.steps_per_epoch() * self._tasks_per_step
        return [number % len(self.prompts) for number in range(count)]

    def reward(self, *, prompts: list[str], completion_ids: list[list[int]], **_: object) -> list[float | None]:
        """TRL's reward function: what the task's verifier says of each completion; None where it broke."""
        return run_async(self._rewards([self.prompts[int(number)] for number in prompts], completion_ids))

    async def _rewards(self, prompts: list[Prompt], completions: list[list[int]]) -> list[float | None]:
        pairs = zip(prompts, completions, strict=True)
        return list(await asyncio.gather(*(self._reward(prompt, tokens) for prompt, tokens in pairs)))

    async def _reward(self, prompt: Prompt, tokens: list[int]) -> float | None:
        plan = prompt.task.verifier
        assert isinstance(plan, InProcessVerifier)  # others were refused at the start
        try:
            verdict = await verifiers.adapted(plan.fn_name).judge_within(
                VERIFIER_SECONDS,
                text_of(tokens, self.renderer.tokenizer),
                plan.expected,
                plan.params,
                prompt=prompt.task.instruction,
                task_id=prompt.task.task_id,
            )
        except Cancelled:
            raise
        except FOREIGN as exc:
            self.broken += 1
            get_logger(__name__).warning("task %s: no reward: %s", prompt.task.task_id, exc)
            return None
        return float(verdict.reward)
