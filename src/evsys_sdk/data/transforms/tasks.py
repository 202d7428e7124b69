"""Rows become tasks to be tried, or examples to search a prompt with.

In: rows with a question and an answer in their columns. Out: rows of the published formats `harbor_task` and
`prompt_dataset`; the other columns go into `metadata`, where breakdowns look for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field, field_validator, model_validator

from evsys_sdk.config.base import JsonDict, Name, Params
from evsys_sdk.data.columns import (
    ANSWER_COLUMNS,
    PROMPT_COLUMNS,
    BadRow,
    find_answer,
    find_prompt,
    fingerprint,
    keys_of,
    required,
)
from evsys_sdk.data.templates import Template, compile_template
from evsys_sdk.data.transforms.base import Change, RowByRow
from evsys_sdk.errors import UnknownKind
from evsys_sdk.protocols import Row
from evsys_sdk.registry import register_transform, verifiers


@register_transform("to_harbor_task", yields=True)
class ToHarborTask(RowByRow):
    """Make every row a task that a registered verifier function scores."""

    cfg: Config

    class Config(Params):
        instruction_template: Template | None = None
        """Text with `{column}` holes; by default the first of prompt, query, question, instruction, input."""
        expected_key: Name | None = None
        """The column with the right answer; by default the first of completion, response, answer, output, ..."""
        expected_template: Template | None = None
        """The right answer as text with holes, instead of `expected_key`."""
        fn_name: Name = "exact_match"
        """The verifier function that compares answer and expectation."""
        verifier_params: JsonDict = Field(default_factory=dict)
        """Params of the verifier."""
        task_id_key: Name | None = None
        """The column with the task's id; by default the id follows from the content."""

        @model_validator(mode="after")
        def _one_expectation(self) -> ToHarborTask.Config:
            if self.expected_key is not None and self.expected_template is not None:
                raise ValueError("expected_key and expected_template are both set; keep one")
            return self

        @field_validator("fn_name")
        @classmethod
        def _is_registered(cls, name: str) -> str:
            try:
                verifiers.get(name)
            except UnknownKind as exc:
                raise ValueError(str(exc)) from exc
            return name

    def changer(self) -> Change:
        cfg = self.cfg
        instruction = _prompt if cfg.instruction_template is None else compile_template(cfg.instruction_template)
        expected = _expectation(cfg.expected_key, cfg.expected_template)
        name_task, fn_name, params = _namer(cfg.task_id_key), cfg.fn_name, cfg.verifier_params
        used = {"metadata", cfg.task_id_key, cfg.expected_key}

        def change(row: Row) -> Row:
            task = {
                "instruction": instruction(row),
                "verifier": {
                    "kind": "in_process",
                    "fn_name": fn_name,
                    "expected": expected(row),
                    "params": dict(params),
                },
            }
            return {"task_id": name_task(row, task), **task, "metadata": _metadata(row, used)}

        return change


def _prompt(row: Row) -> str:
    text = find_prompt(row)
    if text is None:
        columns = ", ".join(PROMPT_COLUMNS)
        raise BadRow(f"has nothing to do: none of {columns}; it has: {keys_of(row)}; set instruction_template")
    return text


def _answer(row: Row) -> Any:
    value = find_answer(row)
    if value is None:
        columns = ", ".join(ANSWER_COLUMNS)
        raise BadRow(f"has no right answer: none of {columns}; it has: {keys_of(row)}; set expected_key")
    return value


def _expectation(key: str | None, template: str | None) -> Callable[[Row], Any]:
    if template is not None:
        return compile_template(template)
    return _answer if key is None else lambda row: required(row, key)


def _namer(key: str | None) -> Callable[[Row, Row], str]:
    """Ids that differ: from the column, where two equal ones are an error, or from the content, where they count up."""
    used: dict[str, int] = {}

    def from_column(row: Row, task: Row) -> str:
        name = str(required(row, key or ""))
        if name in used:
            raise BadRow(f"has the id {name!r} in {key!r}, and so has row {used[name]}; ids must differ")
        used[name] = len(used)
        return name

    def from_content(row: Row, task: Row) -> str:
        name = f"task-{fingerprint(task).hex()[:12]}"
        used[name] = used.get(name, 0) + 1
        return name if used[name] == 1 else f"{name}-{used[name]}"

    return from_content if key is None else from_column


def _metadata(row: Row, used: set[str | None]) -> Row:
    """The columns that have no place of their own, and what the row had in `metadata`."""
    own = row.get("metadata") or {}
    if not isinstance(own, dict):
        raise BadRow(f"has {type(own).__name__} in `metadata`; it must be a mapping")
    return {**{key: value for key, value in row.items() if key not in used}, **own}


def _value(row: Row, key: str) -> Any:
    """The value, which may be null as long as the column is there."""
    return row[key] if key in row else required(row, key)


@register_transform("to_prompt_example", yields=True)
class ToPromptExample(RowByRow):
    """Make every row inputs and the output wanted."""

    cfg: Config

    class Config(Params):
        input_keys: list[Name] | None = Field(default=None, min_length=1)
        """The columns that are inputs; by default all but the expected one and `metadata`."""
        expected_key: Name | None = None
        """The column with the output wanted; by default the first of completion, response, answer, output, ...,
        and nothing where a row has none of them."""

    def changer(self) -> Change:
        inputs, key = self.cfg.input_keys, self.cfg.expected_key

        def change(row: Row) -> Row:
            answer = key or next((column for column in ANSWER_COLUMNS if row.get(column) is not None), None)
            names = [name for name in row if name not in (answer, "metadata")] if inputs is None else inputs
            return {
                "inputs": {name: _value(row, name) for name in names},
                "expected": None if answer is None else required(row, answer),
                "metadata": _metadata(row, {"metadata", answer, *names}),
            }

        return change
