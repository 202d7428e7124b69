"""Where test tasks take part in choosing, and what has to be admitted of it.

In: a config. Out: problems, where a benchmark that selects has the tasks of a test benchmark and nobody allowed it; and
of an experiment that may run, what its conclusion and its page must say. Validation benchmarks select: arms, trials,
weights, when to stop. The rows of `eval.eval_data` do where a metric that chooses is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.config.source import source_of
from evsys_sdk.data.shared_tasks import Overlap, Side, overlap_of
from evsys_sdk.errors import DataError, EvsysError, Problem
from evsys_sdk.running.foreseen_leakage import cheap_eval_suites
from evsys_sdk.running.leakage import EVAL_DATA, eval_suite
from evsys_sdk.running.metric_checks import keys_of
from evsys_sdk.running.scoring import find_benchmark
from evsys_sdk.running.search_value import objective_of
from evsys_sdk.score_names import is_test_score

if TYPE_CHECKING:
    from evsys_sdk.running.workbench import Workbench

SUCCESS, OBJECTIVE = "metadata.success_metric", "search.objective"
REMEDY = (
    "test tasks do not select: choose by tasks of their own, or set `metadata.allow_test_selection: true`, which the "
    "conclusion admits"
)
UNSEEN = "only tasks that nobody has looked at can say how good what was chosen is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One way in which test tasks took part in choosing."""

    by: str
    """The setting that chose."""
    test: list[str]
    """The test scores, or the test benchmark, that did not stay out of it."""
    text: str
    shared: int | None = None
    """Tasks of the test benchmark among those that select."""


def admissions(config: ExperimentConfig) -> list[Admission]:
    """What has to be admitted of an experiment that was let run."""
    return [*_by_scores(config), *map(_by_tasks, overlaps(config))]


def _by_scores(config: ExperimentConfig) -> Iterator[Admission]:
    for place, keys in _chosen_by(config):
        scores = [key for key in keys if is_test_score(key)]
        if scores and config.metadata.allow_test_selection:
            what = "Trials were chosen by" if place == OBJECTIVE else "Arms were picked by"
            text = f"{what} test scores, {', '.join(scores)} (allow_test_selection): {UNSEEN}."
            yield Admission(by=place, test=scores, text=text)


def _chosen_by(config: ExperimentConfig) -> Iterator[tuple[str, list[str]]]:
    """The settings that choose among arms and trials, each with the scores that it means."""
    success, search = config.metadata.success_metric, config.search
    if success is not None and (search is not None or len(config.all_runs()) > 1):
        yield SUCCESS, keys_of(config, success.name)
    objective = objective_of(config) if search is not None else None
    if objective is not None:
        yield OBJECTIVE, keys_of(config, objective.name)


def _by_tasks(overlap: Overlap) -> Admission:
    allowed = " (allow_test_selection)" if overlap.is_most else ""
    takes_part = f"{overlap.test.name} takes part in what {overlap.selecting.name} chooses, and {UNSEEN}"
    text = f"{overlap.text}{allowed}: {takes_part}."
    return Admission(by=overlap.selecting.place, test=[overlap.test.name], text=text, shared=overlap.shared)


def overlaps(config: ExperimentConfig) -> list[Overlap]:
    """Every benchmark that selects with every test benchmark, where they share tasks."""
    tests = list(_sides(config, "test"))
    selecting = list(_sides(config, "val")) if tests else []
    if tests and _selects_by_eval(config):
        suites = cheap_eval_suites(config)
        selecting += [Side(name=EVAL_DATA, place=place, tasks=suite.tasks) for place, suite in suites]
    return _that_share(selecting, tests)


def _sides(config: ExperimentConfig, role: str) -> Iterator[Side]:
    """The benchmarks of the role that can be read; the others are told of by their own check."""
    for index, entry in enumerate(config.metadata.benchmark):
        try:
            tasks = find_benchmark(entry, config).tasks[: entry.limit] if entry.role == role else []
        except EvsysError:
            continue
        if tasks:
            yield Side(name=f"{role}/{entry.label}", place=f"metadata.benchmark[{index}]", tasks=tasks)


def _that_share(selecting: list[Side], tests: list[Side]) -> list[Overlap]:
    found = [overlap_of(mine, theirs) for mine in selecting for theirs in tests]
    return [overlap for overlap in found if overlap.shared]


def _selects_by_eval(config: ExperimentConfig) -> bool:
    return any(key.startswith("eval/") for _, keys in _chosen_by(config) for key in keys)


def overlap_problems(config: ExperimentConfig) -> Iterator[Problem]:
    """Benchmarks that select with all or most of the tasks of a test benchmark, though nobody allowed it."""
    for overlap in overlaps(config):
        if overlap.is_most and not config.metadata.allow_test_selection:
            message = f"{overlap.text} ({overlap.test.place}); {REMEDY}"
            yield Problem(path=overlap.selecting.place, message=message)


def overlap_warnings(config: ExperimentConfig) -> list[Problem]:
    """Benchmarks that select with some tasks of a test benchmark, or with most where that is allowed."""
    problems = [Problem(path=one.selecting.place, message=f"{one.text} ({one.test.place})") for one in overlaps(config)]
    return [source_of(config).located(problem) for problem in problems]


def refuse_test_questions(bench: Workbench) -> None:
    """The same for rows of `eval.eval_data` that only the run itself can read."""
    config, data, ctx = bench.plan.experiment, bench.plan.run.eval.eval_data, bench.ctx
    if data is None or ctx is None or not _selects_by_eval(config):
        return
    tests = list(_sides(config, "test"))
    try:
        suite = eval_suite(data, config, ctx.data_store).suite if tests else None
    except EvsysError:  # told when they are asked
        return
    own = [Side(name=EVAL_DATA, place=EVAL_DATA, tasks=suite.tasks)] if suite is not None and suite.tasks else []
    for overlap in _that_share(own, tests):
        if overlap.is_most and not config.metadata.allow_test_selection:
            raise DataError(f"{overlap.text} ({overlap.test.place}), so nothing was trained; {REMEDY}")
        bench.record.warnings.append(overlap.text)
