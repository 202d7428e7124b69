"""HTTP/1.1 on which a caller cannot dawdle: a head that does not arrive in time is answered with 408.

In: seconds. Out: the protocol class that uvicorn takes as `http=`. uvicorn has a time limit between two requests of a
connection, but none for a request of which only the first lines arrive: each such connection would stay for ever. The
time limit of a body is the application's, which reads it.
"""

from __future__ import annotations

import asyncio
from typing import Any

TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def timed_protocol(head_seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's own HTTP/1.1 protocol; a connection has `head_seconds` for the head of each request."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._arm()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._disarm()
            elif self._timer is None and self.conn.trailing_data[0]:  # the next request has begun
                self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _arm(self) -> None:
            self._timer = self.loop.call_later(head_seconds, self._give_up)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            self._timer = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self.transport.write(TOO_LATE)
                self.transport.close()

    return TimedProtocol
