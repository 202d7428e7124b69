"""Hand a run's weights to other programs: which run and checkpoint are meant, and where the result goes.

In: what somebody calls a run (a directory, `<experiment>/<run>`, sampler weights, a model's name), a checkpoint of it
and a form. Out: an `Exported`. Only weights of the local backend are files of a transformer; others are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.errors import EvsysError, not_known
from evsys_sdk.running.opening import Target, Wish, find_target
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
    if "@" in ref and not Path(ref).exists():
        ref, _, checkpoint = ref.rpartition("@")
    target = _target(ref, checkpoint)
    if target.backend != "local":
        raise EvsysError(
            f"{ref}: its weights live on the backend {target.backend!r}; only the backend local keeps weights that can "
            "be exported"
        )
    from evsys_engine.hand_over import export_model
    from evsys_engine.models import find_model
    from evsys_engine.types import EngineError

    place = out or _default_place(target, form, checkpoint)
    weights = None if target.checkpoint is None else Path(target.checkpoint)
    try:
        base = find_model(target.model)
        # A hub id says more to others than a path of this machine.
        name = target.model if base.source == "hub" else str(base.path)
        export_model(form, base.path, weights, place.absolute(), base_name=name, number_type=number_type)
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


def _default_place(target: Target, form: Form, checkpoint: str) -> Path:
    step = "" if checkpoint == "final" else f"-{Path(checkpoint).name}"
    name = f"{target.name.replace('/', '-')}{step}"
    return Path(f"{name}.gguf" if form == "gguf" else f"{name}-{form}")


def _target(ref: str, checkpoint: str) -> Target:
    path = _run_dir(ref)
    run_dir = path if path is not None and (path / RUN_RESULT_FILE).is_file() else None
    if checkpoint == "final":
        return find_target(Wish(text=str(path or ref)))
    if run_dir is None:
        raise EvsysError(f"{ref} is not a run, so it has no checkpoint {checkpoint!r}; name a run's directory")
    return find_target(Wish(text=_sampler(run_dir, checkpoint)))


def _sampler(run_dir: Path, checkpoint: str) -> str:
    """The sampler weights of a step."""
    kept = {f"step-{found.step}": found.sampler for told in manifests_in(run_dir) for found in told.whole()}
    wanted = checkpoint if checkpoint.startswith("step-") else f"step-{checkpoint}"
    sampler = kept.get(wanted)
    if not sampler:
        raise EvsysError(f"{run_dir}: " + not_known(checkpoint, "checkpoint of this run", ["final", *kept]))
    return sampler


def _run_dir(ref: str) -> Path | None:
    """The path that `ref` is, or the directory of the run `<experiment>/<run>`; None for a model's name."""
    path = Path(ref).expanduser()
    if path.exists():
        return path
    experiment, _, run = ref.partition("/")
    if not run:
        return None
    from evsys_sdk.config.root import project_root
    from evsys_sdk.constants import WORKSPACE_DIR
    from evsys_sdk.record.history import DEFAULT_OUTPUTS, read_history

    here = Path.cwd()
    history = read_history(project_root(here) / WORKSPACE_DIR, outputs=here / DEFAULT_OUTPUTS)
    places = [entry.record.parent / run for entry in history.entries if entry.name == experiment]
    return next((place for place in places if place.is_dir()), None)
