"""Research unattended: propose a change, run it as an experiment, judge it, repeat (docs/research.md)."""

EXTENSIONS: tuple[str, ...] = ("proposers.command", "proposers.evolve", "proposers.llm", "proposers.scripted")
"""Modules of this room that register extensions."""
