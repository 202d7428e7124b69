"""What the tests that grade a model's work see of a sandbox: the work, and nothing else that the model may have left.

In: the variables a task asks for. Out: those that its tests get, and a folder for Python. Python looks for modules in
many places that a model can write to: the working directory, the script's own folder, `~/.local`, compiled files beside
the sources. For tests it finds the standard library and installed packages first, and a finder of ours looks into the
model's folders last, only for modules that the tests or the model's own modules ask for. Tests can import what the
model wrote; the standard library and installed packages, which try to import many a module that is not there (`msvcrt`,
`org.python.core`, `numexpr`), cannot. Search paths of other programs (`PATH`, `LD_LIBRARY_PATH`, `PERL5LIB`) name the
machine's own folders first in the same way.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import PurePosixPath

from evsys_sandbox.code_origin import READ_ONLY
from evsys_sandbox.landlock import TESTS_HOME
from evsys_sandbox.launch import PATH, Tracing

OWN = "/evsys"
"""The one folder inside that is ours; nothing in it can be written, but for a grader's home."""
GRADER_HOME = TESTS_HOME
"""Empty whenever tests begin."""
PYTHON_FOLDER = f"{OWN}/python"
_READ_ONLY_PREFIXES = tuple(f"{place}/" for place in READ_ONLY)
_LATER_PATHS = "EVSYS_PYTHONPATH"
_HARMLESS = frozenset({"PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONHASHSEED", "PYTHONWARNINGS"})
# Each names a file that a program then runs, or loads, before it does its own work.
_RUN_FIRST = frozenset({"BASH_ENV", "ENV", "LD_PRELOAD", "LD_AUDIT", "NODE_OPTIONS", "PERL5OPT", "RUBYOPT"})
# These may do so too. They have harmless uses, so they go only where they name a file that the model can write to.
_OPTIONS = frozenset(
    {
        "EDITOR", "GIT_ASKPASS", "GIT_EDITOR", "GIT_EXTERNAL_DIFF", "GIT_PAGER", "GIT_SSH", "GIT_SSH_COMMAND",
        "GOFLAGS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "LESSOPEN", "LUA_INIT", "MAKEFLAGS", "PAGER", "PERL5DB",
        "PROMPT_COMMAND", "PS4", "PYTEST_ADDOPTS", "RUSTC", "RUSTC_WRAPPER", "SHELL", "TAR_OPTIONS", "VISUAL",
        "_JAVA_OPTIONS",
    }
)  # fmt: skip
_FILES = frozenset(
    {
        "AWKLIBPATH", "AWKPATH", "COMPILER_PATH", "COVERAGE_PROCESS_START", "CURL_HOME", "GCC_EXEC_PREFIX",
        "GCONV_PATH", "GIT_CONFIG", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_EXEC_PATH", "GIT_TEMPLATE_DIR",
        "LOCPATH", "MAGIC", "MAKEFILES", "OPENSSL_CONF", "OPENSSL_ENGINES", "OPENSSL_MODULES", "R_ENVIRON",
        "R_ENVIRON_USER", "R_PROFILE", "R_PROFILE_USER", "TCLLIBPATH", "WGETRC",
    }
)  # fmt: skip

_LASTING = re.compile(
    r"localhost|127\.0\.0\.1|0\.0\.0\.0|::1\b|https?://|\bcurl\b|\bwget\b|\bsocket\b|\.sock\b|\bports?\b|server|daemon"
    r"|\bnohup\b|\bsetsid\b|\bdisown\b|\btmux\b|\bscreen\b|\bservice\b|systemctl|\bpgrep\b|\bpkill\b|\bpidof\b|\.pid\b"
    r"|psutil|ssh-agent|background",
    re.IGNORECASE,
)
"""Words of tests that rely on a process which outlives the program that started it."""

SITECUSTOMIZE = f'''"""Python runs this at its start: modules of the model are found last, and not by libraries."""
import importlib.machinery
import opcode
import os
import sys

# Library code that imports modules which its user names. No other library may import a module of the model's.
_LOADERS = frozenset({{
    "celery", "cloudpickle", "concurrent", "coverage", "django", "doctest", "flask", "gunicorn", "hypercorn",
    "importlib", "joblib", "multiprocessing", "pickle", "pkgutil", "pydoc", "pytest", "_pytest", "runpy", "unittest",
    "uvicorn",
}})
# Run the tests, or are imported by what does: where the machine lacks one, the agent's is not taken for it.
_RUNNERS = frozenset({{
    "_pytest", "behave", "coverage", "hypothesis", "iniconfig", "nose", "nose2", "pluggy", "pytest", "xdist",
}})
_IMPORT_NAME = opcode.opmap["IMPORT_NAME"]
# With what this interpreter has by itself, wherever it lies: a task may bring another Python.
_NOT_MODELS = (*{_READ_ONLY_PREFIXES!r}, *(os.path.abspath(place) + "/" for place in sys.path if place))


def _own_folder():
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word in ("-W", "-X"):
            next(words, None)
        elif word in ("-", "-c", "-m") or word.startswith(("-c", "-m")):
            return os.getcwd()
        elif not word.startswith("-"):
            return os.path.dirname(os.path.realpath(word))
    return os.getcwd()


def _is_models(place):
    """Whether a folder may hold what the model left."""
    return not (os.path.abspath(place) + "/").startswith(_NOT_MODELS)


def _may_ask(frame):
    """Whether the code that is importing may have a module of the model's."""
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    is_statement = True
    while frame is not None and frame.f_globals.get("__name__") == "importlib":  # import_module
        is_statement, frame = False, frame.f_back
    if frame is None:
        return True
    file = frame.f_code.co_filename
    if not file.startswith("<frozen ") and (file.startswith("<") or _is_models(file) or file.startswith("/tests/")):
        return True
    if is_statement and frame.f_code.co_code[frame.f_lasti] == _IMPORT_NAME:
        return False  # `import msvcrt`, in a try: the library does without
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LOADERS


class _Finder(importlib.machinery.PathFinder):
    """Python's own, but for folders that the model can write to, on `sys.path` (tests, and pytest, put them there) or
    added to it here: what is in them takes no standard module's name, and libraries do not get it."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None:
            path = [*sys.path, *_folders]
            # Python has put the folder of the program first: where the tests cleared its environment (PYTHONSAFEPATH).
            if not _IS_SAFE and path[0] in ("", _OWN) and _is_models(path[0]):
                path.append(path.pop(0))
            if name in sys.stdlib_module_names or name in _RUNNERS or not _may_ask(sys._getframe(1)):
                path = [place for place in path if not _is_models(place)]
        return super().find_spec(name, path, target)

    @staticmethod
    def find_distributions(*args, **kwargs):
        """Without those of the model, unless one is asked for by its name: plugins are found through them."""
        from importlib.metadata import DistributionFinder, MetadataPathFinder

        context = args[0] if args else kwargs.get("context", DistributionFinder.Context())
        if context.name is None and "path" not in vars(context):
            context = DistributionFinder.Context(path=[place for place in sys.path if not _is_models(place)])
        return MetadataPathFinder.find_distributions(context)


_folders = []
_IS_SAFE, _OWN = getattr(sys.flags, "safe_path", False), ""
try:
    _OWN = _own_folder()
    for _place in [_OWN, os.getcwd(), *os.environ.get("{_LATER_PATHS}", "").split(os.pathsep)]:
        if sys.flags.isolated:  # tests that use `python -I` want nothing of it
            break
        if _place and _place not in sys.path and _place not in _folders:
            (_folders if _is_models(_place) else sys.path).append(_place)
except OSError:  # a working directory that is gone
    pass
sys.meta_path[:] = [_Finder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
'''


def grading_variables(asked: Mapping[str, str]) -> dict[str, str]:
    """The environment of tests, from what the task's Dockerfile and `task.toml` ask for."""
    kept: dict[str, str] = {}
    for name, value in asked.items():
        named: list[str] = []
        if name in _FILES:
            named = re.split(r"[:\s]+", value)
        elif name in _OPTIONS:  # as in `-I/app/include` or `--require ./hook.js`
            words = (word for word in re.split(r"[\s=:,;'\"]+", value) if "/" in word)
            named = [word[word.index("/") :] if word.startswith("-") else word for word in words]
        is_safe = name not in _RUN_FIRST and not any(map(is_writable_by_model, named))
        # Most PYTHON* variables (PYTHONHOME, PYTHONSTARTUP, PYTHONINSPECT, ...) decide what Python loads or runs.
        if is_safe and (not name.startswith("PYTHON") or name in _HARMLESS):
            kept[name] = value
    for name, machines_own in _SEARCHED_FIRST.items():
        # Empty entries, which mean the working directory, go.
        entries = [entry for entry in kept.get(name, "").split(":") if entry]
        later = [entry for entry in entries if is_writable_by_model(entry)]
        first = [entry for entry in entries if entry not in later]
        if kept.get(name):
            kept[name] = ":".join(dict.fromkeys([*first, *(machines_own() if later else ()), *later]))
    return {
        "HOME": GRADER_HOME,
        **kept,
        # Where `sitecustomize` lies. PYTHONSAFEPATH leaves out the script's folder and the working directory, not this.
        "PYTHONPATH": PYTHON_FOLDER,
        _LATER_PATHS: asked.get("PYTHONPATH", ""),
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        # Where nothing can be written: a program that the tests run must not leave compiled modules for them.
        "PYTHONPYCACHEPREFIX": f"{PYTHON_FOLDER}/none",
    }


def tracing_for(tests_text: str, *, guarded: str | None = None) -> Tracing:
    """How the programs that tests start are kept apart. What a program leaves running is killed when it ends, unless
    the tests speak of servers, daemons or terminals, which must outlive the script that started them. In the `guarded`
    folder only programs of the tests write."""
    return Tracing(kills_strays=_LASTING.search(tests_text) is None, guarded=guarded)


def is_writable_by_model(path: str) -> bool:
    """Whether a folder of a search path may hold what the model left; a relative one is below the working directory."""
    parts = PurePosixPath(os.path.normpath(path)).parts
    return len(parts) < 2 or parts[0] not in ("/", "//") or f"/{parts[1]}" not in READ_ONLY


@cache
def _libraries() -> tuple[str, ...]:
    """Where the dynamic linker finds libraries by itself: it would look into LD_LIBRARY_PATH before."""
    listed = _ask("/sbin/ldconfig", "-p")
    found = [os.path.dirname(line.rpartition(" => ")[2]) for line in listed.splitlines() if " => /" in line]
    return tuple(dict.fromkeys([*found, "/lib64", "/usr/lib64", "/lib", "/usr/lib"]))


@cache
def _perl_modules() -> tuple[str, ...]:
    return tuple(_ask("perl", "-e", 'print join "\\n", @INC').splitlines())


@cache
def _ruby_modules() -> tuple[str, ...]:
    return tuple(_ask("ruby", "-e", "puts $LOAD_PATH").splitlines())


def _ask(program: str, *words: str) -> str:
    """What a program of this machine says; nothing where it is missing."""
    found = shutil.which(program, path=PATH)
    if found is None:
        return ""
    asked = subprocess.run([found, *words], capture_output=True, text=True, check=False, env={"PATH": PATH}, cwd="/")
    return asked.stdout


_SEARCHED_FIRST: Mapping[str, Callable[[], tuple[str, ...]]] = {
    "PATH": lambda: tuple(PATH.split(":")),
    "LD_LIBRARY_PATH": _libraries,
    "PERL5LIB": _perl_modules,
    "PERLLIB": _perl_modules,
    "RUBYLIB": _ruby_modules,
}
"""Lists of folders that programs search before the machine's own, and what those are."""
