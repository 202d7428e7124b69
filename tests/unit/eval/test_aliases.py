"""Alias matching: which names count for which, at which level, and what a broken alias file is told."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.errors import DataError
from evsys_sdk.eval import AliasMatcher

MATCHER = AliasMatcher({"SEND_MAIL": ["MAIL_SEND"]}, secondary={"SEND_MAIL": ["WRITE_MAIL"]})


@pytest.mark.parametrize(
    ("predicted", "level"),
    [
        ("SEND_MAIL", "exact"),
        ("send_mail", "alias"),
        ("mail_send", "alias"),
        ("WRITE_MAIL", "secondary"),
        ("READ_MAIL", None),
        (None, None),
    ],
)
def test_the_strictest_level_at_which_a_prediction_matches(predicted, level):
    assert MATCHER.match(predicted, "SEND_MAIL") == level


def test_a_level_includes_the_stricter_ones():
    assert MATCHER.matches("SEND_MAIL", "SEND_MAIL", level="exact")
    assert not MATCHER.matches("MAIL_SEND", "SEND_MAIL", level="exact")
    assert MATCHER.matches("MAIL_SEND", "SEND_MAIL")
    assert not MATCHER.matches("WRITE_MAIL", "SEND_MAIL")
    assert MATCHER.matches("WRITE_MAIL", "SEND_MAIL", level="secondary")


def test_a_mapping_resumese_way_and_a_group_all_ways():
    assert MATCHER.match("SEND_MAIL", "MAIL_SEND") is None
    grouped = AliasMatcher([["A", "B", "C"], ["D"]])
    assert [grouped.match(one, "A") for one in "ABCD"] == ["exact", "alias", "alias", None]
    assert grouped.match("A", "C") == "alias"


def test_case_counts_when_it_is_told_to():
    strict = AliasMatcher({"Send": ["Mail"]}, case_sensitive=True)
    assert (strict.match("send", "Send"), strict.match("mail", "Send"), strict.match("Mail", "Send")) == (
        None,
        None,
        "alias",
    )


def test_a_target_may_be_a_list_or_carry_its_toolkit():
    assert MATCHER.match("MAIL_SEND", ["OTHER", "SEND_MAIL"]) == "alias"
    assert MATCHER.match("SEND_MAIL", {"tool_slug": "SEND_MAIL", "toolkit": "mail"}) == "exact"


def test_aliases_are_read_from_files(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"A": "B"}))
    (tmp_path / "b.json").write_text(json.dumps([["A", "C"]]))
    matcher = AliasMatcher.from_files(tmp_path / "a.json", tmp_path / "b.json")
    assert [matcher.match(one, "A") for one in "BCD"] == ["alias", "secondary", None]
    assert (matcher.has_secondary, len(matcher)) == (True, 1)
    assert not AliasMatcher.from_files(tmp_path / "a.json").has_secondary


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{half", r"a\.json: not valid JSON"),
        ('"A"', r"a\.json: aliases are a mapping .* or a list of groups"),
        ('{"A": {"B": 1}}', r"a\.json: aliases of 'A' must be a list of names"),
        ('{"A": ["B", 7]}', r"a\.json: aliases of 'A': 7 is no name"),
        ('[["A", ""]]', r"a\.json: aliases, group 0: '' is no name"),
    ],
)
def test_a_broken_alias_file_is_named_with_its_mistake(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=message):
        AliasMatcher.from_files(tmp_path / "a.json")


def test_a_missing_file_is_named_once(tmp_path):
    with pytest.raises(DataError) as caught:
        AliasMatcher.from_files(tmp_path / "none.json")
    assert str(caught.value).count("none.json") == 1


def test_the_same_aliases_have_the_same_hash():
    same = AliasMatcher({"send_mail": ["Mail_Send"]}, secondary={"SEND_MAIL": ["WRITE_MAIL"]})
    assert same.sha256 == MATCHER.sha256 != AliasMatcher({"SEND_MAIL": ["MAIL_SEND"]}).sha256
