"""What does a model answer to this prompt? Clients behind one method, `generate`."""

from __future__ import annotations

from evsys_sdk.inference.base import Completion, Usage
from evsys_sdk.inference.policy import TrainedModelClient

__all__ = ["Completion", "TrainedModelClient", "Usage"]

EXTENSIONS = ("policy", "claude", "openai", "gemini")
"""Modules of this room that register extensions."""
