"""A budget is a hard stop: what was done until then is in the record, and a larger one goes on from there."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def sweep(project, minimal_run):
    def config(budget, **top):
        runs = [
            minimal_run(name=name, seed=seed, algorithm__params={"max_steps": 10, "batch_size": 4})
            for seed, name in enumerate(("first", "second", "third"))
        ]
        return project.config(run=None, runs=runs, **({"budget": budget} if budget else {}), **top)

    return config


def _run(project, path, *flags):
    done = project.evsys("run", path, "--json", *flags)
    summary = json.loads(done.stdout)
    return done.returncode, summary, [(run["status"], run["metrics"].get("steps")) for run in summary["runs"]]


def _steps(project, run):
    path = project.root / "outputs" / run / "logs/metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row["step"] for row in rows if "loss" in row]


def test_steps_end_with_the_budget_and_a_larger_one_resumes(project, sweep):
    code, summary, _ = _run(project, sweep({"steps": 13}))
    assert code == 2
    assert [len(_steps(project, run)) for run in ("first", "second", "third")] == [10, 3, 0]
    assert [run["status"] for run in summary["runs"]] == ["completed", "cancelled", "cancelled"]
    assert summary["runs"][1]["error"] == "the budget is spent: 13 of 13 steps"
    assert summary["runs"][2]["error"] == "not started: the budget is spent: 13 of 13 steps"
    assert summary["budget"]["spent"]["steps"] == 13
    _, again, _ = _run(project, sweep({"steps": 13}))
    assert again["budget"]["spent"]["steps"] == 13, "what an earlier process spent counts"
    code, summary, ends = _run(project, sweep({"steps": 30}))
    assert code == 0 and ends == [("completed", 10)] * 3
    assert _steps(project, "second") == list(range(1, 11)) and summary["budget"]["spent"]["steps"] == 30


def test_arms_at_once_do_not_overdraw_it(project, sweep):
    _, summary, _ = _run(project, sweep({"steps": 14}, max_concurrent_arms=3))
    assert summary["budget"]["spent"]["steps"] == 14
    assert sum(len(_steps(project, run)) for run in ("first", "second", "third")) == 14


@pytest.mark.parametrize(
    ("budget", "completed", "error"),
    [
        ({"trials": 1}, 1, "not started: the budget is spent: 1 of 1 trials"),
        ({"tokens": 1}, 0, "of 1 tokens"),
        ({"seconds": 1e-9}, 0, "of 1e-09 seconds"),
    ],
)
def test_every_limit_stops_with_a_record(project, sweep, budget, completed, error):
    code, summary, ends = _run(project, sweep(budget))
    assert code == 2 and [status for status, _ in ends].count("completed") == completed
    assert error in summary["runs"][-1]["error"]
    assert summary["budget"]["limits"] == budget


def test_the_tokens_of_every_phase_count(project, minimal_run):
    phase = {"algorithm": {"kind": "sft", "params": {"max_steps": 10, "batch_size": 4}}}
    run = minimal_run(algorithm={"kind": "combo", "params": {"phases": [phase, phase]}})
    whole = _run(project, project.config(run=run, output_dir="whole", budget={"tokens": 10**6}))[1]["budget"]["spent"]
    rows = project.metrics(folder="whole")
    assert whole["tokens"] == sum(value for row in rows for name, value in row.items() if name.endswith("/tokens")) > 0
    cut = project.config(run=run, output_dir="cut", budget={"tokens": whole["tokens"] // 2})
    code, summary, _ = _run(project, cut)
    assert code == 2 and f"of {whole['tokens'] // 2} tokens" in summary["runs"][0]["error"]


@pytest.mark.parametrize(
    ("budget", "spent"), [({"steps": 13, "tokens": 10**9}, "13 of 13 steps"), ({"trials": 1}, "1 of 1 trials")]
)
def test_status_says_to_raise_a_budget_that_is_spent(project, sweep, budget, spent):
    path = sweep(budget)
    project.evsys("run", path)
    [follows] = json.loads(project.evsys("status", "hello_sft", "--json", check=True).stdout)["next"]
    assert follows == f"evsys run {path}, with a larger budget: {spent} are spent"


def test_an_empty_budget_or_one_of_nothing_is_refused(project, sweep):
    for budget, told in (({"steps": 0}, "budget.steps"), ({"dollars": 3}, "budget.dollars")):
        refused = project.evsys("run", sweep(budget))
        assert refused.returncode == 1 and told in refused.stderr


def test_the_seconds_of_all_processes_count(project, sweep):
    _, first, _ = _run(project, sweep({"steps": 13, "seconds": 1000}))
    code, second, _ = _run(project, sweep({"steps": 30, "seconds": 1000}))
    spent = first["budget"]["spent"]["seconds"]
    assert code == 0 and second["budget"]["spent"]["seconds"] > spent > 0 and second["seconds"] > first["seconds"]
    told = json.loads((project.root / "outputs/hello_sft.experiment_result.json").read_text())
    assert told["seconds"] == second["seconds"]
    code, third, _ = _run(project, sweep({"steps": 60, "seconds": spent / 2}), "--fork")
    assert code == 0, third


LATE = """
import time
from evsys_sdk.registry import register_launcher
from evsys_sdk.experiment.launchers import LocalLauncher

@register_launcher("late_first")
class LateFirst(LocalLauncher):
    def execute(self, plan):
        time.sleep(0.5 if plan.run.name == "first" else 0)
        return super().execute(plan)
"""


def test_trials_go_to_the_runs_in_their_order_whichever_thread_is_first(project, sweep):
    (project.root / "late.py").write_text(LATE)
    top = {"imports": ["late"], "launcher": {"kind": "late_first"}, "max_concurrent_arms": 3}
    _, summary, ends = _run(project, sweep({"trials": 1}, **top))
    assert [status for status, _ in ends] == ["completed", "cancelled", "cancelled"]
    assert summary["budget"]["spent"]["trials"] == 1
    _, summary, ends = _run(project, sweep({"trials": 2}, **top))
    assert [status for status, _ in ends] == ["completed", "completed", "cancelled"], "the first needs no other trial"


def test_the_verdict_names_a_seed_that_was_not_started(project, minimal_run):
    project.write_tasks()
    entry = {"name": "colours", "path": "bench", "split": "val", "temperature": 0}
    metadata = {"benchmark": [entry], "success_metric": "val.pass@1"}
    run = minimal_run(algorithm__params={"max_steps": 2})
    path = project.config(run=run, n_repeats=2, budget={"trials": 1}, metadata=metadata)
    _, summary, _ = _run(project, path)
    assert "seed 43 without a score (not started: the budget is spent: 1 of 1 trials)" in summary["conclusion"]
