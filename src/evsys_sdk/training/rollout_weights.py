"""Saved weights that roll out, from the step they are saved before to the last step that learns from them.

In: where weights were saved, and which steps they are to roll out for. Out: samplers over them. What no step needs any
more is let go: the sampler at once, the files as soon as no checkpoint speaks of them. Checkpoints themselves are never
touched: these are weights that were saved for rollouts alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evsys_sdk.surface import SamplingClient, TrainingService, discard_weights, let_go


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Saved weights with a sampler over them."""

    before: int
    """The step that was about to change them."""
    path: str
    sampler: SamplingClient


@dataclass(slots=True)
class RolloutWeights:
    """Which weights roll out for which step."""

    service: TrainingService
    of_step: dict[int, Source] = field(default_factory=dict)
    """Steps that have still to learn from their rollouts."""
    noted: set[str] = field(default_factory=set)
    """Paths that the last checkpoint speaks of: a run that goes on from there will want them again."""
    idle: set[str] = field(default_factory=set)
    """Paths that no step needs any more."""

    async def open(self, path: str, before: int, steps: list[int]) -> SamplingClient:
        """A sampler over the weights at `path`, which roll out for `steps`."""
        source = Source(before=before, path=path, sampler=await self.service.create_sampling_client(path))
        self.of_step |= dict.fromkeys(steps, source)
        return source.sampler

    async def done(self, step: int) -> int:
        """Step `step` has its rollouts; returns how many steps old the weights are that made them."""
        source = self.of_step.pop(step)
        if source not in self.of_step.values():
            let_go(source.sampler)
            self.idle.add(source.path)
            await self._sweep()
        return step - source.before

    async def _sweep(self) -> None:
        for path in sorted(self.idle - self.noted):
            self.idle.discard(path)
            await discard_weights(self.service, path)

    def progress(self) -> dict[str, Any]:
        """Which weights are to roll out for which step to come; the checkpoint that keeps this needs their files."""
        told = {str(step): [source.before, source.path] for step, source in self.of_step.items()}
        self.noted = {source.path for source in self.of_step.values()}
        return told

    async def restore(self, told: dict[str, Any]) -> None:
        """Open again what `progress` told of."""
        by_path: dict[tuple[int, str], list[int]] = {}
        for step, (before, path) in told.items():
            by_path.setdefault((before, path), []).append(int(step))
        for (before, path), steps in by_path.items():
            await self.open(path, before, steps)
        self.noted = {path for _, path in by_path}
