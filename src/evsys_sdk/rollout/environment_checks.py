"""What keeps a task that needs an environment from being done here, before anything is spent.

In: a task. Out: a sentence, or None. It looks at the machine and at the task's files with the same eyes as the sandbox
itself (`sandbox_environment`), and starts nothing; harbor is looked for and not imported.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from evsys_sdk.data_types import HarborTask
from evsys_sdk.dockerfile import INSTEAD, fetches, missing_packages, steps_of
from evsys_sdk.errors import DataError
from evsys_sdk.sandbox import why_unavailable
from evsys_sdk.task_dirs import has_own_tests, needs_of, task_directory


def environment_problem(task: HarborTask) -> str | None:
    """Why no rollout of this task can be made here; None where nothing stands against it."""
    if not needs_of(task):
        return None
    if importlib.util.find_spec("harbor") is None:
        return "it needs an environment, and that needs harbor: pip install 'evsys-sdk[harbor]'"
    unavailable, folder = why_unavailable(), task_directory(task)
    if unavailable or folder is None:
        return unavailable
    return files_problem(folder, tested=has_own_tests(task)) or _dockerfile_problem(folder)


def files_problem(folder: Path, *, tested: bool) -> str | None:
    """What of these files a sandbox without network and images cannot do."""
    scripts = sorted([*folder.glob("tests/*.sh"), *folder.glob("steps/*/tests/*.sh")])
    if tested and not any(script.name == "test.sh" for script in scripts):
        return "it has no tests/test.sh, so nothing could grade it"
    if (folder / "environment" / "docker-compose.yaml").exists():
        return f"the sandbox cannot do docker-compose; {INSTEAD}"
    for script in scripts:
        line = fetches(script.read_text(encoding="utf-8", errors="replace"))
        if line is not None:
            return f"the sandbox has no network, and {script.relative_to(folder)} needs one: {line}; {INSTEAD}"
    return None


def _dockerfile_problem(folder: Path) -> str | None:
    file = folder / "environment" / "Dockerfile"
    try:
        missing = missing_packages(steps_of(file.read_text(encoding="utf-8"))) if file.is_file() else None
    except (DataError, UnicodeDecodeError) as exc:
        return str(exc)
    return missing and f"{missing}: install it here, or {INSTEAD}"
