"""The words that every settings block is made of.

In: nothing. Out: `Strict` for blocks of the YAML, `Params` for an extension's own settings, and `{kind, params}` specs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from evsys_sdk.config.reading import Tracked

JsonDict = dict[str, Any]


def tunable(
    low: float | None = None, high: float | None = None, *, log: bool = False, when: JsonDict | None = None
) -> JsonDict:
    """Says in a field's schema (`json_schema_extra`) that research may change it: numbers from `low` to `high`, which
    is where good values lie and narrower than what is legal; switches and choices without. `log`: the range spans
    decades. `when`: only while other settings of the block have these values, because it is not read otherwise."""
    bounds = {} if low is None else {"low": low, "high": high, "log": log}
    return {"tunable": bounds | ({"when": when} if when else {})}


class Strict(BaseModel):
    """A config model: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", validate_default=False, protected_namespaces=())


class Params(Tracked, BaseModel):
    """Base for an extension's `Config`. Optional: any pydantic model works. Reads are noted (see `reading`)."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    not_scored: ClassVar[frozenset[str]] = frozenset()
    """Settings that change where, how fast or how observed a run is, and scores by rounding at most: how often weights
    are kept, the device. Those of base classes count too. Arms that differ only in these ask the same question."""

    @classmethod
    def scored_settings(cls, params: Mapping[str, Any]) -> JsonDict:
        """The settings that can change scores, defaults included, so that the same meaning has one form."""
        ignored = frozenset[str]().union(*(getattr(base, "not_scored", ()) for base in cls.__mro__))
        return cls.model_validate(dict(params)).model_dump(mode="json", exclude=set(ignored))


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    if any(ord(letter) < 32 or 0xD800 <= ord(letter) <= 0xDFFF for letter in text):
        raise ValueError("must be plain text without control characters")
    return text


Name = Annotated[str, AfterValidator(_not_blank)]


class KindSpec(Strict):
    """`{kind, params}`: a registry key and the settings of what it names."""

    kind: Name
    """The name of an extension; `evsys list` shows what there is."""
    params: JsonDict = Field(default_factory=dict)
    """Settings of the extension; `evsys schema <registry> <name>` shows them."""


class AlgorithmConfig(KindSpec): ...


class VerifierSpec(KindSpec): ...


class MetricSpec(KindSpec): ...


class TransformSpec(KindSpec): ...


class InferenceSpec(KindSpec): ...


class CallbackSpec(KindSpec): ...


class DataStoreSpec(KindSpec):
    kind: Name = "local"


class LogStoreSpec(KindSpec):
    kind: Name = "jsonl"


class BackendConfig(KindSpec):
    kind: Name = "tinker"


class LauncherSpec(KindSpec):
    kind: Name = "local"


class DeploySpec(KindSpec): ...
