"""Calls of one model that wait for a number that never comes, and threads that end before they serve."""

from __future__ import annotations

import asyncio
import time

import pytest

from evsys_engine.http import run_in_thread
from evsys_engine.server.futures import Futures
from evsys_engine.server.limits import ServerLimits
from evsys_engine.server.sessions import ModelJob, ModelQueue
from evsys_engine.types import EngineError


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_model_is_unloaded_at_the_very_moment_its_wait_for_a_lost_call_ends(turns):
    async def check():
        limits = ServerLimits(quiet_seconds=0.01)
        futures = Futures(limits, time.monotonic)
        queue = ModelQueue("m", futures, limits, lambda: False)
        promise = futures.make("r", "s", "")
        queue.put(3, ModelJob(promise, lambda: pytest.fail("it was refused")))
        for _ in range(3):
            await asyncio.sleep(0)
        time.sleep(0.02)  # the wait is over, and the loop has not seen it yet
        for _ in range(turns):
            await asyncio.sleep(0)
        await queue.close()
        assert b"was unloaded" in (await promise.answer).body

    asyncio.run(check())


def test_a_server_that_ends_before_it_is_ready_says_so():
    async def serve(on_ready, stop):
        return None

    with pytest.raises(EngineError, match="toy ended before it was ready"), run_in_thread(serve, name="toy"):
        pass
