"""Does a regular expression match? With a time limit, and without keeping anything else waiting.

In: a pattern and a text. Out: yes or no, or `VerifierFailed` where it takes longer than `PATTERN_SECONDS`. Python's
`re` cannot be interrupted and holds the whole process while it backtracks: `(a+)+$` needs years for 60 characters. A
pattern that is quick on any text of this length is matched here; any other in a worker process, which is killed.
"""

from __future__ import annotations

import json
import math
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
QUICK_STEPS = 5_000_000
"""What may be done here, at most: between a tenth and half of a second."""
_LOOK_SECONDS = 0.05
_REPEATS = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})


def pattern_matches(pattern: str, text: str, *, flags: int = 0, is_full: bool = False) -> bool:
    """Whether the pattern occurs in the text, or with `is_full` covers it."""
    compiled = re.compile(pattern, flags)  # an error in the pattern is the same wherever it is matched
    if is_quick(pattern, flags, len(text)):
        return (compiled.fullmatch if is_full else compiled.search)(text) is not None
    return _ask({"pattern": pattern, "flags": flags, "text": text, "is_full": is_full})


def is_quick(pattern: str, flags: int, length: int) -> bool:
    """Whether no text of this length can keep `re` busy for more than `QUICK_STEPS`."""
    return most_steps(pattern, flags, 1 << length.bit_length()) <= QUICK_STEPS  # rounded up: few values to keep


@lru_cache(maxsize=4096)
def most_steps(pattern: str, flags: int, length: int) -> float:
    """An upper bound of the steps that backtracking takes on any text of this length: from each of its characters,
    every way through the pattern is tried."""
    try:
        return (length + 1) * _explore(_parser.parse(pattern, flags), length)[1]
    except (re.error, RecursionError, OverflowError):
        return 0.0  # it never gets as far as matching


def _explore(parsed: Any, length: int) -> tuple[float, float]:
    """In how many ways these items can match from one place, and the steps to try them all. What follows an item is
    tried again for each way in which the item matches: that is what makes `a?a?a?` and `(a|a)(a|a)` explode."""
    ways, steps = 1.0, 1.0
    for operation, argument in parsed:
        item_ways, item_steps = _explore_item(str(operation), argument, length)
        steps += ways * item_steps
        ways *= item_ways
    return ways, steps


def _explore_item(name: str, argument: Any, length: int) -> tuple[float, float]:
    if name in _REPEATS:
        low, high, body = argument
        times = max(low, min(high, length + 1))  # `re` leaves a loop that consumes nothing, but not before `low`
        ways, steps = _explore(body, length)
        # A float ends at exp(709.8), and `**` raises beyond it.
        grown = ways**times if times * math.log(ways) < 700 else math.inf  # 1.0 where the body has one way
        return (times - low + 1) * grown, times * steps * grown
    if name == "BRANCH":
        options = [_explore(option, length) for option in argument[1]]
        return sum(ways for ways, _ in options), sum(steps for _, steps in options)
    if name == "GROUPREF_EXISTS":
        options = [_explore(option, length) for option in argument[1:] if option is not None]
        return sum(ways for ways, _ in options) + 1, sum(steps for _, steps in options)
    if name in ("ASSERT", "ASSERT_NOT"):
        return 1.0, _explore(argument[1], length)[1]  # entered once: what it matched is not tried again
    if name == "SUBPATTERN":
        return _explore(argument[3], length)
    if name == "ATOMIC_GROUP":
        return _explore(argument, length)
    return 1.0, {"GROUPREF": length, "IN": len(argument) if name == "IN" else 1}.get(name, 1)


class _Worker:
    """One process that matches patterns, one question at a time."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("pattern_worker.py"))
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            # -I -S: neither PYTHON* variables nor site-packages nor this folder, with its `format` and `logs`, are
            # looked at.
            [sys.executable, "-I", "-S", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            # A Ctrl-C in the terminal goes to the whole process group, of which the worker is then no part.
            encoding="utf-8", start_new_session=True,
        )  # fmt: skip

    def answer(self, question: dict[str, object]) -> dict[str, object] | None:
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

    def _exchange(self, question: dict[str, object], said: list[str]) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            # The worker's own alarm is later than our limit: it only counts where this process is gone.
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
        worker = None
        while _idle and worker is None:
            one = _idle.pop()
            # After a fork the workers are the parent's.
            worker = one if one.owner == os.getpid() and one.process.poll() is None else None
        worker = worker or _Worker()
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
