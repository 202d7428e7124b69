"""`evsys completion`: the Tab key.

In: a shell's name, or the words typed so far. Out: a script to source, or the words that may follow. The script asks
`evsys` itself, so completions always fit the installed version and the registered extensions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from evsys_sdk.constants import EXIT_OK

_BASH = """_evsys() {
    local IFS=$'\\n'
    COMPREPLY=($(evsys completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _evsys evsys
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + _BASH
_FISH = """complete -c evsys -f -a '(evsys completion words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
complete -c evsys -F -n '__fish_seen_subcommand_from run validate'
"""
TAKES_EXPERIMENT = ("experiment", "experiments", "record")
"""Arguments, as the verbs call them, that name an experiment."""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "completion",
        help="shell completion",
        description='Print a completion script. Use: eval "$(evsys completion bash)" (or zsh, fish).',
    )
    parser.add_argument("shell", choices=[*SCRIPTS, "words"], help="`words` is what the scripts themselves call")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=complete)


def complete(args: argparse.Namespace) -> int:
    if args.shell in SCRIPTS:
        print(SCRIPTS[args.shell], end="")
        return EXIT_OK
    from evsys_sdk.cli.main import build_parser

    print("\n".join(words_after(build_parser(), args.words)))
    return EXIT_OK


def words_after(parser: argparse.ArgumentParser, typed: list[str]) -> list[str]:
    """The words that may stand where the last of `typed` does."""
    *before, current = typed or [""]
    places = 0
    for word in before:
        verbs = _verbs(parser)
        if verbs and word in verbs:
            parser, places = verbs[word], 0
        elif not word.startswith("-"):
            places += 1
    options = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    candidates = options if current.startswith("-") else _positional(parser, before, places)
    return sorted(word for word in candidates if word.startswith(current))


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _positional(parser: argparse.ArgumentParser, before: list[str], places: int) -> Iterable[str]:
    verbs = _verbs(parser)
    if verbs:
        return verbs
    from evsys_sdk.registry import REGISTRIES, registry_for

    if before and before[-1] == "--kind":
        return [found.plural for found in REGISTRIES.values()]
    if before and before[0] == "schema":
        if places == 0:
            return [*REGISTRIES, "config"]
        return registry_for(before[1]).names() if before[1] in REGISTRIES else []
    if before and before[0] == "list" and places == 0:
        return [found.plural for found in REGISTRIES.values()]
    own = [action for action in parser._actions if not action.option_strings]
    action = own[min(places, len(own) - 1)] if own else None
    if action is None or (places >= len(own) and action.nargs not in ("*", "+")):
        return []
    if action.dest in TAKES_EXPERIMENT and before[0] != "regrade":  # that takes a path
        return experiment_names(with_runs=before[0] == "rollouts")
    return list(action.choices or [])


def experiment_names(*, with_runs: bool = False) -> list[str]:
    """Names of the experiments that are known here; what cannot be read offers nothing."""
    from contextlib import redirect_stderr
    from io import StringIO

    from evsys_sdk.cli.experiments import open_history
    from evsys_sdk.errors import EvsysError

    with redirect_stderr(StringIO()):
        try:
            entries = open_history(argparse.Namespace(dir=[], workspace=None)).entries
        except EvsysError:
            return []
    runs = [f"{entry.name}/{arm.arm}" for entry in entries for arm in entry.digest.arms] if with_runs else []
    return [*(entry.name for entry in entries), *runs]
