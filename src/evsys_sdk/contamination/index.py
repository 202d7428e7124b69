"""Finds the tasks of a benchmark that a text holds: word for word, in another spelling, with other numbers, or in part.

In: tasks; a sample of the rows, to learn which phrases are common and which tasks come from a template; then rows, one
at a time. Out: `Match`es, and of all rows a `ContaminationFinding`. The index is over the tasks and stays small.

A text within a longer one is found by an anchor: the phrase of 5 words that the fewest tasks have. Where it stands, the
rest is compared. Tasks of fewer than 8 words are looked for as a whole line or sentence. In part, a task is found by
its telling phrases: those that no other task and not more than ten sampled rows have.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from evsys_sdk.contamination.normalize import Gram, Reading, grams_of, reversed_text, rot13, solid_text
from evsys_sdk.contamination.tasks import (
    COVERED,
    GRAM_WORDS,
    MIN_COVERED,
    Family,
    Meeting,
    TaskText,
    family_key,
    gather,
    is_of_template,
    phrases_of,
    rests_of,
    row_texts,
)
from evsys_sdk.data_types import HarborTask
from evsys_sdk.protocols import Row

Turn = Callable[[str], str]
Kind = Literal["exact", "normalised", "numbers", "ngram"]
Level = Literal["whole", "within", "prompt", "near", "one", "many"]
"""How sure a match is: the row's text itself; a part of it, word for word; anything that the system says; nearly the
text; of a template, with one other number; with several."""
MIN_GRAMS = 4
"""Telling phrases that a task needs to be looked for in part: one of 8 words has as many."""
MIN_OVERLAP = 0.7
MIN_SOME_OVERLAP, MIN_WORDS_COVERED = 0.4, 0.8
"""A text with a changed word here and there has fewer of the phrases, and still nearly all words in runs of 5."""
MIN_GRAMS_OF_PART = 8
MAX_ROWS_OF_PHRASE = 10
OWN_GRAMS = 20
"""Telling phrases that make a text its own, whatever else it shares: 24 words in a row have as many."""
MIN_AGREEING_DIGITS = 6
PIECES_OF_TEXT = 10
"""Lines and sentences that may make up a short text."""
MAX_PLACES = 100
"""Where the same phrase is looked at in one text."""
CHUNK = 100_000
SAMPLE_CHARS = 30_000_000
_OVERLAP = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A row has (nearly) this text."""

    text: TaskText
    kind: Kind
    level: Level
    overlap: float
    """Share of the text that the row has."""
    row_key: int
    """Rows in which the same words made the match share a key."""


@dataclass(frozen=True, slots=True)
class RowSample:
    """Different texts of some of the rows, each with the number of rows it stands in."""

    texts: list[tuple[Reading, int]]
    n_rows: int

    @classmethod
    def of(cls, rows: Iterable[Row]) -> RowSample:
        counts: Counter[tuple[str, bool]] = Counter()
        n_rows = 0
        for row in rows:
            n_rows += 1
            counts.update(row_texts(row).items())
        longest = max(1_000, min(CHUNK, SAMPLE_CHARS // max(len(counts), 1)))
        found = [(Reading(text[:longest], from_prompt=said), count) for (text, said), count in counts.items()]
        return cls([one for one in found if one[0].run], n_rows)


class TaskIndex:
    """The texts of a benchmark's tasks, for look-ups."""

    def __init__(self, tasks: Sequence[HarborTask], sample: RowSample):
        self.texts = gather(tasks)
        self.by_raw = {raw: text for text in self.texts for raw in text.raw}
        self.by_mask: dict[str, list[TaskText]] = {}
        for text in self.texts:
            if text.mask:
                self.by_mask.setdefault(text.mask, []).append(text)
        self.by_numbers = {(text.mask, *text.numbers): text for text in self.texts}
        self.by_digits = {(text.mask, "".join(text.numbers)): text for text in self.texts}
        solid = {solid_text(raw): text for raw, text in self.by_raw.items()}
        self.by_solid = {letters: text for letters, text in solid.items() if len(letters) >= MIN_TURNED}
        self.longest = max((text.length for text in self.texts), default=0)
        self.pieces = {text.mask for text in self.texts if text.can_be_a_piece}
        self.longest_piece = max(map(len, self.pieces), default=0)
        self.by_gram: dict[Gram, TaskText] = {}
        self.anchors: dict[Gram, set[tuple[int, int]]] = {}
        self._learn(sample)
        self.grams = frozenset(self.by_gram) | frozenset(self.anchors)
        self.enough_digits = max(MIN_AGREEING_DIGITS, 3 + math.ceil(math.log10(max(len(tasks), 1))))
        # Of templates: the text with a number left out -> that number's value and the texts, by value.
        self.by_rest: dict[int, list[tuple[int, int, TaskText]]] = {}
        for order, text in enumerate(text for text in self.texts if text.templated):
            for rest, number in rests_of(text.mask, text.numbers):
                self.by_rest.setdefault(rest, []).append((_value(number), order, text))
        for texts in self.by_rest.values():
            texts.sort(key=lambda one: one[:2])
        self._look_for_families(sample)

    def _learn(self, sample: RowSample) -> None:
        """Which phrases are telling, which anchor a text, and which texts come from a template."""
        by_task, by_row = Counter[Gram](), Counter[Gram]()
        phrases, of_rows = Counter[Gram](), Counter[Gram]()
        for same in self.by_mask.values():
            by_task.update(set(grams_of(same[0].run, GRAM_WORDS)))
            phrases.update(dict.fromkeys(phrases_of(same[0].run), len(same)))
        self._set_anchors(by_task, by_row)
        for reading, _ in sample.texts:
            grams, theirs = set(grams_of(reading.run, GRAM_WORDS)), phrases_of(reading.run)
            for run in self._tasks_held(reading, grams):
                grams, theirs = grams.difference(grams_of(run, GRAM_WORDS)), theirs - phrases_of(run)
            by_row.update(gram for gram in grams if gram in by_task)
            of_rows.update(phrase for phrase in theirs if phrase in phrases)
        self._set_anchors(by_task, by_row)
        for same in self.by_mask.values():
            grams = set(grams_of(same[0].run, GRAM_WORDS))
            telling = {gram for gram in grams if by_task[gram] == 1 and by_row[gram] <= MAX_ROWS_OF_PHRASE}
            templated = len(telling) < OWN_GRAMS and is_of_template(same, phrases, of_rows)
            for text in same:
                text.grams, text.templated = telling, templated
            if len(telling) >= max(MIN_GRAMS, min(OWN_GRAMS, len(grams) / 2)) and not templated:
                self.by_gram.update(dict.fromkeys(telling, same[0]))
        self.phrases, self.phrases_of_rows = phrases, of_rows

    def _tasks_held(self, reading: Reading, grams: set[Gram]) -> list[list[str]]:
        """The words of the tasks that a text holds whole, whatever their numbers: that it has their phrases shows no
        template."""
        mask = reading.mask
        held = {mask} | {
            mask[at : at + size] for gram in grams & self.anchors.keys() for at, size in self._places(mask, gram)
        }
        return [self.by_mask[one][0].run for one in held if one in self.by_mask]

    def _set_anchors(self, by_task: Counter[Gram], by_row: Counter[Gram]) -> None:
        """By how many tasks and rows have each phrase."""
        self.anchors.clear()
        for text in (same[0] for same in self.by_mask.values() if not same[0].is_short):
            grams = dict.fromkeys(grams_of(text.run, GRAM_WORDS))
            length, taken = len(text.mask), set[int]()
            # In each third of the text its rarest phrase: punctuation that was left out may have glued words of the
            # others together.
            for gram in sorted(grams, key=lambda gram: (by_task[gram], by_row[gram])):
                offset = text.mask.find("".join(gram))
                if (third := 3 * offset // length) not in taken:
                    taken.add(third)
                    self.anchors.setdefault(gram, set()).add((offset, length))

    def _look_for_families(self, sample: RowSample) -> None:
        """The templates of the tasks, and which sampled rows look as if they came from them."""
        families: dict[Gram, Family] = {}
        for text in (text for text in self.texts if text.templated):
            phrases = phrases_of(text.run)
            text.family = families.setdefault(family_key(phrases, self.phrases, self.phrases_of_rows), Family())
            text.family.tasks.add(text.mask, text.numbers)
            text.family.says_little |= text.says_little
            shared = sum(self.phrases[phrase] > 1 for phrase in phrases)
            text.family.looks.append(max(COVERED * shared, MIN_COVERED * len(phrases)))
        least = {family: family.least for family in families.values()}
        for reading, count in sample.texts if families else ():
            for part in (reading, *(reading.pieces if self.pieces else ())):
                known = {phrase for phrase in phrases_of(part.run) if phrase in self.phrases}
                family = families.get(family_key(known, self.phrases, self.phrases_of_rows)) if known else None
                if family is None or len(known) < least[family]:
                    continue
                # A row that looks like the tasks of a family is a stranger, unless it is a copy.
                hits = self.grams.intersection(grams_of(part.run, GRAM_WORDS))
                levels = {match.level for match in self.matches(part, hits) if match.text.family in (family, None)}
                if not levels & {"whole", "within", "prompt", "near", "one"}:
                    family.note_stranger("one", part, count)
                    if not levels:
                        family.note_stranger("many", part, count)

    def matches(self, reading: Reading, hits: Collection[Gram]) -> list[Match]:
        """The task texts that a text holds, each once, as the closest copy. `hits`: those of its phrases that
        `grams` has."""
        found: dict[TaskText, Match] = {}
        for match in self._whole(reading) or [*self._within(reading, hits), *self._in_pieces(reading)]:
            known = found.setdefault(match.text, match)
            if known is not match and closeness(match) < closeness(known):
                found[match.text] = match
        if texts := [self.by_gram[gram] for gram in hits if gram in self.by_gram]:
            masks = {text.mask for text in found}
            found |= {match.text: match for match in self._parts(reading, texts) if match.text.mask not in masks}
        return list(found.values())

    def _whole(self, reading: Reading) -> list[Match]:
        raw = self.by_raw.get(reading.text.strip())
        if raw is not None:
            return [_same(raw, "exact", "whole", reading)]
        if reading.mask in self.by_mask:
            return self._compare_masked(reading.mask, reading.numbers, reading)
        run_together = self.by_solid.get(reading.solid)
        return [] if run_together is None else [_same(run_together, "normalised", "whole", reading)]

    def _within(self, reading: Reading, hits: Iterable[Gram]) -> Iterator[Match]:
        """Texts that stand in the middle of this one."""
        mask = reading.mask
        for start, length in {place for gram in hits for place in self._places(mask, gram)}:
            inside = mask[start : start + length]
            if length < len(mask) and inside in self.by_mask:
                yield from self._compare_masked(inside, self._numbers_at(reading, start, inside), reading)

    def _places(self, mask: str, gram: Gram) -> Iterator[tuple[int, int]]:
        """Where a text may begin that has this phrase, and how long it would be."""
        needle = "".join(gram)
        text = self.by_gram.get(gram)
        places = self.anchors.get(gram, set()) | ({(text.mask.find(needle), len(text.mask))} if text else set())
        found = mask.find(needle)
        for _ in range(MAX_PLACES):
            if found < 0:
                return
            yield from ((found - offset, length) for offset, length in places if found >= offset)
            found = mask.find(needle, found + 1)

    def _numbers_at(self, reading: Reading, start: int, inside: str) -> list[str]:
        """The numbers of a part. At its ends it has no more than the task: the others belong to what is around it."""
        first = reading.mask.count("#", 0, start)
        groups = reading.groups[first : first + inside.count("#")]
        task = self.by_mask[inside][0].groups
        if inside.startswith("#"):
            groups[0] = groups[0][-len(task[0]) :]
        if inside.endswith("#"):
            groups[-1] = groups[-1][: len(task[-1])]
        return [number for group in groups for number in group]

    def _in_pieces(self, reading: Reading) -> Iterator[Match]:
        """Short texts that are a line or a sentence of this one, or several."""
        parts = reading.pieces if self.pieces else []
        for first in range(len(parts)):
            mask, numbers = "", list[str]()
            for part in parts[first : first + PIECES_OF_TEXT]:
                mask, numbers = mask + part.mask, numbers + part.numbers
                if len(mask) > self.longest_piece:
                    break
                if mask in self.pieces and mask != reading.mask:
                    yield from self._compare_masked(mask, numbers, reading)

    def _compare_masked(self, mask: str, numbers: list[str], reading: Reading) -> list[Match]:
        """What has the words of a task: the task itself, or one with other numbers."""
        same = self.by_numbers.get((mask, *numbers))
        if same is not None:
            if mask == reading.mask:
                return [_same(same, "normalised", "whole", reading)]
            return [_same(same, "ngram", "within", reading)]
        same = self.by_digits.get((mask, "".join(numbers)))
        if same is not None and len(same.numbers) != len(numbers):  # `1.5` without its point
            return [_match_with_other_numbers(same, numbers, "near", reading)]
        sisters = self.by_mask[mask]
        if not sisters[0].templated:
            closest = min(sisters, key=lambda text: _different(text.numbers, numbers))
            return [_match_with_other_numbers(closest, numbers, "near", reading)]
        found = []
        for rest, number in rests_of(mask, numbers):
            if texts := self.by_rest.get(rest):
                # Of texts that differ in one number alone, the one whose number is nearest.
                value = _value(number)
                place = bisect_left(texts, value, key=lambda one: one[0])
                text = min(texts[max(0, place - 1) : place + 1], key=lambda one: abs(one[0] - value))[2]
                agreeing = sum(map(len, numbers)) - len(number)
                found.append(
                    _match_with_other_numbers(
                        text, numbers, "near" if agreeing >= self.enough_digits else "one", reading
                    )
                )
        return found or [_match_with_other_numbers(sisters[0], numbers, "many", reading)]

    def _parts(self, reading: Reading, texts: list[TaskText]) -> Iterator[Match]:
        """Texts of which this one has most of the telling phrases; `texts`: the text of each phrase that it has."""
        for text, count in Counter(texts).items():
            overlap = count / len(text.grams)
            if overlap < MIN_SOME_OVERLAP:
                continue
            theirs = set(grams_of(reading.run, GRAM_WORDS))
            if overlap < MIN_OVERLAP and (count < MIN_GRAMS_OF_PART or count < 0.9 * len(theirs)):
                telling = [(at, gram) for at, gram in enumerate(grams_of(text.run, GRAM_WORDS)) if gram in text.grams]
                places = {at + n for at, _ in telling for n in range(GRAM_WORDS)}
                covered = {at + n for at, gram in telling if gram in theirs for n in range(GRAM_WORDS)}
                if len(covered) < MIN_WORDS_COVERED * len(places):
                    continue
            for one in self.by_mask[text.mask]:
                level: Level = "prompt" if reading.from_prompt else "near"
                yield Match(text=one, kind="ngram", level=level, overlap=overlap, row_key=hash(reading.mask))


def closeness(match: Match) -> tuple[int, float]:
    """The smaller, the closer."""
    order = ("exact", "normalised", "within", "numbers", "ngram")
    return order.index("within" if match.kind == "ngram" and match.overlap == 1 else match.kind), -match.overlap


def readings_of(text: str, from_prompt: bool, longest: int) -> Iterable[Reading]:
    """The text, or pieces of one that is longer than memory likes; each is longer than any task."""
    size = max(CHUNK, 4 * longest)
    if len(text) <= size:
        return (Reading(text, from_prompt=from_prompt),)
    more = 2 * longest + _OVERLAP
    return (Reading(text[at : at + size + more], from_prompt=from_prompt) for at in range(0, len(text), size))


def _value(number: str) -> int:
    return int(number[:18]) if number.isdecimal() else 0


def _different(mine: list[str], theirs: list[str]) -> int:
    return sum(one != other for one, other in zip(mine, theirs, strict=False)) + abs(len(mine) - len(theirs))


def _same(text: TaskText, kind: Kind, level: Level, reading: Reading) -> Match:
    level = "prompt" if reading.from_prompt else level
    return Match(text=text, kind=kind, level=level, overlap=1.0, row_key=hash(reading.text))


def _match_with_other_numbers(text: TaskText, numbers: list[str], level: Level, reading: Reading) -> Match:
    level = "prompt" if reading.from_prompt else level
    overlap = 1 - _different(text.numbers, numbers) / max(text.n_words, 1)
    return Match(text=text, kind="numbers", level=level, overlap=max(overlap, 0.0), row_key=hash((text.mask, *numbers)))


MIN_TURNED = 16
"""Letters of the shortest text that is looked for in rot13 as a whole."""
TURNED_GRAMS = 8
"""Phrases of a text that it is looked for by in rot13; more would make the index larger than the tasks' own."""
_LONG, _MEMORY = 200, 500


class RowSearch:
    """Looks rows up in several indexes; most rows resemble nothing in any, and are done with at the first look."""

    def __init__(self, indexes: list[TaskIndex]):
        self.indexes = indexes
        self.grams: frozenset[Gram] = frozenset().union(*(index.grams for index in indexes))
        self.whole = {name for index in indexes for name in (*index.by_mask, *index.by_raw)}
        self.solid: frozenset[str] = frozenset().union(*(index.by_solid for index in indexes))
        self.longest = max((index.longest for index in indexes), default=0)
        self.has_pieces = any(index.pieces for index in indexes)
        # What rot13 and reversal would make of them: the rows are turned only where one of these stands in them.
        self.turned_grams: dict[Gram, Turn] = {}
        self.turned_whole: dict[str, Turn] = {}
        for text in (text for index in indexes for text in index.texts):
            last = len(text.run) - GRAM_WORDS
            for at in range(0, last + 1, max(1, last // TURNED_GRAMS)):  # spread over all of the text
                gram = tuple(text.run[at : at + GRAM_WORDS])
                self.turned_grams[tuple(map(rot13, gram))] = rot13
                self.turned_grams[tuple(map(reversed_text, gram[::-1]))] = reversed_text
        for mask in (mask for index in indexes for mask in index.by_mask if len(mask) >= MIN_TURNED):
            self.turned_whole |= {turn(mask): turn for turn in (rot13, reversed_text)}
        self.first_look = self.grams.union(self.turned_grams)
        self._without_match: set[str] = set()

    def find(self, row: Row) -> dict[int, list[Match]]:
        """Number of the index -> what the row holds."""
        found: dict[int, list[Match]] = {}
        for text, from_prompt in row_texts(row).items():
            if text in self._without_match:
                continue
            matched = self._look(text, from_prompt, found, may_be_turned=True)
            if not matched and len(text) >= _LONG:  # system prompts come again and again
                if len(self._without_match) >= _MEMORY:
                    self._without_match.clear()
                self._without_match.add(text)
        return found

    def _look(self, text: str, from_prompt: bool, found: dict[int, list[Match]], *, may_be_turned: bool) -> bool:
        """Add what the text holds to `found`, also in rot13 or from back to front; whether there was anything."""
        matched = False
        for reading in readings_of(text, from_prompt, self.longest):
            run = reading.run
            hits = self.first_look.intersection(zip(run, run[1:], run[2:], run[3:], run[4:], strict=False))
            if may_be_turned:
                turns = {self.turned_grams[gram] for gram in hits & self.turned_grams.keys()} if hits else set()
                if reading.mask in self.turned_whole:
                    turns.add(self.turned_whole[reading.mask])
                for turn in turns:
                    # Only ASCII letters can be turned; the others look like some, and are folded to them.
                    plain = reading.text if reading.text.isascii() else " ".join(reading.words)
                    matched |= self._look(turn(plain), from_prompt, found, may_be_turned=False)
            is_whole = reading.mask in self.whole or text.strip() in self.whole or reading.solid in self.solid
            if not (hits or self.has_pieces or is_whole):
                continue
            for number, index in enumerate(self.indexes):
                if matches := index.matches(reading, hits & index.grams if hits else hits):
                    found.setdefault(number, []).extend(matches)
                    matched = True
        return matched


# What counts as a leak is decided when all rows have passed. A near copy in too many different rows is a template,
# unless a text with distinctive words appears with other numbers, which is how a test set is multiplied. Of templates
# only those rows are copies that `tasks.Family` can tell from accidents. A text in a prompt that many rows share is no
# leak.

MAX_VARIANTS = 20
"""Different rows that may be near copies of one task; with more, task and rows are of one family."""
MAX_SHARE = 0.5
"""Of the rows that may have a text as a part; with more, it is part of their prompt."""
_FEW_WORDS = 3


@dataclass(slots=True)
class Sightings:
    """The rows that hold one task text in one way."""

    best: Match
    row: int
    """The first with that best copy."""
    rows: int = 0
    variants: set[int] = field(default_factory=set)

    def add(self, match: Match, row: int) -> None:
        self.rows += 1
        is_like = match.kind == self.best.kind and match.overlap == self.best.overlap
        if not is_like and closeness(match) < closeness(self.best):
            self.best, self.row = match, row
        if len(self.variants) <= MAX_VARIANTS:
            self.variants.add(match.row_key)


Seen = tuple[TaskText, Level]


@dataclass(slots=True)
class ContaminationFinding:
    """What is leaked, and what is not counted."""

    leaked: dict[TaskText, Sightings]
    """The closest copy of each text."""
    rows: int
    alike: set[TaskText]
    """Texts that share a template with rows, and are not leaked."""
    alike_rows: int
    shared: set[TaskText]
    """Texts that stand in a prompt of many rows, and are not leaked otherwise."""


@dataclass(slots=True)
class Tally:
    """Counts while the rows pass."""

    seen: dict[Seen, Sightings] = field(default_factory=dict)
    rows: Counter[tuple[Seen, ...]] = field(default_factory=Counter)
    """What was seen together in a row -> rows."""
    met: dict[tuple[Family, Meeting], set[int]] = field(default_factory=dict)

    def add(self, row: int, matches: Iterable[Match]) -> None:
        closest: dict[Seen, Match] = {}
        for match in matches:
            known = closest.setdefault((match.text, match.level), match)
            if known is not match and closeness(match) < closeness(known):
                closest[match.text, match.level] = match
        for key, match in closest.items():
            self.seen.setdefault(key, Sightings(match, row)).add(match, row)
            if (match.level == "one" or match.level == "many") and match.text.family is not None:
                self.met.setdefault((match.text.family, match.level), set()).add(match.row_key)
        self.rows[tuple(closest)] += 1

    def finding(self, n_rows: int, scale: float) -> ContaminationFinding:
        """`scale`: rows for each sampled one."""
        copies = {
            (family, how)
            for (family, how), rows in self.met.items()
            if family.are_copies(how, len(rows), n_rows, scale)
        }
        counted = {seen for seen, sightings in self.seen.items() if _is_leak(seen, sightings, copies, n_rows)}
        leaked: dict[TaskText, Sightings] = {}
        for text, level in self.seen:
            if (text, level) in counted:
                new, known = self.seen[text, level], leaked.get(text)
                if known is None or (*closeness(new.best), new.row) < (*closeness(known.best), known.row):
                    leaked[text] = new
        other = [(text, level) for text, level in self.seen if text not in leaked]
        alike = {text for text, level in other if level in ("near", "one", "many")}
        return ContaminationFinding(
            leaked=leaked,
            rows=sum(count for seen, count in self.rows.items() if not counted.isdisjoint(seen)),
            alike=alike,
            alike_rows=sum(
                count
                for seen, count in self.rows.items()
                if counted.isdisjoint(seen) and any(level in ("near", "one", "many") for _, level in seen)
            ),
            shared={text for text, _ in other} - alike,
        )


def _is_leak(seen: Seen, sightings: Sightings, copies: set[tuple[Family, Meeting]], n_rows: int) -> bool:
    text, level = seen
    many = len(sightings.variants) > MAX_VARIANTS
    if level == "whole":
        says_little = text.n_words < _FEW_WORDS and "#" not in text.mask
        return not (says_little and sightings.rows > MAX_VARIANTS)
    if level == "within":
        return not many or (not text.is_short and sightings.rows <= MAX_SHARE * n_rows)
    if level == "prompt":
        return sightings.rows <= MAX_VARIANTS
    if level == "near":
        return not many or (sightings.best.kind == "numbers" and text.has_own_words)
    return (not many or not text.is_short) and (text.family, level) in copies
