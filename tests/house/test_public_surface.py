"""The names that stay: section 14 of the reference, and what type checkers see."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import evsys_sdk

KINDS = [
    ("algorithm", "algorithms"), ("verifier", "verifiers"), ("metric", "metrics"), ("backend", "backends"),
    ("inference", "inference"), ("transform", "transforms"), ("data_store", "data_stores"),
    ("log_store", "log_stores"), ("callback", "callbacks"), ("deployer", "deployers"), ("agent", "agents"),
    ("launcher", "launchers"), ("data_source", "data_sources"), ("proposer", "proposers"),
]  # fmt: skip
REFERENCE = [
    "ExperimentConfig", "RunConfig", "AlgorithmConfig", "DataConfig", "ModelConfig", "BackendConfig", "EvalConfig",
    "DataStoreSpec", "LogStoreSpec", "MetricSpec", "VerifierSpec", "TransformSpec", "InferenceSpec",
    "Algorithm", "Backend", "DataStore", "LogStore", "Metric", "Verifier", "Transform", "InferenceClient",
    "RunContext", "RunResult",
    "load_yaml", "dump_yaml", "validate_yaml",
    "run_experiment",
    "TargetFormat", "ChatMessagesRow", "HarborTask", "PromptExample", "InProcessVerifier", "E2BVerifier",
    "LLMJudgeVerifier", "VerifierPayload", "text_block", "image_url_block", "image_base64_block",
    "block_to_image_src", "has_images", "detect_format", "from_dict", "to_dict", "iter_jsonl",
    "DashboardClient", "ExperimentRun", "DashboardClientError", "EvsysAuthError",
    "configure_logger", "get_logger", "set_level",
    # beyond the reference: 002 and 004
    "Experiment", "BaseAlgorithm", "TrainingBatch", "schema_for", "register_verifier_fn", "parse_rows", "Workspace",
]  # fmt: skip
NAMES = (
    REFERENCE + [f"{verb}_{one}" for one, _ in KINDS for verb in ("register", "get")] + [f"list_{s}" for _, s in KINDS]
)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_can_be_imported(name):
    assert getattr(evsys_sdk, name) is not None
    assert name in dir(evsys_sdk)


def test_type_checkers_see_the_same_names_as_python():
    tree = ast.parse(Path(evsys_sdk.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module.removeprefix("evsys_sdk."), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert seen == {(module, name) for name, module in evsys_sdk._MODULE_OF.items()}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = evsys_sdk.nonsense


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "first",
    [
        "import evsys_sdk",
        "from evsys_sdk import ExperimentConfig, load_yaml; import evsys_sdk; evsys_sdk.list_algorithms()",
    ],
)
def test_importing_and_listing_load_no_heavy_library(first):
    heavy = "{'torch','tinker','harbor','django','numpy','scipy','requests','transformers'}"
    assert _run(f"{first}; import sys; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_the_version_is_the_packages():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert evsys_sdk.__version__ == project["version"]
