"""What an experiment may spend, and what it has spent.

In: steps, tokens and dollars as runs use them up; what earlier processes used, from the journal. Out: `Cancelled`
when a limit is reached: the runs stop there with a valid record. Steps and trials are never exceeded; tokens, seconds
and dollars by what one step of each run under way takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product

from evsys_sdk.errors import Cancelled
from evsys_sdk.record.journal import IDENTITY, PAYMENT, REUSED, ROLLOUT, Journal, RunJournal, number_in

LIMITS = ("steps", "tokens", "seconds", "usd", "trials")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """So much so far; `steps` are those that were done."""

    steps: int = 0
    tokens: int = 0
    usd: float = 0.0
    seconds: float = 0.0
    trials: int = 0


@dataclass(slots=True)
class Budget:
    """Shared by all runs of an experiment."""

    limits: dict[str, float] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    reserved: int = 0
    """Steps that runs are in the middle of."""
    begun: set[str] = field(default_factory=set)
    """Runs that count already: resuming one is not another trial."""
    waiting: dict[str, None] = field(default_factory=dict)
    """Runs that may yet take a trial, in the order in which they are planned."""
    lock: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    def of(
        cls, *specs: object, spent: Spent, begun: Iterable[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> Budget:
        """The budget of config blocks, of which the tighter limit holds, or one without limits."""
        # As if this process had begun so much earlier: `seconds` then counts on over all processes.
        started = clock() - spent.seconds
        return cls(limits=limits_of(*specs), spent=spent, begun=set(begun), clock=clock, started=started)

    def expect(self, run_id: str) -> None:
        """A run is planned: trials go to runs in this order, however their threads are scheduled."""
        with self.lock:
            if run_id not in self.begun:
                self.waiting[run_id] = None

    @contextmanager
    def turn(self, run_id: str) -> Iterator[None]:
        """Wait until no run planned earlier can be short of a trial because of this one; then it may `begin_run`. What
        has not begun when the block is left (it was finished before, or is refused) takes no trial."""
        try:
            with self.lock:
                self.lock.wait_for(lambda: self._is_its_turn(run_id))
            yield
        finally:
            self._settle(run_id)

    def _is_its_turn(self, run_id: str) -> bool:
        left = self.limits.get("trials", float("inf")) - self.spent.trials
        if left <= 0 or run_id not in self.waiting:
            return True
        # As many runs as trials are left may go ahead: those before it in the plan have theirs, should they want one.
        return list(self.waiting).index(run_id) < left

    def _settle(self, run_id: str) -> None:
        with self.lock:
            self.waiting.pop(run_id, None)
            self.lock.notify_all()

    def begin_run(self, run_id: str) -> None:
        """A run starts or resumes; Cancelled when no more may."""
        with self.lock:
            self._refuse_if_spent()
            self._refuse_more("steps", self.spent.steps)
            if run_id not in self.begun:
                self._refuse_more("trials", self.spent.trials)
                self.begun.add(run_id)
                self.spent = replace(self.spent, trials=self.spent.trials + 1)
        self._settle(run_id)

    def begin_step(self) -> None:
        """Another step starts; Cancelled when no more may."""
        with self.lock:
            self._refuse_if_spent()
            self._refuse_more("steps", self.spent.steps + self.reserved)
            self.reserved += 1

    def end_step(self, tokens: float) -> None:
        with self.lock:
            self.reserved -= 1
            self.spent = replace(self.spent, steps=self.spent.steps + 1, tokens=self.spent.tokens + int(tokens))

    def give_back_step(self) -> None:
        """A step that was begun will not be done."""
        with self.lock:
            self.reserved -= 1

    def pay(self, usd: float) -> None:
        with self.lock:
            self.spent = replace(self.spent, usd=self.spent.usd + usd)

    def check(self) -> None:
        """Something is about to cost more; Cancelled when nothing may."""
        with self.lock:
            self._refuse_if_spent()

    def _refuse_if_spent(self) -> None:
        self.spent = replace(self.spent, seconds=self.clock() - self.started)
        for name in ("tokens", "seconds", "usd"):
            self._refuse_more(name, getattr(self.spent, name))

    def _refuse_more(self, name: str, used: float) -> None:
        if used >= self.limits.get(name, float("inf")):
            raise Cancelled(f"the budget is spent: {used:.6g} of {self.limits[name]:g} {name}", reason="budget")

    def summary(self) -> dict[str, object] | None:
        """Limits and spending as plain data; None without limits."""
        return {"limits": self.limits, "spent": asdict(self.spent)} if self.limits else None


def limits_of(*specs: object) -> dict[str, float]:
    """What config blocks allow together: of two limits the tighter one."""
    limits: dict[str, float] = {}
    for spec, name in product([spec for spec in specs if spec is not None], LIMITS):
        if (limit := getattr(spec, name)) is not None:
            limits[name] = min(limit, limits.get(name, limit))
    return limits


PAID = f"'{ROLLOUT}', '{PAYMENT}'"
_OWN = (
    "id > (SELECT coalesce(min(id), 0) FROM events WHERE run = ? AND attempt = ?)"
    f" AND (run, attempt) NOT IN (SELECT run, attempt FROM events WHERE kind = '{REUSED}')"
)
"""Since the experiment was launched; not what came with a run that another experiment had finished."""


def spent_before(journal: Journal, line: RunJournal, *, seconds: float) -> Spent:
    """What the runs of this experiment have used since it was launched, also what was done twice after a kill; in so
    many seconds."""
    # `superseded` is not asked for: a step that was done twice after a kill was paid for twice.
    launch = (line.run, line.attempt)
    [(steps, tokens)] = journal.read(
        f"SELECT count(*), coalesce(sum({number_in('metrics.tokens')}), 0) FROM events WHERE kind = 'step' AND {_OWN}",
        launch,
    )
    [(usd,)] = journal.read(
        f"SELECT coalesce(sum({number_in('cost_usd')}), 0) FROM events WHERE kind IN ({PAID}) AND {_OWN}",
        launch,
    )
    trials = len(begun_before(journal, line))
    return Spent(steps=steps, tokens=int(tokens), usd=usd, seconds=seconds, trials=trials)


def begun_before(journal: Journal, line: RunJournal) -> list[str]:
    """The runs of this experiment that were begun since it was launched, in this or another process."""
    query = f"SELECT DISTINCT run FROM events WHERE kind = '{IDENTITY}' AND {_OWN}"
    return [run for (run,) in journal.read(query, (line.run, line.attempt))]
