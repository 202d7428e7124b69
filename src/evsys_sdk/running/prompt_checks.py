"""Whether the model is asked on a benchmark as it was trained to be asked.

In: a config. Out: warnings: a system prompt, a text around the question or a chat template that stands on one side
only, with the first prompt of both sides. The first rows and tasks are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from evsys_sdk.config.metadata import BenchmarkEntry
from evsys_sdk.config.models import ExperimentConfig, RunConfig
from evsys_sdk.config.source import source_of
from evsys_sdk.data_types import ChatMessagesRow, HarborTask, content_text, from_dict, task_messages
from evsys_sdk.errors import FOREIGN, EvsysError, Problem, shorten
from evsys_sdk.running.early_checks import first_rows, recipes_of
from evsys_sdk.running.scoring import find_benchmark

LOOKED_AT = 20
"""Rows and tasks of each side."""
SHOWN = 240
"""Characters of a prompt in a warning."""
SHORTEST_TEXT = 3
"""Letters that a text around the question has at least; less may be chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """How one side asks: the messages before the answer, of the first rows or tasks."""

    chats: list[list[dict[str, Any]]]
    template: str = ""
    """The text with placeholders that made the questions, where one is known."""

    @property
    def around(self) -> tuple[str, str]:
        """The text before and after what differs from question to question."""
        if "{" in self.template and "}" in self.template:
            return self.template.partition("{")[0], self.template.rpartition("}")[2]
        return _around(self.questions)

    @property
    def has_system(self) -> bool:
        return any(message.get("role") == "system" for chat in self.chats for message in chat)

    @property
    def questions(self) -> list[str]:
        """The last thing that the user says in each."""
        said = ([m for m in chat if m.get("role") == "user"] for chat in self.chats)
        return [content_text(turns[-1].get("content")) for turns in said if turns]

    @property
    def shown(self) -> str:
        """The first of them as text."""
        parts = [f"[{message.get('role')}] {content_text(message.get('content'))}" for message in self.chats[0]]
        return repr(shorten(" ".join(parts), SHOWN))


def prompt_warnings(config: ExperimentConfig) -> list[Problem]:
    """A warning for each benchmark that asks otherwise than training does, located."""
    found: dict[tuple[str, str], Problem] = {}
    runs = config.all_runs()
    trained = {index: prompts for index, run in enumerate(runs) if (prompts := _of_training(run, config)) is not None}
    for number, entry in enumerate(config.metadata.benchmark if trained else ()):
        asked = _of_tasks(entry, config)
        for index, prompts in trained.items() if asked is not None else ():
            for message in _differences(entry, asked, prompts, runs[index]):
                place = f"metadata.benchmark[{number}]"
                found.setdefault((place, message), Problem(path=place, message=message))
    return [source_of(config).located(problem) for problem in found.values()]


def _differences(entry: BenchmarkEntry, asked: Prompts | None, trained: Prompts, run: RunConfig) -> list[str]:
    assert asked is not None
    both = f"training asks {trained.shown}, {entry.role}/{entry.label} asks {asked.shown}"
    found = []
    if trained.has_system != asked.has_system:
        with_it = "the training prompts have" if trained.has_system else "the benchmark's prompts have"
        found.append(f"only {with_it} a system prompt: {both}")
    for where, text, other in (
        ("training prompts", trained.around, asked.questions),
        ("benchmark's prompts", asked.around, trained.questions),
    ):
        start, end = text
        missing = [part for part in (start, end) if len(part.strip()) >= SHORTEST_TEXT]
        if missing and not any(_has(question, start, end) for question in other):
            words = " and ".join(repr(shorten(part.strip(), 60)) for part in missing)
            found.append(f"only the {where} have the text {words} around the question: {both}")
            break
    if entry.chat_template is not None and run.backend.kind != "mock":
        template = shorten(" ".join(entry.chat_template.split()), 80)
        found.append(
            f"chat_template {template!r} renders the benchmark's prompts only; training uses the model's own template "
            f"({run.model.renderer_name or run.model.name}): {both}"
        )
    return found


def _around(questions: Sequence[str]) -> tuple[str, str]:
    """The text with which all questions begin, and that with which they end, up to a word's edge; what a template
    puts there. Nothing where there are too few different questions to tell."""
    if len(set(questions)) < 3:
        return "", ""
    start = _common(questions)
    end = _common([question[::-1] for question in questions])[::-1]
    return _to_edge(start), _to_edge(end[::-1])[::-1]


def _common(texts: Sequence[str]) -> str:
    low, high = min(texts), max(texts)
    differ = (index for index, (one, other) in enumerate(zip(low, high, strict=False)) if one != other)
    return low[: next(differ, min(len(low), len(high)))]


def _to_edge(text: str) -> str:
    """`Query: ` of `Query: re`: words that happen to begin alike are no template. A template ends in a mark."""
    marks = [index for index, letter in enumerate(text) if letter in ":\n>]}|#=\"'"]
    return text[: marks[-1] + 1] if marks else ""


def _has(question: str, start: str, end: str) -> bool:
    return question.startswith(start.rstrip()) and question.endswith(end.lstrip())


def _of_training(run: RunConfig, config: ExperimentConfig) -> Prompts | None:
    """How the first rows of the run's first data ask; None where they cannot be looked at cheaply."""
    blocks = list(chain.from_iterable(recipe.data for recipe in recipes_of(run)))
    try:
        seen = first_rows(blocks[0][1], config) if blocks else None
    except EvsysError:
        return None  # reported by the check of the rows
    chats = [chat for row in (seen.rows[:LOOKED_AT] if seen else []) if (chat := _chat_of(row))]
    templates = [spec.params.get("user_template") for spec in blocks[0][1].transforms] if blocks else []
    template = next((text for text in templates if isinstance(text, str)), "")
    return Prompts(chats=chats, template=template) if chats else None


def _chat_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages before the answer."""
    try:
        parsed = from_dict(row)
    except FOREIGN:
        return []
    if isinstance(parsed, HarborTask):
        return task_messages(parsed)
    if not isinstance(parsed, ChatMessagesRow):
        return []
    messages = [dict(message) for message in parsed.messages]
    last = max((index for index, message in enumerate(messages) if message.get("role") == "assistant"), default=None)
    return messages if last is None or parsed.target_assistant is not None else messages[:last]


def _of_tasks(entry: BenchmarkEntry, config: ExperimentConfig) -> Prompts | None:
    try:
        tasks = find_benchmark(entry, config).tasks[: entry.limit][:LOOKED_AT]
    except EvsysError:
        return None  # reported by the check of the entry
    if entry.agent_import_path is not None or not tasks:
        return None  # an agent words what it asks in its own way
    return Prompts(chats=[task_messages(task) for task in tasks])
