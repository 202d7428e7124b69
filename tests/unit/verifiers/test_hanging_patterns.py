"""Patterns and completions made to take for ever: they are ended, and nothing waits for them meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evsys_sdk import patterns
from evsys_sdk.answers import answer_in, has_answer, texts_between
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.errors import VerifierFailed
from evsys_sdk.eval.aliases import extract_predicted_slug
from evsys_sdk.patterns import is_quick, pattern_matches
from evsys_sdk.rollout.chat import calls_in
from evsys_sdk.serving.tools import read_calls
from evsys_sdk.verifiers import grade, run_verifier
from evsys_sdk.verifiers.judge import Unreadable, read_verdict
from evsys_sdk.verifiers.values import json_values, values_in

EVIL = r"(a+)+$"
LONG = "a" * 60 + "!"


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(patterns, "PATTERN_SECONDS", 0.5)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (EVIL, LONG),
        (r"(a|a)*b", LONG),
        (r"(\w+\s?)+:", "word " * 40),
        (r"^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 80),
        (r"(.*a){25}", "a" * 24 + "b" * 40),
        (r"(x+x+)+y", "x" * 60),
        ("[a-z ]{0,900}" * 4 + "!", "a b " * 2000),
        ("(?:a|a)" * 40 + "b", "a" * 60),
        ("a?" * 40 + "a" * 40 + "$", "a" * 40 + "b"),
        ("(?:a|b|ab)" * 60 + "!", "ab" * 60),
        (r"\s*\w*\s*\w*\s*\w*:", "a" * 4000),
        (r"(?=(?:a|a){40}b)", "a" * 60),
        (r"(?:a{0,30}){0,30}b", "a" * 400),
    ],
    ids=lambda text: text[:30],
)
def test_a_pattern_that_backtracks_for_ever_is_an_error_of_the_verifier(hurried, pattern, text):
    begin = time.monotonic()
    with pytest.raises(VerifierFailed, match=r"took longer than 0.5 seconds on a text of \d+ characters"):
        run_verifier("regex_match", text, pattern, {})
    assert time.monotonic() - begin < 30, "on a busy machine; without an end it would take years"


def test_format_only_has_the_same_limit(hurried):
    with pytest.raises(VerifierFailed, match="took longer"):
        run_verifier("format_only", LONG, None, {"pattern": EVIL})


@pytest.mark.parametrize(
    ("pattern", "text", "flags", "matches"),
    [
        (r"(a+)+$", "baaa", 0, True),
        (r"(?i)(ab|cd)+", "xCDab", 0, True),
        (r"(\w)\1", "hello", 0, True),
        (r"(\w)\1", "helo", 0, False),
        (r"(?<=\$)\d+(\.\d+)?", "costs $5.20", 0, True),
        (r"a.*b.*c", "a\nb\nc", re.DOTALL, True),
        (r"a.*b.*c", "a\nb\nc", 0, False),
        ("(üa|é)+x", "üaéx \U0001f600", 0, True),
        (r"\ud800?(a+)+", "\ud800a", 0, True),
    ],
)
def test_a_pattern_means_the_same_in_a_worker(monkeypatch, pattern, text, flags, matches):
    monkeypatch.setattr(patterns, "QUICK_STEPS", -1)
    assert pattern_matches(pattern, text, flags=int(flags)) is matches
    assert (re.search(pattern, text, flags) is not None) is matches
    whole = re.fullmatch(pattern, text, flags) is not None
    assert pattern_matches(pattern, text, flags=int(flags), is_full=True) is whole


@pytest.mark.parametrize(
    "pattern", ["red", "^red$", r"\b42\b", r"[a-z]+", r"answer: (yes|no)", r"\d{3}-\d{4}", "a?b", r".*done"]
)
def test_plain_patterns_are_matched_without_a_worker(pattern, monkeypatch):
    monkeypatch.setattr(patterns, "_ask", lambda question: pytest.fail("a worker was asked"))
    assert is_quick(pattern, 0, 500)
    pattern_matches(pattern, "some text " * 50)


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        (EVIL, 20),
        ("(ab|c)*d", 20),
        ("(a?b?)*", 20),
        (".*x.*y", 500),
        (r"(\w)\1+", 5000),
        ("(?=a+)b", 5000),
        ("(?:a{1,9}){1,9}b", 20),
        (".*done", 5000),
        ("a?" * 40, 5),
        ("(?:a|a)" * 40, 5),
        ("red", 5_000_000),
    ],
)
def test_patterns_that_may_backtrack_go_to_a_worker(pattern, length):
    assert not is_quick(pattern, 0, length)


ATOMS = ["a", "[ab]", ".", "a?", "a*", "b+?", "(?:a|b)", "(?:a|a)", "(?:aa|a)", "a{0,9}", "(?:a?){3}", "(?=a*)",
         "(a)\\1", "$", "^", "(?:a+)+", "(?:ab|a)*", "a{0,900}", "[ab]{0,30}", "(?>a*)", "a*+", "(?:a?b?){2,5}",
         "(?<!b)"]  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(ATOMS), min_size=1, max_size=9), st.sampled_from(["a", "ab", "aab"]), st.integers(5, 13)
)
def test_no_pattern_that_is_called_quick_takes_long(atoms, repeated, magnitude):
    length, pattern = 2**magnitude, "".join(atoms) + "!"
    if is_quick(pattern, 0, length):
        begin = time.process_time()
        re.search(pattern, (repeated * length)[:length])
        assert time.process_time() - begin < 5, "CPU seconds; the slowest took 0.02"


def test_a_pattern_that_does_not_compile_is_an_error_of_the_verifier():
    with pytest.raises(VerifierFailed, match="unterminated"):
        run_verifier("regex_match", "x", "(a", {})


async def test_the_event_loop_turns_while_a_pattern_hangs(hurried):
    plan = InProcessVerifier(fn_name="regex_match", expected=EVIL)
    work = asyncio.ensure_future(grade(HarborTask(task_id="t", instruction="?", verifier=plan), LONG))
    turns = 0
    while not work.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert turns >= 5
    with pytest.raises(VerifierFailed, match=r"'t'.*took longer"):
        await work


async def test_a_pattern_that_hangs_can_be_cancelled(monkeypatch):
    monkeypatch.setattr(patterns, "PATTERN_SECONDS", 600)
    plan = InProcessVerifier(fn_name="regex_match", expected=EVIL)
    work = asyncio.ensure_future(grade(HarborTask(task_id="t", instruction="?", verifier=plan), LONG))
    await asyncio.sleep(0.3)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(work, 300)
    assert patterns._places.acquire(timeout=30), "its worker was ended and its place is free"
    patterns._places.release()


HANGING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
from evsys_sdk import patterns
from evsys_sdk.verifiers import run_verifier
patterns.PATTERN_SECONDS = 600
print("ready", flush=True)
run_verifier("regex_match", "a" * 60 + "!", r"(a+)+$", {})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_in_which_a_pattern_hangs_can_be_stopped_and_its_worker_ends_with_it(number):
    process = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    workers = []
    try:
        assert process.stdout.readline() == b"ready\n"
        while not any(worker.cpu_times().user > 0.2 for worker in workers):  # it is at its match
            time.sleep(0.01)
            workers = psutil.Process(process.pid).children()
        begin = time.monotonic()
        os.kill(process.pid, number)
        process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert time.monotonic() - begin < 60 and process.returncode != 0
    _, alive = psutil.wait_procs(workers, timeout=60)  # its own alarm would end it after 600 s
    assert not alive


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 16000,
        "</answer>" * 16000,
        "<answer>" * 16000 + "</answer>",
        "<tool_call>" * 16000,
        "<tool_call>{" * 16000,
        "```json" * 16000,
        "[" * 50000,
        '{"a":' * 20000,
        ("[" + "1," * 50) * 2000,
        "[1," * 30000 + "]" * 100,
        "1,111" * 20000,
        "-" * 100000,
        ("9" * 300 + ".") * 300,
        '{"a":"' * 150000,
        "[{" * 100000,
        '["' * 100000,
        '\\"[' * 100000,
        '{"a":[1,{"b":"' * 50000,
        "[" * 900 + '"' + "a" * 2_000_000,
        "[]" * 100000,
        "{\n" * 100000,
        "<tool_call>[" * 50000 + "</tool_call>" * 50000,
        "<think></think>" * 50000,
        "1/" * 200000,
        "1,111," * 100000,
        "9e" * 100000,
    ],
    ids=lambda text: text[:12],
)
def test_whatever_a_model_repeats_is_read_in_no_time(text):
    begin = time.process_time()
    _read_by_all(text)
    assert time.process_time() - begin < 30, "CPU seconds, about 2; where time grows with the square it is minutes"


def _read_by_all(text):
    """Every extraction from a completion. None of them fails, whatever the completion is."""
    answer_in(text), has_answer(text), list(json_values(text)), list(values_in(text))
    calls_in(text), read_calls(text, [{"function": {"name": "f"}}]), extract_predicted_slug(text)
    with suppress(Unreadable):
        read_verdict(text)
    for name, expected in (
        ("exact_match", "x"),
        ("tool_calls_match", []),
        ("json_match", {"a": 1}),
        ("numeric_match", 5),
        ("contains", "x"),
        ("regex_match", "x"),
        ("format_only", None),
    ):
        run_verifier(name, text, expected, {})
    run_verifier("format_only", text, None, {"format": "json"})


PIECES = ['"', "\\", '\\"', "[", "]", "{", "}", ",", ":", "1", "-", ".", "e", "/", " ", "\n", "a", "A_B", "_", "`",
          "```", "```json", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<think>", "</think>", '{"a":',
          '"a"', '{"name":"f","arguments":', "\u2212", "\ud800", "\x00", "true", "NaN", "1,111", "<"]  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=3), st.lists(st.sampled_from(PIECES), min_size=1, max_size=4),
       st.lists(st.sampled_from(PIECES), max_size=3))  # fmt: skip
def test_no_repeated_pieces_are_read_in_time_that_grows_with_their_square(before, repeated, behind):
    """Four times the text takes four times as long, not sixteen; half a second of CPU more is no sign of anything."""
    seconds = []
    for times in (4000, 16000):
        text = "".join(before) + "".join(repeated) * times + "".join(behind)
        begin = time.process_time()
        _read_by_all(text)
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 0.5 + 10 * seconds[0]


@pytest.mark.parametrize(
    "text", ["[" * 3000 + "]" * 3000, '{"answer":' * 3000 + "1" + "}" * 3000, '{"a":' * 900 + "1" + "}" * 900]
)
def test_an_answer_nested_too_deeply_is_wrong_and_no_failure_of_the_verifier(text):
    _read_by_all(text)
    assert run_verifier("json_match", text, {"a": 1}, {}) == 0.0
    assert run_verifier("tool_calls_match", text, [CALL], {}) == 0.0


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([*PIECES, "[1]", '{"a":1}', '"k":', "\\u00e9", "1.5"]), max_size=14).map("".join))
def test_values_in_running_text_are_what_json_reads_at_each_bracket(text):
    expected, place = [], 0
    while (begin := re.search(r"[\[{]", text[place:])) is not None:
        try:
            value, place = json.JSONDecoder().raw_decode(text, place + begin.start())
        except ValueError:
            place += begin.end()
        else:
            expected.append(value)
    assert repr(list(values_in(text))) == repr(expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<answer>a</answer>",
        "x<ANSWER>a</Answer>b<answer>c</answer>",
        "<answer><answer>a</answer></answer>",
        "<answer>a",
    ],
)
def test_texts_between_marks_are_what_a_lazy_pattern_finds(text):
    lazy = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL | re.IGNORECASE)
    begin, end = re.compile("<answer>", re.IGNORECASE), re.compile("</answer>", re.IGNORECASE)
    assert texts_between(text, begin, end) == lazy


CALL = {"name": "a", "arguments": {"x": 1}}
OTHER = {"name": "delete_everything", "arguments": {}}


F, G = json.dumps(CALL), json.dumps(OTHER)


@pytest.mark.parametrize(
    "said",
    [
        f"[{F}] and then [{G}]",
        f"[{F}]\n{G}",
        f"```json\n[{F}]\n```\n```json\n[{G}]\n```",
        f'{F} {{"tool_calls": [{G}]}}',
        f"<tool_call>{F}</tool_call> {G}",
        f"{G} <tool_call>{F}</tool_call>",
        f"<tool_call>{F}</tool_call>[{G}]",
        f"<tool_call>{F}</tool_call><tool_call>{G}",
        f"{F} <tool_call>{G}",
        f"<tool_call>{F}</tool_call> then <tool_call>\n{G} and more",
        f"<answer>[{F}]</answer> {G}",
        f"{G} <answer>[{F}]</answer>",
        f"<answer>[{F}]</answer><answer>[{G}]</answer>",
        f'{{"tool_calls":[{F}],"function":{G}}}',
        f'{{"function":{F},"tool_calls":[{{"function": {G}}}]}}',
        f'{{"tool_calls":[{F}],"next":{G}}}',
        f'{{"name": "a", "arguments": {{"x": 1}}, "tool_calls": [{G}]}}',
        f'{{"name": "a", "arguments": {{"x": 1}}, "then": [{G}]}}',
        f"[[{F}], [{G}]]",
        f'{{"choices": [{{"message": {{"tool_calls": [{F}, {G}]}}}}]}}',
        f"<think>hm <tool_call>{G}</tool_call></think> {F}",
        f"<think>{F} {G}",
    ],
)
def test_calls_behind_the_first_list_are_calls_too(said):
    assert run_verifier("tool_calls_match", said, [CALL], {}) == 0.0
    assert run_verifier("tool_calls_match", said, [CALL, OTHER], {}) == 1.0
    assert run_verifier("tool_calls_match", said, [CALL], {"partial_credit": True}) == 0.5


@pytest.mark.parametrize(
    "said",
    [
        f"[{F}] [{G}, 5]",
        f"[{F}, 5]",
        f"<tool_call>{F}</tool_call><tool_call>{G} {G}</tool_call>",
        f'{F} <tool_call>{{"name": "delete_ev',
        f'{{"tool_calls": [{F}, "delete_everything"]}}',
        f"<tool_call>{F}<tool_call>{G}</tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_is_made_and_wrong(said):
    assert run_verifier("tool_calls_match", said, [CALL], {}) == 0.0
    assert run_verifier("tool_calls_match", said, [], {}) == 0.0


@pytest.mark.parametrize(
    "said",
    [
        f"I call [{F}].",
        f"As {{this}} says: {F} [1]",
        f"[{F}]",
        f"<think>Perhaps {G}? No.</think><tool_call>{F}</tool_call>",
        f"<think>Perhaps {G}? No.</think>{F}",
        f"I use the tag <tool_call> for {F}",
        f'{{"role": "assistant", "name": "bot", "tool_calls": [{F}], "user": {{"name": "Bob"}}}}',
        '{"name": "a", "arguments": {"x": 1}}  <tool_call>',
    ],
)
def test_one_list_of_calls_in_running_text_is_found_as_before(said):
    assert run_verifier("tool_calls_match", said, [CALL], {}) == 1.0
