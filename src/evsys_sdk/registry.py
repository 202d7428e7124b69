"""One registry per extension point: a name in the YAML on the left, a class on the right.

In: classes, by decorator or entry point. Out: look-ups, listings and JSON schemas. Built-ins and
entry points load at the first look-up, so that `import evsys_sdk` stays light.

Who may take which name: the names of the published reference are reserved, and two extensions that
claim the same name are refused. Built-ins that we added beyond the reference yield to a project's own
extension of that name (`yields=True`): a new built-in must not break a project that had the name first.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from evsys_sdk.errors import FOREIGN, ConfigError, DuplicateKind, Problem, UnknownKind, not_known

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One registered extension."""

    name: str
    target: Any
    """The class (or, for verifiers, the function) as it was registered."""
    origin: str
    """The module it came from; shown by `evsys list`."""
    yields: bool = False
    """True for a built-in that a project's extension of the same name may replace."""


@dataclass(slots=True)
class Registry:
    """All extensions of one kind."""

    kind: str
    """Singular, as in `evsys schema <kind>`."""
    plural: str
    """As in `evsys list --kind <plural>` and in the entry-point group."""
    adapt: Callable[[Any], Any] | None = None
    """Checks a newcomer and brings it into the one form the SDK calls; raises TypeError when it has none."""
    match: Callable[[str], Any] | None = None
    """Answers names that form a family, such as `pass@7`; exact registrations come first."""
    entries: dict[str, Entry] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    """Entry points that could not be loaded: name -> reason."""

    @property
    def group(self) -> str:
        return f"evsys_sdk.{self.plural}"

    def register(self, name: str, *, yields: bool = False) -> Callable[[T], T]:
        """Decorator: `@register("sft")` on a class makes `kind: sft` mean that class."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"register_{self.kind} takes a name: @register_{self.kind}('my_{self.kind}')")

        def decorate(target: T) -> T:
            with _lock:
                if not _is_built_in(target):
                    _load_built_ins()  # so that a taken name is refused here, not at the first look-up
                self._add(name, target, yields)
            return target

        return decorate

    def _add(self, name: str, target: Any, yields: bool) -> None:
        if self.adapt is not None:
            self.adapt(target)
        old = self.entries.get(name)
        if old is not None and not old.yields and not _same(old.target, target):
            if yields:
                return  # a project took the name before the built-in was loaded
            raise DuplicateKind(
                f"{self.kind} {name!r} is already registered by {_describe(old.target)}; "
                f"register {_describe(target)} under another name"
            )
        if inspect.isclass(target) and not callable(getattr(target, "name", None)):  # harbor's agents have name()
            target.name = name  # type: ignore[attr-defined]
        module = getattr(target, "__module__", "?")
        self.entries[name] = Entry(name=name, target=target, origin=module, yields=yields)

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

    def schema(self, name: str) -> dict[str, Any]:
        """JSON schema of the extension's params; an empty closed object where it takes none."""
        target = self.get(name)
        config = config_model(target) or config_model(self.adapted(name)) or _signature_model(name, target)
        if config is None:
            return {"title": name, "type": "object", "properties": {}, "additionalProperties": False}
        from evsys_sdk.config.schema import described_schema

        return described_schema(config)

    def build(self, name: str, params: dict[str, Any]) -> Any:
        """An instance of `name` with `params`; bad params come out as a ConfigError."""
        cls = self.get(name)
        problems = check_params(cls, params)
        if problems:
            raise ConfigError(f"{self.kind} {name!r}", problems)
        return cls(**params)


def _same(old: Any, new: Any) -> bool:
    """Same object, or the same module-level definition executed again (a reload, a notebook cell)."""

    def place(target: Any) -> tuple[str, str]:
        return getattr(target, "__module__", ""), getattr(target, "__qualname__", "")

    return old is new or (place(old) == place(new) and "<locals>" not in place(new)[1] and place(new)[1] != "")


def _is_built_in(target: Any) -> bool:
    return str(getattr(target, "__module__", "")).startswith("evsys_sdk.")


def _describe(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"


def config_model(target: Any) -> Any | None:
    """The pydantic `Config` of an extension, or None when it has none."""
    config = getattr(target, "Config", None)
    return config if config is not None and hasattr(config, "model_json_schema") else None


def _signature_model(name: str, target: Any) -> Any | None:
    """The arguments of a class without `Config` as a model, so that its schema tells what it takes."""
    from pydantic import ConfigDict, create_model

    if not inspect.isclass(target) or target.__init__ is object.__init__:
        return None
    fields = {
        parameter.name: (
            Any
            if isinstance(parameter.annotation, str) or parameter.annotation is parameter.empty
            else parameter.annotation,
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return create_model(name, __config__=config, **fields) if fields else None  # type: ignore[call-overload]


def check_params(target: Any, params: dict[str, Any]) -> list[Problem]:
    """What is wrong with `params` for this extension; paths are relative to the params block."""
    config = config_model(target)
    if config is None:
        return _check_signature(target, params)
    from pydantic import ValidationError

    from evsys_sdk.config.explain import problems_of

    problems = _unknown_keys(config, params)
    unknown = params.keys() - _known_keys(config) if problems else set()
    try:
        config.model_validate({key: value for key, value in params.items() if key not in unknown})
    except ValidationError as exc:
        problems += problems_of(exc, config)
    except FOREIGN as exc:
        problems.append(Problem(path="", message=f"its Config raised {type(exc).__name__}: {exc}"))
    return problems + _truths_for_numbers(config, params)


def _truths_for_numbers(config: Any, params: dict[str, Any]) -> list[Problem]:
    # pydantic takes `true` for 1, and nobody who writes max_steps: true means that.
    numbers = (int, float, int | None, float | None)
    return [
        Problem(path=key, value=value, message="must be a number, not true or false")
        for key, value in params.items()
        if isinstance(value, bool) and key in config.model_fields and config.model_fields[key].annotation in numbers
    ]


def _unknown_keys(config: Any, params: dict[str, Any]) -> list[Problem]:
    # A Config that merely ignores extra keys would hide a typo, so we look ourselves.
    if config.model_config.get("extra") == "allow":
        return []
    return unknown_params(sorted(_known_keys(config)), params)


def _known_keys(config: Any) -> set[str]:
    return {info.alias or name for name, info in config.model_fields.items()}


def unknown_params(known: list[str], params: dict[str, Any]) -> list[Problem]:
    """A problem for each of the params that is not known."""
    from evsys_sdk.config.explain import MOST_PROBLEMS, the_rest, unknown_key

    names, taken = sorted(known), frozenset(known)
    wrong = [key for key in params if key not in taken]
    explained = [
        Problem(path=key, message=unknown_key(key, names, in_params=False), value=params[key])
        for key in wrong[:MOST_PROBLEMS]
    ]
    return [*explained, *the_rest(wrong[MOST_PROBLEMS:])]


def _check_signature(target: Any, params: dict[str, Any]) -> list[Problem]:
    try:
        signature = inspect.signature(target)
        signature.bind(**params)
    except TypeError:
        names = [n for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        problems = unknown_params(names, params)
        missing = [n for n in names if signature.parameters[n].default is inspect.Parameter.empty and n not in params]
        return problems + [Problem(path=name, message="missing; it has no default") for name in missing]
    except ValueError:  # a builtin without a signature
        return []
    return []


_lock = threading.RLock()
_built_ins_loaded = False
_loaded = False


def _load_built_ins() -> None:
    """Import the modules of the built-in extensions once; they register themselves."""
    global _built_ins_loaded
    if _built_ins_loaded:
        return
    _built_ins_loaded = True  # before loading: a built-in may itself look something up
    from evsys_sdk import _entry_points

    try:
        _entry_points.load_built_ins()
    except BaseException:
        _built_ins_loaded = False
        raise


def load_all() -> None:
    """Load built-ins and entry points once; every look-up passes through here."""
    global _loaded
    if _loaded:
        return
    with _lock:
        if _loaded:
            return
        _loaded = True  # before loading: a built-in may itself look something up
        from evsys_sdk import _entry_points

        try:
            _load_built_ins()
            _entry_points.load_third_party(REGISTRIES)
        except BaseException:
            _loaded = False
            raise


def _adapt_verifier(target: Any) -> Any:
    from evsys_sdk.verifiers.adapt import as_verifier

    return as_verifier(target)


def _adapt_metric(target: Any) -> Any:
    from evsys_sdk.eval.metrics import as_metric

    return as_metric(target)


def _metric_family(name: str) -> Any:
    from evsys_sdk.eval.metrics import metric_family

    return metric_family(name)


algorithms = Registry("algorithm", "algorithms")
backends = Registry("backend", "backends")
transforms = Registry("transform", "transforms")
data_stores = Registry("data_store", "data_stores")
log_stores = Registry("log_store", "log_stores")
metrics = Registry("metric", "metrics", adapt=_adapt_metric, match=_metric_family)
verifiers = Registry("verifier", "verifiers", adapt=_adapt_verifier)
inference = Registry("inference_client", "inference")
callbacks = Registry("callback", "callbacks")
deployers = Registry("deployer", "deployers")
agents = Registry("agent", "agents")
launchers = Registry("launcher", "launchers")

REGISTRIES: dict[str, Registry] = {
    registry.kind: registry
    for registry in (
        algorithms,
        backends,
        transforms,
        data_stores,
        log_stores,
        metrics,
        verifiers,
        inference,
        callbacks,
        deployers,
        agents,
        launchers,
    )
}


def registry_for(kind: str) -> Registry:
    """The registry called `kind`, singular or plural."""
    for registry in REGISTRIES.values():
        if kind in (registry.kind, registry.plural):
            return registry
    raise UnknownKind(not_known(kind, "registry", REGISTRIES))


def schema_for(kind: str, name: str) -> dict[str, Any]:
    """The legal params of one extension, as JSON schema: the mutation space of a search."""
    return registry_for(kind).schema(name)


LESS_OF = frozenset(
    ["cost", "dollars", "usd", "error", "errors", "latency", "loss", "nll", "perplexity", "seconds", "time", "tokens"]
)
"""Of what these words count, less is better; but not where it is had for time or money, as tokens per second."""
HAD_FOR = frozenset(["second", "minute", "hour", "dollar", "usd"])


def lower_is_better(metric: str) -> bool:
    """Whether less of a metric is better: as its class says (`lower_is_better = True`), else by what its name counts:
    `final_loss` losses, `tokens` tokens."""
    found = metrics.entries.get(metric)
    told = getattr(found.target, "lower_is_better", None) if found else None
    counted, _, each = metric.partition("_per_")
    return bool(told) if told is not None else counted.rpartition("_")[2] in LESS_OF and each not in HAD_FOR


register_algorithm, get_algorithm, list_algorithms = algorithms.register, algorithms.get, algorithms.names
register_backend, get_backend, list_backends = backends.register, backends.get, backends.names
register_transform, get_transform, list_transforms = transforms.register, transforms.get, transforms.names
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
