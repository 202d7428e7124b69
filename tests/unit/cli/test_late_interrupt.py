"""A Ctrl-C that comes when the command is done, while Python shuts down, does not change the exit code."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

ENDS = """
import atexit, sys, time
from evsys_sdk.cli.main import main

def wait():
    print("ending", flush=True)
    sys.stdin.readline()

if sys.argv[1] == "after ours":
    atexit.register(wait)
code = main()
if sys.argv[1] == "before ours":
    atexit.register(wait)
sys.exit(code)
"""


@pytest.mark.parametrize("moment", ["before ours", "after ours"])
def test_a_late_ctrl_c_keeps_the_exit_code(moment):
    """`main` was given a wrong verb, which is exit code 1; exit handlers run before and after its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS, moment], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ending\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(b"on\n", timeout=300)
    assert process.returncode == 1, err
    assert b"KeyboardInterrupt" not in err
