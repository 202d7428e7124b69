"""Whether the model is asked on a benchmark as it was trained to be asked.

In: a config. Out: warnings: a system prompt, a text around the question or a chat template that stands on one side
only, with the first prompt of both sides. The first rows and tasks are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evsys_sdk.checks.blocks import recipes_of
from evsys_sdk.checks.rows import first_rows
from evsys_sdk.config.metadata import BenchmarkEntry
from evsys_sdk.config.schema import ExperimentConfig, RunConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.data.columns import parse_template
from evsys_sdk.data_types import ChatMessagesRow, HarborTask, content_text, from_dict, task_messages
from evsys_sdk.errors import FOREIGN, EvsysError, Problem, shorten
from evsys_sdk.eval.benchmark import BenchmarkLoader

LOOKED_AT = 20
"""Rows and tasks of each side."""
SHOWN = 240
"""Characters of a prompt in a warning."""
SHORTEST_GUESS = 3
"""Letters of a text around the questions that counts where no template is known; less may be chance."""
TEMPLATES = ("user_template", "instruction_template")
"""Params of transforms that put a text around the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """How one side asks: the messages before the answer, of the first rows or tasks."""

    chats: list[list[dict[str, Any]]]
    template: str = ""
    """The text with placeholders that made the questions, where one is known."""

    @property
    def texts(self) -> list[str]:
        """The fixed text before, between and after what differs from question to question, with single spaces."""
        if self.template:
            return [re.sub(r"\s+", " ", text) for text in parse_template(self.template)[0]]
        questions = self.questions
        if len(set(questions)) < 3:
            return [""]  # too few different questions to tell what a template put there
        start = _up_to_mark(_common_start(questions))
        end = _up_to_mark(_common_start([question[::-1] for question in questions]))[::-1]
        return [" ".join(text.split()) if len(text.strip()) >= SHORTEST_GUESS else "" for text in (start, end)]

    @property
    def has_system(self) -> bool:
        return any(message.get("role") == "system" for chat in self.chats for message in chat)

    @property
    def questions(self) -> list[str]:
        """The last thing that the user says in each."""
        said = ([message for message in chat if message.get("role") == "user"] for chat in self.chats)
        return [content_text(turns[-1].get("content")) for turns in said if turns]

    @property
    def shown(self) -> str:
        """The first of them as text."""
        parts = [f"[{message.get('role')}] {content_text(message.get('content'))}" for message in self.chats[0]]
        return repr(shorten(" ".join(parts), SHOWN))


def prompt_warnings(config: ExperimentConfig, benchmarks: BenchmarkLoader) -> list[Problem]:
    """A warning for each benchmark that asks otherwise than training does, located."""
    found: dict[tuple[str, str], Problem] = {}
    entries: list[tuple[str, BenchmarkEntry, Prompts]] = []
    for number, entry in enumerate(config.metadata.benchmark):
        try:
            tasks = benchmarks.get(entry).tasks[: entry.limit][:LOOKED_AT]
        except EvsysError:
            continue  # reported by the check of the entry
        if entry.agent_import_path is None and tasks:  # an agent words its questions itself
            asked = Prompts(chats=[task_messages(task) for task in tasks])
            entries.append((f"metadata.benchmark[{number}]", entry, asked))
    for run in config.all_runs() if entries else ():
        trained = _of_training(run, config)
        for place, entry, asked in entries if trained else ():
            for message in _differences(entry, asked, trained, run) if trained else ():
                found.setdefault((place, message), Problem(path=place, message=message))
    return [source_of(config).located(problem) for problem in found.values()]


def _differences(entry: BenchmarkEntry, asked: Prompts, trained: Prompts, run: RunConfig) -> list[str]:
    both = f"training asks {trained.shown}, {entry.role}/{entry.label} asks {asked.shown}"
    found = []
    if trained.has_system != asked.has_system:
        with_it = "the training prompts have" if trained.has_system else "the benchmark's prompts have"
        found.append(f"only {with_it} a system prompt: {both}")
    for where, texts, other in (
        ("training prompts", trained.texts, asked.questions),
        ("benchmark's prompts", asked.texts, trained.questions),
    ):
        fixed = [text.strip() for text in texts if text.strip()]
        if fixed and not any(_is_made_of(texts, question) for question in other):
            words = " and ".join(repr(shorten(text, 60)) for text in fixed)
            found.append(f"only the {where} have the text {words} around the question: {both}")
            break
    if entry.chat_template is not None and run.backend.kind != "mock":
        template = shorten(" ".join(entry.chat_template.split()), 80)
        found.append(
            f"chat_template {template!r} renders the benchmark's prompts only; training uses the model's own template "
            f"({run.model.renderer_name or run.model.name}): {both}"
        )
    return found


def _is_made_of(texts: Sequence[str], question: str) -> bool:
    """Whether a question begins with the first text, ends with the last and has the others between, in this order.

    Spaces at the edge of a text do not count, unless the text is so short that they tell it from a word's letters."""
    parts = [text if len(text.strip()) < SHORTEST_GUESS else text.strip() for text in texts]
    parts[0], parts[-1] = parts[0].lstrip(), parts[-1].rstrip()
    question = " ".join(question.split())
    if not question.startswith(parts[0]) or not question.endswith(parts[-1] if len(parts) > 1 else ""):
        return False
    at = len(parts[0])
    for part in parts[1:-1]:
        found = question.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return at + (len(parts[-1]) if len(parts) > 1 else 0) <= len(question)


def _common_start(texts: Sequence[str]) -> str:
    # What the first and the last in sorted order share, all between them share too.
    low, high = min(texts), max(texts)
    differ = (index for index, (one, other) in enumerate(zip(low, high, strict=False)) if one != other)
    return low[: next(differ, min(len(low), len(high)))]


def _up_to_mark(text: str) -> str:
    """`Query:` of `Query: re`: words that happen to begin alike are no template. A template ends in a mark."""
    marks = [index for index, letter in enumerate(text) if letter in ":\n>]}|#=\"'"]
    return text[: marks[-1] + 1] if marks else ""


def _of_training(run: RunConfig, config: ExperimentConfig) -> Prompts | None:
    """How the first rows of the run's first data ask; None where they cannot be looked at cheaply."""
    blocks = [data for recipe in recipes_of(run) for _, data in recipe.data]
    try:
        seen = first_rows(blocks[0], config) if blocks else None
    except EvsysError:
        return None  # reported by the check of the rows
    chats = []  # the messages before the answer
    for row in seen.rows[:LOOKED_AT] if seen else ():
        try:
            parsed = from_dict(row)
        except FOREIGN:
            continue
        if isinstance(parsed, HarborTask):
            chats.append(task_messages(parsed))
        elif isinstance(parsed, ChatMessagesRow):
            chat = [dict(message) for message in parsed.messages]
            answers = [index for index, message in enumerate(chat) if message.get("role") == "assistant"]
            has_answer = bool(answers) and parsed.target_assistant is None
            chats.append(chat[: answers[-1]] if has_answer else chat)
    chats = [chat for chat in chats if chat]
    if not chats:
        return None
    templates = [spec.params.get(key) for spec in blocks[0].transforms for key in TEMPLATES]
    return Prompts(chats=chats, template=next((text for text in templates if isinstance(text, str)), ""))


def prompt_search_problems(config: ExperimentConfig) -> list[Problem]:
    """Scores that a prompt search cannot make: it has no weights to score before it ends."""
    message = "gepa_prompt has no weights to score during the search; remove run_every"
    return [
        Problem(path=f"metadata.benchmark[{index}].run_every", message=message, value=entry.run_every)
        for index, entry in enumerate(config.metadata.benchmark)
        if entry.run_every is not None and _searches_prompts(config)
    ]


def prompt_search_warnings(config: ExperimentConfig) -> list[Problem]:
    """A prompt search whose result nothing can be compared with."""
    entries = config.metadata.benchmark
    if not _searches_prompts(config) or any(entry.baseline for entry in entries):
        return []
    message = "no benchmark scores the seed prompt, so the verdict cannot say whether the new prompt is better; "
    place = "metadata.benchmark[0].baseline" if entries else "metadata.benchmark"
    fix = "set baseline: true" if entries else "add a benchmark with baseline: true"
    return [source_of(config).located(Problem(path=place, message=message + fix))]


def _searches_prompts(config: ExperimentConfig) -> bool:
    return any(recipe.spec.kind == "gepa_prompt" for run in config.all_runs() for recipe in recipes_of(run))
