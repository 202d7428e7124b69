"""Memory of threads, as the C library sees it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COUNT_HEAPS = """
import ctypes, sys, threading
from pathlib import Path

from evsys_engine.devices import share_one_heap

if "share" in sys.argv[2:]:
    print(share_one_heap())
libc, met = ctypes.CDLL(None), threading.Barrier(4)

def allocate():
    kept = bytearray(50_000)
    met.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(Path(sys.argv[1]).read_text().count("<heap nr="))
"""


def count_heaps(folder, *words, **env):
    """What the script printed, in a process of its own: the setting is for a whole process."""
    left = {key: value for key, value in os.environ.items() if key != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", COUNT_HEAPS, str(folder / "heaps.xml"), *words]
    return subprocess.run(command, env=left | env, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="only glibc has a heap per thread")
def test_threads_share_one_heap_unless_the_user_has_a_limit_of_their_own(tmp_path):
    assert int(count_heaps(tmp_path)[0]) > 1  # as it is without us
    assert count_heaps(tmp_path, "share") == ["True", "1"]
    assert count_heaps(tmp_path, "share", MALLOC_ARENA_MAX="4")[0] == "False"
