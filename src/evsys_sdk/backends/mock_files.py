"""The mock's weights on disk.

In: a model, and its optimiser when training is to go on from there. Out: a file named after what is in it, so that
nothing saved is ever overwritten by something else; and back, whole or not at all. Only rows that were ever
touched are stored.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evsys_sdk.atomic import whole_file
from evsys_sdk.backends.mock_contexts import Array
from evsys_sdk.backends.mock_model import Adam, TableModel
from evsys_sdk.errors import BackendError

FORMAT = "evsys-mock-1"
Kind = Literal["state", "sampler"]
_MAKER = {"state": "save_state", "sampler": "save_weights_for_sampler"}


def save(directory: Path, name: str, model: TableModel, adam: Adam | None) -> str:
    """Write the weights, with `adam` as a state and without as sampler weights; return the path."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise BackendError(f"{name!r} cannot name a checkpoint; use letters, digits, '.', '_' and '-'")
    kind: Kind = "sampler" if adam is None else "state"
    head = {"format": FORMAT, "kind": kind, "model": model.model_name, "rank": model.rank}
    rows = np.flatnonzero(model.used)
    arrays: dict[str, Any] = {"rows": rows, "weights": model.weights[rows]}
    if adam is not None:
        head["adam_steps"] = adam.steps
        arrays |= {"mean": adam.mean[rows], "square": adam.square[rows]}
    content = io.BytesIO()
    np.savez(content, head=np.frombuffer(json.dumps(head).encode(), dtype=np.uint8), **arrays)
    digest = hashlib.blake2b(content.getbuffer(), digest_size=6).hexdigest()
    path = directory / f"{name}-{digest}.{kind}.npz"
    with whole_file(path) as handle:
        handle.write(content.getbuffer())
    return str(path)


def load(path: str, kind: Kind) -> tuple[dict[str, Any], dict[str, Array]]:
    """Head and arrays of a file that `save` wrote; anything else is refused."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}  # reading checks each part's checksum
        head = {"kind": None, "model": None, "rank": None, **json.loads(arrays.pop("head").tobytes())}
        if head.get("format") != FORMAT or not {"rows", "weights"} <= arrays.keys():
            raise ValueError("it has another format")
    except FileNotFoundError:
        raise BackendError(f"{path}: there is no such checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, zipfile.BadZipFile) as exc:
        raise BackendError(f"{path} is not a whole checkpoint of the mock backend ({exc})") from exc
    if head["kind"] != kind:
        raise BackendError(f"{path} holds a {head['kind']}; this needs what {_MAKER[kind]} returned")
    return head, arrays


def restore(path: str, kind: Kind, model_name: str, rank: int | None = None) -> tuple[TableModel, Adam | None]:
    """The model in a file, with its optimiser if it is a state. It must fit `model_name`, and `rank` if given."""
    head, arrays = load(path, kind)
    if head["model"] != model_name:
        raise BackendError(f"{path} holds weights for {head['model']!r}; this run's model is {model_name!r}")
    if rank is not None and head["rank"] != rank:
        raise BackendError(f"{path} has rank {head['rank']}, this adapter has {rank}; set lora_rank: {head['rank']}")
    model = TableModel(model_name=model_name, rank=head["rank"], seed=None)
    try:
        _fill(model, arrays)
        return model, _optimizer(model, head, arrays) if kind == "state" else None
    except (KeyError, IndexError, ValueError) as exc:
        raise BackendError(f"{path} is not a whole checkpoint of the mock backend ({exc})") from exc


def average(paths: Sequence[str], shares: Sequence[float], model_name: str) -> TableModel:
    """A model whose weights are the weighted sum of those in sampler files."""
    models = [restore(path, "sampler", model_name)[0] for path in paths]
    ranks = sorted({model.rank for model in models})
    if len(ranks) != 1:
        raise BackendError(f"cannot average weights of ranks {', '.join(map(str, ranks)) or 'none'}, which differ")
    total = TableModel(model_name=model_name, rank=models[0].rank, seed=None)
    for model, share in zip(models, shares, strict=True):
        rows = np.flatnonzero(model.used)
        total.weights[rows] += np.float32(share) * model.weights[rows]
        total.used[rows] = True
    return total


def _fill(model: TableModel, arrays: dict[str, Array]) -> None:
    model.weights[arrays["rows"]] = arrays["weights"]
    model.used[arrays["rows"]] = True


def _optimizer(model: TableModel, head: dict[str, Any], arrays: dict[str, Array]) -> Adam:
    adam = Adam(model)
    adam.steps = int(head["adam_steps"])
    adam.mean[arrays["rows"]], adam.square[arrays["rows"]] = arrays["mean"], arrays["square"]
    return adam
