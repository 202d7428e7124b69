"""How good is this completion? Functions and classes that score one rollout."""

from __future__ import annotations

from evsys_sdk.verifiers.adapt import AdaptedVerifier, as_verifier, check_verifier_params, run_verifier
from evsys_sdk.verifiers.grading import grade, grading_problem, grading_problems

__all__ = [
    "AdaptedVerifier",
    "as_verifier",
    "check_verifier_params",
    "grade",
    "grading_problem",
    "grading_problems",
    "run_verifier",
]

EXTENSIONS = ("adapt", "text", "values", "tools", "weighted", "judge", "e2b")
"""Modules of this room that register extensions."""
