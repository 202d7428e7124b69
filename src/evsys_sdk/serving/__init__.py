"""Any model here as an OpenAI-compatible endpoint, with the exact tokens of each session captured for training."""

from __future__ import annotations

from evsys_sdk.serving.capture import Capture
from evsys_sdk.serving.endpoint import Endpoint, ServedModel
from evsys_sdk.serving.run import Address, Running, in_background, running, serve

__all__ = ["Address", "Capture", "Endpoint", "Running", "ServedModel", "in_background", "running", "serve"]
