"""What a result depended on besides its config: versions, code, data.

In: the config and the folder it lies in. Out: a plain dict for `run_result.json`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "evsys-sdk", "pydantic", "numpy", "scipy", "torch", "transformers", "peft", "trl", "tinker", "tinker-cookbook",
    "harbor", "datasets", "gepa", "optuna",
)  # fmt: skip


def describe_environment(folder: Path) -> dict[str, Any]:
    """Python, platform, package versions, and the git commit of `folder`."""
    commit = _git(folder, "rev-parse", "HEAD")
    dirty = bool(commit and _git(folder, "status", "--porcelain", "--untracked-files=no"))
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "git": None if commit is None else {"commit": commit, "dirty": dirty},
    }


def config_hash(settings: dict[str, Any]) -> str:
    """sha256 of settings as canonical JSON: the same settings give the same hash, whatever their order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
