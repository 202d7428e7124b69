"""What several verbs need of a project: its own extensions, and the benchmark that words on a command line mean."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evsys_sdk.errors import DataError
    from evsys_sdk.eval.benchmark import Benchmark

SUITE = "a folder with tasks.jsonl or task directories, such a file, or a name or id in the workspace"


def import_extensions(names: Sequence[str], *settings: object) -> None:
    """Import modules that register extensions, from this folder or the project's root; agents, tools and environments
    that `settings` name by a dotted path can be imported from there afterwards."""
    from evsys_sdk.config.project import code_paths, make_importable, project_root
    from evsys_sdk.errors import EvsysError, error_boundary

    folders = list(dict.fromkeys([Path.cwd(), project_root(Path.cwd())]))
    if not names and any((folder / "src" / "__init__.py").is_file() for folder in folders):
        names = ["src"]
    make_importable(folders, [*names, *code_paths(list(settings), naming=True)])
    for name in names:
        with error_boundary(EvsysError, f"import of {name}"):
            importlib.import_module(name)


def load_suite(target: str, *, on_unreadable: Callable[[str, DataError], None] | None = None) -> Benchmark:
    """The benchmark at a path, or of that name or id in the workspace. A task that cannot be read is an error, or, with
    `on_unreadable`, reported there and left out."""
    from evsys_sdk.data.workspace import Workspace
    from evsys_sdk.eval.benchmark import Benchmark

    if Path(target).exists() or "/" in target:
        return Benchmark.load(target, on_unreadable=on_unreadable)
    folder = Workspace.find(Path.cwd()).pull_benchmark(target)
    return Benchmark.load(folder, name=target, on_unreadable=on_unreadable)
