"""Experiments are found again from disk, whatever state their files are in."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk.errors import EvsysError
from evsys_sdk.history import history
from evsys_sdk.history.context import Section, context_text, count_tokens, fit, make_context
from evsys_sdk.history.digest import digest_of, from_plain, to_plain
from evsys_sdk.history.history import History, look_up, parse_condition, read_history, records_below, select
from evsys_sdk.history.index import INDEX_FILE, add_note, note_results, note_start, notes_path, read_index
from evsys_sdk.history.leaderboard import Noise, expected_maximum, looks_of, tracks_of, values_tried
from evsys_sdk.history.progress import progress_in
from evsys_sdk.record.journal import EXPERIMENT, Journal
from evsys_sdk.record.layout import hold, is_held


def record(name: str, *arms: dict[str, Any], day: int = 1, **facts: Any) -> dict[str, Any]:
    """What an experiment with these arms leaves; `day` of January 2026 is when it ended, `reuses` names the experiment
    that runs were taken over from, with how many seeds per arm (all, if that is left out)."""
    arms = arms or (arm("a", 0.5),)
    metric = facts.pop("metric", "pass@1")
    split = facts.pop("split", "val")
    mode = facts.pop("mode", "max")
    allow_test = facts.pop("allow_test", False)
    bench = {"name": "tools", "split": split, "path": "data/val", **facts.pop("bench", {})}
    reuses, seeds_reused = facts.pop("reuses", None), facts.pop("seeds_reused", 99)
    tasks = facts.pop("tasks", "t" * 64)
    runs = [
        {
            "run_id": f"{name}/{one['arm']}__s{seed}",
            "status": status,
            "run_dir": f"somewhere/{name}_{one['arm']}__s{seed}",
            "reused_from": f"{reuses}_{one['arm']}__s{seed}" if reuses and seed < seeds_reused else None,
            "metrics": {f"{split}/tools/{metric}": score} if (score := one["each"][seed]) is not None else {},
            "evals": [
                {
                    "name": "tools",
                    "split": split,
                    "step": None,
                    "scores": [{"metric": metric, "value": score, "low": score - 0.1, "high": score + 0.1}],
                }
            ]
            if score is not None
            else [],
        }
        for one in arms
        for seed, status in enumerate(one["statuses"])
    ]
    configs = [{"name": one["arm"], "algorithm": {"kind": "sft", "params": one["settings"]}} for one in arms]
    return {
        "experiment": name,
        "tags": facts.pop("tags", []),
        "hypothesis": facts.pop("hypothesis", ""),
        "ts": f"2026-01-{day:02d}T12:00:00.000+00:00",
        "contents": {f"tasks of {split}/tools": tasks},
        "best_arm": facts.pop("best_arm", arms[0]["arm"] if len(arms) == 1 else None),
        "conclusion": "It is so.",
        "arms": [{key: one[key] for key in ("arm", "statuses", "scores", "errors")} for one in arms],
        "runs": runs,
        "config": {
            "name": name,
            "metadata": {
                "success_metric": {"name": metric, "mode": mode},
                "allow_test_selection": allow_test,
                "benchmark": [bench],
            },
            **({"runs": configs} if len(configs) > 1 else {"run": configs[0]}),
        },
        **facts,
    }


def arm(name: str, *scores: float | None, errors: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
    """An arm with a seed per score; None is a seed that failed."""
    return {
        "arm": name,
        "each": scores,
        "scores": [score for score in scores if score is not None],
        "statuses": ["failed" if score is None else "completed" for score in scores],
        "errors": list(errors),
        "settings": settings,
    }


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    (tmp_path / "outputs").mkdir()
    return tmp_path / "outputs"


def write(folder: Path, data: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{data['experiment']}.experiment_result.json"
    path.write_text(json.dumps(data))
    return path


def begin(folder: Path, name: str) -> Path:
    """An experiment that has a journal and no result."""
    path = folder / f"{name}.journal.sqlite"
    Journal(path).close()
    return folder / f"{name}.experiment_result.json"


def entry_of(folder: Path, name: str) -> Any:
    return next(entry for entry in read_history(None, [folder]).entries if entry.name == name)


def history_of(outputs: Path, *records: dict[str, Any]) -> History:
    for data in records:
        write(outputs, data)
    return read_history(None, [outputs])


# What a record says


def test_a_digest_survives_being_written_down():
    digest = digest_of(record("x", arm("a", 0.5, None, errors=("boom",), lr=1e-3), arm("b", 0.7, 0.8, lr=1e-2)))
    assert from_plain(json.loads(json.dumps(to_plain(digest)))) == digest


def test_a_digest_tells_what_the_arms_share_and_what_not():
    digest = digest_of(record("x", arm("a", 0.5, lr=1e-3, rank=8), arm("b", 0.7, lr=1e-2, rank=8)))
    assert digest.common == {"algorithm.kind": "sft", "algorithm.params.rank": 8}
    assert [one.own for one in digest.arms] == [{"algorithm.params.lr": 1e-3}, {"algorithm.params.lr": 1e-2}]


def test_a_digest_gives_each_arm_the_metrics_of_its_own_completed_runs():
    digest = digest_of(record("x", arm("a", 0.5, None), arm("b", 0.7, 0.9)))
    assert [one.metrics for one in digest.arms] == [{"val/tools/pass@1": 0.5}, {"val/tools/pass@1": 0.8}]
    assert digest.measured == ["val/tools/pass@1"] and digest.status == "partial"
    assert digest.arms[1].half_width == pytest.approx(0.1)


def test_the_verdict_of_a_record_reaches_its_arms():
    undecided = {"verdict": "undecided", "more_tasks": 120, "more_seeds": None}
    verdict = {
        "arms": [{"arm": "a", "verdict": None}, {"arm": "b", "verdict": "undecided", "vs_baseline": undecided}],
        "winner": {"arm": "b", "expected": 0.66},
    }
    digest = digest_of(record("x", arm("a", 0.5), arm("b", 0.7), verdict=verdict))
    assert (digest.arms[1].verdict, digest.arms[1].needs) == ("undecided", "about 120 more tasks")
    assert digest.expected == 0.66


@pytest.mark.parametrize("data", [{}, {"experiment": 3}, {"experiment": "x", "arms": [3]}, [1], "x", None])
def test_what_is_no_record_is_told_and_listed_as_unreadable(outputs, data):
    (outputs / "x.experiment_result.json").write_text(json.dumps(data))
    found = read_history(None, [outputs])
    assert [entry.state for entry in found.entries] == ["unreadable"]
    assert "x.experiment_result.json cannot be read, so nothing of it counts: " in found.problems[0]


@pytest.mark.parametrize("text", ["", "{", '{"experiment": "x", "ar', "\x00\x00", "[" * 100_000])
def test_a_torn_record_does_not_hide_the_others(outputs, text):
    (outputs / "torn.experiment_result.json").write_text(text)
    found = history_of(outputs, record("good"))
    assert {entry.name: entry.state for entry in found.entries} == {"torn": "unreadable", "good": "completed"}
    assert "good" in context_text(found, 1000)


# What state an experiment is in


@pytest.mark.parametrize(
    ("scores", "state"), [((0.5, 0.6), "completed"), ((0.5, None), "partial"), ((None, None), "failed")]
)
def test_the_runs_make_the_state(outputs, scores, state):
    assert history_of(outputs, record("x", arm("a", *scores))).entries[0].state == state


def test_without_a_result_the_lock_tells_running_from_interrupted(outputs):
    begin(outputs, "x")
    lock = outputs / ".x.lock"
    with hold(lock, "x"):
        assert entry_of(outputs, "x").state == "running"
    assert entry_of(outputs, "x").state == "interrupted"


def test_an_experiment_that_is_run_again_is_running_although_it_has_a_result(outputs):
    write(outputs, record("x"))
    with hold(outputs / ".x.lock", "x"):
        assert entry_of(outputs, "x").state == "running"
    assert entry_of(outputs, "x").state == "completed"


def test_an_experiment_that_was_killed_when_run_again_is_interrupted(tmp_path, outputs):
    path = write(outputs, record("x"))
    digest = digest_of(record("x"))
    os.utime(path, (1000, 1000))
    (tmp_path / ".evsys").mkdir()
    note_start(tmp_path / ".evsys", path, digest, now=2000)
    assert [entry.state for entry in read_history(tmp_path / ".evsys").entries] == ["interrupted"]


def test_looking_does_not_keep_a_run_from_starting(tmp_path, monkeypatch):
    """Who looks holds the lock for a moment; a run that starts in that moment waits and is not refused."""
    lock = tmp_path / ".x.lock"
    looker = os.open(lock, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(looker, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda seconds: os.close(looker))
    with hold(lock, "x"):
        assert is_held(lock)
    assert not is_held(lock)


def test_how_far_an_interrupted_experiment_came_is_in_its_journal(outputs):
    with closing(Journal(outputs / "x.journal.sqlite")) as journal:
        journal.begin(EXPERIMENT, "plan")
        done = journal.begin("x/a", "f")
        done.add("step", {}, at=5)
        done.add("end", {"status": "completed"}, at=5)
        journal.begin("x/b", "f").add("step", {}, at=3)
    told = [(run.run, run.status, run.step) for run in progress_in(outputs / "x.journal.sqlite")]
    assert told == [("a", "completed", 5), ("b", None, 3)]


def test_a_journal_that_is_no_journal_tells_nothing(outputs):
    (outputs / "x.journal.sqlite").write_text("not a database")
    assert progress_in(outputs / "x.journal.sqlite") == []
    assert entry_of(outputs, "x").state == "interrupted"


# Where experiments are found


def test_a_folder_is_looked_through_but_for_runs_rehearsals_and_hidden_folders(outputs):
    write(outputs / "deep" / "er", record("deep"))
    for place in ("dry", ".hidden", "run/weights"):
        write(outputs / place, record("not_this"))
    run = outputs / "run2"
    write(run, record("nor_this"))
    (run / "run_result.json").write_text("{}")
    assert [path.name.partition(".")[0] for path in records_below(outputs)] == ["deep"]


def test_the_index_finds_what_lies_elsewhere_and_skips_what_is_gone(tmp_path):
    here, gone = write(tmp_path / "far" / "away", record("here")), tmp_path / "gone" / "x.experiment_result.json"
    workspace = tmp_path / ".evsys"
    note_start(workspace, here, digest_of(record("here")), now=1.0)
    note_start(workspace, gone, digest_of(record("gone")), now=1.0)
    assert [entry.name for entry in read_history(workspace).entries] == ["here"]
    assert len(read_index(workspace)) == 2, "a disk that is not mounted today may be tomorrow"


def test_the_index_answers_for_a_record_only_while_it_is_the_same_file(tmp_path, outputs):
    path, workspace = write(outputs, record("x", arm("a", 0.5))), tmp_path / ".evsys"
    note_results(workspace, {path: digest_of(record("x", arm("a", 0.9)))})
    assert read_history(workspace).entries[0].digest.arms[0].scores == [0.9], "read from the index, not from the file"
    write(outputs, record("x", arm("a", 0.25)))
    assert read_history(workspace).entries[0].digest.arms[0].scores == [0.25]
    assert read_index(workspace)[0].digest.arms[0].scores == [0.25], "and the index has learned it"


def test_a_record_that_changes_while_it_is_read_is_read_again(tmp_path, outputs, monkeypatch):
    path, workspace = write(outputs, record("x", arm("a", 0.5))), tmp_path / ".evsys"
    workspace.mkdir()
    as_it_was = history._read

    def read_and_change(place):
        found = as_it_was(place)
        write(outputs, record("x", arm("a", 0.25), arm("b", 0.75)))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(history, "_read", read_and_change)
        assert read_history(workspace, outputs=outputs).entries[0].digest.arms[0].scores == [0.5]
    assert path.is_file() and len(read_history(workspace, outputs=outputs).entries[0].digest.arms) == 2


def test_what_lies_in_outputs_is_found_without_an_index(tmp_path, outputs):
    write(outputs, record("x"))
    assert [entry.name for entry in read_history(tmp_path / ".evsys", outputs=outputs).entries] == ["x"]
    assert not (tmp_path / ".evsys").exists(), "looking back makes no workspace"


@pytest.mark.parametrize("broken", ["not a database", ""])
def test_a_broken_index_is_done_without(tmp_path, outputs, broken):
    workspace = tmp_path / ".evsys"
    workspace.mkdir()
    (workspace / INDEX_FILE).write_text(broken)
    path = write(outputs, record("x"))
    note_results(workspace, {path: digest_of(record("x"))})
    assert [entry.name for entry in read_history(workspace, outputs=outputs).entries] == ["x"]


def test_a_workspace_that_is_a_file_fails_nobody(tmp_path):
    (tmp_path / ".evsys").write_text("")
    note_start(tmp_path / ".evsys", tmp_path / "x.experiment_result.json", digest_of(record("x")), now=1.0)
    assert read_history(tmp_path / ".evsys").entries == []


def test_an_index_that_another_process_is_writing_does_not_stop_a_run(tmp_path, monkeypatch):
    workspace = tmp_path / ".evsys"
    monkeypatch.setattr("evsys_sdk.history.index.WAIT_SECONDS", 0.01)
    note_start(workspace, tmp_path / "a.experiment_result.json", digest_of(record("a")), now=1.0)
    with closing(sqlite3.connect(workspace / INDEX_FILE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        note_start(workspace, tmp_path / "b.experiment_result.json", digest_of(record("b")), now=1.0)
        assert read_index(workspace) == []
    assert len(read_index(workspace)) == 1


# Which one is meant


def test_an_experiment_is_found_by_name_beginning_and_path(outputs, monkeypatch):
    history = history_of(outputs, record("alpha_one"), record("alpha"), record("beta"))
    path = outputs / "beta.experiment_result.json"
    assert look_up("alpha", history).entry.name == "alpha", "a whole name comes before the beginning of another"
    assert look_up("be", history).entry.name == "beta"
    assert look_up(str(path), history).entry.name == "beta"
    begin(outputs / "..", "gamma")
    assert look_up(str(outputs.parent / "gamma.journal.sqlite"), history).entry.state == "interrupted"
    assert look_up(str(outputs.parent), history).entry.name == "gamma", "a folder with one experiment"
    monkeypatch.chdir(outputs.parent)
    assert look_up("gamma.journal.sqlite", history).entry.name == "gamma", "a path needs no slash"
    (outputs.parent / "bet").mkdir()
    assert look_up("bet", history).entry.name == "beta", "names come before folders"


def test_an_experiment_is_found_without_its_date(outputs, monkeypatch):
    names = ["20261117_first_sft", "20261118_lr", "20261118_lr_high", "20261116_twice", "20261118_twice", "plain_lr"]
    history = history_of(outputs, *map(record, names))
    assert look_up("first_sft", history).entry.name == "20261117_first_sft"
    assert look_up("lr", history).entry.name == "20261118_lr", "the slug is whole, and not the beginning of another"
    assert look_up("20261118_twice", history).entry.name == "20261118_twice"
    with pytest.raises(
        EvsysError, match="'twice' is the slug of 2 experiments: 20261116_twice, 20261118_twice; say which"
    ):
        look_up("twice", history)
    monkeypatch.chdir(outputs)
    (outputs / "first_sft").mkdir()
    assert look_up("first_sft", history).entry.name == "20261117_first_sft", "names come before folders"


@pytest.mark.parametrize(
    ("ref", "told"),
    [
        ("alp", "'alp' is the beginning of 2 experiments: alpha_one, alpha_two; say which"),
        ("alpha_tow", "closest: alpha_two"),
        ("zzz", "known: alpha_one, alpha_two"),
        ("", "there is no experiment ''"),
        ("./nowhere", "there is no record of an experiment at nowhere"),
    ],
)
def test_a_wrong_name_is_answered_with_what_there_is(outputs, ref, told):
    history = history_of(outputs, record("alpha_one"), record("alpha_two"))
    with pytest.raises(EvsysError) as caught:
        look_up(ref, history)
    assert told in str(caught.value)


def test_of_two_experiments_of_one_name_the_newest_is_taken_and_that_is_said(outputs):
    write(outputs / "old", record("x", arm("a", 0.1), day=1))
    write(outputs / "new", record("x", arm("a", 0.9), day=2))
    found = look_up("x", read_history(None, [outputs]))
    assert found.entry.digest.arms[0].scores == [0.9]
    assert "2 experiments are called x" in found.note and str(outputs / "old") in found.note


def test_tags_statuses_and_metrics_select(outputs):
    history = history_of(
        outputs,
        record("low", arm("a", 0.2, 0.4), tags=["lr", "big"]),
        record("high", arm("a", 0.1), arm("b", 0.8), tags=["lr"]),
        record("broken", arm("a", None), tags=["lr"]),
    )
    names = lambda **conditions: {entry.name for entry in select(history.entries, **conditions)}  # noqa: E731
    assert names(tags=["lr", "big"]) == {"low"}
    assert names(statuses=["failed", "running"]) == {"broken"}
    assert names(conditions=["pass@1"]) == {"low", "high"}
    assert names(conditions=["pass@1>=0.3"]) == {"low", "high"}, "the mean over seeds counts"
    assert names(conditions=["val/tools/pass@1 > 0.35"]) == {"high"}
    assert names(conditions=["pass@1<0.15"]) == {"high"}, "one arm is enough"
    assert names(conditions=["no_such_metric"]) == set()


@pytest.mark.parametrize("text", ["pass@1>=", "pass@1>=high", ">=0.5", ""])
def test_a_condition_that_makes_no_sense_is_refused_with_an_example(text):
    with pytest.raises(EvsysError, match=r"pass@1>=0\.5"):
        parse_condition(text)


def test_an_unknown_status_names_the_known(outputs):
    with pytest.raises(EvsysError, match="closest: completed"):
        select([], statuses=["complete"])


# What people say


def test_an_invalid_experiment_does_not_count_until_that_is_taken_back(outputs):
    history = history_of(outputs, record("x"))
    path, result = history.entries[0].record, history.entries[0].digest.result
    before = path.read_bytes()
    add_note(path, "invalid", "leaked", about=result)
    entry = entry_of(outputs, "x")
    assert (entry.status, entry.state, entry.counts) == ("invalid", "completed", False)
    add_note(path, "valid", "", about=result)
    assert entry_of(outputs, "x").counts
    assert path.read_bytes() == before, "the machine's record is not touched"


def test_a_note_holds_for_the_result_it_was_written_for(outputs):
    entry = history_of(outputs, record("x", arm("a", 0.5))).entries[0]
    add_note(entry.record, "invalid", "leaked", about=entry.digest.result)
    write(outputs, record("x", arm("a", 0.5), day=9, seconds=77.0))
    assert entry_of(outputs, "x").status == "invalid", "the same result, reported later"
    write(outputs, record("x", arm("a", 0.6)))
    again = entry_of(outputs, "x")
    assert again.status == "completed" and again.notes.earlier == 1


def test_a_torn_line_of_notes_costs_that_line_only(outputs):
    entry = history_of(outputs, record("x")).entries[0]
    add_note(entry.record, "conclusion", "first", about=entry.digest.result)
    with open(notes_path(entry.record), "a") as file:
        file.write('{"kind": "conclu')
    add_note(entry.record, "conclusion", "second", about=entry.digest.result)
    again = entry_of(outputs, "x")
    assert [note.text for note in again.notes.conclusions] == ["first", "second"]
    assert "1 of 3 lines cannot be read" in read_history(None, [outputs]).problems[0]


def test_an_empty_note_is_refused(outputs):
    with pytest.raises(EvsysError, match="empty"):
        add_note(outputs / "x.experiment_result.json", "conclusion", "  ", about="")


# Noise, leaderboard, dead ends


def test_the_noise_floor_is_the_pooled_scatter_over_seeds():
    # Variances 0.02 and 0.0002 with one degree of freedom each: sd = sqrt(0.0101); t(2) = 4.303.
    entries = [_counting(record("x", arm("a", 0.4, 0.6), arm("b", 0.7, 0.72)))]
    noise = tracks_of(entries)[0].noise
    assert noise.seed_sd == pytest.approx(0.0101**0.5) and noise.degrees == 2
    assert noise.floor(2, 2) == pytest.approx(4.303 * 0.0101**0.5)


def test_without_repeated_seeds_the_intervals_over_tasks_stand_in():
    noise = tracks_of([_counting(record("x", arm("a", 0.5)))])[0].noise
    assert noise.seed_sd is None and noise.floor() == pytest.approx(0.1 * 2**0.5)
    assert Noise().floor() is None


def _counting(data: dict[str, Any]) -> Any:
    from evsys_sdk.history.history import ExperimentEntry

    digest = digest_of(data)
    return ExperimentEntry(digest=digest, record=Path("x"), state=digest.status, when=float(data["ts"][8:10]))


@pytest.mark.parametrize(("known", "told"), [(False, "supported"), (True, "supported post hoc")])
def test_a_hypothesis_that_was_written_afterwards_is_not_told_as_a_prediction(known, told):
    judged = {"outcome": "supported", "known_before": known}
    assert digest_of({**record("x", arm("a", 0.5)), "hypothesis_result": judged}).outcome == told


def outcomes(*records: dict[str, Any]) -> dict[str, str]:
    [track] = tracks_of([_counting(data) for data in records])
    return {row.entry.name: row.outcome for row in (*track.kept, *track.undecided, *track.dead_ends)}


def test_one_arm_whose_seeds_lie_far_apart_does_not_hide_every_gain():
    wild = record("wild", arm("base", 0.667, 0.683), arm("good", 0.9, 0.917), arm("wild", 0.167, 0.95), best="good")
    noise = tracks_of([_counting(wild)])[0].noise
    assert noise.floor(2, 2) < 0.1, "it was 1.0"


@pytest.mark.parametrize("scores", [(0.167, 0.95), (0.0, 1.0), (0.0, 1.0, 0.0)])
def test_the_noise_floor_of_a_share_is_at_most_1(scores):
    noise = tracks_of([_counting(record("x", arm("a", *scores)))])[0].noise
    assert 0.9 < noise.floor() <= 1.0, "it was 7 on a metric from 0 to 1"


def test_the_noise_floor_of_an_open_scale_has_no_limit():
    noise = tracks_of([_counting(record("x", arm("a", 10.0, 30.0)))])[0].noise
    assert noise.floor() > 100


def of_loss(name: str, *arms: Any, day: int = 1, **fields: Any) -> dict[str, Any]:
    """A record that is judged by a number that a run has once."""
    data = record(name, *arms, day=day, **fields)
    data["config"]["metadata"]["success_metric"] = {"name": "final_loss", "mode": "min"}
    for run in data["runs"]:
        run["metrics"] = {"final_loss": next(iter(run["metrics"].values()))}
        run["evals"] = []
    return data


@pytest.mark.parametrize("value", [1e300, -1.7e308])
def test_a_number_beyond_what_statistics_can_square_costs_no_context(outputs, value):
    write(outputs, record("wild", arm("a", value, 0.5, 0.4), arm("b", value, -value)))
    assert entry_of(outputs, "wild").digest.arm("a").scores == [0.5, 0.4]
    assert "wild" in context_text(read_history(None, [outputs]), 2000)


def test_tiny_scatter_of_most_arms_is_not_the_noise_of_an_open_scale():
    """Three arms with a loss of next to nothing made a noise floor of 0.000, and +0.033 a step forward."""
    quiet = [arm(f"a{i}", 0.1 + i / 1000, 0.10001 + i / 1000, 0.1 + i / 1000) for i in range(4)]
    first = of_loss("first", *quiet, arm("loud", 0.05, 0.09, 0.3), best_arm="loud", day=1)
    later = of_loss("later", arm("loud", 0.04, 0.1, 0.2), day=2)
    [track] = tracks_of([_counting(first), _counting(later)])
    assert track.noise.floor() > 0.05 and math.isinf(track.noise.largest)
    assert [row.outcome for row in (*track.kept, *track.undecided)] == ["first", "within noise"]
    better = of_loss("better", arm("b", 0.01, 0.0101, 0.0099), day=3)
    found = tracks_of([_counting(of_loss("x", *quiet, day=1)), _counting(better)])[0]
    assert [row.outcome for row in found.kept] == ["first", "kept"], "by the scatter of these two arms"


def test_a_wild_arm_of_a_share_is_held_to_its_own_scatter():
    calm = record("calm", *(arm(f"a{i}", 0.5, 0.51, 0.5) for i in range(4)), best_arm="a0", day=1)
    wild = record("wild", arm("w", 0.1, 0.9, 0.95), day=2)
    assert outcomes(calm, wild)["wild"] == "within noise", "its mean of 0.65 was a step forward"


def test_a_result_is_kept_when_it_beats_the_last_by_more_than_noise():
    # Tasks' half-width 0.1: the floor is 0.141.
    found = outcomes(
        record("first", arm("a", 0.5), day=1),
        record("bit_more", arm("a", 0.6), day=2),
        record("much_more", arm("a", 0.7), day=3),
        record("bit_less", arm("a", 0.6), day=4),
        record("much_less", arm("a", 0.5), day=5),
    )
    assert found == {
        "first": "first",
        "bit_more": "within noise",
        "much_more": "kept",
        "bit_less": "within noise",
        "much_less": "worse",
    }


def test_where_lower_is_better_the_leaderboard_goes_down():
    found = outcomes(
        record("first", arm("a", 0.5), day=1, metric="loss", mode="min"),
        record("lower", arm("a", 0.3), day=2, metric="loss", mode="min"),
        record("higher", arm("a", 0.9), day=3, metric="loss", mode="min"),
    )
    assert found == {"first": "first", "lower": "kept", "higher": "worse"}


def test_scores_on_other_tasks_or_metrics_are_on_separate_leaderboards():
    tracks = tracks_of(
        [
            _counting(record("a", arm("a", 0.5))),
            _counting(record("b", arm("a", 0.9), tasks="u" * 64)),
            _counting(record("c", arm("a", 0.9), metric="mean_reward")),
        ]
    )
    assert len(tracks) == 3 and all(len(track.kept) == 1 for track in tracks)


def labels(*records: dict[str, Any]) -> set[str]:
    return {track.label for track in tracks_of([_counting(data) for data in records])}


def test_tracks_of_one_metric_say_what_tells_them_apart():
    plain = record("a")
    assert labels(plain) == {"val/tools/pass@1"}, "nothing to tell apart"
    assert labels(plain, record("b", tasks="u" * 64, bench={"path": "data/hard"})) == {
        "val/tools/pass@1 (tasks tttttttt in data/val)",
        "val/tools/pass@1 (tasks uuuuuuuu in data/hard)",
    }
    assert labels(plain, record("b", mode="min")) == {
        "val/tools/pass@1 (higher is better)",
        "val/tools/pass@1 (lower is better)",
    }
    assert labels(record("a", split="test"), record("b", split="test", allow_test=True)) == {
        "test/tools/pass@1 (no allow_test_selection)",
        "test/tools/pass@1 (allow_test_selection)",
    }
    unknown = record("b", contents={})
    assert "val/tools/pass@1 (tasks in data/val)" in labels(plain, unknown)
    nowhere = record("b", contents={}, bench={"path": None})
    assert "val/tools/pass@1 (tasks not known)" in labels(plain, nowhere)
    moved = record("c", contents={}, bench={"path": "data/hard"})
    assert labels(unknown, moved) == {
        "val/tools/pass@1 (tasks in data/val)",
        "val/tools/pass@1 (tasks in data/hard)",
    }, "another folder is another benchmark where no hash is known"


def _on(data: dict[str, Any], model: str, backend: str) -> dict[str, Any]:
    """The record with all its arms on this model and backend."""
    config = data["config"]
    for run in config.get("runs") or [config["run"]]:
        run |= {"model": {"name": model}, "backend": {"kind": backend}}
    return data


def test_mock_runs_and_other_models_are_on_separate_leaderboards():
    records = [
        _on(record("toy", arm("a", 0.99), day=1), "small", "mock"),
        _on(record("real", arm("a", 0.4), day=2), "small", "local"),
        _on(record("remote", arm("a", 0.45), day=3), "small", "tinker"),
        _on(record("large", arm("a", 0.9), day=4), "large", "local"),
    ]
    tracks = tracks_of([_counting(data) for data in records])
    assert {track.label: [entry.name for entry in track.entries] for track in tracks} == {
        "val/tools/pass@1 (large)": ["large"],
        "val/tools/pass@1 (small)": ["real", "remote"],
        "val/tools/pass@1 (small; mock backend)": ["toy"],
    }
    assert all(not track.dead_ends for track in tracks)


def test_arms_of_several_models_in_one_experiment_are_taken_apart():
    data = record("both", arm("s", 0.4, lr=1), arm("l", 0.9, lr=1), best_arm="l", verdict={"winner": {"expected": 0.8}})
    for run, model in zip(data["config"]["runs"], ["small", "large"], strict=True):
        run["model"] = {"name": model}
    tracks = tracks_of([_counting(data), _counting(_on(record("next", arm("s", 0.6), day=2), "small", "local"))])
    found = {track.model: [(row.entry.name, row.arm.arm, row.score) for row in track.kept] for track in tracks}
    assert found == {"large": [("both", "l", 0.8)], "small": [("both", "s", 0.4), ("next", "s", 0.6)]}


def test_what_lies_within_noise_is_an_open_question_and_no_dead_end(outputs):
    history = history_of(
        outputs, record("first", arm("a", 0.5, lr=1), day=1), record("less", arm("a", 0.45, lr=2), day=2)
    )
    text = context_text(history, 4000)
    assert "Dead ends" not in text
    assert "is less as good? 0.450 against 0.500 of first, within noise (0.141); lr 1 -> 2" in text


def test_a_dead_end_shows_how_its_settings_differ_where_they_are_long_or_close(outputs):
    long = "You are a helpful assistant for the tools of an office. "
    history = history_of(
        outputs,
        record("first", arm("a", 0.9, system=f"{long}Be brief. {long}", lr=0.1), day=1),
        record("less", arm("a", 0.1, system=f"{long}Ramble on. {long}", lr=0.10000001), day=2),
    )
    [line] = [line for line in context_text(history, 4000).splitlines() if "less: worse" in line]
    assert "lr 0.1 -> 0.10000001" in line
    before, _, now = line.partition("system ")[2].partition(" -> ")
    assert before != now.partition(", ")[0], line


def test_errored_rollouts_and_lost_seeds_stand_beside_scores_in_the_context(outputs):
    data = record("x", arm("a", 0.5, None, None, lr=1), arm("b", 0.9, 0.9, 0.9, lr=2))
    for run in data["runs"][3:]:
        run["evals"][0]["scores"][0] |= {"n_rollouts": 20, "n_errors": 7}
    history = history_of(outputs, data)
    assert [one.errors for one in history.entries[0].digest.arms] == ["", "21 of 60 rollouts errored"]
    text = context_text(history, 4000)
    assert "0.900 (3 seeds) x / lr=2, 2026-01-01; 21 of 60 rollouts errored; first" in text
    assert "x: can its scores be believed? 21 of 60 rollouts errored in lr=2; errors count as failures" in text
    assert "lr=2 0.900 (21 of 60 rollouts errored), lr=1 0.500 (1 of 3 seeds)" in text


def test_what_was_selected_on_is_counted_over_experiments(outputs):
    sweep = [arm(f"a{n}", 0.5, lr=n) for n in range(12)]
    history = history_of(
        outputs,
        *(record(f"sweep{number}", *sweep, day=1 + number) for number in range(2)),
        record("again", *sweep, day=4, reuses="sweep1"),
        _on(record("toy", arm("t", 0.5), day=5), "small", "mock"),
        record("tested", arm("t", 0.5), day=6, split="test"),
        record("other", arm("t", 0.5), day=7, tasks="u" * 64),
    )
    [used, other, toy] = looks_of(history.entries)
    assert (used.benchmark, used.tasks, used.n_arms, len(used.experiments)) == ("val/tools", "tasks tttttttt", 24, 2)
    assert (other.n_arms, toy.n_arms, toy.is_mock) == (1, 1, True) and not used.is_spent
    assert used.by_chance == pytest.approx(0.1 / 1.96 * 1.9477, rel=0.01), "E max of 24 normals is 1.948"
    assert "budget is spent" not in str(used) and other.by_chance is None
    write(outputs, record("last", arm("a", 0.5), day=8))
    text = context_text(read_history(None, [outputs]), 4000)
    assert (
        "- val/tools pass@1 (tasks tttttttt): 25 arms of 3 experiments compared on it (budget 25); the best of 25 "
        "equal arms scores about 0.100 too high by chance. The budget is spent: choose on a fresh validation set."
        in text
    )


def test_what_was_selected_on_is_counted_per_metric_and_in_its_unit_and_direction(outputs):
    slow = record("slow", *(arm(f"a{n}", 40.0 + n, lr=n) for n in range(3)), day=3, metric="latency", mode="min")
    for run in slow["runs"]:
        run["evals"][0]["scores"][0] |= {"low": run["metrics"]["val/tools/latency"] - 9.8, "unit": "s"}
        run["evals"][0]["scores"][0]["high"] = run["metrics"]["val/tools/latency"] + 9.8
    sweep = [arm(f"a{n}", 0.5, lr=n) for n in range(2)]
    history = history_of(outputs, record("x", *sweep), record("y", *sweep, day=2), slow)
    shares, seconds = looks_of(history.entries)
    assert (shares.metric, shares.n_arms, seconds.metric, seconds.n_arms) == ("pass@1", 4, "latency", 3)
    assert shares.by_chance == pytest.approx(0.1 / 1.96 * expected_maximum(4), rel=0.01)
    assert str(seconds) == (
        "val/tools latency (tasks tttttttt): 3 arms of 1 experiment compared on it (budget 25); the best of 3 equal "
        f"arms scores about {5.0 * expected_maximum(3):.3f} s too low by chance"
    )
    assert [one.as_dict()["metric"] for one in (shares, seconds)] == ["pass@1", "latency"]


def test_other_tasks_are_counted_apart_under_a_benchmark_called_like_its_split(outputs):
    def of_val(name: str, tasks: str, day: int) -> dict[str, Any]:
        data = record(name, arm("a", 0.5, lr=day), arm("b", 0.5, lr=9), day=day, bench={"name": "val"})
        for run in data["runs"]:
            run["metrics"] = {"val/pass@1": 0.5}
            run["evals"][0]["name"] = "val"
        return data | {"contents": {"tasks of val/val": tasks}}

    history = history_of(outputs, of_val("x", "t" * 64, 1), of_val("y", "u" * 64, 2))
    found = [(one.benchmark, one.tasks, one.n_arms) for one in looks_of(history.entries)]
    assert sorted(found) == [("val", "tasks tttttttt", 2), ("val", "tasks uuuuuuuu", 2)]


def test_mock_arms_have_a_budget_of_looks_too(outputs):
    sweep = [arm(f"a{n}", 0.5, lr=n) for n in range(13)]
    data = [_on(record(f"sweep{number}", *sweep, day=1 + number), "small", "mock") for number in range(2)]
    history = history_of(outputs, *data, record("real", arm("a", 0.5), day=4))
    [real, mock] = looks_of(history.entries)
    assert (real.n_arms, real.is_spent, mock.n_arms, mock.is_mock, mock.is_spent) == (1, False, 26, True, True)
    assert "mock backend): 26 arms of 2 experiments" in str(mock) and "The budget is spent" in str(mock)
    assert mock.as_dict()["spent"] is True


def test_trials_that_a_search_left_behind_were_compared_too(outputs):
    data = record("searched", *(arm(f"a{n}", 0.5, lr=n) for n in range(4)))
    for one, run in zip(data["arms"][1:], data["runs"][1:], strict=True):
        one |= {"statuses": ["pruned"], "scores": []}
        run |= {"status": "pruned"}
    [looks] = looks_of(history_of(outputs, data).entries)
    assert looks.n_arms == 4


@pytest.mark.parametrize(("n", "truth"), [(2, 0.564), (5, 1.163), (10, 1.539), (25, 1.965), (100, 2.508)])
def test_the_expected_maximum_of_normal_values(n, truth):
    assert expected_maximum(n) == pytest.approx(truth, rel=0.05)


def test_scores_on_a_part_of_the_tasks_are_on_a_separate_leaderboard():
    found = labels(record("all"), record("some", bench={"limit": 8}))
    assert found == {
        "val/tools/pass@1 (tasks tttttttt in data/val)",
        "val/tools/pass@1 (the first 8 of tasks tttttttt in data/val)",
    }


def test_every_line_about_a_track_says_which_one_it_is(outputs):
    history = history_of(
        outputs,
        record("easy", arm("a", 0.5, lr=1e-3), arm("b", 0.6, lr=1e-2)),
        record("hard", arm("a", 0.1, lr=1e-3), arm("b", 0.2, lr=1e-2), tasks="u" * 64),
    )
    text = context_text(history, 4000)
    told = [line for line in text.partition("## Tried")[0].splitlines() if "val/tools/pass@1" in line]
    assert len(told) == 6, "a best, a noise floor and the values of each"
    assert all("(tasks tttttttt in data/val)" in line or "(tasks uuuuuuuu in data/val)" in line for line in told)


def test_test_scores_make_no_leaderboard(outputs):
    history = history_of(outputs, record("x", split="test"), record("y", split="test", day=2))
    [track] = tracks_of(history.entries)
    assert not track.selects and not track.kept and not track.dead_ends
    assert "test scores select nothing" in context_text(history, 1000)


ON_TEST = (arm("a", 0.4, lr=1e-3), arm("b", 0.6, lr=1e-2))


def test_test_scores_are_reported_and_rank_nothing(outputs):
    history = history_of(outputs, record("x", *ON_TEST, split="test"), record("y", *ON_TEST, split="test", day=2))
    text = context_text(history, 4000)
    assert "pass@1 (test scores, a report and no ranking): lr=0.001 0.400, lr=0.01 0.600" in text, "in their own order"
    assert "## Values tried" not in text and "## Dead ends" not in text
    digest = history.entries[0].digest
    assert digest.top is None and not digest.selects


def test_where_the_config_allows_it_test_scores_make_a_leaderboard(outputs):
    history = history_of(
        outputs,
        record("x", *ON_TEST, split="test", allow_test=True),
        record("y", *ON_TEST, split="test", day=2),
    )
    allowed = next(track for track in tracks_of(history.entries) if track.selects)
    assert [(row.entry.name, row.arm.arm) for row in allowed.kept] == [("x", "b")]
    text = context_text(history, 4000)
    assert "0.01 (1, 0.600), 0.001 (1, 0.400)" in text, "y took no part in it"


def test_a_bound_on_a_bare_name_is_not_met_by_a_test_score(outputs):
    history = history_of(outputs, record("x", arm("a", 0.9), split="test"), record("y", arm("a", 0.8)))
    names = lambda condition: {entry.name for entry in select(history.entries, conditions=[condition])}  # noqa: E731
    assert names("pass@1>=0.5") == {"y"}
    assert names("pass@1") == {"x", "y"}, "having a metric is no choice"
    assert names("test/tools/pass@1>=0.5") == {"x"}, "it was asked for by name"


def test_a_winner_counts_with_the_score_to_expect_of_it():
    [track] = tracks_of(
        [_counting(record("x", arm("a", 0.5), arm("b", 0.9), best_arm="b", verdict={"winner": {"expected": 0.7}}))]
    )
    assert track.kept[0].score == 0.7


# Runs that were taken over


def test_an_experiment_of_runs_that_were_taken_over_is_neither_kept_nor_dead_end():
    arms = [arm("a", 0.5, 0.6, lr=1e-3), arm("b", 0.3, 0.4, lr=1e-2)]
    once, twice = record("first", *arms), record("again", *arms, day=2, reuses="first")
    assert outcomes(once, twice) == {"first": "first"}
    [track], [alone] = tracks_of([_counting(once), _counting(twice)]), tracks_of([_counting(once)])
    assert values_tried(track) == values_tried(alone), "the same evidence is counted once"
    assert track.noise == alone.noise


def test_of_an_experiment_with_one_new_arm_the_new_arm_counts():
    more = record(
        "more",
        arm("a", 0.5, lr=1e-3),
        arm("b", 0.2, lr=1e-2),
        day=2,
        best_arm="a",
        verdict={"winner": {"expected": 0.4}},
    )
    more["runs"][0]["reused_from"] = "first_a__s0"
    [track] = tracks_of([_counting(record("first", arm("a", 0.5, lr=1e-3))), _counting(more)])
    assert [(row.entry.name, row.arm.arm, row.score) for row in track.dead_ends] == [("more", "b", 0.2)]
    assert [len(one.scores) for one in values_tried(track)["algorithm.params.lr"]] == [1, 1]


def test_an_arm_with_more_seeds_takes_the_place_of_the_one_it_took_over():
    more = record("more", arm("a", 0.5, 0.7, 0.9, lr=1e-3), day=2, reuses="first", seeds_reused=1)
    other = record("other", arm("a", 0.1, lr=1e-2), day=3)
    [track] = tracks_of([_counting(record("first", arm("a", 0.5, lr=1e-3))), _counting(more), _counting(other)])
    [best, _] = values_tried(track)["algorithm.params.lr"]
    assert best.scores == [pytest.approx(0.7)]
    assert [row.entry.name for row in (*track.kept, *track.undecided)] == ["first", "more", "other"], (
        "it is news all the same"
    )


def test_what_an_experiment_took_over_from_one_that_is_not_known_here_is_its_own():
    assert outcomes(record("again", arm("a", 0.5), reuses="gone")) == {"again": "first"}


def test_runs_of_an_invalid_experiment_do_not_come_back_with_those_who_took_them_over(outputs):
    history = history_of(
        outputs, record("leaked", arm("a", 0.99)), record("again", arm("a", 0.99), day=2, reuses="leaked")
    )
    leaked = entry_of(outputs, "leaked")
    add_note(leaked.record, "invalid", "tasks were in the rows", about=leaked.digest.result)
    assert tracks_of(history.entries) and not tracks_of(read_history(None, [outputs]).entries)


def test_an_invalid_experiment_leaves_the_runs_that_it_took_over_to_their_owner(outputs):
    history_of(outputs, record("first", arm("a", 0.5)), record("again", arm("a", 0.5), day=2, reuses="first"))
    again = entry_of(outputs, "again")
    add_note(again.record, "invalid", "it took over the wrong run", about=again.digest.result)
    [track] = tracks_of(read_history(None, [outputs]).entries)
    assert [row.entry.name for row in track.kept] == ["first"]


def test_a_question_about_the_same_runs_is_asked_once(outputs):
    verdict = {"arms": [{"arm": "a"}, {"arm": "b", "verdict": "undecided"}]}
    arms = (arm("a", 0.5, lr=1e-3), arm("b", 0.6, lr=1e-2))
    history = history_of(
        outputs, record("first", *arms, verdict=verdict), record("again", *arms, day=2, reuses="first", verdict=verdict)
    )
    text = context_text(history, 4000)
    assert "first: undecided against the baseline" in text and text.count("undecided against the baseline") == 1
    assert "again (2026-01-02, completed, 2 arms, runs taken over from other experiments)" in text
    silent = record("first", *arms, verdict=verdict, split="test")
    asking = record("again", *arms, day=2, reuses="first", verdict=verdict, split="test", allow_test=True)
    text = context_text(history_of(outputs, silent, asking), 4000)
    assert "again: undecided against the baseline" in text, "the one before it may not choose, and asked nothing"


# The context


def test_the_context_tells_what_the_next_experiment_needs(outputs):
    history_of(
        outputs,
        record("first", arm("a", 0.5, lr=1e-3), day=1, hypothesis="A start."),
        record("jump", arm("a", 0.8, lr=1e-2), day=2, hypothesis="A higher rate helps."),
        record("worse", arm("a", 0.3, lr=1.0), day=3),
        record("broken", arm("a", None, errors=("out of memory",)), day=4),
        record("leaked", arm("a", 0.99, lr=1e-1), day=5),
    )
    begin(outputs, "killed")
    leaked, jump = entry_of(outputs, "leaked"), entry_of(outputs, "jump")
    add_note(leaked.record, "invalid", "tasks were in the rows", about=leaked.digest.result)
    add_note(jump.record, "conclusion", "try 3e-2 next", about=jump.digest.result)
    text = context_text(read_history(None, [outputs]), 4000)
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    best = sections["Best so far, and how it was reached (newest first)"]
    assert "0.800 (1 seed) jump, 2026-01-02; +0.300 (noise 0.141) by lr 0.001 -> 0.01" in best
    assert "leaked" not in best
    dead = sections["Dead ends (newest first)"]
    assert "worse: worse, 0.300 against 0.800 of jump; lr 0.01 -> 1" in dead
    assert "broken: every run failed: out of memory" in dead
    assert "leaked: invalid, do not build on it: tasks were in the rows" in dead
    assert "differ by less than 0.141" in sections["Noise floor"]
    opened = sections["Open questions"]
    assert "killed was interrupted" in opened and "jump, has one seed" in opened
    assert "0.990" not in text, "an invalid score is nowhere to be built on"
    assert "A higher rate helps. pass@1 0.800" in text and "concluded: try 3e-2 next" in text
    assert "algorithm.params.lr: 0.01 (1, 0.800), 0.001 (1, 0.500), 1 (1, 0.300)" in text


def test_an_empty_history_says_so():
    assert "No experiment is known here yet" in context_text(History(), 400)


@pytest.mark.parametrize("tokens", [400, 700, 4000, 20_000])
def test_the_context_of_500_experiments_is_within_its_budget(many, tokens):
    text = context_text(many, tokens)
    plain = make_context(many, tokens)
    printed = json.dumps(plain, indent=2, ensure_ascii=False)
    assert count_tokens(text) <= tokens and count_tokens(printed) <= tokens
    assert count_tokens(text) > 0.7 * tokens, "and uses it"
    assert "500 experiments" in plain["sections"][0]["lines"][0]
    assert plain["tokens"] <= plain["budget"] == tokens
    shown = sum(len(section["lines"]) + section["left_out"] for section in plain["sections"][-1:])
    assert shown == 500, "what does not fit is counted"


def test_a_small_budget_still_has_the_best_and_the_noise(many):
    text = context_text(many, 500)
    best = tracks_of(many.entries)[0].kept[-1]
    assert f"{best.score:.3f} (2 seeds) {best.entry.name}" in text and "may be equal" in text


def test_a_budget_in_which_nothing_can_be_said_is_refused(many):
    with pytest.raises(EvsysError, match="at least 400"):
        context_text(many, 399)


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> History:
    """500 experiments with some of every state."""
    outputs = tmp_path_factory.mktemp("many") / "outputs"
    for number in range(500):
        level = 0.3 + 0.6 * (number * 37 % 500) / 500
        arms = [arm(f"n{number}_{rate:g}", level, level + 0.05, lr=rate, rank=number % 6) for rate in (1e-3, 1e-2)]
        if number % 50 == 0:
            arms = [arm(f"n{number}", None, errors=("out of memory",), lr=1e-3)]
        facts = {"day": 1 + number % 28, "hypothesis": f"Idea {number} makes it better."}
        write(outputs, record(f"exp_{number:03d}", *arms, **facts))
    return read_history(None, [outputs])


def test_no_section_is_starved_by_another():
    long = Section(title="Long", lines=tuple(f"line {n} of many words" for n in range(100)))
    short = Section(title="Short", lines=("the one that matters",))
    kept = fit([long, short], 60, lambda found: "\n".join(line for section in found for line in section.lines))
    assert kept[1].lines == short.lines and 0 < len(kept[0].lines) < 100
    assert kept[0].left_out == 100 - len(kept[0].lines)


def test_arms_that_all_score_the_same_are_no_undecided_question(outputs):
    judged = {"constant": 0.0, "arms": [{"arm": "a"}, {"arm": "b", "verdict": "undecided"}]}
    history = history_of(outputs, record("zero", arm("a", 0.0, lr=1), arm("b", 0.0, lr=2), verdict=judged))
    text = context_text(history, 4000)
    assert "zero: every arm scored 0.000 on every task: check the answers and the verifier" in text
    assert "undecided" not in text and history.entries[0].digest.constant == 0.0
    assert digest_of(record("one", arm("a", 0.0), verdict={"constant": 0.0})).constant is None


def test_arms_with_one_loss_are_not_said_to_have_scored_it_on_tasks(outputs):
    judged = {"constant": 0.001, "arms": [{"arm": "a"}, {"arm": "b", "verdict": "undecided"}]}
    found = record("loss", arm("a", 0.001, lr=1), arm("b", 0.001, lr=2), verdict=judged)
    found["config"]["metadata"]["success_metric"] = "final_loss"
    for run in found["runs"]:
        run["metrics"] = {"final_loss": 0.001}
    text = context_text(history_of(outputs, found), 4000)
    assert "loss: every arm has final_loss 0.001: check whether their settings differ" in text
    assert "on every task" not in text


def test_errors_stand_beside_every_score_that_is_shown(outputs, capsys):
    data = record("x", arm("a", 0.5))
    [run] = data["runs"]
    run["metrics"]["test/t/pass@1"] = 0.25
    score = {"metric": "pass@1", "value": 0.25, "n_rollouts": 60, "n_errors": 8}
    run["evals"].append({"name": "t", "split": "test", "step": None, "scores": [score]})
    run["evals"].append({"name": "t", "split": "test", "step": 0, "scores": [{**score, "value": 0.0, "n_errors": 3}]})
    write(outputs, data)
    from evsys_sdk.cli.main import main

    assert main(["show", str(outputs / "x.experiment_result.json")]) == 0
    told = capsys.readouterr().out
    assert "untrained: test/t/pass@1 0.000 (3 of 60 rollouts errored)" in told
    assert "test/t/pass@1 0.250 (8 of 60 rollouts errored)" in told


def on_rows(data: dict[str, Any], *arms: str, n_tasks: int = 0) -> dict[str, Any]:
    """The record with the scores of these arms on training rows: on so many tasks of them, or all."""
    for run in data["runs"]:
        if not arms or run["run_id"].split("/")[1].split("__")[0] in arms:
            run["evals"] = [{**one, "on_training_rows": not n_tasks, "n_training_tasks": n_tasks or 9}
                            for one in run["evals"]]  # fmt: skip
    return data


@pytest.mark.parametrize("n_tasks", [0, 3])
def test_a_memorised_score_is_no_bar_for_honest_ones(outputs, n_tasks):
    memorised = on_rows(record("memorised", arm("a", 1.0, 1.0, 0.99), day=1), n_tasks=n_tasks)
    honest = [record(f"honest{day}", arm("a", score, score + 0.01), day=day) for day, score in ((2, 0.4), (3, 0.7))]
    found = history_of(outputs, memorised, *honest)
    first, second = tracks_of(found.entries)
    assert [(row.entry.name, row.outcome) for row in first.kept] == [("honest2", "first"), ("honest3", "kept")]
    assert not first.dead_ends and not first.is_memory
    assert [row.entry.name for row in second.kept] == ["memorised"] and second.is_memory
    assert second.label == "val/tools/pass@1 (tasks in training rows)"
    text = context_text(found, 2000)
    assert "Dead ends" not in text and "(tasks in training rows): 0.997 (3 seeds) memorised" in text


def test_one_memorised_arm_does_not_stand_for_its_experiment():
    both = on_rows(record("both", arm("clean", 0.5, 0.52), arm("leaky", 1.0, 0.98), best_arm="leaky"), "leaky")
    first, second = tracks_of([_counting(both)])
    assert (first.kept[0].arm.arm, second.kept[0].arm.arm) == ("clean", "leaky")


@pytest.mark.parametrize(
    ("line", "marked"),
    [
        ("Leakage: 3 of 40 val/tools tasks appear in 5 of 200 training rows (3 verbatim)", ["a", "b"]),
        ("Leakage: 1 of 1,040 val/tools tasks appears in 5 of 200 training rows (1 verbatim)", ["a", "b"]),
        ("Leakage: b: 3 of 40 val/tools tasks appear in 5 of 200 training rows (3 verbatim)", ["b"]),
        ("Leakage: c, b: 3 of 40 val/tools tasks appear in 5 of 200 training rows (3 verbatim)", ["b"]),
        ("Leakage: 3 of 40 test/tools tasks appear in 5 of 200 training rows (3 verbatim)", []),
        ("Leakage: 3 of 40 val/tools2 tasks appear in 5 of 200 training rows (3 verbatim)", []),
        ("Not counted as leakage: 3 of 40 val/tools tasks share a template with 5 of 200 training rows", []),
    ],
)
def test_a_leak_marks_the_arms_and_the_benchmark_that_it_is_of(line, marked):
    """A leak of the test tasks made the best validation score one whose `tasks appear in its training rows`."""
    digest = digest_of({**record("x", arm("a", 0.5), arm("b", 0.6)), "conclusion": f"It is so.\n{line}."})
    assert [one.arm for one in digest.arms if one.training_mark] == marked


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        (
            {"constant": 1.0, "share": True},
            "every arm scored 1.000 on every task: harder tasks would show a difference",
        ),
        ({"constant": 1.0, "share": False}, "every arm scored 1.000 on every task: check the answers and the verifier"),
        ({"constant": 1.0, "share": True, "mode": "min"}, "on every task: check the answers and the verifier"),
        ({"constant": 0.5, "share": True}, "every arm scored 0.500 on every task: check the answers and the verifier"),
    ],
)
def test_arms_that_solve_every_task_need_harder_ones_and_no_other_verifier(outputs, verdict, told):
    value, mode = verdict["constant"], verdict.get("mode", "max")
    judged = {"mode": "max", **verdict, "arms": []}
    found = record("same", arm("a", value, lr=1), arm("b", value, lr=2), verdict=judged, mode=mode)
    assert told in context_text(history_of(outputs, found), 4000)


def test_of_a_folder_that_was_copied_each_experiment_counts_once(tmp_path):
    workspace = tmp_path / "before/.evsys"
    paths = [write(workspace / f"outputs/{name}", record(name)) for name in ("first", "second")]
    note_results(workspace, {path: digest_of(record(path.parent.name)) for path in paths})
    shutil.copytree(tmp_path / "before", tmp_path / "now")
    copied, changed = (tmp_path / "now" / path.relative_to(tmp_path / "before") for path in paths)
    changed.write_text(changed.read_text() + " ")  # another experiment by now
    found = read_history(tmp_path / "now/.evsys")
    assert {entry.record for entry in found.entries} == {copied, changed, paths[1]}
    assert {entry.record for entry in read_history(workspace).entries} == set(paths)


def test_a_workspace_that_was_moved_still_has_its_experiments(tmp_path):
    old = write(tmp_path / "before/.evsys/outputs/first", record("first"))
    note_results(tmp_path / "before/.evsys", {old: digest_of(record("first"))})
    (tmp_path / "before").rename(tmp_path / "now")
    write(tmp_path / "now/outputs/deeper/second", record("second"))
    found = read_history(tmp_path / "now/.evsys", outputs=tmp_path / "now/outputs")
    assert {entry.record for entry in found.entries} == {
        tmp_path / "now/.evsys/outputs/first/first.experiment_result.json",
        tmp_path / "now/outputs/deeper/second/second.experiment_result.json",
    }
