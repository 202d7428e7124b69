"""The journal: what happened, once each, in order, through kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import EvalResult, Rollout, Score, Turn
from evsys_sdk.record.journal import Journal
from evsys_sdk.record.models import from_data, to_data


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "e.journal.sqlite")


def test_events_come_back_in_order_and_once(journal):
    run = journal.begin("e/r", "abc")
    run.add("step", {"metrics": {"loss": 0.1}}, at=1)
    run.add("step", {"metrics": {"loss": 0.2}}, at=2)
    run.add("step", {"metrics": {"loss": 9.9}}, at=1)
    assert [(event.at, event.data["metrics"]["loss"]) for event in run.events(upto=9)] == [(1, 0.1), (2, 0.2)]
    assert [event.at for event in run.events(after=1, upto=2)] == [2]


def test_numbers_of_other_libraries_stay_numbers_and_floats_stay_exact(journal):
    numpy = pytest.importorskip("numpy")
    run = journal.begin("e/r", "abc")
    run.add("step", {"a": numpy.float32(0.5), "b": 0.1 + 0.2, "c": float("nan")}, at=1)
    (event,) = run.events(upto=1)
    assert event.data["a"] == 0.5 and event.data["b"] == 0.1 + 0.2 and event.data["c"] != event.data["c"]


def test_what_is_superseded_may_happen_again(journal):
    run = journal.begin("e/r", "abc")
    for step in (1, 2, 3):
        run.add("step", {"n": step}, at=step)
    run.supersede(after=1)
    assert [event.at for event in run.events(upto=9)] == [1]
    run.add("step", {"n": 20}, at=2)
    assert [event.data["n"] for event in run.events(upto=9)] == [1, 20]


def test_only_the_same_run_that_did_not_complete_is_taken_up(journal):
    first = journal.begin("e/r", "abc")
    first.add("step", {}, at=1)
    assert journal.unfinished("e/r", "other") is None and journal.unfinished("e/else", "abc") is None
    first.add("end", {"status": "cancelled"}, at=0, key="cancelled")
    taken = journal.unfinished("e/r", "abc")
    assert taken.attempt == first.attempt and len(taken.events(upto=9)) == 2
    taken.add("end", {"status": "completed"}, at=0, key="completed")
    assert journal.unfinished("e/r", "abc") is None
    assert journal.begin("e/r", "abc").events(upto=9) == []


def test_runs_on_threads_of_their_own_do_not_mix(journal):
    def work(name):
        run = journal.begin(name, "x")
        for step in range(200):
            run.add("step", {"run": name}, at=step)

    threads = [threading.Thread(target=work, args=(f"e/{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        events = journal.unfinished(f"e/{n}", "x").events(upto=999)
        assert [event.at for event in events] == list(range(200))
        assert {event.data["run"] for event in events} == {f"e/{n}"}


def test_what_was_noted_before_a_kill_is_there_after_it(tmp_path):
    code = (
        "import os, signal; from pathlib import Path; from evsys_sdk.record.journal import Journal\n"
        f"run = Journal(Path({str(tmp_path / 'j')!r})).begin('e/r', 'abc')\n"
        "for step in range(50): run.add('step', {}, at=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(Journal(tmp_path / "j").unfinished("e/r", "abc").events(upto=99)) == 50


def test_a_file_that_is_no_journal_is_said(tmp_path):
    (tmp_path / "j").write_text("this is not a database, and it is long enough to be looked at" * 20)
    with pytest.raises(EvsysError, match=r"journal .*/j cannot be used: file is not a database"):
        Journal(tmp_path / "j")


def test_an_evaluation_survives_the_way_there_and_back(journal):
    score = Score(metric="pass@1", value=0.5, low=0.1, high=0.9, n_tasks=2, n_rollouts=2)
    turn = Turn(prompt_tokens=[1], completion_tokens=[2, 3], logprobs=[-0.1, -0.2], text="hi")
    result = EvalResult(
        name="b",
        split="val",
        scores=[score],
        step=5,
        breakdown={"kind": {"easy": [score]}},
        rollouts=[Rollout(task_id="t", turns=[turn], reward=1.0, metadata={"sample": 0})],
    )
    run = journal.begin("e/r", "abc")
    run.add("eval", to_data(result), at=5)
    assert from_data(run.events(upto=5)[0].data) == result
