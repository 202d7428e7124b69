"""Rows of every format as prompts."""

from __future__ import annotations

import pytest

from evsys_sdk.errors import DataError, UnknownKind
from evsys_sdk.training.prompts import read_prompts, read_tasks

TASK = {"task_id": "a", "instruction": "say a", "verifier": {"fn_name": "exact_match", "expected": "a"}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"},
]


def test_a_chat_is_put_to_the_model_up_to_the_answer_it_shows():
    (by_target,) = read_prompts([{"messages": CHAT, "target_assistant": "4"}], "sdft")
    (by_last,) = read_prompts([{"messages": [*CHAT, {"role": "assistant", "content": "4"}]}], "sdft")
    assert by_target.messages == by_last.messages == CHAT
    assert by_target.answer == by_last.answer == "4"
    assert by_target.task.verifier.fn_name == "exact_match"


def test_inputs_with_an_expected_output_are_a_prompt():
    (prompt,) = read_prompts([{"inputs": {"q": "2+2?"}, "expected": 4, "metadata": {"id": "sum"}}], "sdft")
    assert prompt.messages == [{"role": "user", "content": "2+2?"}]
    assert prompt.answer == "4" and prompt.task.task_id == "sum"


def test_a_tasks_demonstration_comes_before_what_its_verifier_expects():
    plain, shown = read_prompts([TASK, {**TASK, "metadata": {"demonstration": "I say: a"}}], "sdft")
    assert plain.answer == "a" and shown.answer == "I say: a"


def test_a_prompt_without_an_answer_is_not_judged():
    (prompt,) = read_prompts([{"messages": CHAT}], "distill")
    assert prompt.answer is None and not prompt.judged


def test_a_task_that_stands_there_twice_is_two_tasks():
    names = [prompt.task.task_id for prompt in read_tasks([TASK, TASK, {**TASK, "task_id": "b"}, TASK], "rl")]
    assert names == ["a", "a#2", "b", "a#3"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"inputs": {"a": 1, "b": 2}}, "one input can be a prompt, not 2"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the message before the answer must be the user's"),
        ({"query": "?"}, "no known shape"),
    ],
)
def test_a_row_that_is_no_prompt_is_named_with_the_remedy(row, said):
    with pytest.raises(DataError, match=rf"row 1: (.|\n)*{said}(.|\n)*jsonl_to_chat"):
        read_prompts([{"messages": CHAT}, row], "distill")


def test_rl_takes_tasks_alone_and_says_how_to_get_them():
    with pytest.raises(
        DataError, match=r"row 0 is chat_messages, not harbor_task(.|\n)*rl needs tasks.*to_harbor_task"
    ):
        read_tasks([{"messages": CHAT}], "rl")


def test_an_unknown_verifier_is_found_before_anything_is_rolled_out():
    with pytest.raises(UnknownKind, match=r"exact_macth.*closest: exact_match"):
        read_tasks([{**TASK, "verifier": {"fn_name": "exact_macth"}}], "rl")


@pytest.mark.parametrize("read", [read_tasks, read_prompts])
def test_no_rows_are_refused(read):
    with pytest.raises(DataError, match="there are no training rows"):
        read(None, "rl")
