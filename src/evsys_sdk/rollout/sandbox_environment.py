"""A harbor environment on this machine: the task's files in a bubblewrap sandbox, and every command a jail around them.

In: a task's `environment/`. Out: what harbor asks of an environment. There is no network, there is one user, and a
process lives no longer than the command that started it, so nothing an agent left behind can touch the verifier's
files. Whatever an agent did to its folders, the tests run and say what it is worth. Where there can be no sandbox the
trial fails with the sentence that says so; nothing runs outside.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.paths import EnvironmentPaths

from evsys_sdk.dockerfile import INSTEAD, SYSTEM, Step, missing_packages, steps_of, top_folder
from evsys_sdk.errors import DataError, EvsysError, shorten
from evsys_sdk.logs import get_logger
from evsys_sdk.rollout.environment_checks import files_problem
from evsys_sdk.sandbox import HOME, Limits, Sandbox, SandboxError

PATHS = EnvironmentPaths()
KEPT = (HOME, "/logs", "/tests", "/solution", "/harbor", "/root", "/home", "/workspace", "/tmp")
"""Top-level folders that outlive a command, besides those that the task itself names."""
NO_SESSION = (
    "in the local sandbox a process lives no longer than the command that started it, so no tmux session can be kept: "
    "use the agent `chat` with the tool `bash`, or another environment (docker, e2b)"
)
DEFAULT_SECONDS = 3600.0
"""For a command without a time limit of its own."""
_ENTER = 'cd -- "$1" || cd /; exec /bin/bash -c "$2"'
"""A working directory that the agent has closed or removed is no reason not to run a command."""
_MAKE_ROOM = """chmod -R u+rwX {logs} {tests}
rm -rf {verifier} && mkdir {verifier}
find {tests} ! -type d ! -type f -delete
for name in {names}; do if [ -d "$name" ]; then rm -rf "$name"; fi; done
"""


class EnvironmentDamaged(EvsysError):
    """A file cannot be put where it belongs, because of what the agent has put there."""


class SandboxEnvironment(BaseEnvironment):
    """The local sandbox, as harbor knows environments."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        dockerfile = self.environment_dir / "Dockerfile"
        self.steps: list[Step] = steps_of(dockerfile.read_text(encoding="utf-8")) if dockerfile.is_file() else []
        self.workdir = self.task_env_config.workdir or HOME
        self.variables: dict[str, str] = {}
        self.box: Sandbox | None = None

    @staticmethod
    def type() -> str:
        return "evsys-sandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        wrong = files_problem(self.environment_dir.parent, tested=False)
        if wrong is not None:
            raise DataError(wrong)

    async def start(self, force_build: bool) -> None:
        missing = await asyncio.to_thread(missing_packages, self.steps)
        if missing is not None:
            raise SandboxBuildFailedError(f"{missing}: install it here, or {INSTEAD}")
        self.box = Sandbox(folders=self._folders(), limits=self._limits())
        await self.box.open()
        await self._must(f"mkdir -p {self.workdir} {PATHS.agent_dir} {PATHS.verifier_dir} {PATHS.artifacts_dir}", "/")
        for step in self.steps:
            await self._build(step)

    def _folders(self) -> tuple[str, ...]:
        named = [self.workdir, *(step.words[-1] for step in self.steps if step.kind in ("workdir", "copy"))]
        tops = [top for top in map(top_folder, named) if top]
        reserved = [top for top in tops if top in SYSTEM]
        if reserved:
            raise SandboxBuildFailedError(f"nothing can be put into {reserved[0]} of the sandbox; {INSTEAD}")
        return tuple(dict.fromkeys([*KEPT, *tops]))

    def _limits(self) -> Limits:
        megabytes = self.task_env_config.memory_mb
        return Limits(memory_bytes=megabytes << 20) if megabytes else Limits()

    async def _build(self, step: Step) -> None:
        if step.kind == "env":
            self.variables[step.words[0]] = step.words[1]
        elif step.kind == "workdir":
            self.workdir = str(PurePosixPath(self.workdir, step.words[0]))
            await self._must(f"mkdir -p {shlex.quote(self.workdir)}", "/")
        elif step.kind == "run":
            await self._must(step.words[0], self.workdir)
        elif step.kind == "copy":
            await self._copy(step.words[:-1], step.words[-1])

    async def _copy(self, sources: tuple[str, ...], destination: str) -> None:
        target = PurePosixPath(self.workdir, destination)
        into = destination.endswith(("/", ".")) or len(sources) > 1
        for pattern in sources:
            below = pattern.strip("/") or "."  # as for docker, `/` is the folder of the Dockerfile
            found = [self.environment_dir] if below == "." else sorted(self.environment_dir.glob(below))
            if not found:
                raise SandboxBuildFailedError(f"COPY {pattern}: there is no such file in {self.environment_dir}")
            outside = next((source for source in found if not self._stays_inside(source)), None)
            if outside is not None:
                raise SandboxBuildFailedError(
                    f"COPY {pattern}: {outside} leads to {outside.resolve()}, outside of the task's environment/, and "
                    "is not copied; put the file itself there"
                )
            for source in found:
                if source.is_dir():
                    await self.upload_dir(source, str(target))
                else:
                    await self.upload_file(source, str(target / source.name if into or len(found) > 1 else target))

    def _stays_inside(self, path: Path) -> bool:
        """Whether a file of environment/ lies there; a link may lead to any file of the machine, such as a key."""
        is_inside = path.resolve().is_relative_to(self.environment_dir.resolve())
        if not is_inside:
            get_logger(__name__).warning("%s is a link that leaves the task's environment/ and is not copied", path)
        return is_inside

    async def _must(self, command: str, cwd: str) -> None:
        done = await self.exec(command, cwd=cwd)
        if done.return_code != 0:
            said = [line for line in (done.stderr or done.stdout or "").splitlines() if line.strip()]
            why = shorten(said[-1]) if said else "it printed nothing"
            raise SandboxBuildFailedError(
                f"in the sandbox, which has no network and a read-only system, this failed with exit code "
                f"{done.return_code}: {shorten(command)}: {why}; {INSTEAD}"
            )

    async def stop(self, delete: bool) -> None:
        box, self.box = self.box, None
        if box is not None:
            await box.close()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command; there is one user inside, whichever is asked for."""
        if _leaves_a_session(command):
            return ExecResult(stdout="", stderr=NO_SESSION, return_code=1)
        variables = {**self.variables, **(self._merge_env(env) or {})}
        done = await self._open.run(
            ["/bin/bash", "-c", _ENTER, "bash", cwd or self.workdir, command],
            cwd="/",
            env=variables,
            timeout_seconds=timeout_sec or DEFAULT_SECONDS,
        )
        late = f"\n[killed after {timeout_sec} seconds]" if done.timed_out else ""
        return ExecResult(stdout=done.stdout, stderr=done.stderr + late, return_code=done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source = Path(source_path)
        mode = stat.S_IMODE(source.stat().st_mode) | stat.S_IRUSR | stat.S_IWUSR
        try:
            await asyncio.to_thread(self._open.write, self._inside(target_path), source.read_bytes(), mode=mode)
        except SandboxError as exc:
            raise EnvironmentDamaged(str(exc)) from exc

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        source = Path(source_dir)
        files = sorted(path for path in source.rglob("*") if path.is_file())
        if source.absolute().is_relative_to(self.environment_dir.absolute()):
            files = [file for file in files if self._stays_inside(file)]
        targets = {file: str(PurePosixPath(target_dir, file.relative_to(source).as_posix())) for file in files}
        if PurePosixPath(target_dir) == PATHS.tests_dir:
            await self._make_room(targets.values())
        for file, target in targets.items():
            await self.upload_file(file, target)

    async def _make_room(self, names: Iterable[str]) -> None:
        """The verifier is about to run, and no process of the agent is alive: a reward that lies there is forged, and
        what stands in the way of the tests is the agent's."""
        places = {"logs": PATHS.logs_dir, "tests": PATHS.tests_dir, "verifier": PATHS.verifier_dir}
        await self.exec(_MAKE_ROOM.format(names=shlex.join(names), **places), cwd="/")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(await asyncio.to_thread(self._open.read, self._inside(source_path)))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        target = Path(target_dir)
        target.mkdir(parents=True, exist_ok=True)
        for name in await self._open.list_files(self._inside(source_dir)):
            await self.download_file(f"{source_dir}/{name}", target / name)

    def _inside(self, path: str) -> str:
        return str(PurePosixPath(self.workdir, path))

    @property
    def _open(self) -> Sandbox:
        if self.box is None:
            raise RuntimeError("this environment is not running")
        return self.box


def _leaves_a_session(command: str) -> bool:
    """Whether it starts tmux for later commands (harbor's terminus agents do); within one command a session works."""
    calls = re.findall(r"\btmux\s+([a-z-]+)", command)
    return calls == ["new-session"] and re.search(r"\s-d\s", command) is not None
