"""What happens around a training loop while it turns: callbacks, journal, in-loop evaluation, stopping.

In: the loop's events. Out: callback calls, journal entries, evaluations on snapshots that overlap training, log lines,
and a `Cancelled` when the user wants to stop. After a resume the journal's events are replayed first. An evaluation
that breaks is a result with an error, never the run's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from evsys_sdk.config.metadata import BenchmarkEntry
from evsys_sdk.errors import Cancelled
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import EvalResult, FinishedRollouts, KeptWeights, RunContext, Snapshot, StoppedAt
from evsys_sdk.record.callbacks import CallbackList, eval_metrics
from evsys_sdk.record.journal import (
    PAYMENT,
    TASKS,
    JournalEvent,
    JournalledRollouts,
    RunJournal,
    read_eval,
    to_data_without,
)
from evsys_sdk.record.models import question_to_data, to_data
from evsys_sdk.run.attempt import RunAttempt
from evsys_sdk.run.budget import Budget
from evsys_sdk.run.evals import RunEvals
from evsys_sdk.run.resume import was_paused_at
from evsys_sdk.run.stop import StopFlag, StoppableLogStore
from evsys_sdk.score_names import resolve_one
from evsys_sdk.training import rollout_data
from evsys_sdk.training.checkpoints import manifests_in, with_paths, without_paths
from evsys_sdk.training_api import SamplingClient, discard_weights, let_go

LAST_STEP = 2**62
"""Later than any step."""
EVALS_AHEAD = 4
"""Evaluations under way beside the training. Each keeps the weights of its step, in memory or on disk: where scoring is
slower than training, they would fill both."""


def _is_gone(path: str) -> bool:
    """Whether these weights were files of this machine and are not there any more; a server's paths are believed."""
    return path.startswith("/") and not Path(path).exists()


@dataclass(slots=True)
class LoopHooks:
    """`protocols.Hooks` for one run."""

    ctx: RunContext
    callbacks: CallbackList
    scoring: RunEvals
    stop: StopFlag
    journal: RunJournal
    results: list[EvalResult] = field(default_factory=list)
    stage: str | None = None
    first_step: int = 0
    """Steps of earlier stages: steps count on through a chain, so that its curves do not overlap."""
    steps: int = 0
    """Steps done so far."""
    replayed: int = -1
    """Callbacks and logs have the events up to this step: replayed after a resume, or as they happened."""
    chosen: int | None = None
    """The step whose weights the stage ends with, where that is not its last."""
    budget: Budget = field(default_factory=Budget)
    pause_at: int | None = None
    """The run is to stop after this step, with all its evaluations done."""
    in_step: bool = False
    total_steps: int | None = None
    """Of the stages begun so far; None where the algorithm does not say."""
    saved_step: int = 0
    """The step of the newest checkpoint, by the run's own count."""
    unannounced: tuple[int, str] | None = None
    """Step and path of a checkpoint that callbacks get after its step."""
    pending: set[asyncio.Task[None]] = field(default_factory=set)
    under_way: dict[tuple[str, str, int | None], JournalledRollouts] = field(default_factory=dict)
    """The finished rollouts of evaluations that are not finished."""
    tasks_kept: set[str] = field(default_factory=set)
    """Benchmarks (`split/name`) whose questions are in the journal."""
    scored_snapshots: dict[int, str] = field(default_factory=dict)
    """Step -> sampler weights that were saved for an in-loop evaluation which is done."""

    @classmethod
    def create(cls, attempt: RunAttempt, ctx: RunContext) -> LoopHooks:
        """The hooks of an attempt whose backend is prepared; the context gets them, the rollout engine and renderer."""
        plan, scoring = attempt.plan, RunEvals.create(attempt)
        hooks = cls(
            ctx, plan.callbacks, scoring, plan.stop, attempt.journal, budget=plan.budget, pause_at=plan.pause_at
        )
        scoring.finished = hooks.finished
        ctx.hooks, ctx.rollouts, ctx.extras["renderer"] = hooks, scoring.engine, scoring.renderer
        # The same objects: what was scored before a crash stays in the record.
        attempt.record.evals, attempt.record.benchmarks = hooks.results, scoring.loaded
        return hooks

    def finished(self, split: str, name: str, sha256: str, step: int | None) -> FinishedRollouts:
        """Where an evaluation keeps its rollouts one by one, so that a kill in its midst loses none."""
        at = self.steps if step is None else step
        when = "final" if step is None else str(step)
        key = f"{self.stage or ''}/{split}/{name}/{when}/{sha256}"  # other tasks under the same name are other tasks
        self.under_way[split, name, step] = JournalledRollouts(self.journal, key, at=at)
        return self.under_way[split, name, step]

    def begin_stage(self, name: str | None) -> None:
        """A stage of a chain starts; its own step 1 comes after the last step of the stage before."""
        store = self.ctx.log_store
        logged = store.last_step if isinstance(store, StoppableLogStore) else 0
        self.stage, self.first_step, self.chosen = name, max(self.steps, logged), None
        if isinstance(store, StoppableLogStore):
            store.first_step = self.first_step

    @property
    def weights_step(self) -> int:
        """The step of the weights that the stage ended with."""
        return self.steps if self.chosen is None else self.chosen

    def of_this_stage(self) -> list[EvalResult]:
        return [result for result in self.results if result.stage == self.stage]

    def train_start(self, total_steps: int | None) -> None:
        total = None if total_steps is None else self.first_step + total_steps
        # A phase before this one may have chosen: the run ends with what is trained now.
        self.total_steps, self.chosen = total, None
        self.journal.add("train_start", {"total_steps": total}, at=self.first_step, key=self.stage or "")
        self.callbacks.on_train_start(self.ctx, total)

    def step_start(self, step: int) -> None:
        self.stop.check()
        if self.pause_at is not None and self.first_step + step > self.pause_at:
            last = self.first_step + step - 1
            raise Cancelled(f"paused at step {last}", reason="pause", step=last)
        self.budget.begin_step()
        self._mark_step(True)

    def pay(self, call: str, usd: float) -> None:
        self.budget.pay(usd)
        # At step 0, which no resume takes back: what was paid for stays paid.
        self.journal.add(PAYMENT, {"cost_usd": usd}, at=0, key=call)

    def check_budget(self) -> None:
        self.stop.check()
        self.budget.check()

    def _mark_step(self, in_step: bool) -> None:
        self.in_step = in_step
        if isinstance(self.ctx.log_store, StoppableLogStore):
            self.ctx.log_store.in_step = in_step

    async def step_end(self, step: int, metrics: dict[str, float], snapshot: Snapshot) -> None:
        if not self.in_step:  # an algorithm whose own loop does not say when a step begins
            self.budget.begin_step()
        self._mark_step(False)
        self.budget.end_step(metrics.get("tokens", 0))
        self.steps = self.replayed = self.first_step + step
        # The journal before callbacks and scores: what it has is replayed after a kill, what it lacks is done again.
        self.journal.add("step", {"metrics": metrics}, at=self.steps)
        self.callbacks.on_step(self.ctx, self.steps, metrics)
        # Only now, a step later: the checkpoint of the step before, which may share these files, is in the manifest.
        await self._discard_snapshots(before=self.steps)
        due = self.scoring.due(step)
        if due:
            while len(self.pending) >= EVALS_AHEAD:
                await asyncio.wait(self.pending, return_when=asyncio.FIRST_COMPLETED)
            sampler = await snapshot()
            save, path = getattr(snapshot, "save_for_sampler", None), None
            if save is not None:
                path = await save()
                self.journal.add(
                    "snapshot", {"path": without_paths(path, self.ctx.output_dir.absolute())}, at=self.steps
                )
            self._start(due, sampler, self.steps, path)
            if self.callbacks.waits_for_scores():
                await self._all_scored()
        self._announce_saved()
        self.stop.check()
        await self._before_a_pause()

    def _start(self, entries: list[BenchmarkEntry], sampler: SamplingClient, step: int, path: str | None) -> None:
        """Score beside the training."""
        task = asyncio.create_task(self._score(entries, sampler, step, path))
        self.pending.add(task)
        task.add_done_callback(self.pending.discard)

    async def _score(self, entries: list[BenchmarkEntry], sampler: SamplingClient, step: int, path: str | None) -> None:
        async def score(entry: BenchmarkEntry) -> None:
            self.add(await self.stop.unless_set(self.scoring.score(entry, sampler, step=step)))

        try:
            await asyncio.gather(*map(score, entries))
        finally:
            let_go(sampler)
        if path is not None:
            self.scored_snapshots[step] = path

    async def _discard_snapshots(self, *, before: int) -> None:
        """Delete sampler weights that were saved only to be scored, of steps before `before`.

        The weights of the current step stay: a checkpoint of that step would point to the same files."""
        done = [step for step in self.scored_snapshots if step < before]
        if not done:
            return
        self.flush()  # the scores must outlive the weights they were made with
        kept = {found.sampler for manifest in manifests_in(self.ctx.output_dir) for found in manifest.checkpoints}
        service = self.ctx.extras["backend_handles"]["service"]
        for step in done:
            path = self.scored_snapshots.pop(step)
            if path in kept or _is_gone(path):
                continue
            try:
                await discard_weights(service, path)
            except Exception as exc:  # the run does not depend on it; `evsys clean` finds what is left
                get_logger(__name__).warning("could not delete the sampler weights %s: %s", path, exc)

    def add(self, result: EvalResult) -> None:
        """Keep, log and announce a finished evaluation."""
        result = replace(result, stage=self.stage)
        self.budget.pay(sum(rollout.cost_usd for rollout in result.rollouts))
        at = self.steps if result.step is None else result.step
        kind = "final_eval" if result.step is None else "eval"
        kept = self.under_way.pop((result.split, result.name, result.step), None)
        data = to_data(result) if kept is None else to_data_without(result, kept)
        self._keep_tasks(result)
        # After its rollouts (`to_data_without` keeps them): a kill in between leaves rollouts that the evaluation, made
        # again, finds and does not repeat.
        self.journal.add(kind, data, at=at, key=f"{self.stage or ''}/{result.split}/{result.name}/{at}")
        self._announce(result, at)

    def _keep_tasks(self, result: EvalResult) -> None:
        """Keep what the tasks of a benchmark asked and expected, once per run: a rollout has only its task's id."""
        suite = self.scoring.loaded.get(f"{result.split}/{result.name}")
        key = f"{result.split}/{result.name}"
        if suite is None or not result.rollouts or key in self.tasks_kept:
            return
        tried = {rollout.task_id for rollout in result.rollouts}
        tasks = {task.task_id: question_to_data(task) for task in suite.tasks if task.task_id in tried}
        self.journal.add(TASKS, {"tasks": tasks}, at=0, key=key)
        self.tasks_kept.add(key)

    def _announce(self, result: EvalResult, at: int) -> None:
        self.results.append(result)
        values = eval_metrics(result)
        if values:
            self.ctx.log_store.log_metrics(values, at - self.first_step)
        self.callbacks.on_eval(self.ctx, result)

    def checkpoint(self, step: int, path: str, *, planned: bool = True) -> None:
        """Weights are on disk. Callbacks get the event after their step, which may be sent only now that nothing can be
        lost; of a checkpoint that is only there to resume from they do not hear, as it will be deleted."""
        self._announce_saved()
        self.saved_step = self.first_step + step
        if not planned:
            return
        self.unannounced = (self.first_step + step, path)
        if self.steps >= self.first_step + step:
            self._announce_saved()

    def _announce_saved(self) -> None:
        if self.unannounced is not None:
            (at, path), self.unannounced = self.unannounced, None
            self._announce_checkpoint(at, path)

    def _announce_checkpoint(self, at: int, path: str) -> None:
        self.journal.add("checkpoint", {"path": path}, at=at)
        self.callbacks.on_checkpoint(self.ctx, at, path)

    def flush(self) -> None:
        self.journal.journal.sync()
        rollout_data.sync(self.ctx.output_dir)

    def recorded_steps(self) -> int:
        """The steps of this stage that the journal has without a gap: each with the score of every evaluation that was
        due after it, or with a snapshot from which the score can still be made."""
        home, at = self.ctx.output_dir.absolute(), self.first_step
        events = self.journal.events(after=self.first_step, upto=LAST_STEP)
        steps = {event.at for event in events if event.kind == "step"}
        taken = {event.at: with_paths(event.data["path"], home) for event in events if event.kind == "snapshot"}
        scored = {(event.at, event.data["split"], event.data["name"]) for event in events if event.kind == "eval"}
        # Ends at the first gap: a run that resumes from a later checkpoint would never fill it.
        while at + 1 in steps:
            due = [(at + 1, entry.role, entry.label) for entry in self.scoring.due(at + 1 - self.first_step)]
            if not scored.issuperset(due) and (at + 1 not in taken or _is_gone(taken[at + 1])):
                break
            at += 1
        return at - self.first_step

    async def resumed(self, last: KeptWeights) -> None:
        """Replay to callbacks and logs what happened up to `last`; what came later is void."""
        upto, before = self.first_step + last.step, self.replayed
        if not last.final:  # after a stage that ended, what came later is for the next one to judge
            self.journal.supersede(after=upto)
        events = self.replay(upto)
        if last.state:
            self._complete(last, events)
        self.steps = self.saved_step = upto
        if last.state and not last.final and not was_paused_at(self.journal, upto):
            get_logger(__name__).warning("Resuming %s from step %d (%s)", self.ctx.run_id, upto, last.state)
        if last.state:
            await self._score_what_is_missing(events, before, upto, last)
            if self.callbacks.waits_for_scores():
                await self._all_scored()
        await self._before_a_pause()

    async def _before_a_pause(self) -> None:
        """A pause ends the loop, and with it what is still being scored: wait for that."""
        while self.pause_at is not None and self.steps >= self.pause_at and self.pending:
            await asyncio.gather(*self.pending)

    def replay(self, upto: int) -> list[JournalEvent]:
        """Replay the events of an earlier attempt to logs and callbacks, in their order; returns them."""
        events = self.journal.events(after=self.replayed, upto=upto)
        with self._replaying():
            for event in events:
                if event.kind == "step":
                    self._replay_step(event.at, event.data["metrics"])
                elif event.kind == "checkpoint":
                    self.callbacks.on_checkpoint(self.ctx, event.at, event.data["path"])
                elif event.kind == "eval":
                    self._announce(read_eval(event.data, self.journal), event.at)
        self.replayed = upto
        return events

    def replay_final(self) -> None:
        """Replay the scores that an earlier attempt made after the training of this stage."""
        with self._replaying():
            for event in self.journal.events(after=self.first_step - 1, upto=self.steps):
                if event.kind == "final_eval" and event.data["stage"] == self.stage:
                    self._announce(read_eval(event.data, self.journal), event.at)

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        """Callbacks can tell what happens now from what an earlier attempt did."""
        self.ctx.replaying = True
        try:
            yield
        finally:
            self.ctx.replaying = False

    def _replay_step(self, at: int, metrics: dict[str, float]) -> None:
        self.ctx.log_store.log_metrics(metrics, at - self.first_step)
        self.callbacks.on_step(self.ctx, at, metrics)

    def _complete(self, last: KeptWeights, events: list[JournalEvent]) -> None:
        """The checkpoint is on disk before its step is in the journal: a kill may have come between the two."""
        at = self.first_step + last.step
        known = {(event.kind, event.at) for event in events}
        if ("step", at) not in known:
            self.journal.add("step", {"metrics": last.metrics}, at=at)
            with self._replaying():
                self._replay_step(at, last.metrics)
        if last.planned and ("checkpoint", at) not in known:
            self._announce_checkpoint(at, last.state)

    async def _score_what_is_missing(
        self, events: list[JournalEvent], after: int, upto: int, last: KeptWeights
    ) -> None:
        """Evaluations that were under way when the earlier attempt ended, on the weights they were meant for."""
        home = self.ctx.output_dir.absolute()
        taken = {event.at: with_paths(event.data["path"], home) for event in events if event.kind == "snapshot"}
        paths = taken | {upto: last.sampler}
        done = {(result.split, result.name, result.step) for result in self.of_this_stage()}
        service = self.ctx.extras["backend_handles"]["service"]
        for at in range(max(after, self.first_step) + 1, upto + 1):
            missing = [e for e in self.scoring.due(at - self.first_step) if (e.role, e.label, at) not in done]
            if missing and at in paths and _is_gone(paths[at]):
                names = ", ".join(entry.label for entry in missing)
                get_logger(__name__).warning("step %d stays unscored on %s: %s is gone", at, names, paths[at])
            elif missing and at in paths:
                self.journal.add("snapshot", {"path": without_paths(paths[at], home)}, at=at)
                sampler = await service.create_sampling_client(paths[at])
                self._start(missing, sampler, at, paths[at])
            elif at in taken:
                self.scored_snapshots[at] = taken[at]

    def best(self, metric: str, mode: Literal["max", "min"], *, after: int = 0) -> tuple[int, float] | None:
        key = resolve_one(metric, self.scoring.config.metadata.in_loop_scores)
        scored = [
            (value, result.step - self.first_step)
            for result in self.of_this_stage()
            if result.step is not None and result.step > self.first_step + after and result.split != "test"
            if (value := eval_metrics(result).get(key or metric)) is not None
        ]
        if not scored:
            return None
        sign = 1 if mode == "max" else -1
        value, step = max(scored, key=lambda found: (sign * found[0], -found[1]))  # of equals the earliest
        self.chosen = self.first_step + step
        return step, value

    async def _all_scored(self) -> None:
        if self.pending:
            self.callbacks.doing(self.ctx, "scoring")
        while self.pending:
            under_way = list(self.pending)
            await asyncio.gather(*under_way)
            # Not left to the tasks' callbacks: gathering what is done already lets nothing else run.
            self.pending.difference_update(under_way)

    async def train_end(self, metrics: dict[str, float]) -> None:
        await self._all_scored()
        self._announce_saved()
        await self._discard_snapshots(before=self.steps + 1)  # the final checkpoint is made by now
        self.callbacks.on_train_end(self.ctx, metrics)

    def stopped_at(self) -> StoppedAt:
        """Where a run stands that is stopped now: its step, of how many, and the step of the newest checkpoint."""
        return StoppedAt(step=self.steps, total_steps=self.total_steps, checkpoint_step=self.saved_step)

    def close(self) -> None:
        """Training is over, or broke off."""
        if self.in_step:
            self._mark_step(False)
            self.budget.give_back_step()

    def should_stop(self) -> str | None:
        return self.callbacks.stop_reason(self.ctx.run_id)
