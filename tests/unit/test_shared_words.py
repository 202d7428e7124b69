from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time

import pytest

from evsys_sdk import files, logs
from evsys_sdk.concurrency import on_thread, run_async
from evsys_sdk.errors import (
    BackendError,
    DataError,
    EvsysError,
    MissingDependency,
    closest,
    error_boundary,
    need,
    shorten,
)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "record.json"
    files.write_json(path, {"a": 1})

    def write_half() -> None:
        with files.whole_file(path) as handle:
            handle.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]


def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "record.txt"
    path.write_text("old")
    code = (
        "import os, signal, sys; from evsys_sdk.files import whole_file\n"
        f"with whole_file({str(path)!r}) as h:\n    h.write(b'new'); h.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert path.read_text() == "old"


def test_json_is_standard_even_for_nan():
    text = files.to_json({"loss": math.nan, "best": [math.inf, -math.inf], "n": 1.5})
    assert json.loads(text) == {"loss": "NaN", "best": ["Infinity", "-Infinity"], "n": 1.5}


def test_json_takes_numpy_scalars_and_paths(tmp_path):
    import numpy as np

    value = {"a": np.float32(0.5), "b": np.arange(2), "c": np.float64("nan"), "p": tmp_path}
    assert json.loads(files.to_json(value)) == {"a": 0.5, "b": [0, 1], "c": "NaN", "p": str(tmp_path)}


def test_foreign_code_is_blamed_by_name_and_our_errors_pass():
    with (
        pytest.raises(DataError, match="transform 'x' failed: ZeroDivisionError"),
        error_boundary(DataError, "transform 'x'"),
    ):
        _ = 1 / 0
    with pytest.raises(BackendError, match=r"^mine$"), error_boundary(DataError, "transform"):
        raise BackendError("mine")


def test_a_missing_library_says_how_to_install_it():
    with pytest.raises(MissingDependency, match=r"pip install 'evsys-sdk\[local\]'"):
        need("no_such_library_here", extra="local")


def test_closest_ignores_case_and_knows_when_nothing_is_close():
    assert closest("Learning_Rat", ["learning_rate", "loss"]) == "learning_rate"
    assert closest("zzz", ["learning_rate"]) is None


def test_long_values_are_cut_in_the_middle():
    assert len(shorten("x" * 500)) <= 60 and shorten("a\n b") == "a b"


def test_log_level_comes_from_the_environment_and_logs_go_to_stderr(capsys):
    try:
        logs.configure_logger(environ={"EVSYS_LOGGING_LEVEL": "info"})
        logs.get_logger("some.module").info("hello")
        captured = capsys.readouterr()
        assert "evsys_sdk.some.module: hello" in captured.err and captured.out == ""
        logs.set_level("ERROR")
        logs.get_logger().warning("quiet")
        assert capsys.readouterr().err == ""
    finally:
        logs.configure_logger(environ={})
    assert logging.getLogger("evsys_sdk").level == logging.WARNING


def test_an_unknown_log_level_is_refused_by_name():
    with pytest.raises(EvsysError, match="'loud' is not a log level"):
        logs.set_level("loud")


async def test_what_plain_code_on_a_thread_returns_or_raises_comes_back():
    async def leaves():
        await on_thread(lambda: sys.exit(3))

    assert await on_thread(lambda: 7) == 7
    with pytest.raises(SystemExit, match="3"):
        await leaves()


async def test_plain_code_that_nobody_waits_for_any_more_is_ended():
    begun, ended = threading.Event(), threading.Event()

    def for_ever():
        try:
            begun.set()
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    work = asyncio.create_task(on_thread(for_ever))
    assert await asyncio.to_thread(begun.wait, 60)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await asyncio.to_thread(ended.wait, 60)


async def test_a_coroutine_runs_from_inside_a_running_loop():
    async def work() -> int:
        return os.getpid()

    assert run_async(work()) == os.getpid()

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run_async(fail())
