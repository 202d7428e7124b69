"""Test tasks that take part in choosing are refused, and where that is allowed admitted."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.checks import test_selection
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.eval.benchmark import BenchmarkLoader

WORDS = [
    f"{size} {colour} {thing}" for size in ("big", "small") for colour in ("red", "blue") for thing in ("cup", "hat")
]
SFT = {
    "name": "a",
    "data": {"path": "rows.jsonl"},
    "model": {"name": "m"},
    "algorithm": {"kind": "sft"},
    "backend": {"kind": "mock"},
}
GRID = {"kind": "grid", "space": {"algorithm.params.learning_rate": [1e-3, 1e-4]}}


def find_test_selections(config):
    return test_selection.find_test_selections(config, BenchmarkLoader(config))


def overlap_problems(config):
    return test_selection.overlap_problems(config, BenchmarkLoader(config))


def overlap_warnings(config):
    return test_selection.overlap_warnings(config, BenchmarkLoader(config))


@pytest.fixture
def config(tmp_path):
    """A config whose benchmarks `val/dev` and `test/exam` have these tasks."""

    def written(name, words):
        (tmp_path / name).mkdir(exist_ok=True)
        plan = {"kind": "in_process", "fn_name": "exact_match"}
        rows = [
            {"task_id": f"{name}{n}", "instruction": f"Say {word}", "verifier": {**plan, "expected": word}}
            for n, word in enumerate(words)
        ]
        (tmp_path / name / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def made(dev=WORDS[:4], exam=WORDS[4:], *, limit=None, runs=None, search=None, **metadata):
        written("dev", dev)
        written("exam", exam)
        entries = [{"name": "dev", "path": "dev", "split": "val"}, {"name": "exam", "path": "exam"}]
        entries[0] |= {"limit": limit} if limit else {}
        top = {"base_run": SFT, "search": GRID | search} if search else {"runs": runs or [SFT, SFT | {"name": "b"}]}
        told = {"benchmark": entries, "success_metric": "val.pass@1", **metadata}
        data = {"name": "e", **top, "metadata": told}
        return parse_config(Document(label="config", data=json.loads(json.dumps(data))), folder=tmp_path)

    return made


def problems(config):
    return [(problem.path, problem.message) for problem in overlap_problems(config)]


def test_benchmarks_with_tasks_of_their_own_are_taken(config):
    assert problems(config()) == [] and find_test_selections(config()) == [] and overlap_warnings(config()) == []


def test_a_validation_benchmark_with_the_tasks_of_the_test_set_is_refused(config):
    [(path, message)] = problems(config(exam=WORDS[:4]))
    assert path == "metadata.benchmark[0]"
    assert message.startswith(
        "4 of the 4 tasks of val/dev, which selects, are among the 4 of test/exam (metadata.benchmark[1]);"
    )
    assert "`metadata.allow_test_selection: true`" in message


def test_where_that_is_allowed_it_is_admitted(config):
    allowed = config(exam=WORDS[:4], allow_test_selection=True)
    assert problems(allowed) == []
    [one] = find_test_selections(allowed)
    assert (one.by, one.test, one.shared) == ("metadata.benchmark[0]", ["test/exam"], 4)
    assert "(allow_test_selection): test/exam takes part in what val/dev chooses" in one.text


def test_a_few_shared_tasks_are_said_and_not_refused(config):
    few = config(dev=WORDS[:5], exam=WORDS[4:])
    assert problems(few) == []
    [warning] = overlap_warnings(few)
    assert warning.message.startswith("1 of the 5 tasks of val/dev, which selects, is among the 4 of test/exam")
    [one] = find_test_selections(few)
    assert one.shared == 1 and "allow_test_selection" not in one.text


def test_only_tasks_that_are_asked_count(config):
    assert problems(config(dev=WORDS, exam=WORDS[4:], limit=4)) == []
    assert problems(config(dev=WORDS, exam=WORDS[4:], limit=6)) == [], "2 of 4"
    assert problems(config(dev=WORDS, exam=WORDS[4:], limit=7)) != []


@pytest.mark.parametrize(
    ("objective", "success", "by"),
    [
        ("test.pass@1", "val.pass@1", ["search.objective"]),
        ("test/exam/pass@1", None, ["metadata.success_metric", "search.objective"]),
        (None, "test.pass@1", ["metadata.success_metric", "search.objective"]),
        ("val.pass@1", "test.pass@1", ["metadata.success_metric"]),
        ("val.pass@1", "pass@1", []),
    ],
)
def test_a_search_by_test_scores_is_admitted(config, objective, success, by):
    search = {"objective": objective} if objective else {"seed": 1}
    found = find_test_selections(config(search=search, success_metric=success, allow_test_selection=True))
    assert [one.by for one in found] == by
    assert all(one.test == ["test/exam/pass@1"] and "test scores, test/exam/pass@1" in one.text for one in found)


def test_arms_that_are_compared_by_test_scores_are_admitted_where_they_pick(config):
    assert [
        one.by for one in find_test_selections(config(success_metric="test.pass@1", allow_test_selection=True))
    ] == ["metadata.success_metric"]
    assert find_test_selections(config(success_metric="test.pass@1")) == [], "without leave nothing is picked"
    assert find_test_selections(config(runs=[SFT], success_metric="test.pass@1", allow_test_selection=True)) == []


@pytest.mark.parametrize(("success", "refused"), [("eval.exact_match", True), ("val.pass@1", False)])
def test_rows_to_ask_that_are_the_test_set_are_refused_where_they_select(config, tmp_path, success, refused):
    rows = [{"prompt": f"Say {word}", "expected": word} for word in WORDS[4:]]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"eval": {"enabled": True, "metrics": [{"kind": "exact_match"}], "eval_data": {"path": "asked.jsonl"}}}
    found = problems(config(runs=[SFT | asked, SFT | asked | {"name": "b"}], success_metric=success))
    assert [path for path, _ in found] == (["runs[1].eval.eval_data"] if refused else [])
    assert not refused or "4 of the 4 tasks of eval.eval_data" in found[0][1]
