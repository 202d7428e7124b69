"""The folder where prepared models lie: made once, whole, by one process at a time.

In: a name, facts about it and a function that fills a folder. Out: that folder, ready. What counts is the manifest
inside, which is written last; a folder without it, with a file of another size, or made by an older recipe is made
again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from evsys_engine.folders import MANIFEST, write_folder
from evsys_engine.models.errors import ModelError
from evsys_engine.types import JsonObject

ENV_CACHE = "EVSYS_CACHE"
UNFINISHED = re.compile(r"^\.(?P<name>.+)\.[0-9a-f]{12}\.(part|old)$")
"""What `write_folder` calls a folder it is still writing, or replacing."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """$EVSYS_CACHE, else `~/.cache/evsys/models`."""
    named = environ.get(ENV_CACHE)
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache/evsys/models"


def read_ready(folder: Path, recipe: str | None = None) -> JsonObject | None:
    """The manifest of a folder that is whole (and was made by this recipe), else None."""
    try:
        manifest: JsonObject = json.loads((folder / MANIFEST).read_text())
        whole = all((folder / name).stat().st_size == told["bytes"] for name, told in manifest["files"].items())
        return manifest if whole and recipe in (None, manifest["recipe"]) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def make_ready(folder: Path, facts: JsonObject, fill: Callable[[Path], None]) -> JsonObject:
    """The manifest of `folder`, which `fill` writes unless it is there already; other processes wait for it."""
    found = read_ready(folder, facts["recipe"])
    if found is not None:
        return found
    try:
        with _hold_lock(folder):
            found = read_ready(folder, facts["recipe"])
            if found is None:
                for leftover in unfinished_folders(folder.parent, folder.name):
                    shutil.rmtree(leftover, ignore_errors=True)
                write_folder(folder, {"kind": "model", **facts}, fill)
                found = read_ready(folder, facts["recipe"])
    except OSError as exc:
        raise ModelError(f"cannot make {folder} ({exc}); set {ENV_CACHE} to a folder that can be written") from exc
    if found is None:
        raise ModelError(f"{folder} was changed while it was made; try again")
    return found


def unfinished_folders(cache: Path, name: str | None = None) -> list[Path]:
    """Folders that an interrupted process left behind (or a living one is writing now)."""
    if not cache.is_dir():
        return []
    matches = ((path, UNFINISHED.match(path.name)) for path in sorted(cache.iterdir()))
    return [path for path, match in matches if match and name in (None, match["name"])]


def require_space(folder: Path, needed_bytes: int) -> None:
    """Say no before the disk does."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ModelError(
            f"this needs {needed_bytes / 1e9:.1f} GB under {folder} and {free / 1e9:.1f} GB are free; "
            f"make room, or set {ENV_CACHE} to a folder on another disk"
        )


def folder_bytes(folder: Path) -> int:
    """What the files of a folder take, links followed."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    # The kernel's lock goes with the process that held it, so a killed one blocks no other.
    folder.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder.parent / f".{folder.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
