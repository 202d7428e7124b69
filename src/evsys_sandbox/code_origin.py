"""Whose code a program runs: that of the tests, or that of the agent whose work they grade.

In: what the kernel knows of a program that is about to begin (`Execution`). Out: whether it runs code that the agent
may have written. A program of the tests is one whose code lies where nothing can be written while tests run: a program
of the machine, an interpreter with a script in /tests or with code on its command line. Part of `supervisor`, so
without imports of evsys_sdk.

Paths are compared as they are written, links not followed: a link in an agent's folder can be laid anew at any moment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob

READ_ONLY = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/tests", "/evsys")
"""Top-level folders that cannot be written while tests run; every other one may hold what the agent left."""
_NOT_AGENTS = (*READ_ONLY, "/dev", "/proc", "/logs/verifier")
_AGENTS_TOO = ("/dev/shm", "/evsys/home", "/evsys/work")
"""Folders in those above that any program can write to."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The exact forms of a program's options. A word of another form may take the next one as its value or not: which
    word is the script is then not known."""

    flags: str = "(?!)"
    """One option of a bundle such as `-lane`, as a regular expression."""
    valued: str = ""
    """Letters whose value is the rest of the word or, where that is empty, the next word."""
    attached: str = ""
    """Letters whose value is the rest of the word, if any."""
    long: str = "(?!)"
    """Whole words without a value or with one, as a regular expression."""
    long_valued: tuple[str, ...] = ()
    """Whole words whose value is the next word, or stands after `=`."""

    def parse(self, word: str, following: str) -> tuple[str, str, str, int] | None:
        """The flags of a word, the option with a value, that value, and how many of the next words belong to it."""
        name, equals, value = word.partition("=")
        if name in self.long_valued:
            return "", name, value if equals else following, int(not equals)
        if re.fullmatch(self.long, word, re.DOTALL):
            return "", "", "", 0
        valued = f"[{self.valued}{self.attached}]" if self.valued or self.attached else "(?!)"
        found = re.fullmatch(rf"-((?>{self.flags})*+)(?:({valued})(.*))?", word, re.DOTALL)
        if not found or word in ("-", "--"):
            return None
        flags, letter, value = found[1], found[2] or "", found[3] or ""
        if letter and letter in self.valued and not value:
            return flags, letter, following, 1
        return flags, letter, value, 0


_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_SHELL = re.compile(r"(ba|rba|da|z|k|mk|a)?sh")
_PERL = re.compile(r"perl[\d.]*")
_RUBY = re.compile(r"ruby[\d.]*")
_NODE = re.compile(r"node|nodejs")
_SED = re.compile(r"sed")
_AWK = re.compile(r"[gmn]?awk|original-awk")
_BASH = re.compile(r"r?bash")
_OPTIONS = {
    _PYTHON: _Options(
        "[bBdEhiIOPqRsStuvVx?]", "cmWX", long="--(help|version|help-(env|xoptions|all))",
        long_valued=("--check-hash-based-pycs",),
    ),
    # It takes its long options with one dash too: -rcfile is no -c.
    _BASH: _Options(
        "(?!rcfile|restricted|verbose|help|debugger|protected|pretty-print)[abcefhiklmnprstuvxBCDEHPT]", "oO",
        long="--(debugger|help|login|noediting|noprofile|norc|posix|restricted|verbose|version)",
    ),
    # What the others have in common.
    _SHELL: _Options("[acefhiklmnpstuvxC]", "o"),
    _PERL: _Options(r"[acfgnpstTuUvwWX]|0(?:x[\da-fA-F]+|[0-7]*)|l[0-7]*", "eEI", "iCFMmx"),
    _RUBY: _Options(
        r"[acdhlnpsUvwy]|0[0-7]*|K[a-zA-Z]?|W(?::[\w-]+|[0-2]?)", "eErICX", "iFx",
        long="--(debug|jit|rjit|yjit|verbose|version|help|copyright|(en|dis)able-[a-z-]+|(backtrace-limit|parser)=.*)",
        long_valued=("--encoding", "--external-encoding", "--internal-encoding", "--enable", "--disable"),
    ),
    _NODE: _Options(
        long=r"-[chv]|--(check|help|version|no-[\w-]+|(?!eval|print|run|test|watch|env-file)[\w-]+=.*|trace-[a-z-]+"
        r"|(throw|pending)-deprecation|expose[-_]gc|harmony|enable-source-maps|preserve-symlinks(-main)?|use-strict"
        r"|experimental-(vm-modules|modules|strip-types|transform-types|json-modules|wasm-modules|fetch|require-module))",
        long_valued=(
            "-e", "--eval", "-p", "-pe", "--print", "-r", "--require", "--import", "--loader", "--experimental-loader",
            "-C", "--conditions", "--input-type", "--unhandled-rejections",
        ),
    ),
    _SED: _Options(
        "[nrEsuzb]", "efl", "i",
        long="--(quiet|silent|debug|posix|regexp-extended|separate|unbuffered|null-data|sandbox|follow-symlinks|zero-"
        "terminated|help|version|in-place(=.*)?)",
        long_valued=("--expression", "--file", "--line-length"),
    ),
    _AWK: _Options(
        "[bcCgIkMnNOPrsStVh]", "fFvEil", "dLop",
        long="--(posix|traditional|re-interval|sandbox|csv|lint|characters-as-bytes|help|version)",
        long_valued=("--file", "--exec", "--include", "--load", "--field-separator", "--assign"),
    ),
}  # fmt: skip
_FILTER_SCRIPTS = {_SED: ("f", "--file"), _AWK: ("f", "E", "i", "l", "--file", "--exec", "--include", "--load")}
# Bash keeps a long here-document in a file that it has removed.
_HERE_DOCUMENT = re.compile(r".*/sh-thd[.-]?\w+ \(deleted\)")

# Take commands from files of the working directory: the tests' own in /tests, else the agent's.
_FOLDER_RUNNERS = frozenset(
    {
        "ant", "bmake", "bun", "bundle", "cabal", "cargo", "cmake", "ctest", "deno", "dotnet", "dune", "git", "gmake",
        "go", "gradle", "just", "lein", "make", "meson", "mix", "mvn", "ninja", "nox", "npm", "npm-cli.js", "npx",
        "npx-cli.js", "pnpm", "rake", "rebar3", "sbt", "scons", "stack", "tox", "yarn", "yarn.js", "zig",
    }
)  # fmt: skip
# Take files of the agent as data, or run what the rest of their command line says, which is then looked at by itself.
# What is not listed may run code from a file, its input or the working directory (sqlite3, ed, vim, gdb, java, ...),
# and counts as the agent's: it works all the same, and cannot write the reward.
_PLAIN = frozenset(
    {
        "ar", "base32", "base64", "basename", "bzip2", "cat", "chgrp", "chmod", "chown", "chrt", "cksum", "cmp",
        "comm", "cp", "csplit", "curl", "cut", "date", "dd", "df", "diff", "diff3", "dirname", "du", "echo", "env",
        "expand", "false", "file", "find", "flock", "fmt", "fold", "grep", "gunzip", "gzip", "head", "hexdump",
        "iconv", "install", "ionice", "join", "jq", "json", "kill", "killall", "ln", "ls", "md5sum", "mkdir", "mkfifo",
        "mktemp", "mv", "nice", "nl", "nohup", "od", "paste", "patch", "pgrep", "pidof", "pkill", "pr", "printf",
        "prlimit", "readlink", "realpath", "rm", "rmdir", "rsync", "seq", "setpriv", "setsid", "sha1sum", "sha256sum",
        "sha512sum", "shuf", "sleep", "sort", "split", "stat", "stdbuf", "strings", "sync", "tac", "tail", "tar",
        "taskset", "tee", "test", "time", "timeout", "touch", "tr", "true", "truncate", "tsort", "unexpand", "uniq",
        "unzip", "wc", "wget", "which", "xargs", "xxd", "xz", "yes", "zip", "zstd",
    }
)  # fmt: skip
_COPIERS = frozenset(
    {
        "7z", "7za", "7zr", "ar", "bsdtar", "busybox", "cp", "cpio", "dpkg-deb", "git", "hg", "install", "jar", "mv",
        "patch", "pax", "rsync", "svn", "tar", "tarfile", "unsquashfs", "unzip", "zipfile",
    }
)  # fmt: skip
"""Make files and links whose names and targets are written in other files, which may be the agent's."""


@dataclass(frozen=True, slots=True)
class Execution:
    """A program that is about to begin."""

    executable: str
    """Where the machine code lies; for a script, that of its interpreter."""
    file: str
    """What was executed, as it was named: a program, a script, a link to either."""
    words: Sequence[str]
    """The command line; for a script with the interpreter before it."""
    folder: str
    """The working directory."""
    open_files: Mapping[int, str] = field(default_factory=dict)
    """By their numbers: a path, or `pipe:[1]`."""
    root: str = "/"
    """Where the program's root directory is to be found."""
    not_documents: frozenset[int] = frozenset()
    """Numbers of open files that are no here-document, whatever their names look like."""


def is_agents(path: str, folder: str = "/") -> bool:
    """Whether an agent can write to a path."""
    whole = "/" + os.path.normpath(os.path.join(folder, path)).lstrip("/") + "/"
    is_ours = whole.startswith(tuple(f"{place}/" for place in _NOT_AGENTS))
    return not is_ours or whole.startswith(tuple(f"{place}/" for place in _AGENTS_TOO))


def runs_agents_code(run: Execution) -> bool:
    """Whether the program runs code that an agent may have written, as far as its command line says."""
    if is_agents(run.executable) or is_agents(run.file, run.folder):
        return True
    if _has_option_of_agent(run):
        return True
    # Both names: one program may be there under many (vim.basic, coreutils), or run itself again as /proc/self/exe.
    names = {os.path.basename(run.executable), os.path.basename(run.file)}
    kind, code, words = _code(os.path.basename(run.executable), list(run.words[1:]))
    if kind == "text":
        return False
    if kind == "unknown":
        return _may_run_agents(words, run)
    if kind == "input" or _HANDLE.fullmatch(code):
        return _is_agents_script(code if kind == "script" else "-", run)
    if kind == "script":
        if is_agents(code, run.folder):
            return True
        if os.path.normpath(os.path.join(run.folder, code)).startswith("/tests/"):
            return False
        names = {os.path.basename(code)}
    elif kind == "module":
        module = code.partition(".")[0]
        if is_agents(run.folder) and not _is_installed(module, run):
            return True
        if any(os.path.lexists(f"{run.root}/tests/{module}{ending}") for ending in ("", ".py")):
            return False
        names = {module}
    elif os.path.normpath(run.executable).startswith("/tests/"):
        return False
    if names & _TEST_RUNNERS:
        return _collects_agents_tests(words, run)
    if names & _FOLDER_RUNNERS:
        return (
            is_agents(_folder_of(words), run.folder)
            or _is_agents_script("-", run)
            or any(_names_agents_file(word, run) for word in words)
        )
    for each in (_SED, _AWK):
        if any(map(each.fullmatch, names)):
            return _filters_by_agents_script(each, words, run)
    return not names & _PLAIN


def takes_names_from_files(run: Execution) -> bool:
    """Whether the program makes files and links whose names and targets are written in other files."""
    name = os.path.basename(run.executable)
    kind, code, _ = _code(name, list(run.words[1:]))
    return bool(_COPIERS & {name, os.path.basename(run.file), code if kind == "module" else ""})


def names_folder(run: Execution, folder: str) -> bool:
    """Whether a command line says that the program works in a folder: by its working directory or by a path, which may
    stand in an option (`--file=PATH`, `-CPATH`)."""
    places = [".", *run.words[1:], *(re.sub("^-[^/=]*=?", "", word) for word in run.words[1:] if word.startswith("-"))]
    whole = (os.path.normpath(os.path.join(run.folder, place)) for place in places)
    return any(f"{place}/".startswith(f"{folder}/") for place in whole)


def _has_option_of_agent(run: Execution) -> bool:
    """Whether an option is the name of a file in a folder of the agent: `tar cf x.tar *` has it from there. So can
    perl have a name that it runs as a command (`perl -ne 1 *` and a file `... |`).

    A file of the name `-c` must not make the agent's what the tests call with `-c`. So the option has its value in the
    same word, or the next word is the name of a file as well.
    """
    if _PERL.fullmatch(os.path.basename(run.executable)) and any(
        _COMMAND_OF_PERL.fullmatch(word)
        and is_agents(word, run.folder)
        and os.path.lexists(f"{run.root}{os.path.join(run.folder, word)}")
        for word in run.words[1:]
    ):
        return True
    if not is_agents(run.folder):
        return False

    def is_file(word: str) -> bool:
        return "/" not in word and "\0" not in word and os.path.lexists(f"{run.root}{run.folder}/{word}")

    return any(
        word.startswith("-") and is_file(word) and (not re.fullmatch("[-\\w]+", word) or is_file(following or "/"))
        for word, following in zip(run.words[1:], [*run.words[2:], ""], strict=False)
    )


_COMMAND_OF_PERL = re.compile(r"\s*\|.*|.*\|\s*", re.DOTALL)
"""Names of files that its `<>` opens as commands."""
_TEST_RUNNERS = frozenset({"pytest", "py.test", "unittest"})
_SETTINGS = re.compile(r"(?:-c|--config-file|--rootdir|--confcutdir|-s|--start-directory|-t|--top-level-directory)=?")


def _collects_agents_tests(words: list[str], run: Execution) -> bool:
    """Whether pytest or unittest takes tests, or settings, from a folder of the agent: from where its options say, else
    from the working directory.

    One whose options write a report into /logs/verifier must be able to (docs/rollouts.md, "What remains").
    """
    if names_folder(run, "/logs/verifier"):
        return False
    named = [_SETTINGS.sub("", word) if _SETTINGS.match(word) else word for word in words]
    paths = [word.partition("::")[0] for word in named if word and word[0] != "-"]
    places = [os.path.normpath(os.path.join(run.folder, path)) for path in paths]
    existing = [place for place in places if "\0" not in place and os.path.lexists(f"{run.root}{place}")]
    modules = [word.partition(".")[0] for word in words if re.fullmatch(r"[\w.]+", word)]
    is_of_tests = any(not is_agents(place) for place in existing) or any(
        os.path.lexists(f"{run.root}/tests/{module}{ending}") for module in modules for ending in ("", ".py")
    )
    return any(map(is_agents, existing)) or (is_agents(run.folder) and not is_of_tests)


def _code(name: str, words: list[str]) -> tuple[str, str, list[str]]:
    """What an interpreter runs: `text` of its command line, its `input`, a `module` or a `script` with its name and the
    words after it; `unknown`, with all words from there, at an option that is not known in its exact form; `program`
    for what is no interpreter."""
    kind = next((each for each in (_PYTHON, _BASH, _SHELL, _PERL, _RUBY, _NODE) if each.fullmatch(name)), None)
    if kind is None:
        return "program", "", words
    is_shell = kind in (_BASH, _SHELL)
    while words:
        word, left = words[0], words[1:]
        if word == "--" or (word == "-" and is_shell):
            return ("script", left[0], left[1:]) if left else ("input", "", [])
        if word == "-":
            return "input", "", left
        if not word.startswith("-") and not (word.startswith("+") and is_shell):
            return "script", word, left
        following = "".join(left[:1])
        parsed = _OPTIONS[kind].parse("-" + word[1:] if is_shell else word, following)
        if parsed is None:
            return "unknown", "", words
        flags, option, value, skipped = parsed
        if is_shell:
            # `zsh -opipefail` has the value in the word, `bash -oe pipefail` the next option; +c and +s differ.
            if (option and not skipped) or (word[0] == "+" and re.search("[cs]", flags)):
                return "unknown", "", words
            if "c" in flags:
                return "text", "", []
            if "s" in flags:
                return "input", "", []
        elif kind is _PYTHON and option == "m":
            return "module", value, left[skipped:]
        elif kind is _NODE and option in ("-p", "--print") and (following.startswith("-") or not skipped):
            return "unknown", "", words  # `-p -r x y.js` runs y.js
        elif option in _TEXT[kind]:
            return "text", "", []
        elif kind in (_PERL, _RUBY) and option in _GOES_ELSEWHERE[kind] and value:
            return "script", "/", []  # from wherever that is
        words = left[skipped:]
    return "input", "", []


_TEXT = {_PYTHON: ("c",), _PERL: ("e", "E"), _RUBY: ("e",), _NODE: ("-e", "--eval", "-p", "-pe", "--print")}
_GOES_ELSEWHERE = {_PERL: ("x",), _RUBY: ("x", "C", "X")}
_HANDLE = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/(\d+)")


def _is_agents_script(path: str, run: Execution) -> bool:
    """Whether a script is the agent's; `-` is the input."""
    handle = _HANDLE.fullmatch("/dev/stdin" if path == "-" else path)
    if handle is None:
        return is_agents(path, run.folder)
    number = int(handle[1] or 0)
    file = run.open_files.get(number, "")
    if _HERE_DOCUMENT.fullmatch(file) and number not in run.not_documents:
        return False
    return file.startswith("/") and is_agents(file)


def _filters_by_agents_script(kind: re.Pattern[str], words: list[str], run: Execution) -> bool:
    """Whether sed or awk takes its commands, or some of them, from a file of the agent."""
    while words:
        word, left = words[0], words[1:]
        if word == "--" or (kind is _AWK and not (word.startswith("-") and word != "-")):
            return False
        if word.startswith("-") and word != "-":  # sed takes options after its files too
            parsed = _OPTIONS[kind].parse(word, "".join(left[:1]))
            if parsed is None:
                return _may_run_agents(words, run)
            _, option, value, skipped = parsed
            if option in _FILTER_SCRIPTS[kind] and _is_agents_script(value, run):
                return True
            left = left[skipped:]
        words = left
    return False


def _may_run_agents(words: list[str], run: Execution) -> bool:
    """Whether one of these words, of which any may be the script, names a file of the agent; without a word that may
    be it, whether the input or the working directory is the agent's."""
    named = []
    for word in words:
        if not word.startswith("-"):
            named.append(word)
        elif "/" in word or "=" in word:
            named.append(re.sub("^[^/=]*=?", "", word))
        elif not word.startswith("--"):
            named.append(word[2:])
    if all(word.startswith("-") for word in words):
        named += ["-", "."]
    return any(_is_agents_script(each, run) for each in named if each)


def _is_installed(module: str, run: Execution) -> bool:
    """Whether Python has a module of this name from the machine or the tests; it looks for it in the agent's folder
    last (`grading`)."""
    own = os.path.dirname(os.path.dirname(run.executable))
    folders = [
        f"{run.root}{place}"
        for prefix in dict.fromkeys([own, "/usr", "/usr/local"])
        for place in (f"{prefix}/lib*/python3*", f"{prefix}/lib*/python3*/*-packages")
    ]
    return re.fullmatch(r"\w+", module) is not None and any(
        glob(f"{folder}/{module}{ending}")
        for folder in [*folders, f"{run.root}/tests"]
        for ending in ("", ".py", ".*.so")
    )


def _folder_of(words: list[str]) -> str:
    """Where make, git and their kin go before they begin, relative to the working directory."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if found := re.fullmatch(r"(?:-C|--directory=)(.*)", word):
            return found[1] or following or "."
    return "."


def _names_agents_file(word: str, run: Execution) -> bool:
    """Whether an argument names a file of the agent, as in `/app/x`, `--file=x` or `-I/app`."""
    value = word.rpartition("=")[2]
    if value.startswith("-"):
        value = value[value.index("/") :] if "/" in value else ""
    if not value or not is_agents(value, run.folder):
        return False
    place = os.path.normpath(os.path.join(run.folder, value))
    return "\0" not in value and (value.startswith("/") or os.path.lexists(f"{run.root}{place}"))
