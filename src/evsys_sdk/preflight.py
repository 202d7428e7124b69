"""What can be known to be wrong before anything is spent.

In: a config. Out: problems with their places. `evsys validate` prints them, a run refuses to start on them. Every
kind/params block, every file and every verifier that a run will touch is looked at. Nothing is trained or asked, but
the project's own code is imported, because its extensions are otherwise not known; `run_code=False` imports none of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evsys_sdk import jsonl, registry
from evsys_sdk.config.arms import arm_problems
from evsys_sdk.config.base import KindSpec
from evsys_sdk.config.files import load_yaml
from evsys_sdk.config.metadata import BenchmarkEntry, EnvironmentConfig, as_environment
from evsys_sdk.config.models import SCHEMA_VERSION, DataConfig, ExperimentConfig, RunConfig
from evsys_sdk.config.project import extension_names, import_extensions, path_folders, search_folders
from evsys_sdk.config.source import source_of
from evsys_sdk.data.stores import LocalDataStore
from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import ConfigError, DataError, EvsysError, Problem, UnknownKind, blame
from evsys_sdk.protocols import SANDBOX
from evsys_sdk.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One `{kind, params}` in the config."""

    place: str
    registry: Registry
    kind: str
    params: dict[str, Any]


def validate_yaml(
    path: str | Path,
    deep: bool = False,
    *,
    strict: bool = False,
    overrides: Sequence[str] = (),
    run_code: bool = True,
) -> ExperimentConfig:
    """Check a config file and return it. `deep` looks into every block and all data files; `strict` also refuses
    ignored settings. `run_code=False`: no code of the project is imported, and what only it registers is not checked.
    """
    config = load_yaml(path, overrides=overrides)
    found = deep_problems(config, run_code=run_code, whole_files=True) if deep else []
    found += ignored_settings(config) if strict else []
    if found:
        raise ConfigError(source_of(config).label, found)
    return config


def deep_warnings(config: ExperimentConfig, *, run_code: bool = True) -> list[Problem]:
    """What is not wrong with a config but should be known before it is run, located."""
    from evsys_sdk.running.admissions import overlap_warnings
    from evsys_sdk.running.foreseen_leakage import foreseen_leakage
    from evsys_sdk.running.prompt_checks import prompt_warnings

    is_partial = not run_code and bool(extension_names(config))
    found = [*overlap_warnings(config), *prompt_warnings(config)]
    # Under `error` it has been a problem; without the project's transforms its rows are not known.
    if config.leakage == "warn" and not is_partial:
        found += foreseen_leakage(config)
    if is_partial:
        names = ", ".join(extension_names(config))
        message = f"the project's code ({names}) was not run, so what it registers was not checked"
        found.append(source_of(config).located(Problem(path="imports", message=message)))
    return found


class UnknownKindProblem(Problem):
    """A kind that is not registered; where the project's code was not run, that is no mistake."""


def deep_problems(config: ExperimentConfig, *, run_code: bool = True, whole_files: bool = False) -> list[Problem]:
    """Everything that is wrong with the blocks, files and verifiers of a config, located.

    `whole_files`: every line of the data files is parsed, which a run does itself when it loads them.
    """
    from evsys_sdk.running.admissions import overlap_problems
    from evsys_sdk.running.foreseen_leakage import foreseen_leakage
    from evsys_sdk.running.metric_checks import metric_problems, with_judged_metrics
    from evsys_sdk.running.search_checks import search_problems

    if run_code:
        import_extensions(config)
    # What the project would register is not known: names that are missing may be its own.
    is_partial = not run_code and bool(extension_names(config))
    config, source = with_judged_metrics(config), source_of(config)
    problems = [problem for block in _experiment_blocks(config) for problem in check_block(block)]
    if not is_partial:
        problems += search_problems(config)
        problems += metric_problems(config)
    problems += arm_problems(config)
    problems += overlap_problems(config)
    looks = Looks(config=config, run_code=run_code, is_partial=is_partial, whole_files=whole_files)
    for index, entry in enumerate(config.metadata.benchmark):
        problems += _check_benchmark(entry, f"metadata.benchmark[{index}]", looks)
    for index, run in enumerate(config.all_runs()):
        for problem in _run_problems(run, looks):
            problems.append(replace(problem, path=source.in_run(index, problem.path)))
    if config.leakage == "error" and not problems and not is_partial:
        problems += foreseen_leakage(config)
    kept = [p for p in problems if not (is_partial and isinstance(p, UnknownKindProblem))]
    unique = {(p.path, p.message): p for p in kept}
    return [source.located(problem) for problem in unique.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """How closely a config is looked at."""

    config: ExperimentConfig
    run_code: bool
    is_partial: bool
    """The project has code that was not run."""
    whole_files: bool
    parsed: set[str] = field(default_factory=set)
    """Data files that were parsed to their end: the arms of a sweep share them."""

    def is_due(self, path: str) -> bool:
        """Whether a file is to be parsed to its end now."""
        is_due = self.whole_files and path not in self.parsed
        self.parsed.add(path)
        return is_due


def check_block(block: Block) -> list[Problem]:
    """Whether the kind exists and its params fit."""
    try:
        target = block.registry.get(block.kind)
    except UnknownKind as exc:
        hint = f"evsys list --kind {block.registry.plural}"
        return [UnknownKindProblem(path=f"{block.place}.kind", message=str(exc), value=block.kind, next_command=hint)]
    hint = f"evsys schema {block.registry.kind} {block.kind}"
    return _missing_packages(block, target) + [
        replace(problem, path=f"{block.place}.params.{problem.path}".rstrip("."), next_command=hint)
        for problem in registry.check_params(target, block.params)
    ]


def _missing_packages(block: Block, target: Any) -> list[Problem]:
    """What an extension says it `requires` (module -> our extra that brings it) and is not installed."""
    missing = {extra: module for module, extra in getattr(target, "requires", {}).items() if not _is_installed(module)}
    return [
        Problem(
            path=f"{block.place}.kind", value=block.kind, message=f"needs {module}: pip install 'evsys-sdk[{extra}]'"
        )
        for extra, module in missing.items()
    ]


def _is_installed(module: str) -> bool:
    return find_spec(module) is not None


def _block(place: str, kinds: Registry, spec: KindSpec) -> Block:
    return Block(place=place, registry=kinds, kind=spec.kind, params=spec.params)


def _experiment_blocks(config: ExperimentConfig) -> Iterator[Block]:
    yield _block("data_store", registry.data_stores, config.data_store)
    yield from _log_store_blocks(_block("log_store", registry.log_stores, config.log_store))
    yield _block("launcher", registry.launchers, config.launcher)
    for index, callback in enumerate(config.callbacks):
        yield _block(f"callbacks[{index}]", registry.callbacks, callback)


def _log_store_blocks(block: Block) -> Iterator[Block]:
    yield block
    children = block.params.get("stores") if block.kind == "multiplex" else None
    for index, child in enumerate(children if isinstance(children, list) else []):
        if isinstance(child, dict) and isinstance(child.get("kind"), str):
            place = f"{block.place}.params.stores[{index}]"
            params = child["params"] if isinstance(child.get("params"), dict) else {}
            yield from _log_store_blocks(
                Block(place=place, registry=registry.log_stores, kind=child["kind"], params=params)
            )


def _run_blocks(run: RunConfig) -> Iterator[Block]:
    yield _block("algorithm", registry.algorithms, run.algorithm)
    yield _block("backend", registry.backends, run.backend)
    for place, data in data_blocks(run):
        for index, transform in enumerate(data.transforms):
            yield _block(f"{place}.transforms[{index}]", registry.transforms, transform)
    for index, metric in enumerate(run.eval.metrics):
        yield _block(f"eval.metrics[{index}]", registry.metrics, metric)
    if run.eval.inference is not None:
        yield _block("eval.inference", registry.inference, run.eval.inference)


def data_blocks(run: RunConfig) -> Iterator[tuple[str, DataConfig]]:
    """Every data block of a run with its path: `data`, `eval.eval_data`, `continual.stages[i].data`."""
    if run.data is not None:
        yield "data", run.data
    if run.eval.eval_data is not None:
        yield "eval.eval_data", run.eval.eval_data
    if run.continual is not None:
        for index, stage in enumerate(run.continual.stages):
            yield f"continual.stages[{index}].data", stage.data


def all_data(run: RunConfig) -> Iterator[tuple[str, DataConfig]]:
    """The same with those inside an algorithm's settings."""
    yield from data_blocks(run)
    yield from _phase_data(run)


def _phase_data(run: RunConfig) -> Iterator[tuple[str, DataConfig]]:
    """The data blocks inside a `combo`'s phases; its own settings check the rest of them."""
    phases = run.algorithm.params.get("phases") if run.algorithm.kind == "combo" else None
    for index, phase in enumerate(phases if isinstance(phases, list) else []):
        with suppress(ValidationError, TypeError, AttributeError):  # told by the check of the block
            if phase.get("data") is not None:
                yield f"algorithm.params.phases[{index}].data", DataConfig.model_validate(phase["data"])


def _run_problems(run: RunConfig, looks: Looks) -> Iterator[Problem]:
    from evsys_sdk.running.early_checks import early_problems

    config = looks.config
    for block in _run_blocks(run):
        yield from check_block(block)
    for place, data in all_data(run):
        yield from _check_data(data, place, looks)
    if not looks.is_partial:
        yield from _check_best_by(run, config)
    yield from _check_recipe(run)
    yield from _check_backend(run, config)
    recipe = run.algorithm.params
    place = "algorithm.params.agent_import_path"
    if looks.run_code:
        yield from _check_agent(recipe.get("agent_import_path"), recipe.get("agent_params"), place)
    yield from _check_environment(recipe.get("environment"), "algorithm.params.environment")
    yield from _check_start(run, config)
    yield from early_problems(run, config, is_partial=looks.is_partial)


def _check_start(run: RunConfig, config: ExperimentConfig) -> Iterator[Problem]:
    """Saved weights that are not there, or that the backend is known not to be able to start from."""
    from evsys_sdk.running.checkpoint_names import checkpoint_path

    start, place = run.model.load_checkpoint_path, "model.load_checkpoint_path"
    if start is None:
        return
    try:
        start = checkpoint_path(start, "state", search_folders(source_of(config)))
    except EvsysError as exc:
        yield Problem(path=place, value=start, message=str(exc))
        return
    if "://" in start:
        return
    if not Path(start).exists():
        yield Problem(
            path=place,
            value=start,
            message="no such file or directory; a checkpoint of a run is <run>@final or <run>@step-<n>",
        )
        return
    block = _block("backend", registry.backends, run.backend)
    if check_block(block):
        return
    backend, rank = registry.backends.get(block.kind), run.algorithm.params.get("lora_rank")
    problem = None
    if hasattr(backend, "checkpoint_problem"):
        problem = backend(**block.params).checkpoint_problem(start, rank if isinstance(rank, int) else None)
    elif (Path(start) / "adapter_config.json").exists():
        problem = f"this is a PEFT adapter, which the backend {block.kind!r} does not train further; use local"
    if problem:
        yield Problem(path=place, value=start, message=problem)


def _check_recipe(run: RunConfig) -> Iterator[Problem]:
    """A recipe that the backend is known not to be able to run. Both may say so (`elsewhere`, `needs`; `offers`)."""
    recipe = _block("algorithm", registry.algorithms, run.algorithm)
    place = _block("backend", registry.backends, run.backend)
    if check_block(recipe) or check_block(place):
        return
    algorithm, backend = registry.algorithms.get(recipe.kind), registry.backends.get(place.kind)
    elsewhere = getattr(algorithm, "elsewhere", None)
    wrong = elsewhere(place.kind) if elsewhere else None
    if wrong:
        yield Problem(path="backend.kind", value=place.kind, message=wrong)
    elif hasattr(algorithm, "needs") and hasattr(backend, "offers"):
        lack = algorithm(**recipe.params).needs(backend(**place.params).offers())
        if lack:
            yield Problem(path="algorithm.kind", value=recipe.kind, message=f"on backend {place.kind!r}: {lack}")


def _check_backend(run: RunConfig, config: ExperimentConfig) -> Iterator[Problem]:
    """A model that the backend knows it cannot find, or a server that it cannot ask, where it can say so
    (`model_problem`, `access_problem`). Where runs execute elsewhere, that machine's environment is not known."""
    place = _block("backend", registry.backends, run.backend)
    if check_block(place):
        return
    backend = registry.backends.get(place.kind)(**place.params)
    why = backend.model_problem(run.model.name) if hasattr(backend, "model_problem") else None
    if why:
        yield Problem(path="model.name", value=run.model.name, message=why)
    is_here = config.launcher.kind == "local" and hasattr(backend, "access_problem")
    why = backend.access_problem(os.environ) if is_here else None
    if why:
        yield Problem(path="backend", message=why)


def _check_agent(path: Any, params: Any, place: str) -> Iterator[Problem]:
    """An agent that cannot be found, or made with these params."""
    from evsys_sdk.protocols import AgentSpec
    from evsys_sdk.rollout.agents import find_agent

    if not isinstance(path, str) or not isinstance(params or {}, dict):
        return  # there is none, or the check of the block tells
    try:
        find_agent(AgentSpec(kind=path, params=params or {}))
    except EvsysError as exc:
        yield Problem(path=place, value=path, message=str(exc))


def _check_environment(value: Any, place: str) -> list[Problem]:
    """A kind of environment that does not exist, or cannot be had on this machine."""
    from evsys_sdk.rollout.environment_checks import kind_problem

    try:
        chosen = None if value is None else EnvironmentConfig.model_validate(as_environment(value))
    except ValueError:
        return []  # the check of the block tells
    wrong = kind_problem(chosen.kind) if chosen is not None else None
    return [Problem(path=place, value=chosen.kind, message=wrong)] if chosen and wrong else []


def _check_best_by(run: RunConfig, config: ExperimentConfig) -> Iterator[Problem]:
    """Weights can only be chosen by one validation score that is made while they train."""
    from evsys_sdk.algorithms.base import LoopParams
    from evsys_sdk.running.early_checks import recipes_of
    from evsys_sdk.running.metric_checks import why_not_in_training

    for recipe in recipes_of(run):
        name = recipe.spec.params.get("best_by")
        block = _block(recipe.place, registry.algorithms, recipe.spec)
        if not isinstance(name, str) or check_block(block):
            continue
        if not issubclass(getattr(registry.algorithms.get(block.kind), "Config", object), LoopParams):
            continue  # what a project's own algorithm means by it is not known
        message = why_not_in_training(config, name, what="validation score made during training (run_every)")
        if message is not None:
            yield Problem(path=f"{recipe.place}.params.best_by", message=message, value=name)


FILE_KINDS = ("jsonl", "json", "csv", "parquet")


def _check_data(data: DataConfig, place: str, looks: Looks) -> list[Problem]:
    from evsys_sdk.data.sources import as_rows, find_path, open_source
    from evsys_sdk.data.workspace import Workspace

    config = looks.config
    folders = search_folders(source_of(config))
    ref = data.dataset_id or data.dataset_name
    try:
        if ref is not None:
            workspace = Workspace.find(source_of(config).folder)
            path = workspace.path(workspace.get(ref, "dataset"))
            if looks.is_due(str(path)):
                _read_to_the_end(jsonl.read_rows(path))
        elif data.source_kind in FILE_KINDS and not check_block(
            _block("data_store", registry.data_stores, config.data_store)
        ):
            with blame(DataError, f"data store {config.data_store.kind!r}"):
                store = registry.data_stores.build(config.data_store.kind, dict(config.data_store.params))
                find_path(str(data.path), store=store, folders=folders)
            if data.source_kind == "parquet" and find_spec("pyarrow") is None:
                raise DataError("a Parquet file needs pyarrow: pip install 'evsys-sdk[parquet]'")
            source = open_source(data, store=store, folders=folders)
            if type(store) is LocalDataStore and looks.is_due(source.name):
                _read_to_the_end(as_rows(source.rows(), source.name))
        elif data.source_kind == "hf_dataset" and find_spec("datasets") is None:
            raise DataError("an hf_dataset needs datasets: pip install 'evsys-sdk[local]'")
    except EvsysError as exc:
        key = "dataset_id" if data.dataset_id else "dataset_name" if ref else _source_key(data)
        return [Problem(path=f"{place}.{key}", message=str(exc), value=getattr(data, key))]
    return []


def _read_to_the_end(rows: Iterable[Any]) -> None:
    """A DataError comes up at the first line that is not a JSON object."""
    for _ in rows:
        pass


def _source_key(data: DataConfig) -> str:
    return "hf_dataset" if data.source_kind == "hf_dataset" else "path"


def _check_benchmark(entry: BenchmarkEntry, place: str, looks: Looks) -> list[Problem]:
    from evsys_sdk.eval.benchmark import cluster_problem, sampling_problem
    from evsys_sdk.running.scoring import find_benchmark
    from evsys_sdk.running.task_checks import undoable

    problems: list[Problem] = []
    config = looks.config
    for index, name in enumerate(entry.metrics):
        block = Block(place=f"{place}.metrics[{index}]", registry=registry.metrics, kind=name, params={})
        problems += [replace(p, path=block.place) for p in check_block(block)]
    short = None if problems else sampling_problem(entry.metrics, entry.num_samples)
    if short:
        problems.append(Problem(path=f"{place}.num_samples", message=short, value=entry.num_samples))
    if looks.run_code:
        problems += _check_agent(entry.agent_import_path, entry.agent_params, f"{place}.agent_import_path")
    problems += _check_template(entry, place, config)
    problems += _check_environment(entry.environment, f"{place}.environment")
    try:
        benchmark = find_benchmark(entry, config)
    except EvsysError as exc:
        key = "id" if entry.id else "path" if entry.path else "name"
        where = Problem(path=f"{place}.{key}", message=str(exc), value=getattr(entry, key))
        return [*problems, where, *_check_hosted_models(entry, place, [])]
    environment = entry.environment.kind if entry.environment else SANDBOX
    undone = undoable(benchmark, limit=entry.limit, environment=environment, known_only=looks.is_partial)
    problems += [Problem(path=place, message=text) for text in undone]
    unknown = cluster_problem(benchmark.tasks[: entry.limit], entry.cluster_key)
    if unknown:
        problems.append(Problem(path=f"{place}.cluster_key", message=unknown, value=entry.cluster_key))
    return problems + _check_hosted_models(entry, place, benchmark.tasks[: entry.limit])


def _check_template(entry: BenchmarkEntry, place: str, config: ExperimentConfig) -> list[Problem]:
    from evsys_sdk.training.templates import template_problem

    if entry.chat_template is None:
        return []
    wrong = template_problem(entry.chat_template, path_folders(source_of(config)))
    return [Problem(path=f"{place}.chat_template", value=entry.chat_template, message=wrong)] if wrong else []


def _check_hosted_models(entry: BenchmarkEntry, place: str, tasks: list[HarborTask]) -> list[Problem]:
    """API models that do not exist, have no key here, or cannot be put to these tasks."""
    from evsys_sdk.running.hosted import hosted_problems

    problems = []
    for index, model in enumerate(entry.models):
        block = _block(f"{place}.models[{index}]", registry.inference, model)
        wrong = check_block(block)
        problems += wrong or [Problem(path=block.place, message=text) for text in _cannot_be_asked(block)]
    refused = hosted_problems(tasks) if entry.models else []
    return problems + [Problem(path=f"{place}.models", message=text) for text in refused]


def _cannot_be_asked(block: Block) -> list[str]:
    from evsys_sdk.running.baselines import is_trained_here

    if is_trained_here(block.kind):
        return [f"{block.kind!r} asks the model that a run trains; to score that untrained, set `baseline: true`"]
    try:
        with blame(EvsysError, f"inference client {block.kind!r}"):
            registry.inference.build(block.kind, dict(block.params))
    except EvsysError as exc:
        return [str(exc)]
    return []


def ignored_settings(config: ExperimentConfig) -> list[Problem]:
    """Settings that are given and, by the meaning of another setting, will not be looked at."""
    source = source_of(config)
    found = [
        Problem(path=source.in_run(index, path), message=f"unread setting: {why}")
        for index, run in enumerate(config.all_runs())
        for path, why in (*_ignored_in_run(run), *_overridden_seed(run, config))
    ]
    if config.version > SCHEMA_VERSION:
        why = f"this SDK reads schema version {SCHEMA_VERSION}; what came later is not known to it"
        found.append(Problem(path="version", value=config.version, message=f"unread setting: {why}"))
    unique = {(p.path, p.message): p for p in found}
    return [source.located(problem) for problem in unique.values()]


def _ignored_in_run(run: RunConfig) -> Iterator[tuple[str, str]]:
    if run.continual is not None and run.data is not None:
        yield "data", "the stages of `continual` bring their own data"
    for place, data in all_data(run):
        yield from ((f"{place}.{key}", why) for key, why in _ignored_in_data(data))
    given = run.eval.model_fields_set - {"enabled"}
    if not run.eval.enabled:
        yield from ((f"eval.{key}", "eval is not enabled") for key in sorted(given))
    elif not run.eval.metrics:
        yield from ((f"eval.{key}", "eval has no metrics") for key in sorted(given - {"metrics"}))
    inference = run.eval.inference
    if inference and inference.kind in ("mock", "local", "tinker") and inference.kind != run.backend.kind:
        yield "eval.inference.kind", f"the weights live on backend {run.backend.kind!r} and are sampled there"


def _overridden_seed(run: RunConfig, config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    if config.base_seed is not None and "seed" in run.model_fields_set:
        yield "seed", "base_seed is set"


def _ignored_in_data(data: DataConfig) -> Iterator[tuple[str, str]]:
    uses = {"in_memory": {"rows"}, "hf_dataset": {"hf_dataset", "hf_split"}}
    sources = {"source_kind", "path", "rows", "hf_dataset", "hf_split"}
    ref = "dataset_id" if data.dataset_id else "dataset_name" if data.dataset_name else None
    used = set() if ref else uses.get(data.source_kind, {"path"}) | {"source_kind"}
    why = f"{ref} is set" if ref else f"source_kind is {data.source_kind}"
    for key in sorted((sources - used) & data.model_fields_set):
        yield key, why
