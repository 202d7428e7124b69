"""An evaluation's own directory: whose it is, what is reused, and what is never written over."""

from __future__ import annotations

import pytest

from evsys_sdk.errors import EvsysError, RunLocked
from evsys_sdk.experiment.standalone import EvaluationSpec, finished_result, open_evaluation, stamp_of
from evsys_sdk.protocols import Rollout

ASKED = EvaluationSpec(subject={"model": "m", "temperature": 1.0}, folding={"metrics": ("pass@1",)})


def test_a_rollout_that_was_finished_is_there_when_the_directory_is_opened_again(tmp_path):
    seen = []
    with open_evaluation(tmp_path / "e", ASKED) as evaluation:
        kept = evaluation.finished(seen.append)
        assert kept.find("t", 0) is None
        kept.add("t", 0, Rollout(task_id="t", reward=1.0))
        kept.add("t", 1, Rollout(task_id="t", status="infra_error", error="lost"))
    assert len(seen) == 2
    with open_evaluation(tmp_path / "e", ASKED) as evaluation:
        assert evaluation.finished().find("t", 0).reward == 1.0
        assert evaluation.finished().find("t", 1) is None, "what infrastructure broke is tried again"


def test_other_folding_uses_the_same_rollouts_and_is_not_the_same_result(tmp_path):
    with open_evaluation(tmp_path / "e", ASKED) as evaluation:
        evaluation.finished().add("t", 0, Rollout(task_id="t", reward=1.0))
        evaluation.finish({"scores": [1]})
    assert finished_result(tmp_path / "e", ASKED)["scores"] == [1]
    other = EvaluationSpec(subject=ASKED.subject, folding={"metrics": ["pass@2"]})
    assert finished_result(tmp_path / "e", other) is None
    with open_evaluation(tmp_path / "e", other) as evaluation:
        assert evaluation.finished().find("t", 0) is not None


def test_another_evaluation_is_refused_with_what_differs_and_set_aside_when_asked(tmp_path):
    with open_evaluation(tmp_path / "e", ASKED) as evaluation:
        evaluation.finished().add("t", 0, Rollout(task_id="t", reward=1.0))
        evaluation.finish({})
    other = EvaluationSpec(subject={"model": "m", "temperature": 0.5})
    with pytest.raises(EvsysError, match=r"temperature was 1\.0 and is 0\.5\. Choose another"):
        open_evaluation(tmp_path / "e", other).__enter__()
    with open_evaluation(tmp_path / "e", other, fresh=True) as evaluation:
        assert evaluation.finished().find("t", 0) is None
    assert (tmp_path / "e" / "attempts" / "1" / "result.json").is_file()
    assert not (tmp_path / "e" / "result.json").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path, fresh):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(EvsysError, match=r"holds something else \(thesis\.txt\)"):
        open_evaluation(tmp_path, ASKED, fresh=fresh).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_two_processes_cannot_hold_the_same_directory(tmp_path):
    with open_evaluation(tmp_path / "e", ASKED), pytest.raises(RunLocked):
        open_evaluation(tmp_path / "e", ASKED).__enter__()


def test_weights_that_are_written_anew_have_another_stamp(tmp_path):
    import os

    weights = tmp_path / "w"
    weights.mkdir()
    (weights / "a.bin").write_bytes(b"1")
    before = stamp_of(str(weights))
    assert before == stamp_of(str(weights))
    os.utime(weights / "a.bin", ns=(1, 1))
    assert stamp_of(str(weights)) != before
    assert stamp_of(None) is None and stamp_of("tinker://run/x") is None
