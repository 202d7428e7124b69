"""Many runs: arms, seeds, isolation, conclusion.

In: an `ExperimentConfig`. Out: an `ExperimentResult`, and the same on disk. `evsys run`, `Experiment.run` and
`run_experiment` are this one path. A run that fails, fails alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from evsys_sdk import registry
from evsys_sdk.atomic import write_json
from evsys_sdk.config.document import Document
from evsys_sdk.config.files import load_yaml, parse_config, plain, refuse_shared_names
from evsys_sdk.config.matrix import expanded
from evsys_sdk.config.models import ExperimentConfig, RunConfig
from evsys_sdk.config.names import REHEARSALS, directory_name
from evsys_sdk.config.reading import forget, unread
from evsys_sdk.config.search import settled
from evsys_sdk.config.source import source_of
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, MODEL_ROLLOUTS_FILE
from evsys_sdk.errors import ConfigError, EvsysError, Problem, RunLocked
from evsys_sdk.eval.hypothesis import fingerprint
from evsys_sdk.preflight import deep_problems, ignored_settings
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.callbacks import CallbackList
from evsys_sdk.record.conclusion import Conclusion, ModelScore, conclude
from evsys_sdk.record.experiment_page import PageFacts, write_page
from evsys_sdk.record.journal import Journal, RunJournal
from evsys_sdk.record.run_dir import hold
from evsys_sdk.record.run_record import eval_summary
from evsys_sdk.runner import RunPlan, execute_run
from evsys_sdk.running.baselines import Baselines, write_rollouts
from evsys_sdk.running.budget import Budget, BudgetSpent, begun_before, spent_before
from evsys_sdk.running.interrupts import StopFlag, stop_on_signals
from evsys_sdk.running.launch import Facts, contents_for, facts_of, fork, journal_path, take_up
from evsys_sdk.running.parts import Parts
from evsys_sdk.running.registering import contents, register_end, register_start
from evsys_sdk.running.search import PlanArm, Search
from evsys_sdk.running.search_state import SearchState
from evsys_sdk.running.search_text import search_lines
from evsys_sdk.running.verdicts import judge_experiment

DRY_STEPS = 2
DRY_TASKS = 4
WHAT_RUNS_READ = ("metadata.benchmark", "data_store", "log_store", "leakage")
"""Shared settings that runs look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run it, as opposed to what to run."""

    max_steps: int | None = None
    dry: bool = False
    """A rehearsal of the whole path: two steps, four tasks per evaluation, results under `<output_dir>/dry`."""
    fresh: bool = False
    """Begin every run anew, also those that were finished, or interrupted and could be taken up."""
    fork: bool = False
    """Where the experiment was launched with other settings, run these as a child of it."""
    strict: bool = False
    """Settings that nothing reads are an error."""
    watchers: Sequence[Any] = ()
    """Callbacks of the caller's own, such as the terminal's progress display."""


@dataclass(slots=True, kw_only=True)
class ExperimentResult:
    """What an experiment came to."""

    name: str
    runs: list[RunResult]
    conclusion: Conclusion
    output_dir: Path
    models: list[ModelScore] = field(default_factory=list)
    """API models that were scored beside the arms."""
    budget: dict[str, Any] | None = None
    """What it might spend and what it spent, where there was a budget."""
    search: dict[str, Any] | None = None
    """Trials, values and rungs, where a search decided what the arms are."""
    seconds: float = 0.0
    unread_settings: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What went wrong beside the runs: hooks of callbacks at the experiment's start and end."""

    @property
    def best_arm(self) -> str | None:
        return self.conclusion.best_arm

    @property
    def completed(self) -> bool:
        """Whether every run came to its end, or was left behind by a search."""
        return all(run.status in ("completed", "pruned") for run in self.runs)


class Experiment:
    """One config, ready to run."""

    def __init__(self, config: ExperimentConfig):
        self.config = expanded(config)
        self.ignored: tuple[str, ...] = ()
        """Settings that by the meaning of others will not be looked at."""
        self.conclusion: Conclusion | None = None
        """Set when the runs are done, before callbacks hear of the end."""
        self.search: dict[str, Any] | None = None
        """What a search asked and heard, when it is over."""
        self.trials: list[RunConfig] = []
        """The arms that it came to."""

    @classmethod
    def from_yaml(cls, path: str | Path, *, overrides: Sequence[str] = ()) -> Experiment:
        return cls(load_yaml(path, overrides=overrides))

    def run(self, options: RunOptions | None = None) -> ExperimentResult:
        """Run every arm and seed, write the record, return the result."""
        options = options or RunOptions()
        started = time.monotonic()
        self.check(strict=options.strict)
        base = Path(self.config.output_dir).expanduser()
        output_dir = base / REHEARSALS if options.dry else base
        facts = facts_of(self.config)
        if options.fork:
            self.config, output_dir = fork(self.config, facts, output_dir)
        config = self.config
        self.ignored = tuple(problem.path for problem in ignored_settings(config))
        forget(config)  # looking a config over is not reading it
        _ = config.output_dir  # but for this, which was
        output_dir = _made(output_dir)
        with hold(output_dir / f".{directory_name(config.name)}.lock", f"experiment {config.name!r} in {output_dir}"):
            return self._run(options, output_dir, facts | {"name": config.name}, started)

    def _run(self, options: RunOptions, output_dir: Path, facts: Facts, started: float) -> ExperimentResult:
        config, parts = self.config, Parts()
        callbacks = self._callbacks(parts, options.watchers)
        stop = StopFlag()
        with closing(Journal(journal_path(output_dir, config.name))) as journal:
            line = take_up(journal, config.name, facts, fresh=options.fresh or options.dry)
            limits = (config.budget, config.search.budget if config.search else None)
            budget = Budget.of(*limits, spent=spent_before(journal, line), begun=begun_before(journal, line))
            register_start(config, record_path(output_dir, config.name), facts)
            callbacks.on_experiment_start(self)
            plan = self._planner(output_dir, options, callbacks, stop, journal, budget, facts)
            baselines = self._baselines(options, parts, stop, journal)
            with stop_on_signals(stop), baselines.beside() as models:
                arms = self._arms(plan) if config.search is None else self._search(plan, line, options)
        results = [run for found in arms.values() for run in found]
        metadata = config.metadata
        self.conclusion = conclude(
            arms,
            hypothesis=str(metadata.hypothesis),
            success=metadata.success_metric,
            findings=judge_experiment(_not_pruned(arms), metadata),
            models=models,
            search=search_lines(self.search) if self.search else (),
        )
        result = ExperimentResult(
            name=config.name,
            runs=results,
            conclusion=self.conclusion,
            output_dir=output_dir,
            models=models,
            budget=budget.summary(),
            search=self.search,
        )
        callbacks.on_experiment_end(results)
        result.seconds = time.monotonic() - started
        result.warnings = callbacks.errors_of("")
        self._record(result, parts, options, contents(facts))
        return result

    def check(self, *, strict: bool = False) -> None:
        """Refuse what cannot work before anything is spent."""
        refuse_shared_names(self.config)
        problems = deep_problems(self.config) + (ignored_settings(self.config) if strict else [])
        if problems:
            raise ConfigError(source_of(self.config).label, problems)

    def _callbacks(self, parts: Parts, watchers: Iterable[Any]) -> CallbackList:
        built = [
            (spec.kind, parts.build(registry.callbacks, spec, f"callbacks[{index}]"))
            for index, spec in enumerate(self.config.callbacks)
        ]
        return CallbackList([*built, *((type(watcher).__name__, watcher) for watcher in watchers)])

    def _arms(self, plan: PlanArm) -> dict[str, list[RunResult]]:
        """Every arm with the results of its seeds."""
        arms = [(arm.name, plan(arm, index)) for index, arm in enumerate(self.config.all_runs())]
        found = iter(run_all([run for _, runs in arms for run in runs], workers=self.config.max_concurrent_arms))
        return {name: [next(found) for _ in runs] for name, runs in arms}

    def _search(self, plan: PlanArm, line: RunJournal, options: RunOptions) -> dict[str, list[RunResult]]:
        """The same where a search decides what the arms are."""

        def say(text: str) -> None:
            for tell in [watcher.say for watcher in options.watchers if hasattr(watcher, "say")]:
                tell(text)

        state = SearchState.of(line)
        search = Search(config=self.config, plan=plan, execute=_isolated, state=state, say=say, dry=options.dry)
        search.run()
        arms = search.finished_arms()
        self.search, self.trials = search.summary(), [arm.run for arm in arms]
        return {arm.run.name: arm.results for arm in arms}

    def _planner(
        self,
        output_dir: Path,
        options: RunOptions,
        callbacks: CallbackList,
        stop: StopFlag,
        journal: Journal,
        budget: Budget,
        facts: Facts,
    ) -> PlanArm:
        """What makes an arm, and the place where it stands in the file, into the plans of its runs."""
        steps = [limit for limit in (options.max_steps, DRY_STEPS if options.dry else None) if limit is not None]

        def plan(arm: RunConfig, index: int) -> list[RunPlan]:
            return [
                RunPlan(
                    experiment=self.config,
                    run=run,
                    index=index,
                    run_dir=output_dir / directory_name(run.name),
                    callbacks=callbacks,
                    stop=stop,
                    journal=journal,
                    fresh=options.fresh or options.dry,
                    max_steps=min(steps, default=None),
                    max_tasks=DRY_TASKS if options.dry else None,
                    budget=budget,
                    contents=contents_for(run, facts),
                    ignored=self.ignored,
                )
                for run in seeds_of(arm, repeats=self.config.n_repeats, base_seed=self.config.base_seed)
            ]

        return plan

    def _baselines(self, options: RunOptions, parts: Parts, stop: StopFlag, journal: Journal) -> Baselines:
        tasks = DRY_TASKS if options.dry else None
        return Baselines(
            config=self.config, parts=parts, journal=journal, stop=stop, fresh=options.fresh, max_tasks=tasks
        )

    def _record(self, result: ExperimentResult, parts: Parts, options: RunOptions, hashes: Facts) -> None:
        config = self.config
        facts = {
            "experiment": config.name,
            "description": config.description,
            "version": config.version,
            "parent_experiment_id": config.parent_experiment_id,
            "tags": config.metadata.tags,
            "hypothesis": plain(config.metadata)["hypothesis"] if config.metadata.hypothesis else "",
            "hypothesis_sha256": fingerprint(config.metadata.hypothesis),
            "options": {"max_steps": options.max_steps, "dry": options.dry, "strict": options.strict},
            "config_folder": str(source_of(config).folder),
            "contents": hashes,
            "ts": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        _ = config.imports  # read when extensions were imported, before the notes were cleared
        elsewhere = ("run.", "runs[", *(WHAT_RUNS_READ if any(map(_was_taken_up, result.runs)) else ()))
        top = [path for path in unread(config) if not path.startswith(elsewhere)] if result.completed else []
        own = dict.fromkeys([*top, *parts.unread()] if result.completed else [])
        result.unread_settings = list(
            dict.fromkeys([*own, *(path for run in result.runs for path in run.extras.get("unread_settings", []))])
        )
        settings = plain(config)
        if config.search is not None:
            settings = settled(settings, [plain(run) for run in self.trials])
        summary = {**facts, **summarise(result), "config": settings}
        path = record_path(result.output_dir, config.name)
        try:
            write_rollouts(result.models, path.with_name(f"{directory_name(config.name)}.{MODEL_ROLLOUTS_FILE}"))
            write_json(path, summary)
        except OSError as exc:
            raise EvsysError(f"the experiment's record could not be written to {path}: {exc.strerror}") from exc
        register_end(config, path, summary)
        write_page(PageFacts.of(config, result, directory_name(config.name)))


def record_path(output_dir: Path, name: str) -> Path:
    return output_dir / f"{directory_name(name)}.{EXPERIMENT_RESULT_FILE}"


def _not_pruned(arms: dict[str, list[RunResult]]) -> dict[str, list[RunResult]]:
    """The arms that a search did not leave behind: only they have come to something that can be compared."""
    return {arm: runs for arm, runs in arms.items() if any(run.status != "pruned" for run in runs)}


def _was_taken_up(run: RunResult) -> bool:
    """Whether an earlier process did part of it; what that one read of the shared settings is not known."""
    return bool(run.extras.get("finished_before") or run.extras.get("resumed"))


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise EvsysError(f"output_dir {folder} cannot be used: {exc.strerror}") from exc
    return folder


def seeds_of(arm: RunConfig, *, repeats: int, base_seed: int | None) -> list[RunConfig]:
    """One run per seed; with several seeds each carries its own in the name."""
    first = arm.seed if base_seed is None else base_seed
    if repeats == 1:
        return [arm] if base_seed is None else [BaseModel.model_copy(arm, update={"seed": first}, deep=True)]
    return [
        BaseModel.model_copy(arm, update={"seed": seed, "name": f"{arm.name}__s{seed}"}, deep=True)
        for seed in range(first, first + repeats)
    ]


def run_all(plans: Sequence[RunPlan], *, workers: int) -> list[RunResult]:
    """Results in the order of the plans; runs execute on threads of their own, `workers` at a time."""
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="evsys-run") as pool:
        return list(pool.map(_isolated, plans))


def _isolated(plan: RunPlan) -> RunResult:
    if plan.stop.event.is_set():
        return RunResult(run_id=plan.run_id, status="cancelled", error="not started: the experiment was stopped")
    try:
        return execute_run(plan)
    except BudgetSpent as exc:
        return RunResult(run_id=plan.run_id, status="cancelled", error=f"not started: {exc}")
    except RunLocked as exc:  # the directory is another process's: nothing may be written into it
        return RunResult(run_id=plan.run_id, status="failed", error=str(exc), extras={"run_name": plan.run.name})
    except Exception as exc:
        error = f"the run's record could not be kept: {exc}"
        return RunResult(run_id=plan.run_id, status="failed", error=error, extras={"run_name": plan.run.name})


def summarise(result: ExperimentResult) -> dict[str, Any]:
    """The result as plain data: what `--json` prints and the summary file holds."""
    return {
        "name": result.name,
        "output_dir": str(result.output_dir),
        "seconds": round(result.seconds, 3),
        "best_arm": result.best_arm,
        "conclusion": result.conclusion.text,
        **result.conclusion.findings.data,
        "arms": [asdict(arm) for arm in result.conclusion.arms],
        "models": [
            {"model": score.model, "cost_usd": score.cost_usd, **eval_summary(score.result)} for score in result.models
        ],
        "budget": result.budget,
        "search": result.search,
        "unread_settings": result.unread_settings,
        "warnings": result.warnings,
        "runs": [
            {
                "run_id": run.run_id,
                "status": run.status,
                "metrics": run.metrics,
                "artifacts": run.artifacts,
                "error": run.error,
                "evals": [eval_summary(found) for found in run.extras.get("evals", [])],
                "run_dir": run.extras.get("run_dir"),
            }
            for run in result.runs
        ],
    }


def run_experiment(config: ExperimentConfig | str | Path | dict[str, Any]) -> list[RunResult]:
    """Run a config, its settings as a dict, or the YAML file at a path; the results of its runs, in order."""
    if isinstance(config, str | Path):
        config = load_yaml(config)
    elif isinstance(config, dict):
        config = parse_config(Document(label="config", data=config), folder=Path.cwd())
    return Experiment(config).run().runs


def strict_problems(result: ExperimentResult, config: ExperimentConfig) -> list[Problem]:
    """Under `--strict`: the settings that nothing read, as problems."""
    source = source_of(config)
    return [
        source.located(Problem(path=path, message="unread setting: nothing looked at it during the run"))
        for path in result.unread_settings
    ]
