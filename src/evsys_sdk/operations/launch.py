"""Start `evsys run` in a session that outlives this process.

In: the words of the command. Out: the launch record of the new process, or the exit code with which it was refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from evsys_sdk.constants import ENV_LAUNCH_FD


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedLaunch:
    """What became of it."""

    record: dict[str, Any] | None
    """The launch record, as `--json` prints it; None for a command that was refused or a process that was killed."""
    code: int = 0
    """The exit code of a refused command; below 0 the signal that ended the process."""


def launch_detached(
    words: Sequence[str], *, stdout: IO[bytes] | None = None, stderr: IO[bytes] | None = None
) -> DetachedLaunch:
    """Start `evsys` with these words in a new session, which neither a closed terminal nor the end of this process
    reaches, and wait until it has the experiment. A refusal is written to `stdout` and `stderr`, by default ours."""
    reader, writer = os.pipe()
    # -P: as for the `evsys` script, the current folder is no place to import from.
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "evsys_sdk.cli.main", *words],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=[writer],
        env={**os.environ, ENV_LAUNCH_FD: str(writer)},
    )
    os.close(writer)  # else `read` would not end when the child closes its end, or dies
    try:
        with os.fdopen(reader) as news:
            launched = news.read()
    except KeyboardInterrupt:
        child.terminate()  # it does not get the terminal's Ctrl-C, being in another session
        raise
    if launched:
        return DetachedLaunch(record=json.loads(launched))
    return DetachedLaunch(record=None, code=child.wait())
