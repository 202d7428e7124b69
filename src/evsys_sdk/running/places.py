"""Where the runs of an experiment lie.

In: a run's id. Out: its directory, claimed for it: named like the run; where another run has that one, such as one of
another experiment in the same folder, `<run>@<experiment>`. Nobody's record gives way to another's.
"""

from __future__ import annotations

import os
from pathlib import Path

from evsys_sdk.atomic import read_object, write_text
from evsys_sdk.config.names import directory_name
from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.logs import get_logger
from evsys_sdk.record.run_dir import OWNER_FILE


class Places:
    """The run directories of one experiment."""

    def __init__(self, output_dir: Path, experiment: str):
        self._folder, self._experiment = output_dir, experiment
        self._said = False

    def of(self, run: str) -> Path:
        """The directory of a run: the one it has, else the first that is nobody's."""
        run_id, plain, number = f"{self._experiment}/{run}", directory_name(run), 1
        other = f"{plain}@{directory_name(self._experiment)}"
        name, holder = plain, _claimed(self._folder / plain, run_id)
        while holder != run_id:
            self._say(name, holder, other)
            name, number = other if number == 1 else f"{other}-{number}", number + 1
            holder = _claimed(self._folder / name, run_id)
        return self._folder / name

    def _say(self, name: str, holder: str, other: str) -> None:
        if not self._said:
            say = "%s is the run %s; runs of the same name lie in %s and the like"
            get_logger(__name__).warning(say, self._folder / name, holder, self._folder / other)
            self._said = True


def _claimed(folder: Path, run_id: str) -> str:
    """Whose the directory is: this run's, unless somebody has it already."""
    recorded = (read_object(folder / RUN_RESULT_FILE) or {}).get("run_id")
    if isinstance(recorded, str) and not (folder / OWNER_FILE).exists():
        return recorded
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _holder(folder / OWNER_FILE, run_id)
    except OSError:  # the run itself will say that it cannot use it
        return run_id


def _holder(owner: Path, run_id: str) -> str:
    try:
        descriptor = os.open(owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        holder = owner.read_text(errors="replace").strip()
        if not holder:  # whoever began to claim it was killed in the midst of it
            write_text(owner, f"{run_id}\n")
        return holder or run_id
    with os.fdopen(descriptor, "w") as handle:
        handle.write(f"{run_id}\n")
    return run_id
