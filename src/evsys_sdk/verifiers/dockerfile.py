"""What a Dockerfile asks for, as far as a machine without Docker can give it.

In: a Dockerfile's text. Out: a `Recipe`: where to work, which variables, what must be installed, what to run first.
The image is not built; this machine's /usr stands for it. What it lacks is named, so that tests are not run, and
failed, without it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath

from evsys_sdk.errors import DataError, blame

_PIP = re.compile(r"^(?:uv\s+)?(?:python[\d.]*\s+-m\s+)?pip[\d.]*\s+install\b(.*)")
_APT = re.compile(r"^(?:apt-get|apt)\s+(?:-\S+\s+)*install\b(.*)")
_INSTALLS = re.compile(r"\bpip[\d.]*\s+install\b|\bapt(?:-get)?\s")
# Housekeeping of package managers: nothing that a test could miss.
_IDLE = re.compile(
    r"^(?:(?:apt-get|apt)\s+(?:-\S+\s+)*(?:update|clean|autoremove|upgrade)\b|rm\s+-rf\s+/var/|set\s+-|true$)"
)
_OPTION_WITH_VALUE = {"-i", "--index-url", "--extra-index-url", "-t", "--target", "-f", "--find-links"}
_FORBIDDEN = ("/", "/usr", "/bin", "/lib", "/lib64", "/sbin", "/dev", "/proc", "/sys", "/etc", "/tests")


@dataclass(slots=True, kw_only=True)
class Recipe:
    """What to have in place before the tests."""

    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    python_packages: list[str] = field(default_factory=list)
    system_packages: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    """RUN commands that are neither; they run in the sandbox, in the working directory."""
    refused: list[str] = field(default_factory=list)
    """Lines that cannot be honoured without building the image."""


@lru_cache(maxsize=1024)
def read_dockerfile(text: str) -> Recipe:
    """The recipe in a Dockerfile; lines that only describe the image (FROM, LABEL, CMD, ...) ask for nothing here."""
    with blame(DataError, "reading the dockerfile"):
        return _read(text)


def _read(text: str) -> Recipe:
    recipe = Recipe()
    for line in re.sub(r"\\\s*\n", " ", re.sub(r"(?m)^\s*#.*\n?", "", text)).splitlines():
        word, _, rest = line.strip().partition(" ")
        match word.upper():
            case "WORKDIR":
                recipe.workdir = str(PurePosixPath(recipe.workdir, rest.strip()))
            case "ENV":
                recipe.env.update(_variables(rest.strip()))
            case "RUN":
                _read_run(recipe, rest.strip())
            case "COPY" | "ADD":
                recipe.refused.append(line.strip())
    if recipe.workdir in _FORBIDDEN:
        recipe.refused.append(f"WORKDIR {recipe.workdir}")
    return recipe


def _variables(text: str) -> dict[str, str]:
    if re.match(r"\w+\s", text):  # the old form, ENV NAME value
        name, _, value = text.partition(" ")
        return {name: value.strip()}
    return dict(word.split("=", 1) for word in shlex.split(text) if "=" in word)


def _read_run(recipe: Recipe, command: str) -> None:
    if command.startswith("["):
        command = shlex.join(json.loads(command))
    command = re.sub(r"^(?:--\S+\s+)+", "", command)  # --mount=... and the like
    # Only where packages are installed the parts are looked at; any other command stays whole, quotes and all.
    parts = re.split(r"&&|;", command) if _INSTALLS.search(command) else [command]
    for part in filter(None, (part.strip() for part in parts)):
        if found := _PIP.match(part):
            _read_pip(recipe, found[1], part)
        elif found := _APT.match(part):
            recipe.system_packages += [word for word in shlex.split(found[1]) if not word.startswith("-")]
        elif not _IDLE.match(part):
            recipe.steps.append(part)


def _read_pip(recipe: Recipe, rest: str, line: str) -> None:
    words = iter(shlex.split(rest))
    for word in words:
        if word in ("-r", "-c", "-e") or word.startswith((".", "/", "git+", "http")):
            recipe.refused.append(f"RUN {line}")
        elif word in _OPTION_WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            recipe.python_packages.append(re.split(r"[\s\[<>=!~;]", word)[0])


@lru_cache(maxsize=1024)
def what_is_missing(text: str) -> str | None:
    """What this Dockerfile asks for that this machine's sandbox does not have; None when all is there."""
    recipe = read_dockerfile(text)
    if recipe.refused:
        return f"the dockerfile's `{recipe.refused[0]}` needs an image built"
    absent = _absent_python(recipe.python_packages) + _absent_packages(recipe.system_packages)
    return f"the dockerfile installs {', '.join(absent)}, and this machine's /usr has not" if absent else None


def _absent_python(names: list[str]) -> list[str]:
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
    return asked.stdout.split() if asked.returncode == 0 else names


def _absent_packages(names: list[str]) -> list[str]:
    """Debian packages by their own register; where there is none, a package counts when a program has its name."""
    query = shutil.which("dpkg-query")
    return [name for name in (n.split("=")[0] for n in names) if not _has_package(query, name)]


def _has_package(query: str | None, name: str) -> bool:
    if shutil.which(name, path="/usr/local/bin:/usr/bin:/bin") is not None:
        return True
    if query is None:
        return False
    asked = subprocess.run([query, "-W", "-f=${Status}", "--", name], capture_output=True, text=True, check=False)
    return asked.stdout.strip() == "install ok installed"
