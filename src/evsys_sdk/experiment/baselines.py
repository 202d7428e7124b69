"""API models beside the arms: the `models` of benchmark entries, scored once per experiment.

In: the entries, and the experiment's journal. Out: `ModelScore`s. They are scored on a separate thread while the
arms train. What was scored before with the same settings on the same tasks is not asked for again, also after a kill in
the midst of it; only `--fresh` asks anew. A model that cannot be asked is a result with an error, never the arms'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from evsys_sdk import registry
from evsys_sdk.config.metadata import BenchmarkEntry, HostedModel
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.errors import Cancelled
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.eval.hosted import score_hosted
from evsys_sdk.files import encode_record, whole_file
from evsys_sdk.protocols import EvalResult
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.journal import Journal, JournalledRollouts, RunJournal, read_eval, to_data_without
from evsys_sdk.record.models import plain_settings, rollout_to_data
from evsys_sdk.report.conclusion import ModelScore
from evsys_sdk.rollout.client_model import CONCURRENCY
from evsys_sdk.run.evals import run_evaluation
from evsys_sdk.run.plan import ExtensionFactory, NotingJournal, ReadNotes, read_before
from evsys_sdk.run.stop import StopFlag

HOW_ASKED = ("metrics", "num_samples", "max_tokens", "temperature", "limit", "breakdown_keys", "cluster_key", "engine")
"""Settings of an entry that a model's score depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One model on one entry."""

    entry: BenchmarkEntry
    model: HostedModel
    place: str
    """Of the model, in the config."""


@dataclass(slots=True, kw_only=True)
class Baselines:
    """The API models of one experiment."""

    config: ExperimentConfig
    parts: ExtensionFactory
    journal: Journal
    stop: StopFlag
    benchmarks: BenchmarkLoader
    fresh: bool = False
    max_tasks: int | None = None
    """A ceiling from `--dry`."""
    scores: list[ModelScore] = field(default_factory=list)

    @contextmanager
    def beside(self) -> Iterator[list[ModelScore]]:
        """Score while the block runs; after it the list is complete, unless the user stopped it."""
        wanted = [
            Wanted(entry=entry, model=model, place=f"metadata.benchmark[{index}].models[{number}]")
            for index, entry in enumerate(self.config.metadata.benchmark)
            for number, model in enumerate(entry.models)
        ]
        if not wanted:
            yield self.scores
            return
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="evsys-models") as pool:
            done: Future[None] = pool.submit(lambda: asyncio.run(self._score_all(wanted)))
            yield self.scores
            done.result()

    async def _score_all(self, wanted: list[Wanted]) -> None:
        for one in wanted:
            if self.stop.event.is_set():
                return
            work = run_evaluation(partial(self._score, one), name=one.entry.label, split=one.entry.role)
            try:
                result = await self.stop.unless_set(work)
            except Cancelled:
                return
            self.scores.append(ModelScore(model=one.model.label, result=result))

    async def _score(self, one: Wanted) -> EvalResult:
        """The model's score: the one that the journal has, or a new one."""
        entry, model = one.entry, one.model
        suite, limit, parts = self.benchmarks.get(entry), self._limit(entry), ExtensionFactory()
        client = parts.build(registry.inference, model, one.place)
        own = getattr(client, "cfg", None)
        settings = {  # the model's own params win over the entry's
            name: getattr(own, name) if name in model.params and hasattr(own, name) else getattr(entry, name)
            for name in ("max_tokens", "temperature")
        }
        attempt = self._attempt(entry, model, {"tasks": suite.sha256, "limit": limit, **settings})
        known = [event for event in attempt.events(upto=0) if event.kind == "final_eval"]
        self.parts.settings += parts.settings
        if known:
            parts.note_read(read_before(attempt))
            return read_eval(known[-1].data, attempt)
        attempt = NotingJournal(attempt, ReadNotes(attempt, parts.read))
        kept = JournalledRollouts(attempt, "rollouts")
        result = await score_hosted(
            suite,
            client,
            split=entry.role,
            metrics=entry.metrics,
            num_samples=entry.num_samples,
            breakdown_keys=entry.breakdown_keys,
            cluster_key=entry.cluster_key,
            limit=limit,
            concurrency=entry.n_concurrent or CONCURRENCY,
            finished=kept,
            **settings,
        )
        # A score with an error is not kept: the next process asks again, and only for rollouts that are missing.
        if result.error is None:
            attempt.add("final_eval", to_data_without(result, kept), at=0)
        return result

    def _limit(self, entry: BenchmarkEntry) -> int | None:
        return min((limit for limit in (entry.limit, self.max_tasks) if limit is not None), default=None)

    def _attempt(self, entry: BenchmarkEntry, model: HostedModel, asked: dict[str, object]) -> RunJournal:
        """The journal of this question: the unfinished one, as long as the question stays the same."""
        how = {key: value for key, value in plain_settings(entry).items() if key in HOW_ASKED}
        fingerprint = config_hash({"model": plain_settings(model), "how": how, **asked})
        run = f"{self.config.name} model {entry.role}/{entry.label}/{model.label}"
        earlier = None if self.fresh else self.journal.unfinished(run, fingerprint)
        return earlier or self.journal.begin(run, fingerprint)


def write_rollouts(scores: list[ModelScore], file: Path) -> None:
    """What the models answered, a line for each rollout; no file where there is nothing."""
    lines = [
        encode_record(
            {"model": score.model, "split": score.result.split, "eval": score.result.name, **rollout_to_data(rollout)}
        )
        for score in scores
        for rollout in score.result.rollouts
    ]
    if lines:
        with whole_file(file) as handle:
            handle.write(b"".join(lines))
    else:
        file.unlink(missing_ok=True)
