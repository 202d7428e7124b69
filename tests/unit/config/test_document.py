from __future__ import annotations

import math

import pytest

from evsys_sdk.config.yaml_io import parse_document, parse_value, read_document
from evsys_sdk.errors import ConfigError
from evsys_sdk.explain import show_path, split_path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("off", "off"),
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        (".inf", math.inf),
        ("'1'", "1"),
        ("[1, a]", [1, "a"]),
        ("{a: 1}", {"a": 1}),
        ("{}", {}),
        ("{base_url}", "{base_url}"),
        ("{base_url}/v1", "{base_url}/v1"),
    ],
)
def test_scalars_mean_what_people_mean(text, value):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_every_key_knows_its_line():
    document = parse_document("a: 1\nb:\n  - x: 2\n    y: 3\n")
    assert document.line(("b", 0, "y")) == 4
    assert document.line(("b", 0, "y", "deeper")) == 4
    assert document.data == {"a": 1, "b": [{"x": 2, "y": 3}]}


def test_a_key_given_twice_is_refused_with_both_lines():
    with pytest.raises(ConfigError, match=r"(?s)config:3.*b\.x\s+is given twice \(first on line 2\)"):
        parse_document("b:\n  x: 1\n  x: 2\n")


def test_merge_keys_work_and_own_keys_win():
    document = parse_document("base: &b {x: 1, y: 2}\nother:\n  <<: *b\n  y: 3\n")
    assert document.data["other"] == {"x": 1, "y": 3}


def test_a_value_that_refers_to_itself_is_refused():
    with pytest.raises(ConfigError, match="refers to itself"):
        parse_document("a: &a\n  b: *a\n")


def test_a_python_tag_is_refused():
    with pytest.raises(ConfigError, match="not supported"):
        parse_document("a: !!python/name:os.system x\n")


@pytest.mark.parametrize("kind", ["seq [1]", "python/object/apply:os.system [id]", "python/dict {a: 1}", "set {a, b}"])
def test_a_list_or_mapping_with_a_tag_of_its_own_is_refused(kind):
    text = f"a: !!{kind}\n"
    if kind.startswith("seq"):
        assert parse_document(text).data == {"a": [1]}
        return
    with pytest.raises(ConfigError, match="not supported"):
        parse_document(text)


@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "-" + "9" * 4000, "9" * 100_000, "0o" + "7" * 9000])
def test_an_integer_that_no_float_has_room_for_is_refused_in_few_words(number):
    with pytest.raises(ConfigError, match="cannot be read as int") as caught:
        parse_document(f"a: {number}\n")
    assert len(str(caught.value)) < 300
    assert parse_document(f"a: {'9' * 300}\n").data == {"a": int("9" * 300)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\x00b\n", "is not YAML"),
        ("[" * 3000, "nested too deeply|is not YAML"),
        ("a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"{c}: &{c} [{', '.join([f'*{b}'] * 10)}]\n" for b, c in zip("abcdefg", "bcdefgh", strict=True)
        ), "unfolds into more than"),
    ],
    ids=["nul", "deep", "aliases"],
)  # fmt: skip
def test_hostile_yaml_is_one_problem_soon(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_document(text)


def test_digits_of_other_scripts_are_no_indices():
    assert split_path("a.²") == ("a", "²")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_document(path)


@pytest.mark.parametrize("text", ["runs[0].data.path", "runs.0.data.path"])
def test_paths_are_read_in_both_spellings_and_shown_in_one(text):
    assert split_path(text) == ("runs", 0, "data", "path")
    assert show_path(split_path(text)) == "runs[0].data.path"
