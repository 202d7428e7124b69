"""Was the hypothesis right, and is it the one that was asked?"""

from __future__ import annotations

import json

import numpy as np
import pytest

from evsys_sdk.config.metadata import Hypothesis
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.hypothesis import fingerprint, judge_hypothesis, predicted_pair
from evsys_sdk.stats.judge import judge_arms


def arm(name, share, seed):
    values = np.random.default_rng(seed).random(400) < share
    return ArmScores(arm=name, seeds={42: {f"t{i:03d}": float(value) for i, value in enumerate(values)}})


ARMS = [arm("base", 0.5, 0), arm("good", 0.7, 1), arm("same", 0.5, 2), ArmScores(arm="lost", failed={42: "killed"})]
VERDICT = judge_arms(
    ARMS, metric="val.pass@1", untrained={f"t{i:03d}": 0.0 for i in range(400)}, also=[("good", "same")]
)


def hypothesis(confidence=None, **prediction):
    return Hypothesis.model_validate({"claim": "it helps", "prediction": prediction, "confidence": confidence})


def outcome(**prediction):
    result = judge_hypothesis(hypothesis(**prediction), VERDICT)
    json.dumps(result.as_dict(), allow_nan=False)
    return result.outcome


def test_a_gain_beyond_what_was_predicted_supports_it():
    result = judge_hypothesis(hypothesis(arm="good", at_least=0.05, confidence=0.8), VERDICT)
    assert result.outcome == "supported" and result.low > 0.05 and result.n_tasks == 400
    assert (result.arm, result.vs, result.metric) == ("good", "base", "val.pass@1")
    assert result.brier == pytest.approx(0.04)


def test_a_gain_that_surely_falls_short_refutes_it():
    assert outcome(arm="good", at_least=0.5) == "refuted"
    assert outcome(arm="good", direction="lower") == "refuted"
    assert judge_hypothesis(hypothesis(arm="good", at_least=0.5, confidence=0.9), VERDICT).brier == pytest.approx(0.81)


def test_what_the_interval_leaves_open_is_inconclusive():
    result = judge_hypothesis(hypothesis(arm="same", confidence=0.9), VERDICT)
    assert result.outcome == "inconclusive" and result.brier is None and "leaves open" in result.why
    found = VERDICT.find("good", "base")
    assert outcome(arm="good", at_least=(found.low + found.high) / 2) == "inconclusive"


def test_a_comparison_may_be_asked_the_other_way_round():
    result = judge_hypothesis(hypothesis(arm="base", vs="good", direction="lower", at_least=0.05), VERDICT)
    found = VERDICT.find("good", "base")
    assert result.outcome == "supported"
    assert (result.difference, result.low, result.high) == (-found.difference, -found.high, -found.low)


def test_any_arm_or_the_untrained_model_can_be_the_other_side():
    assert outcome(arm="good", vs="same") == "supported"
    assert outcome(arm="good", vs="untrained", at_least=0.5) == "supported"
    assert outcome(arm="untrained", vs="good", direction="lower") == "supported"
    assert predicted_pair(hypothesis(arm="untrained", vs="good").prediction, "base") == ("good", "untrained")
    assert predicted_pair(hypothesis(arm="good").prediction, "base") == ("good", "base")


@pytest.mark.parametrize(
    ("prediction", "why"),
    [
        ({"arm": "nobody"}, "there is no arm nobody; arms: base, good, same, lost"),
        ({"arm": "lost"}, "lost has no score: killed"),
        ({"arm": "same", "vs": "good"}, None),
        ({"arm": "base"}, "base cannot be compared with itself"),
    ],
)
def test_what_cannot_be_judged_says_why(prediction, why):
    result = judge_hypothesis(hypothesis(**prediction), VERDICT)
    if why is None:
        assert result.outcome == "refuted"  # it was compared, the other way round
    else:
        assert (result.outcome, result.why, result.difference) == ("inconclusive", why, None)


def test_two_arms_that_were_not_compared_say_so():
    verdict = judge_arms(ARMS, metric="pass@1")
    result = judge_hypothesis(hypothesis(arm="good", vs="same"), verdict)
    assert (result.outcome, result.why) == ("inconclusive", "good and same were not compared")


def test_a_short_name_of_the_metric_means_the_same():
    assert outcome(arm="good", metric="pass@1") == outcome(arm="good", metric="val/pass@1") == "supported"


def test_the_fingerprint_is_that_of_what_is_said_not_of_how_it_is_written():
    short = hypothesis(arm="good")
    assert fingerprint(short) == fingerprint(hypothesis(arm="good", direction="up", at_least=0))
    assert fingerprint("it helps\n") == fingerprint("it helps")
    said = [fingerprint(h) for h in (short, hypothesis(arm="same"), hypothesis(0.5, arm="good"), "it helps")]
    assert len(set(said)) == 4


def test_the_fingerprint_of_a_hypothesis_never_changes():
    assert fingerprint("it helps") == "sha256:dc137567d621b154fb541453d72c0d9198f38bb4c1a6583c043aa5cc13f4064d"
    assert (
        fingerprint(hypothesis(0.8, arm="good", vs="base", at_least=0.05))
        == "sha256:aa88357c22aa81b2156e63484f88b4995ceeccc06a13a46a2f2179a8b4d83b59"
    )
