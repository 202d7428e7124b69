"""A research from its config: check everything, then run the loop over real experiments.

In: a YAML file and what the command line adds. Out: a `ResearchReport`, and on disk `<output_dir>/<name>.research/`:
the journal and a folder per experiment. The same command resumes it; with other settings it is refused, as an
experiment is. Goal, budget and patience may change: they only say when it ends.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.checks.metrics import keys_of, why_no_score, with_judged_metrics
from evsys_sdk.checks.preflight import deep_problems
from evsys_sdk.config.load import load_yaml, plain
from evsys_sdk.config.project import import_extensions, project_root, search_folders
from evsys_sdk.config.research import ResearchBudget, ResearchSpec
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.sweep import directory_name
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import ConfigError, EvsysError, Problem, SettingsChanged
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.experiment.identity import SHOWN, Facts, differences, identity_facts
from evsys_sdk.experiment.outcome import make_output_dir
from evsys_sdk.files import to_json
from evsys_sdk.format import count, interval_text, shown
from evsys_sdk.history.compare import is_share_of_tasks
from evsys_sdk.history.context import context_text
from evsys_sdk.history.history import History, read_history
from evsys_sdk.logs import get_logger
from evsys_sdk.record.layout import ATTEMPTS, hold, move_aside
from evsys_sdk.redaction import learn_from_settings
from evsys_sdk.research.driver import Approve, Research, ResearchResult
from evsys_sdk.research.journal import ResearchJournal
from evsys_sdk.research.laboratory import FINAL, TAG, Experiments
from evsys_sdk.research.legal import FileCheck
from evsys_sdk.research.proposers.command import CommandProposer, ProjectCopy
from evsys_sdk.research.shares import CAP, EVOLVE, Seat
from evsys_sdk.research.space import Space
from evsys_sdk.run.plan import ExtensionFactory
from evsys_sdk.run.stop import StopFlag, stop_on_signals
from evsys_sdk.score_names import is_test_score, metric_of, parse_key

FREE = frozenset(["goal", "budget", "patience"])
"""Settings of the block that only say when the research ends."""
CONTEXT_TOKENS = 4000
"""Of the history, in what a model is asked."""
_GOAL = re.compile(r"\s*(\S+)\s*(>=|<=|>|<)\s*([-+0-9.eE]+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResearchOptions:
    """What the command line adds to the config."""

    goal: str | None = None
    budget: ResearchBudget | None = None
    fresh: bool = False
    approve: Approve | None = None
    overrides: Sequence[str] = ()
    watchers: Sequence[Any] = ()
    """Callbacks of every experiment, such as a progress display."""
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResearchReport:
    """The result of the research, for people and as JSON."""

    name: str
    folder: Path
    metric: str
    result: ResearchResult
    goal: str | None = None
    lines: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        result = self.result
        return {
            "name": self.name,
            "folder": str(self.folder),
            "metric": self.metric,
            "direction": result.state.direction,
            "goal": self.goal,
            "stopped_by": result.reason,
            "why": result.why,
            "spent": asdict(result.spent),
            "winner": {"trial": result.winner.number, "recipe": result.winner.recipe, "selected_score":
                       result.winner.score, "experiment": result.winner.experiment},
            "final": result.final and asdict(result.final),
            "trials": [asdict(trial) for trial in result.state.trials],
        }  # fmt: skip


def run_research(path: str | Path, options: ResearchOptions | None = None) -> ResearchReport:
    """Research from the YAML at `path`; everything is checked before anything is spent."""
    options = options or ResearchOptions()
    config = load_yaml(path, overrides=options.overrides)
    learn_from_settings(plain(config))
    spec = _spec_of(config, options)
    import_extensions(config)
    config = with_judged_metrics(config)
    benchmarks = BenchmarkLoader(config)
    problems = [*deep_problems(config, benchmarks=benchmarks), *research_problems(config, spec, benchmarks)]
    if problems:
        raise ConfigError(source_of(config).label, [source_of(config).located(one) for one in problems])
    success = config.metadata.success_metric
    assert success is not None and config.run is not None
    recipe: JsonObject = {key: value for key, value in plain(config.run).items() if key != "name"}
    files = FileCheck.of(config)
    space = Space.of(recipe, spec, files)
    folder = research_folder(config)
    make_output_dir(folder.parent)
    with (
        hold(folder.parent / f".{folder.name}.lock", f"research {config.name!r} in {folder.parent}"),
        stop_on_signals(StopFlag()) as stop,
        _without_reuse_warnings(),
    ):
        if options.fresh and folder.exists():
            move_aside({folder: folder.name}, folder.with_name(f"{folder.name}.{ATTEMPTS}"))
        make_output_dir(folder)
        journal = ResearchJournal.open(folder / "journal.jsonl")
        _begin_or_resume(journal, config, spec, benchmarks)
        seats = seats_of(spec)
        project = _project_copy(config, folder)
        for seat in seats:
            if isinstance(seat.proposer, CommandProposer):
                seat.proposer.attach(project, stop.event.is_set)
        first_seed = config.run.seed if config.base_seed is None else config.base_seed
        research = Research(
            spec=spec,
            recipe=recipe,
            laboratory=Experiments(config=config, folder=folder, files=files, watchers=options.watchers),
            seats=seats,
            metric=success.name,
            direction=success.direction,
            space=space,
            journal=journal,
            n_repeats=config.n_repeats,
            base_seed=first_seed,
            goal=parse_goal(spec.goal)[2] if spec.goal else None,
            max_score=1.0 if is_share_of_tasks(_metric_name(config)) else None,
            approve=options.approve,
            is_stopped=stop.event.is_set,
            context=lambda: research_context(folder),
            say=options.say,
        )
        result = research.run()
    report = ResearchReport(name=config.name, folder=folder, metric=success.name, result=result, goal=spec.goal)
    return replace(report, lines=list(_lines(report)))


@contextmanager
def _without_reuse_warnings() -> Iterator[None]:
    """Every round reuses the incumbent's runs; saying so each time would bury what is new."""

    def is_new(record: logging.LogRecord) -> bool:
        return not record.getMessage().endswith("is not run again (--fresh would)")

    logger = get_logger("evsys_sdk.run.resume")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def research_folder(config: ExperimentConfig) -> Path:
    return Path(config.output_dir).expanduser() / f"{directory_name(config.name)}.research"


def _spec_of(config: ExperimentConfig, options: ResearchOptions) -> ResearchSpec:
    given = config.research or ResearchSpec()
    update: dict[str, object] = {}
    if options.goal is not None:
        update["goal"] = options.goal
    if options.budget is not None:
        update["budget"] = options.budget
    return given.model_copy(update=update)


def research_problems(config: ExperimentConfig, spec: ResearchSpec, benchmarks: BenchmarkLoader) -> Iterator[Problem]:
    """What can be known to be wrong with a research before anything is spent."""
    if config.run is None:
        message = "research starts from one run: keep `run`, and leave runs, matrix and search to evsys run"
        yield Problem(path="run", message=message)
        return
    if spec.budget is None:
        yield Problem(path="research.budget", message="is missing; set it here, or give --budget trials=12")
    success = config.metadata.success_metric
    if success is None:
        message = "is missing; research keeps what is better by it, e.g. `success_metric: val.pass@1`"
        yield Problem(path="metadata.success_metric", message=message)
        return
    wrong = why_no_score(config, success.name)
    if wrong is not None:
        return  # reported by the check of the metric itself
    keys = keys_of(config, success.name)
    if keys and all(map(is_test_score, keys)) and not config.metadata.allow_test_selection:
        message = "is scored on a test benchmark only, and test scores keep nothing; label an entry `split: val`"
        yield Problem(path="metadata.success_metric", value=success.name, message=message)
    for index, entry in enumerate(config.metadata.benchmark):
        if any(key in keys for key in entry.score_keys):
            tasks = len(benchmarks.get(entry).tasks[: entry.limit])
            if tasks < 2:
                message = f"has {count(tasks, 'task')}, and no verdict can be based on fewer than two"
                yield Problem(path=f"metadata.benchmark[{index}]", message=message)
    if spec.goal is not None:
        yield from _goal_problems(config, spec.goal, keys)
    if spec.rungs is not None:
        yield from _rung_problems(config, spec.rungs.min_steps, keys)


def parse_goal(text: str) -> tuple[str, str, float]:
    """`val.pass@1 >= 0.8` as metric, operator and number."""
    found = _GOAL.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        return found[1], found[2], float(found[3])
    except ValueError:
        wanted = "a goal is a metric, a comparison and a number, as 'val.pass@1 >= 0.8'"
        raise EvsysError(f"{wanted}; got {text!r}") from None


def _goal_problems(config: ExperimentConfig, goal: str, keys: Sequence[str]) -> Iterator[Problem]:
    success = config.metadata.success_metric
    assert success is not None
    try:
        metric, sign, value = parse_goal(goal)
    except EvsysError as exc:
        yield Problem(path="research.goal", message=str(exc))
        return
    if metric != success.name and (not keys or keys_of(config, metric) != list(keys)):
        why = why_no_score(config, metric)
        message = why or f"names {metric}, and the success metric is {success.name}: research keeps by one metric"
        yield Problem(path="research.goal", value=goal, message=message)
    if (sign[0] == ">") != (success.direction == "max"):
        better = "more" if success.direction == "max" else "less"
        yield Problem(path="research.goal", value=goal, message=f"{better} of {success.name} is better")
    if is_share_of_tasks(_metric_name(config)) and not 0 <= value <= 1:
        yield Problem(path="research.goal", value=goal, message=f"{metric} lies between 0 and 1")


def _metric_name(config: ExperimentConfig) -> str:
    success = config.metadata.success_metric
    assert success is not None
    keys = keys_of(config, success.name)
    return metric_of(keys[0]) if keys else success.name


def _rung_problems(config: ExperimentConfig, first: int, keys: Sequence[str]) -> Iterator[Problem]:
    for index, entry in enumerate(config.metadata.benchmark):
        # Without `run_every` an entry is scored after training alone, which is later than any rung.
        if any(key in keys for key in entry.score_keys) and (entry.run_every or first + 1) > first:
            message = f"rungs need its score at step {first}: set run_every to {first} or less"
            yield Problem(path=f"metadata.benchmark[{index}].run_every", value=entry.run_every, message=message)
    if any((score := parse_key(key)) is not None and score.split == "eval" for key in keys):
        message = "a score of run.eval is made only after training, and rungs need one during training"
        yield Problem(path="research.rungs", message=message)


def seats_of(spec: ResearchSpec) -> list[Seat]:
    """The proposers of the config, built, with their caps."""
    factory, seats = ExtensionFactory(), list[Seat]()
    for index, one in enumerate(spec.proposers):
        same = sum(other.kind == one.kind for other in spec.proposers[:index])
        cap = one.share if one.share is not None else 1.0 if one.kind == EVOLVE else CAP
        proposer = factory.build(registry.proposers, one, f"research.proposers[{index}]")
        seats.append(Seat(name=f"{one.kind}-{same + 1}" if same else one.kind, proposer=proposer, cap=cap))
    return seats


def _project_copy(config: ExperimentConfig, folder: Path) -> ProjectCopy:
    """What agents may see: the project without its test benchmarks and without results."""
    source = source_of(config)
    tests = [entry.path for entry in config.metadata.benchmark if entry.role == "test" and entry.path]
    hidden = [place / path for path in tests for place in search_folders(source)]
    return ProjectCopy(root=project_root(source.folder), hidden=(*hidden, folder, Path(config.output_dir).expanduser()))


def research_context(folder: Path) -> str:
    """What `evsys context` says of the rounds of a research; its final experiments, which have test scores, are left
    out."""
    entries = read_history(None, [folder]).entries
    rounds = [entry for entry in entries if FINAL not in entry.digest.tags]
    return context_text(History(entries=rounds), CONTEXT_TOKENS) if rounds else ""


def _begin_or_resume(
    journal: ResearchJournal, config: ExperimentConfig, spec: ResearchSpec, benchmarks: BenchmarkLoader
) -> None:
    """Note what the research is, or refuse to mix it with another."""
    block = {f"research.{key}": value for key, value in spec.model_dump(mode="json", exclude=set(FREE)).items()}
    # As JSON: they are compared with what is read back from the journal.
    facts: Facts = json.loads(to_json({**identity_facts(config, benchmarks), **block}))
    known = journal.find("begin") or journal.add("begin", {"facts": json.loads(to_json(facts))})
    found = differences(dict(known["facts"]), facts)  # type: ignore[arg-type]
    if found:
        lines = [f"research {config.name!r} was begun with other settings:", *map(str, found[:SHOWN])]
        lines.append("next: put them back to resume it, give it another name, or start over with --fresh")
        raise SettingsChanged("\n".join(lines), {each.place: (each.before, each.now) for each in found})


def _lines(report: ResearchReport) -> Iterator[str]:
    """The report in words."""
    result, metric = report.result, report.metric
    launched = [trial for trial in result.state.launched if trial.number]
    words = [trial.decision or trial.status for trial in launched]
    outcomes = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    yield f"{report.name}: ended by {result.reason}: {result.why}"
    yield f"{count(len(launched), 'candidate')} measured: {outcomes or 'none'}"
    for trial in result.state.trials:
        if trial.decision in ("first", "kept") and trial.score is not None:
            changes = ", ".join(f"{path}: {value}" for path, value in trial.proposal.changes.items())
            made = changes or "the config's own run"
            yield f"  {trial.decision:<5} trial {trial.number}: {metric} {shown(trial.score)} (selected), {made}"
    final = result.final
    if final is None or final.candidate is None:
        yield "No final score: " + (final.why if final else "the same command resumes the research")
        return
    one = final.candidate
    # Said beside the result: the best of many validation scores is too high by chance.
    looks = sum(trial.score is not None for trial in result.state.trials)
    seeds = count(one.n_seeds, "fresh seed")
    recipes = count(looks, "recipe")
    score = interval_text(one.mean, one.low, one.high)
    yield f"Result: {metric} {score} on {seeds}, chosen from {recipes} by validation scores"
    compared = final.comparison
    if compared is not None and compared.difference is not None:
        low, high = compared.low, compared.high
        ends = ""
        if low is not None and high is not None:
            ends = f" (95 % CI {shown(low, signed=True)} to {shown(high, signed=True)})"
        yield f"  {shown(compared.difference, signed=True)}{ends} to the config's own run: {compared.verdict}"
    yield f"next: evsys show {final.experiment}, evsys context --tag {TAG}:{report.name}"
