"""A harbor environment on this machine: the task's files in a bubblewrap sandbox, and every command a jail around them.

In: a task's `environment/`. Out: what harbor asks of an environment. There is no network, there is one user, and a
process lives no longer than the command that started it. Whatever an agent did to its folders, the tests run and say
what it is worth: from the moment the tests come in, the folders belong to another uid, the tests lie in a new folder
that cannot be written, home is empty, and of the folders that neither the task nor its tests name nothing is seen.
Where there can be no sandbox the trial fails with the sentence that says so; nothing runs outside.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.paths import EnvironmentPaths

from evsys_sandbox.dockerfile import INSTEAD, SYSTEM, Step, missing_packages, steps_of, top_folder
from evsys_sandbox.errors import SandboxError
from evsys_sandbox.grading import GRADER_HOME, grading_variables, tracing_for
from evsys_sandbox.launch import SandboxLimits
from evsys_sandbox.sandbox import EVERYTHING, HOME, Sandbox, SandboxResult, View
from evsys_sdk.errors import DataError, EvsysError, shorten
from evsys_sdk.logs import get_logger
from evsys_sdk.rollout.requirements import files_problem
from evsys_sdk.rollout.task_dirs import OWN_TESTS

PATHS = EnvironmentPaths()
TESTS, VERIFIER = str(PATHS.tests_dir), str(PATHS.verifier_dir)
USERS_HOME = "/root"
"""Where tasks that are written for images expect it."""
MAYBE_GRADED = ("/solution", "/harbor", USERS_HOME, "/home", "/workspace", "/tmp")
"""Folders whose contents tests see only where the task or the tests name them."""
KEPT = (HOME, "/logs", VERIFIER, TESTS, *MAYBE_GRADED)
"""Folders that outlive a command, besides those that the task itself names."""
# `git config --global` is for the programs that the tests run, too.
_NAMES_HOME = re.compile(r"~/|\bHOME\b|expanduser|Path\.home|homedir|--global\b")
_SETS_HOME = re.compile(r"""\bHOME\b["'\]]*\s*[=:,]\s*["']?(/[\w./-]+)""")
_OF_PROJECTS = frozenset({".git", ".gitattributes", ".github", ".gitignore", ".gitmodules", ".venv"})
"""Belong to the folder in which they lie, whether it is a home or not."""
NOT_RUN = (126, 127)
"""The shell's exit codes for a command that cannot be run or found: such tests have said nothing about the model."""
NO_SESSION = (
    "in the local sandbox a process lives no longer than the command that started it, so no tmux session can be kept: "
    "use the agent `chat` with the tool `bash`, or another environment (docker, e2b)"
)
DEFAULT_SECONDS = 3600.0
"""For a command without a time limit."""
_ENTER = 'cd -- "$1" || cd /; exec /bin/bash -c "$2"'
"""A working directory that the agent has closed or removed is no reason not to run a command."""


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
        self.tests_text: str | None = None
        """All that the tests say, while they are in the environment; None while the agent works."""
        self.graded_by_exit_code = False

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
        aliases = {step.words[1]: step.words[0] for step in self.steps if step.kind == "alias"}
        self.box = Sandbox(folders=self._folders(), limits=self._limits(), aliases=aliases)
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

    def _limits(self) -> SandboxLimits:
        memory, disk = self.task_env_config.memory_mb, self.task_env_config.storage_mb
        default = SandboxLimits()
        return SandboxLimits(
            memory_bytes=memory << 20 if memory else default.memory_bytes,
            total_memory_bytes=memory << 20 if memory else default.total_memory_bytes,
            disk_bytes=disk << 20 if disk else default.disk_bytes,
        )

    async def _build(self, step: Step) -> None:
        if step.kind == "env":
            self.variables[step.words[0]] = step.words[1]
        elif step.kind == "workdir":
            self.workdir = str(PurePosixPath(self.workdir, step.words[0]))
            await self._must(f"mkdir -p {shlex.quote(self.workdir)}", "/")
        elif step.kind == "run":
            await self._must(step.words[0], self.workdir)
        elif step.kind == "copy" and step.texts:
            await self._copy_texts(step)
        elif step.kind == "copy":
            await self._copy(step.words[:-1], step.words[-1])

    async def _copy_texts(self, step: Step) -> None:
        target, is_folder = step.words[-1], step.words[-1].endswith("/") or len(step.texts) > 1
        for name, text in zip(step.words, step.texts, strict=False):
            place = PurePosixPath(self.workdir, target, *([name] if is_folder else []))
            await asyncio.to_thread(self._open.write, str(place), text)

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
                    f"COPY {pattern}: {outside} leads to {os.path.realpath(outside)}, outside of the task's "
                    "environment/, and is not copied; put the file itself there"
                )
            for source in found:
                if source.is_dir():
                    await self.upload_dir(source, str(target))
                else:
                    await self.upload_file(source, str(target / source.name if into or len(found) > 1 else target))

    def _stays_inside(self, path: Path) -> bool:
        """Whether a file of environment/ lies there; a link may lead to any file of the machine, such as a key."""
        is_inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.environment_dir))
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
        variables = {"HOME": USERS_HOME, **self.variables, **(self._merge_env(env) or {})}
        view = EVERYTHING
        if self.tests_text is not None:
            if command.startswith(f"chmod +x {TESTS}/"):  # they are, and nothing there can be changed
                return ExecResult(stdout="", stderr="", return_code=0)
            view, home = self._graders_view(self.tests_text)
            variables = grading_variables({name: value for name, value in variables.items() if name != "HOME"} | home)
        done = await self._open.run(
            ["/bin/bash", "-c", _ENTER, "bash", cwd or self.workdir, command],
            cwd="/",
            env=variables,
            timeout_seconds=timeout_sec or DEFAULT_SECONDS,
            view=view,
        )
        # Only what runs the tests settles the reward; harbor runs other commands here as well.
        if self.tests_text is not None and f"{TESTS}/" in command:
            await asyncio.to_thread(self._settle_reward, done)
        why, limits = "", self._open.limits
        if done.timed_out:
            why = f"\n[killed after {timeout_sec} seconds]"
        elif done.killed == "forgery":
            why = "\n[killed: a link led the tests to the folder of their reward]"
        elif done.killed is not None:
            most = {"memory": limits.total_memory_bytes, "disk": limits.disk_bytes}[done.killed]
            why = f"\n[killed: more than {most >> 20} MB of {done.killed} in use]"
        return ExecResult(stdout=done.stdout, stderr=done.stderr + why, return_code=done.exit_code)

    def _graders_view(self, tests_text: str) -> tuple[View, dict[str, str]]:
        """What tests see, and the home they have where they look into the user's."""
        named = {top_folder(str(PurePosixPath(self.workdir)))}
        named |= {top_folder(step.words[-1]) for step in self.steps if step.kind in ("workdir", "copy")}
        at_home = _NAMES_HOME.search(tests_text) is not None
        hidden = [
            folder
            for folder in MAYBE_GRADED
            if folder not in named
            and not re.search(rf"{folder}\b", tests_text)
            and not (folder == USERS_HOME and at_home)
        ]
        view = View(
            read_only=(TESTS,),
            emptied=tuple(hidden),
            home=USERS_HOME if at_home else GRADER_HOME,
            tracing=tracing_for(tests_text, guarded=VERIFIER),
        )
        return view, {"HOME": USERS_HOME} if at_home else {}

    def _settle_reward(self, done: SandboxResult) -> None:
        """The tests have run, and all that they started is dead: what they say is now out of anybody's reach."""
        rewards = [f"{VERIFIER}/reward.txt", f"{VERIFIER}/reward.json"]
        # Tests that were killed have passed nothing, whatever a program that they ran has written in their name.
        was_killed = done.exit_code > 128 or done.killed is not None
        if not self.graded_by_exit_code and not was_killed:
            if done.exit_code:
                self._note(f"[the tests ended with exit code {done.exit_code}]")
            self._settle_contradiction(*rewards)
            return
        for path in rewards:
            self._open.remove(path)
        if done.killed == "forgery":
            self._note(f"[the tests were ended and the reward is 0: {done.stderr.strip().rpartition(chr(10))[2]}]")
        elif was_killed or done.exit_code in NOT_RUN:
            self._note(f"[the tests ended with exit code {done.exit_code}]")
        # Without a reward harbor's verifier fails: the rollout is an `infra_error` and is not counted as wrong.
        if done.exit_code not in NOT_RUN and not done.timed_out:
            self._open.write(rewards[0], str(int(done.exit_code == 0)))

    def _settle_contradiction(self, plain: str, as_json: str) -> None:
        """Where both files of the reward are there, harbor reads the JSON, which tests can have copied from the work of
        the agent (`cp results/* /logs/verifier/`). It does not count where the other file says less."""
        try:
            least = float(self._open.read(plain))
            rewards = json.loads(self._open.read(as_json))
            said = float(rewards.get("reward", next(iter(rewards.values()))))
        except (
            OSError,
            SandboxError,
            ValueError,
            TypeError,
            AttributeError,
            StopIteration,
            ArithmeticError,
            RecursionError,
        ):
            return  # one of them is not there or cannot be read, and harbor says so
        if least < said:
            self._open.remove(as_json)
            self._note(f"[reward.json says {said:g} and reward.txt {least:g}: the lower one counts]")

    def _note(self, text: str) -> None:
        """Add a line to what the tests printed."""
        path = f"{VERIFIER}/test-stdout.txt"
        try:
            printed = self._open.read(path)
        except (FileNotFoundError, SandboxError):
            self._open.remove(path)
            printed = b""
        self._open.write(path, printed + f"{text}\n".encode())

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source = Path(source_path)
        mode = stat.S_IMODE(source.stat().st_mode) | stat.S_IRUSR | stat.S_IWUSR
        if self.tests_text is not None and source.suffix == ".sh":
            mode |= stat.S_IXUSR
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
            await self._begin_grading(source, files)
        for file, target in targets.items():
            await self.upload_file(file, target)

    async def _begin_grading(self, source: Path, files: Sequence[Path]) -> None:
        """The tests are about to come in, and no process of the agent is alive: what lies there is the agent's."""
        if self.tests_text is None:
            # In this order: the new folders belong to the new uid, and links are cut when no process of the agent can
            # lay others.
            await self._open.hand_over()
            await self._open.empty(TESTS)
            await self._open.empty(VERIFIER)
            await self._open.cut_links(VERIFIER)
            self.tests_text, self.graded_by_exit_code = "", False
        self._open.bring_back()
        self.tests_text += "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
        self.graded_by_exit_code |= (source / OWN_TESTS).is_file()
        await asyncio.to_thread(self._set_settings_aside, self.tests_text)

    def _set_settings_aside(self, tests_text: str) -> None:
        """Out of a home that the tests name goes what programs read there by themselves (`.bashrc`, `.gitconfig`,
        `.config/git`), unless the task or the tests name it too."""
        dockerfile = self.environment_dir / "Dockerfile"
        task = dockerfile.read_text(encoding="utf-8") if dockerfile.is_file() else ""
        texts = "\n".join((tests_text, task, self.workdir, *self.variables.values()))

        def is_named(name: str) -> bool:
            return name in _OF_PROJECTS or re.search(rf"(?<![\w)\]]){re.escape(name)}(?![\w-])", texts) is not None

        homes = set(map(os.path.normpath, _SETS_HOME.findall(tests_text)))
        for home in homes | ({USERS_HOME} if _NAMES_HOME.search(tests_text) else set()):
            self._open.set_aside(f"{home}/.config", lambda name: not is_named(f".config/{name}"))
            self._open.set_aside(home, lambda name: name.startswith(".") and not is_named(name))

    async def reset_dirs(
        self,
        *,
        remove_dirs: Sequence[PurePath | str],
        create_dirs: Sequence[PurePath | str],
        chmod_dirs: Sequence[PurePath | str] | None = None,
    ) -> ExecResult:
        """Between the steps of a task: the tests go, and it is the agent's turn."""
        own = [str(path) for path in remove_dirs if str(path) in self._open.folders]
        for folder in own:
            await self._open.empty(folder)
        if TESTS in own:
            self.tests_text = None
            self._open.bring_back()
        return await super().reset_dirs(
            remove_dirs=[path for path in remove_dirs if str(path) not in own],
            create_dirs=create_dirs,
            chmod_dirs=chmod_dirs,
        )

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Cut and not refused: a program that prints without end must not make its failure one of the machine.
        target.write_bytes(await asyncio.to_thread(self._open.read, self._inside(source_path), is_cut=True))

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
