"""Finds the tasks of a benchmark that a row holds: word for word, in another spelling, with other numbers, or in part.

In: tasks; a sample of the rows, to learn which phrases are nobody's; then rows, one at a time. Out: `Match`es. The
index is over the tasks and stays small; rows pass by.

What makes a near copy one, and not a sister from the same template, is decided here:

- A phrase (5 words) that stands in two tasks, or in more than ten sampled rows, says nothing about either.
- A task is *templated* where another task has the same words and other numbers, or where 60 % of its phrases of 3 words
  recur in texts with other words. To hold a part of it, a row must then have nearly all of its own phrases.
- A text with other numbers is a copy of a task that is not templated. Of one that is, it is a copy only where chance
  can hardly make one: where rows among themselves, and tasks among themselves, agree in all words so rarely that one of
  200 rows would meet a task by accident, or where all numbers but one agree and have many digits.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from evsys_sdk.data.leakage_text import key_of, row_texts, task_texts, without_numbers, words_of
from evsys_sdk.data_types import HarborTask
from evsys_sdk.protocols import Row

Kind = Literal["exact", "normalised", "numbers", "ngram"]
RANKS: dict[Kind, int] = {"exact": 0, "normalised": 1, "numbers": 2, "ngram": 3}
Gram = tuple[str, ...]

GRAM_WORDS = 5
MIN_GRAMS = 4
"""Telling phrases that a task needs to be looked for in part: one of 8 words has as many."""
MIN_OVERLAP, MIN_TEMPLATED_OVERLAP = 0.7, 0.95
MAX_ROWS_OF_PHRASE = 10
TEMPLATE_SHARE, TEMPLATE_TEXTS = 0.6, 3
MIN_LETTERS = 16
"""Letters that a text needs beside its numbers to be known by them; `What is 2 + 2?` has 6."""
MIN_AGREEING_DIGITS = 6
MAX_NUMBERS = 50
"""That are left out one by one; a table of thousands in an instruction would fill the memory."""
MAX_CHANCE = 0.005
"""Share of rows that may have the words of a templated task by accident."""
SHORT_LINE_WORDS = range(3, GRAM_WORDS + MIN_GRAMS - 1)
"""Tasks too short to be looked for in part are looked for as a whole line."""
CHUNK = 100_000
_OVERLAP = 1_000
_LONG, _MEMORY = 200, 500
_HEAD = 6
_DIGITS = re.compile(r"\d+")
_LABEL = re.compile(r"^[^\W\d_]{1,20}: (?=\S)")


@dataclass(slots=True, eq=False)
class TaskText:
    """A text by which tasks are known; tasks with the same words share one."""

    key: str
    masked: str
    words: list[str]
    tasks: list[tuple[int, str]]
    """Number of the task, and which part of it this is."""
    raw: set[str] = field(default_factory=set)
    grams: set[Gram] = field(default_factory=set)
    templated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A row has (nearly) this text."""

    text: TaskText
    kind: Kind
    overlap: float
    """Share of the text that the row has."""
    row_key: int
    """The same for rows in which the same words made the match."""


def grams_of(words: Sequence[str], size: int) -> Iterator[Gram]:
    """Every run of `size` words."""
    return zip(*(words[start:] for start in range(size)), strict=False)


class TaskIndex:
    """The texts of a benchmark's tasks, made for looking rows up in them."""

    def __init__(self, tasks: Sequence[HarborTask], sample: Iterable[Row] = ()):
        self.n_tasks = len(tasks)
        self.texts = _gather(tasks)
        self.by_raw = {raw: text for text in self.texts for raw in text.raw}
        self.by_key = {text.key: text for text in self.texts if text.key}
        self.by_masked: dict[str, list[TaskText]] = {}
        for text in self.texts:
            if text.masked != text.key and sum(map(str.isalpha, text.masked)) >= MIN_LETTERS:
                self.by_masked.setdefault(text.masked, []).append(text)
        self.by_line = {text.key: text for text in self.texts if len(text.words) in SHORT_LINE_WORDS}
        self.longest = max((len(text.key) for text in self.texts), default=0)
        self.heads = {text.key[:_HEAD] for text in self.texts}
        self.by_gram: dict[Gram, TaskText] = {}
        words, row_keys = _distinct(sample)
        self._learn(words)
        self.grams = frozenset(self.by_gram)
        self.chance = _chance_of_same_words(row_keys, self.texts)
        self.by_number = self._known_by_all_numbers_but_one()
        self._without_match: set[str] = set()

    def _learn(self, sample: dict[str, list[str]]) -> None:
        """Which phrases are common, and which tasks come from a template."""
        owners: dict[Gram, TaskText | None] = {}
        for text in self.texts:
            for gram in set(grams_of(text.words, GRAM_WORDS)):
                owners[gram] = None if gram in owners else text
        phrases, seen = self._phrases(), Counter[Gram]()
        copies = {text.masked for text in self.texts}
        for words in (words for masked, words in sample.items() if masked not in copies):
            seen.update(gram for gram in set(grams_of(words, GRAM_WORDS)) if gram in owners)
            phrases.update(gram for gram in set(grams_of(_masked(words), 3)) if gram in phrases)
        for gram, owner in owners.items():
            if owner is not None and seen[gram] <= MAX_ROWS_OF_PHRASE:
                owner.grams.add(gram)
        self.by_gram = {gram: text for text in self.texts if len(text.grams) >= MIN_GRAMS for gram in text.grams}
        for text in self.texts:
            text.templated = len(self.by_masked.get(text.masked, ())) > 1 or self._is_of_template(text, phrases)

    def _phrases(self) -> Counter[Gram]:
        """How many texts, counted as one where only numbers differ, have each phrase of 3 words."""
        phrases = Counter[Gram]()
        for words in {text.masked: text.words for text in self.texts}.values():
            phrases.update(set(grams_of(_masked(words), 3)))
        return phrases

    def _is_of_template(self, text: TaskText, phrases: Counter[Gram]) -> bool:
        own = set(grams_of(_masked(text.words), 3))
        recurring = sum(phrases[gram] > TEMPLATE_TEXTS for gram in own)
        return bool(own) and recurring >= TEMPLATE_SHARE * len(own)

    def _known_by_all_numbers_but_one(self) -> dict[str, TaskText]:
        """For templated tasks: the key with one number left out, where the others are enough to know it by."""
        enough = max(MIN_AGREEING_DIGITS, 3 + math.ceil(math.log10(max(self.n_tasks, 1))))
        found: dict[str, TaskText | None] = {}
        for text in (text for same in self.by_masked.values() for text in same if text.templated):
            digits = sum(map(str.isdigit, text.key))
            for rest, left_out in _leaving_one_number_out(text.key):
                if digits - left_out >= enough:
                    found[rest] = None if rest in found else text
        return {rest: text for rest, text in found.items() if text is not None}

    def match(self, row: Row) -> list[Match]:
        """The task texts that `row` holds, each once, as the closest kind of copy."""
        best: dict[TaskText, Match] = {}
        for text in row_texts(row):
            for match in self._matches_of(text) if text not in self._without_match else ():
                known = best.get(match.text)
                if known is None or RANKS[match.kind] < RANKS[known.kind]:
                    best[match.text] = match
        return list(best.values())

    def _remember(self, text: str) -> None:
        """System prompts come again and again."""
        if len(self._without_match) >= _MEMORY:
            self._without_match.clear()
        self._without_match.add(text)

    def _matches_of(self, text: str) -> list[Match]:
        if len(text) > CHUNK:
            return self._in_chunks(text)
        words = words_of(text)
        key = key_of(words) if self._may_be_a_task(words) else ""
        masked = without_numbers(key)
        same = self.by_raw.get(text.strip()) or (self.by_key.get(key) if key else None)
        found = [_same(same, text, key)] if same else []
        if not same and masked != key and masked in self.by_masked:
            found += self._other_numbers(key, self.by_masked[masked], words)
        found += self._parts(words, masked)
        if self.by_line:
            found += self._lines(text, excluded=same)
        if not found and len(text) >= _LONG:
            self._remember(text)
        return found

    def _may_be_a_task(self, words: list[str]) -> bool:
        """A quick look at how the text begins, before its whole key is made; a number there may have been changed."""
        head = "".join(words[:_HEAD])[:_HEAD]
        return len(words) <= self.longest and (head in self.heads or not head.isalpha())

    def _in_chunks(self, text: str) -> list[Match]:
        """A text longer than memory likes is searched for parts only, piece by piece (longer than any task)."""
        size = max(CHUNK, 4 * self.longest)
        pieces = (text[start : start + size + 2 * self.longest + _OVERLAP] for start in range(0, len(text), size))
        return [match for piece in pieces for match in self._parts(words_of(piece), "")]

    def _other_numbers(self, key: str, sisters: list[TaskText], words: list[str]) -> list[Match]:
        if len(sisters) == 1 and (not sisters[0].templated or self.chance <= MAX_CHANCE):
            return [_changed(sisters[0], key, words)]
        if not self.by_number:
            return []
        near = {self.by_number[rest] for rest, _ in _leaving_one_number_out(key) if rest in self.by_number}
        return [_changed(text, key, words) for text in near]

    def _parts(self, words: list[str], masked: str) -> list[Match]:
        """Texts of which the row has most of the telling phrases. What differs in numbers alone was judged before."""
        hits = self.grams.intersection(zip(words, words[1:], words[2:], words[3:], words[4:], strict=False))
        if len(hits) < MIN_GRAMS * MIN_OVERLAP:
            return []
        found = []
        for text, count in Counter(self.by_gram[gram] for gram in hits).items():
            overlap = count / len(text.grams)
            if overlap >= MIN_OVERLAP and (not masked or text.masked != masked) and _holds(words, text, overlap):
                row_key = hash(masked) if masked else hash(tuple(words))
                found.append(Match(text=text, kind="ngram", overlap=overlap, row_key=row_key))
        return found

    def _lines(self, text: str, *, excluded: TaskText | None) -> list[Match]:
        """Short tasks that are a line of the text, or what follows a label such as `Question: `."""
        if "\n" not in text and ": " not in text:
            return []
        found = {}
        for line in text.splitlines():
            for piece in (line, _LABEL.sub("", line)):
                same = self.by_line.get(key_of(words_of(piece))) if len(piece) < 200 else None
                if same is not None and same is not excluded:
                    found[same.key] = Match(text=same, kind="ngram", overlap=1.0, row_key=hash(text))
        return list(found.values())


def _gather(tasks: Sequence[HarborTask]) -> list[TaskText]:
    """One entry per distinct text that tells something."""
    texts: dict[str, TaskText] = {}
    for number, task in enumerate(tasks):
        for part, raw in task_texts(task):
            if raw := raw.strip():
                words = words_of(raw)
                key = key_of(words)
                masked = without_numbers(key)
                text = texts.setdefault(key or raw, TaskText(key, masked, words, []))
                text.raw.add(raw)
                text.tasks.append((number, part))
    return [text for text in texts.values() if not _is_boilerplate(text, tasks)]


def _is_boilerplate(text: TaskText, tasks: Sequence[HarborTask]) -> bool:
    """An answer that two tasks share; an instruction that many share which want different things, such as
    `Do what problem.md says.`"""
    owners = {number for number, _ in text.tasks}
    if all(part == "answer" for _, part in text.tasks):
        return len(owners) > 1
    if len(owners) < max(3, 0.02 * len(tasks)):
        return False
    return len({repr((tasks[n].verifier, tasks[n].metadata.get("harbor"))) for n in owners}) > 2


def _distinct(sample: Iterable[Row]) -> tuple[dict[str, list[str]], dict[str, set[int]]]:
    """The sampled texts by their keys without numbers: the words of one, and which different ones there are."""
    words_by: dict[str, list[str]] = {}
    keys_by: dict[str, set[int]] = {}
    for row in sample:
        for text in row_texts(row):
            words = words_of(text[:CHUNK])
            key = key_of(words)
            masked = without_numbers(key)
            words_by.setdefault(masked, words)
            keys_by.setdefault(masked, set()).add(hash(key))
    return words_by, keys_by


def _chance_of_same_words(row_keys: dict[str, set[int]], texts: Sequence[TaskText]) -> float:
    """The share of rows to be expected to differ from some task in numbers alone, by accident.

    Judged by pairs of rows and pairs of tasks, since a row and a task that agree may be the very leak. Three pairs more
    than were seen are taken to agree: with none among n, that many are possible (95 %).
    """
    tasks = Counter(text.masked for text in texts)
    groups = ([len(keys) for keys in row_keys.values()], list(tasks.values()))
    agreeing = sum(count * (count - 1) / 2 for group in groups for count in group)
    pairs = sum(sum(group) * (sum(group) - 1) / 2 for group in groups)
    return len(texts) * (agreeing + 3) / pairs if pairs else 1.0


def _masked(words: list[str]) -> list[str]:
    return ["#" if word[0].isdigit() else word for word in words]


def _leaving_one_number_out(key: str) -> Iterator[tuple[str, int]]:
    """The key without its first number, without its second, ...; and how many digits that took."""
    for number in islice(_DIGITS.finditer(key), MAX_NUMBERS):
        yield f"{key[: number.start()]}#{key[number.end() :]}", number.end() - number.start()


def _same(same: TaskText, text: str, key: str) -> Match:
    kind: Kind = "exact" if text.strip() in same.raw else "normalised"
    return Match(text=same, kind=kind, overlap=1.0, row_key=hash(key))


def _holds(words: list[str], task: TaskText, overlap: float) -> bool:
    """Of a templated task nearly all phrases must be there, also those that tell nothing: sisters have many of both."""
    if not task.templated or overlap < MIN_TEMPLATED_OVERLAP:
        return not task.templated
    own = set(grams_of(task.words, GRAM_WORDS))
    return len(own.intersection(grams_of(words, GRAM_WORDS))) >= MIN_TEMPLATED_OVERLAP * len(own)


def _changed(task: TaskText, key: str, words: list[str]) -> Match:
    equal = sum(mine == theirs for mine, theirs in zip(words, task.words, strict=False))
    return Match(text=task, kind="numbers", overlap=equal / max(len(words), len(task.words)), row_key=hash(key))
