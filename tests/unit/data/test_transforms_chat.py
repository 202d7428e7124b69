"""jsonl_to_chat: rows become conversations and lose nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from evsys_sdk.data.transforms import JsonlToChat
from evsys_sdk.errors import DataError

ROW = {"query": "weather in Oslo", "tool_slug": "WEATHER", "toolkit": "weather"}


def chat(row: dict[str, Any], **params: Any) -> list[Any]:
    (out,) = JsonlToChat(**params)([row])
    return [(message["role"], message["content"]) for message in out["messages"]]


def test_templates_make_a_question_and_an_answer() -> None:
    assert chat(ROW, user_template="Query: {query}", assistant_template="<answer>{tool_slug}</answer>") == [
        ("user", "Query: weather in Oslo"),
        ("assistant", "<answer>WEATHER</answer>"),
    ]


def test_the_columns_stay_and_the_given_row_is_not_changed() -> None:
    given = dict(ROW)
    (out,) = JsonlToChat()([given])
    assert given == ROW
    assert {key: out[key] for key in ROW} == ROW


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"prompt": "p", "query": "q", "completion": "c", "answer": "a"}, ["p", "c"]),
        ({"query": "q", "tool_slug": "T"}, ["q", "T"]),
        ({"question": "q", "answer": 4}, ["q", "4"]),
        ({"prompt": None, "input": "i", "target": "t"}, ["i", "t"]),
        ({"instruction": "Translate.", "input": "Hund", "output": "dog"}, ["Translate.\n\nHund", "dog"]),
        ({"instruction": "Greet.", "input": "", "output": "hi"}, ["Greet.", "hi"]),
        ({"question": "q", "response": {"tool": "x"}}, ["q", '{"tool": "x"}']),
    ],
)
def test_without_templates_known_columns_are_used(row: dict[str, Any], texts: list[str]) -> None:
    assert [content for _, content in chat(row)] == texts


def test_one_template_leaves_the_other_side_to_the_columns() -> None:
    assert [content for _, content in chat(ROW, assistant_template="-> {tool_slug}")] == [
        "weather in Oslo",
        "-> WEATHER",
    ]


def test_a_system_prompt_comes_first_and_is_plain_text() -> None:
    assert chat(ROW, system_prompt='Answer as {"tool": ...}.')[0] == ("system", 'Answer as {"tool": ...}.')


CHAT_COLUMNS = {
    "prompt": [{"role": "system", "content": "old"}, {"role": "user", "content": "2+2?"}],
    "completion": [{"role": "assistant", "content": "4"}],
}


@pytest.mark.parametrize(
    ("row", "params", "texts"),
    [
        (CHAT_COLUMNS, {}, ["old", "2+2?", "4"]),
        (CHAT_COLUMNS, {"system_prompt": "new"}, ["new", "2+2?", "4"]),
        (CHAT_COLUMNS, {"prompt_only": True}, ["old", "2+2?"]),
        (CHAT_COLUMNS, {"assistant_template": "four"}, ["old", "2+2?", "four"]),
        (CHAT_COLUMNS | {"completion": "4"}, {}, ["old", "2+2?", "4"]),
        ({"prompt": {"role": "user", "content": "2+2?"}, "completion": {"role": "assistant", "content": "4"}}, {},
         ["2+2?", "4"]),
    ],
)  # fmt: skip
def test_columns_of_messages_are_turns_and_not_json_text(row: Any, params: Any, texts: list[str]) -> None:
    assert [content for _, content in chat(row, **params)] == texts


def test_a_row_with_messages_passes_as_it_is() -> None:
    row = {"messages": [{"role": "user", "content": "hi"}], "query": "q"}
    (out,) = JsonlToChat()([row])
    assert out is row


def test_a_system_prompt_replaces_the_one_a_conversation_brings() -> None:
    turns = [{"role": "system", "content": "old"}, {"role": "user", "content": "hi"}]
    assert chat({"messages": turns}, system_prompt="new") == [("system", "new"), ("user", "hi")]
    assert turns[0]["content"] == "old"


def test_prompt_only_leaves_the_answer_out() -> None:
    assert chat({"query": "q"}, prompt_only=True) == [("user", "q")]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert chat({"messages": turns}, prompt_only=True) == [("user", "hi")]
    with pytest.raises(ValidationError, match="keep one"):
        JsonlToChat(prompt_only=True, assistant_template="{a}")


def test_a_missing_key_names_row_and_key_and_what_there_is() -> None:
    rows = [ROW, {"qury": "x", "tool_slug": "T"}]
    with pytest.raises(
        DataError,
        match=r"jsonl_to_chat: row 1 \(counting from 0\) has no 'query' \(closest: qury\); it has: qury, tool_slug",
    ):
        JsonlToChat(user_template="{query}")(rows)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "row 0 .*nothing to ask.*it has: text; set user_template"),
        ({"query": "x"}, "row 0 .*no answer.*it has: query; set assistant_template, or prompt_only"),
        ({"messages": "hi"}, "row 0 .*`messages` that are not a list"),
        ({"messages": ["hi"]}, "row 0 .*`messages` that are not a list"),
    ],
)
def test_a_row_that_says_nothing_is_named_with_the_remedy(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        JsonlToChat()([row])


def test_a_template_with_loose_braces_is_refused_before_any_row() -> None:
    with pytest.raises(ValidationError, match=r"write \{\{ for a brace"):
        JsonlToChat(user_template='{"q": "{query}"}')


def test_rows_stream_one_by_one() -> None:
    rows = JsonlToChat().stream(iter([ROW, {"bad": 1}]))
    assert next(rows)["messages"]
    with pytest.raises(DataError):
        next(rows)
