"""Verifiers that compare text: the answer itself, a part of it, a pattern, or only its form.

In: a completion, what was expected, settings. Out: 1.0 or 0.0. An expected value that every output would
satisfy is refused: a task that cannot be failed teaches nothing.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from evsys_sdk.answers import answer_in, has_answer, read_json, same_answer
from evsys_sdk.config.base import JsonDict
from evsys_sdk.patterns import is_quick, pattern_matches
from evsys_sdk.registry import register_verifier

CaseSensitive = Annotated[bool, Field(description="Whether `Yes` and `yes` are different.")]


@register_verifier("exact_match")
def exact_match(completion: str, expected: object, *, case_sensitive: CaseSensitive = True) -> float:
    """Is the answer (inside `<answer>` tags, if there are any) the expected one, or one of an expected list?"""
    if expected is None or expected == []:
        raise ValueError("exact_match needs `expected`")
    return float(same_answer(completion, expected, case_sensitive=case_sensitive))


@register_verifier("contains")
def contains(
    completion: str,
    expected: object,
    *,
    case_sensitive: CaseSensitive = True,
    require: Annotated[
        Literal["all", "any"], Field(description="Of a list of texts: whether all must be there, or any.")
    ] = "all",
) -> float:
    """Does the completion contain the expected text (of a list: all of them, or any)?"""
    parts = [str(part) for part in (expected if isinstance(expected, list) else [expected])]
    if expected is None or not parts or not all(part.strip() for part in parts):
        raise ValueError("contains needs a non-empty `expected`: otherwise every output passes")
    text = completion if case_sensitive else completion.casefold()
    found = [(part if case_sensitive else part.casefold()) in text for part in parts]
    return float(all(found) if require == "all" else any(found))


@register_verifier("regex_match")
def regex_match(
    completion: str,
    expected: object,
    *,
    pattern: Annotated[str | None, Field(description="The regular expression; by default `expected` is one.")] = None,
    case_sensitive: CaseSensitive = True,
    full_match: Annotated[bool, Field(description="Match the whole answer, not a part of it.")] = False,
) -> float:
    """Does the pattern (`expected`, unless `pattern` is given) occur, or with `full_match` cover the answer?"""
    source = pattern if pattern is not None else expected
    if not isinstance(source, str) or not source:
        raise ValueError("regex_match needs a pattern, as `expected` or as params.pattern")
    flags = _flags(case_sensitive)
    text = answer_in(completion) if full_match else completion
    return float(pattern_matches(source, text, flags=flags, is_full=full_match))


@register_verifier("format_only")
def format_only(
    completion: str,
    expected: object = None,
    *,
    format: Annotated[
        Literal["answer", "json", "regex"],
        Field(description="What must be there: `<answer>` tags, a JSON value, or a match of `pattern`."),
    ] = "answer",
    pattern: Annotated[str | None, Field(description="The regular expression for `format: regex`.")] = None,
) -> float:
    """Does the completion have the right form, whatever it says: `<answer>` tags, JSON, or a pattern?"""
    if pattern is not None or format == "regex":
        if not pattern:
            raise ValueError("format_only with format: regex needs params.pattern")
        return float(pattern_matches(pattern, completion.strip(), flags=_flags(), is_full=True))
    if format == "json":
        try:
            read_json(answer_in(completion))
        except ValueError:
            return 0.0
        return 1.0
    return float(has_answer(completion))


def _flags(case_sensitive: bool = True) -> int:
    return int(re.DOTALL if case_sensitive else re.DOTALL | re.IGNORECASE)


def _may_be_slow(completion: str, expected: object, params: JsonDict) -> bool:
    """Whether the pattern is matched in a worker, which is no work for the event loop to wait for."""
    source = params.get("pattern") if params.get("pattern") is not None else expected
    flags = _flags(bool(params.get("case_sensitive", True)))
    return isinstance(source, str) and not is_quick(source, flags, len(completion))


regex_match.may_be_slow = format_only.may_be_slow = _may_be_slow  # type: ignore[attr-defined]
