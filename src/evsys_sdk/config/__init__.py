"""What was asked: YAML in, checked and expanded `ExperimentConfig` out.

The models are importable from here (`from evsys_sdk.config import ExperimentConfig`); they load when they are asked
for, because every extension imports `config.base`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evsys_sdk.config.base import (
        AlgorithmConfig,
        BackendConfig,
        CallbackSpec,
        DataStoreSpec,
        InferenceSpec,
        LogStoreSpec,
        MetricSpec,
        Params,
        TransformSpec,
        VerifierSpec,
    )
    from evsys_sdk.config.load import dump_yaml, load_yaml
    from evsys_sdk.config.metadata import BenchmarkEntry, Metadata
    from evsys_sdk.config.schema import (
        ContinualConfig,
        DataConfig,
        EvalConfig,
        ExperimentConfig,
        MatrixSpec,
        ModelConfig,
        RunConfig,
    )

_PUBLIC = {
    "base": """
        AlgorithmConfig BackendConfig CallbackSpec DataStoreSpec InferenceSpec LogStoreSpec MetricSpec Params
        TransformSpec VerifierSpec
    """,
    "load": "dump_yaml load_yaml",
    "metadata": "BenchmarkEntry Metadata",
    "schema": "ContinualConfig DataConfig EvalConfig ExperimentConfig MatrixSpec ModelConfig RunConfig",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'evsys_sdk.config' has no attribute {name!r}")
    return getattr(importlib.import_module(f"evsys_sdk.config.{_MODULE_OF[name]}"), name)


EXTENSIONS = ("key_places",)
"""Modules of this room that register extensions."""
