"""Scores: what a set of weights is worth, and how sure that is."""

from __future__ import annotations

from evsys_sdk.eval.aliases import (
    DEFAULT_SYSTEM,
    DEFAULT_SYSTEM_NO_THINK,
    AliasMatcher,
    extract_predicted_slug,
    qwen3_chat_template_prompt,
    qwen_chat_prompt,
)
from evsys_sdk.eval.benchmark import Benchmark, sampling_problem, task_problems
from evsys_sdk.eval.model_eval import (
    EvalArtifacts,
    EvalSummary,
    ModelEvalConfig,
    RetryFailure,
    RetryReport,
    acall_with_retry,
    aevaluate_model,
    call_with_retry,
    evaluate_model,
    format_summary_markdown,
    load_eval_dataset,
)
from evsys_sdk.eval.row_eval import asker, score_rows

__all__ = [
    "DEFAULT_SYSTEM",
    "DEFAULT_SYSTEM_NO_THINK",
    "AliasMatcher",
    "Benchmark",
    "EvalArtifacts",
    "EvalSummary",
    "ModelEvalConfig",
    "RetryFailure",
    "RetryReport",
    "acall_with_retry",
    "aevaluate_model",
    "asker",
    "call_with_retry",
    "evaluate_model",
    "extract_predicted_slug",
    "format_summary_markdown",
    "load_eval_dataset",
    "qwen3_chat_template_prompt",
    "qwen_chat_prompt",
    "sampling_problem",
    "score_rows",
    "task_problems",
]

EXTENSIONS = ("metrics",)
"""Modules of this room that register extensions."""
