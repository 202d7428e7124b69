"""A name that no arm has is found before anything runs."""

from __future__ import annotations

import pytest

from evsys_sdk.checks.preflight import arm_problems
from evsys_sdk.config.schema import ExperimentConfig


def _config(**metadata):
    run = {"data": {"source_kind": "in_memory", "rows": []}, "algorithm": {"kind": "sft"}, "backend": {"kind": "mock"}}
    runs = [{**run, "name": name, "model": {"name": "m"}} for name in ("small", "large")]
    return ExperimentConfig(name="x", runs=runs, metadata=metadata)


def test_arms_that_are_there_may_be_named_and_so_may_the_untrained_model():
    prediction = {"arm": "large", "vs": "untrained"}
    assert arm_problems(_config(baseline_arm="small", hypothesis={"claim": "c", "prediction": prediction})) == []


def test_arms_that_are_not_there_are_told_with_the_nearest():
    prediction = {"arm": "larg", "vs": "smal"}
    found = arm_problems(_config(baseline_arm="tiny", hypothesis={"claim": "c", "prediction": prediction}))
    assert [problem.path for problem in found] == [
        "metadata.baseline_arm",
        "metadata.hypothesis.prediction.arm",
        "metadata.hypothesis.prediction.vs",
    ]
    assert "large" in found[1].message


@pytest.mark.parametrize(
    ("baseline", "prediction", "refused"),
    [
        (None, {"arm": "small"}, True),
        (None, {"arm": "large"}, False),
        ("large", {"arm": "large"}, True),
        ("large", {"arm": "small"}, False),
        (None, {"arm": "small", "vs": "untrained"}, False),
        (None, {"arm": "small", "vs": "small"}, True),
        (None, {"arm": "untrained"}, False),
        (None, {"arm": "untrained", "vs": "untrained"}, True),
    ],
)
def test_an_arm_is_not_compared_with_itself(baseline, prediction, refused):
    found = arm_problems(_config(baseline_arm=baseline, hypothesis={"claim": "c", "prediction": prediction}))
    assert [problem.path for problem in found] == (["metadata.hypothesis.prediction.arm"] if refused else [])
    assert not refused or "would be compared with itself" in found[0].message
