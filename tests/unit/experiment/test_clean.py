"""`evsys clean` and a rehearsal that begins while it works."""

from __future__ import annotations

import pytest

from evsys_sdk.errors import RunLocked
from evsys_sdk.experiment import clean
from evsys_sdk.experiment.clean import CleanPlan, Leftover, remove
from evsys_sdk.record.layout import REHEARSALS, hold


@pytest.fixture
def dry(tmp_path):
    folder = tmp_path / REHEARSALS
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "weights.npz").write_bytes(b"x")
    return folder


def plan_of(dry):
    return CleanPlan(leftovers=[Leftover(experiment=REHEARSALS, path=dry, bytes=1, why="rehearsals")])


def test_a_rehearsal_that_began_after_the_plan_was_made_keeps_its_files(dry):
    plan = plan_of(dry)
    with hold(dry / ".x.lock", "a rehearsal"), pytest.raises(RunLocked, match="rehearsal is running"):
        remove(plan, [])
    assert (dry / "run" / "weights.npz").exists()
    assert remove(plan, []) == 1 and not dry.exists()


def test_a_rehearsal_that_begins_at_the_very_moment_gets_its_folder_back(dry, monkeypatch):
    looks = iter([False, True])
    monkeypatch.setattr(clean, "is_rehearsing", lambda folder: next(looks))
    with pytest.raises(RunLocked, match="rehearsal is running"):
        remove(plan_of(dry), [])
    assert (dry / "run" / "weights.npz").exists() and [one.name for one in dry.parent.iterdir()] == [REHEARSALS]
