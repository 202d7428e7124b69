"""evsys-sdk: one strict YAML describes an LLM training experiment; this package runs it.

Every name below is public and stable. They load when first used, so that `import evsys_sdk` costs next
to nothing. The first list is for type checkers, the second for Python; `tests/house` holds them equal.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# fmt: off
if TYPE_CHECKING:
    from evsys_sdk.algorithms.base import BaseAlgorithm
    from evsys_sdk.config.load import dump_yaml, load_yaml
    from evsys_sdk.config.base import (
        AlgorithmConfig, BackendConfig, CallbackSpec, DataStoreSpec, InferenceSpec, LogStoreSpec,
        MetricSpec, Params, TransformSpec, VerifierSpec,
    )
    from evsys_sdk.config.metadata import BenchmarkEntry, Metadata
    from evsys_sdk.config.schema import (
        ContinualConfig, DataConfig, EvalConfig, ExperimentConfig, MatrixSpec, ModelConfig,
        RunConfig,
    )
    from evsys_sdk.data.workspace import Workspace
    from evsys_sdk.data_types import (
        ChatMessagesRow, E2BVerifier, HarborTask, InProcessVerifier, LLMJudgeVerifier,
        PromptExample, TargetFormat, VerifierPayload, block_to_image_src, detect_format, from_dict,
        has_images, image_base64_block, image_url_block, iter_jsonl, parse_rows, text_block, to_dict,
    )
    from evsys_sdk.errors import (
        ConfigError, DashboardClientError, EvsysAuthError, EvsysError,
    )
    from evsys_sdk.eval.benchmark import Benchmark
    from evsys_sdk.experiment.experiment import Experiment, ExperimentResult, run_experiment
    from evsys_sdk.logs import configure_logger, get_logger, set_level
    from evsys_sdk.checks.preflight import validate_yaml
    from evsys_sdk.protocols import (
        Algorithm, Backend, Callback, DataStore, EvalResult, InferenceClient, LogStore, Metric,
        Rollout, RunContext, RunResult, Score, Transform, VerificationResult, Verifier,
    )
    from evsys_sdk.record.dashboard.client import DashboardClient, ExperimentRun
    from evsys_sdk.registry import (
        get_agent, get_algorithm, get_backend, get_callback, get_data_source, get_data_store, get_deployer,
        get_inference, get_launcher, get_log_store, get_metric, get_proposer, get_transform, get_verifier,
        list_agents, list_algorithms, list_backends, list_callbacks, list_data_sources, list_data_stores,
        list_deployers, list_inference, list_launchers, list_log_stores, list_metrics, list_proposers,
        list_transforms, list_verifiers, register_agent, register_algorithm, register_backend,
        register_callback, register_data_source, register_data_store, register_deployer, register_inference,
        register_launcher, register_log_store, register_metric, register_proposer, register_transform,
        register_verifier, register_verifier_fn, schema_for,
    )
    from evsys_sdk.training_api import (
        Datum, ModelInput, SamplingParams, TensorData,
    )
    from evsys_sdk.training.batch import TrainingBatch
    from evsys_sdk.training.loop import LoopPlan, LoopResult, StepBuilder, TrainingLoop
# fmt: on

_PUBLIC = {
    "algorithms.base": "BaseAlgorithm",
    "config.load": "dump_yaml load_yaml",
    "config.base": """
        AlgorithmConfig BackendConfig CallbackSpec DataStoreSpec InferenceSpec LogStoreSpec MetricSpec Params
        TransformSpec VerifierSpec
    """,
    "config.metadata": "BenchmarkEntry Metadata",
    "config.schema": "ContinualConfig DataConfig EvalConfig ExperimentConfig MatrixSpec ModelConfig RunConfig",
    "data.workspace": "Workspace",
    "data_types": """
        ChatMessagesRow E2BVerifier HarborTask InProcessVerifier LLMJudgeVerifier PromptExample
        TargetFormat VerifierPayload block_to_image_src detect_format from_dict has_images
        image_base64_block image_url_block iter_jsonl parse_rows text_block to_dict
    """,
    "errors": "ConfigError DashboardClientError EvsysAuthError EvsysError",
    "eval.benchmark": "Benchmark",
    "experiment.experiment": "Experiment ExperimentResult run_experiment",
    "logs": "configure_logger get_logger set_level",
    "checks.preflight": "validate_yaml",
    "protocols": """
        Algorithm Backend Callback DataStore EvalResult InferenceClient LogStore Metric Rollout
        RunContext RunResult Score Transform VerificationResult Verifier
    """,
    "record.dashboard.client": "DashboardClient ExperimentRun",
    "registry": """
        get_agent get_algorithm get_backend get_callback get_data_source get_data_store get_deployer get_inference
        get_launcher get_log_store get_metric get_proposer get_transform get_verifier list_agents list_algorithms
        list_backends list_callbacks list_data_sources list_data_stores list_deployers list_inference list_launchers
        list_log_stores list_metrics list_proposers list_transforms list_verifiers register_agent
        register_algorithm register_backend register_callback register_data_source register_data_store register_deployer
        register_inference register_launcher register_log_store register_metric register_proposer register_transform
        register_verifier register_verifier_fn schema_for
    """,
    "training_api": "Datum ModelInput SamplingParams TensorData",
    "training.batch": "TrainingBatch",
    "training.loop": "LoopPlan LoopResult StepBuilder TrainingLoop",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'evsys_sdk' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"evsys_sdk.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
