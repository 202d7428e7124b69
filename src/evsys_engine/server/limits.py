"""How much and how long: every bound of the server in one place."""

from __future__ import annotations

from dataclasses import dataclass

from evsys_engine.http import HttpLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits(HttpLimits):
    body_bytes: int = 64 * 2**20
    """Of one request; the client cuts training batches into pieces of 5 MB by itself."""
    json_bytes: int = 8 * 2**20
    """Of one request in JSON: a prompt of half a million tokens."""
    tensor_elements: int = 2**26
    """Of one tensor after sparse ones are spread out."""
    poll_seconds: float = 25.0
    """How long a request for a result waits before the answer is "try again"; the client gives up at 45."""
    session_seconds: float = 600.0
    """A session that has been silent for so long is over; a living client is heard every 10 s."""
    quiet_seconds: float = 5.0
    """How long calls wait for an earlier number while no numbered call is arriving. The client sends a call only after
    the one before it was answered (`parallel_fwdbwd_chunks` is off), so a number that is missing is one that the client
    dropped before sending: its own validation refused the call. 5 s leave room for clients that send side by side."""
    gap_seconds: float = 120.0
    """The longest wait for an earlier number, also while numbered calls are arriving."""
    collected_seconds: float = 60.0
    """A result stays so long after it was handed out, in case the answer was lost on its way."""
    uncollected_seconds: float = 3600.0
    """A result that no client collects stays so long."""
    archive_seconds: float = 7200.0
    """How long the address of a packed checkpoint works."""
    loaded_samplers: int = 8
    """Kept in memory; the others are read from their folder again when used."""
    unnamed_samplers: int = 32
    """Kept on disk per session; older ones are removed. A named sampler stays until it is deleted or expires."""
    workers: int = 32
    """Threads that wait for the engine, which does one thing at a time where it must."""

    @property
    def sweep_seconds(self) -> float:
        shortest = min(self.session_seconds, self.collected_seconds, self.uncollected_seconds)
        return min(30.0, shortest / 4)


LIMITS = ServerLimits()
"""As it comes."""
