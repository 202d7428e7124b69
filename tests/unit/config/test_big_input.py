"""A config of any size is answered in a time that grows with its size, and not faster."""

from __future__ import annotations

import json

import pytest
import yaml

from evsys_sdk import explain
from evsys_sdk.config import yaml_io as documents
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import ConfigSource, parse_document
from evsys_sdk.errors import ConfigError, Problem
from evsys_sdk.experiment.experiment import Experiment
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
    source = ConfigSource(lines=lines)
    assert source.located(Problem(path="a.b", message="m")).line == 1
    assert source.located(Problem(path="matrix.axes.algorithm.params.lora_rank[2]", message="m")).line == 7
    assert source.located(Problem(path="matrix.axes.other", message="m")).line == 6


@pytest.fixture
def no_slow_parser(monkeypatch):
    if not yaml.__with_libyaml__:
        pytest.skip("PyYAML was built without libyaml")

    class Slow:
        def __init__(self, text):
            raise AssertionError("the text was scanned letter by letter in Python")

    monkeypatch.setattr(documents, "_Loader", Slow)


def test_text_is_scanned_by_libyaml(no_slow_parser):
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


def test_so_are_they_by_libyaml_with_every_line_as_it_was(no_slow_parser):
    found = parse_document('# \\ud83d\na: "\\ud83d\\ude00\n  x"\nb: | # \\ud83d\\ude00\n  \\uD83D\nc: 1\n')
    assert found.data == {"a": "\U0001f600 x", "b": "\\uD83D\n", "c": 1}
    assert [found.lines[key,] for key in "abc"] == [2, 4, 6]
    with pytest.raises(ConfigError, match="half of a surrogate pair") as caught:
        parse_document('a: 1\nb: "\\ud83d"')
    assert caught.value.problems[0].line == 2


def test_escapes_in_text_that_is_not_quoted_stay_as_they_are(no_slow_parser):
    written = "\\ud83d\\ude00"
    assert parse_document(f"a: {written}\nb: '{written}'").data == {"a": written, "b": written}
    escaped = written.replace("\\", "\\\\")
    assert parse_document(f'a: "{escaped} {written}"').data == {"a": f"{written} \U0001f600"}


@pytest.mark.parametrize("holds", ["\\uE000 \\ue001 \\U0000E002", "\ue000\ue001", "\\x5cuE000"])
def test_private_characters_beside_an_emoji_stay_as_they_are(holds, no_slow_parser):
    read = parse_document(f'"{holds}"').data
    assert parse_document(f'a: "{holds}\\ud83d\\ude00{holds}"').data == {"a": f"{read}\U0001f600{read}"}
    assert parse_document(f"a: '{holds}\\ud83d'\nb: {holds}").data == {"a": f"{holds}\\ud83d", "b": holds}


def test_a_text_with_every_character_that_could_stand_in_is_read_too():
    private = "".join(chr(0xE000 + number) for number in range(0x99A))
    text = f'# {"x" * documents.SMALL}\na: "{private}\\ud83d\\ude00"'
    assert parse_document(text).data == {"a": f"{private}\U0001f600"}


def test_a_key_given_twice_is_found_however_it_is_written():
    with pytest.raises(ConfigError, match="is given twice"):
        parse_document('"\\ud83d\\ude00": 1\n"\U0001f600": 2')


@pytest.mark.parametrize("text", ['a: 1\nb: "\\ud83d"', 'a: 1\nb: "\\ude00\\ud83d"', '{"a": 1,\n"\\ud83d": 2}'])
def test_half_a_pair_is_refused_with_its_line(text):
    with pytest.raises(ConfigError, match="half of a surrogate pair") as caught:
        parse_document(text)
    assert caught.value.problems[0].line == 2


MANY = {
    "keys given twice": "name: e\n" + "name: f\n" * 3000,
    "types": "name: e\nruns:\n" + "  - {name: 5, seed: abc, data: 5, model: 5}\n" * 3000,
    "kinds": "name: e\nruns:\n"
    + "".join(
        f"  - {{name: r{n}, data: {{path: a}}, model: {{name: m}}, algorithm: {{kind: z{n}}}}}\n" for n in range(300)
    ),
}


@pytest.mark.parametrize("what", MANY)
def test_a_file_with_very_many_problems_of_any_kind_is_told_the_first_hundred(tmp_path, what):
    path = tmp_path / "config.yaml"
    path.write_text(MANY[what])
    with pytest.raises(ConfigError) as caught:
        Experiment.from_yaml(path).check()
    lines = str(caught.value).splitlines()
    assert len([line for line in lines if line.startswith("  ")]) == explain.MOST_PROBLEMS + 1 and len(lines) <= 105
    assert "more problems" in str(caught.value)
