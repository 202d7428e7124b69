"""What trials tell about recipes that were not tried: scores and failures by similarity.

In: points of the space with a value each. Out: a `Surrogate`, which predicts mean and deviation anywhere: a Gaussian
process with a Matern 5/2 kernel (Rasmussen and Williams 2006, equations 2.25, 2.26 and 4.17), a length scale for each
dimension. Recipes of different kinds do not have the same dimensions: one that only one of two points has counts as a
fixed difference, one that neither has as none (after Hutter and Osborne 2013).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evsys_sdk.research.space import Point

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

MISSING = 0.3
"""How far apart two points are in a dimension that only one of them has; a choice that differs counts 1."""
STEPS = (0.2, 5.0)
"""By what the search for a length scale multiplies its inverse square."""
SWEEPS = 1
SPREAD = 1.2
"""Of the prior of log inverse squares around their start: dimensions are alike until the trials say otherwise."""
NOISE = 0.003
"""Variance that is expected beside the noise that is known, as a part of the variance of all values."""
MOST = 200
"""Trials that are fitted: the last ones. Time grows with the cube of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """How points become rows of numbers whose squared distance is how much the points differ: a number from 0 to 1 is
    one column, and beside it one that says that it is missing; a word is a column for each value."""

    places: dict[tuple[str, str], int]
    """Dimension and word (empty for the number itself, `?` for its lack) -> column."""
    owners: Array
    """Column -> index of its dimension."""
    names: tuple[str, ...]

    @classmethod
    def of(cls, points: Sequence[Point]) -> Columns:
        import numpy as np

        found = {(name, value if isinstance(value, str) else "") for point in points for name, value in point.items()}
        found |= {(name, "?") for name, word in found if not word}
        names = tuple(sorted({name for name, _ in found}))
        places = {key: column for column, key in enumerate(sorted(found))}
        return cls(places=places, owners=np.array([names.index(name) for name, _ in places]), names=names)

    def number(self, name: str) -> int:
        """The column of a number."""
        return self.places[name, ""]

    def rows(self, points: Sequence[Point]) -> Array:
        import numpy as np

        rows = np.zeros((len(points), len(self.places)))
        for row, point in zip(rows, points, strict=True):
            for name, value in point.items():
                if isinstance(value, str):
                    column = self.places.get((name, value))
                    if column is not None:
                        row[column] = math.sqrt(0.5)
                else:
                    row[self.places[name, ""]] = value
            for (name, word), column in self.places.items():
                if word == "?" and name not in point:
                    row[self.places[name, ""]], row[column] = 0.5, MISSING
        return rows


def squares_between(rows: Array, others: Array) -> Array:
    """Squared distances, `(rows, others)`."""
    import numpy as np

    squares = (rows * rows).sum(axis=1)[:, None] + (others * others).sum(axis=1)[None, :] - 2.0 * rows @ others.T
    found: Array = np.maximum(squares, 0.0)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """A fitted Gaussian process."""

    rows: Array
    """Divided by the length scales."""
    scales: Array
    """Column -> one by its length scale."""
    factor: Array
    """Cholesky factor of the kernel with noise."""
    solved: Array
    centre: float
    scale: float

    @classmethod
    def fit(cls, columns: Columns, rows: Array, values: Sequence[float], *, noise: float) -> Surrogate:
        """By the most likely length scales and noise; `noise` is the least standard deviation of one value."""
        import numpy as np

        rows, y = rows[-MOST:], np.array(values[-MOST:])
        centre, scale = float(y.mean()), float(y.std()) or 1.0
        y = (y - centre) / scale
        start = 4.0 / max(len(columns.names), 1) ** 0.5
        weights, floor = np.full(len(columns.names), start), max(noise / scale, 1e-3) ** 2
        extra, best = NOISE, -math.inf

        def evidence(weights: Array, extra: float) -> float:
            near = rows * np.sqrt(weights)[columns.owners]
            factor = np.linalg.cholesky(_matern(squares_between(near, near)) + (floor + extra) * np.eye(len(y)))
            half = np.linalg.solve(factor, y)
            prior = (
                -0.5 * float(((np.log(weights / start) / SPREAD) ** 2).sum()) - 0.5 * math.log(extra / 0.03) ** 2 / 4
            )
            return -0.5 * float(half @ half) - float(np.log(np.diag(factor)).sum()) + prior

        best = evidence(weights, extra)
        # Dimensions in which all trials agree say nothing.
        differ = sorted({int(columns.owners[column]) for column in np.flatnonzero(np.ptp(rows, axis=0))})
        for _ in range(SWEEPS):
            for column in differ:
                for step in STEPS:
                    trial = weights.copy()
                    trial[column] *= step
                    if (found := evidence(trial, extra)) > best:
                        weights, best = trial, found
                        break
            for step in (0.2, 4.0):
                if 1e-5 < extra * step < 1 and (found := evidence(weights, extra * step)) > best:
                    extra, best = extra * step, found
        scales = np.sqrt(weights)[columns.owners]
        rows = rows * scales
        factor = np.linalg.cholesky(_matern(squares_between(rows, rows)) + (floor + extra) * np.eye(len(y)))
        solved = np.linalg.solve(factor.T, np.linalg.solve(factor, y))
        return cls(rows=rows, scales=scales, factor=factor, solved=solved, centre=centre, scale=scale)

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the value, its noise left out."""
        import numpy as np

        near = _matern(squares_between(rows * self.scales, self.rows))
        half = np.linalg.solve(self.factor, near.T)
        deviation = np.sqrt(np.maximum(1.0 - (half * half).sum(axis=0), 1e-9))
        return self.centre + self.scale * (near @ self.solved), self.scale * deviation


def _matern(squares: Array) -> Array:
    import numpy as np

    root: Array = np.sqrt(5.0 * squares)
    return (1.0 + root + root * root / 3.0) * np.exp(-root)


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """How much a value is expected to be above the best (Jones et al. 1998, equation 15)."""
    import numpy as np

    gap = (mean - best) / deviation
    # The error function by Abramowitz and Stegun 7.1.26, exact to 1.5e-7: scipy takes longer to import than to fit.
    t = 1.0 / (1.0 + 0.3275911 * np.abs(gap) / math.sqrt(2.0))
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * poly * np.exp(-gap * gap / 2.0)
    above = np.where(gap > 0, 1.0 - tail, tail)
    found: Array = deviation * (gap * above + np.exp(-gap * gap / 2.0) / math.sqrt(2.0 * math.pi))
    return np.maximum(found, 1e-300)
