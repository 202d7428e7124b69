"""The texts by which tasks are known, and whether many come from one template.

In: tasks. Out: `TaskText`s: tasks with the same words and numbers share one; what many tasks share that want different
things is nobody's text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from evsys_sdk.data.leakage_family import Family, phrases_of
from evsys_sdk.data.leakage_text import task_texts
from evsys_sdk.data.leakage_words import Gram, Reading
from evsys_sdk.data_types import HarborTask

GRAM_WORDS = 5
TEMPLATE_TEXTS = 3
LONG_RUN, TEMPLATE_SHARE, SHORT_TEMPLATE_SHARE = 12, 0.6, 0.4
MIN_LETTERS = 16
"""Letters that a text needs beside its numbers to be known by them; `What is 2 + 2?` has 6."""
SHORT_WORDS = 8
OWN_PHRASES = 8
MAX_PIECE = 200
MAX_WORDS, MIN_RUN = 2_000_000, 100
"""Words of all tasks that are kept for their phrases, and of each at least; of long texts the beginning and the end."""


@dataclass(slots=True, eq=False)
class TaskText:
    """A text by which tasks are known."""

    mask: str
    run: list[str]
    numbers: list[str]
    groups: list[list[str]]
    """The numbers as they stand in a row."""
    n_words: int
    length: int
    """Letters."""
    tasks: list[tuple[int, str]] = field(default_factory=list)
    """Number of the task, and which part of it this is."""
    raw: set[str] = field(default_factory=set)
    grams: set[Gram] = field(default_factory=set)
    """The phrases that tell of this text."""
    templated: bool = False
    family: Family | None = None

    @property
    def is_short(self) -> bool:
        return self.n_words < SHORT_WORDS or len(self.run) < GRAM_WORDS

    @property
    def has_own_words(self) -> bool:
        """Whether rows with these words were made from this text, however many they are: half of its phrases, or
        enough of a long text, are its own."""
        half = (len(self.run) - GRAM_WORDS + 1) / 2
        return not self.is_short and not self.templated and len(self.grams) >= min(OWN_PHRASES, half)

    @property
    def can_be_a_piece(self) -> bool:
        """Whether it can be recognised as a line or sentence of a longer text."""
        return self.is_short and self.n_words > (1 if "#" in self.mask else 2) and len(self.mask) <= MAX_PIECE

    @property
    def says_little(self) -> bool:
        return sum(map(str.isalpha, self.mask)) < MIN_LETTERS


def gather(tasks: Sequence[HarborTask]) -> list[TaskText]:
    """One entry per distinct text that tells something."""
    texts: dict[tuple[str, ...], TaskText] = {}
    most = max(MIN_RUN, MAX_WORDS // max(len(tasks), 1))
    for number, task in enumerate(tasks):
        for part, raw in task_texts(task):
            if raw := raw.strip():
                reading = Reading(raw)
                key = (reading.mask, *reading.numbers) if reading.mask else (raw,)
                if key not in texts:
                    texts[key] = _task_text(reading, most)
                texts[key].raw.add(raw)
                texts[key].tasks.append((number, part))
    return [text for text in texts.values() if not _is_boilerplate(text, tasks)]


def _task_text(reading: Reading, most: int) -> TaskText:
    run, words = reading.run, reading.words
    return TaskText(
        mask=reading.mask,
        run=run if len(run) <= most else [*run[: most // 2], "", *run[-most // 2 :]],
        numbers=reading.numbers,
        groups=reading.groups,
        n_words=len(words),
        length=len(reading.text),
    )


def _is_boilerplate(text: TaskText, tasks: Sequence[HarborTask]) -> bool:
    """An answer that two tasks share; an instruction that many share which want different things, such as
    `Do what problem.md says.`"""
    owners = {number for number, _ in text.tasks}
    if all(part == "answer" for _, part in text.tasks):
        return len(owners) > 1
    if len(owners) < max(3, 0.02 * len(tasks)):
        return False
    return len({repr((tasks[n].verifier, tasks[n].metadata.get("harbor"))) for n in owners}) > 2


def is_of_template(same: list[TaskText], of_tasks: Counter[Gram], of_rows: Counter[Gram]) -> bool:
    """Whether too many texts have these words, or most of their phrases; or whether the words are too few to tell."""
    text = same[0]
    if "#" in text.mask and text.says_little:
        return True
    own = phrases_of(text.run)
    recurring = sum(of_tasks[phrase] + of_rows[phrase] > TEMPLATE_TEXTS for phrase in own)
    share = TEMPLATE_SHARE if len(text.run) >= LONG_RUN else SHORT_TEMPLATE_SHARE
    return len(same) > TEMPLATE_TEXTS or recurring >= share * len(own)
