"""The folder of checkpoints: whole or not there, known by name, gone when their time is up."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from evsys_engine.server.checkpoints import Checkpoints, TinkerPath, UnknownCheckpoint
from evsys_engine.server.sessions import Naming
from evsys_engine.types import BadRequest, ModelInfo

PATH = TinkerPath("run", "weights", "one")


class Clock:
    now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    store = Checkpoints(tmp_path, clock)
    yield store
    store.close()


def writing(text):
    def write(folder):
        folder.mkdir()
        (folder / "weights").write_text(text)

    return write


def test_a_save_that_fails_leaves_nothing_behind(store):
    def break_off(folder):
        writing("half")(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(PATH, break_off, {})
    with pytest.raises(UnknownCheckpoint):
        store.find(PATH)
    assert list((store.folder / "run" / "weights").iterdir()) == []


def test_a_failed_overwrite_keeps_the_old_one(store):
    store.save(PATH, writing("old"), {"lora": 1})

    def break_off(folder):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(PATH, break_off, {}, overwrite=True)
    assert (store.find(PATH) / "weights").read_text() == "old" and store.facts(PATH)["lora"] == 1
    store.save(PATH, writing("new"), {}, overwrite=True)
    assert (store.find(PATH) / "weights").read_text() == "new"
    assert [entry.name for entry in (store.folder / "run" / "weights").iterdir()] == ["one"]


def test_a_folder_without_its_marker_is_not_a_checkpoint(store):
    writing("stray")(_parents(store.folder / "run" / "weights" / "stray"))
    assert store.of_run("run") == []
    with pytest.raises(UnknownCheckpoint):
        store.facts(TinkerPath("run", "weights", "stray"))


def _parents(folder):
    folder.parent.mkdir(parents=True)
    return folder


def test_a_checkpoint_goes_when_its_time_is_up(store, clock):
    store.save(PATH, writing("short"), {}, ttl_seconds=60)
    lasting = TinkerPath("run", "sampler_weights", "two")
    store.save(lasting, writing("long"), {})
    store.remove_expired()
    assert len(store.of_run("run")) == 2
    clock.now += timedelta(seconds=61)
    store.remove_expired()
    assert store.of_run("run") == [lasting]
    store.set_ttl(lasting, 10)
    clock.now += timedelta(seconds=11)
    store.remove_expired()
    assert store.of_run("run") == []


def test_a_new_store_knows_what_an_old_one_saved(tmp_path):
    first = Checkpoints(tmp_path)
    first.save(PATH, writing("x"), {"user_metadata": {"step": "3"}})
    first.close()
    second = Checkpoints(tmp_path)
    assert second.runs() == ["run"]
    described = second.describe(second.of_run("run")[0])
    assert described["tinker_path"] == "tinker://run/weights/one" and described["user_metadata"] == {"step": "3"}
    second.close()


@pytest.mark.parametrize(
    "text",
    ["tinker://a/weights/..", "tinker://../weights/a", "tinker://a/weights/b/c", "tinker://a/other/b", "a/weights/b",
     "tinker:///weights/b", "tinker://a/weights/", "tinker://a/weights/.hidden", "tinker://.unnamed/weights/a"],
)  # fmt: skip
def test_only_plain_names_make_a_path(text):
    with pytest.raises(BadRequest):
        TinkerPath.parse(text)


def info(name, path):
    return ModelInfo(
        name=name, path=Path(path), vocab_size=1, max_length=1, parameters=1, device="cpu", dtype="float32"
    )


@pytest.mark.parametrize(
    ("name", "path", "public"),
    [
        ("Qwen/Qwen3-0.6B", "/cache/hub/x", "Qwen/Qwen3-0.6B"),
        ("tiny-random", "/cache/models/tiny-random", "/cache/models/tiny-random"),
        # The client would take this one for org/model/variant and look for the tokenizer in /models.
        ("tiny", "/models/tiny", "/models/tiny/"),
    ],
)
def test_clients_are_told_a_name_they_can_load_the_tokenizer_by(name, path, public):
    naming = Naming(info(name, path))
    assert naming.public == public
    for known in (name, path, public):
        naming.check(known)
    with pytest.raises(BadRequest, match="not served"):
        naming.check("another/model")


def test_any_way_to_write_the_models_folder_is_its_name(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    naming = Naming(info("model", tmp_path / "model"))
    for name in ("model", "./model", str(tmp_path / "model"), f"{tmp_path}/model/"):
        naming.check(name)


KILLED_SERVER = """
import os, signal, sys
from pathlib import Path
from evsys_engine.server import checkpoints
from evsys_engine.server.checkpoints import Checkpoints, TinkerPath

def write(folder):
    folder.mkdir(parents=True)
    (folder / "adapter.bin").write_bytes(b"x" * 1000)
    if sys.argv[2] == "while writing":
        os.kill(os.getpid(), signal.SIGKILL)

store, path = Checkpoints(Path(sys.argv[1])), TinkerPath("run", "weights", "step-1")
if sys.argv[2] == "between the renames":
    store.save(path, write, {"version": 1})
    replace = os.replace
    def killed(source, target):
        replace(source, target)
        if str(target).endswith("-old"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.replace = killed
store.save(path, write, {"version": 2}, overwrite=True)
"""


@pytest.mark.parametrize(("when", "version"), [("while writing", None), ("between the renames", 1)])
def test_what_a_killed_server_was_writing_is_swept(tmp_path, when, version):
    done = subprocess.run([sys.executable, "-c", KILLED_SERVER, str(tmp_path / "store"), when], timeout=300)
    assert done.returncode == -signal.SIGKILL
    drafts = [path for path in (tmp_path / "store").rglob(".*") if path.name != ".lock"]
    assert drafts, "the kill left something"
    store = Checkpoints(tmp_path / "store")
    assert not [path for path in (tmp_path / "store").rglob(".*") if path.name != ".lock"]
    path = TinkerPath("run", "weights", "step-1")
    if version is None:
        with pytest.raises(UnknownCheckpoint):
            store.find(path)
    else:
        assert store.facts(path)["version"] == version, "the older version counts until the new one is in place"
    store.close()
