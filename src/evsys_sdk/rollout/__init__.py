"""Behaviour: what the model does with a task."""

from __future__ import annotations

from evsys_sdk.rollout.engine import HarborRolloutEngine, InProcessRolloutEngine

__all__ = ["InProcessRolloutEngine", "HarborRolloutEngine"]

EXTENSIONS = ("chat",)
"""Modules of this room that register extensions."""
