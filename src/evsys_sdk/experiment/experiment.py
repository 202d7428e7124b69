"""Many runs: load inputs, check, claim, plan, launch or search, conclude, write.

In: an `ExperimentConfig`. Out: an `ExperimentResult`, and the same on disk. `evsys run`, `Experiment.run` and
`run_experiment` are this one path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.checks.metrics import with_judged_metrics
from evsys_sdk.checks.preflight import deep_problems, ignored_settings
from evsys_sdk.checks.test_selection import SUCCESS, SelectionByTest, find_test_selections
from evsys_sdk.config.base import DeploySpec
from evsys_sdk.config.load import load_yaml, parse_config, plain, refuse_shared_names
from evsys_sdk.config.schema import ExperimentConfig, RunConfig
from evsys_sdk.config.sweep import REHEARSALS, directory_name, expand_sweep, replace_search
from evsys_sdk.config.yaml_io import Document, source_of
from evsys_sdk.errors import Cancelled, ConfigError, EvsysError, RunLocked
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.experiment.baselines import Baselines
from evsys_sdk.experiment.deployment import deploy_best
from evsys_sdk.experiment.identity import (
    Facts,
    contents_for,
    experiment_id_of,
    fork,
    identity_facts,
    journal_path,
    open_journal,
    resume_experiment,
)
from evsys_sdk.experiment.looks import find_looks, question_of, spent_budgets
from evsys_sdk.experiment.model_card import SHIPPED
from evsys_sdk.experiment.outcome import (
    ExperimentResult,
    describe,
    make_output_dir,
    record_path,
    seconds_in,
    set_aside,
    summarise,
    sweep_leftovers,
    write_files,
)
from evsys_sdk.experiment.registration import contents, note_launch, register_start
from evsys_sdk.experiment.search import Search, SearchState
from evsys_sdk.experiment.verdict import judge_experiment, not_pruned, note_post_hoc
from evsys_sdk.protocols import Launcher, RunResult
from evsys_sdk.record.callbacks import CallbackList
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.journal import RunJournal
from evsys_sdk.record.layout import RunFolders, hold
from evsys_sdk.redaction import learn_from_settings
from evsys_sdk.report.conclusion import Conclusion, ModelScore, conclude, conclude_without_verdict
from evsys_sdk.run.budget import Budget, begun_before, spent_before
from evsys_sdk.run.plan import (
    READ,
    ExperimentInputs,
    ExtensionFactory,
    ReadNotes,
    RunPlan,
    read_before,
)
from evsys_sdk.run.status import last_written, launched_at, seconds_before
from evsys_sdk.run.stop import StopFlag, stop_on_signals
from evsys_sdk.stats.judge import catch_statistics_errors

DRY_STEPS = 2
DRY_TASKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run it, as opposed to what to run."""

    max_steps: int | None = None
    dry: bool = False
    """A rehearsal of the whole path: two steps, four tasks per evaluation, results under `<output_dir>/dry`."""
    fresh: bool = False
    """Start every run over, also completed and interrupted ones."""
    fork: bool = False
    """Where the experiment was launched with other settings, run these as a child of it."""
    strict: bool = False
    """Settings that nothing reads are an error."""
    pause_at: int | None = None
    """Stop every run after this step, with status `pruned`; without it, the same experiment resumes them exactly."""
    watchers: Sequence[Any] = ()
    """Callbacks of the caller's own, such as the terminal's progress display."""
    launched: Callable[[ExperimentConfig, Path], object] = note_launch
    """Called when this process has the experiment, with the path of its record."""

    @property
    def starts_over(self) -> bool:
        """A rehearsal resumes nothing either."""
        return self.fresh or self.dry


Arms = dict[str, list[RunResult]]
"""Arm -> the results of its seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """An experiment that this process has: what its runs share."""

    options: RunOptions
    inputs: ExperimentInputs
    facts: Facts
    output_dir: Path
    folders: RunFolders
    stop: StopFlag
    extensions: ExtensionFactory
    callbacks: CallbackList
    line: RunJournal
    """The experiment's own events in its journal."""
    budget: Budget
    started: float
    """By the monotonic clock, earlier by what earlier processes took."""


class Experiment:
    """One config, ready to run."""

    def __init__(self, config: ExperimentConfig):
        self.config = expand_sweep(config)
        self.ignored: tuple[str, ...] = ()
        """Settings that by the meaning of others will not be looked at."""
        self.experiment_id: str | None = None
        """Known when it starts; the same in every process that resumes it or runs it again."""
        self.conclusion: Conclusion | None = None
        """Set when the runs are done, before callbacks hear of the end."""
        self.search: dict[str, Any] | None = None
        """Trials and values of a search, when it is over."""
        self.trials: list[RunConfig] = []
        """The arms of a search."""
        self.test_selection: list[SelectionByTest] = []
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
        return means[best] if best in means else (min if success.direction == "min" else max)(means.values())

    @classmethod
    def from_yaml(cls, path: str | Path, *, overrides: Sequence[str] = ()) -> Experiment:
        return cls(load_yaml(path, overrides=overrides))

    def run(self, options: RunOptions | None = None) -> ExperimentResult:
        """Run every arm and seed, write the record, return the result."""
        options, started = options or RunOptions(), time.monotonic()
        if options.fresh and options.fork:
            raise EvsysError("fresh starts the experiment over and fork leaves it for a child: choose one of the two")
        learn_from_settings(plain(self.config))  # secrets of a config that was made in Python and not read from a file
        inputs = ExperimentInputs(self.config)
        self.check(strict=options.strict, benchmarks=inputs.benchmarks)
        self.config = with_judged_metrics(self.config)
        facts = identity_facts(self.config, inputs.benchmarks)
        output_dir = Path(self.config.output_dir).expanduser() / (REHEARSALS if options.dry else "")
        if options.fork:
            self.config, output_dir = fork(self.config, facts, output_dir)
        config = self.config
        self.ignored = tuple(problem.path for problem in ignored_settings(config))
        self.test_selection = find_test_selections(config, inputs.benchmarks)
        # After the fork, which gives a child its own name and folder.
        output_dir, facts = make_output_dir(output_dir), facts | {"name": config.name}
        lock = output_dir / f".{directory_name(config.name)}.lock"
        with hold(lock, f"experiment {config.name!r} in {output_dir}"), stop_on_signals(StopFlag()) as stop:
            sweep_leftovers(output_dir, config.name)
            if options.starts_over:  # before the journal says so: a kill in between loses nothing
                set_aside(output_dir, config.name)
            with self._launch(options, inputs, facts, output_dir, stop, started) as launch:
                arms, models = self._execute(launch)
                self.conclusion = self._conclude(launch, arms, models)
                # While the journal is open: `_write` runs when it is closed.
                known = read_before(launch.line)
            return self._write(launch, arms, models, known)

    def check(self, *, strict: bool = False, benchmarks: BenchmarkLoader | None = None) -> None:
        """Refuse what cannot work before anything is spent."""
        refuse_shared_names(self.config)
        problems = deep_problems(self.config, benchmarks=benchmarks) + (ignored_settings(self.config) if strict else [])
        if problems:
            raise ConfigError(source_of(self.config).label, problems)

    @contextmanager
    def _launch(
        self,
        options: RunOptions,
        inputs: ExperimentInputs,
        facts: Facts,
        output_dir: Path,
        stop: StopFlag,
        started: float,
    ) -> Iterator[Launch]:
        """Open the journal, resume or begin the experiment in it, register the process, call `on_experiment_start`."""
        config, extensions = self.config, ExtensionFactory()
        callbacks = CallbackList(
            [
                *(
                    (spec.kind, extensions.build(registry.callbacks, spec, f"callbacks[{index}]"))
                    for index, spec in enumerate(config.callbacks)
                ),
                *((type(watcher).__name__, watcher) for watcher in options.watchers),
            ]
        )
        path, record = journal_path(output_dir, config.name), record_path(output_dir, config.name)
        # Before this process writes to the journal: the last write is then that of the process before, and ends its
        # time.
        written = last_written(path)
        with closing(open_journal(path, fresh=options.starts_over)) as journal:
            line = resume_experiment(journal, config.name, facts, fresh=options.starts_over)
            self.experiment_id = experiment_id_of(line)
            # `callbacks` itself is noted with their params, so that it is known that a run called them.
            callbacks.members.append((READ, ReadNotes(line, lambda: ["callbacks", *extensions.read()])))
            started -= seconds_before(line, written)
            limits = (config.budget, config.search.budget if config.search else None)
            spent = spent_before(journal, line, seconds=time.monotonic() - started)
            budget = Budget.of(*limits, spent=spent, begun=begun_before(journal, line))
            register_start(config, record, facts)
            options.launched(config, record)
            callbacks.on_experiment_start(self)
            yield Launch(
                options=options,
                inputs=inputs,
                facts=facts,
                output_dir=output_dir,
                folders=RunFolders(output_dir, config.name),
                stop=stop,
                extensions=extensions,
                callbacks=callbacks,
                line=line,
                budget=budget,
                started=started,
            )

    def _execute(self, launch: Launch) -> tuple[Arms, list[ModelScore]]:
        """The results of every arm's seeds, and of the hosted models that are scored beside them."""
        config, options = self.config, launch.options
        baselines = Baselines(
            config=config,
            parts=launch.extensions,
            journal=launch.line.journal,
            stop=launch.stop,
            benchmarks=launch.inputs.benchmarks,
            fresh=options.fresh,
            max_tasks=DRY_TASKS if options.dry else None,
        )
        launcher: Launcher = launch.extensions.build(registry.launchers, config.launcher, "launcher")
        plan, execute = partial(self._plan, launch), partial(execute_isolated, launcher=launcher)
        with closing(launcher), baselines.beside() as models:
            if config.search is None:
                planned = [(arm.name, plan(arm, index)) for index, arm in enumerate(config.all_runs())]
                with ThreadPoolExecutor(config.max_concurrent_arms, thread_name_prefix="evsys-run") as pool:
                    # `map` yields in the order of the plans, whichever run ends first; the next line counts on that.
                    results = pool.map(execute, [run for _, runs in planned for run in runs])
                    return {name: [next(results) for _ in runs] for name, runs in planned}, models

            def say(text: str) -> None:
                for watcher in options.watchers:
                    if hasattr(watcher, "say"):
                        watcher.say(text)

            state = SearchState.of(launch.line)
            search = Search(config=config, plan=plan, execute=execute, state=state, say=say, dry=options.dry)
            search.run()
            arms = search.finished_arms()
            self.search, self.trials = search.summary(), [arm.run for arm in arms]
            return {arm.run.name: arm.results for arm in arms}, models

    def _plan(self, launch: Launch, arm: RunConfig, index: int) -> list[RunPlan]:
        """The runs of an arm, one per seed; `index` is the arm's place in the file."""
        config, options = self.config, launch.options
        steps = [limit for limit in (options.max_steps, DRY_STEPS if options.dry else None) if limit is not None]
        runs = seeds_of(arm, repeats=config.n_repeats, base_seed=config.base_seed)
        launch.line.add("arm", {"runs": [run.name for run in runs], "settings": plain(arm)}, at=0, key=arm.name)
        for run in runs:
            launch.budget.expect(f"{config.name}/{run.name}")
        return [
            RunPlan(
                experiment=config,
                run=run,
                index=index,
                run_dir=launch.folders.of(run.name),
                callbacks=launch.callbacks,
                stop=launch.stop,
                journal=launch.line.journal,
                inputs=launch.inputs,
                fresh=options.starts_over,
                max_steps=min(steps, default=None),
                max_tasks=DRY_TASKS if options.dry else None,
                budget=launch.budget,
                contents=contents_for(run, launch.facts),
                ignored=self.ignored,
                pause_at=options.pause_at,
            )
            for run in runs
        ]

    def _conclude(self, launch: Launch, arms: Arms, models: list[ModelScore]) -> Conclusion:
        """What the runs show. Each verdict goes into the journal once."""
        config, metadata, search = self.config, self.config.metadata, self.config.search
        # A grid is a matrix written otherwise; of trials that were drawn, none is the baseline by coming first.
        drawn = search is not None and search.kind != "grid"
        metric = metadata.success_metric.name if metadata.success_metric else None
        try:
            with catch_statistics_errors():
                max_steps, benchmarks = launch.options.max_steps, launch.inputs.benchmarks
                question = question_of(config, arms, launch.facts, benchmarks, max_steps=max_steps)
                looks = find_looks(arms, metric, launch.output_dir, config, question)
                findings = judge_experiment(
                    not_pruned(arms), metadata, searched=drawn, name=config.name, looks=looks.count
                )
                # Where nothing was compared, it does not matter how often.
                is_compared = findings.verdict is not None and findings.verdict.has_comparisons
                recorded = looks.to_record()
                lines = [*recorded.warnings, *findings.lines, *looks.lines] if is_compared else findings.lines
                findings = replace(findings, lines=lines, looks=recorded)
                conclusion = conclude(
                    arms,
                    hypothesis=str(metadata.hypothesis),
                    success=metadata.success_metric,
                    findings=note_post_hoc(findings, arms, launched_at(launch.line)),
                    models=models,
                    search=self.search,
                    # Of arms that were picked by test scores the verdict speaks itself.
                    admitted=[one.text for one in self.test_selection if one.by != SUCCESS],
                )
        except Cancelled:
            raise
        except EvsysError as exc:  # the runs are done, and their record is worth more than its summary
            conclusion = conclude_without_verdict(arms, str(exc))
        verdict = {"best_arm": conclusion.best_arm, "text": conclusion.text, **conclusion.findings.as_dict()}
        launch.line.add("verdict", verdict, at=0, key=config_hash(verdict))
        return conclusion

    def _write(self, launch: Launch, arms: Arms, models: list[ModelScore], known: Collection[str]) -> ExperimentResult:
        """Call `on_experiment_end` and leave the experiment's own files. `known`: the settings that runs of all
        processes have read."""
        assert self.conclusion is not None
        config, options, output_dir = self.config, launch.options, launch.output_dir
        result = ExperimentResult(
            name=config.name,
            runs=[run for runs in arms.values() for run in runs],
            conclusion=self.conclusion,
            output_dir=output_dir,
            models=models,
            budget=launch.budget.summary(),
            search=self.search,
            test_selection=[asdict(one) for one in self.test_selection],
        )
        launch.callbacks.on_experiment_end(result.runs)
        # Where nothing was run, the record keeps the time that the experiment once took.
        is_reused = all(run.finished_before for run in result.runs)
        before = seconds_in(record_path(output_dir, config.name)) if is_reused else None
        result.seconds = time.monotonic() - launch.started if before is None else before
        result.warnings = [
            *launch.callbacks.errors_of(""),
            *(one.text for one in self.test_selection if one.shared),
        ]
        flags = {"max_steps": options.max_steps, "dry": options.dry, "strict": options.strict}
        shared: list[str] = []
        # Where no run called the callbacks (all runs were reused), what they do not read is not known.
        if result.completed and known:
            launch.extensions.note_read(known)
            shared = list(launch.extensions.unread())
        of_runs = (path for run in result.runs for path in run.unread_settings)
        result.unread_settings = list(dict.fromkeys([*shared, *of_runs]))
        settings = plain(config)
        if config.search is not None:
            settings = replace_search(settings, [plain(run) for run in self.trials])
        about = describe(config, flags, contents(launch.facts), settings)
        write_files(config, result, about)
        # The record of this experiment counts too, and is in the history from here on.
        if spent := spent_budgets(config, output_dir):
            self.conclusion = replace(self.conclusion, text="\n".join([self.conclusion.text, *spent]))
            result.conclusion = self.conclusion
            write_files(config, result, about)
        # After the record is on disk: a target that hangs or a kill costs the deployment and nothing else.
        if config.deploy is not None and not options.dry:
            self.conclusion = result.conclusion = self._deploy(result, about, config.deploy)
            write_files(config, result, about)
        launch.callbacks.record_written(record_path(output_dir, config.name))
        return result

    def _deploy(self, result: ExperimentResult, about: dict[str, object], spec: DeploySpec) -> Conclusion:
        """The conclusion, with what came of the deployment of the best arm."""
        record = summarise(result, about)
        if record.options.max_steps is not None:
            line = f"{SHIPPED}Not deployed to {spec.kind}: --steps cut the runs to {record.options.max_steps} steps."
        else:
            line = deploy_best(record, record_path(result.output_dir, result.name), spec)
        return replace(result.conclusion, text=f"{result.conclusion.text}\n{line}")


def seeds_of(arm: RunConfig, *, repeats: int, base_seed: int | None) -> list[RunConfig]:
    """One run per seed; with several seeds each carries its own in the name."""
    first = arm.seed if base_seed is None else base_seed
    if repeats == 1:
        return [arm] if base_seed is None else [arm.model_copy(update={"seed": first}, deep=True)]
    return [
        arm.model_copy(update={"seed": seed, "name": f"{arm.name}__s{seed}"}, deep=True)
        for seed in range(first, first + repeats)
    ]


def execute_isolated(plan: RunPlan, launcher: Launcher) -> RunResult:
    """The result of a run, whatever happens to it: a run that fails, fails alone."""
    try:
        with plan.budget.turn(plan.run_id):
            if plan.stop.event.is_set():
                raise Cancelled("the experiment was stopped")
            return launcher.execute(plan)
    except Cancelled as exc:
        return plan.failed_result("cancelled", f"not started: {exc}")
    except RunLocked as exc:  # the directory is another process's: nothing may be written into it
        return plan.failed_result("failed", str(exc))
    except Exception as exc:
        return plan.failed_result("failed", f"the run's record could not be kept: {exc}")


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
