"""One registry per extension point: a name in the YAML on the left, a class on the right.

In: classes, by decorator or entry point. Out: look-ups, listings and JSON schemas. Built-ins and
entry points load at the first look-up, so that `import evsys_sdk` stays light.

Who may take which name: two extensions that claim the same name are refused when the second one registers, also where
the first is a built-in. Exceptions are the two names that the published documents register themselves (`EXAMPLES`).
"""

from __future__ import annotations

import importlib
import inspect
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from evsys_sdk import _entry_points
from evsys_sdk.errors import FOREIGN, ConfigError, DuplicateKind, Problem, UnknownKind, not_known

if TYPE_CHECKING:
    from pydantic import BaseModel

    from evsys_sdk.data_types import JsonObject

T = TypeVar("T")
EXAMPLES = {("transform", "dedupe"), ("metric", "pass@2")}
"""Built-ins whose names a published document gives to a class of the project: there the project's class is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One registered extension."""

    name: str
    target: object
    """The class (or, for verifiers, the function) as it was registered."""
    origin: str
    """The module it came from; shown by `evsys list`."""


@dataclass(slots=True)
class Registry:
    """All extensions of one kind."""

    kind: str
    """Singular, as in `evsys schema <kind>`."""
    plural: str
    """As in `evsys list --kind <plural>` and in the entry-point group."""
    adapt: Callable[[object], object] | None = None
    """Checks a newcomer and brings it into the one form the SDK calls; raises TypeError when it has none. The room of
    the extension sets it when it is imported: `verifiers.adapt`, `eval.metrics`."""
    match: Callable[[str], object] | None = None
    """Answers names that form a family, such as `pass@7`; exact registrations come first."""
    entries: dict[str, Registration] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    """Entry points that could not be loaded: name -> reason."""

    @property
    def group(self) -> str:
        return f"evsys_sdk.{self.plural}"

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: `@register("sft")` on a class makes `kind: sft` mean that class."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"register_{self.kind} takes a name: @register_{self.kind}('my_{self.kind}')")

        def decorate(target: T) -> T:
            with _lock:
                if not _is_built_in(target):
                    _load_built_ins()  # so that a taken name is refused here, not at the first look-up
                self._add(name, target)
            return target

        return decorate

    def _add(self, name: str, target: object) -> None:
        if self.adapt is not None:
            self.adapt(target)
        # A name may be taken by an entry, or by one of a family of built-ins such as `pass@7`.
        old = self.entries[name].target if name in self.entries else self.match(name) if self.match else None
        if old is not None and not _is_redefined(old, target):
            if (self.kind, name) not in EXAMPLES or _is_built_in(old) == _is_built_in(target):
                raise DuplicateKind(
                    f"{self.kind} {name!r} is already registered by {_describe(old)}; "
                    f"register {_describe(target)} under another name"
                )
            if _is_built_in(target):
                return  # a project took the name before the built-in was loaded
        if inspect.isclass(target) and not callable(getattr(target, "name", None)):  # harbor's agents have name()
            target.name = name  # type: ignore[attr-defined]
        self.entries[name] = Registration(name=name, target=target, origin=getattr(target, "__module__", "?"))

    def get(self, name: str) -> Any:
        """The extension registered under `name`; a `KeyError` that lists what there is otherwise."""
        load_all()
        if name in self.entries:
            return self.entries[name].target
        found = self.match(name) if self.match else None
        if found is None:
            reason = f" (its entry point is broken: {self.broken[name]})" if name in self.broken else ""
            raise UnknownKind(not_known(name, self.kind.replace("_", " "), self.entries) + reason)
        return found

    def adapted(self, name: str) -> Any:
        """What `name` means, in the one form the SDK calls; the thing itself where there is only one form."""
        target = self.get(name)
        return self.adapt(target) if self.adapt else target

    def names(self) -> list[str]:
        load_all()
        return sorted(self.entries)

    def schema(self, name: str) -> JsonObject:
        """JSON schema of the extension's params; an empty closed object where it takes none."""
        target = self.get(name)
        config = config_model(target) or config_model(self.adapted(name)) or _signature_model(name, target)
        if config is None:
            return {"title": name, "type": "object", "properties": {}, "additionalProperties": False}
        from evsys_sdk.explain import described_schema

        return described_schema(config)

    def build(self, name: str, params: Mapping[str, object]) -> Any:
        """An instance of `name` with `params`; bad params come out as a ConfigError."""
        cls = self.get(name)
        problems = check_params(cls, params)
        if problems:
            raise ConfigError(f"{self.kind} {name!r}", problems)
        return cls(**params)


def _is_redefined(old: object, new: object) -> bool:
    """Same object, or the same module-level definition executed again (a reload, a notebook cell)."""
    places = [(getattr(target, "__module__", ""), getattr(target, "__qualname__", "")) for target in (old, new)]
    name = places[1][1]
    return old is new or (places[0] == places[1] and name != "" and "<locals>" not in name)


def _is_built_in(target: object) -> bool:
    return str(getattr(target, "__module__", "")).startswith("evsys_sdk.")


def _describe(target: object) -> str:
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"


def config_model(target: object) -> type[BaseModel] | None:
    """The pydantic `Config` of an extension, or None when it has none."""
    config = getattr(target, "Config", None)
    return config if hasattr(config, "model_json_schema") else None


def scored_block(kinds: Registry, kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """A `{kind, params}` block with the params that can change scores, as far as the extension says which."""
    scored_settings = getattr(config_model(kinds.get(kind)), "scored_settings", None)
    try:
        return {"kind": kind, "params": dict(params) if scored_settings is None else scored_settings(params)}
    except (TypeError, ValueError):  # params that do not fit are reported where they are used
        return {"kind": kind, "params": dict(params)}


def _signature_model(name: str, target: object) -> type[BaseModel] | None:
    """The arguments of a class without `Config` as a model, so that its schema tells what it takes."""
    from pydantic import ConfigDict, create_model

    if not inspect.isclass(target) or target.__init__ is object.__init__:
        return None
    fields = {
        parameter.name: (
            object
            if isinstance(parameter.annotation, str) or parameter.annotation is parameter.empty
            else parameter.annotation,
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return create_model(name, __config__=config, **fields) if fields else None  # type: ignore[call-overload]


def check_params(target: Any, params: Mapping[str, object], *, kind: str | None = None) -> list[Problem]:
    """What is wrong with `params` for this extension; paths are relative to the params block. With the `kind` of
    extension, a setting that belongs into the params of another block is named with that place."""
    config = config_model(target)
    if config is None:
        return _check_signature(target, params, kind)
    from pydantic import ValidationError

    from evsys_sdk.explain import problems_of

    problems: list[Problem] = []
    known = {info.alias or name for name, info in config.model_fields.items()}
    if config.model_config.get("extra") != "allow":
        # A Config that merely ignores extra keys would hide a typo, so we look ourselves.
        problems += unknown_params(known, params, kind=kind)
        params = {key: value for key, value in params.items() if key in known}
    try:
        config.model_validate(params)
    except ValidationError as exc:
        problems += problems_of(exc, config)
    except FOREIGN as exc:
        problems.append(Problem(path="", message=f"its Config raised {type(exc).__name__}: {exc}"))
    # pydantic takes `true` for 1, and that is not what `max_steps: true` means.
    numbers = (int, float, int | None, float | None)
    return problems + [
        Problem(path=key, value=value, message="must be a number, not true or false")
        for key, value in params.items()
        if isinstance(value, bool) and key in config.model_fields and config.model_fields[key].annotation in numbers
    ]


def unknown_params(known: Collection[str], params: Mapping[str, object], *, kind: str | None = None) -> list[Problem]:
    """A problem for each of the params that is not known."""
    from evsys_sdk.explain import MOST_PROBLEMS, PARAMS_PLACES, count_the_rest, unknown_key

    own = PARAMS_PLACES.get(kind or "")
    names = sorted(known)
    wrong = [key for key in params if key not in known]
    explained = [
        Problem(path=key, message=unknown_key(key, names, in_params=own is not None, not_under=own), value=params[key])
        for key in wrong[:MOST_PROBLEMS]
    ]
    return [*explained, *count_the_rest(wrong[MOST_PROBLEMS:])]


def _check_signature(target: Callable[..., object], params: Mapping[str, object], kind: str | None) -> list[Problem]:
    try:
        signature = inspect.signature(target)
        signature.bind(**params)
    except TypeError:
        names = [n for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        missing = [n for n in names if signature.parameters[n].default is inspect.Parameter.empty and n not in params]
        return unknown_params(names, params, kind=kind) + [
            Problem(path=name, message="missing; it has no default") for name in missing
        ]
    except ValueError:  # a builtin without a signature
        pass
    return []


_lock = threading.RLock()
_built_ins_loaded = False
_loaded = False
_entry_points_wait = False


def _load_built_ins() -> None:
    """Import the modules of the built-in extensions once; they register themselves."""
    global _built_ins_loaded
    if _built_ins_loaded:
        return
    _built_ins_loaded = True  # before loading: a built-in may itself look something up
    try:
        for module in _entry_points.built_in_modules():
            importlib.import_module(module)
    except BaseException:
        _built_ins_loaded = False
        raise


@contextmanager
def built_ins_only() -> Iterator[None]:
    """Inside, look-ups load no entry point, because that runs the code of an installed package, which may be the
    project's own. What was loaded before stays."""
    global _entry_points_wait
    before, _entry_points_wait = _entry_points_wait, True
    try:
        yield
    finally:
        _entry_points_wait = before


def entry_point_names() -> list[str]:
    """The entry points of installed packages for any registry, as `name = module:Class`; none of them is loaded."""
    return [
        f"{point.name} = {point.value}"
        for registry in REGISTRIES.values()
        for point in metadata.entry_points(group=registry.group)
    ]


def load_all() -> None:
    """Load built-ins and entry points once; every look-up passes through here."""
    global _loaded
    if _loaded:
        return
    # `_loaded` stays False: the first look-up outside `built_ins_only` still loads the entry points.
    if _entry_points_wait:
        with _lock:
            return _load_built_ins()
    with _lock:
        if _loaded:
            return
        _loaded = True  # before loading: a built-in may itself look something up
        try:
            _load_built_ins()
            _entry_points.load_third_party(REGISTRIES)
        except BaseException:
            _loaded = False
            raise


algorithms = Registry("algorithm", "algorithms")
backends = Registry("backend", "backends")
transforms = Registry("transform", "transforms")
data_sources = Registry("data_source", "data_sources")
data_stores = Registry("data_store", "data_stores")
log_stores = Registry("log_store", "log_stores")
metrics = Registry("metric", "metrics")
verifiers = Registry("verifier", "verifiers")
inference = Registry("inference_client", "inference")
callbacks = Registry("callback", "callbacks")
deployers = Registry("deployer", "deployers")
agents = Registry("agent", "agents")
launchers = Registry("launcher", "launchers")
proposers = Registry("proposer", "proposers")

REGISTRIES: dict[str, Registry] = {
    registry.kind: registry
    for registry in (
        algorithms, backends, transforms, data_sources, data_stores, log_stores, metrics,
        verifiers, inference, callbacks, deployers, agents, launchers, proposers,
    )
}  # fmt: skip


def registry_for(kind: str) -> Registry:
    """The registry called `kind`, singular or plural."""
    for registry in REGISTRIES.values():
        if kind in (registry.kind, registry.plural):
            return registry
    raise UnknownKind(not_known(kind, "registry", REGISTRIES))


def schema_for(kind: str, name: str) -> JsonObject:
    """The legal params of one extension, as JSON schema: the mutation space of a search."""
    return registry_for(kind).schema(name)


Direction = Literal["max", "min"]
"""Whether more (`max`) or less (`min`) of a metric is better."""
LESS_OF = frozenset([
    "cer", "cost", "costs", "dollars", "duration", "error", "errors", "failure", "failures", "kl", "latency",
    "loss", "losses", "mae", "mse", "nll", "norm", "perplexity", "ppl", "regret", "rmse", "runtime", "seconds",
    "time", "timeout", "timeouts", "tokens", "usd", "wer",
])  # fmt: skip
"""Of what these words count, less is better."""
MORE_OF = frozenset([
    "accuracy", "acc", "auc", "bleu", "correct", "f1", "match", "pass", "passed", "precision", "recall",
    "return", "reward", "rewards", "rouge", "score", "scores", "solved", "success", "successes", "win", "wins",
])  # fmt: skip
"""Of what these words count, more is better."""
HOW_COUNTED = frozenset([
    "avg", "average", "count", "final", "first", "last", "max", "mean", "median", "min", "ms", "n", "num",
    "p50", "p90", "p95", "p99", "rate", "ratio", "s", "share", "std", "sum", "total",
])  # fmt: skip
"""Words that say how something is counted and not what: in `error_rate` the errors decide."""
HAD_FOR = frozenset(["second", "sec", "s", "minute", "hour", "dollar", "usd"])
"""More tokens for a second or a dollar are better."""


def own_direction(name: str) -> Direction | None:
    """Which direction of a metric is better, as far as the metric itself tells; None where it does not.

    `name` may come with split and benchmark (`val.tools.cost`). A registered metric's class decides by
    `lower_is_better = True` or `False`; otherwise the words of the name decide: `final_loss` counts losses.
    """
    load_all()
    # The longest rest first: a metric's own name may have a dot in it.
    for tail in [name, *(name[found.end() :] for found in re.finditer(r"[./]", name))]:
        entry = metrics.entries.get(tail)
        target = entry.target if entry else metrics.match(tail) if metrics.match else None
        if target is not None:
            declared = getattr(target, "lower_is_better", None)
            return ("min" if declared else "max") if isinstance(declared, bool) else _direction_of_words(tail)
    return _direction_of_words(name)


def _direction_of_words(name: str) -> Direction | None:
    counted, _, each = name.lower().partition("_per_")
    words = [word for word in re.split(r"[^a-z0-9]+", counted) if word and word not in HOW_COUNTED]
    last = words[-1] if words else ""
    if last == "tokens" and each in HAD_FOR:
        return "max"
    return "min" if last in LESS_OF or words[-2:] == ["cross", "entropy"] else "max" if last in MORE_OF else None


def better_direction(name: str, mode: Direction | None = None) -> Direction:
    """`max` where more of a metric is better, `min` where less is: `mode` where the config gives one, else what the
    metric itself says (`own_direction`), else `max`. Everything that ranks, stops or chooses by a metric asks here."""
    return mode or own_direction(name) or "max"


def lower_is_better(metric: str) -> bool:
    """Whether less of a metric is better."""
    return better_direction(metric) == "min"


register_algorithm, get_algorithm, list_algorithms = algorithms.register, algorithms.get, algorithms.names
register_backend, get_backend, list_backends = backends.register, backends.get, backends.names
register_transform, get_transform, list_transforms = transforms.register, transforms.get, transforms.names
register_data_source, get_data_source, list_data_sources = data_sources.register, data_sources.get, data_sources.names
register_data_store, get_data_store, list_data_stores = data_stores.register, data_stores.get, data_stores.names
register_log_store, get_log_store, list_log_stores = log_stores.register, log_stores.get, log_stores.names
register_metric, get_metric, list_metrics = metrics.register, metrics.get, metrics.names
# A verifier comes as an `AdaptedVerifier`: it can be called as (model_output, expected, params), as
# (completion, expected, **params) and by `verify`, whichever form it was written in; `.target` is what was registered.
register_verifier, get_verifier, list_verifiers = verifiers.register, verifiers.adapted, verifiers.names
register_verifier_fn = verifiers.register
register_inference, get_inference, list_inference = inference.register, inference.get, inference.names
register_callback, get_callback, list_callbacks = callbacks.register, callbacks.get, callbacks.names
register_deployer, get_deployer, list_deployers = deployers.register, deployers.get, deployers.names
register_agent, get_agent, list_agents = agents.register, agents.get, agents.names
register_launcher, get_launcher, list_launchers = launchers.register, launchers.get, launchers.names
register_proposer, get_proposer, list_proposers = proposers.register, proposers.get, proposers.names
