"""Folders of rollouts: held while their process lives, and swept when it was killed."""

from __future__ import annotations

import os
import time

import pytest

from evsys_sdk.rollout import trial
from evsys_sdk.rollout.trial import PREFIXES, Scratch


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(trial.tempfile, "tempdir", str(tmp_path))
    trial._sweep_once.cache_clear()
    yield tmp_path
    trial._sweep_once.cache_clear()


def age(*places):
    for place in places:
        os.utime(place, (time.time() - 3600,) * 2)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_a_killed_process_left_is_swept_and_what_lives_or_is_young_stays(temporary, prefix):
    live = Scratch(prefix)
    stale, young, foreign = (temporary / name for name in (f"{prefix}stale", f"{prefix}young", "somebody-elses"))
    for place in (stale, young, foreign):
        (place / "deep").mkdir(parents=True)
    age(live.path, stale, foreign)
    trial._sweep_once.cache_clear()
    Scratch(prefix).remove()
    assert not stale.exists()
    assert live.path.exists() and young.exists() and foreign.exists()
    live.remove()
    assert not live.path.exists()
