"""Many rollouts at once: in order, none left behind, and never the whole event loop to themselves."""

from __future__ import annotations

import asyncio
import warnings

import pytest

from evsys_sdk.rollout.trial import BEGUN_AT_ONCE, all_of


async def test_results_come_in_order_however_long_each_took():
    async def one(n: int) -> int:
        for _ in range((n * 7) % 5):
            await asyncio.sleep(0)
        return n

    assert await all_of([one(n) for n in range(3 * BEGUN_AT_ONCE)]) == list(range(3 * BEGUN_AT_ONCE))


async def test_others_get_a_turn_while_many_are_begun():
    begun: list[int] = []
    seen: list[int] = []

    async def one(n: int) -> None:
        begun.append(n)

    asyncio.get_running_loop().call_soon(lambda: seen.append(len(begun)))
    await all_of([one(n) for n in range(3 * BEGUN_AT_ONCE)])
    assert seen == [BEGUN_AT_ONCE]


async def test_when_one_fails_the_others_are_cancelled():
    ended: list[int] = []

    async def one(n: int) -> None:
        if n == 1:
            raise ValueError("stop")
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(n)

    with pytest.raises(ValueError, match="stop"):
        await all_of([one(n) for n in range(5)])
    assert ended == [0, 2, 3, 4]


async def test_one_that_is_cancelled_while_it_begins_leaves_nothing_behind():
    begun: list[int] = []
    ended: list[int] = []

    async def one(n: int) -> None:
        begun.append(n)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(n)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a coroutine that was never awaited or closed
        work = asyncio.ensure_future(all_of([one(n) for n in range(2 * BEGUN_AT_ONCE)]))
        asyncio.get_running_loop().call_soon(work.cancel)
        with pytest.raises(asyncio.CancelledError):
            await work
    assert begun == ended and len(begun) < 2 * BEGUN_AT_ONCE
