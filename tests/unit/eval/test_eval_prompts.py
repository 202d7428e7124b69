"""Prompts in Qwen's form, and how an identifier is read from a completion."""

from __future__ import annotations

import pytest

from evsys_sdk.eval import (
    DEFAULT_SYSTEM,
    DEFAULT_SYSTEM_NO_THINK,
    extract_predicted_slug,
    qwen3_chat_template_prompt,
    qwen_chat_prompt,
)


def test_a_qwen_prompt_ends_where_the_assistant_is_to_speak():
    assert qwen_chat_prompt("mail Bob", system="Choose.") == (
        "<|im_start|>system\nChoose.<|im_end|>\n<|im_start|>user\nmail Bob<|im_end|>\n<|im_start|>assistant\n"
    )
    assert DEFAULT_SYSTEM in qwen_chat_prompt("mail Bob")
    assert qwen_chat_prompt("mail Bob", system=None).startswith("<|im_start|>user")


def test_qwen3_without_thinking_begins_with_an_empty_thought():
    assert qwen3_chat_template_prompt("hi").endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert qwen3_chat_template_prompt("hi", enable_thinking=True) == qwen_chat_prompt("hi")
    assert DEFAULT_SYSTEM_NO_THINK.endswith("/no_think")


@pytest.mark.parametrize(
    ("completion", "slug"),
    [
        ("<answer>GMAIL_SEND</answer>", "GMAIL_SEND"),
        ("I would say <answer>A</answer>, no: <answer> B </answer>", "B"),
        ("<think>maybe <answer>A</answer></think>\n<answer>B</answer>", "B"),
        ('<answer>{"tool_slug": "A_B", "toolkit": "a"}</answer>', "A_B"),
        ('<answer>{"other": 1}</answer>', None),
        ("foo <answer>A", "A"),
        ("foo\n<ANSWER> A_B </ans", "A_B"),
        ("<answer>A_B\n\nThat is the C_D tool.", "A_B"),
        ("no <answer>A, but <answer>B", "B"),
        ('<answer>{\n"tool_slug": "A_B"\n}', "A_B"),
        ("<think>say <answer>A</think>\nC_D", "C_D"),
        ('<tool_call>\n{"name": "A_B", "arguments": {"x": {"y": 1}}}\n</tool_call>', "A_B"),
        ("GMAIL_SEND", "GMAIL_SEND"),
        ("`GMAIL_SEND`.", "GMAIL_SEND"),
        ("First I looked.\nThe tool is GMAIL_SEND, surely.\nGood luck", "GMAIL_SEND"),
        ("First I looked.\nThen I gave up.", None),
        ("<think>GMAIL_SEND it is, or", None),
        ("<answer></answer>\n\n", "<answer></answer>"),
        ("", None),
    ],
)
def test_an_identifier_is_read_from_what_was_said(completion, slug):
    assert extract_predicted_slug(completion) == slug
