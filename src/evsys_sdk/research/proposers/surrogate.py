"""What trials tell about recipes that were not tried: scores and failures by similarity.

In: points of the space with a value each. Out: a `Surrogate`, which predicts mean and deviation anywhere: a Gaussian
process (Rasmussen and Williams 2006, equations 2.25, 2.26 and 4.17). Its kernel has two parts. One is a trend: each
dimension adds a separate term, a number by its first and second power. Part of the trend carries over from one
kind or list to another, part is each kind's own, and it is learnt from few trials. The other is a Matern 5/2 kernel
over all dimensions, for how they interact. Both share a weight for each dimension. Recipes of different kinds do not
have the same dimensions: one that only one of two points has counts as a fixed difference, one that neither has as none
(after Hutter and Osborne 2013).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evsys_sdk.research.space import ORDER, Point, list_of_order

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

MISSING = 0.3
"""How far apart two points are in a dimension that only one of them has; a choice that differs counts 1."""
STEPS = (0.2, 5.0)
"""By what the search for a weight multiplies it."""
SWEEPS = 1
SPREAD = 1.2
"""Of the prior of log weights around their start: dimensions are alike until the trials say otherwise."""
NOISE = 0.003
"""Variance that is expected beside the noise that is known, as a part of the variance of all values."""
TREND = 0.5
"""The part of the variance that the trend explains, before the trials say otherwise."""
TRENDS = (0.0, 0.25, 0.5, 0.75, 0.9)
BY_KIND = 0.5
"""The part of the trend that holds for recipes of the same kinds alone, before the trials say otherwise."""
BY_KINDS = (0.0, 0.5, 0.9)
DOME = 0.7
"""Expected curvature of a score in each number, in standard deviations of the trend's coefficient: the bounds of a
setting lie far apart, so that the best is seldom at one of them. Chosen before it was measured; without it, a rank
correlation of 0.49 to 0.54 with the truth after 12 trials becomes 0.58 to 0.62 (families lists, kinds, ridge)."""
WIDTHS = (0.1, 0.5)
"""Of the scales on which scores are compared, in parts of their range: see `score_scales`."""
MOST = 200
"""Trials that are fitted: the last ones. Time grows with the cube of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """How points become rows of numbers whose squared distance is how much the points differ: a number from 0 to 1 is
    one column, and beside it one that says that it is missing; a word is a column for each value; the order of two
    items of a list is one column, in the middle where one of them is missing."""

    places: dict[tuple[str, str], int]
    """Dimension and word (empty for the number itself, `?` for its lack) -> column."""
    owners: Array
    """Column -> index of its dimension; the orders of a list are one dimension."""
    names: tuple[str, ...]
    numbers: Array
    """The columns of numbers."""
    kinds: Array
    """The columns of the words of kinds."""

    @classmethod
    def of(cls, points: Sequence[Point]) -> Columns:
        import numpy as np

        found = {(name, value if isinstance(value, str) else "") for point in points for name, value in point.items()}
        found |= {(name, "?") for name, word in found if not word and not list_of_order(name)}
        names = tuple(sorted({list_of_order(name) or name for name, _ in found}))
        places = {key: column for column, key in enumerate(sorted(found))}
        return cls(
            places=places,
            owners=np.array([names.index(list_of_order(name) or name) for name, _ in places]),
            names=names,
            numbers=np.array([c for (name, word), c in places.items() if not word and not list_of_order(name)], int),
            kinds=np.array([c for (name, word), c in places.items() if word and name.endswith(".kind")], int),
        )

    def number(self, name: str) -> int:
        """The column of a number."""
        return self.places[name, ""]

    def rows(self, points: Sequence[Point]) -> Array:
        import numpy as np

        absent = np.zeros(len(self.places))
        for (name, word), column in self.places.items():
            if not word:
                # In the middle: as far from either end, so that a lack pulls to neither.
                absent[column] = ORDER / 2 if list_of_order(name) else 0.5
            elif word == "?":
                absent[column] = MISSING
        rows = np.repeat(absent[None, :], len(points), axis=0)
        for row, point in zip(rows, points, strict=True):
            for name, value in point.items():
                if isinstance(value, str):
                    known = self.places.get((name, value))
                    if known is not None:
                        # Two different words are then 1 apart (squared: 0.5 + 0.5).
                        row[known] = math.sqrt(0.5)
                else:
                    row[self.places[name, ""]] = value
                    if (name, "?") in self.places:
                        row[self.places[name, "?"]] = 0.0
        return rows

    def trend(self, rows: Array) -> Array:
        """The features of the trend: each column, and the square of each number; a dimension varies by about 1."""
        import numpy as np

        # From -1 to 1: a number then has variance 1/3 and its square 4/45, over the range.
        middle = 2.0 * rows[:, self.numbers] - 1.0
        return np.hstack([rows * self._factors(), 2.4 * (middle * middle - 1.0 / 3.0)])

    def dome(self, features: Array, weights: Array, trend: float) -> Array:
        """What the trend is expected to be before any trial: lower towards the bounds of each number."""
        import numpy as np

        squares = features[:, len(self.places) :]
        found: Array = -DOME * squares @ np.sqrt(trend * weights[self.owners[self.numbers]] / weights.sum())
        return found

    def are_alike(self, rows: Array, others: Array) -> Array:
        """1 where two rows have the same kinds, 0 where they have not, `(rows, others)`."""
        found: Array = (squares_between(rows[:, self.kinds], others[:, self.kinds]) < 0.1).astype(float)
        return found

    def _factors(self) -> Array:
        import numpy as np

        factors = np.ones(len(self.places)) * 1.2
        factors[self.numbers] = 2.4
        return factors

    @property
    def trend_owners(self) -> Array:
        import numpy as np

        return np.concatenate([self.owners, self.owners[self.numbers]])


def squares_between(rows: Array, others: Array) -> Array:
    """Squared distances, `(rows, others)`."""
    import numpy as np

    # (a - b)^2 as a^2 + b^2 - 2ab: one matrix product; rounding may leave it below 0, hence the maximum.
    squares = (rows * rows).sum(axis=1)[:, None] + (others * others).sum(axis=1)[None, :] - 2.0 * rows @ others.T
    found: Array = np.maximum(squares, 0.0)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """A fitted process."""

    columns: Columns
    rows: Array
    features: Array
    weights: Array
    trend: float
    by_kind: float
    inverse: Array
    """Of the kernel's lower triangle."""
    solved: Array
    centre: float
    scale: float
    are_scores: bool

    @classmethod
    def fit(
        cls,
        columns: Columns,
        rows: Array,
        values: Sequence[float],
        *,
        noise: float = 0.0,
        are_scores: bool = False,
        doubt: float = 1.0,
    ) -> Surrogate:
        """By the most likely weights, trend and noise; `noise` is the least standard deviation of one value. With
        `are_scores` the values are compared on the likeliest of the scales of `score_scales`, and predicted on it, and
        are expected to be lower at the bounds of numbers than in the middle (`DOME`). With `doubt` they say so many
        times less about other places than seems likeliest."""
        import numpy as np

        rows, y = rows[-MOST:], np.array(values[-MOST:])
        n, count = len(y), len(columns.names)
        start = 4.0 / max(count, 1) ** 0.5
        weights = np.full(count, start)
        features = columns.trend(rows)
        features = features - features.mean(axis=0)
        # By dimension: squared distances, and products of trend features.
        gaps, products = np.zeros((count, n, n)), np.zeros((count, n, n))
        for place in range(count):
            own = rows[:, columns.owners == place]
            gaps[place] = squares_between(own, own)
            own = features[:, columns.trend_owners == place]
            products[place] = own @ own.T
        unit, half_log, alike = np.eye(n), math.log(start), columns.are_alike(rows, rows)
        squares, sums = np.tensordot(weights, gaps, 1), np.tensordot(weights, products, 1)
        scales = [(y, np.zeros(n))]
        if are_scores and np.ptp(y):
            kernel = (1.0 - TREND) * _matern(squares) + (TREND / weights.sum()) * sums + NOISE * unit
            factor = np.linalg.cholesky(kernel)

            def likelihood(scale: tuple[Array, Array]) -> float:
                # The likelihood of the values themselves: the slope of the scale is the Jacobian of a change of
                # variables.
                half = np.linalg.solve(factor, (scale[0] - scale[0].mean()) / scale[0].std())
                return -0.5 * float(half @ half) - n * math.log(float(scale[0].std())) + float(scale[1].sum())

            scales = sorted(score_scales(y), key=likelihood, reverse=True)
        y = scales[0][0]
        centre, scale = float(y.mean()), float(y.std()) or 1.0
        y, floor = (y - centre) / scale, max(noise / scale, 1e-3) ** 2

        def covary(squares: Array, sums: Array, weights: Array, trend: float, by_kind: float, extra: float) -> Array:
            kernel = (1.0 - trend) * _matern(squares) + (floor + extra) * unit
            found: Array = kernel + (trend / weights.sum()) * sums * (1.0 - by_kind + by_kind * alike)
            return found

        def beyond(weights: Array, trend: float) -> Array:
            return y - columns.dome(features, weights, trend) if are_scores else y

        def evidence(squares: Array, sums: Array, weights: Array, trend: float, by_kind: float, extra: float) -> float:
            # The log marginal likelihood (equation 2.30, without its constant) and the priors: of the weights
            # log-normal around their start, of the noise around 0.03 with a standard deviation of 2 in its logarithm.
            kernel = covary(squares, sums, weights, trend, by_kind, extra)
            factor = np.linalg.cholesky(kernel)
            half = np.linalg.solve(factor, beyond(weights, trend))
            prior = -0.5 * float((((np.log(weights) - half_log) / SPREAD) ** 2).sum())
            prior -= 0.5 * math.log(extra / 0.03) ** 2 / 4
            return -0.5 * float(half @ half) - float(np.log(factor.diagonal()).sum()) + prior

        trend, by_kind, extra = TREND, 0.0 if alike.all() else BY_KIND, NOISE
        best = evidence(squares, sums, weights, trend, by_kind, extra)
        # Dimensions in which all trials agree say nothing.
        differ = sorted({int(columns.owners[column]) for column in np.flatnonzero(np.ptp(rows, axis=0))})
        for _ in range(SWEEPS):
            for place in differ:
                for step in STEPS:
                    # Coordinate search: one weight at a time, and the distances are corrected instead of computed anew.
                    trial = weights.copy()
                    trial[place] *= step
                    more = trial[place] - weights[place]
                    one, two = np.maximum(squares + more * gaps[place], 0.0), sums + more * products[place]
                    if (found := evidence(one, two, trial, trend, by_kind, extra)) > best:
                        squares, sums, weights, best = one, two, trial, found
                        break
            for share in TRENDS:
                if share != trend and (found := evidence(squares, sums, weights, share, by_kind, extra)) > best:
                    trend, best = share, found
            for share in () if alike.all() else BY_KINDS:
                if share != by_kind and (found := evidence(squares, sums, weights, trend, share, extra)) > best:
                    by_kind, best = share, found
            for step in (0.2, 4.0):
                if 1e-5 < extra * step < 1:
                    if (found := evidence(squares, sums, weights, trend, by_kind, extra * step)) > best:
                        extra, best = extra * step, found
        if doubt > 1.0:
            weights, squares, trend = weights * doubt, squares * doubt, trend / doubt
            sums = sums * doubt
        kernel = covary(squares, sums, weights, trend, by_kind, extra)
        inverse = np.linalg.inv(np.linalg.cholesky(kernel))
        return cls(
            columns=columns, rows=rows, features=columns.trend(rows), weights=weights, trend=trend,
            by_kind=by_kind, inverse=inverse, solved=inverse.T @ (inverse @ beyond(weights, trend)), centre=centre,
            scale=scale, are_scores=are_scores,
        )  # fmt: skip

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the value, its noise left out."""
        import numpy as np

        scales = np.sqrt(self.weights)[self.columns.owners]
        near = (1.0 - self.trend) * _matern(squares_between(rows * scales, self.rows * scales))
        own, mean = np.full(len(rows), 1.0 - self.trend), np.zeros(len(rows))
        if self.trend:
            middle = self.features.mean(axis=0)
            share = np.sqrt(self.trend * self.weights / self.weights.sum())[self.columns.trend_owners]
            new = self.columns.trend(rows) - middle
            if self.are_scores:
                mean = self.columns.dome(new, self.weights, self.trend)
            new *= share
            sums = new @ ((self.features - middle) * share).T
            near += sums * (1.0 - self.by_kind + self.by_kind * self.columns.are_alike(rows, self.rows))
            own += (new * new).sum(axis=1)
        half = self.inverse @ near.T
        # The floor keeps points that were tried from a deviation of 0, by which `expected_improvement` divides.
        deviation = np.sqrt(np.maximum(own - (half * half).sum(axis=0), 1e-9))
        return self.centre + self.scale * (mean + near @ self.solved), self.scale * deviation


def score_scales(values: Array) -> list[tuple[Array, Array]]:
    """Scales on which values can be compared, each with the logarithm of its slope at each value. On the first, values
    far below the median count as little below it: how bad a bad recipe is says nothing about the best. On the others
    the logarithm of what is above the lowest counts, since what spoils a recipe often takes away a part of its score.
    """
    import numpy as np

    low, middle, top = float(values.min()), float(np.median(values)), float(values.max())
    width = (top - middle) or 1.0
    below = np.maximum(middle - width - values, 0.0) / width
    found = [(np.where(below > 0, middle - width - width * np.log1p(below), values), -np.log1p(below))]
    for part in WIDTHS:
        width = part * (top - low)
        above = np.log1p((values - low) / width)
        found.append((above, -above - math.log(width)))
    return found


def _matern(squares: Array) -> Array:
    import numpy as np

    root: Array = np.sqrt(5.0 * squares)
    # Equation 4.17 with l = 1: the weights have scaled the distance.
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
