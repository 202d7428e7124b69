"""The project's own code behind a config.

In: a config. Out: every source file that its `imports:` (or `src/`), its agents and their tools are made of, and what
those import in turn. Imports are read, not run, also those inside functions; a module whose name is put together at run
time is not seen. Installed packages, the standard library and this SDK are not the project's.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from evsys_sdk.config.files import plain
from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.config.project import extension_names, search_folders
from evsys_sdk.config.source import source_of

SDK = ("evsys_sdk", "evsys_engine")
INSTALLED = {"site-packages", "dist-packages"}
PACKAGE = "__init__.py"
NAMING_CODE = ("agent_import_path", "agent_params")
"""Settings that say where code is, such as `my_project.agents.ToolUse` or `my_project.tools:search`."""


def project_files(config: ExperimentConfig) -> dict[str, Path]:
    """The files, by their paths below the project."""
    roots = search_folders(source_of(config))
    places = list(dict.fromkeys([*roots, *(Path(entry).resolve() for entry in sys.path)]))
    named = [file for name in extension_names(config) for file in _whole(_modules(name, places))]
    named += [file for name in _called(plain(config)) for file in _modules(name, places)]
    # What the config names is the project's wherever it lies, and so is what lies beside it.
    beside = [next(place for place in places if file.is_relative_to(place)) for file in named if not _installed(file)]
    roots = list(dict.fromkeys([*roots, *beside]))
    found = _with_what_they_import(named, roots, places)
    return {_below(roots, file).as_posix(): file for file in sorted(found)}


def _with_what_they_import(files: Sequence[Path], roots: Sequence[Path], places: Sequence[Path]) -> set[Path]:
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file not in found and not _installed(file) and any(file.is_relative_to(root) for root in roots):
            found.add(file)
            waiting += [module for name, where in _imports(file, places) for module in _modules(name, where)]
    return found


def _below(roots: Sequence[Path], file: Path) -> Path:
    return next(file.relative_to(root) for root in roots if file.is_relative_to(root))


def _installed(file: Path) -> bool:
    return bool(INSTALLED & {*file.parts}) or file.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())


def _whole(files: list[Path]) -> list[Path]:
    """Of a package that the config imports, every file: it may look for its parts itself."""
    if not files or files[-1].name != PACKAGE or _installed(files[-1]):
        return files
    return [*files, *files[-1].parent.rglob("*.py")]


def _called(value: Any, *, naming: bool = False) -> Iterator[str]:
    """The modules of agents and tools that settings name, each with what is wanted of it as its last part."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _called(inner, naming=naming or str(key).rpartition(".")[2] in NAMING_CODE)
    elif isinstance(value, list):
        for inner in value:
            yield from _called(inner, naming=naming)
    elif naming and isinstance(value, str) and ("." in value or ":" in value):
        yield value.replace(":", ".")


def _modules(name: str, places: Sequence[Path]) -> list[Path]:
    """The files that importing `name` runs, packages first; of one that is found in part, those of that part."""
    files: list[Path] = []
    parts = takewhile(str.isidentifier, name.split("."))
    for part in () if name.partition(".")[0] in SDK else parts:
        tries = (file for place in places for file in (place / part / PACKAGE, place / f"{part}.py"))
        file = next((file for file in tries if file.is_file()), None)
        files += [file] if file else []
        if file and file.name != PACKAGE:
            break
        places = [file.parent] if file else [place / part for place in places if (place / part).is_dir()]
    return files


def _imports(file: Path, places: Sequence[Path]) -> Iterator[tuple[str, Sequence[Path]]]:
    """What a file imports, and where that is looked for."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # one that is imported when the run begins has been refused by now
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, places) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            where = [file.parents[node.level - 1]] if node.level else places
            yield from ((f"{node.module}.{alias.name}" if node.module else alias.name, where) for alias in node.names)
