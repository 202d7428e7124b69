"""Checkpoints to download: a `tar.gz` behind an address that works for a while without a key.

In: a checkpoint's folder. Out: a ticket, which is the last part of the address, and the file behind it until it
expires. The client hands the address to any HTTP client, which knows no key: the ticket cannot be guessed.
"""

from __future__ import annotations

import secrets
import shutil
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

from evsys_engine.server.sessions import NotFound

FOLDER = ".archives"


class Archives:
    """The archives of one server; they go with it."""

    def __init__(self, folder: Path, clock: Callable[[], float], *, seconds: float) -> None:
        self._folder, self._clock, self.seconds = folder / FOLDER, clock, seconds
        self._until: dict[str, float] = {}
        self._guard = threading.Lock()
        shutil.rmtree(self._folder, ignore_errors=True)  # of a server that is gone

    def make(self, checkpoint: Path) -> str:
        """Pack the folder; returns the ticket."""
        ticket = f"{secrets.token_hex(16)}.tar.gz"
        self._folder.mkdir(exist_ok=True)
        with tarfile.open(self._folder / ticket, "w:gz", compresslevel=1) as archive:
            for file in sorted(checkpoint.rglob("*")):
                archive.add(file, arcname=str(file.relative_to(checkpoint)), recursive=False)
        with self._guard:
            self._until[ticket] = self._clock() + self.seconds
        return ticket

    def find(self, ticket: str) -> Path:
        with self._guard:
            until = self._until.get(ticket)
        if until is None or self._clock() >= until:
            raise NotFound("there is no such archive (any more); ask for its address again")
        return self._folder / ticket

    def sweep(self) -> None:
        now = self._clock()
        with self._guard:
            old = [ticket for ticket, until in self._until.items() if now >= until]
            for ticket in old:
                del self._until[ticket]
        for ticket in old:
            (self._folder / ticket).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
