"""A call counts as a tool-calling server would execute it; what servers read in two ways is made and wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evsys_sdk.errors import VerifierFailed
from evsys_sdk.verifiers import run_verifier

A = {"name": "a", "arguments": {"x": 1}}
B = {"name": "b", "arguments": {}}
F, G = json.dumps(A), json.dumps(B)


def reward(completion: str, expected: object, **params: bool) -> float:
    return run_verifier("tool_calls_match", completion, expected, params)


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "b", "name": "a", "arguments": {"x": 1}}',
        '{"name": "a", "name": "a", "arguments": {"x": 1}}',
        '{"name": "a", "arguments": {"x": 2}, "arguments": {"x": 1}}',
        '{"name": "a", "arguments": {"x": 2, "x": 1}}',
        r'{"name": "a", "arguments": "{\"x\": 2, \"x\": 1}"}',
        f'{{"tool_calls": [{G}], "tool_calls": [{F}]}}',
        '<tool_call>{"name": "b", "name": "a", "arguments": {"x": 1}}</tool_call>',
        f'{F} {{"next": {G}, "next": 1}}',
    ],
    ids=str,
)
def test_a_key_that_occurs_twice_makes_no_match(said):
    assert reward(said, [A]) == reward(said, []) == 0.0


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "a", "arguments": {"x": 1}, "parameters": {"x": 2}}',
        '{"name": "a", "arguments": {"x": 1}, "parameters": {"x": 1}}',
        '{"name": "a", "arguments": {"x": 1}, "params": {"x": 2}}',
        '{"name": "a", "arguments": {"x": 1}, "input": null}',
        '{"name": "a", "arguments": {"x": 1}, "tool": "b"}',
        '{"name": "a", "arguments": {"x": 1}, "tool_name": "b"}',
        '{"name": "a", "arguments": {"x": 1}, "function": "b"}',
        f'{{"name": "a", "arguments": {{"x": 1}}, "function": {G}}}',
        '{"function": {"name": "a"}, "arguments": {"x": 1}}',
        '[{"name": "a", "arguments": {"x": 1}, "tool_slug": "b"}]',
        '<tool_call>{"name": "a", "arguments": {"x": 1}, "tool": "b"}</tool_call>',
        '{"tool_name": "a", "arguments": {"x": 1}}',
        '{"arguments": {"x": 1}}',
        '{"name": "a", "arguments": [1]}',
        '{"name": "a", "arguments": "x"}',
        '{"name": "a", "arguments": null}',
        '{"name": "", "arguments": {}}',
        '{"name": {"name": "a"}, "arguments": {"x": 1}}',
    ],
    ids=str,
)
@pytest.mark.parametrize("ignore_arguments", [False, True])
def test_two_names_or_arguments_or_such_of_a_wrong_type_make_no_match(said, ignore_arguments):
    expectations = ([A], [B], [A, B], [{"name": "a"}], [])
    assert {reward(said, expected, ignore_arguments=ignore_arguments) for expected in expectations} == {0.0}


@pytest.mark.parametrize(
    "other",
    [
        "<function=b>{}",
        "<function=b>{}</function>",
        "<function=b>\n<parameter=x>1</parameter></function>",
        '<function name="b"></function>',
        '<invoke name="b"><parameter name="x">1</parameter></invoke>',
        "[TOOL_CALLS]b[ARGS]{}",
        '<|python_tag|>b.call(query="x")',
        "<\uff5ctool\u2581calls\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>b",
        "<|tool_call_begin|>functions.b:0<|tool_call_argument_begin|>{}",
        "<|channel|>commentary to=functions.b <|message|>{}",
        "{'name': 'b', 'arguments': {}}",
        "[{'name': 'b'}]",
        "{name: 'b', arguments: {}}",
        '{"name": "b", "arguments": {},}',
        '{"name": "b", "arguments": {"y": 1,}}',
        '{"name": "b", // why\n "arguments": {}}',
        '{"name": "b", "arguments": {"y": 1',
        '{"id": 1 "name": "b"}',
        '{"name": "b", "argum',
        "{\u201cname\u201d: \u201cb\u201d}",
        json.dumps(G),
        json.dumps([G]),
        json.dumps({"note": f"I call {G}"}),
        json.dumps({"note": f"<tool_call>{G}</tool_call>"}),
        json.dumps(json.dumps(G)),
        '{"name": "b", "arguments": ' + "[" * 300 + "]" * 300 + "}",
        '{"name": "b", "name": "c"}',
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "form", ["{F} {other}", "{other}\n{F}", "<tool_call>{F}</tool_call>{other}", "```json\n[{F}]\n```\n{other}"]
)
def test_another_call_beside_a_proper_one_is_a_call_too_in_whatever_form(other, form):
    said = form.replace("{F}", F).replace("{other}", other)
    assert reward(said, [A]) == reward(other, []) == reward(other, [B]) == 0.0
    assert reward(said, [A], partial_credit=True) < 1.0


@pytest.mark.parametrize(
    "said",
    [
        f"[{F},]",
        f"{{'tool_calls': [{F}]}}",
        f'{{"name": "b", "arguments": {F},}}',
        f"{{'x': [{F}]}}",
        f"[see {F}]",
        f'"{F}"',
        f"'{F}'",
        f'He said "call {F} now".',
        f"\u201c{F}\u201d",
        f"{{calls: [{F}]}}",
    ],
    ids=str,
)
def test_a_call_inside_a_string_or_other_brackets_makes_no_match(said):
    assert reward(said, [A]) == reward(said, []) == 0.0


@pytest.mark.parametrize(
    "said",
    [
        f'The "send" tool fits (x in [0, 1)): {F}',
        f"For {{each}} of [these]: {F}, see [1].",
        f"[TOOL_CALLS] [{F}]",
        '<|python_tag|>{"name": "a", "parameters": {"x": 1}}',
        '{"type": "function", "id": "c1", "index": 0, "function": {"name": "a", "arguments": "{\\"x\\": 1}"}}',
        '{"type": "tool_use", "id": "t1", "name": "a", "input": {"x": 1.0}}',
        f'{{"role": "assistant", "content": "I {{do}} <b>so</b>.", "tool_calls": [{F}]}}',
        f"`name`: a, `arguments`: x = 1. {F}",
        f'5" wide\n{F}\n"so"',
    ],
    ids=str,
)
def test_the_forms_that_servers_execute_still_match(said):
    assert reward(said, [A]) == 1.0


def test_strings_inside_arguments_are_data():
    call = {"name": "a", "arguments": {"body": f"{G} <function=b> {{'name': 'b'}}", "list": ['"', "["]}}
    assert reward(json.dumps(call), [call]) == reward(f"So: [{json.dumps(call)}]", [call]) == 1.0


def test_an_expected_call_with_two_names_is_an_error_of_the_task_and_nulls_of_a_table_are_not():
    with pytest.raises(VerifierFailed, match="needs `expected`"):
        reward("", [{"name": "a", "tool": "b", "arguments": {}}])
    assert reward(F, [{"name": "a", "tool": None, "arguments": {"x": 1}, "parameters": None}]) == 1.0


names = st.text(min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls = st.fixed_dictionaries({"name": names, "arguments": st.dictionaries(st.text(max_size=4), values, max_size=3)})
# Tags inside arguments cut a call in two, for servers as well.
proper = calls.filter(lambda call: "<" not in json.dumps(call, ensure_ascii=False))
FORMS = {
    "list": lambda made: json.dumps(made),
    "lines": lambda made: "\n".join(map(json.dumps, made)),
    "message": lambda made: json.dumps({"role": "assistant", "tool_calls": made}),
    "openai": lambda made: json.dumps(
        [{"type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}} for call in made]
    ),
    "blocks": lambda made: "I call:" + "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in made),
    "fenced": lambda made: f"```json\n{json.dumps(made, indent=1)}\n```",
    "thought": lambda made: f"<think>{G}?</think>{json.dumps(made, ensure_ascii=False)}",
    "claude": lambda made: json.dumps([{"name": call["name"], "input": call["arguments"]} for call in made]),
    "llama": lambda made: json.dumps([{"name": call["name"], "parameters": call["arguments"]} for call in made]),
}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(proper, min_size=1, max_size=4), st.sampled_from(sorted(FORMS)), st.randoms(use_true_random=False))
def test_proper_calls_match_in_every_form_and_order_and_no_others_do(made, form, random):
    said = FORMS[form](made)
    mixed = random.sample(made, len(made))
    assert reward(said, mixed) == 1.0
    assert reward(said, [*mixed, B]) == reward(said, mixed[1:]) == 0.0


def broken(call: dict[str, object]) -> st.SearchStrategy[str]:
    """Texts that some server might take for this call, and others not."""
    text, name = json.dumps(call), json.dumps(call["name"])
    return st.sampled_from(
        [
            repr(call), f"[{text},]", text[:-1] + ",}", text[:-1], text[:-1] + f', "name": {name}}}',
            text[:-1] + ', "parameters": {}}', text[:-1] + f', "tool": {name}}}', json.dumps(text), f'"{text}"',
            f"<function={call['name']}>{json.dumps(call['arguments'])}</function>", f"{{'x': {text}}}",
            json.dumps({"content": text}), text[:-1] + ', "arguments": {}}', f"<tool_call>{text[:-1]}</tool_call>",
        ]
    )  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(proper, max_size=2),
    st.sampled_from(sorted(FORMS)),
    proper.flatmap(lambda call: st.tuples(st.just(call), broken(call))),
    st.booleans(),
    st.booleans(),
)
def test_a_broken_call_never_matches_alone_or_beside_proper_ones(made, form, one, is_first, ignore_arguments):
    call, text = one
    around = [FORMS[form](made)] if made else []
    said = "\n".join([text, *around] if is_first else [*around, text])
    assert reward(said, made, ignore_arguments=ignore_arguments) == 0.0
    assert reward(said, [*made, call], ignore_arguments=ignore_arguments) == 0.0
