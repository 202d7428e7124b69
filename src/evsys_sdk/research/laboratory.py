"""The real laboratory: every measurement is an ordinary experiment, with runs `incumbent` and `candidate`.

In: a `RoundPlan`. Out: a `Measurement`, and on disk an experiment with a hypothesis that was registered before the
launch, the incumbent's experiment as its parent, a verdict and tags, which `evsys history` shows like any other. What
was trained before is reused (`run/resume.py`). Test benchmarks are scored in the final experiment alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evsys_sdk import registry
from evsys_sdk.config.metadata import Hypothesis, Prediction
from evsys_sdk.config.schema import BudgetSpec, ExperimentConfig, RunConfig
from evsys_sdk.config.yaml_io import Origin, remember, source_of
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import ConfigError, EvsysError, Problem
from evsys_sdk.experiment.experiment import Experiment, RunOptions
from evsys_sdk.experiment.identity import journal_path
from evsys_sdk.experiment.outcome import ExperimentResult, record_path, seconds_in
from evsys_sdk.experiment.search import number, step_name
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.journal import RunJournal
from evsys_sdk.record.rollouts import StoredJournal
from evsys_sdk.research.legal import FileCheck
from evsys_sdk.research.state import (
    CANDIDATE,
    INCUMBENT,
    ArmMean,
    Measurement,
    RoundPlan,
    TrialCost,
    recipe_key,
)
from evsys_sdk.run.resume import metrics_at
from evsys_sdk.stats.verdict import Verdict

TAG = "research"
"""Of every experiment of a research, beside `research:<name>`."""
FINAL = "final"
"""A further tag, of the experiment that scores the winner: it alone has test scores."""


@dataclass(slots=True, kw_only=True)
class Experiments:
    """Measures recipes as experiments in `folder`, each in its own folder."""

    config: ExperimentConfig
    """The config that the research was started with; its one run is trial 0."""
    folder: Path
    files: FileCheck
    """What is wrong with a recipe before it costs anything."""
    watchers: Sequence[Any] = ()
    _identities: dict[str, str] = field(default_factory=dict)

    def check(self, recipe: JsonObject) -> list[Problem]:
        return self.files(recipe)

    def identity(self, recipe: JsonObject) -> str:
        """By the settings that can change scores, defaults written out."""
        key = recipe_key(recipe)
        if key not in self._identities:
            try:
                given = RunConfig.model_validate({"name": CANDIDATE, **recipe}).model_dump(exclude={"name", "tags"})
                given["algorithm"] = registry.scored_block(registry.algorithms, **given["algorithm"])
                given["backend"] = registry.scored_block(registry.backends, **given["backend"])
                self._identities[key] = config_hash(given)
            except (ValidationError, EvsysError):
                self._identities[key] = key
        return self._identities[key]

    def measure(self, plan: RoundPlan) -> Measurement:
        config = self.config_for(plan)
        experiment = Experiment(config)
        started, before = time.monotonic(), seconds_in(record_path(Path(config.output_dir), config.name)) or 0.0
        try:
            result = experiment.run(RunOptions(watchers=self.watchers, pause_at=plan.until))
        except ConfigError as exc:
            return Measurement(status="failed", why=str(exc), experiment=config.name)
        # The experiment's own clock also has the time of a process that was killed in this round.
        took = max(time.monotonic() - started, result.seconds - before)
        return self._read(plan, config, result, seconds=round(took, 3))

    def config_for(self, plan: RoundPlan) -> ExperimentConfig:
        """The experiment of a plan, as `evsys run` would take it."""
        base, is_final = self.config, plan.purpose == "final"
        name = f"{base.name}-final-{plan.trial:03d}" if is_final else f"{base.name}-r{plan.trial:03d}"
        if not is_final and len(plan.seeds) != base.n_repeats:
            name += f"-s{len(plan.seeds)}"
        candidate, incumbent = arms_of(plan)
        arms = {incumbent: plan.incumbent, candidate: plan.candidate} if plan.incumbent else {candidate: plan.candidate}
        runs = [RunConfig.model_validate({**recipe, "name": arm}) for arm, recipe in arms.items() if recipe is not None]
        metadata, update = base.metadata, dict[str, object]()
        hypothesis: str | Hypothesis = plan.proposal.claim
        if plan.incumbent is not None:
            claim = plan.proposal.claim
            if is_final:
                claim = "What the research kept is better than the config's own run, on seeds that took no part."
            prediction = Prediction(arm=candidate, vs=incumbent)
            confidence = None if is_final else plan.proposal.confidence
            hypothesis = Hypothesis(claim=claim, prediction=prediction, confidence=confidence)
            update["baseline_arm"] = incumbent
        tags = [TAG, f"{TAG}:{base.name}", FINAL if is_final else plan.proposal.operator]
        update |= {"hypothesis": hypothesis, "tags": list(dict.fromkeys([*metadata.tags, *tags]))}
        # What a round scores decides what is kept, so test benchmarks are left to the final experiment.
        if not is_final and not metadata.allow_test_selection:
            update["benchmark"] = [entry for entry in metadata.benchmark if entry.role != "test"]
        # At least a little: a budget of 0 is no legal config, and what is spent ends the research before a round.
        limits = {key: max(1, int(left)) if key in ("steps", "tokens") else max(left, 1e-9)
                  for key, left in plan.limits.items()}  # fmt: skip
        return self._with_runs(
            base,
            runs,
            name=name,
            description=claim_of(plan),
            output_dir=str(self.folder / name),
            parent_experiment_id=plan.parent or base.parent_experiment_id,
            n_repeats=len(plan.seeds),
            base_seed=plan.seeds[0],
            budget=BudgetSpec.model_validate(limits) if limits else None,
            metadata=metadata.model_copy(update=update),
        )

    def _with_runs(self, base: ExperimentConfig, runs: Sequence[RunConfig], **update: object) -> ExperimentConfig:
        """The config with these runs; what belongs to the research or comes after it is left out."""
        single = len(runs) == 1
        update |= {"run": runs[0] if single else None, "runs": None if single else list(runs)}
        update |= {"research": None, "deploy": None}
        config = base.model_copy(update=update)
        # So that the record has what was set and nothing else.
        config.model_fields_set.difference_update([key for key, value in update.items() if value is None])
        prefixes: list[tuple[str | int, ...]] = [("run",)] if single else [("runs", at) for at in range(len(runs))]
        source = source_of(base)
        remember(config, replace(source, lines={}, origins=tuple(Origin(prefix=prefix) for prefix in prefixes)))
        return config

    def _read(
        self, plan: RoundPlan, config: ExperimentConfig, result: ExperimentResult, *, seconds: float
    ) -> Measurement:
        candidate, incumbent = arms_of(plan)
        with closing(StoredJournal(journal_path(Path(config.output_dir), config.name))) as journal:
            cost = replace(_cost_of(result, journal, plan.until), seconds=seconds)
            at_rung = {}
            if plan.until is not None:
                metric = config.metadata.success_metric
                assert metric is not None  # checked when the research began
                for arm in (candidate, incumbent):
                    at_rung[arm] = _mean_at(plan.until, metric.name, _runs_of(result, arm, config.n_repeats), journal)
        runs = _runs_of(result, candidate, config.n_repeats)
        found = Measurement(status="completed", experiment=config.name, cost=cost, conclusion=result.conclusion.text)
        # Before failures: a run that was stopped says nothing about its recipe.
        stopped = next((run for run in result.runs if run.status == "cancelled"), None)
        if stopped is not None:
            return replace(found, status="stopped", why=stopped.error or "interrupted")
        failed = [run for run in runs if run.status == "failed"]
        if failed:
            which = "" if len(runs) == 1 else f"{len(failed)} of {len(runs)} seeds: "
            return replace(found, status="failed", why=f"{which}{failed[0].error}")
        if plan.until is not None:
            return replace(found, candidate=at_rung[candidate], incumbent=at_rung[incumbent])
        verdict = result.conclusion.findings.verdict
        if verdict is None:
            return replace(found, status="failed", why=result.conclusion.findings.why_not or "there is no verdict")
        return replace(
            found,
            candidate=_arm_mean(verdict, candidate),
            incumbent=_arm_mean(verdict, incumbent),
            comparison=verdict.find(candidate, incumbent),
            looks=verdict.looks,
        )


def arms_of(plan: RoundPlan) -> tuple[str, str]:
    """What the candidate and what it is compared with are called in the experiment of a plan."""
    if plan.purpose == "final":
        return "winner", "config"
    return (CANDIDATE, INCUMBENT) if plan.incumbent is not None else (INCUMBENT, "")


def claim_of(plan: RoundPlan) -> str:
    """Trial, changes and claim in a line, for people."""
    if plan.purpose == "final":
        return f"The winner of the research, trial {plan.trial}, on fresh seeds"
    changes = ", ".join(f"{path}: {value}" for path, value in plan.proposal.changes.items())
    return f"Trial {plan.trial} of the research" + (f": {changes}" if changes else "")


def _runs_of(result: ExperimentResult, arm: str, seeds: int) -> list[RunResult]:
    names = {arm} if seeds == 1 else {run.run_name for run in result.runs if run.run_name.startswith(f"{arm}__s")}
    return [run for run in result.runs if run.run_name in names]


def _arm_mean(verdict: Verdict, arm: str) -> ArmMean | None:
    found = next((one for one in verdict.arms if one.arm == arm and one.mean is not None), None)
    if found is None or found.mean is None:
        return None
    winner = verdict.winner if verdict.winner is not None and verdict.winner.arm == arm else None
    expected = winner.expected if winner else None
    return ArmMean(mean=found.mean, low=found.low, high=found.high, n_seeds=found.n_seeds, expected=expected)


def _mean_at(step: int, metric: str, runs: Sequence[RunResult], journal: StoredJournal) -> ArmMean | None:
    """What an arm had scored at a step: the last score or number up to there."""
    values = []
    for run in runs:
        line = journal.latest(run.run_id)
        metrics = metrics_at(line, step) if line is not None else {}
        value = number(metrics, metric, run)
        value = number(metrics, step_name(metric, metrics), run) if value is None else value
        if value is not None:
            values.append(value)
    return ArmMean(mean=sum(values) / len(values), n_seeds=len(values)) if values else None


def _cost_of(result: ExperimentResult, journal: StoredJournal, until: int | None) -> TrialCost:
    """What the runs of this measurement took: not those that were reused, and not the steps up to an earlier rung."""
    cost = TrialCost()
    for run in result.runs:
        line = journal.latest(run.run_id)
        if run.reused_from is None and line is not None:
            after = _last_rung(line, until)
            steps: list[Mapping[str, Any]] = [event.data for event in line.events(after=after, upto=2**62)
                                              if event.kind == "step"]  # fmt: skip
            cost = replace(
                cost,
                steps=cost.steps + len(steps),
                tokens=cost.tokens + int(sum(step["metrics"].get("tokens", 0) for step in steps)),
                usd=cost.usd + sum(rollout.cost_usd for one in run.evals for rollout in one.rollouts),
            )
    return cost


def _last_rung(line: RunJournal, until: int | None) -> int:
    """The last step before `until` at which the run was paused; 0 where it was not."""
    paused = [int(event.key.partition("@")[2]) for event in line.events(upto=2**62)
              if event.kind == "end" and event.key.startswith("pruned@")]  # fmt: skip
    return max((step for step in paused if until is None or step < until), default=0)
