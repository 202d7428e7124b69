"""Flags that several verbs have, and what their values must be."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def zero_or_more(text: str) -> int:
    """A whole number from 0 up."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 up, not {text!r}")
    return int(text)


def not_negative(text: str) -> float:
    """A number from 0 up."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0 or math.isinf(number):
        raise argparse.ArgumentTypeError(f"must be a number not below 0, not {text!r}")
    return number


def add_quiet_flag(parser: Any) -> None:
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no progress and no warnings on stderr; errors and the result stay"
    )


def add_import_flag(parser: Any) -> None:
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="a module of yours that registers extensions (default: the package src, if there is one)",
    )  # fmt: skip


def parse_params(texts: Sequence[str], *, flag: str = "--set", example: str = "device=cpu") -> dict[str, Any]:
    """`["device=cpu", "threads=2"]` as a mapping; values are read as in YAML."""
    from evsys_sdk.config.document import parse_value
    from evsys_sdk.errors import EvsysError

    pairs = [text.partition("=") for text in texts]
    wrong = next(("".join(pair) for pair in pairs if not pair[1]), None)
    if wrong is not None:
        raise EvsysError(f"{flag} takes param=value, e.g. {flag} {example}; got {wrong!r}")
    return {key: parse_value(value) for key, _, value in pairs}
