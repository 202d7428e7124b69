"""Which weights of a run were kept, and whether they are whole.

In: paths that a backend returned. Out: a manifest file beside the run. An entry is begun before anything is saved and
completed after everything is, so that a run that died in between leaves an entry that nobody trusts.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from evsys_sdk.atomic import write_json
from evsys_sdk.errors import BackendError
from evsys_sdk.protocols import RunContext

MANIFEST_FILE = "checkpoints.json"


def manifest_path(ctx: RunContext) -> Path:
    """Where the checkpoints of this run, or of this stage of a chain, are listed."""
    if ctx.stage is None:
        return ctx.output_dir / MANIFEST_FILE
    return ctx.output_dir / "stages" / re.sub(r"[^\w.-]+", "-", ctx.stage) / MANIFEST_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The weights after one step."""

    step: int
    state: str = ""
    """What `load_state` takes: weights and optimiser."""
    sampler: str = ""
    """What `create_sampling_client` takes."""
    metrics: dict[str, float] = field(default_factory=dict)
    complete: bool = False


class Manifest:
    """The checkpoints of one run, oldest first, on disk after every change."""

    def __init__(self, path: Path, checkpoints: list[Checkpoint] | None = None):
        self.path, self.checkpoints = path, checkpoints or []

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

    def complete(self, step: int, *, state: str, sampler: str, metrics: dict[str, float]) -> Checkpoint:
        """Say that everything of `step` is saved."""
        done = Checkpoint(step=step, state=state, sampler=sampler, metrics=metrics, complete=True)
        self._put(done)
        return done

    def last_complete(self) -> Checkpoint | None:
        """The newest checkpoint that can be trusted."""
        whole = [checkpoint for checkpoint in self.checkpoints if checkpoint.complete]
        return max(whole, key=lambda checkpoint: checkpoint.step, default=None)

    def _put(self, new: Checkpoint) -> None:
        others = [checkpoint for checkpoint in self.checkpoints if checkpoint.step != new.step]
        self.checkpoints = sorted([*others, new], key=lambda checkpoint: checkpoint.step)
        write_json(self.path, {"checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints]})
