"""Chats over several turns: what was written is never encoded again, and tools answer whatever is asked of them."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.errors import DataError, EvsysError
from evsys_sdk.protocols import Turn
from evsys_sdk.rollout.chat import ChatHistory, answer_calls, begin_chat, calls_in, tool_at, tool_of
from evsys_sdk.training.rendering import ChatRenderer

END = ByteTokenizer.eos_token_id
ASK = [{"role": "user", "content": "Hi"}]


def said(history, tokens, text):
    return Turn(prompt_tokens=history.prompt, completion_tokens=tokens, logprobs=[0.0] * len(tokens), text=text)


def test_the_next_prompt_begins_with_what_was_read_and_written():
    history = ChatHistory(ChatRenderer(ByteTokenizer()), ASK)
    turn = said(history, [*b"yo", END], "yo")
    history.add(turn, {"role": "user", "content": "And?"})
    assert history.prompt[: len(turn.prompt_tokens) + 3] == [*turn.prompt_tokens, *turn.completion_tokens]
    messages = [*ASK, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "And?"}]
    assert history.prompt == ChatRenderer(ByteTokenizer()).prompt(messages)


class PairTokenizer(ByteTokenizer):
    """Knows a token for `ab`, which encoding always uses and a model may spell otherwise."""

    PAIR = 300

    def encode(self, text):
        tokens = super().encode(text)
        out = []
        for token in tokens:
            if out and (out[-1], token) == (ord("a"), ord("b")):
                out[-1] = self.PAIR
            else:
                out.append(token)
        return out

    def decode(self, tokens):
        flat = [one for token in tokens for one in ([ord("a"), ord("b")] if token == self.PAIR else [token])]
        return super().decode(flat)


def test_tokens_that_no_encoding_would_give_stay_as_they_were_drawn():
    history = ChatHistory(ChatRenderer(PairTokenizer()), ASK)
    turn = said(history, [ord("a"), ord("b"), END], "ab")
    history.add(turn, {"role": "user", "content": "ab?"})
    begin = len(turn.prompt_tokens)
    assert history.prompt[begin : begin + 3] == [ord("a"), ord("b"), END]
    assert PairTokenizer.PAIR in history.prompt[begin + 3 :]


def test_a_turn_that_was_cut_off_is_closed_in_the_prompt_that_follows():
    history = ChatHistory(ChatRenderer(ByteTokenizer()), ASK)
    turn = said(history, [*b"yo"], "yo")
    history.add(turn, {"role": "user", "content": "And?"})
    begin = len(turn.prompt_tokens)
    assert history.prompt[begin : begin + 3] == [*b"yo", END]


class ForgetfulTokenizer(ByteTokenizer):
    """Shows what the assistant said as `...` once somebody has answered."""

    def apply_chat_template(self, messages, *, add_generation_prompt=False):
        last = len(messages) - 1
        shown = [
            {**message, "content": "..."} if message["role"] == "assistant" and index < last else message
            for index, message in enumerate(messages)
        ]
        return super().apply_chat_template(shown, add_generation_prompt=add_generation_prompt)


def test_a_template_that_rewrites_earlier_turns_is_asked_for_the_whole_prompt():
    history = ChatHistory(ChatRenderer(ForgetfulTokenizer()), ASK)
    history.add(said(history, [*b"yo", END], "yo"), {"role": "user", "content": "And?"})
    text = ForgetfulTokenizer().decode(history.prompt)
    assert "assistant\n...<|im_end|>" in text and "yo" not in text


class ToollessTokenizer(ByteTokenizer):
    """Refuses tools, as templates without a place for them are made to."""

    def apply_chat_template(self, messages, *, add_generation_prompt=False):
        if messages[0].get("tools"):
            raise DataError("no place for tools")
        return super().apply_chat_template(messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be short."}]], ids=["alone", "with a system"])
def test_tools_are_described_in_words_where_the_template_has_no_place_for_them(system):
    history = begin_chat(ChatRenderer(ToollessTokenizer()), [*system, *ASK], [tool_of(add)])
    text = ByteTokenizer().decode(history.prompt)
    assert text.count("<|im_start|>system") == 1 and '"name": "add"' in text and "<tool_call>" in text
    assert ("Be short." in text) == bool(system) and "user\nHi<|im_end|>" in text


class ToolTokenizer(ByteTokenizer):
    """Shows tools in a place of its own."""

    def apply_chat_template(self, messages, *, add_generation_prompt=False):
        shown = self.encode("TOOLS\n") if messages[0].get("tools") else []
        return [*shown, *super().apply_chat_template(messages, add_generation_prompt=add_generation_prompt)]


def test_the_template_is_given_the_tools_where_it_takes_them():
    history = begin_chat(ChatRenderer(ToolTokenizer()), ASK, [tool_of(add)])
    assert history.messages[0]["tools"] and ByteTokenizer().decode(history.prompt).startswith("TOOLS")
    assert "tools" not in begin_chat(ChatRenderer(ToolTokenizer()), ASK, []).messages[0]


def test_a_template_that_passes_over_tools_in_silence_leaves_them_to_words():
    text = ByteTokenizer().decode(begin_chat(ChatRenderer(ByteTokenizer()), ASK, [tool_of(add)]).prompt)
    assert '"name": "add"' in text and "<tool_call>" in text


def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


def test_a_function_with_hints_describes_itself():
    described = tool_of(add).described()["function"]
    assert (described["name"], described["description"]) == ("add", "The sum of two numbers.")
    assert described["parameters"]["properties"]["a"]["type"] == "integer"
    assert described["parameters"]["required"] == ["a"]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        ("I will " + call("add", a=1) + call("add", a=2), [("add", {"a": 1}), ("add", {"a": 2})]),
        ('{"name": "add", "arguments": {"a": 1}}', [("add", {"a": 1})]),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', [("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', [("add", {"a": 1})]),
        ("<tool_call>add 1</tool_call>", [("", "add 1")]),
        ('{"answer": 3}', []),
    ],
)
def test_calls_are_found_in_what_the_model_wrote(text, calls):
    assert calls_in(text) == calls


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("add", {"a": 1, "b": 2}), "3"),
        (("add", {"a": "x"}), "valid integer"),
        (("add", [1]), "must be a JSON object"),
        (("ad", {}), "closest: add"),
        (("", "junk"), "not a tool call"),
    ],
)
async def test_whatever_is_wrong_with_a_call_is_told_to_the_model(call, said):
    [message] = await answer_calls([call], {"add": tool_of(add)})
    assert message["role"] == "tool" and said in message["content"]


async def test_plain_tools_of_many_rollouts_run_side_by_side_and_off_the_loop():
    meeting = threading.Barrier(3, timeout=20)

    def meet() -> str:
        meeting.wait()
        return threading.current_thread().name

    tools = {"meet": tool_of(meet)}
    said = await asyncio.gather(*(answer_calls([("meet", {})], tools) for _ in range(3)))
    names = [message["content"] for [message] in said]
    assert threading.current_thread().name not in names and "error" not in "".join(names)


async def test_an_async_tool_stays_on_the_loop():
    async def where() -> str:
        return threading.current_thread().name

    [message] = await answer_calls([("where", {})], {"where": tool_of(where)})
    assert message["content"] == threading.current_thread().name


async def test_a_tool_that_exits_the_program_has_merely_failed():
    def leave() -> None:
        raise SystemExit(1)

    [message] = await answer_calls([("leave", {})], {"leave": tool_of(leave)})
    assert message["content"] == "error: SystemExit: 1"


def test_a_tool_is_found_by_path_and_a_wrong_path_offers_the_nearest():
    assert tool_at("os.path:join").name == "join"
    with pytest.raises(EvsysError, match="closest: join"):
        tool_at("os.path.joyn")
    with pytest.raises(
        EvsysError, match=r"'bahs' is not a tool; closest: bash;.*a function is written as module:function"
    ):
        tool_at("bahs")
    with pytest.raises(EvsysError, match="no_such_module"):
        tool_at("no_such_module.f")
