"""Hosted models on benchmark tasks: `score_hosted` scores any InferenceClient on a suite, as an arm would be scored.

In: a benchmark and a client (`openai`, `claude`, `gemini`, or a project's own). Out: an `EvalResult`. Each sample is
one question, graded by the task's verifier, with the tokens and the cost that the provider reports. What breaks is a
rollout with a status and no reward, never a 0. A key that is missing or refused ends the evaluation: no other question
would fare better. The client's own limit of calls under way (`concurrency` in its params) holds inside the one here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from evsys_sdk.errors import EvsysError
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.protocols import AgentSpec, EvalResult, InferenceClient
from evsys_sdk.rollout.client_model import CONCURRENCY, ClientModel
from evsys_sdk.training_api import SamplingParams


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
