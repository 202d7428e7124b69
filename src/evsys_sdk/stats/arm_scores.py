"""What the arms scored, as arrays that can be compared.

In: per arm, per seed, per task one value. Out: seeds x tasks arrays on the tasks that are shared.
A value that is no finite number, or too large to square, counts as missing. Errored rollouts are failures in the values
already, not missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

Values = Mapping[str, float]
"""task_id -> the metric on that task."""
LARGEST = 1e70
"""Products of two variances of larger values are beyond what a float holds."""


# Without slots: `cached_property` keeps its value in the instance's `__dict__`.
@dataclass(frozen=True, kw_only=True)
class ArmScores:
    """What is known of one arm: a value per seed and task."""

    arm: str
    seeds: Mapping[int, Values] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    """Seeds without a score, each with its reason."""
    why_unscored: str | None = None
    """Set when the arm as a whole may not be ranked, whatever values it has."""
    n_rollouts: int = 0
    """Behind the values of all seeds; 0 where that is not known."""
    n_errors: int = 0
    """Of these, those that errored and count as failures."""
    first_error: str | None = None
    training_mark: str = ""
    """`on training rows` where the values are of tasks that the arm trained on."""

    @property
    def why_unranked(self) -> str | None:
        """Why this arm cannot be ranked; None when it can."""
        if self.why_unscored:
            return self.why_unscored
        if not self.usable:
            reasons = dict.fromkeys(self.failed.values())
            return "; ".join(reasons) or "no seed has a score"
        return None if self.tasks else "its seeds share no task"

    @cached_property
    def usable(self) -> dict[int, Values]:
        """Seeds with at least one value."""
        return {seed: values for seed, values in self.seeds.items() if _tasks_present(values)}

    @cached_property
    def tasks(self) -> set[str]:
        """Tasks that every usable seed has a value for."""
        return set.intersection(*map(_tasks_present, self.usable.values())) if self.usable else set()

    @property
    def dropped_tasks(self) -> int:
        """Tasks of some seed that another has no value for."""
        return len({task for values in self.usable.values() for task in values}) - len(self.tasks)


def _tasks_present(values: Values) -> set[str]:
    return {task for task, value in values.items() if abs(value) <= LARGEST}  # false for NaN too


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTable:
    """One arm as an array, its tasks in order."""

    arm: str
    values: Array
    """Seeds x tasks."""
    tasks: tuple[str, ...]
    fixed: bool = False
    """One model, as the untrained one, and no draw of a recipe."""

    @property
    def n_seeds(self) -> int:
        return len(self.values)

    def on(self, tasks: Sequence[str]) -> Array:
        """The columns of these tasks, in their order."""
        if tuple(tasks) == self.tasks:
            return self.values
        place = {task: index for index, task in enumerate(self.tasks)}
        return self.values[:, [place[task] for task in tasks]]


def table_of(scores: ArmScores) -> ArmTable:
    """The arm's usable seeds on the tasks that all of them have."""
    return _table(scores.arm, list(scores.usable.values()), scores.tasks)


def fixed_table(name: str, values: Values) -> ArmTable:
    """The scores of a model that was not trained: one row, without seeds."""
    return _table(name, [values], _tasks_present(values), fixed=True)


def _table(arm: str, rows: list[Values], tasks: set[str], *, fixed: bool = False) -> ArmTable:
    import numpy as np

    order = tuple(sorted(tasks))
    values = np.array([[row[task] for task in order] for row in rows], dtype=np.float64)
    return ArmTable(arm=arm, values=values, tasks=order, fixed=fixed)


def shared_tasks(tables: Sequence[ArmTable]) -> tuple[str, ...]:
    """Tasks that all of them have, in order."""
    # Arms mostly have the same tasks, and `_table` sorts them, so equal tuples need no sets.
    first = tables[0].tasks
    if all(table.tasks == first for table in tables):
        return first
    return tuple(sorted(set(first).intersection(*(table.tasks for table in tables[1:]))))
