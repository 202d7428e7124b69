"""`evsys mcp`: the verbs as tools for a coding agent, over stdin and stdout."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType

import click

from evsys_sdk.cli.options import POSITIVE, not_negative, verb
from evsys_sdk.constants import EXIT_OK
from evsys_sdk.errors import need

MAX_RUNS = 20


@verb("mcp")
@click.option(
    "--project",
    metavar="DIR",
    help="the research project (default: the client's first root, EVSYS_PROJECT_DIR, CLAUDE_PROJECT_DIR, this folder)",
)
@click.option("--allow-launch", is_flag=True, help="offer launch, stop and conclude; without it nothing is changed")
@click.option(
    "--max-runs", type=POSITIVE, default=MAX_RUNS, metavar="N", help=f"launch at most N runs (default {MAX_RUNS})"
)
@click.option("--max-seconds", type=not_negative, metavar="S", help="let what is launched take at most S seconds")
def mcp(project: str | None, allow_launch: bool, max_runs: int, max_seconds: float | None) -> int:
    """Serve the Model Context Protocol on stdin and stdout, for Claude Code, Codex, Cursor, Gemini CLI and others.
    Needs the extra `mcp`."""
    # Before anything is imported: only the protocol may be written to the real stdout, and only it may read stdin.
    sys.stdout.flush()
    real_stdin, real_stdout = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with redirect_stdout(sys.stderr):
        if importlib.util.find_spec("mcp") is None:
            need("mcp", extra="mcp")
        with fast_imports():
            import anyio

            from evsys_sdk.mcp_server.budget import LaunchBudget
            from evsys_sdk.mcp_server.project import find_project
            from evsys_sdk.mcp_server.server import EvsysServer, serve
        budget = LaunchBudget(max_runs=max_runs, max_seconds=max_seconds)
        server = EvsysServer(find_project(project), allow_launch=allow_launch, budget=budget)

        async def run() -> None:
            await serve(server, stdin=real_stdin, stdout=real_stdout)

        anyio.run(run)
    return EXIT_OK


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import what the server needs of the package `mcp` and no more: it starts in three quarters of the time.

    `mcp` and `mcp.server` import every client and every HTTP server of the package. Empty packages stand in for them
    meanwhile, so that only the modules that are named are loaded; afterwards `import mcp` finds the real one. No
    garbage is looked for among the protocol's models, of which there are thousands and which all stay."""
    found = importlib.util.find_spec("mcp")
    folder = found.submodule_search_locations[0] if found and found.submodule_search_locations else None
    stand_ins = {"mcp": folder, "mcp.server": f"{folder}/server"} if folder and "mcp" not in sys.modules else {}
    gc.disable()
    try:
        for name, path in stand_ins.items():
            package = ModuleType(name)
            package.__path__ = [str(path)]
            sys.modules[name] = package
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)
        gc.freeze()
        gc.enable()
