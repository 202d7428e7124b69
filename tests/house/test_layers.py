"""Who may import whom (DESIGN.md, "The house"): held by reading the code, not by running it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "evsys_sdk"

SHARED = {
    "errors", "atomic", "constants", "logs", "asyncs", "data_types", "answers", "protocols", "surface", "registry",
    "_entry_points", "jsonl", "numbers", "task_dirs", "sandbox", "sandbox_filter", "sandbox_launch", "sandbox_uids",
    "sandbox_supervisor", "dockerfile", "score_names", "sandbox_grading", "redaction", "terminal",
}  # fmt: skip
CONDUCTORS = {"runner", "experiment", "preflight", "running", "cli", "testing", "__init__"}
STAGE_OF = {
    "config": "config",
    "data": "data",
    "training": "training", "algorithms": "training", "backends": "training",
    "rollout": "rollout",
    "verifiers": "verifiers",
    "inference": "inference",
    "serving": "serving",
    "eval": "eval",
    "record": "record",
    "deployers": "deployers",
}  # fmt: skip
ALLOWED = {("data", "config")}
# Extensions everywhere base their `Config` on these.
SETTINGS_BASE = {"evsys_sdk.config.base", "evsys_sdk.config.metadata", "evsys_sdk.config.models"}


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "evsys_sdk":
                found |= {f"evsys_sdk.{alias.name}" for alias in node.names}
    return found


def _room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_the_shared_words_and_its_own_stage(path):
    room = _room_of(path)
    if room in CONDUCTORS or room in ("_entry_points", "registry"):
        return  # conductors see all stages; the registry reaches into verifiers and eval late, to adapt newcomers
    here = STAGE_OF.get(room, "shared")
    for module in _imports(path):
        if not module.startswith("evsys_sdk.") or module in SETTINGS_BASE:
            continue
        there = _room(module)
        if there in SHARED:
            continue
        stage = STAGE_OF.get(there)
        assert stage == here or (here, stage) in ALLOWED, f"{path.name} ({here}) must not import {module} ({there})"


def test_every_room_has_a_stage():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(STAGE_OF) | CONDUCTORS
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert files <= SHARED | CONDUCTORS, f"new top-level modules need a place: {files - SHARED - CONDUCTORS}"


def test_no_module_is_called_utils():
    names = {path.stem for path in _modules()}
    assert not names & {"utils", "util", "helpers", "common", "misc"}
