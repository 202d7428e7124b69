"""A folder of experiments as the dashboard shows it: finished, running, interrupted, torn, copied, gone."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "10_sweep"
CONFIG = """
version: 1
name: small
output_dir: OUTPUT
n_repeats: 2
callbacks: [CALLBACKS]
metadata:
  hypothesis: "1e-3 learns more than 1e-5"
  tags: [lr]
  success_metric: val.pass@1
  benchmark:
    - { name: tools, path: EXAMPLE/data/val, split: val, run_every: 2, limit: 4, metrics: [pass@1], temperature: 0 }
matrix:
  axes:
    algorithm.params.learning_rate: [1e-5, 1e-3]
  name_template: "lr{algorithm.params.learning_rate}"
base_run:
  data:
    path: EXAMPLE/data/train.jsonl
    transforms:
      - kind: jsonl_to_chat
        params: { user_template: "{query}", assistant_template: "<answer>{tool_slug}</answer>" }
  model: { name: table-model }
  algorithm: { kind: sft, params: { max_steps: 4, batch_size: 16 } }
  backend: { kind: mock }
"""


def run_small(folder: Path, callbacks: str = "") -> Path:
    """Run the small experiment in `folder`; returns the path of its record."""
    from evsys_sdk.runner import run_experiment

    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    text = CONFIG.replace("OUTPUT", str(folder / "outputs")).replace("EXAMPLE", str(EXAMPLE))
    config.write_text(text.replace("CALLBACKS", callbacks))
    run_experiment(config)
    return folder / "outputs" / "small.experiment_result.json"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of an experiment that has ended; not to be changed."""
    return run_small(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def record(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(finished.parent, tmp_path / "copy")
    return tmp_path / "copy" / finished.name


def follow(project: Any, folder: Path) -> Any:
    from evsys_dashboard.follow import FollowedSource, Follower

    follower = Follower(project, FollowedSource(folders=(folder,)))
    follower.update()
    return follower


def look_again(follower: Any) -> None:
    follower._searched = 0.0  # as if the seconds between two searches had passed
    follower.update()


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def test_a_finished_experiment_is_a_row_with_its_summary(project, record):
    follow(project, record.parent)
    row = project.experiments.get()
    said = json.loads(record.read_text())
    assert (row.name, row.status, row.hypothesis) == ("small", "completed", "1e-3 learns more than 1e-5")
    assert (row.tags, row.metric, row.n_arms, row.n_runs) == (["lr"], "val.pass@1", 2, 4)
    assert row.record == said
    assert row.conclusion == said["conclusion"]
    judged = {arm["arm"]: arm for arm in said["verdict"]["arms"]}
    assert (row.best_value, row.best_low, row.best_high) == (
        judged[row.best_arm]["mean"], judged[row.best_arm]["low"], judged[row.best_arm]["high"],
    )  # fmt: skip
    assert (row.n_tasks, row.n_seeds, row.model, row.backend) == (4, 2, "table-model", "mock")
    assert 1 < len(row.spark) <= 24
    assert row.ended - row.created == pytest.approx(said["seconds"])
    runs = {(run.arm, run.seed, run.status) for run in row.generations.all()}
    assert runs == {(arm, seed, "completed") for arm in ("lr1e-05", "lr0p001") for seed in (42, 43)}


def test_points_evaluations_and_rollouts_of_a_run_are_there_when_a_page_asks(project, record):
    from evsys_dashboard.follow import ensure_loaded
    from evsys_dashboard.points import curve

    follow(project, record.parent)
    run = project.experiments.get().generations.get(arm="lr0p001", seed=42)
    ensure_loaded(run)
    lines = [json.loads(line) for line in (Path(run.source) / "logs/metrics.jsonl").read_text().splitlines()]
    found = curve(run.metric_keys.get(name="loss").pk)
    assert list(zip(found.step, found.value, strict=True)) == [
        (one["step"], one["loss"]) for one in lines if "loss" in one
    ]
    assert [(one.split, one.step, one.n_rollouts) for one in run.evals.order_by("step")] == [
        ("val", 2, 4),
        ("val", 4, 4),
    ]
    said = run.evals.order_by("step").last().predictions.order_by("task_id").first()
    assert (said.task_id, said.status) == ("val-000", "ok")
    assert said.body["question"]["messages"][0]["role"] == "user"
    assert said.body["question"]["expected"] == "GMAIL_SEND"
    assert said.body["turns"][0]["role"] == "assistant"
    assert said.body["turns"][0]["text"] == said.completion
    assert [one["step"] for one in run.checkpoints] == [4]
    assert run.record["run_id"] == "small/lr0p001__s42"


def test_reading_changes_nothing_on_disk(project, record):
    from evsys_dashboard.follow import ensure_experiment_loaded

    before = files_in(record.parent)
    follow(project, record.parent)
    ensure_experiment_loaded(project.experiments.get())
    assert files_in(record.parent) == before


def test_what_has_not_changed_is_not_read_again(project, record, monkeypatch):
    from evsys_dashboard import follow as module

    follower = follow(project, record.parent)
    read: list[Path] = []
    monkeypatch.setattr(module, "read_experiment", lambda _, line, *__, **___: read.append(line.record))
    look_again(follower)
    follow(project, record.parent)  # as at the next start
    assert read == []
    os.utime(record)
    follow(project, record.parent)
    assert read == [record]


def test_loading_a_run_twice_doubles_nothing(project, record):
    from evsys_dashboard.follow import load_run
    from evsys_dashboard.models import MetricKey, PredictionRow

    follow(project, record.parent)

    def count() -> tuple[object, ...]:
        keys = MetricKey.objects.filter(generation__project=project)
        return sorted(keys.values_list("generation", "name", "n")), PredictionRow.objects.filter(
            project=project
        ).count()

    for run in project.experiments.get().generations.all():
        load_run(run)
    before = count()
    for run in project.experiments.get().generations.all():
        run.loaded = {}
        load_run(run)
    assert count() == before
    assert before[1] == 4 * 2 * 4


def test_new_lines_of_a_running_run_are_read_and_half_a_line_is_not(project, record):
    from evsys_dashboard.follow import load_run
    from evsys_dashboard.points import curve

    follow(project, record.parent)
    run = project.experiments.get().generations.get(arm="lr0p001", seed=42)
    load_run(run)
    offset = run.loaded["metrics"][1]
    path = Path(run.source) / "logs" / "metrics.jsonl"
    with open(path, "ab") as handle:
        handle.write(b'{"step": 5, "ts": 5e9, "loss": "NaN"}\n{"step": 6, "ts": 5e9, "lo')
    load_run(run)
    found = curve(run.metric_keys.get(name="loss").pk)
    assert found.step == [1, 2, 3, 4, 5] and math.isnan(found.value[-1])
    assert run.loaded["metrics"][1] > offset
    with open(path, "ab") as handle:
        handle.write(b'ss": 0.5}\nno json\n{"step": 7, "ts": 5e9, "loss": 0.25}\n')
    load_run(run)
    found = curve(run.metric_keys.get(name="loss").pk)
    assert (found.step[-2:], found.value[-2:]) == ([6, 7], [0.5, 0.25])


def test_a_torn_record_is_a_row_with_the_reason(project, record):
    record.write_text(record.read_text()[:500])
    follow(project, record.parent)
    row = project.experiments.get()
    assert (row.name, row.status) == ("small", "unreadable")
    assert "not whole, valid JSON" in row.problem


def test_a_record_that_is_torn_later_takes_its_scores_out(project, record):
    whole = record.read_text()
    follower = follow(project, record.parent)
    record.write_text(whole[:500])
    look_again(follower)
    row = project.experiments.get()
    assert (row.status, row.record, row.conclusion, row.verdict) == ("unreadable", None, "", "")
    assert (row.best_arm, row.best_value, row.standing, row.seconds) == ("", None, "", None)
    record.write_text(whole)
    look_again(follower)
    row = project.experiments.get()
    assert (row.status, row.record, row.conclusion) == ("completed", json.loads(whole), json.loads(whole)["conclusion"])


def test_the_times_of_a_run_stay_those_of_its_record_when_the_experiment_is_read_again(project, record):
    from evsys_dashboard.follow import ensure_experiment_loaded

    follower = follow(project, record.parent)
    ensure_experiment_loaded(project.experiments.get())
    before = list(project.experiments.get().generations.order_by("pk").values_list("created", "ended"))
    os.utime(record, ns=(1_900_000_000_000_000_000,) * 2)  # another stamp, as after a note
    look_again(follower)
    assert list(project.experiments.get().generations.order_by("pk").values_list("created", "ended")) == before


def test_a_record_that_is_mended_is_read_again(project, record):
    whole = record.read_text()
    record.write_text(whole[:500])
    follower = follow(project, record.parent)
    record.write_text(whole)
    look_again(follower)
    row = project.experiments.get()
    assert (row.status, row.problem, row.n_arms) == ("completed", "", 2)


def test_an_experiment_without_a_result_is_interrupted_or_running_while_its_lock_is_held(project, record):
    from evsys_sdk.record.layout import hold

    record.unlink()
    follower = follow(project, record.parent)
    row = project.experiments.get()
    assert (row.status, row.generations.count()) == ("interrupted", 4)
    with hold(record.parent / ".small.lock", "the experiment"):
        look_again(follower)
        assert project.experiments.get().status == "running"
        assert project.experiments.get().ended is None
    look_again(follower)
    assert project.experiments.get().status == "interrupted"


def test_notes_of_people_arrive_and_invalid_ones_do_not_count(project, record):
    from evsys_sdk.history.history import read_one
    from evsys_sdk.history.index import add_note

    follower = follow(project, record.parent)
    entry = read_one(record)
    assert entry is not None
    add_note(record, "invalid", "the tasks were in the rows", about=entry.digest.result)
    look_again(follower)
    row = project.experiments.get()
    assert row.status == "invalid"
    assert [(note["kind"], note["text"]) for note in row.notes] == [("invalid", "the tasks were in the rows")]


def test_an_experiment_whose_files_are_gone_is_gone(project, record):
    follower = follow(project, record.parent)
    assert project.experiments.count() == 1
    shutil.rmtree(record.parent)
    look_again(follower)
    assert project.experiments.count() == 0


def test_a_copy_of_a_folder_is_another_experiment(project, record, tmp_path):
    shutil.copytree(record.parent, tmp_path / "second")
    follower = follow(project, tmp_path)
    assert {Path(row.source).parent.name for row in project.experiments.all()} == {"copy", "second"}
    before = set(project.experiments.values_list("pk", flat=True))
    look_again(follower)
    assert set(project.experiments.values_list("pk", flat=True)) == before


def test_newest_experiments_are_read_first(project, record, tmp_path, monkeypatch):
    from evsys_dashboard import follow as module

    for number in range(3):
        shutil.copytree(record.parent, tmp_path / f"n{number}")
        os.utime(tmp_path / f"n{number}" / record.name, (2e9 + number, 2e9 + number))
    read: list[str] = []
    monkeypatch.setattr(module, "read_experiment", lambda _, line, *__, **___: read.append(line.record.parent.name))
    follow(project, tmp_path)
    assert read == ["n2", "n1", "n0", "copy"]


def test_the_thread_indexes_and_loads_everything_in_the_background(project, record):
    from evsys_dashboard.follow import FollowedSource, Follower
    from evsys_dashboard.models import GenerationRow

    follower = Follower(project, FollowedSource(folders=(record.parent,)))
    follower.start()
    try:
        assert follower.wait_until_indexed(60)
        done = threading.Event()
        for _ in range(600):
            if not GenerationRow.objects.filter(project=project, loaded={}).exists():
                break
            done.wait(0.1)
        assert not GenerationRow.objects.filter(project=project, loaded={}).exists()
    finally:
        follower.stop()
    assert project.experiments.get().generations.filter(last_step=4).count() == 4


def test_an_experiment_that_was_sent_and_is_found_on_disk_is_one(project, record):
    """The logger's ids are those that the folder gives."""
    from evsys_dashboard import ingest
    from evsys_sdk.record.dashboard.wire import derived_id
    from evsys_sdk.record.rollouts import StoredJournal

    journal = StoredJournal(record.with_name("small.journal.sqlite"))
    [(data,)] = journal.read("SELECT data FROM events WHERE kind = 'experiment_id'", ())
    journal.close()
    own = json.loads(data)["id"]
    body = {"name": "small", "status": "running", "ts": 1.0}
    with ingest.writing():
        ingest.save_experiment(project, own, body, create=True)
        run = derived_id("generation", own, "small/lr0p001__s42")
        ingest.save_generation(project, run, {**body, "name": "lr0p001__s42", "experiment_id": own}, create=True)
    follow(project, record.parent)
    row = project.experiments.get()
    assert (row.pk, row.status, row.generations.count()) == (own, "completed", 4)
    assert row.generations.get(pk=run).status == "completed"


def test_a_record_that_breaks_the_reading_hides_no_other(project, record, tmp_path, monkeypatch):
    from evsys_dashboard import follow as module

    shutil.copytree(record.parent, tmp_path / "second")
    read = module.read_experiment

    def break_one(project: Any, line: Any, stamp: str, *, is_new: bool) -> None:
        if line.record.parent.name == "copy":
            raise RecursionError("too deep")
        read(project, line, stamp, is_new=is_new)

    monkeypatch.setattr(module, "read_experiment", break_one)
    follower = follow(project, tmp_path)
    found = {Path(row.source).parent.name: (row.status, row.problem) for row in project.experiments.all()}
    assert found == {"copy": ("unreadable", "RecursionError: too deep"), "second": ("completed", "")}
    monkeypatch.undo()
    os.utime(record)
    look_again(follower)
    assert {row.status for row in project.experiments.all()} == {"completed"}
