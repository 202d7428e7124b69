"""What a researcher adds to a record.

In: an experiment and a text. Out: the note as it was written. The machine's own record is never touched.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evsys_sdk.history.history import ExperimentEntry
from evsys_sdk.history.index import Note, NoteKind, add_note, notes_path
from evsys_sdk.operations.place import HistoryPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenNote:
    """A note and the file that it was added to."""

    experiment: str
    file: Path
    note: Note

    def plain(self) -> dict[str, Any]:
        return {"experiment": self.experiment, "file": str(self.file), **asdict(self.note)}


def write_note(entry: ExperimentEntry, kind: NoteKind, text: str) -> WrittenNote:
    """Add a note on the result that the experiment has now."""
    note = add_note(entry.record, kind, text, about=entry.digest.result)
    return WrittenNote(experiment=entry.name, file=notes_path(entry.record), note=note)


def conclude_experiment(place: HistoryPlace, ref: str, text: str) -> WrittenNote:
    """Add a conclusion to an experiment, beside the machine's own."""
    return write_note(place.find(ref).entry, "conclusion", text)
