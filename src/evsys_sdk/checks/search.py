"""What can be known to be wrong with a search before anything is spent.

In: a config with a search. Out: problems with their places: an objective that will not exist or must not select, and
for halving, runs that cannot be paused or have no score where they would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from evsys_sdk import registry
from evsys_sdk.checks.blocks import build_or_none
from evsys_sdk.checks.metrics import keys_of, objective_of, why_no_score
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.errors import Problem
from evsys_sdk.score_names import is_test_score


def search_problems(config: ExperimentConfig) -> Iterator[Problem]:
    """Everything of that kind; nothing for a config without a search."""
    search = config.search
    if search is None:
        return
    if find_spec("optuna") is None:
        message = "needs optuna: pip install 'evsys-sdk[search]'"
        yield Problem(path="search.kind", value=search.kind, message=message)
    objective = objective_of(config)
    if objective is None:
        message = "is missing; name the metric to search for, here or as metadata.success_metric"
        yield Problem(path="search.objective", message=message)
    else:
        place = "metadata.success_metric" if search.objective is None else "search.objective"
        wrong = why_no_score(config, objective.name)
        if wrong is not None:
            yield Problem(path=place, value=objective.name, message=wrong)
        keys = keys_of(config, objective.name)
        if keys and all(map(is_test_score, keys)) and not config.metadata.allow_test_selection:
            message = "is scored on a test benchmark only, and test scores do not select; label an entry val"
            yield Problem(path=place, value=objective.name, message=message)
    if search.kind != "halving":
        return
    first = search.min_steps or 1
    keys = keys_of(config, objective.name) if objective is not None else []
    # Scores of the objective that do not exist yet when the first trials are to be left behind.
    for index, entry in enumerate(config.metadata.benchmark):
        # Without `run_every` a score is made after training, which is later than any step.
        if not any(key in keys for key in entry.score_keys) or (entry.run_every or first + 1) <= first:
            continue
        place = f"metadata.benchmark[{index}]"
        made = "only after training" if entry.run_every is None else f"every {entry.run_every} steps"
        message = (
            f"the objective is scored {made}, and halving needs it at step {first}: set run_every to {first} or less"
        )
        yield Problem(path=place if entry.run_every is None else f"{place}.run_every", message=message)
    if any(key.startswith("eval/") for key in keys):
        message = (
            "is a score of run.eval, which is made only after training; halving needs one that is made during training"
        )
        yield Problem(path="search.objective", message=message)
    runs = config.all_runs()
    lengths = [run.algorithm.params.get("max_steps") for run in runs]
    if all(isinstance(length, int) and length <= first for length in lengths):
        message = "no run is longer than that, so none would be left behind"
        yield Problem(path="search.min_steps", value=first, message=message)
    for run in runs:
        backend = build_or_none(registry.backends, run.backend)
        offers = backend.offers() if backend is not None and hasattr(backend, "offers") else None
        lacking = None
        if offers is not None and not offers.resume:
            lacking = f"backend {run.backend.kind!r}"
        elif not getattr(build_or_none(registry.algorithms, run.algorithm), "supports_resume", True):
            lacking = f"algorithm {run.algorithm.kind!r}"
        if lacking:
            message = f"{lacking} cannot resume from a checkpoint, which halving needs"
            yield Problem(path="search.kind", value=search.kind, message=message)
            return  # one run's reason is enough
