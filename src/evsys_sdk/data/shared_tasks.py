"""Tasks that two benchmarks have in common.

In: the tasks of a benchmark that selects, and of one that tests. Out: an `Overlap`. A task is the same by what it asks
and what it wants, wherever its file lies and whatever its id; case, punctuation and white space do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from evsys_sdk.atomic import to_json
from evsys_sdk.data.leakage_text import task_texts
from evsys_sdk.data.leakage_words import words_of
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.task_dirs import contents_sha256, task_directory

TaskKey = tuple[str, str]
"""What a task asks, and what it wants; the latter is empty where the former says it all."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """The tasks of one benchmark."""

    name: str
    place: str
    """In the config."""
    tasks: Sequence[HarborTask] = field(repr=False)

    @cached_property
    def questions(self) -> list[str]:
        return [_question(task) for task in self.tasks]

    @cached_property
    def times_asked(self) -> Counter[str]:
        return Counter(self.questions)

    def keys(self, other: Side) -> list[TaskKey]:
        """What each task is known by beside another benchmark: where no two tasks of either ask the same, the question
        alone, so that an answer in another form changes nothing."""
        return [
            (asked, _wish(task) if other.times_asked[asked] and not self._is_told(task, asked, other) else "")
            for asked, task in zip(self.questions, self.tasks, strict=True)
        ]

    def _is_told(self, task: HarborTask, asked: str, other: Side) -> bool:
        return _says_all(task) and max(self.times_asked[asked], other.times_asked[asked]) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How many tasks of a benchmark that selects are a test benchmark's too."""

    selecting: Side
    test: Side
    shared: int
    """Of the tasks that select."""
    tested: int
    """Of the test tasks."""

    @property
    def is_most(self) -> bool:
        """Of one or the other, which is no accident."""
        return 2 * self.shared > len(self.selecting.tasks) or 2 * self.tested > len(self.test.tasks)

    @property
    def text(self) -> str:
        """`40 of the 40 tasks of val/dev, which selects, are among the 40 of test/tools`."""
        are = "is" if self.shared == 1 else "are"
        return (
            f"{self.shared} of the {len(self.selecting.tasks)} tasks of {self.selecting.name}, which selects, {are} "
            f"among the {len(self.test.tasks)} of {self.test.name}"
        )


def overlap_of(selecting: Side, test: Side) -> Overlap:
    """What the two have in common."""
    mine, theirs = selecting.keys(test), test.keys(selecting)
    both = set(mine) & set(theirs)
    return Overlap(
        selecting=selecting,
        test=test,
        shared=sum(key in both for key in mine),
        tested=sum(key in both for key in theirs),
    )


def _question(task: HarborTask) -> str:
    _, text = next(task_texts(task))
    return " ".join(words_of(text)) or text.strip()


def _says_all(task: HarborTask) -> bool:
    """The instruction of a task directory is about the files in it, and may be that of others."""
    return isinstance(task.verifier, InProcessVerifier) and task_directory(task) is None


def _wish(task: HarborTask) -> str:
    folder = task_directory(task)
    if folder is not None:
        return contents_sha256(folder, [folder])
    return to_json(task.verifier.expected if isinstance(task.verifier, InProcessVerifier) else repr(task.verifier))
