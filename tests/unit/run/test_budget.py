"""Who gets the trials of a budget when threads ask in any order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import pytest

from evsys_sdk.errors import Cancelled
from evsys_sdk.record.journal import EXPERIMENT, Journal
from evsys_sdk.run.budget import Budget, spent_before


def _planned(trials: int, *runs: str) -> Budget:
    budget = Budget(limits={"trials": trials})
    for run in runs:
        budget.expect(run)
    return budget


def _begin(budget: Budget, run: str) -> str:
    with budget.turn(run):
        try:
            budget.begin_run(run)
        except Cancelled as exc:
            return "refused" if exc.reason == "budget" else f"stopped: {exc.reason}"
    return "begun"


def _passes(budget: Budget, run: str) -> str:
    """As a run does that was finished before."""
    with budget.turn(run):
        return "passed"


@pytest.mark.parametrize(
    ("first", "then"), [(_begin, ["begun", "refused"]), (_passes, ["begun", "begun"])], ids=["begun", "finished before"]
)
def test_a_later_run_waits_until_an_earlier_one_has_decided(first, then):
    budget = _planned(2, "a", "b", "c")
    with ThreadPoolExecutor(3) as pool:
        later = [pool.submit(_begin, budget, run) for run in ("c", "b")]
        assert later[1].result(timeout=300) == "begun", "there is one for the first and one for the second"
        assert wait_for(later, timeout=0.2).not_done == {later[0]}
        first(budget, "a")
        assert [later[1].result(), later[0].result(timeout=300)] == then


def test_nobody_waits_for_a_run_that_went_wrong_or_where_trials_are_not_counted():
    budget = _planned(1, "a", "b")
    with pytest.raises(ZeroDivisionError), budget.turn("a"):
        raise ZeroDivisionError
    assert _begin(budget, "b") == "begun"
    free = Budget()
    free.expect("a")
    free.expect("b")
    assert _begin(free, "b") == "begun"


def test_what_was_spent_is_known_beside_numbers_that_are_none(tmp_path):
    journal = Journal(tmp_path / "e.journal.sqlite")
    line, run = journal.begin(EXPERIMENT, "plan"), journal.begin("e/r", "abc")
    line.add("plan", {}, at=0)
    run.add("step", {"metrics": {"tokens": 3, "odd": float("nan")}}, at=1)
    run.add("step", {"metrics": {"tokens": 4}}, at=2)
    run.add("rollout", {"cost_usd": 0.5, "logprobs": [float("-inf")]}, at=2)
    run.add("rollout", {"cost_usd": 0.25}, at=2, key="other")
    journal.check()
    spent = spent_before(journal, line, seconds=0)
    assert (spent.steps, spent.tokens, spent.usd) == (2, 7, 0.75)
