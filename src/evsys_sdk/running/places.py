"""Where the runs of an experiment lie.

In: the experiment's folder, and the journals in it. Out: a directory for each run, named like the run; where another
experiment in the same folder has a run of that name, `<run>@<experiment>`. Nobody's record gives way to another's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from evsys_sdk.config.names import directory_name
from evsys_sdk.constants import JOURNAL_FILE
from evsys_sdk.errors import EvsysError
from evsys_sdk.logs import get_logger
from evsys_sdk.record.journal import Journal
from evsys_sdk.record.stored import StoredJournal

WHERE = (
    "SELECT data FROM events WHERE run = ? AND attempt = ? AND kind IN ('run', 'reused') AND superseded = 0 ORDER BY id"
)
"""Both say where the run lies; of one that was taken over, the later says so of the copy."""


class Places:
    """The run directories of one experiment."""

    def __init__(self, output_dir: Path, experiment: str, journal: Journal):
        self._folder, self._experiment = output_dir, directory_name(experiment)
        self._own = dict(_directories(journal))
        self._taken = {
            where.name: path.name.removesuffix(f".{JOURNAL_FILE}")
            for path in sorted(output_dir.glob(f"*.{JOURNAL_FILE}"))
            if path.name != journal.path.name
            for where in _directories_in(path)
            if (output_dir / where.name).is_dir()
        }
        self._said = False

    def of(self, run_id: str, run: str) -> Path:
        """The directory of a run: the one it has, else one that is nobody's."""
        plain, other = directory_name(run), f"{directory_name(run)}@{self._experiment}"
        known = self._own.get(run_id)
        if known is not None and known.name in (plain, other):
            return self._folder / known.name
        if plain not in self._taken:
            return self._folder / plain
        self._say(plain, other)
        return self._folder / other

    def _say(self, plain: str, other: str) -> None:
        if not self._said:
            say = "%s is a run of experiment %s; runs of the same name lie in %s and the like"
            get_logger(__name__).warning(say, self._folder / plain, self._taken[plain], self._folder / other)
            self._said = True


def _directories(journal: Journal) -> Iterator[tuple[str, Path]]:
    """The id of each run and where it lies."""
    for run, attempt in journal.read("SELECT run, max(attempt) FROM attempts GROUP BY run", ()):
        for (data,) in journal.read(WHERE, (run, attempt)):
            if found := json.loads(data).get("run_dir"):
                yield run, Path(found)


def _directories_in(path: Path) -> list[Path]:
    try:
        with closing(StoredJournal(path)) as journal:
            return list(dict(_directories(journal)).values())
    except (EvsysError, ValueError):  # not a journal of ours, or a torn one
        return []
