"""What other weights think of a completion: the reference of a penalty, the teacher of a distillation.

In: a sampling client over fixed weights, a prompt and a completion that another model or a person wrote. Out: the
logprobs that these weights give the completion's own tokens, or the tokens they would have liked best in each place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from evsys_sdk.errors import BackendError
from evsys_sdk.protocols import Turn
from evsys_sdk.training_api import ModelInput, SamplingClient, SamplingParams, TrainingService, discard_weights


class AveragingService(TrainingService, Protocol):
    """A training service with the capability `average_weights`."""

    async def average_weights(self, paths: Sequence[str], shares: Sequence[float], name: str) -> str: ...


class MovingAverage:
    """A teacher that follows the student slowly: at each step it keeps `decay` of itself and takes the rest from the
    student. Weights that it has left behind are deleted, unless one of the last two checkpoints names them: an earlier
    checkpoint is then no longer whole, and the newest may have lost its place in the journal."""

    def __init__(self, service: AveragingService, *, start: str, decay: float):
        self.service, self.decay = service, decay
        self.path = start
        """The weights that teach now."""
        self.start = start
        self.noted: list[str] = []
        """The teachers of the last two checkpoints."""
        self.idle: set[str] = set()
        """Weights that taught before."""

    async def follow(self, student: str, step: int) -> str:
        """The weights that teach in `step`, given the student's before it."""
        before, shares = self.path, [self.decay, 1 - self.decay]
        # Named by the step whose weights went in, so that a resumed run makes the same name again.
        self.path = await self.service.average_weights([before, student], shares, f"teacher-{step - 1:06d}")
        self.idle.add(before)
        for path in sorted(self.idle - {self.path, self.start, *self.noted}):
            self.idle.discard(path)
            await discard_weights(self.service, path)
        return self.path

    def progress(self) -> str:
        """Which weights teach now; the checkpoint that keeps this needs them."""
        self.noted = [path for path in (*self.noted, self.path) if path != self.path][-1:] + [self.path]
        return self.path

    def restore(self, path: str) -> None:
        """Continue with the teacher that `progress` names."""
        self.path = path
        self.noted = [path]


async def logprobs_of(sampler: SamplingClient, turns: Sequence[Turn]) -> list[list[float]]:
    """The logprobs that `sampler`'s weights give what was written in each turn."""
    return await asyncio.gather(*[completion_logprobs(sampler, t.prompt_tokens, t.completion_tokens) for t in turns])


async def completion_logprobs(sampler: SamplingClient, prompt: list[int], completion: list[int]) -> list[float]:
    """The logprob of each token of `completion` after `prompt`."""
    answer = await sampler.compute_logprobs(ModelInput.from_ints([*prompt, *completion]))
    return _of_completion(answer, prompt, completion)


async def completion_top_k(
    sampler: SamplingClient, prompt: list[int], completion: list[int], k: int
) -> list[list[tuple[int, float]]]:
    """The `k` likeliest tokens in the place of each token of `completion`, with their logprobs."""
    answer = await sampler.sample(
        ModelInput.from_ints([*prompt, *completion]),
        1,
        # Only the prompt's logprobs are wanted, but a sampler has to draw: the shortest completion, without chance.
        SamplingParams(max_tokens=1, temperature=0.0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=k,
    )
    return _of_completion(answer.topk_prompt_logprobs or [], prompt, completion)


def _of_completion(answer: Sequence[Any], prompt: list[int], completion: list[int]) -> list[Any]:
    """The part of a per-token answer that is about the completion, whole."""
    wanted = len(prompt) + len(completion)
    part = list(answer[len(prompt) :])
    if len(answer) != wanted or any(value is None for value in part):
        raise BackendError(f"the backend gave logprobs for {len(answer)} of {wanted} prompt tokens, or left some out")
    return part
