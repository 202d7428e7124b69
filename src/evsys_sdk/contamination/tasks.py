"""Which texts of tasks and rows are compared, which tasks come from one template, and what two benchmarks share.

In: training rows and `HarborTask`s. Out: the texts of a row (`row_texts`); `TaskText`s, one for all tasks with the same
words and numbers, without texts that many tasks share which want different things; the `Overlap` of two benchmarks.

Of a row count: its messages, the conversation up to its last question, its instruction and history, its inputs, prompt
and answer columns, what its `metadata` (keys too) and the descriptions of its `tools` say; of a row in no known shape
every text column. Answers shorter than 40 characters do not count: that two tasks have the same answer is no leak.
HTML entities and base64 are decoded. Of a task count: the instruction with the history before it,
and what is expected where it is a text of at least 12 words. Images count by their address. A task's system prompt,
rubric, tests and the rest of its `metadata` do not count.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from evsys_sdk.answers import parsed_json
from evsys_sdk.contamination.normalize import Gram, Reading, decoded_texts, grams_of, may_be_coded, words_of
from evsys_sdk.data.columns import ANSWER_COLUMNS, PROMPT_COLUMNS, find_prompt
from evsys_sdk.data_types import HarborTask, InProcessVerifier, block_to_image_src
from evsys_sdk.files import to_json
from evsys_sdk.protocols import Row
from evsys_sdk.rollout.task_dirs import contents_sha256, task_directory

MIN_ANSWER_CHARS = 40
MIN_ANSWER_WORDS = 12
MIN_ASIDE_CHARS = 20
"""A text in `metadata` or in a tool's description counts from this length on; categories and names are shorter."""
MIN_LAST_TURN_WORDS = 8
"""A task's last turn counts without the turns before it when it is at least this long; `Continue.` is no copy."""
_SHAPED = frozenset(("messages", "instruction", "inputs"))
_SYSTEM = ("system", "developer")
_ANSWERS = frozenset((*ANSWER_COLUMNS, "target_assistant", "expected", "label"))
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_COLUMNS = _ANSWERS.union(PROMPT_COLUMNS, _THOUGHTS)
_NO_DIGITS = str.maketrans("0123456789", "ghijklmnop")  # `1.png` and `2.png` do not differ in a number
_ASIDES = ("metadata", "tools", "functions")
_WITH_ASIDES = frozenset((*_ASIDES, "messages"))
_ASIDE = frozenset(("id", "task_id", "metadata", "verifier", "split", "source"))


def content_with_images(content: object) -> str:
    """The text of a message's content, with the address (or, of an image by value, the hash) of each image."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = []
    for block in content:
        if isinstance(block, dict):
            src = block_to_image_src(block)
            if src is not None:
                digest = hashlib.sha256(src.encode(errors="replace")).hexdigest()
                parts.append(f"image{digest.translate(_NO_DIGITS)}")
            elif isinstance(block.get("text"), str) and block["text"]:
                parts.append(block["text"])
    return "\n".join(parts)


def task_texts(task: HarborTask) -> Iterator[tuple[str, str]]:
    """The texts by which a task is recognised, each with the part it is: `instruction` or `answer`."""
    last = next(decoded_texts(content_with_images(task.instruction)))
    before = _history(task.metadata)
    if before:
        yield "instruction", "\n".join([*before, last])
    if not before or len(words_of(last)) >= MIN_LAST_TURN_WORDS:
        yield "instruction", last
    expected = task.verifier.expected if isinstance(task.verifier, InProcessVerifier) else None
    if isinstance(expected, str) and len(words_of(expected)) >= MIN_ANSWER_WORDS:
        yield "answer", expected


def _history(metadata: object) -> list[str]:
    history = metadata.get("history") if isinstance(metadata, dict) else None
    return [text for role, text in _spoken(history) if role not in _SYSTEM]


def row_texts(row: Row) -> dict[str, bool]:
    """The texts of a row that training may teach, decoded, each once, and whether the system says it."""
    plain: dict[str, bool] = {}
    shaped = not _SHAPED.isdisjoint(row)
    for name, value in row.items():
        if name not in _SHAPED and (name in _ASIDE or (shaped and name not in _COLUMNS)):
            continue
        if not isinstance(value, str):
            for text, from_system in _texts_in(value):
                plain[text] = from_system and plain.get(text, True)
        elif name not in _ANSWERS or len(value) >= MIN_ANSWER_CHARS:
            plain[value] = name == "system"
    if row.get("input") and isinstance(row.get("instruction"), str):
        plain[str(find_prompt(row))] = False
    if "verifier" in row:  # a row that is a task is also known by its turns before the last and by a long answer
        plan, before = row["verifier"], _history(row.get("metadata"))
        if before:
            plain["\n".join([*before, content_with_images(row.get("instruction"))])] = False
        expected = plan.get("expected") if isinstance(plan, dict) else None
        if isinstance(expected, str) and len(expected) >= MIN_ANSWER_CHARS:
            plain[expected] = False
    if not _WITH_ASIDES.isdisjoint(row):
        asides = [row.get(name) for name in _ASIDES]
        messages = row.get("messages")
        if isinstance(messages, list):
            asides += [message["tools"] for message in messages if isinstance(message, dict) and "tools" in message]
        for aside in filter(None, asides):
            for text in _nested_texts(aside):
                if len(text) >= MIN_ASIDE_CHARS:
                    plain.setdefault(text, True)  # many rows share their tools, as they share a system prompt
    if not any(map(may_be_coded, plain)):
        return plain
    texts: dict[str, bool] = {}
    for text, from_system in plain.items():
        for said in decoded_texts(text):
            texts[said] = from_system and texts.get(said, True)
    return texts


def _texts_in(value: object) -> Iterator[tuple[str, bool]]:
    """Of messages, content blocks, or whatever else holds texts; of each whether the system says it."""
    spoken = _spoken(value)
    for role, text in spoken:
        if role != "assistant" or len(text) >= MIN_ANSWER_CHARS:
            yield text, role in _SYSTEM
    if len(spoken) > 2:
        # All that was said up to the last question, where there is more than that question.
        turns = [one for one in spoken if one[0] not in _SYSTEM]
        last = max((index for index, (role, _) in enumerate(turns) if role != "assistant"), default=0)
        if last:
            yield "\n".join(text for _, text in turns[: last + 1]), False
    if spoken:
        yield from ((text, False) for text in _beside_content(value))
    else:
        blocks = content_with_images(value) if isinstance(value, list) else ""
        yield from ((text, False) for text in ([blocks] if blocks else _nested_texts(value)))


def _nested_texts(value: object) -> Iterator[str]:
    """Every text in lists and mappings, however deep; of keys those that are long enough to say something."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            yield from (key for key in one if isinstance(key, str) and len(key) >= MIN_ASIDE_CHARS)
            # A stack gives the last one first: reversed, texts come in the row's order.
            waiting += reversed([*one.values()])
        elif isinstance(one, list | tuple):
            waiting += reversed(one)


def _spoken(messages: object) -> list[tuple[str, str]]:
    """Role and text of every message that says something, also of what it hands to tools."""
    spoken = []
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(role := message.get("role"), str):
            content = message.get("content")
            text = content if isinstance(content, str) else content_with_images(content)
            if text:
                spoken.append((role, text))
            calls = message.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                function = call.get("function") if isinstance(call, dict) else None
                arguments = function.get("arguments") if isinstance(function, dict) else None
                values = arguments.values() if isinstance(arguments, dict) else [arguments]
                spoken += ((role, value) for value in values if isinstance(value, str) and value)
    return spoken


def _beside_content(messages: object) -> Iterator[str]:
    """What messages say in other keys than `content`: thoughts, refusals, arguments of calls; also in content blocks
    that are neither text nor image. Names, ids and roles are shorter than what counts."""
    found: list[object] = []
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            found += [value for key, value in message.items() if key not in ("role", "content", "tools")]
            blocks = message.get("content")
            for block in blocks if isinstance(blocks, list) else ():
                if isinstance(block, dict) and block_to_image_src(block) is None:
                    found += [value for key, value in block.items() if key not in ("type", "text")]
    for text in _nested_texts(found):
        if len(text) >= MIN_ASIDE_CHARS:
            yield text
            # Arguments are JSON in a text, in which a line break is a backslash and an n.
            inside = parsed_json(text) if text.lstrip()[:1] in ("{", "[") else None
            yield from (one for one in _nested_texts(inside) if len(one) >= MIN_ASIDE_CHARS)


# Tasks and rows from one template: when is a row that shares all words with a task, and not the numbers, a copy?
#
# In: the task texts of a template (a family), and the sampled rows that look as if they came from it too. Out: for
# rows that differ from a task in one number, and for those that differ in several, whether they can be
# distinguished from rows that the template made by accident.
#
# If the rows were all fresh, a share `chance` of them would meet a task. It is learned from how often rows among
# themselves, and tasks among themselves, meet. So the rows of the family that meet no task say how many met one by
# accident. Those that met one are copies where accidents are less than 0.5 % of all rows, and do not explain so many.


Meeting = Literal["one", "many"]
"""A row and a task of the same words differ in one number, or in several."""
PHRASE_WORDS = 3
SHORT_RUN = 4
MAX_NUMBERS = 50
"""That are left out one by one; a table of thousands in an instruction would fill the memory."""
MAX_FALSE = 0.005
"""Share of rows that may be suspected by accident: half of the goal, since it is an estimate."""
MAX_COINCIDENCE = 0.01
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
    """The family's tasks have hardly any words, such as `What is 2 + 2?`."""

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
        # A fresh row meets each task with the share of pairs that meet; 1 - exp(-sum) is the chance to meet any
        # (Poisson). The 1 below the line is for families of one text, which have no pairs.
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
        # Of fresh rows, chance / (1 - chance) meet a task for each one that meets none: so many of `met` are accidents.
        if chance > CERTAIN or min(strangers * chance / (1 - chance), met) > tolerated:
            return False
        # `DOUBT` multiplies the odds, not the chance, which could then exceed 1.
        return chernoff_bound(met, met + strangers, DOUBT * chance / (1 + (DOUBT - 1) * chance)) <= MAX_COINCIDENCE


def chernoff_bound(met: float, tries: float, chance: float) -> float:
    """An upper bound (Chernoff's) of the probability that `met` or more of `tries` succeed."""
    share = met / tries if tries else 0.0
    if share <= chance:
        return 1.0
    # The Kullback-Leibler divergence of `share` from `chance` (Hoeffding 1963, theorem 1).
    exponent = share * math.log(share / chance)
    if share < 1:
        exponent += (1 - share) * math.log((1 - share) / (1 - chance))
    return math.exp(-tries * exponent)


def family_key(phrases: set[Gram], of_tasks: Counter[Gram], of_rows: Counter[Gram]) -> Gram:
    """The phrase that most tasks share, and then most rows."""
    # The phrase itself breaks ties: the order of a set of texts differs from process to process.
    return max(phrases, key=lambda phrase: (of_tasks[phrase], of_rows[phrase], phrase))


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
                    # A run that is cut gets an empty word between its ends, so that no phrase crosses the gap.
                    run = reading.run
                    texts[key] = TaskText(
                        mask=reading.mask,
                        run=run if len(run) <= most else [*run[: most // 2], "", *run[-most // 2 :]],
                        numbers=reading.numbers,
                        groups=reading.groups,
                        n_words=len(reading.words),
                        length=len(raw),
                    )
                texts[key].raw.add(raw)
                texts[key].tasks.append((number, part))
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


def is_of_template(same: list[TaskText], of_tasks: Counter[Gram], of_rows: Counter[Gram]) -> bool:
    """Whether too many texts have these words, or most of their phrases; or whether the words are too few to tell."""
    text = same[0]
    if "#" in text.mask and text.says_little:
        return True
    own = phrases_of(text.run)
    recurring = sum(of_tasks[phrase] + of_rows[phrase] > TEMPLATE_TEXTS for phrase in own)
    share = TEMPLATE_SHARE if len(text.run) >= LONG_RUN else SHORT_TEMPLATE_SHARE
    return len(same) > TEMPLATE_TEXTS or recurring >= share * len(own)


# Tasks that two benchmarks have in common: a task is the same by what it asks and what it wants, wherever its file lies
# and whatever its id; case, punctuation and white space do not count.


TaskKey = tuple[str, str]
"""What a task asks, and what it wants; the latter is empty where the former says it all."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkTasks:
    """The tasks of one benchmark."""

    name: str
    place: str
    """In the config."""
    tasks: Sequence[HarborTask] = field(repr=False)

    @cached_property
    def questions(self) -> list[str]:
        texts = [next(task_texts(task))[1] for task in self.tasks]
        return [" ".join(words_of(text)) or text.strip() for text in texts]

    @cached_property
    def times_asked(self) -> Counter[str]:
        return Counter(self.questions)

    def keys(self, other: BenchmarkTasks) -> list[TaskKey]:
        """What each task is known by beside another benchmark: where no two tasks of either ask the same, the question
        alone, so that an answer in another form changes nothing."""
        keys = []
        for asked, task in zip(self.questions, self.tasks, strict=True):
            folder, plan = task_directory(task), task.verifier
            # The instruction of a task directory is about the files in it, and may be that of others.
            says_all = isinstance(plan, InProcessVerifier) and folder is None
            is_unique = max(self.times_asked[asked], other.times_asked[asked]) == 1
            expected = ""
            if other.times_asked[asked] and not (says_all and is_unique):
                own = plan.expected if isinstance(plan, InProcessVerifier) else repr(plan)
                expected = to_json(own) if folder is None else contents_sha256(folder, [folder])
            keys.append((asked, expected))
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How many tasks of a benchmark that selects are a test benchmark's too."""

    selecting: BenchmarkTasks
    test: BenchmarkTasks
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


def overlap_of(selecting: BenchmarkTasks, test: BenchmarkTasks) -> Overlap:
    """What the two have in common."""
    mine, theirs = selecting.keys(test), test.keys(selecting)
    both = set(mine) & set(theirs)
    return Overlap(
        selecting=selecting,
        test=test,
        shared=sum(key in both for key in mine),
        tested=sum(key in both for key in theirs),
    )
