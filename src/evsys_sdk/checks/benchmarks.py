"""Whether benchmarks can be scored, and tasks done and graded, on this machine, before anything is spent on them.

In: an entry of `metadata.benchmark`, or tasks to train on, each with its place. Out: problems, each at the first task
that has it: a verifier that is not registered or whose params do not fit, no sandbox, no judge, no key, an environment
that cannot be made, an agent that cannot be found.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from evsys_sdk import registry
from evsys_sdk.checks.blocks import Block, block_at, check_block
from evsys_sdk.config.metadata import BenchmarkEntry, EnvironmentConfig, as_environment
from evsys_sdk.config.project import path_folders
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import ConfigError, EvsysError, Problem, error_boundary
from evsys_sdk.eval.benchmark import BenchmarkLoader, cluster_problem, sampling_problem
from evsys_sdk.inference.policy import is_trained_here
from evsys_sdk.protocols import SANDBOX, AgentSpec
from evsys_sdk.rollout.agents import find_agent
from evsys_sdk.rollout.client_model import hosted_problems
from evsys_sdk.rollout.requirements import environment_problem, is_class_path, kind_problem
from evsys_sdk.rollout.task_dirs import has_own_tests
from evsys_sdk.verifiers.grading import missing_for, never_grades, plan_of, verifier_names

SHOWN = 5
"""Reasons that are shown; a suite that is wrong throughout is known by its first ones."""


def entry_problems(
    entry: BenchmarkEntry,
    place: str,
    config: ExperimentConfig,
    benchmarks: BenchmarkLoader,
    *,
    run_code: bool = True,
    is_partial: bool = False,
) -> list[Problem]:
    """What is wrong with a benchmark: its metrics, agent, template, environment, tasks and hosted models."""
    problems: list[Problem] = []
    for index, name in enumerate(entry.metrics):
        where = f"{place}.metrics[{index}]"
        block = Block(place=where, registry=registry.metrics, kind=name, params={})
        problems += [replace(problem, path=where) for problem in check_block(block)]
    short = None if problems else sampling_problem(entry.metrics, entry.num_samples)
    if short:
        problems.append(Problem(path=f"{place}.num_samples", message=short, value=entry.num_samples))
    if run_code:
        problems += agent_problems(entry.agent_import_path, entry.agent_params, place)
    if entry.chat_template is not None:
        from evsys_sdk.training.rendering import template_problem  # slow to import, and seldom needed

        wrong = template_problem(entry.chat_template, path_folders(source_of(config)))
        if wrong:
            problems.append(Problem(path=f"{place}.chat_template", value=entry.chat_template, message=wrong))
    problems += environment_problems(entry.environment, f"{place}.environment", run_code=run_code)
    tasks: list[HarborTask] = []
    try:
        benchmark = benchmarks.get(entry)
    except EvsysError as exc:
        key = "id" if entry.id else "path" if entry.path else "name"
        problems.append(Problem(path=f"{place}.{key}", message=str(exc), value=getattr(entry, key)))
    else:
        tasks = benchmark.tasks[: entry.limit]
        environment = entry.environment.kind if entry.environment else SANDBOX
        placed = zip(tasks, benchmark.places[: entry.limit], strict=True)
        undone = undoable_tasks(placed, environment=environment, known_only=is_partial)
        problems += [Problem(path=place, message=text) for text in undone]
        unknown = cluster_problem(tasks, entry.cluster_key)
        if unknown:
            problems.append(Problem(path=f"{place}.cluster_key", message=unknown, value=entry.cluster_key))
    for index, model in enumerate(entry.models):
        block = block_at(f"{place}.models[{index}]", registry.inference, model)
        problems += check_block(block) or hosted_model_problems(block)
    refused = hosted_problems(tasks) if entry.models else []
    return problems + [Problem(path=f"{place}.models", message=text) for text in refused]


def undoable_tasks(
    placed: Iterable[tuple[HarborTask, str]], *, environment: str = SANDBOX, known_only: bool = False
) -> list[str]:
    """`tasks.jsonl:3: task 'a': ... (and 11 other tasks)` for each reason against tasks, which come with their places.
    `known_only`: nothing is said of verifiers that are not registered, because the project's code, which may bring
    them, was not run."""
    known: dict[str, str | None] = {}
    first: dict[str, str] = {}
    count = Counter[str]()
    for task, place in placed:
        plan = plan_of(task.verifier)
        if known_only and not verifier_names(plan) <= set(registry.verifiers.names()):
            continue
        why = environment_problem(task, environment)
        if why is None and not has_own_tests(task):
            # Whether the verifier is there and takes the params is the same for all tasks that have them; what is
            # expected differs from task to task.
            key = json.dumps([plan.name, plan.params], sort_keys=True, default=repr)
            if key not in known:
                known[key] = missing_for(plan)
            why = known[key] or never_grades(plan)
        if why is not None:
            count[why] += 1
            first.setdefault(why, f"{place}: task {task.task_id!r}")
    reasons = []
    for why in list(first)[:SHOWN]:
        others = count[why] - 1
        more = "" if others == 0 else " (and another task)" if others == 1 else f" (and {others} other tasks)"
        reasons.append(f"{first[why]}: {why}{more}")
    return [*reasons, f"and {len(first) - SHOWN} more reasons"] if len(first) > SHOWN else reasons


def agent_problems(path: object, params: object, place: str) -> Iterator[Problem]:
    """An agent that cannot be found, or made with these params."""
    params = {} if params is None else params
    if not isinstance(path, str) or not isinstance(params, dict):
        return  # there is none, or the check of the block reports it
    try:
        find_agent(AgentSpec(kind=path, params=params))
    except ConfigError as exc:
        for problem in exc.problems:
            yield replace(problem, path=f"{place}.agent_params.{problem.path}".rstrip("."))
    except EvsysError as exc:
        yield Problem(path=f"{place}.agent_import_path", value=path, message=str(exc))


def environment_problems(value: object, place: str, *, run_code: bool) -> list[Problem]:
    """A kind of environment that does not exist, or cannot be had on this machine."""
    try:
        chosen = None if value is None else EnvironmentConfig.model_validate(as_environment(value))
    except ValueError:
        return []  # reported by the check of the block
    if chosen is None or (is_class_path(chosen.kind) and not run_code):
        return []  # to look at a class is to import it
    wrong = kind_problem(chosen.kind)
    return [Problem(path=place, value=chosen.kind, message=wrong)] if wrong else []


def hosted_model_problems(block: Block) -> list[Problem]:
    """A model behind an API that cannot be called from here: no key, no address, or none that is hosted."""
    if is_trained_here(block.kind):
        message = f"{block.kind!r} asks the model that a run trains; to score that untrained, set `baseline: true`"
        return [Problem(path=block.place, message=message)]
    try:
        with error_boundary(EvsysError, f"inference client {block.kind!r}"):
            registry.inference.build(block.kind, dict(block.params))
    except EvsysError as exc:
        return [Problem(path=block.place, message=str(exc))]
    return []
