"""An experiment is what it was launched as: what has ended is not repeated, and what has changed is not mixed in."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest


@pytest.fixture
def launched(project, minimal_run):
    """A finished experiment of two arms with a benchmark; returns how to write its config with changes."""
    project.write_tasks()
    entry = {"name": "colours", "path": "bench", "split": "val", "temperature": 0}

    def config(rates=(1e-3, 1e-2), **top):
        runs = [
            minimal_run(name=f"rate{rate}", algorithm__params={"max_steps": 4, "batch_size": 4, "learning_rate": rate})
            for rate in rates
        ]
        given = {"run": None, "runs": runs, "metadata": {"benchmark": [entry], "hypothesis": "more is more"}}
        return project.config(**{**given, **top})

    project.evsys("run", config(), check=True)
    return config


def _summary(project, path, *flags):
    done = project.evsys("run", path, "--json", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


def _results(project):
    return {path: path.read_bytes() for path in (project.root / "outputs").rglob("run_result.json")}


def test_finished_runs_are_not_repeated_and_their_scores_are_still_told(project, launched):
    before = _results(project)
    summary, said = _summary(project, launched())
    assert said.count("is not run again") == 2 and _results(project) == before
    scores = [run["evals"][0]["scores"][0] for run in summary["runs"]]
    assert [score["n_tasks"] for score in scores] == [4, 4] and all(score["low"] is not None for score in scores)


def test_only_what_is_missing_is_run(project, launched):
    shutil.rmtree(project.root / "outputs/rate0.01")
    _, said = _summary(project, launched())
    assert said.count("is not run again") == 1 and (project.root / "outputs/rate0.01/run_result.json").exists()


def test_fresh_repeats_everything(project, launched):
    _, said = _summary(project, launched(), "--fresh")
    assert "is not run again" not in said
    assert (project.root / "outputs/rate0.001/attempts/1/run_result.json").exists()


def test_fresh_sets_aside_what_the_experiment_had_come_to(project, launched):
    outputs = project.root / "outputs"
    endings = ("experiment_result.json", "experiment.md")
    before = [(outputs / f"hello_sft.{ending}").read_bytes() for ending in endings]
    (outputs / "hello_sft.curves.experiment.md").write_text("of an experiment that is called hello_sft.curves")
    for number in (1, 2):
        _summary(project, launched(description=f"{number}"), "--fresh")
        aside = outputs / f"hello_sft.attempts/{number}"
        assert [(aside / name).read_bytes() for name in (endings[0], f"hello_sft.{endings[1]}")] == before
        before = [(outputs / f"hello_sft.{ending}").read_bytes() for ending in endings]
    assert (outputs / "hello_sft.curves.experiment.md").exists()
    listed = json.loads(project.evsys("history", "--dir", "outputs", "--json", check=True).stdout)
    assert [found["name"] for found in listed["experiments"]] == ["hello_sft"]
    shown = project.evsys("show", "outputs/hello_sft.attempts/1")
    assert shown.returncode == 1 and "there is no record" in shown.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rates": (1e-3, 2e-2)}, ["arms.rate0.02: a new arm", "arms.rate0.01: this arm is gone"]),
        ({"n_repeats": 2}, ["n_repeats: (not set) -> 2"]),
        ({"metadata": {"hypothesis": "less is more"}}, ["metadata.hypothesis: 'more is more' -> 'less is more'"]),
    ],
)
def test_other_settings_are_refused_with_the_difference_and_nothing_is_lost(project, launched, change, told):
    before = _results(project)
    refused = project.evsys("run", launched(**change))
    assert refused.returncode == 1
    assert all(line in refused.stderr for line in told) and "--fork" in refused.stderr and "--fresh" in refused.stderr
    assert _results(project) == before


def test_other_rows_tasks_or_code_are_other_settings(project, launched):
    rows = (project.root / "data/train.jsonl").read_text()
    (project.root / "data/train.jsonl").write_text(rows + rows.splitlines()[0] + "\n")
    tasks = (project.root / "bench/tasks.jsonl").read_text().splitlines()
    (project.root / "bench/tasks.jsonl").write_text("\n".join(reversed(tasks)))
    (project.root / "src").mkdir()
    (project.root / "src/__init__.py").write_text("")
    refused = project.evsys("run", launched())
    assert refused.returncode == 1
    for what in ("contents of data/train.jsonl", "tasks of val/colours", "code of src"):
        assert what in refused.stderr


def test_code_that_the_projects_modules_import_counts_too(project, minimal_run):
    (project.root / "ext.py").write_text("from helper import FACTOR\n")
    (project.root / "helper.py").write_text("FACTOR = 1\n")
    config = project.config(imports=["ext"], run=minimal_run(algorithm__params={"max_steps": 2}))
    project.evsys("run", config, check=True)
    _, said = _summary(project, config, "--set", "name=same")
    assert said.count("is not run again") == 1
    (project.root / "helper.py").write_text("FACTOR = 100\n")
    refused = project.evsys("run", config)
    assert refused.returncode == 1 and "code of helper.py: " in refused.stderr and "ext.py" not in refused.stderr
    _, said = _summary(project, config, "--set", "name=other")
    assert "is not run again" not in said


def test_how_it_is_watched_may_change(project, launched):
    path = launched(callbacks=[{"kind": "csv_metrics"}], description="the same", max_concurrent_arms=2)
    _, said = _summary(project, path)
    assert said.count("is not run again") == 2


STOPPER = {"kind": "early_stopping", "params": {"metric": "loss", "patience": 1, "min_delta": 100}}


def test_a_callback_that_steers_may_not_change(project, launched):
    refused = project.evsys("run", launched(callbacks=[{"kind": "csv_metrics"}, STOPPER]))
    assert refused.returncode == 1 and "callbacks.early_stopping.min_delta: (not set) -> 100" in refused.stderr
    assert "csv_metrics" not in refused.stderr and "--fork" in refused.stderr
    child, said = _summary(project, launched(callbacks=[STOPPER]), "--fork")
    assert "is not run again" not in said and [run["metrics"]["steps"] for run in child["runs"]] == [2, 2]


def test_a_run_that_is_stopped_early_is_not_one_that_is_not(project, launched):
    for name, callbacks, steps in (("stopped", [STOPPER], 2), ("whole", [], 4)):
        summary, _ = _summary(project, launched(callbacks=callbacks), "--set", f"name={name}")
        assert [run["metrics"]["steps"] for run in summary["runs"]] == [steps, steps]
    _, said = _summary(project, launched(callbacks=[STOPPER, {"kind": "csv_metrics"}]), "--set", "name=same")
    assert said.count("is not run again") == 2


def test_a_launch_that_came_to_nothing_binds_nobody(project, minimal_run):
    broken = minimal_run(backend__params={"fail_on_prepare": True})
    assert project.evsys("run", project.config(run=broken)).returncode == 2
    assert project.evsys("run", project.config(run=minimal_run())).returncode == 0


def test_a_fork_is_a_child_that_takes_over_what_is_the_same(project, launched):
    summary, said = _summary(project, launched(rates=(1e-3, 1e-2, 2e-2)), "--fork")
    assert summary["name"] == "hello_sft-2" and said.count("is not run again") == 2
    record = json.loads((project.root / "outputs/hello_sft-2/hello_sft-2.experiment_result.json").read_text())
    assert record["parent_experiment_id"] == "hello_sft"
    child = json.loads((project.root / "outputs/hello_sft-2/rate0.001/run_result.json").read_text())
    assert child["run_id"] == "hello_sft-2/rate0.001" and child["reused_from"].endswith("outputs/rate0.001")
    assert [run["reused_from"] for run in record["runs"]] == ["../rate0.001", "../rate0.01", None]
    assert [run["evals"][0]["scores"][0]["n_tasks"] for run in summary["runs"]] == [4, 4, 4]
    _, again = _summary(project, launched(rates=(1e-3, 1e-2, 2e-2)), "--fork")
    assert again.count("is not run again") == 3 and not (project.root / "outputs/hello_sft-3").exists()
    other, _ = _summary(project, launched(rates=(5e-3,)), "--fork")
    assert other["name"] == "hello_sft-3"


def test_what_is_taken_over_is_not_paid_for_again(project, launched):
    rates = (1e-3, 1e-2, 2e-2)
    for _ in range(2):  # the first process of the child, then one that goes on
        summary, _ = _summary(project, launched(rates=rates, budget={"steps": 9}), "--fork")
        assert [run["status"] for run in summary["runs"]] == ["completed"] * 3, summary
        (project.root / "outputs/hello_sft-2/rate0.02/run_result.json").unlink()


def test_identical_runs_of_another_experiment_in_the_same_folder_are_taken_over(project, launched):
    summary, said = _summary(project, launched(), "--set", "name=other")
    assert said.count("is not run again") == 2 and summary["name"] == "other"
    assert [run["run_id"] for run in summary["runs"]] == ["other/rate0.001", "other/rate0.01"]
    assert [run["reused_from"] for run in summary["runs"]] == ["rate0.001", "rate0.01"], "as seen from outputs/"
    assert _summary(project, launched(), "--set", "name=other")[0]["runs"] == summary["runs"], "and still says so"


def test_rows_of_a_combos_phase_are_part_of_what_was_launched(project, minimal_run):
    project.write_rows("data/later.jsonl", [{"prompt": "say red", "completion": "red"}])
    data = {"path": "data/later.jsonl", "transforms": [{"kind": "jsonl_to_chat", "params": {}}]}
    sft = {"kind": "sft", "params": {"max_steps": 2}}
    phases = [{"name": "one", "algorithm": sft}, {"name": "two", "algorithm": sft, "data": data}]
    path = project.config(run=minimal_run(algorithm={"kind": "combo", "params": {"phases": phases}}))
    project.evsys("run", path, check=True)
    project.write_rows("data/later.jsonl", [{"prompt": "say red", "completion": "blue"}])
    refused = project.evsys("run", path)
    assert refused.returncode == 1 and "contents of data/later.jsonl" in refused.stderr


def test_weights_that_were_taken_over_stay_when_their_first_owner_begins_anew(project, launched):
    taken, _ = _summary(project, launched(), "--set", "name=other")
    _summary(project, launched(), "--fresh")
    for run in taken["runs"]:
        assert all(f"@other{os.sep}" in place and Path(place).exists() for place in run["artifacts"].values())
    scored = project.evsys(
        "benchmark", "run", "--path", "bench", "--model", taken["runs"][0]["run_dir"], "--limit", "2"
    )
    assert scored.returncode == 0, scored.stderr


def test_experiments_with_runs_of_one_name_in_one_folder_keep_their_own(project, minimal_run):
    project.write_tasks()
    entry = {"name": "colours", "path": "bench", "split": "val", "temperature": 0, "max_tokens": 4}

    def config(rate):
        run = minimal_run(algorithm__params={"max_steps": 4, "batch_size": 4, "learning_rate": rate})
        return project.config(run=run, metadata={"benchmark": [entry]}, callbacks=[{"kind": "local_logger"}])

    def launch(name, rate):
        return _summary(project, config(rate), "--set", f"name={name}")

    weak, _ = launch("weak", 1e-5)
    strong, said = launch("strong", 1e-1)
    assert "outputs/r0 is the run weak/r0" in said and strong["runs"][0]["run_dir"] == "outputs/r0@strong"
    again, said = launch("weak", 1e-5)
    assert said.count("is not run again") == 1 and again["runs"] == weak["runs"]
    again, said = launch("strong", 1e-1)
    assert said.count("is not run again") == 1 and again["runs"] == strong["runs"]
    compared = project.evsys("compare", "weak", "strong", "--json", check=True)
    assert json.loads(compared.stdout)["verdicts"]
    copy, said = launch("copy", 1e-5)
    assert said.count("is not run again") == 1 and copy["runs"][0]["run_dir"] == "outputs/r0@copy"
    brought = {name: place.replace("r0@copy", "r0") for name, place in copy["runs"][0]["artifacts"].items()}
    assert brought == weak["runs"][0]["artifacts"]
    scored = project.evsys("benchmark", "run", "--path", "bench", "--model", "outputs/r0", "--limit", "2")
    assert scored.returncode == 0, scored.stderr
    assert launch("copy", 1e-5)[0]["runs"] == copy["runs"]
    regraded = project.evsys("regrade", "outputs/strong.experiment_result.json", "--verifier", "exact_match")
    assert regraded.returncode == 0, regraded.stderr


def test_arms_that_are_alike_are_all_run(project, minimal_run):
    runs = [minimal_run(name=name, algorithm__params={"max_steps": 2}) for name in ("one", "other")]
    _, said = _summary(project, project.config(run=None, runs=runs))
    assert "is not run again" not in said


def test_a_torn_journal_is_named_and_a_fresh_start_sets_it_aside(project):
    path = project.config()
    project.evsys("run", path, check=True)
    journal = project.root / "outputs/hello_sft.journal.sqlite"
    with open(journal, "r+b") as file:
        file.truncate(20_000)
    refused = project.evsys("run", path)
    assert refused.returncode == 1 and str(journal.relative_to(project.root)) in refused.stderr
    assert "next: the same command with --fresh" in refused.stderr and "Traceback" not in refused.stderr
    again = project.evsys("run", path, "--fresh")
    assert again.returncode == 0, again.stderr
    assert [file.stat().st_size for file in journal.parent.glob("*.damaged-*[0-9]")] == [20_000]


@pytest.mark.parametrize(("word", "torn"), [(b'{"metrics": {', b'{"metrics": ['), (b'"metrics"', b'"metr\xffcs"')])
def test_a_journal_with_torn_events_is_named_and_a_fresh_start_sets_it_aside(project, word, torn):
    path = project.config()
    project.evsys("run", path, check=True)
    journal = project.root / "outputs/hello_sft.journal.sqlite"
    whole = journal.read_bytes()
    assert word in whole
    journal.write_bytes(whole.replace(word, torn, 1))
    refused = project.evsys("run", path)
    assert refused.returncode == 1 and "is damaged" in refused.stderr and "Traceback" not in refused.stderr
    assert "next: the same command with --fresh" in refused.stderr and len(refused.stderr) < 500
    again = project.evsys("run", path, "--fresh")
    assert again.returncode == 0 and len(list(journal.parent.glob("*.damaged-*[0-9]"))) == 1, again.stderr


def test_a_finished_experiment_keeps_the_time_it_took(project):
    path = project.config()
    first = json.loads(project.evsys("run", path, "--json", check=True).stdout)
    again = json.loads(project.evsys("run", path, "--json", check=True).stdout)
    assert again["seconds"] == first["seconds"]


def test_the_journal_has_the_arms_and_the_verdict(project):
    project.evsys("run", project.config(n_repeats=2), check=True)
    project.evsys("run", project.config(n_repeats=2), check=True)
    with sqlite3.connect(project.root / "outputs/hello_sft.journal.sqlite") as db:
        found = db.execute(
            "SELECT kind, key, data FROM events WHERE run = '' AND kind IN ('arm', 'verdict')"
        ).fetchall()
    [(_, name, arm), (_, _, verdict)] = found
    assert name == "r0" and json.loads(arm)["runs"] == ["r0__s42", "r0__s43"]
    assert json.loads(verdict)["text"].count("r0: 2 of 2 seeds completed") == 1


def test_fresh_and_fork_at_once_are_refused(project, launched):
    before = _results(project)
    refused = project.evsys("run", launched(n_repeats=2), "--fresh", "--fork")
    assert refused.returncode == 1 and "choose one" in refused.stderr and _results(project) == before


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("link", "link is a link to gone, which is not there"),
        ("link/inside", "link is a link to gone, which is not there"),
        ("config.yaml", "config.yaml is a file"),
    ],
)
def test_an_output_dir_that_cannot_be_made_says_what_is_in_the_way(project, folder, told):
    (project.root / "link").symlink_to("gone")
    refused = project.evsys("run", project.config(output_dir=folder))
    assert refused.returncode == 1 and told in refused.stderr
