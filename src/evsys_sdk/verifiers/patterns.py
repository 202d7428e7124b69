"""Does a regular expression match? With a time limit, and without keeping anything else waiting.

In: a pattern and a text. Out: yes or no, or `VerifierFailed` where it takes longer than `PATTERN_SECONDS`. Python's
`re` cannot be interrupted and holds the whole process while it backtracks: `(a+)+$` needs years for 60 characters. A
pattern that is known to be quick is matched here; any other in a worker process, which is killed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # what `re` itself makes of a pattern
from typing import Any

from evsys_sdk.errors import VerifierFailed, shorten

PATTERN_SECONDS = 5.0
MOST_WORKERS = 4
QUICK_CHARS = 20_000
"""Longer texts go to a worker in any case."""
_LOOK_SECONDS = 0.05
_REPEATS = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})


def pattern_matches(pattern: str, text: str, *, flags: int = 0, is_full: bool = False) -> bool:
    """Whether the pattern occurs in the text, or with `is_full` covers it."""
    compiled = re.compile(pattern, flags)  # an error in the pattern is the same wherever it is matched
    if is_quick(pattern, flags) and len(text) <= QUICK_CHARS:
        return (compiled.fullmatch if is_full else compiled.search)(text) is not None
    return _ask({"pattern": pattern, "flags": flags, "text": text, "is_full": is_full})


@lru_cache(maxsize=4096)
def is_quick(pattern: str, flags: int = 0) -> bool:
    """Whether no text can make this pattern backtrack for long: it repeats at most one thing without end, that thing is
    a single character or class, and nothing that repeats holds another repeat or a choice."""
    try:
        parsed = _parser.parse(pattern, flags)
    except (re.error, RecursionError, OverflowError):
        return True  # it never gets as far as matching
    return _endless(parsed, inside=False) <= 1


def _endless(parsed: Any, *, inside: bool) -> int:
    """How many repeats without end there are; many where one of them can multiply another."""
    count = 0
    for operation, argument in parsed:
        name = str(operation)
        if name in _REPEATS:
            _, most, body = argument
            is_endless = most is _parser.MAXREPEAT or most > 1000
            if inside or body.getwidth()[0] != body.getwidth()[1]:
                return 100
            count += int(is_endless) + _endless(body, inside=True)
        elif name in ("GROUPREF", "GROUPREF_EXISTS", "ASSERT", "ASSERT_NOT"):
            return 100
        elif name == "SUBPATTERN":
            count += _endless(argument[3], inside=inside)
        elif name == "ATOMIC_GROUP":
            count += _endless(argument, inside=inside)
        elif name == "BRANCH":
            if inside:
                return 100
            count += max(_endless(branch, inside=inside) for branch in argument[1])
    return count


class _Worker:
    """One process that matches patterns, one question at a time."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("pattern_worker.py"))
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            encoding="utf-8", start_new_session=True,
        )  # fmt: skip

    def answer(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """What it says; None when it was killed because it took too long. Whatever ends the wait kills it too."""
        said: list[str] = []
        asking = threading.Thread(target=self._exchange, args=(question, said), daemon=True)
        deadline = time.monotonic() + PATTERN_SECONDS
        try:
            asking.start()
            # In small steps: an exception that is raised on this thread, to stop it, arrives between two of them.
            while asking.is_alive() and time.monotonic() < deadline:
                asking.join(_LOOK_SECONDS)
        finally:
            if not said:
                self.close()
        return json.loads(said[0]) if said and said[0] else None

    def _exchange(self, question: dict[str, Any], said: list[str]) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({**question, "seconds": PATTERN_SECONDS + 1}) + "\n")
            self.process.stdin.flush()
            said.append(self.process.stdout.readline())
        except (OSError, ValueError):
            pass  # it was killed

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


_idle: list[_Worker] = []
_places = threading.BoundedSemaphore(MOST_WORKERS)


def _ask(question: dict[str, Any]) -> bool:
    while not _places.acquire(timeout=_LOOK_SECONDS):
        pass  # the others have a time limit each
    try:
        worker = _take()
        answer = worker.answer(question)
        if answer is not None:
            _idle.append(worker)
    finally:
        _places.release()
    if answer is None:
        raise VerifierFailed(
            f"the pattern {shorten(question['pattern'])!r} took longer than {PATTERN_SECONDS:g} seconds on a text of "
            f"{len(question['text'])} characters; write it without repeats inside repeats"
        )
    if "error" in answer:
        raise VerifierFailed(f"the pattern {shorten(question['pattern'])!r}: {answer['error']}")
    return bool(answer["matches"])


def _take() -> _Worker:
    while _idle:
        worker = _idle.pop()
        # After a fork the workers are the parent's.
        if worker.owner == os.getpid() and worker.process.poll() is None:
            return worker
    return _Worker()
