"""The formats of public datasets become rows that the algorithms read."""

from __future__ import annotations

from typing import Any

import pytest

from evsys_sdk.algorithms.dpo import read_preferences
from evsys_sdk.data.transforms import AlpacaToChat, SharegptToChat, ToPlainText, ToPreference
from evsys_sdk.errors import DataError


def said(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row["messages"]]


def one(transform: Any, row: dict[str, Any]) -> dict[str, Any]:
    (out,) = transform([row])
    return out


def test_sharegpt_turns_become_messages_and_other_columns_stay() -> None:
    row = {
        "id": "x1",
        "system": "Be brief.",
        "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4", "weight": 0}],
    }
    out = one(SharegptToChat(), row)
    assert said(out) == [("system", "Be brief."), ("user", "2+2?"), ("assistant", "4")]
    assert out["id"] == "x1" and "conversations" not in out and "system" not in out
    assert out["messages"][2]["weight"] == 0


def test_sharegpt_calls_and_tools_written_as_json_are_read() -> None:
    row = {
        "tools": '[{"name": "clock", "parameters": {}}]',
        "conversations": [
            {"from": "human", "value": "time?"},
            {"from": "function_call", "value": '{"name": "clock", "arguments": {"zone": "UTC"}}'},
            {"from": "observation", "value": "12:00"},
            {"from": "gpt", "value": "noon"},
        ],
    }
    out = one(SharegptToChat(), row)
    assert [message["role"] for message in out["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert out["messages"][1]["tool_calls"][0]["function"] == {"name": "clock", "arguments": {"zone": "UTC"}}
    assert out["tools"] == [{"type": "function", "function": {"name": "clock", "parameters": {}}}]


def test_sharegpt_speakers_of_ones_own_and_role_content_turns() -> None:
    row = {"chat": [{"role": "Alice", "content": "hi"}, {"role": "bot", "content": "hello"}]}
    assert said(one(SharegptToChat(key="chat", speakers={"Alice": "user"}), row)) == [
        ("user", "hi"),
        ("assistant", "hello"),
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": [{"from": "hooman", "value": "x"}]}, ["row 0", "'hooman'", "conversations[0]", "human"]),
        ({"conversations": [{"from": "human"}]}, ["conversations[0]", "`value`"]),
        ({"conversations": []}, ["list of turns"]),
        ({"conversation_s": []}, ["'conversations'", "closest: conversation_s"]),
        ({"conversations": [{"from": "function_call", "value": "clock()"}]}, ["conversations[0]", "not JSON"]),
        ({"conversations": [{"from": "gpt", "value": "x"}], "tools": "nope"}, ["tools", "not JSON"]),
    ],
)
def test_a_sharegpt_row_that_cannot_be_read_is_named_with_its_place(row: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        SharegptToChat()([row])
    assert all(word in str(caught.value) for word in words), caught.value


def test_alpaca_rows_ask_with_their_input_and_after_their_history() -> None:
    row = {
        "instruction": "Do.",
        "input": "Hund",
        "output": "dog",
        "history": [["a", "b"]],
        "system": "S",
        "n": 1,
    }
    out = one(AlpacaToChat(), row)
    assert said(out) == [
        ("system", "S"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "Do.\n\nHund"),
        ("assistant", "dog"),
    ]
    assert out["n"] == 1 and "instruction" not in out
    assert said(one(AlpacaToChat(system_prompt="T"), {"instruction": "Greet.", "input": None, "output": "hi"})) == [
        ("system", "T"),
        ("user", "Greet."),
        ("assistant", "hi"),
    ]


def test_an_alpaca_row_without_an_answer_is_named() -> None:
    with pytest.raises(DataError, match=r"row 1 .*has an empty 'output'"):
        AlpacaToChat()([{"instruction": "a", "output": "b"}, {"instruction": "a", "output": " "}])


def test_plain_text_is_one_message_outside_any_chat() -> None:
    assert one(ToPlainText(key="body"), {"body": "Once.", "id": 3}) == {
        "id": 3,
        "messages": [{"role": "text", "content": "Once."}],
    }
    with pytest.raises(DataError, match=r"row 0 .*needs text in 'text', not 7"):
        ToPlainText()([{"text": 7}])


PAIRS = {
    "texts": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    "other names": {"question": "2+2?", "chosen_response": "4", "rejected_response": "5"},
    "alpaca": {"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "5"},
    "chats with the prompt beside": {
        "prompt": "2+2?",
        "chosen": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "rejected": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"}],
    },
    "chats alone": {
        "chosen": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "rejected": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"}],
    },
    "transcripts": {
        "chosen": "\n\nHuman: 2+2?\n\nAssistant: 4",
        "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5",
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2+2?"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "5"},
    },
    "a prompt of messages": {
        "prompt": [{"role": "system", "content": "Be wrong."}, {"role": "user", "content": "2+2?"}],
        "chosen": [{"role": "assistant", "content": "4"}],
        "rejected": [{"role": "assistant", "content": "5"}],
    },
    "content blocks": {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}],
        "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "4"}]}],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "5"}]}],
    },
    "openai": {
        "input": {"messages": [{"role": "user", "content": "2+2?"}]},
        "preferred_output": [{"role": "assistant", "content": "4"}],
        "non_preferred_output": [{"role": "assistant", "content": "5"}],
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_every_form_become_what_dpo_reads(name: str) -> None:
    out = one(ToPreference(system_prompt="Be right."), PAIRS[name])
    (read,) = read_preferences([out])
    assert (read.chosen, read.rejected) == ("4", "5")
    assert [(message["role"], message["content"]) for message in read.prompt] == [
        ("system", "Be right."),
        ("user", "2+2?"),
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, ["same answer"]),
        ({"prompt": "p", "chosen": "a"}, ["no worse answer", "rejected_key"]),
        ({"chosen": "a", "rejected": "b"}, ["no prompt", "prompt_key"]),
        ({"prompt": "p", "chosen": "a", "rejected": ""}, ["assistant's answer", "'rejected'"]),
        (
            {"chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}],
             "rejected": [{"role": "user", "content": "y"}, {"role": "assistant", "content": "b"}]},
            ["'rejected'", "does not begin with the prompt"],
        ),
        ({"input": {"messages": [{"role": "user", "content": "p"}], "tools": [{}]}, "preferred_output": "a",
          "non_preferred_output": "b"}, ["input.tools"]),
    ],
)  # fmt: skip
def test_a_pair_that_cannot_be_read_is_named(row: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        ToPreference()([row])
    assert all(word in str(caught.value) for word in words), caught.value
