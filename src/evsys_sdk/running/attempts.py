"""Whether a run is begun or taken up: what an interrupted attempt left, and what of it still counts.

In: a run's directory and the experiment's journal. Out: the journal of the attempt that now goes on. The same settings
and at least one whole checkpoint or one rollout of an evaluation make an unfinished attempt one to go on with; anything
else is set aside.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.errors import BackendError, DataError
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.eval_data import in_order
from evsys_sdk.record.finished import retold
from evsys_sdk.record.journal import Journal, RunJournal
from evsys_sdk.record.run_dir import set_aside
from evsys_sdk.running.pausing import PAUSED_AT
from evsys_sdk.training.checkpoints import MANIFEST_FILE, STAGES, Checkpoint, manifests_in, stage_folder
from evsys_sdk.training.rollout_log import carry_over


def begin_or_resume(
    journal: Journal, run_id: str, fingerprint: str, run_dir: Path, *, fresh: bool
) -> tuple[RunJournal, bool]:
    """The journal to write to, and whether an earlier attempt goes on in it."""
    earlier = None if fresh else journal.unfinished(run_id, fingerprint)
    reached = _reached(run_dir) if earlier else {}
    if earlier and reached:
        aside = set_aside(run_dir, keep=_to_keep(run_dir, reached))
        if aside:
            carry_over(aside, run_dir, lambda stage, step: step <= _step(reached, stage))
        return earlier, True
    aside = set_aside(run_dir)
    if earlier:
        earlier.supersede(after=0)
    if earlier and earlier.has_rollouts:
        get_logger(__name__).warning("%s begins anew with what is known of the untrained model", run_id)
        return earlier, True
    if earlier and aside:
        say = "%s begins anew: the interrupted attempt left no whole checkpoint to go on from (it is kept in %s)"
        get_logger(__name__).warning(say, run_id, aside)
    return journal.begin(run_id, fingerprint), False


def finished(journal: RunJournal, run_dir: Path) -> RunResult | None:
    """What a run came to that ended before this process began; None where its record is gone or not whole."""
    result = read_back(journal, run_dir)
    return result if result is not None and result.status == "completed" else None


def stands_at(journal: RunJournal, run_dir: Path, step: int) -> RunResult | None:
    """What a run came to that an earlier process paused at this very step."""
    result = read_back(journal, run_dir)
    return result if result and result.status == "pruned" and result.extras.get(PAUSED_AT) == step else None


def read_back(journal: RunJournal, run_dir: Path) -> RunResult | None:
    """The result whose record lies there, whatever its end was."""
    try:
        found = json.loads((run_dir / RUN_RESULT_FILE).read_text())
        if found["run_id"] != journal.run:
            return None  # somebody else's
        told = {"warnings": found["warnings"], "unread_settings": found["unread_settings"], **found["notes"]}
        told["leakage"] = found.get("leakage", [])
        told |= {"reused_from": found["reused_from"]} if "reused_from" in found else {}
        about = {"run_name": found["run"], "seed": found["seed"], "finished_before": found["ts"]}
        about |= {"reused_from": found["reused_from"]} if "reused_from" in found else {}
        result = RunResult(
            run_id=found["run_id"],
            status=found["status"],
            metrics=found["metrics"],
            artifacts=found["artifacts"],
            error=found["error"],
            extras={**told, **about, "run_dir": str(run_dir)},
        )
    except (OSError, ValueError, KeyError):
        return None
    result.extras["evals"] = in_order([retold(event.data, journal) for event in journal.evals()])
    where = f" in {found['reused_from']}" if "reused_from" in found else ""
    if result.status == "completed":
        say = "%s finished at %s%s and is not run again (--fresh would)"
        get_logger(__name__).warning(say, result.run_id, found["ts"], where)
    return result


Reached = dict[str | None, Checkpoint]
"""The last whole checkpoint of each stage, by its folder's name; None for a run without stages."""


def _reached(run_dir: Path) -> Reached:
    """How far an attempt came; nowhere, if a manifest of its cannot be trusted."""
    try:
        manifests = manifests_in(run_dir)
    except BackendError as exc:
        get_logger(__name__).warning("%s, so nothing can be gone on from", exc)
        return {}
    return {manifest.stage: last for manifest in manifests if (last := manifest.last_complete())}


def _step(reached: Reached, stage: str | None) -> int:
    last = reached.get(None if stage is None else stage_folder(stage))
    return last.step if last else 0


def _to_keep(run_dir: Path, reached: Reached) -> set[str]:
    """What the run goes on with: the manifests, and the folders that the weights lie in."""
    keep = {MANIFEST_FILE, STAGES}
    for path in [Path(path) for last in reached.values() for path in (last.state, last.sampler)]:
        if path.is_relative_to(run_dir.absolute()):
            keep.add(path.relative_to(run_dir.absolute()).parts[0])
    return keep


def refuse_other_data(journal: RunJournal, loaded: list[dict[str, Any]]) -> None:
    """A resumed run goes on with the rows it began with, or not at all."""
    before = {event.key: event.data for event in journal.events(upto=0) if event.kind == "data"}
    for block in loaded:
        known = before.get(block["place"])
        if known is not None and known["sha256"] != block["sha256"]:
            raise DataError(
                f"{block['place']}: {block['source']} has changed since this run was interrupted; put the old "
                "rows back, or start over with --fresh"
            )
        journal.add("data", block, at=0, key=block["place"])
