"""The SDK's own log lines: one logger tree, on stderr, quiet until asked.

In: a level (argument or EVSYS_LOGGING_LEVEL). Out: `logging` loggers below `evsys_sdk`.
stdout belongs to results, so nothing here ever writes to it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from evsys_sdk.constants import ENV_LOGGING_LEVEL
from evsys_sdk.errors import EvsysError, not_known
from evsys_sdk.format import visible
from evsys_sdk.redaction import redact

ROOT = "evsys_sdk"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is now, so that a redirected stream is honoured."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None: ...


def get_logger(name: str = ROOT) -> logging.Logger:
    """A logger below `evsys_sdk`, set up on first use."""
    root = logging.getLogger(ROOT)
    if not any(getattr(h, "evsys", False) for h in root.handlers):
        configure_logger()
    return logging.getLogger(name if name == ROOT or name.startswith(f"{ROOT}.") else f"{ROOT}.{name}")


def configure_logger(
    level: str | int | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    handler: logging.Handler | None = None,
    quiet: bool = False,
) -> logging.Logger:
    """Send SDK logs to stderr (or `handler`) at `level`, else EVSYS_LOGGING_LEVEL, else WARNING.

    `quiet` lets only errors through to stderr; log files get the rest."""
    root = logging.getLogger(ROOT)
    for old in [h for h in root.handlers if getattr(h, "evsys", False)]:
        root.removeHandler(old)
    handler = handler or _StderrHandler()
    handler.evsys = True  # type: ignore[attr-defined]
    handler.setFormatter(line_format())
    handler.setLevel(logging.ERROR if quiet else logging.NOTSET)
    root.addHandler(handler)
    root.propagate = False
    set_level(level if level is not None else environ.get(ENV_LOGGING_LEVEL) or "WARNING")
    return root


class _GuardedFormatter(logging.Formatter):
    """Log lines without secrets, their control characters as text; tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(redact(super().format(record)))


def line_format() -> logging.Formatter:
    return _GuardedFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")


def set_level(level: str | int) -> None:
    """Change how much is said; a level that does not exist is refused by name."""
    if isinstance(level, str):
        if level.upper() not in LEVELS:
            raise EvsysError(not_known(level, "log level", LEVELS))
        level = level.upper()
    logging.getLogger(ROOT).setLevel(level)
