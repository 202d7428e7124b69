"""The project around a config: its folders, and its own extensions.

In: a config. Out: the project's modules imported, so that their decorators have run before any look-up.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.config.root import project_root
from evsys_sdk.config.source import Source, source_of
from evsys_sdk.errors import FOREIGN, ConfigError, EvsysError, Problem
from evsys_sdk.logs import get_logger


def search_folders(source: Source) -> list[Path]:
    """Where relative paths of a config are looked up, after the store itself."""
    return list(dict.fromkeys([source.folder, project_root(source.folder)]))


def path_folders(source: Source) -> list[Path]:
    """Where a relative path that no store reads is looked up: where one starts, then as above."""
    return list(dict.fromkeys([Path.cwd(), *search_folders(source)]))


def extension_names(config: ExperimentConfig) -> list[str]:
    """The modules that `imports:` names; without it, a `src/` package beside the config or at the project's root."""
    if config.imports is not None:
        return list(config.imports)
    folders = search_folders(source_of(config))
    return ["src"] if any((folder / "src" / "__init__.py").is_file() for folder in folders) else []


def import_extensions(config: ExperimentConfig) -> None:
    """Import the project's own extensions, so that their decorators have run before any look-up."""
    source = source_of(config)
    folders = search_folders(source)
    names = extension_names(config)
    problems = []
    for index, name in enumerate(names):
        try:
            _import_from(folders, name)
        except FOREIGN as exc:
            get_logger(__name__).debug("import of %s failed\n%s", name, traceback.format_exc())
            problems.append(Problem(path=f"imports[{index}]", value=name, message=_why(name, exc, folders)))
    if problems:
        raise ConfigError(source.label, [source.located(p) for p in problems])


def _import_from(folders: list[Path], name: str) -> None:
    # The project's own folders come first, as they would for a script that lies there.
    for folder in reversed(folders):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    _forget_other_project(folders, name.partition(".")[0])
    importlib.invalidate_caches()
    importlib.import_module(name)


def _forget_other_project(folders: list[Path], top: str) -> None:
    """Drop a loaded module of the same name that belongs to another project (every project has a `src`)."""
    loaded = sys.modules.get(top)
    here = next(
        (path for folder in folders for path in (folder / top / "__init__.py", folder / f"{top}.py") if path.is_file()),
        None,
    )
    if loaded is None or here is None or getattr(loaded, "__file__", None) == str(here):
        return
    for module in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        del sys.modules[module]
    sys.path.insert(0, str(here.parent.parent if here.name == "__init__.py" else here.parent))


def _why(name: str, exc: BaseException, folders: list[Path]) -> str:
    if isinstance(exc, ModuleNotFoundError) and exc.name and name.split(".")[0] == exc.name.split(".")[0]:
        return f"no such module; looked in {', '.join(map(str, folders))} and the installed packages"
    if isinstance(exc, EvsysError):
        return f"importing it failed: {exc}"
    frames = traceback.extract_tb(exc.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(exc, SyntaxError):
        place = f" ({exc.filename}:{exc.lineno})"
    return f"importing it failed: {type(exc).__name__}: {exc}{place}"
