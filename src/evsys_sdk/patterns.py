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
from re import _compiler, _parser  # type: ignore[attr-defined]  # what `re` itself makes of a pattern
from typing import Any

from evsys_sdk.errors import VerifierFailed, shorten

PATTERN_SECONDS = 5.0
MOST_WORKERS = 4
QUICK_STEPS = 5_000_000
"""What may be done here, at most: between a tenth and half of a second."""
_LOOK_SECONDS = 0.05
_NO_WIDTH = frozenset({"AT", "ASSERT", "ASSERT_NOT"})
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


@lru_cache(maxsize=4096)
def matches_nothing(pattern: str, flags: int = 0) -> bool:
    """Whether it can be proved that no text matches, as of `(?!)` and `a^b`. False where it can match, where it is not
    known, and where the pattern is wrong in another way."""
    try:
        parsed = _parser.parse(pattern, flags)
        return _is_dead(parsed, parsed.state.flags)
    except (re.error, RecursionError, OverflowError):
        return False


def _is_dead(parsed: Any, flags: int, before: int = 0, after: int = 0) -> bool:
    """Whether these items cannot match. `before` and `after`: characters that the same match takes at least before and
    after them, which is what rules `^` and `$` out."""
    for index, (operation, argument) in enumerate(parsed):
        ahead, behind = parsed[index + 1 :], parsed[:index]
        least_before, least_after = before + behind.getwidth()[0], after + ahead.getwidth()[0]
        # What stands at this place of the text, however many anchors and looks stand there too.
        last = next((item for item in reversed(list(behind)) if str(item[0]) not in _NO_WIDTH), None)
        following = next((item for item in ahead if str(item[0]) not in _NO_WIDTH), None)
        name = str(operation)
        if name == "AT":
            if {"AT_BOUNDARY", "AT_NON_BOUNDARY"} == {str(argument), str(ahead[0][1]) if len(ahead) else ""}:
                return True
            if _is_dead_anchor(parsed, str(argument), flags, last, following, least_before, least_after):
                return True
        elif name in ("ASSERT", "ASSERT_NOT"):
            if _is_dead_look(name, argument, flags, following if argument[0] > 0 else last, least_before):
                return True
        elif name == "IN":
            if str(argument[0][0]) == "NEGATE" and _matches_no_character(parsed, (operation, argument), flags):
                return True
        elif name == "BRANCH":
            if all(_is_dead(option, flags, least_before, least_after) for option in argument[1]):
                return True
        elif name == "SUBPATTERN":
            _, added, removed, body = argument
            if _is_dead(body, (flags | added) & ~removed, least_before, least_after):
                return True
        elif name == "ATOMIC_GROUP":
            if _is_dead(argument, flags, least_before, least_after):
                return True
        elif name in _REPEATS:
            # The first time round nothing but `before` was taken, the last time nothing but `after` will be.
            if argument[0] > 0 and _is_dead(argument[2], flags, least_before if argument[0] == 1 else 0, 0):
                return True
        elif name == "GROUPREF_EXISTS":
            options = [option for option in argument[1:] if option is not None]
            if len(options) == 2 and all(_is_dead(option, flags, least_before, least_after) for option in options):
                return True
    return False


def _is_dead_anchor(
    parsed: Any, anchor: str, flags: int, last: Any, following: Any, least_before: int, least_after: int
) -> bool:
    takes_newline = {
        side: _takes_newline(parsed, item, flags) for side, item in (("last", last), ("following", following))
    }
    is_multiline = bool(flags & re.MULTILINE)
    if anchor == "AT_BEGINNING_STRING" or (anchor == "AT_BEGINNING" and not is_multiline):
        return least_before > 0
    if anchor == "AT_BEGINNING":
        return takes_newline["last"] is False
    if anchor == "AT_END_STRING":
        return least_after > 0
    if anchor == "AT_END":
        # Without MULTILINE `$` also holds before a line break that is the last character.
        return (least_after > 1 and not is_multiline) or takes_newline["following"] is False
    return False


def _is_dead_look(name: str, argument: Any, flags: int, beside: Any, least_before: int) -> bool:
    """A look ahead or behind that always fails; `beside` is the item that takes what it looks at."""
    direction, body = argument
    seen = _characters(body[0], flags) if len(body) == 1 else None
    taken = _characters(beside, flags) if beside is not None else None
    if name == "ASSERT":
        is_apart = seen is not None and taken is not None and not seen & taken
        return is_apart or _is_dead(body, flags, least_before if direction > 0 else 0)
    return (seen is not None and taken is not None and taken <= seen) or _takes_nothing(body)


def _takes_nothing(parsed: Any) -> bool:
    """Whether it matches at every place of every text, because each of its items may be left out."""
    for operation, argument in parsed:
        name = str(operation)
        if name in _REPEATS and (argument[0] == 0 or _takes_nothing(argument[2])):
            continue
        if name == "SUBPATTERN" and _takes_nothing(argument[3]):
            continue
        if name == "BRANCH" and any(map(_takes_nothing, argument[1])):
            continue
        return False
    return True


def _characters(item: Any, flags: int) -> frozenset[int] | None:
    """What an item that takes one character can take; None where that is not known, or much."""
    name, argument = str(item[0]), item[1]
    if flags & re.IGNORECASE:
        return None
    if name == "LITERAL":
        return frozenset([argument])
    if name != "IN":
        return None
    found: set[int] = set()
    for kind, value in argument:
        if str(kind) == "LITERAL":
            found.add(value)
        elif str(kind) == "RANGE" and value[1] - value[0] < 1000:
            found.update(range(value[0], value[1] + 1))
        else:
            return None
    return frozenset(found)


def _takes_newline(parsed: Any, item: Any, flags: int) -> bool | None:
    """Whether an item that takes one character can take a line break; None for other items."""
    if item is None or str(item[0]) not in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
        return None
    return _compile_item(parsed, item, flags).fullmatch("\n") is not None


def _matches_no_character(parsed: Any, item: Any, flags: int) -> bool:
    pattern = _compile_item(parsed, item, flags)
    # Most classes take one of these; all the others are tried on every character there is.
    return pattern.search("a0_ \n-\u00e9\u4e2d") is None and pattern.search(_all_characters()) is None


def _compile_item(parsed: Any, item: Any, flags: int) -> re.Pattern[str]:
    return _compiler.compile(_parser.SubPattern(parsed.state, [item]), flags)


@lru_cache(maxsize=1)
def _all_characters() -> str:
    return "".join(map(chr, range(sys.maxunicode + 1)))


class _Worker:
    """One process that matches patterns, one question at a time."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("pattern_worker.py"))
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            # -I -S: neither PYTHON* variables nor site-packages nor this folder, with its `format` and `logs`, are
            # looked at.
            [sys.executable, "-I", "-S", script],
            # Nothing reads stderr: that its other end is gone tells the worker that this process has ended.
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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
            # The worker's own alarm is later than our limit: it only counts where this process is gone unnoticed.
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
