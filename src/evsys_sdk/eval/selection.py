"""What looking at many arms costs: p-values for a family of tests, and the score of an arm that was picked for it.

In: p-values; or the values of several arms on the same tasks. Out: Holm's p-values; or the score to expect of the arm
that is picked, which is lower than the highest score seen (the winner's curse).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

ROUNDS = 60
"""Each makes two splits."""


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Corrected so that the chance of any false alarm in the family stays at alpha (Holm 1979).

    A test that could not be made (None) stays None and still counts as one of the family.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        corrected[index] = largest
    return corrected


def picked_score(arms: Sequence[Array], *, mode: Literal["max", "min"] = "max", seed: int = 0) -> float | None:
    """The mean score of the arm that would be picked, on tasks and seeds it was not picked by.

    Many times over, the best arm is picked on one half of the tasks and scored on the other; where an arm has several
    seeds, one half picks and the other scores. Arms are arrays of seeds x tasks. None for fewer than two tasks.
    """
    import numpy as np

    tasks = arms[0].shape[1]
    if tasks < 2:
        return None
    chance = np.random.default_rng(seed)
    picking = _halves(tasks, chance)
    sign = 1.0 if mode == "max" else -1.0
    runs = np.concatenate(arms).T * sign
    by_run = np.split(_weights(picking) @ runs, _ends(arms), axis=1)
    held_out = np.split(_weights(~picking) @ runs, _ends(arms), axis=1)
    sides = [_over_seeds(*pair, chance) for pair in zip(by_run, held_out, strict=True)]
    seen, unseen = np.stack([side[0] for side in sides]), np.stack([side[1] for side in sides])
    # Over all possible splits an arm's unseen scores average to its mean; made so for those that were drawn.
    unseen += np.array([[values.mean() * sign] for values in arms]) - unseen.mean(axis=1, keepdims=True)
    best = np.isclose(seen, seen.max(axis=0), rtol=0, atol=1e-12 * (1 + np.abs(seen).max()))
    expected = (unseen * best).sum(axis=0) / best.sum(axis=0)  # equals share the pick
    return sign * float(expected.mean())


def _halves(tasks: int, chance: np.random.Generator) -> NDArray[np.bool_]:
    """One row per split: which tasks pick. Each half picks once and scores once."""
    import numpy as np

    half = np.argsort(chance.random((ROUNDS, tasks)), axis=1) < tasks / 2
    return np.concatenate([half, ~half])


def _ends(arms: Sequence[Array]) -> list[int]:
    """Where in the list of all runs the next arm begins."""
    return list(accumulate(map(len, arms)))[:-1]


def _over_seeds(seen: Array, unseen: Array, chance: np.random.Generator) -> tuple[Array, Array]:
    """The means of an arm's runs in every split, as means of the seeds that pick and of the seeds that score."""
    import numpy as np

    splits, seeds = seen.shape
    if seeds == 1:
        return seen[:, 0], unseen[:, 0]
    scores = np.argsort(chance.random((splits, seeds)), axis=1) < seeds // 2
    return (seen * _weights(~scores)).sum(axis=1), (unseen * _weights(scores)).sum(axis=1)


def _weights(chosen: NDArray[np.bool_]) -> Array:
    """Of a mean over what each row has chosen."""
    weights: Array = chosen / chosen.sum(axis=1, keepdims=True)
    return weights
