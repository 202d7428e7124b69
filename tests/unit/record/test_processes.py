"""A process is told from a later one with the same number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from evsys_sdk.record.processes import process_start, this_process


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_this_process_is_alive_and_named_as_its_locks_name_it(tmp_path):
    from evsys_sdk.record.layout import held_by, hold

    this = this_process()
    assert this.is_alive and this.is_here and this.pid == os.getpid()
    with hold(tmp_path / ".x.lock", "x"):
        assert held_by(tmp_path / ".x.lock") == str(this)


def test_another_process_with_its_number_is_left_alone(sleeper):
    other = replace(this_process(), pid=sleeper.pid, born="another boot/1")
    assert not other.is_alive
    assert other.send(signal.SIGKILL) is False
    assert replace(other, born=process_start(sleeper.pid), host="elsewhere").send(signal.SIGKILL) is False
    assert replace(other, born=None).send(signal.SIGKILL) is False
    assert sleeper.poll() is None
    assert replace(other, born=process_start(sleeper.pid)).send(signal.SIGTERM) is True
    assert sleeper.wait(timeout=300) == -signal.SIGTERM


def test_one_that_has_ended_has_no_birth_even_before_it_is_waited_for(sleeper):
    assert process_start(sleeper.pid) is not None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is a zombie now
    assert process_start(sleeper.pid) is None


def test_a_name_with_brackets_and_blanks_does_not_confuse(tmp_path):
    script = tmp_path / "a) b (c 1 2"
    script.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(script), "600"])
    try:
        assert process_start(process.pid) is not None and process_start(process.pid) == process_start(process.pid)
        assert process_start(process.pid).rpartition("/")[2].isdigit()
    finally:
        process.kill()
        process.wait()
