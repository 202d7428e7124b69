"""How rows become better weights: one file per algorithm, and the plumbing they share."""

from evsys_sdk.algorithms.base import BaseAlgorithm, LoopParams

__all__ = ["BaseAlgorithm", "LoopParams"]
