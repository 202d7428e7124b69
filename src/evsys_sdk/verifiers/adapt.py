"""Bring every way of writing a verifier into one form, and run it where its failures have a name.

In: a function or class as it was registered. Out: an `AdaptedVerifier`, called as
`(model_output, expected, params) -> float`, or awaited with `ajudge`. A verifier that raises, or returns no finite
number, gives `VerifierFailed`: never a reward of 0. The signature alone decides which form it is; any form may be
`async`, for one that asks a server.
"""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Real
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from evsys_sdk.concurrency import run_async, within
from evsys_sdk.config.base import JsonDict
from evsys_sdk.errors import VerifierFailed, error_boundary, shorten
from evsys_sdk.protocols import VerificationResult
from evsys_sdk.registry import check_params, config_model, verifiers
from evsys_sdk.verifiers.aside import run_aside

Params = JsonDict
RawCall = Callable[[str, object, Params, object], object]
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
    settings: object = None
    """What the params must fit, a class or something with a `Config`; None when anything goes."""
    params: Params = field(default_factory=dict)
    """Settings for `verify`, which takes none."""
    is_aside: bool = False
    """Plain code of a project: `ajudge` runs it beside the event loop, because it may never return."""

    @property
    def Config(self) -> type[BaseModel] | None:
        """The model of the legal params, where the verifier says which they are."""
        model: type[BaseModel] | None = config_model(self.settings)
        return model

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
        find_reason = getattr(self.target, "why_not", None)
        return find_reason(params) if callable(find_reason) else None

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """The reward of `(model_output, expected, params)` or of `(completion, expected, **params)`, by position or by
        name, whichever form the verifier itself has. With settings alone, `get_verifier(name)(**params)`: the verifier
        with these as its params, for `verify`."""
        if not args and "completion" in settings:
            settings["model_output"] = settings.pop("completion")
        if not args and "model_output" not in settings:
            return replace(self, params={**self.params, **settings})
        names = ("model_output", "expected", "params")
        given = dict(zip(names, args, strict=False))
        given |= {name: settings.pop(name) for name in names if name not in given and name in settings}
        params = {**self.params, **(given.get("params") or {}), **settings}
        return self.judge(given["model_output"], given.get("expected"), params).reward

    def verify(self, *, prompt: object, completion: str, target: object) -> VerificationResult:
        """The class form of the published protocol, with the params that this verifier was made with."""
        return self.judge(completion, target, self.params, prompt=prompt)

    def judge(
        self, model_output: str, expected: object, params: Params, *, prompt: object = None, task_id: str | None = None
    ) -> VerificationResult:
        """The reward, with what the verifier had to say about it. `prompt` reaches the class form only."""
        whose = self._check_params(params, task_id)
        with _verifier_boundary(whose):
            verdict = self.call(model_output, expected, params, prompt)
            if inspect.isawaitable(verdict):  # plain code has to wait; a rollout engine uses `ajudge`
                awaitable = verdict

                async def wait() -> object:
                    return await awaitable

                verdict = run_async(wait())
        return _as_result(verdict, whose)

    async def ajudge(
        self, model_output: str, expected: object, params: Params, *, prompt: object = None, task_id: str | None = None
    ) -> VerificationResult:
        """The reward, for code that must not wait: other rollouts proceed while an async verifier waits for a server,
        or a plain one of the project works on its thread. Cancel it, or use `judge_within`, to limit the time."""
        whose = self._check_params(params, task_id)
        with _verifier_boundary(whose):
            # One of ours may ask to be run beside the event loop for this task.
            may_be_slow = getattr(self.target, "may_be_slow", None)
            if self.is_aside or (may_be_slow is not None and may_be_slow(model_output, expected, params)):
                verdict = await run_aside(self.target, lambda: self.call(model_output, expected, params, prompt))
            else:
                verdict = self.call(model_output, expected, params, prompt)
            if inspect.isawaitable(verdict):
                verdict = await verdict
        return _as_result(verdict, whose)

    async def judge_within(
        self,
        seconds: float,
        model_output: str,
        expected: object,
        params: Params,
        *,
        prompt: object = None,
        task_id: str | None = None,
    ) -> VerificationResult:
        """`ajudge`; one that takes longer has failed."""
        try:
            judged = self.ajudge(model_output, expected, params, prompt=prompt, task_id=task_id)
            return await within(judged, seconds)
        except TimeoutError:
            raise VerifierFailed(f"verifier {self.label!r} took longer than {seconds:g} seconds") from None

    def _check_params(self, params: Params, task_id: str | None) -> str:
        """Whose failure it will be, once the params are known to fit."""
        whose = f"verifier {self.label!r}" + (f" on task {task_id!r}" if task_id is not None else "")
        wrong = self.problem(params)
        if wrong:
            raise VerifierFailed(f"{whose}: params: {wrong}")
        return whose


def as_verifier(target: object) -> AdaptedVerifier:
    """The one form of `target`, made once; a TypeError naming the forms when it has none of them."""
    try:
        # An instance whose class defines `__eq__` alone has no hash and cannot be a key of the cache.
        hash(target)
    except TypeError:
        return _adapt(target)
    return _adapt_once(target)


def run_verifier(
    name: str, output: str, expected: object, params: Params, *, prompt: object = None, task_id: str | None = None
) -> float:
    """The reward that the verifier registered as `name` gives; any error in it is `VerifierFailed`."""
    adapted: AdaptedVerifier = verifiers.adapted(name)
    return adapted.judge(output, expected, params, prompt=prompt, task_id=task_id).reward


def check_verifier_params(name: str, params: Params) -> str | None:
    """What is wrong with these params for the verifier `name`, or None. An unknown name raises UnknownKind."""
    adapted: AdaptedVerifier = verifiers.adapted(name)
    return adapted.problem(params)


@contextmanager
def _verifier_boundary(whose: str) -> Iterator[None]:
    """An error boundary; a `VerifierFailed` that the verifier itself raises gets its name and task as well."""
    try:
        with error_boundary(VerifierFailed, whose):
            yield
    except VerifierFailed as exc:
        if str(exc).startswith(whose):
            raise
        raise VerifierFailed(f"{whose}: {exc}") from exc


def _as_result(verdict: object, whose: str) -> VerificationResult:
    info = getattr(verdict, "info", None)
    reward = getattr(verdict, "reward", verdict)
    if hasattr(reward, "item") and callable(reward.item):  # a numpy or torch scalar
        reward = reward.item()
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise VerifierFailed(f"{whose} returned {shorten(repr(reward))}; a reward is a finite number")
    return VerificationResult(reward=float(reward), info=info if isinstance(info, dict) else {})


def _adapt(target: Any) -> AdaptedVerifier:
    if inspect.isclass(target):
        adapted = _from_class(target)
    elif callable(getattr(target, "verify", None)):
        _check_verify(target)
        none = _Settings(create_model("none", __config__=ConfigDict(extra="forbid")))
        adapted = AdaptedVerifier(target=target, call=lambda o, e, _, prompt: _ask(target, o, e, prompt), settings=none)
    elif callable(target):
        adapted = _from_function(target)
    else:
        raise TypeError(f"{target!r} cannot be called; {FORMS}")
    # The built-in ones are fast and return: a thread would cost more than they do.
    is_ours = str(getattr(target, "__module__", "")).split(".")[0] == "evsys_sdk"
    acts = [target, getattr(target, "verify", None), target.__call__ if callable(target) else None]
    return replace(adapted, is_aside=not is_ours and not any(map(inspect.iscoroutinefunction, acts)))


_adapt_once = lru_cache(maxsize=4096)(_adapt)


def _from_function(fn: Callable[..., object]) -> AdaptedVerifier:
    label, parameters = _label(fn), _parameters(fn)
    if _takes_params(parameters, label):
        return AdaptedVerifier(
            target=fn, call=lambda o, e, params, _: fn(o, e, params), settings=fn if config_model(fn) else None
        )
    model = _params_model(label, parameters)

    def call(output: str, expected: object, params: Params, prompt: object) -> object:
        if model is not None and params:
            # The types that the signature names: a `"no"` for a bool must not be true.
            valid = model.model_validate(params)
            params = {name: getattr(valid, name) for name in params}
        return fn(output, expected, **params)

    return AdaptedVerifier(target=fn, call=call, settings=_Settings(model) if model else None)


def _from_class(cls: type) -> AdaptedVerifier:
    if callable(getattr(cls, "verify", None)):
        _check_verify(cls)
    elif "__call__" not in {name for base in cls.__mro__ for name in vars(base)}:
        raise TypeError(f"class {cls.__qualname__} has neither verify nor __call__; {FORMS}")
    elif _takes_params(_parameters(cls.__call__)[1:], _label(cls)):
        return AdaptedVerifier(target=cls, call=lambda o, e, params, _: cls()(o, e, params))
    instances: dict[str, object] = {}

    def call(output: str, expected: object, params: Params, prompt: object) -> object:
        # One instance per distinct params: a verifier that loads a word list loads it once, not per rollout.
        key = json.dumps(params, sort_keys=True, default=repr)
        if key not in instances:
            # A bound for suites whose params differ from task to task.
            if len(instances) >= 256:
                instances.clear()
            instances[key] = cls(**params)
        return _ask(instances[key], output, expected, prompt)

    return AdaptedVerifier(target=cls, call=call, settings=cls)


@dataclass(frozen=True, slots=True)
class _Settings:
    Config: type[BaseModel]


def _ask(verifier: Any, output: str, expected: object, prompt: object) -> object:
    if callable(getattr(verifier, "verify", None)):
        verdict: object = verifier.verify(prompt=prompt, completion=output, target=expected)
        return verdict
    return verifier(output, expected)


def _check_verify(owner: Any) -> None:
    """`verify` must take the three arguments of the contract; refused at registration rather than per rollout."""
    verify = owner.verify
    first = (None,) if inspect.isclass(owner) and inspect.isfunction(verify) else ()
    try:
        inspect.signature(verify).bind(*first, prompt=None, completion="", target=None)
    except TypeError as exc:
        raise TypeError(f"verify of {_label(owner)} does not fit ({exc}); {FORMS}") from None


def _parameters(fn: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(fn, eval_str=True)
    except ValueError:
        raise TypeError(f"{_label(fn)} does not tell its parameters; {FORMS}") from None
    except Exception:  # an annotation that cannot be evaluated: the names are enough
        found = inspect.signature(fn)
    return list(found.parameters.values())


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
    config = ConfigDict(
        extra="allow" if is_open else "forbid", arbitrary_types_allowed=True, protected_namespaces=(),
        allow_inf_nan=False,  # as `Params` has it: nothing compares with NaN
    )  # fmt: skip
    fields: JsonDict = {
        p.name: (
            Any if p.annotation is _EMPTY or isinstance(p.annotation, str) else p.annotation,
            ... if p.default is _EMPTY else p.default,
        )
        for p in named
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a setting may be called `json` or `schema`
            return create_model(label, __config__=config, **fields)
    except Exception:  # a name or type pydantic cannot hold; the call itself still tells
        return None


def _label(target: object) -> str:
    # The registry writes the registered name onto a class; a function goes by its own.
    name = vars(target).get("name") if inspect.isclass(target) else None
    return name if isinstance(name, str) else str(getattr(target, "__name__", type(target).__name__))


verifiers.adapt = as_verifier
