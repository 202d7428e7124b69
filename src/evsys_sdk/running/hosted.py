"""Hosted models on benchmark tasks: `score_hosted` scores any InferenceClient on a suite, as an arm would be scored.

In: a benchmark and a client (`openai`, `claude`, `gemini`, or a project's own). Out: an `EvalResult`. The folding is
`Benchmark.score`'s; only here an InferenceClient stands where a rollout engine is expected (`HostedEngine`): each
sample is one question, graded by the task's verifier, with the tokens and the cost that the provider reports. What
breaks is a rollout with a status and no reward, never a 0. A key that is missing or refused ends the evaluation: no
other question would fare better.

The client's own limit of calls under way (`concurrency` in its params) holds inside the one given here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from evsys_sdk.asyncs import within
from evsys_sdk.data_types import HarborTask, task_messages
from evsys_sdk.errors import BackendError, EvsysAuthError, EvsysError, blame
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.eval.row_eval import ask_text, shortest
from evsys_sdk.inference.asking import Completion
from evsys_sdk.protocols import AgentSpec, EvalResult, FinishedRollouts, Renderer, Rollout, Turn
from evsys_sdk.rollout.lanes import STOPS, Grade, Limits, all_of
from evsys_sdk.rollout.policies import say
from evsys_sdk.surface import SamplingClient, SamplingParams
from evsys_sdk.task_dirs import needs_of
from evsys_sdk.verifiers.grading import grade as by_its_verifier

CONCURRENCY = 64
ENDS_ALL = (*STOPS, EvsysAuthError)


async def score_hosted(
    benchmark: Benchmark,
    client: Any,
    *,
    concurrency: int = CONCURRENCY,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> EvalResult:
    """The client's scores; `options` are those of `Benchmark.score` but for a seed, which providers do not take.

    `max_tokens` includes what a model thinks before it answers.
    """
    nobody: Any = None  # the client is asked in words; there are no tokens of ours to sample or to render
    engine = HostedEngine(client, concurrency=concurrency, clock=clock)
    try:
        return await benchmark.score(engine=engine, sampler=nobody, renderer=nobody, clock=clock, **options)
    finally:
        close = getattr(client, "aclose", None)
        if close is not None:
            await close()


def hosted_problems(tasks: Sequence[HarborTask]) -> list[str]:
    """One line per reason why a hosted model cannot be put to these tasks, at the first that has it."""
    first: dict[str, str] = {}
    for task in tasks:
        reason = _refusal(task)
        if reason is not None:
            first.setdefault(reason, task.task_id)
    return [f"task {task_id!r} {reason}" for reason, task_id in first.items()]


def _refusal(task: HarborTask) -> str | None:
    needs = needs_of(task)
    if not needs:
        return None
    return f"needs an environment ({', '.join(needs)}), and a hosted model only answers questions"


@dataclass(slots=True)
class HostedEngine:
    """A `RolloutEngine` whose model is an InferenceClient; the sampler and the renderer it is given are not used."""

    client: Any
    concurrency: int = CONCURRENCY
    grade: Grade = by_its_verifier
    verifier_seconds: float = field(default_factory=lambda: Limits().verifier_seconds)
    clock: Callable[[], float] = time.monotonic

    async def roll_out(
        self,
        tasks: Sequence[HarborTask],
        *,
        sampler: SamplingClient,
        renderer: Renderer,
        sampling: SamplingParams,
        num_samples: int = 1,
        agent: AgentSpec | None = None,
        finished: FinishedRollouts | None = None,
    ) -> list[list[Rollout]]:
        """One list per task, in order."""
        if agent is not None:
            raise EvsysError(f"agent {agent.kind!r} samples from weights; a hosted model is asked without an agent")
        slots = asyncio.Semaphore(self.concurrency)

        async def roll(task: HarborTask, sample: int) -> Rollout:
            done = finished.find(task.task_id, sample) if finished is not None else None
            if done is not None:
                return done
            async with slots:
                rollout = await self._roll(task, sample, sampling)
                if finished is not None:
                    finished.add(task.task_id, sample, rollout)
            return rollout

        made = await all_of([roll(task, sample) for task in tasks for sample in range(num_samples)])
        return [made[first : first + num_samples] for first in range(0, len(made), num_samples)]

    async def _roll(self, task: HarborTask, sample: int, sampling: SamplingParams) -> Rollout:
        started = self.clock()
        rollout = Rollout(task_id=task.task_id, metadata={"sample": sample})
        try:
            rollout = _answered(rollout, await self._ask(task, sampling))
            verdict = await within(self.grade(task, rollout.completion), self.verifier_seconds)
            said = {"verifier": verdict.info} if verdict.info else {}
            rollout = replace(rollout, reward=verdict.reward, metadata={**rollout.metadata, **said})
        except ENDS_ALL:
            raise
        except TimeoutError:
            late = f"the verifier took longer than {self.verifier_seconds:g} seconds"
            rollout = replace(rollout, status="infra_error", error=late)
        except Exception as exc:
            rollout = replace(rollout, status="infra_error", error=say(exc))
        return replace(rollout, seconds=self.clock() - started)

    async def _ask(self, task: HarborTask, sampling: SamplingParams) -> Completion:
        reason = _refusal(task)
        if reason is not None:
            raise BackendError(f"task {task.task_id!r} {reason}")
        with blame(BackendError, f"inference on {task.task_id}"):
            return await ask(self.client, task, sampling)


async def ask(client: Any, task: HarborTask, sampling: SamplingParams) -> Completion:
    """The client's answer to the task, with what it took as far as the client tells."""
    settings: dict[str, Any] = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
    if callable(getattr(client, "acomplete", None)):
        answer: Completion = await client.acomplete(prompt=task_messages(task), **settings)
        return answer
    return Completion(text=await ask_text(client, shortest(task_messages(task)), **settings))


def _answered(rollout: Rollout, answer: Completion) -> Rollout:
    """The rollout with the answer; a provider tells its tokens by number only."""
    about = {
        "model": answer.model or None,
        "stop_reason": answer.stop_reason,
        "attempts": answer.attempts,
        "n_input_tokens": answer.input_tokens,
        "n_output_tokens": answer.output_tokens,
        "unpriced": True if answer.cost_usd is None else None,
    }
    known = {key: value for key, value in about.items() if value is not None}
    turn = Turn(prompt_tokens=[], completion_tokens=[], logprobs=[], text=answer.text)
    cost = answer.cost_usd or 0.0
    return replace(rollout, turns=[turn], cost_usd=cost, metadata={**rollout.metadata, **known})
