"""A folder of experiments as rows of the dashboard, kept up to date while they run.

In: what `evsys history` reads: records, journals, notes, and the logs of runs. Out: the same rows that a client would
have sent. Nothing on disk is changed but the dashboard's own database, which remembers what each file was when it was
read, so that the next start reads only what has changed. Records come first and newest first; points and rollouts
follow in the background, and at once for a run that a page asks for (`ensure_loaded`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from django.db import DatabaseError, close_old_connections, connection
from django.db.models import Q

from evsys_dashboard import ingest
from evsys_dashboard.models import EvalRow, ExperimentRow, GenerationRow, Project
from evsys_dashboard.points import MAX_STEP
from evsys_dashboard.request_body import STATUSES, clean, storable
from evsys_dashboard.summary import cost_of, summarize
from evsys_sdk.constants import JOURNAL_FILE
from evsys_sdk.errors import EvsysError
from evsys_sdk.files import read_object
from evsys_sdk.history.history import ExperimentEntry, find_lines, read_line, read_record
from evsys_sdk.history.index import IndexLine, notes_path
from evsys_sdk.history.progress import progress_in
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import EvalResult
from evsys_sdk.record.dashboard.payloads import checkpoints_in, eval_fields, eval_id, figures_beside, prediction_fields
from evsys_sdk.record.dashboard.wire import derived_id
from evsys_sdk.record.journal import EXPERIMENT, number_in, read_eval
from evsys_sdk.record.layout import is_held, stem_of
from evsys_sdk.record.lines import last_lines
from evsys_sdk.record.models import ExperimentRecord, RecordedRun, RunRecord
from evsys_sdk.record.processes import log_of, read_launch, resume_command
from evsys_sdk.record.rollouts import StoredJournal, evals_in_logs

POLL_SECONDS = 1.0
SEARCH_SECONDS = 5.0
"""How often folders are looked through for new experiments; known ones are looked at every `POLL_SECONDS`."""
PAUSE_SECONDS, BREATH_SECONDS, MOST_AT_ONCE = 0.02, 0.002, 50
"""While much is to be loaded: a pause per round and per run, in which pages are answered; and runs per round."""
COMMIT_SECONDS = 0.1
"""Of reading experiments, until what was read is committed."""
PAGE_SECONDS = 1.0
"""How long reading waits, at most, for pages that are being answered."""
LOG_BYTES = 64 * 1024
LOG_LINES = 1000
BATCH_LINES = 5000
"""Of metrics.jsonl in one commit."""
SEED = re.compile(r"__s(\d+)$")
LIVE = ("running", "interrupted")
PlainFields = dict[str, Any]
"""Fields of a wire body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSource:
    """Where to look, as `evsys history` does."""

    workspace: Path | None = None
    """The index in it names records."""
    outputs: Path | None = None
    folders: tuple[Path, ...] = ()
    """Looked through instead of the index."""

    def lines(self) -> dict[Path, IndexLine]:
        """Every experiment that may be there, by the path of its record."""
        return find_lines(self.workspace, self.folders, outputs=self.outputs)


def project_of(place: FollowedSource, root: Path) -> Project:
    """The project that shows this place: that of the folder `root`, or one for the folders that were named."""
    about = place.folders[0].resolve() if place.folders else root
    slug = re.sub(r"[^a-z0-9]+", "-", about.name.lower()).strip("-")[:40] or "local"
    if place.folders:  # the same name may mean other folders tomorrow
        slug += f"-{derived_id(*(str(folder.resolve()) for folder in place.folders))[:6]}"
    found, _ = Project.objects.get_or_create(
        pk=slug, defaults={"name": about.name or str(about), "folder": str(about), "created": time.time()}
    )
    return found


@dataclass(slots=True)
class Follower:
    """A thread that keeps one project up to date with its folders."""

    project: Project
    place: FollowedSource
    _stop: threading.Event = field(default_factory=threading.Event)
    _indexed: threading.Event = field(default_factory=threading.Event)
    """Set when every record was read once."""
    _thread: threading.Thread | None = None
    _lines: dict[Path, IndexLine] = field(default_factory=dict)
    _searched: float = 0.0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="evsys-dashboard-follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)

    def wait_until_indexed(self, seconds: float) -> bool:
        return self._indexed.wait(seconds)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    close_old_connections()
                    self.update()
                    self._indexed.set()
                    is_done = self._load_next()
                except Exception:  # a full disk, a database that is locked: the next round tries again
                    get_logger(__name__).warning("following the folder failed; trying again", exc_info=True)
                    is_done = True
                self._stop.wait(POLL_SECONDS if is_done else PAUSE_SECONDS)
        finally:
            connection.close()

    def update(self) -> None:
        """Bring the rows of all experiments up to date, newest first."""
        now = time.monotonic()
        if not self._searched or now - self._searched > SEARCH_SECONDS:
            self._lines, self._searched = self.place.lines(), now
            self._forget_missing()
        known = dict(
            ExperimentRow.objects.filter(project=self.project).exclude(source="").values_list("source", "stamp")
        )
        changed = []
        for record, line in self._lines.items():
            stamp = stamp_of(line)
            if stamp and known.get(str(record)) != stamp:
                changed.append((newest_of(record), stamp, line))
        waiting = deque((stamp, line) for _, stamp, line in sorted(changed, key=lambda one: -one[0]))
        while waiting and not self._stop.is_set():
            # Many in one commit, whose fsync takes as long as reading one; each is a savepoint. Not all of them: pages
            # show what is there, and logging in waits for the commit.
            ingest.pages_in_flight.wait_until_none(PAGE_SECONDS)
            until = time.monotonic() + COMMIT_SECONDS
            with ingest.writing():
                while waiting:
                    stamp, line = waiting.popleft()
                    self._read(stamp, line, is_new=str(line.record) not in known)
                    if time.monotonic() > until:  # after at least one: waiting for the turn to write took time too
                        break

    def _read(self, stamp: str, line: IndexLine, *, is_new: bool) -> None:
        try:
            read_experiment(self.project, line, stamp, is_new=is_new)
        except DatabaseError:
            raise
        except Exception as exc:  # one record that breaks our reading must not hide the others
            get_logger(__name__).debug("%s", line.record, exc_info=exc)
            note_unreadable(self.project, line.record, stamp, f"{type(exc).__name__}: {exc}")

    def update_all(self) -> None:
        """Bring everything up to date, points and rollouts too, and then return."""
        self.update()
        runs = GenerationRow.objects.filter(project=self.project).exclude(source="")
        for generation in runs.filter(Q(loaded={}) | Q(experiment__status="running")):
            load_run(generation)

    def _forget_missing(self) -> None:
        """Delete the rows of experiments whose files are gone, as `evsys history` skips them."""
        followed = ExperimentRow.objects.filter(project=self.project).exclude(source="")
        for pk, source in followed.values_list("pk", "source"):
            record = Path(source)
            if record not in self._lines or not stamp_of(self._lines[record]):
                with ingest.writing():
                    ExperimentRow.objects.filter(pk=pk).delete()

    def _load_next(self) -> bool:
        """Points and rollouts in the background: of running experiments always, of the others once. False where time
        ran out: running experiments are looked at again before the rest is loaded."""
        runs = GenerationRow.objects.filter(project=self.project).exclude(source="")
        live = list(runs.filter(experiment__status="running"))
        rest = list(runs.filter(loaded={}).exclude(experiment__status="running").order_by("-created")[:MOST_AT_ONCE])
        until = time.monotonic() + POLL_SECONDS
        for generation in [*live, *rest]:
            if self._stop.is_set() or time.monotonic() > until:
                return False
            try:
                load_run(generation)
            except DatabaseError:
                raise
            except Exception as exc:
                get_logger(__name__).debug("%s", generation.source, exc_info=exc)
                loaded = {"problem": f"{type(exc).__name__}: {exc}"}
                GenerationRow.objects.filter(pk=generation.pk).update(loaded=loaded)
            self._stop.wait(BREATH_SECONDS)
        return len(rest) < MOST_AT_ONCE


def _stat(path: Path) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_mtime_ns}:{found.st_size}"


def journal_path(record: Path) -> Path:
    return record.with_name(f"{stem_of(record)}.{JOURNAL_FILE}")


def stamp_of(line: IndexLine) -> str:
    """What changes when anything of an experiment does; empty where nothing of it is on disk."""
    record, journal = line.record, journal_path(line.record)
    files = [_stat(record), _stat(journal)]
    if not any(files):
        return ""
    held = is_held(record.parent / f".{stem_of(record)}.lock")
    # Of an experiment that has ended, another reader may touch the journal's log: it says nothing new then.
    log = _stat(journal.with_name(f"{journal.name}-wal")) if held or not files[0] else ""
    return "|".join(
        [files[0] or "-", files[1] if held or not files[0] else "", log, _stat(notes_path(record)), str(held)]
    )


def newest_of(record: Path) -> float:
    for path in (record, journal_path(record)):
        try:
            return os.stat(path).st_mtime
        except OSError:
            continue
    return 0.0


# One experiment.


def read_experiment(project: Project, line: IndexLine, stamp: str, *, is_new: bool = False) -> None:
    """Bring the rows of one experiment up to date with its files. `is_new`: no row has this record."""
    entry = read_line(line)
    if entry is None:
        return
    record = None if entry.problem else ExperimentRecord.find(entry.record)
    journal = JournalFacts.read(entry.journal)
    experiment_id = journal.experiment_id or derived_id("experiment", str(entry.record))
    source, now = str(entry.record), time.time()
    same_id = list(ExperimentRow.objects.filter(pk=experiment_id).values_list("project_id", "source"))
    if any(
        place not in ("", source) and (owner != project.pk or Path(place).exists()) for owner, place in same_id
    ):  # a copy of a folder is another experiment, and so is the same folder in another project
        experiment_id, same_id = derived_id("experiment", project.pk, source), []
        is_new = is_new and not ExperimentRow.objects.filter(pk=experiment_id).exists()
    body = _experiment_fields(entry, record, journal)
    runs = dict(_run_fields(experiment_id, run, now) for run in _runs_of(entry, record, journal))
    began = journal.began or entry.when
    if record is not None and record.seconds is not None and entry.when and entry.state != "running":
        began = entry.when - record.seconds
    columns = ingest.FollowedColumns(
        source=source,
        stamp=stamp,
        created=began,
        ended=None if entry.state == "running" else entry.when or None,
        digest=entry.digest if record is not None and entry.state not in LIVE else None,
        is_free=is_new and not same_id,
        n_runs=len(runs),
        n_arms=len({run["arm"] for run in runs.values()}),
    )
    with ingest.writing():
        if not is_new:
            # Started over with other settings, the same file is another experiment; what it was is set aside on disk.
            ExperimentRow.objects.filter(project=project, source=source).exclude(pk=experiment_id).delete()
        row = ingest.save_experiment(project, experiment_id, {**body, "ts": now}, create=True, own=columns)
        if entry.problem and row.record:
            ingest.drop_result(row)
        ingest.save_generations(row, runs, are_new=columns.is_free)


def note_unreadable(project: Project, record: Path, stamp: str, problem: str) -> None:
    """A row for an experiment that cannot be read, with the reason."""
    own = ExperimentRow.objects.filter(project=project, source=str(record)).values_list("pk", flat=True).first()
    body = {
        "name": stem_of(record),
        "status": "unreadable",
        "problem": storable(problem),
        "ts": time.time(),
    }
    with ingest.writing():
        identifier = own or derived_id("experiment", project.pk, str(record))
        row = ingest.save_experiment(project, identifier, body, create=True)
        ExperimentRow.objects.filter(pk=row.pk).update(source=str(record), stamp=stamp)


def _experiment_fields(
    entry: ExperimentEntry, record: ExperimentRecord | None, journal: JournalFacts
) -> dict[str, Any]:
    digest = entry.digest
    notes = [{"kind": one.kind, "text": one.text, "by": one.by, "ts": one.ts} for one in entry.notes.current]
    fields: dict[str, Any] = {
        "name": entry.name,
        "hypothesis": digest.hypothesis,
        "status": entry.status,
        "tags": digest.tags,
        "parent_experiment_id": digest.parent or "",
        "notes": notes,
        "problem": entry.problem or "",
        "cost_usd": journal.cost_usd if record is None else cost_of(record, rollouts_usd=journal.cost_usd),
    }
    if record is not None:
        plain = read_record(entry)  # as it is in its file, where NaN is a word
        fields |= {"record": plain, "config": plain.get("config", {}), "description": record.description}
        fields |= {"conclusion": record.conclusion, "metadata": plain.get("config", {}).get("metadata") or {}}
        claim = record.hypothesis.get("claim") if isinstance(record.hypothesis, dict) else record.hypothesis
        fields["hypothesis"] = claim or digest.hypothesis
    elif entry.problem is None:
        metadata = {"success_metric": {"name": digest.metric}} if digest.metric else {}
        fields["config"] = {"name": entry.name, "runs": [*journal.arms.values()], "metadata": metadata}
    return {key: clean(value) for key, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFacts:
    """What the journal says of an experiment, as far as its record does not, or not yet."""

    experiment_id: str | None = None
    began: float | None = None
    cost_usd: float | None = None
    arms: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Arm -> its settings."""
    runs: Mapping[str, str] = field(default_factory=dict)
    """Name of a run -> its arm."""

    @classmethod
    def read(cls, path: Path) -> JournalFacts:
        """Empty where there is no journal, or none that can be read."""
        if not path.is_file():
            return cls()
        try:
            with closing(StoredJournal(path)) as journal:
                last = journal.latest(EXPERIMENT)
                events = last.events(upto=2**62) if last else []
                cost = f"SELECT sum({number_in('cost_usd')}) FROM events WHERE kind = 'rollout' AND superseded = 0"
                [(usd,)] = journal.read(cost, ())
        except (EvsysError, ValueError):
            return cls()
        arms = {event.key: event.data for event in events if event.kind == "arm"}
        return cls(
            experiment_id=next((str(one.data["id"]) for one in events if one.kind == "experiment_id"), None),
            began=next((one.data.get("began") for one in events if one.kind == "process"), None),
            cost_usd=usd or None,  # a local model costs nothing, which says less than no number
            arms={arm: data.get("settings") or {} for arm, data in arms.items()},
            runs={run: arm for arm, data in arms.items() for run in data.get("runs") or []},
        )


# Its runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run of an experiment on disk."""

    run_id: str
    name: str
    arm: str
    status: str
    run_dir: Path
    settings: dict[str, Any]
    recorded: RecordedRun | None = None
    total_steps: int | None = None


def _runs_of(entry: ExperimentEntry, record: ExperimentRecord | None, journal: JournalFacts) -> Iterator[FoundRun]:
    if record is not None and entry.state not in LIVE:
        configs = {run.get("name"): run for run in record.config.get("runs") or [] if isinstance(run, dict)}
        for arm, runs in record.runs_of():
            for run in runs:
                name = run.run_id.partition("/")[2] or run.run_id
                own = Path(run.run_dir).name if run.run_dir else name
                yield FoundRun(
                    run_id=run.run_id,
                    name=name,
                    arm=arm.arm,
                    status=run.status,
                    # Runs lie beside the record, wherever both were copied to.
                    run_dir=entry.record.parent / (run.reused_from or own),
                    settings=configs.get(arm.arm) or journal.arms.get(arm.arm) or {},
                    recorded=run,
                )
        return
    for progress in progress_in(entry.journal):
        arm_name = journal.runs.get(progress.run, SEED.sub("", progress.run))
        yield FoundRun(
            run_id=f"{entry.name}/{progress.run}",
            name=progress.run,
            arm=arm_name,
            status=progress.status or entry.state,
            run_dir=entry.record.parent / Path(progress.run_dir or progress.run).name,
            settings=journal.arms.get(arm_name) or {},
            total_steps=progress.total_steps,
        )


def _run_fields(experiment_id: str, run: FoundRun, now: float) -> tuple[str, PlainFields]:
    """The id of a run, and its fields for `ingest.save_generations`."""
    seed = int(match[1]) if (match := SEED.search(run.name)) else run.settings.get("seed")
    body: dict[str, Any] = {
        "name": run.name,
        "arm": run.arm,
        "status": run.status if run.status in STATUSES else "failed",
        "run_config": {**run.settings, "name": run.name, **({"seed": seed} if seed is not None else {})},
        "recipe_kind": str((run.settings.get("algorithm") or {}).get("kind") or ""),
    }
    if run.recorded is not None:
        body |= {"metrics": dict(run.recorded.metrics), "artifacts": run.recorded.artifacts}
        body["error"] = run.recorded.error or ""
    if run.total_steps is not None:
        body["total_steps"] = run.total_steps
    generation_id = derived_id("generation", experiment_id, run.run_id)
    return generation_id, {**clean(body), "ts": now, "source": str(run.run_dir)}


# Points, evaluations and rollouts of a run.


def ensure_loaded(generation: GenerationRow) -> None:
    """Read what is on disk of a run that a page is about to show; a run that came over HTTP is all there."""
    if generation.source:
        load_run(generation)
        generation.refresh_from_db()


def ensure_experiment_loaded(experiment: ExperimentRow) -> None:
    """Read the points and evaluations of all runs of an experiment, and its figures."""
    if not experiment.source:
        return
    for generation in experiment.generations.exclude(source=""):
        load_run(generation)
    load_figures(experiment)
    experiment.refresh_from_db()


def load_run(generation: GenerationRow) -> None:
    """Read what is new of a run: its record, points, evaluations with their rollouts, log. In one commit: the disk's
    fsync takes longer than all the rest of it."""
    with ingest.writing():
        run_dir = Path(generation.source)
        before = dict(generation.loaded)
        loaded = dict(before)
        experiment = generation.experiment
        record = Path(experiment.source)
        ending = _stat(run_dir / "run_result.json")
        if loaded.get("record", "") != ending:
            _load_record(generation, run_dir)
            loaded["record"] = ending
        loaded["metrics"] = _load_points(generation, run_dir, loaded.get("metrics") or ["", 0])
        journal = journal_path(record)
        evals = "|".join([_stat(journal), _stat(journal.with_name(f"{journal.name}-wal"))])
        if loaded.get("evals") != evals:
            _load_evals(generation, journal, run_dir)
            loaded["evals"] = evals
        log = _stat(log_of(record))
        if log and loaded.get("log") != log:
            lines, _ = last_lines(log_of(record), LOG_LINES)
            tail = storable("\n".join(lines)[-LOG_BYTES:])
            GenerationRow.objects.filter(pk=generation.pk).update(log_tail=tail)
            loaded["log"] = log
        if loaded != before:
            generation.loaded = loaded
            GenerationRow.objects.filter(pk=generation.pk).update(loaded=loaded)
            if not experiment.spark:
                summarize(experiment)
                ExperimentRow.objects.filter(pk=experiment.pk).update(spark=experiment.spark)
            load_figures(experiment)


def _load_record(generation: GenerationRow, run_dir: Path) -> None:
    record, plain = RunRecord.find(run_dir), read_object(RunRecord.path_in(run_dir))
    if record is None or plain is None:
        return
    plain = clean(RunRecord.upgrade(plain))
    body: PlainFields = {"record": plain, "checkpoints": checkpoints_in(run_dir), "error": record.error or ""}
    body["run_config"] = {**generation.run_config, **(plain.get("hparams") or {}), "name": generation.name}
    if record.seed is not None:
        body["run_config"]["seed"] = record.seed
    with ingest.writing():
        ingest.save_generation(generation.project, generation.pk, {**body, "ts": time.time()}, create=False)
        times = {"created": _epoch(record.started), "ended": _epoch(record.ts)}
        GenerationRow.objects.filter(pk=generation.pk).update(**{key: value for key, value in times.items() if value})


def _epoch(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _load_points(generation: GenerationRow, run_dir: Path, place: Sequence[Any]) -> list[Any]:
    """Read the lines of metrics.jsonl behind `place` ([file, offset]); returns the place behind them."""
    logs = run_dir / "logs"
    path = next((one for one in (logs / "metrics.jsonl", logs / "jsonl" / "metrics.jsonl") if one.is_file()), None)
    if path is None:
        return list(place)
    with open(path, "rb") as handle:
        stat = os.fstat(handle.fileno())
        # A finished file is put in order and replaced: another inode, read from its start, which changes no point.
        name, offset = f"{stat.st_dev}:{stat.st_ino}", int(place[1])
        if name != place[0] or stat.st_size < offset:
            offset = 0
        handle.seek(offset)
        while True:
            lines = handle.readlines(BATCH_LINES * 200)
            if lines and not lines[-1].endswith(b"\n"):
                lines.pop()  # its writer is not done with it
            if not lines:
                return [name, offset]
            offset += sum(map(len, lines))
            _save_lines(generation, lines)


def _save_lines(generation: GenerationRow, lines: Sequence[bytes]) -> None:
    steps = []
    for line in lines:
        try:
            found = json.loads(line)
            step, ts = found.pop("step"), found.pop("ts")
            numbers = {str(key): value for key, value in found.items() if _is_number(value)}
            if isinstance(step, int) and abs(step) <= MAX_STEP and numbers:
                steps.append({"step": step, "ts": ts, "metrics": storable(numbers)})
        except (ValueError, KeyError, AttributeError, TypeError):
            continue  # torn by a power cut; the others count
    if not steps:
        return
    try:
        batch = ingest.read_steps(generation.pk, {"steps": steps})
    except ingest.Refusal as exc:
        get_logger(__name__).warning("points of %s cannot be read: %s", generation.source, exc)
        return
    with ingest.writing():
        ingest.save_steps([batch])


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return value in ("NaN", "Infinity", "-Infinity")
    return isinstance(value, int | float) and not isinstance(value, bool)


def _load_evals(generation: GenerationRow, journal: Path, run_dir: Path) -> None:
    """Evaluations and rollouts that are not in the tables yet, from the journal or else from the run's logs."""
    known = set(EvalRow.objects.filter(generation=generation, n_rollouts__gt=0).values_list("pk", flat=True))
    run_id = f"{generation.experiment.name}/{generation.name}"
    try:
        if journal.is_file():
            with closing(StoredJournal(journal)) as opened:
                last = opened.latest(run_id)
                if last is not None:
                    for event in last.evals():
                        bare = read_bare_eval(event.data)
                        if eval_id(generation.pk, bare) not in known:
                            asked = opened.questions(run_id, f"{bare.split}/{bare.name}")
                            _save_eval(generation, read_eval(event.data, last), asked)
                    return
        recorded = RunRecord.model_validate(generation.record).evals if generation.record else []
        for stored in evals_in_logs(run_dir, generation.name):
            result = EvalResult(
                name=stored.name, split=stored.split, scores=[], step=stored.step, stage=stored.stage,
                rollouts=stored.rollouts,
            )  # fmt: skip
            # The run's record has the scores, and the logs the rollouts.
            own = (result.split, result.name, result.step, result.stage)
            found = next((one for one in recorded if (one.split, one.name, one.step, one.stage) == own), None)
            _save_eval(generation, replace(found, rollouts=result.rollouts) if found else result, {})
    except (EvsysError, ValueError, KeyError, TypeError) as exc:
        get_logger(__name__).warning("evaluations of %s cannot be read: %s", run_dir, exc)


def read_bare_eval(data: Mapping[str, Any]) -> EvalResult:
    """Which evaluation a journal's event is, without its rollouts."""
    return EvalResult(name=data["name"], split=data["split"], scores=[], step=data["step"], stage=data.get("stage"))


def _save_eval(generation: GenerationRow, result: EvalResult, questions: Mapping[str, Mapping[str, object]]) -> None:
    identifier, now, project = eval_id(generation.pk, result), time.time(), generation.project
    fields = {key: value for key, value in eval_fields(result).items() if value is not None}
    items = [
        {**{key: value for key, value in one.items() if value is not None}, "eval_run_id": identifier, "ts": now}
        for one in prediction_fields(identifier, result.rollouts, questions)
    ]
    rows = ingest.read_predictions(project, generation.pk, {"predictions": clean(items)})
    with ingest.writing():
        plain = clean(fields)
        ingest.save_predictions(rows)
        ingest.save_eval(project, generation, {**plain, "id": identifier, "ts": now})


def load_figures(experiment: ExperimentRow) -> None:
    """The SVG figures that lie beside the record."""
    if not experiment.source or experiment.figures:
        return
    found = storable(figures_beside(Path(experiment.source)))
    if found:
        with ingest.writing():
            ingest.save_experiment(
                experiment.project, experiment.pk, {"figures": found, "ts": time.time()}, create=False
            )
        experiment.figures = found


def find_resume_command(row: ExperimentRow) -> str:
    """The command that resumes an experiment of a followed folder; empty where its launch left none."""
    launch = read_launch(Path(row.source)) if row.source else None
    return f"cd {shlex.quote(launch.cwd)} && {resume_command(launch.command)}" if launch and launch.command else ""
