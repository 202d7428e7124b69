"""A research project with a small working example.

In: a folder, which may hold a repository, and the date. Out: the files of `template/project` and a first experiment in
it. Nothing that exists is changed.
"""

from __future__ import annotations

import datetime
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from evsys_sdk.errors import EvsysError
from evsys_sdk.files import write_text

FIRST_SLUG = "first_sft"
DOTFILES = {"gitignore", "gitkeep"}
"""Template names that get a dot in front: git would read them where they lie."""
REGISTERING = "src/__init__.py"
FOR_AGENTS = "AGENTS.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldedProject:
    """What `init_project` did; paths are relative to `root`."""

    root: Path
    name: str
    experiment: str
    """The first experiment: a folder in `experiments/`."""
    written: list[str]
    kept: list[str]
    """Files that existed and were left as they are."""
    notes: list[str]
    """What the person has to do by hand because a file was kept."""


def init_project(folder: Path, *, date: datetime.date) -> ScaffoldedProject:
    """Fill `folder` with a project, keeping every file that is there."""
    root = Path(os.path.abspath(folder))
    if os.path.lexists(root) and not root.is_dir():
        raise EvsysError(f"{folder} is a {'file' if root.exists() else 'broken link'}; name a folder")
    name = package_name(root.name)
    # A project that was scaffolded on another day keeps its first experiment.
    existing = sorted(root.glob(f"experiments/*_{FIRST_SLUG}/config.yaml"))
    experiment = existing[0].parent.name if existing else experiment_name(FIRST_SLUG, date)
    texts = dict(template_texts("project", {"name": name, "experiment": experiment}))
    for path, text in template_texts("experiment", {"experiment": experiment}):
        texts[f"experiments/{experiment}/{path}"] = text
    _refuse_files_as_folders(root, texts)
    kept = [path for path in texts if os.path.lexists(root / path)]  # a dangling link is a user's file, too
    notes = []
    if REGISTERING in kept and not _names(root / REGISTERING, "metrics", "transforms", "verifiers"):
        notes.append(
            f"{REGISTERING} was kept and does not import the example's extensions; add this line to it:\n"
            "  from src import metrics, transforms, verifiers"
        )
    if FOR_AGENTS in kept and not _names(root / FOR_AGENTS, "evsys"):
        notes.append(
            f"{FOR_AGENTS} was kept and does not name evsys; add lines such as these to it:\n"
            "  Read `evsys context` before an experiment; `evsys conclude` after it.\n"
            "  Select by validation scores; do not open data/benchmark/, test.jsonl files, .env or keys."
        )
    written = [path for path in texts if path not in kept]
    for path in written:
        write_text(root / path, texts[path])
    return ScaffoldedProject(root=root, name=name, experiment=experiment, written=written, kept=kept, notes=notes)


def template_texts(part: str, words: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Relative path and text of each file of `template/<part>`, with `{{word}}` filled in."""
    for path, file in _walk(files("evsys_sdk.scaffold") / "template" / part):
        text = file.read_text(encoding="utf-8")
        folder, _, filename = path.rpartition("/")
        plain = filename.removesuffix(".template")
        if plain != filename:  # other files are data, taken as they are
            text = re.sub(r"\{\{(\w+)\}\}", lambda hole: words[hole.group(1)], text)
        dotted = f".{plain}" if plain in DOTFILES else plain
        yield f"{folder}/{dotted}" if folder else dotted, text


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for child in sorted(folder.iterdir(), key=lambda child: child.name):
        if child.is_dir():
            yield from _walk(child, f"{prefix}{child.name}/")
        else:
            yield f"{prefix}{child.name}", child


def package_name(text: str) -> str:
    """A name that pyproject.toml takes: `My project` becomes `my-project`."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()  # é is e and an accent
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-") or "research"


def experiment_name(slug: str, date: datetime.date) -> str:
    return f"{date:%Y%m%d}_{slug}"


def _refuse_files_as_folders(root: Path, paths: Mapping[str, str]) -> None:
    """Before anything is written: `data` may be a file."""
    folders = {parent for path in paths for parent in Path(path).parents}
    wrong = sorted(str(folder) for folder in folders if (root / folder).exists() and not (root / folder).is_dir())
    if wrong:
        raise EvsysError(f"{', '.join(wrong)} in {root} must be folders and are files; nothing was written")


def _names(file: Path, *words: str) -> bool:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return all(word in text for word in words)
