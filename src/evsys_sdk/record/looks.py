"""How often a set of tasks was selected on, and what the best of so many arms is worth by chance.

In: the entries of a history. Out: a `Looks` per set of tasks. Every arm whose score may select counts as one look at
the tasks, in whichever experiment it was; scores on test benchmarks count only where `allow_test_selection` lets them
select. Arms of the mock backend are counted apart, and a run that other experiments took over counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, median
from typing import Any

from evsys_sdk.numbers import count
from evsys_sdk.record.digest import Digest
from evsys_sdk.record.history import Entry
from evsys_sdk.record.ladder import counted_once, mock_arms

BUDGET = 25
"""Arms that may be compared on one set of tasks. The best of 25 equal arms is expected 1.96 standard errors above its
true level, so beyond that the 95 % interval of the best score usually lies wholly above what the arm is worth."""


@dataclass(slots=True, kw_only=True)
class Looks:
    """One set of tasks, and who chose by it."""

    benchmark: str
    """Its names, as `val/tools`."""
    tasks: str
    """What tells the tasks from others: the beginning of their hash, or the path where no hash is known."""
    is_mock: bool = False
    experiments: list[str] = field(default_factory=list)
    n_arms: int = 0
    half_widths: list[float] = field(default_factory=list)
    """Of the arms' 95 % intervals over tasks, one seed each."""

    @property
    def by_chance(self) -> float | None:
        """How far the best of so many equal arms is expected above its true level, in the metric's unit; None where no
        score has an interval."""
        if not self.half_widths or self.n_arms < 2:
            return None
        return expected_maximum(self.n_arms) * median(self.half_widths) / NormalDist().inv_cdf(0.975)

    @property
    def is_spent(self) -> bool:
        return self.n_arms >= BUDGET and not self.is_mock

    def as_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "tasks": self.tasks,
            "mock": self.is_mock,
            "experiments": len(self.experiments),
            "arms": self.n_arms,
            "budget": BUDGET,
            "spent": self.is_spent,
            "best_by_chance": self.by_chance,
        }

    def __str__(self) -> str:
        """`val/tools (tasks 5f0c1a2b): 31 arms of 12 experiments were selected on it; ...`."""
        mock = "; mock backend" if self.is_mock else ""
        arms, experiments = count(self.n_arms, "arm"), count(len(self.experiments), "experiment")
        text = f"{self.benchmark} ({self.tasks}{mock}): {arms} of {experiments} compared on it (budget {BUDGET})"
        if self.by_chance is not None:
            text += f"; the best of {self.n_arms} equal arms scores about {self.by_chance:.3f} too high by chance"
        return f"{text}. The budget is spent: choose on a fresh validation set." if self.is_spent else text


def expected_maximum(n: int) -> float:
    """Of n independent standard normal values (Blom 1958, within 2 % from n = 5 on)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def looks_of(entries: Sequence[Entry]) -> list[Looks]:
    """Every set of tasks that was selected on, the most used first."""
    found: dict[tuple[str, bool], Looks] = {}
    counting = sorted((entry for entry in entries if entry.counts), key=lambda entry: entry.when)
    for entry in counted_once(counting):
        digest = entry.digest
        if not digest.selects:
            continue
        mock = mock_arms(digest)
        for suite in dict.fromkeys(key.rpartition("/")[0] for key in digest.measured if "/" in key):
            tasks = _tasks(digest, suite)
            for arm in digest.scored:
                is_mock = arm.arm in mock
                looks = found.setdefault((tasks, is_mock), Looks(benchmark=suite, tasks=tasks, is_mock=is_mock))
                looks.n_arms += 1
                looks.half_widths += [arm.half_width] if arm.half_width is not None else []
                looks.experiments += [entry.name] if entry.name not in looks.experiments else []
                looks.benchmark += f", {suite}" if suite not in looks.benchmark.split(", ") else ""
    return sorted(found.values(), key=lambda one: (one.is_mock, -one.n_arms))


def _tasks(digest: Digest, suite: str) -> str:
    first = f"the first {digest.limits[suite]} of " if suite in digest.limits else ""
    if suite in digest.tasks:
        return f"{first}tasks {digest.tasks[suite][:8]}"
    return f"{first}tasks in {digest.paths[suite]}" if suite in digest.paths else f"{first}tasks of {suite}"
