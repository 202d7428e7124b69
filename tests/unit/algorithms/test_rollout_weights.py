"""Weights that were saved for rollouts alone, and their end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from evsys_sdk.algorithms.on_policy import RolloutWeights


class Service:
    """Notes what is opened, closed and deleted."""

    def __init__(self):
        self.events = []

    async def create_sampling_client(self, path):
        self.events.append(("open", path))
        return SimpleNamespace(close=lambda: self.events.append(("close", path)))

    async def discard_weights(self, path):
        self.events.append(("delete", path))


def test_weights_go_when_the_last_step_that_learns_from_them_has_its_rollouts():
    async def check():
        service = Service()
        weights = RolloutWeights(service)
        await weights.open("w0", 1, [1, 2])
        assert await weights.done(1) == 0
        assert service.events == [("open", "w0")], "step 2 still needs them"
        assert await weights.done(2) == 1
        assert service.events == [("open", "w0"), ("close", "w0"), ("delete", "w0")]

    asyncio.run(check())


def test_weights_that_a_checkpoint_speaks_of_stay_until_the_next_checkpoint():
    async def check():
        service = Service()
        weights = RolloutWeights(service)
        await weights.open("w0", 1, [1, 2])
        await weights.done(1)
        assert weights.progress() == {"2": [1, "w0"]}
        await weights.done(2)
        assert ("close", "w0") in service.events and ("delete", "w0") not in service.events
        await weights.open("w2", 3, [3])
        weights.progress()
        await weights.done(3)
        assert ("delete", "w0") in service.events and ("delete", "w2") not in service.events

    asyncio.run(check())


def test_a_resumed_run_opens_what_the_checkpoint_told_of_each_once():
    async def check():
        service = Service()
        weights = RolloutWeights(service)
        await weights.restore({"5": [3, "w2"], "6": [3, "w2"], "7": [4, "w3"]})
        assert service.events == [("open", "w2"), ("open", "w3")]
        assert weights.progress() == {"5": [3, "w2"], "6": [3, "w2"], "7": [4, "w3"]}
        assert await weights.done(5) == 2

    asyncio.run(check())
