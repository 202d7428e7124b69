"""A model's name becomes a local folder.

In: what stands at `model.name`: a built-in name, a directory, a `.gguf` file or a hub id. Out: a `ModelFolder` that
transformers can load as it is. A name that leads nowhere is answered with what would.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evsys_engine.models import gguf
from evsys_engine.models.builtin import BUILT_INS
from evsys_engine.models.cache import cache_folder, make_ready
from evsys_engine.models.errors import ModelError
from evsys_engine.models.hub import HUB_ID, NotCached, find_on_hub
from evsys_engine.models.layout import missing_parts

Source = Literal["builtin", "directory", "gguf", "hub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model on this disk, ready to load."""

    name: str
    """As it was asked for."""
    path: Path
    source: Source
    sha256: str = ""
    """Of the GGUF file it was made from; empty where there was none."""


def find_model(
    name: str, *, cache: Path | None = None, fetch: bool = True, say: Callable[[str], None] = lambda line: None
) -> ModelFolder:
    """The folder of the model `name`, fetched and converted first if need be.

    `fetch=False` stays off the network. `say` hears what takes time.
    """
    cache = Path(cache) if cache is not None else cache_folder()
    if name in BUILT_INS:
        manifest = BUILT_INS[name].make(cache, fetch=fetch, say=say)
        return ModelFolder(name=name, path=cache / name, source="builtin", sha256=manifest["sha256"])
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        return _from_gguf(name, path, cache, say)
    if path.is_dir():
        return _from_directory(name, path)
    if HUB_ID.match(name):
        return _from_hub(name, fetch=fetch, say=say)
    raise ModelError(f"{name!r} is not a model that can be found here.\n{advice(name)}")


def unknown(name: str) -> str | None:
    """Why no model can be meant by `name`, without fetching or converting anything; None where one may be."""
    path = Path(name).expanduser()
    try:
        if name in BUILT_INS or path.is_file() or (path.is_dir() and _from_directory(name, path)):
            return None
    except ModelError as exc:
        return str(exc)
    if HUB_ID.match(name) and path.suffix.lower() != ".gguf":
        return None  # a hub may have it
    return f"{name!r} is not a model that can be found here.\n{advice(name)}"


def _from_directory(name: str, path: Path) -> ModelFolder:
    missing = missing_parts(path)
    if missing:
        files = sorted(path.glob("*.gguf"))
        hint = f"; name the file itself: {files[0]}" if files else ""
        raise ModelError(f"directory {name!r} is not a whole Hugging Face model: {missing}{hint}")
    return ModelFolder(name=name, path=path.resolve(), source="directory")


def _from_gguf(name: str, path: Path, cache: Path, say: Callable[[str], None]) -> ModelFolder:
    try:
        with open(path, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as exc:
        raise ModelError(f"model file {name!r}: {exc.strerror or exc}.\n{advice(name)}") from exc
    folder = cache / f"gguf-{re.sub(r'[^A-Za-z0-9._-]+', '-', path.stem)[:60]}-{digest[:12]}"
    facts = {"name": name, "source": "gguf", "recipe": gguf.RECIPE, "origin": str(path.resolve()), "sha256": digest}

    def fill(part: Path) -> None:
        say(f"converting {path.name} to safetensors")
        gguf.convert_gguf(path, part)

    make_ready(folder, facts, fill)
    return ModelFolder(name=name, path=folder, source="gguf", sha256=digest)


def _from_hub(name: str, **options: Any) -> ModelFolder:
    try:
        return ModelFolder(name=name, path=find_on_hub(name, **options), source="hub")
    except NotCached as exc:
        raise ModelError(f"{exc}.\n{advice(name)}") from exc


def advice(name: str) -> str:
    """What to do about a model that is not there."""
    hub = f"\n  where a hub can be reached: evsys model pull {name}" if HUB_ID.match(name) else ""
    return (
        f"What would do:\n  a built-in model: {closest_built_in(name)} (evsys model list){hub}\n"
        "  a local directory with config.json, *.safetensors and tokenizer.json, or a .gguf file"
    )


def closest_built_in(name: str) -> str:
    """The built-in most like `name`, else the one that really speaks."""
    near = difflib.get_close_matches(name.lower().rsplit("/", 1)[-1], BUILT_INS, n=1, cutoff=0.6)
    return near[0] if near else next(iter(BUILT_INS))
