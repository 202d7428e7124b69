"""What an experiment left on disk, in a form in which two of them can be compared."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from pathlib import Path

CLOCKS = frozenset(("ts", "step_seconds", "tokens_per_second", "seconds", "started", "latency"))
NOT_COMPARED = ("attempts", "weights")
"""Earlier attempts; and weights, which are compared where a record names them."""


def _scrubbed(value, root: Path):
    """Without clock readings; a path of weights as its name and the hash of what lies there, any other
    path without its root."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if str(key).split("/")[-1] not in CLOCKS}
        return {key: _scrubbed(inner, root) for key, inner in kept.items()}
    if isinstance(value, list):
        return [_scrubbed(inner, root) for inner in value]
    if isinstance(value, str) and str(root) in value and "weights" in Path(value).parts:
        return f"{Path(value).name}: {_content(Path(value))}"
    return _placeless(value, root) if isinstance(value, str) else value


def _placeless(text: str, root: Path) -> str:
    return text.replace(str(root), "").replace(str(root.relative_to(Path.cwd())), "")


def _content(path: Path) -> str:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def record_tree(folder: Path):
    """Every record below `folder`, by its path, without clock readings."""
    found = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if not file.is_file() or ".sqlite" in file.name or file.name.startswith(".") or file.suffix == ".log":
            continue  # the log is what the processes said, each of them
        if any(part in NOT_COMPARED for part in inside.parts):
            continue
        found[str(inside)] = _records(file, folder)
    return found


def _records(file: Path, root: Path):
    if file.suffix == ".png":
        return hashlib.sha256(file.read_bytes()).hexdigest()
    text = file.read_text()
    if file.suffix == ".json":
        return _scrubbed(json.loads(text), root)
    if file.suffix == ".jsonl":
        return [json.dumps(_scrubbed(json.loads(line), root)) for line in text.splitlines()]
    if file.suffix == ".csv":
        return [str(_scrubbed(row, root)) for row in csv.DictReader(text.splitlines())]
    return _placeless(re.sub(r"\d+(\.\d+)? s\b", "", text), root)
