"""Keep or discard: the rule that the driver and the bench of proposers share.

In: the verdict's comparison of a candidate with the incumbent, and how many seeds both have. Out: a `Ruling`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evsys_sdk.registry import Direction
from evsys_sdk.research.state import ArmMean
from evsys_sdk.stats.verdict import Comparison

KEEP_LEVEL = 0.05
"""A candidate is kept where the verdict's own p-value, corrected for its looks, is below this."""
LEAST_SEEDS = 2
"""One seed says something of those weights and nothing of the recipe, so it keeps nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What becomes of a candidate after a look."""

    word: Literal["kept", "discarded", "undecided", "repeat"]
    why: str
    seeds: int = 0
    """For `repeat`: how many seeds the next look has, those that were measured included."""


def decide(comparison: Comparison | None, *, direction: Direction, n_seeds: int, max_repeats: int) -> Ruling:
    """Kept where the verdict says better, for a recipe and not only for one seed's weights; discarded where it says
    worse or equivalent, or where the candidate does not even lie above; else repeated with more seeds, up to
    `max_repeats`, and then undecided. Each repeat is a further look, for which the comparison is corrected."""
    if comparison is None or comparison.difference is None:
        why = comparison.why if comparison is not None else ""
        return Ruling(word="undecided", why=why or "the two could not be compared")
    gain = comparison.difference if direction == "max" else -comparison.difference
    if comparison.verdict in ("worse", "equivalent"):
        return Ruling(word="discarded", why=f"{comparison.verdict} than the incumbent" if comparison.verdict == "worse"
                      else "equivalent to the incumbent")  # fmt: skip
    if gain <= 0:
        return Ruling(word="discarded", why="not above the incumbent")
    is_proven = comparison.verdict == "better" and (comparison.p_holm or 0.0) < KEEP_LEVEL
    if is_proven and n_seeds >= min(LEAST_SEEDS, max_repeats):
        return Ruling(word="kept", why="better than the incumbent")
    if n_seeds < max_repeats:
        return Ruling(word="repeat", why="promising, not yet proven", seeds=min(2 * n_seeds, max_repeats))
    return Ruling(word="undecided", why=comparison.why or f"not proven with {n_seeds} seeds")


def is_behind(candidate: ArmMean | None, incumbent: ArmMean | None, direction: Direction) -> bool:
    """Whether a candidate is left behind at a rung: its score there lies below the incumbent's at that step."""
    if candidate is None or incumbent is None:
        return False
    return candidate.mean < incumbent.mean if direction == "max" else candidate.mean > incumbent.mean
