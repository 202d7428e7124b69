"""Verifiers that compare values rather than text: JSON, and numbers.

In: a completion, the value expected, settings. Out: 1.0 or 0.0. Where a completion holds its value (answer tags, a
fenced block, running text) is decided only here, by `json_values` and `number_in`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from evsys_sdk.answers import answer_in, parsed_json, texts_between
from evsys_sdk.registry import register_verifier

_FENCE, _FENCE_END = re.compile(r"```(?:json)?"), re.compile(r"```")
_BRACKET = re.compile(r"[\[{]")
_NOT_JSON = object()
# 1,234.5 and 3/4 and -1e-3; a minus between two digits is no sign, and `x2` holds no number.
_NUMBER = re.compile(r"(?<![\w.])([-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d+)?)(?:/(\d+))?")


@register_verifier("json_match", yields=True)
def json_match(completion: str, expected: Any, *, subset: bool = False, ignore_order: bool = False) -> float:
    """Is the completion's JSON the expected value? `subset` allows more keys, `ignore_order` mixed lists."""
    if expected is None or (subset and expected == {}):
        raise ValueError("json_match needs `expected`: the JSON value, and with subset at least one key")
    wanted = parsed_json(expected) if isinstance(expected, str) and parsed_json(expected) is not None else expected
    found = next(json_values(completion), _NOT_JSON)
    return float(found is not _NOT_JSON and _same(found, wanted, subset, ignore_order))


def json_values(completion: str) -> Iterator[Any]:
    """The JSON values that a completion may mean, likeliest first: its answer, fenced blocks, then running text."""
    answer = answer_in(completion)
    for text in (answer, *texts_between(answer, _FENCE, _FENCE_END)):
        value = _parsed(text.strip())
        if value is not _NOT_JSON:
            yield value
    yield from islice(values_in(answer), 1)


def values_in(text: str) -> Iterator[Any]:
    """The lists and objects in running text, one behind the other, in time that grows with the text's length."""
    decoder, place = json.JSONDecoder(), 0
    patience = 20 * len(text) + 10_000  # characters that may be read in vain: brackets can be nested to be read again
    while patience > 0 and (begin := _BRACKET.search(text, place)) is not None:
        try:
            value, place = decoder.raw_decode(text, begin.start())
        except json.JSONDecodeError as exc:
            place, patience = begin.end(), patience - (exc.pos - begin.start()) - 1
        except (ValueError, RecursionError):
            place, patience = begin.end(), patience - len(text) // 2 - 1
        else:
            yield value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _same(found: Any, wanted: Any, subset: bool, ignore_order: bool) -> bool:
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or not (
            wanted.keys() <= found.keys() if subset else wanted.keys() == found.keys()
        ):
            return False
        return all(_same(found[key], value, subset, ignore_order) for key, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return False
        if ignore_order:
            return _pairs_up(found, wanted, subset)
        return all(_same(one, other, subset, ignore_order) for one, other in zip(found, wanted, strict=True))
    # Python says 1 == True; JSON does not.
    return bool(found == wanted) and isinstance(found, bool) == isinstance(wanted, bool)


def _pairs_up(found: list[Any], wanted: list[Any], subset: bool) -> bool:
    """Whether each wanted item has a found one of its own; with subset one may fit several, so pairs are exchanged."""
    partner: dict[int, int] = {}  # index found -> index wanted

    def place(index: int, tried: set[int]) -> bool:
        for other, item in enumerate(found):
            if other not in tried and _same(item, wanted[index], subset, True):
                tried.add(other)
                if other not in partner or place(partner[other], tried):
                    partner[other] = index
                    return True
        return False

    return all(place(index, set()) for index in range(len(wanted)))


@register_verifier("numeric_match", yields=True)
def numeric_match(completion: str, expected: Any, *, tolerance: float = 1e-6, relative_tolerance: float = 0.0) -> float:
    """Is the completion's number (its answer, or the last number in it) the expected one, within the tolerance?"""
    wanted = number_in(str(expected)) if not isinstance(expected, bool) else None
    if wanted is None or not math.isfinite(wanted):
        raise ValueError("numeric_match needs `expected`: a number")
    if tolerance < 0 or relative_tolerance < 0 or math.isinf(tolerance) or relative_tolerance >= 1:
        raise ValueError("numeric_match needs a tolerance of at least 0 and a relative_tolerance below 1")
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
