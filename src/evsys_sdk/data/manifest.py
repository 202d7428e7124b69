"""What the workspace stores: checked lines, and a manifest that vouches for them.

In: a user's file, or what a remote source sends; `<id>.jsonl` and `<id>.manifest.json`. Out: clean lines, one JSON
object each, as bytes; a `DatasetManifest`, or the reason why a stored file is not to be trusted. A line that is no row
is named by file and number. JSONL lines keep their own spelling; only blank lines, line endings and a byte-order mark
are dropped, so that they do not make a new version. The manifest is written last: its `complete: true` vouches for the
data beside it.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import itertools
import json
import os
import re
import time
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from evsys_sdk.config.base import JsonDict
from evsys_sdk.config.schema import DataConfig
from evsys_sdk.data.columns import row_at
from evsys_sdk.data.sources import as_rows, kind_of_file, open_source
from evsys_sdk.data.stores import LocalDataStore
from evsys_sdk.data_types import TargetFormat, detect_format, from_dict
from evsys_sdk.errors import DataError, WorkspaceError, shorten
from evsys_sdk.files import encode_row, open_bytes, parse_object, reason, to_json, whole_file

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
class DatasetManifest:
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


def read_manifest(path: Path, kind: Kind) -> DatasetManifest:
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
        # Not isinstance, to which True is an int.
        if type(data.get(key)) is not wanted:
            raise WorkspaceError(f"its manifest has no {key!r} of type {wanted.__name__}")
    if data["kind"] != kind or path.name != f"{data['id']}.manifest.json":
        raise WorkspaceError(f"its manifest is that of {data['kind']} {data['id']!r}")
    # `transforms_sha256` stands in the file and is no field: it is computed.
    given = {key: value for key, value in data["lineage"].items() if key in Lineage.__dataclass_fields__}
    for key in ("parents", "transforms"):
        given[key] = tuple(given.get(key) or ())
    lineage = Lineage(**{"source": "", **given})
    return DatasetManifest(**{key: data[key] for key in _REQUIRED if key != "lineage"}, lineage=lineage)


def manifest_data(manifest: DatasetManifest) -> JsonDict:
    """The manifest as plain data: what its file holds and `evsys data --json` prints."""
    data = dataclasses.asdict(manifest)
    data["lineage"]["transforms_sha256"] = manifest.lineage.transforms_sha256
    return data


def write_manifest(path: Path, manifest: DatasetManifest) -> None:
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


def fault_of(manifest: DatasetManifest, path: Path, *, thorough: bool = True) -> str | None:
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
        # Of the handle, not of the path: the stamps must be those of the very file that is read.
        stat = os.fstat(handle.fileno())
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if key in _measured:
            return _measured[key]
        digest, rows, size = hashlib.sha256(), 0, 0
        while block := handle.read(1 << 20):
            digest.update(block)
            rows, size = rows + block.count(b"\n"), size + len(block)
    contents = Contents(rows=rows, bytes=size, sha256=digest.hexdigest())
    if time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > _STAMPS_SETTLE_NS:
        _measured[key] = contents
    return contents


def data_file(path: Path) -> Path:
    """The file that `path` means: itself, or the `tasks.jsonl` of a benchmark's folder."""
    tasks = path / "tasks.jsonl"
    return tasks if path.is_dir() and tasks.is_file() else path


def file_lines(path: Path, kind: Kind) -> Iterator[bytes]:
    """The rows of a JSONL file, a `.json` list, a CSV or a Parquet file, as checked lines."""
    if kind_of_file(path) != "jsonl":
        source = open_source(DataConfig(source_kind=kind_of_file(path), path=str(path)), store=LocalDataStore())
        for index, row in enumerate(as_rows(source.rows(), str(path))):
            yield _check_row(row, f"{path}: {row_at(index)}", kind)
        return
    with open_bytes(path) as handle:
        try:
            for number, raw in enumerate(handle, 1):
                line = (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).strip()
                if line:
                    yield _check_row(line, f"{path}:{number}", kind)
        except (OSError, EOFError, zlib.error) as exc:  # a packed file that was cut short
            raise DataError(f"{path}: cannot be read to its end: {reason(exc)}") from exc


def stream_lines(items: Iterable[Mapping[str, Any] | bytes], what: str, kind: Kind) -> Iterator[bytes]:
    """The rows a remote source sends as checked lines; byte chunks may be cut anywhere."""
    number, rest = 0, b""
    for item in itertools.chain(items, [b"\n"]):  # the line break ends a last line that has none
        whole: list[Mapping[str, Any] | bytes] = [item] if not isinstance(item, bytes) else []
        if isinstance(item, bytes):
            *lines, rest = (rest + item).split(b"\n")
            # As they are, but for blank ones: the source announced a hash of these bytes.
            whole += [line for line in lines if line.strip()]
        for one in whole:
            number += 1
            yield _check_row(one, f"{what}: row {number}", kind)


def _check_row(item: Mapping[str, Any] | bytes, place: str, kind: Kind) -> bytes:
    """The row as a line of JSON; a row of a benchmark must be a task that can be verified."""
    try:
        row = parse_object(item) if isinstance(item, bytes) else dict(item)
        if kind == "benchmark":
            if detect_format(row) != TargetFormat.HARBOR_TASK:
                keys = shorten(", ".join(map(str, row)), 100)
                raise DataError(f"a benchmark's row needs `instruction` and `verifier`; this one has: {keys}")
            from_dict(row)
    except DataError as exc:
        raise DataError(f"{place}: {exc}") from exc
    return item + b"\n" if isinstance(item, bytes) else encode_row(row)
