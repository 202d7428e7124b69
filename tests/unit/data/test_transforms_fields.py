"""identity and map_fields: columns as they are, and as they are wanted."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from evsys_sdk.data.transforms import Identity, MapFields
from evsys_sdk.errors import DataError

ROW = {"a": 1, "b": "x", "c": None}


def mapped(**params: Any) -> dict[str, Any]:
    row = dict(ROW)
    (out,) = MapFields(**params)([row])
    assert row == ROW, "the given row was changed"
    return out


def test_identity_changes_nothing() -> None:
    assert Identity()([ROW]) == [ROW]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"rename": {"a": "n"}}, {"n": 1, "b": "x", "c": None}),
        ({"rename": {"a": "b", "b": "a"}}, {"b": 1, "a": "x", "c": None}),
        ({"rename": {"c": "d"}}, {"a": 1, "b": "x", "d": None}),
        ({"set": {"t": "{b}-{a}", "k": 5, "l": [1]}}, {**ROW, "t": "x-1", "k": 5, "l": [1]}),
        ({"set": {"b": "<{b}>"}}, {**ROW, "b": "<x>"}),
        ({"drop": ["a", "nowhere"]}, {"b": "x", "c": None}),
        ({"keep": ["c", "a"]}, {"c": None, "a": 1}),
        ({"rename": {"a": "n"}, "set": {"t": "{n}{b}"}, "drop": ["b"], "keep": ["t"]}, {"t": "1x"}),
    ],
)
def test_columns_are_renamed_set_dropped_and_kept(params: dict[str, Any], expected: dict[str, Any]) -> None:
    assert mapped(**params) == expected
    assert list(mapped(**params)) == list(expected)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"rename": {"aa": "n"}}, r"map_fields: row 0 .* has no 'aa' \(closest: a\)|has no 'aa'; it has: a, b, c"),
        ({"rename": {"a": "b"}}, "row 0 .* already has 'b', which 'a' would become"),
        ({"set": {"t": "{z}"}}, "row 0 .* has no 'z'"),
        ({"keep": ["a", "z"]}, "row 0 .* has no 'z'; it has: a, b, c"),
    ],
)
def test_a_row_that_does_not_fit_is_named(params: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        mapped(**params)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "does nothing"),
        ({"rename": {"a": "n", "b": "n"}}, "the same name"),
        ({"set": {"t": "{a"}}, r"set\.t: a single {"),
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        MapFields(**params)
