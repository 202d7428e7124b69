"""Verifiers that compare values rather than text: JSON and numbers.

In: a completion, the expected value, settings. Out: 1.0 or 0.0. Where a completion holds its value (answer tags, a
fenced block, running text) is decided only here, by `json_values` and `number_in`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Annotated

from pydantic import Field

from evsys_sdk.answers import answer_in, parsed_json, read_json, texts_between
from evsys_sdk.registry import register_verifier

_FENCE, _FENCE_END = re.compile(r"```(?:json)?"), re.compile(r"```")
_BRACKET = re.compile(r"[\[{]")
_NOT_JSON = object()

# The tokens of JSON as `json` reads them, by what may follow. Possessive repeats (`*+`): no token backtracks.
_STRING = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
_SCALAR = (
    rf"(?P<scalar>{_STRING}|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?|true|false|null|NaN|-?Infinity)"
)
_KEY = rf"(?P<key>{_STRING}[ \t\n\r]*+:)"
_OPEN = r"(?P<open>[\[{])"
_TOKENS = {
    wanted: re.compile(rf"[ \t\n\r]*+(?:{pattern})")
    for wanted, pattern in {
        "value": rf"{_OPEN}|{_SCALAR}",
        "first_value": rf"{_OPEN}|{_SCALAR}|(?P<close>\])",
        "in_list": r"(?P<comma>,)|(?P<close>\])",
        "key": _KEY,
        "first_key": rf"{_KEY}|(?P<close>\}})",
        "in_object": r"(?P<comma>,)|(?P<close>\})",
    }.items()
}
# 1,234.5 and 3/4 and -1e-3; a minus between two digits is no sign, and `x2` holds no number.
_NUMBER = re.compile(r"(?<![\w.])([-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d+)?)(?:/(\d+))?")


@register_verifier("json_match")
def json_match(
    completion: str,
    expected: object,
    *,
    subset: Annotated[bool, Field(description="Allow keys in the answer that `expected` does not have.")] = False,
    ignore_order: Annotated[bool, Field(description="Compare lists without their order.")] = False,
) -> float:
    """Is the completion's JSON the expected value? `subset` allows more keys, `ignore_order` mixed lists."""
    if expected is None or (subset and expected == {}):
        raise ValueError("json_match needs `expected`: the JSON value, and with subset at least one key")
    parsed = parsed_json(expected) if isinstance(expected, str) else None
    wanted = expected if parsed is None else parsed
    found = next(json_values(completion), _NOT_JSON)
    return float(found is not _NOT_JSON and _is_same(found, wanted, subset, ignore_order))


def json_values(completion: str) -> Iterator[object]:
    """The JSON values that a completion may mean, likeliest first: its answer, fenced blocks, then running text."""
    answer = answer_in(completion)
    for text in (answer, *texts_between(answer, _FENCE, _FENCE_END)):
        try:
            yield read_json(text.strip())
        except ValueError:
            continue
    yield from islice(values_in(answer), 1)


def values_in(text: str, begin: re.Pattern[str] = _BRACKET) -> Iterator[object]:
    """The lists and objects in running text, in order, outermost only; with `begin`, those that begin so."""
    for start, end in spans_in(text, begin):
        try:
            yield read_json(text[start:end])
        except ValueError:  # nested too deeply, a key twice, or a number of thousands of digits
            continue


def spans_in(text: str, begin: re.Pattern[str] = _BRACKET) -> Iterator[tuple[int, int]]:
    """Where lists and objects begin and end in running text, outermost only. In time that grows with the text's
    length: no part of the text is read twice.

    `json` cannot be used to find out: from each bracket it reads all that follows again, and its error counts the lines
    up to there. Here, where a value breaks off, all that are open around it break off too and are not tried again. Only
    brackets inside strings are; from there, what was a string lies between two, so that no token is met again.
    """
    ends: dict[int, int | None] = {}  # by the place of the opening bracket; None for a value that breaks off
    place = 0
    while (opened := begin.search(text, place)) is not None:
        start = opened.start()
        if start not in ends:
            open_at: list[int] = []
            place, wanted = start, "value"
            while (token := _TOKENS[wanted].match(text, place)) is not None:
                kind, place = token.lastgroup, token.end()
                if kind == "open":
                    open_at.append(place - 1)
                    wanted = "first_value" if text[place - 1] == "[" else "first_key"
                    continue
                if kind == "close":
                    ends[open_at.pop()] = place
                    if not open_at:
                        break
                is_list = text[open_at[-1]] == "["
                if kind == "comma":
                    wanted = "value" if is_list else "key"
                elif kind == "key":
                    wanted = "value"
                else:
                    wanted = "in_list" if is_list else "in_object"
            ends.update(dict.fromkeys(open_at, None))
        end = ends[start]
        place = start + 1 if end is None else end
        if end is not None:
            yield start, end


def _is_same(found: object, wanted: object, subset: bool, ignore_order: bool) -> bool:
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or not (
            wanted.keys() <= found.keys() if subset else wanted.keys() == found.keys()
        ):
            return False
        return all(_is_same(found[key], value, subset, ignore_order) for key, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return False
        if not ignore_order:
            return all(_is_same(one, other, subset, ignore_order) for one, other in zip(found, wanted, strict=True))
        # Bipartite matching by augmenting paths: with `subset` one found item may fit several wanted ones.
        partner: dict[int, int] = {}  # index found -> index wanted

        def assign(index: int, tried: set[int]) -> bool:
            for other, item in enumerate(found):
                if other not in tried and _is_same(item, wanted[index], subset, True):
                    tried.add(other)
                    if other not in partner or assign(partner[other], tried):
                        partner[other] = index
                        return True
            return False

        return all(assign(index, set()) for index in range(len(wanted)))
    # Python says 1 == True; JSON does not.
    return bool(found == wanted) and isinstance(found, bool) == isinstance(wanted, bool)


@register_verifier("numeric_match")
def numeric_match(
    completion: str,
    expected: object,
    *,
    tolerance: Annotated[float, Field(ge=0, description="The largest difference that counts as equal.")] = 1e-6,
    relative_tolerance: Annotated[
        float, Field(ge=0, lt=1, description="The same as a share of the number; the larger of the two counts.")
    ] = 0.0,
) -> float:
    """Is the completion's number (its answer, or the last number in it) the expected one, within the tolerance?"""
    wanted = number_in(str(expected)) if not isinstance(expected, bool) else None
    if wanted is None or not math.isfinite(wanted):
        raise ValueError("numeric_match needs `expected`: a number")
    if not (0 <= tolerance < math.inf and 0 <= relative_tolerance < 1):  # also where one is NaN
        raise ValueError(
            "numeric_match needs a finite tolerance of at least 0 and a relative_tolerance from 0 to below 1"
        )
    found = number_in(answer_in(completion))
    if found is None or not math.isfinite(found):
        return 0.0
    return float(math.isclose(found, wanted, rel_tol=relative_tolerance, abs_tol=tolerance))


def number_in(text: str) -> float | None:
    """The last number in the text, `1,234.50` and `3/4` included; None when there is none."""
    found = list(_NUMBER.finditer(text.replace("\u2212", "-")))
    if not found:
        return None
    value = float(found[-1][1].replace(",", ""))
    below = float(found[-1][2] or 1)
    return value / below if below else None
