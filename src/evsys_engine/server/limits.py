"""How much and how long: every bound of the server in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    body_bytes: int = 64 * 2**20
    """Of one request; the client cuts training batches into pieces of 5 MB by itself."""
    json_bytes: int = 8 * 2**20
    """Of one request in JSON: a prompt of half a million tokens."""
    head_seconds: float = 20.0
    """For the head of a request to arrive."""
    pause_seconds: float = 30.0
    """Between two pieces of a body."""
    body_seconds: float = 300.0
    """For a whole body."""
    tensor_elements: int = 2**26
    """Of one tensor after sparse ones are spread out."""
    poll_seconds: float = 25.0
    """How long a request for a result waits before it is told to ask again; the client gives up at 45."""
    session_seconds: float = 600.0
    """A session that has been silent for so long is over; a living client is heard every 10 s."""
    gap_seconds: float = 120.0
    """How long calls wait for an earlier number that has not arrived; after that its sender has given up."""
    collected_seconds: float = 60.0
    """A result stays so long after it was handed out, in case the answer was lost on its way."""
    uncollected_seconds: float = 3600.0
    """A result nobody asks for stays so long."""
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


LIMITS = Limits()
"""As it comes."""
