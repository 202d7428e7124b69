"""What the `research` block and the schemas allow.

In: a recipe, the block and the config. Out: the parts of a `Space`: the kinds that can stand in for each other here,
the items of lists, explicit settings, what must stay; and the check of a child as a file. Mistakes in the block are a
ConfigError with their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from evsys_sdk import registry
from evsys_sdk.checks.blocks import data_blocks, recipes_of
from evsys_sdk.checks.contamination import foreseen_audits
from evsys_sdk.config.base import KindSpec
from evsys_sdk.config.load import plain
from evsys_sdk.config.research import ResearchSpec
from evsys_sdk.config.run_config import Range, RunConfig
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.sweep import unknown_axis
from evsys_sdk.config.yaml_io import remember, source_of
from evsys_sdk.contamination.audit import Audit
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import FOREIGN, ConfigError, Problem, closest
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.explain import problems_of, show_path, split_path
from evsys_sdk.files import to_json
from evsys_sdk.research.recipes import list_of, with_values
from evsys_sdk.research.settings import KindBlock, Setting, settings_of_schema

NEVER = ("name", "seed", "eval", "tags")
"""What research never changes, whatever the block says: chance, and what scores are made of."""
FIXED = (
    *NEVER, "backend.kind", "model.name", "model.load_checkpoint_path",
)  # fmt: skip
"""What `space: auto` leaves as it is: another model or other weights answer another question."""
SOURCE = (
    "source_kind", "path", "rows", "hf_dataset", "hf_split", "source_params", "dataset_id", "dataset_name",
)  # fmt: skip
"""Where rows come from."""
STAY = ("split", "filter", "identity", "shuffle")
"""Transforms that stay where they are: the first two may keep the rows of a test out, the others change nothing that
is trained, because rows are shuffled for every epoch anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a space is made of."""

    settings: tuple[Setting, ...] = ()
    kinds: Mapping[str, Mapping[str, KindBlock]] = field(default_factory=dict)
    lists: Mapping[str, Mapping[str, KindBlock]] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    free: frozenset[str] | None = None


@dataclass(slots=True)
class FileCheck:
    """What is wrong with a recipe as the only run of a config: what `evsys validate --deep` would say, and whether its
    rows hold tasks of a benchmark, test ones included, that the config's own rows do not hold."""

    config: ExperimentConfig
    benchmarks: BenchmarkLoader
    seen: dict[str, list[Problem]] = field(default_factory=dict)
    leaks: dict[str, list[Problem]] = field(default_factory=dict)
    """Data blocks -> what their rows have in common with benchmarks. The audit takes long."""
    own: dict[str, Audit] | None = None
    """Benchmark -> what it has in common with the config's own rows."""

    @classmethod
    def of(cls, config: ExperimentConfig) -> FileCheck:
        return cls(config=config, benchmarks=BenchmarkLoader(config))

    def __call__(self, recipe: JsonObject) -> list[Problem]:
        key = to_json(recipe)
        if key not in self.seen:
            self.seen[key] = self._problems(recipe)
        return self.seen[key]

    def _problems(self, recipe: JsonObject) -> list[Problem]:
        try:
            run = RunConfig.model_validate({**recipe, "name": "candidate"})
        except ValidationError as exc:
            return problems_of(exc, RunConfig)
        # Late: proposers are registered whenever a kind is looked up, and the checks bring in what runs need.
        from evsys_sdk.checks.preflight import deep_problems

        found = deep_problems(self._config_of(run, leakage="off"), benchmarks=self.benchmarks)
        if not found and self.config.leakage != "off":
            rows = to_json([plain(data) for _, data in data_blocks(run)])
            if rows not in self.leaks:
                self.leaks[rows] = [*self._leaks(run)]
            found = self.leaks[rows]
        # Lines of the file belong to the config's own run.
        return [replace(problem, path=problem.path.removeprefix("run."), line=None) for problem in found]

    def _leaks(self, run: RunConfig) -> Iterator[Problem]:
        if self.own is None:
            own = self._config_of(self.config.all_runs()[0], leakage=self.config.leakage)
            self.own = {audit.benchmark: audit for _, audit in foreseen_audits(own, self.benchmarks)}
        for place, audit in foreseen_audits(self._config_of(run, leakage=self.config.leakage), self.benchmarks):
            if has_more_tasks(audit, self.own.get(audit.benchmark)):
                yield Problem(path=place, message=f"leakage: {audit.text}")

    def _config_of(self, run: RunConfig, *, leakage: str) -> ExperimentConfig:
        one = {"run": run, "runs": [], "matrix": None, "base_run": None, "search": None, "leakage": leakage}
        config = self.config.model_copy(update=one)
        config.__pydantic_fields_set__.difference_update({"runs", "matrix", "base_run", "search"})
        remember(config, source_of(self.config))
        return config


def has_more_tasks(audit: Audit, own: Audit | None) -> bool:
    """Whether rows hold tasks of a benchmark that the config's own rows do not. Of many, only the first are named: then
    their number decides."""
    if audit.clean or own is None:
        return not audit.clean
    known = {leak.task_id for leak in own.leaks}
    are_named = len(own.leaks) == own.tasks
    return audit.tasks > own.tasks or (are_named and any(leak.task_id not in known for leak in audit.leaks))


def parts_of(recipe: JsonObject, spec: ResearchSpec, check: Callable[[JsonObject], list[Problem]]) -> Parts:
    """The parts of the space that the block asks for."""
    run = RunConfig.model_validate({**recipe, "name": "candidate"})
    places = [(one.place, one.spec) for one in recipes_of(run)]
    problems = [Problem(path=f"research.fix[{i}]", value=path, message=why) for i, path in enumerate(spec.fix)
                if (why := _no_setting(path, places))]  # fmt: skip
    fixed = frozenset([*map(normal_path, spec.fix), *NEVER, *seeds_in(recipe)])
    if spec.space == "auto":
        _refuse(problems)
        sources = [f"{place}.{key}" for place, _ in data_blocks(run) for key in SOURCE]
        # Phases hand one adapter on: its size in one of them alone would be no legal file.
        sources += [f"{place}.params.lora_rank" for place, _ in places if place != "algorithm"]
        return Parts(
            # Of a backend, what its schema calls tunable is research; the rest is the machine.
            settings=tuple(
                replace(setting, path=f"backend.params.{setting.path}", when={})
                for setting in settings_of_schema(registry.backends.schema(run.backend.kind))
            ),
            kinds={place: _kinds_at(place, block, recipe, check) for place, block in places},
            lists={f"{place}.transforms": _items(place, recipe, check) for place, _ in data_blocks(run)
                   if not place.startswith("eval.")},
            fixed=fixed | {*FIXED, *sources},
        )  # fmt: skip
    return _explicit(spec.space, places, fixed, problems)


def _explicit(
    space: Mapping[str, list[object] | Range],
    places: list[tuple[str, KindSpec]],
    fixed: frozenset[str],
    problems: list[Problem],
) -> Parts:
    """The settings that the block lists, and no others."""
    settings: list[Setting] = []
    axes = {normal_path(path): axis for path, axis in space.items()}
    names = {place: [str(kind) for kind in axis] for place, _ in places
             if isinstance(axis := axes.get(f"{place}.kind"), list)}  # fmt: skip
    kinds: dict[str, dict[str, list[Setting]]] = {
        place: {kind: [] for kind in names.get(place, [block.kind])} for place, block in places
    }
    schemas = {kind: _schema(kind) for known in kinds.values() for kind in known}
    for path, axis in axes.items():
        place, below = next(
            ((at, path[len(at) + 8 :]) for at, _ in places if path.startswith(f"{at}.params.")), ("", "")
        )
        key = below.partition(".")[0]
        known = [kind for kind in kinds.get(place, {}) if key in schemas[kind]]
        why = _no_setting(path, places, known_keys=None if known else []) or _must_stay(path, fixed)
        if why is not None:
            value = None if isinstance(axis, Range) else axis
            problems.append(Problem(path=f"research.space.{path}", message=why, value=value))
            continue
        for kind in known:
            default = schemas[kind][key].get("default") if key == below else None
            kinds[place][kind].append(_of_axis(below, axis, default))
        if not known and path not in {f"{at}.kind" for at, _ in places}:
            settings.append(_of_axis(path, axis, None))
    _refuse(problems)
    blocks = {
        place: {
            kind: KindBlock(kind=kind, settings=tuple(found), names=frozenset(schemas[kind]))
            for kind, found in known.items()
        }
        for place, known in kinds.items()
    }
    # A whole block or list among the values is a choice like any other; then its kinds are not looked at.
    whole = [place for place in blocks if place in axes]
    free = frozenset(axes) | {f"{place}" for place in names}
    return Parts(
        settings=tuple(settings), kinds={place: known for place, known in blocks.items() if place not in whole},
        fixed=fixed, free=free,
    )  # fmt: skip


def normal_path(path: str) -> str:
    return show_path(split_path(path))


def seeds_in(recipe: object, place: str = "") -> Iterator[str]:
    """Every seed inside the recipe's blocks, as that of a transform."""
    inner = recipe.items() if isinstance(recipe, dict) else enumerate(recipe) if isinstance(recipe, list) else ()
    for key, value in inner:
        path = f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}".removeprefix(".")
        if key == "seed":
            yield path
        yield from seeds_in(value, path)


def _must_stay(path: str, fixed: frozenset[str]) -> str | None:
    parts = split_path(path)
    if parts[-1] == "seed" or parts[0] in NEVER:
        return "is never changed by research: chance, and what scores are made of, stay as they are"
    if any(normal == show_path(parts[:end]) for normal in fixed for end in range(1, len(parts) + 1)):
        return "is in research.fix too; keep one"
    return None


def _no_setting(path: str, places: list[tuple[str, KindSpec]], known_keys: list[str] | None = None) -> str | None:
    """Why there is no such setting; None where there is one. `known_keys`: those of params, looked up by default."""
    normal = normal_path(path)
    if (why := unknown_axis(split_path(path))) is not None and normal != "name":
        return why
    for place, block in places:
        if not normal.startswith(f"{place}.params."):
            continue
        key = normal[len(place) + 8 :].partition(".")[0].partition("[")[0]
        schema = _schema(block.kind)
        if key not in schema and known_keys == []:
            near = closest(key, [*schema])
            return f"is not a setting of {block.kind}{f'; closest: {near}' if near else ''}"
    return None


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError("research", problems)


def _schema(kind: str) -> dict[str, JsonObject]:
    properties = registry.algorithms.schema(kind).get("properties", {})
    assert isinstance(properties, dict)
    return {name: about for name, about in properties.items() if isinstance(about, dict)}


def _of_axis(path: str, axis: list[object] | Range, default: object) -> Setting:
    if isinstance(axis, Range):
        return Setting(path=path, low=axis.low, high=axis.high, log=axis.log, whole=axis.int, default=default)
    return Setting(path=path, values=tuple(axis), default=default)


def _kinds_at(
    place: str, now: KindSpec, recipe: JsonObject, check: Callable[[JsonObject], list[Problem]]
) -> dict[str, KindBlock]:
    """The kinds of algorithm that may stand at the place: those whose defaults make a legal file here. Of a
    class and those made of it, as `sft` and `mock_sft`, one; inside a combo only the kind that is there."""
    own = _algorithm_block(now.kind)
    if own is None:
        return {now.kind: KindBlock(kind=now.kind)}
    found, classes = {now.kind: own}, [registry.algorithms.get(now.kind)]
    for kind in registry.algorithms.names() if place == "algorithm" else []:
        target, block = registry.algorithms.get(kind), _algorithm_block(kind)
        if block is None or any(issubclass(target, one) or issubclass(one, target) for one in classes):
            continue
        params = {name: value for name, value in now.params.items() if name in block.names}
        if not check({**recipe, "algorithm": {"kind": kind, "params": params}}):
            found[kind] = block
            classes.append(target)
    return found


def _algorithm_block(kind: str) -> KindBlock | None:
    """The kind with its tunable settings; None for one without a schema to read."""
    try:
        schema = registry.algorithms.schema(kind)
    except FOREIGN:  # a project's class whose Config has no JSON schema
        return None
    return KindBlock(kind=kind, settings=settings_of_schema(schema), names=frozenset(_schema(kind)))


def _items(place: str, recipe: JsonObject, check: Callable[[JsonObject], list[Problem]]) -> dict[str, KindBlock]:
    """The transforms that may be put in, taken out or moved: ours, as the config has them, or complete by default and
    legal at the end or the beginning of the list."""
    path = f"{place}.transforms"
    items = list_of(recipe, path)
    used = {str(item["kind"]): item for item in items}
    found = {}
    for kind in registry.transforms.names():
        target = registry.transforms.get(kind)
        if not target.__module__.startswith("evsys_sdk.") or kind in STAY:
            continue  # what a project's transform does to rows is not known
        item = used.get(kind, {"kind": kind})
        params = item.get("params") or {}
        assert isinstance(params, dict)
        tries = ([*items, item], [item, *items])
        if kind in used or any(not check(with_values(recipe, {path: one})) for one in tries):
            found[kind] = KindBlock(
                kind=kind, params=params, settings=settings_of_schema(registry.transforms.schema(kind))
            )
    return found
