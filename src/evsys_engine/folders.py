"""Folders that appear whole and say what is in them.

In: something that writes files into a fresh folder. Out: that folder under its name, with `evsys.json` inside, which
lists each file with size and checksum. A reader refuses a folder that is torn, changed or of another kind.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from evsys_engine.types import BadRequest, JsonObject

MANIFEST = "evsys.json"
FORMAT = "evsys-engine-1"
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux, for `renameat2`."""


def write_folder(folder: Path, facts: JsonObject, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, describe it by `facts`, and put it in place; an older `folder` is replaced."""
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.parent / f".{folder.name[:80]}.{secrets.token_hex(6)}.part"
    try:
        part.mkdir()
        write(part)
        files = {str(path.relative_to(part)): path for path in sorted(part.rglob("*")) if path.is_file()}
        manifest = {"format": FORMAT, **facts, "files": {name: _describe(path) for name, path in files.items()}}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        set_modes(files.values(), like=part / MANIFEST)
        # Synced before the rename: under its own name a folder is whole even after a power cut.
        for path in (*files.values(), part / MANIFEST, part):
            _sync(path)
        put_in_place(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def set_modes(files: Iterable[Path], *, like: Path) -> None:
    """Let files be read by those who may read `like`, a new file of this process: safetensors lets only the owner read
    what it writes, so that a server of another user could not load the weights."""
    for path in files:
        path.chmod(like.stat().st_mode)


def put_in_place(part: Path, folder: Path) -> None:
    """Give `part`, which lies beside it, the name `folder`; an older `folder` is deleted once the new one is there.

    A rename cannot replace a folder that has files in it, so the two swap names. Where that cannot be done there are
    two renames: one that fails is undone, and only a process killed between them leaves the older one as `.old`.
    """
    aside = part
    if not folder.exists():
        os.replace(part, folder)
    elif not _exchange(part, folder):
        aside = part.with_suffix(".old")
        os.replace(folder, aside)
        try:
            os.replace(part, folder)
        except BaseException:
            os.replace(aside, folder)
            raise
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def read_manifest(folder: Path, kind: str) -> JsonObject:
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


def _describe(path: Path) -> JsonObject:
    with open(path, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return {"bytes": handle.tell(), "sha256": digest}


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step of the kernel; False where the system or the file system cannot."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or an old libc
        return False
    if swap(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
