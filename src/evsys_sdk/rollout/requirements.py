"""What keeps a task that needs an environment from being done here, before anything is spent.

In: a task. Out: a sentence, or None. It looks at the machine and at the task's files with the same eyes as the sandbox
itself (`rollout.sandbox`), and starts nothing; harbor is looked for and not imported.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

from evsys_sandbox.dockerfile import INSTEAD, fetches, missing_packages, steps_of, syntax_error
from evsys_sandbox.errors import DockerfileError
from evsys_sandbox.sandbox import why_unavailable
from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import not_known
from evsys_sdk.protocols import SANDBOX
from evsys_sdk.rollout.agents import need_harbor
from evsys_sdk.rollout.task_dirs import has_own_tests, link_problem, name_problem, needs_of, task_directory


def environment_problem(task: HarborTask, environment: str = SANDBOX) -> str | None:
    """Why no rollout of this task can be made here; None where nothing stands against it."""
    if not needs_of(task):
        return None
    if importlib.util.find_spec("harbor") is None:
        return "it needs an environment, and that needs harbor: pip install 'evsys-sdk[harbor]'"
    folder = task_directory(task)
    misnamed = name_problem(folder) if folder is not None else None
    if environment != SANDBOX or misnamed:
        return misnamed
    unavailable = why_unavailable()
    if unavailable or folder is None:
        return unavailable
    wrong = files_problem(folder, tested=has_own_tests(task))
    file = folder / "environment" / "Dockerfile"
    if wrong is not None or not file.is_file():
        return wrong
    try:
        missing = missing_packages(steps_of(file.read_text(encoding="utf-8")))
    except (DockerfileError, UnicodeDecodeError) as exc:
        return str(exc)
    return missing and f"{missing}: install it here, or {INSTEAD}"


def is_class_path(kind: str) -> bool:
    """Whether a kind of environment says where its class is, as `my_project.MyEnvironment` does."""
    return ":" in kind or "." in kind


@lru_cache(maxsize=64)
def kind_problem(kind: str) -> str | None:
    """Why this kind of environment cannot be used here, or None: a name that does not exist, no engine, no key."""
    if kind == SANDBOX:
        return None
    if importlib.util.find_spec("harbor") is None:
        return f"environment {kind!r} needs harbor: pip install 'evsys-sdk[harbor]'"
    need_harbor()
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType

    is_class = is_class_path(kind)
    known = [each.value for each in EnvironmentType]
    if not is_class and kind not in known:
        return (
            not_known(kind, "environment", [SANDBOX, *known]) + "; or say where its class is: my_project.MyEnvironment"
        )
    path = (kind if ":" in kind else ":".join(kind.rsplit(".", 1))) if is_class else None
    try:
        EnvironmentFactory.run_preflight(None if is_class else EnvironmentType(kind), path)
    except (Exception, SystemExit) as exc:  # harbor says it by SystemExit
        return f"environment {kind!r} cannot be used on this machine: {str(exc) or type(exc).__name__}"
    return None


def files_problem(folder: Path, *, tested: bool) -> str | None:
    """What of these files a sandbox without network and images cannot do, or may not."""
    if (wrong := link_problem(folder)) is not None:
        return wrong
    scripts = sorted([*folder.glob("tests/*.sh"), *folder.glob("steps/*/tests/*.sh")])
    if tested and not any(script.name == "test.sh" for script in scripts):
        return "it has no tests/test.sh, so nothing could grade it"
    if (folder / "environment" / "docker-compose.yaml").exists():
        return f"the sandbox cannot do docker-compose; {INSTEAD}"
    for script in scripts:
        line = fetches(script.read_text(encoding="utf-8", errors="replace"))
        if line is not None:
            return f"the sandbox has no network, and {script.relative_to(folder)} needs one: {line}; {INSTEAD}"
    return broken_tests(folder) if tested else None


def broken_tests(folder: Path) -> str | None:
    """What is wrong with a task's test scripts, whatever the machine; None where the shell can read them."""
    for script in sorted([*folder.glob("tests/*.sh"), *folder.glob("steps/*/tests/*.sh")]):
        wrong = syntax_error(script.read_text(encoding="utf-8", errors="replace"))
        if wrong is not None:
            return f"the verifier cannot run: {script.relative_to(folder)}: {wrong}"
    return None
