"""What the terminal says of runs that are under way."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from evsys_sdk.cli import progress
from evsys_sdk.cli.progress import PlainProgress


@pytest.fixture
def shown(monkeypatch):
    """A display whose clock stands still until somebody moves it."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    display = PlainProgress(io.StringIO())

    def passes(seconds):
        clock.now += seconds

    display.passes = passes
    return display


def ctx(*, retelling=False):
    return SimpleNamespace(run_id="e/r", extras={"run_name": "r"}, retelling=retelling)


def trained(display, steps, *, each=0.0, retelling=False):
    for step in steps:
        display.passes(each)
        display.on_step(ctx(retelling=retelling), step, {"loss": 1.0})


def last_line(display):
    return display.stream.getvalue().splitlines()[-1]


def test_the_time_that_is_left_is_that_of_the_steps_that_were_made(shown):
    shown.on_train_start(ctx(), 300)
    trained(shown, range(1, 101), each=0.5)
    assert last_line(shown).endswith("eta 1:40")


def test_after_a_resume_only_new_steps_count_and_are_shown(shown):
    shown.on_train_start(ctx(), 300)
    shown.passes(60)  # the model is loaded
    trained(shown, range(1, 111), retelling=True)
    score = SimpleNamespace(metric="pass@1", value=0.5)
    shown.on_eval(ctx(retelling=True), SimpleNamespace(scores=[score], step=100, split="val", name="tools"))
    assert shown.stream.getvalue() == "r: training\n"
    trained(shown, range(111, 121), each=2.0)
    assert last_line(shown) == "r: step 120/300  training  loss 1.0000  val/tools pass@1 0.500  eta 6:00"


def test_a_later_stage_of_a_chain_is_not_taken_for_a_quick_one(shown):
    shown.on_train_start(ctx(), 100)
    trained(shown, range(1, 101), each=0.1)
    shown.on_train_start(ctx(), 200)
    trained(shown, range(101, 151), each=1.0)
    assert last_line(shown).endswith("eta 0:50")
