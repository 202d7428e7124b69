"""Scores: what a set of weights is worth, and how sure that is."""

from __future__ import annotations

from evsys_sdk.eval.benchmark import Benchmark, sampling_problem, task_problems
from evsys_sdk.eval.row_eval import asker, score_rows

__all__ = ["Benchmark", "asker", "sampling_problem", "score_rows", "task_problems"]
