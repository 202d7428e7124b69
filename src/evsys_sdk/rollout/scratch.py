"""Folders for the length of a rollout, in the machine's temporary directory.

In: what they are called by. Out: an empty folder, which its process holds for as long as it lives. What a killed
process left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Literal

from evsys_sdk.sandbox_uids import hold

Prefix = Literal["evsys-trial-", "evsys-agents-"]
PREFIXES: tuple[Prefix, ...] = ("evsys-trial-", "evsys-agents-")
YOUNG_SECONDS = 60.0
"""A folder may have been made and not be held yet."""


class Scratch:
    """An empty folder that nobody sweeps away while this process lives."""

    def __init__(self, prefix: Prefix) -> None:
        _sweep_once()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self.held = _hold(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self.held is not None:
            os.close(self.held)
            self.held = None


@cache
def _sweep_once() -> None:
    root = Path(tempfile.gettempdir())
    for place in [found for prefix in PREFIXES for found in root.glob(f"{prefix}*")]:
        with contextlib.suppress(OSError):
            if time.time() - place.stat().st_mtime > YOUNG_SECONDS and (handle := _hold(place, alone=True)) is not None:
                shutil.rmtree(place, ignore_errors=True)
                os.close(handle)


def _hold(path: Path, *, alone: bool = False) -> int | None:
    try:
        return hold(path, alone=alone)
    except ImportError:  # a system without such locks: nothing is held there, and nothing swept
        return None
