"""A config of any size is answered in a time that grows with its size, and not faster."""

from __future__ import annotations

import json

import pytest
import yaml

from evsys_sdk.config import document as documents
from evsys_sdk.config import explain
from evsys_sdk.config.document import parse_document
from evsys_sdk.config.files import parse_config
from evsys_sdk.config.source import Source
from evsys_sdk.errors import ConfigError, Problem
from evsys_sdk.registry import algorithms, check_params


def refused(text, tmp_path):
    with pytest.raises(ConfigError) as caught:
        parse_config(parse_document(text), folder=tmp_path)
    return caught.value


@pytest.fixture
def comparisons(monkeypatch):
    """How often an unknown word was compared with the known ones."""
    words = []
    true = explain.closest
    monkeypatch.setattr(explain, "closest", lambda word, known: words.append(word) or true(word, known))
    return words


def test_only_the_first_hundred_unknown_keys_are_explained_and_the_others_counted(tmp_path, comparisons):
    keys = "".join(f"key{n}: 1\n" for n in range(3000))
    error = refused(f"name: e\nrun: {{}}\n{keys}", tmp_path)
    assert len(comparisons) <= explain.MOST_PROBLEMS
    assert len(error.problems) == explain.MOST_PROBLEMS + 1
    last = error.problems[-1]
    assert "more problems" in last.message and last.line is not None
    counted = int(last.message.split("and ")[1].split(" ")[0].replace(",", ""))
    assert counted + explain.MOST_PROBLEMS + 1 >= 3000


def test_so_are_unknown_settings_of_an_extension(comparisons):
    found = check_params(algorithms.get("sft"), {f"key{n}": 1 for n in range(3000)})
    assert len(comparisons) <= explain.MOST_PROBLEMS
    assert len(found) == explain.MOST_PROBLEMS + 1 and "2,899 more problems" in found[-1].message


class LookedUp(dict):
    """A mapping that may be looked up, and not gone through."""

    def __iter__(self):
        raise AssertionError("all lines of the file were gone through for one problem")

    keys = items = values = __iter__


def test_the_line_of_a_problem_is_looked_up():
    lines = LookedUp({("a",): 1, ("matrix", "axes", "algorithm.params.lora_rank"): 7, ("matrix", "axes"): 6})
    source = Source(lines=lines)
    assert source.located(Problem(path="a.b", message="m")).line == 1
    assert source.located(Problem(path="matrix.axes.algorithm.params.lora_rank[2]", message="m")).line == 7
    assert source.located(Problem(path="matrix.axes.other", message="m")).line == 6


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
def test_text_is_scanned_by_libyaml(monkeypatch):
    class Slow:
        def __init__(self, text):
            raise AssertionError("the text was scanned letter by letter in Python")

    monkeypatch.setattr(documents, "_Loader", Slow)
    assert parse_document(f"# {'x' * 2_000_000}\na: [1, {{b: 1e-5}}]\n").data == {"a": [1, {"b": 1e-5}]}
    with pytest.raises(ConfigError, match="is not YAML"):
        parse_document(f"# {'x' * 2_000_000}\na: [1\n")


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, "{a: " * 50_000, "- " * 50_000 + "a"])
def test_deep_nesting_is_an_error_and_not_the_end_of_the_process(text):
    with pytest.raises(ConfigError, match=r"nested too deeply|is not YAML"):
        parse_document(text)


WORD = "a \U0001f600 \U0001f469\u200d\U0001f680 z"


@pytest.mark.parametrize("text", [json.dumps(WORD), f'"{WORD}"', WORD])
def test_characters_that_json_escapes_as_two_halves_are_read(text):
    assert parse_document(f"description: {text}\nother: 1").data == {"description": WORD, "other": 1}
    assert parse_document(json.dumps({WORD: [WORD]})).data == {WORD: [WORD]}


def test_escapes_in_text_that_is_not_quoted_stay_as_they_are():
    written = "\\ud83d\\ude00"
    assert parse_document(f"a: {written}\nb: '{written}'").data == {"a": written, "b": written}


@pytest.mark.parametrize("text", ['a: 1\nb: "\\ud83d"', 'a: 1\nb: "\\ude00\\ud83d"', '{"a": 1,\n"\\ud83d": 2}'])
def test_half_a_pair_is_refused_with_its_line(text):
    with pytest.raises(ConfigError, match="half of a surrogate pair") as caught:
        parse_document(text)
    assert caught.value.problems[0].line == 2
