"""What can be known to be wrong before anything is spent.

In: a config. Out: problems with their places. `evsys validate` prints them, a run refuses to start on them. Every
kind/params block, every file and every verifier that a run will touch is looked at. Nothing is trained or asked, but
the project's own code is imported, because its extensions are otherwise not known; `run_code=False` imports none of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from evsys_sdk import registry
from evsys_sdk.algorithms.base import LoopParams
from evsys_sdk.checks.benchmarks import agent_problems, entry_problems, environment_problems, hosted_model_problems
from evsys_sdk.checks.blocks import (
    UnknownKindProblem,
    all_data,
    block_at,
    check_block,
    experiment_blocks,
    recipes_of,
    run_blocks,
)
from evsys_sdk.checks.contamination import foreseen_leakage
from evsys_sdk.checks.metrics import direction_warnings, metric_problems, why_not_in_training, with_judged_metrics
from evsys_sdk.checks.prompts import prompt_search_problems, prompt_search_warnings, prompt_warnings
from evsys_sdk.checks.rows import early_problems, source_problems
from evsys_sdk.checks.search import search_problems
from evsys_sdk.checks.test_selection import overlap_problems, overlap_warnings
from evsys_sdk.config.key_places import places_of_keys
from evsys_sdk.config.load import load_yaml, plain
from evsys_sdk.config.metadata import Hypothesis, Metadata
from evsys_sdk.config.project import extension_names, import_extensions, own_code_paths, search_folders
from evsys_sdk.config.schema import SCHEMA_VERSION, SOURCE_KEYS, DataConfig, ExperimentConfig, RunConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.constants import UNTRAINED
from evsys_sdk.data.sources import source_settings
from evsys_sdk.errors import ConfigError, EvsysError, Problem, UnknownKind, closest, not_known
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.files import to_json
from evsys_sdk.history.checkpoint_refs import checkpoint_path
from evsys_sdk.inference.policy import is_trained_here

NOTES_THAT_ARE_SETTINGS = frozenset(
    ["algorithm", "backend", "baseline", "budget", "callbacks", "continual", "imports", "leakage", "matrix", "runs"]
)
"""Keys of one word that are no word for a note."""
OF_THE_MOCK = "the mock backend has its own template"
FILE_AND_LINE = r"\S.*?:\d+: "
"""How a message begins that is about a line of a file."""


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
    with _code_allowed(run_code):
        config = load_yaml(path, overrides=overrides)
        found = deep_problems(config, run_code=run_code, whole_files=True) if deep else []
    found += ignored_settings(config) if strict else []
    if found:
        raise ConfigError(source_of(config).label, found)
    return config


def _code_allowed(run_code: bool) -> AbstractContextManager[None]:
    return nullcontext() if run_code else registry.built_ins_only()


def _code_not_run(config: ExperimentConfig) -> list[str]:
    """What would register extensions, and is not run without leave: the project's modules and entry points."""
    return [*extension_names(config), *registry.entry_point_names()]


def deep_warnings(config: ExperimentConfig, *, run_code: bool = True) -> list[Problem]:
    """What is not wrong with a config but should be known before it is run, located."""
    with _code_allowed(run_code):
        is_partial = not run_code and bool(_code_not_run(config))
        benchmarks = BenchmarkLoader(config)
        found = [*overlap_warnings(config, benchmarks), *prompt_warnings(config, benchmarks)]
        found += [] if is_partial else direction_warnings(config)
        found += misplaced_notes(config)
        found += prompt_search_warnings(config)
        # Under `error` it has been a problem; without the project's transforms its rows are not known.
        if config.leakage == "warn" and not is_partial:
            found += foreseen_leakage(config, benchmarks)
        not_run = [] if run_code else [*_code_not_run(config), *own_code_paths(config)]
        if not_run:
            message = f"the project's code ({', '.join(not_run)}) was not run, so what it registers was not checked"
            found.append(source_of(config).located(Problem(path="imports", message=message)))
        return found


def misplaced_notes(config: ExperimentConfig) -> list[Problem]:
    """Notes in `metadata` that look like settings: nothing reads them there. Any note is allowed, so they are no
    mistakes."""
    known = [*Metadata.model_fields]
    found = []
    for key in config.metadata.model_extra or {}:
        near = closest(key, known)
        # A word such as `model` or `path` is as likely a note; what is called like nothing else is a setting.
        places = [place for place in places_of_keys().get(key, []) if "_" in key or key in NOTES_THAT_ARE_SETTINGS]
        if near and not places:
            message = f"is a note that nothing reads; the setting is called {near}"
        elif places:
            where = f"under `{places[0]}`" if places[0] else "at the top level"
            message = f"is a note that nothing reads here; as a setting it belongs {where}"
        else:
            continue
        found.append(source_of(config).located(Problem(path=f"metadata.{key}", message=message)))
    return found


def deep_problems(
    config: ExperimentConfig,
    *,
    run_code: bool = True,
    whole_files: bool = False,
    benchmarks: BenchmarkLoader | None = None,
) -> list[Problem]:
    """Everything that is wrong with the blocks, files and verifiers of a config, located.

    `whole_files`: every line of the data files is parsed, which a run does itself when it loads them. `benchmarks`:
    those of the experiment, which then need not parse them again.
    """
    benchmarks = benchmarks or BenchmarkLoader(config)
    if run_code:
        import_extensions(config)
    # What the project would register is not known: names that are missing may be its own.
    is_partial = not run_code and bool(_code_not_run(config))
    config, source = with_judged_metrics(config), source_of(config)
    problems = [problem for block in experiment_blocks(config) for problem in check_block(block)]
    has_store = not any(problem.path.startswith("data_store.") for problem in problems)
    if not is_partial:
        problems += search_problems(config)
        problems += metric_problems(config)
    problems += arm_problems(config)
    problems += prompt_search_problems(config)
    problems += overlap_problems(config, benchmarks)
    for index, entry in enumerate(config.metadata.benchmark):
        place = f"metadata.benchmark[{index}]"
        problems += entry_problems(entry, place, config, benchmarks, run_code=run_code, is_partial=is_partial)
    scope = CheckScope(
        config=config, run_code=run_code, is_partial=is_partial, whole_files=whole_files, has_store=has_store
    )
    for index, run in enumerate(config.all_runs()):
        problems += [replace(problem, path=source.in_run(index, problem.path)) for problem in _run_problems(run, scope)]
    # Only where all else is right: the audit reads the rows and benchmarks that were checked above.
    if config.leakage == "error" and not problems and not is_partial:
        problems += foreseen_leakage(config, benchmarks)
    kept = [p for p in problems if not (is_partial and isinstance(p, UnknownKindProblem))]
    # A broken line of a file is one problem, however many runs read the file.
    unique: dict[tuple[str, str], Problem] = {}
    for p in nearest_places(kept):
        unique.setdefault(("" if re.match(FILE_AND_LINE, p.message) else p.path, p.message), p)
    return [source.located(problem) for problem in unique.values()]


def nearest_places(problems: Iterable[Problem]) -> list[Problem]:
    """Each problem once. Two checks may see one mistake: of `run.data` and `run.data.path` with the same words, the
    nearer place is kept."""
    unique = {(p.path, p.message): p for p in problems}
    # Every place that encloses a problem, with its message: a problem there is the same mistake seen from further out.
    around = {(path[: dot.start()], message) for path, message in unique for dot in re.finditer(r"\.", path)}
    return [p for key, p in unique.items() if key not in around]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckScope:
    """How closely the runs of a config are looked at, and what they share, so that it is looked at once."""

    config: ExperimentConfig
    run_code: bool
    is_partial: bool
    """The project has code that was not run."""
    whole_files: bool
    has_store: bool
    """The data store can be built."""
    parsed: set[str] = field(default_factory=set)
    """Data files that were parsed to their end."""
    sources: dict[str, list[Problem]] = field(default_factory=dict)
    """Sources of rows that were opened, with what is wrong with them."""

    def source_problems(self, data: DataConfig) -> list[Problem]:
        key = to_json(plain(data))
        if key not in self.sources:
            self.sources[key] = source_problems(data, self.config, has_store=self.has_store, is_due=self._is_due)
        return self.sources[key]

    def _is_due(self, path: str) -> bool:
        """Whether a file is to be parsed to its end now."""
        is_due = self.whole_files and path not in self.parsed
        self.parsed.add(path)
        return is_due


def _run_problems(run: RunConfig, scope: CheckScope) -> Iterator[Problem]:
    config, recipes = scope.config, recipes_of(run)
    broken = set[str]()  # places of blocks that are wrong in themselves: what they would make is not asked
    for block in run_blocks(run):
        problems = check_block(block)
        yield from problems
        broken |= {block.place} if problems else set()
    for place, data in all_data(run):
        for problem in scope.source_problems(data):
            yield replace(problem, path=f"{place}.{problem.path}")
    # Weights can only be chosen by one validation score that is made while they train.
    for recipe in recipes if not scope.is_partial else ():
        name = recipe.spec.params.get("best_by")
        if not isinstance(name, str) or recipe.place in broken:
            continue
        if check_block(block_at(recipe.place, registry.algorithms, recipe.spec)):
            continue
        # What a project's own algorithm means by it is not known.
        if issubclass(getattr(registry.algorithms.get(recipe.spec.kind), "Config", object), LoopParams):
            message = why_not_in_training(config, name, what="validation score made during training (run_every)")
            if message is not None:
                yield Problem(path=f"{recipe.place}.params.best_by", message=message, value=name)
    if "backend" not in broken:
        yield from _backend_problems(run, config, knows_algorithm="algorithm" not in broken)
    inference = run.eval.inference
    if inference is not None and run.eval.enabled and run.eval.metrics and config.launcher.kind == "local":
        if "eval.inference" not in broken and not is_trained_here(inference.kind):
            yield from hosted_model_problems(block_at("eval.inference", registry.inference, inference))
    for recipe in recipes:
        params, place = recipe.spec.params, f"{recipe.place}.params"
        if scope.run_code:
            agent = params.get("agent_import_path")
            yield from agent_problems(agent, params.get("agent_params"), place)
        yield from environment_problems(params.get("environment"), f"{place}.environment", run_code=scope.run_code)
    yield from _start_problems(run, config, knows_backend="backend" not in broken)
    checked = [] if "algorithm" in broken else recipes
    yield from early_problems(run, checked, config, is_partial=scope.is_partial)


def _backend_problems(run: RunConfig, config: ExperimentConfig, *, knows_algorithm: bool) -> Iterator[Problem]:
    """A recipe that the backend is known not to be able to run, a model that it cannot find, a server that it cannot
    ask. Each may say so or not: an algorithm by `elsewhere` and `needs`, a backend by `offers`, `model_problem` and
    `access_problem`."""
    backend_class = registry.backends.get(run.backend.kind)
    backend = backend_class(**run.backend.params)
    if knows_algorithm:
        algorithm = registry.algorithms.get(run.algorithm.kind)
        wrong = algorithm.elsewhere(run.backend.kind) if hasattr(algorithm, "elsewhere") else None
        if wrong:
            yield Problem(path="backend.kind", value=run.backend.kind, message=wrong)
        elif hasattr(algorithm, "needs") and hasattr(backend, "offers"):
            lack = algorithm(**run.algorithm.params).needs(backend.offers())
            if lack:
                message = f"on backend {run.backend.kind!r}: {lack}"
                yield Problem(path="algorithm.kind", value=run.algorithm.kind, message=message)
    why = backend.model_problem(run.model.name) if hasattr(backend, "model_problem") else None
    if why:
        yield Problem(path="model.name", value=run.model.name, message=why)
    # Where runs execute elsewhere, that machine's environment is not known.
    is_here = config.launcher.kind == "local" and hasattr(backend, "access_problem")
    why = backend.access_problem(os.environ) if is_here else None
    if why:
        yield Problem(path="backend", message=why)


def _start_problems(run: RunConfig, config: ExperimentConfig, *, knows_backend: bool) -> Iterator[Problem]:
    """Saved weights that are not there, or that the backend is known not to be able to start from."""
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
    problem = None
    if not Path(start).exists():
        problem = "no such file or directory; a checkpoint of a run is <run>@final or <run>@step-<n>"
    elif knows_backend:
        backend, rank = registry.backends.get(run.backend.kind), run.algorithm.params.get("lora_rank")
        if hasattr(backend, "checkpoint_problem"):
            rank = rank if isinstance(rank, int) else None
            problem = backend(**run.backend.params).checkpoint_problem(start, rank)
        elif (Path(start) / "adapter_config.json").exists():
            kind = run.backend.kind
            problem = f"this is a PEFT adapter, which the backend {kind!r} does not train further; use local"
    if problem:
        yield Problem(path=place, value=start, message=problem)


def arm_problems(config: ExperimentConfig) -> list[Problem]:
    """Arms that the config speaks of and does not have: the baseline arm and the two of a prediction; and a prediction
    that compares an arm with itself. The arms of a search are not known beforehand."""
    metadata = config.metadata
    arms = [run.name for run in config.all_runs()] if config.search is None else []
    prediction = metadata.hypothesis.prediction if isinstance(metadata.hypothesis, Hypothesis) else None
    named = {"metadata.baseline_arm": metadata.baseline_arm}
    if prediction is not None:
        place = "metadata.hypothesis.prediction"
        named |= {
            f"{place}.{key}": name
            for key, name in (("arm", prediction.arm), ("vs", prediction.vs))
            if name != UNTRAINED
        }
    known = [*arms, UNTRAINED] if prediction is not None else arms
    problems = [
        Problem(path=place, message=not_known(name, "arm", known), value=name)
        for place, name in named.items()
        if config.search is None and name is not None and name not in arms
    ]
    baseline = metadata.baseline_arm or (arms[0] if arms else UNTRAINED)
    if prediction is not None and prediction.arm == (prediction.vs or baseline):
        default = "" if prediction.vs else f" (without prediction.vs that is {baseline})"
        message = f"would be compared with itself{default}; name another arm, or `{UNTRAINED}`, as prediction.vs"
        problems.append(Problem(path="metadata.hypothesis.prediction.arm", message=message, value=prediction.arm))
    return problems


def ignored_settings(config: ExperimentConfig) -> list[Problem]:
    """Settings that are given and, by the meaning of another setting, will not be looked at."""
    source = source_of(config)
    found = [
        Problem(path=source.in_run(index, path), message=f"unread setting: {why}")
        for index, run in enumerate(config.all_runs())
        for path, why in _ignored_in_run(run, has_base_seed=config.base_seed is not None)
    ]
    if all(run.backend.kind == "mock" for run in config.all_runs()):
        for index, entry in enumerate(config.metadata.benchmark):
            if entry.chat_template is not None:
                message = f"unread setting: {OF_THE_MOCK}"
                found.append(Problem(path=f"metadata.benchmark[{index}].chat_template", message=message))
    if config.version > SCHEMA_VERSION:
        why = f"this SDK reads schema version {SCHEMA_VERSION}; what came later is not known to it"
        found.append(Problem(path="version", value=config.version, message=f"unread setting: {why}"))
    unique = {(p.path, p.message): p for p in found}
    return [source.located(problem) for problem in unique.values()]


def _ignored_in_run(run: RunConfig, *, has_base_seed: bool) -> Iterator[tuple[str, str]]:
    if run.continual is not None and run.data is not None:
        yield "data", "the stages of `continual` bring their own data"
    for place, data in all_data(run):
        ref = "dataset_id" if data.dataset_id else "dataset_name" if data.dataset_name else None
        sources = {"source_kind", "source_params", *SOURCE_KEYS}
        try:
            with registry.built_ins_only():  # also asked where no code of the project may run
                used = set() if ref else {"source_kind", "source_params", *source_settings(data)}
        except UnknownKind:
            used = sources  # reported by the check of the source
        why = f"{ref} is set" if ref else f"source_kind is {data.source_kind}"
        for key in sorted((sources - used) & data.model_fields_set):
            yield f"{place}.{key}", why
    given = run.eval.model_fields_set - {"enabled"}
    if not run.eval.enabled:
        yield from ((f"eval.{key}", "eval is not enabled") for key in sorted(given))
    elif not run.eval.metrics:
        yield from ((f"eval.{key}", "eval has no metrics") for key in sorted(given - {"metrics"}))
    inference = run.eval.inference
    if inference and inference.kind in ("mock", "local", "tinker") and inference.kind != run.backend.kind:
        yield "eval.inference.kind", f"the weights live on backend {run.backend.kind!r} and are sampled there"
    if run.backend.kind == "mock" and run.model.renderer_name is not None:
        yield "model.renderer_name", OF_THE_MOCK
    if has_base_seed and "seed" in run.model_fields_set:
        yield "seed", "base_seed is set"
