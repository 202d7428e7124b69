"""Every way this SDK says no, and the two helpers that turn foreign failures into one of them.

In: nothing. Out: exception classes. The CLI prints any `EvsysError` as a plain message (or JSON) with exit code 1;
whatever is not an `EvsysError` is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal

from evsys_sandbox.errors import SandboxError
from evsys_sdk.redaction import redact


class EvsysError(Exception):
    """Something a user can put right; the message says what and how."""

    problems: Sequence[Problem] = ()
    """What is wrong as records, where the message speaks of places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake in a config file."""

    path: str
    """Dotted key path, e.g. `run.algorithm.params.learning_rate`; empty for the file as a whole."""
    message: str
    """What is wrong, with the nearest right word where there is one."""
    line: int | None = None
    """1-based line in the file; None when the value did not come from the file."""
    value: object = None
    """The offending value, shown shortened; None is not shown."""
    next_command: str = ""
    """The command that shows what is allowed here."""


MOST_PROBLEMS = 100
"""Problems of one file that are listed one by one; those after them are counted."""


class ConfigError(EvsysError):
    """A config that cannot be run: its problems at once, each with its place; of very many, the first hundred."""

    def __init__(self, source: str, problems: Iterable[Problem]):
        self.source = source
        found = sorted(problems, key=lambda p: (p.line is None, p.line or 0))
        self.count = len(found)
        rest = found[MOST_PROBLEMS:]
        if len(rest) > 1:  # one that stands for them, at the first of them
            message = f"is wrong too, and {len(rest) - 1:,} more problems"
            found = [*found[:MOST_PROBLEMS], replace(rest[0], message=message, value=None)]
        self.problems = found
        super().__init__(self.render())

    def render(self) -> str:
        """The text a person reads: a header, a line per problem, the next command."""
        first = next((p.line for p in self.problems if p.line), None)
        place = f"{self.source}:{first}" if first else self.source
        lines = [f"{place}: {self.count} problem{'s' if self.count != 1 else ''}"]
        for problem in self.problems:
            line = f"line {problem.line}  " if problem.line else ""
            shown = "" if problem.value is None else f" = {shorten(repr(problem.value))}"
            lines.append(f"  {line}{problem.path or '(file)'}{shown}   {problem.message}")
        commands = dict.fromkeys(p.next_command for p in self.problems if p.next_command)
        lines += [f"next: {command}" for command in list(commands)[:3]]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Problem):
    """A setting that is not what it was; None stands for "not there"."""

    before: object = None


class SettingsChanged(EvsysError):
    """An experiment was launched with other settings than these, and has results."""

    def __init__(self, message: str, changes: Mapping[str, tuple[object, object]]):
        """`changes`: place -> what it was and what it is."""
        super().__init__(message)
        self.problems = [
            Change(path=place, message="not as it was launched", before=before, value=now)
            for place, (before, now) in changes.items()
        ]


def put_on_one_line(text: str) -> str:
    """`text` without line breaks and secrets; one that was broken over lines would not be known as one later."""
    return " ".join(redact(text).split())


def shorten(text: str, limit: int = 60) -> str:
    """`text` on one line, cut in the middle when longer than `limit`; half a secret would not be known as one later."""
    text = put_on_one_line(text)
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


class UnknownKind(EvsysError, KeyError):
    """A name that no extension is registered under. Also a `KeyError`, as the reference promises."""

    def __str__(self) -> str:
        return str(self.args[0])


class DuplicateKind(EvsysError, ValueError):
    """Two different extensions asked for the same name."""


class MissingDependency(EvsysError, ImportError):
    """An optional library is needed and not installed."""


class DataError(EvsysError):
    """Rows that cannot be read or do not have the shape a stage needs."""


class WorkspaceError(EvsysError):
    """A dataset or benchmark that cannot be found in, or trusted from, the workspace."""


class BackendError(EvsysError):
    """A training backend refused or lost a call."""


class BackendUnavailable(BackendError):
    """A backend that did not answer, or not in time, however often it was asked, or that has lost the run's session."""


class VerifierFailed(EvsysError):
    """A verifier raised; the rollout stays unscored and is never counted as 0 reward by accident."""


class RunLocked(EvsysError):
    """Another live process works in the same run directory."""


class RecordLost(EvsysError):
    """The runs are done, and their results could not be written."""


class JournalDamaged(EvsysError):
    """The journal of an experiment is not what was written."""


StopReason = Literal["user", "budget", "pause"]


class Cancelled(EvsysError):
    """A run has to stop: the user asked for it (a signal, a callback), the budget is spent, or a search pauses it."""

    def __init__(self, message: str = "", *, reason: StopReason = "user", step: int | None = None):
        super().__init__(message)
        self.reason = reason
        self.step = step
        """The last step of a run that a search pauses."""


class EvsysAuthError(EvsysError):
    """Dashboard credentials are missing."""


class DashboardClientError(EvsysError):
    """The dashboard answered 4xx: the request itself is wrong."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


READABLE = (EvsysError, SandboxError)
"""Errors whose text is written for people: it is shown without the name of a class."""
FOREIGN = (Exception, SystemExit)
"""What foreign code may throw at us: `sys.exit()` in a plugin is its failure, not the end of ours."""


@contextmanager
def error_boundary(error: type[EvsysError], what: str) -> Iterator[None]:
    """Run foreign code; what it raises comes out as `error`, saying whose code it was."""
    try:
        yield
    except READABLE:
        raise
    except FOREIGN as exc:
        raise error(f"{what} failed: {type(exc).__name__}: {exc}") from exc


def need(module: str, *, extra: str) -> ModuleType:
    """Import an optional library, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise MissingDependency(f"This needs {module}: pip install 'evsys-sdk[{extra}]' ({exc})") from exc


def refusal(error: str, problems: Sequence[Problem] = (), *, path: str | None = None) -> dict[str, Any]:
    """What `--json` says of a refusal, whatever the verb: the message, its places as records, the file it is about."""
    about = {} if path is None else {"path": path}
    return {"ok": False, **about, "error": error, "problems": [asdict(problem) for problem in problems]}


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, if any is like it."""
    return _closest(word, tuple(sorted(known)))


@lru_cache(maxsize=10_000)  # thousands of arms repeat the same mistakes, and a comparison takes 0.2 ms
def _closest(word: str, names: tuple[str, ...]) -> str | None:
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not matches:
        # A second look, without case: difflib counts `SFT` and `sft` as having no letter in common.
        folded = {name.lower(): name for name in names}
        matches = [folded[m] for m in difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.6)]
    return matches[0] if matches else None


def not_known(word: str, what: str, known: Iterable[str]) -> str:
    """`'tinkr' is not a backend; closest: tinker; known: local, mock, tinker`."""
    names = sorted(known)
    near = closest(word, names)
    hint = f"; closest: {near}" if near else ""
    article = "an" if what[:1] in "aeiou" else "a"
    return f"{word!r} is not {article} {what}{hint}; known: {', '.join(names) or 'none'}"
