"""Targets that are reached through the program they come with: `ollama`, `firectl`, `tinker`.

In: words of a command. Out: what it printed, or an `EvsysError` with the command, what it said and what to install.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from evsys_sdk.errors import EvsysError, shorten
from evsys_sdk.redaction import redact


def run_command(
    words: Sequence[str],
    *,
    seconds: float,
    install: str,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program without a shell and return what it printed."""
    program = [*shlex.split(words[0]), *words[1:]]
    if shutil.which(program[0]) is None:
        raise EvsysError(f"the program {program[0]} is not installed: {install}")
    said = shlex.join(program)
    try:
        done = subprocess.run(
            program, cwd=folder, env={**os.environ, **(environment or {})}, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        raise EvsysError(f"`{said}` did not end in {seconds:g} s") from exc
    if done.returncode != 0:
        reason = shorten(redact((done.stderr or done.stdout).strip()) or "no reason given", 300)
        raise EvsysError(f"`{said}` failed ({done.returncode}): {reason}")
    return done.stdout
