"""How rows become better weights: one file per algorithm, and the plumbing they share."""

from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams

__all__ = ["BaseAlgorithm", "LoopParams"]

EXTENSIONS = ("sft", "rl", "dpo", "distill", "sdft", "gepa_prompt", "combo", "local_sft", "local_rl")
"""Modules of this room that register extensions."""
