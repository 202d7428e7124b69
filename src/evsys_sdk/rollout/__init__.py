"""Behaviour: what the model does with a task."""

from __future__ import annotations

from evsys_sdk.rollout.engine import InProcessRolloutEngine, RolloutEngine

__all__ = ["InProcessRolloutEngine", "RolloutEngine"]
