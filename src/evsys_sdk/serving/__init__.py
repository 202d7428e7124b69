"""Any model here as an OpenAI-compatible endpoint, with the exact tokens of each session captured for training."""

from __future__ import annotations

from evsys_engine.http import ListenAddress
from evsys_sdk.serving.admin import ModelAdmin, StoredModel
from evsys_sdk.serving.endpoint import Capture, Endpoint, ServedModel
from evsys_sdk.serving.run import RunningEndpoint, in_background, running, serve

__all__ = [
    "ListenAddress",
    "Capture",
    "Endpoint",
    "ModelAdmin",
    "RunningEndpoint",
    "ServedModel",
    "StoredModel",
    "in_background",
    "running",
    "serve",
]
