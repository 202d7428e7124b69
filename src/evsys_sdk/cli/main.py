"""`evsys`: parse, call one function, print.

In: the command line. Out: an exit code. Each verb has a file of its own beside this one that adds its parser and
names the function to call; nothing heavy is imported before that function runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evsys_sdk import __version__
from evsys_sdk.cli import (
    backend,
    benchmark,
    clean,
    compare,
    completion,
    context,
    data,
    engine,
    eval,
    history,
    judge,
    logs,
    model,
    notes,
    registries,
    regrade,
    rollouts,
    run,
    serve,
    show,
    status,
    stop,
    validate,
    verifier,
)
from evsys_sdk.constants import EXIT_BAD_INPUT, EXIT_RUN_FAILED

if TYPE_CHECKING:
    from evsys_sdk.errors import Problem

VERBS = (
    validate,
    run,
    status,
    logs,
    stop,
    benchmark,
    eval,
    data,
    backend,
    model,
    engine,
    serve,
    verifier,
    rollouts,
    regrade,
    history,
    show,
    compare,
    judge,
    context,
    notes,
    clean,
    registries,
    completion,
)


class WrongCommandLine(SystemExit):
    """A command line that cannot be read; the message is on stderr."""

    def __init__(self, message: str):
        super().__init__(EXIT_BAD_INPUT)
        self.message = message


class Parser(argparse.ArgumentParser):
    """argparse, with our exit code for a wrong command line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise WrongCommandLine(f"{self.prog}: {message}")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="evsys",
        description="One strict YAML describes an LLM training experiment; evsys runs it and says what it showed.",
        epilog="Exit codes: 0 all well, 1 bad input, 2 a run did not complete.",
    )
    parser.add_argument("--version", action="version", version=f"evsys {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="<verb>", parser_class=Parser)
    for module in VERBS:
        module.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; every mistake a user can make ends in a message and an exit code, not a traceback."""
    from evsys_sdk.redaction import learn_from_words
    from evsys_sdk.terminal import guarded_streams

    words = list(sys.argv[1:] if argv is None else argv)
    learn_from_words(words)
    with guarded_streams():
        try:
            return _main(words)
        except Exception:  # a bug of ours: its traceback may hold a key, or text of a model
            traceback.print_exc()
            return EXIT_BAD_INPUT


def _main(words: list[str]) -> int:
    from evsys_sdk.errors import EvsysError, RecordLost
    from evsys_sdk.logs import configure_logger

    parser = build_parser()
    try:
        args = parser.parse_args(words)
    except WrongCommandLine as exc:
        if "--json" in words:
            _print_refusal(exc.message)
        raise
    args.argv = words
    if not getattr(args, "run", None):
        parser.print_help()
        return EXIT_BAD_INPUT if args.verb else 0
    try:
        configure_logger(quiet=getattr(args, "quiet", False))
        return int(args.run(args))
    except EvsysError as exc:
        print(exc, file=sys.stderr)
        if getattr(args, "json", False):
            _print_refusal(str(exc), exc.problems, path=getattr(args, "path", None))
        return EXIT_RUN_FAILED if isinstance(exc, RecordLost) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_RUN_FAILED
    except BrokenPipeError:  # the reader (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _print_refusal(error: str, problems: Sequence[Problem] = (), *, path: str | None = None) -> None:
    """What `--json` says of a refusal, whatever the verb: the message, its places as records, the file it is about."""
    from dataclasses import asdict

    from evsys_sdk.cli.data import print_json

    about = {} if path is None else {"path": path}
    print_json({"ok": False, **about, "error": error, "problems": [asdict(problem) for problem in problems]})


if __name__ == "__main__":
    sys.exit(main())
