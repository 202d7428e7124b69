"""Where experiments are looked for, and the project's own extensions.

In: folders, a workspace, the name of an experiment. Out: the experiments there, or the one that is meant. What could
not be read, and which of several was taken, is noted on stderr.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evsys_sdk.history.history import History, ResolvedExperiment


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPlace:
    """Where experiments are looked for."""

    dirs: Sequence[str] = ()
    workspace: str | None = None

    def history(self) -> History:
        """The experiments there; what could not be read is noted on stderr."""
        from evsys_sdk.config.project import project_root
        from evsys_sdk.constants import WORKSPACE_DIR
        from evsys_sdk.errors import EvsysError
        from evsys_sdk.history.history import DEFAULT_OUTPUTS, read_history

        folders = [Path(folder) for folder in self.dirs]
        for folder in folders:
            if not folder.is_dir():
                raise EvsysError(f"--dir {folder} is not a folder")
        workspace = Path(self.workspace) if self.workspace else project_root(Path.cwd()) / WORKSPACE_DIR
        history = read_history(workspace, folders, outputs=Path.cwd() / DEFAULT_OUTPUTS)
        for problem in history.problems:
            print(f"note: {problem}", file=sys.stderr)
        return history

    def find(self, ref: str, history: History | None = None) -> ResolvedExperiment:
        """The experiment called `ref`; a choice between several of that name is noted on stderr."""
        from evsys_sdk.history.history import look_up

        found = look_up(ref, history or self.history())
        if found.note:
            print(f"note: {found.note}", file=sys.stderr)
        return found

    def find_or_newest(self, ref: str | None, history: History | None = None) -> ResolvedExperiment:
        """The experiment called `ref`; without a name the newest one, which is named on stderr."""
        from evsys_sdk.errors import EvsysError
        from evsys_sdk.history.history import ResolvedExperiment

        if ref is not None:
            return self.find(ref, history)
        entries = (history or self.history()).entries
        if not entries:
            raise EvsysError(
                "no experiment is known here. Run one, change to its project, or name the path of its record"
            )
        print(f"note: {entries[0].name} is the newest experiment", file=sys.stderr)
        return ResolvedExperiment(entry=entries[0])


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


def import_metrics(names: Sequence[str], recorded: Sequence[str] = ()) -> None:
    """The project may register metrics, in `names` or in what a record says was imported; without them the rest
    can still be compared."""
    from evsys_sdk.errors import EvsysError

    try:
        import_extensions(names or recorded)
    except EvsysError as exc:
        if names:
            raise
        print(f"note: the project's own metrics are missing: {exc}", file=sys.stderr)
