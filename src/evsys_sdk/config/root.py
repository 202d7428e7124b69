"""Where a project begins.

In: a folder. Out: the root of the project around it. Light: verbs that only look back import this and no config.
"""

from __future__ import annotations

from pathlib import Path

from evsys_sdk.constants import WORKSPACE_DIR


def project_root(start: Path) -> Path:
    """Nearest folder at or above `start` that holds `.evsys/` or `pyproject.toml`; else `start` itself."""
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / WORKSPACE_DIR).is_dir() or (folder / "pyproject.toml").is_file():
            return folder
    return start
