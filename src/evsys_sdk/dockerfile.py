"""What a Dockerfile asks for, as far as a sandbox without images can give it.

In: the text of a Dockerfile. Out: its steps in order (`steps_of`), or added up (`recipe_of`), and what of it this
machine lacks. The image itself is the machine's own read-only /usr: packages are looked for there and not installed.
What has no meaning without an image (ports, labels, start commands) is passed over; what would be missed is named.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath
from string import Template
from typing import Literal

from evsys_sdk.errors import DataError, blame, shorten

PASSED_OVER = frozenset(
    {"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "USER", "VOLUME", "STOPSIGNAL", "MAINTAINER", "SHELL", "HEALTHCHECK"}
)
SYSTEM = frozenset({"/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/dev", "/proc", "/sys"})
"""Top-level folders that are the machine's own: nothing can be put there."""
INSTEAD = "run this task in another environment (docker, e2b)"

_FETCHES = re.compile(
    r"^[^#\n]*(?:\b(?:apt-get|apt|yum|dnf|pip3?|npm|cargo|conda)\s+(?:-\S+\s+)*install\b|\bapk\s+(?:-\S+\s+)*add\b"
    r"|\b(?:curl|wget|git\s+clone)\b[^\n]*https?://|\buvx\s).*$",
    re.MULTILINE,
)
_PIP = re.compile(r"^(?:uv\s+)?(?:python[\d.]*\s+-m\s+)?pip[\d.]*\s+install\b(.*)")
_APT = re.compile(r"^(?:apt-get|apt)\s+(?:-\S+\s+)*install\b(.*)")
_MANAGER = re.compile(r"\bpip[\d.]*\s|\bapt(?:-get)?\s")
_INSTALL = re.compile(r"\b(?:pip[\d.]*|apt-get|apt)\s+(?:-\S+\s+)*install\b")
# Housekeeping of package managers: nothing that anybody could miss.
_IDLE = re.compile(r"^(?:(?:apt-get|apt)\s+(?:-\S+\s+)*(?:update|clean|autoremove|upgrade)\b|rm\s+-rf\s+/var/|true$)")
_OPTION_WITH_VALUE = {"-i", "--index-url", "--extra-index-url", "-t", "--target", "-f", "--find-links", "-o"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to do, or to have, before the work begins."""

    kind: Literal["env", "workdir", "copy", "run", "python", "system", "alias", "refused"]
    words: tuple[str, ...]
    """env: name, value. workdir: path. copy: sources, then the destination. run: the shell command. python, system:
    packages to have. alias: a program, and a further name for it. refused: why."""
    line: str = field(default="", compare=False)
    """The instruction as it was written."""


@dataclass(slots=True, kw_only=True)
class Recipe:
    """A whole Dockerfile, for those who put no files of their own beside it."""

    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    python_packages: list[str] = field(default_factory=list)
    system_packages: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    """RUN commands that are neither; they run in the sandbox, in the working directory."""
    refused: list[str] = field(default_factory=list)
    """Lines that cannot be honoured without building the image."""


def fetches(script: str) -> str | None:
    """The first line of a shell script that gets something from the network; without one it would fail, and look as if
    the model had."""
    found = _FETCHES.search(script)
    return shorten(found.group()) if found else None


def steps_of(text: str) -> list[Step]:
    """The steps of a Dockerfile; a DataError names the first one that a sandbox cannot do."""
    steps = _read(text)
    for step in steps:
        if step.kind == "refused":
            raise DataError(f"{step.words[0]}; {INSTEAD}")
    return list(steps)


@lru_cache(maxsize=1024)
def recipe_of(text: str) -> Recipe:
    """The recipe in a Dockerfile; what needs files beside it, or an image, is in `refused`."""
    recipe = Recipe()
    for step in _read(text):
        match step.kind:
            case "env":
                recipe.env[step.words[0]] = step.words[1]
            case "workdir":
                recipe.workdir = str(PurePosixPath(recipe.workdir, step.words[0]))
            case "python":
                recipe.python_packages += step.words
            case "system":
                recipe.system_packages += step.words
            case "run" if not _INSTALL.search(step.words[0]):
                recipe.steps += step.words
            case _:
                recipe.refused.append(step.line)
    if recipe.workdir in ("/", "/tests") or top_folder(recipe.workdir) in SYSTEM:
        recipe.refused.append(f"WORKDIR {recipe.workdir}")
    return recipe


def top_folder(path: str) -> str:
    """`/srv` of `/srv/app`; empty for `/` and for what is not absolute."""
    parts = PurePosixPath(path).parts
    return "/" + parts[1] if len(parts) > 1 and parts[0] == "/" else ""


@lru_cache(maxsize=1024)
def what_is_missing(text: str) -> str | None:
    """What this Dockerfile asks for, with no files beside it, that this machine's sandbox does not have; or None."""
    recipe = recipe_of(text)
    if recipe.refused:
        return f"the dockerfile's `{recipe.refused[0]}` needs an image built"
    return missing_packages(_read(text))


def missing_packages(steps: Iterable[Step]) -> str | None:
    """A sentence on the packages that these steps ask for and this machine's /usr has not; or None."""
    python = tuple(word for step in steps if step.kind == "python" for word in step.words)
    system = tuple(word for step in steps if step.kind == "system" for word in step.words)
    absent = _absent_python(python) + _absent_packages(system)
    return f"the dockerfile installs {', '.join(absent)}, and this machine's /usr has not" if absent else None


@lru_cache(maxsize=1024)
def _read(text: str) -> tuple[Step, ...]:
    """Every step, with those that cannot be done marked as refused."""
    steps: list[Step] = []
    variables: dict[str, str] = {}
    stages = 0
    for line in _lines(text):
        name, _, rest = line.partition(" ")
        name, rest = name.upper(), rest.strip()
        if name == "FROM":
            stages += 1
            if stages > 1:
                steps.append(_refused("the sandbox does not do Dockerfiles of several stages", line))
        elif name not in PASSED_OVER:
            with blame(DataError, f"reading the line of the Dockerfile `{shorten(line)}`"):
                steps += _steps(name, rest, line, variables)
    return tuple(steps)


def _steps(name: str, rest: str, line: str, variables: dict[str, str]) -> list[Step]:
    if name == "RUN" and not rest.startswith("<<"):
        return _run(_command(rest), line)
    if name in ("ENV", "ARG"):
        pairs = [(key, Template(value).safe_substitute(variables)) for key, value in _variables(rest)]
        variables.update(pairs)
        return [Step(kind="env", words=pair, line=line) for pair in pairs]
    known = Template(rest).safe_substitute(variables)
    if name == "WORKDIR" and "$" not in known:
        return [Step(kind="workdir", words=(known.strip("\"'"),), line=line)]
    if name in ("COPY", "ADD") and "$" not in known:
        words = [word for word in _words(known) if not re.match(r"--(chown|chmod|link)", word)]
        if len(words) > 1 and not any(re.match(r"--|<<|https?:|git@", word) for word in words):
            return [Step(kind="copy", words=tuple(words), line=line)]
    return [_refused(f"the sandbox cannot do this step of the Dockerfile: {shorten(line)}", line)]


def _refused(why: str, line: str) -> Step:
    return Step(kind="refused", words=(why,), line=line)


def _lines(text: str) -> list[str]:
    """Whole instructions, without comments and continuations."""
    kept = [line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [line.strip() for line in re.sub(r"\\\n\s*", " ", "\n".join(kept)).splitlines()]


def _variables(rest: str) -> list[tuple[str, str]]:
    words = _words(rest)
    if words and "=" not in words[0]:  # the old form, ENV NAME value
        return [(words[0], " ".join(words[1:]))] if len(words) > 1 else []
    pairs = (word.partition("=") for word in words)
    return [(name, value) for name, _, value in pairs]


def _words(rest: str) -> list[str]:
    if rest.startswith("["):
        return [str(word) for word in json.loads(rest)]
    return shlex.split(rest)


def _command(rest: str) -> str:
    rest = re.sub(r"^(--\S+\s+)+", "", rest)  # --mount=... and the like
    return shlex.join(json.loads(rest)) if rest.startswith("[") else rest


def _run(command: str, line: str) -> list[Step]:
    """A command; where it speaks to a package manager, the packages, and what else it does."""
    if not _MANAGER.search(command):
        return [Step(kind="run", words=(command,), line=line)]
    # Only here the parts are looked at: any other command stays whole, quotes and all.
    parts = re.split(r"\s*(&&|;)\s*", command)
    steps: list[Step] = []
    left = ""
    for joint, part in zip(["", *parts[1::2]], parts[::2], strict=True):
        wanted = _packages(part, line)
        if wanted is not None:
            steps.append(wanted)
        elif part and not _IDLE.match(part):
            left += f" {joint} {part}" if left else part
    return [*steps, Step(kind="run", words=(left,), line=line)] if left else steps


def _packages(part: str, line: str) -> Step | None:
    """The packages that a command installs by name; None when it does something else, or installs files."""
    pip, apt = _PIP.match(part), _APT.match(part)
    found = pip or apt
    words = iter(shlex.split(found[1]) if found else [])
    names: list[str] = []
    for word in words:
        if word in _OPTION_WITH_VALUE:
            next(words, None)
        elif word in ("-r", "-c", "-e") or "$" in word or word.startswith((".", "/", "git+", "http")):
            return None
        elif not word.startswith("-"):
            names.append(re.split(r"[\s\[<>=!~;]", word)[0])
    return Step(kind="python" if pip else "system", words=tuple(names), line=line) if found else None


@lru_cache(maxsize=1024)
def _absent_python(names: tuple[str, ...]) -> list[str]:
    # The Python that the sandbox will see, alone: not ours, and without what the user has installed at home.
    code = (
        "import importlib.metadata as m, sys\n"
        "def has(n):\n    try: return bool(m.version(n))\n    except m.PackageNotFoundError: return False\n"
        "print(*[n for n in sys.argv[1:] if not has(n)])"
    )
    if not names:
        return []
    if shutil.which("/usr/bin/python3") is None:
        return ["python3"]
    asked = subprocess.run(
        ["/usr/bin/python3", "-s", "-E", "-c", code, *names], capture_output=True, text=True, env={}, check=False
    )
    return asked.stdout.split() if asked.returncode == 0 else list(names)


@lru_cache(maxsize=1024)
def _absent_packages(names: tuple[str, ...]) -> list[str]:
    """Debian packages by their own register; where there is none, a package counts when a program has its name."""
    query = shutil.which("dpkg-query")
    return [name for name in names if not _has_package(query, name)]


def _has_package(query: str | None, name: str) -> bool:
    if shutil.which(name, path="/usr/local/bin:/usr/bin:/bin") is not None:
        return True
    if query is None:
        return False
    asked = subprocess.run([query, "-W", "-f=${Status}", "--", name], capture_output=True, text=True, check=False)
    return asked.stdout.strip() == "install ok installed"
