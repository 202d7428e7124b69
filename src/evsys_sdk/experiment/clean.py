"""Which files of finished experiments nothing needs any more.

In: experiments of a history. Out: a `CleanPlan` of `Leftover`s with their sizes; `remove` deletes them. Kept in every
case: records, journals, logs, every checkpoint of a manifest (the best and the final one are among them), every weights
file that any record, journal or config names, and all weights of a run that is not completed, since it can be resumed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.errors import EvsysError, RunLocked
from evsys_sdk.history.history import ExperimentEntry
from evsys_sdk.record.layout import ATTEMPTS, LOCK_FILE, OWNER_FILE, REHEARSALS, held_by, hold, is_held
from evsys_sdk.record.models import RunRecord
from evsys_sdk.record.processes import lock_of
from evsys_sdk.training.checkpoints import MANIFEST_FILE

WEIGHTS = "weights"
_NAMED = re.compile(rb"(attempts/\d+/weights|weights/[A-Za-z0-9._-]+)")
"""A weights file or folder, or those of an attempt that was set aside, as a record or a config names it."""
_DEEPEST = 4
_NO_CONFIGS_IN = frozenset(["node_modules", "__pycache__", WEIGHTS, ATTEMPTS, "logs"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A file or folder that can go."""

    experiment: str
    path: Path
    bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanPlan:
    """What can go, and what was not looked at."""

    leftovers: list[Leftover] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    """Experiments that a process works on: nothing of theirs is touched."""

    @property
    def bytes(self) -> int:
        return sum(found.bytes for found in self.leftovers)


def plan_clean(
    entries: Sequence[ExperimentEntry], *, known: Sequence[ExperimentEntry], project: Path, rehearsals: bool = True
) -> CleanPlan:
    """What can go of `entries`; `known` are all experiments whose records may name their files. Rehearsals share a
    folder, so they go together or not at all."""
    # Records, manifests of other runs and configs of the project may name weights: those are kept.
    files: list[Path] = []
    for folder in {entry.record.parent for entry in known}:
        files += [*folder.glob("*.json"), *folder.glob(f"*/{RUN_RESULT_FILE}"), *folder.glob(f"*/{MANIFEST_FILE}")]
        files += folder.glob(f"*/stages/*/{MANIFEST_FILE}")
    files += _configs_below(project, skip={entry.record.parent.resolve() for entry in known})
    named = _weights_in(files)
    leftovers: list[Leftover] = []
    running = []
    for entry in entries:
        if is_held(lock_of(entry.record)):
            running.append(entry.name)
            continue
        for run_dir in run_dirs_of(entry):
            if is_held(run_dir / LOCK_FILE):
                running.append(entry.name)
            else:
                leftovers += _of_run(entry.name, run_dir, named)
    for folder in sorted({entry.record.parent for entry in entries}) if rehearsals else []:
        dry = folder / REHEARSALS
        if dry.is_dir() and not dry.is_symlink() and not is_rehearsing(dry):
            leftovers.append(_leftover(REHEARSALS, dry, "rehearsals (evsys run --dry)"))
    return CleanPlan(leftovers=leftovers, running=list(dict.fromkeys(running)))


def remove(plan: CleanPlan, entries: Sequence[ExperimentEntry]) -> int:
    """Delete what the plan lists while no process can start on these experiments; returns the bytes that were freed."""
    freed = 0
    with ExitStack() as locks:
        for entry in entries:
            if entry.name not in plan.running:
                locks.enter_context(hold(lock_of(entry.record), f"experiment {entry.name}"))
        # Rehearsals last: one that has begun meanwhile is an error, and must not cost the others.
        for found in sorted(plan.leftovers, key=lambda one: one.path.name == REHEARSALS):
            try:
                if found.path.name == REHEARSALS:
                    _remove_rehearsals(found.path)
                elif found.path.is_dir() and not found.path.is_symlink():
                    shutil.rmtree(found.path)
                else:
                    found.path.unlink(missing_ok=True)
            except OSError as exc:
                raise EvsysError(f"{found.path} cannot be deleted: {exc.strerror}") from exc
            freed += found.bytes
    return freed


def is_rehearsing(dry: Path) -> bool:
    """Whether a process works in this folder of rehearsals."""
    return any(is_held(lock) for lock in [*dry.glob(".*.lock"), *dry.glob(f"*/{LOCK_FILE}")])


def _remove_rehearsals(dry: Path) -> None:
    """Delete the folder, unless a rehearsal has begun since the plan was made."""
    aside = dry.with_name(f".{dry.name}.{os.getpid()}.part")
    if not is_rehearsing(dry):
        # Put aside first: a rehearsal that begins from here on makes a new folder, and one that had just begun is seen
        # by its lock, which moves along.
        dry.rename(aside)
        if not is_rehearsing(aside):
            shutil.rmtree(aside)
            return
        aside.rename(dry)
    raise RunLocked(f"a rehearsal is running in {dry}, so nothing of it was removed\nnext: evsys clean again, after it")


def refuse_running(entry: ExperimentEntry) -> None:
    """Refuse an experiment that a process works on."""
    locks = [lock_of(entry.record), *(run_dir / LOCK_FILE for run_dir in run_dirs_of(entry))]
    lock = next((lock for lock in locks if is_held(lock)), None)
    if lock is not None:
        holder = held_by(lock) or "a process"
        raise RunLocked(
            f"{entry.name} is running ({holder}), so nothing of it is removed\nnext: evsys status {entry.name}"
        )


def run_dirs_of(entry: ExperimentEntry) -> list[Path]:
    """The directories beside the record that belong to a run of this experiment."""
    found = []
    try:
        folders = sorted(one.path for one in os.scandir(entry.record.parent) if one.is_dir(follow_symlinks=False))
    except OSError:
        return []
    for folder in map(Path, folders):
        try:
            owner = (folder / OWNER_FILE).read_text(errors="replace").strip()
        except OSError:
            continue
        if owner.partition("/")[0] == entry.name:
            found.append(folder)
    return found


def _of_run(experiment: str, run_dir: Path, named: set[str]) -> Iterator[Leftover]:
    parts = [part for part in run_dir.rglob(".*.part") if not part.is_symlink()]
    for part in sorted(parts):
        # A half-written folder is listed as a whole, and not its files once more.
        if not any(other in part.parents for other in parts):
            yield _leftover(experiment, part, "half-written by a process that was killed")
    for weights in sorted((run_dir / ATTEMPTS).glob(f"*/{WEIGHTS}")):
        if f"{ATTEMPTS}/{weights.parent.name}/{WEIGHTS}" not in named and not weights.is_symlink():
            yield _leftover(experiment, weights, "weights of an attempt that was set aside; its record stays")
    result = RunRecord.find(run_dir)
    if result is None or result.status != "completed" or not (run_dir / WEIGHTS).is_dir():
        return  # it may be resumed, and then needs what is there
    # Names are compared without the run's folder: weights of one name are kept in every run, which is on the safe side.
    kept = named | _weights_in([run_dir / MANIFEST_FILE, *run_dir.glob(f"stages/*/{MANIFEST_FILE}")])
    for weights in sorted((run_dir / WEIGHTS).iterdir()):
        if f"{WEIGHTS}/{weights.name}" not in kept and not weights.name.startswith(".") and not weights.is_symlink():
            yield _leftover(experiment, weights, "weights that no checkpoint and no record names")


def _leftover(experiment: str, path: Path, why: str) -> Leftover:
    return Leftover(experiment=experiment, path=path, bytes=size_of(path), why=why)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links are not followed."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)


def _weights_in(files: Iterable[Path]) -> set[str]:
    found: set[str] = set()
    for file in files:
        try:
            found.update(name.decode() for name in _NAMED.findall(file.read_bytes()))
        except OSError:
            continue
    return found


def _configs_below(folder: Path, *, skip: set[Path], depth: int = _DEEPEST) -> Iterator[Path]:
    try:
        inside = list(os.scandir(folder))
    except OSError:
        return
    for one in inside:
        if one.is_file() and one.name.endswith((".yaml", ".yml")):
            yield Path(one.path)
        elif (
            depth
            and one.is_dir(follow_symlinks=False)
            and not one.name.startswith(".")
            and one.name not in _NO_CONFIGS_IN
        ):
            if Path(one.path).resolve() not in skip:
                yield from _configs_below(Path(one.path), skip=skip, depth=depth - 1)
