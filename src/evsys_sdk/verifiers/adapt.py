"""Bring every way of writing a verifier into one form, and run it where its failures have a name.

In: a function or class as somebody registered it. Out: an `AdaptedVerifier`, called as
`(model_output, expected, params) -> float`, or awaited with `ajudge`. A verifier that raises, or returns no finite
number, gives `VerifierFailed`: never a reward of 0. Which form it is, only the signature decides; any form may be
`async`, for one that asks a server.
"""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Real
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from evsys_sdk.asyncs import run_async, within
from evsys_sdk.errors import VerifierFailed, blame, shorten
from evsys_sdk.protocols import VerificationResult
from evsys_sdk.registry import check_params, config_model, verifiers
from evsys_sdk.verifiers.aside import run_aside

Params = dict[str, Any]
RawCall = Callable[[str, Any, Params, Any], Any]
"""`(model_output, expected, params, prompt)` -> whatever the verifier returns."""

FORMS = (
    "a verifier is a function (model_output, expected, params) -> float, a function "
    "(completion, expected, **params) -> float, or a class with verify(*, prompt, completion, target) or __call__"
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedVerifier:
    """Any verifier, in the one form the SDK calls."""

    target: Any
    call: RawCall
    settings: Any = None
    """What the params must fit, a class or something with a `Config`; None when anything goes."""
    params: Params = field(default_factory=dict)
    """Settings for `verify`, which takes none."""
    is_aside: bool = False
    """Plain code of somebody else: `ajudge` runs it beside the event loop, because it may never come back."""

    @property
    def Config(self) -> Any | None:
        """The model of the legal params, where the verifier says which they are."""
        return config_model(self.settings)

    @property
    def label(self) -> str:
        return _label(self.target)

    @property
    def failing_reward(self) -> float:
        """The reward of a rollout that failed before it could be graded: the verifier's own `failing_reward`, or 0."""
        declared = getattr(self.target, "failing_reward", 0.0)
        if isinstance(declared, bool) or not isinstance(declared, Real) or not math.isfinite(declared):
            raise VerifierFailed(f"verifier {self.label!r}: failing_reward is {declared!r}; it must be a finite number")
        return float(declared)

    def problem(self, params: Params) -> str | None:
        """What is wrong with these params, or None."""
        problems = check_params(self.settings, params) if self.settings is not None else []
        return "; ".join(f"{p.path}: {p.message}" for p in problems) or None

    def why_not(self, params: Params) -> str | None:
        """Why it could not judge here, or None: params that do not fit, or what its own `why_not` finds missing."""
        wrong = self.problem(params)
        if wrong:
            return f"params of verifier {self.label!r}: {wrong}"
        ask = getattr(self.target, "why_not", None)
        return ask(params) if callable(ask) else None

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """The reward of `(model_output, expected, params)` or of `(completion, expected, **params)`, whichever form the
        verifier itself has. With settings alone, `get_verifier(name)(**params)`: the same verifier with these as its
        params, for `verify`."""
        if not args:
            return replace(self, params={**self.params, **settings})
        output, expected, params = [*args, None, None][:3]
        return self.judge(output, expected, {**self.params, **(params or {}), **settings}).reward

    def verify(self, *, prompt: Any, completion: str, target: Any) -> VerificationResult:
        """The class form of the published protocol, with the params that this verifier was made with."""
        return self.judge(completion, target, self.params, prompt=prompt)

    def judge(
        self, model_output: str, expected: Any, params: Params, *, prompt: Any = None, task_id: str | None = None
    ) -> VerificationResult:
        """The reward, with what the verifier had to say about it. `prompt` reaches the class form only."""
        whose = self._checked(params, task_id)
        with _blamed(whose):
            verdict = self.call(model_output, expected, params, prompt)
            if inspect.isawaitable(verdict):  # plain code has to wait; a rollout engine uses `ajudge`
                verdict = run_async(_awaited(verdict))
        return _as_result(verdict, whose)

    async def ajudge(
        self, model_output: str, expected: Any, params: Params, *, prompt: Any = None, task_id: str | None = None
    ) -> VerificationResult:
        """The same for code that must not wait: other rollouts go on while an async verifier is out asking, or a plain
        one of yours is at work on its thread. Whoever does not want to wait for ever cancels it, or uses
        `asyncs.within`."""
        whose = self._checked(params, task_id)
        with _blamed(whose):
            if self.is_aside or self._may_be_slow(expected, params):
                verdict = await run_aside(self.target, lambda: self.call(model_output, expected, params, prompt))
            else:
                verdict = self.call(model_output, expected, params, prompt)
            if inspect.isawaitable(verdict):
                verdict = await verdict
        return _as_result(verdict, whose)

    def _may_be_slow(self, expected: Any, params: Params) -> bool:
        """Whether one of ours asks to be run beside the event loop for this task."""
        ask = getattr(self.target, "may_be_slow", None)
        return ask is not None and not self.is_aside and bool(ask(expected, params))

    async def judge_within(
        self, seconds: float, model_output: str, expected: Any, params: Params, **about: Any
    ) -> VerificationResult:
        """`ajudge`; one that takes longer has failed."""
        try:
            return await within(self.ajudge(model_output, expected, params, **about), seconds)
        except TimeoutError:
            raise VerifierFailed(f"verifier {self.label!r} took longer than {seconds:g} seconds") from None

    def _checked(self, params: Params, task_id: str | None) -> str:
        """Whose failure it will be, once the params are known to fit."""
        whose = f"verifier {self.label!r}" + (f" on task {task_id!r}" if task_id is not None else "")
        wrong = self.problem(params)
        if wrong:
            raise VerifierFailed(f"{whose}: params: {wrong}")
        return whose


def as_verifier(target: Any) -> AdaptedVerifier:
    """The one form of `target`, made once; a TypeError naming the forms when it has none of them."""
    try:
        return _adapt_once(target)
    except TypeError:
        if _is_hashable(target):
            raise
        return _adapt(target)


def run_verifier(
    name: str, output: str, expected: Any, params: Params, *, prompt: Any = None, task_id: str | None = None
) -> float:
    """The reward that the verifier registered as `name` gives; whatever goes wrong in it is `VerifierFailed`."""
    adapted: AdaptedVerifier = verifiers.adapted(name)
    return adapted.judge(output, expected, params, prompt=prompt, task_id=task_id).reward


def check_verifier_params(name: str, params: Params) -> str | None:
    """What is wrong with these params for the verifier `name`, or None. An unknown name raises UnknownKind."""
    adapted: AdaptedVerifier = verifiers.adapted(name)
    return adapted.problem(params)


@contextmanager
def _blamed(whose: str) -> Iterator[None]:
    """`blame`, and a failure that a verifier reports of itself gets its name and task as well."""
    try:
        with blame(VerifierFailed, whose):
            yield
    except VerifierFailed as exc:
        if str(exc).startswith(whose):
            raise
        raise VerifierFailed(f"{whose}: {exc}") from exc


async def _awaited(verdict: Awaitable[Any]) -> Any:
    return await verdict


def _as_result(verdict: Any, whose: str) -> VerificationResult:
    info = getattr(verdict, "info", None)
    reward = getattr(verdict, "reward", verdict)
    if hasattr(reward, "item") and callable(reward.item):  # a numpy or torch scalar
        reward = reward.item()
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise VerifierFailed(f"{whose} returned {shorten(repr(reward))}; a reward is a finite number")
    return VerificationResult(reward=float(reward), info=info if isinstance(info, dict) else {})


def _is_hashable(target: Any) -> bool:
    try:
        hash(target)
    except TypeError:
        return False
    return True


def _adapt(target: Any) -> AdaptedVerifier:
    return replace(_in_one_form(target), is_aside=not _is_ours(target) and not _is_async(target))


def _is_ours(target: Any) -> bool:
    """The built-in ones are fast and come back; a thread would cost more than they do."""
    return str(getattr(target, "__module__", "")).split(".")[0] == "evsys_sdk"


def _is_async(target: Any) -> bool:
    acts = [target, getattr(target, "verify", None), target.__call__ if callable(target) else None]
    return any(map(inspect.iscoroutinefunction, acts))


def _in_one_form(target: Any) -> AdaptedVerifier:
    if inspect.isclass(target):
        return _from_class(target)
    if callable(getattr(target, "verify", None)):
        return _from_instance(target)
    if callable(target):
        return _from_function(target)
    raise TypeError(f"{target!r} cannot be called; {FORMS}")


_adapt_once = lru_cache(maxsize=4096)(_adapt)


def _from_function(fn: Any) -> AdaptedVerifier:
    label, parameters = _label(fn), _parameters(fn)
    if _takes_params(parameters, label):

        def whole(output: str, expected: Any, params: Params, prompt: Any) -> Any:
            return fn(output, expected, params)

        return AdaptedVerifier(target=fn, call=whole, settings=fn if config_model(fn) else None)
    model = _params_model(label, parameters)

    def spread(output: str, expected: Any, params: Params, prompt: Any) -> Any:
        return fn(output, expected, **_coerced(model, params))

    return AdaptedVerifier(target=fn, call=spread, settings=_Settings(model) if model else None)


def _from_class(cls: type) -> AdaptedVerifier:
    if callable(getattr(cls, "verify", None)):
        _check_verify(cls)
    elif "__call__" not in {name for base in cls.__mro__ for name in vars(base)}:
        raise TypeError(f"class {cls.__qualname__} has neither verify nor __call__; {FORMS}")
    elif _takes_params(_parameters(cls.__call__, bound=False), _label(cls)):
        return AdaptedVerifier(target=cls, call=lambda o, e, params, _: cls()(o, e, params))
    instances: dict[str, Any] = {}

    def call(output: str, expected: Any, params: Params, prompt: Any) -> Any:
        return _ask(_instance(cls, params, instances), output, expected, prompt)

    return AdaptedVerifier(target=cls, call=call, settings=cls)


def _from_instance(verifier: Any) -> AdaptedVerifier:
    _check_verify(verifier)

    def call(output: str, expected: Any, params: Params, prompt: Any) -> Any:
        return _ask(verifier, output, expected, prompt)

    none = _Settings(create_model("none", __config__=ConfigDict(extra="forbid")))
    return AdaptedVerifier(target=verifier, call=call, settings=none)


@dataclass(frozen=True, slots=True)
class _Settings:
    Config: type[BaseModel]


def _ask(verifier: Any, output: str, expected: Any, prompt: Any) -> Any:
    if callable(getattr(verifier, "verify", None)):
        return verifier.verify(prompt=prompt, completion=output, target=expected)
    return verifier(output, expected)


def _instance(cls: type, params: Params, instances: dict[str, Any]) -> Any:
    # One instance per distinct params: a verifier that loads a word list loads it once, not per rollout.
    key = json.dumps(params, sort_keys=True, default=repr)
    if key not in instances:
        if len(instances) >= 256:
            instances.clear()
        instances[key] = cls(**params)
    return instances[key]


def _check_verify(owner: Any) -> None:
    """`verify` must take the three words of the contract; better told at registration than per rollout."""
    verify = owner.verify
    first = (None,) if inspect.isclass(owner) and inspect.isfunction(verify) else ()
    try:
        inspect.signature(verify).bind(*first, prompt=None, completion="", target=None)
    except TypeError as exc:
        raise TypeError(f"verify of {_label(owner)} does not fit ({exc}); {FORMS}") from None


def _parameters(fn: Any, *, bound: bool = True) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(fn, eval_str=True)
    except ValueError:
        raise TypeError(f"{_label(fn)} does not tell its parameters; {FORMS}") from None
    except Exception:  # an annotation that cannot be evaluated: the names are enough
        found = inspect.signature(fn)
    return list(found.parameters.values())[0 if bound else 1 :]


def _takes_params(parameters: list[inspect.Parameter], label: str) -> bool:
    """True for `(model_output, expected, params)`, False for `(completion, expected, **params)`."""
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters) and len(positional) < 3:
        return True
    if len(positional) < 2:
        raise TypeError(f"{label} does not take an output and what was expected; {FORMS}")
    if len(positional) != 3:
        return False
    third = positional[2]
    if third.name.strip("_") in ("params", ""):
        return True
    # `threshold: float` or `threshold=0.5` is one setting; a bare third argument is the params mapping.
    return third.default is _EMPTY and third.annotation not in (bool, int, float, str)


def _params_model(label: str, parameters: list[inspect.Parameter]) -> type[BaseModel] | None:
    """The settings in a signature as a model, so that they can be checked before a run and shown as a schema."""
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    named = positional[2:] + [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    config = ConfigDict(extra="allow" if is_open else "forbid", arbitrary_types_allowed=True, protected_namespaces=())
    fields: dict[str, Any] = {p.name: (_type(p), ... if p.default is _EMPTY else p.default) for p in named}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a setting may be called `json` or `schema`
            return create_model(label, __config__=config, **fields)
    except Exception:  # a name or type pydantic cannot hold; the call itself still tells
        return None


def _type(parameter: inspect.Parameter) -> Any:
    known = parameter.annotation is not _EMPTY and not isinstance(parameter.annotation, str)
    return parameter.annotation if known else Any


def _coerced(model: type[BaseModel] | None, params: Params) -> Params:
    """The params as the types the signature names: a `"no"` for a bool must not be true."""
    if model is None or not params:
        return params
    valid = model.model_validate(params)
    return {name: getattr(valid, name) for name in params}


def _label(target: Any) -> str:
    # The registry writes the registered name onto a class; a function goes by its own.
    name = vars(target).get("name") if inspect.isclass(target) else None
    return name if isinstance(name, str) else str(getattr(target, "__name__", type(target).__name__))
