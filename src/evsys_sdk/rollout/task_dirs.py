"""Tasks as directories in harbor's format, and back.

In: a task directory (`instruction.md`, `task.toml`, `environment/`, `tests/test.sh`), or a directory of them. Out:
`HarborTask`s, and from a `HarborTask` a directory that harbor can run. Reading needs no harbor. What a task wants
beyond a prompt and a verifier is kept by name in `metadata.harbor.needs`, so that it cannot be passed over by accident.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from evsys_sdk.data_types import E2BVerifier, HarborTask, content_text, from_dict, to_dict
from evsys_sdk.errors import DataError, shorten

CONFIG, INSTRUCTION = "task.toml", "instruction.md"
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
"""Marks that keep a benchmark out of training data stand before the instruction; no agent is shown them."""
_PLAIN = {
    "": {"schema_version", "task", "metadata", "source", "solution", "agent", "verifier", "environment"},
    "agent.": {"timeout_sec"},
    "verifier.": {"timeout_sec"},
    "environment.": {"build_timeout_sec", "cpus", "memory_mb", "storage_mb"},
}
"""What a task.toml may say without needing an environment: limits, and the size of one that it does not use."""
_TABLES = ("task", "metadata", "solution", "agent", "verifier", "environment")
_SECONDS = ("timeout_sec", "build_timeout_sec")
_VERSIONS = re.compile(r"1(\.\d+)?")
"""What a later minor version adds is met as a key that is not known, and so as a need."""
_LEFT_BEHIND = frozenset({".git", ".DS_Store", "__pycache__", ".pytest_cache", "Thumbs.db"})
_HARBOR_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
"""ORG_NAME_PATTERN of harbor.constants."""
_REWARDS = "/logs/verifier/reward"
_BY_EXIT_CODE = """#!/bin/bash
# harbor reads a reward, these tests answer with their exit code. A reward that lies there is not theirs.
bash /tests/{tests}
code=$?
rm -rf {rewards}.txt {rewards}.json
# 126 and 127: the tests, or a command in them, could not be run; that says nothing about the model.
if [ $code != 126 ] && [ $code != 127 ]; then echo $((code == 0)) > {rewards}.txt; fi
exit $code
"""
OWN_TESTS = "run_tests.sh"
"""Tests that answer with their exit code, beside a `test.sh` that turns it into a reward."""
_NOT_HERE = "#!/bin/bash\necho 'this task is graded by evsys, from the answer' >&2\nexit 1\n"


def is_task_directory(path: str | Path) -> bool:
    return (Path(path) / CONFIG).is_file()


def read_tasks(root: str | Path, *, on_unreadable: Callable[[str, DataError], None] | None = None) -> list[HarborTask]:
    """The task in `root`, or all tasks below it, in order. A task without an id is called by its path, and
    so is one whose id is taken: no two are called the same. A task that cannot be read is an error; with
    `on_unreadable` it is reported there, by its path, and left out."""
    root = Path(root)
    if is_task_directory(root):
        return [read_task(root)]
    found = task_directories(root)
    if not found:
        raise DataError(f"{root} holds no task directories: there is no {CONFIG} in it or below it")
    tasks: dict[str, HarborTask] = {}
    for path in found:
        place = path.relative_to(root).as_posix()
        try:
            task = read_task(path, default_id=place)
        except DataError as exc:
            if on_unreadable is None:
                raise
            on_unreadable(place, exc)
            continue
        while task.task_id in tasks:
            task = replace(task, task_id=f"{task.task_id}@{place}")
        tasks[task.task_id] = task
    return list(tasks.values())


def task_directories(root: Path) -> list[Path]:
    """Every task directory in or below `root`, in order. A task.toml inside a task's own files is one of its files."""
    found: list[Path] = []
    # By parts, so that what lies in a folder follows it at once: as texts, `a-b` stands between `a` and `a/c`.
    for folder in sorted((path.parent for path in root.rglob(CONFIG)), key=lambda path: path.parts):
        if not found or not folder.is_relative_to(found[-1]):
            found.append(folder)
    return found


def contents_sha256(root: Path, folders: Iterable[str | Path]) -> str:
    """Of every file of these task directories below `root`, with its place in them: the same wherever `root` lies."""
    digest, root = hashlib.sha256(), root.absolute()
    for folder in map(Path, folders):
        files = [path for path in folder.rglob("*") if path.is_file()]
        # What tools and desktops leave beside the task's files is none of them.
        own = [path for path in files if not _LEFT_BEHIND.intersection(path.relative_to(folder).parts)]
        for file in sorted(own, key=lambda path: path.parts):
            place = file.relative_to(root).as_posix()
            # With lengths: bytes that move from one file's end to the next one's name give another hash.
            for part in (place.encode(), file.read_bytes()):
                digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def read_task(path: str | Path, *, default_id: str | None = None) -> HarborTask:
    """The task in one directory; what its `task.toml` says of it is in the metadata."""
    folder = Path(path).absolute()
    if (wrong := link_problem(folder)) is not None:
        raise DataError(f"{folder}: {wrong}")
    config = _config(folder)
    described: dict[str, Any] = dict(config.get("metadata") or {})
    ours, row = described.pop("evsys", None), {}
    if isinstance(ours, dict) and "row" in ours:  # as `write_task` left it
        try:
            row = json.loads(ours["row"])
        except (TypeError, ValueError) as exc:
            raise DataError(f"{folder / CONFIG}: metadata.evsys.row is no JSON: {exc}") from exc
        if not isinstance(row, dict):
            raise DataError(f"{folder / CONFIG}: metadata.evsys.row is no task")
    verifier = row.get("verifier") or E2BVerifier(
        dockerfile=_text(folder / "environment" / "Dockerfile"),
        test_sh=_text(folder / "tests" / OWN_TESTS) or _text(folder / "tests" / "test.sh"),
        test_state_py=_text(folder / "tests" / "test_state.py"),
    )
    needs = [] if "verifier" in row else ["tests/test.sh"]
    named = {"agent_seconds": ("agent", "timeout_sec"), "verifier_seconds": ("verifier", "timeout_sec")}
    limits = {name: (config.get(section) or {}).get(key) for name, (section, key) in named.items()}
    harbor = {
        "dir": str(folder),
        "needs": [*needs, *_needs(config, folder)],
        "limits": {name: float(seconds) for name, seconds in limits.items() if seconds},
    }
    metadata = {**described, **(row.get("metadata") or {}), "harbor": harbor}
    instruction = row.get("instruction") or _instruction(config, folder)
    name = row.get("task_id") or default_id or folder.name
    try:
        task = from_dict({"task_id": name, "instruction": instruction, "verifier": verifier, "metadata": metadata})
    except DataError as exc:
        raise DataError(f"{folder}: {exc}") from exc
    assert isinstance(task, HarborTask)
    return task


def link_problem(folder: Path) -> str | None:
    """Why the environment of the task in `folder` is not used: as a link it may lead to any folder of the machine,
    such as that of keys, whose files would be copied to where the model works."""
    # Not `resolve`, which raises where a link leads to itself.
    place = os.path.realpath(folder / "environment")
    if Path(place).is_relative_to(os.path.realpath(folder)):
        return None
    return f"environment is a link that leads out of the task's directory, to {place}; put the folder there"


def name_problem(folder: Path) -> str | None:
    """Why harbor would not take this directory's name for a task, or None. Only tasks in an environment meet harbor."""
    described = _config(folder).get("task")
    if not described:
        return None
    name, file = described.get("name"), folder / CONFIG
    if name is None:
        return f'{file}: [task] has no name: add name = "<organisation>/{folder.name}", or remove the table'
    if not isinstance(name, str) or not _HARBOR_NAME.fullmatch(name) or ".." in name:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", str(name).split("/")[-1]).strip("-.") or folder.name
        return (
            f"{file}: task.name = {name!r} must be <organisation>/<name>, in letters, digits, dots, hyphens and "
            f'underscores, such as "local/{plain}"'
        )
    return None


def needs_of(task: HarborTask) -> list[str]:
    """What of this task needs an environment, by name; empty when an answer is all there is to it."""
    needs = list((task.metadata.get("harbor") or {}).get("needs") or [])
    folder = task_directory(task)
    if folder is not None and "needs" not in task.metadata["harbor"]:
        needs = read_task(folder).metadata["harbor"]["needs"]
    return [*needs, "metadata.environment"] if task.metadata.get("environment") else needs


def task_directory(task: HarborTask) -> Path | None:
    """Where the task's own directory is, if it has one."""
    named = (task.metadata.get("harbor") or {}).get("dir")
    return Path(named) if named else None


def has_own_tests(task: HarborTask) -> bool:
    """Whether tests inside the environment grade it, and not a look at the answer."""
    return isinstance(task.verifier, E2BVerifier) and bool(needs_of(task))


def write_task(task: HarborTask, folder: str | Path) -> Path:
    """The task as a directory that harbor runs and `read_task` reads back to the same task."""
    folder, plan = Path(folder), task.verifier
    row = {**to_dict(task), "metadata": {key: value for key, value in task.metadata.items() if key != "harbor"}}
    files = {INSTRUCTION: content_text(task.instruction)}
    if isinstance(plan, E2BVerifier):
        del row["verifier"]  # that is what the other files are
        files |= {"environment/Dockerfile": plan.dockerfile, "tests/test.sh": plan.test_sh}
        if _REWARDS not in plan.test_sh:
            files["tests/test.sh"] = _BY_EXIT_CODE.format(rewards=_REWARDS, tests=OWN_TESTS)
            files[f"tests/{OWN_TESTS}"] = plan.test_sh
        if plan.test_state_py:
            files["tests/test_state.py"] = plan.test_state_py
    else:
        files |= {"environment/.gitkeep": "", "tests/test.sh": _NOT_HERE}
    # A JSON text is a TOML basic string, but for DEL.
    text = json.dumps(json.dumps(row, ensure_ascii=False)).replace("\x7f", "\\u007f")
    files[CONFIG] = f'schema_version = "1.0"\n\n[metadata.evsys]\nrow = {text}\n'
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def write_tasks(tasks: Iterable[HarborTask], root: str | Path) -> list[Path]:
    """All tasks, each in another directory below `root`, whatever their ids have in common."""
    taken: set[str] = set()
    written = []
    for task in tasks:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", task.task_id).strip(".-")[:60] or "task"
        # Ids that differ only in what a folder cannot be called stay apart, on disks that fold case too.
        if name != task.task_id or name != name.lower():
            name = f"{name}-{hashlib.sha256(task.task_id.encode()).hexdigest()[:8]}"
        number = next(n for n in range(1, len(taken) + 2) if (name if n == 1 else f"{name}-{n}") not in taken)
        taken.add(name if number == 1 else f"{name}-{number}")
        written.append(write_task(task, Path(root) / (name if number == 1 else f"{name}-{number}")))
    return written


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else ""
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"{file}: {exc}") from exc


def _config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder} is not a task directory: it has no {CONFIG}") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise DataError(f"{file}: {exc}") from exc
    # What is of the wrong kind; keys that are not known here belong to other tools.
    problems: list[str] = []
    version, steps = config.get("schema_version", "1.0"), config.get("steps", [])
    if not isinstance(version, str) or not _VERSIONS.fullmatch(version):
        problems.append(f'schema_version = {version!r} is not known here; it is a text such as "1.0"')
    tables = {name: config[name] for name in _TABLES if name in config}
    problems += [f"{name} = {part!r} must be a table: [{name}]" for name, part in tables.items() if not is_table(part)]
    if not isinstance(steps, list) or not all(is_table(step) and isinstance(step.get("name"), str) for step in steps):
        problems.append(f"steps = {shorten(repr(steps))} must be tables with a name each: [[steps]]")
    for name, part in tables.items():
        times = {key: value for key, value in part.items() if key in _SECONDS} if is_table(part) else {}
        for key, value in times.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                problems.append(f"{name}.{key} = {value!r} must be a number of seconds above 0")
    if problems:
        raise DataError(f"{file}: {'; '.join(problems)}")
    return config


def is_table(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _instruction(config: dict[str, Any], folder: Path) -> str:
    steps = [folder / "steps" / str(step.get("name")) for step in config.get("steps") or []]
    files = [path / INSTRUCTION for path in steps or [folder]]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{folder} is not a task directory: it has no {', '.join(missing)}")
    texts: list[str] = []
    for file in files:
        lines = _text(file).split("\n")
        while lines and _CANARY.match(lines[0].strip()):
            lines.pop(0)
        while lines and not lines[0].strip():
            lines.pop(0)
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _needs(config: dict[str, Any], folder: Path) -> list[str]:
    needs = []
    for section, known in _PLAIN.items():
        part = config.get(section.rstrip("."), {}) if section else config
        needs += [section + key for key, value in part.items() if key not in known and value not in (None, [], {}, "")]
    files = [path for path in (folder / "environment").rglob("*") if path.is_file() and path.name != ".gitkeep"]
    if files:
        needs.append("environment/")
    return needs + [name for name in ("trajectory.json",) if (folder / name).exists()]
