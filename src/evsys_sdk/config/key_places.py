"""Where each key of the config may stand, for a key that stands elsewhere.

In: the models of the config and of the built-in extensions. Out: key -> places. Loading this module makes the places
known to `evsys_sdk.explain`, which is on the floor below the config.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import get_args, get_origin

from pydantic import BaseModel

from evsys_sdk import explain, registry
from evsys_sdk.config.schema import ExperimentConfig


@cache
def places_of_keys() -> dict[str, list[str]]:
    """Every key of the config -> where it may stand, the shallowest place first and `deploy` last: `continual` ->
    `run`. The settings of built-in algorithms, backends, transforms and callbacks are keys too, and so are the names of
    callbacks."""
    found: dict[str, dict[str, None]] = {}
    for key, place in _keys_in(ExperimentConfig, "", ()):
        found.setdefault(key, {})[place] = None
    with registry.built_ins_only():  # a mistake in the file runs no code of the project
        for name, place in explain.PARAMS_PLACES.items():
            kinds = registry.REGISTRIES[name]
            for kind in kinds.names():
                config = registry.config_model(kinds.get(kind))
                for key in config.model_fields if config is not None else ():
                    found.setdefault(key, {})[place] = None
        for callback in registry.REGISTRIES["callback"].names():  # `early_stopping: {...}` among the params
            found.setdefault(callback, {"callbacks": None})

    def rank(place: str) -> tuple[bool, int]:
        # `base_url` and the like are asked for where a run trains far more often than where its weights go.
        return place == explain.PARAMS_PLACES["deployer"], place.count(".")

    return {key: sorted(places, key=rank) for key, places in found.items()}


explain.places_of_keys = places_of_keys


def _keys_in(model: type[BaseModel], place: str, above: tuple[type[BaseModel], ...]) -> Iterator[tuple[str, str]]:
    for name, info in model.model_fields.items():
        yield info.alias or name, place
        if name == "runs":  # again what `run` is
            continue
        is_map = get_origin(info.annotation) is dict
        inner = explain.model_in(get_args(info.annotation)[1]) if is_map else explain.model_in(info.annotation)
        if inner is not None and inner not in above:
            mark = "[]" if get_origin(info.annotation) is list else ".<setting>" if is_map else ""
            yield from _keys_in(inner, f"{place}.{name}{mark}".lstrip("."), (*above, model))
