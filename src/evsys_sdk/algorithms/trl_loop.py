"""What `local_sft` and `local_rl` share: TRL's trainers inside our loop, on the local backend's model.

In: a context on the local backend, and a trainer that a subclass makes. Out: a `RunResult` with weights that the local
backend loads. TRL does the learning (batches, loss, optimiser); rates, logs, hooks, evaluations, checkpoints and early
stopping are the loop's, as for every algorithm. TRL writes nothing, prints nothing and reports to no tracker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams, backend_kind, service_of
from evsys_sdk.config.base import JsonDict
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import BackendError, error_boundary, need, not_known
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import KeptWeights, RunContext, RunResult
from evsys_sdk.training.batch import TrainingBatch
from evsys_sdk.training.loop import LoopPlan, StepWeights, TrainingLoop
from evsys_sdk.training.rendering import renderer_of

# A Hugging Face trainer that takes one step when it is asked to.
#
# In: a trainer with its callbacks open. Out: per step what it logged. It runs on a separate thread and waits there
# between steps, so that our loop (logs, hooks, evaluations, checkpoints, stopping) drives it like anything else. Its
# printing and its schedule are ours: the rate of each step is handed in.


class SteppedTrainer:
    """Runs `make(callback).train()`, a step at a time. `make` must put the callback into the trainer."""

    def __init__(self, make: Callable[[Any], Any], what: str):
        self.make, self.what = make, what
        self._go = threading.Semaphore(0)
        self._stopping = False
        self._rate = 0.0
        self._thread: threading.Thread | None = None
        self._answer: asyncio.Future[dict[str, float]] | None = None

    async def step(self, rate: float) -> dict[str, float]:
        """Take one optimiser step at this learning rate; what the trainer logged about it."""
        self._loop = asyncio.get_running_loop()
        self._answer = self._loop.create_future()
        self._rate = rate
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evsys-trainer", daemon=True)
            self._thread.start()
        else:
            self._go.release()
        return await self._answer

    async def close(self) -> None:
        """Let the training end after the step it is in, and wait for that."""
        self.abandon()
        while self._thread is not None and self._thread.is_alive():
            await asyncio.sleep(0.01)

    def abandon(self) -> None:
        """Let the training end after the step it is in, and do not wait for that."""
        self._stopping = True
        self._go.release()

    def _run(self) -> None:
        try:
            self.make(self._callback()).train()
            self._report(None, BackendError(f"{self.what} ended before its last step"))
        except BaseException as exc:
            self._report(None, exc)

    def _report(self, logs: dict[str, float] | None, failure: BaseException | None = None) -> None:
        """Answer the one who asked for a step, if anybody still listens."""
        answer = self._answer

        def hand_over() -> None:
            if answer is None or answer.done():
                return
            if logs is not None:
                answer.set_result(logs)
            elif isinstance(failure, Exception):
                answer.set_exception(failure)
            else:
                answer.set_exception(BackendError(f"{self.what} was ended by {failure!r}"))

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(hand_over)

    def _callback(self) -> object:
        stepped = self

        class Pause(need("transformers", extra="local").TrainerCallback):  # type: ignore[misc]
            """Sets the rate before a step, hands over the numbers and waits after it."""

            def on_step_begin(
                self, args: object, state: object, control: object, optimizer: Any = None, **rest: object
            ) -> None:
                for group in optimizer.param_groups:
                    group["lr"] = stepped._rate

            def on_log(
                self, args: object, state: object, control: Any, logs: Mapping[str, object], **rest: object
            ) -> object:
                if "loss" not in logs:  # the summary at the end
                    return control
                stepped._report({key: float(value) for key, value in logs.items() if isinstance(value, int | float)})
                # The trainer waits here, after its optimiser step: the weights stand still while the loop saves and
                # scores them.
                stepped._go.acquire()
                control.should_training_stop = control.should_training_stop or stepped._stopping
                return control

        return Pause()


ONE_AT_A_TIME = threading.Lock()
"""TRL seeds the process's random numbers and draws from them: two runs side by side would disturb each other."""
STEP_NAMES = {"learning_rate": None, "epoch": None, "num_tokens": None, "reward": "reward/mean"}
"""TRL's names that are ours by another name (None: that we log ourselves)."""


class TrlAlgorithm(BaseAlgorithm):
    """A trainer of TRL, driven step by step."""

    Config = LoopParams
    only_on = "local"
    supports_resume = False
    requires: ClassVar = {"trl": "local", "peft": "local"}

    @abstractmethod
    def make_trainer(self, model: object, tokenizer: object, settings: JsonObject, callback: object) -> object:
        """The trainer, with `settings` in its config and `callback` in its callbacks."""

    async def build_batch(self, step: int) -> TrainingBatch:
        raise BackendError(f"{self.name}: TRL makes its own batches")

    async def _train(self, ctx: RunContext) -> RunResult:
        self.ctx, self.service = ctx, service_of(ctx)
        wrong = self.elsewhere(backend_kind(ctx))
        if wrong or not hasattr(self.service, "engine"):
            raise BackendError(wrong or f"{self.name}: this backend has no engine of ours to train")
        need("trl", extra="local")
        self.renderer = renderer_of(ctx, self.service)
        await self.setup(ctx, self.service)
        # Polled: a thread that blocks in a lock cannot be cancelled by a request to stop.
        while not ONE_AT_A_TIME.acquire(blocking=False):
            await asyncio.sleep(0.1)
        try:
            return await self._train_alone(ctx)
        finally:
            ONE_AT_A_TIME.release()

    async def _train_alone(self, ctx: RunContext) -> RunResult:
        from evsys_sdk.backends.trainable_copy import TrainableCopy

        service: Any = self.service
        # A client as far as loops need one.
        copy: Any = TrainableCopy(service, rank=self.rank_of(ctx), seed=ctx.seed, start=ctx.start_from)
        plan = self._plan(ctx)
        folder = ctx.output_dir / "trl"
        settings = self._settings(plan, folder, ctx.seed, copy)
        stepped = SteppedTrainer(
            lambda callback: self._quiet(self.make_trainer(copy.model, service.engine.tokenizer, settings, callback)),
            f"{self.name}: TRL's trainer",
        )
        loop = TrlLoop(self, copy, service, ctx, plan, clock=self.clock)
        loop.stepped = stepped
        try:
            result = await loop.run()
            await stepped.close()
        finally:
            stepped.abandon()
            with suppress(OSError):  # not empty: the config makes TRL write there
                folder.rmdir()
        return self._to_run_result(ctx, result)

    def _settings(self, plan: LoopPlan, folder: Path, seed: int, copy: Any) -> JsonObject:
        """What both trainers' configs are given."""
        on_cpu = str(copy.model.device).startswith("cpu")
        return {
            "output_dir": str(folder),
            "max_steps": plan.total_steps,
            "gradient_accumulation_steps": plan.grad_accumulation,
            "learning_rate": self.cfg.learning_rate,  # each step's own rate is set as it begins
            "lr_scheduler_type": "constant",
            "max_grad_norm": plan.max_grad_norm,
            "adam_beta1": plan.beta1,
            "adam_beta2": plan.beta2,
            "adam_epsilon": plan.eps,
            "weight_decay": plan.weight_decay,
            "seed": seed,
            "use_cpu": on_cpu,
            "bf16": copy.engine.info.dtype == "bfloat16" and not on_cpu,
            "gradient_checkpointing": False,
            "logging_strategy": "steps",
            "logging_steps": 1,
            # The filter would log the running mean in the place of a NaN, and `_refuse_spoilt` would never see one.
            "logging_nan_inf_filter": False,
            "save_strategy": "no",
            "eval_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }

    def _quiet(self, trainer: Any) -> Any:
        """Without the callback that prints every log line to stdout."""
        trainer.remove_callback(need("transformers", extra="local").PrinterCallback)
        return trainer


class TrlLoop(TrainingLoop):
    """The training loop, where a step is TRL's."""

    stepped: SteppedTrainer
    tokens_before = 0.0

    async def _step(self, step: int) -> None:
        plan, ctx, began = self.plan, self.ctx, self.clock()
        self.weights.changed = True
        rate = plan.learning_rate(step)
        with error_boundary(BackendError, self.stepped.what):
            logs = await self.stepped.step(rate)
        metrics = self._metrics(logs, rate, self.clock() - began)
        self._refuse_spoilt(step, metrics)
        copy: Any = self.client
        copy.steps = step
        self.weights = StepWeights(self.client, self.service, step)
        self.result.note(step, metrics)
        if plan.saves(step):
            await self._save()
        ctx.log_store.log_metrics(metrics, step)
        if ctx.hooks:
            await ctx.hooks.step_end(step, metrics, self.weights)
        if plan.best_by and self.weights.taken and not plan.saves(step):
            await self._save()

    async def _resume(self) -> bool:
        """TRL's optimiser is not kept, so only a training that had ended is taken up; any other starts again."""
        last = next(iter(self._recorded_checkpoints()), None)
        if last and last.final:
            self.result.resume_from(last)
            self.result.stopped = last.stopped
        elif last:
            get_logger(__name__).warning(
                "%s: TRL's optimizer state is not saved, so training starts again instead of resuming from step %s",
                self.ctx.run_id,
                last.step,
            )
            self.manifest.checkpoints.clear()
        if self.ctx.hooks:
            step = self.result.steps
            await self.ctx.hooks.resumed(
                KeptWeights(
                    step=step, state=last.state, sampler=last.sampler, metrics=dict(last.metrics), final=last.final
                )
                if last and step
                else KeptWeights(step=0)
            )
        return bool(last and last.final)

    def _metrics(self, logs: dict[str, float], rate: float, seconds: float) -> dict[str, float]:
        tokens = logs.get("num_tokens", 0.0) - self.tokens_before
        self.tokens_before = logs.get("num_tokens", 0.0)
        named = {STEP_NAMES.get(key, key): value for key, value in logs.items()}
        metrics = {key: value for key, value in named.items() if key is not None}
        speed = tokens / seconds if seconds else 0.0
        return metrics | {"lr": rate, "tokens": tokens, "step_seconds": seconds, "tokens_per_second": speed}

    def _refuse_spoilt(self, step: int, metrics: dict[str, float]) -> None:
        bad = [key for key in ("loss", "grad_norm") if not math.isfinite(metrics.get(key, 0.0))]
        if bad:
            last = self.manifest.last_complete()
            raise BackendError(
                f"step {step}: {bad[0]} is {metrics[bad[0]]}, so the weights are spoilt; last good checkpoint: "
                f"{last.state if last else 'none'}; look at the rows, or lower learning_rate"
            )


def trl_settings(config: type, ours: JsonObject, given: JsonObject) -> JsonObject:
    """Our settings and what the user gave for TRL itself; a word that TRL lacks or that is ours is refused."""
    known = [field.name for field in dataclasses.fields(config)]
    for key in given:
        if key in ours:
            raise BackendError(f"trl.{key} is set by this algorithm's own settings, or must not change")
        if key not in known:
            raise BackendError(f"trl.{key}: {not_known(key, f'setting of {config.__name__}', known)}")
    return {**given, **ours}


class TrlParams(LoopParams):
    """Settings of both."""

    trl: JsonDict = Field(default_factory=dict)
    """Further settings of TRL's own config (`SFTConfig`, `GRPOConfig`), such as `optim` or `loss_type`."""
