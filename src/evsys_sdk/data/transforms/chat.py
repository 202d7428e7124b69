"""Rows become conversations.

In: rows with a question and an answer in their columns, or with `messages`. Out: the same rows with `messages`; the
columns they had stay beside it, for the transforms and metrics that come after.
"""

from __future__ import annotations

from pydantic import model_validator

from evsys_sdk.config.base import JsonDict, Params
from evsys_sdk.data.columns import (
    ANSWER_COLUMNS,
    PROMPT_COLUMNS,
    BadRow,
    Template,
    as_text,
    compile_template,
    find_answer,
    find_messages,
    find_prompt,
    refuse_row,
)
from evsys_sdk.data.transforms.base import Change, RowByRow
from evsys_sdk.protocols import Row
from evsys_sdk.registry import register_transform

Message = JsonDict


@register_transform("jsonl_to_chat")
class JsonlToChat(RowByRow):
    """Give every row `messages`: a user turn and the assistant's answer, from templates or from known columns.

    Without templates, a row that has `messages` keeps them. A known column may hold messages in place of a text.
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
        system, prompt_only = cfg.system_prompt, cfg.prompt_only
        has_template = cfg.user_template is not None or cfg.assistant_template is not None

        def build(row: Row) -> Row:
            prompt, completion = user(row), "" if prompt_only else answer(row)
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if system is not None:
                others = (turn for turn in turns if turn.get("role") != "system")
                turns = [{"role": "system", "content": system}, *others]
            if not prompt_only:
                last = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
                turns = [*turns, *last]
            return {**row, "messages": turns}

        def build_pair(row: Row) -> Row:  # the usual case, spelt out because it runs a million times
            prompt, completion = user(row), answer(row)
            if not (isinstance(prompt, str) and isinstance(completion, str)):
                return build(row)
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            return {**row, "messages": turns}

        make = build_pair if system is None and not prompt_only else build

        def keep_or_make(row: Row) -> Row:
            turns = row.get("messages")
            if turns is None:
                return make(row)
            if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
                raise BadRow("has `messages` that are not a list of mappings with `role` and `content`")
            kept = turns
            if system is not None:
                others = (turn for turn in turns if turn.get("role") != "system")
                kept = [{"role": "system", "content": system}, *others]
            if prompt_only:
                end = len(kept)
                while end and kept[end - 1].get("role") == "assistant":
                    end -= 1
                kept = kept[:end]
            return row if kept is turns else {**row, "messages": kept}

        return make if has_template else keep_or_make


def _prompt(row: Row) -> str | list[Message]:
    if messages := find_messages(row, PROMPT_COLUMNS):
        return messages
    text = find_prompt(row)
    if text is None:
        raise refuse_row(row, "nothing to ask", PROMPT_COLUMNS, "user_template")
    return text


def _answer(row: Row) -> str | list[Message]:
    if messages := find_messages(row, ANSWER_COLUMNS):
        return messages
    value = find_answer(row)
    if value is None:
        raise refuse_row(row, "no answer", ANSWER_COLUMNS, "assistant_template, or prompt_only")
    return as_text(value)
