"""Finished rollouts in the journal: what an interrupted evaluation takes over, and what it makes again."""

from __future__ import annotations

import pytest

from evsys_sdk.protocols import EvalResult, Rollout, Score, Turn
from evsys_sdk.record.journal import Journal, JournalledRollouts, read_eval, to_data_without


@pytest.fixture
def journal(tmp_path):
    found = Journal(tmp_path / "journal.sqlite")
    yield found.begin("exp/run", "settings")
    found.close()


def rollout(task_id="a", **about):
    turn = Turn(prompt_tokens=[1, 2], completion_tokens=[3], logprobs=[-0.5], text="yes")
    return Rollout(**{"task_id": task_id, "turns": [turn], "reward": 1.0, "metadata": {"sample": 0}} | about)


def test_another_process_finds_what_was_finished_token_for_token(journal):
    JournalledRollouts(journal, "val/colours/5").add("a", 0, rollout())
    again = JournalledRollouts(journal, "val/colours/5")
    assert again.find("a", 0) == rollout() and again.find("a", 1) is None and again.find("b", 0) is None


def test_an_id_with_half_a_surrogate_pair_is_found_again(journal):
    JournalledRollouts(journal, "val").add("red \ud83d", 0, rollout("red \ud83d"))
    again = JournalledRollouts(journal, "val")
    assert again.find("red \ud83d", 0) == rollout("red \ud83d") and again.find("red \ude00", 0) is None


def test_the_rollouts_of_another_evaluation_are_not_its_own(journal):
    JournalledRollouts(journal, "val/colours/5").add("a", 0, rollout())
    for other in ("val/colours/50", "val/colours", "test/colours/5"):
        assert JournalledRollouts(journal, other).find("a", 0) is None


@pytest.mark.parametrize("status", ["infra_error", "cancelled"])
def test_bad_luck_is_tried_again_and_an_agent_that_failed_is_not(journal, status):
    first = JournalledRollouts(journal, "val")
    first.add("a", 0, rollout(status=status, reward=None))
    first.add("b", 0, rollout("b", status="agent_error", reward=0.0))
    again = JournalledRollouts(journal, "val")
    assert again.find("a", 0) is None and again.find("b", 0) is not None


def test_rollouts_after_a_checkpoint_that_training_resumes_from_are_void(journal):
    JournalledRollouts(journal, "val/10", at=10).add("a", 0, rollout())
    JournalledRollouts(journal, "val/5", at=5).add("a", 0, rollout())
    journal.supersede(after=5)
    assert JournalledRollouts(journal, "val/10").find("a", 0) is None
    assert JournalledRollouts(journal, "val/5").find("a", 0) is not None


def test_a_finished_evaluation_is_retold_with_every_rollout_in_its_order(journal):
    tries = [rollout("b"), rollout("b", reward=0.0), rollout("a", status="infra_error", reward=None, error="gone")]
    result = EvalResult(name="colours", split="val", scores=[Score(metric="pass@1", value=0.5)], rollouts=tries)
    kept = JournalledRollouts(journal, "val/colours/5")
    kept.add("b", 0, tries[0])
    data = to_data_without(result, kept)
    assert data["rollouts"] == []
    assert read_eval(data, journal) == result
