"""Which project the server works in, and which paths lie in it.

In: `--project`, the client's roots, the environment, the current folder. Out: a `ProjectFolder`; a path that a client
names, checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from evsys_sdk.constants import ENV_PROJECT_DIR
from evsys_sdk.errors import EvsysError

ENV_CLAUDE_PROJECT_DIR = "CLAUDE_PROJECT_DIR"
"""Set by Claude Code for what a plugin starts, whose current folder is the plugin's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectFolder:
    """The folder in which verbs are run, and what named it."""

    folder: Path
    named_by: str
    """`--project`, `roots of the client`, a variable of the environment, or `current folder`."""

    @property
    def root(self) -> Path:
        """The project around the folder; paths that a client names must lie in it."""
        from evsys_sdk.config.project import project_root  # with the config's models: not while the server starts

        return project_root(self.folder)

    def __str__(self) -> str:
        return f"{self.folder} (from {self.named_by})"


def find_project(option: str | None, *, environ: Mapping[str, str] = os.environ) -> ProjectFolder:
    """The project before the client has named its roots."""
    if option is not None:
        folder = Path(option)
        if not folder.is_dir():
            raise EvsysError(f"--project {option} is not a folder; name the folder of the research project")
        return ProjectFolder(folder=folder.resolve(), named_by="--project")
    for name in (ENV_PROJECT_DIR, ENV_CLAUDE_PROJECT_DIR):
        if (value := environ.get(name)) and Path(value).is_dir():
            return ProjectFolder(folder=Path(value).resolve(), named_by=name)
    return ProjectFolder(folder=Path.cwd(), named_by="current folder")


def project_of_roots(uris: Iterable[str]) -> ProjectFolder | None:
    """The first of the client's roots that is a folder on this machine."""
    for uri in uris:
        parts = urlsplit(uri)
        folder = Path(unquote(parts.path))
        if parts.scheme == "file" and parts.netloc in ("", "localhost") and folder.is_dir():
            return ProjectFolder(folder=folder.resolve(), named_by="roots of the client")
    return None


def check_path(path: str, *, what: str) -> str:
    """`path`, if it lies in the project around the current folder; symbolic links are followed."""
    from evsys_sdk.config.project import project_root

    root = project_root(Path.cwd())
    try:
        lies_inside = Path(path).resolve().is_relative_to(root)
    except (OSError, ValueError):  # a loop of links, a null byte
        lies_inside = False
    if not lies_inside:
        raise EvsysError(
            f"{what}: {path!r} lies outside the project {root}; name a path in it, relative to {Path.cwd()}"
        )
    return path


def check_reference(ref: str) -> str:
    """The name of an experiment, or the path of its record, which must lie in the project."""
    is_path = os.path.exists(ref)  # False, not an error, for a name that is too long for a file
    if "/" in ref or is_path:
        check_path(ref if is_path else ref.partition(":")[0], what="experiment")
    return ref


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuse `a.b=/etc/x`, `a.b=../x` and `a={b: ../x}`: no override may name a file outside the project either."""
    from evsys_sdk.config.yaml_io import parse_value

    for override in overrides:
        key, _, value = override.partition("=")
        for word in _texts_in(parse_value(value)):
            if word.startswith(("/", "~")) or ".." in Path(word).parts:
                check_path(os.path.expanduser(word), what=f"set {key}")


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value.strip()
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts_in(inner)
