"""A model's name becomes a local folder.

In: what stands at `model.name`: a built-in name, a directory, a `.gguf` file or a hub id. Out: a `ModelFolder` that
transformers can load as it is. A name that leads nowhere is answered with what would.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evsys_engine.models import gguf
from evsys_engine.models.builtin import BUILT_INS
from evsys_engine.models.cache import cache_folder, make_ready
from evsys_engine.models.errors import ModelError, need
from evsys_engine.types import JsonObject

# What makes a folder a model: config, weights, tokenizer.
#
# In: a folder. Out: what it lacks, its config, its tensors' shapes; all read from the files, without torch.


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def missing_parts(folder: Path) -> str:
    """What keeps `folder` from being a Hugging Face model, in words; empty for a whole one."""
    if not (folder / "config.json").is_file():
        return f"no config.json in {folder}"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return f"no tokenizer files (tokenizer.json) in {folder}"
    if (folder / "adapter_config.json").is_file() and not weight_files(folder):
        return f"{folder} holds an adapter, not a model; its base model is the one to name"
    for index in folder.glob("*.index.json"):
        wanted = sorted(set(read_json(index).get("weight_map", {}).values()))
        gone = [name for name in wanted if not (folder / name).is_file()]
        if gone:
            return f"{len(gone)} of {len(wanted)} weight files are missing in {folder} ({gone[0]})"
    return "" if weight_files(folder) else f"no weights (*.safetensors) in {folder}"


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights: safetensors, else torch's own."""
    safe = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter"))
    return safe or sorted(folder.glob("pytorch_model*.bin"))


def read_json(path: Path) -> JsonObject:
    """A JSON object from a file; empty where there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def text_config(folder: Path) -> JsonObject:
    """The config of the language model; a model of several senses keeps it one level down."""
    config = read_json(folder / "config.json")
    return {**config, **config.get("text_config", {})}


def count_parameters(folder: Path) -> int | None:
    """Numbers in the weights, each counted once; None where only torch could tell."""
    total = 0
    for path in weight_files(folder):
        if path.suffix != ".safetensors":
            return None
        # The format opens with the header's length and the header in JSON: name -> dtype and shape.
        with open(path, "rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header: JsonObject = json.loads(handle.read(length))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def has_chat_template(folder: Path) -> bool:
    return (folder / "chat_template.jinja").is_file() or bool(
        read_json(folder / "tokenizer_config.json").get("chat_template")
        or read_json(folder / "chat_template.json").get("chat_template")
    )


# Models of a Hugging Face hub, through its own library and its own cache.
#
# In: an id `org/name`. Out: the snapshot's folder. What is already complete in the cache is used without asking the
# hub.


HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
TEXTS = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


class NotCached(ModelError):
    """The hub library's cache does not hold the whole model."""


def find_on_hub(name: str, *, fetch: bool, say: Callable[[str], None]) -> Path:
    """The folder of a hub model, downloaded if allowed and needed."""
    hub = need("huggingface_hub")
    try:
        folder = Path(hub.snapshot_download(name, local_files_only=True))
        if not missing_parts(folder):
            return folder
    except Exception as exc:  # not there, or a broken cache: either way the hub is asked next
        if not fetch:
            raise NotCached(f"model {name!r} is not in the Hugging Face cache ({_reason(exc)})") from exc
    if not fetch:
        raise NotCached(f"model {name!r} is only in part in the Hugging Face cache")
    say(f"fetching {name} from the hub")
    missing = ""
    for weights in ("*.safetensors", "*.bin"):
        try:
            # Subfolders hold other formats of the same weights.
            folder = Path(hub.snapshot_download(name, allow_patterns=[*TEXTS, weights], ignore_patterns=["*/*"]))
        except Exception as exc:
            raise NotCached(
                f"model {name!r} is not in the Hugging Face cache and the hub did not give it ({_reason(exc)})"
            ) from exc
        missing = missing_parts(folder)
        if not missing:
            return folder
    # Out of reach, the library silently hands out what it has; so this is a lack of the hub's or of the way to it.
    raise NotCached(f"model {name!r} is only in part in the Hugging Face cache and the hub gave no more ({missing})")


def cached_models() -> list[tuple[str, Path, int]]:
    """(id, newest snapshot, bytes on disk) of each model in the hub library's cache."""
    try:
        info = need("huggingface_hub").scan_cache_dir(need("huggingface_hub.constants").HF_HUB_CACHE)
    except Exception:  # no library or no cache: then there are none
        return []
    repos = [repo for repo in info.repos if repo.repo_type == "model" and repo.revisions]
    newest = {repo: max(repo.revisions, key=lambda revision: revision.last_modified) for repo in repos}
    return sorted((repo.repo_id, Path(found.snapshot_path), int(repo.size_on_disk)) for repo, found in newest.items())


def _reason(exc: Exception) -> str:
    return f"{type(exc).__name__}: {str(exc).strip().splitlines()[0] if str(exc).strip() else 'no reason given'}"


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
        try:
            return ModelFolder(name=name, path=find_on_hub(name, fetch=fetch, say=say), source="hub")
        except NotCached as exc:
            raise ModelError(f"{exc}.\n{advice(name)}") from exc
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
