"""Names of runs and the directories they get.

In: run configs. Out: one directory name per run, and complaints where two runs would share one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from evsys_sdk.config.models import RunConfig
from evsys_sdk.errors import Problem

MAX_LENGTH = 150
REHEARSALS = "dry"
"""The folder of what `--dry` runs."""


def directory_name(run_name: str) -> str:
    """A run's name as a folder: no separators, no leading dot, never too long for a file system."""
    name = re.sub(r"[^A-Za-z0-9_.=@+-]+", "-", run_name).lstrip(".")
    if not name.strip("-"):
        name = "run-" + hashlib.sha256(run_name.encode()).hexdigest()[:8]
    if len(name) > MAX_LENGTH:
        name = f"{name[:MAX_LENGTH]}-{hashlib.sha256(run_name.encode()).hexdigest()[:8]}"
    return name


def name_problems(runs: Sequence[RunConfig], places: Sequence[str]) -> list[Problem]:
    """Runs whose folder is taken: by a run of the same name, or one that only looks different, or by rehearsals."""
    problems = []
    seen: dict[str, int] = {}
    for index, run in enumerate(runs):
        folder = directory_name(run.name).lower()
        if folder == REHEARSALS:
            why = f"the folder {REHEARSALS!r} is that of --dry; call the run something else"
            problems.append(Problem(path=places[index], value=run.name, message=why))
        first = seen.setdefault(folder, index)
        if first == index:
            continue
        other = runs[first].name
        what = "two runs have this name" if other == run.name else f"makes the same folder as run {other!r}"
        problems.append(
            Problem(
                path=places[index], value=run.name, message=f"{what}; names must differ (in a sweep: set name_template)"
            )
        )
    return problems
