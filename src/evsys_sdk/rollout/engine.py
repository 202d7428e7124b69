"""Roll the model out on tasks that need one answer and an in-process verifier.

In: tasks, a sampler, a renderer. Out: per task a list of `Rollout`s with the exact tokens and logprobs. Whatever
breaks on the way is a rollout with a status and no reward: not an exception, and never a 0. Tasks that need a
sandbox or a judge are refused by name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from evsys_sdk.data_types import HarborTask, InProcessVerifier, task_messages
from evsys_sdk.errors import BackendError, Cancelled, EvsysError
from evsys_sdk.protocols import Renderer, Rollout, Turn
from evsys_sdk.registry import verifiers
from evsys_sdk.surface import (
    ModelInput,
    SampledSequence,
    SampleOutput,
    SamplingClient,
    SamplingParams,
    derive_seed,
    text_of,
)

# Timeouts and lost connections of a sampler are OSErrors: infrastructure, worth another try, never a grade.
RETRIED = (BackendError, OSError)


def refusal(task: HarborTask) -> str | None:
    """Why this engine cannot do the task, or None."""
    if isinstance(task.verifier, InProcessVerifier):
        return None
    return f"a verifier of kind {task.verifier.kind!r} needs a rollout engine that this version does not have"


class InProcessRolloutEngine:
    """One prompt, one completion, one verdict; many tasks at a time."""

    def __init__(
        self,
        *,
        concurrency: int = 64,
        retries: int = 2,
        backoff_seconds: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.concurrency = concurrency
        self.retries = retries
        self.backoff_seconds = backoff_seconds
        self.clock = clock
        self.sleep = sleep
        # A semaphore belongs to one event loop; a run may use several, one after the other.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def roll_out(
        self,
        tasks: Sequence[HarborTask],
        *,
        sampler: SamplingClient,
        renderer: Renderer,
        sampling: SamplingParams,
        num_samples: int = 1,
    ) -> list[list[Rollout]]:
        """One list per task, in order."""
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))

        async def one(task: HarborTask) -> list[Rollout]:
            async with slots:
                return await self._roll_task(task, sampler, renderer, sampling, num_samples)

        jobs = [asyncio.ensure_future(one(task)) for task in tasks]
        try:
            return list(await asyncio.gather(*jobs))
        except BaseException:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            raise

    async def _roll_task(
        self, task: HarborTask, sampler: SamplingClient, renderer: Renderer, sampling: SamplingParams, n: int
    ) -> list[Rollout]:
        started = self.clock()
        try:
            self._refuse(task)
            prompt = renderer.prompt(task_messages(task))
            # The task's own seed: its draw must not depend on which tasks it shares a batch with.
            drawn = replace(sampling, seed=derive_seed(sampling.seed, task.task_id))
            output = await self._sample(sampler, prompt, n, drawn)
        except Cancelled:
            raise
        except Exception as exc:
            broken = Rollout(
                task_id=task.task_id, status="infra_error", error=_say(exc), seconds=self.clock() - started
            )
            return [replace(broken, metadata={"sample": index}) for index in range(n)]
        rollouts = [_graded(task, prompt, sequence, renderer) for sequence in output.sequences[:n]]
        rollouts += [_missing(task, n)] * (n - len(rollouts))
        seconds = self.clock() - started
        return [
            replace(rollout, seconds=seconds, metadata={"sample": index, **rollout.metadata})
            for index, rollout in enumerate(rollouts)
        ]

    def _refuse(self, task: HarborTask) -> None:
        reason = refusal(task)
        if reason is not None:
            raise EvsysError(reason)

    async def _sample(
        self, sampler: SamplingClient, prompt: list[int], n: int, sampling: SamplingParams
    ) -> SampleOutput:
        for attempt in range(self.retries):
            try:
                return await sampler.sample(ModelInput.from_ints(prompt), n, sampling)
            except RETRIED:
                await self.sleep(self.backoff_seconds * 2**attempt)
        return await sampler.sample(ModelInput.from_ints(prompt), n, sampling)


def _graded(task: HarborTask, prompt: list[int], sequence: SampledSequence, renderer: Renderer) -> Rollout:
    """The rollout of one completion, with the verifier's reward, or with its failure and none."""
    rollout = Rollout(task_id=task.task_id, metadata={"stop_reason": sequence.stop_reason})
    try:
        if len(sequence.tokens) != len(sequence.logprobs):
            raise BackendError(f"the sampler gave {len(sequence.tokens)} tokens with {len(sequence.logprobs)} logprobs")
        text = text_of(sequence.tokens, renderer.tokenizer)
        turn = Turn(prompt_tokens=prompt, completion_tokens=sequence.tokens, logprobs=sequence.logprobs, text=text)
        rollout = replace(rollout, turns=[turn])
        return _with_reward(rollout, task, text)
    except Cancelled:
        raise
    except Exception as exc:
        return replace(rollout, status="infra_error", error=_say(exc))


def _with_reward(rollout: Rollout, task: HarborTask, text: str) -> Rollout:
    plan = task.verifier
    assert isinstance(plan, InProcessVerifier)  # others were refused before anything was sampled
    verdict = verifiers.adapted(plan.fn_name).judge(
        text, plan.expected, plan.params, prompt=task.instruction, task_id=task.task_id
    )
    info = {"verifier": verdict.info} if verdict.info else {}
    return replace(rollout, reward=verdict.reward, metadata={**rollout.metadata, **info})


def _missing(task: HarborTask, n: int) -> Rollout:
    error = f"the sampler returned fewer than the {n} completions asked for"
    return Rollout(task_id=task.task_id, status="infra_error", error=error)


def _say(exc: Exception) -> str:
    return str(exc) if isinstance(exc, EvsysError) else f"{type(exc).__name__}: {exc}"
