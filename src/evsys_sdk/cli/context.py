"""`evsys context`: what to know before the next experiment."""

from __future__ import annotations

import argparse
from typing import Any

from evsys_sdk.cli.experiments import add_place_flags, open_history
from evsys_sdk.cli.flags import positive
from evsys_sdk.constants import EXIT_OK


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "context",
        help="what to know before the next experiment, within a token budget",
        description="Print what was tried, the ladder of kept results, dead ends, the noise floor and open questions, "
        "within a number of tokens. Invalid experiments are named and not built on.",
        epilog="Tokens are estimated on the high side, the same for every model: one for every 5 letters begun of a "
        "word, one for every digit, any other sign and the end of a line.",
    )
    parser.add_argument("--tokens", type=positive, default=4000, metavar="N", help="at most N tokens (default: 4000)")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="only experiments with this tag")
    add_place_flags(parser)
    parser.set_defaults(run=print_context)


def print_context(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from evsys_sdk.record.context import context_text, make_context
    from evsys_sdk.record.look_up import select

    history = open_history(args)
    history = replace(history, entries=select(history.entries, tags=args.tag))
    if args.json:
        from evsys_sdk.cli.data import print_json

        print_json(make_context(history, args.tokens))
    else:
        print(context_text(history, args.tokens), end="")
    return EXIT_OK
