"""The time that an experiment took is that of all its processes, killed ones included."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from evsys_sdk.record.journal import EXPERIMENT, Journal
from evsys_sdk.run import status
from evsys_sdk.run.status import last_written, launched_at, seconds_before, seconds_until


@pytest.fixture
def clock(monkeypatch):
    """Processes that begin when it is said."""

    def begin(line, at, written):
        monkeypatch.setattr(status.time, "time", lambda: at)
        return seconds_before(line, written)

    return begin


def test_each_process_counts_from_its_beginning_to_its_last_write(tmp_path, clock):
    with closing(Journal(tmp_path / "j.sqlite")) as journal:
        line = journal.begin(EXPERIMENT, "f")
        assert clock(line, at=1000.0, written=None) == 0
        assert clock(line, at=5000.0, written=1040.0) == 40, "what lies between two processes is nobody's time"
        assert clock(line, at=9000.0, written=5010.0) == 50
        assert seconds_until(line, 9003.0) == 53
        again = journal.begin(EXPERIMENT, "g")
        assert clock(again, at=9500.0, written=9400.0) == 0, "a fresh start has taken no time yet"
        assert (launched_at(line), launched_at(again)) == (1000.0, 9500.0)


def test_the_last_write_is_that_of_the_file_or_of_its_log(tmp_path):
    path = tmp_path / "j.sqlite"
    assert last_written(path) is None
    for name, moment in (("j.sqlite", 100.0), ("j.sqlite-wal", 200.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (moment, moment))
    assert last_written(path) == 200.0
