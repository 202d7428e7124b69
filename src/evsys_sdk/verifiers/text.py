"""Verifiers that compare text: the answer itself, a part of it, a pattern, or only its form.

In: a completion, what was expected, settings. Out: 1.0 or 0.0. An expected value that every output would
satisfy is refused: a task that cannot be failed teaches nothing.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from evsys_sdk.answers import answer_in, has_answer, same_answer
from evsys_sdk.registry import register_verifier
from evsys_sdk.verifiers.patterns import is_quick, pattern_matches


@register_verifier("exact_match", yields=True)
def exact_match(completion: str, expected: Any, *, case_sensitive: bool = True) -> float:
    """Is the answer (inside `<answer>` tags, if there are any) the expected one, or one of an expected list?"""
    if expected is None or expected == []:
        raise ValueError("exact_match needs `expected`")
    return float(same_answer(completion, expected, case_sensitive=case_sensitive))


@register_verifier("contains", yields=True)
def contains(
    completion: str, expected: Any, *, case_sensitive: bool = True, require: Literal["all", "any"] = "all"
) -> float:
    """Does the completion contain the expected text (of a list: all of them, or any)?"""
    parts = [str(part) for part in (expected if isinstance(expected, list) else [expected])]
    if expected is None or not parts or not all(part.strip() for part in parts):
        raise ValueError("contains needs a non-empty `expected`: otherwise every output passes")
    text = completion if case_sensitive else completion.casefold()
    found = [(part if case_sensitive else part.casefold()) in text for part in parts]
    return float(all(found) if require == "all" else any(found))


@register_verifier("regex_match", yields=True)
def regex_match(
    completion: str,
    expected: Any,
    *,
    pattern: str | None = None,
    case_sensitive: bool = True,
    full_match: bool = False,
) -> float:
    """Does the pattern (`expected`, unless `pattern` is given) occur, or with `full_match` cover the answer?"""
    source = pattern if pattern is not None else expected
    if not isinstance(source, str) or not source:
        raise ValueError("regex_match needs a pattern, as `expected` or as params.pattern")
    flags = re.DOTALL if case_sensitive else re.DOTALL | re.IGNORECASE
    text = answer_in(completion) if full_match else completion
    return float(pattern_matches(source, text, flags=int(flags), is_full=full_match))


@register_verifier("format_only")
def format_only(
    completion: str,
    expected: Any = None,
    *,
    format: Literal["answer", "json", "regex"] = "answer",
    pattern: str | None = None,
) -> float:
    """Does the completion have the right form, whatever it says: `<answer>` tags, JSON, or a pattern?"""
    if pattern is not None or format == "regex":
        if not pattern:
            raise ValueError("format_only with format: regex needs params.pattern")
        return float(pattern_matches(pattern, completion.strip(), flags=int(re.DOTALL), is_full=True))
    if format == "json":
        return float(_is_json(answer_in(completion)))
    return float(has_answer(completion))


def _may_be_slow(expected: Any, params: dict[str, Any]) -> bool:
    """Whether the pattern is matched in a worker, which is no work for the event loop to wait for."""
    source = params.get("pattern") if params.get("pattern") is not None else expected
    return isinstance(source, str) and not is_quick(source, int(re.DOTALL))


regex_match.may_be_slow = format_only.may_be_slow = _may_be_slow  # type: ignore[attr-defined]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
