"""What the verbs share: the command class, options that several verbs have, and the place where experiments are.

A verb is a function with click's decorators; its docstring is its `--help`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from evsys_sdk.operations.place import HistoryPlace

if TYPE_CHECKING:
    from evsys_sdk.history.history import ExperimentEntry

Act = Callable[..., int]
F = TypeVar("F", bound=Callable[..., object])

NAMED = "its name, the beginning of its name, or the path of its record or folder"


class WordsOption(click.Option):
    """An option that takes every word up to the next option: `--metrics pass@1 pass@4`."""

    def __init__(self, *args: Any, may_be_empty: bool = False, **attrs: Any):
        super().__init__(*args, **(attrs | {"multiple": True}))
        self.may_be_empty = may_be_empty


class Verb(click.Command):
    """A command with `WordsOption`s; an option's value cannot be another option's name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = {name: param for param in self.get_params(ctx) for name in param.opts if name.startswith("-")}
        plain: list[str] = []
        open_option: str | None = None  # the WordsOption that takes the words we are at
        for place, word in enumerate(args):
            if word == "--":
                plain += args[place:]
                break
            option = options.get(word)
            if open_option is not None and not word.startswith("-"):
                # click knows `multiple` only as `--metrics a --metrics b`.
                plain += [open_option, word]
                continue
            open_option = word if isinstance(option, WordsOption) else None
            follows = args[place + 1] if place + 1 < len(args) else None
            lacks_value = follows is None or follows in options
            if open_option is None:
                plain.append(word)
            elif lacks_value and isinstance(option, WordsOption) and option.may_be_empty:
                plain.append(f"{word}=")
                continue
            # click itself would take `--json` for the value of `--output` in `--output --json`.
            if isinstance(option, click.Option) and not option.is_flag and lacks_value and not ctx.resilient_parsing:
                raise click.BadOptionUsage(word, f"{word} needs a value", ctx)
        return super().parse_args(ctx, plain)


class VerbGroup(click.Group):
    command_class = Verb


verb = functools.partial(click.command, cls=Verb)
group = functools.partial(click.group, cls=VerbGroup)
POSITIVE = click.IntRange(min=1)
PORT = click.IntRange(0, 65535)


def not_negative(text: str | float) -> float:
    """A number from 0 up; click's FloatRange lets NaN pass."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0 or math.isinf(number):
        raise click.BadParameter(f"must be a number not below 0, not {text!r}")
    return number


def parse_params(
    texts: Sequence[str], *, flag: str = "--set", form: str = "param=value", example: str = "device=cpu"
) -> dict[str, Any]:
    """`["device=cpu", "threads=2"]` as a mapping; values are read as in YAML."""
    from evsys_sdk.config.yaml_io import parse_value
    from evsys_sdk.errors import EvsysError

    params = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise EvsysError(f"{flag} takes {form}, e.g. {flag} {example}; got {text!r}")
        params[key] = parse_value(value)
    return params


json_option = click.option("--json", "as_json", is_flag=True, help="print as JSON")
workspace_option = click.option(
    "--workspace", metavar="DIR", help="the workspace folder (default: the project's .evsys)"
)
set_option = click.option("--set", "params", multiple=True, metavar="PARAM=VALUE", help="a backend param")
override_option = click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="override")
# `main` reads it for the logger, whether the verb itself uses it or not.
quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="no progress and no warnings on stderr; errors and the result stay"
)
import_option = click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="MODULE",
    help="a module of yours that registers extensions (default: the package src, if there is one)",
)
limit_option = click.option("--limit", type=POSITIVE, metavar="N", help="only the first N tasks")
environment_option = click.option(
    "--environment",
    metavar="KIND",
    help="where tasks that need an environment run: sandbox (the default), docker or another of harbor's",
)


def listen_options[T: Callable[..., object]](function: T) -> T:
    """`--host` and `--port` of a server."""
    port = click.option("--port", type=PORT, default=0, help="0 (the default) takes any free one and prints it")
    host = click.option("--host", default="127.0.0.1", help="where to listen; beyond this machine a key is needed")
    return host(port(function))


Default = tuple[int | None, str]
"""What holds without the option (None: the verb decides), and its help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOptions:
    """How `evsys benchmark run` and `evsys eval model` ask the model."""

    params: tuple[str, ...]
    imports: tuple[str, ...]
    num_samples: int | None
    max_tokens: int | None
    temperature: float
    seed: int | None
    max_attempts: int | None
    fresh: bool
    retry_errors: bool
    quiet: bool


def scoring_options(
    *, params: str, temperature: float, num_samples: Default, max_tokens: Default, seed: Default, max_attempts: Default
) -> Callable[[Act], Act]:
    """The options of `ScoringOptions` as one argument `scoring`, and `--json`."""
    number = functools.partial(click.option, type=POSITIVE, metavar="N")

    def decorate(function: Act) -> Act:
        @click.option("--set", "params", multiple=True, metavar="PARAM=VALUE", help=params)
        @import_option
        @number("--num-samples", default=num_samples[0], help=num_samples[1])
        @number("--max-tokens", default=max_tokens[0], help=max_tokens[1])
        @click.option(
            "--temperature", type=not_negative, default=temperature, metavar="T", help=f"default: {temperature:g}"
        )
        @click.option("--seed", type=int, default=seed[0], help=seed[1])
        @number("--max-attempts", default=max_attempts[0], help=max_attempts[1])
        @click.option("--fresh", is_flag=True, help="start again; what is there is set aside")
        @click.option("--retry-errors", is_flag=True, help="of a finished evaluation, ask again what errored")
        @quiet_option
        @json_option
        @functools.wraps(function)
        def with_scoring(*, as_json: bool, **values: Any) -> int:
            own = {field.name: values.pop(field.name) for field in fields(ScoringOptions)}
            return function(scoring=ScoringOptions(**own), as_json=as_json, **values)

        return with_scoring

    return decorate


def place_options(function: Act) -> Act:
    """`--dir` and `--workspace` as one argument `place`, and `--json`."""

    @click.option(
        "--dir",
        "dirs",
        multiple=True,
        metavar="DIR",
        help="look through this folder instead of the workspace's index; repeatable",
    )
    @workspace_option
    @json_option
    @functools.wraps(function)
    def with_place(*, dirs: tuple[str, ...], workspace: str | None, **rest: object) -> int:
        return function(place=HistoryPlace(dirs=dirs, workspace=workspace), **rest)

    return with_place


def known_entries() -> list[ExperimentEntry]:
    """The experiments known here, for completion: what cannot be read offers nothing."""
    from contextlib import redirect_stderr
    from io import StringIO

    from evsys_sdk.errors import EvsysError

    with redirect_stderr(StringIO()):
        try:
            return list(HistoryPlace().history().entries)
        except EvsysError:
            return []


def complete_experiments(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [entry.name for entry in known_entries() if entry.name.startswith(incomplete)]


def experiment_argument(help: str = NAMED, *, required: bool = True) -> Callable[[F], F]:
    return click.argument("experiment", required=required, help=help, shell_complete=complete_experiments)
