from __future__ import annotations

import subprocess
import sys

import pytest

from evsys_sdk.errors import EvsysError, RunLocked
from evsys_sdk.record.layout import open_run_dir, set_aside


def test_a_directory_has_one_owner_at_a_time(tmp_path):
    with open_run_dir(tmp_path / "r"), pytest.raises(RunLocked, match="in use by process"):
        open_run_dir(tmp_path / "r").__enter__()
    with open_run_dir(tmp_path / "r"):
        pass


def test_a_killed_owner_does_not_hold_the_lock(tmp_path):
    code = (
        "import os, signal; from pathlib import Path; from evsys_sdk.record.layout import open_run_dir\n"
        f"open_run_dir(Path({str(tmp_path / 'r')!r})).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with open_run_dir(tmp_path / "r"):
        pass


def test_every_earlier_attempt_is_kept_under_its_number(tmp_path):
    for number in range(3):
        with open_run_dir(tmp_path) as folder:
            set_aside(folder)
            assert not (folder / "result").exists()
            (folder / "result").write_text(str(number))
    assert [(tmp_path / f"attempts/{n}/result").read_text() for n in (1, 2)] == ["0", "1"]
    assert (tmp_path / "result").read_text() == "2"


def test_what_is_kept_stays_in_place(tmp_path):
    for name in ("weights", "logs"):
        (tmp_path / name).mkdir()
    assert set_aside(tmp_path, keep=["weights"]) == tmp_path / "attempts/1"
    assert (tmp_path / "weights").is_dir() and (tmp_path / "attempts/1/logs").is_dir()
    assert set_aside(tmp_path, keep=["weights"]) is None


def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EvsysError, match="cannot use run directory"):
        open_run_dir(tmp_path / "file/r").__enter__()


def test_what_a_killed_writer_left_half_done_is_swept_up(tmp_path):
    (tmp_path / "weights/.step-3.ab12.part").mkdir(parents=True)
    (tmp_path / "weights/.step-3.ab12.part/model.bin").write_bytes(b"half")
    (tmp_path / ".run_result.json.99.cd34.part").write_text("{")
    (tmp_path / "weights/step-2").mkdir()
    with open_run_dir(tmp_path):
        assert sorted(path.name for path in tmp_path.rglob("*")) == [".lock", "step-2", "weights"]
