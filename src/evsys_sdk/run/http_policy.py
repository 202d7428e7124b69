"""Policies under training behind an OpenAI-compatible endpoint, for agents that only speak HTTP.

In: the live policies of a rollout engine. Out: an address for each. A policy stands on the endpoint under its own name
and as long as its rollout lasts; its turns, retries and seeds are its own, as if the agent had asked it directly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from evsys_sdk.rollout.policy import Policy, PolicySampler
from evsys_sdk.serving import Endpoint, RunningEndpoint, ServedModel, running


@dataclass(frozen=True, slots=True)
class EndpointFront:
    """One endpoint for all rollouts of a call."""

    found: RunningEndpoint
    context_length: int | None = None

    def open(self, policy: Policy) -> str:
        served = ServedModel(
            sampler=PolicySampler(policy), renderer=policy.renderer, context_length=self.context_length
        )
        self.found.endpoint.models[policy.name] = served
        return self.found.base_url()

    def close(self, policy: Policy) -> None:
        self.found.endpoint.models.pop(policy.name, None)


@asynccontextmanager
async def http_front(context_length: int | None = None) -> AsyncIterator[EndpointFront]:
    """For `LaneSettings(http_front=http_front)`. Where the context's length is known, a chat that outgrew it gets that
    as OpenAI does, which harnesses know how to handle."""
    async with running(Endpoint({})) as found:
        yield EndpointFront(found, context_length)
