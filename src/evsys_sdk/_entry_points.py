"""Bring extensions in: ours by importing their modules, other packages' through entry points.

In: the registries. Out: the registries, filled. A broken third-party entry point is reported and
skipped; it must not take the others down.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

from evsys_sdk.errors import FOREIGN
from evsys_sdk.logs import get_logger
from evsys_sdk.registry import Registry

BUILT_INS = (
    "evsys_sdk.algorithms.sft",
    "evsys_sdk.algorithms.rl",
    "evsys_sdk.algorithms.dpo",
    "evsys_sdk.algorithms.distill",
    "evsys_sdk.algorithms.sdft",
    "evsys_sdk.algorithms.combo",
    "evsys_sdk.algorithms.local_sft",
    "evsys_sdk.algorithms.local_rl",
    "evsys_sdk.backends.mock",
    "evsys_sdk.backends.local",
    "evsys_sdk.backends.tinker",
    "evsys_sdk.data.transforms",
    "evsys_sdk.data.stores",
    "evsys_sdk.record.log_stores",
    "evsys_sdk.record.callbacks",
    "evsys_sdk.record.local_logger",
    "evsys_sdk.record.evsys_logger",
    "evsys_sdk.record.tracking_loggers",
    "evsys_sdk.verifiers.text",
    "evsys_sdk.verifiers.tools",
    "evsys_sdk.verifiers.values",
    "evsys_sdk.verifiers.weighted",
    "evsys_sdk.verifiers.judge",
    "evsys_sdk.verifiers.e2b",
    "evsys_sdk.eval.metrics",
    "evsys_sdk.inference.trained",
    "evsys_sdk.rollout.chat",
    "evsys_sdk.inference.claude",
    "evsys_sdk.inference.openai",
    "evsys_sdk.inference.gemini",
    "evsys_sdk.running.launchers",
    "evsys_sdk.running.ray_launcher",
)


def load_built_ins() -> None:
    for module in BUILT_INS:
        importlib.import_module(module)


def load_third_party(registries: dict[str, Registry]) -> None:
    for registry in registries.values():
        for point in entry_points(group=registry.group):
            _load_one(registry, point)


def _load_one(registry: Registry, point: EntryPoint) -> None:
    try:
        target = point.load()
        if registry.entries.get(point.name) is None or registry.entries[point.name].target is not target:
            registry.register(point.name)(target)
    except FOREIGN as exc:
        reason = f"{type(exc).__name__}: {exc}"
        registry.broken[point.name] = reason
        get_logger(__name__).warning(
            "skipped entry point %s of group %s (%s): %s", point.name, registry.group, point.value, reason
        )
