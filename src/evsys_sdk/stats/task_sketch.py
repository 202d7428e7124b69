"""Which tasks a benchmark asks, told by what they say and not by where they lie or what they are called.

In: tasks. Out: a `TaskSketch` that fits into a record: how many there are, and the smallest hashes of what they ask and
expect (a bottom-k sketch, Broder 1997). Two sketches tell how many tasks two sets share: exactly where both have at
most 64 tasks, else as an estimate. Ids, metadata, order, white space, punctuation and case play no part, and small
edits of the texts hardly any. A second set of hashes, of the whole texts, tells which tasks were left out or changed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from zlib import crc32

from evsys_sdk.data_types import HarborTask

WORD = re.compile(r"\w+")
SIZE = 64
"""Hashes that are kept: a share of 0.5 is then known to 0.06."""
SAME = 0.5
"""Share of the smaller set's tasks from which two sets count as one: more tasks of the same kind, or a part of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSketch:
    """A set of tasks."""

    count: int
    hashes: tuple[str, ...]
    whole: tuple[str, ...] = ()
    """The smallest hashes of whole tasks; empty in records that do not have them. What else is in the set does not
    change them, as it may change `hashes`: a pair of words that a new task has too no longer counts there."""

    def as_dict(self) -> dict[str, Any]:
        return {"count": self.count, "hashes": list(self.hashes), "whole": list(self.whole)}

    def left_out_of(self, others: Sequence[TaskSketch]) -> int:
        """How many of these tasks none of the others has: exactly up to 64 tasks, else as an estimate; 0 where that is
        not known."""
        if not all(other.whole for other in others):
            return 0
        found = {one for other in others for one in other.whole}
        # Of a larger set only the smallest hashes are kept: above the last of them nothing is known.
        known = [h for h in self.whole if h in found or all(len(o.whole) < SIZE or h <= o.whole[-1] for o in others)]
        missing = sum(h not in found for h in known)
        return missing if len(self.whole) < SIZE else round(self.count * missing / max(len(known), 1))

    def is_like(self, other: TaskSketch) -> bool:
        """True where the two sets share at least half of the tasks of the smaller one."""
        if self.count <= SIZE and other.count <= SIZE:
            shared = len({*self.hashes} & {*other.hashes})
            return shared >= SAME * min(len(self.hashes), len(other.hashes)) > 0
        # The smallest hashes of both sets together are a random sample of their union.
        union = sorted({*self.hashes, *other.hashes})[:SIZE]
        alike = len({*union} & {*self.hashes} & {*other.hashes}) / max(len(union), 1)
        # `alike` estimates shared / (a + b - shared), Jaccard's index; this is solved for `shared`.
        shared_tasks = alike * (self.count + other.count) / (1 + alike)
        return shared_tasks >= SAME * min(self.count, other.count) > 0


def sketch_of(tasks: Sequence[HarborTask]) -> TaskSketch:
    """A task's hash is the smallest of the hashes of its word pairs, each with the answer that is expected (min-hash,
    Broder 1997): two wordings of a task have the same one as often as they share pairs, so that a suite in which every
    text was edited a little is still the same set. Pairs that several tasks have, as those of a template, do not count.
    """
    texts = [
        (task.instruction if isinstance(task.instruction, str) else json.dumps(task.instruction)).casefold()
        for task in tasks
    ]
    pairs = [[" ".join(pair) for pair in pairwise(WORD.findall(text))] for text in texts]
    spread = Counter(pair for each in pairs for pair in set(each))
    found, whole = set(), set()
    for task, text, each in zip(tasks, texts, pairs, strict=True):
        verifier = task.verifier
        expected = verifier.get("expected") if isinstance(verifier, Mapping) else getattr(verifier, "expected", None)
        answer = " ".join(WORD.findall(json.dumps(expected, sort_keys=True, default=str).casefold()))
        # A text of one word, and one of which another task has all pairs, counts as a whole.
        own = [pair for pair in each if spread[pair] == 1] or [" ".join(text.split())]
        # CRC-32 only picks one of the pairs, of which there are many; SHA-256 of that one is what tells tasks apart.
        said = min((f"{pair}\t{answer}".encode(errors="replace") for pair in own), key=crc32)
        found.add(hashlib.sha256(said).hexdigest()[:12])
        asked = f"{' '.join(WORD.findall(text))}\t{answer}".encode(errors="replace")
        whole.add(hashlib.sha256(asked).hexdigest()[:12])
    return TaskSketch(count=len(found), hashes=tuple(sorted(found)[:SIZE]), whole=tuple(sorted(whole)[:SIZE]))


def sketch_from(data: Any) -> TaskSketch | None:
    """From a record; None where it has none."""
    if not isinstance(data, Mapping) or not isinstance(data.get("hashes"), list):
        return None
    hashes, whole = (tuple(str(one) for one in data.get(key) or ()) for key in ("hashes", "whole"))
    return TaskSketch(count=int(data.get("count") or len(hashes)), hashes=hashes, whole=whole)
