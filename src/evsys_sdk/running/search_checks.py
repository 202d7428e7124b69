"""What can be known to be wrong with a search before anything is spent.

In: a config with a search. Out: problems with their places: an objective that will not exist or must not select, and
for halving, runs that cannot be paused or have no score where they would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from evsys_sdk import registry
from evsys_sdk.config.base import KindSpec
from evsys_sdk.config.models import ExperimentConfig, RunConfig, SearchSpec
from evsys_sdk.errors import EvsysError, Problem, blame, not_known
from evsys_sdk.running.metric_checks import NUMBERS, keys_of, may_be_a_number, scores_of
from evsys_sdk.running.search_value import objective_of
from evsys_sdk.score_names import AmbiguousName, is_test_score, resolve


def search_problems(config: ExperimentConfig) -> Iterator[Problem]:
    """Everything of that kind; nothing for a config without a search."""
    search = config.search
    if search is None:
        return
    if find_spec("optuna") is None:
        message = "needs optuna: pip install 'evsys-sdk[search]'"
        yield Problem(path="search.kind", value=search.kind, message=message)
    yield from _objective_problems(config, search)
    if search.kind == "halving":
        yield from _halving_problems(config, search)


def _objective_problems(config: ExperimentConfig, search: SearchSpec) -> Iterator[Problem]:
    objective = objective_of(config)
    if objective is None:
        message = "is missing; name the metric to search for, here or as metadata.success_metric"
        yield Problem(path="search.objective", message=message)
        return
    place = "metadata.success_metric" if search.objective is None else "search.objective"
    try:
        scores, keys = scores_of(config), resolve(objective.name, scores_of(config))
    except AmbiguousName as exc:
        yield Problem(path=place, value=objective.name, message=str(exc))
        return
    if keys and all(map(is_test_score, keys)) and not config.metadata.allow_test_selection:
        message = "is scored on a test benchmark only, and test scores do not select; label an entry val"
        yield Problem(path=place, value=objective.name, message=message)
    if not keys and not may_be_a_number(config, objective.name):
        message = not_known(objective.name, "metric that these runs will have", [*scores, *NUMBERS])
        yield Problem(path=place, value=objective.name, message=message)


def _halving_problems(config: ExperimentConfig, search: SearchSpec) -> Iterator[Problem]:
    first, objective = search.min_steps or 1, objective_of(config)
    if objective is not None:
        yield from _unscored(config, keys_of(config, objective.name), first)
    runs = config.all_runs()
    lengths = [run.algorithm.params.get("max_steps") for run in runs]
    if all(isinstance(length, int) and length <= first for length in lengths):
        message = "no run is longer than that, so none would be left behind"
        yield Problem(path="search.min_steps", value=first, message=message)
    why = next((why for run in runs if (why := _why_not_paused(run))), None)
    if why:
        yield Problem(path="search.kind", value=search.kind, message=why)


def _unscored(config: ExperimentConfig, keys: list[str], first: int) -> Iterator[Problem]:
    """Scores of the objective that do not exist yet when the first are to be left behind."""
    for index, entry in enumerate(config.metadata.benchmark):
        if not any(key in keys for key in entry.score_keys) or (entry.run_every or first + 1) <= first:
            continue
        place = f"metadata.benchmark[{index}]"
        made = "only after training" if entry.run_every is None else f"every {entry.run_every} steps"
        message = (
            f"the objective is scored {made}, and halving needs it at step {first}: set run_every to {first} or less"
        )
        yield Problem(path=place if entry.run_every is None else f"{place}.run_every", message=message)
    if any(key.startswith("eval/") for key in keys):
        message = "is a score of run.eval, which is made only after training; halving needs one made while it goes on"
        yield Problem(path="search.objective", message=message)


def _why_not_paused(run: RunConfig) -> str | None:
    """Why a run cannot be stopped and gone on with."""
    backend = _built(registry.backends, run.backend)
    offers = backend.offers() if backend is not None and hasattr(backend, "offers") else None
    if offers is not None and not offers.resume:
        return f"backend {run.backend.kind!r} cannot go on from a checkpoint, which halving needs"
    if not getattr(_built(registry.algorithms, run.algorithm), "goes_on", True):
        return f"algorithm {run.algorithm.kind!r} cannot go on from a checkpoint, which halving needs"
    return None


def _built(kinds: registry.Registry, spec: KindSpec) -> Any | None:
    try:
        with blame(EvsysError, spec.kind):
            return kinds.build(spec.kind, dict(spec.params))
    except EvsysError:
        return None  # told by the check of the block
