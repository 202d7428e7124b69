"""Fair shares of the event loop.

In: nothing. Out: a pause where one is due. Answers to hundreds of rollouts arrive together, and asyncio would go
through all that follows from them before it looks at anything else; what else is on the loop (training, other
rollouts' sockets) gets its turn every few milliseconds instead.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from weakref import WeakKeyDictionary

SHARE_SECONDS = 0.001
"""What rollouts may take of one pass of the loop. A pass itself costs some 15 us, and twice the share where the next
rollouts take longer than the last ones did."""


class _Share:
    """The rollouts' part of the loop's passes; those that do not fit into one wait in line for the next."""

    def __init__(self) -> None:
        self.line: deque[asyncio.Future[None]] = deque()
        self.began = 0.0
        self.turns = 0
        """Taken in this pass."""
        self.planned = False

    def place_in_line(self) -> asyncio.Future[None] | None:
        """What to wait for; None for one that may go on at once."""
        if not self.planned:
            self._plan(turns=0)
        if not self.line and time.perf_counter() - self.began < SHARE_SECONDS:
            self.turns += 1
            return None
        self.line.append(asyncio.get_running_loop().create_future())
        return self.line[-1]

    def _plan(self, turns: int) -> None:
        self.planned, self.began, self.turns = True, time.perf_counter(), turns
        asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        """Let in as many as fit, going by what those of the pass before took."""
        self.planned = False
        if not self.line:
            return
        each = (time.perf_counter() - self.began) / max(1, self.turns)
        room = min(len(self.line), max(1, int(SHARE_SECONDS / max(each, 1e-6))))
        for waiting in [self.line.popleft() for _ in range(room)]:
            if not waiting.done():
                waiting.set_result(None)
        self._plan(turns=room)  # behind those that were let in, so that it sees what they took


_shares: WeakKeyDictionary[asyncio.AbstractEventLoop, _Share] = WeakKeyDictionary()


async def take_turn() -> None:
    """Go on in this pass of the loop, or in a later one when this one has done enough for rollouts."""
    loop = asyncio.get_running_loop()
    share = _shares.get(loop)
    if share is None:
        share = _shares[loop] = _Share()
    wait = share.place_in_line()
    if wait is not None:
        await wait
