"""The plainest rollout: one prompt, one completion, one verdict. It needs no harbor and no agent.

In: a task and something to sample from. Out: `n` rollouts of the task, drawn with one call to the sampler. Whatever
breaks on the way is a rollout with a status and no reward: not an exception, and never a 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from evsys_sdk.concurrency import within
from evsys_sdk.data_types import HarborTask, task_messages
from evsys_sdk.protocols import Renderer, Rollout, Turn
from evsys_sdk.rollout.policy import SampleRetryPolicy, check_logprobs, sample, say
from evsys_sdk.rollout.trial import STOPS, Grade, all_of
from evsys_sdk.training_api import SampledSequence, SamplingClient, SamplingParams, derive_seed, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurnSettings:
    """Who is asked, and how."""

    sampler: SamplingClient
    renderer: Renderer
    sampling: SamplingParams
    num_samples: int
    grade: Grade
    retry_policy: SampleRetryPolicy
    clock: Callable[[], float]
    verifier_seconds: float


async def roll_task(task: HarborTask, asked: SingleTurnSettings) -> list[Rollout]:
    """All rollouts of one task."""
    started, n = asked.clock(), asked.num_samples
    try:
        prompt = asked.renderer.prompt(task_messages(task))
        # The task's own seed: its draw must not depend on which tasks it shares a batch with.
        drawn = replace(asked.sampling, seed=derive_seed(asked.sampling.seed, task.task_id))
        output = await sample(asked.sampler, prompt, n, drawn, asked.retry_policy)
    except STOPS:
        raise
    except Exception as exc:
        return broken(task, say(exc), n, asked.clock() - started)
    rollouts = await all_of([_grade(task, prompt, sequence, asked) for sequence in output.sequences[:n]])
    error = f"the sampler returned fewer than the {n} completions asked for"
    rollouts += [Rollout(task_id=task.task_id, status="infra_error", error=error)] * (n - len(rollouts))
    seconds = asked.clock() - started
    return [
        replace(rollout, seconds=seconds, metadata={"sample": index, **rollout.metadata})
        for index, rollout in enumerate(rollouts)
    ]


def broken(task: HarborTask, error: str, n: int, seconds: float = 0.0) -> list[Rollout]:
    """The rollouts of a task that could not even be asked."""
    one = Rollout(task_id=task.task_id, status="infra_error", error=error, seconds=seconds)
    return [replace(one, metadata={"sample": index}) for index in range(n)]


async def _grade(task: HarborTask, prompt: list[int], sequence: SampledSequence, asked: SingleTurnSettings) -> Rollout:
    """The rollout of one completion, with the verifier's reward, or with its failure and none."""
    rollout = Rollout(task_id=task.task_id, metadata={"stop_reason": sequence.stop_reason})
    try:
        check_logprobs(sequence)
        text = text_of(sequence.tokens, asked.renderer.tokenizer)
        turn = Turn(prompt_tokens=prompt, completion_tokens=sequence.tokens, logprobs=sequence.logprobs, text=text)
        rollout = replace(rollout, turns=[turn])
        verdict = await within(asked.grade(task, text), asked.verifier_seconds)
    except STOPS:
        raise
    except TimeoutError:
        late = f"the verifier took longer than {asked.verifier_seconds:g} seconds"
        return replace(rollout, status="infra_error", error=late)
    except Exception as exc:
        return replace(rollout, status="infra_error", error=say(exc))
    info = {"verifier": verdict.info} if verdict.info else {}
    return replace(rollout, reward=verdict.reward, metadata={**rollout.metadata, **info})
