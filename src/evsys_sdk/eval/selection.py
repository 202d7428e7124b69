"""What looking at many arms costs: p-values for a family of tests, and the score of an arm that was picked for it.

In: p-values; or the values of several arms on the same tasks. Out: Holm's p-values; or the score to expect of the arm
that is picked, which is lower than the highest score seen (the winner's curse).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from evsys_sdk.eval.seed_spread import pooled_spread, seed_spread

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

ROUNDS = 40
"""Each makes a split for every part."""
PARTS = 3
"""Of the tasks, one part scores and the others pick. With halves the pick would be more of a guess than the real one,
and a good arm would be sold short; with smaller parts the score hangs on the few tasks that decide a close race."""

FISSION = math.sqrt(0.5)
"""Of a lone seed, how much noise is added: it then picks like two seeds of three, with half as much variance again."""
UNEVEN, UNLIKE_OTHERS = 0.001, 0.01
"""How seldom seeds lie so far apart by the noise of single values, and in an arm like the others."""


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

    Many times over, the best arm is picked on two thirds of the tasks and scored on the rest; where an arm has several
    seeds, most of them pick and the others score. Of an arm that is not on top, and whose seeds lie further apart than
    those of the other arms, all seeds do both: with one lucky seed of three it would often be picked by it, and what it
    loses by that is not the winner's to bear.
    Arms are arrays of seeds x tasks. None for fewer than two tasks.
    """
    import numpy as np

    tasks = arms[0].shape[1]
    if tasks < 2:
        return None
    chance = np.random.default_rng(seed)
    scoring = _parts(tasks, chance)
    sign = 1.0 if mode == "max" else -1.0
    runs = np.concatenate(arms).T * sign
    by_run = np.split(_weights(~scoring) @ runs, _ends(arms), axis=1)
    held_out = np.split(_weights(scoring) @ runs, _ends(arms), axis=1)
    means = np.array([[values.mean() * sign] for values in arms])
    uneven = _uneven(arms, spared=int(means.argmax()))
    apart = [index not in uneven for index in range(len(arms))]
    luck = _luck_of_a_seed(arms)
    sides = [_over_seeds(*given, luck, chance) for given in zip(by_run, held_out, apart, strict=True)]
    seen, unseen = np.stack([side[0] for side in sides]), np.stack([side[1] for side in sides])
    # Over all possible splits an arm's unseen scores average to its mean; made so for those that were drawn.
    unseen += means - unseen.mean(axis=1, keepdims=True)
    best = np.isclose(seen, seen.max(axis=0), rtol=0, atol=1e-12 * (1 + np.abs(seen).max()))
    share = best / best.sum(axis=0)  # equals share the pick
    if len(always := np.flatnonzero(share.min(axis=1) == 1.0)):
        return float(arms[always[0]].mean())
    return sign * float((unseen * share).sum(axis=0).mean())


def _parts(tasks: int, chance: np.random.Generator) -> NDArray[np.bool_]:
    """One row per split: which tasks score. Each task scores once in every round."""
    import numpy as np

    parts = min(PARTS, tasks)
    place = np.argsort(chance.random((ROUNDS, tasks)), axis=1) % parts
    return np.concatenate([place == part for part in range(parts)])


def _ends(arms: Sequence[Array]) -> list[int]:
    """Where in the list of all runs the next arm begins."""
    return list(accumulate(map(len, arms)))[:-1]


def _uneven(arms: Sequence[Array], *, spared: int) -> set[int]:
    """The arms whose seeds lie further apart than noise explains, and than those of the other arms do."""
    from scipy.stats import chi2, f

    free = [len(values) - 1 for values in arms]
    spread = [float(values.mean(axis=1).var(ddof=1)) if len(values) > 1 else 0.0 for values in arms]
    total = sum(one * df for one, df in zip(spread, free, strict=True))
    found = set()
    for index, (values, df) in enumerate(zip(arms, free, strict=True)):
        if df < 1 or index == spared:
            continue
        noise = float(values.var(axis=0, ddof=1).mean()) / values.shape[1]
        rest = sum(free) - df
        others = (total - spread[index] * df) / rest if rest else 0.0
        if (
            spread[index] > noise * chi2.ppf(1 - UNEVEN, df) / df
            and spread[index] > others * f.ppf(1 - UNLIKE_OTHERS, df, max(rest, 1))
        ):  # fmt: skip
            found.add(index)
    return found


def _luck_of_a_seed(arms: Sequence[Array]) -> float:
    """Standard deviation of what a seed does to a run, as the arms with several seeds tell; 0 where none has."""
    pooled = pooled_spread(seed_spread(values) for values in arms)
    return math.sqrt(max(0.0, pooled.scatter - pooled.noise)) if pooled else 0.0


def _over_seeds(
    seen: Array, unseen: Array, apart: bool, luck: float, chance: np.random.Generator
) -> tuple[Array, Array]:
    """The means of an arm's runs in every split: with `apart`, of the seeds that pick and of the seeds that score.

    A lone seed among arms with several cannot be split. Noise as large as a seed's luck is added where it picks and
    taken off where it scores, so that the two are as independent as two seeds (data fission, Leiner et al. 2023).
    """
    import numpy as np
    from scipy.special import ndtri

    splits, seeds = seen.shape
    if seeds == 1 and luck > 0.0:
        noise = luck * ndtri((chance.permutation(splits) + 0.5) / splits)
        return seen[:, 0] + FISSION * noise, unseen[:, 0] - noise / FISSION
    if seeds == 1 or not apart:
        return seen.mean(axis=1), unseen.mean(axis=1)
    scores = np.argsort(chance.random((splits, seeds)), axis=1) < max(1, round(seeds / PARTS))
    return (seen * _weights(~scores)).sum(axis=1), (unseen * _weights(scores)).sum(axis=1)


def _weights(chosen: NDArray[np.bool_]) -> Array:
    """Of a mean over what each row has chosen."""
    weights: Array = chosen / chosen.sum(axis=1, keepdims=True)
    return weights
