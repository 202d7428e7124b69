"""Whether an experiment begins, resumes, is refused or becomes a child: what is asked now against what was launched.

In: a config, and the journal of the experiment of that name. Out: the journal's own line of the experiment (run `""`).
What decides an experiment's findings is frozen when it is launched: settings, rows, tasks, the project's own code,
callbacks that steer, and the hypothesis. What only decides how it is watched or how much it may spend can change.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from evsys_sdk import registry
from evsys_sdk.checks.blocks import all_data
from evsys_sdk.config.load import plain
from evsys_sdk.config.project import project_files, search_folders
from evsys_sdk.config.schema import DataConfig, ExperimentConfig, RunConfig
from evsys_sdk.config.sweep import directory_name
from evsys_sdk.config.yaml_io import remember, source_of
from evsys_sdk.constants import JOURNAL_FILE
from evsys_sdk.data.sources import open_source
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.errors import EvsysError, JournalDamaged, SettingsChanged, shorten
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.history.checkpoint_refs import checkpoint_path
from evsys_sdk.logs import get_logger
from evsys_sdk.record.callbacks import steering
from evsys_sdk.record.dashboard.wire import new_id
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.journal import EXPERIMENT, Journal, RunJournal
from evsys_sdk.record.rollouts import StoredJournal
from evsys_sdk.redaction import redact_data

WATCHING = frozenset(
    ["budget", "callbacks", "deploy", "description", "launcher", "leakage", "log_store", "max_concurrent_arms"]
    + ["output_dir", "parent_experiment_id", "research", "version"]
)
"""Top-level settings that do not change what is found; of callbacks, those that only watch."""
ARMS = frozenset(["run", "runs", "matrix", "search", "base_run"])
SHOWN = 20
"""Differences that a refusal lists."""
PLAN = "plan"
EXPERIMENT_ID = "experiment_id"
TASKS = "tasks of "
AN_ARM = "(an arm)"
CODE = "code of "
WEIGHTS = "weights of "

Facts = dict[str, object]
"""Dotted place -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as it was at the launch; None stands for "not there"."""

    place: str
    before: object
    now: object

    def __str__(self) -> str:
        if AN_ARM in (self.before, self.now):
            return f"  {self.place}: {'a new arm' if self.before is None else 'this arm is gone'}"
        return f"  {self.place}: {_show_value(self.before)} -> {_show_value(self.now)}"


def open_journal(path: Path, *, fresh: bool) -> Journal:
    """The journal at `path`; one that is damaged is set aside for a fresh start, and left alone otherwise."""
    try:
        journal = Journal(path)
        try:
            journal.check()
        except EvsysError:
            journal.close()
            raise
        return journal
    except JournalDamaged as exc:
        if not fresh:
            raise JournalDamaged(f"{exc}\nnext: the same command with --fresh sets it aside and begins anew") from exc
        aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        # A write-ahead log that stays behind would lie beside the new journal as if it were its own.
        for ending in ("", "-wal", "-shm"):
            if (file := path.with_name(path.name + ending)).exists():
                file.rename(aside.with_name(aside.name + ending))
        get_logger(__name__).warning("the damaged journal %s is now %s", path, aside.name)
        return Journal(path)


def resume_experiment(journal: Journal, name: str, facts: Facts, *, fresh: bool) -> RunJournal:
    """The journal line of this experiment; SettingsChanged when it was launched as something else and has
    results."""
    earlier = journal.latest(EXPERIMENT)
    found = None if earlier is None or fresh else differences(_plan(earlier), facts)
    # Without results nothing can be mixed up, and the experiment begins with the settings of now.
    if found and journal.has_results:
        raise SettingsChanged(_refusal(name, found), {each.place: (each.before, each.now) for each in found})
    # [] says compared and the same. None, as under --fresh, says not compared: then a new line begins.
    if earlier is not None and found == []:
        return earlier
    line = journal.begin(EXPERIMENT, config_hash(facts))
    line.add(PLAN, facts, at=0)
    return line


def experiment_id_of(line: RunJournal) -> str:
    """The id under which trackers know the experiment: made at its first launch and kept in its journal. It is the
    same when the experiment is resumed, run again, or started over with the same settings."""
    # The id of this attempt, else the oldest of an attempt with the same settings. An event that is there stays, so the
    # `add` below changes nothing the second time.
    found = line.journal.read(
        "SELECT events.data FROM events JOIN attempts USING (run, attempt) WHERE run = ? AND kind = ? AND"
        " fingerprint = (SELECT fingerprint FROM attempts WHERE run = ? AND attempt = ?)"
        " ORDER BY attempt = ? DESC, events.id LIMIT 1",
        (line.run, EXPERIMENT_ID, line.run, line.attempt, line.attempt),
    )
    own = str(json.loads(found[0][0])["id"]) if found else new_id()
    line.add(EXPERIMENT_ID, {"id": own}, at=0)
    return own


def fork(config: ExperimentConfig, facts: Facts, output_dir: Path) -> tuple[ExperimentConfig, Path]:
    """The config as a child of the experiment of its name, and the child's own folder; the same settings as those of
    an earlier child (or of the parent) are that one, so that the same command resumes it."""
    number = 1
    while True:
        name = config.name if number == 1 else f"{config.name}-{number}"
        folder = output_dir if number == 1 else output_dir / directory_name(name)
        path, launched = journal_path(folder, name), None
        if path.is_file():
            with closing(StoredJournal(path)) as journal:
                line = journal.latest(EXPERIMENT)
                launched = _plan(line) if line is not None else None
        # A child always differs from its parent in its name, which must not count.
        if launched is None or not differences(launched, facts | {"name": name}):
            break
        number += 1
    if number == 1:
        return config, output_dir
    child = config.model_copy(
        update={"name": name, "parent_experiment_id": config.name, "output_dir": str(folder)}, deep=True
    )
    remember(child, source_of(config))
    return child, folder


def journal_path(output_dir: Path, name: str) -> Path:
    return output_dir / f"{directory_name(name)}.{JOURNAL_FILE}"


def _plan(line: RunJournal) -> Facts:
    return next((event.data for event in line.events(upto=0) if event.kind == PLAN), {})


def _refusal(name: str, found: list[Difference]) -> str:
    lines = [f"experiment {name!r} was launched with other settings, and has results:", *map(str, found[:SHOWN])]
    if len(found) > SHOWN:
        lines.append(f"  ... and {len(found) - SHOWN} more")
    if [each.place for each in found] == ["metadata.baseline_arm"] and found[0].now:
        lines.append(
            f"next: evsys judge {name} --baseline-arm {found[0].now} judges it against that arm without training"
        )
        return "\n".join(lines)
    lines.append("next: put them back to resume it, or evsys run --fork to make a child experiment of it")
    lines.append("      (what is the same is not run again), or evsys run --fresh to start over")
    return "\n".join(lines)


def identity_facts(config: ExperimentConfig, benchmarks: BenchmarkLoader) -> Facts:
    """Everything that decides what the experiment finds."""
    settings = {key: value for key, value in plain(config).items() if key not in WATCHING | ARMS}
    settings["metadata"] = {key: value for key, value in settings.get("metadata", {}).items() if key != "tags"}
    steered = steering(plain(config).get("callbacks", []))
    settings |= {"callbacks": steered} if steered else {}
    settings["arms"] = {run.name: _without_name(run) for run in config.all_runs()}
    if config.search is not None:
        # How many trials are drawn may change: later draws do not change earlier ones.
        free = {"budget"} | ({"max_trials"} if config.search.kind in ("random", "tpe") else set())
        settings["search"] = {key: value for key, value in plain(config.search).items() if key not in free}
        settings["arms"] = {} if config.run is None else {config.run.name: _without_name(config.run)}
        settings["base_run"] = config.base_run
    # As the journal keeps them: a key in the config is no fact about the experiment.
    found: Facts = redact_data(dict(_flat(settings)))
    # The contents that the settings only name: rows, starting weights, tasks, and the project's own code.
    store = registry.data_stores.build(config.data_store.kind, dict(config.data_store.params))
    source = source_of(config)
    folders, workspace = search_folders(source), Workspace.find(source.folder)
    hashed: dict[str, str] = {}
    """Source -> its hash: arms share files."""
    for run in config.all_runs():
        for _, data in all_data(run):
            opened = open_source(data, store=store, folders=folders, workspace=workspace)
            if opened.sha256 and opened.name not in hashed:  # without `sha256` only reading all rows would tell
                hashed[opened.name] = opened.sha256()
            if opened.sha256:
                found[_content_of(data)] = hashed[opened.name]
        if run.model.load_checkpoint_path is not None:  # a name may mean other weights tomorrow
            start = run.model.load_checkpoint_path
            path = checkpoint_path(start, "state", folders)
            found |= {f"{WEIGHTS}{start}": Path(path).name} if path != start else {}
    for entry in config.metadata.benchmark:
        found[f"{TASKS}{entry.role}/{entry.label}"] = benchmarks.get(entry).sha256
    for name, file in project_files(config).items():
        found[f"{CODE}{name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _without_name(run: RunConfig) -> Facts:
    return {key: value for key, value in plain(run).items() if key not in ("name", "tags")}


def _flat(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{place}.{key}" if place else str(key))
    # A list of plain values is one fact. In a list of blocks each has its place, so that a refusal names the setting.
    elif isinstance(value, list) and value and not all(isinstance(item, str | int | float | bool) for item in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{place}[{index}]")
    else:
        yield place, value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


def _content_of(data: DataConfig) -> str:
    return f"contents of {data.path or data.dataset_name or data.dataset_id or data.source_kind}"


def contents_for(run: RunConfig, facts: Facts) -> dict[str, str]:
    """Of the hashes, those of what this run has to do with."""
    own = {_content_of(data) for _, data in all_data(run)} | {f"{WEIGHTS}{run.model.load_checkpoint_path}"}
    return {place: str(digest) for place, digest in facts.items() if place in own or place.startswith((TASKS, CODE))}


def differences(before: Facts, now: Facts) -> list[Difference]:
    """What is not the same, in the order of the settings; an arm that is new or gone is one difference."""
    before, now = _whole_arms(before, now), _whole_arms(now, before)
    places = dict.fromkeys([*before, *now])
    return [
        Difference(place=place, before=before.get(place), now=now.get(place))
        for place in places
        if before.get(place) != now.get(place)
    ]


def _whole_arms(facts: Facts, others: Facts) -> Facts:
    """The facts, those of an arm that the others lack folded into one."""
    known = {_arm(place) for place in others}
    folded: Facts = {}
    for place, value in facts.items():
        arm = _arm(place)
        if arm is None or arm in known:
            folded[place] = value
        else:
            folded[f"arms.{arm}"] = AN_ARM
    return folded


def _arm(place: str) -> str | None:
    # The name itself may hold dots; what follows it is one of the keys of a run.
    match = re.match(rf"arms\.(.+?)\.({'|'.join(RunConfig.model_fields)})\b", place)
    return match[1] if match else None


def _show_value(value: object) -> str:
    if value is None:
        return "(not set)"
    if isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef"):
        return value[:10]
    return shorten(repr(value), 60)
