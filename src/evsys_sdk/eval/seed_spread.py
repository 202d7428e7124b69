"""How much an arm's seeds matter.

In: values as arrays, one row per seed, one column per task. Out: a `SeedSpread` per arm, that of all arms together, and
which of the two to go by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

WILD = 10.0
"""How many times the usual an arm's seeds may scatter and still count in full for the others."""
ROUNDING = 1e-12
"""Standard deviations below this share of the largest value are errors of floating point, and count as 0."""
STANDS_OUT = 0.25
"""Level of the test whether two seeds scatter more than those of the other arms (Bancroft 1944, sometimes pooling)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedSpread:
    """How much the means of an arm's runs scatter, and how much of that the tasks' noise alone would do."""

    scatter: float
    """Variance of the runs' means."""
    noise: float
    """What that variance would be if the seed had no effect of its own."""
    degrees: float
    noise_degrees: float = math.inf


def seed_spread(values: Array) -> SeedSpread | None:
    """Of one arm; None for a single seed or a single task, where it cannot be known."""
    seeds, tasks = values.shape
    if seeds < 2 or tasks < 2:
        return None
    runs, columns = values.mean(axis=1), values.mean(axis=0)
    rest = values - runs[:, None] - columns[None, :] + columns.mean()
    noise = float((rest**2).sum()) / ((seeds - 1) * (tasks - 1)) / tasks
    scatter, degrees = float(runs.var(ddof=1)), seeds - 1
    rounding = (ROUNDING * float(abs(values).max())) ** 2
    return SeedSpread(
        scatter=scatter if scatter > rounding else 0.0,
        noise=noise if noise > rounding else 0.0,
        degrees=degrees,
        noise_degrees=degrees * (tasks - 1),
    )


def chance_of(spread: SeedSpread) -> float:
    """That seeds without an effect of their own scatter as much as these (the F test of a two-way analysis)."""
    from scipy.special import fdtrc  # late: scipy costs 50 ms

    if spread.noise <= 0:
        return 0.0 if spread.scatter > 0 else 1.0
    return float(fdtrc(spread.degrees, spread.noise_degrees, spread.scatter / spread.noise))


def pooled_spread(arms: Iterable[SeedSpread | None]) -> SeedSpread | None:
    """That of all arms with several seeds together; None when there are none."""
    known = [spread for spread in arms if spread]
    if not known:
        return None
    degrees = sum(spread.degrees for spread in known)
    most = WILD * median(spread.scatter for spread in known)  # one arm gone wild must not spoil what is said of others
    return SeedSpread(
        scatter=sum(min(s.scatter, most) * s.degrees for s in known) / degrees,
        noise=sum(s.noise * s.degrees for s in known) / degrees,
        degrees=degrees,
    )


def borrows(own: SeedSpread | None, pooled: SeedSpread | None) -> bool:
    """Whether an arm is taken to scatter as all arms do: with one seed, and with two unless these stand out.

    Two seeds that happen to agree are no proof that seeds do not matter. Three say more of their arm than others do.
    """
    if pooled is None or own is None:
        return own is None
    return own.degrees < 2 and not _stands_out(own, pooled)


def _stands_out(own: SeedSpread, pooled: SeedSpread) -> bool:
    from scipy.special import fdtri  # late: scipy costs 50 ms

    rest = pooled.degrees - own.degrees
    if rest <= 0 or own.noise <= 0 or pooled.noise <= 0:
        return True
    times = own.scatter / own.noise
    others = (pooled.degrees * pooled.scatter / pooled.noise - own.degrees * times) / rest
    return times > 2 and times > others * float(fdtri(own.degrees, rest, 1 - STANDS_OUT))


def borrowed(own: SeedSpread | None, pooled: SeedSpread) -> SeedSpread:
    """How all arms scatter, on the scale of this one: near 0 and 1 both noise and seeds move a share less."""
    if own is None or pooled.noise <= 0:
        return pooled
    return SeedSpread(scatter=pooled.scatter * (own.noise / pooled.noise), noise=own.noise, degrees=pooled.degrees)
