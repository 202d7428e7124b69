"""What a search came to, in a sentence or two.

In: a search as plain data (`Search.summary`). Out: lines for the conclusion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evsys_sdk.errors import shorten


def search_lines(search: Mapping[str, Any]) -> list[str]:
    """How the trials were chosen, who went on, and which of them is the best by the objective."""
    trials, name = search["trials"], search["objective"]
    rungs = [
        f"{len(rung['go_on'])} of {len(rung['trials'])} went on at step {rung['step']}{alike_text(rung['left_alike'])}"
        for rung in search["rungs"]
    ]
    told = f": {', '.join(rungs)}" if rungs else ""
    short = f" of {search['max_trials']}" if len(trials) < search["max_trials"] else ""
    head = f"Search ({search['kind']}, by {name}): {len(trials)}{short} trials{told}."
    best = next((trial for trial in trials if trial["number"] == search["best"]), None)
    if best is None:
        return [f"{head} No trial came to its end with a score."]
    values = ", ".join(f"{path.rsplit('.', 1)[-1]}={shorten(str(value), 40)}" for path, value in best["params"].items())
    luck = f"; as the best of {len(trials)} it may owe something to luck" if len(trials) > 1 else ""
    return [head, f"Best trial: {best['arm']} with {name} {best['value']:.4g} ({values}){luck}."]


def alike_text(count: int) -> str:
    """Of a rung whose scores did not tell all trials apart: ` (3 no worse were left behind)`."""
    return f" ({count} no worse {'was' if count == 1 else 'were'} left behind)" if count else ""
