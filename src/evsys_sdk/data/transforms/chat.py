"""Rows become conversations.

In: rows with a question and an answer in their columns, or with `messages`. Out: the same rows with `messages`; the
columns they had stay beside it, for the transforms and metrics that come after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import model_validator

from evsys_sdk.config.base import Params
from evsys_sdk.data.columns import (
    ANSWER_COLUMNS,
    PROMPT_COLUMNS,
    BadRow,
    as_text,
    find_answer,
    find_prompt,
    keys_of,
)
from evsys_sdk.data.templates import Render, Template, compile_template
from evsys_sdk.data.transforms.base import Change, RowByRow
from evsys_sdk.protocols import Row
from evsys_sdk.registry import register_transform

Message = dict[str, Any]


@register_transform("jsonl_to_chat")
class JsonlToChat(RowByRow):
    """Give every row `messages`: a user turn and the assistant's answer, from templates or from known columns.

    Without templates, a row that has `messages` keeps them.
    """

    cfg: Config

    class Config(Params):
        user_template: Template | None = None
        """Text with `{column}` holes; by default the first of prompt, query, question, instruction, input."""
        assistant_template: Template | None = None
        """By default the first of completion, response, answer, output, target, tool_slug."""
        system_prompt: str | None = None
        """Plain text, put first; it replaces a system message that the row brings along."""
        prompt_only: bool = False
        """Leave the assistant's turn out: rows to be answered, not to be imitated."""

        @model_validator(mode="after")
        def _one_meaning(self) -> JsonlToChat.Config:
            if self.prompt_only and self.assistant_template is not None:
                raise ValueError("prompt_only leaves out the turn that assistant_template describes; keep one")
            return self

    def changer(self) -> Change:
        cfg = self.cfg
        user = compile_template(cfg.user_template) if cfg.user_template is not None else _prompt
        answer = compile_template(cfg.assistant_template) if cfg.assistant_template is not None else _answer
        build = _builder(user, None if cfg.prompt_only else answer, cfg.system_prompt)
        if cfg.user_template is not None or cfg.assistant_template is not None:
            return build
        keep = _keeper(prompt_only=cfg.prompt_only, system=cfg.system_prompt)
        return lambda row: keep(row) if row.get("messages") is not None else build(row)


def _builder(user: Render, answer: Render | None, system: str | None) -> Callable[[Row], Row]:
    if system is None and answer is not None:  # the usual case, spelt out because it runs a million times

        def pair(row: Row) -> Row:
            turns = [{"role": "user", "content": user(row)}, {"role": "assistant", "content": answer(row)}]
            return {**row, "messages": turns}

        return pair

    def build(row: Row) -> Row:
        turns = [] if system is None else [_message("system", system)]
        turns.append(_message("user", user(row)))
        if answer is not None:
            turns.append(_message("assistant", answer(row)))
        return {**row, "messages": turns}

    return build


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _keeper(*, prompt_only: bool, system: str | None) -> Callable[[Row], Row]:
    def keep(row: Row) -> Row:
        turns = row["messages"]
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise BadRow("has `messages` that are not a list of mappings with `role` and `content`")
        if system is not None:
            turns = [_message("system", system), *(turn for turn in turns if turn.get("role") != "system")]
        if prompt_only:
            turns = _until_the_answer(turns)
        return row if turns is row["messages"] else {**row, "messages": turns}

    return keep


def _until_the_answer(turns: list[Message]) -> list[Message]:
    end = len(turns)
    while end and turns[end - 1].get("role") == "assistant":
        end -= 1
    return turns[:end]


def _prompt(row: Row) -> str:
    text = find_prompt(row)
    if text is None:
        raise BadRow(
            f"has nothing to ask: none of {', '.join(PROMPT_COLUMNS)}; it has: {keys_of(row)}; set user_template"
        )
    return text


def _answer(row: Row) -> str:
    value = find_answer(row)
    if value is None:
        raise BadRow(
            f"has no answer: none of {', '.join(ANSWER_COLUMNS)}; it has: {keys_of(row)}; "
            "set assistant_template, or prompt_only"
        )
    return as_text(value)
