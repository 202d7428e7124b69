"""A coding agent is started for each proposal, as `claude -p` or `codex exec`, in a scratch copy of the project.

In: the command, and where the project lies. Out: what the agent wrote into `proposal.json`. The copy has no repository,
no `.evsys`, no file of a test benchmark and no key; what is changed in it has no effect. A git worktree would share the
repository's objects, test tasks among them. The copy is no sandbox: an agent that looks elsewhere on this machine must
be kept from it by its own settings.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from evsys_sdk.config.base import Name, Params
from evsys_sdk.errors import Cancelled, EvsysError, shorten
from evsys_sdk.registry import register_proposer
from evsys_sdk.research.question import LONGEST_ANSWER, question_text, read_answer
from evsys_sdk.research.state import Proposal, ResearchState

ANSWER = "proposal.json"
LONGEST_LINE = 10_000_000
"""Characters of output that are read at once: an agent may print without end."""
MOST_USED = 1e12
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TERM", "TMPDIR", "USER", "SHELL")
LEFT_OUT = (".git", ".evsys", ".venv", "venv", "node_modules", "__pycache__", ".env*", "outputs", "*.research")
POLL_SECONDS = 0.05
GRACE_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectCopy:
    """What an agent may see of a project."""

    root: Path
    hidden: tuple[Path, ...] = ()
    """Files and folders that are left out: those of test benchmarks, and where results are written."""

    def write(self, target: Path) -> None:
        hidden = {path.resolve() for path in self.hidden}
        pattern = shutil.ignore_patterns(*LEFT_OUT)

        def ignore(folder: str, names: list[str]) -> set[str]:
            found = set(pattern(folder, names))
            # A link may lead to what is hidden.
            return found | {name for name in names if _is_within(Path(folder, name).resolve(), hidden)}

        shutil.copytree(self.root, target, ignore=ignore, dirs_exist_ok=True, ignore_dangling_symlinks=True)


def _is_within(path: Path, hidden: Iterable[Path]) -> bool:
    return any(path == one or one in path.parents for one in hidden)


@dataclass(slots=True)
class AgentUsage:
    """Tokens and dollars, as far as an agent's JSON output says."""

    tokens: int = 0
    usd: float = 0.0

    def read(self, line: str) -> None:
        """A line of output: of `claude -p --output-format json`, or an event of `codex exec --json`. What is no amount,
        such as one below zero, is not counted: it would give the budget back."""
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(event, dict):
            return
        used = event.get("usage")
        if isinstance(used, dict):
            self.tokens += sum(int(_amount(used.get(key))) for key in ("input_tokens", "output_tokens"))
        self.usd += _amount(event.get("total_cost_usd"))


def _amount(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < MOST_USED else 0.0  # type: ignore[operator, arg-type]


@register_proposer("command")
class CommandProposer:
    """Start the command, give it the question on stdin, and read `proposal.json`."""

    class Config(Params):
        argv: list[Name] = Field(min_length=1)
        """The command and its words; `{question}` in a word is the name of the file with the question."""
        time_limit: float = Field(default=900.0, gt=0)
        """Seconds after which its processes are ended."""
        token_limit: int | None = Field(default=None, ge=1)
        """Tokens after which they are ended, where its output says how many were used."""
        environment: list[Name] = Field(default_factory=list)
        """Variables that it gets beside PATH, HOME and the like, such as the key that it needs itself."""

    wants_context = True

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)
        self.project: ProjectCopy | None = None
        self.is_stopped: Callable[[], bool] = lambda: False

    def attach(self, project: ProjectCopy, is_stopped: Callable[[], bool]) -> None:
        """Where the project lies; called before the first question."""
        self.project, self.is_stopped = project, is_stopped

    def propose(self, state: ResearchState, space: Any, rng: random.Random) -> Proposal | None:
        incumbent = state.incumbent
        if incumbent is None:
            return None
        question = question_text(state, space, rng) + f"\nWrite the JSON object into the file {ANSWER} here.\n"
        with tempfile.TemporaryDirectory(prefix="evsys-agent-") as scratch:
            folder = Path(scratch)
            if self.project is not None:
                self.project.write(folder)
            (folder / "QUESTION.md").write_text(question)
            (folder / ANSWER).unlink(missing_ok=True)
            session = AgentSession(
                argv=[word.replace("{question}", "QUESTION.md") for word in self.cfg.argv],
                folder=folder,
                environment={name: os.environ[name] for name in (*KEPT_VARIABLES, *self.cfg.environment)
                             if name in os.environ},
                time_limit=self.cfg.time_limit,
                token_limit=self.cfg.token_limit,
            )  # fmt: skip
            why = session.run(question, self.is_stopped)
            used, changes, confidence, operator = session.usage, dict[str, Any](), None, "none"
            try:
                if why:
                    raise EvsysError(why)
                found = read_answer(_read_file(folder / ANSWER), incumbent.recipe, space)
                changes, claim, confidence, operator = found.changes, found.claim, found.confidence, "agent"
            except EvsysError as exc:
                claim = str(exc)
        return Proposal(
            parent=incumbent.number, changes=changes, claim=claim, operator=operator, confidence=confidence,
            tokens=used.tokens, usd=used.usd,
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class AgentSession:
    """One start of an agent."""

    argv: list[str]
    folder: Path
    environment: dict[str, str]
    time_limit: float
    token_limit: int | None
    usage: AgentUsage = field(default_factory=AgentUsage)

    def run(self, question: str, is_stopped: Callable[[], bool]) -> str:
        """Wait for its end; returns why it has no answer, or nothing. All its processes have ended then."""
        try:
            process = subprocess.Popen(
                self.argv, cwd=self.folder, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as exc:
            return f"{self.argv[0]} cannot be started: {exc.strerror}"
        threads = [threading.Thread(target=work, daemon=True) for work in
                   (lambda: self._write(process, question), lambda: self._read(process))]  # fmt: skip
        for thread in threads:
            thread.start()
        end, why = time.monotonic() + self.time_limit, ""
        while process.poll() is None and not why:
            if is_stopped():
                why = "stopped"
            elif time.monotonic() > end:
                why = f"the agent was ended after {self.time_limit:g} seconds"
            elif self.token_limit is not None and self.usage.tokens > self.token_limit:
                why = f"the agent was ended after {self.usage.tokens:,} tokens, of {self.token_limit:,}"
            else:
                time.sleep(POLL_SECONDS)
        self._end(process)
        for thread in threads:
            thread.join(GRACE_SECONDS)
        if why == "stopped":
            raise Cancelled("the research was stopped")
        if not why and process.returncode:
            return f"the agent ended with exit code {process.returncode}"
        return why

    def _write(self, process: subprocess.Popen[str], question: str) -> None:
        assert process.stdin is not None
        with suppress(OSError, ValueError):  # it need not read
            process.stdin.write(question)
            process.stdin.close()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with suppress(OSError, ValueError):
            while line := process.stdout.readline(LONGEST_LINE):
                self.usage.read(line)

    def _end(self, process: subprocess.Popen[str]) -> None:
        """End what is left of its process group, which the agent leads."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except (ProcessLookupError, PermissionError):
                break
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS if number == signal.SIGTERM else None)
        process.wait()


def _read_file(path: Path) -> str:
    try:
        if path.is_symlink() or not path.is_file():
            raise EvsysError(f"the agent wrote no {ANSWER}")
        with path.open(errors="replace") as file:
            return file.read(LONGEST_ANSWER)
    except OSError as exc:
        raise EvsysError(f"{ANSWER} cannot be read: {shorten(str(exc))}") from exc
