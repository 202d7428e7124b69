"""Models of a Hugging Face hub, through its own library and its own cache.

In: an id `org/name`. Out: the snapshot's folder. What is already complete in the cache is used without asking the hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from evsys_engine.models.errors import ModelError, need
from evsys_engine.models.layout import missing_parts

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
    return _download(hub, name)


def _download(hub: object, name: str) -> Path:
    missing = ""
    for weights in ("*.safetensors", "*.bin"):
        try:
            # Subfolders hold other formats of the same weights.
            folder = hub.snapshot_download(name, allow_patterns=[*TEXTS, weights], ignore_patterns=["*/*"])  # type: ignore[attr-defined]
        except Exception as exc:
            raise NotCached(
                f"model {name!r} is not in the Hugging Face cache and the hub did not give it ({_reason(exc)})"
            ) from exc
        missing = missing_parts(Path(folder))
        if not missing:
            return Path(folder)
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
