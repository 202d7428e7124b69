"""A small project on disk, and the real `evsys` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

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

    def __init__(self, root: Path):
        self.root = root
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

    def evsys(self, *arguments: str | Path, check: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "evsys_sdk.cli.main", *map(str, arguments)],
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=120,
            check=check,
            env={**os.environ, **environ},
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "evsys_sdk.cli.main", *map(str, arguments)],
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def record(self, run: str = "r0", output_dir: str = "outputs") -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.root / output_dir / run / "run_result.json").read_text())
        return result

    def metrics(self, run: str = "r0", *, folder: str = "outputs") -> list[dict[str, Any]]:
        lines = (self.root / folder / run / "logs" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path)


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
    place = Path(__file__).with_name("record_trees.py")
    spec = spec_from_file_location("record_trees", place)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Path], dict[str, Any]] = module.record_tree
    return found
