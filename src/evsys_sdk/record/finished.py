"""The finished rollouts of one evaluation, kept in the journal one by one.

In: rollouts as they end. Out: those that an earlier, interrupted process left, so that they are not made again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from evsys_sdk.protocols import EvalResult, Rollout
from evsys_sdk.record.eval_data import from_data, rollout_from_data, rollout_to_data, to_data
from evsys_sdk.record.journal import ROLLOUT, RunJournal

BAD_LUCK = ("infra_error", "cancelled")
"""Ends that an interrupted evaluation does not take over: perhaps the server is back."""
_BETWEEN = "\t"


class JournalledRollouts:
    """`protocols.FinishedRollouts` of the evaluation that `name` tells apart from all others of the run."""

    def __init__(self, journal: RunJournal, name: str, *, at: int = 0):
        self.name = name
        self._journal, self._at = journal, at
        found = journal.rollouts(name + _BETWEEN)
        self._done = {key: rollout_from_data(data) for key, data in found.items()}

    def find(self, task_id: str, sample: int) -> Rollout | None:
        return self._done.get(_key(task_id, sample))

    def add(self, task_id: str, sample: int, rollout: Rollout) -> None:
        if rollout.status not in BAD_LUCK:
            self.keep(task_id, sample, rollout)

    def keep(self, task_id: str, sample: int, rollout: Rollout) -> None:
        """The same for a rollout of an evaluation that is over: it counts, whatever became of it."""
        key = _key(task_id, sample)
        if key in self._done:
            return
        self._done[key] = rollout
        self._journal.add(ROLLOUT, rollout_to_data(rollout), at=self._at, key=self.name + _BETWEEN + key)


def _key(task_id: str, sample: int) -> str:
    return f"{task_id}{_BETWEEN}{sample}"


def to_data_without(result: EvalResult, kept: JournalledRollouts) -> dict[str, Any]:
    """The evaluation as plain data that points to its rollouts, which the journal has."""
    order, seen = [], Counter[str]()
    for rollout in result.rollouts:
        sample = seen[rollout.task_id]
        seen[rollout.task_id] += 1
        kept.keep(rollout.task_id, sample, rollout)
        order.append([rollout.task_id, sample])
    return to_data(replace(result, rollouts=[])) | {"kept": kept.name, "order": order}


def retold(data: dict[str, Any], journal: RunJournal) -> EvalResult:
    """What the journal keeps as an evaluation, with its rollouts."""
    told = {key: value for key, value in data.items() if key not in ("kept", "order")}
    if "kept" not in data:
        return from_data(told)
    kept = JournalledRollouts(journal, data["kept"])
    found = [kept.find(task_id, sample) for task_id, sample in data["order"]]
    return replace(from_data(told), rollouts=[rollout for rollout in found if rollout is not None])
