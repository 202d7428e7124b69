"""How this folder says no: in a message that names the next step."""

from __future__ import annotations

import importlib
from types import ModuleType

from evsys_engine.types import EngineError


class ModelError(EngineError):
    """A model that cannot be had; the message says what to do."""


def need(module: str) -> ModuleType:
    """Import a library of the extra `local`, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ModelError(f"This needs {module}: pip install 'evsys-sdk[local]' ({exc})") from exc
