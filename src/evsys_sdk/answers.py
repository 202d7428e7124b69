"""What a completion answers, and whether that is the answer wanted.

In: a completion and an expected value. Out: the answer inside it, and yes or no. Verifiers and metrics share
these two questions, so that `exact_match` means the same as a reward and as a score.
"""

from __future__ import annotations

import json
import re

_OPEN, _CLOSE = re.compile(r"<answer>", re.IGNORECASE), re.compile(r"</answer>", re.IGNORECASE)
_KEYS = ("tool_slug", "answer")
MOST_NESTED = 200
"""Levels of lists and objects in an answer."""


def answer_in(completion: str) -> str:
    """The text between the last `<answer>` and `</answer>`, else the whole; without spaces around."""
    # The last pair: a model that thinks aloud may name the tags before it uses them.
    found = texts_between(completion, _OPEN, _CLOSE)
    return (found[-1] if found else completion).strip()


def has_answer(completion: str) -> bool:
    """Whether the completion holds a filled-in pair of `<answer>` tags."""
    return any(text.strip() for text in texts_between(completion, _OPEN, _CLOSE))


def texts_between(text: str, begin: re.Pattern[str], end: re.Pattern[str]) -> list[str]:
    """What `begin(.*?)end` finds, in time that grows with the text's length and not with its square: once no end
    follows, none is looked for from the next beginning."""
    found, place = [], 0
    while (opened := begin.search(text, place)) is not None:
        closed = end.search(text, opened.end())
        if closed is None:
            break
        found.append(text[opened.end() : closed.start()])
        place = closed.end()
    return found


def target_answer(target: object) -> object:
    """A target with every text in it reduced to its answer, as a completion is: a demonstration such as
    `so it is <answer>4</answer>` may serve as one."""
    if isinstance(target, str):
        return answer_in(target)
    if isinstance(target, list):
        return [target_answer(one) for one in target]
    if isinstance(target, dict):
        return {key: target_answer(value) for key, value in target.items()}
    return target


def wanted_answer(target: object) -> object:
    """The answer in a target such as `{tool_slug: GMAIL_SEND, toolkit: gmail}`; any other target is the answer."""
    if isinstance(target, dict):
        for key in _KEYS:
            if target.get(key) is not None:
                return target[key]
    return target


def same_answer(completion: str, expected: object, *, case_sensitive: bool = True) -> bool:
    """Whether the completion's answer is `expected`; of a list, any one will do."""
    expected = wanted_answer(expected)
    if isinstance(expected, list):
        return any(same_answer(completion, one, case_sensitive=case_sensitive) for one in expected)
    answer = answer_in(completion)
    if isinstance(expected, str) and answer == answer_in(expected):
        return True  # also a text that is a JSON object, of which the answer is taken below
    fields = parsed_json(answer)
    if isinstance(fields, dict) and not isinstance(expected, dict):
        answer = str(wanted_answer(fields))
    if not isinstance(expected, str):
        found = parsed_json(answer)
        # Python says 1 == True; a task that expects `true` does not mean 1.
        is_same = bool(found == expected) and isinstance(found, bool) == isinstance(expected, bool)
        return is_same or answer == str(expected)
    wanted = answer_in(expected)
    return answer == wanted if case_sensitive else answer.casefold() == wanted.casefold()


def parsed_json(text: str) -> object:
    """The JSON value that `text` is, or None."""
    try:
        return read_json(text)
    except ValueError:
        return None


def read_json(text: str) -> object:
    """The JSON value that `text` is. ValueError where it is none, where an object has a key twice (parsers differ in
    which one they take), or where it is nested deeper than `MOST_NESTED`: code that walks or prints such a value ends
    with a RecursionError, and a model must not be able to make a verifier fail."""
    try:
        value = json.loads(text, object_pairs_hook=_object_of)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # No deeper than it has brackets: most answers need no walk.
    if text.count("[") + text.count("{") <= MOST_NESTED:
        return value
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [
            item
            for one in level
            if isinstance(one, list | dict)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise ValueError("nested too deeply")
    return value


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key occurs twice")
    return value
