"""A finished experiment is judged again against another arm, and nothing is trained for it."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
import yaml

from evsys_sdk.cli.main import main
from evsys_sdk.experiment.experiment import Experiment
from evsys_sdk.history.digest import digest_of
from evsys_sdk.history.history import read_history
from evsys_sdk.record.journal import EXPERIMENT
from evsys_sdk.record.layout import hold
from evsys_sdk.record.rollouts import StoredJournal

WORDS = [f"{first}{second}" for first in ("ba", "de", "fi", "go", "ku", "la") for second in "bdfgl"]
PREDICTION = {"claim": "more rows", "prediction": {"arm": "all", "vs": "half"}, "confidence": 0.9}


@pytest.fixture
def sweep(project, monkeypatch):
    """Writes a sweep of three arms, the first of which crashes; the current folder is the project's."""
    monkeypatch.chdir(project.root)
    rows = [{"prompt": f"say {word}", "completion": word} for word in WORDS]
    project.write_rows("data/all.jsonl", rows)
    project.write_rows("data/half.jsonl", rows[:15])
    verifier = {"kind": "in_process", "fn_name": "exact_match"}
    tasks = [
        {"task_id": word, "instruction": f"say {word}", "verifier": {**verifier, "expected": word}} for word in WORDS
    ]
    project.write_rows("bench/tasks.jsonl", tasks)

    def arm(name, rows, **backend):
        return {
            "name": name,
            "data": {"path": f"data/{rows}.jsonl", "transforms": [{"kind": "jsonl_to_chat"}]},
            "model": {"name": "table"},
            "algorithm": {"kind": "sft", "params": {"learning_rate": 0.01, "max_steps": 25, "batch_size": 8}},
            "backend": {"kind": "mock", "params": backend},
        }

    def write(**metadata):
        entry = {"name": "words", "path": "bench", "split": "val", "temperature": 0, "max_tokens": 8}
        settings = {
            "version": 1, "name": "sweep", "output_dir": "out", "leakage": "off",
            "callbacks": [{"kind": "local_logger"}],
            "runs": [arm("crashes", "all", fail_at_step=3), arm("half", "half"), arm("all", "all")],
            "metadata": {"success_metric": "val.pass@1", "benchmark": [entry], **metadata},
        }  # fmt: skip
        path = project.root / "sweep.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    return write


def _record(project):
    return json.loads((project.root / "out/sweep.experiment_result.json").read_text())


def test_another_baseline_is_named_afterwards_and_every_file_says_the_same(project, sweep, capsys):
    path = sweep()
    Experiment.from_yaml(path).run()
    before = _record(project)
    assert before["best_arm"] == "all" and before["verdict"]["baseline_arm"] == "crashes"
    assert before["conclusion"].endswith("evsys judge sweep --baseline-arm half")
    runs = {file: file.stat().st_mtime_ns for file in (project.root / "out").glob("*/run_result.json")}
    assert main(["invalidate", "sweep", "--why", "wrong tasks"]) == 0
    capsys.readouterr()

    assert main(["judge", "sweep", "--baseline-arm", "half", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["best_arm"], told["baseline_arm"], told["baseline_arm_before"]) == ("all", "half", "crashes")
    after = _record(project)
    assert after["verdict"]["baseline_arm"] == "half" and after["verdict"] == told["verdict"]
    assert after["verdict"]["arms"][2]["vs_baseline"]["verdict"] == "better" and after["verdict"]["pairs"] == []
    lines = after["conclusion"].splitlines()
    assert lines[0].startswith("Best arm by val.pass@1: all, 50.0 points above half (95 % CI ")
    assert lines[-1] == (
        "Post hoc: the baseline half was chosen instead of crashes after the results were known (evsys judge)."
    )
    page = (project.root / "out/sweep.experiment.md").read_text()
    own = (project.root / "out/all/logs/conclusion.md").read_text()
    assert all(f"\n- {line}\n" in page and f"\n- {line}\n" in own for line in lines)
    assert own.count("## Verdict of the experiment sweep") == 1 and "evsys judge sweep" not in own
    with closing(StoredJournal(project.root / "out/sweep.journal.sqlite")) as journal:
        told = [event.data["text"] for event in journal.latest(EXPERIMENT).events(upto=0) if event.kind == "verdict"]
    assert told == [before["conclusion"], after["conclusion"]]
    assert {file: file.stat().st_mtime_ns for file in runs} == runs, "nothing was run"
    same = ("runs", "arms", "config", "seconds", "ts", "models")
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    assert digest_of(after).result == digest_of(before).result, "so that notes still hold"
    [entry] = read_history(None, [project.root / "out"]).entries
    assert entry.status == "invalid"

    assert main(["judge", "sweep", "--baseline-arm", "half"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(after["conclusion"]) and printed.endswith("record: out/sweep.experiment_result.json\n")
    assert _record(project)["judged_again"]["first"] == {"baseline_arm": "crashes", "best_arm": "all"}
    _what_cannot_be_judged_is_refused(project, capsys)

    with pytest.raises(Exception, match="evsys judge sweep --baseline-arm half judges it against that arm"):
        Experiment.from_yaml(sweep(baseline_arm="half")).run()


def _what_cannot_be_judged_is_refused(project, capsys):
    before = _record(project)
    assert main(["judge", "sweep", "--baseline-arm", "crashes"]) == 1
    assert "crashes has no score to compare with; arms with a score: half, all" in capsys.readouterr().err
    assert main(["judge", "sweep", "--baseline-arm", "hal"]) == 1
    assert "closest: half" in capsys.readouterr().err
    with hold(project.root / "out/.sweep.lock", "it"):
        assert main(["judge", "sweep", "--baseline-arm", "all"]) == 1
    assert "sweep is running: wait until it has ended, then judge it again" in capsys.readouterr().err
    (project.root / "out/sweep.journal.sqlite").rename(project.root / "journal")
    assert main(["judge", "sweep", "--baseline-arm", "all"]) == 1
    assert "sweep.journal.sqlite is gone" in capsys.readouterr().err
    (project.root / "journal").rename(project.root / "out/sweep.journal.sqlite")
    assert _record(project) == before


def test_a_typed_hypothesis_keeps_its_outcome(project, sweep):
    Experiment.from_yaml(sweep(hypothesis=PREDICTION)).run()
    before = _record(project)
    assert main(["judge", "sweep", "--baseline-arm", "all"]) == 0
    after = _record(project)
    assert after["hypothesis_result"] == before["hypothesis_result"]
    assert after["hypothesis_result"]["outcome"] == "supported" and after["verdict"]["baseline_arm"] == "all"
    assert after["conclusion"].splitlines()[2] == (
        "The hypothesis is supported: measured +50.0 points (95 % CI +27.5 to +66.2), the whole interval above 0."
    )
    assert "**supported**: " in (project.root / "out/sweep.experiment.md").read_text()
