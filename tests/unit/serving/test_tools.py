"""How tools are shown and calls are read, for templates with a place for them and without."""

from __future__ import annotations

import json
import time

import pytest

from evsys_sdk.serving.tools import read_calls, shown, shows_tools

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def calls_of(text):
    rest, calls = read_calls(text, [TOOL])
    return rest, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "", [("add", {"a": 1})]),
        ('x <tool_call>\n{"name": "add", "arguments": {}}\n</tool_call> y', "x  y", [("add", {})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", {"a": 1})]),
        ('<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "b"}</tool_call>', "", [("add", {}), ("b", {})]),
        ('<tool_call>[{"name": "add"}, {"name": "b"}]</tool_call>', "", [("add", {}), ("b", {})]),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}', "", [("add", {"a": 1})]),
        ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        ('{"function": {"name": "add", "arguments": {}}}', "", [("add", {})]),
    ],
)
def test_calls_are_read_in_the_forms_that_models_are_taught(text, rest, calls):
    assert calls_of(text) == (rest, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
        '{"name": "unheard_of", "arguments": {}}',
        '{"answer": 4}',
        "",
    ],
)
def test_what_is_no_call_stays_as_the_model_wrote_it(text):
    assert calls_of(text) == (text, [])


def test_a_broken_call_stays_in_the_text_beside_a_good_one():
    text = '<tool_call>{"name": "add"}</tool_call>\n<tool_call>oops</tool_call>'
    assert calls_of(text) == ("<tool_call>oops</tool_call>", [("add", {})])


class Renderer:
    """Renders with a template written in Python, and gives text back as its own tokens."""

    def __init__(self, template):
        self.template, self.tokenizer = template, self

    def prompt(self, messages):
        return [ord(letter) for letter in self.template(messages)]

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def test_a_template_with_a_place_for_tools_is_told_from_one_without(renderer):
    from evsys_sdk.errors import DataError

    def refuses(messages):
        raise DataError("no place for tools")

    assert shows_tools(Renderer(lambda messages: json.dumps(messages)))
    assert not shows_tools(Renderer(lambda messages: "".join(str(message["content"]) for message in messages)))
    assert not shows_tools(Renderer(refuses))
    assert not shows_tools(renderer)


def test_a_template_with_a_place_gets_tools_and_calls_as_they_are():
    chat = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "3"}]
    assert shown(chat, [TOOL], by_template=True) == [{**chat[0], "tools": [TOOL]}, chat[1]]
    assert shown(chat, [], by_template=True) == chat


def test_a_template_without_a_place_gets_them_in_the_system_message():
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    system, user = shown(chat, [TOOL], by_template=False)
    assert system["content"].startswith("Be kind.\n\n# Tools") and json.dumps(TOOL) in system["content"]
    assert user == chat[1]
    assert shown(chat[1:], [TOOL], by_template=False)[0]["role"] == "system"
    assert shown(chat, [], by_template=False) == chat


def test_a_call_that_was_shown_as_text_reads_back_as_the_same_call():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert calls_of(shown(chat, [], by_template=False)[1]["content"]) == ("", [("add", {"a": "é"})])


def test_the_template_of_a_real_tool_model_shows_tools_by_itself():
    """Qwen's way of writing tools, by the tokenizer that the local backend uses."""
    pytest.importorskip("torch", reason="needs the extra local")
    from transformers import AutoTokenizer

    from evsys_engine.models import find_model
    from evsys_sdk.backends.chat_tokenizer import ChatTokenizer
    from evsys_sdk.training.rendering import ChatRenderer

    tokenizer = AutoTokenizer.from_pretrained(find_model("tiny-random").path)
    tokenizer.chat_template = (
        "{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
        "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = ChatRenderer(ChatTokenizer(tokenizer))
    assert shows_tools(renderer)
    text = renderer.tokenizer.decode(
        renderer.prompt(shown([{"role": "user", "content": "?"}], [TOOL], by_template=True))
    )
    assert text.count('"add"') == 1 and "# Tools" not in text


@pytest.mark.parametrize(
    "text", ["<tool_call>" * 100_000, "<tool_call>" + " " * 1_000_000 + "x", "<tool_call>x" + "\n" * 500_000]
)
def test_reading_calls_takes_linear_time(text):
    began = time.process_time()
    rest, calls = read_calls(text, [{"function": {"name": "add"}}])
    assert calls == [] and rest == text
    assert time.process_time() - began < 5  # a pattern took minutes
