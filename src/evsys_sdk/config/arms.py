"""Arms that a config speaks of by name: the baseline arm, and the two of a prediction.

In: an expanded config. Out: a `Problem` for every name that no arm has.
"""

from __future__ import annotations

from collections.abc import Iterator

from evsys_sdk.config.metadata import Hypothesis
from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.constants import UNTRAINED
from evsys_sdk.errors import Problem, not_known


def arm_problems(config: ExperimentConfig) -> list[Problem]:
    """Names of arms that there are not. The arms of a search are not known beforehand."""
    if getattr(config, "search", None) is not None:
        return []
    arms = [run.name for run in config.all_runs()]
    known = [*arms, UNTRAINED] if isinstance(config.metadata.hypothesis, Hypothesis) else arms
    return [
        Problem(path=place, message=not_known(name, "arm", known), value=name)
        for place, name in _named(config)
        if name not in arms
    ]


def _named(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    metadata = config.metadata
    if metadata.baseline_arm is not None:
        yield "metadata.baseline_arm", metadata.baseline_arm
    if isinstance(metadata.hypothesis, Hypothesis):
        prediction = metadata.hypothesis.prediction
        for key, name in (("arm", prediction.arm), ("vs", prediction.vs)):
            if name is not None and name != UNTRAINED:
                yield f"metadata.hypothesis.prediction.{key}", name
