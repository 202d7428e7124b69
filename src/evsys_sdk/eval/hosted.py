"""Hosted models on benchmark tasks: `score_hosted` scores any InferenceClient on a suite, as an arm would be scored.

In: a benchmark and a client (`openai`, `claude`, `gemini`, or a project's own). Out: an `EvalResult`. Each sample is
one question, graded by the task's verifier, with the tokens and the cost that the provider reports. What breaks is a
rollout with a status and no reward, never a 0. A key that is missing or refused ends the evaluation: no other question
would fare better. The client's own limit of calls under way (`concurrency` in its params) holds inside the one here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from evsys_sdk.concurrency import within
from evsys_sdk.data_types import HarborTask, task_messages
from evsys_sdk.errors import BackendError, EvsysAuthError, EvsysError, error_boundary
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.eval.evaluate import answer_each
from evsys_sdk.eval.row_eval import ask_text, shortest
from evsys_sdk.inference.base import Completion
from evsys_sdk.protocols import AgentSpec, EvalResult, FinishedRollouts, InferenceClient, Rollout, Turn
from evsys_sdk.rollout.policy import say
from evsys_sdk.rollout.task_dirs import needs_of
from evsys_sdk.rollout.trial import STOPS, Grade, TrialTimeouts
from evsys_sdk.training_api import SamplingParams
from evsys_sdk.verifiers.grading import grade as by_its_verifier

CONCURRENCY = 64
ENDS_ALL = (*STOPS, EvsysAuthError)


async def score_hosted(
    benchmark: Benchmark,
    client: InferenceClient,
    *,
    max_tokens: int = 256,
    temperature: float = 1.0,
    concurrency: int = CONCURRENCY,
    agent: AgentSpec | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> EvalResult:
    """The client's scores; the other `options` are those of `Benchmark.score`. Providers take no seed, and `max_tokens`
    includes what a model thinks before it answers."""
    if agent is not None:
        raise EvsysError(f"agent {agent.kind!r} samples from weights; a hosted model is asked without an agent")
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    model = ClientModel(client, sampling=sampling, concurrency=concurrency, clock=clock)
    try:
        return await benchmark.score(model, clock=clock, **options)
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
class ClientModel:
    """An InferenceClient as an `EvaluatedModel`."""

    client: InferenceClient
    sampling: SamplingParams = field(default_factory=SamplingParams)
    concurrency: int = CONCURRENCY
    grade: Grade = by_its_verifier
    verifier_seconds: float = field(default_factory=lambda: TrialTimeouts().verifier_seconds)
    clock: Callable[[], float] = time.monotonic

    async def roll_out(
        self, tasks: Sequence[HarborTask], *, num_samples: int = 1, finished: FinishedRollouts | None = None
    ) -> list[list[Rollout]]:
        return await answer_each(
            tasks, self._roll, num_samples=num_samples, concurrency=self.concurrency, finished=finished
        )

    async def _roll(self, task: HarborTask, sample: int) -> Rollout:
        started = self.clock()
        rollout = Rollout(task_id=task.task_id, metadata={"sample": sample})
        try:
            rollout = _with_answer(rollout, await self._ask(task))
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

    async def _ask(self, task: HarborTask) -> Completion:
        reason = _refusal(task)
        if reason is not None:
            raise BackendError(f"task {task.task_id!r} {reason}")
        with error_boundary(BackendError, f"inference on {task.task_id}"):
            return await ask(self.client, task, self.sampling)


async def ask(client: InferenceClient, task: HarborTask, sampling: SamplingParams) -> Completion:
    """The client's answer to the task, with what it took as far as the client tells."""
    max_tokens, temperature = sampling.max_tokens, sampling.temperature
    # A client with `acomplete`, as all of ours, tells what an answer took; `generate` returns a text alone.
    acomplete = getattr(client, "acomplete", None)
    if callable(acomplete):
        answer: Completion = await acomplete(prompt=task_messages(task), max_tokens=max_tokens, temperature=temperature)
        return answer
    prompt = shortest(task_messages(task))
    return Completion(text=await ask_text(client, prompt, max_tokens=max_tokens, temperature=temperature))


def _with_answer(rollout: Rollout, answer: Completion) -> Rollout:
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
