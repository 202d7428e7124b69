"""Where a config came from, so that a late mistake can still be shown with its line.

In: a loaded config. Out: its `Source`. The note lies in the model's `__dict__` under a name that is no field,
so two equal configs from different files stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evsys_sdk.config.document import FROM_COMMAND_LINE, Document, KeyPath, show_path, split_path
from evsys_sdk.errors import Problem

_NOTE = "·source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the settings of one run stand in the file."""

    prefix: KeyPath
    axes: Mapping[KeyPath, KeyPath] = field(default_factory=dict)
    """Run path -> file path, for the settings that an axis of a sweep provides."""

    def place(self, path: KeyPath) -> KeyPath:
        """File path of a run's setting."""
        if self.axes and path == ("name",):
            return next(iter(self.axes.values()))[:2]  # the names of a sweep's runs come from its axes
        for end in range(len(path), 0, -1):
            if path[:end] in self.axes:
                return (*self.axes[path[:end]], *path[end:])
        return (*self.prefix, *path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The file (or the Python program) a config was made by."""

    label: str = "config"
    folder: Path = field(default_factory=Path.cwd)
    """Folder of the config file; relative paths in it are also looked up from here."""
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    origins: tuple[Origin, ...] = ()
    """One per run, in order."""

    def located(self, problem: Problem) -> Problem:
        """`problem` with the line of its path, where the file has one."""
        if problem.line is not None:
            return problem
        document = Document(label=self.label, data=None, lines=self.lines)
        line = document.line(split_known(problem.path, self.lines))
        if line == FROM_COMMAND_LINE:
            return replace(problem, message=f"{problem.message} (from --set)")
        return replace(problem, line=line)

    def in_run(self, index: int, path: str) -> str:
        """The file's name for setting `path` of run number `index`."""
        origin = self.origins[index] if index < len(self.origins) else Origin(prefix=("runs", index))
        return show_path(origin.place(split_path(path)))


def split_known(text: str, lines: Mapping[KeyPath, int]) -> KeyPath:
    """Split a shown path, keeping dotted keys (sweep axes) whole when the file has such a key."""
    for head in (("matrix", "axes"), ("search", "space")):
        start = f"{show_path(head)}."
        rest = text.removeprefix(start)
        ends = [len(rest), *(index for index, letter in enumerate(rest) if letter in ".[")] if rest != text else []
        # The longest key first. Looked up, not searched for: a large file has many lines and may have many problems.
        for end in sorted(ends, reverse=True):
            if (*head, rest[:end]) in lines:
                return (*head, rest[:end], *split_path(rest[end:]))
    return split_path(text)


def remember(config: Any, source: Source) -> None:
    object.__getattribute__(config, "__dict__")[_NOTE] = source


def source_of(config: Any) -> Source:
    """The source of a config; a fresh one for a config that was made in Python."""
    found = object.__getattribute__(config, "__dict__").get(_NOTE)
    return found if isinstance(found, Source) else Source(label="ExperimentConfig")
