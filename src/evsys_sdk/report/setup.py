"""What an experiment was made of, in words.

In: its config as plain data. Out: model, backend, data, algorithm and params, a text each. Light: history asks this of
hundreds of records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from evsys_sdk.errors import shorten

MOST_VALUES = 6
"""Of arms that differ, in the table of settings; the record has all."""
SOURCES = ("path", "dataset_name", "dataset_id", "hf_dataset")
"""Settings of a data block that say where its rows come from."""


def setup_of(config: Mapping[str, object]) -> dict[str, str]:
    """What an experiment was made of, in words: model, backend, data, algorithm, params. Where arms differ, their
    values stand side by side; a part that no run names is left out."""
    runs = [run for run in _list(config.get("runs")) or [config.get("run") or {}] if isinstance(run, Mapping)]
    parts: dict[str, list[str]] = {"model": [], "backend": [], "data": [], "algorithm": []}
    for run in runs:
        model = _mapping(run.get("model"))
        start = model.get("load_checkpoint_path")
        parts["model"].append(f"{model.get('name') or ''}{f' from {start}' if start else ''}")
        parts["backend"].append(_kind(run.get("backend")))
        parts["algorithm"].append(_kind(run.get("algorithm")))
        stages = [_mapping(stage) for stage in _list(_mapping(run.get("continual")).get("stages"))]
        texts = []  # of a chain, the data of its stages in order: `data/train.jsonl (jsonl_to_chat, dedupe)`
        for block in map(_mapping, [stage.get("data") for stage in stages] or [run.get("data")]):
            rows = block.get("rows")
            source = next((str(block[key]) for key in SOURCES if block.get(key)), "")
            source = source or (f"{len(rows)} rows in the config" if isinstance(rows, Sequence) else "")
            kinds = [_kind(transform) for transform in _list(block.get("transforms"))]
            texts.append(f"{source} ({', '.join(kinds)})" if source and kinds else source)
        parts["data"].append(" -> ".join(text for text in texts if text))
    # `batch_size=16, learning_rate=1e-05 / 0.001`, in the order of their names
    tables = [_mapping(_mapping(run.get("algorithm")).get("params")) for run in runs]
    params = []
    for name in sorted({str(name) for table in tables for name in table}):
        found = [table.get(name, "(not set)") for table in tables]
        values = [shorten(f"{value:g}" if isinstance(value, float) else str(value), 60) for value in found]
        params.append(f"{name}={_side_by_side(values)}")
    parts["params"] = [", ".join(params)]
    return {name: text for name, values in parts.items() if (text := _side_by_side(values))}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else []


def _kind(part: object) -> str:
    return str(_mapping(part).get("kind") or "")


def _side_by_side(values: Iterable[str]) -> str:
    """The value that all have; else those there are, each once."""
    found = list(dict.fromkeys(value for value in values if value))
    more = f" / {len(found) - MOST_VALUES} more" if len(found) > MOST_VALUES else ""
    return " / ".join(found[:MOST_VALUES]) + more
