"""Stage 2, rows: where they come from, what they become, and the workspace that keeps them.

`sources` reads raw rows, `transforms` change them, `rows` does both in order; `stores` and `workspace` say where
files lie.
"""

EXTENSIONS = ("transforms", "sources", "stores")
"""Modules of this room that register extensions."""
