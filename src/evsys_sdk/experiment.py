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
from evsys_sdk.config.source import source_of
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, JOURNAL_FILE
from evsys_sdk.errors import ConfigError, EvsysError, Problem, RunLocked
from evsys_sdk.preflight import deep_problems, ignored_settings
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.callbacks import CallbackList
from evsys_sdk.record.conclusion import Conclusion, conclude
from evsys_sdk.record.journal import Journal
from evsys_sdk.record.run_dir import hold
from evsys_sdk.record.run_record import eval_summary
from evsys_sdk.runner import RunPlan, execute_run
from evsys_sdk.running.interrupts import StopFlag, stop_on_signals
from evsys_sdk.running.parts import Parts

DRY_STEPS = 2
DRY_TASKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run it, as opposed to what to run."""

    max_steps: int | None = None
    dry: bool = False
    """A rehearsal of the whole path: two steps, four tasks per evaluation, results under `<output_dir>/dry`."""
    fresh: bool = False
    """Begin every run anew, also those that were interrupted and could be taken up."""
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
    seconds: float = 0.0
    unread_settings: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What went wrong beside the runs: hooks of callbacks at the experiment's start and end."""

    @property
    def best_arm(self) -> str | None:
        return self.conclusion.best_arm

    @property
    def completed(self) -> bool:
        return all(run.status == "completed" for run in self.runs)


class Experiment:
    """One config, ready to run."""

    def __init__(self, config: ExperimentConfig):
        self.config = expanded(config)
        self.ignored: tuple[str, ...] = ()
        """Settings that by the meaning of others will not be looked at."""
        self.conclusion: Conclusion | None = None
        """Set when the runs are done, before callbacks hear of the end."""

    @classmethod
    def from_yaml(cls, path: str | Path, *, overrides: Sequence[str] = ()) -> Experiment:
        return cls(load_yaml(path, overrides=overrides))

    def run(self, options: RunOptions | None = None) -> ExperimentResult:
        """Run every arm and seed, write the record, return the result."""
        options = options or RunOptions()
        started = time.monotonic()
        self.check(strict=options.strict)
        config = self.config
        self.ignored = tuple(problem.path for problem in ignored_settings(config))
        forget(config)  # looking a config over is not reading it
        base = Path(config.output_dir).expanduser()
        output_dir = _made(base / REHEARSALS if options.dry else base)
        with hold(output_dir / f".{directory_name(config.name)}.lock", f"experiment {config.name!r} in {output_dir}"):
            return self._run(options, output_dir, started)

    def _run(self, options: RunOptions, output_dir: Path, started: float) -> ExperimentResult:
        config, parts = self.config, Parts()
        callbacks = self._callbacks(parts, options.watchers)
        stop = StopFlag()
        callbacks.on_experiment_start(self)
        with closing(Journal(output_dir / f"{directory_name(config.name)}.{JOURNAL_FILE}")) as journal:
            plans = self._plans(output_dir, options, callbacks, stop, journal)
            with stop_on_signals(stop):
                results = run_all([plan for _, plan in plans], workers=config.max_concurrent_arms)
        arms: dict[str, list[RunResult]] = {}
        for (arm, _), found in zip(plans, results, strict=True):
            arms.setdefault(arm, []).append(found)
        self.conclusion = conclude(arms, hypothesis=config.metadata.hypothesis, success=config.metadata.success_metric)
        result = ExperimentResult(name=config.name, runs=results, conclusion=self.conclusion, output_dir=output_dir)
        callbacks.on_experiment_end(results)
        result.seconds = time.monotonic() - started
        result.warnings = callbacks.errors_of("")
        self._record(result, parts, options)
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

    def _plans(
        self, output_dir: Path, options: RunOptions, callbacks: CallbackList, stop: StopFlag, journal: Journal
    ) -> list[tuple[str, RunPlan]]:
        steps = [limit for limit in (options.max_steps, DRY_STEPS if options.dry else None) if limit is not None]
        return [
            (
                arm.name,
                RunPlan(
                    experiment=self.config,
                    run=run,
                    index=index,
                    run_dir=output_dir / directory_name(run.name),
                    callbacks=callbacks,
                    stop=stop,
                    journal=journal,
                    fresh=options.fresh,
                    max_steps=min(steps, default=None),
                    max_tasks=DRY_TASKS if options.dry else None,
                    ignored=self.ignored,
                ),
            )
            for index, arm in enumerate(self.config.all_runs())
            for run in seeds_of(arm, repeats=self.config.n_repeats, base_seed=self.config.base_seed)
        ]

    def _record(self, result: ExperimentResult, parts: Parts, options: RunOptions) -> None:
        config = self.config
        facts = {
            "experiment": config.name,
            "description": config.description,
            "version": config.version,
            "parent_experiment_id": config.parent_experiment_id,
            "tags": config.metadata.tags,
            "hypothesis": config.metadata.hypothesis,
            "options": {"max_steps": options.max_steps, "dry": options.dry, "strict": options.strict},
        }
        _ = config.imports  # read when extensions were imported, before the notes were cleared
        top = [path for path in unread(config) if not path.startswith(("run.", "runs["))] if result.completed else []
        own = dict.fromkeys([*top, *parts.unread()] if result.completed else [])
        result.unread_settings = list(
            dict.fromkeys([*own, *(path for run in result.runs for path in run.extras.get("unread_settings", []))])
        )
        summary = {**facts, **summarise(result), "config": plain(config)}
        path = result.output_dir / f"{directory_name(config.name)}.{EXPERIMENT_RESULT_FILE}"
        try:
            write_json(path, summary)
        except OSError as exc:
            raise EvsysError(f"the experiment's record could not be written to {path}: {exc.strerror}") from exc


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
        "arms": [asdict(arm) for arm in result.conclusion.arms],
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
