"""Which weights of a run were kept, and whether they are whole.

In: paths that a backend returned. Out: a manifest file beside the run. An entry is begun before anything is saved and
completed after everything is, so that a run that died in between leaves an entry that nobody trusts.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from evsys_sdk.atomic import write_json
from evsys_sdk.errors import BackendError
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
    return re.sub(r"[^\w.-]+", "-", stage)


def manifests_in(run_dir: Path) -> list[Manifest]:
    """The manifests that a run, with its stages, has left."""
    paths = [run_dir / MANIFEST_FILE, *sorted(run_dir.glob(f"{STAGES}/*/{MANIFEST_FILE}"))]
    return [Manifest.load(path) for path in paths if path.is_file()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The weights after one step, and what the loop must know to go on from there."""

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

    @property
    def is_there(self) -> bool:
        """False when its files are on this machine and somebody has removed them; a server's word is taken."""
        return not self.state.startswith("/") or Path(self.state).exists()


class Manifest:
    """The checkpoints of one run, oldest first, on disk after every change."""

    def __init__(self, path: Path, checkpoints: list[Checkpoint] | None = None):
        self.path, self.checkpoints = path, checkpoints or []

    @property
    def stage(self) -> str | None:
        """The folder of the stage that these are the checkpoints of; None for those of a run without stages."""
        return self.path.parent.name if self.path.parent.parent.name == STAGES else None

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """The manifest at `path`; empty when there is none."""
        try:
            return cls(path, [Checkpoint(**entry) for entry in json.loads(path.read_text())["checkpoints"]])
        except FileNotFoundError:
            return cls(path)
        except (ValueError, KeyError, TypeError) as exc:
            raise BackendError(f"{path} is not a checkpoint manifest: {exc}") from exc

    def begin(self, step: int) -> None:
        """Say that the checkpoint of `step` is being written; an older one of that step no longer counts."""
        self._put(Checkpoint(step=step))

    def complete(self, checkpoint: Checkpoint) -> Checkpoint:
        """Say that everything of this checkpoint is saved."""
        done = replace(checkpoint, complete=True)
        self._put(done)
        return done

    def close(self, checkpoint: Checkpoint, *, stopped: str | None) -> Checkpoint:
        """Say that training has ended with these weights."""
        last = replace(checkpoint, final=True, stopped=stopped)
        self._put(last)
        return last

    def last_complete(self) -> Checkpoint | None:
        """The newest checkpoint that can be trusted."""
        whole = [checkpoint for checkpoint in self.checkpoints if checkpoint.complete and checkpoint.is_there]
        return max(whole, key=lambda checkpoint: checkpoint.step, default=None)

    def of_step(self, step: int) -> Checkpoint | None:
        return next((found for found in self.checkpoints if found.step == step and found.complete), None)

    def _put(self, new: Checkpoint) -> None:
        others = [checkpoint for checkpoint in self.checkpoints if checkpoint.step != new.step]
        self.checkpoints = sorted([*others, new], key=lambda checkpoint: checkpoint.step)
        write_json(self.path, {"checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints]})
