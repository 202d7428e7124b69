"""Folders that appear whole and say what is in them.

In: something that writes files into a fresh folder. Out: that folder under its name, with `evsys.json` inside, which
lists each file with size and checksum. A reader refuses a folder that is torn, changed or of another kind.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evsys_engine.types import BadRequest

MANIFEST = "evsys.json"
FORMAT = "evsys-engine-1"


def write_folder(folder: Path, facts: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, describe it by `facts`, and put it in place; an older `folder` is replaced."""
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.parent / f".{folder.name[:80]}.{secrets.token_hex(6)}.part"
    try:
        part.mkdir()
        write(part)
        files = {str(path.relative_to(part)): _describe(path) for path in sorted(part.rglob("*")) if path.is_file()}
        manifest = {"format": FORMAT, **facts, "files": files}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _sync(part / MANIFEST)
        _sync(part)
        _put_in_place(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _put_in_place(part: Path, folder: Path) -> None:
    aside = part.with_suffix(".old")
    if folder.exists():  # a rename cannot replace a folder that has files in it
        os.replace(folder, aside)
    os.replace(part, folder)
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """The facts of a folder that `write_folder` wrote as `kind`, all its files checked."""
    try:
        manifest = json.loads((Path(folder) / MANIFEST).read_text())
        if manifest["format"] != FORMAT or not isinstance(manifest["files"], dict):
            raise ValueError(f"its format is {manifest['format']!r}, this engine reads {FORMAT!r}")
        wrong = [name for name, told in manifest["files"].items() if _describe(Path(folder) / name) != told]
    except FileNotFoundError as exc:
        what = "there is no such folder" if not Path(folder).is_dir() else f"{exc.filename} is missing"
        raise BadRequest(f"{folder}: {what}; take another checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise BadRequest(
            f"{folder} is not a whole {kind} folder of this engine ({exc}); take another checkpoint"
        ) from exc
    if wrong:
        raise BadRequest(f"{folder} is damaged: {', '.join(wrong)} changed after writing; take another checkpoint")
    if manifest.get("kind") != kind:
        raise BadRequest(f"{folder} holds {manifest.get('kind')}; this needs {kind}")
    return dict(manifest)


def content_hash(folder: Path) -> str:
    """The same for folders of `write_folder` with the same files in them."""
    files = json.loads((folder / MANIFEST).read_text())["files"]
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
        os.fsync(handle.fileno())
        return {"bytes": handle.tell(), "sha256": digest}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
