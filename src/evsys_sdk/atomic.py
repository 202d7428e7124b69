"""Files that appear whole: a reader sees the old content or the new one, never a part.

In: a path and content. Out: the file, fsynced. Every record and manifest of the SDK is written here.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from evsys_sdk.constants import WORKSPACE_DIR
from evsys_sdk.redaction import redact, redact_values

GIT_IGNORES_ALL = "# Written by evsys: nothing in this folder belongs into git.\n*\n"


def make_folder(path: Path) -> None:
    """Make a folder with its parents; the first one made in a workspace (`.evsys/`) makes git ignore all of it."""
    path.mkdir(parents=True, exist_ok=True)
    workspace = next((folder for folder in (path, *path.parents) if folder.name == WORKSPACE_DIR), None)
    if workspace is not None and not (workspace / ".gitignore").exists():
        with suppress(OSError):  # another process was quicker, or the disk is full: the run matters more
            (workspace / ".gitignore").write_text(GIT_IGNORES_ALL)


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary handle whose content replaces `path` when the block ends well, and vanishes when it does not."""
    target = Path(path)
    make_folder(target.parent)
    name = target.parent / f".{target.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}.part"
    try:
        with open(name, "xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(name, target)
        _sync_directory(target.parent)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` whole and without secrets; return the path."""
    text = redact(text)
    with whole_file(path) as handle:
        # Half a surrogate pair (a broken emoji in somebody's data) becomes its escape, which JSON reads back.
        handle.write(text.encode(errors="backslashreplace"))
    return Path(path)


def write_json(path: str | Path, value: Any) -> Path:
    """Write `value` whole as indented, standard JSON."""
    return write_text(path, to_json(value, indent=2) + "\n")


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Standard JSON of anything we record: NaN and infinities become the strings "NaN", "Infinity", "-Infinity".

    Secrets that are known by value do not appear in it; `write_text` finds those that are known by shape."""
    return redact_values(plain_json(value, indent=indent))


def plain_json(value: Any, *, indent: int | None = None) -> str:
    """Standard JSON of data that must come back as it was: rows of a dataset."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False, default=_plain)
    except ValueError:
        return json.dumps(_without_nan(value), indent=indent, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # a numpy scalar or array
        return _without_nan(value.tolist())
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
