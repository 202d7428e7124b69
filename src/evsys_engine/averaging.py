"""Saved weights become one: a weighted sum, tensor by tensor.

In: folders that `save_weights` wrote over the same model, and the share of each. Out: another such folder. Of LoRA the
two factors are averaged, not their product, as a moving average of the trained parameters is.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from evsys_engine.export import CONFIG, KIND
from evsys_engine.folders import MANIFEST, read_manifest, write_folder
from evsys_engine.state import check_model, model_facts, shapes_of
from evsys_engine.types import BadRequest, ModelInfo


def average_weights(folders: Sequence[Path], shares: Sequence[float], folder: Path, info: ModelInfo) -> None:
    """Write the sum of `shares[i]` times the weights in `folders[i]` to `folder`."""
    if not folders or len(folders) != len(shares):
        raise BadRequest(f"{len(folders)} folders and {len(shares)} shares; give one share for each")
    for each in folders:
        check_model(each, read_manifest(each, KIND), info)
    first = Path(folders[0])
    # Rank and scale must agree: factors of unlike ones cannot be added.
    settings = {(Path(each) / CONFIG).read_text() if (Path(each) / CONFIG).exists() else "" for each in folders}
    if len(settings) > 1:
        raise BadRequest(
            f"cannot average {', '.join(map(str, folders))}: their {CONFIG} differ (rank, scale or layers)"
        )

    def write(part: Path) -> None:
        for path in sorted(first.iterdir()):
            if path.suffix == ".safetensors":
                total = _sum([Path(each) / path.name for each in folders], shares)
                save_file(total, part / path.name, metadata={"format": "pt"})
            elif path.name != MANIFEST:
                shutil.copy2(path, part / path.name)

    write_folder(folder, {"kind": KIND, **model_facts(info)}, write)


def _sum(paths: Sequence[Path], shares: Sequence[float]) -> dict[str, Tensor]:
    """Added up in fp32, kept in the precision they were saved in."""
    kinds: dict[str, torch.dtype] = {}
    total: dict[str, Tensor] = {}
    for path, share in zip(paths, shares, strict=True):
        try:
            with safe_open(path, framework="pt") as handle:
                tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as exc:
            raise BadRequest(f"{path} cannot be read ({exc}); take other weights") from exc
        if total and shapes_of(tensors) != shapes_of(total):
            raise BadRequest(f"cannot average {path} with {paths[0]}: they hold other tensors")
        for name, tensor in tensors.items():
            kinds.setdefault(name, tensor.dtype)
            part = tensor.float() * share
            total[name] = part if name not in total else total[name].add_(part)
    return {name: tensor.to(kinds[name]) for name, tensor in total.items()}
