"""Fair shares of the event loop: everybody gets a turn, nobody keeps a loop alive."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from evsys_sdk.rollout import policy
from evsys_sdk.rollout.policy import SHARE_SECONDS, take_turn


class Clock:
    """Moves when somebody is busy, and not with the machine."""

    now = 0.0

    def perf_counter(self):
        return self.now


clock = Clock()


@pytest.fixture(autouse=True)
def our_clock(monkeypatch):
    monkeypatch.setattr(policy, "time", clock)


def busy(seconds):
    clock.now += seconds


async def crowd(n, seconds):
    """Which pass of the loop each of `n` had its turn in."""
    passes, turns = 0, []

    async def one():
        await take_turn()
        turns.append(passes)
        busy(seconds)

    async def count():
        nonlocal passes
        while True:
            await asyncio.sleep(0)
            passes += 1

    counter = asyncio.create_task(count())
    await asyncio.gather(*(one() for _ in range(n)))
    counter.cancel()
    return turns


async def test_turns_that_take_long_are_spread_over_passes():
    turns = await crowd(20, SHARE_SECONDS)
    assert len(set(turns)) == 20


async def test_as_many_turns_share_a_pass_as_fit():
    turns = await crowd(100, SHARE_SECONDS / 10)
    assert 9 <= len(set(turns)) <= 12


async def test_turns_that_take_nothing_share_a_pass():
    turns = await crowd(200, 0)
    assert len(set(turns)) == 1


async def test_one_that_is_cancelled_in_line_does_not_hold_up_the_others():
    done = []

    async def one(name):
        await take_turn()
        done.append(name)
        busy(SHARE_SECONDS)

    work = [asyncio.create_task(one(index)) for index in range(6)]
    await asyncio.sleep(0)
    work[4].cancel()
    await asyncio.gather(*work, return_exceptions=True)
    assert done == [0, 1, 2, 3, 5]


def test_a_loop_that_is_over_is_forgotten():
    loop = asyncio.new_event_loop()
    loop.run_until_complete(crowd(5, SHARE_SECONDS))
    loop.close()
    seen = weakref.ref(loop)
    del loop
    gc.collect()
    assert seen() is None
