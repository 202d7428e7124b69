"""A hosted model, or any client, as something that rolls tasks out.

In: tasks and an `InferenceClient`. Out: graded rollouts, one question each, with the tokens and the cost that the
provider reports. What breaks is a rollout with a status and no reward, never a 0. A key that is missing or refused ends
everything: no other question would fare better.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from evsys_sdk.concurrency import within
from evsys_sdk.data_types import HarborTask, Message, task_messages, with_system_prompt
from evsys_sdk.errors import BackendError, EvsysAuthError, error_boundary
from evsys_sdk.inference.base import Completion, Prompt
from evsys_sdk.protocols import FinishedRollouts, InferenceClient, Rollout, Turn
from evsys_sdk.rollout.policy import say
from evsys_sdk.rollout.task_dirs import needs_of
from evsys_sdk.rollout.trial import STOPS, Grade, TrialTimeouts, all_of
from evsys_sdk.training_api import SamplingParams
from evsys_sdk.verifiers.grading import grade as by_its_verifier

CONCURRENCY = 64
ENDS_ALL = (*STOPS, EvsysAuthError)


class Named(Protocol):
    """Whatever has the id of a task."""

    @property
    def task_id(self) -> str: ...


async def answer_each[T: Named](
    tasks: Sequence[T],
    answer: Callable[[T, int], Awaitable[Rollout]],
    *,
    num_samples: int,
    concurrency: int,
    finished: FinishedRollouts | None,
) -> list[list[Rollout]]:
    """`answer(task, sample)` for every sample of every task, at most `concurrency` at a time; when one raises, the
    others end with it."""
    slots = asyncio.Semaphore(concurrency)

    async def roll(task: T, sample: int) -> Rollout:
        known = finished.find(task.task_id, sample) if finished is not None else None
        if known is not None:
            return known
        async with slots:
            rollout = await answer(task, sample)
            if finished is not None:
                finished.add(task.task_id, sample, rollout)
        return rollout

    made = await all_of([roll(task, sample) for task in tasks for sample in range(num_samples)])
    return [made[first : first + num_samples] for first in range(0, len(made), num_samples)]


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
    system_prompt: str | None = None
    """Stands before every task's own messages."""
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
            rollout = with_answer(rollout, await self._ask(task))
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
            return await ask(self.client, with_system_prompt(task_messages(task), self.system_prompt), self.sampling)


async def ask(client: InferenceClient, messages: list[Message], sampling: SamplingParams) -> Completion:
    """The client's answer to a chat, with what it took as far as the client tells."""
    max_tokens, temperature = sampling.max_tokens, sampling.temperature
    # A client with `acomplete`, as all of ours, tells what an answer took; `generate` returns a text alone.
    acomplete = getattr(client, "acomplete", None)
    if callable(acomplete):
        answer: Completion = await acomplete(prompt=messages, max_tokens=max_tokens, temperature=temperature)
        return answer
    text = await ask_text(client, shortest(messages), max_tokens=max_tokens, temperature=temperature)
    return Completion(text=text)


def with_answer(rollout: Rollout, answer: Completion) -> Rollout:
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


async def ask_text(
    client: InferenceClient, prompt: Prompt, *, max_tokens: int, temperature: float, stop: Sequence[str] | None = None
) -> str:
    """What an InferenceClient says to a prompt with these settings; in a thread unless it can be awaited."""
    agenerate = getattr(client, "agenerate", None)
    if callable(agenerate):
        text = await agenerate(prompt=prompt, max_tokens=max_tokens, temperature=temperature, stop=stop)
    else:
        text = await call_generate(client.generate, prompt, max_tokens=max_tokens, temperature=temperature, stop=stop)
    if not isinstance(text, str):
        raise BackendError(f"the client returned {type(text).__name__}, not text")
    return text


async def call_generate(generate: Callable[..., Any], prompt: Prompt, **settings: object) -> Any:
    """What a client of a project returns, which may be anything; in a thread unless it can be awaited."""
    if inspect.iscoroutinefunction(generate):
        return await generate(prompt=prompt, **settings)
    return await asyncio.to_thread(generate, prompt=prompt, **settings)


def shortest(messages: list[Message]) -> Prompt:
    """A chat of one user text as just that text: what a client that knows no messages can take."""
    only = messages[0] if len(messages) == 1 else {}
    content = only.get("content")
    return content if only.get("role") == "user" and isinstance(content, str) else messages
