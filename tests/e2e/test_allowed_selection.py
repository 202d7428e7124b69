"""Choosing by the test set is refused before anything is spent; where it is allowed, every record admits it."""

from __future__ import annotations

import json

import pytest

ADMITTED = "only tasks that have not been looked at can say how good what was chosen is."


@pytest.fixture
def two_arms(project, minimal_run):
    """Two arms and a folder of tasks that is a validation and a test benchmark at once."""
    project.write_tasks("bench/tasks.jsonl")
    runs = [minimal_run(name=name, eval={}) for name in ("a", "b")]
    entries = [{"name": name, "path": "bench", "split": name, "max_tokens": 4} for name in ("val", "test")]
    return lambda **metadata: project.config(
        run=None, runs=runs, metadata={"benchmark": entries, "success_metric": "val.pass@1", **metadata}
    )


def records(project, name="hello_sft"):
    folder = project.root / "outputs"
    return json.loads((folder / f"{name}.experiment_result.json").read_text()), (
        folder / f"{name}.experiment.md"
    ).read_text()


def test_the_test_set_under_another_label_is_refused(project, two_arms):
    for command in (["run"], ["validate", "--deep"]):
        done = project.evsys(*command, two_arms())
        assert done.returncode == 1 and not (project.root / "outputs").exists()
        assert "metadata.benchmark[0]   4 of the 4 tasks of val/val, which selects, are among the 4" in done.stderr


def test_where_it_is_allowed_the_conclusion_the_page_and_the_record_admit_it(project, two_arms):
    done = project.evsys("run", two_arms(allow_test_selection=True), "--steps", "1")
    assert done.returncode == 0, done.stderr
    record, page = records(project)
    text = "4 of the 4 tasks of val/val, which selects, are among the 4 of test/test (allow_test_selection): "
    assert text in done.stdout and text in record["conclusion"] and page.count(text) >= 2
    assert "took no part" not in page and ADMITTED in page
    assert [one["by"] for one in record["test_selection"]] == ["metadata.benchmark[0]"]
    assert not any("allow_test" in path for path in record["unread_settings"]) and any(
        text in warning for warning in record["warnings"]
    )


def test_a_search_by_test_scores_is_admitted_though_arms_are_compared_by_others(project, minimal_run):
    project.write_tasks("bench/tasks.jsonl")
    plan = {"kind": "in_process", "fn_name": "exact_match", "expected": "x"}
    project.write_rows("dev/tasks.jsonl", [{"task_id": "d", "instruction": "say something else", "verifier": plan}])
    entries = [{"name": name, "path": path, "split": name} for name, path in (("val", "dev"), ("test", "bench"))]
    path = project.config(
        run=None,
        base_run=minimal_run(eval={}),
        search={"kind": "grid", "space": {"seed": [1, 2]}, "objective": "test.pass@1"},
        metadata={"benchmark": entries, "success_metric": "val.pass@1", "allow_test_selection": True},
    )
    done = project.evsys("run", path, "--steps", "1")
    assert done.returncode == 0, done.stderr
    record, page = records(project)
    text = f"Trials were chosen by test scores, test/pass@1 (allow_test_selection): {ADMITTED}"
    assert text in record["conclusion"] and text in page and "took no part" not in page
    assert record["test_selection"][0]["by"] == "search.objective" and not any(
        "allow_test" in path for path in record["unread_settings"]
    )


@pytest.fixture
def asked_by_own_code(project, minimal_run):
    """Arms whose `eval` asks the test set, through a transform that nothing calls before the run."""
    (project.root / "mine.py").write_text(
        "from evsys_sdk import register_transform\n\n@register_transform('as_it_is')\nclass AsItIs:\n"
        "    name = 'as_it_is'\n    def __call__(self, rows):\n        return rows\n"
    )
    project.write_tasks("bench/tasks.jsonl")
    words = ("red", "green", "blue", "black")
    project.write_rows("data/asked.jsonl", [{"prompt": f"say {word}", "expected": word} for word in words])
    project.write_rows("data/train.jsonl", [{"prompt": f"sing {n}", "completion": "la"} for n in "abcd"])
    data = {"path": "data/asked.jsonl", "transforms": [{"kind": "as_it_is"}]}
    asked = {"enabled": True, "metrics": [{"kind": "exact_match"}], "eval_data": data}
    metadata = {"benchmark": [{"name": "exam", "path": "bench"}], "success_metric": "eval.exact_match"}
    return project.config(
        run=None, runs=[minimal_run(name=name, eval=asked) for name in "ab"], metadata=metadata, imports=["mine"]
    )


def test_rows_to_ask_that_only_the_run_can_read_stop_it_before_training(project, asked_by_own_code):
    assert project.evsys("validate", "--deep", asked_by_own_code).returncode == 0
    done = project.evsys("run", asked_by_own_code, "--steps", "1")
    assert done.returncode == 2
    found = project.record("a")
    assert found["status"] == "failed" and "4 of the 4 tasks of eval.eval_data" in found["error"]
    assert "nothing was trained" in found["error"] and not found["metrics"]
