"""`evsys completion`: the Tab key.

In: a shell's name, or the words typed so far. Out: a script to source, or the words that may follow. The script asks
`evsys` itself, so completions always fit the installed version and the registered extensions.
"""

from __future__ import annotations

import click

from evsys_sdk.cli.options import verb
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
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


# `completion words run --st`: what follows `words` is not for this command to parse.
@verb("completion", cls=click.Command, context_settings={"allow_interspersed_args": False})
@click.argument("shell", type=click.Choice([*SCRIPTS, "words"]), help="`words` is what the scripts themselves call")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, help="the words typed so far (for `words`)")
@click.pass_context
def completion(ctx: click.Context, shell: str, words: tuple[str, ...]) -> int:
    """Print a completion script. Use: eval "$(evsys completion bash)" (or zsh, fish)."""
    from click.shell_completion import ShellComplete

    if shell in SCRIPTS:
        print(SCRIPTS[shell], end="")
        return EXIT_OK
    *before, current = words or ("",)
    found = ShellComplete(ctx.find_root().command, {}, "evsys", "").get_completions(before, current)
    print("\n".join(sorted(item.value for item in found if item.value.startswith(current))))
    return EXIT_OK
