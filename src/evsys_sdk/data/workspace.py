"""The workspace `.evsys/`: datasets and benchmarks by id or name, each version stored once and for good.

In: a file to register, or a reference to pull. Out: `Manifest`s, and paths of JSONL files that were checked.
Layout: `datasets/<id>.jsonl` with `<id>.manifest.json`, and `benchmarks/` alike. A hit needs no network.
"""

from __future__ import annotations

import fcntl
import getpass
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

from evsys_sdk.constants import WORKSPACE_DIR
from evsys_sdk.data.manifest import (
    FOLDERS,
    Contents,
    DatasetManifest,
    Kind,
    Lineage,
    check_name,
    data_file,
    fault_of,
    file_lines,
    is_safe_id,
    mint_id,
    read_manifest,
    slug,
    stream_lines,
    tally,
    write_data,
    write_manifest,
)
from evsys_sdk.data.remote import DashboardSource, NotAtSource
from evsys_sdk.errors import DataError, WorkspaceError, closest, error_boundary
from evsys_sdk.files import make_folder

# Data is written first and the manifest last, both whole and read-only. Writers take turns behind a lock that a dead
# process does not hold; readers need no lock.


_DATA, _MANIFEST = ".jsonl", ".manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """Something in the workspace that is not to be trusted."""

    id: str
    kind: Kind
    reason: str
    manifest: DatasetManifest | None = None
    """None when not even the manifest is to be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFolder:
    """All stored versions of one kind. The folder is made by the first writer."""

    folder: Path
    kind: Kind

    def data_path(self, id: str) -> Path:
        return self.folder / f"{id}{_DATA}"

    def manifest_path(self, id: str) -> Path:
        return self.folder / f"{id}{_MANIFEST}"

    def read(self, id: str) -> DatasetManifest:
        return read_manifest(self.manifest_path(id), self.kind)

    def ids(self) -> list[str]:
        """Of everything that lies here, finished or not."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        ends = (_DATA, _MANIFEST)
        found = {n.removesuffix(end) for n in names for end in ends if n.endswith(end) and not n.startswith(".")}
        return sorted(found)

    def claims(self) -> list[DatasetManifest]:
        """Every complete manifest, oldest version first, whatever has become of its data."""
        found = []
        for id in self.ids():
            try:
                found.append(self.read(id))
            except WorkspaceError:
                continue
        return sorted(found, key=lambda m: (m.name, m.version, m.lineage.created_at))

    def version_of(self, contents: Contents, name: str, lineage: Lineage) -> DatasetManifest:
        """The manifest that this content already has under `name`, or that of the next version."""
        everything = self.claims()
        for other in everything:
            if other.name != name and slug(other.name) == slug(name):
                raise WorkspaceError(f"{name!r} would share its ids with {other.name!r}; take that name or another")
        versions = [m for m in everything if m.name == name]
        for known in versions:
            if known.sha256 == contents.sha256:
                return replace(known, n_rows=contents.rows, bytes=contents.bytes)
        version = 1 + max((m.version for m in versions), default=0)
        return DatasetManifest(
            id=mint_id(name, version, contents.sha256),
            name=name,
            version=version,
            kind=self.kind,
            n_rows=contents.rows,
            bytes=contents.bytes,
            sha256=contents.sha256,
            lineage=lineage,
        )

    def judge(self, id: str, *, thorough: bool = True) -> Unusable | None:
        """Why the entry is not to be trusted, or None. Not `thorough` goes by the size of the data."""
        try:
            manifest = self.read(id)
        except WorkspaceError as exc:
            return Unusable(id=id, kind=self.kind, reason=str(exc))
        reason = fault_of(manifest, self.data_path(id), thorough=thorough)
        return Unusable(id=id, kind=self.kind, reason=reason, manifest=manifest) if reason else None

    def look_up(self, ref: str) -> tuple[DatasetManifest | None, list[Unusable]]:
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
        return None, faults or self._unfinished_writes(ref)

    def _unfinished_writes(self, ref: str) -> list[Unusable]:
        """Writes under this id or name that never ended."""
        ids = [id for id in self.ids() if id == ref or id.startswith(f"{slug(ref)}-v")]
        judged = [self.judge(id, thorough=False) for id in ids]
        return [fault for fault in judged if fault is not None and fault.manifest is None]

    def store(self, manifest: DatasetManifest, lines: Iterable[bytes], what: str) -> DatasetManifest:
        """Put `lines` here under the lock; content other than the manifest expects leaves nothing."""

        def check(found: Contents) -> None:
            if found.rows != manifest.n_rows:
                raise WorkspaceError(f"{what}: {found.rows} rows came and {manifest.n_rows} were announced; none kept")
            if manifest.sha256 and found.sha256 != manifest.sha256:
                raise WorkspaceError(f"{what}: the content is not the one announced (sha256 differs); nothing kept")

        with error_boundary(WorkspaceError, what):
            contents = write_data(self.data_path(manifest.id), lines, check)
            manifest = replace(manifest, bytes=contents.bytes, sha256=contents.sha256)
            write_manifest(self.manifest_path(manifest.id), manifest)
        return manifest

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only writer. The kernel frees the lock of a process that dies."""
        with error_boundary(WorkspaceError, f"writing in {self.folder}"):
            make_folder(self.folder)
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for leftover in self.folder.glob(".*.part"):  # no other process writes now, so its writer was killed
                leftover.unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)


_Manifests = list[DatasetManifest]  # inside the class, `list` is a method
_REMOTE = "remote"


class RemoteSource(Protocol):
    """Which rows does this reference stand for elsewhere?"""

    def fetch(self, kind: Kind, ref: str) -> tuple[Mapping[str, Any], Iterable[Mapping[str, Any] | bytes]]:
        """What is coming, and it.

        The first has `id`, `name`, `version` and `n_rows`, and may have `sha256` (of the JSONL as
        it will be stored) and `lineage`. The second are rows, or chunks of JSONL bytes cut anywhere.
        """
        ...


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container whose user has no name
        return "unknown"


@dataclass(slots=True)
class Workspace:
    """The folder `root` (usually `.evsys`). Nothing is created before something is stored."""

    root: Path
    source: RemoteSource | None = field(default=None, kw_only=True)
    """Where a miss is fetched from; None works offline."""
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC), kw_only=True)
    who: Callable[[], str] = field(default=_user, kw_only=True)

    def __post_init__(self) -> None:
        self.root = Path(self.root)

    @classmethod
    def find(cls, start: str | Path | None = None, *, source: RemoteSource | None = None) -> Workspace:
        """The workspace of the project that `start` (a folder or a file; default: here) lies in. What it lacks comes
        from `source`; by default from the dashboard that the environment names, if it names one."""
        from evsys_sdk.config.project import project_root

        source = source or DashboardSource.from_environment()
        place = Path.cwd() if start is None else Path(start).absolute()
        return cls(project_root(place.parent if place.is_file() else place) / WORKSPACE_DIR, source=source)

    def pull_dataset(self, ref: str, *, force: bool = False) -> Path:
        """The checked JSONL file of a dataset, by id, or by name: its newest version. `force` asks the source again."""
        return self.path(self.pull(ref, "dataset", force=force))

    def pull_benchmark(self, ref: str, *, force: bool = False) -> Path:
        """The checked JSONL file of a benchmark, by id, or by name: its newest version. `force` asks the source
        again."""
        return self.path(self.pull(ref, "benchmark", force=force))

    def path(self, manifest: DatasetManifest) -> Path:
        """The data file of an entry."""
        return self.versions(manifest.kind).data_path(manifest.id)

    def versions(self, kind: Kind) -> VersionFolder:
        return VersionFolder(folder=self.root / FOLDERS[kind], kind=kind)

    def get(self, ref: str, kind: Kind = "dataset") -> DatasetManifest:
        """The entry that `ref` names, its file checked; never asks the source."""
        found, faults = self.versions(kind).look_up(ref)
        if faults:  # an older version would be other data under the name that was asked for
            raise WorkspaceError(self._say_untrusted(ref, kind, faults))
        if found is None:
            raise WorkspaceError(self._missing(ref, kind))
        return found

    def pull(self, ref: str, kind: Kind = "dataset", *, force: bool = False) -> DatasetManifest:
        """The entry that `ref` names; a miss, or a file not to be trusted, comes from the source if there is one.

        With `force` the source is asked even where the entry is stored: a name may have a newer version there, and an
        id is fetched and written again. A version that is stored under the same id with other content is refused."""
        if self.source is None:
            if force:
                raise WorkspaceError(f"{kind} {ref!r} cannot be pulled again: this workspace has no remote source")
            return self.get(ref, kind)
        if not force:
            found, faults = self.versions(kind).look_up(ref)
            if found is not None and not faults:
                return found
        with self.versions(kind).locked():
            found, faults = self.versions(kind).look_up(ref)  # another process may have been quicker
            if found is not None and not faults and not force:
                return found
            try:
                return self._fetch(self.source, ref, kind, force=force)
            except NotAtSource as exc:
                if faults:
                    raise WorkspaceError(self._say_untrusted(ref, kind, faults)) from exc
                raise WorkspaceError(f"{self._missing(ref, kind)}\n({exc})") from exc

    def list(self, kind: Kind | None = None) -> _Manifests:
        """Every version, by kind, name and number. Data files are judged by their size; `get` reads them."""
        kinds = [kind] if kind else FOLDERS
        everything = [(self.versions(each), m) for each in kinds for m in self.versions(each).claims()]
        return [m for folder, m in everything if folder.judge(m.id, thorough=False) is None]

    def unusable(self, kind: Kind | None = None) -> Sequence[Unusable]:
        """What lies in the workspace and is not to be trusted, as far as a quick look tells."""
        folders = [self.versions(each) for each in ([kind] if kind else FOLDERS)]
        found = [folder.judge(id, thorough=False) for folder in folders for id in folder.ids()]
        return [fault for fault in found if fault is not None]

    def add(
        self,
        path: str | Path,
        *,
        name: str,
        kind: Kind = "dataset",
        parents: Sequence[str] = (),
        transforms: Sequence[Any] = (),
        note: str = "",
    ) -> DatasetManifest:
        """Register a JSONL file or `.json` list as the next version of `name`; content it already has is no new one."""
        check_name(name)
        file = data_file(Path(path))
        # Read once here and once more to store it, so that a large file is checked without holding the lock; `store`
        # keeps nothing if it has changed in between.
        contents = tally(file_lines(file, kind))
        if not contents.rows:
            raise DataError(f"{file} has no rows")
        lineage = Lineage(
            source=self._relative_path(file),
            parents=tuple(self._known_id(parent) for parent in parents),
            transforms=tuple(transforms),
            created_at=self._timestamp(),
            who=self.who(),
            note=note,
        )
        folder = self.versions(kind)
        with folder.locked():
            manifest = folder.version_of(contents, name, lineage)
            if folder.judge(manifest.id) is None:
                return manifest
            return folder.store(manifest, file_lines(file, kind), f"adding {file}")

    def _fetch(self, source: RemoteSource, ref: str, kind: Kind, *, force: bool) -> DatasetManifest:
        """Pull from the source onto the locked folder; what is not as announced leaves nothing."""
        what, folder = f"pulling {kind} {ref!r}", self.versions(kind)
        with error_boundary(WorkspaceError, what):
            info, items = source.fetch(kind, ref)
            manifest = self._announced_manifest(info, ref, kind)
            if folder.judge(manifest.id) is None:
                stored = folder.read(manifest.id)
                if not force:
                    return stored
                # An id never changes its content, so what comes must be what is stored.
                manifest = replace(manifest, sha256=manifest.sha256 or stored.sha256)
                if manifest.sha256 != stored.sha256:
                    raise WorkspaceError(f"{what}: {manifest.id} is stored with other content; nothing was changed")
            return folder.store(manifest, stream_lines(items, what, kind), what)

    def _announced_manifest(self, info: Mapping[str, Any], ref: str, kind: Kind) -> DatasetManifest:
        """What the source says is coming; `sha256` may be empty, and `bytes` are counted when it is here."""
        for key, wanted in {"id": str, "name": str, "version": int, "n_rows": int}.items():
            if type(info.get(key)) is not wanted:
                raise WorkspaceError(f"the source did not say {key!r} ({wanted.__name__}) of {kind} {ref!r}")
        if not is_safe_id(info["id"]):
            raise WorkspaceError(f"the source gave {kind} {ref!r} an id that cannot be a file name: {info['id']!r}")
        if ref not in (info["id"], info["name"]):
            raise WorkspaceError(f"asked for {kind} {ref!r}, the source answered with {info['id']!r}")
        given = info.get("lineage") or {}
        lineage = Lineage(
            source=f"{_REMOTE}: {given['source']}" if given.get("source") else _REMOTE,
            parents=tuple(given.get("parents") or ()),
            transforms=tuple(given.get("transforms") or ()),
            created_at=self._timestamp(),
            who=str(given.get("who") or self.who()),
            note=str(given.get("note") or ""),
        )
        fields = {key: info[key] for key in ("id", "name", "version", "n_rows")}
        return DatasetManifest(**fields, kind=kind, bytes=0, sha256=str(info.get("sha256") or ""), lineage=lineage)

    def _timestamp(self) -> str:
        return self.now().isoformat(timespec="seconds")

    def _known_id(self, ref: str) -> str:
        """The id of a parent, which may be of either kind."""
        for kind in FOLDERS:
            found, _ = self.versions(kind).look_up(ref)
            if found is not None:
                return found.id
        raise WorkspaceError("parent: " + self._missing(ref, "dataset"))

    def _relative_path(self, file: Path) -> str:
        """`file` relative to the project where it lies inside, so that a manifest means the same on every machine."""
        file, project = file.resolve(), self.root.resolve().parent
        return str(file.relative_to(project)) if file.is_relative_to(project) else str(file)

    def _say_untrusted(self, ref: str, kind: Kind, faults: Sequence[Unusable]) -> str:
        lines = [f"  {self.versions(kind).data_path(fault.id)}: {fault.reason}" for fault in faults]
        manifest = faults[0].manifest
        if manifest is None or manifest.lineage.source.split(":")[0] == _REMOTE:
            remedy = f"delete its files and register the data again: evsys data add PATH --name NAME{_flag(kind)}"
        else:
            origin, name = quote(manifest.lineage.source), quote(manifest.name)
            remedy = f"register the original again: evsys data add {origin} --name {name}{_flag(kind)}"
        return "\n".join([f"{kind} {ref!r} is not to be trusted:", *lines, f"next: {remedy}"])

    def _missing(self, ref: str, kind: Kind) -> str:
        other: Kind = "benchmark" if kind == "dataset" else "dataset"
        here, there = self.list(kind), self.list(other)
        names = sorted({m.name for m in here})
        near = closest(ref, {*names, *(m.id for m in here)})
        parts = [f"no {kind} {ref!r} in {self.root}"]
        if ref in {word for m in there for word in (m.id, m.name)}:
            parts.append(f"there is a {other} of that name")
        if near:
            parts.append(f"closest: {near}")
        parts.append(f"known: {', '.join(names[:20]) or 'none'}{', ...' if len(names) > 20 else ''}")
        return "; ".join(parts) + f"\nnext: evsys data add PATH --name {quote(ref)}{_flag(kind)}"


def _flag(kind: Kind) -> str:
    return " --benchmark" if kind == "benchmark" else ""
