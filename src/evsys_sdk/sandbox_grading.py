"""What the tests that grade a model's work see of a sandbox: the work, and nothing else that the model may have left.

In: the variables a task asks for. Out: those that its tests get, and a folder for Python. Python looks for modules in
many places that a model can write to: the working directory, the script's own folder, `~/.local`, compiled files beside
the sources. For tests it finds the standard library and installed packages first, and the model's folders last: tests
can import what the model wrote, and the model cannot put its own `json` in the place of Python's.
"""

from __future__ import annotations

from collections.abc import Mapping

OWN = "/evsys"
"""The one folder inside that is ours; nothing in it can be written, but for a grader's home."""
GRADER_HOME = f"{OWN}/home"
"""Empty whenever tests begin."""
PYTHON_FOLDER = f"{OWN}/python"
_LATER_PATHS = "EVSYS_PYTHONPATH"
_HARMLESS = frozenset({"PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONHASHSEED", "PYTHONWARNINGS"})
# Each names a file that a program then runs, or loads, before it does its own work.
_RUN_FIRST = frozenset({"BASH_ENV", "ENV", "LD_PRELOAD", "LD_AUDIT", "NODE_OPTIONS", "PERL5OPT", "RUBYOPT"})

SITECUSTOMIZE = f'''"""Python runs this at its start: folders that it would have put first come last."""
import os
import sys


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


try:
    for _place in [_own_folder(), os.getcwd(), *os.environ.get("{_LATER_PATHS}", "").split(os.pathsep)]:
        if _place and _place not in sys.path:
            sys.path.append(_place)
except OSError:  # a working directory that is gone
    pass
'''


def grading_variables(asked: Mapping[str, str]) -> dict[str, str]:
    """The environment of tests, from what the task's Dockerfile and `task.toml` ask for."""
    kept = {
        name: value
        for name, value in asked.items()
        if name not in _RUN_FIRST and (not name.startswith("PYTHON") or name in _HARMLESS)
    }
    return {
        "HOME": GRADER_HOME,
        **kept,
        "PYTHONPATH": PYTHON_FOLDER,
        _LATER_PATHS: asked.get("PYTHONPATH", ""),
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        # Where nothing can be written: a program that the tests run must not leave compiled modules for them.
        "PYTHONPYCACHEPREFIX": f"{PYTHON_FOLDER}/none",
    }
