"""What the model is called, by us and by clients.

In: the loaded model's `ModelInfo`. Out: the one name that clients are told, a check of the names they say, and a
fingerprint that tells whether a checkpoint belongs to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evsys_engine.types import BadRequest, ModelInfo


class Naming:
    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self.public = _public_name(info)
        """Clients load the tokenizer by this name: a hub id, or a folder on this machine."""
        self.known = list(dict.fromkeys([info.name, self.public, str(info.path)]))

    def check(self, base_model: str) -> None:
        if base_model in self.known or _is_folder(base_model, self._info.path):
            return
        raise BadRequest(f"base model {base_model!r} is not served here; this server has {' alias '.join(self.known)}")

    def facts(self) -> dict[str, Any]:
        """What a checkpoint remembers of the model it was trained on."""
        info = self._info
        print_of = info.extra.get("fingerprint") or f"{info.vocab_size}-{info.parameters}"
        return {"base_model": info.name, "fingerprint": print_of}

    def check_facts(self, path: str, facts: dict[str, Any]) -> None:
        if facts.get("fingerprint") != self.facts()["fingerprint"]:
            raise BadRequest(f"{path} was trained on {facts.get('base_model')!r}; this server has {self._info.name!r}")


def _public_name(info: ModelInfo) -> str:
    is_hub_id = info.name.count("/") == 1 and not Path(info.name).exists()
    if is_hub_id:
        return info.name
    name = str(info.path.absolute())
    # The client takes a name with two slashes for `org/model/variant` and would cut /models/tiny down to /models.
    return f"{name}/" if name.count("/") == 2 else name


def _is_folder(name: str, folder: Path) -> bool:
    try:
        return Path(name).samefile(folder)
    except (OSError, ValueError):
        return False
