"""Checkpoints on disk and the `tinker://` paths that name them.

In: a folder. Out: `<folder>/<run>/weights/<name>` (state with optimiser) and `<folder>/<run>/sampler_weights/<name>`
(an adapter as `peft` reads it), each with a `checkpoint.json` that says what it is. Nothing is kept in memory, so a
new server on the same folder knows them all.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

from evsys_engine.types import BadRequest, EngineError, JsonObject

logger = logging.getLogger("evsys_engine.server")

KINDS = {"weights": "training", "sampler_weights": "sampler"}
SCHEME = "tinker://"
MARKER = "checkpoint.json"
UNNAMED = ".unnamed"
_DRAFT = re.compile(r"\.(?P<name>.+)-[0-9a-f]{8}(?P<old>-old)?")
"""How a folder or file is called while it is being written, and its older version while it is being replaced."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@,-]{0,199}")


class UnknownCheckpoint(BadRequest):
    """No such checkpoint; the server answers 404."""


@dataclass(frozen=True, slots=True)
class TinkerPath:
    run: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise BadRequest(f"{text!r} is not a path of this server: tinker://<run>/weights|sampler_weights/<name>")
        return cls(check_name(parts[0]), parts[1], check_name(parts[2]))

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


def check_name(name: str) -> str:
    """A name becomes a folder: letters, digits and _ . = + @ , - only, and no dot first."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} is no name for a checkpoint: letters, digits, _ . = + @ , - and at most 200 of them"
        )
    return name


class Checkpoints:
    """The folder."""

    def __init__(self, folder: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.folder, self._now = folder.absolute(), now
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        shutil.rmtree(folder / UNNAMED, ignore_errors=True)  # of a server that is gone
        _sweep_drafts(self.folder)

    def close(self) -> None:
        shutil.rmtree(self.folder / UNNAMED, ignore_errors=True)
        self._lock.close()

    def save(
        self,
        path: TinkerPath,
        write: Callable[[Path], None],
        facts: JsonObject,
        *,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
    ) -> None:
        """`write` fills a folder, which then appears under its name whole or not at all."""
        target = self._place(path)
        if target.exists() and not overwrite:
            raise BadRequest(f"{path} exists already; choose another name or pass overwrite=True to save_state")
        draft = target.with_name(f".{path.name}-{secrets.token_hex(4)}")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(draft)
            now = self._now()
            expires = None if ttl_seconds is None else (now + timedelta(seconds=ttl_seconds)).isoformat()
            _write_json(draft / MARKER, {**facts, "time": now.isoformat(), "expires_at": expires})
            # Two renames, since a folder with files in it cannot be replaced; after a crash between them
            # `_sweep_drafts` puts the older version back.
            old = target.with_name(f"{draft.name}-old")
            if target.exists():
                os.replace(target, old)
            os.replace(draft, target)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def find(self, path: TinkerPath) -> Path:
        folder = self._place(path)
        if not (folder / MARKER).is_file():
            raise UnknownCheckpoint(f"there is no checkpoint {path} under {self.folder}")
        return folder

    def facts(self, path: TinkerPath) -> JsonObject:
        found: JsonObject = json.loads((self.find(path) / MARKER).read_text())
        return found

    def delete(self, path: TinkerPath) -> None:
        shutil.rmtree(self.find(path))

    def set_ttl(self, path: TinkerPath, ttl_seconds: int | None) -> None:
        expires = None if ttl_seconds is None else (self._now() + timedelta(seconds=ttl_seconds)).isoformat()
        _write_json(self.find(path) / MARKER, {**self.facts(path), "expires_at": expires})

    def set_public(self, path: TinkerPath, public: bool) -> None:
        _write_json(self.find(path) / MARKER, {**self.facts(path), "public": public})

    def runs(self) -> list[str]:
        """Those that have a checkpoint."""
        names = [entry.name for entry in self.folder.iterdir() if entry.is_dir() and _NAME.fullmatch(entry.name)]
        return sorted(name for name in names if any(True for kind in KINDS for _ in self._names(name, kind)))

    def of_run(self, run: str) -> list[TinkerPath]:
        """The run's checkpoints, the oldest first."""
        times: dict[TinkerPath, str] = {}
        for path in [TinkerPath(run, kind, name) for kind in KINDS for name in self._names(run, kind)]:
            try:
                times[path] = str(self.facts(path)["time"])
            except UnknownCheckpoint:  # deleted since it was listed
                continue
            except (OSError, ValueError, KeyError) as exc:
                logger.warning("%s is left out of the lists: its %s cannot be read: %s", path, MARKER, exc)
        return sorted(times, key=lambda path: times[path])

    def describe(self, path: TinkerPath) -> JsonObject:
        """As the protocol lists a checkpoint."""
        facts = self.facts(path)
        return {
            "checkpoint_id": f"{path.kind}/{path.name}",
            "checkpoint_type": KINDS[path.kind],
            "tinker_path": str(path),
            "time": facts["time"],
            "expires_at": facts.get("expires_at"),
            "public": facts.get("public", False),
            "size_bytes": sum(file.stat().st_size for file in self.find(path).rglob("*") if file.is_file()),
            "user_metadata": facts.get("user_metadata"),
        }

    def remove_expired(self) -> None:
        for path in [path for run in self.runs() for path in self.of_run(run)]:
            expires = self.facts(path).get("expires_at")
            if expires and datetime.fromisoformat(expires) <= self._now():
                self.delete(path)

    def unnamed_folder(self, session_id: str) -> Path:
        """Where weights without a name live until their session ends."""
        return self.folder / UNNAMED / check_name(session_id)

    def _place(self, path: TinkerPath) -> Path:
        return self.folder / check_name(path.run) / path.kind / check_name(path.name)

    def _names(self, run: str, kind: str) -> Iterator[str]:
        parent = self.folder / check_name(run) / kind
        for entry in parent.iterdir() if parent.is_dir() else ():
            if _NAME.fullmatch(entry.name) and (entry / MARKER).is_file():
                yield entry.name


def _lock(folder: Path) -> IO[str]:
    """One server per folder; the lock goes with the process."""
    stream = (folder / ".lock").open("w")
    with suppress(ImportError):  # there is none on Windows
        import fcntl

        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            stream.close()
            raise EngineError(f"another server keeps its checkpoints in {folder}; name a different folder") from exc
    return stream


def _sweep_drafts(folder: Path) -> None:
    """Remove what a killed server was writing. It holds the folder's lock no longer, so nothing else writes there."""
    # Parents first: a draft is removed with all that is in it.
    for entry in sorted(folder.rglob(".*"), key=lambda path: len(path.parts)):
        match = _DRAFT.fullmatch(entry.name)
        if match is None and not entry.name.endswith((".part", ".old")):
            continue
        target = entry.with_name(match["name"]) if match and match["old"] else None
        if target is not None and entry.exists() and not target.exists():
            os.replace(entry, target)  # killed between the two renames of a replacement: the older version counts
        elif entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _write_json(file: Path, value: JsonObject) -> None:
    draft = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    with draft.open("w") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, file)
