"""Every run compares the rows it trains on with every benchmark it can know, and says what it found."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.experiment.experiment import Experiment, RunOptions

TASKS = [
    "Which of the two boats in the harbour was painted first this spring, and why?",
    "How many of the 14 lamps along the pier are still broken after the storm?",
    "Write a polite note to the harbour master about the noise at night.",
]
AS_IT_IS = """
from evsys_sdk import register_transform

@register_transform("as_it_is")
class AsItIs:
    name = "as_it_is"

    def __call__(self, rows):
        return rows
"""
CLEAN = [{"prompt": f"say {word}", "completion": word} for word in ("red", "green", "blue", "black")]


@pytest.fixture
def bench(project):
    """A benchmark of three tasks at `bench/`, and rows that hold none of them."""
    plan = {"kind": "in_process", "fn_name": "exact_match", "expected": "x"}
    rows = [{"task_id": f"t{n}", "instruction": text, "verifier": plan} for n, text in enumerate(TASKS)]
    project.write_rows("bench/tasks.jsonl", rows)
    project.write_rows("data/train.jsonl", CLEAN)
    return {"benchmark": [{"name": "harbour", "path": "bench", "max_tokens": 4}]}


def leak(project, *texts, file="data/train.jsonl"):
    project.write_rows(file, CLEAN + [{"prompt": text, "completion": "x"} for text in texts])


def record(project, run="r0"):
    return json.loads((project.root / "outputs" / run / "run_result.json").read_text())


def run(project, config, code=0):
    done = project.evsys("run", config, "--steps", "1")
    assert done.returncode == code, done.stderr
    return done


def test_a_copied_task_is_in_the_record_the_output_and_the_conclusion(project, bench):
    leak(project, TASKS[0], TASKS[1].replace("14", "15").upper())
    done = run(project, project.config(metadata=bench))
    text = "2 of 3 test/harbour tasks appear in 2 of 6 training rows (1 verbatim, 1 with other numbers; first: task "
    assert f"leakage: {text}" in done.stderr, "said before anything is trained"
    assert done.stdout.count(text) == 1, "in the conclusion, and not once per run besides"
    assert f"leakage: {text}" in done.stderr
    assert f"Leakage: {text}" in done.stdout
    found = record(project)
    assert [(audit["benchmark"], audit["place"], audit["tasks"]) for audit in found["leakage"]] == [
        ("test/harbour", "data", 2)
    ]
    assert [(one["task_id"], one["row"], one["kind"]) for one in found["leakage"][0]["leaks"]] == [
        ("t0", 4, "exact"),
        ("t1", 5, "numbers"),
    ]
    again = run(project, project.config(metadata=bench))
    assert f"Leakage: {text}" in again.stdout, "a finished run that is not run again still tells"


def test_clean_rows_are_recorded_as_such_and_not_spoken_of(project, bench):
    done = run(project, project.config(metadata=bench))
    assert "eakage" not in done.stdout + done.stderr
    assert [(audit["tasks"], audit["n_rows"]) for audit in record(project)["leakage"]] == [(0, 4)]


@pytest.fixture
def own_code(project, minimal_run):
    """A run whose rows pass through a transform of the user's, which nothing calls before the run does."""
    (project.root / "mine.py").write_text(AS_IT_IS)
    data = {"path": "data/train.jsonl", "transforms": [{"kind": "as_it_is"}, {"kind": "jsonl_to_chat"}]}
    return {"run": minimal_run(data=data), "imports": ["mine"]}


def test_error_refuses_rows_that_are_at_hand_before_anything_else(project, bench):
    leak(project, TASKS[2])
    path = project.config(metadata=bench, leakage="error")
    for command in (["run"], ["validate", "--deep"]):
        done = project.evsys(*command, path)
        assert done.returncode == 1 and not (project.root / "outputs").exists()
        assert "run.data" in done.stderr and "(1 of test/harbour)" in done.stderr
        assert "bench/tasks.jsonl:3) in row 4 verbatim" in done.stderr and "evsys data leakage" in done.stderr


def test_error_refuses_a_task_in_many_rows_with_other_numbers(project, bench):
    leak(project, *(TASKS[1].replace("14", str(n)) for n in range(100, 400)))
    done = project.evsys("run", project.config(metadata=bench, leakage="error"))
    assert done.returncode == 1 and "(1 of test/harbour)" in done.stderr and "with other numbers" in done.stderr


def test_error_stops_a_run_before_training_and_leaves_a_record(project, bench, own_code):
    leak(project, TASKS[2])
    done = run(project, project.config(metadata=bench, leakage="error", **own_code), code=2)
    found = record(project)
    assert found["status"] == "failed" and "nothing was trained" in found["error"]
    assert "1 of test/harbour" in found["error"] and found["leakage"][0]["tasks"] == 1
    assert not found["metrics"] and not found["artifacts"] and "evsys data leakage" in done.stdout


def test_off_compares_nothing(project, bench):
    leak(project, TASKS[2])
    done = run(project, project.config(metadata=bench, leakage="off"))
    assert "eakage" not in done.stdout + done.stderr and record(project)["leakage"] == []
    path = project.config(metadata=bench)
    path.write_text(path.read_text() + "\nleakage: off\n")  # which YAML reads as false
    assert project.evsys("validate", path).returncode == 0


def test_a_benchmark_of_the_workspace_counts_too(project, bench):
    (project.root / ".evsys").mkdir()
    added = project.evsys("data", "add", "bench", "--name", "harbour", "--benchmark")
    assert added.returncode == 0, added.stderr
    leak(project, TASKS[0])
    done = run(project, project.config())
    assert "1 of 3 harbour-v1-" in done.stdout and "(workspace)" in done.stdout
    both = run(project, project.config(metadata=bench, output_dir="./others"))
    assert "(workspace)" not in both.stdout, "the same tasks are compared once, under the experiment's own name"


def test_every_stage_of_a_chain_is_compared(project, bench, minimal_run):
    leak(project, TASKS[1], file="data/second.jsonl")
    chat = [{"kind": "jsonl_to_chat"}]
    stages = [
        {"name": name, "data": {"path": f"data/{file}.jsonl", "transforms": chat}}
        for name, file in (("first", "train"), ("then", "second"))
    ]
    chain = minimal_run(continual={"stages": stages})
    del chain["data"]
    done = run(project, project.config(run=chain, metadata=bench))
    places = {audit["place"]: audit["tasks"] for audit in record(project)["leakage"]}
    assert places == {"continual.stages[0].data": 0, "continual.stages[1].data": 1}
    assert "continual.stages[1].data" in done.stdout


def test_the_phases_of_a_combo_are_compared_before_the_first_trains(project, bench, minimal_run):
    leak(project, TASKS[1], file="data/second.jsonl")
    data = {"path": "data/second.jsonl", "transforms": [{"kind": "jsonl_to_chat"}]}
    sft = {"kind": "sft", "params": {"num_epochs": 1}}
    combo = minimal_run(
        algorithm={
            "kind": "combo",
            "params": {"phases": [{"name": "a", "algorithm": sft}, {"name": "b", "algorithm": sft, "data": data}]},
        }
    )
    done = run(project, project.config(run=combo, metadata=bench, leakage="error"), code=1)
    assert "run.algorithm.params.phases[1].data" in done.stderr and "t1" in done.stderr


def test_arms_and_seeds_on_the_same_rows_are_compared_once(project, bench):
    leak(project, TASKS[0])
    done = run(project, project.config(metadata=bench, n_repeats=3, max_concurrent_arms=3))
    assert done.stderr.count("WARNING evsys_sdk.contamination.audit") == 1
    assert all(record(project, f"r0__s{seed}")["leakage"][0]["tasks"] == 1 for seed in (42, 43, 44))
    assert done.stdout.count("Leakage: 1 of 3 ") == 1


def test_validate_deep_warns_where_the_rows_are_at_hand(project, bench):
    leak(project, TASKS[0])
    path = project.config(metadata=bench)
    done = project.evsys("validate", "--deep", path)
    assert done.returncode == 0 and "leakage: 1 of 3 test/harbour tasks appears" in done.stderr
    told = json.loads(project.evsys("validate", "--deep", "--json", path).stdout)
    # The first is about the config of all these tests: the mock reads no renderer_name.
    expected = [("run.model.renderer_name", False), ("run.data", True)]
    assert [(one["path"], "leakage" in one["message"]) for one in told["warnings"]] == expected
    assert "leakage" in project.evsys("validate", path).stderr, "deep is the default"
    assert "leakage" not in project.evsys("validate", "--shallow", path).stderr


def test_the_command_compares_any_rows_with_any_benchmark(project, bench):
    leak(project, TASKS[0].lower())
    found = project.evsys("data", "leakage", "data/train.jsonl", "bench", "--json")
    told = json.loads(found.stdout)
    assert found.returncode == 1 and not told["ok"] and told["kinds"] == {"normalised": 1}
    table = project.evsys("data", "leakage", "data/train.jsonl", "bench")
    assert table.returncode == 1 and "up to case, punctuation or spaces" in table.stdout
    leak(project)
    clean = project.evsys("data", "leakage", "data/train.jsonl", "bench")
    assert clean.returncode == 0 and clean.stdout == "no bench task found in 4 training rows\n"
    assert project.evsys("data", "leakage", "data/nothing.jsonl", "bench").returncode == 1


def test_the_rows_that_a_run_asks_afterwards_count_too(project, minimal_run):
    project.write_rows("data/asked.jsonl", [{"prompt": text, "completion": "x"} for text in TASKS])
    leak(project, TASKS[1].replace("14", "15"))
    asked = {"enabled": True, "metrics": [{"kind": "exact_match"}], "eval_data": {"path": "data/asked.jsonl"}}
    path = project.config(run=minimal_run(eval=asked))
    warned = project.evsys("validate", "--deep", path)
    assert warned.returncode == 0 and "1 of 3 eval.eval_data tasks appears" in warned.stderr
    run(project, path)
    [audit] = record(project)["leakage"]
    assert (audit["benchmark"], audit["tasks"], audit["kinds"]) == ("eval.eval_data", 1, {"numbers": 1})
    assert audit["leaks"][0]["place"].endswith("data/asked.jsonl, row 1")


@pytest.mark.parametrize("row", [{"prompt": ["a", "b"], "expected": "x"}, {"messages": ["hi"], "expected": "x"}])
def test_rows_to_ask_that_are_odd_are_a_warning_and_not_the_end_of_the_run(project, minimal_run, row):
    project.write_rows("data/asked.jsonl", [row])
    asked = {"enabled": True, "metrics": [{"kind": "exact_match"}], "eval_data": {"path": "data/asked.jsonl"}}
    path = project.config(run=minimal_run(eval=asked))
    assert "Traceback" not in project.evsys("validate", "--deep", path).stderr
    project.evsys("run", path, "--steps", "1")
    found = record(project)
    assert found["status"] == "completed" and any("eval.eval_data cannot be read" in text for text in found["warnings"])


def test_the_benchmark_is_read_anew_when_an_experiment_is_run_again(project, bench, monkeypatch):
    monkeypatch.chdir(project.root)
    experiment = Experiment.from_yaml(project.config(metadata=bench))
    experiment.run(RunOptions(max_steps=1))
    plan = {"kind": "in_process", "fn_name": "exact_match", "expected": "x"}
    tasks = [{"task_id": str(n), "instruction": text, "verifier": plan} for n, text in enumerate([*TASKS, "say red"])]
    project.write_rows("bench/tasks.jsonl", tasks)
    result = experiment.run(RunOptions(max_steps=1, fresh=True))
    assert [audit["n_tasks"] for audit in result.runs[0].leakage] == [4]


def test_rows_from_the_template_of_the_tasks_are_spoken_of_but_are_no_leak(project):
    def made(first, last):
        numbers = [(n % 97, n // 7) for n in range(first, last)]
        return [f"Tom has {a} apples and buys {b} more. How many apples does he have?" for a, b in numbers]

    plan = {"kind": "in_process", "fn_name": "exact_match", "expected": "x"}
    tasks = [{"task_id": f"t{n}", "instruction": text, "verifier": plan} for n, text in enumerate(made(0, 50))]
    project.write_rows("bench/tasks.jsonl", tasks)
    project.write_rows("data/train.jsonl", [{"prompt": text, "completion": "x"} for text in made(1000, 1400)])
    benchmark = {"benchmark": [{"name": "sums", "path": "bench", "max_tokens": 4}]}
    done = run(project, project.config(metadata=benchmark, leakage="error"))
    assert "Not counted as leakage: " in done.stdout and " share a template with " in done.stdout
    assert record(project)["leakage"][0]["tasks"] == 0
