"""Learning rates as pure functions of the step.

In: a step (1-based), the number of steps, a shape. Out: a learning rate. Nothing is remembered between steps, so a
resumed run has the same rates as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

ScheduleName = Literal["constant", "linear", "cosine"]


def constant(progress: float) -> float:
    """The full rate throughout."""
    return 1.0


def linear(progress: float) -> float:
    """A straight line down to 0 just after the last step."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Half a cosine wave down to 0 just after the last step."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SHAPES: dict[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


def warmup_length(total_steps: int, *, warmup_steps: int = 0, warmup_fraction: float = 0.0) -> int:
    """Steps of warm-up, given outright or as a part of the whole."""
    return min(total_steps, warmup_steps or round(warmup_fraction * total_steps))


def learning_rate(step: int, *, peak: float, total_steps: int, shape: ScheduleName, warmup: int = 0) -> float:
    """The rate of step `step`: up a straight line that reaches `peak` at step `warmup`, then along the shape."""
    if step <= warmup:
        return peak * step / warmup
    progress = (step - 1 - warmup) / max(1, total_steps - warmup)
    return peak * SHAPES[shape](min(progress, 1.0))
