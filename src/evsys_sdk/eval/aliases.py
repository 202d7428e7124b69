"""Alias matching: another name for the right answer is right too.

In: aliases that somebody has verified, and optionally a second, looser set; a prediction and its target. Out: at which
level they match: `exact`, `alias`, `secondary`, or not at all. Files are JSON: `{"GMAIL_SEND_EMAIL": ["GMAIL_SEND"]}`
says which other names count for a target (one way only); a list of groups, `[["A", "B"]]`, says that all names of a
group stand for one thing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from evsys_sdk.answers import wanted_answer
from evsys_sdk.errors import DataError, shorten
from evsys_sdk.jsonl import reason

Level = Literal["exact", "alias", "secondary"]
Aliases = Mapping[str, Iterable[str]] | Iterable[Iterable[str]]
LEVELS: tuple[Level, ...] = ("exact", "alias", "secondary")


class AliasMatcher:
    """Says whether a prediction means the target."""

    def __init__(
        self, aliases: Aliases | None = None, secondary: Aliases | None = None, *, case_sensitive: bool = False
    ):
        self.case_sensitive = case_sensitive
        self._aliases = self._read(aliases, "aliases")
        self._secondary = self._read(secondary, "secondary aliases")
        self.has_secondary = secondary is not None

    @classmethod
    def from_files(
        cls, aliases: str | Path, secondary: str | Path | None = None, *, case_sensitive: bool = False
    ) -> AliasMatcher:
        """The aliases in one JSON file, and perhaps the looser ones in another."""
        loose = None if secondary is None else _load(secondary)
        return cls(_load(aliases), loose, case_sensitive=case_sensitive)

    def match(self, predicted: str | None, target: Any) -> Level | None:
        """The strictest level at which they match. Of a target that is a list, any one will do."""
        if predicted is None:
            return None
        wanted = wanted_answer(target)
        levels = [self._level(predicted, str(one)) for one in (wanted if isinstance(wanted, list) else [wanted])]
        return next((level for level in LEVELS if level in levels), None)

    def matches(self, predicted: str | None, target: Any, *, level: Level = "alias") -> bool:
        """Whether they match at `level` or more strictly."""
        found = self.match(predicted, target)
        return found is not None and LEVELS.index(found) <= LEVELS.index(level)

    @property
    def sha256(self) -> str:
        """The same for the same aliases."""
        tables = [
            {name: sorted(others) for name, others in table.items()} for table in (self._aliases, self._secondary)
        ]
        text = json.dumps([tables, self.case_sensitive, self.has_secondary], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def __len__(self) -> int:
        """Names that have aliases."""
        return len(self._aliases)

    def _level(self, predicted: str, target: str) -> Level | None:
        if predicted.strip() == target.strip():
            return "exact"
        said, wanted = self._folded(predicted), self._folded(target)
        if said == wanted or said in self._aliases.get(wanted, ()):
            return "alias"
        return "secondary" if said in self._secondary.get(wanted, ()) else None

    def _folded(self, name: str) -> str:
        return name.strip() if self.case_sensitive else name.strip().casefold()

    def _read(self, aliases: Aliases | None, what: str) -> dict[str, set[str]]:
        table: dict[str, set[str]] = {}
        for name, others in _pairs(aliases, what):
            table.setdefault(self._folded(name), set()).update(map(self._folded, others))
        return table


def _pairs(aliases: Any, what: str) -> Iterable[tuple[str, list[str]]]:
    if aliases is None:
        return []
    if isinstance(aliases, Mapping):
        return [(str(name), _names(others, f"{what} of {name!r}")) for name, others in aliases.items()]
    if isinstance(aliases, str) or not isinstance(aliases, Iterable):
        raise DataError(f"{what} are a mapping (name -> other names) or a list of groups, not {shorten(repr(aliases))}")
    groups = [_names(group, f"{what}, group {index}") for index, group in enumerate(aliases)]
    return [(name, group) for group in groups for name in group]


def _names(value: Any, place: str) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, Mapping) or not isinstance(names, Iterable):
        raise DataError(f"{place} must be a list of names, not {shorten(repr(value))}")
    found = list(names)
    wrong = next((name for name in found if not isinstance(name, str) or not name.strip()), None)
    if wrong is not None:
        raise DataError(f"{place}: {shorten(repr(wrong))} is no name")
    return found


def _load(path: str | Path) -> Any:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise DataError(f"{path}: {getattr(exc, 'strerror', None) or reason(exc)}") from exc
    _pairs(found, f"{path}: aliases")  # a mistake is named with its file
    return found
