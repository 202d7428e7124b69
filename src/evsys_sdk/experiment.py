"""Many runs: arms, seeds, isolation, conclusion.

In: an `ExperimentConfig`. Out: an `ExperimentResult`, and the same on disk. `evsys run`, `Experiment.run` and
`run_experiment` are this one path. A run that fails, fails alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from evsys_sdk import registry
from evsys_sdk.config.document import Document
from evsys_sdk.config.files import load_yaml, parse_config, plain, refuse_shared_names
from evsys_sdk.config.matrix import expanded
from evsys_sdk.config.models import ExperimentConfig, RunConfig
from evsys_sdk.config.names import REHEARSALS, directory_name
from evsys_sdk.config.reading import forget, note_read
from evsys_sdk.config.search import settled
from evsys_sdk.config.source import source_of
from evsys_sdk.errors import Cancelled, ConfigError, EvsysError, RunLocked
from evsys_sdk.eval.judging import catch_statistics_errors
from evsys_sdk.preflight import deep_problems, ignored_settings
from evsys_sdk.protocols import Launcher, RunResult
from evsys_sdk.record.callbacks import CallbackList
from evsys_sdk.record.conclusion import Conclusion, ModelScore, conclude, conclude_without_verdict
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.journal import Journal, RunJournal
from evsys_sdk.record.run_dir import hold
from evsys_sdk.redaction import learn_from_settings
from evsys_sdk.running.admissions import SUCCESS, Admission, admissions
from evsys_sdk.running.baselines import Baselines
from evsys_sdk.running.budget import Budget, begun_before, spent_before
from evsys_sdk.running.hindsight import admit_hindsight
from evsys_sdk.running.interrupts import StopFlag, stop_on_signals
from evsys_sdk.running.launch import (
    Facts,
    contents_for,
    experiment_id_of,
    facts_of,
    fork,
    journal_path,
    open_journal,
    take_up,
)
from evsys_sdk.running.leakage import forget_benchmarks
from evsys_sdk.running.looks import find_looks
from evsys_sdk.running.metric_checks import with_judged_metrics
from evsys_sdk.running.outcome import ExperimentResult, record_path, seconds_in
from evsys_sdk.running.own_files import described, made, set_aside, sweep_leftovers, write_files
from evsys_sdk.running.parts import Parts
from evsys_sdk.running.places import Places
from evsys_sdk.running.reads import READ, ReadNotes, read_before, shared_reads, shared_unread
from evsys_sdk.running.registering import contents, note_launch, register_start
from evsys_sdk.running.search import Execute, PlanArm, Search
from evsys_sdk.running.search_state import SearchState
from evsys_sdk.running.search_text import search_lines
from evsys_sdk.running.time_spent import last_written, launched_at, seconds_before
from evsys_sdk.running.verdicts import judge_experiment, not_pruned
from evsys_sdk.running.workbench import RunPlan

DRY_STEPS = 2
DRY_TASKS = 4


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
    launched: Callable[[ExperimentConfig, Path], Any] = note_launch
    """Told once the experiment is this process's own, and where its record will be."""


class Experiment:
    """One config, ready to run."""

    def __init__(self, config: ExperimentConfig):
        self.config = expanded(config)
        self.ignored: tuple[str, ...] = ()
        """Settings that by the meaning of others will not be looked at."""
        self.experiment_id: str | None = None
        """Known when it starts; the same in every process that resumes it or runs it again."""
        self.conclusion: Conclusion | None = None
        """Set when the runs are done, before callbacks hear of the end."""
        self.search: dict[str, Any] | None = None
        """What a search asked and heard, when it is over."""
        self.trials: list[RunConfig] = []
        """The arms that it came to."""
        self.admissions: list[Admission] = []
        """How test tasks take part in choosing; known when it starts."""

    @property
    def best_score(self) -> float | None:
        """The success metric of the best arm, over its seeds; None before the end and where no arm has a score."""
        success = self.config.metadata.success_metric
        arms = self.conclusion.arms if self.conclusion else []
        means = {arm.arm: arm.mean for arm in arms if arm.scores}
        if success is None or not means:
            return None
        best = self.conclusion.best_arm if self.conclusion else None
        return means[best] if best in means else (min if success.mode == "min" else max)(means.values())

    @classmethod
    def from_yaml(cls, path: str | Path, *, overrides: Sequence[str] = ()) -> Experiment:
        return cls(load_yaml(path, overrides=overrides))

    def run(self, options: RunOptions | None = None) -> ExperimentResult:
        """Run every arm and seed, write the record, return the result."""
        options = options or RunOptions()
        if options.fresh and options.fork:
            raise EvsysError("fresh starts the experiment over and fork leaves it for a child: choose one of the two")
        started = time.monotonic()
        learn_from_settings(plain(self.config))  # one that was made in Python was not read from a file
        self.check(strict=options.strict)
        self.config = with_judged_metrics(self.config)
        base = Path(self.config.output_dir).expanduser()
        output_dir = base / REHEARSALS if options.dry else base
        facts = facts_of(self.config)
        if options.fork:
            self.config, output_dir = fork(self.config, facts, output_dir)
        config = self.config
        self.ignored = tuple(problem.path for problem in ignored_settings(config))
        self.admissions = admissions(config)
        forget(config)  # looking a config over is not reading it
        _ = config.output_dir  # but for this, which was
        output_dir = made(output_dir)
        lock = output_dir / f".{directory_name(config.name)}.lock"
        with hold(lock, f"experiment {config.name!r} in {output_dir}"), stop_on_signals(StopFlag()) as stop:
            sweep_leftovers(output_dir, config.name)
            forget_benchmarks(config)
            return self._run(options, output_dir, facts | {"name": config.name}, started, stop)

    def _run(
        self, options: RunOptions, output_dir: Path, facts: Facts, started: float, stop: StopFlag
    ) -> ExperimentResult:
        config, parts = self.config, Parts()
        callbacks = self._callbacks(parts, options.watchers)
        fresh = options.fresh or options.dry
        if fresh:  # before the journal says so: a kill in between loses nothing
            set_aside(output_dir, config.name)
        written = last_written(journal_path(output_dir, config.name))
        with closing(open_journal(journal_path(output_dir, config.name), fresh=fresh)) as journal:
            line = take_up(journal, config.name, facts, fresh=fresh)
            self.experiment_id = experiment_id_of(line)
            callbacks.members.append((READ, ReadNotes(line, lambda: [*shared_reads(config), *parts.read()])))
            started -= seconds_before(line, written)
            limits = (config.budget, config.search.budget if config.search else None)
            spent = spent_before(journal, line, seconds=time.monotonic() - started)
            budget = Budget.of(*limits, spent=spent, begun=begun_before(journal, line))
            register_start(config, record_path(output_dir, config.name), facts)
            options.launched(config, record_path(output_dir, config.name))
            callbacks.on_experiment_start(self)
            plan = self._planner(output_dir, options, callbacks, stop, line, budget, facts)
            baselines = self._baselines(options, parts, stop, journal)
            launcher = parts.build(registry.launchers, config.launcher, "launcher")
            with closing(launcher), baselines.beside() as models:
                execute = partial(_isolated, launcher=launcher)
                arms = self._search(plan, execute, line, options) if config.search else self._arms(plan, execute)
            self.conclusion = self._conclude(arms, models, line, output_dir)
            known = read_before(line)
        results = [run for found in arms.values() for run in found]
        result = ExperimentResult(
            name=config.name,
            runs=results,
            conclusion=self.conclusion,
            output_dir=output_dir,
            models=models,
            budget=budget.summary(),
            search=self.search,
            admissions=[asdict(one) for one in self.admissions],
        )
        callbacks.on_experiment_end(results)
        is_retold = all(run.extras.get("finished_before") for run in results)
        before = seconds_in(record_path(output_dir, config.name)) if is_retold else None
        result.seconds = time.monotonic() - started if before is None else before
        result.warnings = [*callbacks.errors_of(""), *(one.text for one in self.admissions if one.shared)]
        self._record(result, options, contents(facts), partial(self._unread, parts, known))
        return result

    def _conclude(
        self, arms: dict[str, list[RunResult]], models: list[ModelScore], line: RunJournal, output_dir: Path
    ) -> Conclusion:
        """What the runs show; the verdict goes into the journal, each that was come to once."""
        metadata, search = self.config.metadata, self.config.search
        # A grid is a matrix written otherwise; of trials that were drawn, none is the baseline by coming first.
        drawn = search is not None and search.kind != "grid"
        try:
            with catch_statistics_errors():
                name, success = self.config.name, metadata.success_metric
                parent = self.config.parent_experiment_id
                looks = find_looks(arms, success.name if success else None, output_dir, name, parent)
                findings = judge_experiment(not_pruned(arms), metadata, searched=drawn, name=name, looks=looks.count)
                findings = replace(
                    findings, lines=[*findings.lines, *looks.lines], data={**findings.data, "looks": looks.as_dict()}
                )
                conclusion = conclude(
                    arms,
                    hypothesis=str(metadata.hypothesis),
                    success=metadata.success_metric,
                    findings=admit_hindsight(findings, arms, launched_at(line)),
                    models=models,
                    search=search_lines(self.search) if self.search else (),
                    admitted=self._admitted(),
                )
        except Cancelled:
            raise
        except EvsysError as exc:  # the runs are done, and their record is worth more than its summary
            conclusion = conclude_without_verdict(arms, str(exc))
        verdict = {"best_arm": conclusion.best_arm, "text": conclusion.text, **conclusion.findings.data}
        line.add("verdict", verdict, at=0, key=config_hash(verdict))
        return conclusion

    def _admitted(self) -> list[str]:
        """How test tasks took part; of arms that were picked by test scores the verdict speaks itself."""
        if self.admissions:
            _ = self.config.metadata.allow_test_selection  # which let it be so
        return [one.text for one in self.admissions if one.by != SUCCESS]

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

    def _arms(self, plan: PlanArm, execute: Execute) -> dict[str, list[RunResult]]:
        """Every arm with the results of its seeds; runs execute on threads of their own, so many at a time."""
        arms = [(arm.name, plan(arm, index)) for index, arm in enumerate(self.config.all_runs())]
        with ThreadPoolExecutor(self.config.max_concurrent_arms, thread_name_prefix="evsys-run") as pool:
            found = pool.map(execute, [run for _, runs in arms for run in runs])
            return {name: [next(found) for _ in runs] for name, runs in arms}

    def _search(
        self, plan: PlanArm, execute: Execute, line: RunJournal, options: RunOptions
    ) -> dict[str, list[RunResult]]:
        """The same where a search decides what the arms are."""

        def say(text: str) -> None:
            for tell in [watcher.say for watcher in options.watchers if hasattr(watcher, "say")]:
                tell(text)

        state = SearchState.of(line)
        search = Search(config=self.config, plan=plan, execute=execute, state=state, say=say, dry=options.dry)
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
        line: RunJournal,
        budget: Budget,
        facts: Facts,
    ) -> PlanArm:
        """What makes an arm, and the place where it stands in the file, into the plans of its runs."""
        steps = [limit for limit in (options.max_steps, DRY_STEPS if options.dry else None) if limit is not None]
        places = Places(output_dir, self.config.name)

        def plan(arm: RunConfig, index: int) -> list[RunPlan]:
            runs = seeds_of(arm, repeats=self.config.n_repeats, base_seed=self.config.base_seed)
            line.add("arm", {"runs": [run.name for run in runs], "settings": plain(arm)}, at=0, key=arm.name)
            for run in runs:
                budget.expect(f"{self.config.name}/{run.name}")
            return [
                RunPlan(
                    experiment=self.config,
                    run=run,
                    index=index,
                    run_dir=places.of(run.name),
                    callbacks=callbacks,
                    stop=stop,
                    journal=line.journal,
                    fresh=options.fresh or options.dry,
                    max_steps=min(steps, default=None),
                    max_tasks=DRY_TASKS if options.dry else None,
                    budget=budget,
                    contents=contents_for(run, facts),
                    ignored=self.ignored,
                )
                for run in runs
            ]

        return plan

    def _baselines(self, options: RunOptions, parts: Parts, stop: StopFlag, journal: Journal) -> Baselines:
        tasks = DRY_TASKS if options.dry else None
        return Baselines(
            config=self.config, parts=parts, journal=journal, stop=stop, fresh=options.fresh, max_tasks=tasks
        )

    def _unread(self, parts: Parts, known: Collection[str]) -> Iterator[str]:
        """What runs share and nothing has read; `known` is what runs of all processes did. Without any of that, no run
        was executed here (all were taken over), and nobody can say."""
        if known:
            note_read(self.config, known)
            parts.note_read(known)
            yield from shared_unread(self.config)
            yield from parts.unread()

    def _record(
        self, result: ExperimentResult, options: RunOptions, hashes: Facts, look_over: Callable[[], Iterable[str]]
    ) -> None:
        """Leave the experiment's own files. What they tell of the config counts as read, so it comes first."""
        _ = self.config.imports  # read when extensions were imported, before the notes were cleared
        asked = {"max_steps": options.max_steps, "dry": options.dry, "strict": options.strict}
        about = {**described(self.config), "options": asked, "contents": hashes}
        shared = look_over() if result.completed else ()
        of_runs = (path for run in result.runs for path in run.extras.get("unread_settings", []))
        result.unread_settings = list(dict.fromkeys([*shared, *of_runs]))
        settings = plain(self.config)
        if self.config.search is not None:
            settings = settled(settings, [plain(run) for run in self.trials])
        write_files(self.config, result, about, settings)


def seeds_of(arm: RunConfig, *, repeats: int, base_seed: int | None) -> list[RunConfig]:
    """One run per seed; with several seeds each carries its own in the name."""
    first = arm.seed if base_seed is None else base_seed
    if repeats == 1:
        return [arm] if base_seed is None else [BaseModel.model_copy(arm, update={"seed": first}, deep=True)]
    return [
        BaseModel.model_copy(arm, update={"seed": seed, "name": f"{arm.name}__s{seed}"}, deep=True)
        for seed in range(first, first + repeats)
    ]


def _isolated(plan: RunPlan, launcher: Launcher) -> RunResult:
    """What came of a run, whatever happened to it."""
    try:
        with plan.budget.turn(plan.run_id):
            if plan.stop.event.is_set():
                raise Cancelled("the experiment was stopped")
            return launcher.execute(plan)
    except Cancelled as exc:
        return plan.came_to_nothing("cancelled", f"not started: {exc}")
    except RunLocked as exc:  # the directory is another process's: nothing may be written into it
        return plan.came_to_nothing("failed", str(exc))
    except Exception as exc:
        return plan.came_to_nothing("failed", f"the run's record could not be kept: {exc}")


def run_experiment(
    config: ExperimentConfig | str | Path | dict[str, Any], *, fresh: bool = False, fork: bool = False
) -> list[RunResult]:
    """Run a config, its settings as a dict, or the YAML file at a path; the results of its runs, in order.

    `fresh` starts every run over, also completed and interrupted ones. `fork` runs changed settings as a child of the
    experiment that was launched under this name."""
    if isinstance(config, str | Path):
        config = load_yaml(config)
    elif isinstance(config, dict):
        config = parse_config(Document(label="config", data=config), folder=Path.cwd())
    return Experiment(config).run(RunOptions(fresh=fresh, fork=fork)).runs
