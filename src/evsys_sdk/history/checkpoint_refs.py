"""Checkpoints by name: `<run>@final`, `<run>@latest`, `<run>@step-12`, `<run>@<stage>/step-12`.

In: such a name, where `<run>` is a run's directory, `<experiment>/<run>`, an experiment with one run, or a run's own
name. Out: the path that the backend gave the weights, which holds a hash that cannot be known in advance. What is not
such a name (a path, an address) is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evsys_sdk.config.project import project_root
from evsys_sdk.config.sweep import directory_name
from evsys_sdk.constants import RUN_RESULT_FILE, WORKSPACE_DIR
from evsys_sdk.errors import EvsysError
from evsys_sdk.history.history import DEFAULT_OUTPUTS, newest_by_name, read_history, slug_of
from evsys_sdk.history.progress import progress_in
from evsys_sdk.record.layout import OWNER_FILE
from evsys_sdk.record.models import RunRecord
from evsys_sdk.training.checkpoints import MANIFEST_FILE, STAGES, manifests_in

Weights = Literal["state", "sampler"]
"""What training starts from (weights and optimizer), and what is sampled from."""
LISTED = 8
# The run is greedy up to the last @: its folder may be called `<run>@<experiment>`.
_NAME = re.compile(r"(?P<run>.+)@(?:(?P<stage>[\w.-]+)/)?(?P<point>final|latest|step-(?P<step>\d+))")


class NoSuchRun(EvsysError):
    """No run of the project has that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointName:
    """A checkpoint as people name it."""

    run: str
    stage: str | None
    point: str
    """`final`, `latest` or `step-<n>`."""
    step: int | None

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """The name that `text` is; None for a path or an address."""
        match = _NAME.fullmatch(text)
        if match is None or "://" in text or Path(text).exists():
            return None
        step = int(match["step"]) if match["step"] else None
        return cls(run=match["run"], stage=match["stage"], point=match["point"], step=step)


def checkpoint_path(text: str, weights: Weights, folders: Sequence[Path] = ()) -> str:
    """The path of the weights that `text` names; `text` itself where it is a path or an address. `folders` are where
    relative run directories are looked for, beside the current folder."""
    name = CheckpointName.parse(text)
    if name is None:
        return text
    return weights_at(find_run(name.run, folders), name, weights)


def find_run(ref: str, folders: Sequence[Path] = ()) -> Path:
    """The directory of a run: the path itself, `<experiment>/<run>`, or a name that only one run has."""
    for folder in (Path.cwd(), *folders):
        if is_run_dir(folder / ref):
            return (folder / ref).absolute()
    known = list(known_runs())
    exact = [run_dir for experiment, run, run_dir in known if f"{experiment}/{run}" == ref]
    meant = exact or [run_dir for experiment, run, run_dir in known if ref in (experiment, run)]
    # Last, by the experiment's name without its date.
    meant = meant or [run_dir for name, run, run_dir in known if ref in (slug_of(name), f"{slug_of(name)}/{run}")]
    if len(meant) == 1:
        return meant[0]
    names = [f"{experiment}/{run}" for experiment, run, run_dir in known if not meant or run_dir in meant]
    told = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
    if meant:
        raise EvsysError(f"{ref!r} can mean {len(meant)} runs: {told}; name one as <experiment>/<run>")
    raise NoSuchRun(
        f"no run {ref!r}; " + (f"known: {told}" if names else "none is known here: run it first, or name its directory")
    )


def is_run_dir(path: Path) -> bool:
    """Whether a run has left checkpoints or a record there."""
    return any((path / name).exists() for name in (RUN_RESULT_FILE, MANIFEST_FILE, STAGES))


def known_runs() -> Iterator[tuple[str, str, Path]]:
    """Experiment, run and directory of every run of the project's experiments, of each name the newest."""
    history = read_history(project_root(Path.cwd()) / WORKSPACE_DIR, outputs=Path.cwd() / DEFAULT_OUTPUTS)
    for experiment, entry in newest_by_name(history.entries).items():
        for run in progress_in(entry.journal):
            plain = directory_name(run.run)
            # Where the folder was moved: beside the record, under the names that `Places` gives.
            moved = [entry.record.parent / name for name in (plain, f"{plain}@{directory_name(experiment)}")]
            places = [Path(run.run_dir)] if run.run_dir else []
            run_id = f"{experiment}/{run.run}"
            own = [place for place in (*places, *moved) if is_run_dir(place) and is_of_run(place, run_id)]
            if own:
                yield experiment, run.run, own[0]


def is_of_run(place: Path, run_id: str) -> bool:
    """Whether the directory is that run's, and not one of the same name of another experiment."""
    try:
        return (place / OWNER_FILE).read_text(errors="replace").strip() == run_id
    except OSError:
        record = RunRecord.find(place)
        return record is None or record.run_id in ("", run_id)


def weights_at(run_dir: Path, name: CheckpointName, weights: Weights) -> str:
    """The path of a run's weights; EvsysError that lists the checkpoints there are."""
    if name.point == "final" and name.stage is None:
        # What the record of a completed run names: with `best_by` these are the best weights, not the last.
        record = RunRecord.find(run_dir) or RunRecord()
        path = record.artifacts.get("final_checkpoint" if weights == "state" else "final_sampler")
        if path is not None and record.status == "completed":
            inside = run_dir / "weights" / Path(path).name  # a run directory that was moved has its weights with it
            return str(inside.absolute() if inside.exists() else path)
    there = [
        (manifest, checkpoint)
        for manifest in sorted(manifests_in(run_dir), key=lambda one: one.path.stat().st_mtime)  # a later stage later
        # `whole` has the newest first; here it is last, as `meant[-1]` below expects.
        for checkpoint in reversed(manifest.whole())
    ]
    meant = [
        (manifest, checkpoint)
        for manifest, checkpoint in there
        if name.stage in (None, manifest.stage) and name.step in (None, checkpoint.step)
        if name.point != "final" or checkpoint.final
    ]
    names = [
        f"{run_dir.name}@{f'{manifest.stage}/' if manifest.stage else ''}step-{checkpoint.step}"
        for manifest, checkpoint in (meant if name.step is not None and meant else there)
    ]
    if not meant:
        which = f"{name.point!r}{f' of stage {name.stage!r}' if name.stage else ''}"
        raise EvsysError(
            f"{run_dir} has no checkpoint {which}; " + (f"there are: {', '.join(names)}" if names else "it saved none")
        )
    if name.step is not None and len(meant) > 1:
        raise EvsysError(f"{name.point} of {run_dir} can mean {', '.join(names)}; name the stage")
    return str(getattr(meant[-1][1], weights))
