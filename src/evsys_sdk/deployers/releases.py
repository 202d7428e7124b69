"""A folder of releases, `<path>/<name>/`, and the link `<path>/current` to the one in use.

In: a folder that was filled beside its place. Out: it under its name, whole, with `deployment.json` inside; the link
moves in one step. A name is never used for other weights.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import deployment_of
from evsys_sdk.files import read_object, sync
from evsys_sdk.protocols import Deployment, ModelArtifact

CURRENT = "current"
ABOUT = "deployment.json"


@dataclass(frozen=True, slots=True)
class Releases:
    """The releases below `path`."""

    path: Path

    def add(self, made: Deployment, form: str, fill: Callable[[Path], None]) -> None:
        """Let `fill` write the files of a release, unless it is there already."""
        place = self.path / made.name
        found = read_object(place / ABOUT)
        if found is not None and found.get("digest") == made.digest and found.get("form") == form:
            return
        if place.exists() or place.is_symlink():
            raise EvsysError(f"{place} exists and holds something else; choose another path, or delete it")
        part = self.path / f".{made.name}.{secrets.token_hex(4)}.part"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            part.mkdir()
            fill(part)
            write_about(part, made, form)
            # Everything on disk before the rename: a release that has its name is whole, also after a power cut.
            for file in part.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)  # weights in a run's folder are for their owner alone
                sync(file)
            sync(part)
            os.rename(part, place)  # another process with the same weights got there first: refused, nothing is lost
            sync(self.path)
        except OSError as exc:
            raise EvsysError(f"{place} could not be written: {exc.strerror or exc}") from exc
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def describe(self, artifact: ModelArtifact, kind: str, form: str) -> Deployment:
        """The release that these weights are to become."""
        before = self.current(form)
        return deployment_of(
            artifact, kind, endpoint=str(self.path / artifact.name), alias=str(self.path / CURRENT),
            replaced=before.name if before else None,
        )  # fmt: skip

    def switch(self, name: str) -> None:
        """Point `current` at a release, in one step."""
        # A link cannot be changed in place; another one that takes its name is the one step there is.
        link = self.path / f".{CURRENT}.{secrets.token_hex(4)}.part"
        try:
            os.symlink(name, link)
            os.replace(link, self.path / CURRENT)
            sync(self.path)
        except OSError as exc:
            link.unlink(missing_ok=True)
            raise EvsysError(f"{self.path / CURRENT} could not be switched: {exc.strerror}") from exc

    def current(self, form: str) -> Deployment | None:
        """What `current` points at."""
        return read_about(self.path / CURRENT, form)

    def remove(self, name: str) -> None:
        """Delete a release; the one in use stays."""
        if (self.path / CURRENT).is_symlink() and os.readlink(self.path / CURRENT) == name:
            raise EvsysError(f"{self.path / name} is in use (current); deploy another one first")
        shutil.rmtree(self.path / name, ignore_errors=True)


class ReleaseDeployer:
    """The part that deployers into a folder share: the alias is the link `current`."""

    def __init__(self, path: str, form_name: str) -> None:
        self.releases = Releases(Path(path).expanduser().absolute())
        self.form_name = form_name
        """In which form the files are; a release in another form is another release."""

    def route(self, deployment: Deployment) -> None:
        self.releases.switch(deployment.name)

    def retire(self, name: str) -> None:
        self.releases.remove(name)

    def current(self) -> Deployment | None:
        return self.releases.current(self.form_name)


def write_about(folder: Path, made: Deployment, form: str) -> None:
    """Say in the folder which release it is."""
    (folder / ABOUT).write_text(json.dumps({**asdict(made), "form": form}, indent=2) + "\n")


def read_about(folder: Path, form: str) -> Deployment | None:
    """Which release a folder is. In another form than `form` its digest says so: it is not the same release."""
    found = read_object(folder / ABOUT)
    if found is None:
        return None
    was = found.pop("form", None)
    known = {key: value for key, value in found.items() if key in Deployment.__dataclass_fields__}
    if was != form:
        known["digest"] = f"{was}:{known.get('digest')}"
    return Deployment(**known)
