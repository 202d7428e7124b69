"""What several verbs need of a project: its own extensions, and the benchmark that words on a command line mean."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evsys_sdk.eval.benchmark import Benchmark

SUITE = "a folder with tasks.jsonl or task directories, such a file, or a name or id in the workspace"


def import_extensions(names: list[str]) -> None:
    """Modules that register extensions, found in this folder or at the project's root."""
    from evsys_sdk.config.project import project_root
    from evsys_sdk.errors import EvsysError, blame

    folders = list(dict.fromkeys([Path.cwd(), project_root(Path.cwd())]))
    if not names and any((folder / "src" / "__init__.py").is_file() for folder in folders):
        names = ["src"]
    sys.path[:0] = [str(folder) for folder in folders if names and str(folder) not in sys.path]
    for name in names:
        with blame(EvsysError, f"import of {name}"):
            importlib.import_module(name)


def load_suite(target: str) -> Benchmark:
    """The benchmark at a path, or of that name or id in the workspace."""
    from evsys_sdk.data.workspace import Workspace
    from evsys_sdk.eval.benchmark import Benchmark

    if Path(target).exists() or "/" in target:
        return Benchmark.load(target)
    return Benchmark.load(Workspace.find(Path.cwd()).pull_benchmark(target), name=target)
