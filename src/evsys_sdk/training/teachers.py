"""What other weights think of a completion: the reference of a penalty, the teacher of a distillation.

In: a sampling client over fixed weights, a prompt and a completion that somebody else wrote. Out: the logprobs these
weights give the completion's own tokens, or the tokens they would have liked best in each place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from evsys_sdk.atomic import write_json
from evsys_sdk.errors import BackendError
from evsys_sdk.protocols import Turn
from evsys_sdk.surface import ModelInput, SamplingClient, SamplingParams, TrainingService


class AveragingService(TrainingService, Protocol):
    """A training service with the capability `average_weights`."""

    async def average_weights(self, paths: Sequence[str], shares: Sequence[float], name: str) -> str: ...


class MovingAverage:
    """A teacher that follows the student slowly: at each step it keeps `decay` of itself and takes the rest from the
    student. Its weights are noted in a file, so that an interrupted run goes on with the teacher it had."""

    def __init__(self, service: AveragingService, *, start: str, decay: float, book: Path):
        self.service, self.decay, self.book = service, decay, book
        self.paths = {1: start}
        """Step -> the weights that teach in it."""

    async def at(self, step: int, student: str) -> str:
        """The weights that teach in `step`, given the student's before it."""
        paths = [self._before(step), student]
        name = f"teacher-{step - 1:06d}"
        self.paths[step] = await self.service.average_weights(paths, [self.decay, 1 - self.decay], name)
        write_json(self.book, self.paths)
        return self.paths[step]

    def _before(self, step: int) -> str:
        if step - 1 not in self.paths and self.book.exists():
            noted = {int(key): path for key, path in json.loads(self.book.read_text()).items()}
            self.paths = {key: path for key, path in noted.items() if key < step}
        if step - 1 not in self.paths:
            raise BackendError(f"the averaged teacher of step {step - 1} is lost ({self.book}); start the run anew")
        return self.paths[step - 1]


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
