"""SkyRL's Tinker server, JAX on CPU: what our card says of it, and training through it.

It lives in a venv of its own under the user's cache, because it needs an older tinker client than we do; our SDK runs
there from the sources. The first time takes a few minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

WANTED = ("skyrl[jax,tinker]==0.4.0", "aiohttp")
SOURCES = Path(__file__).parents[2] / "src"
SETTINGS = {
    "max_lora_adapters": 8,
    "max_lora_rank": 32,
    "train_micro_batch_size": 8,
    "sample_max_num_sequences": 8,
}
READY_SECONDS = 300
PATIENTLY = ("--set", "timeout_seconds=300")
"""JAX compiles for minutes on a busy machine before the first answer."""


@pytest.fixture(scope="module")
def uv():
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return found or pytest.skip("needs uv, with which SkyRL starts its engine: pip install uv")


@pytest.fixture(scope="module")
def python(uv):
    """The interpreter of a venv with SkyRL."""
    venv = Path.home() / ".cache/evsys/skyrl-0.4.0"
    interpreter, whole = venv / "bin/python", venv / ".complete"
    if not whole.exists():
        shutil.rmtree(venv, ignore_errors=True)
        environ = dict(os.environ)
        if "PIP_INDEX_URL" in environ:  # uv does not read pip's settings
            environ.setdefault("UV_DEFAULT_INDEX", environ["PIP_INDEX_URL"])
        if "PIP_CERT" in environ:
            environ.setdefault("SSL_CERT_FILE", environ["PIP_CERT"])
        for command in (
            [uv, "venv", "--python", sys._base_executable, str(venv)],
            [uv, "pip", "install", "--python", str(interpreter), *WANTED],
        ):
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800)
            if done.returncode:
                pytest.skip(f"SkyRL cannot be had here: {done.stderr.strip()[-300:]}")
        whole.touch()
    return interpreter


@pytest.fixture(scope="module")
def model():
    from evsys_engine.models import find_model

    return str(find_model("tiny-random").path)


@contextmanager
def serving(uv, python, model, folder):
    """A running server; its address. What it keeps lies in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [uv, "run", "--no-project", "--python", str(python), "-m", "skyrl.tinker.api"]
    command += ["--base-model", model, "--backend", "jax", "--backend-config", json.dumps(SETTINGS)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--checkpoints-base", str(folder / "checkpoints")]
    command += ["--database-url", f"sqlite:///{folder}/tinker.db"]
    environ = {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "PATH": f"{Path(uv).parent}:{os.environ['PATH']}"}
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **environ}, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, folder / "log")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # its engine is a process of its own, in the same group
        process.wait(60)


def _wait_until_ready(process, url, log):
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"SkyRL did not start: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("skyrl")


@pytest.fixture
def evsys(python, tmp_path):
    """Our command line in SkyRL's venv."""

    def run(*arguments):
        return subprocess.run(
            [str(python), "-m", "evsys_sdk.cli.main", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SOURCES), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=900,
        )

    return run


def _config(tmp_path, model, url, algorithm, lacks):
    rows = [{"prompt": f"say {word}", "completion": word} for word in ("red", "green", "blue", "black")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "name": "r0",
        "data": {"path": "train.jsonl", "transforms": [{"kind": "jsonl_to_chat", "params": {}}]},
        "model": {"name": model},
        "algorithm": algorithm,
        "backend": {"kind": "tinker", "params": {"base_url": url, "lacks": lacks}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"name": "skyrl", "output_dir": "out", "run": run}))
    return tmp_path / "out/r0/run_result.json"


def test_the_card_names_every_deviation_and_training_works_within_them(uv, python, model, folder, evsys, tmp_path):
    with serving(uv, python, model, folder) as url:
        check = ("backend", "check", "tinker", "--base-url", url, "--model", model, "--json", *PATIENTLY)
        checked = evsys(*check)
        print(checked.stdout, checked.stderr)
        assert checked.returncode == 2
        card = json.loads(checked.stdout)
        wrong = {found["question"]: found["detail"] for found in card["findings"] if not found["ok"]}
        assert "do not cancel out" in wrong["are losses sums with signed weights"]
        assert "training changed a sampler" in wrong["is a sampler a snapshot"]
        assert "overwrote those in training" in wrong["does sampling leave training alone"]
        assert "leaves out the leading None" in wrong["prompt logprobs"]
        assert "top-k prompt logprobs" in wrong and "does it learn" not in wrong
        assert {"custom_loss", "prompt_logprobs", "topk_prompt_logprobs", "dro"} <= set(card["lacks"])

        sft = {"kind": "sft", "params": {"max_steps": 4, "batch_size": 4, "learning_rate": 5e-3, "lora_rank": 8}}
        path = _config(tmp_path, model, url, sft, card["lacks"])
        trained = evsys("run", "config.yaml")
        print(trained.stdout, trained.stderr)
        record = json.loads(path.read_text())
        assert trained.returncode == 0 and record["status"] == "completed"
        assert record["metrics"]["steps"] == 4 and record["metrics"]["final_loss"] < record["metrics"]["first_loss"]

        path = _config(tmp_path, model, url, {"kind": "sdft", "params": {"max_steps": 2}}, card["lacks"])
        refused = evsys("run", "config.yaml")
        assert refused.returncode == 1 and "set kl: reverse" in refused.stdout + refused.stderr

    kept = next(f["detail"] for f in card["findings"] if f["question"] == "do saved weights survive a restart")
    sampler = kept.rpartition(" ")[2]
    with serving(uv, python, model, folder) as url:
        check = ("backend", "check", "tinker", "--base-url", url, "--model", model, "--json", *PATIENTLY)
        again = evsys(*check, "--sampler-path", sampler)
        last = json.loads(again.stdout)["findings"][-1]
        assert not last["ok"] and "gone after a restart" in last["detail"]
