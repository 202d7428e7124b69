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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath
from string import Template
from typing import Literal

from evsys_sandbox.errors import DockerfileError, SandboxError

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
# `ln -s PROGRAM /usr/bin/NAME` and Debian's way to say the same: /usr cannot be written, but a name can be given.
_END = r"(?:\s*\|\|\s*(?:true|:))?(?:\s+#.*)?$"
_LINK = re.compile(r"ln\s+(?:-\S+\s+)+(?P<program>\$\((?:which|command -v)\s+\S+\)|\S+)\s+(?P<name>[^\s#|]+)" + _END)
_ALTERNATIVE = re.compile(
    r"update-alternatives\s+(?:--\S+\s+)*?--install\s+(?P<name>\S+)\s+\S+\s+(?P<program>\S+)\s+\d+" + _END
)
# A command may follow one of these on its line; something must then be left for the shell to do there.
_KEYWORD = re.compile(r"(?P<word>(?:then|do|else|\{|\()\s+)?(?P<command>.*)", re.DOTALL)
_PROGRAM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# Of whole words only, as Docker does it: `echo "1<<2"` begins no text.
_HEREDOC = re.compile(r"\d*<<(?P<dash>-?)(?P<quote>[\"']?)(?P<word>[A-Za-z_]\w*)(?P=quote)")
_SHELL_WORD = re.compile(r"""(?:[^\s"']|"(?:[^"\\]|\\.)*"|'[^']*')+""")
# Housekeeping of package managers, which leaves nothing that a task could need.
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
    texts: tuple[str, ...] = ()
    """copy: the content of each source that stands in the Dockerfile itself (`<<EOF`), whose name is in `words`."""


@dataclass(slots=True, kw_only=True)
class DockerfileRecipe:
    """A whole Dockerfile, for those who put no files beside it."""

    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    python_packages: list[str] = field(default_factory=list)
    system_packages: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of programs."""
    steps: list[str] = field(default_factory=list)
    """RUN commands that are neither; they run in the sandbox, in the working directory."""
    refused: list[str] = field(default_factory=list)
    """Lines that cannot be honoured without building the image."""


def fetches(script: str) -> str | None:
    """The first line of a shell script that gets something from the network; without one it would fail, and look as if
    the model had."""
    found = _FETCHES.search(script)
    return _one_line(found.group()) if found else None


@lru_cache(maxsize=1024)
def syntax_error(script: str) -> str | None:
    """What the shell says of a script that it cannot read, with the line; None where it can, or where the script is for
    another program. Nothing of the script is run."""
    first = script.partition("\n")[0]
    if shutil.which("bash") is None or (first.startswith("#!") and not re.search(r"\b(ba|da)?sh\b", first)):
        return None
    read = subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True, check=False, env={})
    said = read.stderr.decode(errors="replace").strip()
    return re.sub(r"^.*?(?=line \d+:)", "", said.splitlines()[0]) if read.returncode and said else None


def _one_line(text: str, limit: int = 60) -> str:
    """`text` on one line, cut in the middle when it is longer than `limit`."""
    text = " ".join(text.split())
    half = limit // 2 - 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def steps_of(text: str) -> list[Step]:
    """The steps of a Dockerfile; a DockerfileError names the first one that a sandbox cannot do."""
    steps = _read(text)
    for step in steps:
        if step.kind == "refused":
            raise DockerfileError(f"{step.words[0]}; {INSTEAD}")
    return list(steps)


@lru_cache(maxsize=1024)
def recipe_of(text: str) -> DockerfileRecipe:
    """The recipe in a Dockerfile; what needs files beside it, or an image, is in `refused`."""
    recipe = DockerfileRecipe()
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
            case "alias":
                recipe.aliases[step.words[1]] = step.words[0]
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
    steps = list(steps)
    python = tuple(word for step in steps if step.kind == "python" for word in step.words)
    system = tuple(word for step in steps if step.kind == "system" for word in step.words)
    linked = [step.words[0] for step in steps if step.kind == "alias"]
    absent = [
        *_absent_python(python),
        *_absent_packages(system),
        *(program for program in linked if shutil.which(program) is None),
    ]
    return f"the dockerfile installs {', '.join(absent)}, and this machine's /usr has not" if absent else None


@lru_cache(maxsize=1024)
def _read(text: str) -> tuple[Step, ...]:
    """Every step, with those that cannot be done marked as refused."""
    steps: list[Step] = []
    # For `ENV PATH=/opt/bin:$PATH`.
    variables: dict[str, str] = {"PATH": ":".join(_PROGRAM_FOLDERS)}
    stages = 0
    for line, documents in _instructions(text):
        name, _, rest = line.partition(" ")
        name, rest = name.upper(), rest.strip()
        if name == "FROM":
            stages += 1
            if stages > 1:
                steps.append(_refuse_step("the sandbox does not do Dockerfiles of several stages", line))
        elif name not in PASSED_OVER:
            try:
                steps += _steps(name, rest, line, variables, documents)
            except SandboxError:
                raise
            except Exception as exc:
                place = f"reading the line of the Dockerfile `{_one_line(line)}`"
                raise DockerfileError(f"{place} failed: {type(exc).__name__}: {exc}") from exc
    return tuple(steps)


def _steps(name: str, rest: str, line: str, variables: dict[str, str], documents: Sequence[Heredoc]) -> list[Step]:
    if name == "RUN" and documents:
        return _run_documents(_command(rest), line, documents)
    if name == "RUN" and not rest.startswith("<<"):
        return _run(_command(rest), line)
    if name in ("ENV", "ARG"):
        words = _words(rest)
        if words and "=" not in words[0]:  # the old form, ENV NAME value
            words = [f"{words[0]}={' '.join(words[1:])}"] if len(words) > 1 else []
        split = (word.partition("=") for word in words)
        pairs = [(key, Template(value).safe_substitute(variables)) for key, _, value in split]
        variables.update(pairs)
        return [Step(kind="env", words=pair, line=line) for pair in pairs]
    known = Template(rest).safe_substitute(variables)
    if name == "WORKDIR" and "$" not in known:
        return [Step(kind="workdir", words=(known.strip("\"'"),), line=line)]
    if name in ("COPY", "ADD") and documents:
        words = [word for word in shlex.split(known) if not re.match(r"--(chown|chmod|link)", word)]
        if "$" in words[-1] or not all(word.startswith("<<") for word in words[:-1]):
            return [_refuse_step(f"the sandbox cannot do this step of the Dockerfile: {_one_line(line)}", line)]
        names = (*(document.word for document in documents), words[-1])
        texts = tuple(document.text(variables) for document in documents)
        return [Step(kind="copy", words=names, line=line, texts=texts)]
    if name in ("COPY", "ADD") and "$" not in known:
        words = [word for word in _words(known) if not re.match(r"--(chown|chmod|link)", word)]
        if len(words) > 1 and not any(re.match(r"--|<<|https?:|git@", word) for word in words):
            return [Step(kind="copy", words=tuple(words), line=line)]
    return [_refuse_step(f"the sandbox cannot do this step of the Dockerfile: {_one_line(line)}", line)]


def _refuse_step(why: str, line: str) -> Step:
    return Step(kind="refused", words=(why,), line=line)


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A text that stands in the Dockerfile, between `<<WORD` and a line `WORD`."""

    word: str
    lines: tuple[str, ...]
    is_literal: bool
    """`<<"WORD"`: variables in it are left alone."""

    def text(self, variables: dict[str, str]) -> str:
        whole = "".join(f"{line}\n" for line in self.lines)
        return whole if self.is_literal else Template(whole).safe_substitute(variables)


def _instructions(text: str) -> Iterator[tuple[str, list[Heredoc]]]:
    """Whole instructions, without comments and continuations, each with the texts that follow it."""
    lines = iter(text.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole = line.rstrip()
        while whole.endswith("\\"):
            further = next((more for more in lines if more.strip() and not more.lstrip().startswith("#")), "")
            whole = f"{whole[:-1]} {further.strip()}"
        whole = whole.strip()
        words = _SHELL_WORD.findall(whole) if re.match(r"(RUN|COPY|ADD)\b", whole, re.IGNORECASE) else []
        documents: list[Heredoc] = []
        for begin in filter(None, map(_HEREDOC.fullmatch, words)):
            kept: list[str] = []
            for more in lines:
                own = more.lstrip("\t") if begin["dash"] else more
                if own == begin["word"]:
                    break
                kept.append(own)
            else:
                raise DockerfileError(f"`{_one_line(whole)}` of the Dockerfile has no end: add a line {begin['word']}")
            documents.append(Heredoc(begin["word"], tuple(kept), bool(begin["quote"])))
        yield whole, documents


def _run_documents(command: str, line: str, documents: Sequence[Heredoc]) -> list[Step]:
    """`RUN <<EOF`: a script; `RUN python3 - <<EOF`: the input of a command. The shell puts its own variables in."""
    if not _HEREDOC.fullmatch(command):
        texts = "".join(f"{text}\n" for document in documents for text in (*document.lines, document.word))
        # `<<-` strips tabs, which are stripped already; left as it is, it does no harm.
        return [Step(kind="run", words=(f"{command}\n{texts}",), line=line)]
    [document] = documents
    script = "\n".join(document.lines)
    if script.startswith("#!"):
        text = f"cat > /tmp/evsys-heredoc <<'{document.word}'\n{script}\n{document.word}\n"
        return [Step(kind="run", words=(f"{text}chmod +x /tmp/evsys-heredoc && /tmp/evsys-heredoc",), line=line)]
    steps: list[Step] = []
    rest: list[str] = []
    for part in re.sub(r"\\\n\s*", " ", script).splitlines():
        wanted = _run(part.strip(), line)
        if (all(step.kind == "run" for step in wanted) and not _MANAGER.search(part)) or part.lstrip().startswith("#"):
            rest.append(part)
            continue
        steps += [step for step in wanted if step.kind != "run"]
        # A line that only installs leaves a colon: it may be all there is between `then` and `fi`.
        rest += [step.words[0] for step in wanted if step.kind == "run"] or [":"]
    if not steps and not _MANAGER.search(script):
        return [Step(kind="run", words=(script,), line=line)]  # as it was written, continued lines and all
    left = "\n".join(rest)
    is_idle = all(re.fullmatch(r"\s*(:|#.*|set\s+-\S+.*)?", part) for part in rest)
    return steps if is_idle else [*steps, Step(kind="run", words=(left,), line=line)]


def _words(rest: str) -> list[str]:
    if rest.startswith("["):
        return [str(word) for word in json.loads(rest)]
    return shlex.split(rest)


def _command(rest: str) -> str:
    rest = re.sub(r"^(--\S+\s+)+", "", rest)  # --mount=... and the like
    return shlex.join(json.loads(rest)) if rest.startswith("[") else rest


def _run(command: str, line: str) -> list[Step]:
    """A command; where it speaks to a package manager, the packages, and what else it does."""
    # The group keeps the separators, at the odd places: what is left of the command is joined by its own.
    parts = re.split(r"\s*(&&|;)\s*", command)
    # Only here the parts are looked at: any other command stays whole, quotes and all.
    bodies = [_KEYWORD.fullmatch(part) for part in parts[::2]]
    if not _MANAGER.search(command) and not any(body and _alias(body["command"], line) for body in bodies):
        return [Step(kind="run", words=(command,), line=line)]
    steps: list[Step] = []
    left = ""
    for joint, part, body in zip(["", *parts[1::2]], parts[::2], bodies, strict=True):
        keyword, own = (body["word"] or "", body["command"]) if body else ("", part)
        alias = _alias(own, line)
        wanted = alias or _packages(part, line)
        if wanted is not None:
            steps.append(wanted)
        rest = f"{keyword}:" if alias and keyword else "" if wanted or _IDLE.match(part) else part
        if rest:
            left += f" {joint} {rest}" if left else rest
    return [*steps, Step(kind="run", words=(left,), line=line)] if left else steps


def _alias(part: str, line: str) -> Step | None:
    """A further name for a program, among the system's own; None when the command does anything else."""
    found = _LINK.fullmatch(part) or _ALTERNATIVE.fullmatch(part)
    if found is None or "$" in found["name"] or re.search(r"\$(?!\()", found["program"]):
        return None
    program, name = found["program"].strip("\"'"), PurePosixPath(found["name"].strip("\"'"))
    program = re.sub(r"^\$\((?:which|command -v)\s+(\S+)\)$", r"\1", program)
    folder = str(name) if str(name) in _PROGRAM_FOLDERS else str(name.parent)
    own = PurePosixPath(program).name if str(name) in _PROGRAM_FOLDERS else name.name
    if folder not in _PROGRAM_FOLDERS:
        return None
    where = shutil.which(program, path=":".join(_PROGRAM_FOLDERS)) or program
    return Step(kind="alias", words=(where, own), line=line)


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
            # The bare name: a version, extras and markers are not compared with what is installed.
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
    absent: list[str] = []
    for name in names:
        if shutil.which(name, path="/usr/local/bin:/usr/bin:/bin") is not None:
            continue
        words = [query or "", "-W", "-f=${Status}", "--", name]
        if query is None or subprocess.run(words, capture_output=True, check=False).stdout != b"install ok installed":
            absent.append(name)
    return absent
