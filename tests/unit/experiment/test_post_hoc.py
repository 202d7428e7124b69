"""A hypothesis whose runs had finished before it was written is a description, and the outcome says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evsys_sdk.experiment.verdict import note_post_hoc
from evsys_sdk.protocols import RunResult
from evsys_sdk.report.conclusion import VerdictFindings
from evsys_sdk.stats.hypothesis import HypothesisResult

LAUNCHED = 1_700_000_000.0  # 2023-11-14T22:13:20Z
BEFORE, AFTER = "2023-11-14T22:13:19.999+00:00", "2023-11-14T22:13:20.001+00:00"
JUDGED = HypothesisResult(
    claim="up is better", prediction="up above base", outcome="supported", why="higher", fingerprint="sha256:0",
    metric="pass@1", arm="up", vs="base", direction="higher", at_least=0.0, brier=0.04,
)  # fmt: skip
FINDINGS = VerdictFindings(lines=["The hypothesis is supported: higher.", "Best arm: up."], hypothesis_result=JUDGED)


def taken(when=BEFORE):
    return RunResult(run_id="e/r", status="completed", finished_before=when, reused_from="elsewhere")


def own(**fields):
    return RunResult(run_id="e/r", status="completed", **fields)


def test_the_admission_is_in_the_same_sentence_and_there_is_no_brier_score():
    found = note_post_hoc(FINDINGS, {"base": [taken()], "up": [taken()]}, LAUNCHED)
    admission = "its runs had finished before this was written: a description, not a prediction"
    assert found.lines == [f"The hypothesis is supported: higher; {admission}.", "Best arm: up."]
    expected = replace(JUDGED, why=f"higher; {admission}", brier=None, known_before=True)
    assert found.hypothesis_result == expected


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ({"base": [taken()], "up": [own(), own()]}, "1 of its 3 runs had finished"),
        ({"up": [taken()]}, "its run had finished"),
    ],
)
def test_it_says_how_much_was_known(arms, said):
    found = note_post_hoc(FINDINGS, arms, LAUNCHED)
    assert said in found.lines[0] and found.hypothesis_result.known_before


@pytest.mark.parametrize(
    "arms",
    [
        {"base": [own()], "up": [own(finished_before=BEFORE)]},  # its own, of an earlier process
        {"base": [taken(AFTER)], "up": [own()]},  # of an experiment that ran beside it
        {"base": [own()], "up": [own()], "other": [taken()]},  # not what it is about
    ],
)
def test_a_prediction_stays_one(arms):
    assert note_post_hoc(FINDINGS, arms, LAUNCHED) == FINDINGS


def test_without_a_typed_hypothesis_there_is_nothing_to_admit():
    assert note_post_hoc(VerdictFindings(lines=["x"]), {"up": [taken()]}, LAUNCHED) == VerdictFindings(lines=["x"])
