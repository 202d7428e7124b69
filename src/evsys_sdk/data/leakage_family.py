"""Tasks and rows from one template: when is a row that shares all words with a task, and not the numbers, a copy?

In: the task texts of a template (a family), and the sampled rows that look as if they came from it too. Out: for rows
that differ from a task in one number, and for those that differ in several, whether they can be told from rows that
the template made by accident.

If the rows were all fresh, a share `chance` of them would meet a task. It is learned from how often rows among
themselves, and tasks among themselves, meet. So the rows of the family that meet no task say how many met one by
accident. Those that met one are copies where accidents are less than 0.5 % of all rows, and do not explain so many.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from evsys_sdk.data.leakage_words import Gram, Reading, grams_of

Meeting = Literal["one", "many"]
"""A row and a task of the same words differ in one number, or in several."""
PHRASE_WORDS = 3
SHORT_RUN = 4
MAX_NUMBERS = 50
"""That are left out one by one; a table of thousands in an instruction would fill the memory."""
MAX_FALSE = 0.005
"""Share of rows that may be suspected by accident: half of the goal, since it is an estimate."""
MAX_LUCK = 0.01
"""How unlikely it must be that fresh rows meet so many tasks."""
DOUBT = 2.0
"""The odds are an estimate."""
COVERED, MIN_COVERED = 0.95, 0.4
"""A row looks like a task if it has this share of the phrases that the task shares with others, and of all."""
MAX_CHANCE, CERTAIN = 0.05, 0.7
FEW_TEXTS = 4


def phrases_of(run: Sequence[str]) -> set[Gram]:
    """Every run of 3 masked words; of a very short text the ends are words too."""
    return set(grams_of(run if len(run) > SHORT_RUN else ["^", *run, "$"], PHRASE_WORDS))


def rests_of(mask: str, numbers: Sequence[str]) -> list[tuple[int, str]]:
    """A number for the text without its first number, without its second, ...; and the number left out."""
    count = min(len(numbers), MAX_NUMBERS)
    return [(hash((mask, *numbers[:n], None, *numbers[n + 1 :])), numbers[n]) for n in range(count)]


@dataclass(slots=True)
class Population:
    """Texts that are not copies of one another, and how many pairs of them meet."""

    size: int = 0
    masks: Counter[int] = field(default_factory=Counter)
    rests: Counter[int] = field(default_factory=Counter)

    def add(self, mask: str, numbers: Sequence[str]) -> None:
        self.size += 1
        self.masks[hash(mask)] += 1
        self.rests.update(rest for rest, _ in rests_of(mask, numbers))

    @property
    def pairs(self) -> float:
        return _pairs(self.size)

    def meeting(self, how: Meeting) -> float:
        one = sum(map(_pairs, self.rests.values()))
        return one if how == "one" else max(0.0, sum(map(_pairs, self.masks.values())) - one)


def _pairs(count: int) -> float:
    return count * (count - 1) / 2


@dataclass(slots=True, eq=False)
class Family:
    """The task texts that share their commonest phrase."""

    tasks: Population = field(default_factory=Population)
    rows: dict[Meeting, Population] = field(default_factory=lambda: {"one": Population(), "many": Population()})
    """Of the sample: those that look like the tasks, without those that meet one in this way: copies of one task meet
    each other, which says nothing of the template."""
    looks: list[float] = field(default_factory=list)
    """For each task, how many phrases of the tasks a row must have to look like it."""
    strangers: Counter[Meeting] = field(default_factory=Counter)
    """Sampled rows that look like the tasks, and meet none."""
    says_little: bool = False
    """Its tasks have hardly any words, such as `What is 2 + 2?`."""

    @property
    def least(self) -> float:
        """Phrases that a row must have to look like nine of ten tasks, or longer ones."""
        return sorted(self.looks)[len(self.looks) // 10]

    def note_stranger(self, how: Meeting, row: Reading, count: int) -> None:
        """A sampled text that looks like the tasks and meets none in this way; it stands in `count` rows."""
        self.rows[how].add(row.mask, row.numbers)
        self.strangers[how] += count

    def chance(self, how: Meeting, *, unseen: int = 1) -> float:
        """Of a fresh row, to meet any task; so many pairs more than were seen to meet are taken to."""
        rows = self.rows[how]
        meeting = self.tasks.meeting(how) + rows.meeting(how) + unseen
        return 1 - math.exp(-self.tasks.size * meeting / (self.tasks.pairs + rows.pairs + 1))

    def are_copies(self, how: Meeting, met: int, n_rows: int, scale: float) -> bool:
        """Whether `met` different rows that differ from tasks in this way are copies rather than accidents. `scale`:
        rows for each sampled one."""
        if self.tasks.size + self.rows["one"].size <= FEW_TEXTS and not self.says_little:
            return True  # no template after all
        chance, tolerated = self.chance(how), max(MAX_FALSE * n_rows, 1)
        strangers = self.strangers[how] * scale
        few = met <= max(2 * tolerated, min(self.tasks.size, n_rows / 4)) or self.chance(how, unseen=0) <= MAX_CHANCE
        if few and not self.strangers["one"] and not self.says_little:
            return True  # nothing in the rows comes from this template but what meets tasks
        if chance > CERTAIN or min(strangers * chance / (1 - chance), met) > tolerated:
            return False
        return luck(met, met + strangers, DOUBT * chance / (1 + (DOUBT - 1) * chance)) <= MAX_LUCK


def luck(met: float, tries: float, chance: float) -> float:
    """An upper bound (Chernoff's) of the probability that `met` or more of `tries` succeed."""
    share = met / tries if tries else 0.0
    if share <= chance:
        return 1.0
    exponent = share * math.log(share / chance)
    if share < 1:
        exponent += (1 - share) * math.log((1 - share) / (1 - chance))
    return math.exp(-tries * exponent)


def family_key(phrases: set[Gram], of_tasks: Counter[Gram], of_rows: Counter[Gram]) -> Gram:
    """The phrase that most tasks share, and then most rows."""
    return max(phrases, key=lambda phrase: (of_tasks[phrase], of_rows[phrase], phrase))
