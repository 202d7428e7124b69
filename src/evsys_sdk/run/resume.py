"""Where a run continues: its own interrupted or paused attempt, or a completed identical run to reuse.

In: a run's directory and the experiment's journal. Out: the journal of the attempt that continues, or the stored
result of a run that need not execute again. Two runs are identical if they have the same settings, rows, tasks and
project code; one whose evaluation failed is not reused.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from evsys_sdk.config.load import plain
from evsys_sdk.constants import CALLS_FILE, JOURNAL_FILE
from evsys_sdk.errors import BackendError, DataError, EvsysError
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.callbacks import eval_metrics
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.journal import IDENTITY, REUSED, Journal, JournalEvent, RunJournal, read_eval
from evsys_sdk.record.layout import set_aside
from evsys_sdk.record.models import RecordedData, RunRecord, RunRecorder, from_data, in_order
from evsys_sdk.record.rollouts import StoredJournal
from evsys_sdk.run.plan import RunPlan
from evsys_sdk.training.checkpoints import MANIFEST_FILE, STAGES, manifests_in, stage_folder
from evsys_sdk.training.rollout_data import carry_over

NAMES = ("name", "tags", "group")
"""Settings of a run that only say what it is called."""
LOGS = "logs"


def begin_or_resume(
    journal: Journal, run_id: str, fingerprint: str, run_dir: Path, *, fresh: bool
) -> tuple[RunJournal, bool]:
    """The journal to write to, and whether it continues an earlier attempt.

    An unfinished attempt with the same settings continues if it left a whole checkpoint, answers that a prompt search
    paid for, or rollouts of the untrained model; anything else is set aside."""
    # Other settings have another fingerprint: their attempt is not continued, and its files are set aside below.
    earlier = None if fresh else journal.unfinished(run_id, fingerprint)
    is_lost = not fresh and journal.latest(run_id) is None  # a run that left checkpoints had begun in the journal
    manifests = []
    if earlier or is_lost:
        try:
            manifests = manifests_in(run_dir)
        except BackendError as exc:
            get_logger(__name__).warning("%s, so the run cannot resume from its checkpoints", exc)
    # The last whole checkpoint of each stage, by its folder's name; None is a run without stages.
    reached = {manifest.stage: last for manifest in manifests if (last := manifest.last_complete())}
    calls = {path.name for path in run_dir.glob(f"*{CALLS_FILE}")}
    if earlier and (reached or calls):
        keep, home = {MANIFEST_FILE, STAGES, *calls}, run_dir.absolute()
        for path in [Path(path) for last in reached.values() for path in (last.state, last.sampler)]:
            if path.is_relative_to(home):
                keep.add(path.relative_to(home).parts[0])

        def is_kept(stage: str | None, step: int) -> bool:
            last = reached.get(None if stage is None else stage_folder(stage))
            return step <= (last.step if last else 0)

        aside = set_aside(run_dir, keep=keep)
        if aside:
            carry_over(aside, run_dir, is_kept)
        return earlier, True
    aside = set_aside(run_dir)
    if is_lost and reached:
        say = (
            "%s starts again from step 0: %s lists a checkpoint of step %d, but the journal %s has lost the steps "
            "before it (the file was deleted or cut short). The earlier files are kept in %s"
        )
        last_step = max(checkpoint.step for checkpoint in reached.values())
        get_logger(__name__).warning(say, run_id, run_dir / MANIFEST_FILE, last_step, journal.path, aside)
    if earlier:
        earlier.supersede(after=0)
    if earlier and earlier.has_rollouts:
        get_logger(__name__).warning(
            "%s starts again from step 0; the rollouts of the untrained model are kept", run_id
        )
        return earlier, True
    if earlier and aside:
        say = "%s starts again from step 0: the interrupted attempt left no whole checkpoint (its files are kept in %s)"
        get_logger(__name__).warning(say, run_id, aside)
    return journal.begin(run_id, fingerprint), False


def find_completed(plan: RunPlan, record: RunRecorder) -> RunResult | None:
    """The stored result of this run: completed by an earlier process, reused from an identical run of another
    experiment, or paused at the very step this plan pauses at."""
    if plan.fresh:
        return None
    fingerprint = record.config_hash()
    earlier = plan.journal.latest(plan.run_id, fingerprint)
    if earlier is None:
        is_child = plan.experiment.parent_experiment_id is not None
        same = find_identical(run_identity(plan, record), plan.journal.path, is_child=is_child)
        earlier = reuse_run(same, plan.journal, plan.run_id, fingerprint, record.run_dir) if same else None
    if earlier is None:
        return None
    # The record of a paused run may be whole where the journal has lost its scores, and those decide who continues.
    if not earlier.completed and (plan.pause_at is None or not was_paused_at(earlier, plan.pause_at)):
        return None
    result = load_result(earlier, record.run_dir)
    if result is None:
        return None
    if earlier.completed:
        return result if result.status == "completed" else None
    return result if result.status == "pruned" and result.paused_at == plan.pause_at else None


def load_result(journal: RunJournal, run_dir: Path) -> RunResult | None:
    """The result that a run recorded in its directory; None where there is no whole record of this run."""
    record = RunRecord.find(run_dir)
    if record is None or record.run_id != journal.run:
        return None
    result = record.to_result(run_dir, in_order([read_eval(event.data, journal) for event in journal.evals()]))
    if result.status == "completed":
        where = f" in {record.reused_from}" if record.reused_from else ""
        say = "%s finished at %s%s and is not run again (--fresh would)"
        get_logger(__name__).warning(say, result.run_id, record.ts, where)
    return result


def refuse_other_data(journal: RunJournal, loaded: list[RecordedData]) -> None:
    """Refuse to resume a run on other rows than those it began with."""
    before = {event.key: event.data for event in journal.events(upto=0) if event.kind == "data"}
    for block in loaded:
        known = before.get(block.place)
        if known is not None and known["sha256"] != block.sha256:
            raise DataError(
                f"{block.place}: {block.source} has changed since this run was interrupted; put the old "
                "rows back, or start over with --fresh"
            )
        journal.add("data", block.model_dump(), at=0, key=block.place)


# A pause: a search stops a run at a step (a rung of successive halving). The run has status `pruned` unless a later
# plan, with a later pause or none, resumes it from the checkpoint of that step.


def metrics_at(journal: RunJournal, step: int) -> dict[str, float]:
    """The last score of each benchmark and the last step's metrics, as they stood after `step`."""
    found: dict[str, float] = {}
    for event in journal.events(upto=step):
        if event.kind == "step":
            found.update(event.data["metrics"])
        elif event.kind == "eval" and event.at > 0:  # at 0 it was the untrained model
            data = {key: value for key, value in event.data.items() if key not in ("kept", "order")}
            found.update(eval_metrics(from_data(data)))
    return found


def end_key(result: RunResult) -> str:
    """The key of a run's `end` event in the journal; a run may be paused several times."""
    return result.status if result.paused_at is None else f"{result.status}@{result.paused_at}"


def was_paused_at(journal: RunJournal, step: int) -> bool:
    """Whether a search paused the run after this step."""
    return any(event.kind == "end" and event.key == f"pruned@{step}" for event in journal.events(upto=0))


def amend_record(run_dir: Path, result: RunResult) -> None:
    """Replace status and error in the record of a paused run."""
    record = RunRecord.find(run_dir)
    if record is not None:  # without one, nothing contradicts the result
        record.model_copy(update={"status": result.status, "error": result.error}).write(run_dir)


# Reuse: a completed identical run of another experiment stands in for this one. Its record is copied and its weights
# are linked, so that neither experiment loses them when the other starts over.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusableRun:
    """A completed run of another experiment."""

    journal: Path
    run: str
    attempt: int
    run_dir: Path
    result: RunRecord


def run_identity(plan: RunPlan, record: RunRecorder) -> str:
    """The same for runs that would do the same: settings without names, and hashes of what the settings only name."""
    settings = {key: value for key, value in plain(plan.run).items() if key not in NAMES}
    shared = {**record.shared_settings(), **record.options}
    return config_hash({"run": settings, "shared": shared, "contents": plan.contents})


def find_identical(identity: str, own: Path, *, is_child: bool) -> ReusableRun | None:
    """A completed run with this identity, of another experiment than that of the journal `own`: one in the same
    folder, or a relative of a forked child. Identical arms inside one experiment all execute: they are meant to."""
    # The newest first. An identity stands at step 0, which `supersede` never reaches.
    query = "SELECT run, attempt, data FROM events WHERE kind = ? AND key = ? ORDER BY id DESC"
    folders = (".", "..", "../*") if is_child else (".",)
    paths = [path for folder in folders for path in sorted(own.parent.glob(f"{folder}/*.{JOURNAL_FILE}"))]
    for path in paths:
        if path.resolve() == own.resolve():
            continue
        try:
            with closing(StoredJournal(path)) as journal:
                for run, attempt, data in journal.read(query, (IDENTITY, identity)):
                    events, run_dir = RunJournal(journal, run, attempt), Path(json.loads(data)["run_dir"])
                    if not events.completed or any(event.data["error"] for event in events.evals()):
                        continue
                    result = RunRecord.find(run_dir)
                    if result and result.run_id == run and result.status == "completed":
                        # else another run has taken the directory since
                        return ReusableRun(journal=path, run=run, attempt=attempt, run_dir=run_dir, result=result)
        except EvsysError:  # not a journal of ours, or of another version
            continue
    return None


def reuse_run(found: ReusableRun, journal: Journal, run_id: str, fingerprint: str, run_dir: Path) -> RunJournal:
    """Copy the found run's record to this run. The journal comes last: before it, nothing counts."""
    set_aside(run_dir)
    if (found.run_dir / LOGS).is_dir():
        shutil.copytree(found.run_dir / LOGS, run_dir / LOGS)
    artifacts, source = {}, found.run_dir.absolute()
    for name, artifact in found.result.artifacts.items():
        artifacts[name], place = artifact, Path(artifact)
        if place.is_relative_to(source) and place.exists():  # one that lies elsewhere stays there
            here = run_dir.absolute() / place.relative_to(source)
            artifacts[name] = str(here)
            if not here.exists():
                here.parent.mkdir(parents=True, exist_ok=True)
                if place.is_dir():
                    shutil.copytree(place, here, copy_function=_link)
                else:
                    _link(place, here)
    experiment, _, run = run_id.rpartition("/")
    names = {"run_id": run_id, "experiment": experiment, "run": run, "reused_from": str(found.run_dir)}
    found.result.model_copy(update={**names, "artifacts": artifacts}).write(run_dir)
    places = {"from": str(found.run_dir), "run_dir": str(run_dir.absolute())}
    note = JournalEvent(kind=REUSED, key="0", at=0, data=places)
    with closing(StoredJournal(found.journal)) as source_journal:
        return journal.copy(RunJournal(source_journal, found.run, found.attempt), run_id, fingerprint, note=note)


def _link(source: str | Path, target: str | Path) -> None:
    """Weights are never changed in place, so a hard link is enough; a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
