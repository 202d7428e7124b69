"""Which class an agent's name stands for.

In: an `AgentSpec`: a registered name, the name of one of harbor's own agents, or where a class is. Out: the class and
what to call its constructor with. harbor's configs name a class by `module:Class`; classes that stand in no module (a
notebook's, a test's) get such an address here for as long as they are in use.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from pydantic import ValidationError

from evsys_sdk.errors import ConfigError, EvsysError, Problem, UnknownKind, error_boundary, need, not_known
from evsys_sdk.explain import problems_of
from evsys_sdk.protocols import AgentSpec
from evsys_sdk.registry import agents as registry
from evsys_sdk.registry import check_params, config_model, unknown_params
from evsys_sdk.rollout.chat import tool_at

# The only import of the harbor package.
#
# In: nothing. Out: harbor, or the command that installs it. Two settings must be there before its first import: they
# are made when this module is loaded, which the folder's `__init__` sees to before any other module of it.


os.environ.setdefault("HARBOR_TELEMETRY", "0")  # else its Job and CLI report model names, rewards and costs
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else a price list is looked for on the network


def need_harbor() -> None:
    """Say how to install harbor where it is missing."""
    need("harbor", extra="harbor")


BASE_URL, POLICY = "{base_url}", "{policy}"
"""What stands in params for the address of the model under training, and for its name there."""
NOT_PARAMS = frozenset({"self", "logs_dir", "policy"})
"""What a constructor is given by the SDK and harbor."""
_homeless: WeakValueDictionary[str, type] = WeakValueDictionary()
"""Classes that no import finds, by the name that this module answers to."""


def __getattr__(name: str) -> type:
    try:
        return _homeless[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentClass:
    """An agent that is ready to be made, as often as there are rollouts."""

    cls: Callable[..., Any]
    import_path: str
    """`module:Class`, as harbor's configs want it."""
    harbor_name: str | None
    """Of harbor's own agents: some of them get more from harbor when they are called by it."""
    model_name: str | None
    params: dict[str, object]
    takes_policy: bool
    """Whether its constructor wants the name of the policy; harbor's own agents reach their model otherwise."""

    @property
    def speaks_http(self) -> bool:
        """Whether its params ask for an address."""
        return BASE_URL in json.dumps(self.params, default=str)

    def addressed(self, policy: str, base_url: str) -> AgentClass:
        """This agent with the address of its model, and the model's name there, in its params."""
        marks = {BASE_URL: base_url, POLICY: policy}
        return replace(self, params=_fill(self.params, marks), model_name=_fill(self.model_name, marks))

    def arguments(self, policy: str) -> dict[str, object]:
        """What the constructor gets besides harbor's own arguments."""
        return {**self.params, "policy": policy} if self.takes_policy else dict(self.params)


def _fill(value: Any, marks: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, marks) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, marks) for item in value]
    if isinstance(value, str):
        for mark, text in marks.items():
            value = value.replace(mark, text)
    return value


def find_agent(spec: AgentSpec) -> AgentClass:
    """The agent that `spec` means; an error that names the nearest one otherwise."""
    need_harbor()
    from harbor.agents.base import BaseAgent

    from evsys_sdk.rollout.chat_agent import BASH, ChatAgent
    from evsys_sdk.rollout.plain_agent import as_harbor_agent

    cls, harbor_name = _class_of(spec.kind)
    written = cls
    if not callable(getattr(cls, "run", None)):
        raise EvsysError(f"agent {spec.kind!r} has no run(instruction, environment, context); see harbor's BaseAgent")
    if inspect.isclass(cls) and not issubclass(cls, BaseAgent):
        cls = as_harbor_agent(cls)  # type: ignore[arg-type]  # a class is hashable
    has_config = spec.kind in registry.names() and config_model(registry.get(spec.kind)) is not None
    problems = check_params(registry.get(spec.kind), spec.params) if has_config else []
    params = dict(spec.params)
    model_name = params.pop("model_name", None)
    # Those of the class as it was written: what is wrapped around a plain one takes any.
    problems += _constructor_problems(written, params)
    tools = params.get("tools") if issubclass(cls, ChatAgent) else None
    for index, path in enumerate(tools if isinstance(tools, list) else []):
        try:
            if path != BASH:
                tool_at(str(path))
        except EvsysError as exc:
            problems.append(Problem(path=f"tools[{index}]", value=path, message=str(exc)))
    if problems:
        first = {problem.path: problem for problem in reversed(problems)}  # a Config and a constructor may both object
        raise ConfigError(f"agent {spec.kind!r}", [each for each in problems if first[each.path] is each])
    preflight = getattr(cls, "parse_options", None)
    if preflight is not None:
        with error_boundary(EvsysError, f"agent {spec.kind!r}: params"):
            try:
                preflight(dict(params))
            except ValueError:
                # Harbor's text names its own commands; the model behind it says which param is wrong.
                if problems := _option_problems(cls, params):
                    raise ConfigError(f"agent {spec.kind!r}", problems) from None
                raise
    return AgentClass(
        cls=cls,
        import_path=_address(cls),
        harbor_name=harbor_name,
        model_name=model_name,
        params=params,
        takes_policy=harbor_name is None and _takes_policy(cls),
    )


def _constructor_problems(cls: type, params: dict[str, object]) -> list[Problem]:
    """Arguments that the constructor needs and does not get, and params that no constructor of the class names:
    harbor's own base takes any, so a misspelt one would be lost. Harbor itself checks those of an `options_model`."""
    from harbor.agents.base import BaseAgent

    if getattr(cls, "options_model", None) is not None or cls.__module__.startswith("harbor."):
        return []
    missing: list[Problem] = []
    with suppress(TypeError, ValueError):  # a constructor without a signature
        given = {*params, *NOT_PARAMS, *inspect.signature(BaseAgent.__init__).parameters}
        missing = [
            Problem(path=one.name, message="missing; it has no default")
            for one in inspect.signature(cls).parameters.values()
            if one.default is one.empty
            and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            and one.name not in given
        ]
    known = {"override_setup_timeout_sec"} if issubclass(cls, BaseAgent) else set()
    for base in inspect.getmro(cls):
        maker = vars(base).get("__init__")
        if base is object:  # the constructors of a plain class end here, and this one takes nothing
            break
        if maker is None:
            continue
        try:
            parameters = inspect.signature(maker).parameters.values()
        except (TypeError, ValueError):
            return missing
        known |= {one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
        rest = next((one.name for one in parameters if one.kind is one.VAR_KEYWORD), None)
        if base is BaseAgent or rest is None:
            break
        if not _only_hands_on(maker, rest):
            return missing  # it looks into its `**kwargs` itself
    return [*unknown_params(sorted(known - NOT_PARAMS), params), *missing]


def _option_problems(cls: type, params: dict[str, object]) -> list[Problem]:
    """What the `options_model` of an agent of harbor's refuses in these params; empty where it has none, or where an
    environment variable that fills in for a param is at fault."""
    model = getattr(cls, "options_model", None)
    if model is None:
        return []
    try:
        model.model_validate(params)
    except ValidationError as exc:
        return problems_of(exc, model)
    return []


def _only_hands_on(maker: Callable[..., object], name: str) -> bool:
    """Whether a constructor does nothing with its `**name` but pass it on as `**name`; False where that cannot be
    read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(maker)))
    except (OSError, TypeError, SyntaxError):
        return False
    handed_on = {id(k.value) for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg is None}
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    return bool(uses) and all(id(node) in handed_on for node in uses)


def _class_of(kind: str) -> tuple[Any, str | None]:
    """The class, and harbor's own name for it."""
    if kind in registry.names():
        target = registry.get(kind)
        return (_import_agent(target.import_path_of_agent) if hasattr(target, "import_path_of_agent") else target), None
    if "." in kind or ":" in kind:
        return _import_agent(kind), None
    from harbor.agents.factory import AgentFactory
    from harbor.models.agent.name import AgentName

    if kind in AgentName.values():
        return AgentFactory.get_agent_class(AgentName(kind)), kind
    known = [*registry.names(), *AgentFactory.registered_names()]
    raise UnknownKind(not_known(kind, "agent", known) + "; or say where its class is: my_project.agents.MyAgent")


def _import_agent(path: str) -> Any:
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    with error_boundary(EvsysError, f"agent {path!r}: importing {module_name}"):
        module = importlib.import_module(module_name)
    target = getattr(module, name, None)
    if not inspect.isclass(target):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise UnknownKind(f"agent {path!r}: " + not_known(name, f"class in {module_name}", classes))
    return target


def _address(cls: type) -> str:
    """Where an import finds the class."""
    try:
        found: object = getattr(importlib.import_module(cls.__module__), cls.__name__, None)
    except ImportError:
        found = None
    if found is cls:
        return f"{cls.__module__}:{cls.__name__}"
    # An id is unique as long as the class lives, and `_homeless` holds it no longer.
    name = f"{cls.__name__}_{id(cls):x}"
    _homeless[name] = cls
    return f"{__name__}:{name}"


def _takes_policy(cls: type) -> bool:
    makers: list[Callable[..., object]] = [
        vars(base)["__init__"] for base in inspect.getmro(cls) if "__init__" in vars(base)
    ]
    # The last one is that of `object`.
    named = any("policy" in inspect.signature(maker).parameters for maker in makers[:-1])
    options = getattr(cls, "options_model", None)
    if named or (options is not None and "policy" in options.model_fields):
        return True
    kinds = {parameter.kind for parameter in inspect.signature(makers[0]).parameters.values()}
    # Without a model of its options an agent passes over what it does not know, and may look for `policy` in **kwargs.
    return options is None and inspect.Parameter.VAR_KEYWORD in kinds
