"""One folder of stored versions: which are there, which are to be trusted, and how one is put there.

In: ids, names, lines. Out: `Manifest`s, or what is wrong. Data comes first and the manifest last, both whole and
read-only. Writers take turns behind a lock that a dead process does not hold; readers need no lock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from evsys_sdk.atomic import make_folder
from evsys_sdk.data.manifest import (
    Contents,
    Kind,
    Manifest,
    fault_of,
    is_safe_id,
    read_manifest,
    slug,
    write_data,
    write_manifest,
)
from evsys_sdk.errors import WorkspaceError, blame

_DATA, _MANIFEST = ".jsonl", ".manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """Something in the workspace that is not to be trusted."""

    id: str
    kind: Kind
    reason: str
    manifest: Manifest | None = None
    """None when not even the manifest is to be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """All stored versions of one kind. The folder is made by the first writer."""

    folder: Path
    kind: Kind

    def data_path(self, id: str) -> Path:
        return self.folder / f"{id}{_DATA}"

    def manifest_path(self, id: str) -> Path:
        return self.folder / f"{id}{_MANIFEST}"

    def read(self, id: str) -> Manifest:
        return read_manifest(self.manifest_path(id), self.kind)

    def ids(self) -> list[str]:
        """Of everything that lies here, finished or not."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        ends = (_DATA, _MANIFEST)
        found = {n.removesuffix(end) for n in names for end in ends if n.endswith(end) and not n.startswith(".")}
        return sorted(found)

    def claims(self) -> list[Manifest]:
        """Every complete manifest, oldest version first, whatever has become of its data."""
        found = []
        for id in self.ids():
            try:
                found.append(self.read(id))
            except WorkspaceError:
                continue
        return sorted(found, key=lambda m: (m.name, m.version, m.lineage.created_at))

    def judge(self, id: str, *, thorough: bool = True) -> Unusable | None:
        """Why the entry is not to be trusted, or None. Not `thorough` goes by the size of the data."""
        try:
            manifest = self.read(id)
        except WorkspaceError as exc:
            return Unusable(id=id, kind=self.kind, reason=str(exc))
        reason = fault_of(manifest, self.data_path(id), thorough=thorough)
        return Unusable(id=id, kind=self.kind, reason=reason, manifest=manifest) if reason else None

    def look_up(self, ref: str) -> tuple[Manifest | None, list[Unusable]]:
        """The newest trustworthy version that `ref` names, and the newer ones that are not."""
        if is_safe_id(ref) and self.manifest_path(ref).exists():
            fault = self.judge(ref)
            return (self.read(ref), []) if fault is None else (None, [fault])
        faults: list[Unusable] = []
        for manifest in reversed([m for m in self.claims() if m.name == ref]):
            fault = self.judge(manifest.id)
            if fault is None:
                return manifest, faults
            faults.append(fault)
        return None, faults or self._unfinished(ref)

    def _unfinished(self, ref: str) -> list[Unusable]:
        """Writes under this id or name that never came to an end."""
        ids = [id for id in self.ids() if id == ref or id.startswith(f"{slug(ref)}-v")]
        judged = [self.judge(id, thorough=False) for id in ids]
        return [fault for fault in judged if fault is not None and fault.manifest is None]

    def store(self, manifest: Manifest, lines: Iterable[bytes], what: str) -> Manifest:
        """Put `lines` here under the lock; content other than the manifest expects leaves nothing."""

        def check(found: Contents) -> None:
            if found.rows != manifest.n_rows:
                raise WorkspaceError(f"{what}: {found.rows} rows came and {manifest.n_rows} were announced; none kept")
            if manifest.sha256 and found.sha256 != manifest.sha256:
                raise WorkspaceError(f"{what}: the content is not the one announced (sha256 differs); nothing kept")

        with blame(WorkspaceError, what):
            contents = write_data(self.data_path(manifest.id), lines, check)
            manifest = replace(manifest, bytes=contents.bytes, sha256=contents.sha256)
            write_manifest(self.manifest_path(manifest.id), manifest)
        return manifest

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only writer. The kernel frees the lock of a process that dies."""
        with blame(WorkspaceError, f"writing in {self.folder}"):
            make_folder(self.folder)
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for leftover in self.folder.glob(".*.part"):  # nobody else writes now, so its writer was killed
                leftover.unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)
