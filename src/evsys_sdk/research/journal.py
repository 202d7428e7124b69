"""The journal of a research: what was asked, proposed, measured and decided; what a killed one resumes from.

In: the outcome of each act, under its own key. Out: the same outcomes, so that an act that ended is
never done again. One append-only file of JSON lines per research; a line that a crash cut short counts as not written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import EvsysError, RecordLost
from evsys_sdk.record.lines import append_durably
from evsys_sdk.record.processes import now_text
from evsys_sdk.redaction import redact


@dataclass(slots=True)
class ResearchJournal:
    """Key -> outcome; without a path it is kept in memory alone."""

    path: Path | None = None
    outcomes: dict[str, JsonObject] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> ResearchJournal:
        """The journal at `path`, with what it has so far."""
        journal = cls(path)
        try:
            lines = path.read_bytes().splitlines() if path.exists() else []
        except OSError as exc:
            raise EvsysError(f"the research journal {path} cannot be read: {exc.strerror}") from exc
        for line in lines:
            try:
                event = json.loads(line)
                journal.outcomes.setdefault(event["key"], event["outcome"])
            except (ValueError, KeyError, TypeError):  # cut short by a crash of the machine
                continue
        return journal

    def find(self, key: str) -> JsonObject | None:
        return self.outcomes.get(key)

    def add(self, key: str, outcome: JsonObject) -> JsonObject:
        """Note an outcome; one that is there already stays as it is. Returns what the journal has."""
        if key not in self.outcomes:
            event = {"key": key, "at": now_text(), "outcome": outcome}
            text = redact(json.dumps(event, ensure_ascii=False))
            if self.path is not None:
                try:
                    append_durably(self.path, text)
                except OSError as exc:
                    say = f"the research journal {self.path} cannot be written to: {exc.strerror}"
                    raise RecordLost(f"{say}; the same command resumes from what there is") from exc
            # As it is read back, so that the process that wrote it and one that resumes it see the same.
            self.outcomes[key] = json.loads(text)["outcome"]
        return self.outcomes[key]

    def once(self, key: str, act: Callable[[], JsonObject]) -> JsonObject:
        """The outcome of `act`, which is done only if the journal does not have it."""
        found = self.find(key)
        return self.add(key, act()) if found is None else found
