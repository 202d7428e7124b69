"""The same run in another experiment: taken over instead of run again.

In: what a run is made of, and the folder its experiment writes to. Out: the result of an identical finished run of
another experiment in that folder, or of a child's family, with its record copied and its weights linked, so that
neither loses them when the other begins anew. Identical means the same settings, rows, tasks and project code, and no
evaluation that failed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evsys_sdk.atomic import write_json
from evsys_sdk.constants import JOURNAL_FILE, RUN_RESULT_FILE
from evsys_sdk.errors import EvsysError
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.journal import Event, Journal, RunJournal
from evsys_sdk.record.run_dir import set_aside
from evsys_sdk.record.stored import StoredJournal

IDENTITY = "run"
"""The kind of event by which a run begins; its key is what makes it the same as another."""
REUSED = "reused"
"""The kind of event that says where a run's other events were copied from."""
NAMES = ("name", "tags", "group")
"""Settings of a run that only say what it is called."""
LOGS = "logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An identical run that has ended."""

    journal: Path
    run: str
    attempt: int
    run_dir: Path
    result: dict[str, Any]


def identity_of(run: Mapping[str, Any], shared: Mapping[str, Any], contents: Mapping[str, str]) -> str:
    """The same for runs that would do the same; `contents` are the hashes of what the settings only name."""
    settings = {key: value for key, value in run.items() if key not in NAMES}
    return config_hash({"run": settings, "shared": shared, "contents": contents})


def note_identity(journal: RunJournal, identity: str, run_dir: Path) -> None:
    """So that other experiments can find the run."""
    journal.add(IDENTITY, {"run_dir": str(run_dir.absolute())}, at=0, key=identity)


def find_identical(identity: str, own: Path, *, is_child: bool) -> Found | None:
    """A finished run with this identity, of another experiment than that of the journal `own`: one that writes to the
    same folder, or one of a child's family. Arms of one experiment that are alike are meant to be."""
    for path in _journals_near(own.parent, is_child):
        if path.resolve() == own.resolve():
            continue
        try:
            with closing(StoredJournal(path)) as journal:
                for found in _candidates(journal, identity):
                    return found
        except EvsysError:  # not a journal of ours, or of another version
            continue
    return None


def _journals_near(output_dir: Path, is_child: bool) -> Iterator[Path]:
    for folder in (".", "..", "../*") if is_child else (".",):
        yield from sorted(output_dir.glob(f"{folder}/*.{JOURNAL_FILE}"))


def _candidates(journal: Journal, identity: str) -> Iterator[Found]:
    query = "SELECT run, attempt, data FROM events WHERE kind = ? AND key = ? ORDER BY id DESC"
    for run, attempt, data in journal.read(query, (IDENTITY, identity)):
        events = RunJournal(journal, run, attempt)
        run_dir = Path(json.loads(data)["run_dir"])
        result = _result_in(run_dir, run)
        if events.completed and result and not any(event.data["error"] for event in events.evals()):
            yield Found(journal=journal.path, run=run, attempt=attempt, run_dir=run_dir, result=result)


def _result_in(run_dir: Path, run: str) -> dict[str, Any] | None:
    """The record that lies there, if it is still that of this run."""
    try:
        found: dict[str, Any] = json.loads((run_dir / RUN_RESULT_FILE).read_text())
        return found if found["run_id"] == run and found["status"] == "completed" else None
    except (OSError, ValueError, KeyError):
        return None


def adopt(found: Found, journal: Journal, run_id: str, fingerprint: str, run_dir: Path) -> RunJournal:
    """Make the found run's record this run's own. The journal comes last: before it, nothing counts."""
    set_aside(run_dir)
    if (found.run_dir / LOGS).is_dir():
        shutil.copytree(found.run_dir / LOGS, run_dir / LOGS)
    artifacts = {
        name: _brought(str(place), found.run_dir, run_dir) for name, place in found.result["artifacts"].items()
    }
    experiment, _, run = run_id.rpartition("/")
    names = {"run_id": run_id, "experiment": experiment, "run": run, "reused_from": str(found.run_dir)}
    write_json(run_dir / RUN_RESULT_FILE, {**found.result, **names, "artifacts": artifacts})
    places = {"from": str(found.run_dir), "run_dir": str(run_dir.absolute())}
    note = Event(kind=REUSED, key="0", at=0, data=places)
    with closing(StoredJournal(found.journal)) as source:
        return journal.copy(RunJournal(source, found.run, found.attempt), run_id, fingerprint, note=note)


def _brought(artifact: str, source: Path, target: Path) -> str:
    """Where the artifact lies in `target`, linked there from `source`; one that lies elsewhere stays where it is."""
    place, source = Path(artifact), source.absolute()
    if not place.is_relative_to(source) or not place.exists():
        return artifact
    here = target.absolute() / place.relative_to(source)
    if not here.exists():
        here.parent.mkdir(parents=True, exist_ok=True)
        (_tree if place.is_dir() else _link)(place, here)
    return str(here)


def _tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_link)


def _link(source: str | Path, target: str | Path) -> None:
    """Weights are never changed in place, so two names for one file will do; where that cannot be, a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
