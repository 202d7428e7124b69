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

import pytest

from evsys_sdk.answers import answer_in, has_answer, texts_between
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.errors import VerifierFailed
from evsys_sdk.verifiers import grade, patterns, run_verifier
from evsys_sdk.verifiers.patterns import is_quick, pattern_matches
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
    ],
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
def test_a_pattern_means_the_same_in_a_worker(pattern, text, flags, matches):
    assert not is_quick(pattern, flags)
    assert pattern_matches(pattern, text, flags=int(flags)) is matches
    assert (re.search(pattern, text, flags) is not None) is matches
    whole = re.fullmatch(pattern, text, flags) is not None
    assert pattern_matches(pattern, text, flags=int(flags), is_full=True) is whole


@pytest.mark.parametrize(
    "pattern", ["red", "^red$", r"\b42\b", r"[a-z]+", r"answer: (yes|no)", r"\d{3}-\d{4}", "a?b", r".*done"]
)
def test_plain_patterns_are_matched_without_a_worker(pattern, monkeypatch):
    monkeypatch.setattr(patterns, "_ask", lambda question: pytest.fail("a worker was asked"))
    assert is_quick(pattern)
    pattern_matches(pattern, "some text")


@pytest.mark.parametrize("pattern", [EVIL, "(ab|c)*d", "(a?b?)*", ".*x.*y", r"(\w)\1+", "(?=a+)b", "(?:a{1,9}){1,9}b"])
def test_patterns_that_may_backtrack_go_to_a_worker(pattern):
    assert not is_quick(pattern)


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
        await asyncio.wait_for(work, 30)
    assert patterns._places.acquire(timeout=30), "its worker was ended and its place is free"
    patterns._places.release()


HANGING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
from evsys_sdk.verifiers import patterns, run_verifier
patterns.PATTERN_SECONDS = 600
print("ready", flush=True)
run_verifier("regex_match", "a" * 60 + "!", r"(a+)+$", {})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_in_which_a_pattern_hangs_can_be_stopped(number):
    process = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.3)
        begin = time.monotonic()
        os.kill(process.pid, number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert time.monotonic() - begin < 60 and process.returncode != 0


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
    ],
    ids=lambda text: text[:12],
)
def test_whatever_a_model_repeats_is_read_in_no_time(text):
    begin = time.process_time()
    answer_in(text), has_answer(text), list(json_values(text)), list(values_in(text))
    for name, expected in (
        ("exact_match", "x"),
        ("tool_calls_match", []),
        ("json_match", {"a": 1}),
        ("numeric_match", 5),
    ):
        run_verifier(name, text, expected, {})
    assert time.process_time() - begin < 5, "CPU seconds; it was 9 to 12 for the shorter ones"


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


@pytest.mark.parametrize(
    "said",
    [
        f"{json.dumps([CALL])} and then {json.dumps([OTHER])}",
        f"{json.dumps([CALL])}\n{json.dumps(OTHER)}",
        f"```json\n{json.dumps([CALL])}\n```\n```json\n{json.dumps([OTHER])}\n```",
        f"{json.dumps(CALL)} {json.dumps({'tool_calls': [OTHER]})}",
    ],
)
def test_calls_behind_the_first_list_are_calls_too(said):
    assert run_verifier("tool_calls_match", said, [CALL], {}) == 0.0
    assert run_verifier("tool_calls_match", said, [CALL, OTHER], {}) == 1.0
    assert run_verifier("tool_calls_match", said, [CALL], {"partial_credit": True}) == 0.5


@pytest.mark.parametrize(
    "said", [f"I call {json.dumps([CALL])}.", f"As {{this}} says: {json.dumps(CALL)} [1]", json.dumps([CALL])]
)
def test_one_list_of_calls_in_running_text_is_found_as_before(said):
    assert run_verifier("tool_calls_match", said, [CALL], {}) == 1.0
