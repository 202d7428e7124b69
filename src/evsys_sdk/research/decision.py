"""Keep or discard: the rule that the driver and the bench of proposers share.

In: the verdict's comparison of a candidate with the incumbent, and how many seeds both have. Out: a `Ruling`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evsys_sdk.registry import Direction
from evsys_sdk.research.state import ArmMean
from evsys_sdk.stats.selection import penalty_of_look
from evsys_sdk.stats.verdict import Comparison

KEEP_LEVEL = 0.03
"""A candidate is kept where the verdict's own p-value, corrected for its looks, is below this. Measured on recipes that
do nothing at all (1,200 made-up ones, 200 tasks, at most 4 seeds): 0.05 keeps 1.2 % of them and 0.03 0.8 %, and of
recipes that are better 24 % and 20 %. The share of false keeps follows from how many proposals do nothing."""
LEAST_SEEDS = 2
"""One seed says something of those weights and nothing of the recipe, so it keeps nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What becomes of a candidate after a look."""

    word: Literal["kept", "discarded", "undecided", "repeat"]
    why: str
    seeds: int = 0
    """For `repeat`: how many seeds the next look has, those that were measured included."""


def decide(
    comparison: Comparison | None,
    *,
    direction: Direction,
    n_seeds: int,
    max_repeats: int,
    looks: int = 1,
    first_seeds: int | None = None,
) -> Ruling:
    """Kept where the verdict says better, for a recipe and not only for one seed's weights; discarded where it says
    worse or equivalent, or where the candidate does not even lie above; else repeated with `max_repeats` seeds, and
    then undecided.

    One further look with all seeds finds more than several with ever more: each look is paid for in the level of the
    later ones. `comparison` is corrected for `looks`. A first look with so few seeds (`first_seeds`) that it could keep
    nothing could not keep wrongly either, so that one is taken out of the correction. Measured against repeats with 1,
    2, 4 seeds of which every look counts: twice the gain from as many runs, and no more false keeps."""
    if comparison is None or comparison.difference is None:
        why = comparison.why if comparison is not None else ""
        return Ruling(word="undecided", why=why or "the two could not be compared")
    gain = comparison.difference if direction == "max" else -comparison.difference
    if comparison.verdict == "worse":
        return Ruling(word="discarded", why="worse than the incumbent")
    if comparison.verdict == "equivalent":
        return Ruling(word="discarded", why="equivalent to the incumbent")
    if gain <= 0:
        return Ruling(word="discarded", why="not above the incumbent")
    enough = min(LEAST_SEEDS, max_repeats)
    is_proven = comparison.verdict == "better" and (comparison.p_holm or 0.0) < KEEP_LEVEL
    if comparison.p_holm is not None and looks > 1 and first_seeds is not None and first_seeds < enough:
        is_proven = comparison.p_holm * penalty_of_look(looks - 1) / penalty_of_look(looks) < KEEP_LEVEL
    if is_proven and n_seeds >= enough:
        return Ruling(word="kept", why="better than the incumbent")
    if n_seeds < max_repeats:
        return Ruling(word="repeat", why="promising, not yet proven", seeds=max_repeats)
    return Ruling(word="undecided", why=comparison.why or f"not proven with {n_seeds} seeds")


def is_behind(candidate: ArmMean | None, incumbent: ArmMean | None, direction: Direction) -> bool:
    """Whether a candidate is left behind at a rung: its score there lies below the incumbent's at that step."""
    if candidate is None or incumbent is None:
        return False
    return candidate.mean < incumbent.mean if direction == "max" else candidate.mean > incumbent.mean
