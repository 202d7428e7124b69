"""The workspace `.evsys/`: datasets and benchmarks by id or name, each version stored once and for good.

In: a file to register, or a reference to pull. Out: `Manifest`s, and paths of JSONL files that were checked.
Layout: `datasets/<id>.jsonl` with `<id>.manifest.json`, and `benchmarks/` alike. A hit needs no network.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

from evsys_sdk.constants import WORKSPACE_DIR
from evsys_sdk.data.intake import data_file, file_lines, stream_lines
from evsys_sdk.data.manifest import (
    FOLDERS,
    Contents,
    Kind,
    Lineage,
    Manifest,
    check_name,
    is_safe_id,
    mint_id,
    slug,
    tally,
)
from evsys_sdk.data.shelf import Shelf, Unusable
from evsys_sdk.errors import DataError, WorkspaceError, blame, closest

_Manifests = list[Manifest]  # inside the class, `list` is a method
_REMOTE = "remote"


class RemoteSource(Protocol):
    """Which rows does this reference stand for elsewhere?"""

    def fetch(self, kind: Kind, ref: str) -> tuple[Mapping[str, Any], Iterable[Mapping[str, Any] | bytes]]:
        """What is coming, and it.

        The first has `id`, `name`, `version` and `rows` (their number), and may have `sha256` (of the JSONL as
        it will be stored) and `lineage`. The second are rows, or chunks of JSONL bytes cut anywhere.
        """
        ...


def _utc_now() -> datetime:
    return datetime.now(UTC)


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
    now: Callable[[], datetime] = field(default=_utc_now, kw_only=True)
    who: Callable[[], str] = field(default=_user, kw_only=True)

    def __post_init__(self) -> None:
        self.root = Path(self.root)

    @classmethod
    def find(cls, start: str | Path | None = None, *, source: RemoteSource | None = None) -> Workspace:
        """The workspace of the project that `start` (a folder or a file; default: here) lies in."""
        from evsys_sdk.config.project import project_root

        place = Path.cwd() if start is None else Path(start).absolute()
        return cls(project_root(place.parent if place.is_file() else place) / WORKSPACE_DIR, source=source)

    def pull_dataset(self, ref: str, *, force: bool = False) -> Path:
        """The checked JSONL file of a dataset, by id, or by name: its newest version. `force` asks the source again."""
        return self.path(self.pull(ref, "dataset", force=force))

    def pull_benchmark(self, ref: str, *, force: bool = False) -> Path:
        """The checked JSONL file of a benchmark, by id, or by name: its newest version. `force` asks the source
        again."""
        return self.path(self.pull(ref, "benchmark", force=force))

    def path(self, manifest: Manifest) -> Path:
        """The data file of an entry."""
        return self.shelf(manifest.kind).data_path(manifest.id)

    def shelf(self, kind: Kind) -> Shelf:
        return Shelf(folder=self.root / FOLDERS[kind], kind=kind)

    def get(self, ref: str, kind: Kind = "dataset") -> Manifest:
        """The entry that `ref` names, its file checked; never asks the source."""
        found, faults = self.shelf(kind).look_up(ref)
        if faults:  # an older version would be other data under the name that was asked for
            raise WorkspaceError(self._untrusted(ref, kind, faults))
        if found is None:
            raise WorkspaceError(self._missing(ref, kind))
        return found

    def pull(self, ref: str, kind: Kind = "dataset", *, force: bool = False) -> Manifest:
        """The entry that `ref` names; a miss, or a file not to be trusted, comes from the source if there is one.

        With `force` the source is asked even where the entry is stored: a name may have a newer version there, and an
        id is fetched and written again. A version that is stored under the same id with other content is refused."""
        if self.source is None:
            if force:
                raise WorkspaceError(f"{kind} {ref!r} cannot be pulled again: this workspace has no remote source")
            return self.get(ref, kind)
        if not force:
            found, faults = self.shelf(kind).look_up(ref)
            if found is not None and not faults:
                return found
        with self.shelf(kind).locked():
            found, faults = self.shelf(kind).look_up(ref)  # another process may have been quicker
            if found is not None and not faults and not force:
                return found
            return self._fetch(self.source, ref, kind, force=force)

    def list(self, kind: Kind | None = None) -> _Manifests:
        """Every version, by kind, name and number. Data files are judged by their size; `get` reads them."""
        kinds = [kind] if kind else FOLDERS
        everything = [(self.shelf(each), m) for each in kinds for m in self.shelf(each).claims()]
        return [m for shelf, m in everything if shelf.judge(m.id, thorough=False) is None]

    def unusable(self, kind: Kind | None = None) -> Sequence[Unusable]:
        """What lies in the workspace and is not to be trusted, as far as a quick look tells."""
        shelves = [self.shelf(each) for each in ([kind] if kind else FOLDERS)]
        found = [shelf.judge(id, thorough=False) for shelf in shelves for id in shelf.ids()]
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
    ) -> Manifest:
        """Register a JSONL file or `.json` list as the next version of `name`; content it already has is no new one."""
        check_name(name)
        file = data_file(Path(path))
        contents = tally(file_lines(file, kind))
        if not contents.rows:
            raise DataError(f"{file} has no rows")
        lineage = Lineage(
            source=self._shown(file),
            parents=tuple(self._known_id(parent) for parent in parents),
            transforms=tuple(transforms),
            created_at=self._timestamp(),
            who=self.who(),
            note=note,
        )
        shelf = self.shelf(kind)
        with shelf.locked():
            manifest = _version_for(contents, name, lineage, shelf)
            if shelf.judge(manifest.id) is None:
                return manifest
            return shelf.store(manifest, file_lines(file, kind), f"adding {file}")

    def _fetch(self, source: RemoteSource, ref: str, kind: Kind, *, force: bool) -> Manifest:
        """Pull from the source onto the locked shelf; what is not as announced leaves nothing."""
        what, shelf = f"pulling {kind} {ref!r}", self.shelf(kind)
        with blame(WorkspaceError, what):
            info, items = source.fetch(kind, ref)
            manifest = self._announced(info, ref, kind)
            if shelf.judge(manifest.id) is None:
                stored = shelf.read(manifest.id)
                if not force:
                    return stored
                # An id never changes its content, so what comes must be what is stored.
                manifest = replace(manifest, sha256=manifest.sha256 or stored.sha256)
                if manifest.sha256 != stored.sha256:
                    raise WorkspaceError(f"{what}: {manifest.id} is stored with other content; nothing was changed")
            return shelf.store(manifest, stream_lines(items, what, kind), what)

    def _announced(self, info: Mapping[str, Any], ref: str, kind: Kind) -> Manifest:
        """What the source says is coming; `sha256` may be empty, and `bytes` are counted when it is here."""
        for key, wanted in {"id": str, "name": str, "version": int, "n_rows": int}.items():
            if type(info.get(key)) is not wanted:
                raise WorkspaceError(f"the source did not say {key!r} ({wanted.__name__}) of {kind} {ref!r}")
        if not is_safe_id(info["id"]):
            raise WorkspaceError(f"the source gave {kind} {ref!r} an id that cannot be a file name: {info['id']!r}")
        if ref not in (info["id"], info["name"]):
            raise WorkspaceError(f"asked for {kind} {ref!r}, the source answered with {info['id']!r}")
        told = info.get("lineage") or {}
        lineage = Lineage(
            source=f"{_REMOTE}: {told['source']}" if told.get("source") else _REMOTE,
            parents=tuple(told.get("parents") or ()),
            transforms=tuple(told.get("transforms") or ()),
            created_at=self._timestamp(),
            who=str(told.get("who") or self.who()),
            note=str(told.get("note") or ""),
        )
        given = {key: info[key] for key in ("id", "name", "version", "n_rows")}
        return Manifest(**given, kind=kind, bytes=0, sha256=str(info.get("sha256") or ""), lineage=lineage)

    def _timestamp(self) -> str:
        return self.now().isoformat(timespec="seconds")

    def _known_id(self, ref: str) -> str:
        """The id of a parent, which may be of either kind."""
        for kind in FOLDERS:
            found, _ = self.shelf(kind).look_up(ref)
            if found is not None:
                return found.id
        raise WorkspaceError("parent: " + self._missing(ref, "dataset"))

    def _shown(self, file: Path) -> str:
        """`file` relative to the project where it lies inside, so that a manifest means the same on every machine."""
        file, project = file.resolve(), self.root.resolve().parent
        return str(file.relative_to(project)) if file.is_relative_to(project) else str(file)

    def _untrusted(self, ref: str, kind: Kind, faults: Sequence[Unusable]) -> str:
        lines = [f"  {self.shelf(kind).data_path(fault.id)}: {fault.reason}" for fault in faults]
        return "\n".join([f"{kind} {ref!r} is not to be trusted:", *lines, f"next: {_remedy(faults[0])}"])

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


def _version_for(contents: Contents, name: str, lineage: Lineage, shelf: Shelf) -> Manifest:
    """The manifest that this content already has under `name`, or that of the next version."""
    everything = shelf.claims()
    for other in everything:
        if other.name != name and slug(other.name) == slug(name):
            raise WorkspaceError(f"{name!r} would share its ids with {other.name!r}; take that name or another")
    versions = [m for m in everything if m.name == name]
    for known in versions:
        if known.sha256 == contents.sha256:
            return replace(known, n_rows=contents.rows, bytes=contents.bytes)
    version = 1 + max((m.version for m in versions), default=0)
    return Manifest(
        id=mint_id(name, version, contents.sha256),
        name=name,
        version=version,
        kind=shelf.kind,
        n_rows=contents.rows,
        bytes=contents.bytes,
        sha256=contents.sha256,
        lineage=lineage,
    )


def _remedy(fault: Unusable) -> str:
    manifest = fault.manifest
    if manifest is None or manifest.lineage.source.split(":")[0] == _REMOTE:
        return f"delete its files and register the data again: evsys data add PATH --name NAME{_flag(fault.kind)}"
    origin, name = quote(manifest.lineage.source), quote(manifest.name)
    return f"register the original again: evsys data add {origin} --name {name}{_flag(fault.kind)}"


def _flag(kind: Kind) -> str:
    return " --benchmark" if kind == "benchmark" else ""
