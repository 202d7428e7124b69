"""`evsys rollouts`, `evsys clean`, and what a sweep leaves on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from evsys_sdk.cli.main import main
from evsys_sdk.errors import EvsysError
from evsys_sdk.operations.rollouts import WantedRollouts, _refuse_unknown
from evsys_sdk.record.layout import hold
from evsys_sdk.record.processes import lock_of
from evsys_sdk.training.checkpoints import CheckpointManifest

Evsys = Callable[..., str]


@pytest.fixture
def evsys(project: Any, capsys: pytest.CaptureFixture[str]) -> Evsys:
    """Runs a verb in this process and gives what it printed to stdout; `code` is the exit code to expect."""

    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return run


def sweep(project: Any, minimal_run: Callable[..., dict[str, Any]], rates: list[float], **entry: Any) -> Path:
    project.write_tasks()
    base = minimal_run(eval__enabled=False, algorithm__params__batch_size=8)
    bench = {"name": "tools", "path": "bench/tasks.jsonl", "split": "val", "run_every": 2, "baseline": True, **entry}
    path = project.root / "config.yaml"
    config = {
        "version": 1,
        "name": "sweep",
        "output_dir": "./outputs",
        "metadata": {"benchmark": [bench], "success_metric": "val/tools/pass@1"},
        "base_run": base,
        "matrix": {"axes": {"algorithm.params.learning_rate": rates}},
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_weights_that_were_saved_only_to_be_scored_are_deleted_by_the_run(project, minimal_run, evsys):
    evsys("run", str(sweep(project, minimal_run, [1e-4, 1e-2])), "--quiet")
    for run_dir in (project.root / "outputs").glob("r0__*"):
        manifest = CheckpointManifest.load(run_dir / "checkpoints.json")
        kept = {Path(path).name for found in manifest.checkpoints for path in (found.state, found.sampler)}
        assert {path.name for path in (run_dir / "weights").iterdir()} == kept
        assert len(kept) == 2
    assert evsys("clean") == "nothing to remove\n"


def test_the_best_weights_of_a_run_are_kept_with_those_of_every_evaluated_step(project, minimal_run, evsys):
    path = sweep(project, minimal_run, [1e-3])
    config = yaml.safe_load(path.read_text())
    config["base_run"]["algorithm"]["params"]["best_by"] = "val/tools/pass@1"
    path.write_text(yaml.safe_dump(config))
    evsys("run", str(path), "--quiet")
    run_dir = next((project.root / "outputs").glob("r0__*"))
    checkpoints = CheckpointManifest.load(run_dir / "checkpoints.json").checkpoints
    assert len(checkpoints) > 3 and all(found.is_there for found in checkpoints)
    evsys("clean", "--yes")
    assert all(found.is_there for found in checkpoints)


def test_rollouts_are_readable_without_any_logger(project, minimal_run, evsys):
    evsys("run", str(sweep(project, minimal_run, [1e-5, 1e-2])), "--quiet")
    assert not list((project.root / "outputs").glob("*/logs/*/rollouts.jsonl"))
    (project.root / "bench/tasks.jsonl").unlink()  # what was asked is in the record too
    told = json.loads(evsys("rollouts", "sweep", "--json", "--limit", "0"))
    assert told["n_rollouts"] == len(told["rollouts"]) == 8
    solved = [one for one in told["rollouts"] if one["run"] == "r0__learning_rate0p01" and one["task_id"] == "red"]
    assert [(one["answer"], one["expected"], one["reward"], one["failed"]) for one in solved] == [
        ("red", "red", 1, False)
    ]
    assert solved[0]["messages"] == [{"role": "user", "text": "say red"}]
    text = evsys("rollouts", "--arm", "r0__learning_rate0p01", "--task", "red")
    assert "prompt:    say red\nexpected:  red\nanswer:    red\n" in text and "1 rollout, 0 failed" in text
    failed = json.loads(evsys("rollouts", "sweep", "--failed", "--json", "--limit", "0"))["rollouts"]
    assert {one["run"] for one in failed} == {"r0__learning_rate1e-05"}
    none_failed = evsys("rollouts", "sweep", "--failed", "--arm", "r0__learning_rate0p01")
    assert none_failed.endswith("4 rollouts, 0 failed\n")
    untrained = json.loads(evsys("rollouts", "sweep/r0__learning_rate0p01", "--step", "0", "--json"))["rollouts"]
    assert {(one["step"], one["run"]) for one in untrained} == {(0, "r0__learning_rate0p01")}


def test_a_diff_shows_the_tasks_on_which_two_arms_differ(project, minimal_run, evsys):
    evsys("run", str(sweep(project, minimal_run, [1e-5, 1e-2])), "--quiet")
    for names in ((), ("r0__learning_rate1e-05", "r0__learning_rate0p01")):
        told = json.loads(evsys("rollouts", "sweep", "--json", "--diff", *names))
        assert (told["left"], told["right"]) == ("r0__learning_rate1e-05", "r0__learning_rate0p01")
        assert (told["n_tasks"], told["n_different"], told["n_better"], told["n_worse"]) == (4, 4, 4, 0)
    before = json.loads(evsys("rollouts", "r0__learning_rate0p01", "--json", "--diff"))
    assert (before["left"], before["right"]) == ("untrained", "r0__learning_rate0p01")
    assert {one["left"][0]["step"] for one in before["tasks"]} == {0}
    text = evsys("rollouts", "sweep", "--diff", "--task", "red")
    assert "-- r0__learning_rate0p01: reward 1\nanswer:    red\n" in text and "1 of 1 tasks differ" in text
    assert "not an arm of this record" in evsys("rollouts", "sweep", "--diff", "nope", code=1)


def test_a_list_of_tasks_that_is_cut_says_how_many_there_are():
    views: Any = [SimpleNamespace(task_id=f"t{n:02}", arm="a", run="r", benchmark="val/b") for n in range(23)]
    with pytest.raises(EvsysError, match=r"known: t00, .*, t19 and 3 more$"):
        _refuse_unknown(views, WantedRollouts(tasks=["zebra"]))


def test_what_the_record_does_not_have_is_refused_by_name(project, minimal_run, evsys):
    evsys("run", str(sweep(project, minimal_run, [1e-2])), "--quiet")
    assert "'redd' is not a task; closest: red" in evsys("rollouts", "--task", "redd", code=1)
    assert "no evaluation at this step; there are: 0, 2" in evsys("rollouts", "--step", "3", code=1)
    assert "no training rollouts" in evsys("rollouts", "--train", code=1)
    assert "there is no experiment 'nope'" in evsys("rollouts", "nope", code=1)


def test_clean_removes_nothing_without_yes_and_never_what_a_record_names(project, minimal_run, evsys):
    evsys("run", str(sweep(project, minimal_run, [1e-2])), "--quiet")
    evsys("run", str(project.root / "config.yaml"), "--quiet", "--fresh")
    evsys("run", str(project.root / "config.yaml"), "--quiet", "--dry")
    run_dir = next((project.root / "outputs").glob("r0__*"))
    named, unnamed = run_dir / "weights/named-abc.sampler.npz", run_dir / "weights/left-abc.sampler.npz"
    for path in (named, unnamed):
        path.write_bytes(b"x" * 1000)
    other = project.root / "configs/other.yaml"
    other.parent.mkdir()
    other.write_text(f"run: {{model: {{load_checkpoint_path: outputs/{run_dir.name}/weights/{named.name}}}}}\n")
    before = {path: path.stat().st_size for path in project.root.rglob("*") if path.is_file()}

    told = json.loads(evsys("clean", "--json"))
    listed = {Path(one["path"]) for one in told["leftovers"]}
    assert listed == {unnamed, run_dir / "attempts/1/weights", project.root / "outputs/dry"}
    assert told["bytes"] == sum(
        size for path, size in before.items() if any(p in (path, *path.parents) for p in listed)
    )
    assert "Nothing was removed" in evsys("clean")
    assert all(path.exists() for path in before)

    assert "removed: 3 items" in evsys("clean", "--yes")
    left = {path for path in before if path.exists()}
    assert left == {path for path in before if not any(one in (path, *path.parents) for one in listed)}
    assert evsys("run", str(project.root / "config.yaml"), "--quiet")  # still a finished experiment
    assert json.loads(evsys("rollouts", "--json"))["n_rollouts"] == 4


def test_clean_keeps_all_weights_of_a_run_that_can_be_resumed(project, minimal_run, evsys):
    path = sweep(project, minimal_run, [1e-2])
    config = yaml.safe_load(path.read_text())
    config["base_run"]["backend"] = {"kind": "mock", "params": {"fail_at_step": 5}}
    config["base_run"]["algorithm"]["params"]["save_every"] = 2
    path.write_text(yaml.safe_dump(config))
    evsys("run", str(path), "--quiet", code=2)
    weights = sorted(os.listdir(next((project.root / "outputs").glob("r0__*")) / "weights"))
    assert weights
    assert evsys("clean", "--yes") == "nothing to remove\n"
    assert sorted(os.listdir(next((project.root / "outputs").glob("r0__*")) / "weights")) == weights


def test_clean_refuses_a_running_experiment(project, minimal_run, evsys):
    evsys("run", str(sweep(project, minimal_run, [1e-2])), "--quiet")
    run_dir = next((project.root / "outputs").glob("r0__*"))
    (run_dir / "weights/left-abc.sampler.npz").write_bytes(b"x")
    with hold(lock_of(project.root / "outputs/sweep.experiment_result.json"), "the experiment"):
        assert "sweep is running" in evsys("clean", "sweep", "--yes", code=1)
        assert json.loads(evsys("clean", "--yes", "--json"))["running"] == ["sweep"]
    assert (run_dir / "weights/left-abc.sampler.npz").exists()


def test_quiet_leaves_stderr_empty_and_prints_the_conclusion(project, minimal_run, capfd):
    path = sweep(project, minimal_run, [1e-5, 1e-2])
    assert main(["run", str(path), "--quiet"]) == 0
    told = capfd.readouterr()
    assert told.err == ""
    assert "Best arm" in told.out and "record: " in told.out and "loss" not in told.out


def test_show_without_a_name_is_the_newest_experiment(project, minimal_run, evsys):
    evsys("run", str(sweep(project, minimal_run, [1e-2])), "--quiet")
    assert evsys("show").startswith("sweep: completed")


def test_names_of_experiments_are_completed(project, minimal_run, evsys):
    evsys("run", str(sweep(project, minimal_run, [1e-2])), "--quiet")
    for verb in ("show", "compare", "status", "logs", "stop", "clean"):
        assert evsys("completion", "words", verb, "sw").split() == ["sweep"]
    assert evsys("completion", "words", "rollouts", "sweep/").split() == ["sweep/r0__learning_rate0p01"]
    assert evsys("completion", "words", "list", "alg").split() == ["algorithms"]


def test_list_takes_a_registry_in_singular_and_plural(evsys):
    one, many = (json.loads(evsys("list", word, "--json")) for word in ("algorithm", "algorithms"))
    assert one == many and list(one) == ["algorithms"] and "sft" in one["algorithms"]
    assert "names two registries" in evsys("list", "algorithms", "--kind", "backends", code=1)


def test_schema_lists_what_it_can_show_and_has_a_table(evsys):
    assert "sft" in json.loads(evsys("schema"))["algorithm"]
    assert json.loads(evsys("schema", "algorithm", "sft"))["properties"]["batch_size"]["default"] == 8
    table = evsys("schema", "algorithm", "sft", "--table")
    row = next(line for line in table.splitlines() if line.startswith("batch_size"))
    assert row.split()[:4] == ["batch_size", "integer", ">=", "1"] and row.endswith(
        "Rows per forward/backward call. [tunable: 1 to 64, log]"
    )
    config = evsys("schema", "config", "--table")
    assert "run.algorithm.kind" in config and "metadata.benchmark[].run_every" in config
