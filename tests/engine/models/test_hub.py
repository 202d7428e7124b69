"""Hub ids: the cache first, then the hub; a real huggingface_hub talks to a small hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from evsys_engine.models import ModelError, find_model, list_models

REVISION = "a" * 40
FIND = """
import sys
from evsys_engine.models import find_model
print(find_model(sys.argv[1], fetch=sys.argv[2] == "True").path)
"""


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def _put(cache: Path, name: str, files: list[Path]) -> Path:
    """What the library leaves in its cache after downloading these files."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(REVISION)
    for file in files:
        shutil.copy(file, snapshot)
    return snapshot


def test_a_cached_model_is_used_without_the_hub(hub_cache, tiny):
    snapshot = _put(hub_cache, "org/toy", list(tiny.iterdir()))
    for fetch in (True, False):
        found = find_model("org/toy", fetch=fetch)
        assert (found.path, found.source) == (snapshot, "hub")


def test_a_model_cached_in_part_is_not_used(hub_cache, tiny):
    _put(hub_cache, "org/toy", [tiny / "config.json", tiny / "tokenizer.json"])
    with pytest.raises(ModelError, match="only in part in the Hugging Face cache"):
        find_model("org/toy", fetch=False)
    with pytest.raises(ModelError, match=r"only in part .* and the hub gave no more"):
        find_model("org/toy")
    assert [(model.name, model.state) for model in list_models(tiny.parent) if model.source == "hub"] == [
        ("org/toy", "unfinished")
    ]


def test_offline_and_not_cached_says_what_would_do(hub_cache):
    with pytest.raises(ModelError) as caught:
        find_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    text = str(caught.value)
    assert "a built-in model: smollm2-135m-instruct" in text
    assert "evsys model pull HuggingFaceTB/SmolLM2-135M-Instruct" in text
    assert "a local directory" in text


@pytest.fixture
def hub(tiny):
    """A hub with the model `org/toy`, whose repository also holds what nobody needs for training."""
    files = {path.name: path.read_bytes() for path in tiny.iterdir() if path.name != "evsys.json"}
    files |= {"onnx/model.safetensors": b"other", "pytorch_model.bin": b"old", "README.md": b"hello"}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/api/models/org/toy"):
                siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                tree = [{"type": "file", "path": name, "size": len(data), "oid": "x"} for name, data in files.items()]
                info = {"id": "org/toy", "sha": REVISION, "siblings": siblings}
                self.answer(json.dumps(tree if "/tree/" in self.path else info).encode())
            else:
                self.file()

        def do_HEAD(self) -> None:
            self.file()

        def file(self) -> None:
            name = self.path.split(f"/resolve/{REVISION}/")[-1]
            if name not in files:
                self.answer(b"{}", status=404)
                return
            self.server.asked.append(name)
            self.answer(files[name], etag=hashlib.sha256(files[name]).hexdigest())

        def answer(self, body: bytes, *, status: int = 200, etag: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header(*("X-Repo-Commit", REVISION) if status == 200 else ("X-Error-Code", "RepoNotFound"))
            if etag:
                self.send_header("ETag", f'"{etag}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _find(name: str, fetch: bool, hub, home: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the library reads its environment when it is imported."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    return subprocess.run([sys.executable, "-c", FIND, name, str(fetch)], env=environ, capture_output=True, text=True)


def test_a_hub_in_reach_gives_the_model_and_only_what_training_needs(hub, tiny, tmp_path):
    refused = _find("org/toy", False, hub, tmp_path)
    assert "is not in the Hugging Face cache" in refused.stderr
    done = _find("org/toy", True, hub, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert set(hub.asked) == {path.name for path in tiny.iterdir()} - {"evsys.json"}
    hub.asked.clear()
    assert _find("org/toy", True, hub, tmp_path).stdout == done.stdout
    assert hub.asked == [], "what is cached is not asked for again"


def test_a_model_that_the_hub_does_not_have_is_a_plain_message(hub, tmp_path):
    done = _find("org/nothing", True, hub, tmp_path)
    assert "the hub did not give it (RepositoryNotFoundError" in done.stderr
    assert "What would do" in done.stderr
