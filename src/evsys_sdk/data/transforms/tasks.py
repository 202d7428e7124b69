"""Rows become tasks to be tried, or examples to search a prompt with.

In: rows with a question and an answer in their columns. Out: rows of the published formats `harbor_task` and
`prompt_dataset`; the other columns go into `metadata`, where breakdowns look for them.
"""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from evsys_sdk.config.base import JsonDict, Name, Params
from evsys_sdk.data.columns import (
    ANSWER_COLUMNS,
    PROMPT_COLUMNS,
    BadRow,
    Template,
    compile_template,
    find_answer,
    find_messages,
    find_prompt,
    fingerprint,
    refuse_row,
    require,
)
from evsys_sdk.data.transforms.base import Change, RowByRow
from evsys_sdk.data_types import content_text
from evsys_sdk.errors import UnknownKind
from evsys_sdk.protocols import Row
from evsys_sdk.registry import register_transform, verifiers


@register_transform("to_harbor_task")
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
        expected_text = None if cfg.expected_template is None else compile_template(cfg.expected_template)
        fn_name, params, expected_key, id_key = cfg.fn_name, cfg.verifier_params, cfg.expected_key, cfg.task_id_key
        used = {"metadata", id_key, expected_key}
        ids: dict[str, int] = {}  # the row of an id from a column, or how often content has come

        def expect(row: Row) -> object:
            if expected_text is not None:
                return expected_text(row)
            value = find_answer(row) if expected_key is None else require(row, expected_key)
            if value is None:
                raise refuse_row(row, "no right answer", ANSWER_COLUMNS, "expected_key")
            messages = find_messages({"answer": value}, ["answer"])
            return value if messages is None else content_text(messages[-1].get("content"))

        def name_task(row: Row, task: Row) -> str:
            """Ids that differ: from the column, where two equal ones are an error, or from the content, numbered."""
            if id_key is None:
                name = f"task-{fingerprint(task).hex()[:12]}"
                ids[name] = ids.get(name, 0) + 1
                return name if ids[name] == 1 else f"{name}-{ids[name]}"
            name = str(require(row, id_key))
            if name in ids:
                raise BadRow(f"has the id {name!r} in {id_key!r}, and so has row {ids[name]}; ids must differ")
            ids[name] = len(ids)
            return name

        def change(row: Row) -> Row:
            chat = find_messages(row, PROMPT_COLUMNS) if cfg.instruction_template is None else None
            if chat and chat[-1]["role"] != "user":
                raise BadRow(f"has a prompt whose last message is the {chat[-1]['role']}'s; it must be the user's")
            task = {
                "instruction": chat[-1].get("content") if chat else instruction(row),
                "verifier": {
                    "kind": "in_process",
                    "fn_name": fn_name,
                    "expected": expect(row),
                    "params": dict(params),
                },
            }
            metadata, content = _metadata(row, used), task
            if chat and chat[:-1]:
                metadata["history"] = chat[:-1]
                content = {**task, "history": chat[:-1]}  # two chats may end with the same question
            return {"task_id": name_task(row, content), **task, "metadata": metadata}

        return change


def _prompt(row: Row) -> str:
    text = find_prompt(row)
    if text is None:
        raise refuse_row(row, "nothing to do", PROMPT_COLUMNS, "instruction_template")
    return text


def _metadata(row: Row, used: set[str | None]) -> Row:
    """The columns that have no field in the row, and what the row had in `metadata`."""
    own = row.get("metadata") or {}
    if not isinstance(own, dict):
        raise BadRow(f"has {type(own).__name__} in `metadata`; it must be a mapping")
    return {**{key: value for key, value in row.items() if key not in used}, **own}


@register_transform("to_prompt_example")
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
                # A value may be null as long as the column is there.
                "inputs": {name: row[name] if name in row else require(row, name) for name in names},
                "expected": None if answer is None else require(row, answer),
                "metadata": _metadata(row, {"metadata", answer, *names}),
            }

        return change
