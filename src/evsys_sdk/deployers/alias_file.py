"""An alias for targets that have none: a small JSON file that a gateway or a client reads.

In: a deployment. Out: the file, replaced in one step, so that a reader sees the old or the new one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from evsys_sdk.errors import EvsysError
from evsys_sdk.files import make_folder, read_object, write_json
from evsys_sdk.protocols import Deployment


@dataclass(frozen=True, slots=True)
class AliasFile:
    """Names the deployment that callers are to use."""

    path: Path

    def write(self, deployment: Deployment, **request: object) -> None:
        """`request`: what callers have to send, where `model` alone does not do it."""
        try:
            make_folder(self.path.parent)
            write_json(self.path, {**asdict(deployment), "request": {"model": deployment.name, **request}})
        except OSError as exc:
            raise EvsysError(f"the alias could not be written to {self.path}: {exc.strerror}") from exc

    def read(self) -> Deployment | None:
        found = read_object(self.path)
        if found is None:
            return None
        return Deployment(**{key: value for key, value in found.items() if key in Deployment.__dataclass_fields__})
