"""A small project on disk, and the real `evsys` in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from itertools import cycle
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml


def _load(path: Path) -> Any:
    """A module of the tests' own: with `--import-mode=importlib` their folders are on no path."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fork_server = _load(Path(__file__).parents[1] / "fork_server.py")

MINIMAL = """
version: 1
name: hello_sft
output_dir: ./outputs
data_store: { kind: local }
log_store:  { kind: jsonl }
run:
  name: r0
  data:
    source_kind: jsonl
    path: data/train.jsonl
    transforms:
      - { kind: jsonl_to_chat, params: {} }
  model: { name: Qwen/Qwen3-4B, renderer_name: qwen3 }
  algorithm: { kind: sft, params: { learning_rate: 1e-3, num_epochs: 4 } }
  backend: { kind: mock }
  eval:
    enabled: true
    metrics: [ { kind: exact_match } ]
    inference: { kind: mock }
"""
"""The reference's minimal config, its backend and inference changed to mock and trained long enough to learn."""


class Project:
    """A folder with training rows in which configs are written and run."""

    def __init__(self, root: Path, servers: Iterator[fork_server.ForkServer]):
        self.root = root
        self.servers = servers
        self.cold = False
        (root / "data").mkdir()
        rows = [
            {"prompt": f"say {word}", "completion": word} for word in ("red", "green", "blue", "black", "white", "grey")
        ]
        self.write_rows("data/train.jsonl", rows * 4)

    def write_rows(self, name: str, rows: list[dict[str, Any]]) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def write_tasks(self, name: str = "bench/tasks.jsonl", **verifier: Any) -> Path:
        plan = {"kind": "in_process", "fn_name": "exact_match", **verifier}
        return self.write_rows(
            name,
            [
                {
                    "task_id": word,
                    "instruction": f"say {word}",
                    "verifier": {**plan, "expected": word},
                    "metadata": {"n": len(word)},
                }
                for word in ("red", "green", "blue", "black")
            ],
        )

    def config(self, text: str = MINIMAL, name: str = "config.yaml", **top: Any) -> Path:
        """Write a config; `top` replaces top-level keys."""
        data = yaml.safe_load(dedent(text))
        data.update(top)
        path = self.root / name
        path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}))
        return path

    def evsys(
        self, *arguments: str | Path, check: bool = False, cold: bool = False, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `cold` starts an interpreter for it."""
        process = self.start(*arguments, cold=cold, **environ)
        try:
            out, err = process.communicate(timeout=300)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        assert process.returncode is not None
        done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def start(
        self, *arguments: str | Path, cold: bool = False, signal_at: tuple[Path, int, int] | None = None, **environ: str
    ) -> subprocess.Popen[str] | fork_server.ForkedProcess:
        """Start a command. With `signal_at` (file, lines, signal) it sends itself the signal at so many lines."""
        words, env = [str(argument) for argument in arguments], {**os.environ, **environ}
        server = None if cold or self.cold else next(self.servers)
        if server is not None and fork_server.variables_read_at_import(env) == server.variables:
            return server.fork(words, cwd=self.root, environ=env, signal_at=signal_at)
        assert signal_at is None, "only a forked process can send itself a signal"
        return subprocess.Popen(
            [sys.executable, "-m", "evsys_sdk.cli.main", *words],
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    def record(self, run: str = "r0", output_dir: str = "outputs") -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.root / output_dir / run / "run_result.json").read_text())
        return result

    def metrics(self, run: str = "r0", *, folder: str = "outputs") -> list[dict[str, Any]]:
        lines = (self.root / folder / run / "logs" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[Iterator[fork_server.ForkServer]]:
    """Two in turns, which order sets differently: a run that is resumed must not depend on that order."""
    servers = [fork_server.ForkServer(fork_server.PLOTS, hash_seed=seed) for seed in (1, 2)]
    yield cycle(servers)
    for server in servers:
        server.close()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_servers: Iterator[fork_server.ForkServer]) -> Project:
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path, fork_servers)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sends this process Ctrl-C and returns when the experiment in it has noticed, on whichever thread."""
    from evsys_sdk.experiment import experiment

    flags, make = [], experiment.StopFlag

    def noted() -> Any:
        flags.append(make())
        return flags[-1]

    def send() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert flags[-1].event.wait(300)

    monkeypatch.setattr(experiment, "StopFlag", noted)
    return send


@pytest.fixture
def minimal_run() -> Callable[..., dict[str, Any]]:
    """The `run:` block of the minimal config, with changes by dotted key."""

    def make(**changes: Any) -> dict[str, Any]:
        run: dict[str, Any] = yaml.safe_load(MINIMAL)["run"]
        for key, value in changes.items():
            target = run
            *path, last = key.split("__")
            for part in path:
                target = target.setdefault(part, {})
            target[last] = value
        return run

    return make


@pytest.fixture
def record_tree() -> Callable[[Path], dict[str, Any]]:
    """Every record below a folder, by its path, without clock readings."""
    found: Callable[[Path], dict[str, Any]] = _load(Path(__file__).with_name("record_trees.py")).record_tree
    return found
