"""Regrading is `evaluate` with the answers of a record."""

from __future__ import annotations

from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.experiment.regrade import compare
from evsys_sdk.protocols import Rollout, Turn
from evsys_sdk.record.rollouts import StoredEval
from evsys_sdk.registry import metrics


def rollout(task_id: str, text: str, reward: float) -> Rollout:
    turn = Turn(prompt_tokens=[], completion_tokens=[], logprobs=[], text=text)
    return Rollout(task_id=task_id, turns=[turn], reward=reward)


def task(task_id: str) -> HarborTask:
    return HarborTask(
        task_id=task_id, instruction="?", verifier=InProcessVerifier(fn_name="exact_match", expected=task_id)
    )


async def test_rollouts_of_several_tasks_keep_the_order_of_the_record_and_get_their_own_new_reward():
    recorded = [
        rollout("a", "a", 0.0), rollout("b", "no", 1.0), rollout("a", "no", 0.0), rollout("gone", "x", 1.0),
        rollout("b", "b", 1.0), rollout("a", "a", 1.0),
    ]  # fmt: skip
    known = {"a": task("a"), "b": task("b")}
    stored = StoredEval(run="r", split="test", name="suite", rollouts=recorded)
    found = await compare(
        stored,
        [(one, known.get(one.task_id)) for one in recorded],
        [("mean_reward", metrics.build("mean_reward", {}))],
        concurrency=2,
    )
    assert [(pair.old.task_id, pair.old.completion, pair.old.reward, pair.new.reward) for pair in found.pairs] == [
        ("a", "a", 0.0, 1.0), ("b", "no", 1.0, 0.0), ("a", "no", 0.0, 0.0), ("b", "b", 1.0, 1.0), ("a", "a", 1.0, 1.0),
    ]  # fmt: skip
    assert all(pair.old.completion == pair.new.completion for pair in found.pairs)
    assert found.without_task == 1 and found.graded_by == ["exact_match"]
    # Each task counts the same: (1/3 + 2/2) / 2 before, (2/3 + 1/2) / 2 after.
    assert abs(found.old[0].value - 2 / 3) < 1e-9 and abs(found.new[0].value - 7 / 12) < 1e-9
    assert abs(found.changes[0].value - (7 / 12 - 2 / 3)) < 1e-9
