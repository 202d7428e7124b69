"""`evsys`: parse, call one function, print.

In: the command line. Out: an exit code. Verbs live in the modules beside this one; a module is imported when one of
its verbs is called, and heavy libraries inside the verb.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import click

from evsys_sdk import __version__
from evsys_sdk.cli.options import VerbGroup
from evsys_sdk.cli.output import print_text
from evsys_sdk.constants import EXIT_BAD_INPUT, EXIT_OK, EXIT_RUN_FAILED

VERBS = {
    "init-project": ("scaffold.init_project", "make a research project with a small example"),
    "new-experiment": ("scaffold.new_experiment", "write the next experiment, also as a copy of another one"),
    "validate": ("run.validate", "check a config"),
    "run": ("run.run", "run an experiment"),
    "research": ("research.research", "propose, run, judge and go again until a goal, a budget or a plateau"),
    "ablate": ("research.ablate", "which of several changes did it: leave-one-out arms"),
    "status": ("control.status", "is it running, how far is it, is it stuck"),
    "logs": ("control.logs", "what the process of an experiment wrote"),
    "follow": ("control.follow", "what has happened to an experiment since a cursor"),
    "stop": ("control.stop", "let an experiment end after its current step"),
    "benchmark": ("scoring.benchmark", "score a model on a suite"),
    "eval": ("scoring.evaluation", "evaluate a checkpoint"),
    "data": ("data.data", "datasets and benchmarks by id and name"),
    "backend": ("models.backend", "try a backend"),
    "model": ("models.model", "models on this machine"),
    "engine": ("models.engine", "the local engine as a server"),
    "serve": ("models.serve", "a model or a checkpoint as an OpenAI-compatible endpoint"),
    "deploy": ("deploying.deploy", "ship the weights of an experiment's best arm"),
    "deployments": ("deploying.deployments", "where weights were deployed, and what they replaced"),
    "export": ("deploying.export", "write the weights of an experiment's best arm to files"),
    "verifier": ("grading.verifier", "try a benchmark's verifiers"),
    "rollouts": ("rollouts.rollouts", "what the model said, task by task"),
    "regrade": ("grading.regrade", "grade stored rollouts anew, without asking the model again"),
    "history": ("history.history", "experiments that were run here, newest first"),
    "show": ("history.show", "one experiment: hypothesis, arms, scores, conclusions"),
    "report": ("history.report", "one experiment as a self-contained HTML file"),
    "compare": ("history.compare", "experiments side by side, with a paired verdict"),
    "judge": ("history.judge", "judge a finished experiment again, against another baseline arm"),
    "context": ("history.context", "what to know before the next experiment, within a token budget"),
    "dashboard": ("dashboard.dashboard", "everything that was tried here, in a browser"),
    "invalidate": ("records.invalidate", "take an experiment out of the count, with a reason"),
    "conclude": ("records.conclude", "add a conclusion of your own to an experiment"),
    "clean": ("records.clean", "list files that nothing needs any more, and delete them on request"),
    "mcp": ("mcp.mcp", "the verbs as tools for a coding agent (Model Context Protocol)"),
    "query": ("dashboard.query", "ask the dashboard by SQL, read-only"),
    "sync": ("dashboard.sync", "replay the mirror into a dashboard server"),
    "list": ("registries.list_kinds", "what can be named in a config"),
    "schema": ("registries.schema", "what an extension's params, or the whole YAML, may hold"),
    "completion": ("completion.completion", "shell completion"),
}
"""Verb -> where it lives, and its line in `evsys --help`, which is written without importing it."""


class Evsys(VerbGroup):
    """The verbs above, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name][0].partition(".")
        command: click.Command = getattr(import_module(f"evsys_sdk.cli.{module}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


FAULTS_OF_THE_MACHINE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP,
)  # fmt: skip
"""What a file system refuses: the path and its reason say it all, and a traceback would name the wrong culprit."""

evsys = click.version_option(__version__, message="evsys %(version)s")(
    Evsys(
        "evsys",
        help="One strict YAML describes an LLM training experiment; evsys runs it and says what it showed.",
        epilog="Exit codes: 0 all well, 1 bad input, 2 a run did not complete.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
)


def parse(words: Sequence[str]) -> click.Context:
    """The verb that `words` name with its parameters (`.params`); nothing is run."""
    ctx = evsys.make_context("evsys", list(words), obj=list(words))
    while isinstance(ctx.command, click.Group):
        # click 8 keeps the subcommand's name apart from the other words; click 9 will not.
        name, command, rest = ctx.command.resolve_command(ctx, [*getattr(ctx, "_protected_args", []), *ctx.args])
        assert command is not None  # resolve_command raises for an unknown one
        ctx = command.make_context(name, rest, parent=ctx)
    return ctx


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; every mistake a user can make ends in a message and an exit code, not a traceback."""
    from evsys_sdk.format import guarded_streams
    from evsys_sdk.redaction import learn_from_words

    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        atexit.register(ignore_signals)  # first in, so last of all exit handlers
    learn_from_words(words)
    try:
        with guarded_streams():
            try:
                code = run_words(words)
            except Exception:  # a bug of ours: its traceback may hold a key, or text of a model
                traceback.print_exc()
                code = EXIT_BAD_INPUT
        if argv is None:
            keep_exit_code(code)
    except KeyboardInterrupt:  # after the verb had done its work
        return EXIT_RUN_FAILED
    return code


def keep_exit_code(code: int) -> None:
    """Let a late Ctrl-C end the process at once, but with the exit code of the command, which is done: while Python
    shuts down, a KeyboardInterrupt would replace it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader may have gone
            stream.flush()
    signal.signal(signal.SIGINT, lambda *_: os._exit(code))


def ignore_signals() -> None:
    # From here on Python takes its own handlers away, and the kernel's default would kill the process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_words(words: list[str]) -> int:
    from evsys_sdk.cli.output import print_json
    from evsys_sdk.errors import READABLE, RecordLost, refusal
    from evsys_sdk.logs import configure_logger

    path: str | None = None
    try:
        ctx = parse(words)
        path = ctx.params.get("path")
        configure_logger(quiet=bool(ctx.params.get("quiet")))
        with ctx:
            return int(ctx.command.invoke(ctx))
    except click.exceptions.Exit as exc:  # --help, --version
        return exc.exit_code
    except click.exceptions.NoArgsIsHelpError as exc:
        if exc.ctx is None or exc.ctx.parent is None:
            print(exc.message)
            return EXIT_OK
        print(exc.message, file=sys.stderr)
        return EXIT_BAD_INPUT
    except click.UsageError as exc:
        message = usage_message(exc)
        print_text(f"{exc.ctx.get_usage()}\n{message}" if exc.ctx else message, stream=sys.stderr)
        if "--json" in words:
            print_json(refusal(message))
        return EXIT_BAD_INPUT
    except READABLE as exc:
        print_text(str(exc), stream=sys.stderr)
        if "--json" in words:
            print_json(refusal(str(exc), getattr(exc, "problems", ()), path=path))
        return EXIT_RUN_FAILED if isinstance(exc, RecordLost) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_RUN_FAILED
    except BrokenPipeError:  # the reader (head, less) has gone
        # Python flushes stdout once more when it ends, and would meet the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as exc:
        if exc.errno not in FAULTS_OF_THE_MACHINE or exc.filename is None:
            raise
        message = f"{os.fsdecode(exc.filename)}: {exc.strerror}"
        print_text(message, stream=sys.stderr)
        if "--json" in words:
            print_json(refusal(message))
        return EXIT_BAD_INPUT


def usage_message(exc: click.UsageError) -> str:
    """`evsys run: '--stps' is not an option; closest: --steps; known: ...`."""
    from evsys_sdk.errors import not_known

    ctx, text = exc.ctx, exc.format_message()
    if ctx is None:
        return f"evsys: {text}"
    if isinstance(exc, click.exceptions.NoSuchCommand) and isinstance(ctx.command, click.Group):
        text = not_known(exc.command_name, "command", ctx.command.list_commands(ctx))
    elif isinstance(exc, click.NoSuchOption):
        options = [name for param in ctx.command.get_params(ctx) for name in param.opts if name.startswith("--")]
        text = not_known(exc.option_name, "option", options)
    elif isinstance(exc, click.BadParameter) and exc.param and isinstance(exc.param.type, click.types.IntParamType):
        # click says `0 is not in the range x>=1` and `'x' is not a valid integer range`.
        value = exc.message.partition(" is not ")[0]
        lowest, highest = (getattr(exc.param.type, bound, None) for bound in ("min", "max"))
        wanted = "a whole number" if lowest is None else f"a whole number of at least {lowest}"
        wanted += "" if highest is None else f" and at most {highest}"
        text = f"{exc.param.opts[0]} is {value}; give {wanted}"
    return f"{ctx.command_path}: {text}"


if __name__ == "__main__":
    sys.exit(main())
