"""What does a model answer to this prompt? Clients behind one method, `generate`."""

from __future__ import annotations

from evsys_sdk.inference.asking import Completion, Usage
from evsys_sdk.inference.trained import TrainedModelClient

__all__ = ["Completion", "TrainedModelClient", "Usage"]
