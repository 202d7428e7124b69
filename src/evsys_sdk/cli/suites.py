"""The benchmark that words on a command line mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evsys_sdk.errors import DataError
    from evsys_sdk.eval.benchmark import Benchmark

SUITE = "a folder with tasks.jsonl or task directories, such a file, or a name or id in the workspace"


def load_suite(target: str, *, on_unreadable: Callable[[str, DataError], None] | None = None) -> Benchmark:
    """The benchmark at a path, or of that name or id in the workspace. A task that cannot be read is an error, or, with
    `on_unreadable`, reported there and left out."""
    from evsys_sdk.data.workspace import Workspace
    from evsys_sdk.eval.benchmark import Benchmark

    if Path(target).exists() or "/" in target:
        return Benchmark.load(target, on_unreadable=on_unreadable)
    folder = Workspace.find(Path.cwd()).pull_benchmark(target)
    return Benchmark.load(folder, name=target, on_unreadable=on_unreadable)
