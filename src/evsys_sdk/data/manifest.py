"""What the workspace knows of one stored file, and whether the file still is what it was.

In: `<id>.jsonl` and `<id>.manifest.json`. Out: a `Manifest`, or the reason why the file is not to be trusted.
The manifest is written last: its `complete: true` vouches for the data beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from evsys_sdk.atomic import to_json, whole_file
from evsys_sdk.errors import WorkspaceError

Kind = Literal["dataset", "benchmark"]
FOLDERS: dict[Kind, str] = {"dataset": "datasets", "benchmark": "benchmarks"}
LONGEST_NAME = 80

_MINTED = re.compile(r"-v\d+-[0-9a-f]{8}$")
_SAFE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,149}")
_REQUIRED: dict[str, type] = {
    "id": str, "name": str, "version": int, "kind": str, "n_rows": int, "bytes": int, "sha256": str, "lineage": dict,
}  # fmt: skip
# A file changed within one tick of the kernel's clock keeps its time stamps, so fresh ones prove nothing yet.
_STAMPS_SETTLE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The size and fingerprint of a JSONL file with one row per line."""

    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a version came from."""

    source: str
    """A path (relative to the project where it lies inside), or `remote`."""
    parents: tuple[str, ...] = ()
    """Ids of the entries it was made from."""
    transforms: tuple[Any, ...] = ()
    """What was done to the parents, in order: names, or `{kind, params}`."""
    created_at: str = ""
    """When it was stored here, UTC, ISO 8601."""
    who: str = ""
    note: str = ""

    @property
    def transforms_sha256(self) -> str:
        """Of the transform chain: equal for equal names and params in the same order."""
        return hashlib.sha256(json.dumps(self.transforms, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One immutable version of a dataset or benchmark."""

    id: str
    name: str
    version: int
    kind: Kind
    n_rows: int
    bytes: int
    sha256: str
    """Of the stored JSONL file."""
    lineage: Lineage
    complete: bool = True
    """In the file it is the mark of a finished write; what lacks it never becomes a `Manifest`."""


def check_name(name: str) -> None:
    """Refuse names that could not be looked up again."""
    if not name.strip() or len(name) > LONGEST_NAME:
        raise WorkspaceError(f"a name has 1 to {LONGEST_NAME} characters, this one has {len(name.strip())}")
    if _MINTED.search(name):
        raise WorkspaceError(f"{name!r} looks like an id; give the name without version and hash")


def slug(name: str) -> str:
    """`name` as a file name: lower case, plain letters, dashes for the rest."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    text = re.sub(r"[^a-z0-9._-]+", "-", plain).strip("-.")
    return text or "set-" + hashlib.sha256(name.encode()).hexdigest()[:8]


def mint_id(name: str, version: int, sha256: str) -> str:
    return f"{slug(name)}-v{version}-{sha256[:8]}"


def is_safe_id(text: object) -> bool:
    """Whether `text` can be a file name in the workspace; an id from elsewhere must not walk out of it."""
    return isinstance(text, str) and _SAFE_ID.fullmatch(text) is not None


def read_manifest(path: Path, kind: Kind) -> Manifest:
    """The manifest in `path`; a WorkspaceError says in half a sentence why there is none to trust."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise WorkspaceError("it has no manifest, so it was never finished") from None
    except (OSError, ValueError) as exc:
        raise WorkspaceError(f"its manifest cannot be read ({exc})") from exc
    if not isinstance(data, dict) or data.get("complete") is not True:
        raise WorkspaceError("its manifest lacks `complete: true`, so it was never finished")
    for key, wanted in _REQUIRED.items():
        if type(data.get(key)) is not wanted:
            raise WorkspaceError(f"its manifest has no {key!r} of type {wanted.__name__}")
    if data["kind"] != kind or path.name != f"{data['id']}.manifest.json":
        raise WorkspaceError(f"its manifest is that of {data['kind']} {data['id']!r}")
    return _manifest(data)


def _manifest(data: dict[str, Any]) -> Manifest:
    told = {key: value for key, value in data["lineage"].items() if key in Lineage.__dataclass_fields__}
    for key in ("parents", "transforms"):
        told[key] = tuple(told.get(key) or ())
    lineage = Lineage(**{"source": "", **told})
    return Manifest(**{key: data[key] for key in _REQUIRED if key != "lineage"}, lineage=lineage)


def manifest_data(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain data: what its file holds and `evsys data --json` prints."""
    data = dataclasses.asdict(manifest)
    data["lineage"]["transforms_sha256"] = manifest.lineage.transforms_sha256
    return data


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Vouch for the data file, which must already be in place."""
    with whole_file(path) as handle:
        handle.write(to_json(manifest_data(manifest), indent=2).encode() + b"\n")
        os.fchmod(handle.fileno(), 0o444)


def write_data(path: Path, lines: Iterable[bytes], check: Callable[[Contents], None]) -> Contents:
    """Write `lines` whole and read-only; when `check` raises, nothing is left."""
    with whole_file(path) as handle:
        contents = tally(lines, handle)
        check(contents)
        os.fchmod(handle.fileno(), 0o444)
    return contents


def tally(lines: Iterable[bytes], copy_to: IO[bytes] | None = None) -> Contents:
    """Count and fingerprint `lines`, writing them to `copy_to` on the way."""
    digest, rows, size = hashlib.sha256(), 0, 0
    for line in lines:
        digest.update(line)
        rows, size = rows + 1, size + len(line)
        if copy_to is not None:
            copy_to.write(line)
    return Contents(rows=rows, bytes=size, sha256=digest.hexdigest())


def fault_of(manifest: Manifest, path: Path, *, thorough: bool = True) -> str | None:
    """What is wrong with the data file, or None. Not `thorough` looks at its size only."""
    try:
        size = path.stat().st_size
        if size != manifest.bytes:
            return f"its data file has {size} bytes and the manifest says {manifest.bytes}"
        if not thorough:
            return None
        found = measure(path)
    except FileNotFoundError:
        return "its data file is missing"
    except OSError as exc:
        return f"its data file cannot be read ({exc.strerror})"
    if found.sha256 != manifest.sha256:
        return f"its data file was changed: sha256 {found.sha256[:12]}, the manifest says {manifest.sha256[:12]}"
    if found.rows != manifest.n_rows:
        return f"its data file has {found.rows} rows and the manifest says {manifest.n_rows}"
    return None


_measured: dict[tuple[int, ...], Contents] = {}
"""Files this process has read before, by device, inode, size and time stamps."""


def measure(path: Path) -> Contents:
    """Count and fingerprint a stored file. It is read in full the first time, and again only when touched."""
    with open(path, "rb") as handle:
        stat = os.fstat(handle.fileno())
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if key in _measured:
            return _measured[key]
        contents = _measure(handle)
    if time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > _STAMPS_SETTLE_NS:
        _measured[key] = contents
    return contents


def _measure(handle: IO[bytes]) -> Contents:
    digest, rows, size = hashlib.sha256(), 0, 0
    while block := handle.read(1 << 20):
        digest.update(block)
        rows, size = rows + block.count(b"\n"), size + len(block)
    return Contents(rows=rows, bytes=size, sha256=digest.hexdigest())
