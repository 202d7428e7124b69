"""What the verbs that look back print of records on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk.cli.main import main

Evsys = Callable[..., str]


@pytest.fixture
def evsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Evsys:
    """Runs a verb over the records in `tmp_path` and gives what it printed to stdout, then to stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        assert main([*arguments, "--dir", str(tmp_path)]) == 0
        captured = capsys.readouterr()
        return captured.out + captured.err

    return run


def leave(folder: Path, name: str, scores: dict[str, list[float]], *, split: str = "val", **facts: Any) -> None:
    """The record of an experiment with these arms, by their seeds' scores."""
    runs = [
        {"run_id": f"{name}/{arm}__s{n}", "status": "completed", "metrics": {f"{split}/tools/pass@1": score}}
        for arm, seeds in scores.items()
        for n, score in enumerate(seeds)
    ]
    arms = [{"arm": arm, "statuses": ["completed"] * len(seeds), "scores": seeds} for arm, seeds in scores.items()]
    config = {"metadata": {"success_metric": "pass@1"}, "runs": [{"name": arm} for arm in scores]}
    record = {"experiment": name, "arms": arms, "runs": runs, "config": config, **facts}
    (folder / f"{name}.experiment_result.json").write_text(json.dumps(record))


def test_a_score_on_a_test_benchmark_is_nobodys_best(tmp_path: Path, evsys: Evsys) -> None:
    leave(tmp_path, "x", {"a": [0.4], "b": [0.6]}, split="test")
    leave(tmp_path, "y", {"a": [0.3], "b": [0.7]})
    listed = evsys("history")
    assert "0.6" not in listed and "(test, not ranked)" in listed and "0.700 b" in listed
    told = {one["name"]: one for one in json.loads(evsys("history", "--json"))["experiments"]}
    assert (told["x"]["ranked"], told["x"]["top_arm"], told["x"]["score"]) == (False, None, None)
    assert (told["y"]["ranked"], told["y"]["top_arm"], told["y"]["score"]) == (True, "b", 0.7)


def test_a_best_score_says_when_seeds_were_lost_or_nothing_is_proven(tmp_path: Path, evsys: Evsys) -> None:
    leave(tmp_path, "x", {"a": [0.4], "b": [0.6]}, best_arm="b")
    leave(tmp_path, "y", {"a": [0.3], "b": [0.7]})
    leave(tmp_path, "z", {"a": [0.8]}, best_arm="a")
    path = tmp_path / "z.experiment_result.json"
    record = json.loads(path.read_text())
    record["arms"][0]["statuses"] += ["failed", "failed"]
    record["runs"] += [{"run_id": f"z/a__s{n}", "status": "failed", "error": "killed"} for n in (1, 2)]
    path.write_text(json.dumps(record))
    listed = " ".join(evsys("history").split())
    assert "0.600 b -" in listed and "0.700 b (not proven best)" in listed and "0.800 (1 of 3 seeds)" in listed


def test_a_score_is_shown_with_the_verdicts_interval_and_what_it_covers(tmp_path: Path, evsys: Evsys) -> None:
    arms = [
        {"arm": "a", "low": 0.25, "high": 0.75, "n_seeds": 2},
        {"arm": "b", "low": 0.125, "high": 0.5, "n_seeds": 1},
    ]
    leave(tmp_path, "x", {"a": [0.4, 0.6], "b": [0.3]}, verdict={"arms": arms})
    shown = evsys("show", "x")
    assert "pass@1 0.500 [0.250, 0.750] (95 % over tasks and seeds) (seeds 0.400, 0.600)" in shown
    assert "pass@1 0.300 [0.125, 0.500] (95 % over tasks)" in shown, "one seed says nothing of others"
    assert "+-" not in shown


@pytest.mark.parametrize("n_seeds", [1, 2])
def test_without_a_verdict_a_run_has_its_own_interval_and_a_mean_of_seeds_none(
    tmp_path: Path, evsys: Evsys, n_seeds: int
) -> None:
    leave(tmp_path, "x", {"a": [0.5] * n_seeds})
    path = tmp_path / "x.experiment_result.json"
    record = json.loads(path.read_text())
    scores = [{"metric": "pass@1", "low": 0.25, "high": 0.75}]
    for run in record["runs"]:
        run["evals"] = [{"split": "val", "name": "tools", "scores": scores}]
    path.write_text(json.dumps(record))
    assert ("pass@1 0.500 [0.250, 0.750] (95 % over tasks)" in evsys("show", "x")) == (n_seeds == 1)


def test_a_record_that_cannot_be_read_is_listed_and_not_called_left_out(tmp_path: Path, evsys: Evsys) -> None:
    (tmp_path / "torn.experiment_result.json").write_text('{"experiment": "to')
    printed = evsys("history")
    assert "torn  unreadable" in printed and "cannot be read, so nothing of it counts" in printed
    assert "left out" not in printed


def test_show_names_the_parts_of_an_experiment_its_errors_and_its_test_and_untrained_scores(
    tmp_path: Path, evsys: Evsys
) -> None:
    leave(tmp_path, "x", {"a": [0.4], "b": [0.6]})
    path = tmp_path / "x.experiment_result.json"
    record = json.loads(path.read_text())
    for number, run in enumerate(record["runs"]):
        run["metrics"]["test/tools/pass@1"] = 0.25
        count = {"metric": "pass@1", "n_rollouts": 60, "n_errors": 20 * number}
        start = {"metric": "pass@1", "value": 0.125}
        run["evals"] = [
            {"split": "val", "name": "tools", "step": 0, "scores": [start]},
            {"split": "val", "name": "tools", "step": None, "scores": [count]},
        ]
    for run, rate in zip(record["config"]["runs"], [0.1, 1e-5], strict=True):
        run |= {
            "model": {"name": "tiny"}, "backend": {"kind": "local"},
            "data": {"path": "data/train.jsonl", "transforms": [{"kind": "dedupe"}]},
            "algorithm": {"kind": "sft", "params": {"learning_rate": rate, "batch_size": 16}},
        }  # fmt: skip
    path.write_text(json.dumps(record))
    lines = evsys("show", "x").splitlines()
    for line in [
        "model: tiny", "backend: local", "data: data/train.jsonl (dedupe)", "algorithm: sft",
        "params: batch_size=16, learning_rate=0.1 / 1e-05", "untrained: val/tools/pass@1 0.125",
    ]:  # fmt: skip
        assert line in lines
    arms = [line.strip() for line in lines if line.startswith("  ")]
    assert arms[0].startswith("a: completed, pass@1 0.400, test/tools/pass@1 0.250 [")
    assert arms[1].startswith("b: 20 of 60 rollouts errored; completed, pass@1 0.600, test/tools/pass@1 0.250 [")


def test_history_warns_of_a_benchmark_that_too_many_arms_were_chosen_on(tmp_path: Path, evsys: Evsys) -> None:
    leave(tmp_path, "x", {f"a{n}": [0.4] for n in range(24)})
    told = "val/tools pass@1 (tasks of val/tools): 24 arms of 1 experiment compared on it (budget 25)"
    assert f"selected on: {told}\n" in evsys("history")
    leave(tmp_path, "y", {"b": [0.4]})
    printed = evsys("history")
    assert (
        "warning: val/tools pass@1 (tasks of val/tools): 25 arms of 2 experiments compared on it (budget 25). The"
        in printed
    )
    [looks] = json.loads(evsys("history", "--json"))["benchmarks"]
    assert (looks["arms"], looks["experiments"], looks["spent"], looks["best_by_chance"]) == (25, 2, True, None)


@pytest.mark.parametrize("reason", ["no score for pass@1: invalid: all 6 rollouts errored; the first: 503", None])
def test_an_experiment_whose_rollouts_all_errored_says_so(tmp_path: Path, evsys: Evsys, reason: str | None) -> None:
    score = {"metric": "pass@1", "value": None, "n_tasks": 3, "n_rollouts": 6, "n_errors": 6}
    evals = [{"name": "tools", "split": "val", "scores": [score], "step": None}]
    runs = [{"run_id": "x/a", "status": "completed", "metrics": {"final_loss": 1.0}, "evals": evals}]
    arms = [{"arm": "a", "statuses": ["completed"], "scores": [], "why_unranked": reason}]
    leave(tmp_path, "x", {"a": [0.0]}, runs=runs, arms=arms)
    assert "no score (6 of 6 rollouts errored)" in evsys("history")
    assert "a: 6 of 6 rollouts errored; completed" in evsys("show", "x")
    context = evsys("context")
    assert f"- x: not scored: a ({reason or '6 of 6 rollouts errored'})" in context, "an open question"
    assert "no score by pass@1: 6 of 6 rollouts errored" in context, "what was tried"
    assert "can its scores be believed" not in context, "there are none"
    [arm] = json.loads(evsys("history", "--json"))["experiments"][0]["arms"]
    assert (arm["n_errors"], arm["n_rollouts"], arm["scores"]) == (6, 6, [])


def test_an_arm_without_a_score_is_named_with_its_reason_whatever_it_is(tmp_path: Path, evsys: Evsys) -> None:
    reason = "no score for pass@1: tools/tasks.jsonl is gone"
    arms = [{"arm": "a", "statuses": ["completed"], "scores": [], "why_unranked": reason}]
    leave(tmp_path, "x", {"a": [0.0]}, runs=[{"run_id": "x/a", "status": "completed"}], arms=arms)
    assert "  no score  " in evsys("history") and f"not scored: a ({reason})" in evsys("context")
