"""Templates: holes are filled, braces can be text, and a hole without a value is told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evsys_sdk.data.columns import MissingKey, compile_template

ROW = {
    "query": "flights",
    "n": 3,
    "x": 0.5,
    "yes": True,
    "none": None,
    "empty": "",
    "user": {"name": "Ada", "tags": ["a", "b"]},
    "dotted.key": "plain",
    "tool name": "T",
    "braces": "{query}",
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Query: {query}", "Query: flights"),
        ("{query}{query}", "flightsflights"),
        ("{query} x {n}", "flights x 3"),
        ("no holes", "no holes"),
        ("", ""),
        ("{n} {x} {yes}", "3 0.5 True"),
        ("{n}", "3"),
        ("<{empty}>", "<>"),
        ("{user.name}: {query}", "Ada: flights"),
        ("{user.tags.1}", "b"),
        ("{user.tags}", '["a", "b"]'),
        ("{dotted.key}", "plain"),
        ("{ tool name }", "T"),
        ('{{"q": "{query}"}}', '{"q": "flights"}'),
        ("{{query}}", "{query}"),
        ("{{{query}}}", "{flights}"),
        ("{braces} {query}", "{query} flights"),
        ("%s {query} %(x)s", "%s flights %(x)s"),
    ],
)
def test_holes_are_filled(template: str, text: str) -> None:
    assert compile_template(template)(ROW) == text


@pytest.mark.parametrize("template", ["{quary}", "{query} {quary}", "{user.nme}", "{none}", "{query}{none}", "{n.x}"])
def test_a_hole_without_a_value_is_told(template: str) -> None:
    with pytest.raises(MissingKey):
        compile_template(template)(ROW)


def test_what_is_missing_comes_with_the_closest_column_and_all_there_are() -> None:
    with pytest.raises(MissingKey, match=r"has no 'quary' \(closest: query\); it has: query, n"):
        compile_template("{query} {quary}")(ROW)
    with pytest.raises(MissingKey, match=r"has no 'none' \(it is null\)"):
        compile_template("{none}")(ROW)


@pytest.mark.parametrize("template", ['{"a": "{query}"}', "{query", "query}", "{}", "{ }", "}{"])
def test_braces_that_do_not_pair_up_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"single|empty hole"):
        compile_template(template)


@given(st.text(), st.dictionaries(st.sampled_from("abc"), st.text() | st.integers(), min_size=3))
def test_a_template_says_what_python_would_say(text: str, row: dict[str, Any]) -> None:
    template = "{a}" + text.replace("{", "{{").replace("}", "}}") + "{b}{c}"
    assert compile_template(template)(row) == template.format(**row)
