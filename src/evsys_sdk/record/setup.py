"""What an experiment was made of, in a few words: model, backend, data, algorithm, params.

In: an experiment's settings as plain data. Out: `{"model": "table-model", "data": "data/train.jsonl (dedupe)", ...}`,
one entry per part that the settings name. Where arms differ, their values stand side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evsys_sdk.errors import shorten

MOST_VALUES = 6
"""Of arms that differ; the record has all."""
SOURCES = ("path", "dataset_name", "dataset_id", "hf_dataset")
"""Settings of a data block that say where its rows come from."""


def setup_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The parts of an experiment by name; a part that no run names is left out."""
    runs = [run for run in config.get("runs") or [config.get("run") or {}] if isinstance(run, Mapping)]
    parts = {
        "model": [_model(run) for run in runs],
        "backend": [_kind(run.get("backend")) for run in runs],
        "data": [_data_of(run) for run in runs],
        "algorithm": [_kind(run.get("algorithm")) for run in runs],
        "params": [_params(runs)],
    }
    return {name: text for name, values in parts.items() if (text := _side_by_side(values))}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _kind(part: Any) -> str:
    return str(_mapping(part).get("kind") or "")


def _model(run: Mapping[str, Any]) -> str:
    model = _mapping(run.get("model"))
    start = model.get("load_checkpoint_path")
    return f"{model.get('name') or ''}{f' from {start}' if start else ''}"


def _data_of(run: Mapping[str, Any]) -> str:
    """Of a chain, the data of its stages in order."""
    stages = [_mapping(stage) for stage in _mapping(run.get("continual")).get("stages") or []]
    blocks = [stage.get("data") for stage in stages] or [run.get("data")]
    return " -> ".join(text for block in blocks if (text := _data(_mapping(block))))


def _data(block: Mapping[str, Any]) -> str:
    """`data/train.jsonl (jsonl_to_chat, dedupe)`."""
    rows = block.get("rows")
    source = next((str(block[key]) for key in SOURCES if block.get(key)), "")
    source = source or (f"{len(rows)} rows in the config" if isinstance(rows, Sequence) else "")
    kinds = [_kind(transform) for transform in block.get("transforms") or []]
    return f"{source} ({', '.join(kinds)})" if source and kinds else source


def _params(runs: Sequence[Mapping[str, Any]]) -> str:
    """`batch_size=16, learning_rate=1e-05 / 0.001`: the algorithm's params, in the order of their names."""
    tables = [_mapping(_mapping(run.get("algorithm")).get("params")) for run in runs]
    names = sorted({str(name) for table in tables for name in table})
    each = {name: [_value(table[name]) if name in table else "(not set)" for table in tables] for name in names}
    return ", ".join(f"{name}={_side_by_side(values)}" for name, values in each.items())


def _value(value: Any) -> str:
    return shorten(f"{value:g}" if isinstance(value, float) else str(value), 60)


def _side_by_side(values: Iterable[str]) -> str:
    """The value that all have; else those there are, each once."""
    found = list(dict.fromkeys(value for value in values if value))
    more = f" / {len(found) - MOST_VALUES} more" if len(found) > MOST_VALUES else ""
    return " / ".join(found[:MOST_VALUES]) + more
