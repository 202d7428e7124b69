"""The names that section 12 of the reference promises, and that importing them is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import evsys_sdk.eval

NAMES = [
    "evaluate_model", "AliasMatcher", "score_rows", "ModelEvalConfig", "EvalArtifacts", "EvalSummary", "RetryReport",
    "RetryFailure", "call_with_retry", "format_summary_markdown", "qwen_chat_prompt", "qwen3_chat_template_prompt",
    "extract_predicted_slug", "DEFAULT_SYSTEM", "DEFAULT_SYSTEM_NO_THINK", "load_eval_dataset",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_promised_name_is_there(name):
    assert getattr(evsys_sdk.eval, name) is not None
    assert name in evsys_sdk.eval.__all__


def test_importing_it_loads_no_heavy_library():
    heavy = "{'torch','tinker','harbor','django','numpy','scipy','requests','transformers','openai','anthropic'}"
    code = f"import evsys_sdk.eval, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
