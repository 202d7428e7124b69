"""Row shapes: what is recognised, what is refused, and that nothing is lost on the way there and back."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evsys_sdk.data_types import (
    ChatMessagesRow,
    E2BVerifier,
    HarborTask,
    InProcessVerifier,
    LLMJudgeVerifier,
    PromptExample,
    TargetFormat,
    block_to_image_src,
    content_text,
    detect_format,
    from_dict,
    has_images,
    image_base64_block,
    image_url_block,
    iter_jsonl,
    parse_rows,
    text_block,
    to_dict,
)
from evsys_sdk.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
TASK = {"task_id": "t1", "instruction": "2+2?", "verifier": {"kind": "in_process", "fn_name": "exact_match"}}
PROMPT = {"inputs": {"question": "2+2?"}, "expected": "4"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(st.text(), json_values, max_size=3)
blocks = st.lists(
    st.builds(text_block, st.text())
    | st.builds(image_url_block, st.text(), st.none() | st.just("low"))
    | st.builds(image_base64_block, st.just("image/png"), st.text()),
    max_size=3,
)
contents = st.text() | blocks
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": contents}),
    min_size=1,
    max_size=4,
)
verifiers = (
    st.builds(InProcessVerifier, fn_name=st.text(min_size=1), expected=json_values, params=mappings)
    | st.builds(E2BVerifier, dockerfile=st.text(), test_sh=st.text(), test_state_py=st.text())
    | st.builds(LLMJudgeVerifier, judge_model=st.text(), rubric=st.text())
)
typed_rows = (
    st.builds(ChatMessagesRow, messages=messages, target_assistant=st.none() | st.text(), metadata=mappings)
    | st.builds(HarborTask, task_id=st.text(), instruction=contents, verifier=verifiers, metadata=mappings)
    | st.builds(PromptExample, inputs=mappings, expected=json_values, metadata=mappings)
)
FORMATS: dict[type, str] = {
    ChatMessagesRow: "chat_messages",
    HarborTask: "harbor_task",
    PromptExample: "prompt_dataset",
}


@given(typed_rows)
def test_a_typed_row_survives_the_way_to_json_and_back(row: Any) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(row)))) == row


@given(typed_rows)
def test_the_plain_form_of_a_row_is_recognised_as_what_it_was(row: Any) -> None:
    assert detect_format(to_dict(row)) == FORMATS[type(row)]
    assert parse_rows([to_dict(row)], FORMATS[type(row)]) == [row]


@given(json_values)
def test_anything_is_read_or_refused_but_never_crashes(value: Any) -> None:
    for row in (value, {"messages": value}, {"instruction": value, "verifier": value}, {"inputs": value}):
        with contextlib.suppress(DataError):
            assert to_dict(from_dict(row))


@given(json_values, json_values)
def test_any_verifier_is_read_or_refused_but_never_crashes(kind: Any, value: Any) -> None:
    for verifier in ({"kind": kind}, {"fn_name": value}, {"fn_name": "f", "params": value}):
        with contextlib.suppress(DataError):
            from_dict({"instruction": "x", "verifier": verifier})


@given(mappings)
def test_no_block_makes_the_image_search_crash(block: dict[str, Any]) -> None:
    for shape in (block, {"type": "image", "source": block}, {"type": "image_url", "image_url": block}):
        assert isinstance(block_to_image_src(shape), str | None)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (CHAT, "chat_messages"),
        (TASK, "harbor_task"),
        (PROMPT, "prompt_dataset"),
        ({**CHAT, **TASK}, "harbor_task"),
        ({"messages": "hello"}, "unknown"),
        ({"instruction": "x"}, "unknown"),
        ({"inputs": "x"}, "unknown"),
        ({}, "unknown"),
        (["messages"], "unknown"),
        (None, "unknown"),
    ],
)
def test_the_format_follows_from_the_keys(row: Any, expected: str) -> None:
    assert detect_format(row) == expected


def test_columns_without_a_field_go_into_metadata() -> None:
    row = from_dict({**CHAT, "toolkit": "mail", "metadata": {"id": 7}})
    assert row.metadata == {"toolkit": "mail", "id": 7}


def test_a_task_without_an_id_gets_one_from_its_content() -> None:
    def name(instruction: str) -> str:
        row = from_dict({"instruction": instruction, "verifier": TASK["verifier"]})
        assert isinstance(row, HarborTask)
        return row.task_id

    assert name("a") == name("a") != name("b")


def test_a_numeric_task_id_becomes_text() -> None:
    row = from_dict({**TASK, "task_id": 0})
    assert isinstance(row, HarborTask) and row.task_id == "0"


def test_a_verifier_without_kind_runs_in_process() -> None:
    row = from_dict({**TASK, "verifier": {"fn_name": "contains", "expected": "4"}})
    assert isinstance(row, HarborTask) and row.verifier == InProcessVerifier(fn_name="contains", expected="4")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, ["no known shape", "text"]),
        ({"messages": []}, ["empty"]),
        ({"messages": ["hi"]}, ["messages[0]", "role"]),
        ({"messages": [{"role": "user"}]}, ["messages[0]", "content"]),
        ({"messages": [{"role": 1, "content": "x"}]}, ["messages[0]", "role"]),
        ({"messages": [{"role": "user", "content": 5}]}, ["messages[0].content", "5"]),
        ({**CHAT, "target_assistant": 4}, ["target_assistant"]),
        ({**CHAT, "metadata": [1]}, ["metadata", "list"]),
        ({**TASK, "instruction": 3}, ["instruction", "3"]),
        ({**TASK, "verifier": "exact_match"}, ["verifier", "kind"]),
        ({**TASK, "verifier": {"kind": "in_proces", "fn_name": "f"}}, ["in_proces", "closest: in_process"]),
        ({**TASK, "verifier": {"kind": ["e2b"]}}, ["verifier.kind"]),
        ({**TASK, "verifier": {"kind": "in_process"}}, ["fn_name"]),
        ({**TASK, "verifier": {"fn_name": "f", "expect": 1}}, ["verifier.expect", "closest: expected"]),
        ({**TASK, "verifier": {"fn_name": "f", "params": [1]}}, ["verifier.params", "mapping"]),
        ({**TASK, "verifier": {"fn_name": 3}}, ["verifier.fn_name", "text"]),
        ({**TASK, "verifier": {"kind": "e2b", "dockerfile": "x"}}, ["e2b", "test_sh"]),
    ],
)
def test_a_row_that_is_wrong_says_where_and_why(row: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        from_dict(row)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_message_that_only_calls_tools_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert from_dict({"messages": [call]}) == ChatMessagesRow(messages=[call])


def test_iter_jsonl_reads_mixed_formats(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (CHAT, TASK, PROMPT)) + "\n\n")
    assert [type(row) for row in iter_jsonl(path)] == [ChatMessagesRow, HarborTask, PromptExample]


@pytest.mark.parametrize("line", [b"{not json", b'{"text": "x"}', b"[1]", b'{"inputs": {"a": "\xff"}}'])
def test_iter_jsonl_names_file_and_line_of_a_bad_row(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(CHAT).encode() + b"\n\n" + line)
    with pytest.raises(DataError, match=r"rows\.jsonl:3: "):
        list(iter_jsonl(path))


def test_iter_jsonl_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file.*nowhere\.jsonl"):
        list(iter_jsonl(tmp_path / "nowhere.jsonl"))


def test_parse_rows_takes_all_rows_or_names_the_first_bad_one() -> None:
    assert parse_rows([CHAT, CHAT], TargetFormat.CHAT_MESSAGES) == [from_dict(CHAT)] * 2
    with pytest.raises(DataError, match="row 1 is prompt_dataset, not chat_messages; it has: inputs, expected"):
        parse_rows([CHAT, PROMPT, TASK], "chat_messages")
    with pytest.raises(DataError, match=r"row 2: messages is empty"):
        parse_rows([CHAT, CHAT, {"messages": []}], "chat_messages")


def test_parse_rows_knows_its_formats() -> None:
    with pytest.raises(DataError, match="closest: chat_messages"):
        parse_rows([], "chat_message")


def test_both_image_shapes_become_a_source_for_a_page() -> None:
    assert block_to_image_src(image_url_block("http://x/y.png", detail="low")) == "http://x/y.png"
    assert block_to_image_src(image_base64_block("image/gif", "QUJD")) == "data:image/gif;base64,QUJD"
    assert block_to_image_src({"type": "image", "source": {"type": "url", "url": "http://x"}}) == "http://x"
    assert block_to_image_src({"type": "image_url", "image_url": "http://x"}) == "http://x"
    assert block_to_image_src(text_block("http://x")) is None


def test_images_are_found_in_messages_instructions_and_inputs() -> None:
    image = [text_block("what is this?"), image_url_block("http://x/y.png")]
    assert has_images({"messages": [{"role": "user", "content": image}]})
    assert has_images(from_dict({**TASK, "instruction": image}))
    assert has_images({"inputs": {"picture": image}})
    assert not any(has_images(row) for row in (CHAT, TASK, PROMPT))


def test_the_text_of_a_content_leaves_images_out() -> None:
    assert content_text([text_block("a"), image_url_block("u"), text_block("b"), {"text": None}]) == "ab"
    assert content_text("plain") == "plain"
    assert content_text(None) == ""


def test_an_instruction_that_is_a_list_of_messages_is_refused_and_never_asked_as_nothing() -> None:
    task = {
        "instruction": [{"role": "system", "content": "You route."}, {"role": "user", "content": "Where to?"}],
        "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": "here"},
    }
    with pytest.raises(DataError, match=r"instruction is a list of chat messages.*metadata\.system.*metadata\.history"):
        from_dict(task)


def test_a_system_prompt_under_another_name_is_not_passed_over() -> None:
    row = {"instruction": "hi", "verifier": {"fn_name": "exact_match", "expected": "x"}}
    for wrong in ({**row, "system_prompt": "Be brief."}, {**row, "metadata": {"system_prompt": "Be brief."}}):
        with pytest.raises(DataError, match=r"no `system_prompt`.*write the key as `system`"):
            from_dict(wrong)
    task = from_dict({**row, "system_prompt": "kept for the record", "system": "Be brief."})
    assert task.metadata["system"] == "Be brief."
