"""How often the question of an experiment was looked at before.

In: the runs of every arm and where the experiment's record will be. Out: `Looks`: the earlier results that a reader saw
before this one. Adding seeds or tasks until something is significant finds something among equals; so each earlier
result counts, and the verdict widens its intervals by their number.

Earlier looks are: experiments that runs were taken over from, and the experiment that this one was forked from, where
they compared two of these arms or more and came to other scores; attempts of this experiment that `--fresh` set aside
and that came to other scores. An identical repeat is no further look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evsys_sdk.atomic import read_object
from evsys_sdk.config.names import REHEARSALS, directory_name
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.conclusion import over_tasks, score_keys, task_counts
from evsys_sdk.record.run_dir import ATTEMPTS
from evsys_sdk.running.outcome import record_path

Arms = Mapping[str, Sequence[RunResult]]
Scores = dict[str, list[float]]
"""Arm -> the success metric of each seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """The results on one question that came before this one."""

    before: list[str] = field(default_factory=list)
    """Experiments, each as `name (when)`."""
    set_aside: int = 0
    """Attempts of this experiment that `--fresh` set aside."""
    rerolls: int = 0
    """Those of them that came to other scores, with other seeds or on a backend that does not repeat exactly."""

    @property
    def count(self) -> int:
        """Looks at the question, this one included."""
        return 1 + len(self.before) + self.rerolls

    def as_dict(self) -> dict[str, Any]:
        return {"count": self.count, **asdict(self)}

    @property
    def lines(self) -> list[str]:
        """What the conclusion says of them; nothing where this is the first look."""
        if self.count == 1:
            return []
        told = [f"earlier looks: {', '.join(self.before)}"] if self.before else []
        if self.rerolls:
            attempts = "attempt" if self.rerolls == 1 else "attempts"
            told.append(f"{self.rerolls} {attempts} with other scores set aside by --fresh")
        return [f"Look {self.count} at this question ({'; '.join(told)})."]


def find_looks(arms: Arms, metric: str | None, output_dir: Path, name: str, parent: str | None) -> Looks:
    """The looks at what the arms scored by this metric; none for a rehearsal."""
    if output_dir.name == REHEARSALS:
        return Looks()
    scores = _scores_of(arms, metric)
    own = record_path(output_dir, name).resolve()
    before: dict[str, None] = {}
    for record, path in _related(arms, output_dir, parent):
        if path.resolve() == own:
            continue
        before |= dict.fromkeys(_looks_in(record))
        if _is_earlier_look(_scores_in(record), scores):
            before[f"{record.get('experiment')} ({record.get('ts')})"] = None
    attempts = [found for path in sorted(_attempts(output_dir, name)) if (found := read_object(path))]
    scored = [found for found in map(_scores_in, attempts) if any(found.values())]
    rerolls = {repr(sorted(found.items())) for found in scored} - {repr(sorted(scores.items()))}
    return Looks(before=list(before), set_aside=len(attempts), rerolls=len(rerolls))


def _scores_of(arms: Arms, metric: str | None) -> Scores:
    keys = score_keys(arms, metric) if metric else []
    found = {
        arm: [over_tasks(run.metrics, keys, task_counts(run)) for run in _completed(runs)] for arm, runs in arms.items()
    }
    return {arm: [score for score in each if score is not None] for arm, each in found.items()}


def _completed(runs: Sequence[RunResult]) -> list[RunResult]:
    return [run for run in runs if run.status == "completed"]


def _related(arms: Arms, output_dir: Path, parent: str | None) -> Iterator[tuple[dict[str, Any], Path]]:
    """Records of the experiments that runs were taken over from, and of the parent."""
    taken = {
        Path(str(run.extras["reused_from"])) for runs in arms.values() for run in runs if "reused_from" in run.extras
    }
    folders = dict.fromkeys([place.parent for place in sorted(taken)])
    paths = [path for folder in folders for path in sorted(folder.glob(f"*.{EXPERIMENT_RESULT_FILE}"))]
    if parent is not None:
        paths += [record_path(output_dir.parent, parent), record_path(output_dir, parent)]
    names = {place.name for place in taken}
    for path in dict.fromkeys(paths):
        record = read_object(path)
        if record is None:
            continue
        shares = any(Path(str(run.get("run_dir") or "")).name in names for run in record.get("runs") or [])
        if shares or record.get("experiment") == parent:
            yield record, path


def _looks_in(record: Mapping[str, Any]) -> list[str]:
    """The looks that came before an earlier one."""
    looks = record.get("looks")
    return [str(one) for one in looks.get("before", [])] if isinstance(looks, Mapping) else []


def _is_earlier_look(then: Scores, now: Scores) -> bool:
    """Whether it compared at least two of the arms, with other seeds or scores than now."""
    shared = [arm for arm in then if then[arm] and now.get(arm)]
    return len(shared) > 1 and any(then[arm] != now[arm] for arm in shared)


def _scores_in(record: Mapping[str, Any]) -> Scores:
    return {str(arm.get("arm")): list(arm.get("scores") or []) for arm in record.get("arms") or []}


def _attempts(output_dir: Path, name: str) -> Iterator[Path]:
    yield from (output_dir / f"{directory_name(name)}.{ATTEMPTS}").glob(f"*/{EXPERIMENT_RESULT_FILE}")
