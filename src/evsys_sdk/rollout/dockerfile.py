"""What a Dockerfile asks for, as far as a sandbox without images can give it.

In: the text of a Dockerfile. Out: its steps, in order: variables, working directories, files to copy, commands to run.
The image itself is the machine's own read-only /usr. What has no meaning there (ports, labels, start commands) is
passed over; what would be missed (stages, downloads) is refused by name.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Literal

from evsys_sdk.errors import DataError, shorten

PASSED_OVER = frozenset(
    {"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "USER", "VOLUME", "STOPSIGNAL", "MAINTAINER", "SHELL", "HEALTHCHECK"}
)
INSTEAD = "run this task in another environment (docker, e2b)"
_FETCHES = re.compile(
    r"^[^#\n]*(?:\b(?:apt-get|apt|apk|yum|dnf|pip3?|npm|cargo|conda)\s+(?:-\S+\s+)*install\b"
    r"|\b(?:curl|wget|git\s+clone)\b[^\n]*https?://|\buvx\s).*$",
    re.MULTILINE,
)


def fetches(script: str) -> str | None:
    """The first line of a shell script that gets something from the network; without one it would fail, and look as if
    the model had."""
    found = _FETCHES.search(script)
    return shorten(found.group()) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to do before the agent comes."""

    kind: Literal["env", "workdir", "copy", "run"]
    words: tuple[str, ...]
    """env: name, value. workdir: path. copy: sources, then the destination. run: the shell command."""


def steps_of(text: str) -> list[Step]:
    """The steps of a Dockerfile; a DataError names the first one that a sandbox cannot do."""
    steps: list[Step] = []
    stages = 0
    for line in _lines(text):
        name, _, rest = line.partition(" ")
        name, rest = name.upper(), rest.strip()
        if name == "FROM":
            stages += 1
            if stages > 1:
                raise DataError(f"the sandbox does not do Dockerfiles of several stages; {INSTEAD}")
        elif name not in PASSED_OVER:
            steps += _steps(name, rest, line)
    return steps


def _steps(name: str, rest: str, line: str) -> list[Step]:
    if name in ("ENV", "ARG"):
        return [Step(kind="env", words=pair) for pair in _variables(rest)]
    if name == "WORKDIR":
        return [Step(kind="workdir", words=(rest.strip("\"'"),))]
    if name == "RUN" and not rest.startswith("<<"):
        return [Step(kind="run", words=(_command(rest),))]
    if name in ("COPY", "ADD"):
        words = [word for word in _words(rest) if not re.match(r"--(chown|chmod|link)", word)]
        if len(words) > 1 and not any(re.match(r"--|<<|https?:|git@", word) for word in words):
            return [Step(kind="copy", words=tuple(words))]
    raise DataError(f"the sandbox cannot do this step of the Dockerfile: {shorten(line)}; {INSTEAD}")


def _lines(text: str) -> list[str]:
    """Whole instructions, without comments and continuations."""
    kept = [line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [line.strip() for line in re.sub(r"\\\n\s*", " ", "\n".join(kept)).splitlines()]


def _variables(rest: str) -> list[tuple[str, str]]:
    words = _words(rest)
    if words and "=" not in words[0]:
        return [(words[0], " ".join(words[1:]))] if len(words) > 1 else []
    pairs = (word.partition("=") for word in words)
    return [(name, value) for name, _, value in pairs]


def _words(rest: str) -> list[str]:
    if rest.startswith("["):
        return [str(word) for word in json.loads(rest)]
    return shlex.split(rest)


def _command(rest: str) -> str:
    rest = re.sub(r"^(--\S+\s+)+", "", rest)
    return shlex.join(json.loads(rest)) if rest.startswith("[") else rest
