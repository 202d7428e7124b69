"""The examples that the published documents print, used as printed."""

from __future__ import annotations

import json
from textwrap import dedent

import pytest

DEDUPE = """
from pydantic import BaseModel
from evsys_sdk import register_transform

@register_transform("dedupe")
class Dedupe:
    name = "dedupe"
    class Config(BaseModel, extra="forbid"):
        key: str = "query"

    def __init__(self, **kw):
        self.cfg = self.Config(**kw)

    def __call__(self, rows):
        seen, out = set(), []
        for r in rows:
            if r.get(self.cfg.key) not in seen:
                seen.add(r.get(self.cfg.key)); out.append(r)
        return out
"""
COSINE_TOY = """
import math
from typing import ClassVar
from pydantic import BaseModel
from evsys_sdk import register_algorithm, RunContext, RunResult

@register_algorithm("cosine_toy")
class CosineToy:
    name: ClassVar[str] = "cosine_toy"

    class Config(BaseModel):
        amplitude: float = 1.0
        steps: int = 100

    def __init__(self, **params):
        self.cfg = self.Config(**params)   # validates run.algorithm.params

    def train(self, ctx: RunContext) -> RunResult:
        for step in range(self.cfg.steps):
            ctx.log_store.log_scalar("loss", math.cos(step), step)
        return RunResult(run_id=ctx.run_id, status="completed",
                         metrics={"final_loss": 0.5},
                         artifacts={"final_checkpoint": "..."})
"""
PASS_AT_2 = """
from typing import ClassVar, Sequence
from evsys_sdk import register_metric

@register_metric("pass@2")
class PassAt2:
    name: ClassVar[str] = "pass@2"          # the string you list in `metrics:`

    def compute(self, task_rewards: Sequence[Sequence[float]]) -> float:
        # task_rewards[i] = the rewards for task i's samples; reward >= 1.0 = a pass
        hits = sum(any(r >= 1.0 for r in task[:2]) for task in task_rewards)
        return hits / len(task_rewards)
"""


def test_the_dedupe_transform_of_002(project, minimal_run):
    (project.root / "my_transform.py").write_text(DEDUPE)
    project.write_rows("data/train.jsonl", [{"query": f"q{i % 3}", "tool_slug": f"T{i % 3}"} for i in range(12)])
    run = minimal_run()
    run["data"]["transforms"] = [
        {
            "kind": "jsonl_to_chat",
            "params": {"user_template": "Query: {query}", "assistant_template": "<answer>{tool_slug}</answer>"},
        },
        {"kind": "dedupe", "params": {"key": "query"}},
    ]
    path = project.config(run=run, imports=["my_transform"])
    done = project.evsys("run", path)
    assert done.returncode == 0, done.stderr
    (data,) = project.record()["environment"]["data"]
    assert (data["rows_read"], data["rows"]) == (12, 3)
    listed = project.evsys("list", "--kind", "transforms", "--config", path, check=True).stdout
    assert "[my_transform]" in listed, "the project's dedupe has taken the name"


def test_the_cosine_toy_algorithm_of_003(project, minimal_run):
    (project.root / "my_algorithm.py").write_text(COSINE_TOY)
    run = minimal_run(algorithm={"kind": "cosine_toy", "params": {"steps": 200}})
    del run["eval"]
    done = project.evsys("run", project.config(run=run, imports=["my_algorithm"]))
    assert done.returncode == 0, done.stderr
    assert project.record()["metrics"] == {"final_loss": 0.5}
    assert len(project.metrics()) == 200
    schema = project.evsys("schema", "algorithm", "cosine_toy", "--config", "config.yaml", check=True).stdout
    assert set(json.loads(schema)["properties"]) == {"amplitude", "steps"}


def test_a_setting_of_a_plain_config_that_nothing_reads_is_reported(project, minimal_run):
    (project.root / "my_algorithm.py").write_text(COSINE_TOY)
    run = minimal_run(algorithm={"kind": "cosine_toy", "params": {"steps": 3, "amplitude": 2.0}})
    del run["eval"], run["model"]["renderer_name"]
    path = project.config(run=run, imports=["my_algorithm"])
    project.evsys("run", path, check=True)
    assert project.record()["unread_settings"] == ["run.algorithm.params.amplitude"]
    strict = project.evsys("run", path, "--strict")
    assert strict.returncode == 1
    assert "run.algorithm.params.amplitude   unread setting" in strict.stderr and "config.yaml:" in strict.stderr


def test_the_pass_at_2_metric_of_002(project):
    (project.root / "my_metric.py").write_text(PASS_AT_2)
    project.write_tasks()
    entry = {"name": "colours", "path": "bench", "metrics": ["pass@2", "pass@1"], "num_samples": 4}
    done = project.evsys("run", project.config(metadata={"benchmark": entry}, imports=["my_metric"]))
    assert done.returncode == 0, done.stderr
    scores = {s["metric"]: s for s in project.record()["evals"][0]["scores"]}
    assert scores["pass@2"]["value"] == 1.0 and scores["pass@2"]["n_rollouts"] == 16


def test_a_src_package_beside_the_config_is_imported_by_itself(project, minimal_run):
    (project.root / "src").mkdir()
    (project.root / "src/__init__.py").write_text("from src import transforms\n")
    (project.root / "src/transforms.py").write_text(DEDUPE.replace('"dedupe"', '"my_dedupe"'))
    run = minimal_run()
    run["data"]["transforms"].append({"kind": "my_dedupe", "params": {"key": "prompt"}})
    done = project.evsys("run", project.config(run=run))
    assert done.returncode == 0, done.stderr
    assert project.record()["environment"]["data"][0]["rows"] == 6


def test_entry_points_of_003(project, minimal_run):
    """A package that declares `[project.entry-points."evsys_sdk.algorithms"] my_dpo = "my_pkg.algorithms:MyDPO"`."""
    (project.root / "site/my_pkg").mkdir(parents=True)
    (project.root / "site/my_pkg/__init__.py").write_text("")
    (project.root / "site/my_pkg/algorithms.py").write_text(
        dedent(
            """
            from evsys_sdk import RunResult

            class MyDPO:
                def train(self, ctx):
                    return RunResult(run_id=ctx.run_id, status="completed", metrics={"margin": 1.0})
            """
        )
    )
    info = project.root / "site/my_pkg-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-pkg\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[evsys_sdk.algorithms]\nmy_dpo = my_pkg.algorithms:MyDPO\n")
    run = minimal_run(algorithm={"kind": "my_dpo"})
    del run["eval"]
    done = project.evsys("run", project.config(run=run), PYTHONPATH=str(project.root / "site"))
    assert done.returncode == 0, done.stderr
    assert project.record()["metrics"] == {"margin": 1.0}


@pytest.mark.parametrize("form", ["inside", "beside"])
def test_both_matrix_forms_run(project, minimal_run, form):
    base = {key: value for key, value in minimal_run().items() if key not in ("eval", "name")}
    axes = {"algorithm.kind": ["sft", "mock_sft"], "algorithm.params.learning_rate": [1e-5, 1e-3]}
    config = (
        {"matrix": {"axes": axes, "base_run": base}}
        if form == "inside"
        else {"matrix": {"axes": axes}, "base_run": base}
    )
    done = project.evsys("run", project.config(run=None, max_concurrent_arms=4, **config), "--json", "--steps", "3")
    assert done.returncode == 0, done.stderr
    names = [run["run_id"] for run in json.loads(done.stdout)["runs"]]
    assert names == [
        "hello_sft/hello_sft__kindsft__learning_rate1e-05",
        "hello_sft/hello_sft__kindsft__learning_rate0p001",
        "hello_sft/hello_sft__kindmock_sft__learning_rate1e-05",
        "hello_sft/hello_sft__kindmock_sft__learning_rate0p001",
    ]


def _entries_of_002(project):
    project.write_tasks("data/val/tasks.jsonl")
    words = ("one", "two", "three")
    plan = {"kind": "in_process", "fn_name": "exact_match"}
    tasks = [{"task_id": w, "instruction": f"say {w}", "verifier": {**plan, "expected": w}} for w in words]
    project.write_rows("data/test/tasks.jsonl", tasks)
    return [
        {"name": "val", "path": "data/val", "run_every": 2, "metrics": ["pass@1"], "split": "val"},
        {"name": "test", "path": "data/test", "run_every": 4, "metrics": ["pass@1"], "split": "test"},
    ]


@pytest.mark.parametrize("name", ["val/pass@1", "val.pass@1", "pass@1"])
def test_the_benchmark_entries_of_002_select_stop_and_judge(project, minimal_run, name):
    stopper = {"kind": "early_stopping", "params": {"metric": name, "mode": "max", "patience": 2}}
    settings = {"best_by": name, "learning_rate": 1e-3, "max_steps": 40, "batch_size": 4}
    path = project.config(
        run=minimal_run(algorithm__params=settings),
        metadata={"benchmark": _entries_of_002(project), "success_metric": name},
        callbacks=[stopper],
    )
    done = project.evsys("run", path)
    assert done.returncode == 0, done.stderr
    record = project.record()
    curve = [e["scores"][0]["value"] for e in record["evals"] if e["split"] == "val" and e["step"]]
    assert record["metrics"]["val/pass@1"] == max(curve)
    chosen = record["notes"]["best_checkpoint"]
    assert chosen["by"] == name and chosen["value"] == max(curve)
    assert record["metrics"]["steps"] < 40, "early stopping saw the score"
    whole = json.loads((project.root / "outputs/hello_sft.experiment_result.json").read_text())
    assert whole["arms"][0]["scores"] == [max(curve)]


def test_a_name_that_two_benchmarks_have_cannot_choose_weights(project, minimal_run):
    project.write_tasks()
    entries = [{"name": name, "path": "bench", "split": "val", "run_every": 2} for name in ("a", "b")]
    run = minimal_run(algorithm__params={"best_by": "pass@1", "max_steps": 4})
    done = project.evsys("run", project.config(run=run, metadata={"benchmark": entries}))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "run.algorithm.params.best_by" in done.stderr
    assert "'pass@1' is ambiguous: it can mean val/a/pass@1, or val/b/pass@1" in done.stderr


def test_the_success_metric_of_004_that_no_benchmark_lists(project):
    project.write_tasks()
    metadata = {
        "hypothesis": "Higher LoRA rank improves pass@1",
        "tags": ["sft", "qwen3_4b"],
        "success_metric": "pass_rate",
        "benchmark": {"path": "bench", "breakdown_keys": ["n"]},
    }
    done = project.evsys("run", project.config(metadata=metadata))
    assert done.returncode == 0, done.stderr
    assert {"test/bench/pass@1", "test/bench/pass_rate"} <= set(project.record()["metrics"])
    whole = json.loads((project.root / "outputs/hello_sft.experiment_result.json").read_text())
    assert whole["arms"][0]["scores"] == [project.record()["metrics"]["test/bench/pass_rate"]]
    again = project.evsys("run", project.root / "config.yaml")
    assert again.returncode == 0 and "finished" in again.stdout + again.stderr, again.stderr
