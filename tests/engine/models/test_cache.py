"""A prepared model is whole or it is not there: interrupted, torn and outdated folders are made again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evsys_engine.models import ModelError, find_model, list_models
from evsys_engine.models.cache import cache_folder, make_ready, read_ready, require_space, unfinished_folders

FACTS = {"recipe": "r1", "name": "m", "sha256": ""}
CHILD = """
import os, signal, sys
from pathlib import Path
from evsys_engine.models import find_model, gguf
import evsys_engine.folders as folders

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

place, name, cache = sys.argv[1:]
if place == "weights half written":
    def save_file(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        die()
    import safetensors.numpy
    safetensors.numpy.save_file = save_file
elif place == "files written, no manifest":
    folders._describe = die
else:
    folders.os.replace = die
find_model(name, cache=Path(cache))
"""


def _fill(text="hello"):
    calls = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        (folder / "file.txt").write_text(text)

    return fill, calls


@pytest.mark.parametrize("place", ["weights half written", "files written, no manifest", "all but in place"])
@pytest.mark.parametrize("kind", ["builtin", "gguf"])
def test_a_killed_process_leaves_nothing_that_is_trusted(place, kind, write_gguf, tmp_path):
    cache = tmp_path / "cache"
    name = "tiny-random" if kind == "builtin" else str(write_gguf())
    done = subprocess.run([sys.executable, "-c", CHILD, place, name, str(cache)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [model.state for model in list_models(cache) if model.source == kind and model.disk_bytes] == ["unfinished"]
    folder = find_model(name, cache=cache).path
    assert read_ready(folder) and (folder / "model.safetensors").stat().st_size > 100_000
    assert unfinished_folders(cache) == [], "the leftovers are cleared"


def test_what_is_ready_is_not_made_again(tmp_path):
    fill, calls = _fill()
    first, second = make_ready(tmp_path / "m", FACTS, fill), make_ready(tmp_path / "m", FACTS, fill)
    assert first == second and len(calls) == 1


@pytest.mark.parametrize("harm", ["cut", "removed", "no manifest", "broken manifest", "manifest of another shape"])
def test_a_damaged_folder_is_made_again(harm, tmp_path):
    folder = tmp_path / "m"
    make_ready(folder, FACTS, _fill("hello")[0])
    if harm == "cut":
        (folder / "file.txt").write_text("hel")
    elif harm == "removed":
        (folder / "file.txt").unlink()
    elif harm == "no manifest":
        (folder / "evsys.json").unlink()
    else:
        (folder / "evsys.json").write_text("{" if harm == "broken manifest" else "[1]")
    assert read_ready(folder) is None
    make_ready(folder, FACTS, _fill("hello")[0])
    assert (folder / "file.txt").read_text() == "hello"


def test_a_newer_recipe_makes_it_again(tmp_path):
    make_ready(tmp_path / "m", FACTS, _fill("old")[0])
    make_ready(tmp_path / "m", {**FACTS, "recipe": "r2"}, _fill("new")[0])
    assert (tmp_path / "m/file.txt").read_text() == "new"


def test_of_several_at_once_one_makes_it_and_the_others_wait(tmp_path):
    log = tmp_path / "log"
    code = f"""
import time
from pathlib import Path
from evsys_engine.models.cache import make_ready
def fill(folder):
    with open({str(log)!r}, "a") as handle:
        handle.write("made\\n")
    time.sleep(0.5)
    (folder / "file.txt").write_text("hello")
print(make_ready(Path({str(tmp_path)!r}) / "m", {FACTS!r}, fill)["name"])
"""
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(subprocess.check_output, [sys.executable, "-c", code], text=True) for _ in range(3)]
    assert [run.result() for run in runs] == ["m\n"] * 3
    assert log.read_text() == "made\n"


def test_a_failed_attempt_leaves_no_folder(tmp_path):
    def fill(folder: Path) -> None:
        (folder / "file.txt").write_text("half")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        make_ready(tmp_path / "m", FACTS, fill)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="set EVSYS_CACHE to a folder that can be written"):
        find_model("tiny-random", cache=tmp_path / "file/cache")


def test_a_full_disk_is_seen_before_the_work(tmp_path):
    require_space(tmp_path, 1)
    with pytest.raises(ModelError, match=r"needs 1000000\.0 GB .* are free; make room, or set EVSYS_CACHE"):
        require_space(tmp_path, 10**15)


def test_the_environment_names_the_cache(tmp_path, monkeypatch):
    assert cache_folder({}) == Path.home() / ".cache/evsys/models"
    assert cache_folder({"EVSYS_CACHE": str(tmp_path)}) == tmp_path
    monkeypatch.setenv("EVSYS_CACHE", str(tmp_path))
    assert find_model("tiny-random").path == tmp_path / "tiny-random"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_hit_in_a_read_only_cache_works(tmp_path):
    find_model("tiny-random", cache=tmp_path)
    tmp_path.chmod(0o555)
    assert find_model("tiny-random", cache=tmp_path).path.is_dir()
