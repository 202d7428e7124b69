"""stdout belongs to results: what foreign code prints goes to stderr, and a result file is written where it is meant.

In: a block that runs other people's code; a path. Out: a clean stdout; a file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path


@contextmanager
def prints_to_stderr() -> Iterator[int]:
    """While the block runs, everything written to stdout, also by C code and child processes, goes to stderr; stdout
    itself is kept in the descriptor that the block is given."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield saved
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def check_result_path(path: str) -> None:
    """Refuse, before anything is spent, a file that a result could not be written to."""
    from evsys_sdk.errors import EvsysError

    target = Path(path)
    try:
        if target.is_dir():
            raise EvsysError(f"--output {path} is a directory; name a file in it")
        target.resolve().parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as exc:
        raise EvsysError(f"--output {path} cannot be written: {exc}") from exc


def write_result(path: str, text: str) -> None:
    """Whole, as every file of ours; a device or a pipe is written to instead of being replaced."""
    from evsys_sdk.atomic import write_text
    from evsys_sdk.errors import EvsysError

    target = Path(path).resolve()
    try:
        if target.exists() and not target.is_file():
            with open(target, "w") as device:
                device.write(text)
        else:
            write_text(target, text)
    except OSError as exc:
        raise EvsysError(f"--output {path} cannot be written: {exc.strerror}") from exc
