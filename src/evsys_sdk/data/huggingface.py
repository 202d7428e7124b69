"""Rows of a Hugging Face dataset: on the hub, or on this disk and then without network.

In: a dataset's id, or the path of a folder or file, and a split. Out: rows. The `datasets` library is met only here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evsys_sdk.errors import DataError, blame, need, not_known
from evsys_sdk.protocols import Row

_BUILDERS = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".tsv": "csv",
    ".txt": "text",
}


def read_hf_rows(dataset: str, split: str, folders: Sequence[Path] = ()) -> Iterator[Row]:
    """Stream the rows of one split."""
    datasets = need("datasets", extra="local")
    local = _on_disk(dataset, folders)
    with blame(DataError, f"loading the dataset {dataset!r}, split {split!r},"), _quiet(datasets):
        load = _load_saved if _is_saved(local) else _load
        yield from load(datasets, local or dataset, split)


def _on_disk(dataset: str, folders: Sequence[Path]) -> Path | None:
    places = [Path(dataset).expanduser(), *(Path(folder) / dataset for folder in folders)]
    return next((place.absolute() for place in places if place.exists()), None)


def _is_saved(place: Path | None) -> bool:
    """Whether `Dataset.save_to_disk` made this folder; those need another loader."""
    return place is not None and any((place / name).exists() for name in ("state.json", "dataset_dict.json"))


def _load_saved(datasets: Any, place: Path | str, split: str) -> Any:
    found = datasets.load_from_disk(str(place))
    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found:
        raise DataError(f"{place}: " + not_known(split, "split", found))
    return found[split]


def _load(datasets: Any, source: Path | str, split: str) -> Any:
    builder = _BUILDERS.get(source.suffix) if isinstance(source, Path) and source.is_file() else None
    if builder is None:
        return datasets.load_dataset(str(source), split=split)
    extra = {"delimiter": "\t"} if str(source).endswith(".tsv") else {}
    return datasets.load_dataset(builder, data_files={split: str(source)}, split=split, **extra)


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without the library's progress bars, which would run through ours."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
