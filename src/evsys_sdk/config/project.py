"""The project's own code behind a config.

In: a config. Out: every source file that its `imports:` (or `src/`), its agents, their tools and its environments are
made of, and what those import in turn. Imports are read, not run, also those inside functions; a module whose name is
put together at run time is not seen. Installed packages, the standard library and this SDK are not the project's.
"""

from __future__ import annotations

import ast
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from evsys_sdk.config.load import plain
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.yaml_io import ConfigSource, source_of
from evsys_sdk.constants import WORKSPACE_DIR
from evsys_sdk.errors import FOREIGN, ConfigError, EvsysError, Problem
from evsys_sdk.logs import get_logger
from evsys_sdk.redaction import learn_from_environment

# Where a project begins.
#
# In: a folder. Out: the root of the project around it. Light: verbs that only look back import this and no config.


def project_root(start: Path) -> Path:
    """Nearest folder at or above `start` that holds `.evsys/` or `pyproject.toml`; else `start` itself."""
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / WORKSPACE_DIR).is_dir() or (folder / "pyproject.toml").is_file():
            return folder
    return start


# The project around a config: its folders, and its own extensions.
#
# In: a config. Out: the project's modules imported, so that their decorators have run before any look-up.


NAMING_CODE = ("agent_import_path", "agent_params", "environment")
"""Settings that say where code is."""


def search_folders(source: ConfigSource) -> list[Path]:
    """Where relative paths of a config are looked up, after the store itself."""
    return list(dict.fromkeys([source.folder, project_root(source.folder)]))


def path_folders(source: ConfigSource) -> list[Path]:
    """Where a relative path that no store reads is looked up: where one starts, then as above."""
    return list(dict.fromkeys([Path.cwd(), *search_folders(source)]))


def extension_names(config: ExperimentConfig) -> list[str]:
    """The modules that `imports:` names; without it, a `src/` package beside the config or at the project's root."""
    if config.imports is not None:
        return list(config.imports)
    folders = search_folders(source_of(config))
    return ["src"] if any((folder / "src" / "__init__.py").is_file() for folder in folders) else []


def code_paths(value: object, *, naming: bool = False) -> Iterator[str]:
    """Where settings say that agents, their tools and environments are, such as `my_project.agents.ToolUse`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            # The key of a sweep's axis is a dotted path, of which the last word names the setting.
            yield from code_paths(inner, naming=naming or str(key).rpartition(".")[2] in NAMING_CODE)
    elif isinstance(value, list):
        for inner in value:
            yield from code_paths(inner, naming=naming)
    elif naming and isinstance(value, str) and ("." in value or ":" in value):
        yield value.replace(":", ".")


def own_code_paths(config: ExperimentConfig) -> list[str]:
    """The `code_paths` of a config that lead into its own folders."""
    folders = search_folders(source_of(config))
    return [path for path in dict.fromkeys(code_paths(plain(config))) if _lies_in(folders, path)]


def import_extensions(config: ExperimentConfig) -> None:
    """Import the project's own extensions, so that their decorators have run before any look-up. What the config names
    by a dotted path (agents, tools, environments) can be imported from the same folders afterwards."""
    source = source_of(config)
    folders = search_folders(source)
    names = extension_names(config)
    make_importable(folders, [*names, *code_paths(plain(config))])
    problems = []
    for index, name in enumerate(names):
        try:
            importlib.import_module(name)
        except FOREIGN as exc:
            get_logger(__name__).debug("import of %s failed\n%s", name, traceback.format_exc())
            problems.append(Problem(path=f"imports[{index}]", value=name, message=_why(name, exc, folders)))
    learn_from_environment()
    if problems:
        raise ConfigError(source.label, [source.located(p) for p in problems])


def make_importable(folders: Sequence[Path], modules: Iterable[str]) -> None:
    """Let these modules, or what is in them, be imported from the project's folders if they lie there. The folders come
    first, as they would for a script that lies there; a project that names no module changes nothing."""
    own = {name.partition(".")[0] for name in modules if _lies_in(folders, name)}
    # Reversed, because each is put in front: the first folder ends up first.
    for folder in reversed(folders if own else ()):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    for top in sorted(own):
        _forget_other_project(folders, top)
    importlib.invalidate_caches()


def _lies_in(folders: Iterable[Path], module: str) -> bool:
    top = module.partition(".")[0]
    if not top.isidentifier():
        return False
    return any((folder / f"{top}.py").is_file() or (folder / top).is_dir() for folder in folders)


def _forget_other_project(folders: Sequence[Path], top: str) -> None:
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
    # In front once more: the other project's folder may stand before this one.
    sys.path.insert(0, str(here.parent.parent if here.name == "__init__.py" else here.parent))


def _why(name: str, exc: BaseException, folders: list[Path]) -> str:
    if isinstance(exc, ModuleNotFoundError) and exc.name and name.split(".")[0] == exc.name.split(".")[0]:
        module = name.removesuffix(".py").replace("/", ".")
        if module != name and _lies_in(folders, module):
            return f"a module is named without its ending: {module}"
        return f"no such module; looked in {', '.join(map(str, folders))} and the installed packages"
    if isinstance(exc, EvsysError):
        return f"importing it failed: {exc}"
    frames = traceback.extract_tb(exc.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(exc, SyntaxError):
        place = f" ({exc.filename}:{exc.lineno})"
    return f"importing it failed: {type(exc).__name__}: {exc}{place}"


SDK = ("evsys_sdk", "evsys_engine")
INSTALLED = {"site-packages", "dist-packages"}
PACKAGE = "__init__.py"


def project_files(config: ExperimentConfig) -> dict[str, Path]:
    """The files, by their paths below the project."""
    roots = search_folders(source_of(config))
    places = list(dict.fromkeys([*roots, *(Path(entry).resolve() for entry in sys.path)]))
    named: list[Path] = []
    for name in extension_names(config):
        named += (files := _modules(name, places))
        if files and files[-1].name == PACKAGE and not _is_installed(files[-1]):
            named += files[-1].parent.rglob("*.py")  # a package that the config imports may look for its parts itself
    named += [file for name in code_paths(plain(config)) for file in _modules(name, places)]
    # What the config names is the project's wherever it lies, and so is what lies beside it.
    beside = [
        next(place for place in places if file.is_relative_to(place)) for file in named if not _is_installed(file)
    ]
    roots = list(dict.fromkeys([*roots, *beside]))
    found: dict[Path, str] = {}
    waiting = named
    while waiting:
        file = waiting.pop()
        root = next((root for root in roots if file.is_relative_to(root)), None)
        if file not in found and root is not None and not _is_installed(file):
            found[file] = file.relative_to(root).as_posix()
            waiting += [module for name, where in _imports(file, places) for module in _modules(name, where)]
    return {found[file]: file for file in sorted(found)}


def _is_installed(file: Path) -> bool:
    return bool(INSTALLED & {*file.parts}) or file.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())


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
        # A folder without `__init__.py` is a namespace package, and may lie in several places.
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
            # One dot is the file's own folder, each further dot the one above.
            where = [file.parents[node.level - 1]] if node.level else places
            yield from ((f"{node.module}.{alias.name}" if node.module else alias.name, where) for alias in node.names)
