"""Where files of rows are kept: on disk, or in memory for tests and notebooks.

In: paths, relative to the store or absolute. Out: rows and JSON values. Relative paths get their meaning only
here; `locate` gives the file itself.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from evsys_sdk.config.base import JsonDict, Params
from evsys_sdk.errors import DataError, closest, shorten
from evsys_sdk.files import open_bytes, read_rows, reason, to_json, write_json, write_rows
from evsys_sdk.protocols import Row
from evsys_sdk.registry import register_data_store


@register_data_store("local")
class LocalDataStore:
    """Files below `root`; an absolute path is taken as it is. Names ending in `.gz` are packed and unpacked."""

    class Config(Params):
        root: str = "."
        """Where relative paths begin; `.` is the folder the command runs in."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)

    def locate(self, path: str) -> Path:
        """The file that `path` means."""
        return Path(self.cfg.root).expanduser().absolute() / Path(path).expanduser()

    def read_jsonl(self, path: str) -> Iterator[Row]:
        """Stream the rows of a file; a bad line is named by file and number."""
        yield from read_rows(self.locate(path))

    def write_jsonl(self, path: str, rows: Iterable[Row]) -> None:
        """Write rows; the file appears whole."""
        write_rows(self.locate(path), rows)

    def read_json(self, path: str) -> Any:
        """The value of a JSON file; a mistake in it is named by file, line and column."""
        place = self.locate(path)
        try:
            with open_bytes(place) as handle:
                return json.loads(handle.read().decode("utf-8-sig"))
        except json.JSONDecodeError as exc:
            raise DataError(f"{place}:{exc.lineno}: not valid JSON ({exc.msg} at column {exc.colno})") from exc
        except (OSError, ValueError, EOFError, RecursionError, zlib.error) as exc:
            raise DataError(f"{place}: {reason(exc)}") from exc

    def write_json(self, path: str, value: Any) -> None:
        """Write a value as JSON; the file appears whole."""
        write_json(self.locate(path), value)

    def exists(self, path: str) -> bool:
        try:
            return self.locate(path).is_file()
        except (OSError, ValueError):  # a name that no file can have
            return False

    def list(self, prefix: str = "") -> list[str]:
        """Files whose path begins with `prefix`, sorted, relative to the store; hidden ones are left out."""
        root = self.locate("")
        top = self.locate(prefix if prefix.endswith("/") else os.path.dirname(prefix))
        found = []
        for folder, folders, file_names in os.walk(top):
            # In place: `os.walk` descends into what is left in this very list.
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [Path(folder, name) for name in file_names if not name.startswith(".")]
        names = (str(p.relative_to(root)) if p.is_relative_to(root) else str(p) for p in found)
        return sorted(name for name in names if name.startswith(os.path.normpath(prefix) if prefix else ""))

    def sha256(self, path: str) -> str:
        """Of the file's bytes as they lie on disk."""
        try:
            with open(self.locate(path), "rb") as handle:
                return hashlib.file_digest(handle, "sha256").hexdigest()
        except OSError as exc:
            raise DataError(f"{self.locate(path)}: {exc.strerror or exc}") from exc


@register_data_store("in_memory")
class InMemoryDataStore:
    """Files that live as long as the process. What is read is a copy, as it would be from disk."""

    class Config(Params):
        files: JsonDict = Field(default_factory=dict)
        """Path -> rows (for JSONL) or any value (for JSON) to begin with."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        self._written: JsonDict = {}

    def read_jsonl(self, path: str) -> Iterator[Row]:
        rows = self._value(path)
        if not isinstance(rows, list):
            raise DataError(f"{path} (in memory) holds {type(rows).__name__}, not a list of rows")
        yield from _copies(rows, path)

    def write_jsonl(self, path: str, rows: Iterable[Row]) -> None:
        self._written[path] = list(_copies(rows, path))

    def read_json(self, path: str) -> Any:
        return copy.deepcopy(self._value(path))

    def write_json(self, path: str, value: Any) -> None:
        self._written[path] = copy.deepcopy(value)

    def exists(self, path: str) -> bool:
        return path in self._files()

    def list(self, prefix: str = "") -> list[str]:
        return sorted(path for path in self._files() if path.startswith(prefix))

    def sha256(self, path: str) -> str:
        """Of the value as JSON."""
        text = to_json(self._value(path))
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def _files(self) -> JsonDict:
        return {**self.cfg.files, **self._written}

    def _value(self, path: str) -> Any:
        files = self._files()
        if path not in files:
            near = closest(path, files)
            raise DataError(f"no file {path!r} in memory{f'; closest: {near}' if near else ''}")
        return files[path]


def _copies(rows: Iterable[Any], path: str) -> Iterator[Row]:
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path} (in memory): row {index} is not a mapping but {shorten(repr(row))}")
        yield copy.deepcopy(row)
