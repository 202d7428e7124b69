"""Arms that a config speaks of by name: the baseline arm, and the two of a prediction.

In: an expanded config. Out: a `Problem` for every name that no arm has, and for a prediction that compares an arm with
itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from evsys_sdk.config.metadata import Hypothesis
from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.constants import UNTRAINED
from evsys_sdk.errors import Problem, not_known


def arm_problems(config: ExperimentConfig) -> list[Problem]:
    """Names of arms that there are not, and a prediction that can only be inconclusive. The arms of a search are not
    known beforehand."""
    if getattr(config, "search", None) is not None:
        return list(_with_itself(config, config.metadata.baseline_arm or UNTRAINED))
    arms = [run.name for run in config.all_runs()]
    known = [*arms, UNTRAINED] if isinstance(config.metadata.hypothesis, Hypothesis) else arms
    missing = [
        Problem(path=place, message=not_known(name, "arm", known), value=name)
        for place, name in _named(config)
        if name not in arms
    ]
    return [*missing, *_with_itself(config, config.metadata.baseline_arm or arms[0])]


def _with_itself(config: ExperimentConfig, baseline: str) -> Iterator[Problem]:
    hypothesis = config.metadata.hypothesis
    prediction = hypothesis.prediction if isinstance(hypothesis, Hypothesis) else None
    if prediction is None or prediction.arm != (prediction.vs or baseline):
        return
    default = "" if prediction.vs else f" (without prediction.vs that is {baseline})"
    message = f"would be compared with itself{default}; name another arm, or `{UNTRAINED}`, as prediction.vs"
    yield Problem(path="metadata.hypothesis.prediction.arm", message=message, value=prediction.arm)


def _named(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    metadata = config.metadata
    if metadata.baseline_arm is not None:
        yield "metadata.baseline_arm", metadata.baseline_arm
    if isinstance(metadata.hypothesis, Hypothesis):
        prediction = metadata.hypothesis.prediction
        for key, name in (("arm", prediction.arm), ("vs", prediction.vs)):
            if name is not None and name != UNTRAINED:
                yield f"metadata.hypothesis.prediction.{key}", name
