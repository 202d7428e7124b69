"""Hand a run's weights to other programs: which run and checkpoint are meant, and where the result goes.

In: the name of a run (a directory, `<experiment>/<run>`, a name that only one run has, sampler weights, a model's
name), a checkpoint of it and a form. Out: an `Exported`. Only weights of the local backend are files of a transformer;
others are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.errors import EvsysError, not_known
from evsys_sdk.history.checkpoint_refs import CheckpointName, NoSuchRun, find_run, weights_at
from evsys_sdk.run.open_model import ModelRef, find_target
from evsys_sdk.training.checkpoints import manifests_in

Form = Literal["peft", "merged", "gguf"]
NumberType = Literal["f32", "f16", "bf16", "q8_0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    form: Form
    path: Path
    base_model: str
    checkpoint: str | None
    bytes: int


def export_run(
    ref: str, form: Form, out: Path | None, *, checkpoint: str = "final", number_type: NumberType = "f16"
) -> Exported:
    """Write the weights that `ref` means, which may end in `@<checkpoint>`; `out` is named after them by default."""
    named = "@" in ref and not Path(ref).exists()
    if named:
        ref, _, checkpoint = ref.rpartition("@")
    path: Path | None = Path(ref).expanduser()
    if path is not None and not path.exists():
        path = None
        try:
            path = find_run(ref)
        except NoSuchRun:
            if named:  # only a run has checkpoints; else it is the name of a model
                raise
    if checkpoint == "final":
        target = find_target(ModelRef(text=str(path or ref)))
    elif path is None or not (path / RUN_RESULT_FILE).is_file():
        raise EvsysError(f"{ref} is not a run, so it has no checkpoint {checkpoint!r}; name a run's directory")
    else:
        point = f"step-{checkpoint}" if checkpoint.isdigit() else checkpoint
        kept = {f"step-{found.step}": found.sampler for manifest in manifests_in(path) for found in manifest.whole()}
        wanted = CheckpointName.parse(f"{path}@{point}")
        if wanted is None or (wanted.stage is None and wanted.step is not None and point not in kept):
            raise EvsysError(f"{path}: " + not_known(checkpoint, "checkpoint of this run", ["final", *kept, "latest"]))
        target = find_target(ModelRef(text=weights_at(path, wanted, "sampler")))
    if target.backend != "local":
        raise EvsysError(
            f"{ref}: its weights live on the backend {target.backend!r}; only the backend local keeps weights that can "
            "be exported"
        )
    from evsys_engine.export import export_model
    from evsys_engine.models import find_model
    from evsys_engine.types import EngineError

    step = "" if checkpoint == "final" else f"-{checkpoint.replace('/', '-')}"
    name = f"{target.name.replace('/', '-')}{step}"
    place = out or Path(f"{name}.gguf" if form == "gguf" else f"{name}-{form}")
    weights = None if target.checkpoint is None else Path(target.checkpoint)
    try:
        base = find_model(target.model)
        # A hub id says more to others than a path of this machine.
        base_name = target.model if base.source == "hub" else str(base.path)
        export_model(form, base.path, weights, place.absolute(), base_name=base_name, number_type=number_type)
    except EngineError as exc:
        raise EvsysError(f"{ref}: {exc}") from exc
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    return Exported(
        form=form,
        path=place.absolute(),
        base_model=target.model,
        checkpoint=target.checkpoint,
        bytes=sum(file.stat().st_size for file in files),
    )
