"""Which weights of a run were kept, and whether they are whole.

In: paths that a backend returned. Out: a manifest file beside the run. An entry is begun before anything is saved and
completed after everything is, so that a run that died in between leaves an entry that is not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from evsys_sdk.errors import BackendError
from evsys_sdk.files import write_json
from evsys_sdk.protocols import RunContext

MANIFEST_FILE = "checkpoints.json"
STAGES = "stages"


def manifest_path(ctx: RunContext) -> Path:
    """Where the checkpoints of this run, or of this stage of a chain, are listed."""
    if ctx.stage is None:
        return ctx.output_dir / MANIFEST_FILE
    return ctx.output_dir / STAGES / stage_folder(ctx.stage) / MANIFEST_FILE


def stage_folder(stage: str) -> str:
    """What the folder of a stage is called."""
    # A stage is named by the user, and may hold a slash or a space.
    return re.sub(r"[^\w.-]+", "-", stage)


def manifests_in(run_dir: Path) -> list[CheckpointManifest]:
    """The manifests that a run, with its stages, has left."""
    paths = [run_dir / MANIFEST_FILE, *sorted(run_dir.glob(f"{STAGES}/*/{MANIFEST_FILE}"))]
    return [CheckpointManifest.load(path) for path in paths if path.is_file()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The weights after one step, and what the loop must know to continue from there."""

    step: int
    state: str = ""
    """What `load_state` takes: weights and optimiser."""
    sampler: str = ""
    """What `create_sampling_client` takes."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the step."""
    tokens: int = 0
    """Trained on so far."""
    first_loss: float | None = None
    final_loss: float | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    """What the algorithm itself wants back."""
    stopped: str | None = None
    """Why training ended here before its time, if it did."""
    complete: bool = False
    final: bool = False
    """Training ended with these weights."""
    temporary: list[str] = field(default_factory=list)
    """Of a checkpoint that exists only because the run was stopped at its step: the paths that are deleted as soon as
    a later checkpoint is complete. Empty for a planned checkpoint."""

    @property
    def is_there(self) -> bool:
        """False when its files were on this machine and are gone; for a server's files, what the server says."""
        # Paths of this machine are absolute; a server's are addresses, and only it knows.
        return all(Path(path).exists() for path in (self.state, self.sampler) if path.startswith("/"))


class CheckpointManifest:
    """The checkpoints of one run, oldest first, on disk after every change."""

    def __init__(self, path: Path, checkpoints: list[Checkpoint] | None = None):
        self.path, self.checkpoints = path, checkpoints or []

    @property
    def stage(self) -> str | None:
        """The folder of the stage that these are the checkpoints of; None for those of a run without stages."""
        return self.path.parent.name if self.path.parent.parent.name == STAGES else None

    @property
    def run_dir(self) -> Path:
        """Paths below it are written without it: a run directory can be moved or copied."""
        return (self.path.parent if self.stage is None else self.path.parents[2]).absolute()

    @classmethod
    def load(cls, path: Path) -> CheckpointManifest:
        """The manifest at `path`; empty when there is none."""
        manifest = cls(path)
        try:
            told = with_paths(json.loads(path.read_text()), manifest.run_dir)
            return cls(path, [Checkpoint(**entry) for entry in told["checkpoints"]])
        except FileNotFoundError:
            return cls(path)
        except (ValueError, KeyError, TypeError) as exc:
            raise BackendError(f"{path} is not a checkpoint manifest: {exc}") from exc

    def begin(self, step: int) -> None:
        """Say that the checkpoint of `step` is being written; an older one of that step no longer counts."""
        # A kill before `complete` leaves this entry, which `whole` passes over.
        self._put(Checkpoint(step=step))

    def complete(self, checkpoint: Checkpoint) -> Checkpoint:
        """Say that everything of this checkpoint is saved."""
        done = replace(checkpoint, complete=True)
        self._put(done)
        return done

    def close(self, checkpoint: Checkpoint, *, stopped: str | None) -> Checkpoint:
        """Say that training has ended with these weights."""
        # The final weights are asked for: they stay, even where they were saved only because the run was stopped.
        last = replace(checkpoint, final=True, stopped=stopped, temporary=[])
        self._put(last)
        return last

    def drop_temporary(self, *, before: int) -> list[str]:
        """Remove the temporary checkpoints of steps earlier than `before`; returns the paths nothing refers to now."""
        gone = [found for found in self.checkpoints if found.temporary and found.step < before]
        if gone:
            self.checkpoints = [found for found in self.checkpoints if found not in gone]
            self._write()
        return [path for found in gone for path in found.temporary]

    def whole(self) -> list[Checkpoint]:
        """The checkpoints that can be trusted, the newest first."""
        return [
            found
            for found in reversed(self.checkpoints)
            if found.complete and found.is_there and all(path.exists() for path in self._needed_files(found.progress))
        ]

    def _needed_files(self, progress: Any) -> Iterator[Path]:
        """Files of the run that the algorithm wants back with a checkpoint, such as weights that were rolling out."""
        if isinstance(progress, str) and progress.startswith(f"{self.run_dir}/"):
            yield Path(progress)
        inner = progress.values() if isinstance(progress, dict) else progress if isinstance(progress, list) else ()
        for value in inner:
            yield from self._needed_files(value)

    def last_complete(self) -> Checkpoint | None:
        """The newest checkpoint that can be trusted."""
        return next(iter(self.whole()), None)

    def distrust(self, *, after: int) -> None:
        """Later weights than those of step `after` have turned out to be spoilt."""
        for found in [found for found in self.checkpoints if found.step > after]:
            self._put(replace(found, complete=False))

    def of_step(self, step: int) -> Checkpoint | None:
        return next((found for found in self.checkpoints if found.step == step and found.complete), None)

    def _put(self, new: Checkpoint) -> None:
        others = [checkpoint for checkpoint in self.checkpoints if checkpoint.step != new.step]
        self.checkpoints = sorted([*others, new], key=lambda checkpoint: checkpoint.step)
        self._write()

    def _write(self) -> None:
        told = {"checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints]}
        write_json(self.path, without_paths(told, self.run_dir))


def without_paths(value: Any, folder: Path) -> Any:
    """JSON data in which every path below `folder` begins with `./` instead."""
    if isinstance(value, str):
        return f"./{value.removeprefix(f'{folder}/')}" if value.startswith(f"{folder}/") else value
    if isinstance(value, dict):
        return {key: without_paths(item, folder) for key, item in value.items()}
    return [without_paths(item, folder) for item in value] if isinstance(value, list) else value


def with_paths(value: Any, folder: Path) -> Any:
    """What `without_paths` was given, for the place where `folder` is now."""
    if isinstance(value, str):
        return f"{folder}/{value[2:]}" if value.startswith("./") else value
    if isinstance(value, dict):
        return {key: with_paths(item, folder) for key, item in value.items()}
    return [with_paths(item, folder) for item in value] if isinstance(value, list) else value
