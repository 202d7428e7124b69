"""Where test tasks take part in choosing, and what has to be admitted of it.

In: a config. Out: problems, where a benchmark that selects has the tasks of a test benchmark and that was not allowed;
and of an experiment that may run, what its conclusion and its page must say. Validation benchmarks select: arms,
trials, weights, when to stop. The rows of `eval.eval_data` do where a metric that chooses is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evsys_sdk.checks.contamination import cheap_eval_suites
from evsys_sdk.checks.metrics import keys_of, objective_of
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.contamination.audit import EVAL_DATA
from evsys_sdk.contamination.tasks import BenchmarkTasks, Overlap, overlap_of
from evsys_sdk.errors import EvsysError, Problem
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.score_names import is_test_score

if TYPE_CHECKING:
    pass

SUCCESS, OBJECTIVE = "metadata.success_metric", "search.objective"
REMEDY = (
    "test tasks do not select: choose by separate tasks, or set `metadata.allow_test_selection: true`, which the "
    "conclusion admits"
)
UNSEEN = "only tasks that have not been looked at can say how good what was chosen is"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionByTest:
    """One way in which test tasks took part in choosing."""

    by: str
    """The setting that chose."""
    test: list[str]
    """The test scores, or the test benchmark, that did not stay out of it."""
    text: str
    shared: int | None = None
    """Tasks of the test benchmark among those that select."""


def find_test_selections(config: ExperimentConfig, benchmarks: BenchmarkLoader) -> list[SelectionByTest]:
    """How test tasks take part in choosing, in an experiment that may run so."""
    found = []
    for place, keys in _chosen_by(config):
        scores = [key for key in keys if is_test_score(key)]
        if scores and config.metadata.allow_test_selection:
            what = "Trials were chosen by" if place == OBJECTIVE else "Arms were picked by"
            text = f"{what} test scores, {', '.join(scores)} (allow_test_selection): {UNSEEN}."
            found.append(SelectionByTest(by=place, test=scores, text=text))
    for overlap in overlaps(config, benchmarks):
        test, selecting = overlap.test.name, overlap.selecting
        allowed = " (allow_test_selection)" if overlap.is_most else ""
        text = f"{overlap.text}{allowed}: {test} takes part in what {selecting.name} chooses, and {UNSEEN}."
        found.append(SelectionByTest(by=selecting.place, test=[test], text=text, shared=overlap.shared))
    return found


def _chosen_by(config: ExperimentConfig) -> Iterator[tuple[str, list[str]]]:
    """The settings that choose among arms and trials, each with the scores that it means."""
    success, search = config.metadata.success_metric, config.search
    if success is not None and (search is not None or len(config.all_runs()) > 1):
        yield SUCCESS, keys_of(config, success.name)
    objective = objective_of(config) if search is not None else None
    if objective is not None:
        yield OBJECTIVE, keys_of(config, objective.name)


def overlaps(config: ExperimentConfig, benchmarks: BenchmarkLoader) -> list[Overlap]:
    """Every benchmark that selects with every test benchmark, where they share tasks."""
    tests = list(sides(config, "test", benchmarks))
    selecting = list(sides(config, "val", benchmarks)) if tests else []
    if tests and selects_by_eval(config):
        suites = cheap_eval_suites(config)
        selecting += [BenchmarkTasks(name=EVAL_DATA, place=place, tasks=suite.tasks) for place, suite in suites]
    return that_share(selecting, tests)


def sides(config: ExperimentConfig, role: str, benchmarks: BenchmarkLoader) -> Iterator[BenchmarkTasks]:
    """The benchmarks of the role that can be read; the others are reported by another check."""
    for index, entry in enumerate(config.metadata.benchmark):
        try:
            tasks = benchmarks.get(entry).tasks[: entry.limit] if entry.role == role else []
        except EvsysError:
            continue
        if tasks:
            yield BenchmarkTasks(name=f"{role}/{entry.label}", place=f"metadata.benchmark[{index}]", tasks=tasks)


def that_share(selecting: list[BenchmarkTasks], tests: list[BenchmarkTasks]) -> list[Overlap]:
    found = [overlap_of(mine, theirs) for mine in selecting for theirs in tests]
    return [overlap for overlap in found if overlap.shared]


def selects_by_eval(config: ExperimentConfig) -> bool:
    return any(key.startswith("eval/") for _, keys in _chosen_by(config) for key in keys)


def overlap_problems(config: ExperimentConfig, benchmarks: BenchmarkLoader) -> Iterator[Problem]:
    """Benchmarks that select with all or most of the tasks of a test benchmark, though that was not allowed."""
    for overlap in overlaps(config, benchmarks):
        if overlap.is_most and not config.metadata.allow_test_selection:
            message = f"{overlap.text} ({overlap.test.place}); {REMEDY}"
            yield Problem(path=overlap.selecting.place, message=message)


def overlap_warnings(config: ExperimentConfig, benchmarks: BenchmarkLoader) -> list[Problem]:
    """Benchmarks that select with some tasks of a test benchmark, or with most where that is allowed."""
    problems = [
        Problem(path=one.selecting.place, message=f"{one.text} ({one.test.place})")
        for one in overlaps(config, benchmarks)
    ]
    return [source_of(config).located(problem) for problem in problems]
