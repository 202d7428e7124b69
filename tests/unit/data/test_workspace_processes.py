"""The workspace under several real processes, and under SIGKILL."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evsys_sdk.data.workspace import Workspace
from evsys_sdk.errors import WorkspaceError

PRELUDE = """
import json, pathlib, sys, time
from evsys_sdk.data.workspace import Workspace
folder = pathlib.Path(sys.argv[1])

class Slow:
    "Sends 50 rows with a pause between them, and notes that it was asked."
    def fetch(self, kind, ref):
        with open(folder / "asked", "a") as log:
            log.write(ref + "\\n")
        return {"id": ref, "name": "slow", "version": 1, "n_rows": 50}, self.rows()
    def rows(self):
        for number in range(50):
            yield {"n": number, "pad": "x" * 9000}
            if number == 20:
                (folder / "half-way").touch()
            time.sleep(PAUSE)

def at_once():
    "Wait for the others, so that all are at the door together."
    (folder / f"ready-{sys.argv[2]}").touch()
    while not (folder / "go").exists():
        time.sleep(0.005)
"""
PULL = PRELUDE.replace("PAUSE", "0.002") + (
    "at_once()\nprint(Workspace(folder / '.evsys', source=Slow()).pull_dataset('d-1'))"
)
ADD = PRELUDE + "at_once()\nprint(Workspace(folder / '.evsys').add(folder / sys.argv[3], name='sums').id)"
PULL_SLOWLY = PRELUDE.replace("PAUSE", "0.02") + ("Workspace(folder / '.evsys', source=Slow()).pull_dataset('d-1')")
N = 4


def start(code: str, folder: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(folder), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(check: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def answers(children: list[subprocess.Popen[str]], folder: Path) -> list[str]:
    """What the children print when let go together."""
    wait_for(lambda: len(list(folder.glob("ready-*"))) == len(children))
    (folder / "go").touch()
    results = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0] * len(children), results
    return [out.strip() for out, _ in results]


def stored(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / ".evsys" / "datasets").iterdir() if p.name != ".lock")


def test_processes_pulling_one_id_make_one_file_with_one_fetch(tmp_path: Path) -> None:
    paths = answers([start(PULL, tmp_path, str(i)) for i in range(N)], tmp_path)
    assert set(paths) == {str(tmp_path / ".evsys" / "datasets" / "d-1.jsonl")}
    assert (tmp_path / "asked").read_text() == "d-1\n"
    assert stored(tmp_path) == ["d-1.jsonl", "d-1.manifest.json"]
    lines = Workspace(tmp_path / ".evsys").pull_dataset("d-1").read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines] == list(range(50))


def test_processes_adding_the_same_content_make_one_version(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    ids = answers([start(ADD, tmp_path, str(i), "rows.jsonl") for i in range(N)], tmp_path)
    assert len(set(ids)) == 1
    assert stored(tmp_path) == [f"{ids[0]}.jsonl", f"{ids[0]}.manifest.json"]


def test_processes_adding_different_content_get_a_version_each(tmp_path: Path) -> None:
    for i in range(N):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps({"a": i}) + "\n")
    ids = answers([start(ADD, tmp_path, str(i), f"{i}.jsonl") for i in range(N)], tmp_path)
    entries = Workspace(tmp_path / ".evsys").list()
    assert [entry.version for entry in entries] == [1, 2, 3, 4]
    assert {entry.id for entry in entries} == set(ids)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A workspace whose puller was killed in the middle."""
    child = start(PULL_SLOWLY, tmp_path)
    wait_for(lambda: (tmp_path / "half-way").exists() or child.poll() is not None)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    return tmp_path


def test_a_killed_pull_leaves_nothing_that_is_trusted(killed: Path) -> None:
    assert [name for name in stored(killed) if not name.endswith(".part")] == []
    assert any(name.endswith(".part") for name in stored(killed)), "it was killed too early to prove anything"
    assert Workspace(killed / ".evsys").list() == []
    with pytest.raises(WorkspaceError):
        Workspace(killed / ".evsys").pull_dataset("d-1")


def test_a_killed_pull_does_not_block_the_next_one(killed: Path) -> None:
    (killed / "go").touch()
    child = start(PULL, killed, "again")
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    assert len(Path(out.strip()).read_text().splitlines()) == 50
    assert stored(killed) == ["d-1.jsonl", "d-1.manifest.json"]


def test_a_death_between_data_and_manifest_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    code = """
import os, pathlib, signal, sys
from evsys_sdk.data import workspace
from evsys_sdk.data.workspace import Workspace
workspace.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
folder = pathlib.Path(sys.argv[1])
Workspace(folder / ".evsys").add(folder / "rows.jsonl", name="sums")
"""
    child = start(code, tmp_path)
    child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL
    workspace = Workspace(tmp_path / ".evsys")
    assert [name.rpartition(".")[2] for name in stored(tmp_path)] == ["jsonl"]
    with pytest.raises(WorkspaceError, match="never finished"):
        workspace.pull_dataset("sums")
    entry = workspace.add(tmp_path / "rows.jsonl", name="sums")
    assert entry.version == 1 and workspace.get("sums") == entry
